"""A cohort cut into blocks of like clients; a block is one set of tensors with a leading client dimension C."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from fedbench.contract.algorithm import Stage
from fedbench.data.sampling import Samples
from fedbench.kernels.shuffling import orders


@dataclass(frozen=True)
class Block:
    """C like clients packed in one tensor, on the run's device; short ones are padded."""

    position: np.ndarray
    """[C] positions in the cohort, on the host"""
    clients: Tensor
    """[C] client numbers"""
    rows: Tensor
    """[C, T] item numbers of the touched rows, padded with 0"""
    valid: Tensor
    """[R] positions in the flattened [C·T] that are not padding"""
    real: Tensor
    """[C, T] whether a row is not padding"""
    local: Tensor
    """[C, S] index into the touched rows"""
    label: Tensor
    """[C, S]"""
    count: Tensor
    """[C] samples"""
    counts: np.ndarray
    """[C] samples, on the host"""
    touched: np.ndarray
    """[C] rows, on the host"""
    stream: np.ndarray
    """[C] keys of the shuffles, on the host"""
    halves: np.ndarray
    """[C] keys of the support and query halves, on the host"""
    sent: int
    """what reaches these clients of the server's answer, see sending.sent_to"""
    epochs: int
    """local epochs that these clients finish"""

    def order(self, epoch: int, batch: int) -> Tensor:
        """[C, S] the order of samples in an epoch; padding stays at the end."""
        return moved(self._shuffled(self.stream, epoch, batch), self.local.device)

    def _shuffled(self, stream: np.ndarray, epoch: int, batch: int) -> np.ndarray:
        flat = np.empty(int(self.counts.sum()), np.int64)
        ptr = np.concatenate([[0], np.cumsum(self.counts)])
        orders(stream, ptr, epoch, batch, flat)
        out = np.broadcast_to(np.arange(self.local.shape[1]), self.local.shape).copy()
        pad(flat, ptr, np.arange(len(self.counts)), out)
        return out

    def part(self, stage: Stage) -> Block:
        """This block with the samples of one stage alone: of the shuffled ones the first half (support) or the second (query)."""
        if stage.part == "all" and stage.max_samples is None:
            return self
        half = -(-self.counts // 2)
        first = half if stage.part == "query" else np.zeros_like(half)
        counts = {"all": self.counts, "support": half, "query": self.counts - half}[stage.part]
        counts = counts if stage.max_samples is None else np.minimum(counts, stage.max_samples)
        where = first[:, None] + np.arange(max(1, int(counts.max())))
        order = self._shuffled(self.halves, 0, 1)
        take = moved(np.take_along_axis(order, np.minimum(where, order.shape[1] - 1), axis=1), self.local.device)
        count = moved(counts, self.local.device)
        return replace(self, local=self.local.gather(1, take), label=self.label.gather(1, take), count=count, counts=counts)


@njit(parallel=True, cache=True)
def pad(values: np.ndarray, ptr: np.ndarray, which: np.ndarray, out: np.ndarray) -> None:
    """out [C, W]: the CSR lists `which`, each at the start of its row; the rest of a row is left as it is."""
    for c in prange(which.size):
        start = ptr[which[c]]
        for i in range(ptr[which[c] + 1] - start):
            out[c, i] = values[start + i]


def blocks(samples: Samples, kind: np.ndarray, batch: int, block_rows: int) -> Iterator[np.ndarray]:
    """Positions in the cohort in blocks of at most `block_rows` padded rows: kinds apart, like sizes together."""
    size = np.maximum(samples.touched, 1)
    order = np.lexsort((size, -(-samples.counts // batch), kind))
    start = 0
    while start < len(order):
        stop = start + 1
        widest = size[order[start]]
        while (
            stop < len(order)
            and kind[order[stop]] == kind[order[start]]
            and max(widest, size[order[stop]]) * (stop + 1 - start) <= block_rows
        ):
            widest = max(widest, size[order[stop]])
            stop += 1
        yield order[start:stop]
        start = stop


def pack(
    samples: Samples,
    position: np.ndarray,
    stream: np.ndarray,
    halves: np.ndarray,
    sent: int,
    dtype: torch.dtype,
    device: str,
    epochs: int,
) -> Block:
    """One block's tensors, made on the host and moved once."""
    count, touched = samples.counts[position], samples.touched[position]
    rows = np.zeros((len(position), max(1, int(touched.max()))), np.int64)
    local = np.zeros((len(position), max(1, int(count.max()))), np.int64)
    label: np.ndarray = np.zeros(local.shape, host_type(dtype))
    pad(samples.row, samples.row_ptr, position, rows)
    pad(samples.local, samples.ptr, position, local)
    pad(samples.label, samples.ptr, position, label)
    real = np.arange(rows.shape[1]) < touched[:, None]

    def move(array: np.ndarray) -> Tensor:
        return moved(array, device)

    return Block(position, move(samples.clients[position]), move(rows), move(np.flatnonzero(real)), move(real), move(local), move(label),
                 move(count), count, touched, stream[position], halves[position], sent, epochs)  # fmt: skip


def moved(array: np.ndarray, device: str | torch.device) -> Tensor:
    """An array of the host on the run's device; a GPU fetches it by itself, from memory that stays where it is, while the host goes on."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if torch.device(device).type == "cuda" else tensor.to(device)


def host_type(dtype: torch.dtype) -> type:
    """numpy's type for a torch dtype."""
    return np.float64 if dtype == torch.float64 else np.float32


class ArrayPool:
    """Reuse pool for a round's large arrays: memory fresh from the system costs a page fault for every page."""

    def __init__(self) -> None:
        self.kept: dict[str, list[np.ndarray]] = {}
        """by what they are for, two at most: a round's uploads are often held until the next one is done"""

    def empty(self, name: str, size: int, kind: type) -> np.ndarray:
        """Uninitialised array from the reuse pool."""
        kept = self.kept.setdefault(name, [])
        free = [at for at in range(len(kept)) if sys.getrefcount(kept[at]) == 2]
        fits = [at for at in free if kept[at].size >= size and kept[at].dtype == kind]
        if not fits:
            busy = [array for at, array in enumerate(kept) if at not in free]
            kept[:] = [*busy[-1:], np.empty(size + size // 8, kind)]  # the next cohort may be somewhat larger
            fits = [-1]
        return kept[fits[0]][:size]
