"""The run's side of its MLflow copy: starts the mirror process (mirror_process.py), talks to it, and waits for it for a limited time."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from fedbench import found_by_children, locks
from fedbench.errors import UsageError
from fedbench.tracking import mirror_process

logger = logging.getLogger("fedbench")

AT_HAND = "FEDBENCH_MIRROR"
"""environment variable: the socket of a process that has imported MLflow, see `mlflow_at_hand`"""
PATIENCE = "FEDBENCH_MLFLOW_PATIENCE"
"""environment variable: how many seconds the end of a run waits for MLflow"""
SAY_SO = 3.0
"""seconds after which the log says that the run waits"""


def patience() -> float:
    word = os.environ.get(PATIENCE, "30")
    with suppress(ValueError):
        if 0 < (seconds := float(word)) < float("inf"):
            return seconds
    raise UsageError(f"{PATIENCE} must be a number of seconds, such as 30, not {word!r}")


class Mirror:
    """The MLflow copy of a run: a process beside it that reads its folder, so that the run never waits for MLflow before its end.

    The first failure ends the copy for the rest of the run: the folder is what counts.
    """

    def __init__(self, order: dict[str, Any], note: Callable[[str], None]):
        """order: what to copy, see mirror_process.Copy; note: called with the MLflow run's id once it is known."""
        self.run_id: str | None = None
        self.link: str | None = None
        self.whole = False
        """the copy is complete"""
        self.ended = False
        """the mirror process knows how the run ended"""
        self.place = mirror_process.place(order["experiment"])
        self._out = order["out"]
        self._note = note
        self._process: subprocess.Popen[str] | None = None
        self._patience = patience()
        self._copier: tuple[int, str] | None = None
        """pid and start of the process that copies"""
        self._excused = False
        """the copy's end was reported or needs no report"""
        self._words, self._answers = self._connect() or self._start()
        self._tell({**order, "patience": self._patience})
        self._listener = threading.Thread(target=self._listen, name="mlflow", daemon=True)
        self._listener.start()

    def _connect(self) -> tuple[IO[str], IO[str]] | None:
        """Connect to the process that `mlflow_at_hand` has started, if there is one."""
        with suppress(KeyError, OSError), socket.socket(socket.AF_UNIX) as line:
            line.connect(os.environ[AT_HAND])
            return line.makefile("w", encoding="utf-8"), line.makefile("r", encoding="utf-8")
        return None

    def _start(self) -> tuple[IO[str], IO[str]]:
        self._process = start_mirror(stdout=subprocess.PIPE)
        assert self._process.stdin is not None and self._process.stdout is not None
        return self._process.stdin, self._process.stdout

    def end(self, status: str, final: dict[str, Any], files: list[Path]) -> None:
        """Say how the run ended and wait until the copy is whole, or for as long as patience lasts."""
        self.ended = True
        self._tell({"status": status, "final": final, "files": [str(file) for file in files]})
        with suppress(OSError):
            self._words.close()
        deadline = time.monotonic() + self._patience
        try:
            self._listener.join(min(SAY_SO, self._patience))
            if self._listener.is_alive():
                logger.info("waiting for MLflow, at most %g s in all (%s); Ctrl-C ends the wait", self._patience, PATIENCE)
                self._listener.join(max(0.0, deadline - time.monotonic()))
            if self._listener.is_alive():
                self._give_up(f"the copy was not complete after {self._patience:g} s")
            if self._process:
                self._process.wait(max(1.0, deadline - time.monotonic()))
        except KeyboardInterrupt:
            self._excused = True  # it knows how the run ended and continues alone, for as long as its own patience lasts
            raise
        except subprocess.TimeoutExpired:
            self._kill()
        locks.remove_if_free(Path(self._out) / mirror_process.LOCK)

    def _give_up(self, why: str) -> None:
        self._excused = True
        self._say(why)
        self._kill()

    def _kill(self) -> None:
        """SIGKILL, which ends a stopped process too."""
        if self._process:
            self._process.kill()
            self._process.wait()
        elif self._copier and mirror_process.alive(*self._copier):
            with suppress(OSError):
                os.kill(self._copier[0], signal.SIGKILL)

    def _say(self, why: str) -> None:
        self.run_id = self.link = None
        again = f"the same flags with --resume {self._out} complete the copy"
        logger.warning("MLflow tracking given up (%s); nothing is lost: all is in %s, and %s", why, self._out, again)

    def _tell(self, word: dict[str, Any]) -> None:
        with suppress(OSError):  # it has given up and said why, or was killed, which the listener says
            self._words.write(json.dumps(word) + "\n")
            self._words.flush()

    def _listen(self) -> None:
        with suppress(OSError, ValueError), self._answers as answers:  # ValueError: killed in mid-word
            for line in answers:
                self._hear(json.loads(line))
        if not self._excused:
            self._say("the process that copies was killed")

    def _hear(self, answer: dict[str, Any]) -> None:
        if "pid" in answer:
            self._copier = answer["pid"], answer["pid_start"]
        elif "failure" in answer:
            self._excused = True
            self._say(answer["failure"])
        elif "whole" in answer:
            self._excused = self.whole = True
        else:
            self.run_id, self.link = answer["run_id"], answer["link"]
            with suppress(OSError):  # a full disk: no reason for a traceback of this thread
                self._note(answer["run_id"])


def start_mirror(*arguments: str, stdout: int) -> subprocess.Popen[str]:
    # a session of its own: Ctrl-C at the terminal is for the run, which has a last word to say
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "fedbench.tracking.mirror_process", *arguments],
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=None if logger.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL,
        text=True,
        env={**os.environ, **found_by_children()},
        start_new_session=True,
    )


@contextmanager
def mlflow_at_hand(wanted: bool) -> Iterator[dict[str, str]]:
    """Keep a process that has imported MLflow; yields the environment variables by which runs started meanwhile find it."""
    if not wanted:
        yield {}
        return
    with tempfile.TemporaryDirectory() as folder:  # ours alone, so that nobody else can connect
        address = str(Path(folder) / "mlflow")
        process = start_mirror(address, stdout=subprocess.DEVNULL)
        try:
            yield {AT_HAND: address}
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(patience())
            except subprocess.TimeoutExpired:  # stopped, or the machine is: no copy depends on it any more
                process.kill()
                process.wait()


def within(seconds: float, work: Callable[[], object]) -> str | None:
    """Run `work`, which MLflow may block, for at most so many seconds; returns why it failed, in one line, or None."""
    failed: list[str] = []

    def attempt() -> None:
        try:
            work()
        except Exception as error:
            failed.append(mirror_process.one_line(error))

    # a thread that nobody waits for at the end; MLflow itself has no limit for an answer that comes a byte at a time
    thread = threading.Thread(target=attempt, name="mlflow", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        return f"no answer within {seconds:g} s"
    return failed[0] if failed else None
