"""The rounds of a run: one loop, and the observers that each kind of training has."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from fedbench.experiment.observers import (
    BudgetIsUsed,
    Checkpoints,
    Compiling,
    Evaluation,
    Exposure,
    FailureCounts,
    Interrupt,
    Logged,
    Loss,
    Observer,
    ProgressBar,
    RoundEnd,
    Seconds,
    Selection,
    Traffic,
)
from fedbench.experiment.resume import how_to_resume
from fedbench.experiment.run_state import save
from fedbench.experiment.summary import Best
from fedbench.settings.config import RunConfig
from fedbench.simulation.federation import Federation
from fedbench.tracking.run_log import RunLog

log = logging.getLogger("fedbench")


def train_rounds(federation: Federation, limit: int, unit: str, observers: Sequence[Observer]) -> None:
    """Rounds until `limit` rounds, visits or bytes are spent, or an observer makes one the last; observers see each in their order."""
    with ExitStack() as closing:
        for observer in observers:
            observer.start(federation)
            closing.callback(observer.close)
        going = federation.spent(unit) < limit
        while going:
            started = time.perf_counter()
            result = federation.next_round()
            end = RoundEnd(federation, result, started, last=federation.spent(unit) >= limit)
            for observer in observers:
                observer.after_round(end)
            going = not end.last


def train(federation: Federation, best: Best, run_log: RunLog, config: RunConfig, out: Path) -> None:
    """All rounds that are left of a run's budget."""

    def interrupted(federation: Federation) -> str:
        save(out, federation, best, config)
        log.info("the state after round %d is saved", federation.round)
        return f"interrupted after round {federation.round}; {how_to_resume(config, out)}"

    observers = [
        BudgetIsUsed(config),
        # what a round's line is made of, in the order of its keys; `seconds` counts everything before it
        Loss(),
        Evaluation(config.eval_every),
        Exposure(config.seed),
        Selection(best, config, out),
        Seconds(),
        Traffic(),
        FailureCounts(),
        # the line is on disk before a checkpoint of its round is, so a resumed run never misses one
        Logged(run_log.round),
        Compiling(config.algorithm.name),
        ProgressBar(config.algorithm.name, config.limit, config.budget, config.quiet),
        Interrupt(interrupted),
        Checkpoints(best, config, out),
    ]
    train_rounds(federation, config.limit, config.budget, observers)
    best.rank_all()


def refit(federation: Federation, rounds: int, run_log: RunLog, config: RunConfig, out: Path) -> dict[str, np.ndarray]:
    """Train from scratch for the chosen number of rounds; returns test and full_test [U], evaluated once, at the end.

    The algorithm is as it was, so a schedule over all its rounds takes the course that led to the choice, and stops there.
    """

    def interrupted(federation: Federation) -> str:
        return f"interrupted after round {federation.round} of the refit, which begins again; {how_to_resume(config, out)}"

    bar = ProgressBar(f"{config.algorithm.name} refit", rounds, hidden=config.quiet)
    train_rounds(federation, rounds, "rounds", [Loss(), Seconds(), Logged(run_log.refit_round), bar, Interrupt(interrupted)])
    return {"test": federation.sampled_ranks()["test"], "full_test": federation.full_ranks()["test"]}
