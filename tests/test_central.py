"""The ceilings: each against a small independent version, and what holds for all methods that have all data in one place."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
from torch import nn

from fedbench.algorithms.central_als import CentralALS
from fedbench.algorithms.central_mf import CentralMF
from fedbench.algorithms.central_ncf import CentralNCF
from fedbench.commands import cli
from fedbench.contract.algorithm import Tensors, World
from fedbench.contract.central import Central, Pool
from fedbench.contract.randomness import Draw
from fedbench.data.sampling import pool_of
from fedbench.errors import UsageError
from fedbench.evaluation.metrics import ranking_metrics
from fedbench.experiment import checkpoint, run, run_state
from fedbench.experiment.summary import Best
from fedbench.kernels.compiler import pool
from fedbench.parts.central import Descent
from fedbench.settings.command_line import resolve
from fedbench.settings.config import RunConfig
from fedbench.simulation.federation import Federation
from tests.conftest import small_split

SEED = 0
ROUNDS = 3
MF = CentralMF(dim=6, batch_size=100, lr=0.02, l2=0.003, init_scale=0.3)
NCF = CentralNCF(dim=4, layers=(8, 6, 3), batch_size=100, lr=0.02, l2=0.003, init_scale=0.3)
ALS = CentralALS(dim=6, a0=0.2, l2=0.05)
CENTRAL = [pytest.param(method, id=method.name, marks=[pytest.mark.long] * (method is NCF)) for method in (MF, NCF, ALS)]
DESCENT = [
    pytest.param(method, kernel, id=f"{method.name}-{kernel}", marks=[pytest.mark.long] * (method is NCF and kernel == "auto"))
    for method in (MF, NCF)
    for kernel in ("auto", "off")
]


def start(method: Central, dtype: torch.dtype = torch.float64, kernel: str = "auto") -> Federation:
    return Federation.start(method, small_split(), SEED, dtype=dtype, kernel=kernel)


def pool_in(method: Central, round_: int) -> Pool:
    return pool_of(start(method).samples(round_), SEED, round_, torch.float64)


def assert_same(found: Tensors, expected: Tensors, tolerance: float) -> None:
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}")


def test_a_pool_holds_every_interaction_once_and_fresh_negatives() -> None:
    parts = small_split()
    train = {(u, i) for u in range(parts.clients) for i in parts.train_item[parts.train_ptr[u] : parts.train_ptr[u + 1]].tolist()}
    pools = [pool_in(CentralMF(negatives=3), when) for when in (1, 2)]
    drawn = []
    for one in pools:
        pairs = list(zip(one.user.tolist(), one.item.tolist(), strict=True))
        positive = [pair for pair, label in zip(pairs, one.label.tolist(), strict=True) if label == 1]
        negative = [pair for pair, label in zip(pairs, one.label.tolist(), strict=True) if label == 0]
        assert len(positive) == len(train) and set(positive) == train
        assert len(negative) == 3 * len(train) and not set(negative) & train
        assert one.user.tolist() != sorted(one.user.tolist())
        drawn.append(sorted(negative))
    assert drawn[0] != drawn[1]


class MFModule(nn.Module):
    def __init__(self, server: Tensors) -> None:
        super().__init__()
        self.user = nn.Embedding.from_pretrained(server["user"].clone(), freeze=False)
        self.items = nn.Embedding.from_pretrained(server["items"].clone(), freeze=False)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bd,bd->b", self.user(user), self.items(item))


class NCFModule(MFModule):
    def __init__(self, server: Tensors) -> None:
        super().__init__(server)
        self.deep = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3), nn.ReLU()).double()
        self.head = nn.Linear(4 + 3, 1).double()
        nn.utils.vector_to_parameters(server["mlp"].clone(), self.deep.parameters())
        nn.utils.vector_to_parameters(server["head"].clone(), self.head.parameters())

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        (p, p_deep), (q, q_deep) = self.user(user).split(4, 1), self.items(item).split(4, 1)
        return self.head(torch.cat([p * q, self.deep(torch.cat([p_deep, q_deep], 1))], 1)).squeeze(1)


@pytest.mark.parametrize(("method", "kernel"), DESCENT)
def test_descent_equals_modules_and_torch_optim(method: Descent, kernel: str) -> None:
    federation = start(method, kernel=kernel)
    module = (MFModule if isinstance(method, CentralMF) else NCFModule)(federation.server)
    adam = torch.optim.Adam(module.parameters(), lr=method.lr)
    for round_ in range(1, ROUNDS + 1):
        losses = []
        user, item, label, _ = pool_in(method, round_)
        for at in range(0, len(user), method.batch_size):
            u, i, y = (column[at : at + method.batch_size] for column in (user, item, label))
            each = nn.functional.binary_cross_entropy_with_logits(module(u, i), y, reduction="none")
            norms = module.user(u).square().sum(1) + module.items(i).square().sum(1)
            adam.zero_grad()
            (each + method.l2 * norms).mean().backward()
            adam.step()
            losses += each.tolist()
        assert float(federation.next_round().loss[0]) == pytest.approx(np.mean(losses), abs=1e-9)
    expected = {"user": module.user.weight.detach(), "items": module.items.weight.detach()}
    if isinstance(module, NCFModule):
        expected["mlp"] = nn.utils.parameters_to_vector(module.deep.parameters()).detach()
        expected["head"] = nn.utils.parameters_to_vector(module.head.parameters()).detach()
    assert_same(federation.server, expected, 1e-9)
    client = 5
    sent = {name: value for name, value in federation.server.items() if name != "user"} | {"user": federation.server["user"][client]}
    everything = torch.arange(small_split().items)
    torch.testing.assert_close(method.score({}, sent), module(torch.full_like(everything, client), everything).detach())


@dataclass(frozen=True)
class Other(Descent):
    """A centralised method as one may write it; tests say by which formula."""

    dim: int = 5
    batch_size: int = 90
    lr: float = 0.02
    init_scale: float = 0.3
    of: str = "bias"

    def init_model(self, world: World, draw: Draw) -> Tensors:
        n = 37 if self.of == "wide" else self.dim + 1
        tables = {name: draw.normal(name, rows, n) * self.init_scale for name, rows in (("user", world.clients), ("items", world.items))}
        return tables | {"scale": draw.normal("scale", n), "unused": draw.normal("unused", 3)}

    def logits(self, model: Tensors, user: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return FORMULAS[self.of](model, user, items)


FORMULAS: dict[str, Callable[[Tensors, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "bias": lambda model, user, items: (user[:, :-1] * items[:, :-1]).sum(1) + items[:, -1],
    "both": lambda model, user, items: (user * items).sum(1) - 2 * (user * user).sum(1),
    "gate": lambda model, user, items: (torch.tanh(user * model["scale"]) * torch.relu(items)).sum(1),
    "wide": lambda model, user, items: (user * items).sum(1),
    "distance": lambda model, user, items: -((user - items) ** 2).sum(1),
    "sorted": lambda model, user, items: (user.sort(1).values * items).sum(1),
    "table": lambda model, user, items: (user * items).sum(1) + model["items"].mean(),
    "batch": lambda model, user, items: (user * items).sum(1) + user.sum(),
}
REFUSED = {"sorted": r"sort.*\(test_central.py, line \d+", "table": "KeyError.*items", "batch": "a sum over the samples of a minibatch"}

CASES = [
    ("wide", 0.01),
    *(pytest.param(of, l2, marks=pytest.mark.long) for of, l2 in (("both", 0.0), ("gate", 0.01), ("distance", 0.0))),
]


@pytest.mark.kernels
@pytest.mark.parametrize(("of", "l2"), CASES)
def test_any_formula_has_a_kernel_that_equals_the_generic_path(of: str, l2: float, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fedbench")
    method = Other(of=of, l2=l2)
    fast, slow = start(method), start(method, kernel="off")
    for _ in range(ROUNDS):
        assert float(fast.next_round().loss) == pytest.approx(float(slow.next_round().loss), abs=1e-9)
    assert fast.engine.derived is not None and not fast.engine.derived.off and "no kernel" not in caplog.text
    assert_same(fast.server, slow.server, 1e-9)


@pytest.mark.kernels
@pytest.mark.parametrize("of", REFUSED)
def test_what_kernels_are_not_made_of_takes_the_generic_path(of: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fedbench")
    fast, slow = start(Other(of=of)), start(Other(of=of), kernel="off")
    for _ in range(2):
        fast.next_round(), slow.next_round()
    assert re.search(f"no kernel, for .*{REFUSED[of]}", caplog.text) and caplog.text.count("no kernel") == 1
    assert_same(fast.server, slow.server, 0)


@pytest.mark.kernels
def test_a_kernel_that_differs_is_refused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fedbench")
    right = pool.Kernel.train

    def wrong(self: pool.Kernel, model: Any, moments: Any, samples: Any, plan: tuple[int, int, float]) -> float:
        return right(self, model, moments, samples, (*plan[:2], 1.01 * plan[2]))

    monkeypatch.setattr(pool.Kernel, "train", wrong)
    fast, slow = start(MF), start(MF, kernel="off")
    fast.next_round(), slow.next_round()
    assert "central_mf: no kernel, for its numbers differ from the algorithm's own in" in caplog.text
    assert_same(fast.server, slow.server, 0)


@pytest.mark.kernels
def test_a_kernel_and_the_generic_path_keep_the_same_moments() -> None:
    """So that a run may go on with another --kernel."""
    whole, other = start(NCF, kernel="off"), start(NCF)
    for one in (whole, other):
        one.next_round()
    assert other.server["items/second"].abs().max() > 0
    assert_same(other.server, whole.server, 1e-9)
    whole.engine, other.engine = other.engine, whole.engine
    for one in (whole, other):
        one.next_round()
    assert_same(other.server, whole.server, 1e-9)


def als_by_loops(
    user: np.ndarray, met: list[list[int]], items: int, a0: float, l2: float, rounds: int
) -> tuple[np.ndarray, np.ndarray, float]:
    """The normal equations of every item and every user, written out; and the objective over all pairs."""
    users, d = user.shape
    item = np.zeros((items, d))
    for _ in range(rounds):
        for fixed, solved, groups in (
            (user, item, [[u for u in range(users) if i in met[u]] for i in range(items)]),
            (item, user, met),
        ):
            for row, members in enumerate(groups):
                left, right = l2 * (len(members) + a0 * len(fixed)) * np.eye(d), np.zeros(d)
                for other in range(len(fixed)):
                    left += (a0 + (other in members)) * np.outer(fixed[other], fixed[other])
                    right += (other in members) * fixed[other]
                solved[row] = np.linalg.solve(left, right)
    objective = 0.0
    for u in range(users):
        objective += l2 * (len(met[u]) + a0 * items) * user[u] @ user[u]
        for i in range(items):
            score = user[u] @ item[i]
            objective += (1 - score) ** 2 * (i in met[u]) + a0 * score**2
    for i in range(items):
        objective += l2 * (sum(i in mine for mine in met) + a0 * users) * item[i] @ item[i]
    return user, item, objective


def test_als_equals_normal_equations_by_loops() -> None:
    parts, federation = small_split(), start(ALS)
    met = [parts.train_item[a:b].tolist() for a, b in zip(parts.train_ptr[:-1], parts.train_ptr[1:], strict=True)]
    first = federation.server["user"].numpy().copy()
    losses = [float(federation.next_round().loss[0]) for _ in range(ROUNDS)]
    user, item, objective = als_by_loops(first, met, parts.items, ALS.a0, ALS.l2, ROUNDS)
    assert_same(federation.server, {"user": torch.from_numpy(user), "items": torch.from_numpy(item)}, 1e-9)
    assert losses[-1] == pytest.approx(objective / len(parts.train_item), rel=1e-9)
    assert losses == sorted(losses, reverse=True)


def test_als_solves_the_same_in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, pieces = start(ALS), start(ALS)
    whole.next_round()
    monkeypatch.setattr("fedbench.algorithms.central_als.ROWS", 20)
    pieces.next_round()
    assert_same(pieces.server, whole.server, 1e-12)


@pytest.mark.parametrize("method", CENTRAL)
def test_nobody_is_visited_and_nothing_travels(method: Central) -> None:
    federation = start(method)
    for _ in range(2):
        result = federation.next_round()
        assert result.uploads.bytes() == result.bytes_down == 0 and result.uploads.tensors == {}
    assert federation.bytes_up == federation.bytes_down == 0 and federation.visits.sum() == 0
    assert federation.store.tensors == {}


@pytest.mark.kernels
@pytest.mark.parametrize("method", CENTRAL)
def test_resumes_bit_for_bit(method: Central, tmp_path: Path) -> None:
    steady, stopped, fresh = (start(method) for _ in range(3))
    for federation in (steady, stopped):
        federation.next_round()
        federation.next_round()
    run_state.save(tmp_path, stopped, Best(), RunConfig(algo=method.name, algorithm=method, dataset="synthetic"))
    state = checkpoint.newest(tmp_path)
    assert state is not None
    run_state.restore(state, fresh, Best())
    assert steady.next_round().loss.equal(fresh.next_round().loss)
    assert_same(fresh.server, steady.server, 0)


@pytest.mark.parametrize("method", CENTRAL)
def test_a_round_leaves_what_it_was_given(method: Central) -> None:
    parts = small_split()
    server = method.init_server(World(parts.clients, parts.items), Draw(SEED, 0, None, torch.float64))
    before = {name: value.clone() for name, value in server.items()}
    method.epoch(server, pool_in(method, 1), Draw(SEED, 1, None, torch.float64), True)
    assert_same(server, before, 0)


@pytest.mark.kernels
@pytest.mark.parametrize("method", CENTRAL)
def test_thread_count_does_not_matter(method: Central) -> None:
    servers = []
    for threads in (1, min(2, numba.config.NUMBA_NUM_THREADS)):
        torch.set_num_threads(threads)
        numba.set_num_threads(threads)
        federation = start(method)
        federation.next_round()
        servers.append(federation.server)
    assert_same(servers[1], servers[0], 1e-9)


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(CentralMF(dim=16, batch_size=512, lr=0.02, rounds=12), id="mf"),
        pytest.param(CentralNCF(dim=8, layers=(16, 8), batch_size=512, lr=0.01, rounds=12), id="ncf"),
        pytest.param(CentralALS(dim=16, a0=0.1, l2=0.05, rounds=5), id="als"),
    ],
)
def test_quality_on_planted_tastes(method: Central) -> None:
    """HR@10 of popularity is about .3 there (tests/test_algorithms.py), chance .1."""
    federation = Federation.start(method, small_split(400, 240, 20), SEED)
    for _ in range(method.rounds):
        federation.next_round()
    assert 0.45 <= ranking_metrics(federation.sampled_ranks()["test"])["hr_10"] <= 0.9


@pytest.mark.parametrize("words", ["-n 10", "-e 3", "--sampling queue", "--stop-below 0.1"])
def test_flags_of_clients_are_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--algo", "central_mf", "--dataset", "synthetic", *words.split()]) == 2
    assert "has all data in one place; leave it out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (CentralALS(negatives=4), "--negatives means nothing"),
        (CentralALS(a0=0.0), "--a0 must be over 0"),
        (CentralMF(l2=-1.0), "--l2 must be 0 or more"),
        (CentralMF(lr=0.0), "--lr must be over 0"),
        (CentralNCF(layers=(7, 3)), "--layers 7,3: give two sizes or more"),
    ],
)
def test_refuses_what_makes_no_sense(method: Central, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        method.check()


def test_a_run_with_refit(tmp_path: Path) -> None:
    words = "--algo central_als --dataset synthetic --users 60 --items 150 --interactions 12 --dim 4 --rounds 3 --refit --no-mlflow --quiet"
    summary = run.run(resolve([*words.split(), "--out", str(tmp_path / "r")]))
    assert summary["bytes_up"] == summary["bytes_down"] == summary["client_visits"] == 0
    assert summary["refit"]["rounds"] == summary["best_round"]
