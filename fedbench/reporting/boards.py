"""Finished runs, read from their folders and sorted into what may be compared: one board a dataset and fingerprint, one row a method."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedbench.errors import DataError, UsageError
from fedbench.evaluation import significance
from fedbench.evaluation.metrics import client_metrics
from fedbench.evaluation.significance import bounds
from fedbench.experiment.folder import FLOOR, over_folds, read_clients, read_rounds, read_settings, read_summary
from fedbench.settings.naming import CANARIES, NOT_HASHED

SHORT = {"clients_per_round": "n", "local_epochs": "e"}
NO_SETTING = {*NOT_HASHED, "seed", "fold", "refit"}
"""keys of a config that do not distinguish methods"""


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
        """[U] values of one run; `total` turns their mean (for ratings weighted by each client's count) into the metric."""
        values = table[self.column].to_numpy(np.float64)
        return client_metrics(values)[self.key.removeprefix("full_")] if "rank" in self.column else values

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
    """A finished run, read from its folder."""

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

    @property
    def fold(self) -> int | None:
        return self.summary.get("protocol_fields", {}).get("fold")

    @property
    def kind(self) -> str:
        return "ranking" if "rank_test" in self.clients else "ratings"

    @property
    def fingerprint(self) -> str:
        """The fingerprint that all runs of a table share: for a fold, that of all folds together."""
        return str(self.summary["protocol_fingerprint"]) if self.fold is None else over_folds(self.summary)

    @property
    def weights(self) -> np.ndarray:
        """[U] how many values of a client are tested: one item, or some ratings."""
        return np.ones(len(self.clients)) if self.kind == "ranking" else self.clients["ratings_test"].to_numpy(np.float64)


@dataclass(frozen=True)
class Method:
    """A row of the leaderboard: runs that differ in seed and fold alone."""

    name: str
    algo: str
    runs: list[Run]
    settings: dict[str, Any]

    @property
    def control(self) -> bool:
        """It cannot know the held-out items, so on an honest protocol it must be at chance."""
        return self.algo in CANARIES or any("control" in run.summary for run in self.runs)

    @property
    def seeds(self) -> list[int]:
        return sorted({run.seed for run in self.runs})

    @property
    def folds(self) -> list[int | None]:
        return [run.fold for run in self.runs if run.seed == self.seeds[0]]

    @property
    def weights(self) -> np.ndarray:
        """[U] values of each client that one seed tests, over its folds."""
        return np.sum([run.weights for run in self.runs if run.seed == self.seeds[0]], axis=0)

    def values(self, metric: Metric) -> np.ndarray:
        """[seeds, U]: of folds, the mean over all of a client's ratings; NaN for a client without any."""
        return np.stack([self._pooled(metric, [run for run in self.runs if run.seed == seed]) for seed in self.seeds])

    def _pooled(self, metric: Metric, folds: Sequence[Run]) -> np.ndarray:
        if len(folds) == 1:
            return metric.clients(folds[0].clients)
        total = sum(np.where(run.weights > 0, metric.clients(run.clients) * run.weights, 0) for run in folds)
        return np.divide(total, self.weights, out=np.full(len(self.weights), np.nan), where=self.weights > 0)

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
    """The runs that may be compared in one table: one dataset under one protocol fingerprint."""

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
        return f"{self.dataset} · {self.first.summary['protocol']}{' · ratings' if self.lead in RATING else ''}"

    @cached_property
    def weights(self) -> np.ndarray:
        """[U] how much each tested client counts."""
        weights = self.methods[0].weights
        return weights[weights > 0]

    @cached_property
    def tested(self) -> np.ndarray:
        """Which clients are tested; U is their number in all below."""
        return self.methods[0].weights > 0

    @property
    def users(self) -> int:
        return len(self.weights)

    def values(self, method: Method, metric: Metric) -> np.ndarray:
        """[seeds, U]"""
        return method.values(metric)[:, self.tested]

    def total(self, metric: Metric, values: np.ndarray, inside: np.ndarray | slice = slice(None)) -> float:
        """The metric over seeds and clients, or over those `inside` a group."""
        return float(metric.total(np.average(values.mean(axis=0)[inside], weights=self.weights[inside])))

    @property
    def chance(self) -> dict[str, float]:
        return self.first.summary.get("chance") or {}

    @property
    def floor(self) -> tuple[str, dict[str, float]] | None:
        """What every method must beat, its name and its metrics."""
        return self.references[0] if self.references else None

    @property
    def references(self) -> list[tuple[str, dict[str, float]]]:
        """Reference rows of the leaderboard: the floor, and chance or the global mean."""
        named = (("popularity", "popularity"), ("user_item_mean", "user + item mean"), ("global_mean", "global mean"), ("chance", "chance"))
        first = self.methods[0]
        return [
            (name, {metric.key: first.mean(key, metric.key) for metric in self.metrics}) for key, name in named if key in self.first.summary
        ]

    @cached_property
    def floor_values(self) -> np.ndarray | None:
        """[1, U] the floor's leading metric of every client, from any method whose runs all have it."""
        for method in self.methods:
            if all(FLOOR[self.lead.column] in run.clients for run in method.runs):
                own = replace(self.lead, column=FLOOR[self.lead.column])
                return self.values(method, own)[:1]
            if is_popularity(method):
                return self.values(method, self.lead)[:1]
        return None

    def drawn_over(self, method: Method) -> str:
        """What a method's interval is over, in words."""
        seeds = len(method.seeds)
        return f"over {seeds} seeds and {self.users:,} clients" if seeds > 1 else f"over {self.users:,} clients (one seed)"

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
                # a folder that is reached in two ways counts once
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
    path = folder / "summary.json"
    summary, settings = read_summary(folder), read_settings(folder)
    if not summary:
        raise DataError(f"{path}: is empty; run it again or leave the folder out")
    run = Run(folder, settings, summary, read_clients(folder), read_rounds(folder, summary.get("rounds")), path.stat().st_mtime)
    try:
        _ = run.fingerprint
    except (TypeError, ValueError, KeyError) as error:
        raise DataError(f"{path}: protocol_fields are no protocol's ({error}); run it again or leave the folder out") from None
    return run


def keep(runs: Sequence[Run], prefixes: Sequence[str]) -> list[Run]:
    """The runs whose fingerprint starts with one of these."""
    there = sorted({run.fingerprint for run in runs})
    for prefix in prefixes:
        if not any(fingerprint.startswith(prefix) for fingerprint in there):
            raise UsageError(f"--fingerprint {prefix}: no run has it; there are {', '.join(there)}")
    return [run for run in runs if run.fingerprint.startswith(tuple(prefixes))]


def choose_boards(runs: Sequence[Run], metric: str | None, leak_gap: bool, remarks: list[str]) -> tuple[list[Board], list[Board]]:
    """The leaderboards, one a dataset and kind, and the LEAKY boards beside them. Refuses two fingerprints in one leaderboard."""
    grouped: dict[tuple[str, str], dict[str, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        grouped[str(run.summary["dataset"]), run.kind][run.fingerprint].append(run)
    boards, beside = [], []
    for (dataset, _), by_fingerprint in sorted(grouped.items()):
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
    metrics = RANKING if runs[0].kind == "ranking" else RATING
    lead = next((one for one in metrics if one.key == metric), metrics[0])
    first = runs[0]
    for run in runs:
        # one fingerprint is one split, so clients that differ mean a damaged file
        if not run.clients["user"].equals(first.clients["user"]):
            raise DataError(f"{run.folder} and {first.folder} have one fingerprint, but other clients; one of them is damaged")
    methods = []
    for algo in dict.fromkeys(run.summary["algo"] for run in runs):
        methods += make_methods([run for run in runs if run.summary["algo"] == algo], remarks)
    for method in methods:
        check_folds(method, methods[0])
    board = Board(dataset, fingerprint, methods, (lead, *(one for one in metrics if one is not lead)))
    worst_last = {method.name: -lead.sign * board.total(lead, board.values(method, lead)) for method in methods}
    # what diverged is no number, and last
    methods.sort(key=lambda method: (np.isnan(worst_last[method.name]), worst_last[method.name], method.name))
    return board


def check_folds(method: Method, other: Method) -> None:
    """Every seed of every method must have been tested on the same values."""
    for seed in method.seeds:
        mine = np.sum([run.weights for run in method.runs if run.seed == seed], axis=0)
        if not np.array_equal(mine, other.weights):
            folds = [run.fold for run in method.runs if run.seed == seed]
            raise UsageError(
                f"{method.name}, seed {seed}, was tested on folds {_words(folds)}, and {other.name} on {_words(other.folds)}; "
                "run the same folds of both, or leave one of them out"
            )


def _words(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))


def make_methods(runs: Sequence[Run], remarks: list[str]) -> list[Method]:
    """Runs of one algorithm by their settings; a method is named by those that differ."""
    keys = dict.fromkeys(key for run in runs for key in run.config if key not in NO_SETTING)
    # a key that only newer runs have is no difference
    differ = [key for key in keys if len({json.dumps(run.config[key]) for run in runs if key in run.config}) > 1]
    groups: dict[str, dict[tuple[int, int], Run]] = defaultdict(dict)
    # oldest first: of runs with equal settings and seed the newest stays
    for run in sorted(runs, key=lambda run: run.when):
        group = groups[json.dumps([run.config.get(key) for key in differ])]
        place = run.seed, run.fold or 0
        if place in group:
            remarks.append(f"{run.name}, seed {run.seed}, was run more than once with the same settings: {run.folder} counts")
        group[place] = run
    methods = []
    for group in groups.values():
        members = [group[place] for place in sorted(group)]
        settings = {key: members[0].config.get(key) for key in differ}
        words = [f"{SHORT.get(key, key)}={'all' if value is None and key in SHORT else value}" for key, value in settings.items()]
        methods.append(Method(" ".join([members[0].name, *words]), members[0].summary["algo"], members, settings))
    return methods


def is_popularity(method: Method) -> bool:
    """Whether the method ranks exactly as popularity does."""
    floor = method.runs[0].summary.get("popularity")
    return floor is not None and all(method.runs[0].summary["test"].get(key) == value for key, value in floor.items())


def compare(board: Board) -> list[Row]:
    """Every method's metrics with their intervals, and its leading metric against the best method's and the floor's."""
    methods, lead, floor = board.methods, board.lead, board.floor_values
    values = [[board.values(method, metric) for method in methods] for metric in board.metrics]
    # resampled together: all methods meet the same drawn clients, so differences are paired
    rows = [*(seeds for by_method in values for seeds in by_method), *([] if floor is None else [floor])]
    means = significance.bootstrap(rows, board.weights)
    estimates: list[dict[str, Estimate]] = [{} for _ in methods]
    for position, metric in enumerate(board.metrics):
        for number, found in enumerate(estimates):
            resampled = metric.total(means[position * len(methods) + number])
            found[metric.key] = Estimate(board.total(metric, values[position][number]), *bounds(resampled))

    def against(other: np.ndarray, resampled: np.ndarray, who: Sequence[int]) -> dict[int, Comparison]:
        clients = lead.total(other.mean(axis=0))
        p = significance.holm([significance.wilcoxon(lead.total(values[0][i].mean(axis=0)), clients) for i in who])
        out = {}
        for i, corrected in zip(who, p, strict=True):
            difference = board.total(lead, values[0][i]) - board.total(lead, other)
            out[i] = Comparison(Estimate(difference, *bounds(lead.total(means[i]) - lead.total(resampled))), corrected)
        return out

    to_best = against(values[0][0], means[0], range(1, len(methods)))
    others = [i for i, method in enumerate(methods) if not is_popularity(method)]
    to_floor = {} if floor is None else against(floor, means[-1], others)
    return [Row(method, estimates[i], to_best.get(i), to_floor.get(i)) for i, method in enumerate(methods)]
