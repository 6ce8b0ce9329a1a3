"""What the tests of engine and algorithms share: small federations, and a client that has nothing to train on."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator

import hypothesis
import numba
import pytest
import torch

from fedbench.testing.small_federation import small_split as small_split
from fedbench.testing.small_federation import without_samples as without_samples

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
