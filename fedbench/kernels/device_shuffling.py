"""The order of clients' samples made by torch on any device that has float64, bit for bit as `shuffling.shuffle` makes it."""

from __future__ import annotations

import torch
from torch import Tensor

from fedbench.kernels.hashing import GOLDEN, MUL1, MUL2, TO_UNIT


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _right(x: Tensor, by: int) -> Tensor:
    """x >> by of 64 bits without a sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def unit(key: Tensor, counter: Tensor) -> Tensor:
    """hashing.unit of int64 keys and counters; torch's products of int64 wrap around as those of uint64 do."""
    x = key + (counter + 1) * _signed(int(GOLDEN))
    x = (x ^ _right(x, 30)) * _signed(int(MUL1))
    x = (x ^ _right(x, 27)) * _signed(int(MUL2))
    x = x ^ _right(x, 31)
    return _right(x, 11).to(torch.float64) * TO_UNIT


def orders(stream: Tensor, count: Tensor, width: int, epoch: int, batch: int) -> Tensor:
    """[C, width] the order of each client's samples in an epoch; padding stays at the end, and so does everything in a client of one batch.

    The shuffle swaps the numbers at i and at[i] for i from the last down to 1. Number i comes to its last place in step i, from at[i]. What
    lies at a place p before step i came there in the nearest step before, the smallest s > i with at[s] = p, from place s; so it is what
    lay at s before step s, and so on: a chain, which is followed in twice as long strides each time.
    """
    i = torch.arange(width, device=stream.device)
    n = count[:, None]
    at = (unit(stream[:, None], epoch * n + i) * (i + 1).to(torch.float64)).to(torch.int64)
    at = torch.where((i < n) & (n > batch), at, i)
    # by place, and for one place by step: the next in the row is the step before with the same place
    place, step = torch.sort(at, dim=1, stable=True)
    same = place[:, :-1] == place[:, 1:]
    nobody = torch.full_like(at, width)
    before = nobody.scatter(1, step[:, :-1], torch.where(same, step[:, 1:], width))
    """[C, width] the nearest step before i with the same place; width: none"""
    others = torch.where(at == i, width, i)
    written = nobody.scatter_reduce(1, at, others.expand_as(at), "amin")
    """[C, width] the nearest step before i that put something at i"""
    lies = torch.where(written == width, i, written)
    for _ in range(max(1, width - 1).bit_length()):
        lies = lies.gather(1, lies)
    """[C, width] what lies at i before step i"""
    found = lies.gather(1, before.clamp(max=width - 1))
    return torch.where(at == i, lies, torch.where(before == width, at, found))
