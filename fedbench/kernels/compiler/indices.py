"""Indices of elements: numbers, or the text of one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

LANE = "n"
"""the axis of samples"""
Axis = int | str
Index = int | str | None
"""of one axis in an element: a number, the text of one, or None for LANE"""
Shape = tuple[Axis, ...]


def strides(shape: Sequence[int]) -> list[int]:
    """Strides of a row-major array."""
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def times(a: int | str, b: int | str) -> int | str:
    if a == 0 or b == 0:
        return 0
    if a == 1 or b == 1:
        return b if a == 1 else a
    return a * b if isinstance(a, int) and isinstance(b, int) else f"{a} * {b}"


def plus(a: int | str, b: int | str) -> int | str:
    if a == 0 or b == 0:
        return b if a == 0 else a
    return a + b if isinstance(a, int) and isinstance(b, int) else f"({a} + {b})"


def linear(index: Iterable[int | str], sizes: Sequence[int]) -> int | str:
    """Place of an element in a row-major array."""
    at: int | str = 0
    for one, size in zip(index, sizes, strict=True):
        at = plus(times(at, size), one)
    return at


def parted(at: int | str, sizes: Sequence[int]) -> list[int | str]:
    """The index of the element at a place of a row-major array."""
    out: list[int | str] = []
    for size in reversed(sizes[1:]):
        out.append(at % size if isinstance(at, int) else f"({at} % {size})")
        at = at // size if isinstance(at, int) else f"({at} // {size})"
    return [at, *reversed(out)] if sizes else []


def broadcast(*shapes: Shape) -> Shape:
    """The shape that elementwise operations on these have."""
    n = max(map(len, shapes))
    out: list[Axis] = []
    for axis in range(n):
        sizes = {shape[axis - n + len(shape)] for shape in shapes if axis - n + len(shape) >= 0} - {1}
        if len(sizes) > 1:
            raise NotImplementedError(f"shapes {shapes}, which are not those of samples")
        out.append(sizes.pop() if sizes else 1)
    return tuple(out)
