"""The text of one step's gradient, for numba: a function over blocks of WIDTH samples, every size written as a number.

Arrays of samples lie in blocks: one feature of sixteen samples, the next feature of them, and so on; then the next sixteen samples.
    q_h_items   rows of a table, one for each sample        g_items    their gradient, or that of a tensor
    p_h_user    a tensor without samples                    acts       values of samples that are kept, ACTS numbers for each
    label, weight, rows: see Batch                          tmp        values without samples
    numbers     the loss's constants: another value of a penalty is no other kernel
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

from fedbench.kernels.compiler.expressions import Constants, Expressions, array_name
from fedbench.kernels.compiler.graph import Graph, Value, same_numbers, source
from fedbench.kernels.compiler.indices import Index, linear, plus, strides, times
from fedbench.kernels.compiler.keeping import Kept
from fedbench.kernels.compiler.schedule import BEFORE, LOOP, SUM, Affine, Schedule, reached
from fedbench.kernels.vectors import WIDTH

REDUCED = {"feature_sum": "({0} + {1})", "feature_max": "most({0}, {1})"}
PLAIN_REDUCED = {"feature_sum": "({0} + {1})", "feature_max": "max({0}, {1})"}
"""how values over features become one, those of sixteen samples and those of none"""


class Step(Expressions):
    """Makes the text; afterwards `tables`, `params` say which arrays it reads, `acts` and `tmp` how much room it needs."""

    def __init__(
        self,
        name: str,
        graph: Graph,
        outputs: dict[str, Value],
        constants: Constants,
        fused: Sequence[str] = (),
        found: Kept | None = None,
    ) -> None:
        """fused: tables that take their Adam step as the gradient is made, where nothing reads the rows afterwards."""
        super().__init__(outputs, constants)
        self.name = name
        self.found = found or Kept()
        self.acts, self.tmp = self.found.acts, self.found.tmp
        self.fused = self.fitting(Schedule(graph, outputs, fused, found), fused)
        self.plan = Schedule(graph, outputs, self.fused, found)  # again: tables that step at once have their gradient in the last pass
        self.most_outs = WIDTH
        self.direct: dict[int, tuple[str, int, int]] = {}
        """values that are written right where a gradient belongs"""
        self.awake: dict[int, int] = {}
        """layers with slopes of awake units alone -> where the list of these units is"""
        self.listed = 0
        """room that lists of awake units need"""
        self.text = self.written()

    @staticmethod
    def fitting(plan: Schedule, wanted: Sequence[str]) -> tuple[str, ...]:
        """The tables that can step while their gradient is made: a further one only if that does not read rows of those before it."""
        found: list[str] = []
        for name in wanted:
            reads = set().union(*(plan.reads(piece.value) for piece in plan.pieces if piece.name == name))
            if not any(("held", other) in reads for other in found):  # the rows that it reads would have moved already
                found.append(name)
        return tuple(found)

    # ---- statements ------------------------------------------------------------------------------------------------------

    def written(self) -> str:
        self.find_direct()  # before any statement: it decides where results are written
        plan = self.plan
        for v in reached(plan.outputs.values()):
            if v.number in self.found.there:
                room = ("lane", "acts") if v.lane else ("uniform", "tmp")
                self.place[v.number] = (*room, self.found.slots[v.number])
        for stage in range(plan.last + 1):
            for v in plan.statements:
                if plan.stage[v.number] == (stage, BEFORE):
                    first = len(self.lines)  # what the step before may have left is made under a condition
                    self.before(v)
                    if v.number in self.found.once:
                        self.lines[first:] = ["    if anew:", *(f"    {line}" for line in self.lines[first:])]
            self.write_pass(stage)
        for name, v in self.outputs.items():
            if not v.lane and name != "loss":
                self.store(v, f"g_{name}", 0, strides(v.features))
        ending = self.ending()
        head = [f"@compiled({INLINE})", f"def {self.name}({', '.join(self.given())}):", "    kind = acts.dtype.type"]
        return "\n".join([*head, *self.lines, ending, "", ""])

    def ending(self) -> str:
        if "loss" not in self.outputs:
            return "    return kind(0)"
        loss = self.x(self.outputs["loss"], [0] * len(self.outputs["loss"].shape), False)
        return f"    return {loss}"

    def given(self) -> list[str]:
        """Names of what the function takes, in order."""
        moments = [text for name in self.fused for text in (f"m_{name}", f"v_{name}", f"pace_{name}")]
        samples, room = ["label", "weight", "rows"], ["acts", "tmp", "spare", "nothing", "ones", "numbers", "size", "touched"]
        further = [*(["awake"] if self.listed else []), *(["anew"] if self.found.once else []), *(["fresh", "tiny"] if self.fused else [])]
        return ["blocks", *self.arguments(), *moments, *samples, *room, *further]

    def arguments(self) -> list[str]:
        """Arrays of rows, tensors and gradients that the function takes."""
        gradients = [f"g_{name}" for name in self.outputs if name != "loss" and name not in self.fused]
        tables = {**self.tables, **{("held", name): self.width(name) for name in self.fused}}
        return [f"q_{array_name(key)}" for key in sorted(tables)] + [f"p_{array_name(key)}" for key in sorted(self.params)] + gradients

    def find_direct(self) -> None:
        """Products and layers whose result is a gradient, or a part of one that lies together, are written there at once."""

        def look(v: Value, array: str, at: int, by: Sequence[int]) -> None:
            if v.op == "cat":
                for (low, _), one in zip(v.how["bounds"], v.args, strict=True):
                    look(one, array, at + low * by[v.how["axis"]], by)
                return
            if v.op == "flat" and list(by) == strides(v.features):
                look(v.args[0], array, at, strides(v.args[0].features))
                return
            of = source(v)
            if of.op not in ("prod", "column_sums") or self.plan.uses[of.number] != 1 or of.size != v.size:
                return
            vector = sum(n > 1 for n in of.features) <= 1 and sum(n > 1 for n in v.features) <= 1  # kernels write one number after another
            steps = [one for one, n in zip(by, v.features, strict=True) if n > 1]
            if (v is of and list(by) == strides(v.features)) or (vector and steps in ([1], [])):
                self.direct[of.number] = (array, at, 0)
                self.place[of.number] = ("uniform", array, at)

        for name, v in self.outputs.items():
            if not v.lane and name != "loss":
                look(v, f"g_{name}", 0, strides(v.features))
        for piece in self.plan.pieces:
            v, alone = piece.value, self.plan.uses.get(piece.value.number, 0) == 1
            if v.number in self.plan.affine and alone and piece.name not in self.fused:
                self.direct[v.number] = (f"g_{piece.name}", piece.offset, self.width(piece.name))

    def before(self, v: Value) -> None:
        """A statement that comes before a pass."""
        if v.number in self.plan.affine:
            self.mix(v, self.plan.affine[v.number])
            if any(layer is v for layer in self.plan.gates.values()):  # its gradients follow: list the units that are awake, once
                self.find_awake(v)
        elif v.op in ("prod", "column_sums"):
            self.products(v)
        elif v.op in ("gather", "scatter"):
            self.categories(v)
        elif v.op == "uniform_mm":
            a, b = v.args
            m, n, k = int(v.shape[0]), int(v.shape[1]), int(a.shape[1])
            at = self.kept_at(v)
            self.place[v.number] = ("uniform", "tmp", at)
            i, j = "i0" if m > 1 else 0, "i1" if n > 1 else 0
            summed = f"total += {self.x(a, (i, 'k'), False)} * {self.x(b, ('k', j), False)}"
            self.lines += [f"    for i0 in range({m}):", f"        for i1 in range({n}):", "            total = kind(0)"]
            self.lines += [
                f"            for k in range({k}):",
                f"                {summed}",
                f"            tmp[{at} + i0 * {n} + i1] = total",
            ]
        elif v.op in REDUCED:
            self.uniform_sum(v)
        elif v.size == 1 and v.op != "cat":  # kind(): numba would widen float32 beside whole numbers
            self.lines.append(f"    u{v.number} = kind({self.x_of(v, [0] * len(v.shape), False)})")
            self.place[v.number] = ("variable", f"u{v.number}", 0)
        else:
            at = self.kept_at(v)
            self.store(v, "tmp", at, strides(v.features), own=True)
            self.place[v.number] = ("uniform", "tmp", at)

    def kept_at(self, v: Value) -> int:
        """Where v goes: among what phases keep for each other, or to room of its own."""
        known = self.found.slots.get(v.number)
        return known if known is not None else self.room(v.size) if v.lane else self.aside(v.size)

    def x_of(self, v: Value, index: Sequence[Index], lane: bool) -> str:
        """The text that makes an element of v, also if v has a place by now."""
        return self.applied(v, index, lane) if v.op == "ew" else self.x(v, index, lane)

    def uniform_sum(self, v: Value) -> None:
        of, axis, at = v.args[0], v.how["axis"], self.aside(v.size)
        out = strides(v.features)

        def body(index: tuple[Index, ...]) -> list[str]:
            inner = [*index[:axis], "k", *index[axis:]]
            to = linear([one for one in index if one is not None], v.features) if out else 0
            return [
                f"total = {self.x(of, [*index[:axis], 0, *index[axis:]], False)}",
                f"for k in range(1, {of.shape[axis]}):",
                f"    total = {PLAIN_REDUCED[v.op].format('total', self.x(of, inner, False))}",
                f"tmp[{plus(at, to)}] = total",
            ]

        self.lines += self.looped(v.shape, body, "    ")
        self.place[v.number] = ("uniform", "tmp", at)

    def mix(self, v: Value, affine: Affine) -> None:
        """Layers of a network over the whole batch."""
        n = int(v.shape[1])
        self.most_outs = max(self.most_outs, n)  # `nothing` is so many zeros: where a layer without a bias begins
        gate = self.plan.below_gate.get(v.number)
        if gate is not None:  # with no unit awake above, no gradients arrive and none are made
            above = [f"few_{mix.args[0].number}" for mix in affine.mixes if mix.args[0].number in self.plan.gates]
            asleep = f" if {' + '.join(above)} else 0" if len(above) == len(affine.mixes) else ""
            self.lines.append(f"    few_{gate.number} = few_{self.plan.gates[gate.number].number}{asleep}")
        if v.number in self.direct:
            array, at, wide = self.direct[v.number]
            by = str(wide)
        else:
            array, at, by = "acts", self.kept_at(v), "ACTS"
            self.place[v.number] = ("lane", "acts", at)
        begin = "nothing, 0, 0"
        onto = affine.base is not None
        if affine.base is not None:
            begin = f"acts, {self.place[affine.base.number][2] * WIDTH}, ACTS * {WIDTH}"
        if affine.bias is not None:
            bias, first, steps = self.flat(affine.bias)
            if n > 1 and steps != [1]:  # mix reads a bias one number after another
                to = self.aside(n)
                self.store(affine.bias, "tmp", to, [1])
                bias, first = "tmp", to
            begin = f"{bias}, {first}, 0"
        for k, one in enumerate(affine.mixes):
            a, weights = one.args
            values, feature, block = self.lying(a)
            w, w_at, (by_in, by_out) = self.flat(weights)
            ins, outs = str(a.shape[1]), str(n)
            if a.number in self.plan.gates or gate is not None:
                ins, outs, (w, w_at, by_out, by_in) = self.of_awake(one, gate, (w, w_at, by_out, by_in))  # type: ignore[assignment]
            onto |= k > 0  # each further product is added to what the first has written
            name = ("mix_onto" if onto else "mix") + ("_positive" if affine.relu and k == len(affine.mixes) - 1 else "" if onto else "_all")
            start = f"{array}, {at * WIDTH}, {by} * {WIDTH}" if k else begin
            self.lines.append(
                f"    {name}({values}, {feature * WIDTH}, {block} * {WIDTH}, {ins}, {array}, {at * WIDTH}, {by} * {WIDTH}, {outs}, "
                f"{start}, {w}, {w_at}, {by_out}, {by_in}, blocks)"
            )

    def find_awake(self, layer: Value) -> None:
        """The units of a layer that are not 0 for all samples: only these have slopes. They are listed, and slopes lie in that order."""
        n, number, (_, array, at) = int(layer.shape[1]), layer.number, self.place[layer.number]
        first, to = self.listed, self.aside(n)  # tmp: sums that show which units are 0 throughout
        self.awake[number], self.listed = first, first + n
        self.lines.append(
            f"    few_{number} = list_awake({array}, {at * WIDTH}, ACTS * {WIDTH}, {n}, blocks, ones, tmp, {to}, awake, {first})"
        )

    def of_awake(self, mix: Value, gate: Value | None, weights: tuple[Any, ...]) -> tuple[str, str, tuple[str, ...]]:
        """How many inputs and outputs of a product of a layer are awake, and its weights among these: array, place and steps."""
        a, gates, (array, at, by_out, by_in) = mix.args[0], self.plan.gates, weights
        n, count, name = int(mix.shape[1]), int(a.shape[1]), f"w_{mix.number}"
        ins, first_in = (f"few_{a.number}", self.awake[gates[a.number].number]) if a.number in gates else (str(count), -1)
        outs, first_out = (f"few_{gate.number}", self.awake[gates[gate.number].number]) if gate is not None else (str(n), -1)
        to = self.aside(n * count)  # weights of awake units are copied side by side, if any unit sleeps
        self.lines += [
            f"    {name}, {name}_at, {name}_out, {name}_in = {array}, {at}, {by_out}, {by_in}",
            f"    if {ins} < {count} or {outs} < {n}:",
            f"        {name}, {name}_at, {name}_out, {name}_in = tmp, {to}, 1, {outs}",
            f"        listed_weights({array}, {at}, {by_out}, {by_in}, awake, {first_out}, {outs}, {first_in}, {ins}, tmp, {to})",
        ]
        return ins, outs, (name, f"{name}_at", f"{name}_out", f"{name}_in")

    def products(self, v: Value) -> None:
        """Sums over samples of products."""
        a, b = v.args if v.op == "prod" else (None, v.args[0])
        m, n = v.shape if v.op == "prod" else (1, v.shape[0])
        if v.number in self.direct:
            array, at, _ = self.direct[v.number]
        else:
            array, at = "tmp", self.aside(int(m) * int(n))
            self.place[v.number] = ("uniform", "tmp", at)
        right, feature, block = self.lying(b)
        left, first, step = self.lying(a) if a is not None else ("ones", 0, "0")
        gates = self.plan.gates
        ups = str(m) if a is None or source(a).number not in gates else f"few_{source(a).number}"
        count = str(n) if source(b).number not in gates else f"few_{source(b).number}"
        self.lines.append(f"    {array}[{at}:{at + int(m) * int(n)}] = 0")  # `products` adds to what is there
        self.lines.append(
            f"    products({left}, {first * WIDTH}, {step} * {WIDTH}, {ups}, {right}, {feature * WIDTH}, {block} * {WIDTH}, {count}, "
            f"{array}, {at}, blocks, spare)"
        )
        if a is not None and source(a).number in gates:
            listed = f"awake, {self.awake[gates[source(a).number].number]}"
            self.lines += [f"    if {ups} < {m}:", f"        part_rows({array}, {at}, {at}, {m}, {ups}, {n}, {listed})"]
        if source(b).number in gates:
            listed = f"awake, {self.awake[gates[source(b).number].number]}"
            self.lines += [f"    if {count} < {n}:", f"        for u in range({int(m) - 1}, -1, -1):"]  # backwards: rows widen in place
            self.lines += [f"            part_rows({array}, {at} + u * {count}, {at} + u * {n}, {n}, {count}, 1, {listed})"]

    def categories(self, v: Value) -> None:
        """Rows by the category of each sample, taken from a tensor or added to one, sample by sample."""
        of, category = v.args
        numbers, feature, block = self.lying(category)  # no vectors: two samples of a block may share a category
        every = ["for b in range(blocks):", f"    for s in range({WIDTH}):"]
        row = f"int({numbers}[b * {block} * {WIDTH} + {feature * WIDTH} + s])"
        if v.op == "gather":
            (array, first, (by, step)), n, at = self.flat(of), int(v.shape[1]), self.room(v.size)
            self.place[v.number] = ("lane", "acts", at)
            text = f"acts[b * ACTS * {WIDTH} + ({at} + i) * {WIDTH} + s] = {array}[{first} + c * {by} + i * {step}]"
        else:
            (array, first, per), n, at = self.lying(of), of.size, self.aside(v.size)
            self.place[v.number] = ("uniform", "tmp", at)
            self.lines.append(f"    tmp[{at}:{at + v.size}] = 0")
            text = f"tmp[{at} + c * {n} + i] += {array}[b * {per} * {WIDTH} + ({first} + i) * {WIDTH} + s]"
        self.lines += ["    " + line for line in (*every, f"        c = {row}", f"        for i in range({n}):", f"            {text}")]

    def store(self, v: Value, array: str, at: int, by: Sequence[int], own: bool = False) -> None:
        """A value without samples to array[at + …]; own: it is being made, and has no place yet."""
        if v.op == "cat":
            for (low, _), one in zip(v.how["bounds"], v.args, strict=True):
                self.store(one, array, at + low * by[v.how["axis"]], by)
            return
        if v.op == "flat" and list(by) == strides(v.features):
            self.store(v.args[0], array, at, strides(v.args[0].features))
            return
        if v.op == "view" and (of := same_numbers(v)) is not None:
            left = iter([step for step, n in zip(by, v.features, strict=True) if n > 1])
            self.store(of, array, at, [next(left) if n > 1 else 0 for n in of.features])
            return
        if self.place.get(source(v).number) == ("uniform", array, at) and not own:  # it was written there, see find_direct
            return

        def body(index: tuple[Index, ...]) -> list[str]:
            to: int | str = at
            for one, step in zip(index, by, strict=True):
                to = plus(to, times(one, step))  # type: ignore[arg-type]
            return [f"{array}[{to}] = {self.x_of(v, index, False) if own else self.x(v, index, False)}"]

        self.lines += self.looped(v.shape, body, "    ")

    # ---- a pass over the samples -----------------------------------------------------------------------------------------

    def write_pass(self, stage: int) -> None:
        plan, indent = self.plan, "        "
        lines: list[str] = []
        sums: list[Value] = []
        self.now = {}
        for v in plan.statements:
            if plan.stage[v.number] == (stage, LOOP):
                made = self.in_pass(v, indent)
                if v.number in self.found.once:
                    made = [f"{indent}if anew:", *(f"    {line}" for line in made)]
                    del self.now[v.number]  # numba knows no variable of one branch alone
                lines += made
            elif plan.stage[v.number] == (stage + 1, SUM):
                sums.append(v)
                lines.append(f"{indent}t{v.number} = t{v.number} + {self.x(v.args[0], (None,), True)}")
        pieces = [piece for piece, at in zip(plan.pieces, plan.piece_stage, strict=True) if at == stage]
        for piece in pieces:
            if piece.name not in self.fused and piece.value.number not in self.direct:
                lines += self.vector(piece.value, f"g_{piece.name}", piece.offset, indent)
        for name in self.fused:  # last: it moves rows that all else in this pass reads
            for piece in pieces:
                if piece.name == name:
                    lines += self.adam(piece.value, name, piece.offset, indent)
        if not lines:
            return
        text = "\n".join(lines)
        self.lines += [f"    t{v.number} = spread(kind(0))" for v in sums]  # sixteen sums each; one only after the pass
        self.lines.append("    for b in range(blocks):")
        if ", s)" in text:
            self.lines.append(f"{indent}s = b * {WIDTH}")
        wide = {"acts": "ACTS"} | {f"q_{array_name(key)}": str(n) for key, n in self.tables.items()}  # x_array: where block b begins in it
        wide |= {f"g_{name}": str(self.width(name)) for name in self.outputs}
        self.lines += [f"{indent}x_{array} = b * ({n} * {WIDTH})" for array, n in wide.items() if f"x_{array} " in text]
        self.lines += lines
        for v in sums:
            self.lines.append(f"    u{v.number} = across(t{v.number})")
            self.place[v.number] = ("variable", f"u{v.number}", 0)
        self.now = {}

    def in_pass(self, v: Value, indent: str) -> list[str]:
        if v.number in self.plan.gates:
            return self.gate(v, indent)
        if v.op == "cat":
            at = self.room(v.size)
            self.place[v.number] = ("lane", "acts", at)
            by = strides(v.features)
            axis = v.how["axis"] - 1
            return [
                line
                for (low, _), one in zip(v.how["bounds"], v.args, strict=True)
                for line in self.vector(one, "acts", at + low * by[axis], indent, by)
            ]
        if v.op in REDUCED and v.size == 1:
            lines = self.summed(v, indent)
            self.now[v.number] = f"f{v.number}"
        elif v.op in REDUCED:
            return self.summed_vector(v, indent)
        elif v.size == 1:
            index = [None if not isinstance(n, int) else 0 for n in v.shape]
            lines = [f"{indent}v{v.number} = lanes_of({self.x_of(v, index, True)})"]
            self.now[v.number] = f"v{v.number}"
        else:
            at = self.room(v.size)
            lines = self.vector(v, "acts", at, indent, own=True)
            self.place[v.number] = ("lane", "acts", at)
            return lines
        if v.number in self.plan.kept or v.number in self.found.slots:
            at = self.kept_at(v)
            lines.append(f"{indent}put(acts, x_acts + {at * WIDTH}, lanes_of({self.now[v.number]}))")
            self.place[v.number] = ("lane", "acts", at)
        return lines

    def gate(self, v: Value, indent: str) -> list[str]:
        """Slopes of the units that are awake, one after another."""
        layer, (unit, _, below, _) = self.plan.gates[v.number], v.args
        at, few, first = self.room(v.size), f"few_{v.number}", self.awake[layer.number]
        listed = below.number in self.plan.below_gate
        if not listed:
            self.lines.append(f"    {few} = few_{layer.number}")
        slope = self.x(below, (None, "k1" if listed else "i1"), True)
        self.place[v.number] = ("lane", "acts", at)
        return [
            f"{indent}for k1 in range({few}):",
            f"{indent}    i1 = awake[{first} + k1]",
            f"{indent}    put(acts, x_acts + ({at} + k1) * {WIDTH}, "
            f"lanes_of(pick({self.x(unit, (None, 'i1'), True)}, kind(0), {slope}, kind(0))))",
        ]

    def summed(self, v: Value, indent: str) -> list[str]:
        """A sum or maximum over features, four at a time: one alone would wait for each of its terms."""
        of, axis, join = v.args[0], v.how["axis"], REDUCED[v.op].format
        n, name = int(of.shape[axis]), f"f{v.number}"
        four = min(4, n)

        def at(i: int | str) -> str:
            index = [None if not isinstance(size, int) else i if here == axis else 0 for here, size in enumerate(of.shape)]
            return self.x(of, index, True)

        lines = [f"{indent}{name}_{r} = {at(r)}" for r in range(four)]
        whole = n // four * four
        if whole > four:
            lines.append(f"{indent}for j in range({four}, {whole}, {four}):")
            lines += [f"{indent}    {name}_{r} = {join(f'{name}_{r}', at(plus('j', r)))}" for r in range(four)]
        lines += [f"{indent}{name}_0 = {join(f'{name}_0', at(i))}" for i in range(whole, n)]
        parts = [f"{name}_{r}" for r in range(four)]
        total = join(join(*parts[:2]), join(*parts[2:])) if four == 4 else reduce(join, parts)
        return [*lines, f"{indent}{name} = lanes_of({total})"]

    def summed_vector(self, v: Value, indent: str) -> list[str]:
        of, axis, at = v.args[0], v.how["axis"], self.room(v.size)

        def body(index: tuple[Index, ...]) -> list[str]:
            def element(k: int | str) -> str:
                return self.x(of, [*index[:axis], k, *index[axis:]], True)

            to = plus(at, linear([one for one in index if one is not None], v.features))
            lines = [f"total = lanes_of({element(0)})", f"for k in range(1, {of.shape[axis]}):"]
            lines.append(f"    total = {REDUCED[v.op].format('total', element('k'))}")
            return [*lines, f"put(acts, x_acts + {times(to, WIDTH)}, total)"]

        lines = self.looped(v.shape, body, indent)
        self.place[v.number] = ("lane", "acts", at)
        return lines

    def vector(self, v: Value, array: str, at: int, indent: str, by: Sequence[int] | None = None, own: bool = False) -> list[str]:
        """A value of samples to features at … of an array."""
        steps = strides(v.features) if by is None else by

        def body(index: tuple[Index, ...]) -> list[str]:
            to: int | str = at
            for one, step in zip([i for i in index if i is not None], steps, strict=True):
                to = plus(to, times(one, step))
            text = self.x_of(v, index, True) if own else self.x(v, index, True)
            return [f"put({array}, x_{array} + {times(to, WIDTH)}, lanes_of({text}))"]

        return self.looped(v.shape, body, indent)

    def adam(self, v: Value, name: str, offset: int, indent: str) -> list[str]:
        """Adam's step of the rows, two features at a time: by one division for both."""
        n, q = v.size, f"q_{array_name(('held', name))}"
        self.tables[("held", name)] = self.width(name)
        shape = [LANE_INDEX if not isinstance(size, int) else size for size in v.shape]  # marks the axis of samples, which has no index

        def slope(i: int | str) -> str:
            index = [None if size is LANE_INDEX else 0 if size == 1 else i for size in shape]
            return f"lanes_of({self.x(v, index, True)})"

        assert sum(size is not LANE_INDEX and size > 1 for size in shape) <= 1
        out: list[str] = []
        for test, how in (("if fresh:", "first_steps"), ("else:", "steps_of")):  # moments are not cleared: the first step writes them
            out.append(f"{indent}{test}")
            if n > 1:
                out += [f"{indent}    for j in range(0, {n // 2 * 2}, 2):", f"{indent}        y = x_{q} + (j + {offset}) * {WIDTH}"]
                slopes = f"{slope('j')}, {slope('(j + 1)')}"
                out += [f"{indent}        y0, y1 = {how}(m_{name}, v_{name}, y, {slopes}, pace_{name}, tiny)"]
                out += [
                    f"{indent}        put({q}, y, take({q}, y) - y0)",
                    f"{indent}        put({q}, y + {WIDTH}, take({q}, y + {WIDTH}) - y1)",
                ]
            if n % 2:  # the last feature has none to share a division with
                out.append(f"{indent}    y = x_{q} + {(offset + n - 1) * WIDTH}")
                if how == "first_steps":
                    out += [f"{indent}    put(m_{name}, y, spread(kind(0)))", f"{indent}    put(v_{name}, y, spread(kind(0)))"]
                out += [f"{indent}    y2, y3 = moments(m_{name}, v_{name}, y, {slope(n - 1)}, tiny)"]
                out += [f"{indent}    put({q}, y, take({q}, y) - pace_{name}[0] * y2 / (square_root(y3) + pace_{name}[1]))"]
        return out


LANE_INDEX: Any = object()
INLINE = ""
