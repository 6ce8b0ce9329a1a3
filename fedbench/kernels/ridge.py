"""A client's part of matrix factorisation by squares, its user vector in closed form, and a fused kernel for that."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from fedbench.contract.algorithm import Batch
from fedbench.kernels.layers import DIVIDE, FAST


class Ridge(NamedTuple):
    """Σ (label - w·v)² over the samples + everywhere·Σ (w·v)² over the M rows of the table + l2·(samples + everywhere·M)|w|²."""

    everywhere: float
    """weight of the squared score of every item of the table"""
    l2: float
    positives: bool
    """samples with label 0 stand for the items not met, of which they were drawn; they have no part in w"""

    def met(self, batch: Batch) -> Tensor:
        """[B] 1 for a sample that counts, 0 for a negative and for padding."""
        return batch.weight * batch.label if self.positives else batch.weight

    def solution(self, rows: Tensor, batch: Batch, gram: Tensor, size: Tensor) -> Tensor:
        """w = (Σ v vᵀ + everywhere·VᵀV + l2·(samples + everywhere·M)·1)⁻¹ Σ label·v; rows [B, d], gram VᵀV, size M."""
        met = self.met(batch)
        shrink = self.l2 * (met.sum() + self.everywhere * size) * torch.eye(len(gram), dtype=rows.dtype, device=rows.device)
        normal = (met[:, None] * rows).T @ rows + self.everywhere * gram + shrink
        return torch.cholesky_solve(((met * batch.label) @ rows)[:, None], torch.linalg.cholesky_ex(normal).L)[:, 0]

    def loss(self, rows: Tensor, score: Tensor, batch: Batch, size: Tensor) -> Tensor:
        """Half the sum, negatives weighed so that they stand for all items not met, with l2 for the rows instead of w."""
        # (r - s)² + a0·s² of an item met is (1 + a0)·(s - r/(1 + a0))² and a constant
        a0, met = self.everywhere, self.met(batch)
        unmet = a0 * (size - met.sum()) / (batch.weight - met).sum().clamp(min=1)
        weight = (1 + a0) * met + unmet * (batch.weight - met)
        return (weight * ((score - batch.label / (1 + a0)) ** 2 + self.l2 * (rows**2).sum(dim=1))).sum() / 2


@njit(parallel=True, nogil=True, fastmath=FAST, error_model=DIVIDE, cache=True)
def _solve(
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


def solve(plan: Ridge, local: np.ndarray, label: np.ndarray, counts: np.ndarray, sent: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """`user` [C, d] of a block from what was sent: `items` [C, T, d], and `gram` and `size` of the whole table, the same to all."""
    items = sent["items"]
    kind = items.dtype.type
    user = np.empty((len(items), items.shape[2]), kind)
    base, mass = kind(plan.everywhere) * sent["gram"][0], kind(plan.everywhere) * sent["size"][0]
    _solve(items, local, label, counts, base, mass, kind(plan.l2), plan.positives, user)
    return {"user": user}
