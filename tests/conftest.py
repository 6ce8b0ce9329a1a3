"""What the tests of engine and algorithms share: small federations, and a client that has nothing to train on."""

from __future__ import annotations

import atexit
import gc
import inspect
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from typing import Any

import hypothesis
import numba
import pytest
import torch

from fedbench.simulation.engine import Engine
from fedbench.testing.small_federation import small_split as small_split
from fedbench.testing.small_federation import without_samples as without_samples

# A busy machine is no reason for a test to fail, nor is chance: the same cases each time, unless FEDBENCH_FUZZ asks for others.
hypothesis.settings.register_profile("patient", deadline=None, derandomize="FEDBENCH_FUZZ" not in os.environ)
hypothesis.settings.load_profile("patient")


os.environ.setdefault("FEDBENCH_MLFLOW_PATIENCE", "300")  # nor is it for a copy to be given up; tests of that set their own
# Which plug-ins were run before is remembered for the tests alone, here and in child processes.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="fedbench-state-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)


SECOND = ("FedEMPublished", "FedReconBySGD", "FedRecMFImplicit", "FedCA", "FedCIA", "FedNCF", "LightFR", "FedFast", "GPFedRec", "CoLR")
"""methods whose kernels are compared with the loop in the long form alone, for each takes ten seconds to compile; their own code is
compared at every push"""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What waits long for processes comes first: at the end the other workers would have nothing to do meanwhile."""
    for item in items:
        if item.name.endswith("auto]") and getattr(item.parent, "name", "").removeprefix("Test") in SECOND:
            item.add_marker(pytest.mark.long)
    items.sort(key=lambda item: item.path.stem not in ("test_workers", "test_kills", "test_copier", "test_tracking", "test_finished"))


@pytest.fixture(autouse=True, scope="session")
def little_looking_for_garbage() -> None:
    """What was imported stays, and a compiler makes millions of small objects: looking through all of them takes long."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


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


@pytest.fixture(autouse=True)
def kernels_where_they_are_tested(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel takes seconds to compile. A test that is not about them (no mark `kernels`, no parameter `kernel`) runs the method's own
    code, as with `--kernel off`. Processes that a test starts are left as they are.
    """
    case = getattr(request.node, "callspec", None)
    if request.node.get_closest_marker("kernels") or (case and "kernel" in case.params):
        return
    make, given = Engine.__init__, inspect.signature(Engine.__init__)

    def make_without(*args: Any, **named: Any) -> None:
        found = given.bind(*args, **named).arguments
        make(**{**found, "kernel": "off" if found.get("kernel", "auto") == "auto" else found["kernel"]})

    monkeypatch.setattr(Engine, "__init__", make_without)
