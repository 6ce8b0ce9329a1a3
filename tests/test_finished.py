"""A command given once more: what is finished is told again and not done again, what is missing is done, the mean is written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fedbench.commands import cli
from fedbench.tracking import mirror_process
from tests.test_run import interrupting, result, summary_of

ROOT = Path(__file__).parents[1]
DATA = "--dataset synthetic --users 60 --items 150 --interactions 12"
COMMON = f"{DATA} --dim 4 --kernel off --threads 1 --no-mlflow --quiet"
FEDMF = f"--algo fedmf --rounds 3 {COMMON}"
RATINGS = f"--algo fedrec_mf --feedback explicit --split kfold --folds 2 --rounds 2 {COMMON}"

KILLED_AFTER_ITS_SUMMARY = """
import os, signal, sys
from fedbench.commands import cli
from fedbench.experiment import checkpoint
prune = checkpoint.prune

def killed(out, keep):
    if keep == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    prune(out, keep)

checkpoint.prune = killed
sys.exit(cli.main(sys.argv[1:]))
"""


def command(words: str, out: Path) -> list[str]:
    return [*words.split(), "--out", str(out)]


def written(out: Path) -> dict[str, int]:
    """When the files of finished runs were written."""
    return {str(path.relative_to(out)): path.stat().st_mtime_ns for path in out.rglob("*") if path.name in ("metrics.jsonl", "log.txt")}


def files(out: Path) -> set[str]:
    return {str(path.relative_to(out)) for path in out.rglob("*")}


def mean_of(out: Path) -> dict[str, Any]:
    return result(summary_of(out))


def test_the_same_command_says_finished(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r"
    assert cli.main(command(FEDMF, out)) == 0
    table = capsys.readouterr().out
    before, there = written(out), files(out)
    for again in (command(FEDMF, out), [*FEDMF.split(), "--resume", str(out)], [*command(FEDMF, out), "--checkpoint-every", "1"]):
        assert cli.main(again) == 0
        said = capsys.readouterr().out
        assert said == f"finished: {out} holds this run's result, nothing is left to do\n{table}"
    assert written(out) == before and files(out) == there
    assert cli.main([*command(FEDMF, out), "--rounds", "4"]) == 2
    assert f"--out {out} already holds a run: that run has --rounds 3, here it is 4" in capsys.readouterr().err
    assert cli.main([*command(FEDMF, out), "--resume", "never"]) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert cli.main([*command(FEDMF, out), "--seeds", "0-1"]) == 2
    assert "already holds a run of one seed" in capsys.readouterr().err
    assert written(out) == before and files(out) == there


def test_a_result_that_its_rounds_contradict_is_not_told_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r"
    assert cli.main(command(FEDMF, out)) == 0
    path = out / "summary.json"
    honest = json.loads(path.read_text())
    for part, name, value in (("test", "hr_10", 0.99), ("val", "ndcg_10", 0.5), ("", "best_round", honest["best_round"] % 3 + 1)):
        changed = {**honest, **({part: {**honest[part], name: value}} if part else {name: value})}
        path.write_text(json.dumps(changed))
        capsys.readouterr()
        assert cli.main(command(FEDMF, out)) == 3
        said = capsys.readouterr().err
        assert f"{path} was changed after the run" in said and (name in said or not part), said
    path.write_text(json.dumps(honest))
    assert cli.main(command(FEDMF, out)) == 0


def test_another_file_of_the_same_name_is_not_finished(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    method = tmp_path / "mine.py"
    method.write_text((ROOT / "algorithms" / "popularity.py").read_text().replace('"popularity"', '"mine"'))
    words = command(f"--algo {method} {DATA} --no-mlflow --quiet --keep-state none", tmp_path / "r")
    assert cli.main(words) == 0 and cli.main(words) == 0
    assert "finished" in capsys.readouterr().out
    method.write_text(method.read_text() + "\n# changed\n")
    assert cli.main(words) == 2
    assert f"the content of {method} or synthetic has changed since that run" in capsys.readouterr().err


def test_a_kill_between_the_summary_and_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(command(FEDMF, tmp_path / "steady")) == 0
    out, words = tmp_path / "r", f"{FEDMF} --checkpoint-every 1"
    killed = subprocess.run([sys.executable, "-c", KILLED_AFTER_ITS_SUMMARY, *command(words, out)], cwd=ROOT, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert files(out) - files(tmp_path / "steady"), "it left something behind"
    (out / "summary.json.part").write_text("{")
    (out / ".mlflow-lock").write_text("1\n")
    capsys.readouterr()
    assert cli.main(command(words, out)) == 0
    assert capsys.readouterr().out.startswith("finished: ")
    assert files(out) == files(tmp_path / "steady") and mean_of(out) == mean_of(tmp_path / "steady")


def test_a_kill_before_the_copy_in_mlflow_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    words = f"--algo popularity {DATA} --threads 1 --quiet --experiment last"
    killed = subprocess.run([sys.executable, "-c", KILLED_AFTER_ITS_SUMMARY, *command(words, tmp_path / "r")], cwd=ROOT, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert cli.main(command(words, tmp_path / "r")) == 0
    said = capsys.readouterr().out
    assert said.startswith("finished: ") and "charts  http" in said
    client = mirror_process.import_client()(f"sqlite:///{tmp_path / 'mlflow.db'}")
    (found,) = client.search_runs([client.get_experiment_by_name("last").experiment_id])
    assert found.info.status == "FINISHED" and found.info.run_name == "popularity-synthetic-clean-s0"
    assert found.data.metrics["best/test/hr_10"] == summary_of(tmp_path / "r")["test"]["hr_10"]
    assert {file.path for file in client.list_artifacts(found.info.run_id)} >= {"summary.json", "figures"}
    assert cli.main(command(words, tmp_path / "r")) == 0
    assert "charts" not in capsys.readouterr().out, "the copy is whole: MLflow is not asked again"


@pytest.mark.parametrize("words", [f"{FEDMF} --seeds 0-1", RATINGS], ids=["seeds", "folds"])
def test_several_runs_go_on_after_ctrl_c(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(command(words, tmp_path / "steady")) == 0
    out, rounds = tmp_path / "r", 3 if "seeds" in words else 2
    with monkeypatch.context() as patch:
        interrupting(patch, when=rounds + 1)
        assert cli.main(command(words, out)) == 130
    first, second = (f"{name}-{number}" for name in ("seed" if "seeds" in words else "fold",) for number in (0, 1))
    assert (out / first / "summary.json").exists() and not (out / second / "summary.json").exists()
    before = written(out / first)
    capsys.readouterr()
    assert cli.main(command(words, out)) == 0
    assert capsys.readouterr().out.count("finished: ") == 1 and written(out / first) == before
    assert files(out) == files(tmp_path / "steady") and mean_of(out) == mean_of(tmp_path / "steady")
    assert cli.main(command(words, out)) == 0
    assert capsys.readouterr().out.count("finished: ") == 2
    assert files(out) == files(tmp_path / "steady") and mean_of(out) == mean_of(tmp_path / "steady")
    assert cli.main(command(FEDMF, out)) == 2
    assert "already holds the mean of several runs" in capsys.readouterr().err


@pytest.mark.long
def test_jobs_go_on_after_a_kill(tmp_path: Path) -> None:
    """Of two seeds one is finished when all are killed; the other alone is started again."""
    words = f"{FEDMF} --seeds 0-1 --jobs 1"
    assert cli.main(command(words, tmp_path / "steady")) == 0
    out, words = tmp_path / "r", words.replace("--jobs 1", "--jobs 2")
    steady = command(FEDMF + " --seed 1", out / "seed-1")
    assert cli.main(steady) == 0
    before = written(out)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, str(ROOT / "train.py"), *command(words, out)], cwd=tmp_path, env=environment)
    deadline = time.monotonic() + 300
    while not (out / "seed-0" / "config.json").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert not (out / "summary.json").exists()
    subprocess.run([sys.executable, str(ROOT / "train.py"), *command(words, out)], cwd=tmp_path, env=environment, check=True)
    assert before.items() <= written(out).items()
    assert mean_of(out) == mean_of(tmp_path / "steady")
    assert files(out) - files(tmp_path / "steady") == {"work", "work/0.json", "work/0.log"}
    assert json.loads((out / "work" / "0.json").read_text())["seed"] == 0
