"""Ready comparison views in the MLflow UI: four charts of a set of runs, grouped by what differs between them, seeds averaged.

The UI keeps a saved view as a tag of the experiment whose value is its own page state in JSON. That is no documented interface, so
views are written for the minor version of MLflow that the browser test has opened them in; elsewhere people get the plain link.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import math
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbench.errors import FedbenchError
from fedbench.settings.naming import NOT_HASHED, REPLICATES, SELECT, SHORT, short, title
from fedbench.tracking import copier, mirror_process

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

log = logging.getLogger("fedbench")

TRIED = "3.17."
"""the MLflow whose UI tests/test_browser.py opens these views in"""
TAG = "mlflow.sharedViewState."
OURS = "fedbench-"
"""what the keys of our views begin with; the others are the users' own"""
MOST_VIEWS, ROOM = 40, 5
"""how many views the UI lets people save, and how many of them we leave free"""
LONGEST = 20_000
"""characters of an experiment's tag"""
PAGE = 100
"""how many runs the UI loads before somebody presses "Load more" """
MOST_KEYS = 6
"""settings in the name of a group"""
BESIDE = ("hr_10", "full_ndcg_10", "mae")
"""test metrics beside the leading one, where no setting is a number"""
LINES = 20
"""runs and groups that a list can show without scrolling"""
NO_SETTINGS = {*NOT_HASHED, *REPLICATES, *SHORT, "mlflow"}
"""params never grouped by: they change no result, are averaged over, or also have a short name"""
FIRST = ("dataset", "algo", "protocol", "n", "e")
"""params that groups are made by first, where they differ"""
COHORT = "summary/cohort"
ALL_RUNS = "tags.kind = 'run'"
MOST_READ = 1000
"""runs that are read to find out what differs between them"""
Order = tuple[str, bool]
"""what runs are ordered by, and whether the least comes first"""
BY_SEED: Order = ("params.`seed`", True)
NEWEST: Order = ("attributes.start_time", False)
NOTE, NOTED, LEADS = "mlflow.note.content", "fedbench.note", "mlflow.experiment.primaryMetric.name"
LISTED = 10
"""views that an experiment's note links to"""


@dataclass(frozen=True)
class View:
    """What one comparison shows."""

    key: str
    """fixed for a sweep folder, so that resuming a sweep replaces its view"""
    name: str
    runs: str
    """which runs, in MLflow's search language"""
    metric: str
    groups: tuple[str, ...]
    """params whose values make the groups"""
    numbers: tuple[str, ...]
    """those of them that are a number in every run"""
    lines: str
    """part that the lines by round show: val, where rounds are chosen on it; the results are on test"""
    leaky: bool = False
    """some of the runs are"""
    first: Order | None = None
    """the order of runs that the UI does not load all at once; else they are ordered by their result"""
    folded: tuple[tuple[str, ...], ...] = ()
    """groups, by their values, that the list of runs shows as one line: where there are too many to see them all otherwise"""

    @classmethod
    def of(cls, key: str, name: str, where: str, runs: Sequence[Any], axes: Iterable[str] = (), first: Order = BY_SEED) -> View:
        """A view of these MLflow runs, which the search `where` finds.

        axes: settings that are known to differ, by flag name; first: which runs come first if the UI does not load them all at once.
        """
        params, metrics = [run.data.params for run in runs], [run.data.metrics for run in runs]
        groups = groups_of(params, [short(axis) for axis in axes])
        numbers = tuple(group for group in groups if all(is_number(one.get(group, "")) for one in params))
        if "n" in groups and "n" not in numbers and all(COHORT in one for one in metrics):
            numbers = (COHORT, *numbers)  # "all" is no place on an axis, the clients of a round are
        metric = next((name for name in SELECT if any(f"best/test/{name}" in one for one in metrics)), "ndcg_10")
        on_val = any(f"best/val/{metric}" in one for one in metrics) and all(one.get("select_on") != "test" for one in params)
        leaky = {run.data.tags.get("leaky") == "LEAKY" for run in runs}
        name += {(True,): " LEAKY", (False, True): " (clean and LEAKY)"}.get(tuple(sorted(leaky)), "")
        many = len(runs) > PAGE
        name += f" (the first {PAGE} of {len(runs)} runs; Load more shows the others)" if many else ""
        found = dict.fromkeys(tuple(one.get(group, "") for group in groups) for one in params)
        folded = tuple(found) if len(runs) + len(found) > LINES else ()
        return cls(
            OURS + key, name, where, metric, groups, numbers, "val" if on_val else "test", True in leaky, first if many else None, folded
        )

    @property
    def result(self) -> str:
        return f"best/test/{self.metric}"

    def state(self) -> dict[str, Any]:
        """The page as the UI stores it."""
        columns = [f"metrics.`{part}/{self.metric}`" for part in ("best/test", "best/val")]
        columns += [f"params.`{name}`" for name in (*self.groups, "seed")]
        # runs that are left for a second page must not be the worst ones: then every group would look better than it is
        order, ascending = self.first or (f"metrics.`{self.result}`", SELECT[self.metric] < 0)
        about = f"{'LEAKY ' if self.leaky else ''}{title(self.metric)}, mean over seeds"
        section = {"uuid": "fedbench", "name": about, "display": True, "isReordered": True}
        return {
            "searchFilter": self.runs,
            "orderByKey": order,
            "orderByAsc": ascending,
            "startTime": "ALL",
            "lifecycleFilter": "Active",
            "modelVersionFilter": "All Runs",
            "datasetsFilter": [],
            "selectedColumns": columns,
            "runsHiddenMode": "SHOW_ALL",
            "groupBy": {"aggregateFunction": "average", "groupByKeys": [{"mode": "param", "groupByData": name} for name in self.groups]},
            "groupsExpanded": {",".join(map("param.{}.{}".format, self.groups, values)): False for values in self.folded},
            "useGroupedValuesInCharts": True,
            "hideEmptyCharts": True,
            "isAccordionReordered": True,
            "compareRunSections": [{**section, "deleted": False, "isGenerated": False, "columns": 2, "cardHeight": 360}],
            "compareRunCharts": [self._lines(), self._bars(), self._parallel(), self._fourth()],
        }

    def _lines(self) -> dict[str, Any]:
        metric = f"{self.lines}/{self.metric}"
        scales = {"xAxisKey": "step", "xAxisScaleType": "linear", "scaleType": "linear", "lineSmoothness": 0, "range": {}}
        return chart("LINE", metricKey=metric, selectedMetricKeys=[metric], **scales)

    def _bars(self) -> dict[str, Any]:
        return chart("BAR", metricKey=self.result)

    def _parallel(self) -> dict[str, Any]:
        params = [name for name in self.numbers if name != COHORT]
        metrics = [name for name in self.numbers if name == COHORT]
        beside = [] if self.numbers else [f"best/test/{name}" for name in BESIDE if (name == "mae") == (self.metric == "rmse")]
        # the last one gives the lines their colours
        return chart("PARALLEL", selectedParams=params, selectedMetrics=[*metrics, *beside, self.result], showAllRuns=False)

    def _fourth(self) -> dict[str, Any]:
        """Contour of two numbers; one number against the result; else what the runs sent against the result."""
        result = {"key": self.result, "type": "METRIC"}
        if len(self.numbers) == len(self.groups) == 2:
            x, y = map(axis, self.numbers)
            return chart("CONTOUR", xaxis=x, yaxis=y, zaxis=result)
        alone = len(self.numbers) == len(self.groups) == 1
        return chart("SCATTER", xaxis=axis(self.numbers[0] if alone else "summary/bytes_up"), yaxis=result)

    def value(self, now: int) -> str:
        state = json.dumps(self.state(), separators=(",", ":"))
        return json.dumps({"name": self.name, "createdAt": now, "updatedAt": now, "state": state}, separators=(",", ":"))


def chart(kind: str, **fields: Any) -> dict[str, Any]:
    """One chart. The UI gives it its title: names of metrics and settings."""
    return {"type": kind, "uuid": f"fedbench-{kind}", "metricSectionId": "fedbench", "deleted": False, "isGenerated": False, **fields}


def axis(name: str) -> dict[str, str]:
    return {"key": name, "type": "METRIC" if name.startswith("summary/") else "PARAM"}


def is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def groups_of(params: Sequence[Mapping[str, str]], axes: Sequence[str] = ()) -> tuple[str, ...]:
    """The settings that tell the runs apart, the axes first; one that says no more than those before it is left out."""
    known = dict.fromkeys([*axes, *FIRST, *sorted({name for one in params for name in one})])
    chosen: list[str] = []
    parts = 1
    for name in known:
        if name in NO_SETTINGS or len(chosen) == MOST_KEYS:
            continue
        finer = len({tuple(one.get(key) for key in (*chosen, name)) for one in params})
        if finer > parts:
            chosen, parts = [*chosen, name], finer
    return tuple(chosen) or ("algo",)


def tried() -> bool:
    """Whether the MLflow UI has the version that views were tested with."""
    uri = mirror_process.tracking_uri()
    if not uri.startswith(("http://", "https://")):
        return importlib.metadata.version("mlflow").startswith(TRIED)
    with suppress(OSError), urllib.request.urlopen(f"{mirror_process.ui_address(uri)}/version", timeout=3) as answer:
        return answer.read(100).decode(errors="replace").startswith(TRIED)
    return False


def guarded(write: Callable[[], str | None]) -> str | None:
    """Run `write` and return the view's place, or None: a view is a convenience, so its failure costs one warning."""
    found: list[str | None] = []
    why = copier.within(copier.patience(), lambda: found.append(write() if tried() else None))
    if why is not None:
        log.warning("no ready view in the MLflow UI (%s); the plain link works", why)
        return None
    return found[0]


def of_experiments(uri: str, most: int) -> list[tuple[str, str]]:
    """A comparison of all runs for each of the experiments that changed last: their names, and where it is."""
    try:
        client = mirror_process.import_client()(uri)
        found: list[tuple[str, str]] = []
        for experiment in client.search_experiments(order_by=["last_update_time DESC"]):
            runs = client.search_runs([experiment.experiment_id], ALL_RUNS, max_results=MOST_READ)
            if runs and len(found) < most:
                view = View.of("all-runs", f"all runs: {experiment.name}", ALL_RUNS, runs, first=NEWEST)
                where = guarded(partial(save, client, experiment.experiment_id, view))
                found.append((experiment.name, where or mirror_process.CHARTS.format(experiment.experiment_id)))
        return found
    except Exception as error:
        raise FedbenchError(f"MLflow cannot be read ({mirror_process.one_line(error)}); check MLFLOW_TRACKING_URI") from None


def of_report(copies: Mapping[str, str], name: str, folder: Path) -> list[str]:
    """Comparisons of a report's runs, one for each experiment that they are in: their addresses. None where MLflow lacks the runs.

    copies: the runs' ids in MLflow -> their experiment's name; folder: the report's, so that writing it again replaces its views.
    """
    uri = mirror_process.tracking_uri()
    if not copies or mirror_process.missing_database(uri):
        return []
    key = f"report-{digest(str(folder.absolute()))}"
    places = []
    for experiment in dict.fromkeys(copies.values()):
        ids = sorted(run_id for run_id, its in copies.items() if its == experiment)
        places.append(guarded(partial(_of_runs, uri, experiment, ids, key, name)))
    return [f"{mirror_process.ui_address(uri)}/{where}" for where in places if where]


def _of_runs(uri: str, experiment: str, ids: Sequence[str], key: str, name: str) -> str | None:
    client = mirror_process.import_client()(uri)
    there = client.get_experiment_by_name(experiment)
    where = f"attributes.run_id IN ({', '.join(map(repr, ids))})"
    if there is None or not (runs := client.search_runs([there.experiment_id], where, max_results=MOST_READ)):
        return None
    return save(client, there.experiment_id, View.of(key, name, where, runs))


def save(client: MlflowClient, experiment_id: str, view: View, now: int | None = None) -> str | None:
    """Write or replace a view and drop the oldest of ours if there are many; its place, or None if it is too long for a tag."""
    now = now or int(time.time() * 1000)
    value = view.value(now)
    if len(value) > LONGEST:
        return None
    client.set_experiment_tag(experiment_id, TAG + view.key, value)
    tags = {**client.get_experiment(experiment_id).tags, TAG + view.key: value}
    views = [key for key in tags if key.startswith(TAG)]
    # the users' own views are never deleted
    ours = sorted((key for key in views if key.startswith(TAG + OURS)), key=lambda key: created(tags[key]))
    many = max(0, len(views) - (MOST_VIEWS - ROOM))
    # the one just written stays
    for key in ours[: min(many, len(ours) - 1)]:
        client.delete_experiment_tag(experiment_id, key)
        tags.pop(key)
    client.set_experiment_tag(experiment_id, LEADS, view.result)
    describe(client, experiment_id, tags)
    return place(experiment_id, view.key)


def place(experiment_id: str, key: str) -> str:
    """Where a view is in the UI, whatever its address: what a link in a note needs."""
    return f"{mirror_process.CHARTS.format(experiment_id)}&viewStateShareKey={key}"


def created(value: str) -> int:
    with suppress(ValueError, KeyError, TypeError):
        return int(json.loads(value)["createdAt"])
    return 0


def describe(client: MlflowClient, experiment_id: str, tags: Mapping[str, str]) -> None:
    """The experiment's note, with links to our latest views; one that somebody has written stays."""
    there = tags.get(NOTE, "")
    if there and digest(there) != tags.get(NOTED):
        return
    ours = sorted((key for key in tags if key.startswith(TAG + OURS)), key=lambda key: -created(tags[key]))
    links = [f"- [{json.loads(tags[key])['name']}]({place(experiment_id, key.removeprefix(TAG))})" for key in ours[:LISTED]]
    about = "Runs of fedbench. Sweeps and `--seeds` are parent runs with a note of their own. Comparisons, the newest first:"
    note = "\n".join([about, "", *links])
    client.set_experiment_tag(experiment_id, NOTE, note)
    client.set_experiment_tag(experiment_id, NOTED, digest(note))


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
