"""A search in MLflow: one parent run, each trial its child, the figures with the parent. The folder has all of it without MLflow."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

from fedbench.files import read_json, write_json
from fedbench.settings.config import RunConfig
from fedbench.tracking import mirror_process, run_log
from fedbench.tracking.sweep_parent import Parent
from fedbench.tuning.search import Search

FIGURES = ("history.png", "importance.png", "slice.png", "recipe.toml", "search.json")
"""files of a search's folder that go to its parent run"""


class Copies:
    """What has ended in the folder, in MLflow. Its methods are called one after another, by one thread."""

    def __init__(self, config: RunConfig, folder: Path, search: Search) -> None:
        self.config, self.folder, self.search = config, folder, search
        self.metric = "rmse" if config.protocol.ratings else "ndcg_10"
        self.parent: Parent | None = None

    def open(self) -> None:
        """Find or begin the parent, and copy trials whose copy a kill has prevented."""
        self.parent = Parent(
            self.config.experiment, f"{self.config.algorithm.name}-{Path(self.config.dataset).stem}", self.folder, "search"
        )
        for place in sorted((self.folder / "trials").iterdir()):
            if found := read_json(place / "trial.json"):
                self.add(found)

    def add(self, found: dict[str, Any]) -> None:
        """Make an ended trial a child, if it is none yet."""
        place = self.search.place(found["number"])
        env = read_json(place / "env.json")
        if self.parent is None or env.get("mlflow_copied") == mirror_process.place(self.config.experiment):
            return
        # on disk before MLflow hears of it, so that a copy that a kill cuts short is found again
        env = {"run_key": uuid.uuid4().hex, **env}
        write_json(place / "env.json", env)
        config = {key: value for key, value in self.config.to_dict().items() if key not in ("out", "resume")}
        tags = {"kind": "trial", "algo": self.config.algorithm.name, "how": found["how"], "trial": str(found["number"])}
        name = f"trial {found['number']}"
        order = run_log.order_of(place, {**config, **found["values"]}, env, tags, name, self.config.experiment)
        final: dict[str, float | str] = {"summary/rounds": found["rounds"], "summary/client_visits": found["visits"]}
        if found["value"] is not None:
            final |= {f"best/val/{self.metric}": abs(found["value"]), "summary/best_round": found["best_round"]}
        self.parent.add(place, order, "FINISHED" if found["value"] is not None else "FAILED", final)

    def end(self, status: str, params: dict[str, str], metrics: dict[str, float], files: list[Path]) -> None:
        if self.parent:
            self.parent.finish(status, params, metrics, files)

    def conclude(self, best: dict[str, Any], spent: str, metrics: dict[str, float]) -> str | None:
        """Complete the parent; the address of the trials' charts, if there is one."""
        if self.parent is None or not self.parent.run_id:
            return None
        rows = "\n".join(f"| {name} | {value} |" for name, value in best["values"].items())
        link = self.parent.plain_link(self.metric, "val")
        self.parent.note([f"{spent}; best on validation: trial {best['number']}"], f"| field | best |\n|---|---|\n{rows}", link)
        params = {name: str(value) for name, value in best["values"].items()}
        self.end("FINISHED", {"algo": self.config.algorithm.name, **params}, metrics, [self.folder / name for name in FIGURES])
        return link
