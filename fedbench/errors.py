"""Errors that end a command: one line that says what, where and what to do, and an exit code."""

from __future__ import annotations

import errno

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""no room on the disk, in the quota, or for a file of this size"""


class FedbenchError(Exception):
    """A run or trial failed (exit 1)."""

    exit_code = 1


class UsageError(FedbenchError):
    """A flag, a config key or a combination of them is wrong (exit 2)."""

    exit_code = 2


class DataError(FedbenchError):
    """Data cannot be had, or is not what it should be (exit 3)."""

    exit_code = 3


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, with what is to be said about it: how far the command came and how it goes on (exit 130)."""


class NotFinite(FedbenchError):
    """A quantity that an algorithm needs finite is not; without the uploads that made it so the round may go on."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} is not finite: training diverged; lower the learning rate")
        self.what = what
