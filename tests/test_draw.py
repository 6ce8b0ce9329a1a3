"""Randomness from who and when: the same numbers however clients are grouped, and good ones."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedbench.contract.randomness import Draw, keys

N = 100_000
KINDS = ("normal", "uniform")


@pytest.mark.parametrize("kind", KINDS)
@given(
    clients=st.lists(st.integers(0, 60_000), min_size=1, max_size=12, unique=True),
    cut=st.integers(0, 12),
    width=st.integers(1, 5),
)
@settings(max_examples=25, deadline=None)
def test_a_client_draws_the_same_whoever_is_drawn_with_it(kind: str, clients: list[int], cut: int, width: int) -> None:
    together = getattr(Draw(3, 2, np.array(clients)), kind)("x", width, 2)
    apart = [getattr(Draw(3, 2, np.array(part)), kind)("x", width, 2) for part in (clients[:cut], clients[cut:]) if part]
    assert together.shape == (len(clients), width, 2)
    assert torch.equal(together, torch.cat(apart))
    assert len({tuple(row.flatten().tolist()) for row in together}) == len(clients)


@pytest.mark.parametrize("kind", KINDS)
def test_same_gives_all_clients_the_servers_numbers(kind: str) -> None:
    draw = Draw(0, 1, np.arange(4))
    alike = getattr(draw.same, kind)("x", 3, 2)
    assert alike.shape == (4, 3, 2)
    assert torch.equal(alike, getattr(Draw(0, 1), kind)("x", 3, 2).expand(4, 3, 2))
    assert not torch.equal(alike, getattr(draw, kind)("x", 3, 2))


@pytest.mark.parametrize(("kind", "mean", "variance", "name"), [("normal", 0, 1, "norm"), ("uniform", 0.5, 1 / 12, "uniform")])
@pytest.mark.parametrize("clients", [None, np.arange(N // 5)])
def test_distribution(kind: str, mean: float, variance: float, name: str, clients: np.ndarray | None) -> None:
    """One long stream, and the first five numbers of many streams."""
    numbers = getattr(Draw(0, 0, clients, torch.float64), kind)("x", N if clients is None else 5).numpy().ravel()
    fourth = 3.0 if kind == "normal" else 1 / 80  # central moment: E(x-µ)⁴
    assert abs(numbers.mean() - mean) < 5 * np.sqrt(variance / N)
    assert abs(numbers.var() - variance) < 5 * np.sqrt((fourth - variance**2) / N)
    assert stats.kstest(numbers, name).pvalue > 1e-4
    if kind == "uniform":
        assert numbers.min() >= 0 and numbers.max() < 1


@pytest.mark.parametrize("kind", KINDS)
def test_float32_is_the_rounding_of_float64(kind: str) -> None:
    single, double = (getattr(Draw(5, 0, np.arange(100), dtype), kind)("x", 101) for dtype in (torch.float32, torch.float64))
    assert single.dtype == torch.float32 and double.dtype == torch.float64
    assert torch.equal(single, double.to(torch.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_seeds_rounds_purposes_clients_and_positions_are_uncorrelated(kind: str) -> None:
    def stream(seed: int = 0, when: int = 0, who: int = 0, purpose: str = "x") -> np.ndarray:
        return getattr(Draw(seed, when, np.array([who]), torch.float64), kind)(purpose, N)[0].numpy()

    base = stream()
    streams = [base, stream(seed=1), stream(when=1), stream(who=1), stream(purpose="y"), stream(seed=1, when=1), np.roll(base, 1)]
    for a, b in combinations(streams, 2):
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(N)
        assert abs(np.corrcoef(a**2, b**2)[0, 1]) < 5 / np.sqrt(N)


def test_keys_of_many_clients_purposes_and_rounds_never_meet() -> None:
    who = np.arange(-1, 20_000)
    asked = ((0, 0, "a"), (0, 0, "b"), (0, 1, "a"), (1, 0, "a"), (0, 11, "a"))
    made = [keys(seed, when, purpose, who) for seed, when, purpose in asked]
    assert len(np.unique(np.concatenate(made))) == 5 * len(who)
    assert np.array_equal(made[0][5:9], keys(0, 0, "a", who[5:9]))


@given(n=st.integers(1, 50), k=st.integers(0, 50), seed=st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_subset_is_k_different_numbers_ascending(n: int, k: int, seed: int) -> None:
    picked = Draw(seed, 1).subset("x", n, min(k, n)).tolist()
    assert picked == sorted(set(picked)) and len(picked) == min(k, n)
    assert set(picked) <= set(range(n))


def test_subset_takes_each_number_equally_often() -> None:
    times = np.bincount(np.concatenate([Draw(0, when).subset("x", 20, 5).numpy() for when in range(400)]), minlength=20)
    assert np.abs(times - 100).max() < 5 * np.sqrt(400 * 0.25 * 0.75)


def test_a_drawn_tensor_can_be_a_scalar_or_empty() -> None:
    assert Draw(0).normal("x").shape == ()
    assert Draw(0, 0, np.arange(3)).uniform("x", 0).shape == (3, 0)
