"""Popularity at the time, counted by loops; and that times of training interactions alone reach a method."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedbench.algorithms.popularity_recent import PopularityRecent
from fedbench.contract import registry
from fedbench.contract.dataset import DatasetOptions
from fedbench.data.protocol import PRESETS
from fedbench.data.sampling import pool_of, with_time
from fedbench.data.split import Split, split
from fedbench.errors import UsageError
from fedbench.simulation.federation import Federation
from fedbench.testing.algorithm_tests import AlgorithmTests

SEED = 0
DAY = 86400


def timed_split(has_time: bool = True) -> Split:
    """Planted tastes, at times of two years."""
    data = registry.dataset("synthetic")(DatasetOptions(users=30, items=50, interactions=12))
    time = np.random.default_rng(1).integers(1, 730 * DAY, len(data.user))
    return split(
        replace(data, time=time, has_time=has_time), replace(PRESETS["clean"], split="time" if has_time else "random", eval_negatives=20)
    )


class TestPopularityRecent(AlgorithmTests):
    algorithms = (PopularityRecent(dim=7),)


def interactions(parts: Split) -> list[tuple[int, int, float]]:
    """Users, items and days of what is trained on."""
    user = np.repeat(np.arange(parts.clients), parts.train_counts)
    return list(zip(user.tolist(), parts.train_item.tolist(), (parts.train_time / DAY).tolist(), strict=True))


def counted(parts: Split, moments: int, half_life: float) -> np.ndarray:
    """[U, M] every user's scores: a loop over all interactions that are not later than its moment."""
    known = interactions(parts)
    last = np.array([max(day for who, _, day in known if who == u) for u in range(parts.clients)])
    moment = np.quantile(last, np.arange(moments) / moments)
    scores = np.zeros((parts.clients, parts.items))
    for u in range(parts.clients):
        now = max(one for one in moment if one <= last[u])
        for _, item, day in known:
            if day <= now:
                scores[u, item] += 0.5 ** ((now - day) / half_life)
    return scores


@pytest.mark.parametrize("refit", [False, True])
def test_scores_equal_a_loop_over_earlier_interactions(refit: bool) -> None:
    parts = timed_split().with_validation_in_training() if refit else timed_split()
    federation = Federation.start(PopularityRecent(dim=6, half_life=45.0), parts, SEED, dtype=torch.float64)
    federation.next_round()
    found = federation.server["user"] @ federation.server["items"].T
    expected = counted(parts, 6, 45.0)
    assert np.ptp(expected) > 1
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9, atol=1e-12)


def test_a_time_belongs_to_its_training_interaction() -> None:
    parts = timed_split()
    federation = Federation.start(PopularityRecent(dim=6), parts, SEED)
    pool = with_time(pool_of(federation.samples(1), SEED, 1), parts, "")
    assert pool.time is not None
    found = sorted(zip(pool.user.tolist(), pool.item.tolist(), (pool.time.numpy() / DAY).tolist(), strict=True))
    assert found == sorted(interactions(parts))
    # by time the last interaction of a user is its test item and the one before it its validation item: all that is trained on is earlier
    last = [max(day for who, _, day in found if who == u) for u in range(parts.clients)]
    assert (np.array(last) <= parts.val_time / DAY).all()
    few = parts.of_clients(np.array([4, 2]))
    assert [day for _, _, day in interactions(few)] == [day for u in (4, 2) for who, _, day in interactions(parts) if who == u]


def test_data_without_times_is_refused() -> None:
    parts = timed_split(has_time=False)
    assert (
        not len(parts.train_time)
        and not len(parts.with_validation_in_training().train_time)
        and not len(parts.of_clients(np.arange(3)).val_time)
    )
    with pytest.raises(UsageError, match="use popularity"):
        Federation.start(PopularityRecent(dim=6), parts, SEED).next_round()
