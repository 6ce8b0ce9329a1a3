"""Settings that do not fit together, refused before a run starts; each error names the flags and what to do."""

from __future__ import annotations

import os
import re

from fedbench.contract import registry
from fedbench.contract.algorithm import Algorithm
from fedbench.contract.dataset import DatasetOptions
from fedbench.data import protocol as protocols
from fedbench.data.protocol import Protocol
from fedbench.errors import UsageError
from fedbench.settings.cadence import Cadence
from fedbench.settings.config import SYNTHETIC, RunConfig
from fedbench.simulation.client_store import STORES


def check(config: RunConfig) -> None:
    registry.dataset(config.dataset)
    Cadence.of(config.checkpoint_every)
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d{1,9})?", config.device, re.ASCII):
        raise UsageError(f"--device must be auto, cpu, cuda, cuda:<number> or mps, not {config.device!r}")
    if config.client_store not in STORES and not os.path.isdir(config.client_store):
        raise UsageError(f"--client-store must be auto, ram, mmap or a folder; there is no folder {config.client_store!r}")
    if config.out is not None and os.path.isfile(config.out):
        raise UsageError(f"--out {config.out}: is a file; name a folder")
    if config.resume not in ("auto", "never") and not os.path.isdir(config.resume):
        raise UsageError(f"--resume must be auto, never or the folder of a run; there is no folder {config.resume!r}")
    if config.refit and config.protocol.select_on != "val":
        on = config.protocol.select_on
        raise UsageError(f"--refit trains for the rounds that validation chose, but --select-on {on} chooses on {on}; drop one of them")
    if config.refit and config.protocol.ratings:
        raise UsageError(f"--refit needs a validation item of each client, and --split {config.protocol.split} has none; drop one of them")
    if config.failures.no_server and not config.algorithm.federated:
        raise UsageError(f"--no-server is for federated methods; {config.algorithm.name} has all data in one place, so nothing is sent")
    if config.failures.happen() and not config.algorithm.federated:
        raise UsageError(
            f"--dropout, --stragglers and --corrupt are for federated methods; {config.algorithm.name} has no clients that could fail"
        )
    if config.budget != "rounds" and config.budget_value is None:
        raise UsageError(f"--budget {config.budget} needs --budget-value: how many {config.budget} a run may use")
    _check_split(config.algorithm.name, config.algorithm, config.protocol)
    for key in SYNTHETIC:
        if config.dataset != "synthetic" and getattr(config.data, key) != getattr(DatasetOptions, key):
            raise UsageError(f"--{key.replace('_', '-')} is for --dataset synthetic; {config.dataset} would ignore it")


def _check_split(algo: str, algorithm: Algorithm, protocol: Protocol) -> None:
    """What is held out must be what the algorithm predicts, and fold flags are for folds."""
    split, words = protocol.split, type(algorithm).choices.get("feedback", ())
    if protocol.ratings and not algorithm.predicts_ratings:
        change = "use --feedback explicit" if "explicit" in words else "take an algorithm that predicts ratings"
        raise UsageError(f"--split {split} holds out ratings and {algo} only ranks; {change}, or use --split auto")
    if not protocol.ratings and algorithm.predicts_ratings:
        change = " or --feedback implicit" if "implicit" in words else ""
        raise UsageError(f"--split {split} holds out items to rank and {algo} predicts ratings; use --split kfold{change}")
    if protocol.ratings and protocol.eval_clients is not None:
        raise UsageError(f"--eval-clients is for ranking; --split {split} predicts every rating that is held out")
    if split == "users" and not algorithm.reconstructs:
        raise UsageError(f"--split users tests clients that never took part, and {algo} cannot reconstruct them; use --split kfold")
    if protocol.new_users and protocol.eval_clients is not None:
        raise UsageError("--new-users measures all clients that it keeps out of training; drop --eval-clients")
    if protocol.new_users >= 1:
        raise UsageError(f"--new-users must be a share below 1, such as 0.1, not {protocol.new_users:g}")
    if protocol.new_users and protocol.ratings:
        raise UsageError(f"--new-users is for rankings, and --split {split} holds out ratings; use --split users")
    if split != "kfold":
        for key in protocols.FOLD_FIELDS:
            if getattr(protocol, key) != getattr(Protocol, key):
                raise UsageError(f"--{key} is for --split kfold; --split {split} would ignore it")
    elif protocol.fold is not None and protocol.fold >= protocol.folds:
        raise UsageError(f"--fold {protocol.fold}: name one of 0 to {protocol.folds - 1}, or raise --folds")
