"""FedEM once more, as a small module and plain loops: it shares no code with the algorithm, its parts or the kernels.

Only randomness is taken from the engine: initial tensors, samples, shuffles, and which clients are aggregated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist
from sklearn.decomposition import PCA
from torch import Tensor, nn

from fedbench.algorithms.fedem import FedEM
from fedbench.contract.mixtures import SparseWeights
from fedbench.contract.randomness import Draw, keys
from fedbench.contract.uploads import Tables
from fedbench.data.sampling import Samples, cohort_of, sample_round
from fedbench.data.split import Split
from fedbench.evaluation.metrics import ranking_metrics
from fedbench.kernels.mixing import signatures
from fedbench.kernels.shuffling import orders
from fedbench.simulation.federation import Federation
from fedbench.simulation.sending import COMMON, reaching
from tests.conftest import small_split

SEED, ROUNDS = 3, 3
SMALL: dict[str, Any] = {"dim": 8, "batch_size": 32, "local_epochs": 4, "clients_per_round": 20, "adapter": (16, 6, 1)}


class Client(nn.Module):
    """One device: user vector, the WHOLE item table, adapter."""

    def __init__(self, user: Tensor, items: Tensor, adapter: Tensor, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.user = nn.Parameter(user.clone())
        self.items = nn.Embedding.from_pretrained(items.clone(), freeze=False)
        layers: list[nn.Module] = []
        for fan_in, fan_out in zip(sizes[:-1], sizes[1:], strict=True):
            layers += [nn.Linear(fan_in, fan_out, dtype=torch.float64), nn.ReLU()]
        self.adapter = nn.Sequential(*layers[:-1], nn.Sigmoid())
        nn.utils.vector_to_parameters(adapter, self.adapter.parameters())

    def merged(self, item: Tensor, sent: Tensor) -> Tensor:
        own, change = self.items(item), sent[item] - self.items(item)
        return own + self.adapter(torch.cat([own, change], dim=1)) * change

    def receive(self, sent: Tensor) -> None:
        with torch.no_grad():
            self.items.weight.copy_(self.merged(torch.arange(len(sent)), sent))

    def train_locally(self, item: Tensor, label: Tensor, shuffles: list[Tensor], sent: Tensor | None, recipe: FedEM) -> None:
        frozen = sent is not None and recipe.train_user == "first"
        model = torch.optim.Adam([self.items.weight] if frozen else [self.user, self.items.weight], lr=recipe.lr)
        adapter = torch.optim.Adam(self.adapter.parameters(), lr=recipe.lr_adapter)
        losses: list[float] = []
        before = None
        for order in shuffles:
            for batch in order.split(recipe.batch_size):
                for optimizer in (model,) if sent is None else (adapter, model):
                    rows = self.items(item[batch]) if sent is None else self.merged(item[batch], sent)
                    # BCELoss(sigmoid(logit)) has no digits left at the logits of 30 that come up here, and Adam would show it
                    loss = nn.functional.softplus((1 - 2 * label[batch]) * (rows @ self.user)).mean()
                    self.zero_grad()
                    loss.backward()
                    if not recipe.row_negatives:  # the protocol draws no positive as a negative: a row has samples of one label
                        self.items.weight.grad[item[batch][label[batch] == 0]] = 0
                    optimizer.step()
                losses += [loss.item()] * len(batch)
            mean = float(np.mean(losses))
            if before is not None and abs(mean - before) / abs(before + 1e-5) < recipe.stop_below:
                return
            before = mean


def signature(table: Tensor) -> np.ndarray:
    scores = PCA(1, svd_solver="full").fit_transform(table.numpy())[:, 0]
    return scores * np.sign(scores[np.abs(scores).argmax()])


def mixture(wanted: np.ndarray) -> np.ndarray:
    """The nearest weights >= 0 that sum to 1: all of `wanted` lowered by one level, found by bisection."""
    low, high = wanted.min() - 1, wanted.max()
    for _ in range(200):
        level = (low + high) / 2
        low, high = (level, high) if np.maximum(wanted - level, 0).sum() > 1 else (low, level)
    return np.maximum(wanted - (low + high) / 2, 0)


def mixtures(tables: list[Tensor], samples: np.ndarray, recipe: FedEM) -> list[Tensor]:
    vectors = np.stack([signature(table) for table in tables])
    close = 1 - cdist(vectors, vectors, "cosine") if recipe.similarity == "cos" else 1 / (1 + cdist(vectors, vectors))
    if recipe.similarity == "l2":
        close[close > 0.9] = 1
    share = samples / samples.sum()
    stacked = torch.stack(tables)
    if recipe.exclude_self:
        np.fill_diagonal(close, 0)
    scale = 1 + recipe.alpha if recipe.objective == "paper" else 1
    mixed = []
    for u, row in enumerate(close):
        weights = mixture((share + recipe.alpha * row) / scale)
        others = np.delete(share, u)
        if others.sum() > 0:
            weights = (1 - recipe.floor) * weights + recipe.floor * np.insert(others / others.sum(), u, 0)
        mixed.append(torch.einsum("s,smd->md", torch.from_numpy(weights), stacked))
    return mixed


def of_client(samples: Samples, c: int) -> tuple[Tensor, Tensor]:
    rows = samples.row[samples.row_ptr[c] : samples.row_ptr[c + 1]]
    at = slice(samples.ptr[c], samples.ptr[c + 1])
    return torch.from_numpy(rows[samples.local[at]].astype(np.int64)), torch.from_numpy(samples.label[at]).double()


def oracle(recipe: FedEM, parts: Split, start: dict[str, Tensor]) -> tuple[list[Client], dict[int, Tensor], Tensor | None]:
    """All clients, the table that the server holds for some, and the one for all others, after the last round."""
    clients = [Client(start["user"][u], start["items"][u], start["adapter"][u], recipe.adapter) for u in range(parts.clients)]
    tables: dict[int, Tensor] = {}
    common: Tensor | None = None
    for round_ in range(1, ROUNDS + 1):
        cohort = cohort_of(round_, parts.clients, recipe.clients_per_round or parts.clients, recipe.sampling, SEED)
        samples = sample_round(parts, cohort, recipe.negatives, SEED, round_)
        stream = keys(SEED, round_, "shuffle", cohort)
        for c, u in enumerate(cohort.tolist()):
            item, label = of_client(samples, c)
            shuffles = []
            for epoch in range(recipe.local_epochs):
                order = np.empty(len(label), np.int64)
                orders(stream[c : c + 1], np.array([0, len(label)]), epoch, recipe.batch_size, order)
                shuffles.append(torch.from_numpy(order))
            if u in tables:
                clients[u].receive(tables[u])
            clients[u].train_locally(item, label, shuffles, tables.get(u), recipe)
        picked = Draw(SEED, round_).subset("aggregated", len(cohort), max(1, int(len(cohort) * recipe.agg_ratio))).numpy()
        uploaded = [clients[u].items.weight.detach() for u in cohort[picked]]
        for u in cohort.tolist() if not recipe.floor else ():
            tables.pop(u, None)  # it has come for its table; the others' tables wait
        mixed = mixtures(uploaded, samples.counts[picked], recipe)
        if recipe.floor:  # these rounds reach 20 of all clients, or fewer
            reached = len(picked) / parts.clients
            mean, new = torch.stack(uploaded).mean(0), max(1 / round_, reached)
            common = mean if common is None else (1 - new) * common + new * mean
            mixed = [one + recipe.common * (1 - reached) * (common - one) for one in mixed]
        tables |= dict(zip(cohort[picked].tolist(), mixed, strict=True))
    return clients, tables, common


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


RECIPES = {
    "clean": FedEM(**{**SMALL, "batch_size": FedEM.batch_size}),
    "clean, half aggregated": FedEM(**SMALL, agg_ratio=0.5, floor=0.4),
    "clean, one aggregated": FedEM(**SMALL, agg_ratio=0.05),
    "clean, nothing in common": FedEM(**SMALL, floor=0.0),
    "clean, row negatives": FedEM(**SMALL, row_negatives=True),
    "clean, user always, stops early": FedEM(**SMALL, train_user="always", stop_below=0.1, alpha=0.1, same_start=False),
    "clean, weights of the code": FedEM(**SMALL, exclude_self=False, objective="code"),
    "published": FedEM(**{**FedEM.published, **SMALL}),
    "published, half aggregated": FedEM(**{**FedEM.published, **SMALL, "agg_ratio": 0.5}),
    "published, clean rows": FedEM(**{**FedEM.published, **SMALL, "row_negatives": False, "train_user": "first"}),
}


# other kernels are compared with the loop, tests/test_algorithms.py
@pytest.mark.parametrize(("case", "kernel"), [(case, "off") for case in RECIPES])
def test_equals_the_engine(case: str, kernel: str) -> None:
    recipe, protocol = RECIPES[case], case.split(",")[0]
    parts = small_split(protocol=protocol)
    recipe = replace(recipe, clients_per_round=min(20, parts.clients - 2))
    federation = Federation.start(recipe, parts, SEED, dtype=torch.float64, kernel=kernel)
    start = {name: value.clone() for name, value in federation.store.tensors.items()}
    clients, tables, common = oracle(recipe, parts, start)
    for _ in range(ROUNDS):
        federation.next_round()
    kept = federation.store.tensors
    for u, client in enumerate(clients):
        close(kept["user"][u], client.user.detach())
        close(kept["items"][u], client.items.weight.detach())
        close(kept["adapter"][u], nn.utils.parameters_to_vector(client.adapter.parameters()).detach())
    slot = federation.server["slot"]
    assert set((slot >= 0).nonzero()[:, 0].tolist()) == tables.keys()
    for u, table in tables.items():
        close(federation.server["tables"][slot[u]], table)
    assert ("common" in federation.server) == (common is not None)
    if common is None:
        return
    close(federation.server["common"], common)
    without = torch.tensor([u for u in range(parts.clients) if u not in tables], dtype=torch.int64)
    assert len(without) or recipe.agg_ratio == 1
    answer = federation.algorithm.at(ROUNDS, federation.engine.world).answer(federation.server)
    found = federation.evaluator.scores(federation.store, reaching(answer, COMMON), without, True)
    for u, scores in zip(without.tolist(), found, strict=True):
        close(scores, (clients[u].merged(torch.arange(parts.items), common) @ clients[u].user).detach())


def test_a_table_waits_for_its_client() -> None:
    """With a queue a client comes back only after all others; what the server mixed for it must still be there."""
    parts = small_split()
    federation = Federation.start(replace(FedEM(**SMALL), clients_per_round=parts.clients // 2, sampling="queue"), parts, SEED)
    a_table_each = parts.clients // 2 * parts.items * federation.algorithm.dim * 4
    federation.next_round()
    federation.next_round()
    a_word_each = parts.clients // 2 * 4
    assert federation.bytes_down == a_table_each + a_word_each, "who has no mixture is sent the common table"
    assert (federation.server["slot"] >= 0).sum() == 2 * (parts.clients // 2)
    federation.next_round()
    assert federation.bytes_down == 2 * a_table_each + a_word_each, "who has a mixture is not sent the common table"


def test_one_mixture_for_all_is_kept_once() -> None:
    recipe = replace(FedEM(**SMALL), clients_per_round=4, sampling="queue", alpha=0.0)
    federation = Federation.start(recipe, small_split(), SEED, kernel="off")
    for _ in range(3):
        federation.next_round()
    assert (federation.server["slot"] >= 0).sum() == 12 and len(federation.server["tables"]) == 3


def test_there_is_no_common_table_while_rounds_reach_everybody() -> None:
    federation = Federation.start(FedEM(**{**SMALL, "clients_per_round": None}), small_split(), SEED, kernel="off")
    federation.next_round()
    assert federation.server.keys() == {"tables", "slot"}


def test_a_state_from_before_the_common_table_goes_on() -> None:
    federation = Federation.start(FedEM(**SMALL), small_split(), SEED, kernel="off")
    federation.next_round()
    del federation.server["common"]
    federation.next_round()
    assert federation.server["common"].shape == (federation.split.items, federation.algorithm.dim)


def after(recipe: FedEM, rounds: int = 3) -> dict[str, float]:
    federation = Federation.start(recipe, small_split(), SEED, dtype=torch.float64)
    for _ in range(rounds):
        federation.next_round()
    return ranking_metrics(federation.sampled_ranks()["test"])


def test_both_solvers_train_the_same_numbers() -> None:
    recipe = FedEM(**SMALL)
    assert after(replace(recipe, solver="cvxpy")) == pytest.approx(after(recipe), abs=1e-6)


@pytest.mark.parametrize("floor", [0.0, 0.4])
def test_no_client_weighs_more_than_the_cap(monkeypatch: pytest.MonkeyPatch, floor: float) -> None:
    solve, seen = FedEM.weights, []

    def recording(*arguments: Any) -> SparseWeights:
        found = solve(*arguments)
        assert isinstance(found, SparseWeights)
        seen.append(found.dense())
        return found

    monkeypatch.setattr(FedEM, "weights", recording)
    alone = {**SMALL, "exclude_self": False, "objective": "code", "floor": floor}
    after(FedEM(**alone))
    assert max(float(weights.max()) for weights in seen) > 0.3, "without a cap a client is almost alone, so the cap has work to do"
    seen.clear()
    after(FedEM(**alone, max_weight=0.2))
    assert len(seen) == 3
    for weights in seen:
        assert weights.min() >= 0 and weights.max() <= 0.2 + 1e-12
        close(weights.sum(dim=1), torch.ones(len(weights), dtype=weights.dtype))


def weights_of(recipe: FedEM, samples: list[float], start: int = 0, here: int | None = None) -> Tensor:
    """What the server makes of random tables, `here` of them on this worker from `start` on."""
    tables = torch.from_numpy(np.random.default_rng(0).normal(size=(len(samples), 30, 4)))
    mine = tables[start : start + (here or len(samples))]
    found = recipe.weights(Tables(mine, start, len(samples), lambda make: iter([signatures(tables)])), torch.tensor(samples))
    assert isinstance(found, SparseWeights)
    return found.dense()


def test_the_floor_goes_to_all_others_by_their_samples() -> None:
    samples = [10.0, 20.0, 30.0, 40.0]
    plain, floored = (weights_of(FedEM(floor=floor), samples) for floor in (0.0, 0.2))
    for u in range(4):
        others = np.array(samples) * (np.arange(4) != u)
        close(floored[u], 0.8 * plain[u] + 0.2 * torch.from_numpy(others / others.sum()))
    close(weights_of(FedEM(floor=0.2), samples, start=1, here=2), floored[1:3])  # a rank that has the second and third client


@pytest.mark.parametrize("samples", [[5.0], [5.0, 0.0], [0.0, 0.0]], ids=["alone", "beside one without samples", "none has samples"])
def test_a_floor_without_others_leaves_weights_that_sum_to_1(samples: list[float]) -> None:
    weights = weights_of(FedEM(floor=0.5), samples)
    close(weights.sum(dim=1), torch.ones(len(samples), dtype=weights.dtype))
    assert weights.min() >= 0
