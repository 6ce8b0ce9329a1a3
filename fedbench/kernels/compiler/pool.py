"""Kernels for methods that have all data in one place: minibatches of everybody's samples, and Adam on whole tables.

A sample brings a row of each of two tables, its user's and its item's. Samples are taken a tile at a time, so that all that is made of
them stays in the cache: rows are gathered, one step of the compiler makes their gradients, and those are added to the gradients of the
tables. After a minibatch every number takes a step of Adam, also those of rows that no sample used, as torch.optim.Adam does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbench.kernels.compiler import build, trace
from fedbench.kernels.compiler.expressions import Constants
from fedbench.kernels.compiler.graph import Graph, Value, source
from fedbench.kernels.compiler.indices import LANE
from fedbench.kernels.compiler.record import slopes
from fedbench.kernels.compiler.step import Step
from fedbench.kernels.compiler.weights import Degrees, NotLinear
from fedbench.kernels.optimizers import BETA1, BETA2, TINY
from fedbench.kernels.vectors import WIDTH

TILE = 256
"""samples that are taken at a time"""
MOVED = 1024
"""numbers that Adam moves at a time; their gradient is cleared while it is in the cache"""
COLUMN = {"user": "user", "items": "item"}
"""table -> the samples' column that says which row of it"""
TABLES = tuple(COLUMN)
Objective = Callable[[dict[str, Tensor], Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""all but the two tables, the rows of B samples' users and items [B, d], labels and weights [B] -> what is minimised, and what is
reported; both weigh every sample by its weight and are divided by the sum of those"""


@dataclass(frozen=True)
class Kernel:
    """A compiled pass over samples."""

    module: ModuleType
    names: tuple[str, ...]
    """of the model's tensors"""
    numbers: tuple[float, ...]

    def train(
        self,
        model: Mapping[str, np.ndarray],
        moments: Mapping[str, tuple[np.ndarray, np.ndarray]],
        samples: tuple[np.ndarray, np.ndarray, np.ndarray],
        plan: tuple[int, int, float],
    ) -> float:
        """One pass over samples (user, item, label), in place; returns the mean of what is reported. plan: steps before, batch, rate.

        moments: Adam's first and second of every name, as torch.optim.Adam keeps them.
        """
        arrays = [model[name] if name in TABLES else model[name].reshape(-1) for name in self.names]
        state = [array.reshape(-1) for name in self.names for array in moments[name]]
        kind = arrays[0].dtype.type
        before, batch, rate = plan
        numbers = np.array(self.numbers or (0.0,), kind)
        with trace.compiling():
            mean: float = self.module.train(*samples, *arrays, *state, before, batch, rate, kind(TINY[kind().itemsize]), numbers)
        return mean


def derive(what: str, objective: Objective, shapes: Mapping[str, tuple[int, ...]]) -> Kernel:
    """The kernel of an objective; shapes: of the whole model. What kernels are not made of raises trace.Unsupported."""
    constants = Constants()
    try:
        graph, outputs = gradient_graph(objective, shapes)
        if Degrees().needs_all_rows(outputs):
            # a minibatch has the rows of its samples, never the whole table
            raise trace.Unsupported("a term over the rows of a table")
        sums = {name: found for name in TABLES if (found := combination(graph, outputs[name]))}
        outputs |= {name: together(graph, list(found.values())) for name, found in sums.items()}
        step = Step("step", graph, outputs, constants)
    except NotLinear as error:
        raise trace.Unsupported("a sum over the samples of a minibatch") from error
    except (trace.Unsupported, NotImplementedError) as error:
        raise trace.Unsupported(str(error)) from error
    except Exception as error:  # whatever it is: the generic path runs the method, and says what is wrong with it if anything is
        raise trace.Unsupported(f"{type(error).__name__} while it was derived ({error})") from error
    widths = {name: int(np.prod(shape[name in TABLES :], initial=1)) for name, shape in shapes.items()}
    text = train_text(step, widths, {name: tuple(found) for name, found in sums.items()})
    return Kernel(build.load(build.module_text(what, step.acts, step.text, text)), tuple(shapes), tuple(constants.values))


def gradient_graph(objective: Objective, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Any, dict[str, Any]]:
    """The graph of what is reported ("loss") and of the gradient of what is minimised by every name; tables are rows of samples."""
    leaves: dict[trace.Key, Tensor] = {}
    for name, shape in shapes.items():
        rows = trace.example(shape[1:] if name in TABLES else shape)
        # in training, a table is one row a sample
        leaves["held", name] = rows.expand(trace.SAMPLES, *rows.shape).contiguous() if name in TABLES else rows
    leaves |= {("sample", name): torch.ones(trace.SAMPLES, dtype=torch.float64) for name in ("label", "weight")}

    def function(*tensors: Tensor) -> list[Tensor]:
        given = dict(zip(leaves, tensors, strict=True))
        part = {name: given["held", name] for name in shapes}

        both: list[Tensor] = []

        def of(part: dict[str, Tensor]) -> Tensor:
            rest = {name: value for name, value in part.items() if name not in TABLES}
            both[:] = objective(rest, part["user"], part["items"], given["sample", "label"], given["sample", "weight"])
            return both[0]

        found, _ = slopes(of, part)
        return [*(found[name] for name in shapes), both[1]]

    return trace.trace(function, leaves, [*shapes, "loss"])


def combination(graph: Graph, slope: Value) -> dict[str, Value]:
    """Table -> the number that a sample's row of it is multiplied by, if a gradient is nothing but a sum of such products; else empty.

    So it is with a dot product: rows are then added to the gradients of tables as they lie, and need not be put side by side and back.
    """
    found: dict[str, Value] = {}
    terms = [slope]
    while terms:
        term = terms.pop()
        if term.f == "add":
            terms += [graph.expand(one, term.shape) for one in term.args]
            continue
        factor, tables = graph.const(1.0, (LANE,)), []
        for one in graph.factors(term):
            at = source(one)
            if at.op == "table" and one is at:
                tables.append(at.how["key"][1])
            elif at.op == "const":
                factor = graph.ew("mul", factor, at.args[0])
            elif at.size == 1:
                number = graph.reshape(at, (LANE,) if at.lane else ())
                factor = graph.ew("mul", factor, graph.expand(number, (LANE,)))
            else:
                return {}
        if len(tables) != 1:  # two rows multiplied, or none at all
            return {}
        known = found.get(tables[0])
        found[tables[0]] = factor if known is None else graph.ew("add", known, factor)
    return dict(sorted(found.items()))


def together(graph: Graph, columns: Sequence[Value]) -> Value:
    """[n] each -> [n, columns]"""
    parts = [(at, at + 1, graph.reshape(one, (LANE, 1))) for at, one in enumerate(columns)]
    return graph.cat((LANE, len(columns)), 1, parts)


def train_text(step: Step, widths: Mapping[str, int], sums: Mapping[str, tuple[str, ...]]) -> str:
    """The function `train`: one pass over samples. widths: numbers of each tensor, or of a row of each table; sums: see `combination`."""
    arrays = [f"{'T' if name in TABLES else 'p'}_h_{name}" for name in widths]
    state = [f"{moment}_{name}" for name in widths for moment in ("m", "v")]
    lines = ["@compiled(nogil=True, cache=True)"]
    lines.append(f"def train(user, item, labels, {', '.join([*arrays, *state])}, before, batch, rate, tiny, numbers):")

    def say(*some: str, indent: int = 1) -> None:
        lines.extend("    " * indent + line for line in some)

    say("n, kind, like = labels.size, numbers.dtype.type, numbers", "total = 0.0")
    for name, width in widths.items():
        # g: the gradient of a tile; S: that of the minibatch so far
        size, wide = (f"p_h_{name}.size", width) if name not in TABLES else (f"T_h_{name}.size", len(sums.get(name, range(width))) * TILE)
        say(f"g_{name}, S_{name} = zeros({wide}, like), zeros({size}, like)")
        if name in TABLES:
            say(f"q_h_{name}, p_h_{name} = zeros({width * TILE}, like), T_h_{name}.reshape(-1)")
    sizes = {"acts": max(1, step.acts) * TILE, "tmp": max(1, step.tmp), "spare": f"{WIDTH * TILE} + 2 * SQUARE", "nothing": step.most_outs}
    say(*(f"{name} = zeros({size}, like)" for name, size in sizes.items()))
    say(f"label, weight, ones = zeros({TILE}, like), zeros({TILE}, like), zeros({WIDTH}, like)", "ones[:] = 1")
    say(f"awake = np.empty({step.listed}, np.int64)")
    for name in widths:  # on the scale of `adamw`
        say(*scaled(name, f"kind(1 / {1 - BETA1})", f"kind(1 / {1 - BETA2})"))
    say("for start in range(0, n, batch):", "    stop, before = min(start + batch, n), before + 1")
    # a minibatch in tiles: Adam steps once, when the gradient is complete
    say(f"for low in range(start, stop, {TILE}):", f"    count = min({TILE}, stop - low)", "    blocks = padded(count) // WIDTH", indent=2)
    say("label[:count] = labels[low : low + count]", "weight[:count] = 1", "weight[count:] = 0", indent=3)
    for name in TABLES:
        say(f"take_rows(T_h_{name}, {COLUMN[name]}[low : low + count], q_h_{name}, 0, {widths[name] * WIDTH})", indent=3)
    # every tile divides by the size of its minibatch, so that gradients of tiles add up to that of the mean
    rest = ["label", "weight", "weight", "acts", "tmp", "spare", "nothing", "ones", "numbers", "kind(stop - start)", "kind(0)"]
    rest += ["awake"] if step.listed else []
    say(f"total += step({', '.join(['blocks', *step.arguments(), *rest])}) * (stop - start)", indent=3)
    say(*(line for name in widths for line in added(name, widths[name], sums.get(name))), indent=3)
    say("by, root = paces_at(before, rate)", "pace = (kind(by), kind(root))", indent=2)
    for name in widths:
        say(f"for at in range(0, S_{name}.size, {MOVED}):", f"    own = slice(at, at + {MOVED})", indent=2)
        say(f"adamw(p_h_{name}[own], S_{name}[own], m_{name}[own], v_{name}[own], pace, kind(1), kind(1), tiny)", indent=3)
        say(f"S_{name}[own] = 0", indent=3)
    # back to torch's scale, which checkpoints and the generic path read
    for name in widths:
        say(*scaled(name, f"kind({1 - BETA1})", f"kind({1 - BETA2})"))
    say("return total / n")
    return "\n".join(lines) + "\n"


def added(name: str, width: int, factors: tuple[str, ...] | None) -> list[str]:
    """What a tile's samples add to the gradient of a tensor or a table; factors: tables whose rows that is made of, see `combination`."""
    if name not in TABLES:
        return [f"for i in range({width}):", f"    S_{name}[i] += g_{name}[i]"]
    if factors is None:
        return [f"add_rows(g_{name}, {width * WIDTH}, {COLUMN[name]}[low : low + count], S_{name}.reshape(T_h_{name}.shape))"]
    whole = width // WIDTH * WIDTH
    lines = ["for s in range(count):", f"    x = s // WIDTH * {len(factors) * WIDTH} + s % WIDTH"]
    lines += [f"    y_{one} = {COLUMN[one]}[low + s] * {width}" for one in {name: 0, **dict.fromkeys(factors)}]
    lines += [f"    c_{one} = g_{name}[x + {at * WIDTH}]" for at, one in enumerate(factors)]
    lanes = "".join(f" + c_{one} * take(p_h_{one}, y_{one} + j)" for one in factors)
    rest = " + ".join(f"c_{one} * p_h_{one}[y_{one} + j]" for one in factors)
    lines += [f"    for j in range(0, {whole}, WIDTH):", f"        put(S_{name}, y_{name} + j, take(S_{name}, y_{name} + j){lanes})"]
    return [*lines, f"    for j in range({whole}, {width}):", f"        S_{name}[y_{name} + j] += {rest}"]


def scaled(name: str, first: str, second: str) -> list[str]:
    """Adam's moments of a name times these."""
    return [f"for i in range(m_{name}.size):", f"    m_{name}[i] *= {first}", f"    v_{name}[i] *= {second}"]
