"""The fused kernel for GPUs, proved without one: Triton's interpreter runs it, and its compiler makes machine code of it.

`make test-gpu` runs these. The interpreter is chosen when Triton is imported, so they have a process of their own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from fedbench.algorithms.fedem import FedEM
from fedbench.algorithms.fedmf import FedMF
from fedbench.algorithms.local import Local
from fedbench.contract.algorithm import Algorithm
from fedbench.simulation import engine, generic
from fedbench.simulation.federation import world_of
from fedbench.testing.algorithm_tests import described
from fedbench.testing.small_federation import SMALL, assert_same_trace, by_engine, by_loop
from tests.conftest import small_split

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton"),
]
os.environ["TRITON_INTERPRET"] = "1"
ROOT = Path(__file__).parents[1]
DOTS: list[Algorithm] = [
    FedMF(**SMALL),
    FedMF(**{**SMALL, "dim": 21, "local_epochs": 1}),  # no power of 2
    FedMF(**{**SMALL, "dim": 3, "batch_size": 300}),  # all samples in one batch
    Local(**SMALL, stop_below=0.02),
    # clients with a mixture take the generic path beside those without
    FedEM(**SMALL, adapter=(16, 8, 1), row_negatives=True, train_user="always"),
]
OFF = {"kernel": "off", "compile": False}
MACHINE_CODE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from fedbench.kernels.fused_gpu import BETA1, BETA2, EPSILON, SAMPLES, TILE, _train_dot

arrays = {name: "*NUMBER" for name in ("users", "tables", "first", "second", "pace", "losses")}
arrays |= dict.fromkeys(("codes", "count", "touched", "steps"), "*i32")
numbers = dict.fromkeys(("clients", "width", "longest", "epochs", "batch"), "i32") | {"tolerance": "fp32"}
fixed = {"d": DIM, "D": 32, "TILE": TILE, "SAMPLES": SAMPLES, "b1": BETA1, "b2": BETA2, "eps": EPSILON}
types = {**arrays, **numbers, **dict.fromkeys(fixed, "constexpr")}
source = ASTSource(_train_dot, {name: types[name] for name in _train_dot.arg_names}, fixed)
made = compile(source, target=GPUTarget("cuda", 80, 32))
print(len(made.asm["cubin"]), "atom" in made.asm["ptx"], "bar.sync" in made.asm["ptx"])
"""


@pytest.mark.parametrize("algorithm", DOTS, ids=lambda one: f"{one.name}-{described(one)}")
def test_equals_the_loop(algorithm: Algorithm) -> None:
    kernels = engine.gpu_kernels()
    with mock.patch.object(kernels, "train", wraps=kernels.train) as train:
        found = by_engine(algorithm, kernel="triton")
    assert train.call_count
    assert_same_trace(found, by_loop(algorithm), 1e-9)


def test_a_block_of_any_size_gives_the_same() -> None:
    short = FedMF(**{**SMALL, "local_epochs": 1, "clients_per_round": 6})
    one, other = (by_engine(short, kernel="triton", block_rows=rows) for rows in (40, 4000))
    assert_same_trace(one, other, 0)


def test_a_gpu_takes_the_kernel_and_compiles_the_rest() -> None:
    parts, algorithm = small_split(), FedMF(**SMALL)
    on_gpu, without = (engine.Engine(algorithm, world_of(parts), 0, "cuda", block_rows=40, **how) for how in ({}, OFF))
    assert on_gpu.gpu_kernels and on_gpu.step is not generic.step
    assert not without.gpu_kernels and without.step is generic.step


def test_float32_is_near_float64() -> None:
    assert_same_trace(by_engine(FedMF(**SMALL), torch.float32, kernel="triton"), by_loop(FedMF(**SMALL)), 1e-3)


@pytest.mark.parametrize("number", ["fp32", "fp64"])
def test_compiles_for_a_gpu(number: str) -> None:
    code = MACHINE_CODE.replace("NUMBER", number).replace("DIM", "21")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    size, atomic, waits = done.stdout.split()
    assert int(size) > 1000
    assert (atomic, waits) == ("False", "True")
