"""A run's outputs: its folder, which is complete by itself, and its copy in MLflow."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import math
import os
import platform
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from fedbench import files
from fedbench.errors import DISK_FULL, Interrupted, UsageError
from fedbench.files import read_json, write_json, write_text
from fedbench.text import Shown
from fedbench.tracking import mirror_process
from fedbench.tracking.copier import Mirror

if TYPE_CHECKING:
    import pandas as pd

logger = logging.getLogger("fedbench")

PACKAGES = ("torch", "numpy", "numba", "mlflow", "cvxpy")
CHILD_OF = "mlflow.parentRunId"
"""the tag by which MLflow knows the parent of a run; the parent comes from the environment: FEDBENCH_PARENT_RUN"""
FILES = ("summary.json", "config.json", "metrics.jsonl", "per_client.parquet", "figures", "plugin.py")
"""what of a run's folder MLflow keeps as artifacts"""
ALONE = ("refit/", "new_user/", "new_item/")
"""parts of the summary that keep their own names in MLflow"""
FLOORS = ("popularity", "chance", "user_item_mean", "global_mean")
"""references in the summary: equal for every method, so MLflow gets the main metrics as tags, and no charts of them"""
FLOOR_METRICS = ("hr_10", "ndcg_10", "rmse")
CONSTANTS = (*(f"{name}." for name in FLOORS), "protocol_fields.", "schema", "clients", "items", "new_item.clients", "new_item.items")
"""numbers of the summary that do not depend on the method, by name or by prefix: no metrics in MLflow"""
FORM, CLOCK = "%(asctime)s %(message)s", "%H:%M:%S"
"""a line on the console"""
FLUSH_SECONDS = 5.0
"""how often rounds reach MLflow"""


def setup_logging(quiet: bool, debug: bool) -> None:
    """Log to the console, in colour: INFO, WARNING with `quiet`, DEBUG with `debug`."""
    logger.handlers = [handler for handler in logger.handlers if isinstance(handler, logging.FileHandler)]
    level = logging.DEBUG if debug else logging.WARNING if quiet else logging.INFO
    try:
        import coloredlogs
    except ImportError:  # it needs `pipes`, which Python 3.13 no longer has
        plain_handler = logging.StreamHandler()
        plain_handler.setLevel(level)
        plain_handler.setFormatter(logging.Formatter(FORM, CLOCK))
        logger.addHandler(plain_handler)
    else:
        coloredlogs.install(level=level, logger=logger, fmt=FORM, datefmt=CLOCK, reconfigure=False)
    for handler in logger.handlers:
        handler.addFilter(Shown())
    logging.raiseExceptions = debug  # a log that cannot be written, on a full disk, is no reason for a traceback
    # log.txt keeps INFO however quiet the console is
    logger.setLevel(logging.DEBUG if debug else logging.INFO)


class _LogFile(logging.FileHandler):
    """log.txt, appended to; a symbolic link in its place is refused."""

    def _open(self) -> TextIOWrapper:
        return TextIOWrapper(files.appended(Path(self.baseFilename)), encoding="utf-8", write_through=True)


def attach_log_file(out: Path) -> logging.Handler:
    """Write all that "fedbench" logs to out/log.txt too; the caller removes the handler."""
    handler = _LogFile(out / "log.txt", encoding="utf-8")
    handler.addFilter(Shown())
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    return handler


class RunLog:
    """Everything one run writes. Made by `open`, ended by `finish` or `end`."""

    def __init__(self, out: Path, config: dict[str, Any], env: dict[str, Any], log_file: logging.Handler, copy: Mirror | None):
        self.out = out
        self.tracking_seconds = 0.0
        """seconds that the run spent on MLflow: starting its process, and waiting for it at the end"""
        self._config = config
        self._env = env
        self._log_file: logging.Handler | None = log_file
        self._mirror = copy
        self._lines: list[dict[str, Any]] = []
        self._metrics: BinaryIO | None = None

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
            if not resume and (out / "config.json").exists():
                raise FileExistsError
            write_json(out / "config.json", config)
            before: dict[str, Any] = read_json(out / "env.json") if resume else {}
            plugin = {key: value for key, value in tags.items() if key.startswith("plugin_")}
            kept: dict[str, Any] = {key: before[key] for key in ("mlflow_run_id", "run_key") if is_id(before.get(key))}
            # the key is on disk before MLflow hears of the run, so that one killed at any moment finds its copy again
            env: dict[str, Any] = {**environment(), **plugin, "process": mirror_process.who(), "run_key": uuid.uuid4().hex, **kept}
            write_json(out / "env.json", env)
            log_file = attach_log_file(out)
        except FileExistsError:
            if out.is_dir():
                raise UsageError(f"--out {out} already holds a run; choose another or use --resume") from None
            raise UsageError(f"--out {out} is a file; choose a folder") from None
        except OSError as error:
            if error.errno in DISK_FULL:
                raise
            raise UsageError(f"--out {out} cannot be written ({error.strerror}); choose another folder") from None

        log = cls(out, config, env, log_file, None)
        if mlflow:
            started = time.perf_counter()
            log._mirror = Mirror(order_of(out, config, env, tags, run_name, experiment), lambda run_id: log._note(mlflow_run_id=run_id))
            log.tracking_seconds = time.perf_counter() - started
        return log

    @property
    def run_id(self) -> str | None:
        """The MLflow run, if there is one and it is known by now."""
        return self._mirror.run_id if self._mirror else None

    @property
    def link(self) -> str | None:
        """The address that shows this experiment's charts in the MLflow UI."""
        return self._mirror.link if self._mirror else None

    def resume(self, after: int) -> None:
        """The rounds up to `after` are done; lines of later ones in metrics.jsonl are dropped."""
        self._start_metrics(after + 1)

    def rounds(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, with those from before the run was resumed."""
        return mirror_process.read_lines(self.out / "metrics.jsonl")

    def round(self, metrics: dict[str, float]) -> None:
        """One line of metrics.jsonl. `metrics` has "round"."""
        line = plain(metrics)
        file = self._metrics or self._start_metrics(line["round"])
        self._lines.append(line)
        file.write(json.dumps(line).encode() + b"\n")
        file.flush()  # the mirror process reads it, and a killed run keeps it

    def keep(self, name: str, content: bytes) -> None:
        """Write a file of the run's folder."""
        with files.replacing(self.out / name) as file:
            file.write(content)

    def refit_round(self, metrics: dict[str, float]) -> None:
        """One line of refit.jsonl; in MLflow its names are prefixed with refit/."""
        line = plain(metrics)
        path = self.out / "refit.jsonl"
        # a run that resumes begins its refit anew, and so its file
        with files.created(path) if line["round"] == 1 else files.appended(path) as file:
            file.write(json.dumps(line).encode() + b"\n")

    def finish(self, summary: dict[str, Any], per_client: pd.DataFrame, tidy: Callable[[], None] = lambda: None) -> None:
        """Write per_client.parquet, the figures and, last and atomically, summary.json; tidy; then complete the MLflow run."""
        if self._metrics is None:
            self._start_metrics(None)
        summary = plain(summary)
        with files.replacing(self.out / "per_client.parquet") as file:
            per_client.to_parquet(file, index=False)
        self._draw(summary, per_client)
        write_json(self.out / "summary.json", summary)  # last, for its presence means that the run is finished
        tidy()
        if self._mirror:
            try:
                self._end_mirror("FINISHED", final_metrics(summary, self._config), [self.out / name for name in FILES])
            except KeyboardInterrupt:
                self._close()
                why = "interrupted while MLflow was waited for; the run is finished"
                raise Interrupted(f"{why}, and the same flags with --resume {self.out} complete its copy") from None
            if self._mirror.whole:
                self._note(mlflow_copied=self._mirror.place)
            if self.link:
                logger.info(
                    "charts: %s%s", self.link, " (start the UI with `make ui`)" if self.link.startswith(mirror_process.LOCAL_UI) else ""
                )
        self._close()

    def end(self, status: str) -> None:
        """Close a run that did not finish: FAILED or KILLED. Does nothing after `finish`."""
        if self._log_file is None:
            return
        try:
            if self._mirror and not self._mirror.ended:
                self._end_mirror(status, {}, [])
        finally:
            self._close()

    def _end_mirror(self, status: str, final: dict[str, float | str], files: list[Path]) -> None:
        assert self._mirror is not None
        started = time.perf_counter()
        self._mirror.end(status, final, files)
        self.tracking_seconds += time.perf_counter() - started
        logger.debug("MLflow took %.2f s of the run", self.tracking_seconds)

    def _note(self, **facts: str) -> None:
        """Record facts about the copy in env.json. A full disk is ignored: the run will report it, and the copy is found without them."""
        self._env |= facts
        with suppress(OSError):
            write_json(self.out / "env.json", self._env)

    def _start_metrics(self, first: int | None) -> BinaryIO:
        """Open metrics.jsonl. A resumed run keeps the rounds before its first, and its old summary no longer holds."""
        path = self.out / "metrics.jsonl"
        before = [] if first == 1 else mirror_process.read_lines(path)
        self._lines = [line for line in before if first is None or line["round"] < first]
        if first is not None:
            (self.out / "summary.json").unlink(missing_ok=True)
            write_text(path, "".join(json.dumps(line) + "\n" for line in self._lines))
        self._metrics = files.appended(path)
        return self._metrics

    def _draw(self, summary: dict[str, Any], per_client: pd.DataFrame) -> None:
        """figures/*.png. A figure that cannot be drawn must not cost a run its summary."""
        from fedbench.tracking import figures

        leaky = bool(summary.get("leaky"))
        title = " · ".join(str(summary[key]) for key in ("algo", "dataset", "protocol") if key in summary)
        if summary.get("protocol_fields", {}).get("fold") is not None:
            title += f" · fold {summary['protocol_fields']['fold']}"
        if "seed" in summary:
            title += f" · seed {summary['seed']}"
        candidates = int(summary.get("protocol_fields", {}).get("eval_negatives", 99)) + 1
        try:
            folder = files.make_folder(self.out / "figures")
            figures.save(figures.convergence(self._lines, leaky, title, summary.get("best_round"), candidates), folder / "convergence.png")
            figures.save(figures.distribution(per_client, leaky, title, candidates), folder / "distribution.png")
        except Exception as error:
            logger.warning("figures could not be drawn (%s); all the numbers are in %s", mirror_process.one_line(error), self.out)

    def _close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
        if self._log_file is not None:
            logger.removeHandler(self._log_file)
            self._log_file.close()
            self._log_file = None


class NoLog(RunLog):
    """A run log that writes nothing: that of every worker but the first."""

    def __init__(self) -> None:
        self._mirror = None

    @classmethod
    def open(cls, *_: Any, **__: Any) -> NoLog:
        return cls()

    def rounds(self) -> list[dict[str, Any]]:
        return []

    def resume(self, after: int) -> None: ...

    def round(self, metrics: dict[str, float]) -> None: ...

    def keep(self, name: str, content: bytes) -> None: ...

    def refit_round(self, metrics: dict[str, float]) -> None: ...

    def finish(self, summary: dict[str, Any], per_client: pd.DataFrame, tidy: Callable[[], None] = lambda: None) -> None: ...

    def end(self, status: str) -> None: ...


def mlflow_run_of(out: Path) -> str | None:
    """The id of a run's copy in MLflow, as its folder knows it."""
    found = read_json(out / "env.json").get("mlflow_run_id")
    return found if is_id(found) else None


def is_id(value: object) -> bool:
    """Whether a value of env.json can be what MLflow or fedbench calls a run."""
    return isinstance(value, str) and value.isalnum()


def order_of(
    out: Path, config: dict[str, Any], env: dict[str, Any], tags: dict[str, str], run_name: str, experiment: str
) -> dict[str, Any]:
    """What the mirror process needs to copy a run, see mirror_process.Copy."""
    commit, earlier, parent = env.get("git_commit"), env.get("mlflow_run_id"), os.environ.get("FEDBENCH_PARENT_RUN")
    known = {"kind": "run", "out": str(out), **mirror_process.SOURCE, "run_key": env.get("run_key"), "resumes": earlier, CHILD_OF: parent}
    if commit:
        known |= {"git_commit": commit, "mlflow.source.git.commit": commit, "git_dirty": str(env["git_dirty"]).lower()}
    return {
        "out": str(out.absolute()),
        "experiment": experiment,
        "run_name": os.environ.get("MLFLOW_RUN_NAME") or run_name,
        "params": params_of(config | {key: tags[key] for key in ("algo",) if key in tags}),  # a plug-in by its name, not its path
        "tags": {**{key: value for key, value in known.items() if value}, **tags, **mirror_process.who()},
        "resumes": earlier,
        "every": FLUSH_SECONDS,
    }


def finished_order(out: Path, experiment: str, run_name: str = "", **tags: str) -> dict[str, Any]:
    """What the mirror process needs to copy a finished run, read from its folder."""
    config, summary, env = (read_json(out / name) for name in ("config.json", "summary.json", "env.json"))
    fields = summary.get("protocol_fields", {})
    fold = "" if fields.get("fold") is None else f"-f{fields['fold']}"
    usual = f"{summary['algo']}-{summary['dataset']}-{summary['protocol']}-s{summary['seed']}{fold}"
    known = {key: str(summary.get(key)) for key in ("protocol_fingerprint", "data_checksum", "dataset")}
    known |= {"leaky": "LEAKY" if summary["leaky"] else "no", "split": str(fields.get("split")), "algo": str(summary["algo"])}
    known |= {"control": str(summary["control"].get("what"))} if "control" in summary else {}
    known |= {key: str(summary[key]) for key in ("plugin_sha256", "plugin_package") if summary.get(key)}
    order = order_of(out, config, env, {**known, **tags}, usual, experiment)
    return {**order, "run_name": run_name} if run_name else order


def copy_again(out: Path, experiment: str, parent: str, run_name: str) -> None:
    """Copy a finished run's folder to MLflow, or what is missing there."""
    copy = mirror_process.Copy(finished_order(out, experiment, run_name, **{CHILD_OF: parent}))
    copy.end("FINISHED", *_results(out))
    write_json(
        out / "env.json", {**read_json(out / "env.json"), "mlflow_run_id": copy.run_id, "mlflow_copied": mirror_process.place(experiment)}
    )


def complete_copy(out: Path, experiment: str) -> str | None:
    """Copy to MLflow what it lacks of a finished run, waiting as at a run's end; returns the charts' address, if known."""
    # it is whole in this very store and experiment
    if read_json(out / "env.json").get("mlflow_copied") == mirror_process.place(experiment):
        return None

    def note(run_id: str) -> None:
        write_json(out / "env.json", {**read_json(out / "env.json"), "mlflow_run_id": run_id})

    copy = Mirror(finished_order(out, experiment), note)
    final, files = _results(out)
    try:
        copy.end("FINISHED", final, [Path(file) for file in files])
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted while MLflow was waited for; the run in {out} is finished") from None
    if copy.whole:
        write_json(out / "env.json", {**read_json(out / "env.json"), "mlflow_copied": copy.place})
    return copy.link


def _results(out: Path) -> tuple[dict[str, float | str], list[str]]:
    """A finished run's final metrics, and its files that MLflow keeps."""
    final = final_metrics(read_json(out / "summary.json"), read_json(out / "config.json"))
    return final, [str(out / name) for name in FILES]


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
        params[mirror_process.name_of(key)] = words.get(key, "none") if value is None else text
    return params


def final_metrics(summary: dict[str, Any], config: dict[str, Any]) -> dict[str, float | str]:
    """The summary's numbers by MLflow name: best/val/..., best/test/..., refit/..., new_user/..., new_item/..., and summary/....

    What the config holds is a param already. Texts become tags: what popularity, chance and the means get.
    """
    metrics: dict[str, float | str] = {}
    for key, value in flat({key: value for key, value in summary.items() if config.get(key) != value}).items():
        name = key.replace(".", "/")
        if isinstance(value, int | float) and not isinstance(value, bool) and not _constant(key):
            place = "best/" if name.startswith(("val/", "test/")) else "" if name.startswith(ALONE) else "summary/"
            metrics[place + name] = value
    floors = {f"{floor}.{name}": summary.get(floor, {}).get(name) for floor in FLOORS for name in FLOOR_METRICS}
    metrics |= {key: f"{value:.4f}" for key, value in floors.items() if value is not None}
    if summary.get("rounds") and "client_visits" in summary:
        # where n is "all" this is the number that a chart can have on its axis
        metrics["summary/cohort"] = summary["client_visits"] / summary["rounds"]
    return metrics


def _constant(key: str) -> bool:
    return any(key.startswith(name) if name.endswith(".") else key == name for name in CONSTANTS)


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
    """The value in JSON's types: numpy scalars as numbers, paths as text, null for what is not finite."""
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
