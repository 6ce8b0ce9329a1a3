"""What a round draws: its cohort of clients, and each client's training samples with fresh negatives."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch

from fedbench.contract.central import Pool
from fedbench.contract.randomness import keys, purpose_base
from fedbench.data.split import Split, from_counts, smallest
from fedbench.errors import UsageError
from fedbench.kernels.sampling import below_bound, close_gaps, sample, sample_ratings
from fedbench.kernels.shuffling import orders


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


def _rating_samples(split: Split, cohort: np.ndarray, extra: int, seed: int, when: int, rating: str) -> Samples:
    avoid_ptr, avoid_item = _avoided(split)
    rated, avoided = (ptr[cohort + 1] - ptr[cohort] for ptr in (split.train_ptr, avoid_ptr))
    ptr = from_counts(rated + np.minimum(extra * rated, split.items - avoided))
    row, label = np.empty(ptr[-1], np.int32), np.empty(ptr[-1], np.float32)
    sample_ratings(keys(seed, when, "extra", cohort), cohort, split.train_ptr, split.train_item, split.train_rating, avoid_ptr, avoid_item,
                    split.items, rating == "mean", ptr, label, row)  # fmt: skip
    # rated and added items are all different: each sample has a row of its own
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
    sample(keys(seed, when, purpose, cohort), cohort, split.train_ptr, split.train_item, avoid_ptr, avoid_item, split.items,
            negatives, ptr, local, label, row, touched)  # fmt: skip
    row_ptr = from_counts(touched)
    # rows were drawn into room for one a sample: those in use are put together
    used = empty("row", int(row_ptr[-1]), np.int32)
    close_gaps(row, ptr, row_ptr, used)
    return Samples(cohort, ptr, local, label, row_ptr, used)


def cohort_of(round_: int, clients: int, n: int, sampling: str, seed: int) -> np.ndarray:
    """[n] client numbers of a round (from 1), ascending: drawn anew, or the next n of a shuffled queue that goes round."""
    if n >= clients:
        return np.arange(clients)
    if sampling == "queue":
        return np.sort(_queue(clients, seed)[((round_ - 1) * n + np.arange(n)) % clients])
    most = n + 6 * math.sqrt(n) + 6  # hashes are spread evenly, so only those below a bound that surely leaves n are sorted
    if most < clients / 2:
        some, key = below_bound(purpose_base(seed, round_, "cohort"), clients, np.uint64(most / clients * 2.0**64), int(2 * most))
        if n <= len(some) < int(2 * most):
            return np.sort(some[np.argsort(key, kind="stable")[:n]])
    return np.sort(smallest(keys(seed, round_, "cohort", np.arange(clients)), n))


@lru_cache(maxsize=4)
def _queue(clients: int, seed: int) -> np.ndarray:
    return np.argsort(keys(seed, 0, "cohort", np.arange(clients)), kind="stable")


def pool_of(samples: Samples, seed: int, when: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Pool:
    """What the clients of a round together would train on, shuffled, in one place."""
    users = np.repeat(samples.clients, samples.counts)
    items = samples.row[np.repeat(samples.row_ptr[:-1], samples.counts) + samples.local].astype(np.int64)
    order = np.empty(len(users), np.int64)
    orders(keys(seed, when, "pool", np.array([-1])), np.array([0, len(users)]), 0, 1, order)
    user, item, label = (torch.from_numpy(column[order]).to(device) for column in (users, items, samples.label))
    return Pool(user, item, label.to(dtype))


def with_time(pool: Pool, split: Split, method: str) -> Pool:
    """The pool with the times of its training interactions; UsageError if the data has none."""
    if not len(split.train_time):
        raise UsageError(f"{method} needs to know when interactions happened, and this data does not say; use popularity")
    user, item = (column.cpu().numpy() for column in (pool.user, pool.item))
    place = np.repeat(np.arange(split.clients), split.train_counts) * split.items + split.train_item  # ascending
    at = np.searchsorted(place, user * split.items + item).clip(max=len(place) - 1)
    # negatives have no time
    time = np.where(place[at] == user * split.items + item, split.train_time[at], 0)
    return pool._replace(time=torch.from_numpy(time).to(pool.label.device))
