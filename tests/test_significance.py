"""Intervals and tests against scipy, which shares no code with them, and against figures worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from fedbench.contract.randomness import Draw
from fedbench.evaluation import significance
from fedbench.evaluation.significance import bootstrap, bounds, critical_difference, holm, interval, pareto, uniform, wilcoxon


def values(seeds: int, clients: int, mean: float, seed: int = 0, spread: float = 0.02) -> np.ndarray:
    """[seeds, U]: clients differ, and seeds shift all of them together."""
    rng = np.random.default_rng(seed)
    return mean + spread * rng.normal(size=(seeds, 1)) + 0.3 * rng.normal(size=(seeds, clients))


@pytest.mark.parametrize("n", [1, 7, 943, 40_000])
def test_resamples_are_drawn_as_every_other_random_number(n: int) -> None:
    who = np.arange(3, 40)
    assert np.array_equal(uniform(5, "report clients", who, n), Draw(5, clients=who).uniform("report clients", n).numpy())


@pytest.mark.parametrize("seeds", [1, 2, 5])
def test_the_interval_is_scipys(seeds: int) -> None:
    """scipy resamples its two samples, the numbers of the seeds and of the clients, independently: the same scheme."""
    table = values(seeds, 80, 0.5)
    low, high = interval(table)

    def mean(s: np.ndarray, u: np.ndarray) -> float:
        return table[np.ix_(s, u)].mean()

    samples = (np.arange(seeds), np.arange(80))
    if seeds == 1:
        found = stats.bootstrap((table[0],), np.mean, method="percentile", rng=1).confidence_interval
    else:
        found = stats.bootstrap(samples, mean, vectorized=False, n_resamples=4000, method="percentile", rng=1).confidence_interval
    width = found.high - found.low
    assert (low, high) == pytest.approx((found.low, found.high), abs=0.05 * width)
    assert low < table.mean() < high


def test_seeds_that_disagree_widen_the_interval() -> None:
    alike, apart = interval(values(5, 500, 0.5, spread=0.0)), interval(values(5, 500, 0.5, spread=0.2))
    assert apart[1] - apart[0] > 3 * (alike[1] - alike[0])


def test_methods_meet_the_same_clients_so_that_differences_are_paired() -> None:
    first = values(1, 300, 0.5)
    means = bootstrap([first, first + 0.01])
    assert bounds(means[1] - means[0]) == pytest.approx((0.01, 0.01))


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    table = values(3, 50, 0.5)
    whole = bootstrap([table], resamples=200)
    monkeypatch.setattr(significance, "CHUNK", 700)
    assert bootstrap([table], resamples=200) == pytest.approx(whole)


def test_wilcoxon_is_scipys_and_blind_to_rounding() -> None:
    rng = np.random.default_rng(3)
    a, b = rng.choice([0, 0.5, 1], 200), rng.choice([0, 0.5, 1], 200)
    expected = stats.wilcoxon(a, b).pvalue
    assert wilcoxon(a, b) == pytest.approx(expected)
    assert wilcoxon(a + 1e-15 * rng.normal(size=200), b) == pytest.approx(expected)
    assert wilcoxon(a, a) == 1


def test_holm_by_hand() -> None:
    # sorted .01 .02 .03 .04 times 4 3 2 1: .04 .06 .06 .04, and none below the one before it
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1, 1] and holm([]) == []


def test_critical_difference_as_in_the_tables() -> None:
    """Nemenyi's q at 5 % is 2.343 for 3 methods and 2.728 for 5 (Demšar 2006, table 5)."""
    rng = np.random.default_rng(0)
    for methods, q in ((3, 2.343), (5, 2.728)):
        found = critical_difference(rng.random((8, methods)))
        assert found.difference == pytest.approx(q * np.sqrt(methods * (methods + 1) / 48), rel=1e-3)


def test_mean_ranks_and_friedman() -> None:
    scores = np.array([[0.9, 0.5, 0.1], [0.8, 0.6, 0.2], [0.7, 0.7, 0.3], [0.9, 0.4, 0.3]])
    found = critical_difference(scores)
    assert found.ranks == pytest.approx([1.125, 1.875, 3])
    assert found.p == pytest.approx(stats.friedmanchisquare(*scores.T).pvalue)
    assert critical_difference(np.ones((2, 3))).p == 1


def test_pareto_front() -> None:
    cost, quality = [3, 1, 2, 2, 5, 1], [0.5, 0.2, 0.2, 0.4, 0.45, 0.1]
    assert pareto(cost, quality) == [1, 3, 0]
