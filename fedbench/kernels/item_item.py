"""Item-to-item models: sums of products over pairs of a client's items, and scores that add up weights of its items."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor


def pair_sums(counts: Tensor, item: Tensor, value: Tensor, items: int, digits: int | None = None) -> Tensor:
    """[n], [R], [R] -> [M, M] float64, on the host: Σ over clients of v vᵀ, v a client's numbers for its items, 0 for others.

    counts: how many items each client has. digits: every product is rounded to so many binary digits after the point, and sums are exact.
    """
    who = torch.arange(len(counts), device=counts.device).repeat_interleave(counts).cpu().numpy()
    number = item.cpu().numpy().astype(np.int64)
    out = np.empty((items, items))
    # stable: the numbers of an item are added in the order of clients
    begin, by_item = starts(counts.cpu().numpy()), np.argsort(number, kind="stable")
    lists = begin, who, number, value.detach().cpu().numpy().astype(np.float64)
    (_sum_rounded if digits is not None else _sum)(*lists, by_item, starts(np.bincount(number, minlength=items)), 2.0 ** (digits or 0), out)
    return torch.from_numpy(out)


def starts(counts: np.ndarray) -> np.ndarray:
    """[n] -> [n+1]: where each list begins."""
    return np.concatenate([[0], np.cumsum(counts)])


@njit(parallel=True, nogil=True, cache=True)
def _sum(
    begin: np.ndarray,
    who: np.ndarray,
    item: np.ndarray,
    value: np.ndarray,
    by_item: np.ndarray,
    at: np.ndarray,
    scale: float,
    out: np.ndarray,
) -> None:
    """A row of `out` at a time, which stays in the cache: the lists of all clients that have its item."""
    # a thread has rows of `out` to itself: no locks, and sums do not depend on how many threads there are
    for i in prange(out.shape[0]):
        row = out[i]
        row[:] = 0
        for r in by_item[at[i] : at[i + 1]]:
            for s in range(begin[who[r]], begin[who[r] + 1]):
                row[item[s]] += value[r] * value[s]


@njit(parallel=True, nogil=True, cache=True)
def _sum_rounded(
    begin: np.ndarray,
    who: np.ndarray,
    item: np.ndarray,
    value: np.ndarray,
    by_item: np.ndarray,
    at: np.ndarray,
    scale: float,
    out: np.ndarray,
) -> None:
    """Sums of rounded products, in integers, a row of `out` at a time."""
    for i in prange(out.shape[0]):
        row = np.zeros(out.shape[1], np.int64)
        for r in by_item[at[i] : at[i + 1]]:
            for s in range(begin[who[r]], begin[who[r] + 1]):
                # whole numbers: their sum is the same in any order
                row[item[s]] += np.int64(np.rint(value[r] * value[s] * scale))
        for j in range(row.size):
            out[i, j] = row[j] / scale


def profile_scores(user: Tensor, items: Tensor, ranked: Tensor | None) -> Tensor:
    """[C, M], [M, M], item numbers [C, K] -> [C, K]; all items if none are given. Item k gets Σ_j user[j]·items[j, k]."""
    out = items.new_zeros(user.shape if ranked is None else ranked.shape)
    if ranked is None:
        _score_all(user.numpy(), items.numpy(), out.numpy())
    else:
        _score_some(user.numpy(), items.numpy(), ranked.numpy(), out.numpy())
    return out


@njit(parallel=True, nogil=True, cache=True)
def _score_all(user: np.ndarray, items: np.ndarray, out: np.ndarray) -> None:
    for c in prange(user.shape[0]):
        for j in range(user.shape[1]):
            # most of a client's numbers are 0
            if user[c, j]:
                times, row = items.dtype.type(user[c, j]), items[j]
                for k in range(row.size):
                    out[c, k] += times * row[k]


@njit(parallel=True, nogil=True, cache=True)
def _score_some(user: np.ndarray, items: np.ndarray, ranked: np.ndarray, out: np.ndarray) -> None:
    for c in prange(user.shape[0]):
        for j in range(user.shape[1]):
            # most of a client's numbers are 0
            if user[c, j]:
                times, row = items.dtype.type(user[c, j]), items[j]
                for k in range(ranked.shape[1]):
                    out[c, k] += times * row[ranked[c, k]]
