"""What similarity of item tables is measured on: their rows along the first principal component."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedbench.errors import NotFinite
from fedbench.kernels.layers import DIVIDE, FAST, SQUARE, TILE, padded, products, take_rows, zeros
from fedbench.kernels.threads import shared
from fedbench.kernels.vectors import WIDTH, put, repeat, spread, take

BLOCK = 1 << 26
"""numbers a chunk of a large product may hold"""


def in_float64(values: Tensor) -> Tensor:
    """Numbers in double precision: where they are or, if that device has none (Apple's), on the host."""
    return (values.cpu() if values.device.type == "mps" else values).double()


def signatures(tables: Tensor) -> Tensor:
    """[S, M, d] -> [S, M]: each client's items along the first principal component of its table, the largest entry positive."""
    # an eigenvector has no sign of its own: without this rule equal tables could get opposite signatures
    scores = (_scores_on_cpu if tables.device.type == "cpu" else _scores_in_chunks)(tables)
    largest = scores.gather(1, scores.abs().argmax(dim=1, keepdim=True))
    return scores.mul_(torch.where(largest < 0, -1.0, 1.0))


def _scores_in_chunks(tables: Tensor) -> Tensor:
    """Signatures [S, M] whose sign is still open, by torch on any device, a few tables at a time."""
    scores = tables.new_empty(tables.shape[:2])
    size = max(1, BLOCK // max(1, tables[0].numel()))
    for chunk, out in zip(tables.split(size), scores.split(size), strict=True):
        centred = chunk - chunk.mean(dim=1, keepdim=True)
        # in float64, for directions of close eigenvalues turn on the last digits
        direction = _direction(in_float64(centred.transpose(1, 2) @ centred)).to(tables)
        out.copy_((centred @ direction.unsqueeze(-1)).squeeze(-1))
    return scores


def _scores_on_cpu(tables: Tensor) -> Tensor:
    """Signatures [S, M] whose sign is still open, by compiled kernels that make no centred copy of the tables."""
    mean, scores = tables.mean(dim=1), tables.new_empty(tables.shape[:2])
    covariance = torch.zeros(len(tables), tables.shape[2], tables.shape[2], dtype=torch.float64)
    _covariances(tables.numpy(), mean.numpy(), covariance.numpy())
    _along(tables.numpy(), mean.numpy(), _direction(covariance).to(tables.dtype).numpy(), scores.numpy())
    return scores


def _direction(covariance: Tensor) -> Tensor:
    """[S, d, d] -> [S, d] the first principal components."""
    if not covariance.isfinite().all():
        raise NotFinite("an uploaded item table")
    return torch.linalg.eigh(covariance).eigenvectors[:, :, -1]


@shared(fastmath=FAST, error_model=DIVIDE)
def _covariances(low: int, high: int, tables: np.ndarray, mean: np.ndarray, out: np.ndarray) -> None:
    """out [S, d, d] += the products of every table's columns less their means, which are summed in float64 over tiles of items."""
    clients, items, d = tables.shape
    everything = np.arange(items, dtype=np.int32)
    for c in range(low, high):
        beside, part, spare = zeros(d * TILE, tables), zeros(d * d, tables), zeros((TILE // WIDTH + 2) * SQUARE, tables)
        for start in range(0, items, TILE):
            some = everything[start : start + TILE]
            n, wide = padded(some.size), d * WIDTH
            take_rows(tables[c], some, beside, 0, wide)
            for y in range(0, n * d, WIDTH):
                put(beside, y, take(beside, y) - repeat(mean[c], y // WIDTH % d))
            # padding repeats the last row: 0 after centring, it does not count
            for s in range(some.size, n):
                beside[(n - WIDTH) * d + s % WIDTH : n * d : WIDTH] = 0
            products(beside, 0, wide, d, beside, 0, wide, d, part, 0, n // WIDTH, spare)
            # a tile is summed in float32, which is fast, and tiles in float64, which is exact enough
            for j in range(d):
                for k in range(d):
                    out[c, j, k] += part[j * d + k]
            part[:] = 0


@shared(fastmath=FAST, error_model=DIVIDE)
def _along(low: int, high: int, tables: np.ndarray, mean: np.ndarray, direction: np.ndarray, out: np.ndarray) -> None:
    """out [S, M]: each row of a table less the mean, along the table's direction [S, d]."""
    clients, items, d = tables.shape
    everything = np.arange(items, dtype=np.int32)
    for c in range(low, high):
        beside, scores = zeros(d * TILE, tables), zeros(TILE, tables)
        for start in range(0, items, TILE):
            some = everything[start : start + TILE]
            take_rows(tables[c], some, beside, 0, d * WIDTH)
            for s in range(0, some.size, WIDTH):
                score = spread(tables.dtype.type(0))
                for j in range(d):
                    score = score + repeat(direction[c], j) * (take(beside, s * d + j * WIDTH) - repeat(mean[c], j))
                put(scores, s, score)
            out[c, start : start + TILE] = scores[: some.size]
