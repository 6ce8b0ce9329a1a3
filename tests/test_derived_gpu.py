"""Kernels for GPUs, proved without one: Triton's interpreter runs them, and its compiler makes machine code of them.

`make test-gpu` runs these. The interpreter is chosen when Triton is imported, so they have a process of their own.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"

from fedbench.algorithms.colr import CoLR
from fedbench.algorithms.fedavg_ncf import FedAvgNCF
from fedbench.algorithms.fedca import FedCA
from fedbench.algorithms.fedcia import FedCIA
from fedbench.algorithms.fedem import FedEM
from fedbench.algorithms.fedfast import FedFast
from fedbench.algorithms.fedmf import FedMF
from fedbench.algorithms.fedncf import FedNCF
from fedbench.algorithms.fedrap import FedRAP
from fedbench.algorithms.fedrec_mf import FedRecMF
from fedbench.algorithms.fedrecon import FedRecon
from fedbench.algorithms.gpfedrec import GPFedRec
from fedbench.algorithms.lightfr import LightFR
from fedbench.algorithms.local import Local
from fedbench.algorithms.pfedrec import PFedRec
from fedbench.commands import gpu_kernels
from fedbench.commands.gpu_kernels import TARGETS
from fedbench.contract.algorithm import Algorithm, Phase, Stage
from fedbench.simulation import derived_gpu, generic, kernel_check
from fedbench.simulation.engine import Engine
from fedbench.simulation.federation import Federation, world_of
from fedbench.simulation.probe import tiny
from fedbench.testing.algorithm_tests import described
from fedbench.testing.small_federation import assert_same
from tests.conftest import small_split
from tests.test_derived import LOSSES, OPTIMIZERS, Both, Plain, over_samples

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.kernels,
    pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton"),
]
ROOT = Path(__file__).parents[1]
FEW: dict[str, Any] = {"batch_size": 8, "local_epochs": 2, "clients_per_round": 4, "negatives": 2}
"""4 of 6 clients, each with 21 samples of up to 17 rows: two tiles of 16, and batches in which rows are missing or used twice"""
SMALL: dict[str, Any] = {**FEW, "dim": 5}
TRAIN = derived_gpu.train_block
BUILT_IN: list[Algorithm] = [
    FedMF(**SMALL),
    FedMF(**{**SMALL, "dim": 21, "batch_size": 300}),  # all samples in one batch
    Local(**SMALL, stop_below=0.05),
    FedEM(**{**SMALL, "batch_size": 1 << 20}, adapter=(10, 4, 3, 1)),
    FedEM(**SMALL, adapter=(10, 4, 1), row_negatives=True, train_user="always", agg_ratio=0.7),
    FedEM(**SMALL, merge="static", adapter=(10, 1)),
    FedAvgNCF(**SMALL, layers=(6, 4)),
    FedAvgNCF(**SMALL, layers=(8, 4, 2), share_users=True, average="cohort"),
    FedRecMF(**SMALL, rho=1, hybrid_from=1),
    FedRecMF(**SMALL, form="stochastic"),
    FedRecMF(**SMALL, feedback="implicit"),
    FedRecon(**SMALL, reconstruct="sgd", server="adam", halves=True, recon_steps=3),
    PFedRec(**SMALL),
    GPFedRec(**SMALL, layers=(10, 4, 1)),
    FedRAP(**SMALL, apart=0.1, sparse=0.1),
    CoLR(**SMALL, rank=3),
    FedNCF(**SMALL, layers=(10, 4)),
    FedFast(**SMALL, groups=2),
    FedCA(**SMALL, components=2),
    FedCIA(**SMALL),
    LightFR(**SMALL, warm=2),
]


@pytest.fixture(autouse=True)
def in_tiles_of_16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(derived_gpu, "TILE", 16)


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The comparison of a kernel with the generic path before its first use takes as long as a test, which compares them itself."""
    monkeypatch.setattr(kernel_check, "training", lambda *_: None)
    monkeypatch.setattr(Engine, "agrees", lambda *_: True)
    yield


def left_by(algorithm: Algorithm, kernel: str, dtype: torch.dtype = torch.float64, **more: Any) -> tuple[dict[str, torch.Tensor], Engine]:
    """What two rounds leave, and the engine that ran them."""
    object.__setattr__(algorithm, "name", algorithm.name or "plain")
    parts = tiny(6, 37, algorithm.predicts_ratings)
    federation = Federation.start(algorithm, parts, 0, dtype=dtype, kernel=kernel, compile=False, **more)
    losses = {f"loss {number}": federation.next_round().loss for number in range(2)}
    return {**federation.server, **{f"own {name}": value for name, value in federation.store.tensors.items()}, **losses}, federation.engine


def assert_kernel_equals(algorithm: Algorithm) -> None:
    with mock.patch.object(derived_gpu, "train_block", wraps=derived_gpu.train_block) as train:
        found, engine = left_by(algorithm, "triton")
    assert engine.derived is not None and not engine.derived.said
    assert train.call_count and all(engine.derived.known.values())
    assert_same(found, left_by(algorithm, "off")[0], 1e-9)


@pytest.mark.parametrize("algorithm", BUILT_IN, ids=lambda one: f"{one.name}-{described(one)}")
def test_every_method_equals_the_generic_path(algorithm: Algorithm, unchecked: None) -> None:
    assert_kernel_equals(algorithm)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_equals_the_generic_path(optimizer: str, unchecked: None) -> None:
    assert_kernel_equals(Plain(**FEW, moves=OPTIMIZERS[optimizer]))


def of_loss(of: str) -> Plain:
    return Plain(**{**FEW, "clients_per_round": 2}, of=of, moves=(Phase(("user", "items", "layer"), 0.05),))


MAXIMA = ("attention", "logsumexp", "log_softmax")


@pytest.mark.parametrize("of", sorted(LOSSES.keys() - set(MAXIMA)))
def test_every_operation_equals_the_generic_path(of: str, unchecked: None) -> None:
    assert_kernel_equals(of_loss(of))


@pytest.mark.parametrize("of", MAXIMA)
def test_a_maximum_takes_the_generic_path(of: str, unchecked: None) -> None:
    found, engine = left_by(of_loss(of), "triton")
    assert engine.derived is not None and any("feature_max" in said for said in engine.derived.said)
    assert_same(found, left_by(of_loss(of), "off")[0], 1e-9)


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
def test_own_and_shared_tables_train_together(optimizer: str, unchecked: None) -> None:
    assert_kernel_equals(Both(**FEW, moves=(Phase(("user", "items", "personal"), 0.05, optimizer, 0.1 * (optimizer == "adamw")),)))


def stages(moves: tuple[Phase, ...], **how: Any) -> type[Plain]:
    class InStages(Plain):
        def stages(self, sent):  # type: ignore[no-untyped-def]
            return (Stage(moves, 2, 8, **how), Stage(moves, 1, 8))

    return InStages


@pytest.mark.parametrize("how", [{"max_steps": 4}, {"part": "support"}, {"max_samples": 11}], ids=str)
def test_stages_equal_the_generic_path(how: dict[str, Any], unchecked: None) -> None:
    assert_kernel_equals(stages((Phase(("user", "items"), 0.05),), **how)(**FEW))


def test_a_client_that_stops_early_equals_the_generic_path(unchecked: None) -> None:
    algorithm = Plain(**{**FEW, "local_epochs": 6}, stop_below=0.06, moves=(Phase(("user", "items"), 0.05),))
    done = []
    with mock.patch.object(derived_gpu, "train_block", side_effect=lambda *given: done.append(TRAIN(*given)) or done[-1]):
        found, _ = left_by(algorithm, "triton")
    steps = torch.cat([one[2] for one in done])
    assert len(steps.unique()) > 1, "all clients made as many steps"
    assert_same(found, left_by(algorithm, "off")[0], 1e-9)


def test_a_block_of_any_size_gives_the_same(unchecked: None) -> None:
    one, other = (left_by(FedMF(**SMALL), "triton", block_rows=rows)[0] for rows in (20, 4000))
    assert_same(one, other, 0)


def test_float32_is_near_float64(unchecked: None) -> None:
    assert_same(left_by(FedMF(**SMALL), "triton", torch.float32)[0], left_by(FedMF(**SMALL), "off")[0], 1e-3)


def test_a_gpu_takes_the_kernel_and_compiles_the_rest() -> None:
    world = world_of(small_split())
    on_gpu = Engine(FedMF(**SMALL), world, 0, "cuda", block_rows=40)
    without = Engine(FedMF(**SMALL), world, 0, "cuda", kernel="off", block_rows=40, compile=False)
    assert isinstance(on_gpu.derived, derived_gpu.GpuKernels) and on_gpu.step is not generic.step
    assert without.derived is None and without.step is generic.step


def test_a_kernel_that_differs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedbench.kernels.compiler import triton_step

    monkeypatch.setitem(triton_step.FUNCTIONS, "neg", "({0})")
    found, engine = left_by(Plain(**FEW), "triton")
    assert engine.derived is not None and any("differ" in one for one in engine.derived.said)
    assert_same(found, left_by(Plain(**FEW), "off")[0], 0)


def test_what_kernels_are_not_made_of_is_said_with_its_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(LOSSES, "sorted", lambda a, h, s, b: over_samples(b, torch.sort(h["items"][b.items], dim=1).values[:, 0]))
    algorithm = Plain(**FEW, of="sorted", moves=(Phase(("items",), 0.05),))
    with caplog.at_level(logging.INFO, "fedbench"):
        found, _ = left_by(algorithm, "triton")
    said = [record.getMessage() for record in caplog.records if "no kernel" in record.getMessage()]
    assert len(said) == 1 and "sort" in said[0] and "test_derived_gpu.py, line" in said[0]
    assert_same(found, left_by(algorithm, "off")[0], 0)


COMPILED = """
import json
from fedbench.commands import gpu_kernels
print(json.dumps([{"method": name, "dim": dim, **gpu_kernels.counted(kernel, stage), "text": gpu_kernels.text_of(kernel),
                   **{target: gpu_kernels.compiled(kernel, target) for target in TARGETS}}
                  for dim in DIMS for name, stage, kernel in gpu_kernels.kernels(dim) if name in NAMES]))
"""


def compiled(targets: tuple[str, ...], dims: tuple[int, ...], names: tuple[str, ...]) -> list[dict[str, Any]]:
    """In a process of its own: what is interpreted is not compiled."""
    code = COMPILED.replace("TARGETS", repr(targets)).replace("DIMS", repr(dims)).replace("NAMES", repr(names))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def test_kernels_become_machine_code_without_spills_as_the_table_says() -> None:
    written = {(one["method"], one["dim"]): one for one in json.loads((ROOT / "docs/results/gpu_kernels.json").read_text())}
    found = compiled(tuple(TARGETS), (16, 64), ("fedmf", "fedrec_mf")) + compiled(("sm_80",), (64,), ("fedem", "fedavg_ncf"))
    assert len(found) == 6
    for one in found:
        text = one.pop("text")
        assert "atomic" not in text and "debug_barrier" in text
        known = written[one["method"], one["dim"]]
        assert one == {name: known[name] for name in one}, "run make gpu-kernels"
    for one in written.values():
        assert not any(one[target]["spilled"] for target in TARGETS), one


def test_the_table_has_every_method_and_is_on_its_page() -> None:
    written = json.loads((ROOT / "docs/results/gpu_kernels.json").read_text())
    assert {one["method"].split(",")[0].split()[0] for one in written} == {one.name for one in BUILT_IN}
    assert gpu_kernels.table(written) in (ROOT / "docs/performance.md").read_text()
