"""Runs the trials of a search: asks for them, hands them to workers, ends those that others beat, and writes what each found."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from optuna.trial import Trial

from fedbench import files
from fedbench.errors import FedbenchError, UsageError
from fedbench.tuning.search import Search
from fedbench.tuning.space import Values
from fedbench.tuning.workers import Word, Worker, Workers

ATTEMPTS = 2
"""how often a trial is begun whose worker dies, for instance of too little memory"""
LOWEST = -1e9
"""stands for a value that is no number"""


@dataclass
class UnderWay:
    """A trial that a worker runs."""

    trial: Trial
    values: Values
    lines: list[dict[str, Any]] = field(default_factory=list)
    curve: list[list[float]] = field(default_factory=list)
    """[round, value on validation] of every evaluation"""

    @property
    def best(self) -> float:
        return max(value for _, value in self.curve)

    def found(self, ended: dict[str, Any]) -> dict[str, Any]:
        """What `trial.json` says."""
        value = self.best if self.curve and ended["how"] in ("complete", "pruned") else None
        best_round = None if value is None else next(round_ for round_, one in self.curve if one == value)
        told = {"number": self.trial.number, "values": self.values, "value": value, "best_round": best_round}
        return {**told, **ended, "curve": self.curve}


class Runner:
    """The trials that are still to be run, and who runs which."""

    def __init__(self, search: Search, wanted: int, workers: Workers, on_end: Callable[[dict[str, Any]], None]) -> None:
        self.search, self.wanted, self.workers, self.on_end = search, wanted, workers, on_end
        self.known = False
        """a worker has said what the data is"""
        self.waiting: deque[tuple[Trial, Values]] = deque()
        self.attempts: dict[int, int] = {}
        self.at_work = 0

    def run(self, jobs: int, on_ready: Callable[[dict[str, Any]], None]) -> None:
        """All that are missing, `jobs` at a time. on_ready: called once, with what is known of the data."""
        for trial, values in self.search.under_way():
            if found := self.search.result(trial.number):
                # it had ended, and the kill came before the journal said so
                self.search.tell(trial, found)
            else:
                self.waiting.append((trial, values))
        missing = self.wanted - len(self.search.ended())
        for _ in range(max(0, min(jobs, missing))):
            self._start()
        while self.at_work:
            worker, word = self.workers.hear()
            if word is None:
                self._died(worker)
            elif "error" in word:
                raise (UsageError if word["code"] == UsageError.exit_code else FedbenchError)(word["error"])
            elif "ready" in word:
                if not self.known:
                    self.known = True
                    on_ready(word["ready"])
                self._assign(worker)
            elif "line" in word:
                worker.tell(stop=self._hopeless(worker.trial, word))
            else:
                self._ended(worker, word["ended"])
                self._assign(worker)

    def _start(self) -> None:
        self.workers.start()
        self.at_work += 1

    def _assign(self, worker: Worker) -> None:
        """Give the worker a trial: one that was under way when the search was killed, or a new one; else let it go."""
        if self.waiting:
            trial, values = self.waiting.popleft()
        else:
            asked = self.search.ask() if self.search.begun() < self.wanted else None
            if asked is None:
                worker.dismiss()
                self.at_work -= 1
                return
            trial, values = asked
        worker.trial = UnderWay(trial, values)
        worker.tell(values=values)

    def _hopeless(self, now: UnderWay, word: Word) -> bool:
        line = word["line"]
        now.lines.append(line)
        # what is not finite comes as null
        now.curve.append([line["round"], LOWEST if word["value"] is None else word["value"]])
        return self.search.hopeless(now.trial, line["round"], now.best)

    def _ended(self, worker: Worker, ended: dict[str, Any]) -> None:
        now: UnderWay = worker.trial
        worker.trial = None
        place, found = self.search.place(now.trial.number), now.found(ended)
        place.mkdir(parents=True, exist_ok=True)
        files.write_text(place / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in now.lines))
        # its presence means that the trial has ended
        files.write_json(place / "trial.json", found)
        self.search.tell(now.trial, found)
        self.on_end(found)

    def _died(self, worker: Worker) -> None:
        """A worker that was dismissed has ended; one that was not has died, and its trial is begun again by another."""
        if worker.trial is None:
            if worker.process.wait():
                raise FedbenchError(f"a process that runs trials ended: {worker.error()}; its log is {worker.log}")
            return
        now: UnderWay = worker.trial
        number = now.trial.number
        self.attempts[number] = self.attempts.get(number, 1) + 1
        if self.attempts[number] > ATTEMPTS:
            ended = {"how": "failed", "rounds": 0, "visits": 0, "seconds": 0.0, "error": worker.error()}
            self._ended(worker, ended)
        else:
            worker.trial = None
            self.waiting.appendleft((now.trial, now.values))
        self.at_work -= 1
        self._start()
