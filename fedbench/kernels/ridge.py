"""Every client's ridge regression at once: its user vector in closed form."""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from fedbench.kernels.layers import DIVIDE, FAST


@njit(parallel=True, nogil=True, fastmath=FAST, error_model=DIVIDE, cache=True)
def solve_users(
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
    """items [C, T, d], local and label [C, S], base [d, d] -> user [C, d]. Only lower triangles are made and read."""
    d = base.shape[0]
    for c in prange(counts.size):
        normal = base.copy()
        right = np.zeros(d, base.dtype)
        rows = np.zeros((4, d), base.dtype)
        used, waiting = 0, 0
        for s in range(counts[c]):
            if label[c, s] > 0 or not positives:
                row = items[c, local[c, s]]
                right += label[c, s] * row
                rows[waiting] = row
                used += 1
                waiting += 1
            if waiting == 4 or (s == counts[c] - 1 and waiting > 0):
                rows[waiting:] = 0
                _add_squares(rows, normal)
                waiting = 0
        for i in range(d):
            normal[i, i] += l2 * (used + mass)
        _cholesky(normal)
        for i in range(d):
            total = right[i]
            for j in range(i):
                total -= normal[i, j] * right[j]
            right[i] = total / normal[i, i]
        for i in range(d - 1, -1, -1):
            right[i] /= normal[i, i]
            for j in range(i):
                right[j] -= normal[i, j] * right[i]
        user[c] = right


@njit(fastmath=FAST, error_model=DIVIDE, cache=True)
def _add_squares(rows: np.ndarray, out: np.ndarray) -> None:
    """out += Σ row rowᵀ of four rows, so that `out` is read and written once for all of them."""
    first, second, third, fourth = rows[0], rows[1], rows[2], rows[3]
    for i in range(out.shape[0]):
        a, b, c, e = first[i], second[i], third[i], fourth[i]
        line = out[i]
        for j in range(min(out.shape[0], (i // 16 + 1) * 16)):  # to a multiple of 16: whole vectors
            line[j] += a * first[j] + b * second[j] + c * third[j] + e * fourth[j]


@njit(fastmath=FAST, error_model=DIVIDE, cache=True)
def _cholesky(matrix: np.ndarray) -> None:
    """The lower triangle becomes its Cholesky factor."""
    for i in range(matrix.shape[0]):
        mine = matrix[i]
        for j in range(i + 1):
            other = matrix[j]
            total = mine[j]
            for k in range(j):
                total -= mine[k] * other[k]
            mine[j] = np.sqrt(total) if i == j else total / other[j]
