"""The MLflow copy of a run, made by a process of its own: `python -m fedbench.tracking.mirror_process`, started by `copier.Mirror`.

Importing MLflow and making its database take seconds of a core, and a run must not wait for them. So this process reads what the run
writes anyway (metrics.jsonl) and gets the rest in lines of JSON on standard input: first what to copy, last how the run ended.
It answers in lines of JSON. If its input ends without that last line, the run was killed, and the copy is marked KILLED.

For many runs `python -m fedbench.tracking.mirror_process SOCKET` imports MLflow once: each run that connects there has a
process forked for its copy, which does not depend on the others. It ends with its standard input.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import queue
import re
import select
import signal
import socket
import sys
import threading
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO
from urllib.parse import urlsplit

from fedbench import files
from fedbench.errors import DataError, FedbenchError, UsageError
from fedbench.locks import alone
from fedbench.text import is_number

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

LOCAL_UI = "http://127.0.0.1:5000"
CHARTS = "#/experiments/{}/runs?workflowType=machine_learning&compareRunsMode=CHART"
BATCH_METRICS, BATCH_PARAMS, PARAM_LENGTH, TAG_LENGTH = 1000, 100, 6000, 8000
"""MLflow's limits: metrics and params in one log_batch call, and the length of a param and of a tag"""
ROUNDS = {"metrics.jsonl": "", "refit.jsonl": "refit/"}
"""files with a line a round, and what their names begin with in MLflow"""
FINAL = ("best/", "summary/", "refit/test/", "new_user/", "new_item/")
"""metrics of a whole run, not of a round; logged at step 0, for the UI draws bars only of metrics without a later step"""
SOURCE = {"mlflow.source.name": "train.py", "mlflow.source.type": "LOCAL"}
DIGEST_LENGTH = 32
"""digits of a data checksum that MLflow keeps: it takes 36"""
LOCK = ".mlflow-lock"
"""held in a run's folder by the one process that copies it"""
GONE: dict[str, Any] = {"status": "KILLED", "final": {}, "files": []}
"""stands for the last line of a run that was killed and sent none"""


class Copy:
    """One MLflow run: created or, after an interruption, resumed."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.out = Path(order["out"])
        self.client, experiment_id = open_store(order["experiment"])
        from mlflow.entities import Param

        mark_stale(self.client, experiment_id)
        self.link = f"{ui_address(tracking_uri())}/{CHARTS.format(experiment_id)}"
        self.sent, self.complete = dict.fromkeys(ROUNDS, 0), False
        self._waiting: list[tuple[int, int, dict[str, float]]] = []
        tags = {key: str(value)[:TAG_LENGTH] for key, value in order["tags"].items()}
        earlier = self._earlier(order["resumes"], tags.get("run_key"), experiment_id)
        there: dict[str, str] = {}
        if earlier is not None:
            self.run_id, there = earlier.info.run_id, earlier.data.params
            self.client.update_run(self.run_id, status="RUNNING")
            for key in ("host", "pid", "pid_start"):
                self.client.set_tag(self.run_id, key, tags[key])
        else:
            self.run_id = self.client.create_run(experiment_id, tags=tags, run_name=order["run_name"]).info.run_id
        params = [Param(name_of(key), value[:PARAM_LENGTH]) for key, value in order["params"].items() if name_of(key) not in there]
        for start in range(0, len(params), BATCH_PARAMS):
            self.client.log_batch(self.run_id, params=params[start : start + BATCH_PARAMS])
        if earlier is None or not (earlier.inputs and earlier.inputs.dataset_inputs):
            self._name_data(tags)

    def _name_data(self, tags: dict[str, str]) -> None:
        """Log what the run was trained on, which the UI shows under "Datasets"."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        if tags.get("dataset") and tags.get("data_checksum"):
            source = json.dumps({"uri": tags.get("data_source", "unknown")})
            data = Dataset(tags["dataset"], tags["data_checksum"][:DIGEST_LENGTH], "fedbench", source)
            self.client.log_inputs(self.run_id, [DatasetInput(data, [InputTag("mlflow.data.context", "training")])])

    def _earlier(self, run_id: str | None, key: str | None, experiment_id: str) -> Run | None:
        """The MLflow run to resume, if this store has it, found by its id or by the key in its folder; notes which rounds it holds."""
        from mlflow.exceptions import MlflowException

        run = None
        with suppress(MlflowException):
            run = self.client.get_run(run_id) if run_id else None
        if run and (run.info.experiment_id != experiment_id or run.info.lifecycle_stage != "active"):
            run = None
        if run is None and key:
            run = next(iter(self.client.search_runs([experiment_id], f"tags.run_key = '{key}'", max_results=1)), None)
        if run is None:
            return None
        for name in run.data.metrics:
            if not name.startswith(FINAL):
                file = "refit.jsonl" if name.startswith("refit/") else "metrics.jsonl"
                points = self.client.get_metric_history(run.info.run_id, name)
                self.sent[file] = max(self.sent[file], *(point.step for point in points))
        # they came in one batch: all of them are there or none
        self.complete = any(name.startswith(FINAL) for name in run.data.metrics)
        return run

    def flush(self) -> None:
        """Send the rounds that the folder holds and MLflow does not."""
        for name, prefix in ROUNDS.items():
            for line in read_lines(self.out / name):
                if line["round"] > self.sent[name]:
                    self._add(line["round"], line, prefix)
                    self.sent[name] = line["round"]
        self._send()

    def _add(self, step: int, line: dict[str, Any], prefix: str = "") -> None:
        numbers = {name_of(prefix + key): float(value) for key, value in line.items() if key != "round" and isinstance(value, int | float)}
        if sum(len(row) for *_, row in self._waiting) + len(numbers) > BATCH_METRICS:
            self._send()
        self._waiting.append((int(time.time() * 1000), step, numbers))

    def _send(self) -> None:
        """One batch; a round is never cut in two, so that MLflow has all of it or nothing."""
        from mlflow.entities import Metric

        if self._waiting:
            metrics = [Metric(key, value, when, step) for when, step, row in self._waiting for key, value in row.items()]
            self.client.log_batch(self.run_id, metrics=metrics)
            self._waiting = []

    def end(self, status: str, final: dict[str, float | str], files: list[str]) -> None:
        """final: numbers become metrics, texts become tags."""
        from mlflow.entities import RunTag

        self.flush()
        if final and not self.complete:
            # the metrics last: where they are there, nothing is missing
            self.client.log_batch(self.run_id, tags=[RunTag(key, text) for key, text in final.items() if isinstance(text, str)])
            self._add(0, final)
            self._send()
        # before the files: a store that takes no artifacts still has a finished run
        self.client.set_terminated(self.run_id, status)
        for file in map(Path, files):
            if file.is_dir():
                self.client.log_artifacts(self.run_id, str(file), file.name)
            elif file.exists():
                self.client.log_artifact(self.run_id, str(file))


def main() -> None:
    if hasattr(os, "nice"):
        os.nice(10)
    if len(sys.argv) > 1 and not serve(sys.argv[1]):
        return
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is no answer
    follow(answers)


def serve(address: str) -> bool:
    """Accept runs. Returns True in a forked process for each run, with the run as its standard input and output; False at the end."""
    import_client()
    importlib.import_module("mlflow.store.tracking.sqlalchemy_store")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a copy ended
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(address)
        door.listen(64)
        while door in select.select([door, sys.stdin], [], [])[0]:
            run, _ = door.accept()
            with run:
                if os.fork() == 0:
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    os.setsid()
                    os.dup2(run.fileno(), 0)
                    os.dup2(run.fileno(), 1)
                    return True
    return False


def follow(answers: TextIO) -> None:
    """Copy one run, from the first line on standard input to the last."""
    order = json.loads(sys.stdin.readline())

    def say(**answer: Any) -> None:
        with suppress(BrokenPipeError):
            print(json.dumps(answer), file=answers, flush=True)

    say(pid=os.getpid(), pid_start=started(os.getpid()))
    words: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_listen, args=(words, order["patience"]), daemon=True).start()
    try:
        # the copy of a run that was killed may still be sending what the resumed run would send again
        with alone(Path(order["out"]) / LOCK, patience=60):
            if not words.empty() and words.queue[0] is GONE and _replaced(order):
                return
            copy = Copy(order)
            say(run_id=copy.run_id, link=copy.link)
            word: dict[str, Any] = {}
            while not word:
                try:
                    word = words.get(timeout=order["every"])
                except queue.Empty:
                    copy.flush()
            copy.end(**word)
        say(whole=True)
    except Exception as error:
        say(failure=one_line(error))


def _listen(words: queue.Queue[dict[str, Any]], patience: float) -> None:
    last = sys.stdin.readline()
    words.put(json.loads(last) if last else GONE)
    # the run waits for as long, and ends this process then; after a kill nobody would
    time.sleep(patience + 5)
    os._exit(1)


def _replaced(order: dict[str, Any]) -> bool:
    """Whether the run ended before its copy began and was resumed by another process, whose copy this one would disturb."""
    try:
        now = json.loads((Path(order["out"]) / "env.json").read_text(encoding="utf-8"))["process"]
    except (OSError, ValueError, KeyError):
        return False
    return any(now.get(key) != order["tags"][key] for key in ("host", "pid", "pid_start"))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, one a round; a last line that is not whole yet is left out. DataError names a line that is none."""
    try:
        *lines, _ = files.read_bytes(path).split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from None
    found = []
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line)
            numbers = all(value is None or is_number(value) for value in values.values())
            if not numbers or type(values["round"]) is not int or not 0 < values["round"] < 2**53:
                raise ValueError("a round's numbers belong there")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise DataError(f"{path}, line {number}: not the line of a round ({files.reason(error)})") from None
        found.append(values)
    return found


# ---- the store -------------------------------------------------------------------------------------------------------------


def tracking_uri() -> str:
    """MLFLOW_TRACKING_URI, or mlflow.db in the current folder."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path.cwd() / 'mlflow.db'}"


def missing_database(uri: str) -> Path | None:
    """The file of an SQLite store that is not there yet."""
    database = Path(uri.removeprefix("sqlite:///").partition("?")[0])
    return database if uri.startswith("sqlite:///") and not database.exists() else None


def place(experiment: str) -> str:
    """Which experiment of which store, without the passwords that its address may hold."""
    return hashlib.sha256(f"{tracking_uri()} {experiment}".encode()).hexdigest()[:16]


def refuse_folder(uri: str) -> None:
    """MLflow tries a folder that should be a database for minutes, and refuses one of files in a page of words."""
    local = urlsplit(uri).scheme in ("", "file") and uri != "databricks"
    path = Path(uri.removeprefix("sqlite:///").partition("?")[0]) if uri.startswith("sqlite:///") else None
    allowed = os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() in ("true", "1")
    if (local and not allowed) or (path and path.is_dir()):
        raise UsageError(f"MLFLOW_TRACKING_URI names a folder; give a database, such as sqlite:///mlflow.db, or a server, not {uri}")


def open_store(experiment: str) -> tuple[MlflowClient, str]:
    """The client and the experiment's id; both are made if they are not there yet."""
    uri = tracking_uri()
    refuse_folder(uri)
    client_class = import_client()
    database = Path(uri.removeprefix("sqlite:///").partition("?")[0]).absolute() if uri.startswith("sqlite:///") else None
    if database is None:
        lock: Any = nullcontext()
    else:
        from filelock import FileLock

        # two processes that create the tables of one database at once both fail
        lock = FileLock(f"{database}.lock", timeout=60)
    with lock:
        client = client_class(uri)
        found = client.get_experiment_by_name(experiment)
        if found is not None:
            return client, found.experiment_id
        artifacts = (database.parent / "mlartifacts").as_uri() if database else None
        try:
            return client, client.create_experiment(experiment, artifact_location=artifacts)
        except Exception:
            # on a server, somebody else may have made it just now
            found = client.get_experiment_by_name(experiment)
            if found is None:
                raise
            return client, found.experiment_id


def import_client() -> type[MlflowClient]:
    """MLflow, which takes seconds to import: without telemetry, chatter and minutes of retries."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    os.environ["DO_NOT_TRACK"] = "true"
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "3")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    from mlflow.tracking import MlflowClient

    if "MLFLOW_LOGGING_LEVEL" not in os.environ:
        for name in ("mlflow", "alembic", "urllib3.connectionpool"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    return MlflowClient


def mark_stale(client: MlflowClient, experiment_id: str) -> int:
    """Mark as KILLED the RUNNING runs of this host whose process is gone (a run's copy ended with it); how many there were."""
    mine = f"attributes.status = 'RUNNING' and tags.host = '{socket.gethostname()}'"
    stale = 0
    for run in client.search_runs([experiment_id], mine, max_results=1000):
        pid = run.data.tags.get("pid", "")
        if pid.isdecimal() and pid.isascii() and not alive(int(pid), run.data.tags.get("pid_start", "")):
            client.set_terminated(run.info.run_id, "KILLED")
            stale += 1
    return stale


def who() -> dict[str, str]:
    """Tags by which another process can tell whether this one still runs."""
    return {"host": socket.gethostname(), "pid": str(os.getpid()), "pid_start": started(os.getpid())}


def alive(pid: int, start: str) -> bool:
    if os.name == "nt":
        return True  # there, os.kill would end the process
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return started(pid) == start


def started(pid: int) -> str:
    """When a process began, in ticks since boot: a pid is used again, the pair is not. Empty where there is no /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    # the second field is the command in brackets and can hold blanks; the start time is the 22nd
    return stat.rpartition(")")[2].split()[19]


def finished_folders(experiment: str, scratch: Path) -> list[Path]:
    """The folders of an experiment's finished runs; where one is gone or used again, the run's artifacts, below `scratch`."""
    uri = tracking_uri()
    if database := missing_database(uri):
        raise UsageError(f"--experiment {experiment}: there is no MLflow database {database}; go where it is or set MLFLOW_TRACKING_URI")
    try:
        client = import_client()(uri)
        found = client.get_experiment_by_name(experiment)
        if found is None:
            known = ", ".join(sorted(one.name for one in client.search_experiments()))
            raise UsageError(f"--experiment {experiment}: MLflow has no such experiment; it has {known}")
        folders, token = [], None
        while True:
            page = client.search_runs([found.experiment_id], "attributes.status = 'FINISHED' and tags.kind = 'run'", page_token=token)
            for run in page:
                folder = Path(run.data.tags["out"])
                if _run_id(folder) != run.info.run_id:
                    folder = scratch / run.info.run_id
                    folder.mkdir()
                    client.download_artifacts(run.info.run_id, "", str(folder))
                    (folder / "env.json").write_text(json.dumps({"mlflow_run_id": run.info.run_id}), encoding="utf-8")
                folders.append(folder)
            token = page.token
            if not token:
                return folders
    except UsageError:
        raise
    except Exception as error:
        raise FedbenchError(f"--experiment {experiment}: MLflow cannot be read ({one_line(error)}); give the folders of the runs") from None


def _run_id(folder: Path) -> str | None:
    """The MLflow run that a folder is the original of."""
    try:
        return files.read_json(folder / "env.json").get("mlflow_run_id")
    except DataError:
        return None


def ui_address(uri: str) -> str:
    """Where a browser finds the UI of a store."""
    parts = urlsplit(uri)
    if parts.scheme in ("http", "https"):
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}"
    return LOCAL_UI


def name_of(key: str) -> str:
    """A key as MLflow takes it."""
    return re.sub(r"[^\w./ -]", "_", key)


def one_line(error: Exception) -> str:
    """An error's first line, shortened, without a password that its address may hold."""
    text = (str(error).splitlines() or [""])[0] or type(error).__name__
    text = re.sub(r"//[^/@\s]+@", "//", text)
    return text if len(text) <= 200 else text[:199] + "…"


if __name__ == "__main__":
    main()
