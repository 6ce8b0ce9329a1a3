"""A sweep in MLflow: one parent run, and the runs of its points as its children."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fedbench import mirror, tracking

log = logging.getLogger("fedbench")

MOST_CHILDREN = 50_000


class Parent:
    """The parent run of a sweep. The first failure ends it: the folder is what counts."""

    def __init__(self, experiment: str, name: str, folder: Path) -> None:
        """Make the database and the experiment if they are not there, and find this folder's run in them or begin it."""
        self.run_id = ""
        """empty if there is none"""
        self._experiment = experiment
        self._given_up = False
        self._guarded(lambda: self._open(name, folder.absolute()))

    def _open(self, name: str, folder: Path) -> None:
        self._client, self._experiment_id = mirror.open_store(self._experiment)
        mirror.mark_stale(self._client, self._experiment_id)
        sweep = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
        tags = {"kind": "sweep", "sweep": sweep, "out": str(folder), **mirror.who()}
        found = self._search(f"tags.sweep = '{sweep}'")
        if found:
            self.run_id = found[0].info.run_id
            self._client.update_run(self.run_id, status="RUNNING")
            for key, value in tags.items():
                self._client.set_tag(self.run_id, key, value)
        else:
            self.run_id = self._client.create_run(self._experiment_id, tags=tags, run_name=f"sweep {name}").info.run_id

    def link(self, metric: str, ascending: bool) -> str:
        """The address that shows the charts of the children; ordered by a metric, for otherwise the UI folds them into their parent."""
        charts = f"{mirror.ui_address(mirror.tracking_uri())}/{mirror.CHARTS.format(self._experiment_id)}"
        order = quote(f"metrics.`best/test/{metric}`", safe="")
        return f"{charts}&searchFilter={quote(self._children, safe='')}&orderByKey={order}&orderByAsc={str(ascending).lower()}"

    @property
    def _children(self) -> str:
        return f"tags.`{tracking.CHILD_OF}` = '{self.run_id}'"

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
        """One finished child a finished point: what earlier, killed runs left goes, copies that were cut short are completed.

        finished: folder -> name of the run.
        """
        self._guarded(lambda: self._tidy(finished, others))

    def _tidy(self, finished: Mapping[Path, str], others: Collection[Path]) -> None:
        known = {tracking.mlflow_run_of(folder) for folder in (*finished, *others)}
        whole = set()
        for child in self._search(self._children):
            if child.info.run_id not in known:
                self._client.delete_run(child.info.run_id)
            elif child.info.status == "FINISHED":
                whole.add(child.info.run_id)
        for folder, name in finished.items():
            if tracking.mlflow_run_of(folder) not in whole:
                tracking.copy_again(folder, self._experiment, self.run_id, name)

    def finish(self, status: str, params: dict[str, str], metrics: dict[str, float], files: Collection[Path]) -> None:
        """How it ended, with tables and figures; those of an earlier call are replaced."""
        self._guarded(lambda: self._finish(status, params, metrics, files))

    def _finish(self, status: str, params: dict[str, str], metrics: dict[str, float], files: Collection[Path]) -> None:
        from mlflow.entities import Metric, Param

        there = self._client.get_run(self.run_id).data.params
        texts = [Param(mirror.name_of(key), value[: mirror.PARAM_LENGTH]) for key, value in params.items() if key not in there]
        self._client.log_batch(self.run_id, [Metric(mirror.name_of(key), value, 0, 0) for key, value in metrics.items()], texts)
        self._client.set_terminated(self.run_id, status)
        for file in files:
            self._client.log_artifact(self.run_id, str(file))

    def _guarded(self, work: Callable[[], None]) -> None:
        if self._given_up:
            return
        try:
            work()
        except Exception as error:
            log.warning("MLflow tracking of the sweep given up (%s); nothing is lost: all is in its folder", mirror.one_line(error))
            self._given_up, self.run_id = True, ""
