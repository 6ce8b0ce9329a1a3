"""From interactions to clients: training items, one validation and one test item each, and the items ranked beside them.

A rating split holds out ratings instead: a fold of all ratings, or half the ratings of clients that never take part.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from fedbench.contract.dataset import Interactions
from fedbench.contract.randomness import keys, purpose_base
from fedbench.data.protocol import Protocol
from fedbench.errors import DataError, UsageError
from fedbench.kernels.hashing import below, mix
from fedbench.kernels.sampling import unseen
from fedbench.kernels.threads import shared

log = logging.getLogger("fedbench")

TRAIN, VAL, TEST = 0, 1, 2
"""roles of clients in the users split"""
HELD_SHARE = 0.1
"""share of the clients that validate, and that test, in the users split"""
NO_ITEMS: dict[str, Any] = dict.fromkeys(("val_item", "val_rating", "test_item"), np.empty(0, np.int32))
NO_ITEMS |= dict.fromkeys(("val_candidates", "test_candidates"), np.empty((0, 1), np.int32))
"""fields of a Split that holds out no items to rank"""


class Held(NamedTuple):
    """Held-out ratings, CSR by client; a client's are sorted by item number."""

    ptr: np.ndarray
    """[U+1]"""
    item: np.ndarray
    """[N] int32"""
    rating: np.ndarray
    """[N] float32"""

    @property
    def client(self) -> np.ndarray:
        """[N] whose rating it is"""
        return np.repeat(np.arange(len(self.ptr) - 1), np.diff(self.ptr))


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
    train_time: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """when each training interaction happened, in seconds; empty if the data does not say. Of ranking splits alone"""
    val_time: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    refit: bool = False
    """validation items are training items: nothing may be chosen on them any more"""
    held: Mapping[str, Held] = field(default_factory=dict)
    """rating splits: `test`, and `val` where there is one. Their `val_item`, `test_item` and candidates are empty"""
    role: np.ndarray | None = None
    """[U] TRAIN, VAL or TEST in the users split; there the training items of the last two are their support half"""
    rating_min: float = 0.0
    rating_max: float = 1.0
    cold_start: Split | None = None
    """cold-start users: the clients that --new-users keeps out of training, with the same items"""
    sample: np.ndarray | None = None
    """client numbers of those that are ranked for, ascending, if not all are"""
    blind: bool = False
    """what is held out for test is not in it, see `without_test`"""

    @property
    def evaluated(self) -> np.ndarray:
        """Client numbers of those that are ranked for."""
        return np.arange(self.clients) if self.sample is None else self.sample

    @property
    def clients(self) -> int:
        return len(self.train_ptr) - 1

    @property
    def trainers(self) -> np.ndarray:
        """Client numbers of those that take part in rounds."""
        return np.arange(self.clients) if self.role is None else np.flatnonzero(self.role == TRAIN)

    @property
    def train_counts(self) -> np.ndarray:
        return np.diff(self.train_ptr)

    def chance(self, k: int = 10) -> float:
        """HR@k of a ranking that knows nothing, among the sampled candidates."""
        return min(1.0, k / (self.test_candidates.shape[1] + 1))

    def of_clients(self, which: np.ndarray) -> Split:
        """A ranking split of these clients alone, numbered anew in the order given; the items are as they were."""
        train, seen = _lists(self.train_ptr, which), _lists(self.seen_ptr, which)
        each = ("val_item", "val_rating", "test_item", "val_candidates", "test_candidates", "user_ids")
        # data without times has empty columns, which no index fits
        timed = bool(len(self.train_time))
        return replace(
            self,
            train_ptr=from_counts(self.train_counts[which]),
            train_item=self.train_item[train],
            train_rating=self.train_rating[train],
            seen_ptr=from_counts(np.diff(self.seen_ptr)[which]),
            seen_item=self.seen_item[seen],
            train_time=self.train_time[train if timed else slice(0)],
            val_time=self.val_time[which if timed else slice(0)],
            **{name: getattr(self, name)[which] for name in each},
        )

    def without_test(self) -> Split:
        """The split of a search: what is held out for test is taken out, so that nothing can be chosen on it. Only `val` is evaluated.

        A test item stays in `seen_item`, which says what is no candidate; training draws from it where negatives are leaky alone.
        """
        none = np.empty((len(self.test_candidates), 0), self.test_candidates.dtype)
        return replace(
            self,
            # no item has this number: whoever scores it fails
            test_item=np.full_like(self.test_item, -1),
            test_candidates=none,
            held={name: held for name, held in self.held.items() if name != "test"},
            blind=True,
        )

    def with_validation_in_training(self) -> Split:
        """The split of a refit: each client trains on its validation item too. Test items and candidates stay as they are."""
        everyone = np.arange(self.clients)
        user = np.concatenate([np.repeat(everyone, self.train_counts), everyone])
        item = np.concatenate([self.train_item, self.val_item])
        # lists are sorted by item: samplers search them
        order = np.lexsort((item, user))
        return replace(
            self,
            train_ptr=from_counts(self.train_counts + 1),
            train_item=item[order],
            train_rating=np.concatenate([self.train_rating, self.val_rating])[order],
            train_time=np.concatenate([self.train_time, self.val_time])[order if len(self.train_time) else slice(0)],
            refit=True,
        )


@njit(cache=True)
def _pair_hash(base: np.uint64, user: np.ndarray, item: np.ndarray) -> np.ndarray:
    out = np.empty(user.size, np.uint64)
    for r in range(user.size):
        # By the codes in the data, not by the place of the row: the order of rows in a file must not move the split.
        out[r] = mix(base ^ mix(np.uint64(user[r]) * np.uint64(0x100000001B3) + np.uint64(item[r])))
    return out


@shared()
def _candidates(low: int, high: int, stream: np.ndarray, ptr: np.ndarray, seen: np.ndarray, items: int, out: np.ndarray) -> None:
    """out [U, K]: K different items a client has not seen, in the order drawn."""
    width = out.shape[1]
    for c in range(low, high):
        mine = seen[ptr[c] : ptr[c + 1]]
        free = items - mine.size
        counter = 0
        for k in range(width):
            # K is small beside the free items, so drawing again is cheaper than a shuffle of all of them.
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


def from_counts(counts: np.ndarray) -> np.ndarray:
    """CSR pointers of lists with these lengths."""
    ptr = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=ptr[1:])
    return ptr


def _lists(ptr: np.ndarray, which: np.ndarray) -> np.ndarray:
    """Positions of the values of these CSR lists, one list after another."""
    counts = np.diff(ptr)[which]
    return np.repeat(ptr[which] - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())


def split(data: Interactions, protocol: Protocol) -> Split:
    """Apply a protocol to a dataset. Deterministic: depends on the rows, not on their order, and on `split_seed`."""
    protocol = protocol.resolve(data)
    if protocol.ratings:
        return _rating_split(data, protocol)
    checksum = data.checksum()
    user, item, rating, time = _filtered(data, protocol)
    user_codes, user = _without_gaps(user, data.users)
    item_codes, item = _without_gaps(item, data.items)
    clients, items = len(user_codes), len(item_codes)
    sample = None
    if protocol.eval_clients is not None and protocol.eval_clients < clients:
        # by the users' codes in the data, not by their numbers here, which move with the filter
        sample = np.sort(smallest(keys(protocol.split_seed, 0, "evaluated", user_codes), protocol.eval_clients))
    else:
        protocol = replace(protocol, eval_clients=None)  # all are ranked for: one fingerprint with and without the flag

    # In each user's list, sorted so, the last interaction is the test item and the one before it the validation item.
    order = np.lexsort((*_last_is_test(data, protocol, user_codes[user], item_codes[item], time), user))
    user, item, rating, time = user[order], item[order], rating[order], time[order]
    seen_ptr = from_counts(np.bincount(user, minlength=clients))
    is_test, is_val = np.zeros(len(user), bool), np.zeros(len(user), bool)
    is_test[seen_ptr[1:] - 1] = True
    is_val[seen_ptr[1:] - 2] = True
    train = ~(is_val | is_test)
    # From here on lists are sorted by item, because samplers search them.
    by_item = np.lexsort((item, user))
    seen_item, train_sorted = item[by_item], train[by_item]
    protocol, val_candidates, test_candidates = _ranked_beside(data, protocol, seen_ptr, seen_item, items, user_codes, item_codes)
    whole = Split(
        protocol=protocol,
        fingerprint=protocol.fingerprint(checksum),
        checksum=checksum,
        items=items,
        train_ptr=from_counts(np.bincount(user[train], minlength=clients)),
        train_item=seen_item[train_sorted],
        train_rating=rating[by_item][train_sorted].astype(np.float32),
        seen_ptr=seen_ptr,
        seen_item=seen_item,
        train_time=time[by_item][train_sorted] if data.has_time else np.empty(0, np.int64),
        val_time=time[is_val] if data.has_time else np.empty(0, np.int64),
        val_item=item[is_val],
        val_rating=rating[is_val].astype(np.float32),
        test_item=item[is_test],
        val_candidates=val_candidates,
        test_candidates=test_candidates,
        user_ids=data.user_ids[user_codes],
        item_ids=data.item_ids[item_codes],
        sample=sample,
    )
    return _without_cold_start(whole, user_codes, data.name) if protocol.new_users else whole


def _without_cold_start(whole: Split, user_codes: np.ndarray, name: str) -> Split:
    """The clients that take part; those that do not, the first in the order of a seeded hash, are its cold-start users, `cold_start`."""
    count = max(1, round(whole.protocol.new_users * whole.clients))
    if count >= whole.clients:
        raise DataError(f"{name}: of {whole.clients} users none is left to train; lower --new-users or use more data")
    # The word names a random stream: with another one, other users would be kept out.
    order = np.argsort(keys(whole.protocol.split_seed, 0, "newcomers", user_codes), kind="stable")
    return replace(whole.of_clients(np.sort(order[count:])), cold_start=whole.of_clients(np.sort(order[:count])))


def _filtered(data: Interactions, protocol: Protocol) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Rows of the users that take part. Three interactions are the least that give one to train, one to validate, one to test; of
    ratings to predict, two give one to learn from and one to predict."""
    needed = 2 if protocol.ratings else 3
    least = max(protocol.min_interactions, needed)
    keep = np.bincount(data.user, minlength=data.users)[data.user] >= least
    if not keep.any():
        least_of_all = f"lower --min-interactions ({needed} at least) or use more data"
        raise DataError(f"{data.name}: no user has {least} or more interactions; {least_of_all}")
    return data.user[keep], data.item[keep], data.rating[keep], data.time[keep]


def _without_gaps(code: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The codes that appear, ascending, and [N] int32 the place of each row's among them."""
    there = np.flatnonzero(np.bincount(code, minlength=size))
    number = np.empty(size, np.int32)
    number[there] = np.arange(len(there))
    return there, number[code]


def _rating_split(data: Interactions, protocol: Protocol) -> Split:
    """kfold: one fold of all ratings is test; users: half the ratings of a tenth of the clients is validation, of another tenth test."""
    checksum = data.checksum()
    user, item, rating, _ = _filtered(data, protocol)
    user_codes, user = _without_gaps(user, data.users)
    item_codes, item = _without_gaps(item, data.items)
    order = np.lexsort((item, user))
    user, item, rating = user[order], item[order], rating[order].astype(np.float32)
    clients = len(user_codes)
    role = None
    if protocol.split == "kfold":
        if protocol.fold is None:
            raise UsageError("--split kfold: name the fold to test with --fold")
        # by seed, user and item alone: every rating is in one fold, whichever is tested
        fold = _pair_hash(purpose_base(protocol.split_seed, 0, "fold"), user_codes[user], item_codes[item]) % np.uint64(protocol.folds)
        out = {"test": fold == protocol.fold}
        if not out["test"].any() or out["test"].all():
            raise DataError(f"{data.name}: {len(user)} ratings are too few for {protocol.folds} folds; lower --folds or use more data")
    else:
        role = _roles(data.name, protocol.split_seed, user_codes)
        query = in_query_half(protocol.split_seed, 0, user_codes[user], item_codes[item])
        out = {"val": query & (role[user] == VAL), "test": query & (role[user] == TEST)}

    def csr(rows: np.ndarray) -> Held:
        return Held(from_counts(np.bincount(user[rows], minlength=clients)), item[rows], rating[rows])

    train = csr(~np.any(list(out.values()), axis=0))
    return Split(
        protocol=protocol,
        fingerprint=protocol.fingerprint(checksum),
        checksum=checksum,
        items=len(item_codes),
        train_ptr=train.ptr,
        train_item=train.item,
        train_rating=train.rating,
        seen_ptr=from_counts(np.bincount(user, minlength=clients)),
        seen_item=item,
        **NO_ITEMS,
        user_ids=data.user_ids[user_codes],
        item_ids=data.item_ids[item_codes],
        held={name: csr(rows) for name, rows in out.items()},
        role=role,
        rating_min=data.rating_min,
        rating_max=data.rating_max,
    )


def _roles(name: str, split_seed: int, user_codes: np.ndarray) -> np.ndarray:
    """[U] a tenth of the clients, in the order of a seeded hash, for validation, a tenth for test, the others for training."""
    tenth = max(1, round(HELD_SHARE * len(user_codes)))
    if len(user_codes) <= 2 * tenth:
        raise DataError(f"{name}: {len(user_codes)} users are too few to train, to validate and to test; use more data or --split kfold")
    order = np.argsort(keys(split_seed, 0, "role", user_codes), kind="stable")
    role = np.full(len(user_codes), TRAIN, np.int8)
    role[order[:tenth]], role[order[tenth : 2 * tenth]] = VAL, TEST
    return role


def in_query_half(seed: int, when: int, user: np.ndarray, item: np.ndarray) -> np.ndarray:
    """[N] whether a rating is in its user's query half (the smaller one of an odd number), by a hash of seed, round, user and item."""
    order = np.lexsort((_pair_hash(purpose_base(seed, when, "query"), user, item), user))
    _, first, counts = np.unique(user[order], return_index=True, return_counts=True)
    query = np.empty(len(user), bool)
    # the place within its user's ratings, in the order of the hash
    query[order] = np.arange(len(user)) - np.repeat(first, counts) < np.repeat(counts // 2, counts)
    return query


def _last_is_test(data: Interactions, protocol: Protocol, user: np.ndarray, item: np.ndarray, time: np.ndarray) -> tuple[np.ndarray, ...]:
    """Sort keys (least significant first) that put a user's test interaction last and its validation interaction before it."""
    # The hash breaks ties of time: a file's own order would give whoever wrote it a say in what is tested.
    random = _pair_hash(purpose_base(protocol.split_seed, 0, "split"), user, item)
    if protocol.split == "random":
        return (random,)
    if protocol.split == "item-order":
        return (item,)
    if protocol.split == "time":
        # item codes are given in the order of first appearance
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
    # as many for every client, so that chance is one number
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


def smallest(key: np.ndarray, n: int) -> np.ndarray:
    """[n] where the smallest keys are."""
    return np.argsort(key, kind="stable")[:n]
