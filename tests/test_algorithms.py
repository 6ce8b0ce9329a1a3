"""Every built-in algorithm under the common tests (fedbench/testing/algorithm_tests.py), and that those can fail."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from torch import Tensor

from fedbench.algorithms.central_ease import CentralEASE
from fedbench.algorithms.fedavg_ncf import FedAvgNCF
from fedbench.algorithms.fedcooc import FedCooc
from fedbench.algorithms.fedease import FedEASE
from fedbench.algorithms.fedease_sketch import FedEASESketch
from fedbench.algorithms.fedem import FedEM
from fedbench.algorithms.fedmf import FedMF
from fedbench.algorithms.fedrec_mf import FedRecMF
from fedbench.algorithms.fedrecon import FedRecon
from fedbench.algorithms.itemknn import ItemKNN
from fedbench.algorithms.local import Local
from fedbench.algorithms.popularity import Popularity
from fedbench.algorithms.random_scores import Random
from fedbench.contract.algorithm import Algorithm, Batch, Tensors, bce
from fedbench.contract.randomness import Draw
from fedbench.errors import UsageError
from fedbench.simulation.client_store import ClientStore
from fedbench.simulation.engine import Engine
from fedbench.simulation.federation import Federation
from fedbench.testing import algorithm_tests
from fedbench.testing.algorithm_tests import AlgorithmTests, on_test
from fedbench.testing.small_federation import SEED, SMALL, samples_of, small_split, small_world

QUALITY_USERS = 400
CHANCE = (0.1 - 3 * math.sqrt(0.09 / QUALITY_USERS), 0.1 + 3 * math.sqrt(0.09 / QUALITY_USERS))
"""HR@10 among 1 + 99 of a ranking that knows nothing, give or take three standard errors"""


class TestFedMF(AlgorithmTests):
    algorithms = (
        FedMF(**SMALL),
        FedMF(**SMALL, optimizer="sgd", lr=2.0, lr_items=0.5, average="sum", server="adam", server_lr=0.05),
        *(FedMF(**SMALL, average=average) for average in ("cohort", "sum")),
        FedMF(**SMALL, server="momentum", server_lr=0.5),
        *(FedMF(**SMALL, server=server, server_lr=0.05) for server in ("adagrad", "adam", "yogi")),
    )
    band = (0.25, 0.65)
    quality = {"local_epochs": 2}
    quality_rounds = 6


def fedavg_ncf(**fields: Any) -> FedAvgNCF:
    settings = {"layers": (12, 6, 4), "lr": 0.001, "weight_decay": 0.01, "clip": 0.5, "server_lr": 1.0}
    return FedAvgNCF(**{**settings, **fields, **SMALL})


class TestFedAvgNCF(AlgorithmTests):
    algorithms = (
        fedavg_ncf(),
        fedavg_ncf(**FedAvgNCF.published),
        fedavg_ncf(average="cohort", weight_decay=0.3),
        fedavg_ncf(average="sum", server="adam", server_lr=0.05, clip=0.0),
        fedavg_ncf(share_users=True),
    )
    band = (0.25, 0.65)
    quality = {"average": "sum", "server": "adam", "server_lr": 0.05, "lr": 0.02, "layers": (32, 16, 8)}
    quality_rounds = 8


class TestFedRecon(AlgorithmTests):
    algorithms = (
        FedRecon(**SMALL),
        FedRecon(**SMALL, server="sgd", negatives=4, max_samples=20),
        FedRecon(**SMALL, server_lr=0.5, server_decay="none"),
    )
    band = (0.3, 0.75)
    quality = {"server_lr": 0.0, "max_samples": None, "server_decay": "linear", "rounds": 8}
    quality_rounds = 8


class TestFedReconHalves(AlgorithmTests):
    algorithms = (FedRecon(**SMALL, server="adam", server_lr=0.05, server_decay="none", negatives=2, halves=True),)
    band = (0.3, 0.75)
    quality_rounds = 4


class TestFedReconBySGD(AlgorithmTests):
    published = {**FedRecon.published, **SMALL, "batch_size": 5}
    algorithms = (FedRecon(**published), FedRecon(**{**published, "halves": False, "recon_steps": 7}))
    band = (0.2, 0.7)
    quality = {"batch_size": 20, "local_epochs": 1, "average": "sum", "server": "adam", "server_lr": 0.05, "init_scale": 1.0}
    quality_rounds = 6


def fedrec_mf(**fields: Any) -> FedRecMF:
    return FedRecMF(**{**SMALL, **fields})


class TestFedRecMF(AlgorithmTests):
    algorithms = (
        fedrec_mf(rho=2, hybrid_from=1),
        fedrec_mf(form="stochastic", rho=1, hybrid_from=1, stop_below=0.05),
        fedrec_mf(rho=2, filling="average", penalty=0.1),
        fedrec_mf(form="stochastic", average="cohort", server="adam", server_lr=0.05),
    )
    band = (0.8, 1.0)  # RMSE; predicting the mean gives 1.17
    quality = {"local_epochs": 1, "rho": 0}
    quality_rounds = 10


class TestFedRecMFImplicit(AlgorithmTests):
    algorithms = (fedrec_mf(feedback="implicit"),)
    band = (0.25, 0.65)
    quality = {"local_epochs": 2}
    quality_rounds = 6


class TestLocal(AlgorithmTests):
    algorithms = (Local(**SMALL), Local(**SMALL, stop_below=0.2), Local(**SMALL, sampling="queue"))
    band = CHANCE


class TestFedEASE(AlgorithmTests):
    algorithms = (FedEASE(clients_per_round=17), FedEASE(clients_per_round=17, l2=5.0, user_power=0.5))
    band = (0.3, 0.75)
    quality_rounds = 1


class TestFedEASESketch(AlgorithmTests):
    algorithms = (FedEASESketch(clients_per_round=17, dim=8, l2=3.0),)
    band = (0.25, 0.75)
    quality_rounds = 1


class TestFedEASEInTheClear(AlgorithmTests):
    algorithms = (FedEASE(clients_per_round=17, secure=False), FedCooc(clients_per_round=17, secure=False))
    may_leave = ("user",)  # which is what --no-secure says


class TestFedCooc(AlgorithmTests):
    algorithms = tuple(FedCooc(clients_per_round=17, normalise=how, neighbours=20) for how in ("rp3", "cosine", "none"))
    band = (0.25, 0.75)
    quality_rounds = 1


class TestCentralEASE(AlgorithmTests):
    algorithms = (CentralEASE(), ItemKNN())


class TestPopularity(AlgorithmTests):
    algorithms = (Popularity(clients_per_round=17),)
    band = (0.25, 0.4)
    quality_rounds = 1


class TestRandom(AlgorithmTests):
    algorithms = (Random(clients_per_round=17),)
    band = CHANCE
    quality_rounds = 1


def fedem(**fields: Any) -> FedEM:
    return FedEM(**{**SMALL, "adapter": (16, 8, 1), **fields})


class TestFedEM(AlgorithmTests):
    algorithms = (
        fedem(batch_size=1 << 20),
        *(fedem(merge=merge, batch_size=1 << 20) for merge in ("static", "replace")),
        fedem(row_negatives=True, train_user="always", adapter=(16, 1), stop_below=0.1),
        *(fedem(merge=merge, train_user="always") for merge in ("elastic", "static")),
        *(fedem(merge=merge, row_negatives=True) for merge in ("elastic", "replace")),
        *(fedem(aggregation=aggregation) for aggregation in ("sim", "avg")),
        fedem(agg_ratio=0.4, same_start=False),
        fedem(exclude_self=False),
        fedem(objective="code"),
        fedem(similarity="l2", floor=0.3),
        fedem(floor=0.4, max_weight=0.2),
        fedem(adapter=(16, 1), stop_below=0.1),
    )
    band = (0.25, 0.75)
    quality = {"adapter": (32, 16, 8, 1), "agg_ratio": 1.0, "same_start": True, "max_weight": 1.0, "batch_size": 1 << 20}
    quality_rounds = 2


class TestFedEMPublished(AlgorithmTests):
    algorithms = (fedem(**FedEM.published), fedem(**{**FedEM.published, "agg_ratio": 0.4}))
    band = CHANCE  # what its protocol adds is the leak, not the learning
    quality = {"adapter": (32, 16, 8, 1)}


def test_fedem_does_not_forget_what_it_draws() -> None:
    """Own rows that negatives train lose a client's held-out item once it is drawn; the clean recipe's keep what the server sends."""
    parts = small_split(QUALITY_USERS, 240, 20)

    def curve(recipe: FedEM) -> list[float]:
        federation = Federation.start(recipe, parts, SEED)
        found = []
        for _ in range(6):
            federation.next_round()
            found.append(on_test(federation)["hr_10"])
        return found

    kept, forgot = curve(FedEM()), curve(FedEM(row_negatives=True, train_user="always"))
    assert min(kept) > 0.6 and kept[-1] > max(kept) - 0.02
    assert min(forgot) < forgot[0] - 0.1


def test_a_private_vector_in_an_upload_is_found() -> None:
    class Telling(FedMF):
        def upload(self, held: Tensors, sent: Tensors, samples: Tensor) -> Tensors:
            return {"items": held["items"] - sent["items"] + held["user"].mean() * 1e-6}

    with pytest.raises(AssertionError, match="items"):
        AlgorithmTests().test_private_state_never_shows_in_upload(Telling(**SMALL))


def test_bytes_by_hand() -> None:
    world, draw = small_world(FedMF()), Draw(SEED)
    for algorithm, expected in (
        (FedMF(**SMALL), lambda samples: len(samples.row) * (8 * 4 + 4)),
        (fedem(), lambda samples: 17 * (world.items * 8 * 4 + 4)),
        (Local(**SMALL), lambda samples: 0),
        (Popularity(clients_per_round=17), lambda samples: len(samples.row) * (4 + 4)),
    ):
        samples = samples_of(algorithm, 1)
        store, server = ClientStore(algorithm, world, draw), algorithm.init_server(world, draw)
        assert Engine(algorithm, world, SEED).run_cohort(server, store, samples, 1).uploads.bytes() == expected(samples)


def test_popularity_is_a_count_of_the_clients_that_train_on_an_item() -> None:
    parts = small_split()
    federation = Federation.start(Popularity(), parts, SEED)
    federation.next_round()
    assert (federation.server["count"].numpy() == np.bincount(parts.train_item, minlength=parts.items)).all()


@pytest.mark.parametrize("name", ["alpha", "agg_ratio", "max_weight", "lr", "lr_adapter", "init_items", "init_user"])
def test_fedem_refuses_what_makes_no_sense(name: str) -> None:
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} must be"):
        FedEM(**{name: -1.0}).check()
    with pytest.raises(UsageError, match="--adapter 32,16,8,1 does not fit --dim 8"):
        FedEM(dim=8).check()
    FedEM(dim=8, merge="static").check()


class TestOneAlgorithm(AlgorithmTests):
    """As a plug-in's author writes it."""

    algorithm = Popularity()


class Padded(FedMF):
    """Takes a mean over padded samples."""

    def loss(self, held: Tensors, sent: Tensors, batch: Batch) -> Tensor:
        return bce(held["items"][batch.items] @ held["user"], batch) + (held["items"][batch.items] ** 2).mean()


class PaddedRows(FedMF):
    """Sums over padded rows."""

    def loss(self, held: Tensors, sent: Tensors, batch: Batch) -> Tensor:
        return bce(held["items"][batch.items] @ held["user"], batch) + (held["items"] ** 2).mean()


class Remembering(FedMF):
    """Keeps something beside its tensors."""

    def loss(self, held: Tensors, sent: Tensors, batch: Batch) -> Tensor:
        calls = self.__dict__.setdefault("calls", [])
        calls.append(1)
        return super().loss(held, sent, batch) / len(calls)


class Centred(FedMF):
    """A score that depends on the other rows."""

    def score(self, own: Tensors, sent: Tensors) -> Tensor:
        return (sent["items"] - sent["items"].mean(0)) @ own["user"]


class Waiting(FedMF):
    def phases(self, sent: Tensors) -> tuple[Any, ...]:
        return super().phases(sent) if float(sent["items"].sum()) < 1e9 else ()


class Lost(FedMF):
    """Counts rounds in a place that no checkpoint holds."""

    _so_far: ClassVar[list[int]] = []

    def aggregate(self, server: Tensors, uploads: Any, draw: Draw) -> Tensors:
        self._so_far.append(1)
        return {"items": super().aggregate(server, uploads, draw)["items"] / len(self._so_far)}


@pytest.mark.parametrize(
    ("cls", "test", "said"),
    [
        (
            Padded,
            "equals_the_loop",
            "items.value differs by .* padding is counted: weigh samples by batch.weight and held rows by batch.rows",
        ),
        (PaddedRows, "equals_the_loop", "padding is counted"),
        (PaddedRows, "block_size_does_not_matter", "differs by"),
        (Remembering, "equals_the_loop", "depend on more than its own tensors"),
        (Centred, "works_row_by_row", "score of some rows: score differs by .* that row of the tables alone"),
        (Waiting, "no_step_waits_for_the_device", r"stages calls float\(\) of a tensor, which waits for the device"),
        (Lost, "resumes_bit_for_bit", "after a resume: user differs by .* must be in the tensors"),
    ],
)
def test_the_common_tests_find(cls: type[Algorithm], test: str, said: str, tmp_path: Path) -> None:
    tests = type("TestIt", (AlgorithmTests,), {"algorithms": (cls(**SMALL),)})
    function = getattr(tests(), f"test_{test}")
    case = {**tests.cases(getattr(tests, f"test_{test}"))[-1], **({"tmp_path": tmp_path} if "resumes" in test else {})}
    with pytest.raises(AssertionError, match=f"(?s){said}"):
        function(**case)


def test_a_leak_is_found_without_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The published protocol never draws held-out items as negatives, so a client alone ranks them first."""
    monkeypatch.setattr(algorithm_tests, "split_of", lambda algorithm, *size: small_split(*size, protocol="published"))
    with pytest.raises(AssertionError, match="without a server it is above chance: HR@10 .*, chance 0.1"):
        AlgorithmTests().test_without_a_server_it_is_at_chance(Local())


OTHERS = [TestFedMF, TestFedAvgNCF, TestFedReconBySGD, TestFedRecMF, TestLocal, TestFedEM, TestFedEMPublished]


@pytest.mark.long
@pytest.mark.kernels
@pytest.mark.parametrize("cls", OTHERS, ids=lambda cls: cls.__name__)
def test_other_instances_by_kernels_equal_the_loop(cls: type[AlgorithmTests]) -> None:
    for algorithm in cls.algorithms[1:]:
        cls().test_equals_the_loop(algorithm, "auto")
