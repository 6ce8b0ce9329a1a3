"""A client's part of matrix factorisation by squares: its user vector in closed form, and a kernel that solves it for many clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedbench.contract.algorithm import Batch
from fedbench.kernels.layers import padded
from fedbench.kernels.ridge import solve_listed_users, solve_users


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


def solve(plan: Ridge, local: np.ndarray, label: np.ndarray, counts: np.ndarray, sent: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """`user` [C, d] of a block from what was sent: `items` [C, T, d], and `gram` and `size` of the whole table, the same to all."""
    items = sent["items"]
    kind = items.dtype.type
    user = np.empty((len(items), items.shape[2]), kind)
    base, mass = kind(plan.everywhere) * sent["gram"][0], kind(plan.everywhere) * sent["size"][0]
    solve_users(items, local, label, counts, base, mass, kind(plan.l2), plan.positives, user)
    return {"user": user}


class Lists(NamedTuple):
    """Samples of C clients as lists, see fedbench.data.sampling.Samples: where each client's begin and end, and its rows begin."""

    begin: np.ndarray
    end: np.ndarray
    local: np.ndarray
    label: np.ndarray
    row_begin: np.ndarray
    row: np.ndarray


def solve_lists(plan: Ridge, samples: Lists, sent: Mapping[str, Tensor]) -> Tensor:
    """[C, d] the user vectors from the whole table that was sent: what `solve` makes of blocks, to the last bit."""
    items, base = sent["items"], plan.everywhere * sent["gram"]
    user, kind = items.new_empty(len(samples.begin), items.shape[1]), items.numpy().dtype.type
    given = items.contiguous().numpy(), np.empty(0, kind), base.contiguous().numpy(), *samples, kind(plan.everywhere) * sent["size"].numpy()
    solve_listed_users(*given, kind(plan.l2), plan.positives, user.numpy())
    return user


def solve_where_they_lie(plan: Ridge, samples: Lists, sent: Mapping[str, Tensor]) -> Tensor:
    """[C, d] the user vectors from the whole table that was sent: `items` [M, d], `gram` and `size`.

    In the basis of the eigenvectors of VᵀV, where the clients' matrices are diagonal but for their own samples.
    """
    items = sent["items"]
    d, wide = items.shape[1], padded.py_func(items.shape[1])
    # in float64, for directions of close eigenvalues turn on the last digits
    values, basis = torch.linalg.eigh(sent["gram"].double())
    basis = basis.to(items)
    table, diagonal = items.new_zeros(len(items), wide), items.new_ones(wide)
    table[:, :d] = items @ basis
    # rounding may leave an eigenvalue below 0
    diagonal[:d] = plan.everywhere * values.clamp(min=0)
    user, kind = table.new_empty(len(samples.begin), wide), table.numpy().dtype.type
    mass, l2 = kind(plan.everywhere * sent["size"].item()), kind(plan.l2)
    base = torch.diag(diagonal).numpy()
    solve_listed_users(table.numpy(), diagonal.numpy(), base, *samples, mass, l2, plan.positives, user.numpy())
    return user[:, :d] @ basis.T
