"""Expressions: where values lie, and the text of one element of a value, of sixteen samples or of none."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from fedbench.kernels.compiler.graph import Value, layout, source
from fedbench.kernels.compiler.indices import Index, linear, plus, times
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
        # these fold when numba compiles; no sweep is over them
        if value in LITERAL:
            return f"kind({value!r})"
        for at, one in enumerate(self.values):
            if one == value or (math.isnan(one) and math.isnan(value)):
                return f"numbers[{at}]"
        self.values.append(value)
        return f"numbers[{len(self.values) - 1}]"


class Expressions:
    """Knows where values are that were made, and writes those that are made anew where they are used."""

    def __init__(self, outputs: dict[str, Value], constants: Constants) -> None:
        self.outputs, self.constants = outputs, constants
        self.lines: list[str] = []
        self.acts = self.tmp = 0
        self.tables: dict[tuple[str, str], int] = {}
        self.params: dict[tuple[str, str], int] = {}
        self.place: dict[int, tuple[str, str, Any]] = {}
        """where made values are: ("lane", array, feature), ("uniform", array, place) or ("variable", name, 0)"""
        self.now: dict[int, str] = {}
        """variables of the pass that is being written"""

    # ---- places --------------------------------------------------------------------------------------------------------

    def room(self, n: int) -> int:
        self.acts += n
        return self.acts - n

    def aside(self, n: int) -> int:
        # begins at a multiple of WIDTH, so that lanes do not lie in two cache lines
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
        # matrix products read arrays: a number in a variable is put down first
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
            # an axis of 1 is the same for all
            here = [0 if n == 1 and v.shape[skip + axis] != 1 else index[skip + axis] for axis, n in enumerate(one.shape)]
            args.append(self.x(one, here, lane))
        if v.f in SYMBOLS:
            return f"({args[0]} {SYMBOLS[v.f]} {args[1]})"
        if v.f == "neg":
            return f"(kind(0) - {args[0]})"
        # of a number that is not above 0: its series needs no care for overflow
        if lane and v.f == "exp" and (inner := minus_magnitude(v)) is not None:
            return f"exp_minus({self.x(inner, index[len(index) - len(inner.shape) :], lane)})"
        if lane and v.f == "log1p" and source(v.args[0]).f == "exp" and minus_magnitude(source(v.args[0])) is not None:
            return f"log_one_plus({args[0]})"  # of a number from 0 to 1, for which the series is made
        return (LANES if lane else PLAIN)[v.f].format(*args)

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


def minus_magnitude(v: Value) -> Value | None:
    """x of exp(-|x|)."""
    inner = source(v.args[0])
    if inner.f == "neg" and source(inner.args[0]).f == "abs" and v.shape == v.args[0].shape == inner.shape == inner.args[0].shape:
        return inner.args[0]
    return None
