"""Time estimates by trial: a few rounds of each algorithm on each dataset, in a process that ends after a minute."""

from __future__ import annotations

import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedbench import found_by_children
from fedbench.errors import FedbenchError
from fedbench.experiment import processes
from fedbench.files import read_json, write_json
from fedbench.settings.command_line import resolve
from fedbench.settings.config import RunConfig

SECONDS = 60.0
"""how long all trials together may take"""
ENOUGH = 2.0
"""seconds after which one algorithm on one dataset is not tried for another round"""
MOST_ROUNDS = 4
STATE_MB = 256.0
"""what the clients of a trial may keep together; where it would be more, fewer clients are taken and the times scaled up"""


@dataclass(frozen=True)
class Trial:
    """What a round of one algorithm costs on one dataset."""

    start: float
    """seconds before the first round: packages, data, split"""
    work: float
    """seconds of sampling, training and aggregation in a round"""
    evaluation: float
    """seconds of one evaluation"""
    ranking: float
    """seconds of the full ranking, once a run"""
    cohort: int
    """clients of that round"""
    epochs: int
    clients: int
    """all there are"""
    bytes: float
    """up and down in that round"""

    def visits(self, config: RunConfig) -> int:
        """Clients per round of another config of this algorithm on this dataset."""
        return config.algorithm.cohort(self.clients)

    def rounds(self, config: RunConfig) -> float:
        """Rounds of such a run, in whatever unit its budget is."""
        each = {"rounds": 1.0, "visits": self.visits(config), "bytes": max(1.0, self.bytes * self.visits(config) / self.cohort)}
        return max(1.0, config.limit / each[config.budget])

    def seconds(self, config: RunConfig) -> float:
        """Seconds of the whole run: training grows with clients times epochs, evaluation does not."""
        grown = self.visits(config) * config.algorithm.local_epochs / (self.cohort * self.epochs)
        rounds = self.rounds(config) * (self.work * grown + self.evaluation / config.eval_every)
        return self.start + rounds * (2 if config.refit else 1) + self.ranking


def run(configs: Mapping[Any, RunConfig], threads: int, seconds: float = SECONDS) -> dict[Any, Trial | str]:
    """A trial of each config, or the error as text; those that did not fit into the time are left out."""
    with tempfile.TemporaryDirectory(prefix="fedbench-") as name:
        folder = Path(name)
        for number, config in enumerate(configs.values()):
            told = {key: value for key, value in config.to_dict().items() if key != "out"}
            write_json(folder / f"{number}.config.json", {**told, "threads": threads, "resume": "auto"})
        command = processes.python("-m", "fedbench.sweeping.trials", name, *(config.algo for config in configs.values()))
        process = processes.start(processes.Job("trials", command, folder / "log", found_by_children()))
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            # results of trials that were done are on disk
            pass
        finally:
            process.kill()
            process.wait()
        found = {key: read_json(folder / f"{number}.json") for number, key in enumerate(configs)}
    return {key: Trial(**told["trial"]) if "trial" in told else str(told["error"]) for key, told in found.items() if told}


def main(folder: Path, algorithms: Sequence[str]) -> None:
    """Try the configs in a folder one after another; each result is written beside its config."""

    # CPU time since the process began: imports are part of a run's start
    started = time.process_time()
    logging.disable(logging.WARNING)
    for number, algo in enumerate(algorithms):
        try:
            config = resolve(["--config", str(folder / f"{number}.config.json"), "--algo", algo])
            told: dict[str, Any] = {"trial": asdict(_try(config, started))}
        except FedbenchError as error:
            told = {"error": str(error)}
        except Exception as error:
            told = {"error": f"{type(error).__name__}: {error}"}
        write_json(folder / f"{number}.json", told)


def _try(config: RunConfig, started: float) -> Trial:
    import torch

    from fedbench.experiment.machine import choose_device, set_threads
    from fedbench.experiment.prepare import check_cohort, prepare
    from fedbench.experiment.round_timing import PARTS, bounded_split, round_parts
    from fedbench.simulation.federation import Federation

    set_threads(config.threads or 1)
    began = time.perf_counter()
    split, _ = prepare(config.dataset, config.protocol, config.data)
    loaded = time.perf_counter() - began
    check_cohort(config.algorithm, split)
    everybody, device = split.clients, choose_device(config.device)
    dtype = torch.float64 if config.dtype == "float64" else torch.float32
    split = bounded_split(config, split, STATE_MB, dtype, device)
    share = split.clients / everybody
    federation = Federation.start(config.algorithm, split, config.seed, device, dtype, kernel=config.kernel, compile=config.compile)
    rounds = [round_parts(federation, time.perf_counter)]  # kernels are compiled and compared in it, so it does not count
    began = time.perf_counter()
    while len(rounds) == 1 or (len(rounds) < MOST_ROUNDS and time.perf_counter() - began < ENOUGH):
        rounds.append(round_parts(federation, time.perf_counter))
    # the fastest round, for other programs only ever slow one down
    parts = {name: min(one[name] for one in rounds[1:]) for name in PARTS}
    return Trial(
        start=started + loaded,
        work=parts["sample"] + parts["train"] + parts["aggregate"],
        evaluation=parts["evaluate"] / share,
        ranking=parts["full ranking"] / share,
        cohort=max(1, int(federation.visits.sum()) // len(rounds)),
        epochs=config.algorithm.local_epochs,
        clients=everybody,
        bytes=(federation.bytes_up + federation.bytes_down) / len(rounds),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
