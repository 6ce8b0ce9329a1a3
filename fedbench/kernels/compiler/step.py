"""The text of one step's gradient, for numba: a function over blocks of WIDTH samples, every size written as a number.

Arrays of samples lie in blocks: one feature of sixteen samples, the next feature of them, and so on; then the next sixteen samples.
    q_h_items   rows of a table, one for each sample        g_items    their gradient, or that of a tensor
    p_h_user    a tensor without samples                    acts       values of samples that are kept, ACTS numbers for each
    label, weight, rows: see Batch                          tmp        values without samples
    numbers     the loss's constants: another value of a penalty is no other kernel
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from fedbench.kernels.compiler.graph import Graph, Index, Value, layout, linear, plus, same_numbers, source, strides, times
from fedbench.kernels.compiler.schedule import BEFORE, LOOP, SUM, Affine, Schedule
from fedbench.kernels.vectors import WIDTH

SYMBOLS = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
LANES = {
    "abs": "magnitude({0})", "pick": "pick({0}, {1}, {2}, {3})", "relu": "pick({0}, kind(0), {0}, kind(0))", "min": "least({0}, {1})",
    "max": "most({0}, {1})", "sqrt": "root({0})", "exp": "exponential({0})", "log": "logarithm({0})", "log1p": "log1p({0})",
    "sigmoid": "sigmoid({0})", "tanh": "hyperbolic_tangent({0})", "sign": "sign({0})", "sin": "sine({0})", "cos": "cosine({0})",
    "copy": "{0}",
}  # fmt: skip
"""functions of Lanes; a number may stand in place of any argument"""
PLAIN = {
    "abs": "abs({0})", "pick": "({2} if {0} > {1} else {3})", "relu": "max({0}, kind(0))", "min": "min({0}, {1})", "max": "max({0}, {1})",
    "sqrt": "np.sqrt({0})", "exp": "np.exp({0})", "log": "np.log({0})", "log1p": "np.log1p({0})", "tanh": "np.tanh({0})",
    "sigmoid": "(kind(1) / (kind(1) + np.exp(-({0}))))", "sign": "np.sign({0})", "sin": "np.sin({0})", "cos": "np.cos({0})", "copy": "{0}",
}  # fmt: skip
"""functions of numbers"""
LITERAL = (0.0, 1.0, -1.0, 2.0, 0.5)
"""constants that are written as they are"""


def array_name(key: tuple[str, str]) -> str:
    return f"{key[0][0]}_{key[1]}"


class Constants:
    """Numbers of the loss, which kernels take as an array."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def text(self, value: float) -> str:
        if value in LITERAL:
            return f"kind({value!r})"
        for at, one in enumerate(self.values):
            if one == value or (math.isnan(one) and math.isnan(value)):
                return f"numbers[{at}]"
        self.values.append(value)
        return f"numbers[{len(self.values) - 1}]"


class Step:
    """Makes the text; afterwards `tables`, `params` say which arrays it reads, `acts` and `tmp` how much room it needs."""

    def __init__(self, name: str, graph: Graph, outputs: dict[str, Value], constants: Constants, fused: Sequence[str] = ()) -> None:
        """fused: tables that take their Adam step as the gradient is made, where nothing reads the rows afterwards."""
        self.name, self.outputs, self.constants = name, outputs, constants
        self.fused = self.fitting(Schedule(graph, outputs, fused), fused)
        self.plan = Schedule(graph, outputs, self.fused)
        self.acts = self.tmp = 0
        self.most_outs = WIDTH
        self.tables: dict[tuple[str, str], int] = {}
        self.params: dict[tuple[str, str], int] = {}
        self.place: dict[int, tuple[str, str, Any]] = {}
        """where made values are: ("lane", array, feature), ("uniform", array, place) or ("variable", name, 0)"""
        self.now: dict[int, str] = {}
        """variables of the pass that is being written"""
        self.direct: dict[int, tuple[str, int, int]] = {}
        """values that are written right where a gradient belongs"""
        self.text = self.written()

    @staticmethod
    def fitting(plan: Schedule, wanted: Sequence[str]) -> tuple[str, ...]:
        """Of several tables one can step while its gradient is made; a second only if that does not read the first's rows."""
        found: list[str] = []
        for name in wanted:
            reads = set().union(*(plan.reads(piece.value) for piece in plan.pieces if piece.name == name))
            if not any(("held", other) in reads for other in found):
                found.append(name)
        return tuple(found)

    # ---- places --------------------------------------------------------------------------------------------------------

    def room(self, n: int) -> int:
        self.acts += n
        return self.acts - n

    def aside(self, n: int) -> int:
        self.tmp += -(-n // WIDTH) * WIDTH
        return self.tmp - -(-n // WIDTH) * WIDTH

    def width(self, name: str) -> int:
        """Numbers in a row of an output."""
        return self.outputs[name].size

    def lying(self, v: Value) -> tuple[str, int, str]:
        """Array, first feature and features a block of a value of samples whose features lie one after another."""
        found = layout(v)
        assert found is not None
        at, first, _ = found
        if at.op == "table":
            self.tables[at.how["key"]] = at.size
            return f"q_{array_name(at.how['key'])}", first, str(at.size)
        if at.op == "sample":
            return at.how["key"], 0, "1"
        kind, array, base = self.place[at.number]
        assert kind == "lane", at
        return array, base + first, "ACTS" if array == "acts" else str(self.width(array[2:]))

    def flat(self, v: Value) -> tuple[str, int, list[int]]:
        """Array, first place and strides of a value without samples."""
        found = layout(v)
        assert found is not None
        at, first, by = found
        if at.op == "param" and at.how["key"][0] == "batch":
            raise NotImplementedError("the number of samples as a weight of a layer")
        if at.op == "param":
            self.params[at.how["key"]] = at.size
            return f"p_{array_name(at.how['key'])}", first, by
        kind, array, base = self.place[at.number]
        if kind == "variable":
            to = self.aside(1)
            self.lines.append(f"    tmp[{to}] = {array}")
            return "tmp", to, by
        return array, base + first, by

    # ---- expressions -----------------------------------------------------------------------------------------------------

    def x(self, v: Value, index: Sequence[Index], lane: bool) -> str:
        """The text of an element of v; lane: of sixteen samples, in a pass."""
        if v.op in ("view", "flat"):
            return self.x(v.args[0], v.how["fn"](tuple(index)), lane)
        if v.op == "const":
            return self.constants.text(v.args[0])
        if v.number in self.now:
            return self.now[v.number]
        at = linear([one for one in index if one is not None], v.features)
        if v.op == "table":
            self.tables[v.how["key"]] = v.size
            name = array_name(v.how["key"])
            return f"take(q_{name}, x_q_{name} + {times(at, WIDTH)})"
        if v.op == "sample":
            return f"take({v.how['key']}, s)"
        if v.op == "param" and v.how["key"][0] == "batch":
            return v.how["key"][1]
        if v.op == "param":
            self.params[v.how["key"]] = v.size
            return f"{'repeat(' if lane else ''}p_{array_name(v.how['key'])}{f', {at})' if lane else f'[{at}]'}"
        if v.number in self.place:
            kind, array, base = self.place[v.number]
            if kind == "variable":
                return array
            if kind == "lane":
                return f"take({array}, x_{array} + {times(plus(base, at), WIDTH)})"
            return f"repeat({array}, {plus(base, at)})" if lane else f"{array}[{plus(base, at)}]"
        assert v.op == "ew", f"{v} was not made"
        return self.applied(v, index, lane)

    def applied(self, v: Value, index: Sequence[Index], lane: bool) -> str:
        args = []
        for one in v.args:
            skip = len(v.shape) - len(one.shape)
            here = [0 if n == 1 and v.shape[skip + axis] != 1 else index[skip + axis] for axis, n in enumerate(one.shape)]
            args.append(self.x(one, here, lane))
        if v.f in SYMBOLS:
            return f"({args[0]} {SYMBOLS[v.f]} {args[1]})"
        if v.f == "neg":
            return f"(kind(0) - {args[0]})"
        if lane and v.f == "exp" and (inner := minus_magnitude(v)) is not None:
            return f"exp_minus({self.x(inner, index[len(index) - len(inner.shape) :], lane)})"
        if lane and v.f == "log1p" and source(v.args[0]).f == "exp" and minus_magnitude(source(v.args[0])) is not None:
            return f"log_one_plus({args[0]})"  # of a number from 0 to 1, for which the series is made
        return (LANES if lane else PLAIN)[v.f].format(*args)

    # ---- statements ------------------------------------------------------------------------------------------------------

    def looped(self, shape: Sequence[int | str], body: Callable[[tuple[Index, ...]], list[str]], indent: str) -> list[str]:
        """A body within loops over all features."""
        out: list[str] = []
        index: list[Index] = []
        for axis, n in enumerate(shape):
            if not isinstance(n, int):
                index.append(None)
            elif n == 1:
                index.append(0)
            else:
                out.append(f"{indent}for i{axis} in range({n}):")
                indent += "    "
                index.append(f"i{axis}")
        return out + [indent + line for line in body(tuple(index))]

    def written(self) -> str:
        self.lines: list[str] = []
        self.find_direct()
        plan = self.plan
        for stage in range(plan.last + 1):
            for v in plan.statements:
                if plan.stage[v.number] == (stage, BEFORE):
                    self.before(v)
            self.write_pass(stage)
        for name, v in self.outputs.items():
            if not v.lane and name != "loss":
                self.store(v, f"g_{name}", 0, strides(v.features))
        loss = self.x(self.outputs["loss"], [0] * len(self.outputs["loss"].shape), False)
        moments = [text for name in self.fused for text in (f"m_{name}", f"v_{name}", f"pace_{name}")]
        given = [
            "blocks",
            *self.arguments(),
            *moments,
            "label",
            "weight",
            "rows",
            "acts",
            "tmp",
            "spare",
            "nothing",
            "ones",
            "numbers",
            "size",
            "touched",
        ]
        head = [
            f"@compiled({INLINE})",
            f"def {self.name}({', '.join(given)}{', fresh, tiny' if self.fused else ''}):",
            "    kind = acts.dtype.type",
        ]
        return "\n".join([*head, *self.lines, f"    return {loss}", "", ""])

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
            vector = sum(n > 1 for n in of.features) <= 1 and sum(n > 1 for n in v.features) <= 1
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
        elif v.op in ("prod", "column_sums"):
            self.products(v)
        elif v.op == "uniform_mm":
            a, b = v.args
            m, n, k = int(v.shape[0]), int(v.shape[1]), int(a.shape[1])
            at = self.aside(m * n)
            self.place[v.number] = ("uniform", "tmp", at)
            i, j = "i0" if m > 1 else 0, "i1" if n > 1 else 0
            summed = f"total += {self.x(a, (i, 'k'), False)} * {self.x(b, ('k', j), False)}"
            self.lines += [f"    for i0 in range({m}):", f"        for i1 in range({n}):", "            total = kind(0)"]
            self.lines += [
                f"            for k in range({k}):",
                f"                {summed}",
                f"            tmp[{at} + i0 * {n} + i1] = total",
            ]
        elif v.op == "feature_sum":
            self.uniform_sum(v)
        elif v.size == 1 and v.op != "cat":
            self.lines.append(f"    u{v.number} = kind({self.x_of(v, [0] * len(v.shape), False)})")
            self.place[v.number] = ("variable", f"u{v.number}", 0)
        else:
            at = self.aside(v.size)
            self.store(v, "tmp", at, strides(v.features), own=True)
            self.place[v.number] = ("uniform", "tmp", at)

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
                "total = kind(0)",
                f"for k in range({of.shape[axis]}):",
                f"    total += {self.x(of, inner, False)}",
                f"tmp[{plus(at, to)}] = total",
            ]

        self.lines += self.looped(v.shape, body, "    ")
        self.place[v.number] = ("uniform", "tmp", at)

    def mix(self, v: Value, affine: Affine) -> None:
        """Layers of a network over the whole batch."""
        n = int(v.shape[1])
        self.most_outs = max(self.most_outs, n)
        if v.number in self.direct:
            array, at, wide = self.direct[v.number]
            by = str(wide)
        else:
            array, at, by = "acts", self.room(n), "ACTS"
            self.place[v.number] = ("lane", "acts", at)
        begin = "nothing, 0, 0"
        if affine.bias is not None:
            bias, first, steps = self.flat(affine.bias)
            if n > 1 and steps != [1]:
                to = self.aside(n)
                self.store(affine.bias, "tmp", to, [1])
                bias, first = "tmp", to
            begin = f"{bias}, {first}, 0"
        for k, one in enumerate(affine.mixes):
            a, weights = one.args
            values, feature, block = self.lying(a)
            w, w_at, (by_in, by_out) = self.flat(weights)
            name = ("mix_onto" if k else "mix") + ("_positive" if affine.relu and k == len(affine.mixes) - 1 else "" if k else "_all")
            start = f"{array}, {at * WIDTH}, {by} * {WIDTH}" if k else begin
            self.lines.append(
                f"    {name}({values}, {feature * WIDTH}, {block} * {WIDTH}, {a.shape[1]}, {array}, {at * WIDTH}, {by} * {WIDTH}, {n}, "
                f"{start}, {w}, {w_at}, {by_out}, {by_in}, blocks)"
            )

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
        self.lines.append(f"    {array}[{at}:{at + int(m) * int(n)}] = 0")
        self.lines.append(
            f"    products({left}, {first * WIDTH}, {step} * {WIDTH}, {m}, {right}, {feature * WIDTH}, {block} * {WIDTH}, {n}, "
            f"{array}, {at}, blocks, spare)"
        )

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
        if self.place.get(source(v).number) == ("uniform", array, at) and not own:
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
                lines += self.in_pass(v, indent)
            elif plan.stage[v.number] == (stage + 1, SUM):
                sums.append(v)
                lines.append(f"{indent}t{v.number} = t{v.number} + {self.x(v.args[0], (None,), True)}")
        pieces = [piece for piece, at in zip(plan.pieces, plan.piece_stage, strict=True) if at == stage]
        for piece in pieces:
            if piece.name not in self.fused and piece.value.number not in self.direct:
                lines += self.vector(piece.value, f"g_{piece.name}", piece.offset, indent)
        for name in self.fused:
            for piece in pieces:
                if piece.name == name:
                    lines += self.adam(piece.value, name, piece.offset, indent)
        if not lines:
            return
        text = "\n".join(lines)
        self.lines += [f"    t{v.number} = spread(kind(0))" for v in sums]
        self.lines.append("    for b in range(blocks):")
        if ", s)" in text:
            self.lines.append(f"{indent}s = b * {WIDTH}")
        wide = {"acts": "ACTS"} | {f"q_{array_name(key)}": str(n) for key, n in self.tables.items()}
        wide |= {f"g_{name}": str(self.width(name)) for name in self.outputs}
        self.lines += [f"{indent}x_{array} = b * ({n} * {WIDTH})" for array, n in wide.items() if f"x_{array} " in text]
        self.lines += lines
        for v in sums:
            self.lines.append(f"    u{v.number} = across(t{v.number})")
            self.place[v.number] = ("variable", f"u{v.number}", 0)
        self.now = {}

    def in_pass(self, v: Value, indent: str) -> list[str]:
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
        if v.op == "feature_sum" and v.size == 1:
            lines = self.summed(v, indent)
            self.now[v.number] = f"f{v.number}"
        elif v.op == "feature_sum":
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
        if v.number in self.plan.kept:
            at = self.room(1)
            lines.append(f"{indent}put(acts, x_acts + {at * WIDTH}, lanes_of({self.now[v.number]}))")
            self.place[v.number] = ("lane", "acts", at)
        return lines

    def summed(self, v: Value, indent: str) -> list[str]:
        """A sum over features, four sums at a time: one alone would wait for each of its products."""
        of, axis = v.args[0], v.how["axis"]
        n, name = int(of.shape[axis]), f"f{v.number}"
        four = min(4, n)

        def at(i: int | str) -> str:
            index = [None if not isinstance(size, int) else i if here == axis else 0 for here, size in enumerate(of.shape)]
            return self.x(of, index, True)

        lines = [f"{indent}{name}_{r} = {at(r)}" for r in range(four)]
        whole = n // four * four
        if whole > four:
            lines.append(f"{indent}for j in range({four}, {whole}, {four}):")
            lines += [f"{indent}    {name}_{r} = {name}_{r} + {at(plus('j', r))}" for r in range(four)]
        lines += [f"{indent}{name}_0 = {name}_0 + {at(i)}" for i in range(whole, n)]
        total = f"({name}_0 + {name}_1) + ({name}_2 + {name}_3)" if four == 4 else " + ".join(f"{name}_{r}" for r in range(four))
        return [*lines, f"{indent}{name} = lanes_of({total})"]

    def summed_vector(self, v: Value, indent: str) -> list[str]:
        of, axis, at = v.args[0], v.how["axis"], self.room(v.size)

        def body(index: tuple[Index, ...]) -> list[str]:
            def element(k: int | str) -> str:
                return self.x(of, [*index[:axis], k, *index[axis:]], True)

            to = plus(at, linear([one for one in index if one is not None], v.features))
            lines = [f"total = lanes_of({element(0)})", f"for k in range(1, {of.shape[axis]}):", f"    total = total + {element('k')}"]
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
        shape = [LANE_INDEX if not isinstance(size, int) else size for size in v.shape]

        def slope(i: int | str) -> str:
            index = [None if size is LANE_INDEX else 0 if size == 1 else i for size in shape]
            return f"lanes_of({self.x(v, index, True)})"

        assert sum(size is not LANE_INDEX and size > 1 for size in shape) <= 1
        out: list[str] = []
        for test, how in (("if fresh:", "first_steps"), ("else:", "steps_of")):
            out.append(f"{indent}{test}")
            if n > 1:
                out += [f"{indent}    for j in range(0, {n // 2 * 2}, 2):", f"{indent}        y = x_{q} + (j + {offset}) * {WIDTH}"]
                slopes = f"{slope('j')}, {slope('(j + 1)')}"
                out += [f"{indent}        y0, y1 = {how}(m_{name}, v_{name}, y, {slopes}, pace_{name}, tiny)"]
                out += [
                    f"{indent}        put({q}, y, take({q}, y) - y0)",
                    f"{indent}        put({q}, y + {WIDTH}, take({q}, y + {WIDTH}) - y1)",
                ]
            if n % 2:
                out.append(f"{indent}    y = x_{q} + {(offset + n - 1) * WIDTH}")
                if how == "first_steps":
                    out += [f"{indent}    put(m_{name}, y, spread(kind(0)))", f"{indent}    put(v_{name}, y, spread(kind(0)))"]
                out += [f"{indent}    y2, y3 = moments(m_{name}, v_{name}, y, {slope(n - 1)}, tiny)"]
                out += [f"{indent}    put({q}, y, take({q}, y) - pace_{name}[0] * y2 / (square_root(y3) + pace_{name}[1]))"]
        return out


LANE_INDEX: Any = object()
INLINE = ""


def minus_magnitude(v: Value) -> Value | None:
    """x of exp(-|x|)."""
    inner = source(v.args[0])
    if inner.f == "neg" and source(inner.args[0]).f == "abs" and v.shape == v.args[0].shape == inner.shape == inner.args[0].shape:
        return inner.args[0]
    return None
