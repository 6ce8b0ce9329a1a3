"""From interactions to clients: training items, one validation and one test item each, and the items ranked beside them."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import numpy as np
from numba import njit, prange

from fedbench.data import Interactions
from fedbench.draw import below, keys, mix, purpose_base, unit
from fedbench.errors import DataError
from fedbench.protocol import Protocol

log = logging.getLogger("fedbench")


@dataclass(frozen=True)
class Split:
    """U clients and M items, renumbered without gaps after the protocol's filter. Per-client lists are CSR: ptr [U+1] and values.

    A client's training items and all of its items (training, validation and test) are sorted by item number.
    """

    protocol: Protocol
    """the protocol with nothing left to resolve"""
    fingerprint: str
    checksum: str
    items: int
    train_ptr: np.ndarray
    train_item: np.ndarray
    train_rating: np.ndarray
    seen_ptr: np.ndarray
    seen_item: np.ndarray
    val_item: np.ndarray
    val_rating: np.ndarray
    test_item: np.ndarray
    val_candidates: np.ndarray
    """[U, K] items ranked beside the validation item"""
    test_candidates: np.ndarray
    user_ids: np.ndarray
    """[U] what the source calls a client"""
    item_ids: np.ndarray
    refit: bool = False
    """validation items are training items: nothing may be chosen on them any more"""

    @property
    def clients(self) -> int:
        return len(self.val_item)

    @property
    def train_counts(self) -> np.ndarray:
        return np.diff(self.train_ptr)

    def chance(self, k: int = 10) -> float:
        """HR@k of a ranking that knows nothing, among the sampled candidates."""
        return min(1.0, k / (self.test_candidates.shape[1] + 1))

    def with_validation_in_training(self) -> Split:
        """The split of a refit: each client trains on its validation item too. Test items and candidates stay as they are."""
        everyone = np.arange(self.clients)
        user = np.concatenate([np.repeat(everyone, self.train_counts), everyone])
        item = np.concatenate([self.train_item, self.val_item])
        order = np.lexsort((item, user))
        return replace(
            self,
            train_ptr=_from_counts(self.train_counts + 1),
            train_item=item[order],
            train_rating=np.concatenate([self.train_rating, self.val_rating])[order],
            refit=True,
        )


@njit(cache=True)
def _pair_hash(base: np.uint64, user: np.ndarray, item: np.ndarray) -> np.ndarray:
    out = np.empty(user.size, np.uint64)
    for r in range(user.size):
        out[r] = mix(base ^ mix(np.uint64(user[r]) * np.uint64(0x100000001B3) + np.uint64(item[r])))
    return out


@njit(inline="always", cache=True)
def unseen(seen: np.ndarray, rank: np.int64) -> np.int64:
    """The rank-th item (from 0) that is not in the sorted list `seen`: a binary search, no rejection."""
    low, high = 0, seen.size
    while low < high:
        middle = (low + high) // 2
        if seen[middle] - middle <= rank:
            low = middle + 1
        else:
            high = middle
    return rank + low


@njit(parallel=True, nogil=True, cache=True)
def _candidates(stream: np.ndarray, ptr: np.ndarray, seen: np.ndarray, items: int, out: np.ndarray) -> None:
    """out [U, K]: K different items a client has not seen, in the order drawn."""
    width = out.shape[1]
    for c in prange(stream.size):
        mine = seen[ptr[c] : ptr[c + 1]]
        free = items - mine.size
        counter = 0
        for k in range(width):
            repeated = True
            while repeated:
                pick = unseen(mine, below(stream[c], counter, free))
                counter += 1
                repeated = False
                for j in range(k):
                    if out[c, j] == pick:
                        repeated = True
                        break
            out[c, k] = pick


def _from_counts(counts: np.ndarray) -> np.ndarray:
    """CSR pointers of lists with these lengths."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def split(data: Interactions, protocol: Protocol) -> Split:
    """Apply a protocol to a dataset. Deterministic: depends on the rows, not on their order, and on `split_seed`."""
    protocol = protocol.resolve(data)
    checksum = data.checksum()
    user, item, rating, time = _filtered(data, protocol)
    user_codes, user = np.unique(user, return_inverse=True)
    item_codes, item = np.unique(item, return_inverse=True)
    clients, items = len(user_codes), len(item_codes)

    order = np.lexsort((*_last_is_test(data, protocol, user_codes[user], item_codes[item], time), user))
    user, item, rating = user[order], item[order].astype(np.int32), rating[order]
    seen_ptr = _from_counts(np.bincount(user, minlength=clients))
    is_test, is_val = np.zeros(len(user), bool), np.zeros(len(user), bool)
    is_test[seen_ptr[1:] - 1] = True
    is_val[seen_ptr[1:] - 2] = True
    train = ~(is_val | is_test)
    by_item = np.lexsort((item, user))
    seen_item, train_sorted = item[by_item], train[by_item]
    protocol, val_candidates, test_candidates = _ranked_beside(data, protocol, seen_ptr, seen_item, items, user_codes, item_codes)
    return Split(
        protocol=protocol,
        fingerprint=protocol.fingerprint(checksum),
        checksum=checksum,
        items=items,
        train_ptr=_from_counts(np.bincount(user[train], minlength=clients)),
        train_item=seen_item[train_sorted],
        train_rating=rating[by_item][train_sorted].astype(np.float32),
        seen_ptr=seen_ptr,
        seen_item=seen_item,
        val_item=item[is_val],
        val_rating=rating[is_val].astype(np.float32),
        test_item=item[is_test],
        val_candidates=val_candidates,
        test_candidates=test_candidates,
        user_ids=data.user_ids[user_codes],
        item_ids=data.item_ids[item_codes],
    )


def _filtered(data: Interactions, protocol: Protocol) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Rows of the users that take part. Three interactions are the least that give one to train, one to validate, one to test."""
    least = max(protocol.min_interactions, 3)
    keep = np.bincount(data.user, minlength=data.users)[data.user] >= least
    if not keep.any():
        raise DataError(f"{data.name}: no user has {least} or more interactions; lower --min-interactions (3 at least) or use more data")
    return data.user[keep], data.item[keep], data.rating[keep], data.time[keep]


def _last_is_test(data: Interactions, protocol: Protocol, user: np.ndarray, item: np.ndarray, time: np.ndarray) -> tuple[np.ndarray, ...]:
    """Sort keys (least significant first) that put a user's test interaction last and its validation interaction before it."""
    random = _pair_hash(purpose_base(protocol.split_seed, 0, "split"), user, item)
    if protocol.split == "random":
        return (random,)
    if protocol.split == "item-order":
        return (item,)
    if protocol.split == "time":
        return (-item if protocol.ties == "first" else random, time)
    assert data.held_out is not None
    return (random, time, data.held_out[user] == item)


def _ranked_beside(
    data: Interactions,
    protocol: Protocol,
    ptr: np.ndarray,
    seen: np.ndarray,
    items: int,
    user_codes: np.ndarray,
    item_codes: np.ndarray,
) -> tuple[Protocol, np.ndarray, np.ndarray]:
    """Candidates for validation and test; the protocol comes back with the number that could really be drawn."""
    width = min(protocol.eval_negatives, items - int(np.diff(ptr).max()))
    if width < 1:
        raise DataError(f"{data.name}: a user has met all {items} items, so nothing is left to rank beside the held-out one")
    if width < protocol.eval_negatives:
        log.warning("%d items are ranked beside the held-out one, not %d: some user has met all but %d of the %d items; chance is higher",
                    width, protocol.eval_negatives, width, items)  # fmt: skip
        protocol = replace(protocol, eval_negatives=width)
    clients = np.arange(len(user_codes))
    drawn = {}
    for purpose in ("val", "test"):
        drawn[purpose] = np.empty((len(clients), width), np.int32)
        _candidates(keys(protocol.split_seed, 0, f"candidates/{purpose}", clients), ptr, seen, items, drawn[purpose])
    val, test = drawn["val"], drawn["test"]
    if protocol.candidates == "same":
        val = test
    elif protocol.candidates == "ncf":
        assert data.candidates is not None
        number = np.full(data.items, -1, np.int32)
        number[item_codes] = np.arange(items, dtype=np.int32)
        test = number[data.candidates[user_codes]]
        if (test < 0).any():
            raise DataError(f"{data.name}: --min-interactions removed items that the NCF candidates name; use --min-interactions 0")
        protocol = replace(protocol, eval_negatives=test.shape[1])
    return protocol, val, test


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

    @property
    def counts(self) -> np.ndarray:
        return np.diff(self.ptr)

    @property
    def touched(self) -> np.ndarray:
        return np.diff(self.row_ptr)


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
        avoid = avoid_item[avoid_ptr[u] : avoid_ptr[u + 1]]
        free = items - avoid.size
        place = np.full(items, -1, np.int32)
        start = ptr[c]
        at, rows, counter = start, 0, 0
        for p in range(train_ptr[u], train_ptr[u + 1]):
            first = at
            for j in range(k + 1 if free > 0 else 1):
                pick = np.int64(train_item[p])
                repeated = j > 0
                while repeated:
                    pick = unseen(avoid, below(stream[c], counter, free))
                    counter += 1
                    repeated = False
                    if free >= k:
                        for s in range(first + 1, at):
                            if row[start + local[s]] == pick:
                                repeated = True
                                break
                if place[pick] < 0:
                    place[pick] = rows
                    row[start + rows] = pick
                    rows += 1
                local[at] = place[pick]
                label[at] = 1.0 if j == 0 else 0.0
                at += 1
        touched[c] = rows


def sample_round(split: Split, cohort: np.ndarray, negatives: int, seed: int, when: int) -> Samples:
    """Positives and freshly drawn negatives of every client in the cohort."""
    leaky = split.protocol.train_negatives == "leaky"
    avoid_ptr, avoid_item = (split.seen_ptr, split.seen_item) if leaky else (split.train_ptr, split.train_item)
    has_unseen = split.items > np.diff(avoid_ptr)[cohort]
    counts = split.train_counts[cohort] * np.where(has_unseen, negatives + 1, 1)
    ptr = _from_counts(counts)
    total = int(ptr[-1])
    local, row, label = np.empty(total, np.int32), np.empty(total, np.int32), np.empty(total, np.float32)
    touched = np.zeros(len(cohort), np.int64)
    _sample(keys(seed, when, "negatives", cohort), cohort, split.train_ptr, split.train_item, avoid_ptr, avoid_item, split.items,
            negatives, ptr, local, label, row, touched)  # fmt: skip
    row_ptr = _from_counts(touched)
    used = np.arange(total) - np.repeat(ptr[:-1], counts) < np.repeat(touched, counts)
    return Samples(cohort, ptr, local, label, row_ptr, row[used])


@njit(inline="always", cache=True)
def shuffle(order: np.ndarray, key: np.uint64, epoch: int, batch: int) -> None:
    """Fill `order` with a permutation of its positions for this epoch; a client with one batch needs none."""
    n = order.size
    for i in range(n):
        order[i] = i
    if n > batch:
        for i in range(n - 1, 0, -1):
            j = np.int64(unit(key, epoch * n + i) * (i + 1))
            order[i], order[j] = order[j], order[i]


@njit(parallel=True, nogil=True, cache=True)
def orders(stream: np.ndarray, ptr: np.ndarray, epoch: int, batch: int, out: np.ndarray) -> None:
    """out [S]: every client's order of samples in an epoch, positions within the client."""
    for c in prange(stream.size):
        shuffle(out[ptr[c] : ptr[c + 1]], stream[c], epoch, batch)


def cohort_of(round_: int, clients: int, n: int, sampling: str, seed: int) -> np.ndarray:
    """[n] client numbers of a round (from 1), ascending: drawn anew, or the next n of a shuffled queue that goes round."""
    if n >= clients:
        return np.arange(clients)
    when = 0 if sampling == "queue" else round_
    stream = keys(seed, when, "cohort", np.arange(clients))
    order = np.argsort(stream, kind="stable")
    if sampling == "queue":
        return np.sort(order[((round_ - 1) * n + np.arange(n)) % clients])
    return np.sort(order[:n])
