"""What the tests of engine and algorithms share: small federations, and a client that has nothing to train on."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import hypothesis
import numba
import numpy as np
import pytest
import torch

from fedbench.contract.dataset import DatasetOptions
from fedbench.data.protocol import PRESETS
from fedbench.data.sampling import Samples
from fedbench.data.split import Split, split
from fedbench.datasets.synthetic import load


@cache
def small_split(users: int = 24, items: int = 60, interactions: int = 12, protocol: str = "clean", ratings: bool = False) -> Split:
    """Planted tastes. The defaults with batches of 32 give clients of one batch and clients of many."""
    chosen = replace(PRESETS[protocol], split="kfold", fold=0) if ratings else PRESETS[protocol]
    return split(load(DatasetOptions(users=users, items=items, interactions=interactions)), chosen)


def without_samples(samples: Samples, position: int) -> Samples:
    """The same cohort, but the client at `position` has nothing to train on."""
    keep = np.arange(len(samples.clients)) != position
    counts, touched = samples.counts * keep, samples.touched * keep
    return Samples(
        clients=samples.clients,
        ptr=np.concatenate([[0], np.cumsum(counts)]),
        local=samples.local[np.repeat(keep, samples.counts)],
        label=samples.label[np.repeat(keep, samples.counts)],
        row_ptr=np.concatenate([[0], np.cumsum(touched)]),
        row=samples.row[np.repeat(keep, samples.touched)],
    )


# A busy machine is no reason for a test to fail, nor is chance: the same cases each time, unless FEDBENCH_FUZZ asks for others.
hypothesis.settings.register_profile("patient", deadline=None, derandomize="FEDBENCH_FUZZ" not in os.environ)
hypothesis.settings.load_profile("patient")


os.environ.setdefault("FEDBENCH_MLFLOW_PATIENCE", "300")  # nor is it for a copy to be given up; tests of that set their own
# Which plug-ins were run before is remembered for the tests alone, here and in child processes.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="fedbench-state-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)


@pytest.fixture(autouse=True, scope="session")
def interruptible() -> None:
    """Ctrl-C works, here and in child processes: a shell that runs the tests in the background turns it off for all of them."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tests are small: on busy cores a second thread costs more than it brings. A test that wants two sets them."""
    torch.set_num_threads(1)
    numba.set_num_threads(1)
    yield
