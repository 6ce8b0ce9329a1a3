"""Finished runs, read from their folders and sorted into what may be compared: one board a dataset and fingerprint, one row a method."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedbench import significance
from fedbench.config import NOT_HASHED
from fedbench.errors import DataError, UsageError
from fedbench.evaluate import client_metrics
from fedbench.mirror import read_lines
from fedbench.significance import bounds

SHORT = {"clients_per_round": "n", "local_epochs": "e"}
NO_SETTING = {*NOT_HASHED, "seed", "fold", "refit"}
"""keys of a config that do not make a run another method"""


@dataclass(frozen=True)
class Metric:
    """A metric of the leaderboard; its key is that of `test` in summary.json."""

    key: str
    label: str
    column: str
    """of per_client.parquet"""
    lower: bool = False
    """lower is better"""

    @property
    def sign(self) -> int:
        return -1 if self.lower else 1

    def clients(self, table: pd.DataFrame) -> np.ndarray:
        """[U] values of one run, whose mean (of ratings: weighted by how many a client has) is what `total` takes."""
        values = table[self.column].to_numpy(np.float64)
        return client_metrics(values)[self.key.removeprefix("full_")] if "rank" in self.column else np.nan_to_num(values)

    def total(self, mean: Any) -> Any:
        """The metric, from the mean over clients: RMSE is the root of the mean squared error."""
        return np.sqrt(mean) if self.key == "rmse" else mean


RANKING = (
    Metric("ndcg_10", "NDCG@10", "rank_test"),
    Metric("hr_10", "HR@10", "rank_test"),
    Metric("mrr", "MRR", "rank_test"),
    Metric("full_ndcg_10", "full NDCG@10", "full_rank_test"),
    Metric("full_hr_10", "full HR@10", "full_rank_test"),
)
RATING = (
    Metric("rmse", "RMSE", "mse_test", lower=True),
    Metric("mae", "MAE", "mae_test", lower=True),
    Metric("accuracy", "accuracy", "accuracy_test"),
)


@dataclass(frozen=True)
class Run:
    """A finished run, as its folder tells it."""

    folder: Path
    config: dict[str, Any]
    summary: dict[str, Any]
    clients: pd.DataFrame
    rounds: list[dict[str, Any]]
    when: float
    """when its summary was written"""

    @property
    def name(self) -> str:
        algo = str(self.summary["algo"])
        return Path(algo).stem if algo.endswith(".py") else algo

    @property
    def seed(self) -> int:
        return int(self.summary["seed"])


@dataclass(frozen=True)
class Method:
    """A row of the leaderboard: runs that differ in the seed alone."""

    name: str
    algo: str
    runs: list[Run]
    settings: dict[str, Any]

    def values(self, metric: Metric) -> np.ndarray:
        """[seeds, U]"""
        return np.stack([metric.clients(run.clients) for run in self.runs])

    def mean(self, *keys: str) -> float:
        """Mean over the runs of a number in summary.json; NaN where a run lacks it."""
        found = []
        for run in self.runs:
            value: Any = run.summary
            for key in keys:
                value = value.get(key) if isinstance(value, dict) else None
            found.append(np.nan if value is None else float(value))
        return float(np.mean(found))


@dataclass(frozen=True)
class Board:
    """What may stand in one table: one dataset under one fingerprint."""

    dataset: str
    fingerprint: str
    methods: list[Method]
    """best first"""
    metrics: tuple[Metric, ...]
    """the leading one first"""

    @property
    def first(self) -> Run:
        return self.methods[0].runs[0]

    @property
    def lead(self) -> Metric:
        return self.metrics[0]

    @property
    def leaky(self) -> bool:
        return bool(self.first.summary["leaky"])

    @property
    def title(self) -> str:
        return f"{self.dataset} · {self.first.summary['protocol']}"

    @property
    def users(self) -> int:
        return len(self.first.clients)

    @property
    def chance(self) -> dict[str, float]:
        return self.first.summary.get("chance") or {}

    @property
    def floor(self) -> tuple[str, dict[str, float]] | None:
        """What every method must beat, its name and its metrics."""
        return self.references[0] if self.references else None

    @property
    def references(self) -> list[tuple[str, dict[str, float]]]:
        """What stands beside the methods: the floor, and chance or the global mean."""
        named = (("popularity", "popularity"), ("user_item_mean", "user + item mean"), ("global_mean", "global mean"), ("chance", "chance"))
        return [(name, values) for key, name in named if (values := self.first.summary.get(key))]

    @cached_property
    def floor_clients(self) -> pd.DataFrame | None:
        """The same of every client under the names of a method's own columns, from any run that has it."""
        for run in self.runs:
            if "rank_popularity" in run.clients:
                own = run.clients[["rank_popularity", "full_rank_popularity"]]
                return own.set_axis(["rank_test", "full_rank_test"], axis=1)
        return next((method.runs[0].clients for method in self.methods if is_popularity(method)), None)

    @property
    def runs(self) -> list[Run]:
        return [run for method in self.methods for run in method.runs]


class Estimate(NamedTuple):
    value: float
    low: float
    high: float


class Comparison(NamedTuple):
    """A method against another on the leading metric."""

    difference: Estimate
    p: float
    """Holm-corrected over the table's comparisons with the same other"""


class Row(NamedTuple):
    method: Method
    estimates: dict[str, Estimate]
    to_best: Comparison | None
    to_floor: Comparison | None


def read_runs(folders: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """Every finished run in or below the folders, and remarks on those that were left out."""
    found: dict[Path, Path] = {}
    unfinished = set()
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"{folder}: no such folder; give folders of runs, or folders above them")
        for path in sorted(folder.rglob("config.json")):
            if (path.parent / "summary.json").exists():
                found.setdefault(path.parent.resolve(), path.parent)
            else:
                unfinished.add(path.parent.resolve())
    if not found:
        more = f" ({len(unfinished)} unfinished)" if unfinished else ""
        where = ", ".join(map(str, folders)) or "the experiment"
        raise UsageError(f"{where}: no finished run there{more}; a finished run's folder holds config.json and summary.json")
    remarks = [f"{len(unfinished)} unfinished run{'s' if len(unfinished) > 1 else ''} left out"] if unfinished else []
    return [read_run(folder) for folder in found.values()], remarks


def read_run(folder: Path) -> Run:
    """One run's folder, checked."""
    summary, settings = _read_object(folder / "summary.json"), _read_object(folder / "config.json")
    for key in ("algo", "dataset", "protocol", "protocol_fingerprint", "leaky", "seed", "test"):
        if key not in summary:
            raise DataError(f"{folder / 'summary.json'}: has no {key!r}, so it is no run's summary; run it again or leave the folder out")
    path = folder / "per_client.parquet"
    try:
        clients = pd.read_parquet(path)
        rounds = read_lines(folder / "metrics.jsonl")
    except FileNotFoundError:
        raise DataError(f"{path}: is missing; run it again or leave the folder out") from None
    except (OSError, ValueError) as error:  # pyarrow's and json's own errors are ValueErrors
        raise DataError(f"{folder}: cannot be read ({str(error).splitlines()[0]}); run it again or leave the folder out") from None
    columns = {metric.column for metric in (RANKING if "rank_test" in clients else RATING)} | {"user", "train_items"}
    if missing := sorted(columns - set(clients.columns)):
        raise DataError(f"{path}: has no column {missing[0]}; run it again or leave the folder out")
    return Run(folder, settings, summary, clients, rounds, (folder / "summary.json").stat().st_mtime)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error}); run it again or leave the folder out") from None
    if not isinstance(value, dict):
        raise DataError(f"{path}: must hold an object, not a {type(value).__name__}; run it again or leave the folder out")
    return value


def keep(runs: Sequence[Run], prefixes: Sequence[str]) -> list[Run]:
    kept = [run for run in runs if str(run.summary["protocol_fingerprint"]).startswith(tuple(prefixes))]
    for prefix in prefixes:
        if not any(str(run.summary["protocol_fingerprint"]).startswith(prefix) for run in kept):
            there = ", ".join(sorted({str(run.summary["protocol_fingerprint"]) for run in runs}))
            raise UsageError(f"--fingerprint {prefix}: no run has it; there are {there}")
    return kept


def choose_boards(runs: Sequence[Run], metric: str | None, leak_gap: bool, remarks: list[str]) -> tuple[list[Board], list[Board]]:
    """The leaderboards, one a dataset, and the LEAKY boards that stand beside them. Refuses two fingerprints in one leaderboard."""
    grouped: dict[str, dict[str, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        grouped[str(run.summary["dataset"])][str(run.summary["protocol_fingerprint"])].append(run)
    boards, beside = [], []
    for dataset, by_fingerprint in sorted(grouped.items()):
        made = [make_board(dataset, fingerprint, members, metric, remarks) for fingerprint, members in sorted(by_fingerprint.items())]
        clean = [board for board in made if not board.leaky]
        main = clean if leak_gap and clean else made
        if len(main) > 1:
            raise UsageError(_refusal(dataset, main, leak_gap))
        boards += main
        beside += [board for board in made if board not in main]
    if leak_gap and not beside:
        raise UsageError("--leak-gap: no dataset has both clean and LEAKY runs here; give both, or leave the flag out")
    return boards, beside


def _refusal(dataset: str, boards: Sequence[Board], leak_gap: bool) -> str:
    named = [
        f"{board.fingerprint} ({board.first.summary['protocol']}{' LEAKY' if board.leaky else ''}, {len(board.runs)} runs, "
        f"such as {board.first.folder})"
        for board in boards
    ]
    message = (
        f"{dataset}: runs of different fingerprints cannot stand in one leaderboard: {' and '.join(named)}; keep one with --fingerprint"
    )
    return message + (", or show clean beside LEAKY with --leak-gap" if len({board.leaky for board in boards}) > 1 and not leak_gap else "")


def make_board(dataset: str, fingerprint: str, runs: Sequence[Run], metric: str | None, remarks: list[str]) -> Board:
    """Sort runs into methods and methods by the leading metric."""
    ranking = "rank_test" in runs[0].clients
    metrics = RANKING if ranking else RATING
    lead = next((one for one in metrics if one.key == metric), metrics[0])
    first = runs[0]
    for run in runs:
        if not run.clients["user"].equals(first.clients["user"]):
            raise DataError(f"{run.folder} and {first.folder} have one fingerprint, but other clients; one of them is damaged")
    methods = []
    for algo in dict.fromkeys(run.summary["algo"] for run in runs):
        methods += make_methods([run for run in runs if run.summary["algo"] == algo], remarks)
    methods.sort(key=lambda method: (-lead.sign * method.values(lead).mean(), method.name))
    return Board(dataset, fingerprint, methods, (lead, *(one for one in metrics if one is not lead)))


def make_methods(runs: Sequence[Run], remarks: list[str]) -> list[Method]:
    """Runs of one algorithm by their settings; a method is named by those that differ."""
    keys = dict.fromkeys(key for run in runs for key in run.config if key not in NO_SETTING)
    # a key that only newer runs have is no difference
    differ = [key for key in keys if len({json.dumps(run.config[key]) for run in runs if key in run.config}) > 1]
    groups: dict[str, dict[int, Run]] = defaultdict(dict)
    for run in sorted(runs, key=lambda run: run.when):
        group = groups[json.dumps([run.config.get(key) for key in differ])]
        if run.seed in group:
            remarks.append(f"{run.name}, seed {run.seed}, was run more than once with the same settings: {run.folder} counts")
        group[run.seed] = run
    methods = []
    for group in groups.values():
        members = [group[seed] for seed in sorted(group)]
        settings = {key: members[0].config.get(key) for key in differ}
        words = [f"{SHORT.get(key, key)}={'all' if value is None and key in SHORT else value}" for key, value in settings.items()]
        methods.append(Method(" ".join([members[0].name, *words]), members[0].summary["algo"], members, settings))
    return methods


def is_popularity(method: Method) -> bool:
    """Its ranking is popularity's own."""
    floor = method.runs[0].summary.get("popularity")
    return floor is not None and all(method.runs[0].summary["test"].get(key) == value for key, value in floor.items())


def compare(board: Board) -> list[Row]:
    """Every method's metrics with their intervals, and its leading metric against the best method's and popularity's."""
    methods, lead = board.methods, board.lead
    values = [[method.values(metric) for method in methods] for metric in board.metrics]
    floor = None if board.floor_clients is None else lead.clients(board.floor_clients)
    rows = [*(seeds for metric in values for seeds in metric), *([] if floor is None else [floor[None]])]
    means = significance.bootstrap(rows)
    estimates = []
    for number in range(len(methods)):
        found = {}
        for position, metric in enumerate(board.metrics):
            resampled = metric.total(means[position * len(methods) + number])
            found[metric.key] = Estimate(float(metric.total(values[position][number].mean())), *bounds(resampled))
        estimates.append(found)

    def against(other: np.ndarray, resampled: np.ndarray, who: Sequence[int]) -> dict[int, Comparison]:
        p = significance.holm([significance.wilcoxon(values[0][i].mean(axis=0), other) for i in who])
        out = {}
        for i, corrected in zip(who, p, strict=True):
            difference = lead.total(values[0][i].mean()) - lead.total(other.mean())
            out[i] = Comparison(Estimate(float(difference), *bounds(lead.total(means[i]) - lead.total(resampled))), corrected)
        return out

    to_best = against(values[0][0].mean(axis=0), means[0], range(1, len(methods)))
    others = [i for i, method in enumerate(methods) if not is_popularity(method)]
    to_floor = {} if floor is None else against(floor, means[-1], others)
    return [Row(method, estimates[i], to_best.get(i), to_floor.get(i)) for i, method in enumerate(methods)]
