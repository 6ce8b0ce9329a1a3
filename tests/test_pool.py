"""Jobs as processes: their order, their end, and that they never outlive whoever started them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedbench.commands import cli
from fedbench.evaluation.significance import interval
from fedbench.experiment import processes

ROOT = Path(__file__).parents[1]
DATA = ["--dataset", "synthetic", "--users", "40", "--items", "80", "--interactions", "10"]
SEEDS = ["--algo", "fedmf", *DATA, "--dim", "4", "--rounds", "2", "--seeds", "0-1", "--kernel", "off", "--no-mlflow", "--quiet"]


def job(folder: Path, key: str, code: str) -> processes.Job:
    return processes.Job(key, [sys.executable, "-c", code], folder / f"{key}.log")


def wait_for(condition: Callable[[], object]) -> None:
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("it did not happen within five minutes")


def test_each_job_begins_and_ends_and_one_failure_stops_nobody(tmp_path: Path) -> None:
    codes = {"a": "print('fine')", "b": "import sys; print('fedbench: error: no', file=sys.stderr); sys.exit(3)"}
    codes |= {"c": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "d": "import os; print(os.environ['HELLO'])"}
    jobs = [job(tmp_path, key, code) for key, code in codes.items()]
    jobs[3].env["HELLO"] = "you"
    events = list(processes.run(jobs, at_once=2))
    assert [event.key for event in events if event.code is None] == ["a", "b", "c", "d"]
    ended = {event.key: event.code for event in events if event.code is not None}
    assert ended == {"a": 0, "b": 3, "c": -signal.SIGKILL, "d": 0}
    # never more than two at once
    running, most = 0, 0
    for event in events:
        running += 1 if event.code is None else -1
        most = max(most, running)
    assert most == 2
    assert (tmp_path / "d.log").read_text() == "you\n"
    assert processes.last_error(tmp_path / "b.log", 3) == "fedbench: error: no"
    assert processes.last_error(tmp_path / "c.log", -9).startswith("killed by SIGKILL")
    assert "exit code 4, and not a word" in processes.last_error(tmp_path / "none.log", 4)


SAVES = """
import pathlib, signal, sys, time
try:
    pathlib.Path(sys.argv[1]).touch()
    time.sleep(600)
except KeyboardInterrupt:
    pathlib.Path(sys.argv[1] + ".saved").touch()
"""


def test_an_interrupt_lets_jobs_save_their_state(tmp_path: Path) -> None:
    jobs = [processes.Job(key, [sys.executable, "-c", SAVES, str(tmp_path / key)], tmp_path / f"{key}.log") for key in "ab"]
    events = processes.run(jobs, at_once=2)
    assert [next(events).key, next(events).key] == ["a", "b"]
    wait_for(lambda: (tmp_path / "a").exists() and (tmp_path / "b").exists())
    with pytest.raises(KeyboardInterrupt):
        events.throw(KeyboardInterrupt)
    assert (tmp_path / "a.saved").exists() and (tmp_path / "b.saved").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_jobs_end_with_a_killed_parent(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    child = f"import os, pathlib, time; pathlib.Path({str(pid)!r}).write_text(str(os.getpid())); time.sleep(600)"
    parent = (
        "import sys; from pathlib import Path; from fedbench.experiment import processes as pool\n"
        f"list(pool.run([pool.Job('a', [sys.executable, '-c', {child!r}], Path({str(tmp_path / 'log')!r}))], 1))"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], cwd=ROOT)
    wait_for(lambda: pid.exists() and pid.read_text())
    process.kill()
    process.wait()
    number = int(pid.read_text())

    def gone() -> bool:
        try:
            os.kill(number, 0)
        except ProcessLookupError:
            return True
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] == "Z"

    wait_for(gone)


@pytest.mark.long
def test_seeds_at_once_give_what_seeds_in_turn_give(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, words in (("turn", []), ("once", ["--jobs", "2", "--threads", "1"])):
        assert cli.main([*SEEDS, *words, "--out", str(tmp_path / name)]) == 0
    turn, once = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("turn", "once"))
    assert once["test"] == pytest.approx(turn["test"], abs=1e-6) and len(once["runs"]) == 2
    hits = [(pd.read_parquet(tmp_path / "once" / f"seed-{seed}" / "per_client.parquet")["rank_test"] <= 10).to_numpy() for seed in (0, 1)]
    assert once["test"]["hr_10"] == pytest.approx(np.mean(hits))
    # the resamples of several metrics share their clients, so the ends are those of another draw: equal but for resampling noise
    low, high = once["interval"]["test"]["hr_10"]
    assert (low, high) == pytest.approx(interval(hits), abs=0.03) and low < once["test"]["hr_10"] < high
    assert f"± {once['std']['test']['hr_10']:.4f}  [{low:.4f}, {high:.4f}]" in capsys.readouterr().out


@pytest.mark.long
def test_a_seed_that_fails_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*SEEDS, "-n", "999", "--jobs", "2", "--out", str(tmp_path / "s")]) == 2  # both were told wrongly
    said = capsys.readouterr().err
    assert "2 of 2 runs failed" in said and "999 is more than the 40 clients" in said and said.count("\n") == 1
