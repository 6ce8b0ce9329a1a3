"""How often a run saves its state: the value of --checkpoint-every."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from fedbench.errors import UsageError

AUTO_SECONDS, AUTO_SHARE = 60.0, 0.02
"""--checkpoint-every auto: this often, or less often where saving would take more than this share of the run"""


@dataclass
class Cadence:
    """When the next checkpoint is due: after so many rounds or seconds."""

    rounds: int | None = None
    seconds: float | None = None
    share: float = 1.0
    """largest share of the run's time that saving may take"""

    def __post_init__(self) -> None:
        self._next = time.monotonic() + (self.seconds or 0)

    @staticmethod
    def of(text: str) -> Cadence:
        """`10` (rounds), `60s` (also m and h), `never` or `auto`."""
        if text == "auto":
            return Cadence(seconds=AUTO_SECONDS, share=AUTO_SHARE)
        if text == "never":
            return Cadence()
        match = re.fullmatch(r"(\d{1,9})([smh]?)", text, re.ASCII)
        if match is None or int(match[1]) == 0:
            raise UsageError(f"--checkpoint-every must be a number of rounds such as 10, a time such as 60s, auto or never, not {text!r}")
        number = int(match[1])
        return Cadence(seconds=number * {"s": 1, "m": 60, "h": 3600}[match[2]]) if match[2] else Cadence(rounds=number)

    def due(self, round_: int) -> bool:
        if self.rounds is not None:
            return round_ % self.rounds == 0
        return self.seconds is not None and time.monotonic() >= self._next

    def saved(self, took: float) -> None:
        """Set the next due time after a checkpoint that took `took` seconds."""
        self._next = time.monotonic() + max(self.seconds or 0, took / self.share)
