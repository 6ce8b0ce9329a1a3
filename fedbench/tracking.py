"""A run's outputs: the folder that suffices alone, and its mirror in MLflow."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import math
import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO
from urllib.parse import urlsplit

import coloredlogs

from fedbench.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd
    from mlflow.tracking import MlflowClient

logger = logging.getLogger("fedbench")

PACKAGES = ("torch", "numpy", "numba", "mlflow", "cvxpy")
LOCAL_UI = "http://127.0.0.1:5000"
CHARTS = "#/experiments/{}/runs?workflowType=machine_learning&compareRunsMode=CHART"
FLUSH_SECONDS, FLUSH_SHARE = 5.0, 0.01
"""rounds are sent to MLflow this often, or less often where sending would take more than this share of the run"""
BATCH_METRICS, BATCH_PARAMS, PARAM_LENGTH, TAG_LENGTH = 1000, 100, 6000, 8000
"""what MLflow takes in one log_batch call, and the longest value of a param and of a tag"""


def setup_logging(quiet: bool, debug: bool) -> None:
    """Colour on the console: INFO, WARNING with `quiet`, DEBUG with `debug`."""
    logger.handlers = [handler for handler in logger.handlers if isinstance(handler, logging.FileHandler)]
    level = logging.DEBUG if debug else logging.WARNING if quiet else logging.INFO
    coloredlogs.install(level=level, logger=logger, fmt="%(asctime)s %(message)s", datefmt="%H:%M:%S", reconfigure=False)
    # log.txt keeps INFO however quiet the console is
    logger.setLevel(logging.DEBUG if debug else logging.INFO)


def attach_log_file(out: Path) -> logging.Handler:
    """Write all that "fedbench" logs to out/log.txt too; the caller removes the handler."""
    handler = logging.FileHandler(out / "log.txt", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    return handler


class RunLog:
    """Everything one run writes. Made by `open`, ended by `finish` or `end`."""

    def __init__(self, out: Path, config: dict[str, Any], env: dict[str, Any], log_file: logging.Handler, mirror: Mirror | None):
        self.out = out
        self.tracking_seconds = 0.0
        self._config = config
        self._env = env
        self._log_file: logging.Handler | None = log_file
        self._mirror = mirror
        self._lines: list[dict[str, Any]] = []
        self._metrics: TextIO | None = None

    @classmethod
    def open(
        cls,
        out: Path,
        config: dict[str, Any],
        tags: dict[str, str],
        mlflow: bool,
        run_name: str,
        experiment: str,
        resume: bool = False,
    ) -> RunLog:
        """Claim the folder, write config.json and env.json, start log.txt and the MLflow run."""
        config = plain(config)
        try:
            out.mkdir(parents=True, exist_ok=True)
            with open(out / "config.json", "w" if resume else "x", encoding="utf-8") as file:
                file.write(_json(config))
            earlier = _read_json(out / "env.json").get("mlflow_run_id") if resume else None
            env = environment()
            _write_json(out / "env.json", env)
            log_file = attach_log_file(out)
        except FileExistsError:
            if out.is_dir():
                raise UsageError(f"--out {out} already holds a run; choose another or use --resume") from None
            raise UsageError(f"--out {out} is a file; choose a folder") from None
        except OSError as error:
            raise UsageError(f"--out {out} cannot be written ({error.strerror}); choose another folder") from None

        commit = {"git_commit": env["git_commit"], "mlflow.source.git.commit": env["git_commit"]} if env["git_commit"] else {}
        dirty = {"git_dirty": str(env["git_dirty"]).lower()} if commit else {}
        resumed = {"resumes": earlier} if earlier else {}
        all_tags = {"kind": "run", "out": str(out), **commit, **dirty, **resumed, **tags}

        def note(run_id: str) -> None:
            _write_json(out / "env.json", {**env, "mlflow_run_id": run_id})

        return cls(out, config, env, log_file, Mirror(experiment, run_name, config, all_tags, note) if mlflow else None)

    @property
    def run_id(self) -> str | None:
        """The MLflow run, if there is one; waits until all that was logged has reached it."""
        return self._mirror.run_id if self._mirror else None

    @property
    def link(self) -> str | None:
        """The address that shows this experiment's charts in the MLflow UI."""
        return self._mirror.link if self._mirror else None

    def round(self, metrics: dict[str, float]) -> None:
        """One line of metrics.jsonl, and now and then a batch for MLflow. `metrics` has "round"."""
        started = time.perf_counter()
        line = plain(metrics)
        file = self._metrics or self._start_metrics(line["round"])
        self._lines.append(line)
        file.write(json.dumps(line) + "\n")
        file.flush()
        if self._mirror:
            self._mirror.add(line)
        self.tracking_seconds += time.perf_counter() - started

    def refit_round(self, metrics: dict[str, float]) -> None:
        """One line of refit.jsonl; in MLflow the same names under refit/."""
        started = time.perf_counter()
        line = plain(metrics)
        with (self.out / "refit.jsonl").open("w" if line["round"] == 1 else "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if self._mirror:
            self._mirror.add({"round": line["round"], **{f"refit/{key}": value for key, value in line.items() if key != "round"}})
        self.tracking_seconds += time.perf_counter() - started

    def finish(self, summary: dict[str, Any], per_client: pd.DataFrame) -> None:
        """Write per_client.parquet, the figures and, last and atomically, summary.json; then complete the MLflow run."""
        if self._metrics is None:
            self._start_metrics(None)
        summary = plain(summary)
        per_client.to_parquet(self.out / "per_client.parquet", index=False)
        self._draw(summary, per_client)
        _write_json(self.out / "summary.json", summary)
        if self._mirror:
            # what the config holds is a param already
            final = final_metrics({key: value for key, value in summary.items() if self._config.get(key) != value})
            step = self._lines[-1]["round"] if self._lines else 0
            files = [self.out / name for name in ("summary.json", "config.json", "per_client.parquet", "figures")]
            self._mirror.finish(final, step, files)
            if self.link:
                logger.info("charts: %s%s", self.link, " (start the UI with `make ui`)" if self.link.startswith(LOCAL_UI) else "")
        self._close()

    def end(self, status: str) -> None:
        """Close a run that did not finish: FAILED or KILLED. Does nothing after `finish`."""
        if self._log_file is None:
            return
        if self._mirror:
            self._mirror.end(status)
        self._close()

    def _start_metrics(self, first: int | None) -> TextIO:
        """Open metrics.jsonl. A resumed run keeps the rounds before its first, and its old summary no longer holds."""
        path = self.out / "metrics.jsonl"
        self._lines = [line for line in read_metrics(path) if first is None or line["round"] < first]
        if first is not None:
            (self.out / "summary.json").unlink(missing_ok=True)
            _write(path, "".join(json.dumps(line) + "\n" for line in self._lines))
        if self._mirror:
            for line in self._lines:
                self._mirror.add(line, flush=False)
        self._metrics = path.open("a", encoding="utf-8")
        return self._metrics

    def _draw(self, summary: dict[str, Any], per_client: pd.DataFrame) -> None:
        """figures/*.png. A figure that cannot be drawn must not cost a run its summary."""
        from fedbench import figures

        leaky = bool(summary.get("leaky"))
        title = " · ".join(str(summary[key]) for key in ("algo", "dataset", "protocol") if key in summary)
        if "seed" in summary:
            title += f" · seed {summary['seed']}"
        candidates = int(summary.get("protocol_fields", {}).get("eval_negatives", 99)) + 1
        (self.out / "figures").mkdir(exist_ok=True)
        try:
            convergence = figures.convergence(self._lines, leaky, title, summary.get("best_round"), candidates)
            convergence.savefig(self.out / "figures" / "convergence.png")
            figures.distribution(per_client, leaky, title, candidates).savefig(self.out / "figures" / "distribution.png")
        except Exception as error:
            logger.warning("figures could not be drawn (%s); all the numbers are in %s", _one_line(error), self.out)

    def _close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
        if self._log_file is not None:
            logger.removeHandler(self._log_file)
            self._log_file.close()
            self._log_file = None


class Mirror:
    """The MLflow copy of a run, made by one thread beside it: importing MLflow alone takes seconds that the run need not wait for.

    The first failure ends it for the rest of the run: the folder is what counts.
    """

    def __init__(self, experiment: str, run_name: str, config: dict[str, Any], tags: dict[str, str], note: Callable[[str], None]):
        self._run_id: str | None = None
        self._link: str | None = None
        self._out = tags["out"]
        self._client: MlflowClient | None = None
        self._given_up = False
        self._waiting: list[tuple[int, dict[str, Any]]] = []
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mlflow")
        self._last = self._thread.submit(self._guarded, self._start, experiment, run_name, config, tags, note)
        self._due = time.monotonic() + FLUSH_SECONDS

    @property
    def run_id(self) -> str | None:
        self._last.result()
        return self._run_id

    @property
    def link(self) -> str | None:
        self._last.result()
        return self._link

    def _start(self, experiment: str, run_name: str, config: dict[str, Any], tags: dict[str, str], note: Callable[[str], None]) -> None:
        from mlflow.entities import Param

        client, experiment_id = _open_store(experiment)
        _mark_stale(client, experiment_id)
        who = {"host": socket.gethostname(), "pid": str(os.getpid()), "pid_start": _started(os.getpid())}
        all_tags = {key: str(value)[:TAG_LENGTH] for key, value in {**tags, **who}.items()}
        run_id = client.create_run(experiment_id, tags=all_tags, run_name=run_name).info.run_id
        self._run_id, self._client = run_id, client
        note(run_id)
        params = [Param(key, value[:PARAM_LENGTH]) for key, value in params_of(config).items()]
        for start in range(0, len(params), BATCH_PARAMS):
            client.log_batch(run_id, params=params[start : start + BATCH_PARAMS])
        self._link = f"{_ui_address(tracking_uri())}/{CHARTS.format(experiment_id)}"

    def add(self, line: dict[str, Any], flush: bool = True) -> None:
        """Keep a round's line for the next batch, and hand the batch over when it is due and the last one has gone."""
        if self._given_up:
            return
        self._waiting.append((int(time.time() * 1000), line))
        if flush and time.monotonic() >= self._due and self._last.done():
            self._submit(self._flush, self._take())

    def finish(self, metrics: dict[str, float], step: int, files: list[Path]) -> None:
        """Send what waits, the final metrics and the files, and wait for it."""
        self._waiting.append((int(time.time() * 1000), {**metrics, "round": step}))
        self._submit(self._complete, self._take(), "FINISHED", files)
        self._close()

    def end(self, status: str) -> None:
        """Send what waits and mark the run."""
        self._submit(self._complete, self._take(), status, [])
        self._close()

    def _close(self) -> None:
        self._last.result()
        self._thread.shutdown()

    def _take(self) -> list[tuple[int, dict[str, Any]]]:
        taken, self._waiting = self._waiting, []
        return taken

    def _submit(self, work: Callable[..., None], *arguments: Any) -> None:
        self._last = self._thread.submit(self._guarded, work, *arguments)

    def _flush(self, lines: list[tuple[int, dict[str, Any]]]) -> None:
        from mlflow.entities import Metric

        if self._client is None or self._run_id is None:
            return
        started = time.monotonic()
        metrics = [
            Metric(_name(key), float(value), when, line["round"])
            for when, line in lines
            for key, value in line.items()
            if key != "round" and isinstance(value, int | float)
        ]
        for start in range(0, len(metrics), BATCH_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + BATCH_METRICS])
        now = time.monotonic()
        self._due = now + max(FLUSH_SECONDS, (now - started) / FLUSH_SHARE)

    def _complete(self, lines: list[tuple[int, dict[str, Any]]], status: str, files: list[Path]) -> None:
        if self._client is None or self._run_id is None:
            return
        self._flush(lines)
        # before the files: a store that takes no artifacts still has a finished run
        self._client.set_terminated(self._run_id, status)
        for file in files:
            if file.is_dir():
                self._client.log_artifacts(self._run_id, str(file), file.name)
            elif file.exists():
                self._client.log_artifact(self._run_id, str(file))

    def _guarded(self, work: Callable[..., None], *arguments: Any) -> None:
        if self._given_up:
            return
        try:
            work(*arguments)
        except Exception as error:
            self._client, self._given_up = None, True
            logger.warning("MLflow tracking given up (%s); nothing is lost: all is in %s", _one_line(error), self._out)


def mark_stale(experiment: str) -> int:
    """Mark as KILLED the RUNNING runs of this host whose process is gone; how many there were."""
    try:
        return _mark_stale(*_open_store(experiment))
    except Exception as error:
        logger.warning("MLflow: runs left RUNNING could not be marked (%s)", _one_line(error))
        return 0


def _mark_stale(client: MlflowClient, experiment_id: str) -> int:
    mine = f"attributes.status = 'RUNNING' and tags.host = '{socket.gethostname()}'"
    stale = 0
    for run in client.search_runs([experiment_id], mine, max_results=1000):
        pid = run.data.tags.get("pid", "")
        if pid.isdigit() and not _alive(int(pid), run.data.tags.get("pid_start", "")):
            client.set_terminated(run.info.run_id, "KILLED")
            stale += 1
    return stale


def _alive(pid: int, started: str) -> bool:
    if os.name == "nt":
        return True  # there, os.kill would end the process
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return _started(pid) == started


def _started(pid: int) -> str:
    """When a process began, in ticks since boot: a pid is used again, the pair is not. Empty where there is no /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    # the second field is the command in brackets and can hold blanks; the start time is the 22nd
    return stat.rpartition(")")[2].split()[19]


def tracking_uri() -> str:
    """MLFLOW_TRACKING_URI, or mlflow.db in the current folder."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path.cwd() / 'mlflow.db'}"


def _open_store(experiment: str) -> tuple[MlflowClient, str]:
    """The client and the experiment's id; both are made if they are not there yet."""
    uri = tracking_uri()
    client_class = _import_client()
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


def _import_client() -> type[MlflowClient]:
    """MLflow, which takes seconds to import: without telemetry, chatter and minutes of retries."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    os.environ["DO_NOT_TRACK"] = "true"
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "3")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    from mlflow.tracking import MlflowClient

    if "MLFLOW_LOGGING_LEVEL" not in os.environ:
        for name in ("mlflow", "alembic", "urllib3.connectionpool"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    return MlflowClient


def _ui_address(uri: str) -> str:
    """Where a browser finds the UI of a store."""
    parts = urlsplit(uri)
    if parts.scheme in ("http", "https"):
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}"
    return LOCAL_UI


def params_of(config: dict[str, Any]) -> dict[str, str]:
    """The config as MLflow params: flat, all strings, with the short names n and e beside the long ones."""
    config = flat(config)
    for short, long in (("n", "clients_per_round"), ("e", "local_epochs")):
        if long in config:
            config.setdefault(short, config[long])
    words = {"clients_per_round": "all", "n": "all"}
    params = {}
    for key, value in config.items():
        text = value if isinstance(value, str) else json.dumps(value)
        params[_name(key)] = words.get(key, "none") if value is None else text
    return params


def final_metrics(summary: dict[str, Any]) -> dict[str, float]:
    """The summary's numbers by MLflow name: best/val/..., best/test/..., refit/test/..., and summary/... for all else."""
    metrics: dict[str, float] = {}
    for key, value in flat(summary).items():
        name = key.replace(".", "/")
        if isinstance(value, int | float) and not isinstance(value, bool):
            place = "best/" if name.startswith(("val/", "test/")) else "" if name.startswith("refit/") else "summary/"
            metrics[place + name] = value
    return metrics


def environment() -> dict[str, Any]:
    """What a run's numbers and speed depend on besides its config."""
    import torch

    commit, dirty = _git_state()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "packages": {name: _version(name) for name in PACKAGES},
        "git_commit": commit,
        "git_dirty": dirty,
        "command": sys.argv,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_state() -> tuple[str | None, bool | None]:
    """The commit of the checkout this code runs from and whether it has changes; (None, None) outside of one."""
    # an installed copy inside somebody else's checkout is not tracked there
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None, None
    commit, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain")
    return commit, None if changes is None else changes != ""


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def plain(value: Any) -> Any:
    """JSON types only: arrays' scalars as numbers, paths as text, and null for what is not finite."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if hasattr(value, "item"):
        return plain(value.item())
    return str(value)


def flat(nested: dict[str, Any]) -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}"""
    out: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, dict):
            out.update({f"{key}.{inner}": item for inner, item in flat(value).items()})
        else:
            out[key] = value
    return out


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; a last line that a kill cut short is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return {}


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def _write_json(path: Path, value: Any) -> None:
    _write(path, _json(value))


def _write(path: Path, text: str) -> None:
    """All of it or nothing, also when the process is killed."""
    part = path.with_name(path.name + ".part")
    with open(part, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _name(key: str) -> str:
    """A key as MLflow takes it."""
    return re.sub(r"[^\w./ -]", "_", key)


def _one_line(error: Exception) -> str:
    """An error's first line, shortened, without a password that its address may hold."""
    text = (str(error).splitlines() or [""])[0] or type(error).__name__
    text = re.sub(r"//[^/@\s]+@", "//", text)
    return text if len(text) <= 200 else text[:199] + "…"
