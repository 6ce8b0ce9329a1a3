"""A device that is not there: every method computes on it what it computes on a CPU, and what waits for it is known by number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedbench.algorithms.central_als import CentralALS
from fedbench.algorithms.central_ease import CentralEASE
from fedbench.algorithms.central_mf import CentralMF
from fedbench.algorithms.central_ncf import CentralNCF
from fedbench.algorithms.colr import CoLR
from fedbench.algorithms.fedavg_ncf import FedAvgNCF
from fedbench.algorithms.fedca import FedCA
from fedbench.algorithms.fedcia import FedCIA
from fedbench.algorithms.fedcooc import FedCooc
from fedbench.algorithms.fedease import FedEASE
from fedbench.algorithms.fedease_sketch import FedEASESketch
from fedbench.algorithms.fedem import FedEM
from fedbench.algorithms.fedfast import FedFast
from fedbench.algorithms.fedmf import FedMF
from fedbench.algorithms.fedncf import FedNCF
from fedbench.algorithms.fedrap import FedRAP
from fedbench.algorithms.fedrec_mf import FedRecMF
from fedbench.algorithms.fedrecon import FedRecon
from fedbench.algorithms.gpfedrec import GPFedRec
from fedbench.algorithms.itemknn import ItemKNN
from fedbench.algorithms.lightfr import LightFR
from fedbench.algorithms.local import Local
from fedbench.algorithms.pfedrec import PFedRec
from fedbench.algorithms.popularity import Popularity
from fedbench.algorithms.popularity_recent import PopularityRecent
from fedbench.algorithms.random_scores import Random
from fedbench.commands import cli
from fedbench.contract import registry
from fedbench.contract.algorithm import Algorithm, World
from fedbench.contract.uploads import Rows, Tables, Uploads
from fedbench.errors import FedbenchError
from fedbench.kernels import device_shuffling, mixing, shuffling
from fedbench.simulation.engine import Engine, Round
from fedbench.simulation.failures import Failures
from fedbench.simulation.federation import Federation
from fedbench.simulation.own_tables import rows_at_once
from fedbench.testing.pretend_device import FREE, PretendDevice
from tests.conftest import small_split
from tests.test_contract import (
    Additive,
    Chooses,
    Decayed,
    ForgetsAndSends,
    Merging,
    Pulled,
    PulledToSent,
    Reads,
    SendsBoth,
)

ROUNDS = 3
CENTRAL: dict[str, Any] = {"dim": 4, "batch_size": 64}
SMALL: dict[str, Any] = {**CENTRAL, "batch_size": 32, "local_epochs": 2, "clients_per_round": 9}
METHODS: list[Algorithm] = [
    CentralALS(dim=4),
    CentralEASE(),
    CentralMF(**CENTRAL),
    CentralNCF(**CENTRAL, layers=(6, 4)),
    CoLR(**SMALL, rank=2),
    FedAvgNCF(**SMALL, layers=(6, 4)),
    FedCA(**SMALL, adapter=(8, 4, 1), components=2),
    FedCIA(**SMALL),
    FedCooc(clients_per_round=9, neighbours=7),
    FedEASE(clients_per_round=9),
    FedEASE(clients_per_round=9, secure=False),
    FedEASESketch(clients_per_round=9, dim=5),
    FedEM(**SMALL, adapter=(8, 4, 1)),
    FedFast(**SMALL, groups=3),
    FedMF(**SMALL),
    FedNCF(**SMALL, layers=(8, 4)),
    FedRAP(**SMALL),
    FedRecMF(**SMALL),
    FedRecon(**SMALL),
    FedRecon(**{**SMALL, "negatives": 4}, reconstruct="sgd", server="adam"),
    GPFedRec(**SMALL, layers=(8, 4, 1)),
    ItemKNN(neighbours=7),
    LightFR(**SMALL, warm=1),
    Local(**SMALL),
    PFedRec(**SMALL),
    Popularity(),
    PopularityRecent(dim=4),
    Random(),
]
CASES = (Additive, Decayed, Pulled, PulledToSent, Merging, SendsBoth, ForgetsAndSends, Reads, Chooses)
"""methods that use what the built-in ones do not: own tables beside shared ones, pulls, `keep`, further readings, `choose`"""


def rounds(algorithm: Algorithm, device: str) -> tuple[dict[str, torch.Tensor], dict[str, np.ndarray]]:
    """What a few rounds leave behind: the state that a checkpoint keeps, on the host, and losses, ranks and predictions."""
    ratings = algorithm.predicts_ratings
    federation = Federation.start(algorithm, small_split(18, 40, 8, ratings=ratings), 0, device, kernel="off", compile=False)
    found = {}
    for number in range(ROUNDS):
        found[f"loss/{number}"] = federation.next_round().loss.cpu().numpy()
        for reading, outcome in {"": federation.outcome(), **federation.readings()}.items():
            found |= {f"{reading}/{name}/{number}": value for name, value in outcome.items()}
    if not ratings:
        found |= {f"{name}/full": value for name, value in federation.full_ranks().items()}
    federation.set_state({name: value.clone() for name, value in federation.state().items()})
    return {name: value.cpu() for name, value in federation.state().items()}, found


def test_every_method_is_here() -> None:
    assert {type(one) for one in METHODS} == set(registry.algorithms().values())


@pytest.mark.parametrize("algorithm", [*METHODS, *(case(clients_per_round=9) for case in CASES)], ids=lambda one: type(one).__name__)
def test_a_method_computes_what_it_computes_on_a_cpu(algorithm: Algorithm, monkeypatch: pytest.MonkeyPatch) -> None:
    with PretendDevice() as device:
        state, found = rounds(algorithm, device.name)
    monkeypatch.setattr(mixing, "_scores_on_cpu", mixing._scores_in_chunks)  # a kernel of the CPU's that --kernel off leaves on
    expected, as_expected = rounds(algorithm, "cpu")
    assert state.keys() == expected.keys() and found.keys() == as_expected.keys()
    for name, value in expected.items():
        assert torch.equal(state[name], value), name
    for name, array in as_expected.items():
        assert np.array_equal(found[name], array), name
    assert device.operations.total() > 0


@pytest.mark.parametrize("algorithm", [METHODS[4], METHODS[5], METHODS[8]], ids=lambda one: type(one).__name__)
def test_a_device_without_float64_will_do(algorithm: Algorithm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixing, "_scores_on_cpu", mixing._scores_in_chunks)
    with PretendDevice("mps:0", float64=False) as device:
        state, _ = rounds(algorithm, device.name)
    expected, _ = rounds(algorithm, "cpu")
    for name, value in expected.items():
        assert torch.allclose(state[name], value, atol=1e-6), name


def started(algorithm: Algorithm, device: PretendDevice, **more: Any) -> Federation:
    return Federation.start(algorithm, small_split(18, 40, 8), 0, device.name, kernel="off", compile=False, **more)


COUNTED = [
    *((7, 170), (8, 50), (1, 590), (1, 880), (3, 810), (3, 1320), (8, 1220), (6, 1230), (14, 130), (14, 120)),
    *((13, 120), (14, 170), (8, 1990), (5, 1110), (3, 720), (3, 1190), (3, 730), (3, 630), (7, 280), (7, 1560)),
    *((8, 1780), (8, 50), (3, 430), (2, 700), (3, 820), (3, 60), (8, 120), (2, 50)),
]
"""waits of a round and most operations of one, for each of METHODS. A number that rises makes a GPU slower; one that falls may be written
here. Clients are few, so that all of a kind are in one block"""


@pytest.mark.parametrize(("algorithm", "counted"), list(zip(METHODS, COUNTED, strict=True)), ids=lambda one: type(one).__name__)
def test_a_round_waits_so_often(algorithm: Algorithm, counted: tuple[int, int]) -> None:
    ratings = algorithm.predicts_ratings
    with PretendDevice() as device:
        federation = Federation.start(algorithm, small_split(18, 40, 8, ratings=ratings), 0, device.name, kernel="off", compile=False)
        federation.next_round()
        for counter in (device.waits, device.operations):
            counter.clear()
        federation.next_round()
    assert device.waits.total() == counted[0], device.waits
    assert device.operations.total() <= counted[1], device.operations.most_common(20)


def test_more_blocks_wait_no_more() -> None:
    """Losses and steps stay on the device until the round ends."""
    waits = []
    for rows in (20, 4000):
        with PretendDevice() as device:
            federation = started(METHODS[5], device, block_rows=rows)
            federation.next_round()
            waits.append(device.waits.total())
    assert waits[0] == waits[1]


@pytest.mark.parametrize("algorithm", [one for one in METHODS if one.federated], ids=lambda one: type(one).__name__)
def test_failures_are_those_of_a_cpu(algorithm: Algorithm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that never answer, that finish less, and uploads that arrive damaged."""
    monkeypatch.setattr(mixing, "_scores_on_cpu", mixing._scores_in_chunks)
    found = []
    failures = Failures(dropout=0.2, stragglers=0.3, corrupt=0.3)
    parts = small_split(18, 40, 8, ratings=algorithm.predicts_ratings)
    with PretendDevice() as device:
        for name in (device.name, "cpu"):
            federation = Federation.start(algorithm, parts, 0, name, kernel="off", compile=False, failures=failures)
            for _ in range(2):
                federation.next_round()
            found.append(({name: value.cpu() for name, value in federation.state().items()}, dict(federation.counts)))
    assert found[0][1] == found[1][1] and found[0][1]["dropped"]
    assert bool(found[0][1]["rejected"]) == (type(algorithm) not in (Local, Random)), "which upload nothing"
    for name, value in found[1][0].items():
        assert torch.equal(found[0][0][name], value), name


def test_a_full_ranking_takes_as_many_rows_as_fit() -> None:
    with PretendDevice() as device:
        assert rows_at_once(16, device.name) == FREE // 4 // (16 * 16) > rows_at_once(16, "cpu")


def test_what_clients_keep_must_fit_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with PretendDevice() as device:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (1000, 1000))
        with pytest.raises(FedbenchError, match=r"18 clients keep takes .* of the memory of cuda:0 are free; use --device cpu"):
            Federation.start(Local(**SMALL), small_split(18, 40, 8), 0, device.name, kernel="off", compile=False, block_rows=40)


def test_a_gpu_that_is_full_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def runs_out(argv: list[str]) -> int:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    assert cli.guard(runs_out, []) == 1
    said = capsys.readouterr().err
    assert "the GPU's memory is full; lower --block-rows" in said and said.count("\n") == 1 and "internal" not in said


def test_an_evaluation_brings_back_ranks_and_nothing_else() -> None:
    with PretendDevice() as device:
        federation = started(METHODS[5], device)
        for evaluate in (federation.sampled_ranks, federation.full_ranks):
            device.waits.clear()
            evaluate()
            assert device.waits.total() == 2, device.waits  # which clients, and their ranks


def test_uploads_of_some_clients_whatever_device_the_mask_is_on() -> None:
    values = torch.arange(12.0).view(3, 4)
    keep = torch.tensor([True, False, True])

    def kept(device: str) -> Uploads:
        rows = Rows(torch.tensor([2, 1, 0]).to(device), torch.tensor([5, 6, 7]).to(device), values.to(device))
        tensors: dict[str, Tensor | Rows | Tables] = {"rows": rows, "whole": Tables(values.to(device), 0, 3), "dense": values.to(device)}
        return Uploads(World(9, 9), torch.arange(3).to(device), tensors).only(keep)

    with PretendDevice() as device:
        found = kept(device.name)
        expected = kept("cpu")
        assert found.rows("rows").value.tolist() == expected.rows("rows").value.tolist() == values[:2].tolist()
        assert found.dense("whole").tolist() == found.dense("dense").tolist() == values[[0, 2]].tolist()


def test_a_client_that_diverges_and_keeps_nothing_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    run: Callable[..., Round] = Engine.run_cohort

    def one_diverges(*given: Any) -> Round:
        result = run(*given)
        return replace(result, loss=result.loss.where(torch.arange(len(result.loss)) > 0, torch.nan))

    monkeypatch.setattr(Engine, "run_cohort", one_diverges)
    with PretendDevice() as device:
        federation = started(METHODS[8], device)
        result = federation.next_round()
    assert len(result.uploads.clients) == len(result.loss) == 8


def test_damaged_uploads_are_screened() -> None:
    """On a device that has no float64, too."""
    with PretendDevice("mps:0", float64=False) as device:
        federation = started(METHODS[5], device, failures=Failures(corrupt=0.5))
        federation.next_round()
    assert federation.counts["rejected"]


def test_what_a_gpu_refuses_is_refused() -> None:
    with PretendDevice() as device:
        here, there = torch.ones(3, device=device.name), torch.ones(3)
        for mixed in (lambda: here + there, lambda: there[here.long()], lambda: torch.stack([here, there])):
            with pytest.raises(RuntimeError, match="same device"):
                mixed()
        with pytest.raises(TypeError, match=r"to numpy.*test_pretend_device.py:\d"):
            np.asarray(here)
        assert here[torch.tensor([0, 2])].cpu().tolist() == here.tolist()[:2] == [1, 1]
        assert here.new_tensor([2.0]).device == torch.tensor([1], device=device.name).device == here.device
        torch.add(here, 1, out=here)
        assert here.unsqueeze_(0).shape == (1, 3) and here.cpu().tolist() == [[2, 2, 2]]
    assert {place.partition(":")[0] for place in device.waits} == {"test_pretend_device.py"}
    with PretendDevice("mps:0", float64=False) as device, pytest.raises(TypeError, match="float64"):
        torch.ones(3).to(device.name).double()


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_the_order_of_samples_on_a_device_is_that_of_the_host(batch: int) -> None:
    counts = np.array([0, 1, 2, 3, 7, 33, 64, 65, 200, 1, 511])
    stream = np.random.default_rng(batch).integers(0, 2**64, len(counts), dtype=np.uint64)
    for epoch in (0, 1, 7):
        given = torch.from_numpy(stream.view(np.int64)), torch.from_numpy(counts)
        found = device_shuffling.orders(*given, int(counts.max()), epoch, batch).numpy()
        for row, key, count in zip(found, stream, counts, strict=True):
            expected = np.arange(counts.max())
            shuffling.shuffle(expected[:count], key, epoch, batch)
            assert np.array_equal(row, expected)
