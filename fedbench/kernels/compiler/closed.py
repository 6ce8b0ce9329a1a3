"""Closed forms: `solve` cut in two, where samples end.

    sums    all that has samples, up to the sums over them: a kernel, client by client, on the rows where they lie
    rest    what is made of these sums and of tensors without samples: torch's own operations, mapped over all clients at once

Either part is as the algorithm wrote it: the rest may be anything that torch can map, such as eigenvectors or bits that are set one
after another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from fedbench.kernels.compiler import trace
from fedbench.kernels.compiler.expressions import Constants, array_name
from fedbench.kernels.compiler.graph import Graph, Value
from fedbench.kernels.compiler.step import Step
from fedbench.kernels.compiler.trace import Key, Unsupported
from fedbench.kernels.compiler.weights import Degrees
from fedbench.kernels.vectors import WIDTH

SAMPLES = ("begin", "count", "local", "labels", "row_begin", "touched", "row")


class Sums(Step):
    """The text of the sums over one client's samples."""

    def given(self) -> list[str]:
        room = ["acts", "tmp", "spare", "nothing", "ones", "numbers", "size", "touched"]
        return ["blocks", *self.arguments(), "label", "weight", "rows", *room]

    def ending(self) -> str:
        return "    return"


@dataclass(frozen=True, eq=False)
class Cut:
    """A closed form in its two parts."""

    sums: Sums
    shapes: dict[str, tuple[int, ...]]
    """of the sums"""
    kinds: dict[str, torch.dtype]
    """of the sums, in the rest"""
    wide: bool
    """sums are made in float64 of rows in float32, for the algorithm says so"""
    rest: Callable[..., Sequence[Tensor]]
    """from the sums, and then the tensors `reads`, to what `solve` returns"""
    reads: tuple[Key, ...]

    @property
    def text(self) -> str:
        return self.sums.text + driver_text(self.sums, self.wide)


def cut(function: Callable[..., Sequence[Tensor]], leaves: Mapping[Key, Tensor], constants: Constants) -> Cut:
    """A function of tensors, given in the order of `leaves`, cut where samples end."""
    lines = trace.Lines()
    module = trace.recorded(function, leaves, lines)
    *nodes, out = module.graph.nodes
    # the rest is mapped over clients, which differ in how many samples they have
    if any(has_samples(one) for one in out.all_input_nodes):
        raise Unsupported("a closed form that makes a number for each sample or row")
    # from the outputs back: a cut is where an operation has samples and its result has none
    needed, ends = {*out.all_input_nodes}, set[fx.Node]()
    for node in reversed(nodes):
        if node in needed and any(has_samples(one) for one in node.all_input_nodes):
            ends.add(node)
        elif node in needed:
            needed |= {*node.all_input_nodes}
    if not ends:
        raise Unsupported("a closed form without sums over samples")
    # in the order of recording: names must not depend on the order of a set
    sums = {f"sum_{place}": node for place, node in enumerate(node for node in nodes if node in ends)}
    left = rest_of(module, nodes, needed, [*sums.values()])
    keys = dict(zip([node for node in nodes if node.op == "placeholder"], leaves, strict=True))
    reads = tuple(keys[node] for node in nodes if node in needed and node.op == "placeholder")
    graph, values = summed(module, [*sums.values()], leaves, lines, [*sums])
    run = next(iter(leaves.values())).dtype
    # float64 was asked for before the sums: float32 rows are widened first, as torch would
    wide = run != torch.float64 and any(node.meta["val"].dtype == torch.float64 for node in nodes if has_samples(node))
    shapes = {name: tuple(node.meta["val"].shape) for name, node in sums.items()}
    kinds = {name: node.meta["val"].dtype for name, node in sums.items()}
    return Cut(Sums("sums_of_client", graph, values, constants), shapes, kinds, wide, left, reads)


def has_samples(node: fx.Node) -> bool:
    found = node.meta.get("val")
    several = found if isinstance(found, list | tuple) else [found]
    return any(isinstance(one, Tensor) and bool({trace.SAMPLES, trace.ROWS} & {*one.shape}) for one in several)


def summed(
    module: fx.GraphModule, sums: list[fx.Node], leaves: Mapping[Key, Tensor], lines: trace.Lines, names: list[str]
) -> tuple[Graph, dict[str, Value]]:
    """The graph of the sums alone; NotLinear if samples of one item may not be taken together."""
    # a copy, for `rest_of` reads the record too, and of what the sums need alone: what torch does for its own sake, such as to look
    # whether a system of equations could be solved, belongs to the rest
    needed = {*sums}
    for node in reversed(module.graph.nodes):
        needed |= {*node.all_input_nodes} if node in needed else set()
    alone, known = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in module.graph.nodes:
        if node.op == "placeholder" or node in needed:
            known[node] = alone.node_copy(node, known.__getitem__)
    alone.output(tuple(known[node] for node in sums))
    other = fx.GraphModule(module, alone)
    graph, values = trace.Translation(other, leaves, lines, Graph()).translate(names)
    # for its proof alone: it raises NotLinear
    Degrees().needs_all_rows(values)
    return graph, values


def rest_of(module: fx.GraphModule, nodes: list[fx.Node], needed: set[fx.Node], sums: list[fx.Node]) -> fx.GraphModule:
    """What is left of a function where its sums are given."""
    left = fx.Graph()
    known = {node: left.placeholder(f"sum_{place}") for place, node in enumerate(sums)}
    for node in nodes:
        if node in needed and node not in known:
            schema = getattr(node.target, "_schema", None)
            if schema is not None and schema.is_mutable and node.target not in trace.RESHAPES:
                raise Unsupported("a change in place in a closed form")
            # the size of an example, which no client has
            if any(isinstance(one, int) and one > 1 and one % n == 0 for one in node.args for n in (trace.SAMPLES, trace.ROWS)):
                raise Unsupported("the number of samples or rows as a number; use batch.weight.sum() or batch.rows.sum()")
            known[node] = left.node_copy(node, known.__getitem__)
    out = module.graph.output_node()
    left.output(fx.node.map_arg(out.args[0], known.__getitem__))
    return fx.GraphModule(module, left)


def arguments(sums: Sums) -> list[str]:
    """Names of what the compiled function `sums` takes after low and high, in order."""
    arrays = [text for key in sorted(sums.tables) for text in (f"T_{array_name(key)}", f"at_{array_name(key)}")]
    arrays += [text for key in sorted(sums.params) for text in (f"P_{array_name(key)}", f"at_{array_name(key)}")]
    return [*SAMPLES, *arrays, *(f"O_{name}" for name in sums.outputs), "numbers"]


def driver_text(sums: Sums, wide: bool) -> str:
    """The function over clients low up to high: their rows are laid side by side, and the sums made. wide: see Cut."""
    tables = {key: sums.tables[key] for key in sorted(sums.tables)}
    room = [("nothing", str(sums.most_outs)), *((f"q_{array_name(key)}", f"{n} * most") for key, n in tables.items())]
    room += [("label", "most"), ("weight", "most"), ("rows", "most"), ("ones", str(WIDTH))]
    room += [("acts", "ACTS * most"), ("tmp", str(max(1, sums.tmp))), ("spare", "WIDTH * most + 2 * SQUARE")]
    lines = ["@compiled(nogil=True, cache=True)", f"def sums(low, high, {', '.join(arguments(sums))}):"]

    def say(*some: str, indent: int = 1) -> None:
        lines.extend("    " * indent + line for line in some)

    say(f"like, most = O_{next(iter(sums.outputs))}, padded(max(1, touched[low:high].max()))", "kind, at = like.dtype.type, 0")
    say(f"room = zeros({' + '.join(f'padded({size})' for _, size in room)}, like)")
    say(*(f"{name}, at = part(room, at, {size})" for name, size in room), "ones[:] = 1")
    if wide and tables:
        say(*(f"narrow_{array_name(key)} = zeros({n} * most, T_{array_name(key)})" for key, n in tables.items()))
    say("for c in range(low, high):", "    mine, t = row[row_begin[c] : row_begin[c] + touched[c]], touched[c]")
    # samples of one item become one with a weight, see weights.py
    say("blocks = padded(t) // WIDTH", "label[:], weight[:], rows[:] = 0, 0, 0", "rows[:t] = 1",
        "for s in range(begin[c], begin[c] + count[c]):", "    label[local[s]] = labels[s]",
        "    weight[np.uint32(local[s])] += kind(1)", indent=2)  # fmt: skip
    for key, n in tables.items():
        name = array_name(key)
        # rows are put side by side in their own type, then widened: squares are turned within one type
        to = f"narrow_{name}" if wide else f"q_{name}"
        say(f"take_rows(T_{name}[at_{name}[c]], mine, {to}, 0, {n * WIDTH})", indent=2)
        if wide:
            say(f"for x in range(blocks * {n * WIDTH}):", f"    q_{name}[x] = narrow_{name}[x]", indent=2)
    given = {f"p_{array_name(key)}": f"P_{array_name(key)}[at_{array_name(key)}[c]]" for key in sums.params}
    given |= {f"g_{name}": f"O_{name}[c]" for name in sums.outputs} | {"size": "kind(count[c])", "touched": "kind(t)"}
    say(f"{sums.name}({', '.join(given.get(one, one) for one in sums.given())})", indent=2)
    return "\n".join(lines) + "\n"
