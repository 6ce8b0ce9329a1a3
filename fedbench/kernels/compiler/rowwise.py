"""What is made row by row where the rows lie, without putting rows side by side: dot products, and what goes number by number."""

from __future__ import annotations

from dataclasses import dataclass

from fedbench.kernels.compiler.cut import Cut, Key, one_for_all_items, reads, without_items
from fedbench.kernels.compiler.expressions import LANES, PLAIN, SYMBOLS, Constants, array_name
from fedbench.kernels.compiler.graph import Graph, Value, is_zero, layout, source
from fedbench.kernels.compiler.indices import LANE
from fedbench.kernels.vectors import WIDTH

OF_CLIENT = ("client", "numbers")
"""what is made for each client, and read with its rows"""
Term = tuple[Value, Value | None]
"""a factor without items, and a part of a table (None: nothing else)"""


def terms_of(graph: Graph, v: Value) -> list[Term] | None:
    """v as a sum of products of parts of tables and what has no items; None if it is something else."""
    if without_items(v):
        return [(one_for_all_items(graph, v), None)]
    if source(v).op == "table":
        return [(graph.const(1.0), v)]
    if v.f == "neg":
        return scaled(graph, terms_of(graph, v.args[0]), graph.const(-1.0))
    if v.f in ("add", "sub"):
        a, b = (terms_of(graph, graph.expand(one, v.shape)) for one in v.args)
        b = b if v.f == "add" else scaled(graph, b, graph.const(-1.0))
        return None if a is None or b is None else a + b
    if v.f in ("mul", "div"):
        args = [graph.expand(one, v.shape) for one in v.args]
        # either factor may have the items; of a quotient, the upper part alone
        if v.f == "mul" and without_items(args[0]):
            args.reverse()
        if not without_items(args[1]):
            return None
        factor = one_for_all_items(graph, args[1])
        return scaled(graph, terms_of(graph, args[0]), factor if v.f == "mul" else graph.ew("div", 1.0, factor))
    return None


def scaled(graph: Graph, terms: list[Term] | None, factor: Value) -> list[Term] | None:
    return None if terms is None else [(graph.ew("mul", one, factor), part) for one, part in terms]


@dataclass(frozen=True)
class Linear:
    """weights · a row of each table + bias; what is not of items is made for each client."""

    tables: dict[Key, Value]
    weights: dict[Key, Value]
    bias: Value

    def as_cut(self, graph: Graph, name: str) -> Cut:
        """With the weights of all tables and the bias end to end as what is made for each client."""
        ends = [*self.weights.values(), *([] if is_zero(self.bias) else [graph.reshape(self.bias, (1,))])]
        size, at, parts = sum(v.size for v in ends), 0, []
        leaf = graph.make("param", (size,), (), key=OF_CLIENT)
        for v in ends:
            parts.append((at, at + v.size, v))
            at += v.size
        total = graph.const(0.0, (LANE,)) if is_zero(self.bias) else graph.expand(graph.slice(leaf, 0, size - 1, size), (LANE,))
        # not strict: the bias, the last part, has no table
        for (low, high, _), table in zip(parts, self.tables.values(), strict=False):
            rows = graph.reshape(table, (LANE, table.size))
            total = graph.ew("add", total, graph.feature_sum(graph.ew("mul", rows, graph.slice(leaf, 0, low, high)), 1))
        return Cut({name: total}, None, graph.cat((size,), 0, parts))

    def dots(self, out: str) -> list[str]:
        """The text of one client's sums, row by row, sixteen numbers at a time."""
        lines, body, lanes, single, at = [], [], [], [], 0
        for key, table in self.tables.items():
            name, n = array_name(key), table.size
            each, whole = f"T_{name}[at_{name}[first]]", n // WIDTH * WIDTH
            # an item of several lists lies anywhere: its row is fetched ahead
            lines += [f"t_{name} = {each}.reshape(-1)", "if len(items) > 1:", f"    fetch({each}, mine)"]
            body.append(f"    y_{name} = mine[s] * {n}")
            if whole:
                body.append(f"    a_{name} = take(own, {at}) * take(t_{name}, y_{name})")
                lanes.append(f"a_{name}")
            if whole > WIDTH:
                body += [f"    for j in range({WIDTH}, {whole}, {WIDTH}):"]
                body += [f"        a_{name} = a_{name} + take(own, {at} + j) * take(t_{name}, y_{name} + j)"]
            single += [f"own[{at + j}] * t_{name}[y_{name} + {j}]" for j in range(whole, n)]
            at += n
        total = [*([f"across({' + '.join(lanes)})"] if lanes else []), *single, *([] if is_zero(self.bias) else [f"own[{at}]"])]
        return [*lines, f"out = {out}.reshape(-1)", "for s in range(mine.size):", *body, f"    out[s] = {' + '.join(total)}"]


def linear_form(graph: Graph, v: Value) -> Linear | None:
    """A number [items] as a sum of products with all numbers of rows of tables; None if it is something else."""
    found: dict[Key, Value] = {}
    tables: dict[Key, Value] = {}
    widths: dict[Key, set[int]] = {}
    bias = graph.const(0.0)
    parts = [v]
    while parts:
        one = parts.pop()
        if one.f == "add":
            parts += [graph.expand(arg, one.shape) for arg in one.args]
            continue
        summed = one.op == "feature_sum"
        inner = one.args[0] if summed else one
        terms = terms_of(graph, inner) if not summed or (inner.shape[0] == LANE and len(inner.shape) == 2) else None
        if terms is None:
            return None
        for factor, part in terms:
            # the same for all items: one row of weights
            wide = graph.expand(factor, (1, *inner.shape[1:]))
            if part is None:
                value = graph.feature_sum(wide, 1) if summed else wide
                bias = graph.ew("add", bias, graph.reshape(value, ()))
                continue
            lying = layout(part)
            n = part.size
            # numbers of a row that lie apart would be read one by one: not faster than tiles
            if lying is None or (n > 1 and lying[2] != [1]):
                return None
            table, first, _ = lying
            mine = graph.pad(graph.reshape(wide, (n,)), (table.size,), 0, first)
            key = table.how["key"]
            tables[key], found[key] = table, graph.ew("add", found[key], mine) if key in found else mine
            widths.setdefault(key, set(range(table.size))).difference_update(range(first, first + n))
    # a number of a row that is not asked for may be infinite, and 0 times that is none
    return Linear(tables, found, bias) if found and not any(widths.values()) else None


class Along:
    """The text of rows that are made number by number: of numbers of tables at the same place, of one number an item, of what has no items.

    These are written where they lie, sixteen numbers of a row at a time, and need not be put side by side.
    """

    def __init__(self, constants: Constants) -> None:
        self.constants = constants
        self.scalars: dict[int, Value] = {}
        """numbers of items, by the place of their output"""
        self.tables: dict[Key, Value] = {}

    def fits(self, v: Value, wide: int) -> bool:
        if v.op == "const" or one_an_item(v) is not None:
            return True
        if source(v).op == "table":
            lying = layout(v)
            # number y is made of number y: no part, no offset
            return lying is not None and lying[0].size == v.size == wide and lying[1:] == (0, [1])
        return v.f in LANES | SYMBOLS.keys() | {"neg"} and v.lane and v.shape[-1] == wide and all(self.fits(one, wide) for one in v.args)

    def x(self, v: Value, lane: bool) -> str:
        if v.op == "const":
            return self.constants.text(v.args[0])
        if source(v).op == "table" and v.size > 1:
            table = source(v)
            self.tables[table.how["key"]] = table
            return f"take(t_{array_name(table.how['key'])}, y)" if lane else f"t_{array_name(table.how['key'])}[y]"
        if (one := one_an_item(v)) is not None:
            self.scalars[one.number] = one
            return f"repeat(g__{one.number}, s)" if lane else f"g__{one.number}[s]"
        args = [self.x(one, lane) for one in v.args]
        if v.f in SYMBOLS:
            return f"({args[0]} {SYMBOLS[v.f]} {args[1]})"
        return f"(kind(0) - {args[0]})" if v.f == "neg" else (LANES if lane else PLAIN)[v.f].format(*args)

    def written(self, name: str, v: Value) -> list[str]:
        """One row s of a tile, item i of an output."""
        wide = v.size
        whole = wide // WIDTH * WIDTH
        lines = [f"for y in range(i * {wide}, i * {wide} + {whole}, WIDTH):", f"    put(o_{name}, y, lanes_of({self.x(v, True)}))"]
        rest = [f"for y in range(i * {wide} + {whole}, (i + 1) * {wide}):", f"    o_{name}[y] = {self.x(v, False)}"]
        return (lines if whole else []) + (rest if whole < wide else [])


def one_an_item(v: Value) -> Value | None:
    """The one number of an item that v is, or repeats for all its features; None if it has several."""
    of = source(v)
    return of if of.lane and of.size == 1 else v if v.lane and v.size == 1 else None


def rows_along(outputs: dict[str, Value], constants: Constants) -> tuple[Along, dict[str, Value]]:
    """Which outputs are made along rows. None reads a table that another one writes."""
    along = Along(constants)
    found = {}
    for name, v in outputs.items():
        # rows are written as they are made: a table that is another output would be read half merged
        written = {("own", other) for other in outputs if other != name}
        if v.shape[:1] == (LANE,) and len(v.shape) == 2 and v.size > 1 and along.fits(v, v.size) and not written & reads([v]):
            found[name] = v
    return along, found
