"""MLflow held up, stopped, killed, misnamed and met by a full disk: real processes, and a server that drips."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fedbench.errors import Interrupted, UsageError
from fedbench.tracking import copier, mirror_process, run_log
from fedbench.tracking.sweep_parent import Parent
from tests.test_run import DATA, ROOT
from tests.test_tracking import CLIENTS, SUMMARY, client, database, eventually, history, line, no_handler_stays, run_child, start

__all__ = ["client", "database", "no_handler_stays"]

FINISHED = {
    **SUMMARY,
    **{"protocol": "clean", "protocol_fields": {"fold": None, "split": "time"}, "protocol_fingerprint": "0123456789abcdef"},
    **{"data_checksum": "ab" * 32, "seed": 0},
}
BOUND = 60.0
"""seconds that a wait of a second or two may take on a busy machine; without a bound it would take for ever"""


@pytest.fixture
def dripping() -> Iterator[str]:
    """A server that answers each request with headers that never end, a byte at a time."""
    door = socket.create_server(("127.0.0.1", 0))
    lines: list[socket.socket] = []

    def drip(line: socket.socket) -> None:
        with suppress(OSError):
            line.recv(65536)
            line.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
            while True:
                line.sendall(b"x")
                time.sleep(0.2)

    def serve() -> None:
        with suppress(OSError):
            while True:
                lines.append(door.accept()[0])
                threading.Thread(target=drip, args=(lines[-1],), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    yield f"http://127.0.0.1:{door.getsockname()[1]}"
    door.close()
    for each in lines:
        each.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(copier.PATIENCE, "1.5")


def took(work: Callable[[], Any]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def given_up(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "given up" in record.getMessage()]


def process_of(log: run_log.RunLog) -> subprocess.Popen[str]:
    assert log._mirror is not None and log._mirror._process is not None
    return log._mirror._process


def test_a_server_that_drips_delays_the_end_by_so_long(
    dripping: str, impatient: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", dripping)
    log = start(tmp_path, mlflow=True)
    log.round(line(1))
    assert took(lambda: log.finish(SUMMARY, CLIENTS)) < BOUND
    (said,) = given_up(caplog)
    assert "the copy was not complete after 1.5 s" in said and f"with --resume {tmp_path} complete the copy" in said
    assert process_of(log).poll() is not None, "nobody is left that waits"
    assert (tmp_path / "summary.json").exists() and not (tmp_path / mirror_process.LOCK).exists()
    assert "mlflow_copied" not in json.loads((tmp_path / "env.json").read_text())


def test_a_sweeps_parent_is_not_waited_for_either(
    dripping: str, impatient: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", dripping)
    assert took(lambda: Parent("toy", "name", tmp_path).tidy({}, [])) < BOUND
    (said,) = given_up(caplog)
    assert "no answer within 1.5 s" in said


def test_an_orphaned_copy_ends_by_itself(dripping: str, tmp_path: Path) -> None:
    code = "import sys, time; from pathlib import Path; from fedbench.tracking.run_log import RunLog\n"
    code += "log = RunLog.open(Path(sys.argv[1]), {}, {}, True, 'r', 'toy'); print(log._mirror._process.pid, flush=True); time.sleep(600)"
    run = run_child(code, str(tmp_path / "r"), cwd=tmp_path, database=dripping, **{copier.PATIENCE: "0.1"})
    assert run.stdout is not None
    copy = int(run.stdout.readline())
    begun = mirror_process.started(copy)
    run.kill()
    run.communicate()
    assert eventually(lambda: not mirror_process.alive(copy, begun))


def test_a_stopped_copy_is_killed_and_completed_by_the_next_command(
    client: Any, impatient: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run_log, "FLUSH_SECONDS", 0.05)
    log = start(tmp_path, mlflow=True, experiment="stopped")
    assert eventually(lambda: log.run_id is not None)
    log.round(line(1))
    os.kill(process_of(log).pid, signal.SIGSTOP)
    run_id = log.run_id
    log.round(line(2))
    assert took(lambda: log.finish(FINISHED, CLIENTS)) < BOUND
    assert len(given_up(caplog)) == 1 and process_of(log).poll() == -signal.SIGKILL
    assert not (tmp_path / mirror_process.LOCK).exists()
    monkeypatch.setenv(copier.PATIENCE, "300")
    assert run_log.complete_copy(tmp_path, "stopped") is not None
    (found,) = client.search_runs([client.get_experiment_by_name("stopped").experiment_id])
    assert (found.info.run_id, found.info.status) == (run_id, "FINISHED")
    points = history(client, run_id or "")
    assert {step for key, step in points if key == "loss"} == {1, 2} and found.data.metrics["best/val/hr_10"] == 0.5
    assert {file.path for file in client.list_artifacts(run_id)} >= {"summary.json", "figures"}
    assert run_log.complete_copy(tmp_path, "stopped") is None, "it is whole: MLflow need not be asked"


def test_a_killed_copy_is_said_once(client: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = start(tmp_path, mlflow=True)
    log.round(line(1))
    process_of(log).kill()
    assert eventually(lambda: bool(given_up(caplog))), "at once, not at the end"
    log.round(line(2))
    log.finish(SUMMARY, CLIENTS)
    (said,) = given_up(caplog)
    assert "the process that copies was killed" in said and log.link is None
    assert not (tmp_path / mirror_process.LOCK).exists()


def test_a_stopped_process_at_hand_is_not_waited_for(client: Any, impatient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[subprocess.Popen[str]] = []
    start_mirror = copier.start_mirror
    monkeypatch.setattr(copier, "start_mirror", lambda *words, stdout: made.append(start_mirror(*words, stdout=stdout)) or made[-1])
    with copier.mlflow_at_hand(True):
        made[0].send_signal(signal.SIGSTOP)
        began = time.monotonic()
    assert time.monotonic() - began < BOUND and made[0].poll() == -signal.SIGKILL


@pytest.mark.parametrize("kind", ["{}", "file://{}", "sqlite:///{}"])
def test_an_address_that_names_a_folder(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", kind.format(tmp_path))
    log = start(tmp_path / "r", mlflow=True)
    assert took(lambda: log.finish(SUMMARY, CLIENTS)) < 15
    (said,) = given_up(caplog)
    assert "MLFLOW_TRACKING_URI names a folder; give a database, such as sqlite:///mlflow.db, or a server" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r"]


@pytest.mark.parametrize("word", ["soon", "-1", "0", "inf", "nan", ""])
def test_patience_is_a_number_of_seconds(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(copier.PATIENCE, word)
    with pytest.raises(UsageError, match="must be a number of seconds, such as 30"):
        copier.patience()


KILLED_EARLY = """
import sys, time
from pathlib import Path
from fedbench.tracking.run_log import RunLog
log = RunLog.open(Path(sys.argv[1]), {"algo": "toy", "rounds": 3}, {}, True, "early", "early", resume=sys.argv[2] == "again")
print("begun", flush=True)
time.sleep(600)
"""


def test_a_run_killed_in_its_first_seconds_has_one_copy(client: Any, database: str, tmp_path: Path) -> None:
    for number in range(3):
        words = str(tmp_path / "r"), "again" if number else "first"
        run = run_child(KILLED_EARLY, *words, cwd=tmp_path, database=database)
        assert run.stdout is not None and run.stdout.readline() == "begun\n"
        time.sleep(0.2 * number)
        run.kill()
        run.communicate()
    assert "mlflow_run_id" not in json.loads((tmp_path / "r" / "env.json").read_text()), "MLflow was not reached"
    log = start(tmp_path / "r", mlflow=True, experiment="early", resume=True)
    log.round(line(1))
    log.finish(SUMMARY, CLIENTS)
    experiment = client.get_experiment_by_name("early").experiment_id
    (found,) = client.search_runs([experiment])
    assert (found.info.run_id, found.info.status) == (log.run_id, "FINISHED")
    assert found.data.params["rounds"] == "3"


def test_a_copy_whose_id_was_never_noted_is_found_by_its_key(client: Any, tmp_path: Path) -> None:
    """Killed after MLflow made the run, before anything else was sent: what is missing of its params is sent too."""
    start(tmp_path).end("KILLED")
    key = json.loads((tmp_path / "env.json").read_text())["run_key"]
    experiment = client.create_experiment("key")
    begun = client.create_run(experiment, tags={"run_key": key, "kind": "run"}).info.run_id
    log = start(tmp_path, mlflow=True, experiment="key", resume=True)
    log.finish(SUMMARY, CLIENTS)
    (found,) = client.search_runs([experiment])
    assert (found.info.run_id, found.info.status) == (begun, "FINISHED") and found.data.params["n"] == "all"


def command(words: str, out: Path, uri: str, patience: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "MLFLOW_TRACKING_URI": uri, copier.PATIENCE: patience, "OMP_NUM_THREADS": "1"}
    line = [sys.executable, str(ROOT / "train.py"), *words.split(), "--out", str(out)]
    return subprocess.Popen(line, cwd=out.parent, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def test_ctrl_c_while_the_copy_is_completed(dripping: str, tmp_path: Path) -> None:
    process = command(f"--algo popularity {DATA} --quiet", tmp_path / "r", dripping, "300")
    try:
        assert eventually(lambda: (tmp_path / "r" / "summary.json").exists() or process.poll() is not None)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=BOUND)
    finally:
        process.kill()
    assert process.returncode == 130 and "Traceback" not in err, err
    said = f"fedbench: interrupted while MLflow was waited for; the run is finished, and the same flags with --resume {tmp_path / 'r'}"
    assert err.splitlines()[-1] == f"{said} complete its copy"
    assert not [path for path in (tmp_path / "r").rglob("*") if path.name == ".lock" or "round-" in path.name]


def test_a_second_ctrl_c_does_not_wait_for_mlflow(dripping: str, tmp_path: Path) -> None:
    words = f"--algo fedmf {DATA} --kernel off --dim 4 --rounds 100000 --eval-every 100000 --quiet"
    process = command(words, tmp_path / "r", dripping, "300")
    try:
        assert eventually(lambda: (tmp_path / "r" / "metrics.jsonl").exists() or process.poll() is not None)
        process.send_signal(signal.SIGINT)
        assert eventually(lambda: any((tmp_path / "r").glob("checkpoint/*.json")))
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=BOUND)
    finally:
        process.kill()
    assert process.returncode == 130 and "Traceback" not in err, err
    assert "interrupted" in err.splitlines()[-1] and "resume" in err.splitlines()[-1] and "error" not in err


def test_ctrl_c_in_the_wait_of_a_finished_run(dripping: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(tmp_path).finish(FINISHED, CLIENTS)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", dripping)
    threading.Timer(1.0, lambda: signal.raise_signal(signal.SIGINT)).start()
    with pytest.raises(Interrupted, match="is finished"):
        run_log.complete_copy(tmp_path, "toy")


FULL = """
import resource, sys, time
from pathlib import Path
from fedbench.tracking.run_log import RunLog, setup_logging
setup_logging(quiet=True, debug=False)
log = RunLog.open(Path(sys.argv[1]), {"algo": "toy"}, {}, True, "full", "full")
resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
while log.run_id is None:
    time.sleep(0.01)
time.sleep(0.5)
log.end("FAILED")
"""


def test_a_full_disk_shows_no_traceback_of_a_thread(client: Any, database: str, tmp_path: Path) -> None:
    run = run_child(FULL, str(tmp_path / "r"), cwd=tmp_path, database=database)
    _, err = run.communicate(timeout=300)
    assert (run.returncode, err) == (0, "")
