"""Sweeps as people run them: real points in real processes on a real MLflow database, killed, gone on with, failing."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

import pandas as pd
import pytest

from fedbench.__main__ import main as fedbench_main
from fedbench.errors import UsageError
from fedbench.experiment import processes
from fedbench.locks import claimed
from fedbench.settings.command_line import resolve
from fedbench.sweeping import result_tables, study, sweep, trials
from fedbench.tracking import mirror_process, views
from fedbench.tracking.run_log import mlflow_run_of

ROOT = Path(__file__).parents[1]
DATA = ["--dataset", "synthetic", "--users", "40", "--items", "80", "--interactions", "10"]
LINE = ["--algo", "fedmf", *DATA, "--dim", "4", "--rounds", "2", "--threads", "1", "--kernel", "off", "--quiet"]
GRID = [*LINE, "-n", "10", "20", "-e", "1", "2"]


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def results(folder: Path) -> dict[str, Any]:
    return {path.parent.name: (read(path)["val"], read(path)["test"]) for path in folder.glob("*/summary.json")}


def times(folder: Path) -> dict[str, int]:
    return {path.parent.name: path.stat().st_mtime_ns for path in folder.glob("*/summary.json")}


def children(database: str, parent: str) -> list[Any]:
    client = mirror_process.import_client()(database)
    return client.search_runs(["1"], f"tags.`mlflow.parentRunId` = '{parent}'")


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A sweep of four points at once on a database that was not there; its folder, its database and what it printed."""
    place = tmp_path_factory.mktemp("swept")
    database = f"sqlite:///{place / 'mlflow.db'}"
    command = [sys.executable, str(ROOT / "sweeps" / "grid.py"), *GRID, "--out", "s", "--jobs", "4"]
    done = subprocess.run(
        command, cwd=place, env={**os.environ, "MLFLOW_TRACKING_URI": database}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "MLflow" not in done.stderr, done.stderr
    return place / "s", database, done.stdout


def parent_of(database: str) -> Any:
    (found,) = mirror_process.import_client()(database).search_runs(["1"], "tags.kind = 'sweep'")
    return found


def test_every_point_is_a_run_folder(swept: tuple[Path, str, str]) -> None:
    folder, _, printed = swept
    told = read(folder / "sweep.json")
    assert told["axes"] == {"clients_per_round": [10, 20], "local_epochs": [1, 2]}
    assert told["fixed"]["algo"] == "fedmf" and told["budget"] == {"what": "rounds", "value": 2}
    assert [point["status"] for point in told["points"]] == ["finished"] * 4
    assert all(point["seconds"] > 0 for point in told["points"])
    for point in told["points"]:
        names = {path.name for path in (folder / point["key"]).iterdir()}
        assert {"config.json", "summary.json", "metrics.jsonl", "per_client.parquet"} <= names
        config = read(folder / point["key"] / "config.json")
        assert {key: config[key] for key in point["values"]} == point["values"]
    assert {path.name for path in folder.glob("heatmap-*.png")} == {"heatmap-hr_10.png", "heatmap-ndcg_10.png"}
    table = pd.read_csv(folder / "table.csv")
    for _, row in table.iterrows():
        summary = read(folder / row["key"] / "summary.json")
        assert row["test_ndcg_10"] == pytest.approx(summary["test"]["ndcg_10"])
        # n clients in each of 2 rounds
        assert row["client_visits"] == 2 * row["clients_per_round"] and row["bytes_up"] == summary["bytes_up"] > 0
    assert "| n | e | runs | HR@10 |" in printed and "best on validation" in printed


def test_mlflow_has_a_parent_and_its_children(swept: tuple[Path, str, str]) -> None:
    _, database, printed = swept
    parent = parent_of(database)
    runs = children(database, parent.info.run_id)
    assert sorted((run.data.params["n"], run.data.params["e"]) for run in runs) == [("10", "1"), ("10", "2"), ("20", "1"), ("20", "2")]
    assert {run.info.run_name for run in runs} == {"n=10 e=1", "n=10 e=2", "n=20 e=1", "n=20 e=2"}
    assert {run.info.status for run in [parent, *runs]} == {"FINISHED"}
    artifacts = {file.path for file in mirror_process.import_client()(database).list_artifacts(parent.info.run_id)}
    assert {"table.csv", "table.md", "sweep.json", "heatmap-hr_10.png", "heatmap-ndcg_10.png"} == artifacts
    link = printed.split("charts  ")[1].strip()
    query = parse_qs(link.partition("?")[2])
    assert link.startswith("http://127.0.0.1:5000/#/experiments/1/runs?") and query["compareRunsMode"] == ["CHART"]
    tags = mirror_process.import_client()(database).get_experiment("1").tags
    view = json.loads(tags[f"mlflow.sharedViewState.{query['viewStateShareKey'][0]}"])
    state = json.loads(view["state"])
    assert view["name"] == "n × e: fedmf-synthetic"
    assert state["searchFilter"] == f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'"
    assert [key["groupByData"] for key in state["groupBy"]["groupByKeys"]] == ["n", "e"]
    assert [chart["type"] for chart in state["compareRunCharts"]] == ["LINE", "BAR", "PARALLEL", "CONTOUR"]
    assert view["name"] in tags["mlflow.note.content"]


def test_the_parent_says_what_is_best_and_where_the_charts_are(swept: tuple[Path, str, str]) -> None:
    folder, database, printed = swept
    note = parent_of(database).data.tags["mlflow.note.content"]
    best = next(line for line in printed.splitlines() if line.startswith("best on validation"))
    assert note.startswith(f"**{best}**") and "| n | e | runs | HR@10 |" in note and f"folder `{folder.name}`" in note
    # without a host: the UI may run on another port
    assert f"](#{printed.split('#')[-1].strip()})" in note


def test_without_views_the_plain_link_works(
    swept: tuple[Path, str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """In another MLflow, and where the tag cannot be written: then with one warning."""
    folder, database, _ = swept
    monkeypatch.setenv("MLFLOW_TRACKING_URI", database)
    for how, warnings in ((lambda patch: patch.setattr(views, "TRIED", "2.1."), 0), (refuse_tags, 1)):
        with monkeypatch.context() as patch, caplog.at_level("WARNING"):
            how(patch)
            caplog.clear()
            assert sweep.main([*GRID, "--out", str(folder)]) == 0
        query = parse_qs(capsys.readouterr().out.split("charts  ")[1].strip().partition("?")[2])
        assert unquote(query["searchFilter"][0]) == f"tags.`mlflow.parentRunId` = '{parent_of(database).info.run_id}'"
        assert unquote(query["orderByKey"][0]) == "metrics.`best/test/ndcg_10`"
        assert sum("no ready view" in record.getMessage() for record in caplog.records) == len(caplog.records) == warnings


def refuse_tags(patch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("the store takes no tags")

    patch.setattr(mirror_process.import_client(), "set_experiment_tag", refuse)


@pytest.mark.long
def test_the_next_call_does_what_is_missing_and_nothing_else(
    swept: tuple[Path, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original, database, _ = swept
    monkeypatch.setenv("MLFLOW_TRACKING_URI", database)
    before, made, parent = results(original), times(original), parent_of(database).info.run_id
    line = [*GRID, "--out", str(original)]
    started: list[str] = []
    begin = processes.start
    monkeypatch.setattr(processes, "start", lambda job: started.append(job.key) or begin(job))

    assert sweep.main(line) == 0
    assert started == [] and times(original) == made

    # one point lost, of another the copy in MLflow, and the remains of a killed run in MLflow
    lost, unseen, *_ = made
    shutil.rmtree(original / lost)
    client = mirror_process.import_client()(database)
    client.delete_run(mlflow_run_of(original / unseen))
    remains = client.create_run("1", tags={"mlflow.parentRunId": parent}).info.run_id
    assert sweep.main(line) == 0
    assert started == [lost] and results(original) == before
    assert {key: made[key] for key in made if key != lost} == {key: when for key, when in times(original).items() if key != lost}
    assert parent_of(database).info.run_id == parent
    runs = children(database, parent)
    assert len(runs) == 4 and {run.info.status for run in runs} == {"FINISHED"} and remains not in {run.info.run_id for run in runs}
    again = next(run for run in runs if run.info.run_id == mlflow_run_of(original / unseen))
    assert again.data.metrics["best/test/ndcg_10"] == pytest.approx(before[unseen][1]["ndcg_10"])
    assert again.data.params["n"] == str(read(original / unseen / "config.json")["clients_per_round"])
    capsys.readouterr()


def test_killed_at_any_moment_it_goes_on(swept: tuple[Path, str, str], tmp_path: Path) -> None:
    """SIGKILL to the sweep when one point is done: its workers end, the next call redoes no finished point, totals are the same."""
    command = [sys.executable, str(ROOT / "sweeps" / "grid.py"), *GRID, "--no-mlflow", "--out", str(tmp_path / "s"), "--jobs", "2"]
    process = subprocess.Popen(command, cwd=tmp_path)
    deadline = time.monotonic() + 900
    while not times(tmp_path / "s"):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.wait()
    done = times(tmp_path / "s")
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert results(tmp_path / "s") == results(swept[0])
    assert {key: times(tmp_path / "s")[key] for key in done} == done


@pytest.mark.long
def test_ctrl_c_ends_the_points_and_keeps_their_state(tmp_path: Path) -> None:
    line = [*LINE, "-e", "1", "2", "--no-mlflow", "--out", str(tmp_path / "s"), "--jobs", "2"]
    slow = [word if word != "2" or line[place - 1] != "--rounds" else "100000" for place, word in enumerate(line)]
    process = subprocess.Popen([sys.executable, "-m", "fedbench", "sweep", *slow], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 900
    while len(list((tmp_path / "s").glob("*/metrics.jsonl"))) < 2:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130 and said.splitlines()[-1] == "fedbench: interrupted; the same command goes on"
    assert len(list((tmp_path / "s").glob("*/checkpoint/*.safetensors"))) == 2, "both points saved their state"
    assert [point["status"] for point in read(tmp_path / "s" / "sweep.json")["points"]] == ["waiting", "waiting"]


def test_one_failed_point_stops_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    line = [*LINE, "-n", "999", "10", "--no-mlflow", "--out", "s"]
    assert fedbench_main(["sweep", *line]) == 1
    out, err = capsys.readouterr()
    assert "-n/--clients-per-round 999 is more than the 40 clients" in err
    assert f"redo    python -m fedbench sweep {' '.join(line)}" in err
    told = read(tmp_path / "s" / "sweep.json")["points"]
    assert [point["status"] for point in told] == ["failed", "finished"]
    assert "| 10 | 1 |" in out
    assert fedbench_main(["sweep", *line, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert f"{told[0]['key']}  failed    n=999" in out and f"{told[1]['key']}  finished  n=10" in out
    assert "the missing 1 may take" in out


def test_a_second_sweep_on_one_folder_is_refused(tmp_path: Path) -> None:
    with claimed(tmp_path / "s"):
        code = "import sys; from fedbench.__main__ import main; sys.exit(main(sys.argv[1:]))"
        command = [sys.executable, "-c", code, "sweep", *GRID, "--no-mlflow", "--out", str(tmp_path / "s")]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and f"is in use by process {os.getpid()}" in done.stderr
    assert not (tmp_path / "s" / "sweep.json").exists()


def test_time_left_follows_rounds_visits_and_epochs(tmp_path: Path) -> None:
    what = study.read([*LINE, "-n", "10", "20", "40", "-e", "1", "2", "4"])
    progress = sweep.Progress.read(tmp_path, what)

    def truth(point: study.Point) -> float:
        n, e = point.values["clients_per_round"], point.values["local_epochs"]
        return 5 + 0.25 * 2 + 0.01 * 2 * n * e

    finished = list(what.points)[:5]
    for key in finished:
        progress.entries[key] |= {"status": "finished", "seconds": truth(what.points[key])}
        (tmp_path / key).mkdir()
        (tmp_path / key / "summary.json").write_text('{"rounds": 2, "seconds_per_round": 1.0}')
    guessed = sweep.estimate(progress)
    assert guessed == pytest.approx({key: truth(point) for key, point in what.points.items() if key not in finished})


def test_dry_run_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert sweep.main([*GRID, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert out.count("waiting") == 4 and "4 points, 0 finished, into runs/sweeps/fedmf-synthetic-" in out
    assert "\n8 rounds, 120 client visits\n" in out
    assert re.search(r"\nthe missing 4 may take \d+ s with --jobs 1, by trials of \d+ s\n", out)
    assert list(tmp_path.iterdir()) == []


def test_dry_run_says_what_it_cannot_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert sweep.main([*LINE, "--algo", "fedmf", "popularity", "-n", "999", "--dry-run", "--jobs", "2"]) == 0
    out = capsys.readouterr().out
    assert "fedmf on synthetic: -n/--clients-per-round 999 is more than the 40 clients" in out and "may take" not in out
    monkeypatch.setattr(trials, "SECONDS", 0.0)
    monkeypatch.setattr(trials.run, "__defaults__", (0.0,))
    assert sweep.main([*GRID, "--dry-run"]) == 0
    assert "not tried within 0 s, so without an estimate: fedmf on synthetic" in capsys.readouterr().out


def test_a_trials_time_grows_with_the_run() -> None:
    trial = trials.Trial(start=3.0, work=2.0, evaluation=1.0, ranking=5.0, cohort=10, epochs=2, clients=40, bytes=1000.0)

    def seconds(words: str) -> float:
        return trial.seconds(resolve(["--algo", "fedmf", *DATA, *words.split()]))

    assert seconds("-n 10 -e 2 --rounds 4") == 3 + 4 * (2 + 1) + 5
    assert seconds("-n 20 -e 6 --rounds 4") == 3 + 4 * (2 * 2 * 3 + 1) + 5
    assert seconds("-e 2 --rounds 4 --eval-every 2") == 3 + 4 * (2 * 4 + 1 / 2) + 5
    assert seconds("-n 10 -e 2 --rounds 4 --refit") == 3 + 2 * 4 * (2 + 1) + 5
    assert seconds("-n 10 -e 2 --budget visits --budget-value 40") == seconds("-n 10 -e 2 --rounds 4")
    assert seconds("-n 20 -e 1 --budget bytes --budget-value 8000") == seconds("-n 20 -e 1 --rounds 4")


def test_means_over_seeds_have_students_interval() -> None:
    # scipy.stats.t.interval(.95, 2, .2, .1 / 3 ** .5) = (-.0484, .4484)
    mean, half = result_tables.mean_and_interval(pd.Series([0.1, 0.2, 0.3]).to_numpy())
    assert (mean, half) == pytest.approx((0.2, 0.24841377))


def test_ray_without_a_server_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    from fedbench.sweeping import ray_backend

    with pytest.raises(UsageError, match="set MLFLOW_TRACKING_URI=http"):
        next(ray_backend.run({"a": ray_backend.Task({"mlflow": True}, {})}, tmp_path, 1, 0.0))
