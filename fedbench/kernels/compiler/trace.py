"""From PyTorch code to a graph: torch records the operations of a function and of its gradient, and each becomes values of graph.py.

Example tensors have two sizes that nothing else has, two primes: one for samples, one for touched rows. In a kernel both are the axis of
samples (LANE): `table[batch.items]` is the rows themselves, and what is added up by item is itself, for samples of one item are taken
together (weights.py proves that they may be). What is not known here raises Unsupported, and the generic path runs instead.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from fedbench.kernels.compiler.graph import LANE, Graph, Shape, Value, broadcast
from fedbench.kernels.compiler.weights import PLAIN, Degrees, NotLinear

aten = torch.ops.aten
SAMPLES, ROWS = 1009, 2003
"""sizes of the two axes in examples"""
ITEMS = "items"
"""the index of samples into touched rows"""
Key = tuple[str, str]
"""("held" or "sent", name of a tensor), ("sample", label, weight or rows), or ("index", "items")"""


OURS = re.compile(r"[/\\](torch|fedbench[/\\](kernels|simulation|testing))[/\\]")
"""files whose lines say nothing to the author of a method"""


class Unsupported(Exception):
    """Something that kernels are not made of."""


ELEMENTWISE: dict[Any, str] = {
    aten.mul.Tensor: "mul", aten.add.Tensor: "add", aten.sub.Tensor: "sub", aten.div.Tensor: "div", aten.neg.default: "neg",
    aten.abs.default: "abs", aten.exp.default: "exp", aten.log.default: "log", aten.log1p.default: "log1p", aten.relu.default: "relu",
    aten.sigmoid.default: "sigmoid", aten.tanh.default: "tanh", aten.sqrt.default: "sqrt", aten.minimum.default: "min",
    aten.maximum.default: "max", aten.sign.default: "sign", aten.sgn.default: "sign", aten.mul.Scalar: "mul", aten.div.Scalar: "div",
    aten.add.Scalar: "add", aten.sub.Scalar: "sub", aten.sin.default: "sin", aten.cos.default: "cos",
}  # fmt: skip
COMPARE = {
    aten.gt.Scalar: "gt", aten.gt.Tensor: "gt", aten.lt.Scalar: "lt", aten.lt.Tensor: "lt", aten.ge.Scalar: "ge", aten.ge.Tensor: "ge",
    aten.le.Scalar: "le", aten.le.Tensor: "le",
}  # fmt: skip
SAME_NUMBERS = (aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default)
RESHAPES = (aten.view.default, aten.unsqueeze.default, aten.squeeze.dims, aten.squeeze.dim, aten.squeeze.default, aten._unsafe_view.default,
            aten.reshape.default)  # fmt: skip
WHOLE = (aten.mm.default, aten.mv.default, aten.bmm.default, aten.dot.default, aten.select_backward.default, aten.slice_backward.default,
         aten.sigmoid_backward.default, aten.tanh_backward.default, aten.embedding.default, aten.index_select.default)  # fmt: skip
"""operations that are not taken apart: as they are, they say more"""


def trace(function: Callable[..., Any], leaves: Mapping[Key, Tensor], names: Sequence[str]) -> tuple[Graph, dict[str, Value]]:
    """The graph of a function of tensors, given in the order of `leaves`, that returns a list of tensors, called by `names`."""
    table = {op: how for op, how in core_aten_decompositions().items() if op not in WHOLE}
    lines = Lines()
    try:
        with lines:
            module = make_fx(function, decomposition_table=table)(*leaves.values())
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        raise Unsupported(f"torch cannot record it: {str(error).splitlines()[0] if str(error) else type(error).__name__}") from error
    module.graph.eliminate_dead_code()
    return Translation(module, leaves, lines).translate(names)


def example(shape: Sequence[int | str], dtype: torch.dtype = torch.float64) -> Tensor:
    """A tensor to record with; "n" in a shape are touched rows."""
    size = [ROWS if one == LANE else int(one) for one in shape]
    if any(one % prime == 0 for one in size if one != ROWS and one for prime in (SAMPLES, ROWS)):
        raise Unsupported(f"a tensor of shape {tuple(shape)}: {SAMPLES} and {ROWS} are used as marks")
    return torch.full(size, 0.5, dtype=dtype) if dtype.is_floating_point else torch.zeros(size, dtype=dtype)


def marked(shape: Sequence[int]) -> Shape:
    """A shape of an example with LANE where samples or touched rows are."""
    for n in shape:
        if n not in (SAMPLES, ROWS) and n > 1 and (n % SAMPLES == 0 or n % ROWS == 0):
            raise Unsupported("samples and features in one axis")
    found = tuple(LANE if n in (SAMPLES, ROWS) else int(n) for n in shape)
    if found.count(LANE) > 1:
        raise Unsupported("pairs of samples or of rows")
    return found


class Lines(TorchFunctionMode):
    """Remembers from which line of the method's file each of torch's functions was called."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[str, str] = {}

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame: Any = sys._getframe(1)
        while frame is not None and OURS.search(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is not None:
            code = frame.f_code
            said = f" ({os.path.basename(code.co_filename)}, line {frame.f_lineno}, in {code.co_name})"
            self.known[getattr(function, "__name__", "").strip("_")] = said
        return function(*args, **(kwargs or {}))

    def of(self, target: Any) -> str:
        """The line that an operation comes from; "" if it is one that torch made of another."""
        return self.known.get(str(target).split(".")[1].strip("_"), "") if "." in str(target) else ""


class Translation:
    """Torch's record of one function, operation by operation."""

    def __init__(self, module: Any, leaves: Mapping[Key, Tensor], lines: Lines) -> None:
        self.lines = lines
        self.module, self.graph, self.degrees = module, Graph(), Degrees()
        self.values: dict[Any, Any] = {}
        places = [node for node in module.graph.nodes if node.op == "placeholder"]
        for node, (key, tensor) in zip(places, leaves.items(), strict=True):
            shape = marked(tensor.shape)
            if key[0] == "index":
                self.values[node] = ITEMS
            elif key[0] == "sample":
                self.values[node] = self.graph.make("sample", (LANE,), (), key=key[1])
            else:
                self.values[node] = self.graph.make("table" if LANE in shape else "param", shape, (), key=key)

    def translate(self, names: Sequence[str]) -> tuple[Graph, dict[str, Value]]:
        for node in self.module.graph.nodes:
            if node.op == "get_attr":
                self.values[node] = self.constant(getattr(self.module, node.target))
            elif node.op == "call_function":
                try:
                    self.values[node] = self.translated(node)
                except (Unsupported, NotImplementedError, AssertionError, KeyError, IndexError) as error:
                    what = str(error) if isinstance(error, Unsupported | NotImplementedError) and str(error) else f"{node.target}"
                    raise Unsupported(f"{what}{self.lines.of(node.target)}") from error
        out = next(node for node in self.module.graph.nodes if node.op == "output").args[0]
        found = [self.values[one] if isinstance(one, torch.fx.Node) else self.graph.const(0.0) for one in out]
        return self.graph, dict(zip(names, found, strict=True))

    def constant(self, tensor: Tensor) -> Value:
        if tensor.numel() and bool((tensor == tensor.reshape(-1)[0]).all()):
            return self.graph.const(float(tensor.reshape(-1)[0]), marked(tensor.shape))
        raise Unsupported("a constant tensor")

    def value(self, given: Any) -> Any:
        if isinstance(given, torch.fx.Node):
            return self.values[given]
        if isinstance(given, list | tuple):
            return [self.value(one) for one in given]
        if isinstance(given, int) and not isinstance(given, bool) and given > 1 and (given % SAMPLES == 0 or given % ROWS == 0):
            return given  # a size, which shapes say again
        return given

    def translated(self, node: Any) -> Any:
        """What one operation becomes."""
        target, args = node.target, [self.value(one) for one in node.args]
        made = node.meta.get("val")
        shape = marked(made.shape) if isinstance(made, Tensor) else ()
        if node.kwargs.get("alpha", 1) != 1:
            raise Unsupported(f"{target} with alpha")
        if target in SAME_NUMBERS or target is aten._to_copy.default:
            return args[0]
        for ways in (self.elementwise, self.choosing, self.shaping, self.gathering, self.summing, self.filling):
            found = ways(target, args, shape)
            if found is not None:
                if isinstance(found, Value) and found.shape != shape:
                    raise Unsupported(f"{target}: {found.shape} in place of {shape}")
                return found
        raise Unsupported(f"{target}")

    def number(self, given: Any) -> Value:
        """An argument that may be a plain number."""
        if isinstance(given, Value):
            return given
        if isinstance(given, bool) or not isinstance(given, int | float):
            raise Unsupported(f"an argument {given!r}")
        if isinstance(given, int) and given > 1 and (given % SAMPLES == 0 or given % ROWS == 0):
            raise Unsupported("the number of samples or rows as a number; use batch.weight.sum() or batch.rows.sum()")
        return self.graph.const(given)

    def elementwise(self, target: Any, args: list[Any], shape: Shape) -> Value | None:
        g = self.graph
        if target in ELEMENTWISE:
            return g.expand(g.ew(ELEMENTWISE[target], *map(self.number, args[:2])), shape)
        if target is aten.pow.Tensor_Scalar and float(args[1]) in (-1.0, 0.5, 1.0, 2.0, 3.0, 4.0):
            return self.power(args[0], float(args[1]))
        if target is aten.rsqrt.default:
            return g.ew("div", 1.0, g.ew("sqrt", args[0]))
        if target is aten.reciprocal.default:
            return g.ew("div", 1.0, args[0])
        if target is aten.clamp.default:
            low, high = (*args[1:], None, None)[:2]
            out = args[0] if low is None else g.ew("max", args[0], self.number(low))
            return out if high is None else g.ew("min", out, self.number(high))
        if target is aten.sigmoid_backward.default:
            return g.ew("mul", args[0], g.ew("mul", args[1], g.ew("sub", 1.0, args[1])))
        if target is aten.tanh_backward.default:
            return g.ew("mul", args[0], g.ew("sub", 1.0, g.ew("mul", args[1], args[1])))
        return None

    def power(self, x: Value, exponent: float) -> Value:
        g = self.graph
        if exponent == 0.5:
            return g.ew("sqrt", x)
        if exponent == -1.0:
            return g.ew("div", 1.0, x)
        out = x
        for _ in range(int(exponent) - 1):
            out = g.ew("mul", out, x)
        return out

    def choosing(self, target: Any, args: list[Any], shape: Shape) -> Value | None:
        """Comparisons are numbers, 1 where they hold: pick(x, y, a, b) is a where x > y, else b (also where one is not a number)."""
        g = self.graph
        if target in COMPARE:
            x, y = map(self.number, args[:2])
            how = COMPARE[target]
            pair = {"gt": (x, y), "lt": (y, x), "ge": (y, x), "le": (x, y)}[how]
            held = (1.0, 0.0) if how in ("gt", "lt") else (0.0, 1.0)
            return g.expand(g.ew("pick", *pair, *held), shape)
        if target in (aten.eq.Scalar, aten.eq.Tensor, aten.ne.Scalar, aten.ne.Tensor):
            x, y = map(self.number, args[:2])
            apart = g.ew("max", g.ew("pick", x, y, 1.0, 0.0), g.ew("pick", y, x, 1.0, 0.0))
            return g.expand(apart if target in (aten.ne.Scalar, aten.ne.Tensor) else g.ew("sub", 1.0, apart), shape)
        if target is aten.isnan.default:
            return g.ew("pick", g.ew("abs", args[0]), -1.0, 0.0, 1.0)
        if target is aten.logical_not.default or target is aten.bitwise_not.default:
            return g.ew("sub", 1.0, args[0])
        if target in (aten.logical_and.default, aten.logical_and_.default, aten.bitwise_and.Tensor):
            return g.ew("mul", *args[:2])
        if target in (aten.logical_or.default, aten.logical_or_.default, aten.bitwise_or.Tensor):
            return g.ew("max", *args[:2])
        if target is aten.where.self:
            yes, no = (g.expand(self.number(one), broadcast(self.number(one).shape, shape)) for one in args[1:3])
            test = args[0]
            if test.f == "pick" and [one.args[0] if one.op == "const" else None for one in test.args[2:]] in ([1.0, 0.0], [0.0, 1.0]):
                both = (yes, no) if test.args[2].args[0] == 1.0 else (no, yes)
                return g.expand(g.ew("pick", *test.args[:2], *both), shape)
            return g.expand(g.ew("pick", test, 0.5, yes, no), shape)
        return None

    def shaping(self, target: Any, args: list[Any], shape: Shape) -> Value | None:
        g = self.graph
        if target in RESHAPES:
            return g.reshape(args[0], shape)
        if target is aten.permute.default:
            return g.permute(args[0], args[1])
        if target is aten.t.default:
            return g.permute(args[0], (1, 0)) if len(args[0].shape) == 2 else args[0]
        if target is aten.transpose.int:
            axes = list(range(len(args[0].shape)))
            axes[args[1]], axes[args[2]] = axes[args[2]], axes[args[1]]
            return g.permute(args[0], axes)
        if target is aten.expand.default:
            return g.expand(args[0], shape)
        if target is aten.slice.Tensor:
            given: list[Any] = [*args[1:], *[0, None, None, 1][len(args) - 1 :]]
            axis, start, stop, step = given
            if step != 1 or (args[0].shape[axis] == LANE and shape != args[0].shape):
                raise Unsupported("a part of the samples or rows, or every k-th number")
            return g.slice(args[0], axis, start, stop)
        if target is aten.select.int:
            axis = args[1] % len(args[0].shape)
            if args[0].shape[axis] == LANE:
                raise Unsupported("one sample or row alone")
            at = args[2] % int(args[0].shape[axis])
            return g.reshape(g.slice(args[0], axis, at, at + 1), shape)
        if target is aten.cat.default:
            axis, at, parts = (args[1] if len(args) > 1 else 0) % len(shape), 0, []
            for one in args[0]:
                if one.shape[axis] == LANE:
                    raise Unsupported("samples joined to samples")
                parts.append((at, at + int(one.shape[axis]), one))
                at += int(one.shape[axis])
            return g.cat(shape, axis, parts)
        return self.padding(target, args)

    def padding(self, target: Any, args: list[Any]) -> Value | None:
        """Gradients of parts: the rest is 0."""
        g = self.graph
        if target is aten.select_backward.default:
            size, axis = marked(args[1]), args[2] % len(args[1])
            if size[axis] == LANE:
                raise Unsupported("one sample or row alone")
            return g.pad(g.reshape(args[0], (*size[:axis], 1, *size[axis + 1 :])), size, axis, args[3] % int(size[axis]))
        if target is aten.slice_backward.default:
            size, axis = marked(args[1]), args[2] % len(args[1])
            n = size[axis]
            return args[0] if not isinstance(n, int) else g.pad(args[0], size, axis, max(0, args[3] + n if args[3] < 0 else args[3]))
        if target is aten.constant_pad_nd.default:
            widths = args[1]
            if len(widths) != 2 or min(widths) < 0 or (len(args) > 2 and args[2]):
                raise Unsupported("padding of several axes, or with other numbers than 0")
            last = int(args[0].shape[-1])
            return g.pad(args[0], (*args[0].shape[:-1], last + sum(widths)), len(args[0].shape) - 1, widths[0])
        return None

    def gathering(self, target: Any, args: list[Any], shape: Shape) -> Value | None:
        """Rows of the samples, and what samples add to rows: in a kernel, both are the same axis."""
        if target in (aten.index.Tensor, aten.embedding.default, aten.index_select.default):
            rows, index = args[0], args[1]
            if target is aten.index_select.default:
                index = [args[2]] if args[1] == 0 else None
            elif target is aten.embedding.default:
                index = [args[1]]
            if index != [ITEMS] or rows.shape[:1] != (LANE,):
                raise Unsupported("indexing by anything but batch.items")
            if self.degrees.of(rows) - PLAIN:
                raise Unsupported("batch.rows or batch.weight indexed by batch.items")
            return rows
        if target is aten.index_put.default:
            if args[0].op != "const" or args[0].args[0] != 0 or args[1] != [ITEMS] or not (len(args) > 3 and args[3]):
                raise Unsupported("index_put")
            if any(weight != 1 for weight, _ in self.degrees.of(args[2])):
                raise NotLinear("a gradient of rows that is not linear in batch.weight")
            return args[2]
        return None

    def summing(self, target: Any, args: list[Any], shape: Shape) -> Value | None:
        g = self.graph
        if target in (aten.sum.dim_IntList, aten.sum.default):
            axes = args[1] if len(args) > 1 and args[1] else None
            return g.sum(args[0], axes, len(args) > 2 and bool(args[2]))
        if target is aten.mean.dim:
            axes = [axis % len(args[0].shape) for axis in args[1]]
            if any(args[0].shape[axis] == LANE for axis in axes):
                raise Unsupported("a mean over samples or rows, padding included; weigh by batch.weight or batch.rows")
            count = math.prod(int(args[0].shape[axis]) for axis in axes)
            return g.ew("div", g.sum(args[0], axes, len(args) > 2 and bool(args[2])), float(count))
        if target is aten.mm.default:
            return g.mm(args[0], args[1])
        if target is aten.bmm.default:
            return g.bmm(args[0], args[1])
        if target is aten.mv.default:
            return g.reshape(g.mm(args[0], g.reshape(args[1], (args[1].shape[0], 1))), shape)
        if target is aten.dot.default:
            return g.sum(g.ew("mul", args[0], args[1]), None, False)
        return None

    def filling(self, target: Any, args: list[Any], shape: Shape) -> Value | None:
        g = self.graph
        if target in (aten.full.default, aten.full_like.default):
            return g.const(args[1], shape)
        if target in (aten.zeros_like.default, aten.new_zeros.default, aten.zeros.default):
            return g.const(0, shape)
        if target in (aten.ones_like.default, aten.new_ones.default, aten.ones.default):
            return g.const(1, shape)
        if target is aten.scalar_tensor.default:
            return g.const(args[0], shape)
        return None
