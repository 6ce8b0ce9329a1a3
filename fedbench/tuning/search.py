"""The state of a search: which trials there are, what to try next and which to end early. Optuna's journal file holds all of it.

One process writes the journal, and holds the folder's lock while it does. What a trial found is in trials/<number>/ before the journal says
that it has ended; so after a kill a trial that was under way is run again with the same values, and one that had ended is not.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.trial import FrozenTrial, Trial, TrialState

from fedbench import files
from fedbench.contract.algorithm import Algorithm
from fedbench.contract.search import Span, Value
from fedbench.errors import DataError
from fedbench.tuning.space import Space, Values, counts, in_order

JOURNAL = "journal.log"
KEEP = 3
"""of trials that came as far as a rung, one in so many goes on (successive halving)"""
RUNGS = 2
"""a trial may be ended at a ninth and at a third of its budget"""
START = 10
"""trials that are drawn at random before those found guide the search"""
MOST_REPEATS = 30
"""repeated draws in a row after which the space counts as exhausted"""


class Held(JournalFileSymlinkLock):
    """No lock: the folder is this process's already. Optuna's own would outlive a kill."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None: ...


class Search:
    """Asks for trials and hears how they go. The first trial is the method as the command line has it."""

    def __init__(self, folder: Path, space: Space, algorithm: Algorithm, limit: int, seed: int) -> None:
        """limit: a trial's budget in rounds; seed: of what is drawn, not of training"""
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        # that a part of it is experimental, and that a trial that is run again reports what is known
        warnings.filterwarnings("ignore", module="optuna")
        self.folder, self.space, self.algorithm, self.seed = folder, in_order(space), algorithm, seed
        self.rungs = [max(1, -(-limit // KEEP**rung)) for rung in range(RUNGS, 0, -1)]
        journal = folder / JOURNAL
        drop_cut_line(journal)
        try:
            storage = JournalStorage(JournalFileBackend(str(journal), Held(str(journal))))
            self.study = optuna.create_study(
                storage=storage, study_name="search", direction="maximize", load_if_exists=True, sampler=self._sampler(0)
            )
        except (ValueError, KeyError, AssertionError) as error:
            raise DataError(f"{journal}: cannot be read ({files.reason(error)}); remove the folder, or give another --out") from None

    def _sampler(self, number: int, attempt: int = 0) -> optuna.samplers.BaseSampler:
        """A sampler whose draws depend on the trial's number alone, so that a search that was killed goes on as it would have."""
        mixed = int.from_bytes(hashlib.sha256(f"{self.seed} {number} {attempt}".encode()).digest()[:4], "big")
        return optuna.samplers.TPESampler(n_startup_trials=START, multivariate=True, group=True, constant_liar=True, seed=mixed)

    # ---- asking ------------------------------------------------------------------------------------------------------------
    def under_way(self) -> list[tuple[Trial, Values]]:
        """Trials that a killed search left in mid-course, with their values."""
        trials = [Trial(self.study, frozen._trial_id) for frozen in self._trials(TrialState.RUNNING)]
        return [(trial, self._values(trial)) for trial in trials]

    def ask(self) -> tuple[Trial, Values] | None:
        """A new trial and its values, which no trial before it had; None if the space has no more."""
        if not self._trials(TrialState.WAITING):
            if (drawn := self._drawn()) is None:
                return None
            # one line of the journal holds all values: a kill leaves no trial with some of them
            self.study.enqueue_trial(drawn)
        trial = self.study.ask()
        return trial, self._values(trial)

    def _drawn(self) -> Values | None:
        trials = self._trials()
        known = [trial.params for trial in trials]
        for attempt in range(MOST_REPEATS):
            # a study that is not stored, so that a draw that is not taken leaves nothing
            scratch = optuna.create_study(direction="maximize", sampler=self._sampler(len(trials), attempt))
            if trials:
                scratch.add_trials(trials)
            else:
                scratch.enqueue_trial(self._there())
            if (values := self._values(scratch.ask())) not in known:
                return values
        return None

    def _there(self) -> Values:
        """The settings that are there, where the space has them."""
        return {name: now for name, span in self.space.items() if span.holds(now := getattr(self.algorithm, name))}

    def _values(self, trial: Trial) -> Values:
        """The trial's values: drawn, or as they were drawn before a kill. The first trial has the settings that are there."""
        values: Values = {}
        for name, span in self.space.items():
            if not counts(span, values, self.algorithm):
                continue
            # what chooses for itself, such as 0 or none, has no place in the span
            if trial.number > 0 or span.holds(getattr(self.algorithm, name)):
                values[name] = suggested(trial, name, span)
        return values

    # ---- hearing -----------------------------------------------------------------------------------------------------------
    def hopeless(self, trial: Trial, round_: int, best: float) -> bool:
        """Note the best value so far; whether the trial should end, for others were better at this point.

        Successive halving, by what is noted alone: a trial that is run again after a kill ends where it would have ended.
        """
        before = [step for step in self._trials()[trial.number].intermediate_values if step < round_]
        trial.report(best, round_)
        rung = next((rung for rung in reversed(self.rungs) if rung <= round_), None)
        # the settings that are there are what all others are compared with
        if trial.number == 0 or rung is None or any(step >= rung for step in before):
            return False
        others = [value for one in self._trials() if one.number != trial.number and (value := at_rung(one, rung)) is not None]
        return sum(value > best for value in others) >= -(-(len(others) + 1) // KEEP)

    def tell(self, trial: Trial, found: Mapping[str, Any]) -> None:
        """End a trial whose result is on disk. `found`: as `trial.json` has it."""
        for key in ("how", "visits", "rounds"):
            trial.set_user_attr(key, found[key])
        if found["how"] == "complete":
            self.study.tell(trial, found["value"])
        else:
            # not FAIL, which the sampler forgets: it should keep away from there
            self.study.tell(trial, state=TrialState.PRUNED)

    # ---- what there is -----------------------------------------------------------------------------------------------------
    def _trials(self, *states: TrialState) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False, states=states or None)

    def begun(self) -> int:
        """Trials so far, ended or under way."""
        return sum(trial.state != TrialState.WAITING for trial in self._trials())

    def ended(self) -> list[dict[str, Any]]:
        """What each ended trial found, in their order."""
        numbers = [trial.number for trial in self._trials(TrialState.COMPLETE, TrialState.PRUNED)]
        return [found for number in numbers if (found := self.result(number))]

    def place(self, number: int) -> Path:
        return self.folder / "trials" / f"{number:04d}"

    def result(self, number: int) -> dict[str, Any]:
        """What a trial found, by its folder; {} if it has not ended."""
        return files.read_json(self.place(number) / "trial.json")


def suggested(trial: Trial, name: str, span: Span) -> Value:
    if span.choices:
        value = trial.suggest_categorical(name, span.choices)
        assert value is not None
        return value
    if span.whole:
        return trial.suggest_int(name, int(span.low), int(span.high), log=span.log)
    return trial.suggest_float(name, span.low, span.high, log=span.log)


def at_rung(trial: FrozenTrial, rung: int) -> float | None:
    """A trial's value when it came to a rung, if it did."""
    steps = [step for step in trial.intermediate_values if step >= rung]
    return trial.intermediate_values[min(steps)] if steps else None


def drop_cut_line(journal: Path) -> None:
    """A line that a kill cut short goes: what is written next would stand on it."""
    with suppress(FileNotFoundError):
        content = files.read_bytes(journal)
        if content and not content.endswith(b"\n"):
            whole = content[: content.rfind(b"\n") + 1]
            files.write_text(journal, whole.decode("utf-8"))


def best_of(ended: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The trial with the highest value on validation; of equal ones the first."""
    valued = [found for found in ended if found["value"] is not None]
    return max(valued, key=lambda found: (found["value"], -found["number"])) if valued else None


def digest(curve: list[list[float]]) -> str:
    """Of a validation curve: [round, value] of every evaluation."""
    return hashlib.sha256(json.dumps(curve).encode()).hexdigest()
