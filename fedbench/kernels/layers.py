"""Parts of kernels: rows that lie side by side, weighted sums of them and their products.

Rows lie in blocks of WIDTH, side by side: a block has one feature of its rows after another, a Lanes each. So do a network's numbers.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import njit, types

from fedbench.kernels.register_sums import mixer, multiplier, outer
from fedbench.kernels.vectors import (
    WIDTH,
    across,
    has_avx512,
    prefetch,
    put,
    spread,
    take,
    turn_in,
    turn_onto,
    turn_out,
    turn_square,
)

FAST = {"reassoc", "contract", "nsz"}
"""sums may be reordered, as vector instructions need; infinities and NaN keep their meaning. Without arcp: vector instructions would
divide less exactly than scalar ones, and which of them run can depend on where arrays happen to lie. For the same reason a loop that
sums stores nothing into other arrays."""
DIVIDE: Final = "numpy"
"""no check for a zero divisor: it would keep every loop that divides from being vectorised"""


def compiled(**options: Any) -> Any:
    """numba's njit for kernels and their parts, as above, and compiled for types alone.

    By itself numba compiles a function again for every other constant that another compiled function gives it.
    """

    def decorate(function: Any) -> Any:
        made = njit(fastmath=FAST, error_model=DIVIDE, **options)(function)
        general = made.get_call_template

        def for_types(given: Any, named: Any) -> Any:
            # a constant is a plain integer here, so that one compilation serves all of them
            return general(tuple(map(types.unliteral, given)), {name: types.unliteral(kind) for name, kind in named.items()})

        made.get_call_template = for_types
        return made

    return decorate


TILE = 128
"""rows that are merged or scored at once: what is computed of them stays in the cache"""
OUTS, UPS, OTHERS, WIDE = (8, 2, 8, 16) if has_avx512() else (4, 1, 8, 8)
"""sums that are made at a time, OUTS in mixing and UPS by OTHERS, of WIDE lanes each, in products: as many as registers hold"""
multiply_one, multiply_many, fill = multiplier(1, OTHERS, WIDE), multiplier(UPS, OTHERS, WIDE), outer(OUTS)
SQUARE = WIDTH * WIDTH
"""numbers that are turned at once"""
LISTED: Final = 4
"""blocks of rows for which it takes as long to list a layer's weights and put its slopes in order as to make those of units that sleep"""


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


@njit
def uninitialised(n: int, like: np.ndarray) -> np.ndarray:
    """n numbers of another array's type, not set, that begin where a cache line does."""
    room = np.empty(n + WIDTH, like.dtype)
    skip = -(room.ctypes.data // room.itemsize) % WIDTH
    return room[skip : skip + n]


@njit(inline="always")
def part(room: np.ndarray, at: int, n: int) -> tuple[np.ndarray, int]:
    """n numbers of an array from `at` on, and where the next part begins: with a cache line, if `at` does."""
    return room[at : at + n], at + padded(n)


def mixer_of_blocks(keeps: str, onto: bool = False) -> Any:
    """A function that fills features with weighted sums of others, block by block. It keeps `all` sums or the `positive` ones, see mixer.

    Feature o < outs at y of `out` = begin[b + o] (onto: that feature at b of `begin`) + sum over k < count of
    weights[at + o·by_out + k·by_in] · feature k at x of `values`; the next block is by_x, by_y and by_b further on.
    OUTS features at a time: their sums stay in registers, and what is read serves all of them.
    """
    one, some = mixer(1, keeps, onto), mixer(OUTS, keeps, onto)
    step = WIDTH if onto else 1

    @compiled(forceinline=True)
    def mix(
        values: np.ndarray,
        x: int,
        by_x: int,
        count: int,
        out: np.ndarray,
        y: int,
        by_y: int,
        outs: int,
        begin: np.ndarray,
        b: int,
        by_b: int,
        weights: np.ndarray,
        at: int,
        by_out: int,
        by_in: int,
        blocks: int,
    ) -> None:
        for _ in range(blocks):
            for o in range(0, outs - OUTS + 1, OUTS):
                some(values, x, count, weights, at + o * by_out, by_out, by_in, begin, b + o * step, out, y + o * WIDTH)
            for o in range(outs // OUTS * OUTS, outs):
                one(values, x, count, weights, at + o * by_out, by_out, by_in, begin, b + o * step, out, y + o * WIDTH)
            x, y, b = x + by_x, y + by_y, b + by_b

    return mix


mix_all, mix_positive = map(mixer_of_blocks, ("all", "positive"))
mix_onto, mix_onto_positive = mixer_of_blocks("all", True), mixer_of_blocks("positive", True)


@compiled()
def _products_over_lanes(
    up: np.ndarray,
    x: int,
    by_x: int,
    ups: int,
    acts: np.ndarray,
    y: int,
    by_y: int,
    count: int,
    out: np.ndarray,
    at: int,
    by: int,
    blocks: int,
) -> None:
    """Products as `products` has them, added to out[at + u·by + i], by sums over lanes."""
    u = 0
    while u < ups:
        fits = u + UPS <= ups
        here = UPS if fits else 1
        for i in range(0, count - OTHERS + 1, OTHERS):
            if fits:
                multiply_many(up, x + u * WIDTH, by_x, acts, y + i * WIDTH, by_y, blocks, out, at + u * by + i, by)
            else:
                multiply_one(up, x + u * WIDTH, by_x, acts, y + i * WIDTH, by_y, blocks, out, at + u * by + i, by)
        for v in range(u, u + here):
            for i in range(count // OTHERS * OTHERS, count):
                a = spread(out.dtype.type(0))
                for b in range(blocks):
                    a = a + take(up, x + b * by_x + v * WIDTH) * take(acts, y + b * by_y + i * WIDTH)
                out[at + v * by + i] += across(a)
        u += here


@compiled()
def products(
    up: np.ndarray,
    x: int,
    by_x: int,
    ups: int,
    acts: np.ndarray,
    y: int,
    by_y: int,
    count: int,
    out: np.ndarray,
    at: int,
    blocks: int,
    spare: np.ndarray,
) -> None:
    """out[at + u·count + i] += feature u at x of `up` · feature i at y of `acts`, over all rows, for u < ups, i < count.

    The next block of `up` is by_x, that of `acts` by_y further on. Sixteen by sixteen products are made with those of `up` turned, which
    needs no sums over lanes. spare: room for blocks + 2 squares, not used for fewer than sixteen of `up`
    """
    whole = count // WIDTH * WIDTH
    u = 0
    while whole and u + WIDTH <= ups:
        # turned once for all squares of `acts`; `spare`: a square of sums, the same turned, then `up`
        for b in range(blocks):
            turn_square(up, x + b * by_x + u * WIDTH, spare, (2 + b) * SQUARE)
        for i in range(0, whole, WIDTH):
            for k in range(0, WIDTH, OUTS):
                fill(spare, 2 * SQUARE, acts, y + (i + k) * WIDTH, by_y, blocks, spare, k * WIDTH)
            turn_square(spare, 0, spare, SQUARE)
            for v in range(WIDTH):
                to = at + (u + v) * count + i
                put(out, to, take(out, to) + take(spare, SQUARE + v * WIDTH))
        # columns that fill no block of sixteen
        _products_over_lanes(up, x + u * WIDTH, by_x, WIDTH, acts, y + whole * WIDTH, by_y, count - whole, out, at + u * count + whole,
                             count, blocks)  # fmt: skip
        u += WIDTH
    _products_over_lanes(up, x + u * WIDTH, by_x, ups - u, acts, y, by_y, count, out, at + u * count, count, blocks)


@compiled()
def list_awake(
    acts: np.ndarray, x: int, by: int, units: int, blocks: int, ones: np.ndarray, room: np.ndarray, at: int, awake: np.ndarray, first: int
) -> int:
    """How many units of a layer are not 0 for all rows; `awake` lists them from `first` on. The layer's numbers are not negative.

    All are listed where to leave the others out would save less than it costs.
    """
    # no number is negative, so a sum is 0 only where all of them are
    room[at : at + units] = 0
    _products_over_lanes(ones, 0, 0, 1, acts, x, by, units, room, at, units, blocks)
    few = 0
    for unit in range(units):
        awake[first + few] = unit  # one that sleeps is written over by the next
        few += room[at + unit] != 0
    # only if this saves enough gradients, see LISTED
    if (units - few) * blocks >= LISTED * units:
        return few
    for unit in range(units):
        awake[first + unit] = unit
    return units


@compiled()
def listed_weights(
    weights: np.ndarray,
    at: int,
    by_out: int,
    by_in: int,
    awake: np.ndarray,
    first_out: int,
    outs: int,
    first_in: int,
    ins: int,
    out: np.ndarray,
    to: int,
) -> None:
    """out[to + k·outs + o] = the weight of the o-th listed output and the k-th listed input; all are meant where a list begins at -1."""
    for k in range(ins):
        row = at + (awake[first_in + k] if first_in >= 0 else k) * by_in
        for o in range(outs):
            out[to + k * outs + o] = weights[row + (awake[first_out + o] if first_out >= 0 else o) * by_out]


@compiled()
def part_rows(out: np.ndarray, at: int, to: int, rows: int, few: int, n: int, awake: np.ndarray, first: int) -> None:
    """`few` rows of n numbers that lie one after another from `at` on go to the places that `awake` lists, from `to` on; others are 0.

    to >= at: the last go first, so that none is written over.
    """
    k = few - 1
    for r in range(rows - 1, -1, -1):
        listed = k >= 0 and awake[first + k] == r
        for i in range(n):
            out[to + r * n + i] = out[at + k * n + i] if listed else out.dtype.type(0)
        k -= listed


@njit(inline="always")
def fetch(table: np.ndarray, row: np.ndarray) -> None:
    """Have these rows of a table fetched: waited for one after another, they take three times as long."""
    d = table.shape[1]
    flat = table.reshape(-1)
    for i in range(row.size):
        for j in range(0, d, WIDTH):
            prefetch(flat, row[i] * d + j)
        if d % WIDTH:  # the row may end in one more cache line
            prefetch(flat, row[i] * d + d - 1)


@compiled()
def take_rows(table: np.ndarray, row: np.ndarray, out: np.ndarray, start: int, by: int) -> None:
    """`out` takes these rows of a table, WIDTH side by side, from `start` on, a block every `by` numbers.

    The last block is filled up with the last row.
    """
    d, flat, whole = table.shape[1], table.reshape(-1), row.size // WIDTH * WIDTH
    for first in range(0, whole, WIDTH):
        _take_block(flat, d, row, first, out, start)
        start += by
    if whole < row.size:
        # a list of its own for the last block, so that nothing behind the rows is read
        few = np.empty(WIDTH, row.dtype)
        for k in range(WIDTH):
            few[k] = row[min(whole + k, row.size - 1)]
        _take_block(flat, d, few, 0, out, start)


@compiled(forceinline=True)
def _take_block(flat: np.ndarray, d: int, row: np.ndarray, first: int, out: np.ndarray, start: int) -> None:
    """The WIDTH rows from row[first] on, of a table of rows of d numbers."""
    for j in range(0, d - WIDTH + 1, WIDTH):
        turn_in(flat, row, first, d, j, out, start + j * WIDTH)
    for j in range(d // WIDTH * WIDTH, d):
        for k in range(WIDTH):
            out[start + j * WIDTH + k] = flat[row[first + k] * d + j]


@compiled()
def give_rows(rows: np.ndarray, by: int, row: np.ndarray, table: np.ndarray) -> None:
    """Rows that lie WIDTH side by side, a block every `by` numbers, go to these places in a table."""
    d, flat, start = table.shape[1], table.reshape(-1), 0
    for first in range(0, row.size, WIDTH):
        # padding is not written back: what lies there is no row of this client
        whole = d // WIDTH * WIDTH if first + WIDTH <= row.size else 0
        for j in range(0, whole, WIDTH):
            turn_out(rows, start + j * WIDTH, flat, row, first, d, j)
        for j in range(whole, d):
            for k in range(min(WIDTH, row.size - first)):
                flat[row[first + k] * d + j] = rows[start + j * WIDTH + k]
        start += by


@compiled()
def add_rows(rows: np.ndarray, by: int, row: np.ndarray, table: np.ndarray) -> None:
    """Rows that lie WIDTH side by side, a block every `by` numbers, are added to these rows of a table; a row may be listed again."""
    d, flat, start = table.shape[1], table.reshape(-1), 0
    # as in give_rows, padding is left out
    for first in range(0, row.size, WIDTH):
        whole = d // WIDTH * WIDTH if first + WIDTH <= row.size else 0
        for j in range(0, whole, WIDTH):
            turn_onto(rows, start + j * WIDTH, flat, row, first, d, j)
        for j in range(whole, d):
            for k in range(min(WIDTH, row.size - first)):
                flat[row[first + k] * d + j] += rows[start + j * WIDTH + k]
        start += by


@compiled()
def fetch_rows(table: np.ndarray, row: np.ndarray, out: np.ndarray) -> None:
    """Copy the listed rows of a table to `out`, one after another."""
    d, flat = table.shape[1], table.reshape(-1)
    for i in range(row.size):
        copy(flat, row[i] * d, out, i * d, d)


@compiled()
def store_rows(rows: np.ndarray, table: np.ndarray, row: np.ndarray) -> None:
    """Rows that lie one after another go to these places in a table."""
    d, flat = table.shape[1], table.reshape(-1)
    for i in range(row.size):
        copy(rows, i * d, flat, row[i] * d, d)


@compiled()
def store_changes(rows: np.ndarray, table: np.ndarray, row: np.ndarray, out: np.ndarray) -> None:
    """How rows that lie one after another differ from these rows of a table."""
    d, flat, changes = table.shape[1], table.reshape(-1), out.reshape(-1)
    for i in range(row.size):
        x, y = i * d, row[i] * d
        for j in range(0, d - WIDTH + 1, WIDTH):
            put(changes, x + j, take(rows, x + j) - take(flat, y + j))
        for j in range(d // WIDTH * WIDTH, d):
            changes[x + j] = rows[x + j] - flat[y + j]


@compiled()
def copy(source: np.ndarray, at: int, out: np.ndarray, to: int, n: int) -> None:
    """out[to + i] = source[at + i] for i < n."""
    for i in range(0, n - WIDTH + 1, WIDTH):
        put(out, to + i, take(source, at + i))
    for i in range(n // WIDTH * WIDTH, n):
        out[to + i] = source[at + i]
