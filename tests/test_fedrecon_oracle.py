"""Federated reconstruction once more in plain numpy: dense matrices, one client after another, no code of the algorithm or the engine.

Only randomness is taken from them: the first item table and who takes part in a round.
"""

from __future__ import annotations

import dataclasses
import gc
import weakref

import numpy as np
import pytest
import torch

from fedbench.algorithms.fedrecon import FedRecon
from fedbench.contract.algorithm import World
from fedbench.data.sampling import cohort_of
from fedbench.data.split import Split
from fedbench.errors import UsageError
from fedbench.simulation.federation import Federation
from tests.conftest import small_split

SEED, ROUNDS = 3, 4
NEWTON = FedRecon(dim=6, clients_per_round=15, a0=0.2, l2=0.03, rounds=9)


def items_of(split: Split, u: int) -> np.ndarray:
    return split.train_item[split.train_ptr[u] : split.train_ptr[u + 1]]


def user_vector(V: np.ndarray, mine: np.ndarray, a0: float, l2: float) -> np.ndarray:
    """argmin Σ mine (1 - w·v)² + a0 Σ all (w·v)² + l2(|mine| + a0·M)|w|², as one least-squares problem with a row for each term."""
    M, d = V.shape
    rows = np.concatenate([V[mine], np.sqrt(a0) * V, np.sqrt(l2 * (len(mine) + a0 * M)) * np.eye(d)])
    wanted = np.concatenate([np.ones(len(mine)), np.zeros(M + d)])
    return np.linalg.lstsq(rows, wanted, rcond=None)[0]


def newton_rounds(V: np.ndarray, split: Split, recipe: FedRecon) -> np.ndarray:
    """The item table after ROUNDS rounds."""
    U, M, a0, l2 = split.clients, split.items, recipe.a0, recipe.l2
    count, visits = np.zeros(M), 0
    for round_ in range(1, ROUNDS + 1):
        cohort = cohort_of(round_, U, 15, "uniform", SEED)
        gradient, G = np.zeros_like(V), np.zeros((recipe.dim, recipe.dim))
        for u in cohort:
            w = user_vector(V, items_of(split, u), a0, l2)
            for i in items_of(split, u):
                gradient[i] += (w @ V[i] - 1) * w
                count[i] += 1
            G += np.outer(w, w)
            visits += 1
        scale = U / len(cohort)
        new = V.copy()
        for i in range(M):
            weight = count[i] * U / visits + a0 * U
            g = scale * gradient[i] + scale * a0 * G @ V[i] + l2 * weight * V[i]
            H = weight * (scale * G / U + l2 * np.eye(recipe.dim))
            new[i] -= 1.2 * np.sqrt(len(cohort) / U) * (1 - (round_ - 1) / recipe.rounds) * np.linalg.solve(H, g)
        V = new
    return V


def test_newton_rounds_equal_numpy() -> None:
    split = small_split()
    federation = Federation.start(NEWTON, split, SEED, dtype=torch.float64)
    start = federation.server["items"].numpy().copy()
    for _ in range(ROUNDS):
        federation.next_round()
    expected = newton_rounds(start, split, NEWTON)
    assert np.abs(expected - start).max() > 0.1
    np.testing.assert_allclose(federation.server["items"].numpy(), expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kernel", ["auto", "off"])
def test_evaluation_ranks_with_user_vectors_that_numpy_rebuilds(kernel: str) -> None:
    split = small_split()
    federation = Federation.start(NEWTON, split, SEED, dtype=torch.float64, kernel=kernel)
    for _ in range(ROUNDS):
        federation.next_round()
    V = federation.server["items"].numpy()
    users = np.stack([user_vector(V, items_of(split, u), NEWTON.a0, NEWTON.l2) for u in range(split.clients)])
    np.testing.assert_allclose(federation.private().tensors["user"].numpy(), users, rtol=1e-8, atol=1e-8)
    for name, target, candidates in (("val", split.val_item, split.val_candidates), ("test", split.test_item, split.test_candidates)):
        scores = users @ V.T
        mine = np.take_along_axis(scores, target[:, None].astype(np.int64), axis=1)
        rank = 1 + (np.take_along_axis(scores, candidates.astype(np.int64), axis=1) >= mine).sum(axis=1)
        assert (federation.sampled_ranks()[name] == rank).all()


@pytest.mark.parametrize("algorithm", [NEWTON, FedRecon(**{**FedRecon.published, "dim": 6, "clients_per_round": 15, "negatives": 4})])
def test_clients_keep_nothing(algorithm: FedRecon) -> None:
    """After a round there is the server and nothing else: a federation that is given its tensors alone goes on bit for bit."""
    first = Federation.start(algorithm, small_split(), SEED)
    result = first.next_round()
    assert first.store.tensors == {} and first.rebuilt is None
    assert {field.name for field in dataclasses.fields(result)} == {"uploads", "loss", "bytes_down", "updates"}
    assert not any(isinstance(value, torch.Tensor) for value in vars(first.engine).values())
    other = Federation.start(algorithm, small_split(), SEED)
    other.server = {name: value.clone() for name, value in first.server.items()}
    other.round = first.round
    first.next_round()
    other.next_round()
    for name, value in first.server.items():
        assert torch.equal(value, other.server[name])


def test_what_evaluation_rebuilt_is_forgotten() -> None:
    federation = Federation.start(NEWTON, small_split(), SEED)
    federation.next_round()
    user = weakref.ref(federation.private().tensors["user"])
    assert user() is not None
    federation.next_round()
    gc.collect()
    assert federation.rebuilt is None and user() is None


def test_a_client_that_diverges_is_dropped_and_counted() -> None:
    """One client's labels make its SGD overflow: it sends nothing, is counted, and the others' step is as if it were not there."""
    algorithm = FedRecon(**{**FedRecon.published, "dim": 6, "clients_per_round": None, "negatives": 4})
    split = small_split()
    sound, broken = (Federation.start(algorithm, split, SEED) for _ in range(2))
    everybody = broken.samples(1, np.arange(split.clients))
    labels = everybody.label.copy()
    labels[everybody.ptr[5] : everybody.ptr[6]] *= np.float32(3e38)
    broken.samples = lambda when, cohort: dataclasses.replace(everybody, label=labels)  # type: ignore[method-assign]
    result = broken.next_round()
    assert broken.counts["rejected"] == 1 and 5 not in result.uploads.clients.tolist()
    assert result.loss.isfinite().all() and len(result.loss) == split.clients - 1
    sound.chosen = lambda when: np.delete(np.arange(split.clients), 5)  # type: ignore[method-assign]
    sound.next_round()
    assert torch.equal(broken.server["items"], sound.server["items"])
    assert broken.bytes_up == sound.bytes_up


def test_rebuilding_by_sgd_draws_its_own_negatives(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = FedRecon(**{**FedRecon.published, "dim": 6, "clients_per_round": 15, "negatives": 4})
    federation = Federation.start(algorithm, small_split(), SEED)
    federation.next_round()
    before = federation.private().tensors["user"].clone()
    federation.rebuilt = None
    assert torch.equal(federation.private().tensors["user"], before) and (before != 0).any()
    federation.rebuilt = None
    monkeypatch.setattr(federation, "round", 7)
    assert not torch.equal(federation.private().tensors["user"], before)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"reconstruct": "sgd"}, "--server newton goes with"),
        ({"halves": True}, "--server newton goes with"),
        ({"max_samples": 9}, "--server newton goes with"),
        ({"negatives": 4}, "--server newton goes with"),
        ({"server": "sgd"}, "needs --negatives"),
        ({"a0": -1.0}, "--a0 must be"),
        ({"l2": -0.1}, "--l2 must be 0 or more"),
        ({"recon_steps": 0}, "--recon-steps must be over 0"),
    ],
)
def test_refuses_what_makes_no_sense(flags: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        FedRecon(**flags).check()


def test_a_statistic_of_one_client_is_refused() -> None:
    with pytest.raises(UsageError, match="two clients a round"):
        FedRecon(clients_per_round=1).check(World(24, 60))
    FedRecon(clients_per_round=2).check(World(24, 60))
