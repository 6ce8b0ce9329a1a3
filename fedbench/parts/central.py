"""Centralised methods: all interactions in one place, under the same protocol and with the same sampler and evaluation.

They are the ceilings that a federated method is measured against. One round is one pass over everybody's samples. No client is
visited and nothing travels; what the server holds, user rows included, is handed to the evaluation as if it had been sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding

from fedbench.contract.algorithm import Algorithm, Answer, Batch, Tensors, World, bce
from fedbench.contract.randomness import Draw, keys
from fedbench.data.sampling import Samples
from fedbench.errors import UsageError
from fedbench.kernels.shuffling import orders


class Pool(NamedTuple):
    """Everybody's samples of one round, shuffled; all [S]."""

    user: Tensor
    item: Tensor
    label: Tensor

    @classmethod
    def of(cls, samples: Samples, seed: int, when: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Pool:
        """What the clients of a round together would train on."""
        users = np.repeat(samples.clients, samples.counts)
        items = samples.row[np.repeat(samples.row_ptr[:-1], samples.counts) + samples.local].astype(np.int64)
        order = np.empty(len(users), np.int64)
        orders(keys(seed, when, "pool", np.array([-1])), np.array([0, len(users)]), 0, 1, order)
        user, item, label = (torch.from_numpy(column[order]).to(device) for column in (users, items, samples.label))
        return cls(user, item, label.to(dtype))


@dataclass(frozen=True)
class Central(Algorithm):
    """Base of the centralised methods. The server's dict holds "user" [U, ...], "items" [M, ...] and whatever else `score` needs;
    names with a slash are the optimizer's state."""

    rounds: int = 30
    """passes over all data; the best one is chosen on validation"""
    local_epochs: int = 1

    unused: ClassVar[tuple[str, ...]] = ("clients_per_round", "local_epochs", "sampling", "stop_below")
    """flags of every algorithm that mean nothing here"""

    def check(self, world: World | None = None) -> None:
        for name in self.unused:
            if getattr(self, name) != getattr(type(self), name):
                raise UsageError(f"--{name.replace('_', '-')} means nothing to {self.name}, which has all data in one place; leave it out")

    def epoch(self, server: Tensors, pool: Pool, draw: Draw, kernels: bool) -> tuple[Tensors, Tensor]:
        """The server after one pass over everybody's samples, and the mean loss: a scalar."""
        raise NotImplementedError

    def answer(self, server: Tensors) -> Answer:
        shared = {name: value for name, value in server.items() if name != "user" and "/" not in name}
        return Answer(shared, {"user": server["user"]}, torch.arange(len(server["user"]), device=server["user"].device))

    def score(self, own: Tensors, sent: Tensors) -> Tensor:
        return sent["items"] @ sent["user"]


@dataclass(frozen=True)
class Descent(Central):
    """Base of those that take one Adam step a minibatch on binary cross-entropy; Adam's moments and step count stay between rounds."""

    lr: float = 0.001
    """learning rate of Adam"""
    l2: float = 0.0
    """weight of the squared norms of a sample's user and item rows, added to its loss"""
    init_scale: float = 0.01
    """standard deviation of the initial embeddings"""

    def check(self, world: World | None = None) -> None:
        super().check(world)
        self.must_be_positive("lr", "init_scale")
        if self.l2 < 0:
            raise UsageError(f"--l2 must be 0 or more, not {self.l2:g}")

    def init_model(self, world: World, draw: Draw) -> Tensors:
        """What is trained: "user", "items" and the rest."""
        raise NotImplementedError

    def logits(self, model: Tensors, user: Tensor, items: Tensor) -> Tensor:
        """The rows of B samples' users and items, [B, ...] each -> [B]"""
        raise NotImplementedError

    def init_server(self, world: World, draw: Draw) -> Tensors:
        model = self.init_model(world, draw)
        moments = {f"{name}/{part}": torch.zeros_like(value) for name, value in model.items() for part in ("first", "second")}
        return {**model, **moments, "adam/steps": torch.zeros((), device=draw.device)}

    def epoch(self, server: Tensors, pool: Pool, draw: Draw, kernels: bool) -> tuple[Tensors, Tensor]:
        server = {name: value.clone() for name, value in server.items()}
        model = {name: value.requires_grad_() for name, value in server.items() if "/" not in name}
        adam = torch.optim.Adam(model.values(), lr=self.lr, fused=True)
        for name, value in model.items():
            adam.state[value] = {
                "step": server["adam/steps"].clone(),
                "exp_avg": server[f"{name}/first"],
                "exp_avg_sq": server[f"{name}/second"],
            }
        total = torch.zeros((), dtype=pool.label.dtype, device=draw.device)
        for user, item, label in zip(*(column.split(self.batch_size) for column in pool), strict=True):
            rows = embedding(user, model["user"]), embedding(item, model["items"])
            fit = bce(self.logits(model, *rows), Batch(item, label, torch.ones_like(label)))
            size = (rows[0] ** 2).sum() + (rows[1] ** 2).sum()
            adam.zero_grad()
            (fit + self.l2 / len(label) * size).backward()
            adam.step()
            total += fit.detach() * len(label)
        server["adam/steps"] += -(-len(pool.label) // self.batch_size)
        return {name: value.detach() for name, value in server.items()}, total / len(pool.label)
