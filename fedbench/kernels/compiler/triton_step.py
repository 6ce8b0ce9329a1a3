"""The text of one step of one phase, for Triton: passes over tiles of rows, from the same graph as the text for a CPU.

A value of samples is a tensor in registers: [TILE], or [TILE, F] with all features of a sample in one axis, F the next power of two. What
several passes need, and views that registers cannot give (a slice, a turn), go through memory: `acts` [rows, ACTS], `tmp` [TMP].
    q_h_items   rows of a table             p_h_user    a tensor without samples      g_user      its gradient
    r, real     rows of the tile            label, weight, rows: see Batch            l16, w16    0 .. 15 as a row, and as a vector
Threads of a program share that memory. A barrier stands between a write and what reads it, and before rows move that others may read.
Loops say disable_licm: addresses that the compiler moves out of them would stay in registers, and push out what is computed there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fedbench.kernels.compiler.expressions import SYMBOLS, Constants, array_name
from fedbench.kernels.compiler.graph import Graph, Value, layout, same_numbers
from fedbench.kernels.compiler.indices import Index, linear, plus, strides, times
from fedbench.kernels.compiler.schedule import BEFORE, LEAVES, LOOP, SUM, Affine, Tiles

FUNCTIONS = {
    "abs": "tl.abs({0})", "pick": "tl.where({0} > {1}, {2}, {3})", "relu": "positive({0})", "min": "tl.minimum({0}, {1})",
    "max": "tl.maximum({0}, {1})", "sqrt": "tl.sqrt({0})", "exp": "tl.exp({0})", "log": "tl.log({0})", "log1p": "log1p({0})",
    "sigmoid": "sigmoid({0})", "tanh": "hyperbolic_tangent({0})", "sign": "sign({0})", "sin": "tl.sin({0})", "cos": "tl.cos({0})",
    "neg": "(-{0})", "copy": "{0}",
}  # fmt: skip
OPERATIONS = (*LEAVES, "ew", "cat", "mix", "prod", "column_sums", "lane_sum", "feature_sum", "uniform_mm")
CHUNK = 256
"""numbers without samples that are looked at together"""
UNROLLED = 4
"""inputs of a layer that are read ahead"""
OUTER = 4096
"""numbers of a sum of outer products that are made at once"""
BARRIER = "tl.debug_barrier()"


def power(n: int) -> int:
    """The next power of two from n on."""
    return 1 << max(0, n - 1).bit_length()


class ThroughMemory(Exception):
    """A value that registers cannot give as it is asked for."""

    def __init__(self, number: int) -> None:
        self.number = number


@dataclass(frozen=True)
class Frame:
    """How an expression is laid out: the index of each axis, as text."""

    lane: bool
    index: tuple[Index, ...]
    size: int
    f: str = ""
    """the variable of all features; "" if there is one feature alone"""
    mask: str = ""
    """where f is not beyond them"""
    own: int | str = 0
    """where a feature lies in an array of this very shape, as it is first written: the same as f"""
    row: str = ""
    """the one row that is looked at; "": those of a tile"""

    @property
    def wide(self) -> bool:
        return bool(self.f)

    def moves(self, at: int | str) -> bool:
        """Whether a place depends on the feature."""
        return bool(self.f) and re.search(rf"\b{self.f}\b", str(at)) is not None

    def at(self, features: Sequence[int], index: Sequence[Index]) -> int | str:
        """The place of an element in an array with these features."""
        found = linear([one for one in index if one is not None], features)
        return self.f if self.f and found == self.own else found


@dataclass(frozen=True)
class Slope:
    """A part of the gradient of a tile's rows, in registers."""

    name: str
    offset: int
    """its first number in a row"""
    variable: str
    frame: Frame


Move = Callable[[list[Slope]], list[str]]


class TileStep:
    """Makes the text; afterwards `tables`, `params`, `acts` and `tmp` say what it reads and how much room it needs."""

    def __init__(self, number: int, graph: Graph, outputs: dict[str, Value], constants: Constants, move: Move) -> None:
        """move: what is to be done with the gradients of a tile's rows, in the last pass."""
        self.number, self.outputs, self.constants, self.move = number, outputs, constants, move
        self.plan = Tiles(graph, outputs, [name for name, v in outputs.items() if v.lane])
        for v in self.plan.order:
            if v.op not in OPERATIONS or (v.op == "ew" and v.f not in {**SYMBOLS, **FUNCTIONS}):
                raise NotImplementedError(f"{v.f or v.op}, which kernels for GPUs do not have")
        self.stored: set[int] = set()
        """values that go through memory, found while the text is written"""
        while True:  # anew whenever a value turns out to need memory: once a value at most
            try:
                self.start()
                self.write()
                return
            except ThroughMemory as error:
                self.stored.add(error.number)

    def start(self) -> None:
        self.lines: list[str] = []
        self.acts = self.tmp = 0
        self.tables: dict[tuple[str, str], int] = {}
        self.params: dict[tuple[str, str], int] = {}
        self.powers: set[int] = set()
        self.widths = {1}
        """features of values of samples"""
        self.place: dict[int, tuple[str, int]] = {}
        """made values in memory: "acts" or "tmp", and where"""
        self.scalars: dict[int, str] = {}
        self.now: dict[int, str] = {}
        """variables of the pass that is being written"""
        self.fresh: set[int] = set()
        """values written since the last barrier"""
        self.waits = False
        self.indent = 0

    # ---- text ------------------------------------------------------------------------------------------------------------

    def say(self, *lines: str) -> None:
        if self.waits:  # what follows reads what was just written
            self.barrier()
        self.lines += ["    " * self.indent + line for line in lines]

    def barrier(self) -> None:
        self.lines.append("    " * self.indent + BARRIER)
        self.waits = False
        self.fresh.clear()

    def counted(self, letter: str, n: int) -> str:
        self.powers.add(power(n))
        return f"{letter}{power(n)}"

    def name(self, letter: str, v: Value) -> str:
        return f"{letter}{self.number}_{v.number}"

    def frame(self, shape: Sequence[int | str], lane: bool, f: str = "") -> Frame:
        """The frame of a value of this shape; f: the variable that counts its features, if it is a special one."""
        sizes = [n for n in shape if isinstance(n, int)]
        size = math.prod(sizes)
        if size == 1:
            return Frame(lane, tuple(0 if isinstance(n, int) else None for n in shape), 1)
        self.widths |= {size} if lane else set()
        f = f or (self.counted("l", size) if lane else self.counted("w", size))
        wide = sum(n > 1 for n in sizes)
        index: list[Index] = []
        steps = iter(strides(sizes))
        for n in shape:
            if not isinstance(n, int):
                index.append(None)
                continue
            step = next(steps)
            first = n * step == size
            text = f if step == 1 else f"({f} // {step})"
            index.append(0 if n == 1 else f if wide == 1 else text if first else f"({text} % {n})")
        own = linear([one for one in index if one is not None], sizes)
        return Frame(lane, tuple(index), size, f, f"({f} < {size})", own)

    def whole(self, frame: Frame) -> str:
        """Where a tile has numbers that count."""
        return f"(real[:, None] & {frame.mask})" if frame.wide else "real"

    # ---- expressions -----------------------------------------------------------------------------------------------------

    def x(self, v: Value, index: Sequence[Index], frame: Frame) -> str:
        """The text of v's elements at an index."""
        if v.op in ("view", "flat"):
            return self.x(v.args[0], v.how["fn"](tuple(index)), frame)
        if v.op == "const":
            return self.constant(v.args[0])
        at = frame.at(v.features, index)
        if v.number in self.now:
            return self.in_registers(v, at, frame)
        if v.number in self.scalars:
            return self.scalars[v.number]
        if v.op == "table":
            self.tables[v.how["key"]] = v.size
            return self.rows(f"q_{array_name(v.how['key'])}", str(v.size), at, frame)
        if v.op == "sample":
            return f"{v.how['key']}[:, None]" if frame.wide else v.how["key"]
        if v.op == "param" and v.how["key"][0] == "batch":
            return v.how["key"][1]
        if v.op == "param":
            self.params[v.how["key"]] = v.size
            return self.numbers(f"p_{array_name(v.how['key'])}", at, frame)
        if v.number in self.place:
            array, base = self.place[v.number]
            self.waits |= v.number in self.fresh  # a read after a write
            if array == "acts":
                return self.rows("acts", "ACTS", plus(base, at), frame)
            return self.numbers(array, plus(base, at), frame)
        assert v.op == "ew", f"{v} was not made"
        return self.applied(v, index, frame)

    def constant(self, value: float) -> str:
        text = self.constants.text(value)
        found = re.fullmatch(r"numbers\[(\d+)\]", text)
        return f"number_{found[1]}" if found else text.removeprefix("kind(").removesuffix(")")

    def in_registers(self, v: Value, at: int | str, frame: Frame) -> str:
        name = self.now[v.number]
        if v.size == 1:
            return f"{name}[:, None]" if frame.wide else name
        if at != frame.f or v.size != frame.size:  # registers have no indices
            raise ThroughMemory(v.number)
        return name

    def rows(self, array: str, width: str, at: int | str, frame: Frame) -> str:
        if frame.row:
            return f"tl.load({array} + {frame.row} * {width} + {at}{f', mask={frame.mask}, other=0.0' if frame.moves(at) else ''})"
        row, mask = ("r[:, None]", "real[:, None]") if frame.wide else ("r", "real")
        mask = self.whole(frame) if frame.moves(at) else mask
        return f"tl.load({array} + {row} * {width} + {at}, mask={mask}, other=0.0)"

    def numbers(self, array: str, at: int | str, frame: Frame) -> str:
        return f"tl.load({array} + {at}, mask={frame.mask}, other=0.0)" if frame.moves(at) else f"tl.load({array} + {at})"

    def applied(self, v: Value, index: Sequence[Index], frame: Frame) -> str:
        args = []
        for one in v.args:
            skip = len(v.shape) - len(one.shape)
            here = [0 if n == 1 and v.shape[skip + axis] != 1 else index[skip + axis] for axis, n in enumerate(one.shape)]
            args.append(self.x(one, here, frame))
        return f"({args[0]} {SYMBOLS[v.f]} {args[1]})" if v.f in SYMBOLS else FUNCTIONS[v.f].format(*args)

    def made(self, v: Value, frame: Frame) -> str:
        """The text that makes v, also if it has a place by now."""
        if v.op == "cat":
            return self.joined(v, frame)
        if v.op == "const" and frame.lane:
            return f"tl.full({'[TILE, 1]' if frame.wide else '[TILE]'}, {self.x(v, frame.index, frame)}, kind)"
        return self.applied(v, frame.index, frame) if v.op == "ew" else self.x(v, frame.index, frame)

    def joined(self, v: Value, frame: Frame) -> str:
        """A concatenation: each part where it belongs."""
        axis, text = v.how["axis"], "0.0"
        for (low, high), one in zip(v.how["bounds"], v.args, strict=True):
            i = frame.index[axis]
            index = [plus(here, -low) if at == axis and here is not None else here for at, here in enumerate(frame.index)]
            mask = f"(({i} >= {low}) & ({i} < {high}))"
            part = self.x(one, index, replace(frame, mask=f"({frame.mask} & {mask})", own=""))
            text = f"tl.where({mask}, {part}, {text})"
        return text

    # ---- values without samples ------------------------------------------------------------------------------------------

    def aside(self, n: int) -> int:
        self.tmp += n
        return self.tmp - n

    def chunked(self, shape: Sequence[int], body: Callable[[Frame], list[str]]) -> None:
        """Statements for all numbers of a value, CHUNK at a time."""
        frame = self.frame(shape, False)
        if frame.size <= CHUNK:
            self.say(*body(frame))
            return
        lines = body(self.frame(shape, False, "f"))
        self.counted("w", CHUNK)
        self.say(
            f"for low in tl.range(0, {frame.size}, {CHUNK}, disable_licm=True):",
            f"    f = low + w{CHUNK}",
            *(f"    {line}" for line in lines),
        )

    def before(self, v: Value) -> None:
        """A statement that comes before a pass."""
        if v.op == "prod":
            self.outer(v)
            return
        if v.size == 1 and v.op not in ("cat", "feature_sum", "uniform_mm"):
            self.say(f"{self.name('u', v)} = {self.made(v, self.frame(v.shape, False))}")
            self.scalars[v.number] = self.name("u", v)
            return
        if v.size == 1 and v.op == "feature_sum":
            of = v.args[0]
            frame = self.frame(of.shape, False)
            text = self.x(of, frame.index, frame)
            self.say(f"{self.name('u', v)} = tl.sum(tl.where({frame.mask}, {text}, 0.0))")
            self.scalars[v.number] = self.name("u", v)
            return
        at = self.aside(v.size)

        def body(frame: Frame) -> list[str]:
            if v.op not in ("feature_sum", "uniform_mm"):
                return [self.put("tmp", at, frame, self.made(v, frame))]
            k, term = self.summed(v, frame)
            zero = f"tl.zeros([{min(CHUNK, power(v.size))}], kind)" if frame.wide else "tl.sum(tl.zeros([1], kind))"
            total = self.name("s", v)
            return [f"{total} = {zero}", f"for k in range(0, {k}):", f"    {total} += {term}", self.put("tmp", at, frame, total)]

        self.chunked(v.features, body)
        self.place[v.number] = ("tmp", at)
        self.fresh.add(v.number)

    def summed(self, v: Value, frame: Frame) -> tuple[int, str]:
        """How many terms a sum over features has, and the k-th of them."""
        if v.op == "feature_sum":
            of, axis = v.args[0], v.how["axis"]
            return int(of.shape[axis]), self.x(of, [*frame.index[:axis], "k", *frame.index[axis:]], frame)
        a, b = v.args
        i, j = frame.index
        return int(a.shape[1]), f"{self.x(a, (i, 'k'), frame)} * {self.x(b, ('k', j), frame)}"

    def put(self, array: str, at: int | str, frame: Frame, text: str) -> str:
        if frame.wide:
            return f"tl.store({array} + {plus(at, frame.f)}, {text}, mask={frame.mask})"
        return f"tl.store({array} + {at}, {text})"

    def store(self, v: Value, array: str, at: int, by: Sequence[int]) -> None:
        """A value without samples to array[at + …]."""
        if v.op == "cat" and v.number not in self.place:
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

        def body(frame: Frame) -> list[str]:
            to: int | str = at
            for one, step in zip(frame.index, by, strict=True):
                to = plus(to, times(one, step))  # type: ignore[arg-type]
            mask = f", mask={frame.mask}" if frame.moves(to) else ""
            return [f"tl.store({array} + {to}, {self.x(v, frame.index, frame)}{mask})"]

        self.chunked(v.features, body)

    # ---- a pass over the rows ----------------------------------------------------------------------------------------------

    def write(self) -> None:
        plan = self.plan
        for stage in range(plan.last + 1):
            for v in plan.statements:
                if plan.stage[v.number] == (stage, BEFORE):
                    self.before(v)
            self.write_pass(stage)
        for name, v in self.outputs.items():
            if not v.lane and name != "loss":
                self.store(v, f"g_{name}", 0, strides(v.features))
        loss = self.outputs["loss"]
        self.say(f"value = {self.x(loss, [0] * len(loss.shape), Frame(False, (), 1))}")

    def write_pass(self, stage: int) -> None:
        plan = self.plan
        sums = [v for v in plan.statements if plan.stage[v.number] == (stage + 1, SUM)]
        made = [v for v in plan.statements if plan.stage[v.number] == (stage, LOOP)]
        pieces = [piece for piece, at in zip(plan.pieces, plan.piece_stage, strict=True) if at == stage]
        if not (sums or made or pieces):
            return
        if self.fresh:  # threads write what others read
            self.barrier()
        kept, self.lines, self.indent, self.now = self.lines, [], 1, {}
        for v in made:
            self.in_pass(v)
        totals = [self.total(v) for v in sums]
        slopes = [self.slope(piece.name, piece.offset, piece.value) for piece in pieces]
        self.say(*(self.move(slopes) if slopes else []))
        body, self.lines, self.indent = self.lines, kept, 0
        self.say(*(line for first, _ in totals for line in first), "for top in tl.range(0, t, TILE, disable_licm=True):")
        self.say("    r = top + tl.arange(0, TILE)", "    real = r < t")
        text = "\n".join(body)
        if re.search(r"\blabel\b", text):  # a load that nobody needs would cost registers
            self.say("    label = tl.load(labels + r, mask=real, other=0.0)")
        if re.search(r"\bweight\b", text):
            self.say("    weight = times_used(first, place, r, real, start, stop, most_used).to(kind)")
        if re.search(r"\brows\b", text):
            self.say("    rows = real.to(kind)")
        self.lines += body
        self.now = {}
        self.barrier()
        self.say(*(line for _, last in totals for line in last))
        self.fresh |= {v.number for v in sums if v.number in self.place}

    def in_pass(self, v: Value) -> None:
        """A value of samples; one variable, and a place in memory where it is needed elsewhere or otherwise."""
        name, frame = self.name("v", v), self.frame(v.shape, True)
        if v.number in self.plan.affine:
            self.layer(v, self.plan.affine[v.number], name)
        elif v.op == "feature_sum" and v.size == 1:
            of = v.args[0]
            inner = self.frame(of.shape, True)
            # F is rounded up to a power of two: what lies beyond must not be summed
            self.say(f"{name} = tl.sum(tl.where({self.whole(inner)}, {self.x(of, inner.index, inner)}, 0.0), axis=1)")
        elif v.op == "feature_sum":
            k, term = self.summed(v, frame)
            self.say(f"{name} = tl.zeros([TILE, {frame.f[1:]}], kind)", f"for k in range(0, {k}):", f"    {name} += {term}")
        else:
            self.say(f"{name} = {self.made(v, frame)}{'.to(kind)' if v.f == 'pick' else ''}")  # of two plain numbers
        if v.number in self.plan.kept or v.number in self.stored:
            where, at = f"{'r[:, None]' if frame.wide else 'r'} * ACTS + ", self.acts
            self.acts += v.size
            self.say(f"tl.store(acts + {where}{plus(at, frame.f or 0)}, {name}, mask={self.whole(frame)})")
            self.place[v.number] = ("acts", at)
            self.fresh.add(v.number)
        if v.number not in self.stored:
            self.now[v.number] = name

    def layer(self, v: Value, affine: Affine, name: str) -> None:
        """A layer of a network: products with weights, one input at a time, a bias, the positive part."""
        wide = self.frame(v.shape, True)
        self.say(f"{name} = tl.zeros([TILE, {wide.f[1:]}], kind)")
        for one in affine.mixes:
            k, a = int(one.args[0].shape[1]), self.x(one.args[0], (None, "k"), Frame(True, (None, "k"), 1))
            w, at, (by_in, by_out) = self.weights(one.args[1])
            text = f"tl.load({w} + {plus(at, plus(times('k', by_in), times(wide.f, by_out)))}, mask={wide.mask}, other=0.0)"
            # not tl.dot: it held a column of weights in each thread and spilled, see docs/decisions/007-gpu.md
            self.say(f"for k in tl.range(0, {k}, loop_unroll_factor={UNROLLED}):", f"    {name} += {a}[:, None] * {text}")
        if affine.bias is not None:
            self.say(f"{name} += {self.x(affine.bias, (wide.f,), wide)}")
        if affine.relu:
            self.say(f"{name} = positive({name})")

    def weights(self, v: Value) -> tuple[str, int, list[int]]:
        """Array, first place and strides of a matrix without samples."""
        found = layout(v)
        assert found is not None
        at, first, by = found
        if at.op == "param" and at.how["key"][0] != "batch":
            self.params[at.how["key"]] = at.size
            return f"p_{array_name(at.how['key'])}", first, by
        if at.number not in self.place:
            raise NotImplementedError("a single number as the weights of a layer")
        array, base = self.place[at.number]
        self.waits |= at.number in self.fresh
        return array, base + first, by

    # ---- sums over samples -----------------------------------------------------------------------------------------------

    def total(self, v: Value) -> tuple[list[str], list[str]]:
        """A sum over samples: adds its line to the pass, and returns those before and after."""
        name, into = self.name("t", v), self.name("u", v)
        if v.op == "lane_sum":
            text = self.x(v.args[0], (None,), Frame(True, (None,), 1))
            self.say(f"{name} += tl.where(real, {text}, 0.0)")
            self.scalars[v.number] = into
            return [f"{name} = tl.zeros([TILE], kind)"], [f"{into} = tl.sum({name})"]
        at = self.aside(v.size)
        self.place[v.number] = ("tmp", at)
        b = v.args[-1]
        frame = self.frame(b.shape, True)
        text = self.x(b, frame.index, frame)
        if v.op == "prod":
            text += f" * {self.x(v.args[0], [0 if isinstance(n, int) else None for n in v.args[0].shape], frame)}"
        self.say(f"{name} += tl.where({self.whole(frame)}, {text}, 0.0)")
        if not frame.wide:
            return [f"{name} = tl.zeros([TILE], kind)"], [f"tl.store(tmp + {at}, tl.sum({name}))"]
        size = frame.f[1:]
        done = f"tl.store(tmp + {at} + w{size}, tl.sum({name}, axis=0), mask=w{size} < {frame.size})"
        return [f"{name} = tl.zeros([TILE, {size}], kind)"], [done]

    def outer(self, v: Value) -> None:
        """A sum over samples of outer products, row by row of the table; some of its own rows at a time if it is large."""
        (m, n), name, at = (int(one) for one in v.shape), self.name("t", v), self.aside(v.size)
        some = min(power(m), max(1, OUTER // power(n)))
        high, wide = self.counted("e", some), self.counted("l", n)
        first = f"({high} + low)" if some < m else high
        sides = [(v.args[0], (first, None), high, f"({first} < {m})"), (v.args[1], (None, wide), wide, f"({wide} < {n})")]
        a, b = (self.x(one, index, Frame(True, index, 1, f, mask, row="s")) for one, index, f, mask in sides)
        lines = [
            f"{name} = tl.zeros([{some}, {wide[1:]}], kind)",
            "for s in tl.range(0, t, disable_licm=True):",
            f"    {name} += {a} * {b}",
            f"tl.store(tmp + {at} + {first} * {n} + {wide}, {name}, mask=({first} < {m}) & ({wide} < {n}))",
        ]
        self.say(*([f"for low in tl.range(0, {m}, {some}, disable_licm=True):", *(f"    {line}" for line in lines)] if some < m else lines))
        self.place[v.number] = ("tmp", at)
        self.fresh.add(v.number)

    def slope(self, name: str, offset: int, v: Value) -> Slope:
        frame, text = self.frame(v.shape, True), f"g{self.number}_{name}_{offset}"
        self.say(f"{text} = {self.made(v, frame) if v.op == 'const' else self.x(v, frame.index, frame)}.to(kind)")
        return Slope(name, offset, text, frame)
