"""exp and log as sums and products, for kernels: the library's functions keep a loop from being vectorised.

Both are exact to the last bits of the type they are given, float32 or float64, a number or Lanes; tests hold them to numpy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

from fedbench.kernels.vectors import Lanes, halved, kind_of, logarithm, magnitude, pick, spread, whole

LEAST = {types.float32: 1e-17, types.float64: 1e-150}
"""smallest value of exp_minus: the square of a slope below it would be subnormal and a hundred times slower to compute with"""
FLAGS: Any = {"fastmath": {"contract", "nsz"}, "error_model": "numpy"}
"""as the kernels', but no reordering: it would join the two parts of log 2"""
LN2 = {types.float32: (0.693359375, -2.12194440e-4), types.float64: (0.693145751953125, 1.42860682030941723212e-6)}
"""log 2 in two parts, the first with few enough bits that its multiples are exact"""
compiled_part = njit(inline="always", **FLAGS)
"""for functions that are made of the others here"""


def exp_minus(x: float) -> float:
    """exp(-x) for x >= 0, but no less than LEAST; not a number stays so."""
    return max(math.exp(-x), LEAST[types.float64])


def log_one_plus(x: float) -> float:
    """log(1 + x) for x from 0 to 1."""
    return math.log1p(x)


@overload(exp_minus, jit_options=FLAGS)
def _exp_minus(x: Any) -> Callable[[float], float] | None:
    """2^-k · exp(r) with r within half of log 2 of zero: a power series for exp, and k goes into the exponent's bits."""
    given = kind_of(x)
    if given not in LEAST:
        return None
    kind: Any = np.float32 if given == types.float32 else np.float64
    most, per_log2, half = kind(-math.log(LEAST[given])), kind(1 / math.log(2)), kind(0.5)
    high, low = (kind(part) for part in LN2[given])
    series = tuple(kind(1 / math.factorial(i)) for i in range(7 if given == types.float32 else 13, -1, -1))

    def implementation(x: Any) -> float:
        # cut off where the result would fall below LEAST; NaN is not above anything and passes
        y = pick(x, most, most, x)
        k = whole(y * per_log2 + half)
        # in two steps: k · high is exact, so that no digit of y is lost
        r = (k * high - y) + k * low
        value = r * series[0] + series[1]
        for i in range(2, len(series)):
            value = value * r + series[i]
        return halved(value, k)

    return implementation


@overload(log_one_plus, jit_options=FLAGS)
def _log_one_plus(x: Any) -> Callable[[float], float] | None:
    """2·atanh(z) with z = x / (2 + x), at most 1/3: an odd power series; for float32 a fit, five terms as exact as eight."""
    given = kind_of(x)
    if given not in LEAST:
        return None
    kind: Any = np.float32 if given == types.float32 else np.float64
    two = kind(2)
    fit = np.polynomial.Chebyshev.interpolate(lambda square: 2 * np.arctanh(np.sqrt(square)) / np.sqrt(square), 4, [0, 1 / 9])
    terms = fit.convert(kind=np.polynomial.Polynomial).coef if given == types.float32 else [2 / (2 * i + 1) for i in range(16)]
    series = tuple(kind(term) for term in terms[::-1])

    def implementation(x: Any) -> float:
        z = x / (two + x)
        square = z * z
        value = square * series[0] + series[1]
        for i in range(2, len(series)):
            value = value * square + series[i]
        return value * z

    return implementation


# ---- what derived kernels call, of Lanes or of numbers; exp and log are those above where an argument is known to fit -------------


def lanes_of(x: Any) -> Any:
    """A number as Lanes, Lanes as they are; for compiled code."""
    raise NotImplementedError


@overload(lanes_of, strict=False)
def _lanes_of(x: Any) -> Any:
    return (lambda x: x) if isinstance(x, Lanes) else (lambda x: spread(x))


def exponential(x: float) -> float:
    """exp(x) of any x; it ends where the type's exponents do."""
    return math.exp(x)


@overload(exponential, jit_options=FLAGS)
def _exponential(x: Any) -> Callable[[float], float] | None:
    given = kind_of(x)
    if given not in LEAST:
        return None
    kind: Any = np.float32 if given == types.float32 else np.float64
    most, per_log2, half, base = kind(87.0 if given == types.float32 else 708.0), kind(1 / math.log(2)), kind(0.5), kind(1024)
    high, low = (kind(part) for part in LN2[given])
    series = tuple(kind(1 / math.factorial(i)) for i in range(7 if given == types.float32 else 13, -1, -1))
    zero = kind(0)

    def implementation(x: Any) -> float:
        # cut off at both ends, where 2^-k would leave the type's exponents
        y = pick(zero - x, most, most, zero - x)
        y = pick(zero - most, y, zero - most, y)
        k = whole(y * per_log2 + half + base) - base  # shifted: a whole number is found by cutting, which rounds towards 0
        r = (k * high - y) + k * low
        value = r * series[0] + series[1]
        for i in range(2, len(series)):
            value = value * r + series[i]
        return halved(value, k)

    return implementation


@compiled_part
def least(x: Any, y: Any) -> Any:
    """The smaller one; not a number if one of them is not."""
    # y - y is NaN where y is, and 0 for finite numbers
    return pick(x, y, y, x + (y - y))


@compiled_part
def most(x: Any, y: Any) -> Any:
    """The larger one; not a number if one of them is not."""
    return pick(x, y, x, y + (x - x))


@compiled_part
def sigmoid(x: Any) -> Any:
    tail = exp_minus(magnitude(x))
    # a one of x's own type, Lanes or a number
    one = tail - tail + 1
    return pick(x, tail - tail, one, tail) / (one + tail)


@compiled_part
def hyperbolic_tangent(x: Any) -> Any:
    tail = exp_minus(magnitude(x) + magnitude(x))
    one = tail - tail + 1
    size = (one - tail) / (one + tail)
    return pick(x, tail - tail, size, tail - tail - size)


@compiled_part
def sign(x: Any) -> Any:
    zero = x - x
    return pick(x, zero, zero + 1, zero) - pick(zero, x, zero + 1, zero)


@compiled_part
def log1p(x: Any) -> Any:
    """log(1 + x): what rounding lost of a small x in 1 + x is put back."""
    up = x + 1
    lost = up - 1
    return pick(magnitude(lost), lost - lost, logarithm(up) * (x / pick(magnitude(lost), lost - lost, lost, lost + 1)), x)
