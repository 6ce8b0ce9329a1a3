"""A sweep's points as tasks on a Ray cluster.

Every machine has the same checkout, or the same installed package, at the same path. A task is a run in a folder of its own machine
and sends the run's folder back, so no shared disk is needed. Ray runs a task again whose worker or machine was lost.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedbench import CHECKOUT, HERE, files, found_by_children
from fedbench.errors import UsageError
from fedbench.experiment import processes
from fedbench.experiment.processes import Event
from fedbench.tracking import mirror_process

RETRIES = 3
"""how often Ray repeats a task whose worker died"""
PASSED_ON = ("FEDBENCH_DATA", "FEDBENCH_CACHE", "MLFLOW_TRACKING_URI")


class Task(NamedTuple):
    """One run: its config, and extra environment variables."""

    told: dict[str, Any]
    environment: dict[str, str]


class Outcome(NamedTuple):
    """What a task sends back."""

    code: int
    seconds: float
    log: str
    files: dict[str, bytes]
    """the run's folder without its checkpoints"""


def run(tasks: Mapping[str, Task], folder: Path, cpus: int, gpus: float) -> Generator[Event, None, None]:
    """Run these configs, as many at once as the cluster has room for, and put their folders into the sweep's."""
    ray = imported()
    if any(task.told["mlflow"] for task in tasks.values()) and not mirror_process.tracking_uri().startswith("http"):
        raise UsageError("--backend ray logs to an MLflow server: set MLFLOW_TRACKING_URI=http://host:5000, or use --no-mlflow")
    passed = {key: os.environ[key] for key in PASSED_ON if key in os.environ}
    environment = {**passed, **found_by_children()}
    there = os.environ.get("RAY_ADDRESS")
    # without an address: a cluster for this sweep alone, which other machines cannot reach
    here: dict[str, Any] = {} if there else {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    ray.init(address=there, runtime_env={"env_vars": environment}, log_to_driver=False, logging_level="ERROR", **here)
    try:
        room = ray.cluster_resources()
        if room.get("CPU", 0) < cpus or room.get("GPU", 0) < gpus:
            has = f"{room.get('CPU', 0):g} CPUs and {room.get('GPU', 0):g} GPUs"
            raise UsageError(f"a point asks for {cpus} CPUs and {gpus:g} GPUs, but the cluster has {has}; lower --cpus-per-point")
        remote = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=RETRIES)(run_point)
        # machines with other code would compute other results for the same points
        code, pending = source_digest(), {}
        for key, task in tasks.items():
            pending[remote.remote(task, cpus, code)] = key
            yield Event(key)
        while pending:
            done, _ = ray.wait(list(pending), timeout=1.0)
            for reference in done:
                yield received(ray, reference, pending.pop(reference), folder)
    finally:
        ray.shutdown()


def imported() -> Any:
    # Ray reports its use to its makers otherwise
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    try:
        import ray
    except ImportError:
        raise UsageError("--backend ray needs Ray: pip install -r requirements-ray.txt") from None
    return ray


def received(ray: Any, reference: Any, key: str, folder: Path) -> Event:
    """Write a finished task's files into the sweep's folder, all or none."""
    log = folder / "work" / f"{key}.log"
    files.make_folder(log.parent)
    try:
        outcome: Outcome = ray.get(reference)
    except ray.exceptions.RayError as error:
        files.write_text(log, f"fedbench: error: Ray: {mirror_process.one_line(error)}\n")
        return Event(key, 1)
    files.write_text(log, outcome.log)
    if outcome.code == 0:
        # written aside and renamed: the folder is there whole, or not at all
        fresh = folder / "work" / f"{key}.new"
        shutil.rmtree(fresh, ignore_errors=True)
        for name, content in outcome.files.items():
            (fresh / name).parent.mkdir(parents=True, exist_ok=True)
            (fresh / name).write_bytes(content)
        shutil.rmtree(folder / key, ignore_errors=True)
        fresh.rename(folder / key)
    return Event(key, outcome.code, outcome.seconds)


def run_point(task: Task, threads: int, code: str) -> Outcome:
    """Run one point; called on a machine of the cluster."""
    began = time.monotonic()
    if source_digest() != code:
        return Outcome(1, 0.0, f"fedbench: error: {os.uname().nodename} has another version of the code in {HERE}; update it\n", {})
    with tempfile.TemporaryDirectory(prefix="fedbench-") as place:
        out = Path(place) / "run"
        job = processes.job("point", task.told, out, Path(place), threads, **task.environment)
        process = processes.start(job)
        try:
            process.wait()
        finally:
            processes.end([process])
        files = [path for path in out.rglob("*") if path.is_file() and "checkpoint" not in path.parts]
        content = {str(path.relative_to(out)): path.read_bytes() for path in files}
        return Outcome(process.returncode, time.monotonic() - began, job.log.read_text(encoding="utf-8", errors="replace"), content)


def source_digest() -> str:
    """SHA-256 of the source files, to tell whether two machines have the same code."""
    digest = hashlib.sha256()
    for place in (HERE, *((CHECKOUT / "algorithms", CHECKOUT / "datasets") if CHECKOUT else ())):
        for path in sorted(place.rglob("*.py")):
            digest.update(f"{path.relative_to(place)}\n".encode() + path.read_bytes())
    return digest.hexdigest()
