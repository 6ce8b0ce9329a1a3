"""One set of tests for every algorithm. A new one joins with a class of about four lines at the end of this file."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numba
import numpy as np
import pytest
import torch
from torch import Tensor

from fedbench.algorithms.fedavg_ncf import FedAvgNCF
from fedbench.algorithms.fedem import FedEM
from fedbench.algorithms.fedmf import FedMF
from fedbench.algorithms.fedrec_mf import FedRecMF
from fedbench.algorithms.fedrecon import FedRecon
from fedbench.algorithms.local import Local
from fedbench.algorithms.popularity import Popularity
from fedbench.algorithms.random_scores import Random
from fedbench.contract.algorithm import Algorithm, Tensors, World
from fedbench.contract.randomness import Draw
from fedbench.contract.uploads import Rows, Uploads
from fedbench.data.sampling import Samples, cohort_of, sample_round
from fedbench.data.split import Split
from fedbench.errors import UsageError
from fedbench.evaluation.metrics import metrics_of
from fedbench.experiment import checkpoint, run_state
from fedbench.experiment.summary import Best
from fedbench.settings.config import RunConfig
from fedbench.simulation.channel import SecureSum, Trip
from fedbench.simulation.client_store import ClientStore
from fedbench.simulation.engine import Engine
from fedbench.simulation.failures import Failures
from fedbench.simulation.federation import Federation, world_of
from fedbench.simulation.sending import sent_whole
from fedbench.testing import loop_engine
from tests.conftest import small_split, without_samples

ROUNDS = 3
SEED = 0
QUALITY_USERS = 400
CHANCE = (0.1 - 3 * math.sqrt(0.09 / QUALITY_USERS), 0.1 + 3 * math.sqrt(0.09 / QUALITY_USERS))
"""HR@10 among 1 + 99 of a ranking that knows nothing, give or take three standard errors"""
SMALL = {"dim": 8, "batch_size": 32, "local_epochs": 3, "clients_per_round": 17}
"""17 of 24 clients with 25 to 80 samples: one to three batches each"""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every instance of the class, with fused kernels and without; where no arithmetic is tested, only the first without."""
    if metafunc.cls is None or "algorithm" not in metafunc.fixturenames:
        return
    algorithms = metafunc.cls.algorithms
    if "kernel" not in metafunc.fixturenames:
        metafunc.parametrize("algorithm", algorithms, ids=described)
        return
    arithmetic = (AlgorithmTests.test_equals_the_loop, AlgorithmTests.test_float32_stays_finite)
    without = algorithms if metafunc.function in arithmetic else algorithms[:1]
    pairs = [(one, "auto") for one in algorithms] + [(one, "off") for one in without]
    metafunc.parametrize(("algorithm", "kernel"), pairs, ids=[f"{described(one)}-{kernel}" for one, kernel in pairs])


def described(algorithm: Algorithm) -> str:
    """What sets an instance apart from its class's defaults."""
    plain = {**vars(type(algorithm)()), **SMALL, "adapter": (16, 8, 1), "layers": (12, 6, 4)}
    said = [f"{name}={value}" for name, value in vars(algorithm).items() if value != plain[name]]
    return ",".join(said) or "default"


class Trace(NamedTuple):
    """What a few rounds left behind."""

    store: Tensors
    server: Tensors
    losses: list[Tensor]
    uploads: list[Tensors]


def samples_of(algorithm: Algorithm, round_: int) -> Samples:
    """A round's samples; the fifth client of the cohort has none."""
    parts = parts_of(algorithm)
    cohort = cohort_of(round_, parts.clients, algorithm.clients_per_round or parts.clients, algorithm.sampling, SEED)
    return without_samples(drawn(parts, cohort, algorithm, round_), 4)


def parts_of(algorithm: Algorithm, *size: int) -> Split:
    return small_split(*size, ratings=algorithm.predicts_ratings)


def drawn(parts: Split, cohort: np.ndarray, algorithm: Algorithm, round_: int) -> Samples:
    extra = algorithm.extra(round_)
    return sample_round(parts, cohort, extra.each, SEED, round_, extra.rating)


def small_world(algorithm: Algorithm) -> World:
    return world_of(parts_of(algorithm))


def flat(uploads: Uploads) -> Tensors:
    """Every tensor of an upload by name, copied: those of own tables are views of the store."""
    tensors = {}
    for name, value in uploads.tensors.items():
        parts = value._asdict() if isinstance(value, Rows) else {"": value}
        tensors |= {f"{name}.{part}": tensor.clone() for part, tensor in parts.items() if isinstance(tensor, Tensor)}
    return tensors


def trace(
    algorithm: Algorithm, dtype: torch.dtype, run_cohort: Callable[[Tensors, ClientStore, Samples, int], tuple[Uploads, Tensor]]
) -> Trace:
    """The first rounds, each cohort run by `run_cohort`."""
    world, draw = small_world(algorithm), Draw(SEED, 0, None, dtype)
    server, store = algorithm.init_server(world, draw), ClientStore(algorithm, world, draw)
    losses, uploads = [], []
    for round_ in range(1, ROUNDS + 1):
        uploaded, loss = run_cohort(server, store, samples_of(algorithm, round_), round_)
        losses.append(loss)
        uploads.append(flat(uploaded))
        server = algorithm.aggregate(server, SecureSum()(uploaded, Trip(SEED, round_)), Draw(SEED, round_, None, dtype))
    return Trace(store.tensors, server, losses, uploads)


def by_engine(algorithm: Algorithm, dtype: torch.dtype = torch.float64, **options: Any) -> Trace:
    engine = Engine(algorithm, small_world(algorithm), SEED, dtype=dtype, **options)

    def run_cohort(server: Tensors, store: ClientStore, samples: Samples, when: int) -> tuple[Uploads, Tensor]:
        result = engine.run_cohort(server, store, samples, when)
        return result.uploads, result.loss

    return trace(algorithm, dtype, run_cohort)


@cache
def by_loop(algorithm: Algorithm) -> Trace:
    def run_cohort(server: Tensors, store: ClientStore, samples: Samples, when: int) -> tuple[Uploads, Tensor]:
        uploads, losses = loop_engine.run_cohort(algorithm, small_world(algorithm), server, store.tensors, samples, SEED, when)
        return uploads, torch.tensor(losses, dtype=torch.float64)

    return trace(algorithm, torch.float64, run_cohort)


def assert_same(found: Tensors, expected: Tensors, tolerance: float) -> None:
    """Equal names, shapes and numbers; bit for bit with tolerance 0."""
    assert found.keys() == expected.keys()
    for name in expected:
        gap = {"rtol": tolerance, "atol": tolerance, "msg": lambda text, name=name: f"{name}: {text}"}
        torch.testing.assert_close(found[name], expected[name], check_dtype=False, **gap)


def assert_same_trace(found: Trace, expected: Trace, tolerance: float) -> None:
    for round_ in range(ROUNDS):
        assert_same({"loss": found.losses[round_]}, {"loss": expected.losses[round_]}, tolerance)
        assert_same(found.uploads[round_], expected.uploads[round_], tolerance)
    assert_same(found.store, expected.store, tolerance)
    assert_same(found.server, expected.server, tolerance)


def metrics_on_test(federation: Federation) -> dict[str, float]:
    return metrics_of(federation.split, federation.outcome())["test"]


class AlgorithmTests:
    """What holds for every algorithm."""

    algorithms: ClassVar[tuple[Algorithm, ...]]
    """small instances, all tested"""
    band: ClassVar[tuple[float, float]]
    """test HR@10 (chance .10), or RMSE, on planted tastes after `quality_rounds` rounds at the instance's settings"""
    quality: ClassVar[dict[str, Any]] = {}
    """fields that the quality test sets"""
    quality_rounds: ClassVar[int] = 3
    may_leave: ClassVar[tuple[str, ...]] = ()
    """private tensors that upload may show, with the reason in the algorithm's file"""

    def test_equals_the_loop(self, algorithm: Algorithm, kernel: str) -> None:
        assert_same_trace(by_engine(algorithm, kernel=kernel), by_loop(algorithm), 1e-9)

    def test_float32_stays_finite(self, algorithm: Algorithm, kernel: str) -> None:
        found = by_engine(algorithm, torch.float32, kernel=kernel)
        for tensors in (found.store, found.server, *found.uploads, {"loss": torch.stack(found.losses)}):
            for name, tensor in tensors.items():
                assert tensor.isfinite().all(), name

    def test_private_state_never_shows_in_upload(self, algorithm: Algorithm) -> None:
        server, own = self.after_two_rounds(algorithm)
        sent = {name: value[0] for name, value in sent_whole(algorithm.answer(server), self.a_client(algorithm, server)).items()}
        held = algorithm.receive(own, sent)
        private = own.keys() | (held.keys() - sent.keys() if algorithm.reconstructs else set())
        private = private - set(algorithm.tables) - set(self.may_leave)
        samples = torch.tensor(40.0)

        def seen(held: Tensors) -> Tensors:
            """What the server sees of one client: not what it gets only as a sum."""
            return {name: value for name, value in algorithm.upload(held, sent, samples).items() if name not in algorithm.summed}

        shown = seen(held)
        assert not private & shown.keys()
        for name in private:
            assert held[name].shape not in {value.shape for value in shown.values() if value.dim()}
            assert_same(seen({**held, name: held[name] + torch.randn_like(held[name])}), shown, 0)

    def after_two_rounds(self, algorithm: Algorithm) -> tuple[Tensors, Tensors]:
        """The server, and what a client keeps that was sent something if anybody was."""
        federation = Federation.start(algorithm, parts_of(algorithm), SEED)
        federation.next_round()
        federation.next_round()
        client = self.a_client(algorithm, federation.server)
        return federation.server, {name: value[0].clone() for name, value in federation.store.read(client).items()}

    def a_client(self, algorithm: Algorithm, server: Tensors) -> Tensor:
        slot = algorithm.answer(server).slot
        return torch.tensor([0]) if slot is None else (slot >= 0).nonzero()[0]

    def test_resumes_bit_for_bit(self, algorithm: Algorithm, kernel: str, tmp_path: Path) -> None:
        config = RunConfig(algo=algorithm.name, algorithm=algorithm, dataset="synthetic")
        steady, stopped, fresh = (Federation.start(algorithm, parts_of(algorithm), SEED, kernel=kernel) for _ in range(3))
        for federation in (steady, stopped):
            federation.next_round()
            federation.next_round()
        run_state.save(tmp_path, stopped, Best(), config)
        state = checkpoint.newest(tmp_path)
        assert state is not None
        run_state.restore(state, fresh, Best())
        expected, found = steady.next_round(), fresh.next_round()
        assert fresh.round == 3 and (fresh.visits == steady.visits).all()
        assert (fresh.bytes_up, fresh.bytes_down) == (steady.bytes_up, steady.bytes_down)
        assert_same(fresh.store.tensors, steady.store.tensors, 0)
        assert_same(fresh.server, steady.server, 0)
        assert_same({"loss": found.loss, **flat(found.uploads)}, {"loss": expected.loss, **flat(expected.uploads)}, 0)

    def test_a_round_that_nobody_answers_changes_nothing(self, algorithm: Algorithm) -> None:
        federation = Federation.start(algorithm, parts_of(algorithm), SEED)
        federation.next_round()
        before = {name: value.clone() for name, value in federation.state().items()}
        facts = federation.bytes_up, federation.bytes_down, federation.visits.tolist()
        federation.failures = Failures(dropout=1.0)
        result = federation.next_round()
        assert_same(federation.state(), before, 0)
        assert (federation.bytes_up, federation.bytes_down, federation.visits.tolist()) == facts
        assert federation.round == 2 and result.updates == 0 and federation.counts["dropped"] == 17

    def test_failures_leave_everything_finite(self, algorithm: Algorithm, kernel: str) -> None:
        # fewer than half of so small a cohort are huge: no median could tell them otherwise
        federation = Federation.start(algorithm, parts_of(algorithm), SEED, failures=Failures(0.3, 0.4, 0.2), kernel=kernel)
        for _ in range(ROUNDS):
            assert federation.next_round().loss.isfinite().all()
        for name, tensor in federation.state().items():
            assert tensor.isfinite().all(), name
        assert federation.counts["dropped"] + federation.visits.sum() == ROUNDS * 17
        assert federation.counts["rejected"] > 0 or not federation.bytes_up

    def test_block_size_does_not_matter(self, algorithm: Algorithm, kernel: str) -> None:
        metrics, traces = [], []
        for block_rows in (300, 5000, 1 << 30):
            how = {"dtype": torch.float64, "kernel": kernel, "block_rows": block_rows}
            federation = Federation.start(algorithm, parts_of(algorithm), SEED, **how)
            for _ in range(ROUNDS):
                federation.next_round()
            metrics.append([*metrics_on_test(federation).values()])
            traces.append(by_engine(algorithm, kernel=kernel, block_rows=block_rows))
        tolerance = 0 if kernel == "auto" and algorithm.fused(False) else 1e-9
        for other, its_metrics in zip(traces[1:], metrics[1:], strict=True):
            assert its_metrics == pytest.approx(metrics[0], abs=1e-6)
            assert_same_trace(other, traces[0], tolerance)

    def test_thread_count_does_not_matter(self, algorithm: Algorithm, kernel: str) -> None:
        traces = []
        for threads in (1, min(2, numba.config.NUMBA_NUM_THREADS)):
            torch.set_num_threads(threads)
            numba.set_num_threads(threads)
            traces.append(by_engine(algorithm, kernel=kernel))
        assert_same_trace(traces[1], traces[0], 1e-9)

    @pytest.mark.parametrize("everybody", [False, True])
    def test_order_of_the_cohort_does_not_matter(self, algorithm: Algorithm, kernel: str, everybody: bool) -> None:
        world, parts, draw = small_world(algorithm), parts_of(algorithm), Draw(SEED, 0, None, torch.float64)
        engine = Engine(algorithm, world, SEED, dtype=torch.float64, kernel=kernel)
        cohort = np.arange(world.clients if everybody else 17)
        mixed = np.random.default_rng(0).permutation(cohort)
        results = []
        for clients in (cohort, mixed):
            store = ClientStore(algorithm, world, draw)
            samples = drawn(parts, clients, algorithm, 1)
            results.append((engine.run_cohort(algorithm.init_server(world, draw), store, samples, 1), store.tensors))
        (expected, kept), (found, kept_mixed) = results
        assert_same(kept_mixed, kept, 1e-12)
        assert_same({"loss": found.loss}, {"loss": expected.loss[mixed]}, 1e-12)
        for name, value in expected.uploads.tensors.items():
            if isinstance(value, Rows):
                summed = found.uploads.rows(name).combine(world.items, "sum")
                assert_same({name: summed}, {name: value.combine(world.items, "sum")}, 1e-12)
            else:
                assert_same({name: found.uploads.dense(name)}, {name: value[mixed]}, 1e-12)

    def test_counts_the_bytes_that_travel(self, algorithm: Algorithm) -> None:
        world, draw = small_world(algorithm), Draw(SEED)
        server, store, samples = algorithm.init_server(world, draw), ClientStore(algorithm, world, draw), samples_of(algorithm, 1)
        own = {name: value[0] for name, value in store.tensors.items()}
        answer = algorithm.answer(server)
        sent = (
            {name: value[0] for name, value in sent_whole(answer, torch.tensor([0])).items()}
            if answer.slot is not None or answer.shared
            else {}
        )
        whole = algorithm.travels_whole(world)
        one = algorithm.upload(algorithm.receive(own, sent), sent, torch.tensor(1.0))
        expected = 0
        for name, value in one.items():
            if name in whole:
                expected += len(samples.clients) * whole[name] * 4 * math.prod(value.shape[1:] if name in algorithm.tables else value.shape)
            elif name in algorithm.tables and name not in own:
                expected += len(samples.row) * (4 + 4 * math.prod(value.shape[1:]))
            else:
                expected += len(samples.clients) * (8 if name in algorithm.summed else 4) * value.numel()
        result = Engine(algorithm, world, SEED).run_cohort(server, store, samples, 1)
        assert result.uploads.bytes() == expected

    def test_quality(self, algorithm: Algorithm) -> None:
        parts = parts_of(algorithm, QUALITY_USERS, 240, 20)
        assert parts.held or parts.chance() == 0.1
        settings = {"dim": 16, "batch_size": 256, "local_epochs": 3, "clients_per_round": None, **self.quality}
        federation = Federation.start(replace(algorithm, **settings), parts, SEED)
        for _ in range(self.quality_rounds):
            federation.next_round()
        low, high = self.band
        assert low <= metrics_on_test(federation)["rmse" if parts.held else "hr_10"] <= high


class TestFedMF(AlgorithmTests):
    algorithms = (
        *(FedMF(**SMALL, average=average) for average in ("touching", "cohort", "sum")),
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
        fedavg_ncf(average="cohort", weight_decay=0.3),
        fedavg_ncf(average="sum", server="adam", server_lr=0.05, clip=0.0),
        fedavg_ncf(**FedAvgNCF.published),
        fedavg_ncf(share_users=True),
    )
    band = (0.25, 0.65)
    quality = {"average": "sum", "server": "adam", "server_lr": 0.05, "lr": 0.02, "layers": (32, 16, 8)}
    quality_rounds = 8


class TestFedRecon(AlgorithmTests):
    algorithms = (
        FedRecon(**SMALL),
        FedRecon(**SMALL, server_lr=0.5, server_decay="none"),
        FedRecon(**SMALL, server="sgd", negatives=4, max_samples=20),
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
        fedrec_mf(rho=2, filling="average", penalty=0.1),
        fedrec_mf(form="stochastic", rho=1, hybrid_from=1, stop_below=0.05),
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
        *(fedem(merge=merge, batch_size=1 << 20) for merge in ("elastic", "static", "replace")),
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
            found.append(metrics_on_test(federation)["hr_10"])
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
