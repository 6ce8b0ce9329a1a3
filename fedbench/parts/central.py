"""Centralised methods by gradient descent: minibatches of everybody's samples and Adam."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding

from fedbench.contract.algorithm import Batch, Tensors, World, bce
from fedbench.contract.central import Central, Pool
from fedbench.contract.randomness import Draw
from fedbench.errors import UsageError


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
