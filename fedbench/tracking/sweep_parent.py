"""Runs that belong together in MLflow: one parent run for a sweep or for `--seeds`, and its runs as its children."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fedbench import files
from fedbench.settings import naming
from fedbench.tracking import copier, mirror_process, run_log, views

log = logging.getLogger("fedbench")

MOST_CHILDREN = 50_000
CUT = "The table is longer: the whole of it is in the folder."


class Parent:
    """The parent run of a sweep, or of one run's seeds and folds. After the first failure nothing more is logged; the folder has all."""

    def __init__(self, experiment: str, name: str, folder: Path, kind: str = "sweep") -> None:
        """Make the database and the experiment if they are not there, and find this folder's run in them or begin it."""
        self.run_id = ""
        """empty if there is none"""
        self._experiment, self._name, self._kind, self._folder = experiment, name, kind, folder
        self._given_up = False
        mirror_process.import_client()  # takes seconds of this machine's own, which patience is not for
        self._guarded(lambda: self._open(folder.absolute()))

    def _open(self, folder: Path) -> None:
        self._client, self._experiment_id = mirror_process.open_store(self._experiment)
        mirror_process.mark_stale(self._client, self._experiment_id)
        self._key = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
        tags = {"kind": self._kind, "sweep": self._key, "out": str(folder), **mirror_process.SOURCE, **mirror_process.who()}
        found = self._search(f"tags.sweep = '{self._key}'")
        if found:
            self.run_id = found[0].info.run_id
            self._client.update_run(self.run_id, status="RUNNING")
            for key, value in tags.items():
                self._client.set_tag(self.run_id, key, value)
        else:
            name = f"{self._kind} {self._name}"
            self.run_id = self._client.create_run(self._experiment_id, tags=tags, run_name=name).info.run_id

    def view(self, axes: Collection[str] = ()) -> str | None:
        """Write the comparison of the children; the address that opens it, or None if there is none."""
        where = views.guarded(lambda: self._view(axes)) if self.run_id else None
        return where and f"{mirror_process.ui_address(mirror_process.tracking_uri())}/{where}"

    def _view(self, axes: Collection[str]) -> str | None:
        runs = self._search(self._children)
        crossed = " × ".join(naming.short(axis) for axis in axes if axis not in naming.REPLICATES)
        view = views.View.of(self._key, f"{crossed or self._kind}: {self._name}", self._children, runs, axes)
        return views.save(self._client, self._experiment_id, view)

    def plain_link(self, metric: str, part: str = "test") -> str:
        """The address that shows the charts of the children; ordered by a metric, for otherwise the UI folds them into their parent."""
        charts = f"{mirror_process.ui_address(mirror_process.tracking_uri())}/{mirror_process.CHARTS.format(self._experiment_id)}"
        order = quote(f"metrics.`best/{part}/{metric}`", safe="")
        ascending = str(naming.SELECT[metric] < 0).lower()
        return f"{charts}&searchFilter={quote(self._children, safe='')}&orderByKey={order}&orderByAsc={ascending}"

    @property
    def _children(self) -> str:
        return f"tags.`{run_log.CHILD_OF}` = '{self.run_id}'"

    def _search(self, wanted: str) -> list[Any]:
        found: list[Any] = []
        token = None
        while len(found) < MOST_CHILDREN:
            page = self._client.search_runs([self._experiment_id], wanted, max_results=1000, page_token=token)
            found += page
            token = page.token
            if not token:
                break
        return found

    def tidy(self, finished: Mapping[Path, str], others: Collection[Path]) -> None:
        """Keep one finished child for each finished point: delete what killed runs left, complete copies that were cut short.

        finished: folder -> name of the run.
        """
        self._guarded(lambda: self._tidy(finished, others), 1 + len(finished))

    def _tidy(self, finished: Mapping[Path, str], others: Collection[Path]) -> None:
        known = {run_log.mlflow_run_of(folder) for folder in (*finished, *others)}
        whole = set()
        for child in self._search(self._children):
            # a child that no folder names was left by a run that was killed and started again
            if child.info.run_id not in known:
                self._client.delete_run(child.info.run_id)
            elif child.info.status == "FINISHED":
                whole.add(child.info.run_id)
        for folder, name in finished.items():
            if run_log.mlflow_run_of(folder) not in whole:
                run_log.copy_again(folder, self._experiment, self.run_id, name)

    def adopt(self, folders: Mapping[Path, str]) -> None:
        """Make finished runs that began without a parent its children; what MLflow lacks of them is copied. folders: -> name of the run."""
        self._guarded(lambda: self._adopt(folders), 1 + len(folders))

    def _adopt(self, folders: Mapping[Path, str]) -> None:
        for folder, name in folders.items():
            if not self._has(run_log.mlflow_run_of(folder)):
                run_log.copy_again(folder, self._experiment, self.run_id, name)
            self._client.set_tag(run_log.mlflow_run_of(folder) or "", run_log.CHILD_OF, self.run_id)

    def _has(self, run_id: str | None) -> bool:
        """Whether a run is finished and not deleted in this store."""
        from mlflow.exceptions import MlflowException

        try:
            run = self._client.get_run(run_id) if run_id else None
        except MlflowException:
            return False
        return run is not None and (run.info.status, run.info.lifecycle_stage) == ("FINISHED", "active")

    def add(self, out: Path, order: dict[str, Any], status: str, final: dict[str, float | str]) -> None:
        """Make what has ended in a folder a child, or complete its copy; the folder then knows its MLflow run."""
        self._guarded(lambda: self._add(out, order, status, final), 2)

    def _add(self, out: Path, order: dict[str, Any], status: str, final: dict[str, float | str]) -> None:
        copy = mirror_process.Copy({**order, "tags": {**order["tags"], run_log.CHILD_OF: self.run_id}})
        copy.end(status, final, [])
        known = files.read_json(out / "env.json")
        files.write_json(out / "env.json", {**known, "mlflow_run_id": copy.run_id, "mlflow_copied": mirror_process.place(self._experiment)})

    def note(self, best: Collection[str], table: str, link: str | None) -> None:
        """What the UI shows on the parent's page: the best setting, where its charts and its folder are, and the table."""
        charts = f"[Charts of these runs](#{link.partition('#')[2]}) · " if link else ""
        head = [*(f"**{line}**" for line in best), f"{charts}folder `{self._folder}`"]
        room = mirror_process.TAG_LENGTH - len("\n\n".join([*head, "", CUT]))
        if len(table) > room:
            # whole rows only
            rows = table[:room].rpartition("\n")[0]
            table = f"{rows}\n\n{CUT}"
        self._guarded(lambda: self._client.set_tag(self.run_id, views.NOTE, "\n\n".join([*head, table])))

    def finish(self, status: str, params: dict[str, str], metrics: dict[str, float], files: Collection[Path]) -> None:
        """How it ended, with tables and figures; those of an earlier call are replaced."""
        self._guarded(lambda: self._finish(status, params, metrics, files))

    def _finish(self, status: str, params: dict[str, str], metrics: dict[str, float], files: Collection[Path]) -> None:
        from mlflow.entities import Metric, Param

        # MLflow refuses to change a param
        there = self._client.get_run(self.run_id).data.params
        texts = [
            Param(mirror_process.name_of(key), value[: mirror_process.PARAM_LENGTH]) for key, value in params.items() if key not in there
        ]
        self._client.log_batch(self.run_id, [Metric(mirror_process.name_of(key), value, 0, 0) for key, value in metrics.items()], texts)
        self._client.set_terminated(self.run_id, status)
        for file in files:
            self._client.log_artifact(self.run_id, str(file))

    def _guarded(self, work: Callable[[], object], parts: int = 1) -> None:
        """Do the work within a time limit (for each of its parts that of a run's end); the first failure gives MLflow up."""
        if self._given_up:
            return
        why = copier.within(copier.patience() * parts, work)
        if why is not None:
            log.warning("MLflow tracking of the group given up (%s); nothing is lost: all is in its folder", why)
            self._given_up, self.run_id = True, ""


def join(folders: Collection[Path], experiment: str, folder: Path, summary: dict[str, Any], table: str) -> str | None:
    """The parent run of one run's seeds and folds, with their means; the address of their charts, if there is one.

    It is made when all of them are finished, so that none of them waits for MLflow.
    """
    name = f"{summary['algo']}-{summary['dataset']}-{summary['protocol']}"
    told = {one: files.read_json(one / "summary.json") for one in folders}
    folds = {one: its["protocol_fields"]["fold"] for one, its in told.items()}
    parent = Parent(experiment, name, folder, kind="seeds")
    parent.adopt({one: f"{name}-s{its['seed']}" + ("" if folds[one] is None else f"-f{folds[one]}") for one, its in told.items()})
    link = parent.view(naming.REPLICATES)
    parent.note([f"Mean on test: {naming.headline(summary)}"], f"```text\n{table}\n```", link)
    means = {"mean": summary["test"], "std": summary["std"]["test"]}
    figures = {f"{what}/test/{metric}": value for what, values in means.items() for metric, value in values.items()}
    parent.finish("FINISHED", {key: str(summary[key]) for key in ("algo", "dataset", "protocol")}, figures, [folder / "summary.json"])
    return link or (parent.plain_link(naming.main_metric([summary])) if parent.run_id else None)
