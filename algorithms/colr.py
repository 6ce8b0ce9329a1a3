"""CoLR: correlated low-rank updates of a shared item table.

Nguyen et al., "Towards Efficient Communication and Secure Federated Recommendation System via Low-rank Training", WWW 2024,
arXiv 2401.03748; the authors' code: https://github.com/NNHieu/CoLR-FedRec

A client does not change the item table Q [M, d] but a small one beside it: an item's row is q_i + a_i R, where the basis R [r, d] is
drawn anew each round, the same for all, and A [M, r] starts at 0. So a row goes up as r numbers in place of d. All clients share R:
their changes of A can be added up as they are, also under secure aggregation.

    client   holds Q and R as they are; trains its user vector and the rows of A that its samples touch
    upload   those rows of A; never the user vector
    server   Q <- Q + (mean of A) R, then draws a new R

What goes down is honest here: R comes from a seed and costs nothing. A client that has missed k rounds needs their k means of A,
M·r numbers each, or all of Q, if that is less. Bytes are exact with `--sampling queue`, expected values with uniform.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedbench.contract.algorithm import SHARED, Answer, Batch, Phase, Tensors, World, bce
from fedbench.contract.randomness import Draw
from fedbench.contract.registry import register
from fedbench.contract.search import tuned
from fedbench.contract.uploads import Uploads
from fedbench.errors import UsageError
from fedbench.parts.merging import Mergeable
from fedbench.parts.server_optimizer import SharedModel


@register("colr", summary="matrix factorisation whose item rows are changed in a few random directions: fewer bytes")
@dataclass(frozen=True)
class CoLR(Mergeable, SharedModel):
    rounds: int = 1000
    clients_per_round: int | None = None
    """clients a round (n); 60, or all if they are fewer, if not given"""
    local_epochs: int = 2
    dim: int = 64
    sampling: str = "queue"
    rank: int = tuned(16, choices=(4, 8, 16, 32))
    """numbers of an item row that a client changes and sends (r); at --dim nothing is saved"""
    basis: str = "orthonormal"
    """the directions of a round: orthonormal, as published, or gaussian"""
    optimizer: str = tuned("sgd", choices=("sgd", "adam"))
    """of the local steps: sgd, as published, or adam"""
    lr: float = tuned(0.5, 0.01, 4.0, log=True)
    """local learning rate"""
    l2: float = tuned(5e-4, 1e-5, 0.01, log=True)
    """weight of the squared size of the user vector and of each sample's item row"""

    usual_cohort = 60
    tables = {"items": SHARED, "low": SHARED, "change": SHARED}
    choices = {**SharedModel.choices, "basis": ("orthonormal", "gaussian"), "optimizer": ("sgd", "adam")}
    published = {"clients_per_round": 60}

    def check(self, world: World | None = None) -> None:
        super().check(world)
        self.must_be_positive("lr")
        self.must_not_be_negative("l2")
        if not 1 <= self.rank <= self.dim:
            raise UsageError(f"--rank must be from 1 to --dim ({self.dim}), not {self.rank}")

    # ---- client ------------------------------------------------------------------------------------------------------
    def init_client(self, world: World, draw: Draw) -> Tensors:
        return {"user": draw.normal("user", self.dim) / math.sqrt(self.dim)}

    def phases(self, sent: Tensors) -> tuple[Phase, ...]:
        rates = {"user": self.lr, "low": self.lr * math.sqrt(self.rank / self.dim)}
        return (Phase(("user", "low"), rates, self.optimizer),)

    def loss(self, held: Tensors, sent: Tensors, batch: Batch) -> Tensor:
        samples = batch.weight.sum().clamp(min=1)
        low = held["low"][batch.items]  # [B, r]
        low = low.detach() + samples * (low - low.detach())  # a row moves by the sum over its samples, the user vector by the mean
        rows = held["items"][batch.items] + low @ sent["basis"]  # [B, d]
        size = (batch.weight * (rows**2).sum(1)).sum() / samples + (held["user"] ** 2).sum()
        return bce(rows @ held["user"], batch) + self.l2 * size

    def upload(self, held: Tensors, sent: Tensors, samples: Tensor) -> Tensors:
        return {"change": held["low"]}

    def kept_rows(self, held: Tensors, sent: Tensors) -> Tensor:
        return held["items"] + held["low"] @ sent["basis"]

    def score(self, own: Tensors, sent: Tensors) -> Tensor:
        return sent["items"] @ own["user"]

    # ---- server ------------------------------------------------------------------------------------------------------
    def directions(self, draw: Draw) -> Tensor:
        """[r, d] with RᵀR = 1 in the mean."""
        drawn = draw.normal("basis", self.rank, self.dim)
        if self.basis == "gaussian":
            return drawn / math.sqrt(self.rank)
        left, _, right = torch.linalg.svd(drawn, full_matrices=False)
        return left @ right * math.sqrt(self.dim / self.rank)

    def init_server(self, world: World, draw: Draw) -> Tensors:
        items = draw.normal("items", world.items, self.dim) / math.sqrt(self.dim)
        return {"items": items, "low": draw.zeros(world.items, self.rank), "basis": self.directions(draw)}

    def answer(self, server: Tensors) -> Answer:
        return Answer(shared={name: server[name] for name in ("items", "low", "basis")})

    def bits(self, world: World) -> dict[str, float]:
        return {"items": 32 * self.share_to_catch_up(world), "low": 0, "basis": 0}  # zeros, and a seed

    def share_to_catch_up(self, world: World) -> float:
        """How much of the item table a client of this round must be sent, in the mean: it has its table of its last visit, or the first."""
        now, n = max(1, self.context.round), self.cohort(world.clients)
        if self.sampling == "queue":
            place = (now - 1) * n + np.arange(n)  # in a queue that goes round for ever
            missed, chance = np.where(place < world.clients, now - 1, now - 1 - (place - world.clients) // n), np.full(n, 1 / n)
        else:
            missed, came = np.arange(now), n / world.clients
            chance = came * (1 - came) ** (missed - 1.0) * (missed > 0)
            chance[-1] = 1 - chance[:-1].sum()
        return float((chance * np.minimum(1, missed * self.rank / self.dim)).sum())

    def aggregate(self, server: Tensors, uploads: Uploads, draw: Draw) -> Tensors:
        change = uploads.rows("change")
        moved = self.step(server, {"items": change._replace(value=change.value @ server["basis"])}, draw.when)
        return {**moved, "basis": self.directions(draw)}
