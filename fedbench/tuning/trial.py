"""One trial of a search: a run whose split has lost its test items, so that there is nothing but validation to choose on."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedbench.data.split import Split
from fedbench.errors import FedbenchError, UsageError
from fedbench.experiment.machine import set_up
from fedbench.experiment.observers import SELECT, BudgetIsUsed, Evaluation, Loss, Observer, RoundEnd, Seconds, Traffic
from fedbench.experiment.prepare import check_cohort, prepare_checked
from fedbench.experiment.run import start_federation
from fedbench.experiment.training import train_rounds
from fedbench.settings.config import RunConfig
from fedbench.simulation.federation import Diverged
from fedbench.tuning.space import Values, set_to

Report = Callable[[dict[str, float], float], bool]
"""called after every evaluation with the round's line and its value, higher being better; True ends the trial"""


@dataclass
class Ended:
    """How a trial ended."""

    how: str
    """complete, pruned, diverged or refused"""
    rounds: int = 0
    visits: int = 0
    seconds: float = 0.0
    error: str = ""


@dataclass
class Reports(Observer):
    """Hands every evaluated round's line on, and ends the trial if it is told to."""

    report: Report
    stopped: bool = False

    def after_round(self, end: RoundEnd) -> None:
        if not end.scores:
            return
        scores = end.scores["val"]
        value = -scores["rmse"] if end.federation.split.held else scores[SELECT["val"]]
        self.stopped = self.report(end.line, value) and not end.last
        end.last = end.last or self.stopped


@dataclass
class Bench:
    """The data of a search and the settings that all of its trials share."""

    config: RunConfig
    split: Split = field(repr=False)
    device: str
    facts: dict[str, Any]
    """what a search says of its data"""

    @classmethod
    def prepared(cls, config: RunConfig) -> Bench:
        device = set_up(config)
        split, data = prepare_checked(config, device)
        if split.protocol.select_on != "val":
            raise UsageError(f"tune chooses on validation, and --split {split.protocol.split} has none; use a split with validation items")
        known = {"protocol": split.protocol.name, "protocol_fingerprint": split.fingerprint, "data_checksum": split.checksum}
        facts = {**known, "dataset": data.name, "clients": split.clients, "visits": visits_a_round(config, split)}
        return cls(config, split.without_test(), device, facts)

    def run(self, values: Values, report: Report, out: Path) -> Ended:
        """Train with these values until the budget is spent or `report` says stop."""
        began = time.perf_counter()
        try:
            config = dataclasses.replace(self.config, algorithm=set_to(self.config.algorithm, values))
            check_cohort(config.algorithm, self.split)
        except UsageError as error:
            return Ended("refused", error=str(error))
        last, how, error_text = Reports(report), "complete", ""
        federation = start_federation(config, self.device, out, self.split)
        with closing(federation):
            try:
                line = [BudgetIsUsed(config), Loss(), Evaluation(config.eval_every), Seconds(), Traffic(), last]
                train_rounds(federation, config.limit, config.budget, line)
            except Diverged as error:
                how, error_text = "diverged", str(error)
            except (FedbenchError, MemoryError) as error:
                how, error_text = "refused", str(error) or "not enough memory"
            how = "pruned" if last.stopped else how
            return Ended(how, federation.round, int(federation.visits.sum()), time.perf_counter() - began, error_text)


def visits_a_round(config: RunConfig, split: Split) -> int:
    """Clients that a round asks; 0 for a method that has all data in one place."""
    return config.algorithm.cohort(len(split.trainers)) if config.algorithm.federated else 0
