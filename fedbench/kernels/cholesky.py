"""Small symmetric systems, one a client: products of a matrix with itself, and their solution by a Cholesky factor.

A matrix of n rows lies in rows of n + WIDTH numbers: its upper triangle, and in column n the right side. n is a multiple of WIDTH.
"""

from __future__ import annotations

import numpy as np

from fedbench.kernels.layers import compiled
from fedbench.kernels.register_sums import factor_square, solve_square, tiler
from fedbench.kernels.vectors import WIDTH, across, has_avx512, put, repeat, spread, take

UPS, MANY = (8, 2) if has_avx512() else (4, 1)
"""rows and lanes of a tile: as many sums as registers hold"""
add_one, add_many = tiler(UPS, 1), tiler(UPS, MANY)
less_one, less_many = tiler(UPS, 1, less=True), tiler(UPS, MANY, less=True)


@compiled()
def add_squares(rows: np.ndarray, step: int, block: int, count: int, size: int, wide: int, out: np.ndarray) -> None:
    """out [size, size + WIDTH] += the upper triangle of RᵀR in its first `wide` columns.

    Number j of row k < count of R is rows[k·step + j // WIDTH·block + j % WIDTH]: rows that lie one after another, or WIDTH side by side.
    """
    by = size + WIDTH
    for i in range(0, size, UPS):
        x, j = i // WIDTH * block + i % WIDTH, i // WIDTH * WIDTH
        while j + MANY * WIDTH <= wide:
            add_many(rows, x, rows, j // WIDTH * block, step, block, count, out, i * by + j, by)
            j += MANY * WIDTH
        while j < wide:
            add_one(rows, x, rows, j // WIDTH * block, step, block, count, out, i * by + j, by)
            j += WIDTH


@compiled()
def solve(matrix: np.ndarray, size: int, inverse: np.ndarray, out: np.ndarray) -> None:
    """out [size]: what the matrix times it is the right side; the matrix is overwritten. inverse: room for `size` numbers."""
    by = size + WIDTH
    # sixteen rows at a time: tiles take off what stands above, the square on the diagonal is factored in registers
    for i in range(0, size, WIDTH):
        for u in range(i, i + WIDTH, UPS):  # what the rows above say about these sixteen
            j = i
            while j + MANY * WIDTH <= by:
                less_many(matrix, u, matrix, j, by, WIDTH, i, matrix, u * by + j, by)
                j += MANY * WIDTH
            while j < by:
                less_one(matrix, u, matrix, j, by, WIDTH, i, matrix, u * by + j, by)
                j += WIDTH
        factor_square(matrix, i * by + i, by, inverse, i)
        for j in range(i + WIDTH, by, WIDTH):
            solve_square(matrix, i * by + j, by, inverse, i, matrix, i * by + i)
    for i in range(0, size, WIDTH):
        put(out, i, spread(matrix.dtype.type(0)))
    # backwards: whole blocks by lanes, its own block number by number
    for i in range(size - 1, -1, -1):
        total = spread(matrix.dtype.type(0))
        for j in range((i // WIDTH + 1) * WIDTH, size, WIDTH):
            total = total + take(matrix, i * by + j) * take(out, j)
        rest = matrix[i * by + size] - across(total)
        for j in range(i + 1, (i // WIDTH + 1) * WIDTH):
            rest -= matrix[i * by + j] * out[j]
        out[i] = rest * inverse[i]


@compiled()
def weighted_sum(table: np.ndarray, wide: int, listed: np.ndarray, weights: np.ndarray, out: np.ndarray) -> None:
    """out [wide]: the listed rows of a table of `wide` numbers a row, a multiple of WIDTH, with a weight each."""
    for j in range(0, wide, WIDTH):
        total = spread(table.dtype.type(0))
        for s in range(listed.size):
            total = total + repeat(weights, s) * take(table, listed[s] * wide + j)
        put(out, j, total)
