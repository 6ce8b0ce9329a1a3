"""From PyTorch code to a graph: torch records the operations of a function and of its gradient, and each becomes values of graph.py.

Example tensors have two sizes that nothing else has, two primes: one for samples, one for touched rows. In a kernel both are the axis of
samples (LANE): `table[batch.items]` is the rows themselves, and what is added up by item is itself, for samples of one item are taken
together (weights.py proves that they may be). What is not known here raises Unsupported, and the generic path runs instead.
"""

from __future__ import annotations

import gc
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from numba.core.errors import NumbaError, UnsupportedBytecodeError
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedbench.kernels.compiler.graph import Graph, Value, source
from fedbench.kernels.compiler.indices import LANE, Shape, broadcast
from fedbench.kernels.compiler.operations import (
    COMPARE,
    ELEMENTWISE,
    EMPTY,
    RESHAPES,
    SAME_NUMBERS,
    SHAPE_ALONE,
    VIEWS,
    not_in_place,
    taken_apart,
)
from fedbench.kernels.compiler.record import record
from fedbench.kernels.compiler.weights import PLAIN, Degrees, NotLinear

aten = torch.ops.aten
SAMPLES, ROWS = 1009, 2003
"""sizes of the two axes in examples"""
ITEMS = "items"
"""the index of samples into touched rows"""
MOST_CONSTANTS = 256
"""numbers of a constant tensor that are written into a kernel"""
BETWEEN_COLLECTIONS = 100_000
"""objects that are made between two looks for garbage while a kernel is compiled"""
MOST_FACTORS = 8
"""powers up to this one are products"""
WHOLE = "whole"
"""ends the shape of a tensor of whole numbers, such as the category of each item"""
Key = tuple[str, str]
"""("held" or "sent", name of a tensor), ("sample", label, weight or rows), or ("index", "items")"""


OURS = re.compile(r"[/\\](torch|fedbench[/\\](kernels|simulation|testing))[/\\]")
"""files whose lines say nothing to the author of a method"""


class Unsupported(Exception):
    """Something that kernels are not made of."""


@contextmanager
def compiling() -> Iterator[None]:
    """Around a kernel's call, the first of which compiles it: what numba cannot compile is Unsupported."""
    known = gc.get_threshold()
    # a compiler makes millions of small objects: to look for garbage among them as often as usual takes a sixth of its time
    gc.set_threshold(max(known[0], BETWEEN_COLLECTIONS), *known[1:])
    try:
        yield
    except (NumbaError, UnsupportedBytecodeError) as error:
        said = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise Unsupported(f"numba cannot compile it ({said})") from error
    finally:
        gc.set_threshold(*known)


def trace(
    function: Callable[..., Any], leaves: Mapping[Key, Tensor], names: Sequence[str], graph: Graph | None = None
) -> tuple[Graph, dict[str, Value]]:
    """The graph of a function of tensors, given in the order of `leaves`, that returns a list of tensors, called by `names`."""
    lines = Lines()
    module = recorded(function, leaves, lines)
    return Translation(module, leaves, lines, Graph() if graph is None else graph).translate(names)


def recorded(function: Callable[..., Any], leaves: Mapping[Key, Tensor], lines: Lines) -> Any:
    """Torch's record of a function, without what nothing is made of; `lines` remembers where operations come from."""
    try:
        with lines:
            # softmax and the like come apart into operations that graphs know, see operations.py
            module = record(function, [*leaves.values()], taken_apart(), lines)
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        raise Unsupported(f"torch cannot record it: {str(error).splitlines()[0] if str(error) else type(error).__name__}") from error
    # a gradient makes values that nobody asks for: these need not be known here
    module.graph.eliminate_dead_code()
    return module


def read(function: Callable[..., Any], leaves: Mapping[Key, Tensor]) -> list[set[Key]]:
    """What each tensor that a function returns is made of, by whatever operations: the keys of its leaves.

    Unsupported if the function looks at the numbers of tensors, changes one in place, or if how many rows there are is among its numbers.
    """
    # recorded again with a row less: a number that changes is the number of rows
    fewer = {key: value[1:] if value.shape[:1] == (ROWS,) else value for key, value in leaves.items()}
    (found, numbers), (_, others) = (_read(function, some) for some in (leaves, fewer))
    if numbers != others:
        raise Unsupported("the number of rows as a number")
    return found


def _read(function: Callable[..., Any], leaves: Mapping[Key, Tensor]) -> tuple[list[set[Key]], list[str]]:
    """What outputs are made of, and the operations with all numbers in them."""
    try:
        *nodes, out = record(function, [*leaves.values()], {}).graph.nodes
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        raise Unsupported(f"torch cannot record it: {str(error).splitlines()[0] if str(error) else type(error).__name__}") from error
    keys, found, needed = iter(leaves), dict[Any, set[Key]](), {*out.all_input_nodes}
    for node in nodes:
        # tensors may share memory: what was written into could not be told any more
        if node.op == "call_function" and getattr(node.target, "_schema", None) is not None and node.target._schema.is_mutable:
            raise Unsupported("a change in place")
        inputs = () if node.target in SHAPE_ALONE else node.all_input_nodes
        found[node] = {next(keys)} if node.op == "placeholder" else set().union(*(found[one] for one in inputs))
    # only numbers that reach an output count
    for node in reversed(nodes):
        if node in needed and node.target not in SHAPE_ALONE:
            needed |= {*node.all_input_nodes}
    return [found.get(one, set()) for one in out.args[0]], [node.format_node() for node in nodes if node in needed]


def example(shape: Sequence[int | str], dtype: torch.dtype = torch.float64) -> Tensor:
    """A tensor to record with; "n" in a shape are touched rows."""
    if shape[-1:] == (WHOLE,):
        return example(shape[:-1], torch.int64)
    size = [ROWS if one == LANE else int(one) for one in shape]
    # a feature axis of such a size would be taken for one of samples
    if any(one % prime == 0 for one in size if one != ROWS and one for prime in (SAMPLES, ROWS)):
        raise Unsupported(f"a tensor of shape {tuple(shape)}: {SAMPLES} and {ROWS} are used as marks")
    # torch computes while it records: roots, logarithms and quotients of 0.5 are numbers
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
        self.made: dict[str, str] = {}
        """by the name of what was recorded while the function ran, such as what torch makes a softmax of"""
        self.nodes: Any = ()
        """what was recorded so far"""

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame: Any = sys._getframe(1)
        while frame is not None and OURS.search(frame.f_code.co_filename):
            frame = frame.f_back
        nodes = self.nodes
        # names of functions do not say what torch makes of them: what is recorded meanwhile belongs to this line too
        before = len(nodes)
        found = function(*args, **(kwargs or {}))
        if frame is not None:
            code = frame.f_code
            said = f" ({os.path.basename(code.co_filename)}, line {frame.f_lineno}, in {code.co_name})"
            self.known[getattr(function, "__name__", "").strip("_")] = said
            if len(nodes) > before:
                self.made |= {node.name: said for node in islice(reversed(nodes), len(nodes) - before)}
        return found

    def of(self, node: Any) -> str:
        """The line that an operation comes from; "" if it is one of a gradient that no function is named like."""
        target = str(node.target)
        return self.made.get(node.name) or (self.known.get(target.split(".")[1].strip("_"), "") if "." in target else "")


def whose(node: Any) -> Any:
    """The operation whose numbers a view shows."""
    while node.op == "call_function" and node.target in VIEWS:
        node = node.args[0]
    return node


class Translation:
    """Torch's record of one function, operation by operation."""

    def __init__(self, module: Any, leaves: Mapping[Key, Tensor], lines: Lines, graph: Graph) -> None:
        self.lines = lines
        self.module, self.graph, self.degrees = module, graph, Degrees()
        self.values: dict[Any, Any] = {}
        self.whole: set[Key] = set()
        """tables of whole numbers"""
        places = [node for node in module.graph.nodes if node.op == "placeholder"]
        for node, (key, tensor) in zip(places, leaves.items(), strict=True):
            shape = marked(tensor.shape)
            if not tensor.is_floating_point():
                self.whole.add(key)
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
                # a rule that meets what it does not expect fails somehow: the generic path runs the method, only slower
                except (Unsupported, NotImplementedError, AssertionError, KeyError, IndexError) as error:
                    what = str(error) if isinstance(error, Unsupported | NotImplementedError) and str(error) else f"{node.target}"
                    raise Unsupported(f"{what}{self.lines.of(node)}") from error
        out = next(node for node in self.module.graph.nodes if node.op == "output").args[0]
        # no node: the loss does not depend on that name, and its gradient is 0
        found = [self.values[one] if isinstance(one, torch.fx.Node) else self.graph.const(0.0) for one in out]
        return self.graph, dict(zip(names, found, strict=True))

    def constant(self, tensor: Tensor) -> Value:
        # one number throughout needs no memory: it is written into expressions
        if tensor.numel() and bool((tensor == tensor.reshape(-1)[0]).all()):
            return self.graph.const(float(tensor.reshape(-1)[0]), marked(tensor.shape))
        if not 0 < tensor.numel() <= MOST_CONSTANTS:
            raise Unsupported(f"a constant tensor of more than {MOST_CONSTANTS} numbers")
        each = [(at, at + 1, self.graph.const(float(one), (1,))) for at, one in enumerate(tensor.reshape(-1).tolist())]
        return self.graph.reshape(self.graph.cat((len(each),), 0, each), marked(tensor.shape))

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
            args[1] = self.graph.ew("mul", self.number(args[1]), self.number(node.kwargs["alpha"]))
        if target in SAME_NUMBERS or target is aten._to_copy.default:
            return args[0]
        # an operation in place is as good as its plain form if nobody reads the old numbers
        if target is aten.copy_.default or (target not in RESHAPES and not_in_place(target) is not None):
            if self.read_later(node):
                raise Unsupported("a change in place of what is read later")
            if target is aten.copy_.default:
                return self.graph.expand(args[1], shape)
            target = not_in_place(target)
        if target is aten.arange.start_step or target is aten.arange.default:
            return self.constant(target(*node.args, dtype=torch.float64))
        for ways in (self.elementwise, self.choosing, self.shaping, self.gathering, self.summing, self.filling):
            found = ways(target, args, shape)
            if found is not None:
                # a wrong shape is a rule's mistake: a kernel of it would read beside its rows
                if isinstance(found, Value) and found.shape != shape:
                    raise Unsupported(f"{target}: {found.shape} in place of {shape}")
                return found
        raise Unsupported(f"{target}")

    def read_later(self, node: Any) -> bool:
        """Whether an operation reads what this one has written over, other than as this one's result."""
        *before, _ = self.module.graph.nodes
        order = {one: at for at, one in enumerate(before)}
        written = whose(node.args[0])
        return written.op == "placeholder" or any(
            order.get(user, len(order)) > order[node] for one in before if whose(one) is written for user in one.users
        )

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
        if target is aten.pow.Tensor_Scalar:
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
        if exponent < 0:
            return g.ew("div", 1.0, self.power(x, -exponent))
        if exponent * 2 % 1:  # of a negative number torch finds nan too
            return g.ew("exp", g.ew("mul", exponent, g.ew("log", x)))
        if exponent > MOST_FACTORS:  # x ** 20 by squares: few products
            half = self.power(x, float(exponent // 2))
            return g.product([half, half, *([self.power(x, exponent % 2)] if exponent % 2 else [])])
        factors = [x] * int(exponent) + [g.ew("sqrt", x)] * bool(exponent % 1)
        return g.product(factors) if factors else g.const(1.0, x.shape)

    def choosing(self, target: Any, args: list[Any], shape: Shape) -> Value | None:
        """Comparisons are numbers, 1 where they hold: pick(x, y, a, b) is a where x > y, else b (also where one is not a number)."""
        g = self.graph
        if target in COMPARE:
            x, y = map(self.number, args[:2])
            how = COMPARE[target]
            # pick knows > alone: x >= y is "not y > x", with results exchanged
            pair = {"gt": (x, y), "lt": (y, x), "ge": (y, x), "le": (x, y)}[how]
            held = (1.0, 0.0) if how in ("gt", "lt") else (0.0, 1.0)
            return g.expand(g.ew("pick", *pair, *held), shape)
        if target in (aten.eq.Scalar, aten.eq.Tensor, aten.ne.Scalar, aten.ne.Tensor):
            x, y = map(self.number, args[:2])
            apart = g.ew("max", g.ew("pick", x, y, 1.0, 0.0), g.ew("pick", y, x, 1.0, 0.0))
            return g.expand(apart if target in (aten.ne.Scalar, aten.ne.Tensor) else g.ew("sub", 1.0, apart), shape)
        if target is aten.isnan.default:
            # no comparison with NaN holds, so it alone is not > -1
            return g.ew("pick", g.ew("abs", args[0]), -1.0, 0.0, 1.0)
        if target is aten.logical_not.default or target is aten.bitwise_not.default:
            return g.ew("sub", 1.0, args[0])
        if target in (aten.logical_and.default, aten.bitwise_and.Tensor):
            return g.ew("mul", *args[:2])
        if target in (aten.logical_or.default, aten.bitwise_or.Tensor):
            return g.ew("max", *args[:2])
        if target is aten.where.self:
            yes, no = (g.expand(self.number(one), broadcast(self.number(one).shape, shape)) for one in args[1:3])
            test = args[0]
            # `where` of a comparison is one pick, not a 0 or 1 that is then compared
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
            # kernels take all samples of a block: they cannot leave some out
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
            if self.is_category(index) and not rows.lane:
                return self.graph.rows_of_categories(rows, index[0])
            if index != [ITEMS] or rows.shape[:1] != (LANE,):
                raise Unsupported("indexing by anything but batch.items, or categories of items")
            # such rows have a weight already, and would get that of their samples on top
            if self.degrees.of(rows) - PLAIN:
                raise Unsupported("batch.rows or batch.weight indexed by batch.items")
            return rows
        if target is aten.index_put.default:
            if args[0].op != "const" or args[0].args[0] != 0 or not (len(args) > 3 and args[3]):
                raise Unsupported("index_put")
            if self.is_category(args[1]):
                return self.graph.make("scatter", shape, (self.graph.lying(args[2]), args[1][0]))
            if args[1] != [ITEMS]:
                raise Unsupported("index_put by anything but batch.items, or categories of items")
            # samples of one item are one with a weight: their gradients add up only if linear in it
            if any(weight != 1 for weight, _ in self.degrees.of(args[2])):
                raise NotLinear("a gradient of rows that is not linear in batch.weight")
            return args[2]
        return None

    def is_category(self, index: Any) -> bool:
        """Whether an index is one whole number of each item."""
        one = index[0] if isinstance(index, list) and len(index) == 1 else None
        return isinstance(one, Value) and one.shape == (LANE,) and source(one).op == "table" and source(one).how["key"] in self.whole

    def summing(self, target: Any, args: list[Any], shape: Shape) -> Value | None:
        g = self.graph
        if target in (aten.sum.dim_IntList, aten.sum.default):
            axes = args[1] if len(args) > 1 and args[1] else None
            return g.sum(args[0], axes, len(args) > 2 and bool(args[2]))
        if target in (aten.mean.dim, aten.mean.default):
            axes = [axis % len(args[0].shape) for axis in (args[1:] and args[1]) or range(len(args[0].shape))]
            if any(args[0].shape[axis] == LANE for axis in axes):
                raise Unsupported("a mean over samples or rows, padding included; weigh by batch.weight or batch.rows")
            count = math.prod(int(args[0].shape[axis]) for axis in axes)
            return g.ew("div", g.sum(args[0], axes, len(args) > 2 and bool(args[2])), float(count))
        if target is aten.amax.default:
            return g.largest(args[0], args[1] if len(args) > 1 and args[1] else None, len(args) > 2 and bool(args[2]))
        if target is aten.linalg_vector_norm.default and (len(args) < 2 or float(args[1]) in (1, 2)):
            axes, keep = args[2] if len(args) > 2 and args[2] else None, len(args) > 3 and bool(args[3])
            if len(args) > 1 and float(args[1]) == 1:
                return g.sum(g.ew("abs", args[0]), axes, keep)
            return g.ew("sqrt", g.sum(g.ew("mul", args[0], args[0]), axes, keep))
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
        if target in (aten.zeros_like.default, aten.new_zeros.default, aten.zeros.default, *EMPTY):
            return g.const(0, shape)
        if target in (aten.ones_like.default, aten.new_ones.default, aten.ones.default):
            return g.const(1, shape)
        if target is aten.scalar_tensor.default:
            return g.const(args[0], shape)
        return None
