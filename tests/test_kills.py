"""Runs that are killed at random moments, also while a checkpoint is being written, and gone on with: all equal the undisturbed run.

Few here; `FEDBENCH_KILLS=40 python -m pytest tests/test_kills.py` kills 40 runs of each algorithm, and 42 times runs of each kind: several
seeds, folds, a refit, sweeps, with MLflow, under torchrun.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from fedbench.__main__ import main as fedbench_main
from fedbench.commands import cli
from fedbench.experiment import checkpoint
from fedbench.simulation.engine import Round
from fedbench.simulation.federation import Federation
from fedbench.tracking import mirror_process
from fedbench.tracking.run_log import mlflow_run_of
from tests.test_run import ROOT, lines_of, result, summary_of

pytestmark = pytest.mark.kernels

RUNS = int(os.environ.get("FEDBENCH_KILLS", "1"))
"""killed runs of each algorithm"""
ROUNDS = 12
DATA = "--dataset synthetic --users 60 --items 150 --interactions 12"
COMMON = f"{DATA} --rounds {ROUNDS} --dim 8 --threads 1 --checkpoint-every 2 --quiet --dropout 0.2"
ALGORITHMS = {
    "fedmf": "--algo fedmf",
    "fedem": "--algo fedem --adapter 16,8,1 -e 2 -n 40 --kernel off",
    "fedem_mapped": "--algo fedem --adapter 16,8,1 -e 2 -n 20 --client-store mmap --kernel off",
    "fedavg_ncf": "--algo fedavg_ncf --layers 16,8 -n 40 -e 1 --kernel off",
}
"""fedmf by its kernels; those of others would be compiled again after every early kill"""
BASE = f"{DATA} --rounds {ROUNDS} --dim 8 --threads 1 --checkpoint-every 2 --quiet"
MF = f"--algo fedmf --kernel off {BASE}"
KINDS = {
    "seeds": f"{MF} --seeds 0-1",
    "refit": f"{MF} --refit --no-mlflow",
    "jobs": f"{MF} --seeds 0-1 --jobs 2",
    "folds": f"--algo fedrec_mf --kernel off --feedback explicit --split kfold --folds 2 {BASE}",
    "mlflow": f"{MF} --refit",
    "sweep": f"sweep {MF} -e 1 2 --jobs 2",
    "torchrun": f"{MF} --no-mlflow",
}
"""kinds of runs; those that say nothing of MLflow have it"""
KILLED_KINDS = [(kind, run) for kind in (list(KINDS)[:2] if RUNS == 1 else KINDS) for run in range(1 if RUNS == 1 else -(-RUNS // 14))]
"""each is killed twice"""
PATIENCE = 900
"""seconds after which something hangs"""


def train(words: list[str], folder: str, room: int | None = None) -> None:
    """A process's whole life. Checkpoints are slow to write, so that a kill often meets one half-written.

    With MLflow, which takes long to import, a run waits in mid-course until its copy has begun. room: no file may be larger.
    """
    if room is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
    os.chdir(folder)
    os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder}/mlflow.db"
    sync = checkpoint._sync

    def slow(path: Path) -> None:
        time.sleep(0.01)
        sync(path)

    checkpoint._sync = slow
    next_round = Federation.next_round

    def waiting(self: Federation) -> Round:
        while self.round == ROUNDS // 2 and "--no-mlflow" not in words and not has_copy(Path(words[-1])):
            time.sleep(0.01)
        return next_round(self)

    Federation.next_round = waiting  # type: ignore[method-assign]
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open("errors.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    sys.exit(fedbench_main(words) if words[0] == "sweep" else cli.main(words))


def has_copy(out: Path) -> bool:
    """Whether MLflow has heard of a single run."""
    return not (out / "env.json").exists() or "mlflow_run_id" in json.loads((out / "env.json").read_text())


def started(words: str, out: Path, room: int | None = None) -> BaseProcess:
    """A process of its own, forked from one that has imported everything and done nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.test_kills"])
    process = context.Process(target=train, args=([*words.split(), "--out", str(out)], str(out.parent), room))
    process.start()
    return process


def rounds_done(out: Path) -> int:
    metrics = out / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def finish(words: str, out: Path) -> None:
    process = started(words, out)
    process.join(PATIENCE)
    assert process.exitcode == 0


def kill_somewhere(process: BaseProcess, out: Path, chance: random.Random) -> bool:
    """SIGKILL after a random round and then some, or while the next checkpoint is written; False if the run was done before."""
    after, in_checkpoint, more = chance.randrange(-1, ROUNDS), chance.random() < 0.5, chance.uniform(0, 0.03)
    deadline = time.monotonic() + PATIENCE
    while process.is_alive() and rounds_done(out) < after:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    while in_checkpoint and process.is_alive() and not list((out / "checkpoint").glob("*.part")):
        assert time.monotonic() < deadline
    time.sleep(0 if in_checkpoint else more)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(PATIENCE)
    return process.exitcode == -signal.SIGKILL


def outcome(out: Path) -> dict[str, Any]:
    """All that a run leaves behind, the time that it took aside."""
    lines = [{key: value for key, value in line.items() if key != "seconds"} for line in lines_of(out)]
    ranks = hashlib.sha256((out / "per_client.parquet").read_bytes()).hexdigest()
    model = hashlib.sha256((out / "checkpoint" / "model.safetensors").read_bytes()).hexdigest()
    files = sorted(str(path.relative_to(out)) for path in out.rglob("*"))
    return {"lines": lines, "summary": result(summary_of(out)), "ranks": ranks, "model": model, "files": files}


@cache
def undisturbed(algo: str, folder: Path) -> dict[str, Any]:
    finish(f"{ALGORITHMS[algo]} {COMMON} --no-mlflow", folder / algo)
    return outcome(folder / algo)


def begun(kind: str, out: Path, more: str = "") -> BaseProcess | subprocess.Popen[bytes]:
    if kind != "torchrun":
        return started(f"{KINDS[kind]} {more} --experiment kills", out)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(ROOT / "train.py")]
    with (out.parent / "errors.txt").open("ab") as errors:
        return subprocess.Popen([*words, *KINDS[kind].split(), "--out", str(out)], cwd=out.parent, stdout=subprocess.DEVNULL, stderr=errors)


def code_of(process: BaseProcess | subprocess.Popen[bytes], patience: float | None = None) -> int | None:
    """The exit code, waited for if there is patience; None while the process runs."""
    if isinstance(process, subprocess.Popen):
        return process.wait(patience) if patience else process.poll()
    process.join(patience or 0)
    return process.exitcode


def runs_in(out: Path) -> list[Path]:
    return sorted(path.parent for path in out.rglob("config.json"))


def kill_kind(kind: str, out: Path, chance: random.Random) -> bool:
    """SIGKILL when a random number of rounds is done, of all runs together, or a little later; of torchrun's workers the first one."""
    process = begun(kind, out)
    rounds = ROUNDS if kind in ("refit", "mlflow", "torchrun") else 2 * ROUNDS
    after, more = chance.randrange(-1, rounds + 1), chance.choice([0.0, 0.0, 0.1, 0.5, 2.0])
    deadline = time.monotonic() + PATIENCE
    while code_of(process) is None and sum(map(rounds_done, runs_in(out))) < after:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    time.sleep(more * chance.random())
    pid = process.pid
    while kind == "torchrun" and code_of(process) is None and not (pid := holder(out)):
        assert time.monotonic() < deadline
    assert pid
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return code_of(process, PATIENCE) != 0


def holder(out: Path) -> int:
    """The process that holds a run's folder; 0 if there is none yet."""
    with suppress(OSError, ValueError):
        return int((out / ".lock").read_text())
    return 0


def outcome_of_all(out: Path) -> dict[str, Any]:
    """What several runs leave behind. Of a sweep's own files, which hold times, the runs' alone."""
    # the copy to MLflow of a run that was killed outlives it, and looks once more before it ends
    deadline = time.monotonic() + PATIENCE
    while list(out.rglob(".mlflow-lock")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    found: dict[str, Any] = {str(folder.relative_to(out)): outcome(folder) for folder in runs_in(out)}
    if (out / "sweep.json").exists():
        return found
    files = sorted(str(path.relative_to(out)) for path in out.rglob("*"))
    return found | {"mean": result(summary_of(out)), "files": files}


@cache
def undisturbed_kind(kind: str, folder: Path) -> dict[str, Any]:
    process = begun(kind, folder / f"steady-{kind}", "--no-mlflow")
    assert code_of(process, PATIENCE) == 0
    return outcome_of_all(folder / f"steady-{kind}")


@pytest.mark.parametrize(("kind", "run"), KILLED_KINDS)
def test_killed_runs_of_any_kind_equal_the_undisturbed_ones(
    kind: str, run: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    out, chance = tmp_path / "r", random.Random(f"{kind}/{run}")
    kills = sum(kill_kind(kind, out, chance) for _ in range(2))
    print(f"{kind}: killed {kills} times")
    assert code_of(begun(kind, out), PATIENCE) == 0, (tmp_path / "errors.txt").read_text()
    assert outcome_of_all(out) == undisturbed_kind(kind, tmp_path_factory.getbasetemp()), f"killed {kills} times"
    if "--no-mlflow" in KINDS[kind]:
        return
    client = mirror_process.import_client()(f"sqlite:///{tmp_path / 'mlflow.db'}")
    mirrored = client.search_runs([client.get_experiment_by_name("kills").experiment_id])
    assert {found.info.status for found in mirrored} == {"FINISHED"}
    copies = {found.info.run_id for found in mirrored if found.data.tags["kind"] == "run"}
    assert copies == {mlflow_run_of(folder) for folder in runs_in(out)} and len(copies) == len(runs_in(out))
    assert len(mirrored) - len(copies) == (kind != "mlflow"), "one parent"
    for folder in runs_in(out):
        points = client.get_metric_history(mlflow_run_of(folder), "loss")
        assert sorted((point.step, point.value) for point in points) == [(line["round"], line["loss"]) for line in lines_of(folder)]


@pytest.mark.parametrize("run", range(RUNS))
@pytest.mark.parametrize("algo", [*list(ALGORITHMS)[:3], pytest.param("fedavg_ncf", marks=pytest.mark.long)])
def test_a_killed_run_equals_the_undisturbed_one(algo: str, run: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    words, out = f"{ALGORITHMS[algo]} {COMMON} --no-mlflow", tmp_path / "r"
    chance = random.Random(f"{algo}/{run}")
    kills = sum(kill_somewhere(started(words, out), out, chance) for _ in range(chance.choice([1, 2, 3]) if RUNS > 1 else 2))
    finish(words, out)  # also if it was killed between its summary and its last breath: what it left goes then
    expected = undisturbed(algo, tmp_path_factory.getbasetemp())
    assert outcome(out) == expected, f"killed {kills} times"


@pytest.mark.parametrize("room", ["checkpoint", "metrics"])
def test_a_full_disk_ends_in_one_line_and_the_run_goes_on_later(
    room: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    words, out = f"{ALGORITHMS['fedmf']} {COMMON} --no-mlflow", tmp_path / "r"
    process = started(words, out)
    deadline = time.monotonic() + PATIENCE
    while process.is_alive() and rounds_done(out) < 5:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.kill()
    process.join(PATIENCE)
    earlier = {path.name: path.read_bytes() for path in (out / "checkpoint").glob("round-*")}
    saved = checkpoint.rounds(out)
    assert saved and not (out / "summary.json").exists()
    small = (out / "checkpoint" / f"round-{saved[0]}.safetensors").stat().st_size - 1
    if room == "metrics":
        small = (out / "metrics.jsonl").stat().st_size + 10
    process = started(words, out, small)
    process.join(PATIENCE)
    said = [line for line in (tmp_path / "errors.txt").read_text().splitlines() if "fedbench: " in line]
    assert process.exitcode == 1 and len(said) == 1 and "File too large" in said[0] and "make room" in said[0]
    assert "Traceback" not in (tmp_path / "errors.txt").read_text()
    assert {
        name: (out / "checkpoint" / name).read_bytes() for name in earlier if (out / "checkpoint" / name).exists()
    }.items() <= earlier.items()
    assert checkpoint.newest(out) is not None
    finish(words, out)
    assert outcome(out) == undisturbed("fedmf", tmp_path_factory.getbasetemp())


HOLD = """
import sys, time
from pathlib import Path
from fedbench.locks import claimed
with claimed(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(999)
"""


def test_two_processes_with_one_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"{ALGORITHMS['fedmf']} {COMMON} --no-mlflow --out {tmp_path / 'r'}".split()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "r")], stdout=subprocess.PIPE, env=environment) as other:
        try:
            assert other.stdout is not None and other.stdout.readline() == b"held\n"
            assert cli.main(words) == 2
            assert f"--out {tmp_path / 'r'} is in use by process {other.pid}; wait for it or choose another" in capsys.readouterr().err
            assert [path.name for path in (tmp_path / "r").iterdir()] == [".lock"], "nothing is touched"
        finally:
            other.kill()
    assert cli.main(words) == 0, "a process that was killed holds nothing"


def test_mlflow_has_every_point_once(tmp_path: Path) -> None:
    words, out = f"{ALGORITHMS['fedmf']} {COMMON} --experiment kills", tmp_path / "r"
    process = started(words, out)
    deadline = time.monotonic() + PATIENCE
    while process.is_alive() and rounds_done(out) < ROUNDS - 3:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(PATIENCE)
    assert not (out / "summary.json").exists() and checkpoint.rounds(out)
    finish(words, out)
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("kills")
    (mirrored,) = client.search_runs([experiment.experiment_id])
    assert mirrored.info.status == "FINISHED"
    for key in ("test/hr_10", "loss", "dropped"):
        points = sorted((point.step, point.value) for point in client.get_metric_history(mirrored.info.run_id, key))
        assert points == [(line["round"], line[key]) for line in lines_of(out)], key
