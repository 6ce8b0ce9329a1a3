"""The text of a kernel for a GPU: one program a client makes all its local steps, in place on its rows and tensors.

It is the same for every model, as driver.py's text for a CPU is. No atomic operations: the same run gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fedbench.kernels.compiler.driver import Update
from fedbench.kernels.compiler.expressions import Constants, array_name
from fedbench.kernels.compiler.graph import Graph, Value
from fedbench.kernels.compiler.indices import plus
from fedbench.kernels.compiler.triton_step import BARRIER, CHUNK, Slope, TileStep, power
from fedbench.kernels.optimizers import BETA1, BETA2, EPSILON

HEAD = '''"""Derived from {what} by fedbench/kernels/compiler; written anew when that changes."""

import triton
import triton.language as tl

from fedbench.kernels.tiles import hyperbolic_tangent, log1p, positive, sigmoid, sign, times_used

B1, B2, EPSILON = tl.constexpr({b1!r}), tl.constexpr({b2!r}), tl.constexpr({eps!r})
ACTS = tl.constexpr({acts})


'''
SAMPLES = ("labels", "first", "places", "counts", "heights", "used")
"""[C, T] labels of rows; [C, T + 1] where the samples of a row begin; [E, C, S] their places in each epoch's order; [C] each: samples,
rows, and the most samples of one row"""
NUMBERS = ("pace", "how", "numbers")
"""[steps, 2 + updates] Adam's corrections and the rates of every step; [updates, 3] weight decay, momentum, weight of a pull, after them
a clip for each phase and the tolerance of the early stop; the constants of the loss"""
RESULTS = ("losses", "steps")
SIZES = ("height", "longest", "by_epoch", "epochs", "batch", "most_steps")
"""T, S, numbers of `places` an epoch (0: all are alike), and the plan of the stage"""


@dataclass
class TileModel:
    """What a kernel for a GPU is written for."""

    graphs: Sequence[tuple[Graph, dict[str, Value]]]
    updates: tuple[Update, ...]
    constants: Constants = field(default_factory=Constants)

    def __post_init__(self) -> None:
        self.steps = [
            TileStep(number, *graph, self.constants, lambda slopes, number=number: self.move_rows(number, slopes))  # type: ignore[misc]
            for number, graph in enumerate(self.graphs)
        ]
        for one in self.updates:  # moved though nothing reads them
            to = {("held", one.name): one.width} | ({one.target: one.width} if one.target else {})
            (self.steps[one.phase].tables if one.table else self.steps[one.phase].params).update(to)
        self.tables = dict(sorted({key: n for step in self.steps for key, n in step.tables.items()}.items()))
        self.params = dict(sorted({key: n for step in self.steps for key, n in step.params.items()}.items()))
        self.acts, self.tmp = (max(1, *(getattr(step, name) for step in self.steps)) for name in ("acts", "tmp"))

    @property
    def kept(self) -> dict[str, tuple[bool, int]]:
        """Arrays that begin as zeros, name -> whether it has rows and how many numbers (a row): moments, and gradients on their way."""
        found = {array: (one.table, one.width) for one in self.updates for array in one.state}
        found |= {f"g_{one.name}": (one.table, one.width) for one in self.updates if not one.table or one.clip}
        return dict(sorted(found.items()))

    def arguments(self) -> list[str]:
        """Names of what the kernel takes, in order."""
        tables = [f"q_{array_name(key)}" for key in self.tables]
        params = [text for key in self.params for text in (f"p_{array_name(key)}", f"by_{array_name(key)}")]
        return [*tables, *params, *self.kept, "acts", "tmp", *SAMPLES, *NUMBERS, *RESULTS, *SIZES]

    # ---- optimizers ------------------------------------------------------------------------------------------------------

    def updates_of(self, number: int) -> list[tuple[int, Update]]:
        return [(at, one) for at, one in enumerate(self.updates) if one.phase == number]

    def move_rows(self, number: int, slopes: list[Slope]) -> list[str]:
        """A tile's rows take their step; if the norm of the whole gradient counts, their gradient is put down and its square added up."""
        updates = {one.name: (at, one) for at, one in self.updates_of(number) if one.table}
        clips = any(one.clip for _, one in updates.values())
        lines = [] if clips else [BARRIER]  # rows move in place: others may still read them
        for slope in slopes:
            frame, (at, one) = slope.frame, updates[slope.name]
            row, real = ("r[:, None]", f"(real[:, None] & {frame.mask})") if frame.wide else ("r", "real")
            place = f"{row} * {one.width} + {plus(slope.offset, frame.f or 0)}"
            if clips:
                lines.append(f"tl.store(g_{one.name} + {place}, {slope.variable}, mask={real})")
                lines.append(f"square += tl.sum(tl.where({real}, {slope.variable} * {slope.variable}, 0.0))")
            else:
                lines += self.moved(at, one, place, real, slope.variable)
        return lines

    def moved(self, at: int, one: Update, place: str, mask: str, slope: str) -> list[str]:
        """The optimizer's step of numbers at a place of an array and of what belongs to it."""
        letter, end = ("q" if one.table else "p"), f", mask={mask}"
        array = f"{letter}_h_{one.name}"

        where, slope_, x, m, v = (f"{name}_{at}" for name in ("where", "slope", "x", "m", "v"))

        def take(name: str) -> str:
            return f"tl.load({name} + {where}{end}, other=0.0)"

        lines = [f"{where} = {place}", f"{slope_} = {slope}{' * scale' if one.clip else ''}", f"{x} = {take(array)}"]
        pull = f"weight_{at} * ({x} - {take(f'{letter}_{array_name(one.target)}')})" if one.target else ""
        if one.adam:
            first, second = one.state
            lines += [f"{m} = B1 * {take(first)} + (1 - B1) * {slope_}", f"{v} = B2 * {take(second)} + (1 - B2) * {slope_} * {slope_}"]
            stay = f"{x} * (1 - rate_{at} * decay_{at})" if one.decay else x
            stay += f" - rate_{at} * {pull}" if pull else ""
            lines.append(f"{x} = {stay} - rate_{at} * fast * {m} / (tl.sqrt({v}) * slow + EPSILON)")
            lines += [f"tl.store({first} + {where}, {m}{end})", f"tl.store({second} + {where}, {v}{end})"]
        else:
            lines += [f"{slope_} += decay_{at} * {x}"] * one.decay + [f"{slope_} += {pull}"] * bool(pull)
            if one.momentum:
                lines += [f"{slope_} += momentum_{at} * {take(one.state[0])}", f"tl.store({one.state[0]} + {where}, {slope_}{end})"]
            lines.append(f"{x} -= rate_{at} * {slope_}")
        return [*lines, f"tl.store({array} + {where}, {x}{end})"]

    def phase(self, number: int) -> list[str]:
        updates = self.updates_of(number)
        clips = any(one.clip for _, one in updates)
        lines = [f"rate_{at} = tl.load(pace + step * {2 + len(self.updates)} + {2 + at})" for at, _ in updates]
        lines += ["square = tl.sum(tl.zeros([1], kind))"] * clips + self.steps[number].lines + [BARRIER]
        if clips:
            for at, one in updates:
                if not one.table:
                    lines += self.chunks(one, lambda f, at=at, one=one: [  # type: ignore[misc]
                        f"slope_{at} = tl.load(g_{one.name} + {f}, mask={f} < {one.width}, other=0.0)",
                        f"square += tl.sum(slope_{at} * slope_{at})"])  # fmt: skip
            lines.append(f"scale = tl.minimum(tl.load(how + {3 * len(self.updates) + number}) / (tl.sqrt(square) + 1e-6), 1.0)")
        for at, one in updates:
            if one.table and clips:
                wide = f"l{power(one.width)}"
                real = f"real[:, None] & ({wide} < {one.width})"
                place = f"r[:, None] * {one.width} + {wide}"
                body = self.moved(at, one, place, real, f"tl.load(g_{one.name} + where_{at}, mask={real}, other=0.0)")
                lines += ["for top in tl.range(0, t, TILE, disable_licm=True):", "    r = top + tl.arange(0, TILE)", "    real = r < t",
                          *(f"    {line}" for line in body)]  # fmt: skip
            elif not one.table:
                lines += self.chunks(one, lambda f, at=at, one=one: self.moved(  # type: ignore[misc]
                    at, one, f, f"{f} < {one.width}", f"tl.load(g_{one.name} + {f}, mask={f} < {one.width}, other=0.0)"))  # fmt: skip
        return [*lines, BARRIER]

    @staticmethod
    def chunks(one: Update, body: Callable[[str], list[str]]) -> list[str]:
        """Statements for all numbers of a tensor."""
        if one.width <= CHUNK:
            return body(f"w{power(one.width)}")
        return [
            f"for low in tl.range(0, {one.width}, {CHUNK}, disable_licm=True):",
            f"    f = low + w{CHUNK}",
            *(f"    {line}" for line in body("f")),
        ]

    # ---- the whole ---------------------------------------------------------------------------------------------------------

    def text(self, what: str) -> str:
        head = HEAD.format(what=what, b1=BETA1, b2=BETA2, eps=EPSILON, acts=self.acts)
        lines = ["c = tl.program_id(0).to(tl.int64)", "n, t, most_used = tl.load(counts + c), tl.load(heights + c), tl.load(used + c)"]
        some = f"q_{array_name(next(iter(self.tables)))}" if self.tables else f"p_{array_name(next(iter(self.params)))}"
        lines.append(f"kind = {some}.dtype.element_ty")
        lines += [f"q_{array_name(key)} += c * height * {n}" for key, n in self.tables.items()]
        lines += [f"p_{array_name(key)} += c * by_{array_name(key)}" for key in self.params]
        lines += [f"{array} += c * {f'height * {n}' if rows else n}" for array, (rows, n) in self.kept.items()]
        lines += [f"acts += c * height * {self.acts}", f"tmp += c * {self.tmp}", "labels += c * height", "first += c * (height + 1)"]
        powers = {n for step in self.steps for n in step.powers} | {power(min(one.width, CHUNK)) for one in self.updates}
        for n in sorted(powers | {power(one.width) for one in self.updates if one.table}):
            lines += [f"w{n} = tl.arange(0, {n})", f"l{n} = tl.arange(0, {n})[None, :]", f"e{n} = tl.arange(0, {n})[:, None]"]
        lines += [f"number_{at} = tl.load(numbers + {at})" for at in range(len(self.constants.values))]
        for at, one in enumerate(self.updates):
            used = [one.decay, one.momentum, one.target is not None]
            names = ("decay", "momentum", "weight")
            lines += [f"{name}_{at} = tl.load(how + {3 * at + k})" for k, name in enumerate(names) if used[k]]
        lines += [
            f"touched, tolerance = t.to(kind), tl.load(how + {3 * len(self.updates) + len(self.steps)})",
            "step, epoch, seen, active = 0, 0, 0, n > 0",
        ]
        lines += ["total, before = tl.sum(tl.zeros([1], kind)), tl.sum(tl.zeros([1], kind))", "while (epoch < epochs) & active:"]
        lines += ["    place = places + epoch * by_epoch + c * longest", "    left = tl.minimum(n, (most_steps - step) * batch)"]
        lines += ["    for start in tl.range(0, left, batch, disable_licm=True):"]
        inner = ["stop = tl.minimum(start + batch, n)", "size = (stop - start).to(kind)"]
        width = 2 + len(self.updates)
        inner += [f"fast, slow = tl.load(pace + step * {width}), tl.load(pace + step * {width} + 1)"]
        for number in range(len(self.steps)):
            inner += self.phase(number)
        inner += ["total += value * size", "seen += stop - start", "step += 1"]
        lines += [f"        {line}" for line in inner]
        lines += ["    mean = total / tl.maximum(seen, 1).to(kind)",
                  "    changed = tl.abs(mean - before) / tl.abs(before + 1e-5) >= tolerance",
                  "    active = ((epoch == 0) | (tolerance <= 0) | changed) & (step < most_steps)", "    before = mean",
                  "    epoch += 1", "tl.store(losses + c, before)", "tl.store(steps + c, step)"]  # fmt: skip
        given = ", ".join(self.arguments())
        body = "\n".join(f"    {line}" for line in lines)
        return f"{head}@triton.jit\ndef train({given}, TILE: tl.constexpr):\n{body}\n"
