"""The processes that run trials, several at once. They end when this process ends, however it ends."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbench import files, found_by_children, trust
from fedbench.experiment import processes
from fedbench.settings.config import RunConfig

Word = dict[str, Any]
"""a line of JSON from a worker"""


@dataclass(eq=False)
class Worker:
    process: subprocess.Popen[str]
    log: Path
    trial: Any = None
    """what it works on, if anything"""

    def tell(self, **word: Any) -> None:
        # one that has died says so by the end of its answers
        with suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(word) + "\n")
            self.process.stdin.flush()

    def dismiss(self) -> None:
        with suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.close()

    def error(self) -> str:
        """Why it ended."""
        return processes.last_error(self.log, self.process.wait())


class Workers:
    """Starts workers and hears all of them."""

    def __init__(self, config: RunConfig, folder: Path, threads: int) -> None:
        self.folder, self.threads, self.algo = files.make_folder(folder), threads, config.algo
        self.all: list[Worker] = []
        self.words: queue.SimpleQueue[tuple[Worker, Word | None]] = queue.SimpleQueue()
        told = {name: value for name, value in config.to_dict().items() if name not in ("out", "resume")}
        files.write_json(self.folder / "config.json", {**told, "threads": threads, "quiet": True})

    def start(self) -> Worker:
        number = len(self.all)
        place = files.make_folder(self.folder / f"worker-{number}")
        words = ("-m", "fedbench.tuning.worker", str(self.folder / "config.json"), self.algo, str(place))
        limits = {"OMP_NUM_THREADS": str(self.threads), "NUMBA_NUM_THREADS": str(self.threads)}
        log = self.folder / f"worker-{number}.log"
        with files.created(log) as written:
            process = subprocess.Popen(
                processes.python(*words),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=written,
                text=True,
                env={**os.environ, **found_by_children(), **trust.handed_on(), **limits},
                process_group=0,  # Ctrl-C at the terminal reaches this process alone
                preexec_fn=processes.tied_to(os.getpid()),
            )
        worker = Worker(process, log)
        self.all.append(worker)
        threading.Thread(target=self._listen, args=(worker,), daemon=True).start()
        return worker

    def _listen(self, worker: Worker) -> None:
        assert worker.process.stdout is not None
        # ValueError: killed in mid-word
        with suppress(OSError, ValueError):
            for line in worker.process.stdout:
                self.words.put((worker, json.loads(line)))
        self.words.put((worker, None))

    def hear(self) -> tuple[Worker, Word | None]:
        """The next word of any worker; None: it has ended."""
        return self.words.get()

    def end(self) -> None:
        """Trials that are under way are begun again by the next call, so there is nothing to wait for."""
        for worker in self.all:
            worker.process.kill()
            worker.process.wait()
