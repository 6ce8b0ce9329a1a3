"""Runs in processes of their own, several at once. They end when this process ends, however it ends."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fedbench import files, found_by_children
from fedbench.files import write_json

log = logging.getLogger("fedbench")

LOOK_SECONDS = 0.05
END_SECONDS = 60.0
"""how long interrupted jobs may take to save their state"""
DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG"""


@dataclass(frozen=True)
class Job:
    """One process."""

    key: str
    command: list[str]
    log: Path
    """takes what it prints"""
    env: dict[str, str] = field(default_factory=dict)


class Event(NamedTuple):
    """A job began (no code) or ended."""

    key: str
    code: int | None = None
    """exit code; negative: the signal that killed it"""
    seconds: float = 0.0


class Child(NamedTuple):
    job: Job
    process: subprocess.Popen[bytes]
    began: float


def job(key: str, config: dict[str, Any], out: Path, work: Path, threads: int, **environment: str) -> Job:
    """One run into `out`, or going on with what is there; its config and its log are kept in `work`."""
    file = work / f"{key}.json"
    work.parent.mkdir(parents=True, exist_ok=True)
    files.make_folder(work)
    # the command line says the rest
    write_json(file, {name: value for name, value in config.items() if name not in ("out", "resume", "threads", "quiet")})
    words = ["--config", str(file), "--out", str(out), "--resume", "auto", "--threads", str(threads), "--quiet"]
    limits = {"OMP_NUM_THREADS": str(threads), "NUMBA_NUM_THREADS": str(threads)}
    return Job(key, python("-m", "fedbench", "train", *words), work / f"{key}.log", {**found_by_children(), **environment, **limits})


def python(*words: str) -> list[str]:
    """A command for this very Python. The folder that it is started in is no place for modules: what lies there is the user's."""
    return [sys.executable, "-P", *words]


def threads_each(given: int | None, at_once: int) -> int:
    """Threads of a run, if so many run at once."""
    return given or max(1, (os.cpu_count() or 1) // at_once)


def run(jobs: Sequence[Job], at_once: int) -> Generator[Event, None, None]:
    """Start the jobs in order, `at_once` at a time. An interrupt is handed on to them, and waited for."""
    waiting = list(jobs)
    children: list[Child] = []
    try:
        while waiting or children:
            while waiting and len(children) < at_once:
                children.append(Child(waiting[0], start(waiting[0]), time.monotonic()))
                yield Event(waiting.pop(0).key)
            time.sleep(LOOK_SECONDS)
            for child in [child for child in children if child.process.poll() is not None]:
                children.remove(child)
                yield Event(child.job.key, child.process.returncode, time.monotonic() - child.began)
    finally:
        end([child.process for child in children])


def start(job: Job) -> subprocess.Popen[bytes]:
    with files.created(job.log) as log:
        return subprocess.Popen(
            job.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **job.env},
            process_group=0,  # Ctrl-C at the terminal reaches this process alone, which hands it on once
            preexec_fn=tied_to(os.getpid()),
        )


def tied_to(parent: int) -> Callable[[], None]:
    """What a new process does first: from now on it is killed when its parent ends (where the system can do that)."""
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

    def tie() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job ignores it
        if prctl is not None:
            prctl(DIE_WITH_PARENT, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

    return tie


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Interrupt them, so that they can save their state; kill those that take too long, or all on a second Ctrl-C."""
    processes = [process for process in processes if process.poll() is None]
    if processes:
        log.warning("waiting until the %d runs under way have saved their state; Ctrl-C ends them at once", len(processes))
    for process in processes:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
    last = time.monotonic() + END_SECONDS
    try:
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, last - time.monotonic()))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def last_error(log: Path, code: int) -> str:
    """Why a job failed, in one line: its own last error line, or the signal that killed it."""
    if code < 0:
        with suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}" + (" (out of memory?)" if -code == signal.SIGKILL else "")
        return f"killed by signal {-code}"
    try:
        lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    said = [line for line in lines if line.startswith("fedbench:")]
    return (said or lines or [f"exit code {code}, and not a word in {log}"])[-1]
