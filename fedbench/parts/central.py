"""Centralised methods by gradient descent: minibatches of everybody's samples and Adam."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import embedding

from fedbench.contract.algorithm import Batch, Tensors, World, bce
from fedbench.contract.central import Central, Pool
from fedbench.contract.randomness import Draw
from fedbench.contract.search import tuned
from fedbench.errors import UsageError
from fedbench.kernels.compiler import pool as pool_kernel


@dataclass(frozen=True)
class Descent(Central):
    """Base of those that take one Adam step a minibatch on binary cross-entropy; Adam's moments and step count stay between rounds."""

    lr: float = tuned(0.001, 1e-4, 0.03, log=True)
    """learning rate of Adam"""
    l2: float = tuned(0.0, 0.0, 0.02)
    """weight of the squared norms of a sample's user and item rows, added to its loss"""
    init_scale: float = 0.01
    """standard deviation of the initial embeddings"""

    def check(self, world: World | None = None) -> None:
        super().check(world)
        self.must_be_positive("lr", "init_scale")
        if self.l2 < 0:
            raise UsageError(f"--l2 must be 0 or more, not {self.l2:g}")

    def init_model(self, world: World, draw: Draw) -> Tensors:
        """What is trained: "user" [U, d], "items" [M, d] and the rest."""
        raise NotImplementedError

    def logits(self, model: Tensors, user: Tensor, items: Tensor) -> Tensor:
        """The rows of B samples' users and items, [B, d] each -> [B]"""
        raise NotImplementedError

    def init_server(self, world: World, draw: Draw) -> Tensors:
        model = self.init_model(world, draw)
        moments = {f"{name}/{part}": torch.zeros_like(value) for name, value in model.items() for part in ("first", "second")}
        return {**model, **moments, "adam/steps": torch.zeros((), device=draw.device)}

    def objective(self, model: Tensors, user: Tensor, items: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """What a minibatch minimises, and its cross-entropy alone: two scalars. user, items: see `logits`."""
        fit = bce(self.logits(model, user, items), batch)
        if not self.l2:
            return fit, fit
        norms = (user**2).sum(1) + (items**2).sum(1)
        return fit + self.l2 * (batch.weight * norms).sum() / batch.weight.sum(), fit

    def epoch(self, server: Tensors, pool: Pool, draw: Draw, kernels: bool) -> tuple[Tensors, Tensor]:
        # a copy: if this pass diverges, the server stays as it was
        server = {name: value.clone() for name, value in server.items()}
        model = {name: value for name, value in server.items() if "/" not in name}
        loss = (self.descend_by_kernel if kernels else self.descend)(server, model, pool)
        server["adam/steps"] += -(-len(pool.label) // self.batch_size)
        return server, loss

    def descend(self, server: Tensors, model: Tensors, pool: Pool) -> Tensor:
        """A pass over the samples, in place; returns the mean loss."""
        leaves = {name: value.requires_grad_() for name, value in model.items()}
        adam = torch.optim.Adam(leaves.values(), lr=self.lr, fused=True)
        # moments stay in the server's dict, where torch changes them in place
        for name, value in leaves.items():
            adam.state[value] = {
                "step": server["adam/steps"].clone(),
                "exp_avg": server[f"{name}/first"],
                "exp_avg_sq": server[f"{name}/second"],
            }
        total = torch.zeros((), dtype=pool.label.dtype, device=pool.label.device)
        for user, item, label in zip(*(column.split(self.batch_size) for column in pool[:3]), strict=True):
            rows = embedding(user, leaves["user"]), embedding(item, leaves["items"])
            objective, fit = self.objective(leaves, *rows, Batch(item, label, torch.ones_like(label)))
            adam.zero_grad()
            objective.backward()
            adam.step()
            total += fit.detach() * len(label)
        # between rounds they are plain tensors
        for value in leaves.values():
            value.requires_grad_(False)
        return total / len(pool.label)

    def descend_by_kernel(self, server: Tensors, model: Tensors, pool: Pool) -> Tensor:
        """`descend` by a kernel that is derived from `objective`."""
        kernel = _derived(self, tuple((name, tuple(value.shape)) for name, value in model.items()))
        moments = {name: (server[f"{name}/first"].numpy(), server[f"{name}/second"].numpy()) for name in model}
        user, item, label = (column.numpy() for column in pool[:3])
        arrays = {name: value.numpy() for name, value in model.items()}
        loss = kernel.train(arrays, moments, (user, item, label), (int(server["adam/steps"]), self.batch_size, self.lr))
        return torch.tensor(loss, dtype=torch.float64)


@cache
def _derived(method: Descent, shapes: tuple[tuple[str, tuple[int, ...]], ...]) -> pool_kernel.Kernel:
    """The kernel of a method's objective for a model of these shapes."""

    def objective(rest: Tensors, user: Tensor, items: Tensor, label: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return method.objective(rest, user, items, Batch(label, label, weight))

    return pool_kernel.derive(type(method).__name__, objective, dict(shapes))
