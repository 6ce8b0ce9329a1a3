"""The data of a run and the checks that need it, before anything is written."""

from __future__ import annotations

import dataclasses
from typing import Any

from fedbench.contract import registry
from fedbench.contract.algorithm import Algorithm
from fedbench.contract.dataset import Interactions
from fedbench.data.protocol import Protocol
from fedbench.data.split import Split, split
from fedbench.errors import UsageError
from fedbench.simulation.federation import world_of


def prepare(name: str, protocol: Protocol, options: Any) -> tuple[Split, Interactions]:
    """Load a dataset and apply a protocol."""
    ncf = protocol.split == "ncf" or protocol.candidates == "ncf"
    data = registry.dataset(name)(dataclasses.replace(options, ncf=ncf))
    return split(data, protocol), data


def check_cohort(algorithm: Algorithm, parts: Split) -> None:
    n, most = algorithm.clients_per_round, len(parts.trainers)
    if n is not None and n > most:
        raise UsageError(f"-n/--clients-per-round {n} is more than the {most} clients of this dataset and protocol; lower it")
    algorithm.check(world_of(parts))


def check_shared(algorithm: Algorithm) -> None:
    """Refuse what ranks cannot share out."""
    if not algorithm.federated:
        raise UsageError(f"{algorithm.name} has all data in one place: there are no clients to share out; run it without torchrun")
