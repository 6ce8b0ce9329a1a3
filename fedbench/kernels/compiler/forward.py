"""The text of functions without a gradient: a client's scores of its items, and tables that are merged row by row.

A function is cut in three, so that nothing is made twice:
    common    what no client has a part in: once for all clients, a row of numbers for each item
    client    what no item has a part in: once for each client
    rows      the rest, over tiles of items
The common part is a function of its own; what it makes is read as one more table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fedbench.kernels.compiler.cut import Key, common_to_all, cut, without_items
from fedbench.kernels.compiler.expressions import Constants, array_name
from fedbench.kernels.compiler.graph import Graph, Value
from fedbench.kernels.compiler.rowwise import OF_CLIENT, Linear, linear_form, rows_along
from fedbench.kernels.compiler.step import Step
from fedbench.kernels.vectors import WIDTH

MADE_ROWS, MADE_NUMBERS = ("made", "rows"), ("made", "numbers")
"""what is made once for all clients"""
MINE = "_client"
"""the output of a client's part that its rows read"""
IN_CACHE = 1 << 13
"""numbers of the rows of a tile: they stay in the fastest cache"""
TILES = 4 * WIDTH, 32 * WIDTH
"""fewest and most rows of a tile"""


class Part(Step):
    """The text of one part of a function."""

    def given(self) -> list[str]:
        return ["blocks", *self.arguments(), "acts", "tmp", "nothing", "numbers"]

    def ending(self) -> str:
        return "    return"


@dataclass(frozen=True)
class Program:
    """A compiled function over clients: what it reads and writes, and its text."""

    name: str
    tables: dict[Key, int]
    """numbers in a row of each table"""
    params: dict[Key, int]
    rows: dict[str, int]
    """outputs that have items: numbers in a row"""
    dense: dict[str, int]
    """outputs that have none"""
    copies: dict[str, Key]
    """outputs that are a table as it was sent"""
    acts: int
    text: str

    @property
    def arguments(self) -> list[str]:
        """Names of what the function takes after low and high, in order."""
        tables = [text for key in self.tables for text in (f"T_{array_name(key)}", f"at_{array_name(key)}")]
        params = [text for key in self.params for text in (f"P_{array_name(key)}", f"at_{array_name(key)}")]
        outs = [text for name in (*self.rows, *self.dense, *self.copies) for text in (f"O_{name}", f"to_{name}")]
        return [*tables, *params, *outs, "items", "numbers"]


def program(
    name: str, graph: Graph, outputs: dict[str, Value], constants: Constants, shared: Callable[[Key], bool], whole: bool
) -> Program:
    """whole: the items are all items, so that what was sent as it is can be copied."""
    copies = {n: v.how["key"] for n, v in outputs.items() if whole and v.op == "table" and v.how["key"][0] == "sent"}
    dense = {n: v for n, v in outputs.items() if not v.lane}
    lane = {n: v for n, v in outputs.items() if v.lane and n not in copies}
    # one score that is linear in its rows may need no tiles, see rowwise.Linear
    score = next(iter(lane)) if len(lane) == 1 and not whole else ""
    form = linear_form(graph, lane[score]) if score else None
    left = form.as_cut(graph, score) if form else cut(graph, lane, without_items, MADE_ROWS, OF_CLIENT)
    along, made_along = rows_along(left.outputs if whole else {}, constants)
    texts = {n: along.written(n, v) for n, v in made_along.items()}
    tiled = {n: v for n, v in left.outputs.items() if n not in texts} | {f"_{v.number}": v for v in along.scalars.values()}
    # the client's part goes first: its rows read what it makes
    before = dense if left.numbers is None else {**dense, MINE: left.numbers}
    client = Part(f"{name}_client", graph, before, constants) if before else None
    rows = Part(f"{name}_rows", graph, tiled, constants) if tiled else None
    parts = [part for part in (client, rows) if part is not None]
    tables = {key: n for part in parts for key, n in part.tables.items()} | {key: v.size for key, v in along.tables.items()}
    params = {key: n for part in parts for key, n in part.params.items() if key != OF_CLIENT}
    read = {**tables, **{key: outputs[n].size for n, key in copies.items()}}
    made = Program(name, dict(sorted(read.items())), dict(sorted(params.items())), {n: v.size for n, v in lane.items()},
                   {n: v.size for n, v in dense.items()}, copies, max([1, *(part.acts for part in parts)]), "")  # fmt: skip
    size = 0 if left.numbers is None else left.numbers.size
    run = Run(made, client, rows, size, not whole and all(map(shared, read)), form, texts)
    text = "".join(part.text for part in parts) + run.text()
    return replace(made, text=text)


@dataclass(frozen=True)
class Run:
    """The function over clients low up to high. Clients that read the same rows of the same tables take them tile by tile, together."""

    made: Program
    client: Part | None
    rows: Part | None
    size: int
    """numbers that each client's part makes"""
    alike: bool
    """all clients read the same tables"""
    form: Linear | None
    along: dict[str, list[str]]
    """outputs that are made along rows, and how"""

    @property
    def tables(self) -> dict[Key, int]:
        return {} if self.rows is None else dict(sorted(self.rows.tables.items()))

    @property
    def tile(self) -> int:
        # a tile's rows, what is made of them and its results share the cache
        numbers = sum(self.tables.values()) + self.made.acts + (sum(v.size for v in self.rows.outputs.values()) if self.rows else 0)
        return min(TILES[1], max(TILES[0], IN_CACHE // numbers // WIDTH * WIDTH))

    def room(self) -> list[tuple[str, str]]:
        """Parts of the working memory, and how many numbers they have."""
        made, tile = self.made, self.tile
        parts = [part for part in (self.client, self.rows) if part is not None]
        room = [(f"q_{array_name(key)}", f"{n * tile}") for key, n in self.tables.items()]
        room += [(f"g_{name}", f"{v.size * tile}") for name, v in self.rows.outputs.items()] if self.rows else []
        room += [(f"g_{name}", f"{n}") for name, n in made.dense.items()]
        room += [("acts", f"ACTS * {tile}"), ("tmp", str(max([1, *(part.tmp for part in parts)])))]
        return [*room, ("nothing", str(max([WIDTH, *(part.most_outs for part in parts)])))]

    def called(self, part: Part, blocks: str) -> str:
        own = f"own[(c - first) * {self.size} : (c - first + 1) * {self.size}]"
        mine = {f"p_{array_name(key)}": f"P_{array_name(key)}[at_{array_name(key)}[c]]" for key in part.params}
        mine |= {f"p_{array_name(OF_CLIENT)}": own, f"g_{MINE}": own, "blocks": blocks}
        return f"{part.name}({', '.join(mine.get(one, one) for one in part.given())})"

    def text(self) -> str:
        made, room = self.made, self.room()
        like = next(one for one in made.arguments if one.startswith("O_"))
        lines = [f"kind, at, room = {like}.dtype.type, 0, zeros({' + '.join(f'padded({n})' for _, n in room)}, {like})"]
        lines += [f"{name}, at = part(room, at, {n})" for name, n in room]
        # clients that read the same rows go over a tile together: it is fetched once
        lines += [f"together = max(1, high - low) if {self.alike} and len(items) == 1 else 1"]
        lines += [f"own = zeros(together * {self.size}, {like})"]
        lines += ["for first in range(low, high, together):"]
        if self.client is not None:
            lines += ["    for c in range(first, first + together):", f"        {self.called(self.client, '0')}"]
        if self.rows is not None or self.along:
            lines += ["    mine = items[first if len(items) > 1 else 0]", *(f"    {line}" for line in self.over_rows())]
        lines += [f"    O_{name}[to_{name}[first]][:] = g_{name}" for name in made.dense]
        for name, key in made.copies.items():
            lines.append(f"    O_{name}[to_{name}[first]][:] = T_{array_name(key)}[at_{array_name(key)}[first]]")
        head = ["@compiled(nogil=True, cache=True)", f"def {made.name}(low, high, {', '.join(made.arguments)}):"]
        return "\n".join([*head, *(f"    {line}" for line in lines)]) + "\n\n\n"

    def over_rows(self) -> list[str]:
        """All items of the clients from `first` on: dot products row by row where rows are read once, else tile by tile."""
        if self.form is None:
            return self.tiles()
        (name,) = self.made.rows
        dots = self.form.dots(f"O_{name}[to_{name}[first]]")
        if not self.alike:
            return dots
        return ["if len(items) > 1:", *(f"    {line}" for line in dots), "else:", *(f"    {line}" for line in self.tiles())]

    def tiles(self) -> list[str]:
        each = {key: f"T_{array_name(key)}[at_{array_name(key)}[first]]" for key in self.made.tables}
        lines = [f"some = mine[start : start + {self.tile}]", "blocks = padded(some.size) // WIDTH"]
        if self.tables:
            lines += ["if len(items) > 1:", *(f"    fetch({each[key]}, some)" for key in self.tables)]
        if self.tables and not self.alike and not self.along:  # the next tile comes to the cache while this one is worked on
            ahead = f"mine[start + {self.tile} : start + {2 * self.tile}]"
            lines += ["else:", *(f"    fetch({each[key]}, {ahead})" for key in self.tables)]
        lines += [f"take_rows({each[key]}, some, q_{array_name(key)}, 0, {n * WIDTH})" for key, n in self.tables.items()]
        if self.rows is not None:
            lines += ["for c in range(first, first + together):", f"    {self.called(self.rows, 'blocks')}"]
        for name, n in self.made.rows.items():
            to = f"O_{name}[to_{name}[c]]"
            if name in self.along:
                continue
            if n == 1:
                lines += [f"    out = {to}.reshape(-1)", "    for s in range(some.size):", f"        out[start + s] = g_{name}[s]"]
            else:
                lines.append(f"    give_rows(g_{name}, {n * WIDTH}, some, {to})")
        before = []
        if self.along:
            before = [f"t_{array_name(key)} = {table}.reshape(-1)" for key, table in each.items()]
            before += [f"o_{name} = O_{name}[to_{name}[first]].reshape(-1)" for name in self.along]
            lines += ["for s in range(some.size):", "    i = some[s]"]  # and rows of the next tile, where there is one, come to the cache
            lines += [f"    prefetch(t_{array_name(key)}, (i + {self.tile}) * {n})" for key, n in self.made.tables.items()]
            lines += [f"    {line}" for texts in self.along.values() for line in texts]
        return [*before, f"for start in range(0, mine.size, {self.tile}):", *(f"    {line}" for line in lines)]


def programs(
    graph: Graph, outputs: dict[str, Value], constants: Constants, shared: Callable[[Key], bool], whole: bool
) -> tuple[Program | None, Program]:
    """What is made once for all clients, if anything is, and what is made for each. whole: see program."""
    # an output that is a leaf (a table as it was sent) has nothing to cut
    direct = {name: v for name, v in outputs.items() if not v.inputs}
    left = cut(graph, {name: v for name, v in outputs.items() if name not in direct}, common_to_all(shared), MADE_ROWS, MADE_NUMBERS)
    made = {name: v for name, v in (("rows", left.rows), ("numbers", left.numbers)) if v is not None}
    common = program("common", graph, made, constants, lambda key: True, True) if made else None
    both: dict[str, Value] = {name: left.outputs.get(name, v) for name, v in outputs.items()}
    return common, program("each", graph, both, constants, lambda key: key == MADE_ROWS or shared(key), whole)


def given(made: Program, arrays: Mapping[Key, tuple[Any, Any]], outs: Mapping[str, tuple[Any, Any]]) -> list[Any]:
    """The arguments of a compiled program up to its items. arrays, outs: [X, ...], and which of them is each client's."""
    found: list[Any] = []
    for key, width in made.tables.items():
        array, at = arrays[key]
        found += [array.reshape(len(array), -1, width), at]
    for key in made.params:
        array, at = arrays[key]
        found += [array.reshape(len(array), -1), at]
    for name in (*made.rows, *made.dense, *made.copies):
        array, at = outs[name]
        width = made.rows.get(name) or (made.tables[made.copies[name]] if name in made.copies else 0)
        found += [array.reshape(len(array), -1, width) if width else array.reshape(len(array), -1), at]
    return found
