"""Weights of many mixtures, most of them 0: what a server that mixes every client's table for every client keeps instead of all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fedbench.kernels import mixtures

BLOCK = 1 << 19
"""weights that are worked out at once on a CPU: they stay in the cache"""
LARGE = 1 << 26
"""on other devices"""
DENSE_FROM = 0.3
"""share of weights that are not 0 from which on a product of whole matrices is faster than a sum of what is listed"""


class SparseWeights(NamedTuple):
    """[R, S]: for each of R mixtures the weights of S tables, as a list of those that are not 0, plus share ⊗ common."""

    ptr: Tensor
    """[R + 1] where the list of each mixture begins"""
    table: Tensor
    """[K] which tables, ascending in each list; 32 bits"""
    value: Tensor
    """[K] what they weigh, in float64"""
    share: Tensor
    """[R] how much of `common` each mixture takes besides"""
    common: Tensor
    """[S] weights that all mixtures have in common"""

    @classmethod
    def of(cls, blocks: Iterable[Tensor], share: Tensor, common: Tensor) -> SparseWeights:
        """From weights [r, S] of some mixtures at a time, which need not exist all at once."""
        counts, index, value = [share.new_zeros(1, dtype=torch.int64)], [share.new_zeros(0, dtype=torch.int32)], [share.new_zeros(0)]
        for block in blocks:
            some = block != 0
            counts.append(some.sum(dim=1))
            index.append(some.nonzero()[:, 1].int())
            value.append(block[some])
        return cls(torch.cat(counts).cumsum(0), torch.cat(index), torch.cat(value), share, common)

    def dense(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """[R, S] all weights."""
        out = torch.empty(len(self.share), len(self.common), dtype=dtype)
        at = 0
        for some in in_blocks(out):
            ends = self.ptr[at : at + len(some) + 1]
            row, mine = torch.arange(len(some)).repeat_interleave(ends.diff()), slice(int(ends[0]), int(ends[-1]))
            block = self.value.new_zeros(some.shape)
            block[row, self.table[mine].long()] = self.value[mine]
            some.copy_(block.add_(self.share[at : at + len(some), None] * self.common))
            at += len(some)
        return out

    def onto(self, mixed: Tensor | None, tables: Tensor, first: int) -> Tensor:
        """[R, M, ...]: mixtures of the tables [k, M, ...] from number `first` on, added to `mixed` if that is given; on a CPU."""
        flat = tables.contiguous().flatten(1)
        out = flat.new_empty(len(self.share), flat.shape[1]) if mixed is None else mixed.flatten(1)
        begin, end = (self._from(number) for number in (first, first + len(tables)))
        some = self.common[first : first + len(tables)]
        mixtures.mix(
            *(flat.numpy(), first, begin.numpy(), end.numpy(), self.table.numpy(), self.value.to(flat.dtype).numpy()),
            *(self.share.to(flat.dtype).numpy(), some.to(flat.dtype).numpy(), mixed is not None, out.numpy()),
        )
        return out.view(len(out), *tables.shape[1:])

    def _from(self, number: int) -> Tensor:
        """[R] where in each list the tables from `number` on begin."""
        if number <= 0 or number >= len(self.common):
            return self.ptr[:-1] if number <= 0 else self.ptr[1:]
        # Counted before each list and within it: lists are ascending, so what is below the number comes first.
        below = torch.cat([self.ptr[:1], (self.table < number).cumsum(0)])
        return self.ptr[:-1] + below[self.ptr[1:]] - below[self.ptr[:-1]]


def in_blocks(rows: Tensor) -> Iterator[Tensor]:
    """Some rows [r, S] at a time: what is made of them on a CPU stays in the cache."""
    return iter(rows.split(max(1, (BLOCK if rows.device.type == "cpu" else LARGE) // max(1, rows.shape[1])))) if len(rows) else iter(())


def collected(blocks: Iterable[Tensor], share: Tensor, common: Tensor) -> Tensor | SparseWeights:
    """[R, S] weights of mixtures, which come some rows [r, S] at a time, plus share ⊗ common; as a matrix on what is no CPU.

    There the product is one of matrices, and to list what is not 0 would make the host wait for the device.
    """
    if share.device.type == "cpu":
        return SparseWeights.of(blocks, share, common)
    rows = list(blocks)
    parts = share.split([len(some) for some in rows])
    return torch.cat(
        [common.new_zeros(0, len(common)), *(some.add_(part[:, None] * common) for some, part in zip(rows, parts, strict=True))]
    )


def faster_form(weights: Tensor | SparseWeights, tables: Tensor) -> Tensor | SparseWeights:
    """The weights [R, S] as the product with these tables is faster: listed, on a CPU, if few are not 0, else a matrix of their type."""
    here = tables.device.type == "cpu" and tables.dtype in (torch.float32, torch.float64)
    if isinstance(weights, SparseWeights):
        few = len(weights.value) < DENSE_FROM * len(weights.share) * len(weights.common)
        return weights if here and few else weights.dense(tables.dtype).to(tables)
    if here and int(weights.count_nonzero()) < DENSE_FROM * weights.numel():
        return SparseWeights.of(in_blocks(weights), *(weights.new_zeros(size) for size in weights.shape))
    return weights.to(tables)
