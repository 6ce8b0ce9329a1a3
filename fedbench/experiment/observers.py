"""What happens after every round of training, one observer for each thing: evaluation, the log, the progress bar, checkpoints.

The loop (training.py) calls them in the order of their list, and the order matters: an observer reads what those before it have written
into the round's `line` and decided about `last`. New ones (a privacy ledger, early stopping) are one more member of the list.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from numba.core import event
from numba.core.event import Listener
from tqdm.auto import tqdm

from fedbench.errors import Interrupted, UsageError
from fedbench.evaluation.metrics import metrics_of
from fedbench.experiment.kept_model import Aside
from fedbench.experiment.run_state import save
from fedbench.experiment.summary import Best
from fedbench.kernels.compiler.build import DERIVED
from fedbench.settings.cadence import Cadence
from fedbench.settings.config import RunConfig
from fedbench.simulation import workers
from fedbench.simulation.engine import Round
from fedbench.simulation.exposure import exposure
from fedbench.simulation.federation import Federation

log = logging.getLogger("fedbench")

ALL, ONE = 30, 10
"""seconds that it takes about to compile all kernels of a run, or those alone that are derived from a method"""
SELECT = {"val": "ndcg_10", "test": "hr_10"}
"""the metric that chooses the reported round of a ranking; of ratings it is the RMSE"""


@dataclass
class RoundEnd:
    """A round that has just ended, as observers see it."""

    federation: Federation
    result: Round
    started: float
    """when it began, by time.perf_counter"""
    last: bool
    """whether training ends here: the budget is spent, or an observer has said so"""
    line: dict[str, float] = field(default_factory=dict)
    """the round's numbers for the log, in the order in which they were added"""
    outcome: dict[str, Any] = field(default_factory=dict)
    """every client's ranks or predictions, if this round was evaluated"""
    scores: dict[str, dict[str, float]] = field(default_factory=dict)
    """metrics on validation and test, if this round was evaluated"""


class Observer:
    """Does something after every round; each method does nothing unless it is overridden."""

    def start(self, federation: Federation) -> None:
        """Called once before the first round."""

    def after_round(self, end: RoundEnd) -> None:
        """Called after every round."""

    def close(self) -> None:
        """Called once when training is over, also after an error."""


@dataclass(eq=False)
class CompileClock(Listener):
    """Counts kernels that numba compiles, and the seconds that takes; install it as a listener to numba:compile."""

    kernels: int = 0
    seconds: float = 0.0
    depth: int = 0
    """functions that are being compiled: a kernel, and within it those that it calls"""
    began: float = 0.0

    def on_start(self, of: event.Event) -> None:
        if not self.depth:
            self.began = time.perf_counter()
        self.depth += 1

    def on_end(self, of: event.Event) -> None:
        self.depth -= 1
        if not self.depth:
            self.seconds += time.perf_counter() - self.began
            self.kernels += 1


class Compiling(Observer, CompileClock):
    """Says that rounds wait for kernels to be compiled, and when they do no longer."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.method, self.said = method, False

    def start(self, federation: Federation) -> None:
        event.register("numba:compile", self)

    def on_start(self, of: event.Event) -> None:
        if not self.said:
            self.said = True
            alone = of.data["dispatcher"].py_func.__module__.startswith(DERIVED)  # all that a run compiles before is there
            self.say(f"compiling kernels for {self.method} (about {ONE if alone else ALL} s, once) …")
        super().on_start(of)

    def after_round(self, end: RoundEnd) -> None:
        if self.said:
            self.say(f"compiled {self.kernels} kernels for {self.method} in {self.seconds:.1f} s; they are kept for the next run")
        self.kernels, self.seconds, self.said = 0, 0.0, False

    def close(self) -> None:
        event.unregister("numba:compile", self)

    def say(self, line: str) -> None:
        with tqdm.external_write_mode():  # the bar makes way for a line
            log.info(line)


class Loss(Observer):
    """The mean training loss over the clients of the round."""

    def after_round(self, end: RoundEnd) -> None:
        end.line["round"] = end.federation.round
        if end.result.updates:
            end.line["loss"] = float(end.result.loss.mean())


@dataclass
class Evaluation(Observer):
    """Metrics on validation and test, of every reading of the model, every so many rounds and after the last."""

    every: int

    def after_round(self, end: RoundEnd) -> None:
        if end.federation.round % self.every == 0 or end.last:
            end.outcome = end.federation.outcome()
            end.scores = metrics_of(end.federation.split, end.outcome)
            readings = {f"{name}/": metrics_of(end.federation.split, found) for name, found in end.federation.readings().items()}
            for name, scores in {"": end.scores, **readings}.items():
                end.line |= {f"{name}{part}/{key}": value for part, metrics in scores.items() for key, value in metrics.items()}


@dataclass
class Exposure(Observer):
    """What the round's uploads show of clients' items; only in rounds that are evaluated, for it costs a pass over the uploads."""

    seed: int

    def after_round(self, end: RoundEnd) -> None:
        if end.scores:
            federation = end.federation
            tables, own = federation.algorithm.tables, federation.store.clients
            end.line |= exposure(end.result.uploads, tables, federation.split, self.seed, federation.round, own)


@dataclass
class Selection(Observer):
    """Keeps the best round so far: its score, its outcome and, set aside, its state."""

    best: Best
    config: RunConfig
    out: Path

    def start(self, federation: Federation) -> None:
        self.aside = Aside(federation, self.config, self.out)
        more = federation.spent(self.config.budget) < self.config.limit
        if federation.round and self.best.round == federation.round and more:
            self.aside.put(federation, self.best)  # resumed at the best round: a checkpoint does not hold its state twice

    def after_round(self, end: RoundEnd) -> None:
        if not end.scores:
            return
        federation, best = end.federation, self.best
        score, better = self.judge(end)
        # decided together, for what follows exchanges state between workers
        if not workers.on_any(better):
            return
        best.round, best.score, best.outcome = federation.round, score, end.outcome
        if not federation.split.held:  # the next round may be better: if the model is small its full ranking can wait
            best.unranked = federation.frozen() or federation
            if best.unranked is federation:
                best.rank_all()
        if not end.last:  # after the last round it is what the federation holds
            self.aside.put(federation, best)

    def judge(self, end: RoundEnd) -> tuple[float, bool]:
        """The round's score, higher being better, and whether it beats the best one."""
        split = end.federation.split
        on = split.protocol.select_on
        if on == "last":
            return 0.0, end.last
        score = -end.scores[on]["rmse"] if split.held else end.scores[on][SELECT[on]]
        # a later round wins a tie on test, as in the published code; on validation the earlier one stands
        return score, score > self.best.score or (on == "test" and score == self.best.score)


class Seconds(Observer):
    """How long the round took, with all that observers before this one did."""

    def after_round(self, end: RoundEnd) -> None:
        end.line["seconds"] = time.perf_counter() - end.started


class Traffic(Observer):
    """Bytes and client visits since the first round."""

    def after_round(self, end: RoundEnd) -> None:
        federation = end.federation
        end.line |= {"bytes_up": federation.bytes_up, "bytes_down": federation.bytes_down}
        end.line["client_visits"] = int(federation.visits.sum())


class FailureCounts(Observer):
    """How many clients failed in the round, and in which way; nothing where none could and none did."""

    def start(self, federation: Federation) -> None:
        self.before = dict(federation.counts)

    def after_round(self, end: RoundEnd) -> None:
        total = end.federation.counts
        now = {name: total[name] - self.before[name] for name in total}
        self.before = dict(total)
        if end.federation.failures.happen() or any(now.values()):
            end.line |= now


@dataclass
class Logged(Observer):
    """Hands the round's line to the run log."""

    write: Callable[[dict[str, float]], None]

    def after_round(self, end: RoundEnd) -> None:
        self.write(end.line)


@dataclass
class ProgressBar(Observer):
    """A bar over a budget of rounds, visits or bytes, with the scores of the last evaluation beside it."""

    name: str
    limit: int
    unit: str = "rounds"
    hidden: bool = False

    def start(self, federation: Federation) -> None:
        self.spent = federation.spent(self.unit)
        self.bar = tqdm(
            total=self.limit,
            initial=self.spent,
            desc=self.name,
            unit=self.unit[:-1],
            unit_scale=self.unit == "bytes",
            disable=self.hidden or not workers.is_first(),
            dynamic_ncols=True,
        )

    def after_round(self, end: RoundEnd) -> None:
        if end.scores:
            key, label = ("rmse", "RMSE") if end.federation.split.held else ("hr_10", "HR@10")
            shown = (f"{part} {label} {metrics[key]:.3f}" for part, metrics in end.scores.items())
            self.bar.set_postfix_str(" ".join(shown), refresh=False)
        before, self.spent = self.spent, end.federation.spent(self.unit)
        self.bar.update(min(self.spent, self.limit) - before)

    def close(self) -> None:
        self.bar.close()


class Interrupt(Observer):
    """Ctrl-C waits for the end of the round, since a half-finished round cannot be resumed. A second Ctrl-C does not wait."""

    def __init__(self, finish: Callable[[Federation], str]) -> None:
        self.finish = finish
        """saves what is to be saved; returns the error message"""
        self.asked = self.installed = False

    def start(self, federation: Federation) -> None:
        self.before = signal.getsignal(signal.SIGINT)
        # a handler of somebody else's, or another thread than Python's main one: signals are not ours to take
        if threading.current_thread() is threading.main_thread() and self.before is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._ask)
            self.installed = True

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        # torchrun hands a Ctrl-C on that may have come from the terminal already, and does not wait for ever
        signal.signal(signal.SIGINT, self.before if workers.count() == 1 else signal.SIG_IGN)

    def after_round(self, end: RoundEnd) -> None:
        # asked of one worker, all end after the same round
        if workers.on_any(self.asked):
            raise Interrupted(self.finish(end.federation))

    def close(self) -> None:
        if self.installed:
            signal.signal(signal.SIGINT, self.before)


@dataclass
class Checkpoints(Observer):
    """Saves the state whenever the cadence says so; not after the last round, whose result follows at once."""

    best: Best
    config: RunConfig
    out: Path

    def start(self, federation: Federation) -> None:
        self.cadence = Cadence.of(self.config.checkpoint_every)

    def after_round(self, end: RoundEnd) -> None:
        if not end.last and workers.on_any(self.cadence.due(end.federation.round)):
            started = time.perf_counter()
            save(self.out, end.federation, self.best, self.config)
            self.cadence.saved(time.perf_counter() - started)


@dataclass
class BudgetIsUsed(Observer):
    """Refuses a budget in a unit that the method does not use, for it would never end."""

    config: RunConfig

    def after_round(self, end: RoundEnd) -> None:
        unit = self.config.budget
        if end.federation.spent(unit) == 0 and len(end.result.loss):
            raise UsageError(f"--budget {unit}: {self.config.algorithm.name} uses none, so no budget would end it; use --rounds")
