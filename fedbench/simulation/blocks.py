"""A cohort cut into blocks of like clients; a block is one set of tensors with a leading client dimension C."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedbench.contract.algorithm import Stage
from fedbench.data.sampling import Samples
from fedbench.kernels import device_shuffling
from fedbench.kernels.shuffling import orders
from fedbench.kernels.threads import shared


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
    height: Tensor
    """[C] rows"""
    touched: np.ndarray
    """[C] rows, on the host"""
    key: Tensor
    """[C] keys of the shuffles"""
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
        # one batch each: no order to choose
        if (self.counts <= batch).all():
            return torch.arange(self.local.shape[1], device=self.local.device).expand(self.local.shape)
        if self.local.device.type == "cuda":
            return device_shuffling.orders(self.key, self.count, self.local.shape[1], epoch, batch)
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
        first, counts = share_of(stage, self.counts)
        where = first[:, None] + np.arange(max(1, int(counts.max())))
        order = self._shuffled(self.halves, 0, 1)
        # behind a client's samples any index will do, for `count` masks them
        take = moved(np.take_along_axis(order, np.minimum(where, order.shape[1] - 1), axis=1), self.local.device)
        count = moved(counts, self.local.device)
        return replace(self, local=self.local.gather(1, take), label=self.label.gather(1, take), count=count, counts=counts)


def share_of(stage: Stage, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[C] the first sample of a stage, and how many it has, of the samples that were shuffled for it."""
    # the odd sample is in the support half
    half = -(-counts // 2)
    first = half if stage.part == "query" else np.zeros_like(half)
    many = {"all": counts, "support": half, "query": counts - half}[stage.part]
    return first, many if stage.max_samples is None else np.minimum(many, stage.max_samples)


def part_of(samples: Samples, stage: Stage, halves: np.ndarray) -> Samples:
    """The samples of one stage alone, as `Block.part` has them, with the same rows. halves [n]: keys of the halves."""
    if stage.part == "all" and stage.max_samples is None:
        return samples
    order = np.empty(len(samples.local), np.int64)
    orders(halves, samples.ptr, 0, 1, order)
    first, counts = share_of(stage, samples.counts)
    ptr = np.concatenate([[0], np.cumsum(counts)])
    # the place in the order of each sample of the stage, then the sample that stands there
    take = np.repeat(samples.ptr[:-1] + first - ptr[:-1], counts) + np.arange(ptr[-1])
    take = np.repeat(samples.ptr[:-1], counts) + order[take]
    return Samples(samples.clients, ptr, samples.local[take], samples.label[take], samples.row_ptr, samples.row)


@shared(rows=lambda values, ptr, which, out: len(which))
def pad(low: int, high: int, values: np.ndarray, ptr: np.ndarray, which: np.ndarray, out: np.ndarray) -> None:
    """out [C, W]: the CSR lists `which`, each at the start of its row; the rest of a row is left as it is."""
    for c in range(low, high):
        start = ptr[which[c]]
        for i in range(ptr[which[c] + 1] - start):
            out[c, i] = values[start + i]


def blocks(samples: Samples, kind: np.ndarray, batch: int, block_rows: int) -> Iterator[np.ndarray]:
    """Positions in the cohort in blocks of at most `block_rows` padded rows: kinds apart, like sizes together."""
    size = np.maximum(samples.touched, 1)
    # kinds first, then batches an epoch, then rows: the last key of lexsort leads
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

    def index(array: np.ndarray) -> Tensor:
        """Whole numbers travel in 32 bits; torch's indices have 64."""
        return move(array.astype(np.int32)).long() if torch.device(device).type == "cuda" else move(array)

    key = stream[position]
    return Block(position, move(samples.clients[position]), index(rows), index(np.flatnonzero(real)), move(real), index(local), move(label),
                 index(count), count, index(touched), touched, move(key.view(np.int64)), key, halves[position], sent, epochs)  # fmt: skip


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
        # 2: this list and the call itself; a view of the array, such as a round's uploads, would make it more
        free = [at for at in range(len(kept)) if sys.getrefcount(kept[at]) == 2]
        fits = [at for at in free if kept[at].size >= size and kept[at].dtype == kind]
        if not fits:
            busy = [array for at, array in enumerate(kept) if at not in free]
            kept[:] = [*busy[-1:], np.empty(size + size // 8, kind)]  # the next cohort may be somewhat larger
            fits = [-1]
        return kept[fits[0]][:size]
