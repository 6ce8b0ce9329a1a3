"""Mixtures of many clients' tables: weights on the simplex, and sums of tables with weights that are mostly 0."""

from __future__ import annotations

import numpy as np

from fedbench.kernels.layers import DIVIDE, FAST, OUTS, compiled, copy, uninitialised
from fedbench.kernels.register_sums import gatherer
from fedbench.kernels.threads import shared
from fedbench.kernels.vectors import WIDTH, prefetch, put, spread, take

COLUMNS = OUTS * WIDTH
"""numbers of a table that are mixed at once: as many sums as registers hold"""
AHEAD = 8
"""tables whose part is fetched before it is read: they lie far apart"""
add_listed = gatherer(OUTS)


@shared(fastmath=FAST, error_model=DIVIDE)
def project(low: int, high: int, target: np.ndarray, out: np.ndarray) -> None:
    """out [R, S]: the point nearest to each row of `target` with entries >= 0 that sum to 1, exactly and without sorting.

    All entries are lowered by one level, and what falls below 0 is cut off. The level at which the entries of a set would sum to 1 only
    rises when those below it leave the set, so that the first set that nobody leaves is the support (Michelot 1986).
    """
    for r in range(low, high):
        given, size = target[r], target.shape[1]
        kept = np.empty(size, target.dtype)
        top = given.max()
        total = target.dtype.type(0)
        for i in range(size):
            total += given[i] - top
        one = target.dtype.type(1)
        level, many, before = (total - one) / size, 0, size
        for i in range(size):  # without branches: half of the entries are below
            kept[many] = given[i] - top
            many += kept[many] > level
        while many < before:
            total = kept[:many].sum()
            level, before, many = (total - one) / many, many, 0
            for i in range(before):
                value = kept[i]
                kept[many] = value
                many += value > level
        for i in range(size):
            over = (given[i] - top) - level
            out[r, i] = over if over > 0 else 0


@shared(rows=lambda tables, *_: -(-tables.shape[1] // COLUMNS), fastmath=FAST, error_model=DIVIDE)
def mix(
    low: int,
    high: int,
    tables: np.ndarray,
    first: int,
    begin: np.ndarray,
    end: np.ndarray,
    index: np.ndarray,
    value: np.ndarray,
    share: np.ndarray,
    common: np.ndarray,
    onto: bool,
    out: np.ndarray,
) -> None:
    """out [R, N], or what is added onto it: for each row r a mixture of tables [K, N], which are number `first` and following of all.

    Table index[k] weighs value[k], from k = begin[r] to end[r], and all K weigh share[r]·common [K] besides. The tables are gone through
    once, some columns of all of them at a time, which lie side by side while every mixture reads them.
    """
    clients, numbers = tables.shape
    flat = tables.reshape(-1)
    beside = uninitialised(clients * COLUMNS, tables)
    alike, line = uninitialised(COLUMNS, tables), uninitialised(COLUMNS, tables)
    for b in range(low, high):
        column = b * COLUMNS
        wide = min(COLUMNS, numbers - column)
        _take_columns(flat, numbers, column, wide, common, beside, alike)
        for r in range(begin.size):
            mine = spread(share[r])
            for j in range(0, COLUMNS, WIDTH):
                put(line, j, mine * take(alike, j))
            if onto:
                for j in range(wide):
                    line[j] += out[r, column + j]
            add_listed(beside, -first * COLUMNS, index, begin[r], value, begin[r], end[r] - begin[r], line, 0)
            copy(line, 0, out[r], column, wide)


@compiled()
def _take_columns(
    flat: np.ndarray, numbers: int, column: int, wide: int, common: np.ndarray, beside: np.ndarray, alike: np.ndarray
) -> None:
    """beside [K, COLUMNS]: `wide` columns of all tables [K, numbers], zeros behind; alike [COLUMNS]: their sum weighed by `common`."""
    alike[:COLUMNS] = 0
    for s in range(common.size):
        at = s * COLUMNS
        if wide < COLUMNS:
            beside[at + wide : at + COLUMNS] = 0
        if s + AHEAD < common.size:
            for j in range(0, wide, WIDTH):
                prefetch(flat, (s + AHEAD) * numbers + column + j)
        copy(flat, s * numbers + column, beside, at, wide)
        weight = spread(common[s])
        for j in range(0, COLUMNS, WIDTH):
            put(alike, j, take(alike, j) + weight * take(beside, at + j))
