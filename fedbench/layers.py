"""Parts of kernels: rows that lie side by side, weighted sums and products of them, and small networks over them.

A network's numbers are kept feature by feature: row f of an array of rows of TILE numbers holds feature f of up to TILE samples.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import njit

from fedbench.elementary import exp_minus
from fedbench.lanes import (
    WIDTH,
    across,
    has_avx512,
    magnitude,
    mixer,
    multiplier,
    pick,
    prefetch,
    put,
    repeat,
    spread,
    take,
    turn_in,
    turn_out,
)

FAST = {"reassoc", "contract", "nsz"}
"""sums may be reordered, as vector instructions need; infinities and NaN keep their meaning. Without arcp: vector instructions would
divide less exactly than scalar ones, and which of them run can depend on where arrays happen to lie. For the same reason a loop that
sums stores nothing into other arrays."""
DIVIDE: Final = "numpy"
"""no check for a zero divisor: it would keep every loop that divides from being vectorised"""
TILE = 128
"""rows whose layers are computed at once, a feature's numbers side by side"""
OUTS, BLOCKS, UPS, OTHERS, WIDE = (8, 2, 2, 8, 16) if has_avx512() else (4, 1, 1, 8, 8)
"""sums that are made at a time, OUTS by BLOCKS in mixing and UPS by OTHERS, of WIDE lanes each, in products: as many as registers hold"""
multiply_one, multiply_many = multiplier(1, OTHERS, WIDE), multiplier(UPS, OTHERS, WIDE)


@njit(inline="always")
def padded(n: int) -> int:
    """Rows are padded to a multiple of WIDTH, so that no loop over them has a remainder."""
    return -(-n // WIDTH) * WIDTH


@njit
def zeros(n: int, like: np.ndarray) -> np.ndarray:
    """n zeros of another array's type that begin where a cache line does: lanes that lie in two lines are read half as fast."""
    room = np.zeros(n + WIDTH, like.dtype)
    skip = -(room.ctypes.data // room.itemsize) % WIDTH
    return room[skip : skip + n]


@njit(inline="always")
def part(room: np.ndarray, at: int, n: int) -> tuple[np.ndarray, int]:
    """n numbers of an array from `at` on, and where the next part begins: with a cache line, if `at` does."""
    return room[at : at + n], at + padded(n)


@njit(fastmath=FAST, error_model=DIVIDE)
def mixed(begin: float, values: np.ndarray, source: int, count: int, s: int, weights: np.ndarray, at: int, by: int) -> float:
    """begin + sum over k < count of weights[at + k·by] · the lanes at s of row source + k of `values`; rows of TILE numbers."""
    for k in range(count):
        begin = begin + repeat(weights, at + k * by) * take(values, (source + k) * TILE + s)
    return begin


def mixer_of_rows(keeps: str) -> Any:
    """A function that fills rows with weighted sums of other rows, of which it keeps `all`, those over 0 (`positive`), or those where the
    same place of another array is over 0 (`gated`), the rest being 0.

    Row target + o of `out` = begin[o] + sum over k of weights[at + o·by_out + k·by_in] · row source + k of `values`, n numbers of each.
    OUTS rows of BLOCKS lanes at a time: their sums stay in registers, and what is read serves all of them.
    """
    one, some, many = mixer(1, 1, keeps), mixer(OUTS, 1, keeps), mixer(OUTS, BLOCKS, keeps)

    @njit(fastmath=FAST, error_model=DIVIDE)
    def mix(
        values: np.ndarray,
        source: int,
        count: int,
        out: np.ndarray,
        target: int,
        begin: np.ndarray,
        weights: np.ndarray,
        at: int,
        by_out: int,
        by_in: int,
        n: int,
        gate: np.ndarray,
    ) -> None:
        s = 0
        while s < n:
            fits = s + BLOCKS * WIDTH <= n
            wide = BLOCKS * WIDTH if fits else WIDTH
            x, y = source * TILE + s, target * TILE + s
            for o in range(0, begin.size - OUTS + 1, OUTS):
                if fits:
                    many(values, x, count, weights, at + o * by_out, by_out, by_in, begin, o, out, y + o * TILE, TILE, gate)
                else:
                    some(values, x, count, weights, at + o * by_out, by_out, by_in, begin, o, out, y + o * TILE, TILE, gate)
            for o in range(begin.size // OUTS * OUTS, begin.size):
                for b in range(0, wide, WIDTH):
                    one(values, x + b, count, weights, at + o * by_out, by_out, by_in, begin, o, out, y + o * TILE + b, TILE, gate)
            s += wide

    return mix


mix_rows, mix_positive, mix_gated = map(mixer_of_rows, ("all", "positive", "gated"))


@njit(fastmath=FAST, error_model=DIVIDE)
def products(up: np.ndarray, row: int, ups: int, acts: np.ndarray, source: int, count: int, out: np.ndarray, at: int, n: int) -> None:
    """out[at + u·count + i] += row row + u of up · row source + i of acts, for u < ups, i < count; rows of TILE numbers, n of each used."""
    u = 0
    while u < ups:
        fits = u + UPS <= ups
        here = UPS if fits else 1
        x, to = (row + u) * TILE, at + u * count
        for i in range(0, count - OTHERS + 1, OTHERS):
            if fits:
                multiply_many(up, x, acts, (source + i) * TILE, n, TILE, out, to + i, count)
            else:
                multiply_one(up, x, acts, (source + i) * TILE, n, TILE, out, to + i, count)
        for v in range(here):
            for i in range(count // OTHERS * OTHERS, count):
                a = spread(out.dtype.type(0))
                for s in range(0, n, WIDTH):
                    a = a + take(up, x + v * TILE + s) * take(acts, (source + i) * TILE + s)
                out[to + v * count + i] += across(a)
        u += here


@njit(inline="always")
def row_of(acts: np.ndarray, i: int) -> np.ndarray:
    """Row i of rows of TILE numbers."""
    return acts[i * TILE : (i + 1) * TILE]


@njit(fastmath=FAST, error_model=DIVIDE)
def forward(weights: np.ndarray, sizes: np.ndarray, acts: np.ndarray, n: int, squash: bool) -> None:
    """acts [sum(sizes)·TILE], a row a feature: fill every layer after the input; ReLU inside, sigmoid (squash) or ReLU at the end."""
    one, zero = weights.dtype.type(1), weights.dtype.type(0)
    source, at = 0, 0
    for layer in range(sizes.size - 1):
        fan_in, fan_out = sizes[layer], sizes[layer + 1]
        target = source + fan_in
        bias = at + fan_in * fan_out
        end = bias + fan_out
        if squash and layer == sizes.size - 2:
            mix_rows(acts, source, fan_in, acts, target, weights[bias:end], weights, at, fan_in, 1, n, acts)
            for o in range(target, target + fan_out):
                for y in range(o * TILE, o * TILE + n, WIDTH):
                    x = take(acts, y)
                    tail = exp_minus(magnitude(x))
                    put(acts, y, pick(x, zero, spread(one), tail) / (one + tail))
        else:
            mix_positive(acts, source, fan_in, acts, target, weights[bias:end], weights, at, fan_in, 1, n, acts)
        source = target
        at = end


@njit(fastmath=FAST, error_model=DIVIDE)
def backward(
    weights: np.ndarray,
    sizes: np.ndarray,
    acts: np.ndarray,
    delta: np.ndarray,
    grad: np.ndarray,
    nothing: np.ndarray,
    n: int,
    of_weights: bool,
    of_inputs: int,
) -> None:
    """delta ends with the slopes of the last layer; add to `grad` (of the weights) and fill the first rows of `delta` (of so many inputs).

    nothing: zeros, as many as the widest layer has features
    """
    zero = weights.dtype.type(0)
    target, end = 0, 0
    for layer in range(sizes.size - 1):
        target += sizes[layer]
        end += sizes[layer] * sizes[layer + 1] + sizes[layer + 1]
    for layer in range(sizes.size - 2, -1, -1):
        fan_in, fan_out = sizes[layer], sizes[layer + 1]
        source = target - fan_in
        bias = end - fan_out
        at = bias - fan_in * fan_out
        if of_weights:
            products(delta, target, fan_out, acts, source, fan_in, grad, at, n)
            for o in range(fan_out):
                slopes = spread(zero)
                for s in range(0, n, WIDTH):
                    slopes = slopes + take(delta, (target + o) * TILE + s)
                grad[bias + o] += across(slopes)
        if layer > 0:
            mix_gated(delta, target, fan_out, delta, source, nothing[:fan_in], weights, at, 1, fan_in, n, acts)
        else:
            mix_rows(delta, target, fan_out, delta, source, nothing[:of_inputs], weights, at, 1, fan_in, n, acts)
        target = source
        end = at


@njit(inline="always")
def fetch(table: np.ndarray, row: np.ndarray) -> None:
    """Have these rows of a table fetched: waited for one after another, they take three times as long."""
    d = table.shape[1]
    flat = table.reshape(-1)
    for i in range(row.size):
        for j in range(0, d, WIDTH):
            prefetch(flat, row[i] * d + j)
        prefetch(flat, row[i] * d + d - 1)


@njit(inline="always")
def _places(row: np.ndarray, first: int, by: int, places: np.ndarray) -> None:
    """Where the WIDTH rows from row[first] on begin, in a table of rows of `by` numbers; after the last row that again."""
    if first + WIDTH <= row.size:
        for k in range(WIDTH):
            places[k] = np.int64(row[first + k]) * by
    else:
        for k in range(WIDTH):
            places[k] = np.int64(row[min(first + k, row.size - 1)]) * by


@njit(fastmath=FAST, error_model=DIVIDE)
def take_rows(table: np.ndarray, row: np.ndarray, out: np.ndarray, start: int, by_block: int, by: int) -> None:
    """`out` takes these rows of a table, WIDTH side by side: a block of them every by_block numbers, a row's next number `by` further on.

    The last block is filled up with the last row.
    """
    n, d, flat = row.size, table.shape[1], table.reshape(-1)
    here = np.empty(WIDTH, np.int64)
    for first in range(0, n, WIDTH):
        _places(row, first, d, here)
        for j in range(0, d - WIDTH + 1, WIDTH):
            turn_in(flat, here, out, start + j * by, by)
            here += WIDTH
        for j in range(d // WIDTH * WIDTH, d):
            for k in range(WIDTH):
                out[start + j * by + k] = flat[here[k] + j % WIDTH]
        start += by_block


@njit(fastmath=FAST, error_model=DIVIDE)
def give_rows(rows: np.ndarray, row: np.ndarray, table: np.ndarray) -> None:
    """Rows that lie WIDTH side by side go to these places in a table."""
    d, flat = table.shape[1], table.reshape(-1)
    there = np.empty(WIDTH, np.int64)
    for first in range(0, row.size, WIDTH):
        _places(row, first, d, there)
        whole = d // WIDTH * WIDTH if first + WIDTH <= row.size else 0
        for j in range(0, whole, WIDTH):
            turn_out(rows, first * d + j * WIDTH, flat, there, WIDTH)
            there += WIDTH
        for j in range(whole, d):
            for k in range(min(WIDTH, row.size - first)):
                flat[there[k] + j - whole] = rows[first * d + j * WIDTH + k]


@njit(fastmath=FAST, error_model=DIVIDE)
def copy(source: np.ndarray, at: int, out: np.ndarray, to: int, n: int) -> None:
    """out[to + i] = source[at + i] for i < n."""
    for i in range(0, n - WIDTH + 1, WIDTH):
        put(out, to + i, take(source, at + i))
    for i in range(n // WIDTH * WIDTH, n):
        out[to + i] = source[at + i]
