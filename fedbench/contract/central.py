"""The contract of centralised methods: all interactions in one place, under the same protocol and with the same sampler and evaluation.

They are the ceilings that a federated method is measured against. One round is one pass over everybody's samples. No client is
visited and nothing travels; what the server holds, user rows included, is handed to the evaluation as if it had been sent.

A method writes `init_server`, `epoch` and, if it is not the dot product, `score`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fedbench.contract.algorithm import Algorithm, Answer, Tensors, World
from fedbench.contract.randomness import Draw
from fedbench.errors import UsageError


class Pool(NamedTuple):
    """Everybody's samples of one round, shuffled; all [S]."""

    user: Tensor
    item: Tensor
    label: Tensor
    time: Tensor | None = None
    """when a training interaction happened, in seconds (0 for a negative), if the method `reads_time`"""


@dataclass(frozen=True)
class Central(Algorithm):
    """Base of the centralised methods. The server's dict holds "user" [U, ...], "items" [M, ...] and whatever else `score` needs;
    names with a slash are the optimizer's state."""

    rounds: int = 30
    """passes over all data; the best one is chosen on validation"""
    local_epochs: int = 1

    federated: ClassVar[bool] = False
    unused: ClassVar[tuple[str, ...]] = ("clients_per_round", "local_epochs", "sampling", "stop_below")
    """flags of every algorithm that mean nothing here"""
    reads_time: ClassVar[bool] = False
    """`epoch` needs `pool.time`: such a method runs only on data that has times"""

    def check(self, world: World | None = None) -> None:
        for name in self.unused:
            if getattr(self, name) != getattr(type(self), name):
                raise UsageError(f"--{name.replace('_', '-')} means nothing to {self.name}, which has all data in one place; leave it out")

    def epoch(self, server: Tensors, pool: Pool, draw: Draw, kernels: bool) -> tuple[Tensors, Tensor | float]:
        """The server after one pass over everybody's samples, and the mean loss: one number."""
        raise NotImplementedError

    def answer(self, server: Tensors) -> Answer:
        shared = {name: value for name, value in server.items() if name != "user" and "/" not in name}
        return Answer(shared, {"user": server["user"]}, torch.arange(len(server["user"]), device=server["user"].device))

    def score(self, own: Tensors, sent: Tensors) -> Tensor:
        return sent["items"] @ sent["user"]
