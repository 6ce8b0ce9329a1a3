"""The data of a run and the checks that need it, before anything is written."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from fedbench.contract import registry
from fedbench.contract.algorithm import Algorithm
from fedbench.contract.dataset import Interactions
from fedbench.data import split as splits
from fedbench.data.protocol import Protocol
from fedbench.data.split import Split
from fedbench.errors import UsageError
from fedbench.experiment import memory
from fedbench.settings.config import RunConfig
from fedbench.simulation import new_users, workers
from fedbench.simulation.federation import world_of
from fedbench.simulation.probe import check_local_work


def prepare(name: str, protocol: Protocol, options: Any) -> tuple[Split, Interactions]:
    """Load a dataset and apply a protocol."""
    ncf = protocol.split == "ncf" or protocol.candidates == "ncf"
    data = registry.dataset(name)(dataclasses.replace(options, ncf=ncf))
    return splits.split(data, protocol), data


def prepare_checked(config: RunConfig, device: str) -> tuple[Split, Interactions]:
    """The data and split of a run, equal on all workers, after every check that can fail before training."""
    workers.agree("other flags", config.hash8)
    split, data = workers.run_on_all(lambda: prepare(config.dataset, config.protocol, config.data))
    workers.agree("other data", lambda: f"{split.checksum} {split.fingerprint}")
    # every check before the folder is made: a mistake leaves nothing behind
    check_cohort(config.algorithm, split)
    # an outside algorithm is rehearsed first, for its mistakes would confuse the count; a built-in one may be too large for a rehearsal
    outside = not type(config.algorithm).__module__.startswith("fedbench.algorithms.")
    if outside:
        check_local_work(config.algorithm, dtype_of(config))
    memory.check(config.algorithm, split, world_of(split), dtype_of(config), device, -(-split.clients // workers.count()))
    if not outside:
        check_local_work(config.algorithm, dtype_of(config))
    if split.cold_start:
        new_users.check_before_training(config.algorithm, split, config.seed)
    return split, data


def dtype_of(config: RunConfig) -> torch.dtype:
    return torch.float64 if config.dtype == "float64" else torch.float32


def check_cohort(algorithm: Algorithm, split: Split) -> None:
    """Refuse a cohort that is larger than all clients, and what the algorithm itself refuses."""
    n, most = algorithm.clients_per_round, len(split.trainers)
    if n is not None and n > most:
        raise UsageError(f"-n/--clients-per-round {n} is more than the {most} clients of this dataset and protocol; lower it")
    algorithm.check(world_of(split))


def check_shared(algorithm: Algorithm) -> None:
    """Refuse a method whose clients cannot be shared out over workers."""
    if not algorithm.federated:
        raise UsageError(f"{algorithm.name} has all data in one place: there are no clients to share out; run it without torchrun")
