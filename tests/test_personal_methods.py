"""PFedRec, FedRAP, CoLR and GPFedRec under the common tests, and what is said of each on its page."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedbench.algorithms.colr import CoLR
from fedbench.algorithms.fedmf import FedMF
from fedbench.algorithms.fedrap import FedRAP
from fedbench.algorithms.gpfedrec import GPFedRec
from fedbench.algorithms.pfedrec import PFedRec
from fedbench.contract.algorithm import Algorithm, Batch, Context, Phase, Tensors, World, bce
from fedbench.contract.uploads import Tables
from fedbench.data.sampling import cohort_of
from fedbench.errors import UsageError
from fedbench.simulation.federation import Federation
from fedbench.testing.algorithm_tests import AlgorithmTests
from fedbench.testing.small_federation import SEED, SMALL, small_split

LAYERS = {"layers": (16, 6, 1)}


def of(cls: type[Algorithm], **fields: Any) -> Any:
    return cls(**{**SMALL, **fields})


class TestPFedRec(AlgorithmTests):
    algorithms = (of(PFedRec), of(PFedRec, score_with="own", optimizer="adam", lr=0.02, lr_items=0.02))
    band = (0.2, 0.7)
    quality_rounds = 6


class TestFedRAP(AlgorithmTests):
    adam = {"optimizer": "adam", "lr": 0.02, "lr_items": 0.02, "average": "touching"}
    algorithms = (of(FedRAP), of(FedRAP, **adam, apart=0.1, sparse=0.1, curriculum="tanh", score_with="sent"))
    band = (0.2, 0.7)
    quality_rounds = 6


class TestCoLR(AlgorithmTests):
    algorithms = (of(CoLR, rank=3), of(CoLR, rank=8, basis="gaussian", sampling="uniform"), of(CoLR, rank=4, optimizer="adam", lr=0.02))
    band = (0.2, 0.7)
    quality = {"rank": 8, "optimizer": "sgd", "lr": 0.5}
    quality_rounds = 60


class TestGPFedRec(AlgorithmTests):
    algorithms = (
        of(GPFedRec, **LAYERS),
        of(GPFedRec, **LAYERS, neighbours=3, similarity="cosine", sketch=0, score_with="own", reach=3.0),
    )
    band = (0.15, 0.7)
    quality = {"layers": (32, 16, 8, 1)}
    quality_rounds = 6


class TestPublished(AlgorithmTests):
    """As published, all but FedRAP's rates of 200, which magnify rounding. What they learn is for the oracles."""

    algorithms = (
        of(PFedRec, **{**PFedRec.published, **SMALL}),
        of(FedRAP, **{**FedRAP.published, "lr_items": 5.0, "lr_personal": 5.0, **SMALL}),
        of(GPFedRec, **{**GPFedRec.published, **SMALL, **LAYERS}),
    )


def trained(algorithm: Algorithm, rounds: int = 2) -> Federation:
    federation = Federation.start(algorithm, small_split(), SEED, dtype=torch.float64)
    for _ in range(rounds):
        federation.next_round()
    return federation


# ---- readings ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [of(PFedRec, lr_items=0.0), of(FedRAP, lr_personal=0.0), of(GPFedRec, **LAYERS, pull=1.0)])
def test_own_and_sent_are_one_reading_where_nothing_private_is_learnt(algorithm: Algorithm) -> None:
    """PFedRec's rows and FedRAP's personal table do not move at a rate of 0. GPFedRec's do: its two readings must differ."""
    readings = trained(algorithm).readings()
    same = all((readings["own"][part] == readings["sent"][part]).all() for part in readings["own"])
    assert same != isinstance(algorithm, GPFedRec)


@pytest.mark.parametrize("cls", [PFedRec, FedRAP, GPFedRec])
def test_the_score_is_the_reading_that_was_asked_for(cls: type[Algorithm]) -> None:
    for which in ("own", "sent"):
        federation = trained(of(cls, score_with=which, **(LAYERS if cls is GPFedRec else {})))
        outcome, reading = federation.outcome(), federation.readings()[which]
        assert all((outcome[part] == reading[part]).all() for part in reading)


# ---- bytes ---------------------------------------------------------------------------------------------------------------


def test_published_tables_travel_whole_and_clean_ones_as_rows() -> None:
    world = World(24, 60)
    for cls in (PFedRec, FedRAP):
        clean, published = trained(of(cls), 1), trained(of(cls, average="cohort"), 1)
        assert published.bytes_up == 17 * published.split.items * 8 * 8  # numbers of float64
        assert clean.bytes_up % (8 * 8 + 4) == 0 and clean.bytes_up < published.bytes_up
        assert of(cls).travels_whole(world) == {}


@pytest.mark.parametrize(("sampling", "seeds", "within"), [("queue", 1, 1e-12), ("uniform", 400, 4 * 0.5 / math.sqrt(400 * 5))])
def test_colr_counts_what_a_client_missed(sampling: str, seeds: int, within: float) -> None:
    """Exactly for the queue; for uniform sampling it is the mean over many seeds."""
    clients, n, rounds = 24, 5, 9
    algorithm, world = CoLR(rank=2, dim=8, clients_per_round=n, sampling=sampling), World(clients, 60)
    found = np.zeros((seeds, rounds))
    for seed in range(seeds):
        steps = np.zeros(clients, int)  # of the server, that each client's table has seen
        for now in range(1, rounds + 1):
            cohort = cohort_of(now, clients, n, sampling, seed)
            found[seed, now - 1] = np.minimum(1, (now - 1 - steps[cohort]) * 2 / 8).mean()
            steps[cohort] = now - 1
    expected = [algorithm.at(now, world).share_to_catch_up(world) for now in range(1, rounds + 1)]
    assert expected == pytest.approx(found.mean(0), abs=within)


def test_colr_pays_for_rank_numbers_up_and_for_no_basis_down() -> None:
    federation = trained(of(CoLR, rank=3, dim=12), 1)
    assert federation.bytes_down == 0, "the first table comes from a seed, and nobody has missed a round"
    assert federation.bytes_up % (3 * 8 + 4) == 0
    federation.next_round()
    clients, items = federation.split.clients, federation.split.items
    late = max(0, 2 * 17 - clients)  # of the queue's second cohort came in round 1 too; all have missed one round
    assert late > 0 and federation.bytes_down == 17 * math.ceil(items * 12 * 32 * 3 / 12 / 8)


# ---- what each is ---------------------------------------------------------------------------------------------------------


class Factors(FedMF):
    """FedMF by SGD: rows move by the sum over their samples, the user vector by the mean."""

    def phases(self, sent: Tensors) -> tuple[Phase, ...]:
        return (Phase(("user", "items"), 0.5, "sgd"),)

    def loss(self, held: Tensors, sent: Tensors, batch: Batch) -> Tensor:
        rows, user = held["items"][batch.items], held["user"]
        of_rows = bce(rows @ user.detach(), batch) * batch.weight.sum()
        return bce(rows.detach() @ user, batch) + of_rows - of_rows.detach()


def test_colr_at_full_rank_is_matrix_factorisation() -> None:
    """RᵀR = 1 at full rank, so to change A is to change Q."""
    algorithm = of(CoLR, rank=8, l2=0.0, sampling="uniform")
    ours, plain = (Federation.start(one, small_split(), SEED, dtype=torch.float64) for one in (algorithm, of(Factors)))
    plain.server = {"items": ours.server["items"].clone()}
    plain.store.tensors["user"].copy_(ours.store.tensors["user"])
    for _ in range(2):
        assert torch.allclose(ours.next_round().loss, plain.next_round().loss, atol=1e-9)
    torch.testing.assert_close(ours.server["items"], plain.server["items"], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ours.store.tensors["user"], plain.store.tensors["user"], rtol=1e-9, atol=1e-9)


def test_gpfedrec_links_the_least_alike_as_published_and_the_most_alike_in_clean() -> None:
    drawn = np.random.default_rng(0)
    groups = [drawn.normal(size=(1, 30, 4)), drawn.normal(size=(1, 30, 4))]
    value = torch.from_numpy(np.concatenate([groups[u % 2] + 0.1 * drawn.normal(size=(1, 30, 4)) for u in range(8)]))
    tables, common = Tables(value, 0, 8), torch.zeros(30, 4, dtype=torch.float64)
    federation = trained(of(GPFedRec, **LAYERS), 1)
    draw = type("Fixed", (), {"uniform": lambda self, purpose, *shape: torch.from_numpy(np.random.default_rng(1).uniform(size=shape))})()
    same = (torch.arange(8)[:, None] - torch.arange(8)) % 2 == 0
    for fields, near in (({}, same), ({"similarity": "cosine", "sketch": 0}, same), ({"similarity": "distance", "sketch": 0}, ~same)):
        recipe = replace(federation.algorithm, **fields)
        weights = recipe.weights(recipe.alike(tables, common, draw))
        torch.testing.assert_close(weights.sum(1), torch.ones(8, dtype=torch.float64))
        assert (weights >= 0).all() and (weights.diagonal() == 0).all() and (weights[~near] == 0).all() and (weights.sum(0) > 0).all()
    alone = replace(federation.algorithm, threshold=1e9).weights(torch.eye(8, dtype=torch.float64))
    assert (alone == torch.eye(8)).all(), "a client without neighbours has itself"


def test_gpfedrecs_pull_is_a_share_of_the_way() -> None:
    algorithm = GPFedRec(**{**GPFedRec.published, "dim": 8, "layers": (16, 1)})
    object.__setattr__(algorithm, "context", Context(2, World(5, 1000)))
    (phase,) = algorithm.phases({"anchor": torch.zeros(1), "items": torch.zeros(1)})
    assert phase.pull["items"].target == "anchor"
    assert phase.rate("items") * phase.pull["items"].weight == pytest.approx(16 / 8, rel=2e-5)
    (phase,) = replace(algorithm, pull=0.3).at(2, World(5, 1000)).phases({"items": torch.zeros(1)})
    assert phase.pull["items"] == ("items", 0.3 / phase.rate("items"))


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        (CoLR(rank=65), "--rank must be from 1 to --dim"),
        (CoLR(l2=-1.0), "--l2 must be 0 or more"),
        (PFedRec(lr_items=-1.0), "--lr-items must be 0 or more"),
        (FedRAP(weight_decay=0.1, optimizer="adam"), "--weight-decay belongs to --optimizer sgd"),
        (FedRAP(step_decay=0.0), "--step-decay must be over 0 and at most 1"),
        (GPFedRec(pull=2.0), "--pull must be from 0 to 1"),
        (GPFedRec(dim=8), "--layers 32,16,8,1 does not fit --dim 8"),
    ],
)
def test_what_makes_no_sense_is_refused(algorithm: Algorithm, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        algorithm.check()
