"""A sweep on a real local Ray cluster, with a real MLflow server, and a worker killed in the middle. `make test-ray`"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

pytest.importorskip("ray")
pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[1]
DATA = ["--dataset", "synthetic", "--users", "40", "--items", "80", "--interactions", "10"]
LINE = ["--algo", "fedmf", *DATA, "--dim", "4", "--rounds", "3", "-e", "1", "2", "--seeds", "0-1", "--threads", "1", "--quiet"]
PATIENCE = 600
QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """An MLflow server of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = ["--backend-store-uri", f"sqlite:///{tmp_path / 'mlflow.db'}", "--artifacts-destination", str(tmp_path / "artifacts")]
    command = [sys.executable, "-m", "mlflow", "server", *store, "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    with (tmp_path / "server.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **QUIET})
    address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + PATIENCE
    while True:
        assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "server.log").read_text()
        try:
            if requests.get(f"{address}/health", timeout=5).ok:
                break
        except requests.ConnectionError:
            time.sleep(0.5)
    yield address
    process.send_signal(signal.SIGTERM)
    process.wait(60)


def results(folder: Path) -> dict[str, dict[str, Any]]:
    told = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("*/summary.json")}
    return {key: {**summary["val"], **{f"test {name}": value for name, value in summary["test"].items()}} for key, summary in told.items()}


def worker_of_a_run(place: Path) -> int | None:
    """The Ray worker that runs a training whose files are below `place`."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if "train" in words and any(word.startswith(str(place)) for word in words):
                return int((process / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    return None


@pytest.mark.slow
def test_ray_gives_what_the_pool_gives_though_a_worker_is_killed(tmp_path: Path, server: str) -> None:
    grid = [sys.executable, str(ROOT / "sweeps" / "grid.py"), *LINE]
    temporary = tmp_path / "t"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary), "MLFLOW_TRACKING_URI": server, "RAY_TMPDIR": "/tmp"}
    with (tmp_path / "ray.log").open("wb") as log:
        command = [*grid, "--backend", "ray", "--cpus-per-point", "1", "--out", str(tmp_path / "ray")]
        sweep = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)
    deadline = time.monotonic() + PATIENCE
    while (worker := worker_of_a_run(temporary)) is None:
        assert sweep.poll() is None and time.monotonic() < deadline, (tmp_path / "ray.log").read_text()
        time.sleep(0.1)
    os.kill(worker, signal.SIGKILL)
    assert sweep.wait(PATIENCE) == 0, (tmp_path / "ray.log").read_text()

    subprocess.run([*grid, "--no-mlflow", "--out", str(tmp_path / "pool"), "--jobs", "2"], cwd=tmp_path, check=True)
    expected, found = results(tmp_path / "pool"), results(tmp_path / "ray")
    assert len(expected) == 4 and found.keys() == expected.keys()
    for key in expected:
        assert found[key] == pytest.approx(expected[key], abs=1e-6)

    from mlflow.tracking import MlflowClient

    client = MlflowClient(server)
    (parent,) = client.search_runs(["1"], "tags.kind = 'sweep'")
    runs = client.search_runs(["1"], f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'")
    assert sorted((run.data.params["e"], run.data.params["seed"]) for run in runs) == [("1", "0"), ("1", "1"), ("2", "0"), ("2", "1")]
    assert {run.info.status for run in [parent, *runs]} == {"FINISHED"}
    assert "table.md" in {file.path for file in client.list_artifacts(parent.info.run_id)}
