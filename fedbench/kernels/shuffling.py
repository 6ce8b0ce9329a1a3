"""The order of a client's samples in an epoch: a function of its key and the epoch alone."""

from __future__ import annotations

import numpy as np
from numba import njit

from fedbench.kernels.hashing import unit
from fedbench.kernels.threads import shared


@njit(nogil=True, cache=True)
def shuffle(order: np.ndarray, key: np.uint64, epoch: int, batch: int) -> None:
    """Fill `order` with a permutation of its positions for this epoch; a client with one batch needs none."""
    for i in range(order.size):
        order[i] = i
    permute(order, key, epoch, batch)


@njit(nogil=True, cache=True)
def permute(values: np.ndarray, key: np.uint64, epoch: int, batch: int) -> None:
    """Permute values in place, as `shuffle` does positions."""
    n = values.size
    if n > batch:
        # every epoch has n numbers of the stream to itself
        swap, first = np.empty(n, np.int32), np.uint64(epoch * n)
        # a loop of its own, which vectorises: by 32-bit numbers, others have no vector instructions for it before AVX-512
        for i in range(n):
            swap[i] = np.int32(unit(key, first + np.uint64(i)) * np.float64(np.int32(i + 1)))
        # Fisher-Yates; device_shuffling.py makes the same permutations on a GPU, so change both
        for i in range(n - 1, 0, -1):
            j = swap[i]
            values[i], values[j] = values[j], values[i]


@shared()
def orders(low: int, high: int, stream: np.ndarray, ptr: np.ndarray, epoch: int, batch: int, out: np.ndarray) -> None:
    """out [S]: every client's order of samples in an epoch, positions within the client."""
    for c in range(low, high):
        shuffle(out[ptr[c] : ptr[c + 1]], stream[c], epoch, batch)
