"""A server's Newton step on an item table, from what item rows changed and one d x d statistic of all clients together."""

from __future__ import annotations

import torch
from torch import Tensor

from fedbench.contract.algorithm import Tensors
from fedbench.contract.uploads import Rows


def newton_step(server: Tensors, rows: Rows, statistic: Tensor, a0: float, l2: float, rate: float) -> Tensors:
    """V_i -= rate·H_i⁻¹ g_i with H_i = (c_i + a0·U)(G/U + l2·1), everything scaled from n clients to all U, here divided by U.

    rows: Σ (r - w·v_i) w over the clients that have item i, one row a client; statistic: G = Σ w wᵀ over the clients, packed.
    server: V as "items", how often item i was sent as "count", and the clients seen so far as "visits".
    """
    items, n = server["items"], rows.clients
    total, senders = rows.combined(len(items), "sum")
    count = server["count"] + senders
    visits = server["visits"] + n
    weight = (count / visits + a0)[:, None]
    mean = unpacked(statistic, items.shape[1]) / n
    gradient = a0 * items @ mean - total / n + l2 * weight * items
    curvature, basis = torch.linalg.eigh(mean)
    # an item that nobody has sent yet has weight 0 on ratings, and no gradient either
    step = (gradient @ basis) / (weight.clamp(min=1 / visits) * (curvature.clamp(min=0) + l2)) @ basis.T
    return {"items": items - rate * step, "count": count, "visits": visits}


def packed(matrix: Tensor) -> Tensor:
    """[d, d] symmetric -> [d(d+1)/2]: its upper triangle."""
    row, column = torch.triu_indices(*matrix.shape, device=matrix.device)
    return matrix.flatten().gather(0, row * len(matrix) + column)


def unpacked(triangle: Tensor, dim: int) -> Tensor:
    """[d(d+1)/2] -> [d, d] symmetric."""
    row, column = torch.triu_indices(dim, dim, device=triangle.device)
    matrix = triangle.new_zeros(dim, dim)
    matrix[row, column] = matrix[column, row] = triangle
    return matrix
