"""A run's folder and its MLflow mirror, on a real database."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import requests

from fedbench.errors import UsageError
from fedbench.tracking import copier, mirror_process, run_log
from fedbench.tracking.run_log import RunLog

REPO = Path(__file__).parent.parent
CONFIG: dict[str, Any] = {"algo": "toy", "rounds": 3, "clients_per_round": None, "local_epochs": 2, "protocol": {"split": "time"}}
TAGS = {"protocol_fingerprint": "0123456789abcdef", "leaky": "false", "dataset": "synthetic", "data_checksum": "ab" * 32}
SUMMARY: dict[str, Any] = {
    "algo": "toy",
    "dataset": "synthetic",
    "leaky": False,
    "rounds": 3,
    "best_round": 2,
    "bytes_up": 600,
    "client_visits": 60,
    "clients": 40,
    "clients_never_seen": 0,
    "protocol_fields": {"eval_negatives": 99},
    "popularity": {"hr_10": 0.4, "hr_20": 0.5},
    "val": {"hr_10": np.float32(0.5), "ndcg_10": 0.25},
    "test": {"hr_10": 0.375, "full_hr_10": float("nan")},
}
CLIENTS = pd.DataFrame(
    {
        "user": ["a", "b", "c"],
        "train_items": [3, 4, 9],
        "rank_val": [1, 50, 7],
        "rank_test": [2, 60, 11],
        "full_rank_val": [5, 900, 70],
        "full_rank_test": [8, 901, 72],
    }
)


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One database for the whole file: creating one takes seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('store') / 'mlflow.db'}"


@pytest.fixture
def client(database: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", database)
    yield mirror_process.import_client()(database)


@pytest.fixture(autouse=True)
def no_handler_stays() -> Iterator[None]:
    before = list(run_log.logger.handlers)
    yield
    left = [handler for handler in run_log.logger.handlers if handler not in before]
    run_log.logger.handlers = before
    assert not left, "a run left its log file attached"


def start(out: Path, mlflow: bool = False, experiment: str = "toy", **more: Any) -> RunLog:
    return RunLog.open(out, CONFIG, TAGS, mlflow=mlflow, run_name="toy-0", experiment=experiment, **more)


def line(number: int) -> dict[str, float]:
    return {"round": number, "loss": 1 / number, "val/ndcg_10": 0.1 * number, "bytes_up": 200}


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def history(client: Any, run_id: str) -> dict[tuple[str, int], float]:
    keys = client.get_run(run_id).data.metrics
    return {(key, point.step): point.value for key in keys for point in client.get_metric_history(run_id, key)}


def test_the_folder_is_complete_without_mlflow(tmp_path: Path) -> None:
    log = start(tmp_path / "a" / "run")
    for number in (1, 2, 3):
        log.round(line(number))
    logging.getLogger("fedbench.anything").info("a word for the log")
    log.finish(SUMMARY, CLIENTS)
    out = tmp_path / "a" / "run"
    assert read(out / "config.json") == CONFIG
    assert mirror_process.read_lines(out / "metrics.jsonl") == [line(1), line(2), line(3)]
    assert pd.read_parquet(out / "per_client.parquet").equals(CLIENTS)
    assert {path.name for path in (out / "figures").iterdir()} == {"convergence.png", "distribution.png"}
    assert "a word for the log" in (out / "log.txt").read_text()
    summary = read(out / "summary.json")
    assert summary["val"] == {"hr_10": 0.5, "ndcg_10": 0.25}
    assert summary["test"]["full_hr_10"] is None
    env = read(out / "env.json")
    assert env["packages"]["torch"] and env["cpu_count"] and env["torch_threads"] >= 1
    assert (log.run_id, log.link) == (None, None)
    assert not list(out.glob("*.part"))


def test_mlflow_is_not_imported_until_it_is_used() -> None:
    code = "import sys, fedbench.tracking.run_log; print([m for m in ('mlflow', 'torch', 'matplotlib') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_failing_round_leaves_the_lines_before_it(tmp_path: Path) -> None:
    log = start(tmp_path)
    log.round(line(1))
    # read before the run ends: a line is on disk as soon as its round is over
    assert mirror_process.read_lines(tmp_path / "metrics.jsonl") == [line(1)]
    log.end("FAILED")
    assert not (tmp_path / "summary.json").exists()


def test_a_loss_that_is_not_finite_is_null(tmp_path: Path) -> None:
    log = start(tmp_path)
    log.round({"round": 1, "loss": float("nan"), "val/hr_10": np.float64("inf")})
    log.end("FAILED")
    assert read(tmp_path / "metrics.jsonl") == {"round": 1, "loss": None, "val/hr_10": None}


def test_out_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    start(tmp_path).end("FAILED")
    with pytest.raises(UsageError, match=r"already holds a run; choose another or use --resume"):
        start(tmp_path)


@pytest.mark.parametrize("below", ["", "deeper/run"])
def test_out_that_cannot_be_made_is_one_line(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError) as caught:
        start(tmp_path / "file" / below)
    assert caught.value.exit_code == 2
    assert str(tmp_path / "file") in str(caught.value) and "\n" not in str(caught.value)


def test_resume_keeps_the_rounds_before_and_drops_those_done_again(tmp_path: Path) -> None:
    log = start(tmp_path)
    for number in (1, 2, 3):
        log.round(line(number))
    log.end("KILLED")
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"round": 4, "lo')
    (tmp_path / "summary.json").write_text("{}")
    log = start(tmp_path, resume=True)
    assert (tmp_path / "summary.json").exists()
    log.round({**line(3), "loss": 0.25})
    assert not (tmp_path / "summary.json").exists()
    log.finish(SUMMARY, CLIENTS)
    assert mirror_process.read_lines(tmp_path / "metrics.jsonl") == [line(1), line(2), {**line(3), "loss": 0.25}]


def test_mlflow_holds_what_the_folder_holds(tmp_path: Path, client: Any, capfd: pytest.CaptureFixture[str]) -> None:
    log = start(tmp_path, mlflow=True)
    for number in (1, 2, 3):
        log.round(line(number))
    log.refit_round({"round": 1, "loss": 0.5})
    log.finish(SUMMARY, CLIENTS)
    assert capfd.readouterr().err == ""
    run = client.get_run(log.run_id)
    expected = {
        (key, item["round"]): value for item in mirror_process.read_lines(tmp_path / "metrics.jsonl") for key, value in item.items()
    }
    stored = history(client, log.run_id)
    assert {place: value for place, value in stored.items() if "/" not in place[0] or place[0] == "val/ndcg_10"} == {
        place: value for place, value in expected.items() if place[0] != "round"
    }
    assert stored["refit/loss", 1] == 0.5
    final = {key: value for key, value in run.data.metrics.items() if key.startswith(("best/", "summary/"))}
    assert final == {
        "best/val/hr_10": 0.5,
        "best/val/ndcg_10": 0.25,
        "best/test/hr_10": 0.375,
        "summary/best_round": 2,
        "summary/bytes_up": 600,
        "summary/client_visits": 60,
        "summary/clients_never_seen": 0,
        "summary/cohort": 20,
    }
    # the UI draws bars of them; what says nothing of the run is no metric
    assert {step for (key, step) in stored if key in final} == {0}
    assert run.data.tags["popularity.hr_10"] == "0.4000"
    (data,) = run.inputs.dataset_inputs
    assert (data.dataset.name, data.dataset.digest) == ("synthetic", "ab" * 16)
    assert run.data.tags["mlflow.source.name"] == "train.py"
    assert run.info.status == "FINISHED"
    assert run.data.params == {
        "algo": "toy",
        "rounds": "3",
        "clients_per_round": "all",
        "n": "all",
        "local_epochs": "2",
        "e": "2",
        "protocol.split": "time",
    }
    assert run.data.tags.items() >= {**TAGS, "kind": "run", "mlflow.runName": "toy-0"}.items()
    assert {item.path for item in client.list_artifacts(log.run_id)} == {
        "summary.json",
        "config.json",
        "metrics.jsonl",
        "per_client.parquet",
        "figures",
    }
    experiment = client.get_experiment_by_name("toy").experiment_id
    ui = f"http://127.0.0.1:5000/#/experiments/{experiment}/runs?workflowType=machine_learning&compareRunsMode=CHART"
    assert log.link == ui
    assert log.tracking_seconds > 0
    assert read(tmp_path / "env.json")["mlflow_run_id"] == log.run_id


def test_a_resumed_run_goes_on_in_its_mlflow_run_without_doubled_points(tmp_path: Path, client: Any) -> None:
    first = start(tmp_path, mlflow=True)
    for number in (1, 2, 3):
        first.round(line(number))
    first.end("KILLED")
    assert client.get_run(first.run_id).info.status == "KILLED"
    second = start(tmp_path, mlflow=True, resume=True)
    for number in (3, 4):  # the checkpoint was that of round 2
        second.round(line(number))
    second.finish(SUMMARY, CLIENTS)
    assert second.run_id == first.run_id
    assert client.get_run(first.run_id).info.status == "FINISHED"
    assert [point.step for point in client.get_metric_history(first.run_id, "loss")] == [1, 2, 3, 4]
    # a finished run that is gone on with has nothing new to say
    again = start(tmp_path, mlflow=True, resume=True)
    again.finish(SUMMARY, CLIENTS)
    assert len(client.get_metric_history(first.run_id, "best/val/hr_10")) == 1


def test_a_resumed_run_that_the_store_does_not_know_is_sent_whole(tmp_path: Path, client: Any) -> None:
    first = start(tmp_path)
    first.round(line(1))
    first.end("KILLED")
    env = read(tmp_path / "env.json")
    (tmp_path / "env.json").write_text(json.dumps({**env, "mlflow_run_id": "0" * 32}))
    second = start(tmp_path, mlflow=True, resume=True)
    second.round(line(2))
    second.end("FAILED")
    assert {step for _, step in history(client, second.run_id or "")} == {1, 2}
    assert client.get_run(second.run_id).data.tags["resumes"] == "0" * 32


def test_many_params_and_rounds_go_in_batches(tmp_path: Path, client: Any) -> None:
    config = {f"key_{i}": "x" * 7000 if i == 0 else i for i in range(250)} | {
        "clients_per_round": 50,
        "odd@key": None,
        "empty": "",
    }
    log = RunLog.open(tmp_path, config, TAGS, mlflow=True, run_name="big", experiment="toy")
    for number in range(1, 502):
        log.round(line(number))
    log.end("FAILED")
    params = client.get_run(log.run_id).data.params
    assert len(params) == 254 and len(params["key_0"]) == 6000
    assert (params["n"], params["odd_key"]) == ("50", "none")
    # get_metric_history gives all 501 points: 1503 metrics, more than one batch takes
    assert len(client.get_metric_history(log.run_id, "loss")) == 501


def eventually(true: Callable[[], bool]) -> bool:
    """Whether it becomes true; the minutes are for busy machines."""
    until = time.monotonic() + 300
    while not true() and time.monotonic() < until:
        time.sleep(0.05)
    return true()


def test_rounds_reach_mlflow_while_the_run_goes_on(tmp_path: Path, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_log, "FLUSH_SECONDS", 0.05)
    log = start(tmp_path, mlflow=True)
    assert eventually(lambda: log.run_id is not None)
    for number in (1, 2):
        log.round(line(number))
        assert eventually(lambda number=number: len(client.get_metric_history(log.run_id, "loss")) == number)  # type: ignore[misc]
    log.end("KILLED")
    assert len(client.get_metric_history(log.run_id, "loss")) == 2


def test_a_dead_server_costs_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://someone:secret@127.0.0.1:9")
    with caplog.at_level(logging.WARNING):
        log = start(tmp_path, mlflow=True)
        for number in (1, 2, 3):
            log.round(line(number))
        log.finish(SUMMARY, CLIENTS)
    assert [record.name for record in caplog.records] == ["fedbench"]
    warning = caplog.records[0].getMessage()
    assert "given up" in warning and str(tmp_path) in warning and "secret" not in warning
    assert (log.run_id, log.link) == (None, None)
    assert len(mirror_process.read_lines(tmp_path / "metrics.jsonl")) == 3
    assert (tmp_path / "summary.json").exists()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A real MLflow server on a database of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{tmp_path / 'server.db'}", "--artifacts-destination", str(tmp_path / "files")]
    # without its job runners, seven processes that a tracking server does not need
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": environment}
    process = subprocess.Popen(command, cwd=tmp_path, start_new_session=True, **quiet)  # type: ignore[call-overload]
    try:
        address = f"http://127.0.0.1:{port}"

        def answers() -> bool:
            with suppress(OSError):
                return requests.get(f"{address}/health", timeout=5).ok
            return False

        assert eventually(answers)
        yield address, process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
def test_a_server_takes_a_run_and_may_die_in_the_next(
    tmp_path: Path, server: tuple[str, subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    address, process = server
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    monkeypatch.setattr(run_log, "FLUSH_SECONDS", 0.05)
    whole = start(tmp_path / "whole", mlflow=True)
    whole.round(line(1))
    whole.finish(SUMMARY, CLIENTS)
    client = mirror_process.import_client()(address)
    assert whole.link is not None and whole.link.startswith(f"{address}/#/experiments/")
    assert client.get_run(whole.run_id).info.status == "FINISHED"
    assert {item.path for item in client.list_artifacts(whole.run_id)} >= {"summary.json", "figures"}
    cut = start(tmp_path / "cut", mlflow=True)
    assert eventually(lambda: cut.run_id is not None)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    with caplog.at_level(logging.WARNING):
        for number in (1, 2, 3):
            cut.round(line(number))
        cut.finish(SUMMARY, CLIENTS)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert ["given up" in warning for warning in warnings] == [True]
    assert (tmp_path / "cut" / "summary.json").exists() and cut.link is None


def run_child(code: str, *arguments: str, cwd: Path, database: str, **environment: str) -> subprocess.Popen[str]:
    env = {**os.environ, "MLFLOW_TRACKING_URI": database, "PYTHONPATH": str(REPO), **environment}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, cwd=cwd, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


CHILD = """
import sys, time
from pathlib import Path
from fedbench.tracking.run_log import RunLog
log = RunLog.open(Path(sys.argv[1]), {"algo": "toy"}, {}, True, "child", sys.argv[2])
log.round({"round": 1, "loss": 1.0})
while log.run_id is None:
    time.sleep(0.01)
process = log._mirror._process
print(log.run_id, process.pid if process else "at hand", flush=True)
"""


@pytest.mark.parametrize("both", [False, True], ids=["the-run", "the-run-and-its-copy"])
def test_a_killed_run_is_marked(tmp_path: Path, client: Any, database: str, both: bool) -> None:
    """By its copy, which sees it go; or by the next run, if the copy went with it."""
    child = run_child(CHILD + "time.sleep(600)\n", str(tmp_path / "killed"), "kill", cwd=tmp_path, database=database)
    assert child.stdout is not None
    killed, copy = child.stdout.readline().split()
    try:
        assert client.get_run(killed).info.status == "RUNNING"
        if both:
            os.kill(int(copy), signal.SIGKILL)
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.communicate()
    if both:
        log = start(tmp_path / "next", mlflow=True, experiment="kill")
        log.end("KILLED")
        assert client.get_run(killed).info.status == "KILLED"
    else:
        assert eventually(lambda: client.get_run(killed).info.status == "KILLED")
        assert [point.step for point in client.get_metric_history(killed, "loss")] == [1]
    assert mirror_process.mark_stale(client, client.get_experiment_by_name("kill").experiment_id) == 0


def test_copies_are_forked_from_one_process_and_outlive_it(
    tmp_path: Path, client: Any, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", database)
    with copier.mlflow_at_hand(True) as here:
        address = Path(here[copier.AT_HAND])
        assert eventually(address.exists)
        names = ("first", "second")
        runs = [run_child(CHILD + "input()\n", str(tmp_path / name), "hand", cwd=tmp_path, database=database, **here) for name in names]
        ids = []
        for run in runs:
            assert run.stdout is not None
            run_id, how = run.stdout.readline().split(maxsplit=1)
            assert how.strip() == "at hand"
            ids.append(run_id)
    assert not address.exists()
    runs[0].kill()
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv(copier.AT_HAND, str(address))  # nobody waits there any more
        log = start(tmp_path / "other", mlflow=True, experiment="hand")
        log.finish(SUMMARY, CLIENTS)
    assert log.run_id is not None and client.get_run(log.run_id).info.status == "FINISHED"
    assert eventually(lambda: client.get_run(ids[0]).info.status == "KILLED")
    assert client.get_run(ids[1]).info.status == "RUNNING"
    runs[1].kill()
    for run in runs:
        run.communicate()
    assert eventually(lambda: client.get_run(ids[1]).info.status == "KILLED")


def test_a_pid_used_again_by_another_process_is_no_sign_of_life() -> None:
    own = os.getpid()
    assert mirror_process.alive(own, mirror_process.started(own))
    if Path("/proc/self/stat").exists():
        assert not mirror_process.alive(own, "1")


@pytest.mark.slow
def test_two_processes_create_one_database(tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path / 'fresh.db'}"
    children = [run_child(CHILD + "log.end('FAILED')\n", str(tmp_path / name), "both", cwd=tmp_path, database=database) for name in "ab"]
    outputs = [child.communicate(timeout=120) for child in children]
    ids = {out.split()[0] for out, _ in outputs}
    assert len(ids) == 2
    assert [chatter for _, chatter in outputs] == ["", ""]
    assert [child.returncode for child in children] == [0, 0]


def test_the_link_is_built_on_a_servers_own_address() -> None:
    assert mirror_process.ui_address("https://me:pw@host:8080/mlflow/") == "https://host:8080/mlflow"
    assert mirror_process.ui_address("postgresql://me:pw@host/db") == mirror_process.LOCAL_UI


def test_quiet_silences_the_console_and_not_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = list(run_log.logger.handlers)
    run_log.setup_logging(quiet=True, debug=False)
    try:
        log = start(tmp_path)
        run_log.logger.info("for the file")
        run_log.logger.warning("for both")
        log.end("FAILED")
    finally:
        run_log.logger.handlers = before
    console = capsys.readouterr().err
    assert "for both" in console and "for the file" not in console
    assert "for the file" in (tmp_path / "log.txt").read_text()
