"""Counter-based random numbers: the splitmix64 finaliser over a counter. A key stands for (seed, round, client, purpose)."""

from __future__ import annotations

import numpy as np
from numba import njit

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MUL1 = np.uint64(0xBF58476D1CE4E5B9)
MUL2 = np.uint64(0x94D049BB133111EB)
S11, S27, S30, S31 = np.uint64(11), np.uint64(27), np.uint64(30), np.uint64(31)
LOW_BITS = np.uint64((1 << 33) - 1)
TO_UNIT = 1.0 / (1 << 53)


@njit(inline="always", cache=True)
def almost_mixed(x: np.uint64) -> np.uint64:
    """All of `mix` but its last step, which changes LOW_BITS alone."""
    x = (x ^ (x >> S30)) * MUL1
    return (x ^ (x >> S27)) * MUL2


@njit(inline="always", cache=True)
def mix(x: np.uint64) -> np.uint64:
    """uint64 -> uint64, every bit of x stirred into every bit of the result."""
    x = almost_mixed(x)
    return x ^ (x >> S31)


@njit(inline="always", cache=True)
def bits(key: np.uint64, counter: int | np.uint64) -> np.uint64:
    """The counter-th 64 random bits of a key."""
    return mix(key + (np.uint64(counter) + np.uint64(1)) * GOLDEN)


@njit(inline="always", cache=True)
def unit(key: np.uint64, counter: int | np.uint64) -> float:
    """The counter-th uniform number of a key, in [0, 1)."""
    return np.float64(bits(key, counter) >> S11) * TO_UNIT


@njit(inline="always", cache=True)
def below(key: np.uint64, counter: int, n: int) -> np.int64:
    """The counter-th integer of a key, uniform on 0 .. n-1."""
    return np.int64(unit(key, counter) * n)
