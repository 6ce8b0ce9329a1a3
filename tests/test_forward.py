"""Kernels derived from `score` and `receive` against torch's vmap of the same functions, in float64, and when they are refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import vmap

from fedbench.contract.algorithm import OWN, SHARED, Algorithm, Answer, Tensors, World
from fedbench.contract.registry import algorithm
from fedbench.kernels import threads
from fedbench.parts.merging import elastic, mlp, static
from fedbench.simulation import forward, own_tables, scoring
from fedbench.simulation.client_store import ClientStore
from fedbench.simulation.federation import Federation
from fedbench.simulation.sending import reaching, sent_rows, sent_to, sent_whole
from tests.test_evaluate import parts

pytestmark = pytest.mark.kernels

CLIENTS, ITEMS, D = 5, 700, 12  # items of several tiles, the last block of them not full
LAYERS = (2 * D, 7, 3, 1)
NUMBERS = sum((fan_in + 1) * fan_out for fan_in, fan_out in zip(LAYERS[:-1], LAYERS[1:], strict=True))
Score = Callable[[Tensors, Tensors], Tensor]


@dataclass(frozen=True)
class Model(Algorithm):
    """Functions of one client that a test hands it."""

    tables: ClassVar[dict[str, str]] = {"items": SHARED, "gain": SHARED, "square": SHARED, "mine": OWN, "second": OWN, "anchor": SHARED}
    scorer: Any = None
    receiver: Any = None

    def score(self, own: Tensors, sent: Tensors) -> Tensor:
        return self.scorer(own, sent)

    def receive(self, own: Tensors, sent: Tensors) -> Tensors:
        return self.receiver(own, sent)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng([seed, *shape]).standard_normal(shape))


def private(dtype: torch.dtype = torch.float64) -> ClientStore:
    tensors = {
        "user": random(CLIENTS, D),
        "bias": random(CLIENTS),
        "mine": random(CLIENTS, ITEMS, D),
        "second": random(CLIENTS, ITEMS, D, seed=1),
        "mlp": random(CLIENTS, NUMBERS) / 4,
    }
    return ClientStore.of({name: value.to(dtype) for name, value in tensors.items()})


def sent(dtype: torch.dtype = torch.float64) -> Answer:
    """Shared tables and layers, and a table and a vector of one's own; the last two clients share a slot."""
    shared = {
        "items": random(ITEMS, D, seed=2),
        "gain": random(ITEMS, seed=3),
        "square": random(ITEMS, 3, 4, seed=4),
        "layers": random(NUMBERS, seed=5) / 4,
        "mean": torch.tensor(0.3, dtype=torch.float64),
    }
    personal = {"anchor": random(CLIENTS - 1, ITEMS, D, seed=7), "centre": random(CLIENTS - 1, D, seed=8)}
    in_type = [{name: value.to(dtype) for name, value in tensors.items()} for tensors in (shared, personal)]
    return Answer(*in_type, torch.tensor([2, 1, 0, 3, 3]))


def joined(user: Tensor, rows: Tensor) -> Tensor:
    return torch.cat([user.expand(len(rows), -1), rows], dim=1)


def neumf(own: Tensors, sent: Tensors) -> Tensor:
    deep = mlp(sent["layers"], LAYERS, joined(own["user"], sent["items"]))[:, 0]
    return deep + (own["user"][:4] * sent["items"][:, :4]).sum(1) + sent["mean"]


def gated(own: Tensors, sent: Tensors) -> Tensor:
    gate = torch.sigmoid(mlp(own["mlp"], LAYERS, torch.cat([own["mine"], sent["anchor"] - own["mine"]], dim=1)))
    return (own["mine"] + gate * (sent["anchor"] - own["mine"])) @ own["user"]


SCORES: dict[str, Score] = {
    "dot": lambda own, sent: sent["items"] @ own["user"],
    "turned dot": lambda own, sent: own["user"] @ sent["items"].T,
    "biases": lambda own, sent: sent["mean"] + own["bias"] + sent["gain"] + sent["items"][:, :-1] @ own["user"][:-1] + sent["items"][:, -1],
    "own table": lambda own, sent: own["mine"] @ own["user"] * 2 - own["bias"],
    "own and shared": lambda own, sent: (sent["items"] + own["mine"] - sent["anchor"]) @ (own["user"] * sent["centre"]) / 3 + own["bias"],
    "neumf": neumf,
    "own layers": lambda own, sent: mlp(own["mlp"], LAYERS, joined(own["user"], sent["items"]))[:, 0],
    "gate": gated,
    "distance": lambda own, sent: -((sent["items"] - own["user"]) ** 2).sum(1).sqrt(),
    "cosine": lambda own, sent: sent["items"] @ own["user"] / (sent["items"].norm(dim=1) * own["user"].norm()),
    "rows of matrices": lambda own, sent: (sent["square"] * own["user"][:4]).sum(2).tanh().sum(1) + (sent["square"] ** 2).sum((1, 2)),
    "choices": lambda own, sent: torch.where(sent["gain"] > own["bias"], sent["items"][:, 0].exp(), own["mine"].abs().mean(1)).clamp(max=2),
    "of the items alone": lambda own, sent: torch.log1p(sent["gain"] ** 2),
    "of the client alone": lambda own, sent: (own["user"] ** 2).sum().expand(len(sent["gain"])),
    "one table": lambda own, sent: sent["gain"],
    "part of a row": lambda own, sent: own["mine"][:, 3:7] @ own["user"][3:7],
}


def found(
    kernels: forward.Kernels, model: Algorithm, store: ClientStore, answer: Answer, items: Tensor | None, what: str = "score"
) -> Tensor | None:
    kernel = kernels.fitting(model, what, store, answer, lambda kernel: True)
    asked = np.arange(ITEMS)[None] if items is None else items.numpy()
    return None if kernel is None else kernels.scores(kernel, np.arange(CLIENTS), answer, store, asked, ITEMS)


def expected(model: Algorithm, store: ClientStore, answer: Answer, items: Tensor | None, what: str = "score") -> Tensor:
    everyone = torch.arange(CLIENTS)
    if items is None:
        return vmap(getattr(model, what))(store.read(everyone), sent_whole(answer, everyone))
    own = store.rows(everyone, items, model.tables)
    return vmap(getattr(model, what))(own, sent_rows(answer, everyone, items, model.tables))


def some_items(width: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(width).integers(0, ITEMS, (CLIENTS, width)))


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (at % 2)) for at, name in enumerate(SCORES)])
def test_scores_are_those_of_the_function(name: str) -> None:
    model, kernels, store, answer = Model(scorer=SCORES[name]), forward.Kernels(), private(), sent()
    for items in (None, some_items(1), some_items(37), some_items(600)):
        scores = found(kernels, model, store, answer, items)
        assert scores is not None, f"{name} has no kernel"
        torch.testing.assert_close(scores, expected(model, store, answer, items), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["dot", "neumf", "gate"])
def test_float32_and_threads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, kernels = Model(scorer=SCORES[name]), forward.Kernels()
    store, answer = private(torch.float32), sent(torch.float32)
    for items in (None, some_items(37)):
        scores = found(kernels, model, store, answer, items)
        assert scores is not None and scores.dtype == torch.float32
        torch.testing.assert_close(scores.double(), expected(model, private(), sent(), items), rtol=1e-4, atol=1e-4)
        with monkeypatch.context() as patch:
            patch.setattr(threads, "get_num_threads", lambda: 2)
            assert torch.equal(found(kernels, model, store, answer, items), scores)


BUILT_IN = [
    ("fedmf", {}),
    ("fedem", {"dim": 4, "adapter": (8, 6, 1)}),
    ("fedem", {"dim": 4, "adapter": (8, 6, 1), "merge": "static", "floor": 0.0}),
    ("fedavg_ncf", {"dim": 5, "layers": (6, 4, 3)}),
    ("fedavg_ncf", {"dim": 5, "layers": (6, 4, 3), "share_users": True, "average": "cohort"}),
    ("fedrec_mf", {}),
    ("fedrec_mf", {"feedback": "implicit", "negatives": 4, "rho": 0}),
    ("fedrecon", {"dim": 17}),
    ("central_mf", {}),
    ("central_ncf", {"dim": 5, "layers": (6, 4, 3)}),
    ("central_als", {"dim": 20}),
    ("local", {}),
    ("popularity", {}),
    ("random", {}),
]


SOME = [pytest.param(*case, marks=[pytest.mark.long] * (at % 2)) for at, case in enumerate(BUILT_IN)]


@pytest.mark.parametrize(("name", "fields"), SOME, ids=lambda given: given if isinstance(given, str) else ",".join(given) or "default")
def test_built_ins_are_scored_by_kernels(name: str, fields: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fedbench")
    model = algorithm(name)(**fields)
    federation = Federation.start(model, parts(), seed=0, dtype=torch.float64)
    users, items = federation.split.clients, federation.split.items
    store = ClientStore.of({"user": random(users, model.dim)}) if model.reconstructs else federation.store
    for at, tensor in enumerate(store.tensors.values()):
        tensor.copy_(random(*tensor.shape, seed=at))
    server = {n: random(*v.shape, seed=9) if v.is_floating_point() else v for n, v in federation.server.items()}
    if name == "fedem":  # for a third of the clients there is no mixture
        server = {"tables": random(users, items, model.dim), "slot": torch.arange(users).where(torch.arange(users) % 3 > 0, -1)}
        server |= {"common": random(items, model.dim)} if "common" not in fields else {}
    answer = model.at(3, World(users, items)).answer(server)
    without = scoring.Evaluator(model, parts(), "cpu", kernels=False)
    levels = sent_to(answer, torch.arange(users))
    for level in np.unique(levels):
        clients, theirs = torch.from_numpy(np.flatnonzero(levels == level)), reaching(answer, level)
        for asked in (None, torch.from_numpy(parts().test_candidates[clients].astype(np.int64))):
            given = store, theirs, clients, bool(level), asked
            assert federation.evaluator.kernel(*given[:4]) is not None
            torch.testing.assert_close(federation.evaluator.scores(*given), without.scores(*given), rtol=1e-9, atol=1e-9)
    assert "no kernel" not in caplog.text


@dataclass(frozen=True)
class Readings(Model):
    scores: ClassVar[tuple[str, ...]] = ("shared", "later")

    def score_shared(self, own: Tensors, sent: Tensors) -> Tensor:
        return sent["items"] @ own["user"]

    def score_later(self, own: Tensors, sent: Tensors) -> Tensor:
        return own["mine"] @ own["user"] * 0.5**self.context.round


def test_readings_have_kernels_and_see_the_round() -> None:
    model, kernels, store, answer = Readings(scorer=SCORES["own table"]), forward.Kernels(), private(), sent()
    for when in (1, 4):
        for what in ("score", "score_shared", "score_later"):
            now = model.at(when, World(CLIENTS, ITEMS))
            scores = found(kernels, now, store, answer, None, what)
            assert scores is not None
            torch.testing.assert_close(scores, expected(now, store, answer, None, what), rtol=1e-9, atol=1e-9)
    assert len({kernel.module for _, kernel in kernels.known.values() if kernel is not None}) == 3, "a round is no other text"


def test_what_no_client_has_a_part_in_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, kernels, store, answer = Model(scorer=neumf), forward.Kernels(), private(), sent()
    made = []
    monkeypatch.setattr(forward.Kernel, "made_for_all", counted(made, forward.Kernel.made_for_all))
    for items in (None, some_items(3), None):
        found(kernels, model, store, answer, items)
    assert len(made) == 1
    assert made[0][forward.forward.MADE_ROWS].shape == (1, ITEMS, LAYERS[1] + 4), "the first layer's products, and what is multiplied"
    found(kernels, model, store, Answer({**answer.shared, "gain": answer.shared["gain"] + 1}, answer.personal, answer.slot), None)
    assert len(made) == 1, "what it is not made of"
    found(kernels, model, store, Answer({**answer.shared, "items": answer.shared["items"] + 1}, answer.personal, answer.slot), None)
    answer.shared["items"].add_(1)
    scores = found(kernels, model, store, answer, None)
    assert len(made) == 3 and scores is not None
    torch.testing.assert_close(scores, expected(model, store, answer, None), rtol=1e-9, atol=1e-9)


def counted(made: list[Any], function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*given: Any) -> Any:
        made.append(function(*given))
        return made[-1]

    return call


# ---- merging -----------------------------------------------------------------------------------------------------------------


def mixed_by_features(own: Tensors, sent: Tensors) -> Tensor:
    return own["mine"] + torch.sigmoid(own["mine"] * own["user"] - sent["items"]) * (sent["anchor"] - own["mine"])


MERGES: dict[str, Callable[[Tensors, Tensors], Tensors]] = {
    "elastic": lambda own, sent: {**own, "mine": elastic(own["mine"], sent["anchor"], own["mlp"], LAYERS)},
    "static": lambda own, sent: {**own, "mine": static(own["mine"], sent["anchor"], 0.3)},
    "replaced by what all are sent": lambda own, sent: {**own, **sent, "mine": sent["items"]},
    "replaced by what one is sent": lambda own, sent: {**own, "second": sent["anchor"]},
    "two tables by each other": lambda own, sent: {**own, "mine": own["second"], "second": own["mine"] + own["second"]},
    "a gate a feature": lambda own, sent: {**own, "mine": mixed_by_features(own, sent)},
    "a table and what is no table": lambda own, sent: {**own, "mine": own["mine"] * own["bias"], "bias": own["bias"] * 2 + sent["mean"],
                                                       "user": sent["centre"]},
    "a shared layer": lambda own, sent: {**own, "mine": own["mine"] + sent["items"] @ sent["layers"][: D * D].view(D, D)},
}  # fmt: skip


@pytest.mark.parametrize("name", MERGES)
def test_tables_are_merged_as_the_function_says(name: str) -> None:
    model, kernels, answer = Model(receiver=MERGES[name]), forward.Kernels(), sent()
    mine, plain = private(), private()
    clients = torch.tensor([3, 0, 4])
    own_tables.merge_whole_tables(model, clients, answer, mine, kernels)
    own_tables.merge_whole_tables(model, clients, answer, plain)
    assert all(kernel is not None for _, kernel in kernels.known.values()) and all(kernels.agreed.values()) and kernels.agreed
    for tensor, value in plain.tensors.items():
        torch.testing.assert_close(mine.tensors[tensor], value, rtol=1e-12, atol=1e-12, msg=tensor)
    before = private().tensors
    assert torch.equal(mine.tensors["mine"][1], before["mine"][1]), "a client that is not in the cohort"
    assert any(not torch.equal(mine.tensors[one][3], before[one][3]) for one in before)


# ---- refusals ----------------------------------------------------------------------------------------------------------------


REFUSED = {
    "sort": lambda own, sent: sent["items"].sort(dim=1).values @ own["user"],
    "a sum over items": lambda own, sent: sent["items"] @ own["user"] - sent["gain"].sum(),
    "a mean over samples": lambda own, sent: (sent["items"] - sent["items"].mean(0)) @ own["user"],
}


@pytest.mark.parametrize("word", REFUSED)
def test_an_operation_that_kernels_do_not_know_is_named(word: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fedbench")
    model, kernels = Model(scorer=REFUSED[word]), forward.Kernels()
    for _ in range(2):
        assert found(kernels, model, private(), sent(), None) is None
    (said,) = caplog.messages
    assert said.startswith("Model: no kernel for score, for ") and word in said and "(test_forward.py, line " in said


def test_whole_numbers_and_numbers_of_two_types_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fedbench")
    answer = sent(torch.float32)
    assert found(forward.Kernels(), Model(scorer=SCORES["dot"]), private(), answer, None) is None
    assert "numbers of the type torch.float32 and torch.float64" in caplog.text
    whole = Answer({**sent().shared, "gain": torch.arange(ITEMS)}, sent().personal, sent().slot)
    assert found(forward.Kernels(), Model(scorer=SCORES["one table"]), private(), whole, None) is None
    assert found(forward.Kernels(), Model(scorer=SCORES["dot"]), private(), whole, None) is not None, "it is not read"


def test_evaluation_goes_on_without_a_kernel(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that differs is refused, and so is one that cannot be made: the ranks are those of the algorithm's own function."""
    caplog.set_level(logging.INFO, "fedbench")
    fedmf = algorithm("fedmf")()
    federation = Federation.start(fedmf, parts(), seed=0, dtype=torch.float64, kernel="off")
    store, answer = federation.store, fedmf.answer(federation.server)
    plain = federation.evaluator.full_ranks(store, answer)
    assert federation.evaluator.kernels is None, "--kernel off"
    right = forward.Kernels.scores
    monkeypatch.setattr(forward.Kernels, "scores", lambda *given: right(*given) * 1.001)
    wrong = scoring.Evaluator(fedmf, parts(), "cpu")
    ranks = wrong.full_ranks(store, answer)
    assert all(np.array_equal(ranks[part], plain[part]) for part in plain)
    assert caplog.text.count("fedmf: no kernel for score, for its numbers differ from the algorithm's own") == 1


def test_a_merge_that_differs_is_refused(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO, "fedbench")
    right = forward.Kernel.run

    def wrong(self: forward.Kernel, clients: int, arrays: Any, outs: Any, items: np.ndarray) -> None:
        right(self, clients, arrays, outs, items)
        outs["mine"][0][:] *= 1.01

    monkeypatch.setattr(forward.Kernel, "run", wrong)
    model, mine, plain = Model(receiver=MERGES["static"]), private(), private()
    own_tables.merge_whole_tables(model, torch.arange(CLIENTS), sent(), mine, forward.Kernels())
    own_tables.merge_whole_tables(model, torch.arange(CLIENTS), sent(), plain)
    assert all(torch.equal(value, plain.tensors[name]) for name, value in mine.tensors.items())
    assert "no kernel for receive, for its numbers differ" in caplog.text
