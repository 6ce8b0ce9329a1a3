"""A seeded generator with a planted structure: low-rank tastes, popular and unpopular items, light and heavy users."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import torch
from numba import njit, prange

from fedbench.contract.dataset import DatasetOptions, Interactions
from fedbench.contract.randomness import Draw, keys, unit
from fedbench.contract.registry import register_dataset
from fedbench.data.sources import cache_folder
from fedbench.errors import UsageError
from fedbench.locks import alone
from fedbench.system_memory import free_memory

from .rows import assemble

RANK = 6
TASTE = 3.0
"""weight of a user's taste against the chance of the draw"""
POPULARITY = -0.7
"""the item of rank r is drawn in proportion to (1 + r) to this power, tastes aside"""
RATING_SHARES = (0.1, 0.25, 0.55, 0.85)
"""shares of the rows up to each of the ratings 1 to 4"""
MIN_INTERACTIONS = 6
BLOCK_CELLS = 4_000_000
"""scores held at once"""
LARGE = 1 << 28
"""with more pairs of user and item not every one is scored, and the rows are made on disk"""
CHUNK_USERS = 1 << 16
POOL = 8
"""items drawn by popularity for each interaction, among which taste chooses, where not every pair is scored"""
COLUMNS = {"user": np.int32, "item": np.int32, "rating": np.float32, "time": np.int64}
DONE = "done"
"""the file that says that all others are whole"""
START = 1_600_000_000
YEAR = 365 * 24 * 3600


@register_dataset("synthetic", summary="seeded generator with planted tastes; --users, --items, --interactions (a user), --data-seed")
def load(options: DatasetOptions) -> Interactions:
    users, items, mean = options.users, options.items, options.interactions
    _check(users, items, mean, options.data_seed)
    if users * items > LARGE:
        return _large(options)
    rng = np.random.default_rng(options.data_seed)
    tastes = rng.normal(size=(users, RANK)) / np.sqrt(RANK)
    traits = rng.normal(size=(items, RANK))
    popularity = POPULARITY * np.log1p(rng.permutation(items))
    counts = _counts(rng, options)
    user, item, liking = _draw(rng, tastes, traits, popularity, counts)

    noisy = liking + rng.normal(scale=0.3, size=len(liking))
    rating = 1.0 + np.searchsorted(np.quantile(noisy, RATING_SHARES), noisy)
    time = START + rng.integers(0, YEAR, users)[user] + rng.integers(0, YEAR // 4, len(user))
    order = np.lexsort((time, user))
    return assemble(
        "synthetic",
        user[order],
        item[order],
        rating[order],
        time[order],
        rating_min=1.0,
        rating_max=5.0,
        licence="generated, free",
        source=f"generator, seed {options.data_seed}",
    )


def _refuse_too_large(options: DatasetOptions, folder: Path) -> None:
    """Raise before anything is drawn if the generator cannot hold what it works with, or its folder the rows."""
    users, items, mean = options.users, options.items, options.interactions
    chunk = min(users, CHUNK_USERS) * mean
    for what, needed, free in (
        ("memory", 8 * (4 * users + (2 * RANK + 4) * items) + 48 * chunk, free_memory()),
        (f"room in {folder}", users * mean * sum(np.dtype(kind).itemsize for kind in COLUMNS.values()), _room(folder)),
    ):
        if needed > free:
            size = f"{users:,} users with {mean:,} of {items:,} items each take about {needed / 1e9:,.1f} GB"
            raise UsageError(f"synthetic: {size}, and {free / 1e9:,.1f} GB of {what} are free; lower --users, --items or --interactions")


def _room(folder: Path) -> float:
    """Bytes that are free on the disk of a folder, which need not be there yet."""
    there = next((place for place in folder.absolute().parents if place.is_dir()), Path("/"))
    return float(shutil.disk_usage(there).free)


def _counts(rng: np.random.Generator, options: DatasetOptions) -> np.ndarray:
    """[U] how many interactions each user has."""
    extra = rng.gamma(2.0, (options.interactions - MIN_INTERACTIONS) / 2, size=options.users)
    return np.minimum(MIN_INTERACTIONS + np.rint(extra).astype(np.int64), options.items - 1)


def _draw(
    rng: np.random.Generator, tastes: np.ndarray, traits: np.ndarray, popularity: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """User, item and liking of each row: distinct items, drawn in proportion to exp(score) by the Gumbel trick."""
    block = max(1, BLOCK_CELLS // len(traits))
    most = int(counts.max())
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for first in range(0, len(tastes), block):
        liking = tastes[first : first + block] @ traits.T
        cost = -(TASTE * liking + popularity + rng.gumbel(size=liking.shape))
        best = np.argpartition(cost, most - 1, axis=1)[:, :most]
        best = np.take_along_axis(best, np.argsort(np.take_along_axis(cost, best, axis=1), axis=1), axis=1)
        row, place = np.nonzero(np.arange(most) < counts[first : first + block, None])
        item = best[row, place]
        found.append((first + row, item, liking[row, item]))
    user, item, liking = (np.concatenate(column) for column in zip(*found, strict=True))
    return user, item, liking


def _check(users: int, items: int, mean: int, seed: int) -> None:
    if users < 1:
        raise UsageError(f"synthetic: {users} users; give at least 1")
    if mean < MIN_INTERACTIONS:
        raise UsageError(f"synthetic: {mean} interactions a user; give at least {MIN_INTERACTIONS}")
    if items < 2 * mean:
        raise UsageError(f"synthetic: {items} items are too few for {mean} interactions a user; give at least {2 * mean} items")
    if seed < 0:
        raise UsageError(f"synthetic: data seed {seed}; give 0 or more")


# ---- too large to score every pair: columns on disk --------------------------------------------------------------------------


def _large(options: DatasetOptions) -> Interactions:
    """Planted tastes for any number of users, made in chunks of users and kept in the cache as one file a column."""
    folder = cache_folder(options) / "synthetic" / f"{options.users}-{options.items}-{options.interactions}-{options.data_seed}"
    with alone(folder.with_suffix(".lock"), patience=3600):
        if not (folder / DONE).exists():
            _refuse_too_large(options, folder)
            _generate(options, folder)
    columns = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in (*COLUMNS, "item_ids")}
    return Interactions(
        name="synthetic",
        **columns,
        user_ids=np.arange(options.users),
        has_time=True,
        explicit=True,
        rating_min=1.0,
        rating_max=5.0,
        licence="generated, free",
        source=f"generator, seed {options.data_seed}, in {folder}",
    )


def _generate(options: DatasetOptions, folder: Path) -> None:
    rng = np.random.default_rng(options.data_seed)
    traits = rng.normal(size=(options.items, RANK))
    weight = (1.0 + rng.permutation(options.items)) ** POPULARITY
    cumulated = np.cumsum(weight)
    guide = np.searchsorted(cumulated, np.arange(options.items) / options.items * cumulated[-1], side="right")
    ptr = np.concatenate([[0], np.cumsum(_counts(rng, options))])
    folder.mkdir(parents=True, exist_ok=True)
    columns = {name: np.lib.format.open_memmap(folder / f"{name}.npy", "w+", kind, (int(ptr[-1]),)) for name, kind in COLUMNS.items()}
    bounds = np.zeros(0)
    code, met = np.full(options.items, -1, np.int32), 0
    for first in range(0, options.users, CHUNK_USERS):
        who = np.arange(first, min(first + CHUNK_USERS, options.users))
        rows = slice(int(ptr[who[0]]), int(ptr[who[-1] + 1]))
        tastes = Draw(options.data_seed, 0, who, torch.float64).normal("synthetic/tastes", RANK).numpy() / np.sqrt(RANK)
        user, item, when = (np.empty(rows.stop - rows.start, kind) for kind in (np.int32, np.int32, np.int64))
        liking = np.empty(len(item))
        stream, mine = keys(options.data_seed, 0, "synthetic/rows", who), ptr[who[0] : who[-1] + 2] - rows.start
        _choose(stream, who, tastes, traits, (cumulated, guide, np.log(weight)), mine, (user, item, liking, when))
        bounds = bounds if len(bounds) else np.quantile(liking, RATING_SHARES)
        met = _code(item, code, met)
        for name, value in (("user", user), ("item", item), ("rating", 1.0 + np.searchsorted(bounds, liking)), ("time", when)):
            columns[name][rows] = value
    for column in columns.values():
        column.flush()
    ids = np.empty(met, np.int64)
    ids[code[code >= 0]] = np.flatnonzero(code >= 0)
    np.save(folder / "item_ids.npy", ids)
    (folder / DONE).touch()


@njit(cache=True)
def _code(item: np.ndarray, code: np.ndarray, met: int) -> int:
    """Replace items by their order of first appearance, so far `met`; returns how many have appeared now."""
    for r in range(item.size):
        if code[item[r]] < 0:
            code[item[r]] = met
            met += 1
        item[r] = code[item[r]]
    return met


@njit(parallel=True, nogil=True, cache=True)
def _choose(
    stream: np.ndarray,
    who: np.ndarray,
    tastes: np.ndarray,
    traits: np.ndarray,
    popularity: tuple[np.ndarray, np.ndarray, np.ndarray],
    ptr: np.ndarray,
    out: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
) -> None:
    """Each user's rows in the order of time: distinct items, the best by taste and chance among some that were drawn by popularity.

    Where those would be half of all items or more, or too few of them differ, among all items.
    popularity: weights summed up, where in them the search for a share of their total begins, for each M-th; and their logarithms.
    out: user, item, liking and time of each row.
    """
    (cumulated, guide, log_weight), (user, item, liking, when) = popularity, out
    items = len(traits)
    for c in prange(stream.size):
        begin, count = ptr[c], ptr[c + 1] - ptr[c]
        pool = POOL * count
        few = 2 * pool < items
        some = np.empty(pool if few else items, np.int64)
        if few:
            for i in range(pool):
                share = unit(stream[c], i)
                at = guide[np.int64(share * items)]
                while cumulated[at] <= share * cumulated[-1]:
                    at += 1
                some[i] = at
            some = np.unique(some)
            few = some.size >= count
        if not few:
            some = np.arange(items)
        like, cost = np.empty(some.size), np.empty(some.size)
        for i in range(some.size):
            like[i] = 0.0
            for k in range(RANK):
                like[i] += tastes[c, k] * traits[some[i], k]
            gumbel = -math.log(-math.log(1.0 - unit(stream[c], pool + i)))
            cost[i] = -(TASTE * like[i] + gumbel + (0.0 if few else log_weight[some[i]]))
        best = np.argsort(cost)[:count]
        after = pool + items
        start = START + np.int64(unit(stream[c], after) * YEAR)
        days = np.empty(count, np.int64)
        for r in range(count):
            days[r] = start + np.int64(unit(stream[c], after + 1 + r) * (YEAR // 4))
        order = np.argsort(days)
        for r in range(count):
            noise = unit(stream[c], after + 1 + count + 2 * r) + unit(stream[c], after + 2 + count + 2 * r) - 1.0
            user[begin + r] = who[c]
            item[begin + r] = some[best[order[r]]]
            liking[begin + r] = like[best[order[r]]] + 0.7 * noise
            when[begin + r] = days[order[r]]
