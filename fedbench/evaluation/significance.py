"""How sure a difference is: intervals over seeds and clients, paired tests over clients, ranks over datasets."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
RESAMPLES = 10_000
LEVEL = 0.95
CHUNK = 4_000_000
"""numbers drawn at once"""
BLOCK = 1 << 15
"""numbers made at once, so that they stay in a core's cache"""


CHANCE_ERRORS = 3
"""standard errors above chance from which a control is taken to know something"""


class FromChance(NamedTuple):
    """How far HR@10 of a control, which cannot know the held-out items, is from chance."""

    hit: float
    chance: float
    error: float
    """standard error of `hit` at chance"""

    @property
    def errors(self) -> float:
        """The distance in standard errors."""
        return (self.hit - self.chance) / self.error if self.error else 0.0

    @property
    def leaks(self) -> bool:
        """Too far above chance to be chance."""
        return self.errors > CHANCE_ERRORS

    def __str__(self) -> str:
        return f"HR@10 {self.hit:.4f}, chance {self.chance:.4f} ± {self.error:.4f} ({self.errors:+.1f} standard errors)"


def from_chance(ranks: np.ndarray, items: np.ndarray, chance: float) -> FromChance:
    """[U] ranks of the held-out items, [U] those items.

    Clients that are all sent one table score an item by the same row, so the hits of those with the same held-out item go together. The
    error is the larger one: of clients that are independent, or of items that are.
    """
    hits = ranks <= 10
    by_item = np.bincount(items, hits - chance) / max(1, len(hits))
    return FromChance(float(hits.mean()), chance, max((chance * (1 - chance) / max(1, len(hits))) ** 0.5, float((by_item**2).sum() ** 0.5)))


def interval(values: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """95 % percentile bootstrap interval of the mean of [seeds, U]; see `bootstrap`."""
    return bounds(bootstrap([values], seed=seed)[0])


def bounds(means: np.ndarray) -> tuple[float, float]:
    """The middle 95 % of resampled means."""
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def bootstrap(methods: Sequence[np.ndarray], weights: np.ndarray | None = None, resamples: int = RESAMPLES, seed: int = 0) -> np.ndarray:
    """[methods, resamples] means: a method is [seeds, U], with the same clients in the same order for all.

    Each resample draws U clients with replacement, the same ones for every method, and apart from that as many seeds as the method has,
    with replacement; its value is the mean over all pairs of a drawn seed and a drawn client. With one seed only clients vary.
    With `weights` [U], how many values a client has, means are over those values.
    """
    stacked = np.concatenate(methods)  # [runs, U]
    clients = stacked.shape[1]
    weights = np.ones(clients) if weights is None else weights
    by_run = np.empty((resamples, len(stacked)))
    for rows, count in _drawn(seed, "report clients", clients, resamples):
        by_run[rows] = (count @ (stacked * weights).T) / (count @ weights)[:, None]
    out = np.empty((len(methods), resamples))
    first = 0
    for number, values in enumerate(methods):
        runs = by_run[:, first : first + len(values)]
        first += len(values)
        for rows, count in _drawn(seed, f"report seeds {number}", len(values), resamples):
            out[number, rows] = (count * runs[rows]).sum(axis=1) / len(values)
    return out


def _drawn(seed: int, purpose: str, n: int, resamples: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Chunks of resamples: their numbers [b], and how often each of n things was drawn in n draws with replacement, [b, n]."""
    for rows in np.array_split(np.arange(resamples), max(1, -(-resamples * n // CHUNK))):
        if n == 1:
            yield rows, np.ones((len(rows), 1))
            continue
        unit = uniform(seed, purpose, rows, n)
        # float32 has a last step below 1 that times n can round up to n
        chosen = np.minimum((unit * n).astype(np.int64), n - 1) + np.arange(len(rows))[:, None] * n
        yield rows, np.bincount(chosen.ravel(), minlength=len(rows) * n).reshape(len(rows), n).astype(np.float64)


def uniform(seed: int, purpose: str, who: np.ndarray, n: int) -> np.ndarray:
    """[len(who), n] float32 in [0, 1), bit for bit what `Draw(seed, clients=who).uniform(purpose, n)` gives.

    In numpy, so that a report needs neither torch nor numba: splitmix64 over a counter, a key for each of `who`.
    """
    base = np.frombuffer(hashlib.blake2b(f"{seed}/0/{purpose}".encode(), digest_size=8).digest(), "<u8")
    keys = _mixed(base + (who + 2).astype(np.uint64) * GOLDEN)
    steps = np.arange(1, n + 1, dtype=np.uint64) * GOLDEN
    out = np.empty((len(who), n), np.float32)
    each = max(1, BLOCK // n)
    for first in range(0, len(who), each):
        bits = _mixed(keys[first : first + each, None] + steps) >> np.uint64(11)
        np.multiply(bits, 2.0**-53, out=out[first : first + each], casting="same_kind")
    return out


def _mixed(x: np.ndarray) -> np.ndarray:
    """The splitmix64 finaliser, in place."""
    shifted = np.empty_like(x)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        np.right_shift(x, np.uint64(shift), out=shifted)
        np.bitwise_xor(x, shifted, out=x)
        np.multiply(x, np.uint64(factor), out=x)
    return x


def wilcoxon(a: np.ndarray, b: np.ndarray) -> float:
    """Two-sided p of the signed-rank test on paired values [U]; clients without a difference do not count. 1 if there are none with one."""
    # means over seeds that are equal on paper differ in the last bit, and would be ranked
    difference = np.round(np.asarray(a, np.float64) - np.asarray(b, np.float64), 12)
    from scipy import stats

    return float(stats.wilcoxon(difference).pvalue) if difference.any() else 1.0


def holm(p: Sequence[float]) -> list[float]:
    """p-values corrected for multiple comparisons (Holm's step-down method)."""
    order = np.argsort(p, kind="stable")
    raised = np.maximum.accumulate(np.asarray(p, np.float64)[order] * np.arange(len(p), 0, -1))
    out = np.empty(len(p))
    out[order] = np.minimum(raised, 1)
    return out.tolist()


class CriticalDifference(NamedTuple):
    """Friedman's test and Nemenyi's critical difference of mean ranks over datasets."""

    ranks: np.ndarray
    """[methods] mean over datasets; 1 is best"""
    p: float
    """of Friedman's test: that all methods are alike"""
    difference: float
    """two methods whose mean ranks differ by less are not told apart at the 5 % level"""


def critical_difference(scores: np.ndarray) -> CriticalDifference:
    """[datasets, methods] with higher better; at least 2 × 3. Equal scores share their ranks."""
    datasets, methods = scores.shape
    from scipy import stats

    ranks = stats.rankdata(-scores, axis=1).mean(axis=0)
    alike = np.ptp(scores, axis=1).max() == 0
    p = 1.0 if alike else float(stats.friedmanchisquare(*scores.T).pvalue)
    q = stats.studentized_range.ppf(LEVEL, methods, np.inf) / np.sqrt(2)
    return CriticalDifference(ranks, p, float(q * np.sqrt(methods * (methods + 1) / (6 * datasets))))


def pareto(cost: Sequence[float], quality: Sequence[float]) -> list[int]:
    """The points that no other beats in both, by rising cost: none is as cheap and as good, and better in one of them."""
    front: list[int] = []
    for point in sorted(range(len(cost)), key=lambda i: (cost[i], -quality[i])):
        if not front or quality[point] > quality[front[-1]]:
            front.append(point)
    return front
