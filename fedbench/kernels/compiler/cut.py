"""Graphs of functions that work row by row, and how they are cut into parts that are made one after another.

What no client has a part in is made once, what no item has a part in once for each client: a cut takes it out of the graph, and the rest
reads it as one more tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from fedbench.kernels.compiler.graph import Graph, Value, is_uniform, source
from fedbench.kernels.compiler.indices import LANE, Index, Shape, broadcast, linear, plus
from fedbench.kernels.compiler.schedule import reached

Key = tuple[str, str]
Inside = Callable[[Value], bool]


class RowGraph(Graph):
    """A graph of functions that work row by row: rows are never added up, and what is the same for all of them is made once."""

    def ew(self, f: str, *given: Value | float) -> Value:
        args = [one if isinstance(one, Value) else self.const(one) for one in given]
        if not any(one.lane for one in args) or not all(map(without_items, args)):
            return self.joined(*args) if f == "add" and all(one.lane for one in args) else super().ew(f, *args)
        # made once and repeated afterwards, so that it can be cut out as the client's part
        return self.expand(super().ew(f, *(one_for_all_items(self, one) for one in args)), broadcast(*(one.shape for one in args)))

    def mm(self, a: Value, b: Value) -> Value:
        """(x - y) @ W = x @ W + y @ -W for rows x and y, which lie there already."""
        if a.f in ("add", "sub") and a.shape[:1] == (LANE,) and not b.lane and all(source(one).op == "table" for one in a.args):
            other = b if a.f == "add" else self.ew("neg", b)
            return self.ew("add", self.mm(self.expand(a.args[0], a.shape), b), self.mm(self.expand(a.args[1], a.shape), other))
        return super().mm(a, b)

    def joined(self, *args: Value) -> Value:
        """A sum in which x @ W + x @ V are x @ (W + V)."""
        terms = [term for one in args for term in summands(one)]
        mixed: dict[int, Value] = {}
        for one in terms:
            if one.op == "mix":
                known = mixed.get(one.args[0].number)
                mixed[one.args[0].number] = one if known is None else self.mm(one.args[0], self.ew("add", known.args[1], one.args[1]))
        if len(mixed) == sum(one.op == "mix" for one in terms):
            return super().ew("add", *args)  # nothing to join: the sum stays as it was written, rounding included
        left = [*mixed.values(), *(one for one in terms if one.op != "mix")]
        total = left[0]
        for one in left[1:]:
            total = super().ew("add", total, one)
        return self.expand(total, broadcast(*(one.shape for one in args)))

    def feature_sum(self, v: Value, axis: int) -> Value:
        if not is_uniform(v):
            return super().feature_sum(v, axis)
        total = super().feature_sum(one_for_all_items(self, v), axis)
        return self.expand(total, (n for at, n in enumerate(v.shape) if at != axis))

    def feature_max(self, v: Value, axis: int) -> Value:
        if not is_uniform(v):
            return super().feature_max(v, axis)
        found = super().feature_max(one_for_all_items(self, v), axis)
        return self.expand(found, (n for at, n in enumerate(v.shape) if at != axis))

    def lane_sum(self, v: Value, axis: int) -> Value:
        raise NotImplementedError("a sum over items")

    def prod(self, a: Value, b: Value) -> Value:
        raise NotImplementedError("a sum over items")


def summands(v: Value) -> list[Value]:
    return [term for one in v.args for term in summands(one)] if v.f == "add" else [v]


def common_to_all(shared: Callable[[Key], bool]) -> Inside:
    """Whether a value depends on nothing that differs from client to client; shared: whether a tensor is the same for all clients."""
    known: dict[int, bool] = {}

    def common(v: Value) -> bool:
        if v.number not in known:
            known[v.number] = shared(v.how["key"]) if v.op in ("table", "param") else all(map(common, v.inputs))
        return known[v.number]

    return common


def without_items(v: Value) -> bool:
    """Whether a value is the same for all items."""
    return not v.lane or is_uniform(v)


def rebuilt(graph: Graph, v: Value, known: dict[int, Value]) -> Value:
    """v made of other values: `known` says which stand for which."""
    if v.number not in known:
        args = [rebuilt(graph, one, known) if isinstance(one, Value) else one for one in v.args]
        # what does not change keeps its number, by which others know it
        same = all(new is old for new, old in zip(args, v.args, strict=True))
        known[v.number] = v if same else graph.make(v.op, v.shape, args, **v.how)
    return known[v.number]


def regrouped(graph: Graph, outputs: dict[str, Value], inside: Inside) -> dict[str, Value]:
    """Values regrouped: sums and products are made of what is `inside` first, so that they can be cut there."""
    uses: dict[int, int] = {}
    order = reached(outputs.values())
    for v in order:
        for one in v.inputs:
            uses[one.number] = uses.get(one.number, 0) + 1

    def terms(v: Value, f: str) -> list[Value]:
        # a sum that others read too stays whole: else it would be made twice
        return [term for one in v.args for term in (terms(one, f) if one.f == f and uses[one.number] == 1 else [one])]

    known: dict[int, Value] = {}
    for v in order:
        parts = terms(v, v.f) if v.f in ("add", "mul") and not inside(v) else []
        first = [one for one in parts if inside(one)]
        # one alone is cut where it stands: another order would change rounding and gain nothing
        if len(first) < 2:
            rebuilt(graph, v, known)
            continue
        total = one_for_all_items(graph, first[0])
        for one in first[1:]:
            total = graph.ew(v.f, total, one_for_all_items(graph, one))
        for one in parts:
            total = total if inside(one) else graph.ew(v.f, total, rebuilt(graph, one, known))
        known[v.number] = graph.expand(total, v.shape)
    return {name: known[v.number] for name, v in outputs.items()}


def one_for_all_items(graph: Graph, v: Value) -> Value:
    """A value that is repeated for all items, once; others as they are."""
    if not v.lane or not is_uniform(v):
        return v
    lane = v.shape.index(LANE)
    return graph.view(
        v,
        (1 if n == LANE else n for n in v.shape),
        lambda index: tuple(None if axis == lane else one for axis, one in enumerate(index)),
    )


@dataclass(frozen=True)
class Cut:
    outputs: dict[str, Value]
    """what is left: it reads what was taken out as two more tensors"""
    rows: Value | None
    """[items, ...] what was taken out and has items, side by side"""
    numbers: Value | None
    """what was taken out and has none, end to end"""


def cut(graph: Graph, outputs: dict[str, Value], inside: Inside, rows: Key, numbers: Key) -> Cut:
    """Take all out of a graph that is `inside`; rows, numbers: what the rest finds it under."""
    outputs = regrouped(graph, outputs, inside)
    taken = worth_it(frontier(outputs.values(), inside))
    known: dict[int, Value] = {}
    made = []
    for lane, key in ((True, rows), (False, numbers)):
        mine = [v for v in taken if v.lane == lane]
        lead: Shape = (LANE,) if lane else ()
        width, at, parts = sum(v.size for v in mine), 0, []
        # all that was taken out is one row a sample (or one vector), so kernels read one table more at most
        leaf = graph.make("table" if lane else "param", (*lead, width), (), key=key)
        for v in mine:
            known[v.number] = graph.view(leaf, v.shape, place_of(v, at))
            # samples first: that is how rows of tables lie
            axes = sorted(range(len(v.shape)), key=lambda axis, v=v: v.shape[axis] != LANE)  # type: ignore[misc]
            parts.append((at, at + v.size, graph.reshape(graph.permute(v, axes), (*lead, v.size))))
            at += v.size
        made.append(graph.cat((*lead, width), len(lead), parts) if mine else None)
    return Cut({name: rebuilt(graph, v, known) for name, v in outputs.items()}, *made)


def place_of(v: Value, at: int) -> Callable[[tuple[Index, ...]], tuple[Index, ...]]:
    """From an index of v to one of the row or the vector that holds it from place `at` on."""

    def fn(index: tuple[Index, ...]) -> tuple[Index, ...]:
        to = plus(at, linear([one for one in index if one is not None], v.features))
        return (None, to) if v.lane else (to,)

    return fn


def frontier(values: Collection[Value], inside: Inside) -> list[Value]:
    """The last values inside, which the others are made of. Views are taken where they look at a part of a table alone."""
    found: dict[int, Value] = {}
    seen: set[int] = set()

    def walk(v: Value) -> None:
        if v.number in seen or not v.inputs:
            return
        seen.add(v.number)
        # views cost nothing: what they look at is taken, unless they show less of it
        whole = v.op in ("view", "flat") and (not v.args[0].lane or v.size >= v.args[0].size)
        if inside(v) and not whole:
            found[v.number] = v
            return
        for one in v.inputs:
            walk(one)

    for v in values:
        walk(v)
    return list(found.values())


def worth_it(taken: list[Value]) -> list[Value]:
    """Without parts of tables that are all of them: to copy these would gain nothing."""
    parts = [v for v in taken if v.op == "view" and v.args[0].op == "table"]
    tables = {v.args[0].number: v.args[0].size for v in parts}
    # parts of several tables are worth a copy only if they are less than the tables
    if sum(v.size for v in parts) < sum(tables.values()):
        return taken
    return [v for v in taken if v not in parts]


def reads(values: Sequence[Value]) -> set[Key]:
    """Tensors that values are made of."""
    return {v.how["key"] for v in reached(values) if v.op in ("table", "param")}
