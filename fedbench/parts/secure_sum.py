"""Secure aggregation, simulated: the server learns the sum of an upload over the cohort and no single client's part of it.

Each client rounds its numbers to fixed point (int64) and adds a mask for each of its neighbours: one that it shares with the
neighbour, which subtracts it. Integers wrap around, so the masks cancel exactly and one masked upload is uniform noise.
Neighbours are the next and the previous NEIGHBOURS clients in a ring, not all others: the masks cost O(n) instead of O(n²), and
it takes all of a client's 2·NEIGHBOURS neighbours and the server together to unmask it. Key agreement and clients that vanish
after they agreed are not simulated.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from fedbench.contract.randomness import keys
from fedbench.contract.uploads import Rows, flat
from fedbench.errors import FedbenchError
from fedbench.kernels.hashing import bits

FRACTION = 36
"""binary digits after the point: a resolution of 1.5e-11"""
NEIGHBOURS = 2
AT_ONCE = 1 << 14
"""rows that are rounded at once"""


def to_fixed(values: np.ndarray) -> np.ndarray:
    """[n, ...] float -> [n, ...] int64, such that the sum over n fits."""
    scaled = np.rint(values.astype(np.float64) * 2.0**FRACTION)
    # before the cast: a number out of range has no int64
    check_range(np.abs(scaled).max(initial=0.0) / 2.0**FRACTION, len(values))
    return scaled.astype(np.int64)


def room(clients: int) -> float:
    """How large a number may be for so many of them to be added up in fixed point."""
    return 2.0 ** (62 - FRACTION) / max(1, clients)


def check_range(largest: float, clients: int) -> None:
    """Raise FedbenchError unless so many numbers of this size can be added up in fixed point."""
    if not largest < room(clients):
        raise FedbenchError(
            f"a securely summed upload is not finite or over {room(clients):.3g}, too much for the fixed point: training diverged"
        )


@njit(parallel=True, nogil=True, cache=True)
def _mask(pair: np.ndarray, values: np.ndarray) -> None:
    """values [n, D] uint64, in place: client c adds the mask of pair (c, c + 1 + j) and subtracts that of (c - 1 - j, c)."""
    n, width = pair.shape
    for c in prange(n):
        for j in range(width):
            give, take = pair[c, j], pair[(c - 1 - j) % n, j]
            for i in range(values.shape[1]):
                values[c, i] += bits(give, i) - bits(take, i)


def masked(values: np.ndarray, clients: np.ndarray, seed: int, when: int) -> np.ndarray:
    """[n, D] int64 -> [n, D] int64: what the clients send."""
    n = len(values)
    width = min(NEIGHBOURS, n - 1)
    pair = np.empty((n, width), np.uint64)
    # one key a pair, which both of its clients know and the server does not
    for j in range(width):
        pair[:, j] = keys(seed, when, f"mask/{j}", clients)
    # unsigned: these wrap around by definition
    out = values.view(np.uint64).copy()
    _mask(pair, out)
    return out.view(np.int64)


def masked_sum(values: Tensor, clients: np.ndarray, seed: int, when: int) -> Tensor:
    """[n, ...] -> [...]: what the server can make of it."""
    fixed = to_fixed(flat(values).cpu().numpy())
    total = masked(fixed, clients, seed, when).sum(axis=0)
    return torch.from_numpy(total / 2.0**FRACTION).to(values).view(values.shape[1:])


def pair_sum(rows: Rows, items: int) -> Tensor:
    """[M, M]: `masked_sum` of every client's v vᵀ, bit for bit, without a matrix a client: its masks would cancel, so none is added."""
    check_rows(rows, float(rows.value.square().max()) if len(rows.value) else 0.0)
    return rows.gram(items, FRACTION)


def row_sum(rows: Rows, items: int) -> Tensor:
    """[M, ...]: `masked_sum` of every client's whole table, bit for bit, without a table a client: rows that it did not touch are 0."""
    check_rows(rows, float(rows.value.abs().max()) if len(rows.value) else 0.0)
    total = torch.zeros(items, *rows.value.shape[1:], dtype=torch.int64, device=rows.value.device)
    for item, value in zip(rows.item.split(AT_ONCE), rows.value.split(AT_ONCE), strict=True):
        # every number is rounded before it is added, as each device rounds its own
        total.index_add_(0, item, (value.cpu().double() * 2.0**FRACTION).round().to(total))
    return (rows.total(total).cpu().double() / 2.0**FRACTION).to(rows.value)


def check_rows(rows: Rows, here: float) -> None:
    """Raise FedbenchError, on all workers, unless numbers as large as this worker's largest can be added up in fixed point."""
    # asked of all workers: one that raised alone would leave the others waiting
    too_large = rows.total(torch.tensor([0.0 if here < room(rows.clients) else 1.0], device=rows.value.device))
    check_range(float("inf") if too_large.any() else here, rows.clients)
