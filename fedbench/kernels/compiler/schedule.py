"""What of a graph is kept, and when it is made.

A step runs in passes. Before a pass come products over the whole batch (a layer of a network, a sum of outer products), which are fast
because their sums stay in registers; the pass itself is one loop over blocks of samples that makes all elementwise values, dot products
and sums over samples. A sum over samples ends a pass: what needs it is made in the next. Values that are used once, or are cheap, are
made anew where they are used and never written to memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from fedbench.kernels.compiler.graph import Graph, Value, is_uniform, is_zero, same_numbers, source
from fedbench.kernels.compiler.indices import strides

if TYPE_CHECKING:
    from fedbench.kernels.compiler.keeping import Kept

LEAVES = ("view", "flat", "const", "param", "table", "sample")
BEFORE, LOOP, SUM = "before", "loop", "sum"
"""kinds of statements: before a pass over the samples, within it, and sums that are there after it"""
WHOLE_BATCH = ("prod", "column_sums", "uniform_mm", "gather")
CHEAP = ("mul", "neg", "sub", "add")


class Affine(NamedTuple):
    """x1 @ W1 + x2 @ W2 + … + bias or base, the positive part of it where a ReLU follows."""

    mixes: list[Value]
    bias: Value | None
    relu: bool
    base: Value | None = None
    """what is made apart, see keeping.py"""


class Piece(NamedTuple):
    """A part of the gradient of a table."""

    name: str
    offset: int
    """its first number in a row"""
    value: Value


class Schedule:
    def __init__(self, graph: Graph, outputs: dict[str, Value], at_the_end: Iterable[str] = (), found: Kept | None = None) -> None:
        """at_the_end: tables whose gradient is made in the last pass, where the optimizer uses it at once. found: see keeping.py"""
        self.graph, self.outputs, self.at_the_end = graph, outputs, set(at_the_end)
        self.there = found.there if found else set()
        self.bases = found.bases if found else {}
        self.order = reached(outputs.values())
        self.uses: dict[int, int] = {}
        self.by: dict[int, set[str]] = {}
        self.affine: dict[int, Affine] = {}
        self.forced: set[int] = set()
        self.gates: dict[int, Value] = {}
        """slopes of units that are 0 wherever the unit sleeps -> the layer of these units"""
        self.below_gate: dict[int, Value] = {}
        """layers of which nothing but a gate is made -> that"""
        self.statements: list[Value] = []
        self.stage: dict[int, tuple[int, str]] = {}
        self.kept: set[int] = set()
        """values of a pass that are needed outside of it"""
        self.pieces: list[Piece] = []
        self.piece_stage: list[int] = []
        self.count_uses()
        self.find_affine()
        self.find_gates()
        self.find_statements()
        self.assign_stages()

    def count_uses(self) -> None:
        for v in self.order:
            if v.op not in ("view", "flat"):
                for one in v.inputs:
                    self.used(source(one), v)
        for v in self.outputs.values():
            at = source(v)
            self.uses[at.number] = self.uses.get(at.number, 0) + 1

    def used(self, v: Value, by: Value) -> None:
        self.uses[v.number] = self.uses.get(v.number, 0) + 1
        # what kinds of operations read a value decides in `made` whether it gets a place
        self.by.setdefault(v.number, set()).add(by.op if by.op != "ew" else "lane" if by.lane else "uniform")

    # ---- layers of networks ------------------------------------------------------------------------------------------

    def terms(self, v: Value) -> tuple[list[Value], list[Value]] | None:
        """The products with weights and the uniform terms of a tree of sums; None if there is anything else."""
        if v.op == "mix":
            return [v], []
        if is_uniform(v):
            return [], [v]
        if v.f != "add":
            return None
        # a part that others read too is made for them anyway: as a term it would be made twice
        if any(self.uses[source(one).number] > 1 and source(one).op in ("mix", "ew") and source(one).lane for one in v.args):
            return None
        parts = [self.terms(self.graph.expand(one, v.shape)) for one in v.args]
        if parts[0] is None or parts[1] is None:
            return None
        return parts[0][0] + parts[1][0], parts[0][1] + parts[1][1]

    def find_affine(self) -> None:
        folded: set[int] = set()

        def fold(v: Value, top: Value) -> None:
            if v is not top:
                folded.add(v.number)
            if v.f in ("add", "relu"):
                for one in v.args:
                    if one.op in ("ew", "mix") and one.lane:
                        fold(one, top)

        # from the end, so that the whole sum becomes one layer and not its first part
        for v in reversed(self.order):
            if v.number in folded or not v.lane or v.size == 1 or len(v.shape) != 2:
                continue
            relu = v.f == "relu" and v.args[0].op in ("ew", "mix") and self.uses[source(v.args[0]).number] == 1
            body = v.args[0] if relu else v
            terms = self.terms(body) if body.op == "mix" or body.f == "add" else None
            if not terms or not terms[0]:
                continue
            bias: Value | None = None
            for one in terms[1]:
                # a term without samples is the same for all of them: one row of it is the bias
                row = self.graph.view(one, (v.shape[1],), lambda index: (None, index[0]))
                bias = row if bias is None else self.graph.ew("add", bias, row)
            self.affine[v.number] = Affine(terms[0], bias, relu)
            fold(v, v)
        # a base is a layer of its own, without the ReLU, which must see the whole sum
        for number in self.affine.keys() & self.bases.keys():
            base, part = self.bases[number]
            mixes, _, relu, _ = self.affine[number]
            self.affine[number] = Affine([mix for mix in mixes if mix not in part.mixes], None, relu, base)
            self.affine[base.number] = part
        for mixes, bias, _, _ in self.affine.values():
            # products over the whole batch read arrays, not variables of a pass
            self.forced |= {source(one).number for mix in mixes for one in mix.args}
            if bias is not None:
                self.forced.add(source(bias).number)

    def find_gates(self) -> None:
        """Slopes of a layer with a ReLU that nothing but layers and sums over samples read: those of units that sleep can be left out."""
        for v in self.order:
            if v.f == "pick" and v.size > 1 and len(v.shape) == 2 and is_zero(v.args[1]) and is_zero(v.args[3]):
                layer = v.args[0]
                if layer.shape == v.shape and layer.number in self.affine and self.affine[layer.number].relu:
                    self.gates[v.number] = layer
        for v in self.order:
            if v.op not in ("view", "flat"):
                gates = [(at, one, source(one).number) for at, one in enumerate(v.args) if isinstance(one, Value)]
                gates = [(at, one, number) for at, one, number in gates if number in self.gates]
                for at, one, number in gates:
                    # gradients of awake units lie in the order of a list: a reader that slices or joins them would meet others
                    whole = one.number == number or (v.op, at) == ("prod", 0)
                    reads = (v.op == "mix" and at == 0) or v.op in ("prod", "column_sums")
                    if not (whole and reads and len(gates) == 1 and one.size == source(one).size):
                        self.gates.pop(number, None)
        for v in self.outputs.values():
            self.gates.pop(source(v).number, None)
        for v in self.order:
            if v.number in self.gates:
                # what the gate alone reads is not needed for sleeping units either
                affine = self.affine.get(v.args[2].number)
                if affine and not affine.relu and affine.bias is None and self.uses[v.args[2].number] == 1:
                    self.below_gate[v.args[2].number] = v

    def inputs(self, v: Value) -> list[Value]:
        """What must be there before v is made."""
        if v.number in self.affine:
            mixes, bias, _, base = self.affine[v.number]
            return [one for mix in mixes for one in mix.args] + [one for one in (bias, base) if one is not None]
        return list(v.inputs)

    # ---- what is written down ----------------------------------------------------------------------------------------

    def made(self, v: Value) -> bool:
        """Whether v has a place of its own; else it is made anew wherever it is used."""
        if v.number in self.affine:
            return True
        if v.op in LEAVES:
            return False
        if v.op != "ew":
            return True
        by = self.by.get(v.number, set())
        # one number a sample is a variable of its pass: keeping it is free
        if v.lane and v.size == 1:
            return True
        if v.lane:
            if by & {"mix", "prod", "column_sums", "scatter"} or v.number in self.forced:
                return True
            # a value goes to memory where that costs less than making it again
            return self.uses.get(v.number, 0) > 1 and not self.cheap(v)
        dear = v.f not in CHEAP and "uniform" in by  # a root or an exponential would be found again for every use
        return v.size == 1 or dear or bool(by & {"mix", "uniform_mm", "lane", "cat", "gather"}) or v.number in self.forced

    def cheap(self, v: Value) -> bool:
        return v.f in CHEAP and all(source(one).op in LEAVES or self.made(source(one)) for one in v.args)

    def find_statements(self) -> None:
        seen: set[int] = set()

        def walk(v: Value) -> None:
            # `there`: an earlier phase of this step left it
            if v.number in seen or v.number in self.there:
                return
            seen.add(v.number)
            for one in self.inputs(v):
                walk(one)
            if self.made(v):
                self.statements.append(v)

        def parts(v: Value) -> None:
            """A concatenation is written part by part where it belongs."""
            if v.op == "cat":
                for one in v.args:
                    parts(one)
            elif v.op == "flat" or (v.op == "view" and same_numbers(v) is not None):
                parts(v.args[0])
            else:
                walk(v)

        for name, v in self.outputs.items():
            if v.lane:
                whole = v.op == "cat" and v.how["axis"] > 0
                pairs = zip(v.how["bounds"], v.args, strict=True) if whole else [((0, 0), v)]
                by = strides(v.features)[v.how["axis"] - 1] if whole else 1
                for (low, _), one in pairs:
                    walk(one)
                    self.pieces.append(Piece(name, low * by, one))
            else:
                parts(v)

    def earliest(self, v: Value, kind: str) -> int:
        """The first stage at which a statement of this kind can read v."""
        v = source(v)
        if v.number in self.stage:
            stage, made = self.stage[v.number]
            # what a pass makes is whole only when it has seen all blocks
            return stage + 1 if made == LOOP and kind == BEFORE else stage
        return max((self.earliest(one, kind) for one in self.inputs(v)), default=0)

    def kind(self, v: Value) -> str:
        """When a statement runs; here, for a CPU, products over the whole batch come before a pass, because they are fastest alone."""
        if v.op == "lane_sum":
            return SUM
        return BEFORE if v.number in self.affine or v.op in WHOLE_BATCH or not v.lane else LOOP

    def assign_stages(self) -> None:
        for v in self.statements:
            kind = self.kind(v)
            stage = max((self.earliest(one, BEFORE if kind == BEFORE else LOOP) for one in self.inputs(v)), default=0)
            self.stage[v.number] = (stage + (kind == SUM), kind)
        stages = [self.earliest(piece.value, LOOP) for piece in self.pieces]
        self.last = max([stage for stage, _ in self.stage.values()] + stages, default=0)
        end = self.end(stages)
        self.piece_stage = [end if piece.name in self.at_the_end else stage for piece, stage in zip(self.pieces, stages, strict=True)]
        for piece, stage in zip(self.pieces, self.piece_stage, strict=True):
            self.keep(piece.value, stage, LOOP)
        for v in self.statements:
            stage, kind = self.stage[v.number]
            for one in self.inputs(v):
                self.keep(one, *((stage - 1, LOOP) if kind == SUM else (stage, kind)))

    def end(self, stages: list[int]) -> int:
        """The stage in which gradients are made that are used at once; stages: the first ones in which the pieces can be."""
        return self.last

    def keep(self, v: Value, stage: int, kind: str) -> None:
        """v is read at a stage: what it is made of must be kept if that was made in another pass."""
        v = source(v)
        if v.number in self.stage:
            at, made = self.stage[v.number]
            # variables end with their pass
            if made == LOOP and (at != stage or kind != LOOP):
                self.kept.add(v.number)
            return
        for one in self.inputs(v):
            self.keep(one, stage, kind)

    def reads(self, v: Value) -> set[str]:
        """Tables that an expression reads where it is written down, not through a kept value."""
        v = source(v)
        if v.op == "table":
            return {v.how["key"]}
        if v.number in self.stage:
            return set()
        return set().union(*(self.reads(one) for one in self.inputs(v)))


class Tiles(Schedule):
    """For a GPU. Sums over samples are made in the pass that makes their terms, but for those of outer products, and layers too."""

    def kind(self, v: Value) -> str:
        if v.op in ("lane_sum", "column_sums") or (v.op == "prod" and v.shape[0] == 1):
            return SUM
        return LOOP if v.lane else BEFORE

    def end(self, stages: list[int]) -> int:
        """The first pass after which nothing reads rows."""
        for v in self.statements:
            stage, kind = self.stage[v.number]
            # rows move in place where their gradient is made: nobody may want the old ones afterwards
            if kind != BEFORE or any(self.reads(one) for one in v.inputs):
                stages = [*stages, stage - (kind == SUM)]
        return max(stages, default=0)


def reached(values: Iterable[Value]) -> list[Value]:
    """All that these values are made of, and they, in an order in which they can be made."""
    order: list[Value] = []
    seen: set[int] = set()

    def walk(v: Value) -> None:
        if v.number not in seen:
            seen.add(v.number)
            for one in v.inputs:
                walk(one)
            order.append(v)

    for v in values:
        walk(v)
    return order
