"""Draws of a round: training samples with fresh negatives, and the cohort."""

from __future__ import annotations

import numpy as np
from numba import njit

from fedbench.kernels.hashing import GOLDEN, LOW_BITS, S31, almost_mixed, below
from fedbench.kernels.threads import shared
from fedbench.kernels.vectors import prefetch


@njit(inline="always", cache=True)
def unseen(seen: np.ndarray, rank: np.int64) -> np.int64:
    """The rank-th item (from 0) that is not in the sorted list `seen`: a binary search, no rejection."""
    low, high = 0, seen.size
    while low < high:
        middle = (low + high) // 2
        # before seen[middle] lie seen[middle] - middle items that are not seen
        if seen[middle] - middle <= rank:
            low = middle + 1
        else:
            high = middle
    return rank + low


@njit(cache=True)
def outside(avoid: np.ndarray, items: int) -> np.ndarray:
    """[items - len(avoid)] the items that are not in the sorted list `avoid`, ascending."""
    out = np.empty(items - avoid.size, np.int32)
    item = 0
    for k in range(avoid.size + 1):
        stop = avoid[k] if k < avoid.size else items
        for i in range(item, stop):
            out[i - k] = i
        item = stop + 1
    return out


@shared()
def sample(
    low: int,
    high: int,
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
    for c in range(low, high):
        u = clients[c]
        if c + 2 < clients.size:  # lists of other clients lie far away
            prefetch(train_item, train_ptr[clients[c + 2]])
            prefetch(avoid_item, avoid_ptr[clients[c + 2]])
        avoid = avoid_item[avoid_ptr[u] : avoid_ptr[u + 1]]
        free = items - avoid.size
        start, total = ptr[c], ptr[c + 1] - ptr[c]
        # many draws: the list of items to draw from; few among many items: a search a draw
        listed = outside(avoid, items) if items <= 16 * total else avoid[:0]
        # item -> its place among the client's rows: a hash table that is at most half full, or has a slot for every item
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
                    # every try takes the next number of the stream: samples depend on the key alone, not on machine or thread
                    rank = below(stream[c], counter, free)
                    pick = np.int64(listed[rank]) if listed.size else unseen(avoid, rank)
                    counter += 1
                    repeated = False
                    # different ones, if there are enough: else the loop would not end
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


@shared(rows=lambda values, ptr, out_ptr, out: len(out_ptr) - 1)
def close_gaps(low: int, high: int, values: np.ndarray, ptr: np.ndarray, out_ptr: np.ndarray, out: np.ndarray) -> None:
    """out: the first values of each list of `values`, as many as its list in `out` is long."""
    for c in range(low, high):
        for i in range(out_ptr[c + 1] - out_ptr[c]):
            out[out_ptr[c] + i] = values[ptr[c] + i]


@shared()
def sample_ratings(
    low: int,
    high: int,
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
    for c in range(low, high):
        u = clients[c]
        rated = train_ptr[u + 1] - train_ptr[u]
        start = ptr[c]
        row[start : start + rated] = train_item[train_ptr[u] : train_ptr[u + 1]]
        label[start : start + rated] = train_rating[train_ptr[u] : train_ptr[u + 1]]
        extra = ptr[c + 1] - start - rated
        if extra == 0:
            continue
        avoid = avoid_item[avoid_ptr[u] : avoid_ptr[u + 1]]
        # Fisher-Yates up to the `extra`-th place: the rest of the order is not needed
        order = np.arange(items - avoid.size)
        for i in range(extra):
            j = i + below(stream[c], i, order.size - i)
            order[i], order[j] = order[j], order[i]
            row[start + rated + i] = unseen(avoid, order[i])
        # known: what was not rated counts as the client's mean rating; else it has no label
        label[start + rated : ptr[c + 1]] = label[start : start + rated].mean() if known else np.nan


@njit(cache=True)
def below_bound(base: np.uint64, clients: int, bound: np.uint64, most: int) -> tuple[np.ndarray, np.ndarray]:
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
