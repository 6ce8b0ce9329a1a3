"""Every client's ridge regression at once: its user vector in closed form."""

from __future__ import annotations

import numpy as np

from fedbench.kernels.cholesky import add_squares, solve, weighted_sum
from fedbench.kernels.layers import DIVIDE, FAST, compiled, copy, padded, take_rows, uninitialised
from fedbench.kernels.threads import shared
from fedbench.kernels.vectors import WIDTH, prefetch, put, spread, take

CHUNK = 64
"""samples that are multiplied at once: their rows stay in the first cache"""
AHEAD = 8
"""rows that are fetched before they are read"""


@shared(fastmath=FAST, error_model=DIVIDE)
def solve_users(
    low: int,
    high: int,
    items: np.ndarray,
    local: np.ndarray,
    label: np.ndarray,
    counts: np.ndarray,
    base: np.ndarray,
    mass: float,
    l2: float,
    positives: bool,
    user: np.ndarray,
) -> None:
    """items [C, T, d], local and label [C, S], base [d, d] -> user [C, d], from all samples or those of a positive label."""
    d = base.shape[0]
    for c in range(low, high):
        used, value = _counting(local[c], label[c], 0, counts[c], positives, base)
        user[c] = _from_squares(items[c].reshape(-1), d, used, value, base, l2 * (used.size + mass))[:d]


@shared(rows=lambda table, diagonal, base, begin, *_: len(begin), fastmath=FAST, error_model=DIVIDE)
def solve_listed_users(
    low: int,
    high: int,
    table: np.ndarray,
    diagonal: np.ndarray,
    base: np.ndarray,
    begin: np.ndarray,
    end: np.ndarray,
    local: np.ndarray,
    label: np.ndarray,
    row_begin: np.ndarray,
    row: np.ndarray,
    mass: float,
    l2: float,
    positives: bool,
    user: np.ndarray,
) -> None:
    """table [M, d], base [d, d] -> user [C, d], from samples where they lie: client c's sample s is item row[row_begin[c] + local[s]].

    diagonal [d]: that of base, in a basis in which it has nothing besides, so that a client with few samples can be solved with a number
    a sample instead of one a feature: (D + RᵀR)⁻¹Rᵀy = D⁻¹Rᵀ(1 + R D⁻¹Rᵀ)⁻¹y; d is a multiple of WIDTH then. [0] in any other basis.
    """
    d = table.shape[1]
    flat = table.reshape(-1)
    for c in range(low, high):
        used, value = _counting(local, label, begin[c], end[c], positives, diagonal)
        for s in range(used.size):
            used[s] = row[row_begin[c] + used[s]]
        shrink = l2 * (used.size + mass)
        # exactly 0, without a system to solve
        if used.size == 0:
            user[c] = 0
        # the smaller of two systems: one equation a sample, or one a feature
        elif padded(used.size) < diagonal.size:
            user[c] = _from_samples(table, used, value, diagonal, shrink)
        else:
            user[c] = _from_squares(flat, d, used, value, base, shrink)[:d]


@compiled()
def _counting(
    local: np.ndarray, label: np.ndarray, begin: int, end: int, positives: bool, like: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The samples from `begin` to `end` that count: their places among the client's rows, and their labels as numbers of a type."""
    used, value, many = np.empty(end - begin, np.int32), np.empty(end - begin, like.dtype), 0
    for s in range(begin, end):
        used[many], value[many] = local[s], label[s]
        many += label[s] > 0 or not positives
    return used[:many], value[:many]


@compiled()
def _from_squares(flat: np.ndarray, d: int, used: np.ndarray, value: np.ndarray, base: np.ndarray, shrink: float) -> np.ndarray:
    """(base + shrink·1 + RᵀR)⁻¹Rᵀy of the used rows of a table with d numbers a row, with zeros behind."""
    size = padded(d)
    # sixteen columns more: the right side goes along as the first of them
    by = size + WIDTH
    matrix, rows = uninitialised(size * by, base), uninitialised(CHUNK * by, base)
    matrix[:] = 0
    rows[:] = 0
    for i in range(d):
        copy(base[i], 0, matrix, i * by, d)
    # padding has 1 on the diagonal: without it there would be no Cholesky factor
    for i in range(size):
        matrix[i * by + i] += shrink if i < d else 1
    for start in range(0, used.size, CHUNK):
        many = min(CHUNK, used.size - start)
        for s in range(many):
            if start + s + AHEAD < used.size:
                for j in range(0, d, WIDTH):
                    prefetch(flat, used[start + s + AHEAD] * d + j)
            copy(flat, used[start + s] * d, rows, s * by, d)
            rows[s * by + size] = value[start + s]
        add_squares(rows, by, WIDTH, many, size, by, matrix)
    out = uninitialised(size, base)
    solve(matrix, size, uninitialised(size, base), out)
    return out


@compiled()
def _from_samples(table: np.ndarray, used: np.ndarray, value: np.ndarray, diagonal: np.ndarray, shrink: float) -> np.ndarray:
    """D⁻¹Rᵀ(1 + R D⁻¹Rᵀ)⁻¹y of the used rows of a table, D = diagonal + shrink."""
    d, n, size = table.shape[1], used.size, padded(used.size)
    by = size + WIDTH
    beside, matrix = uninitialised(size * d, table), uninitialised(size * by, table)
    take_rows(table, used, beside, 0, d * WIDTH)
    # R D^(-1/2), whose products of rows are R D⁻¹Rᵀ
    for j in range(d):
        root = spread(table.dtype.type(1 / np.sqrt(diagonal[j] + shrink)))
        for at in range(j * WIDTH, size * d, d * WIDTH):
            put(beside, at, root * take(beside, at))
    # take_rows fills its last block with copies of a row, which must not count
    for s in range(n, size):
        beside[(size - WIDTH) * d + s % WIDTH :: WIDTH] = 0
    matrix[:] = 0
    add_squares(beside, WIDTH, d * WIDTH, d, size, size, matrix)
    for s in range(size):
        matrix[s * by + s] += 1
        matrix[s * by + size] = value[s] if s < n else 0
    each, out = uninitialised(size, table), uninitialised(d, table)
    solve(matrix, size, uninitialised(size, table), each)
    # Rᵀ from the table itself, for `beside` was scaled; D⁻¹ last
    weighted_sum(table.reshape(-1), d, used, each, out)
    for j in range(d):
        out[j] /= diagonal[j] + shrink
    return out
