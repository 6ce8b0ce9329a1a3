"""What a round draws: its cohort of clients, and each client's training samples with fresh negatives."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numba import njit, prange

from fedbench.contract.randomness import keys, purpose_base
from fedbench.data.split import Split, from_counts, smallest, unseen
from fedbench.kernels.hashing import GOLDEN, LOW_BITS, S31, almost_mixed, below
from fedbench.kernels.vectors import prefetch


@dataclass(frozen=True)
class Samples:
    """A cohort's training samples of one round, CSR by position in the cohort: samples by `ptr`, touched rows by `row_ptr`."""

    clients: np.ndarray
    """[n] client numbers"""
    ptr: np.ndarray
    """[n+1]"""
    local: np.ndarray
    """[S] int32: which of the client's touched rows a sample uses"""
    label: np.ndarray
    """[S] float32"""
    row_ptr: np.ndarray
    """[n+1]"""
    row: np.ndarray
    """[R] int32: item numbers of the touched rows, in order of first use"""

    @cached_property
    def counts(self) -> np.ndarray:
        return self.ptr[1:] - self.ptr[:-1]

    @cached_property
    def touched(self) -> np.ndarray:
        return self.row_ptr[1:] - self.row_ptr[:-1]


@njit(cache=True)
def _outside(avoid: np.ndarray, items: int) -> np.ndarray:
    """[items - len(avoid)] the items that are not in the sorted list `avoid`, ascending."""
    out = np.empty(items - avoid.size, np.int32)
    item = 0
    for k in range(avoid.size + 1):
        stop = avoid[k] if k < avoid.size else items
        for i in range(item, stop):
            out[i - k] = i
        item = stop + 1
    return out


@njit(parallel=True, nogil=True, cache=True)
def _sample(
    stream: np.ndarray,
    clients: np.ndarray,
    train_ptr: np.ndarray,
    train_item: np.ndarray,
    avoid_ptr: np.ndarray,
    avoid_item: np.ndarray,
    items: int,
    k: int,
    ptr: np.ndarray,
    local: np.ndarray,
    label: np.ndarray,
    row: np.ndarray,
    touched: np.ndarray,
) -> None:
    """For each client: every training item, each followed by k negatives outside its `avoid` list, different ones if there are k."""
    for c in prange(clients.size):
        u = clients[c]
        if c + 2 < clients.size:  # lists of other clients lie far away
            prefetch(train_item, train_ptr[clients[c + 2]])
            prefetch(avoid_item, avoid_ptr[clients[c + 2]])
        avoid = avoid_item[avoid_ptr[u] : avoid_ptr[u + 1]]
        free = items - avoid.size
        start, total = ptr[c], ptr[c + 1] - ptr[c]
        # many draws: the list of items to draw from; few among many items: a search a draw
        listed = _outside(avoid, items) if items <= 16 * total else avoid[:0]
        size = 1
        while size < min(items, 2 * total):
            size *= 2
        known, place = np.full(size, -1, np.int32), np.empty(size, np.int32)
        at, rows, counter = start, 0, 0
        for p in range(train_ptr[u], train_ptr[u + 1]):
            first = at
            for j in range(k + 1 if free > 0 else 1):
                pick = np.int64(train_item[p])
                repeated = j > 0
                while repeated:
                    rank = below(stream[c], counter, free)
                    pick = np.int64(listed[rank]) if listed.size else unseen(avoid, rank)
                    counter += 1
                    repeated = False
                    if free >= k:
                        for s in range(first + 1, at):
                            if row[start + local[s]] == pick:
                                repeated = True
                                break
                slot = pick & (size - 1)
                while known[slot] >= 0 and known[slot] != pick:
                    slot = (slot + 1) & (size - 1)
                if known[slot] < 0:
                    known[slot] = pick
                    place[slot] = rows
                    row[start + rows] = pick
                    rows += 1
                local[at] = place[slot]
                label[at] = 1.0 if j == 0 else 0.0
                at += 1
        touched[c] = rows


@njit(parallel=True, nogil=True, cache=True)
def _close_gaps(values: np.ndarray, ptr: np.ndarray, out_ptr: np.ndarray, out: np.ndarray) -> None:
    """out: the first values of each list of `values`, as many as its list in `out` is long."""
    for c in prange(out_ptr.size - 1):
        for i in range(out_ptr[c + 1] - out_ptr[c]):
            out[out_ptr[c] + i] = values[ptr[c] + i]


@njit(parallel=True, nogil=True, cache=True)
def _sample_ratings(
    stream: np.ndarray,
    clients: np.ndarray,
    train_ptr: np.ndarray,
    train_item: np.ndarray,
    train_rating: np.ndarray,
    avoid_ptr: np.ndarray,
    avoid_item: np.ndarray,
    items: int,
    known: bool,
    ptr: np.ndarray,
    label: np.ndarray,
    row: np.ndarray,
) -> None:
    """For each client: its rated items, then different ones outside its `avoid` list, as many as there is room for."""
    for c in prange(clients.size):
        u = clients[c]
        rated = train_ptr[u + 1] - train_ptr[u]
        start = ptr[c]
        row[start : start + rated] = train_item[train_ptr[u] : train_ptr[u + 1]]
        label[start : start + rated] = train_rating[train_ptr[u] : train_ptr[u + 1]]
        extra = ptr[c + 1] - start - rated
        if extra == 0:
            continue
        avoid = avoid_item[avoid_ptr[u] : avoid_ptr[u + 1]]
        order = np.arange(items - avoid.size)
        for i in range(extra):
            j = i + below(stream[c], i, order.size - i)
            order[i], order[j] = order[j], order[i]
            row[start + rated + i] = unseen(avoid, order[i])
        label[start + rated : ptr[c + 1]] = label[start : start + rated].mean() if known else np.nan


def _rating_samples(split: Split, cohort: np.ndarray, extra: int, seed: int, when: int, rating: str) -> Samples:
    avoid_ptr, avoid_item = _avoided(split)
    rated, avoided = (ptr[cohort + 1] - ptr[cohort] for ptr in (split.train_ptr, avoid_ptr))
    ptr = from_counts(rated + np.minimum(extra * rated, split.items - avoided))
    row, label = np.empty(ptr[-1], np.int32), np.empty(ptr[-1], np.float32)
    _sample_ratings(keys(seed, when, "extra", cohort), cohort, split.train_ptr, split.train_item, split.train_rating, avoid_ptr, avoid_item,
                    split.items, rating == "mean", ptr, label, row)  # fmt: skip
    local = (np.arange(ptr[-1]) - np.repeat(ptr[:-1], np.diff(ptr))).astype(np.int32)
    return Samples(cohort, ptr, local, label, ptr, row)


def _avoided(split: Split) -> tuple[np.ndarray, np.ndarray]:
    """The items, CSR, that a client never draws."""
    leaky = split.protocol.train_negatives == "leaky"
    return (split.seen_ptr, split.seen_item) if leaky else (split.train_ptr, split.train_item)


def fresh(name: str, size: int, kind: type) -> np.ndarray:
    """An array of any content for a purpose."""
    return np.empty(size, kind)


def sample_round(
    split: Split,
    cohort: np.ndarray,
    negatives: int,
    seed: int,
    when: int,
    rating: str = "mean",
    purpose: str = "negatives",
    empty: Callable[[str, int, type], np.ndarray] = fresh,
) -> Samples:
    """Positives and freshly drawn negatives of every client in the cohort; `purpose` names the stream of the draws, `empty` makes arrays.

    On a rating split: its ratings, and different items without one, `negatives` for each rating or all there are, whose label is the
    client's mean rating, or not a number if `rating` is "unknown".
    """
    if split.protocol.ratings:
        return _rating_samples(split, cohort, negatives, seed, when, rating)
    avoid_ptr, avoid_item = _avoided(split)
    has_unseen = split.items > avoid_ptr[cohort + 1] - avoid_ptr[cohort]
    counts = (split.train_ptr[cohort + 1] - split.train_ptr[cohort]) * np.where(has_unseen, negatives + 1, 1)
    ptr = from_counts(counts)
    total = int(ptr[-1])
    local, row, label = empty("local", total, np.int32), empty("drawn", total, np.int32), empty("label", total, np.float32)
    touched = np.zeros(len(cohort), np.int64)
    _sample(keys(seed, when, purpose, cohort), cohort, split.train_ptr, split.train_item, avoid_ptr, avoid_item, split.items,
            negatives, ptr, local, label, row, touched)  # fmt: skip
    row_ptr = from_counts(touched)
    used = empty("row", int(row_ptr[-1]), np.int32)
    _close_gaps(row, ptr, row_ptr, used)
    return Samples(cohort, ptr, local, label, row_ptr, used)


def cohort_of(round_: int, clients: int, n: int, sampling: str, seed: int) -> np.ndarray:
    """[n] client numbers of a round (from 1), ascending: drawn anew, or the next n of a shuffled queue that goes round."""
    if n >= clients:
        return np.arange(clients)
    if sampling == "queue":
        return np.sort(_queue(clients, seed)[((round_ - 1) * n + np.arange(n)) % clients])
    most = n + 6 * math.sqrt(n) + 6  # hashes are spread evenly, so only those below a bound that surely leaves n are sorted
    if most < clients / 2:
        some, key = _below_bound(purpose_base(seed, round_, "cohort"), clients, np.uint64(most / clients * 2.0**64), int(2 * most))
        if n <= len(some) < int(2 * most):
            return np.sort(some[np.argsort(key, kind="stable")[:n]])
    return np.sort(smallest(keys(seed, round_, "cohort", np.arange(clients)), n))


@njit(cache=True)
def _below_bound(base: np.uint64, clients: int, bound: np.uint64, most: int) -> tuple[np.ndarray, np.ndarray]:
    """The clients, and at most so many, whose key (see randomness.keys) is below a bound, and their keys."""
    who, key, found = np.empty(most, np.int64), np.empty(most, np.uint64), 0
    x = base + GOLDEN
    for u in range(clients):
        x += GOLDEN
        nearly = almost_mixed(x)
        if nearly <= bound | LOW_BITS:  # the last step of a hash leaves its upper bits as they are
            mine = nearly ^ (nearly >> S31)
            if mine < bound and found < most:
                who[found], key[found] = u, mine
                found += 1
    return who[:found], key[:found]


@lru_cache(maxsize=4)
def _queue(clients: int, seed: int) -> np.ndarray:
    return np.argsort(keys(seed, 0, "cohort", np.arange(clients)), kind="stable")
