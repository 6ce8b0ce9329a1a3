"""RunConfig: every setting of one run, and its identity (what determines the result, and the hash of that)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbench.contract.algorithm import Algorithm
from fedbench.contract.dataset import DatasetOptions
from fedbench.data import protocol as protocols
from fedbench.data.protocol import Protocol
from fedbench.settings.naming import NOT_HASHED
from fedbench.simulation.failures import Failures

SYNTHETIC = ("users", "items", "interactions", "data_seed")


@dataclass(frozen=True)
class RunConfig:
    """Every setting of one run. Fields of plain types are flags: the sentence under a field is its --help text."""

    algo: str
    """the algorithm: a name from --list, or a path to a .py file that holds one"""
    algorithm: Algorithm
    dataset: str
    """the data: a name from --list, or a path to a .csv file (user,item[,rating][,time])"""
    data: DatasetOptions = DatasetOptions()
    failures: Failures = Failures()
    protocol: Protocol = Protocol()
    """how data is split and ranked: clean (no leak), ncf (the NCF paper's files), published (as the FedEM code: LEAKS)"""
    recipe: str = "clean"
    """the algorithm's switches: clean, published (its paper's own) or tuned (what `tune` found for this dataset); follows --protocol if
    not given"""
    seed: int = 0
    """seed of everything but the split"""
    refit: bool = False
    """train once more for the chosen number of rounds with the validation items in training; reported beside the strict result"""
    budget: str = "rounds"
    """what --budget-value counts: rounds, visits (clients a round, summed) or bytes (up and down)"""
    budget_value: int | None = None
    """the run ends with the round that reaches it, however many rounds that takes; --rounds ends the run if not given"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 or mps"""
    dtype: str = "float32"
    """precision of the tensors"""
    threads: int | None = None
    """CPU threads; what torch takes if not given"""
    compile: bool | None = None
    """compile the training step of what no kernel can be derived from with torch.compile: slow to start, faster rounds, kept for the
    next run; on a GPU unless --no-compile, on a CPU on request"""
    kernel: str = "auto"
    """auto: kernels derived from the method's own code, where they can be; off: PyTorch alone, slower"""
    block_rows: int | None = None
    """rows of clients' tables in one block; chosen from cache or memory size if not given"""
    client_store: str = "auto"
    """where clients' own state lies: ram, mmap (a sparse file inside --out), a folder for that file, or auto: ram if it fits, else mmap"""
    eval_every: int = 1
    """rounds between two evaluations"""
    out: Path | None = None
    """folder of the run; runs/<dataset>/<algo>/<time>-<hash> if not given"""
    resume: str = "auto"
    """auto (resume the run in --out if it stopped early), never, or the folder of the run to resume"""
    checkpoint_every: str = "auto"
    """rounds (10) or time (60s, 5m) between two checkpoints, never, or auto: each minute, less often if that takes over 2 % of the run"""
    keep_state: str = "auto"
    """what a finished run keeps for later use: best (the state of the reported round), last, none, or auto (best if there is room)"""
    mlflow: bool = True
    """mirror the run in MLflow"""
    experiment: str = "fedbench"
    """name of the MLflow experiment"""
    quiet: bool = False
    """no progress bar, only warnings and the result"""
    debug: bool = False
    """show tracebacks and debug messages"""

    @property
    def limit(self) -> int:
        """The budget at which the run ends, in the unit of `budget`."""
        return self.algorithm.rounds if self.budget_value is None else self.budget_value

    def to_dict(self) -> dict[str, Any]:
        """Every flag's value, flat and ready for JSON; `--config` reads it back."""
        own = {**_values(self), "protocol": self.protocol.name}
        parts = {**_values(self.protocol), **_values(self.data), **_values(self.failures), **_values(self.algorithm)}
        folds = () if self.protocol.split == "kfold" else protocols.FOLD_FIELDS
        hidden = ("algorithm", "data", "failures", "name", "ncf", *(() if self.dataset == "synthetic" else SYNTHETIC), *folds)
        hidden += () if self.budget_value is None else ("rounds",)
        return {key: _plain(value) for key, value in {**own, **parts}.items() if key not in hidden}

    def identity(self) -> dict[str, Any]:
        """What determines the result. A file counts by its content, not by its path."""
        # A setting that came later is left out at its default, so that the hashes of older runs stay valid.
        skipped = {*NOT_HASHED, *(key for key, value in _values(self.failures).items() if value == getattr(Failures, key))}
        skipped |= {key for key in self.algorithm.later if getattr(self.algorithm, key) == getattr(type(self.algorithm), key)}
        skipped |= set() if self.protocol.new_users else {"new_users"}
        skipped |= {"eval_clients"} if self.protocol.eval_clients is None else set()
        values = {key: value for key, value in self.to_dict().items() if key not in skipped}
        return values | {"algo": _identity(self.algo), "dataset": _identity(self.dataset)}

    def digest(self) -> str:
        """64 hex digits of the identity."""
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()

    def hash8(self) -> str:
        return self.digest()[:8]


def placed(configs: Sequence[RunConfig], parent: Path) -> list[RunConfig]:
    """Each of several runs in a folder of its own: parent/seed-K, parent/fold-K or parent/seed-K/fold-K."""
    seeds, folds = {config.seed for config in configs}, {config.protocol.fold for config in configs}

    def place(config: RunConfig) -> Path:
        by_seed = parent / f"seed-{config.seed}" if len(seeds) > 1 else parent
        return by_seed / f"fold-{config.protocol.fold}" if len(folds) > 1 else by_seed

    return [dataclasses.replace(config, out=place(config)) for config in configs]


def _values(thing: Any) -> dict[str, Any]:
    return {field.name: getattr(thing, field.name) for field in dataclasses.fields(thing) if field.init}


def _plain(value: Any) -> Any:
    """A flag's value as JSON knows it."""
    if isinstance(value, tuple):
        return [_plain(member) for member in value]
    return str(value) if isinstance(value, Path) else value


def _identity(name_or_path: str) -> str:
    path = os.path.expanduser(name_or_path)
    if not os.path.isfile(path):
        return name_or_path
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
