"""A seeded generator with a planted structure: low-rank tastes, popular and unpopular items, light and heavy users."""

from __future__ import annotations

import numpy as np

from datasets.rows import assemble
from fedbench.data import DatasetOptions, Interactions
from fedbench.errors import UsageError
from fedbench.registry import register_dataset

RANK = 6
TASTE = 3.0
"""weight of a user's taste against the chance of the draw"""
MIN_INTERACTIONS = 6
BLOCK_CELLS = 4_000_000
"""scores held at once"""
START = 1_600_000_000
YEAR = 365 * 24 * 3600


@register_dataset("synthetic", summary="seeded generator with planted tastes; --users, --items, --interactions, --data-seed")
def load(options: DatasetOptions) -> Interactions:
    users, items, mean = options.users, options.items, options.interactions
    _check(users, items, mean, options.data_seed)
    rng = np.random.default_rng(options.data_seed)
    tastes = rng.normal(size=(users, RANK)) / np.sqrt(RANK)
    traits = rng.normal(size=(items, RANK))
    popularity = -0.7 * np.log1p(rng.permutation(items))
    extra = rng.gamma(2.0, (mean - MIN_INTERACTIONS) / 2, size=users)
    counts = np.minimum(MIN_INTERACTIONS + np.rint(extra).astype(np.int64), items - 1)
    user, item, liking = _draw(rng, tastes, traits, popularity, counts)

    noisy = liking + rng.normal(scale=0.3, size=len(liking))
    rating = 1.0 + np.searchsorted(np.quantile(noisy, (0.1, 0.25, 0.55, 0.85)), noisy)
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
