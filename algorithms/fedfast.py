"""FedFast: who moved more counts more, and clients that were not asked learn from those like them.

Muhammad et al., "FedFast: Going Beyond Average for Faster Training of Federated Recommender Systems", KDD 2020. There is no authors' code.

The server holds everything, the user vectors P [U, d] too: NOTHING is private here but the interactions. It groups clients by their
vectors (k-means). Each round it asks about as many clients of every group, its delegates; the others of the group follow them.

    client   one pass (as published) or more of BCE on its p, the rows q_i and the layer w, b of logit = w·(p∘q_i) + b
    upload   how p, the touched rows, w and b changed, and the number of samples
    server   w, b: mean weighed by samples. Row i: mean of its changes, each weighed by its size, |change|_1. p of delegates: as they sent
             it. Groups are formed anew; p of others: plus gamma^t times the mean change of the delegates of their group
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedbench.contract.algorithm import Algorithm, Answer, Batch, Phase, Tensors, World, bce
from fedbench.contract.randomness import Draw
from fedbench.contract.registry import register
from fedbench.contract.search import tuned
from fedbench.contract.uploads import Uploads
from fedbench.errors import UsageError
from fedbench.parts.server_optimizer import weighted_mean

LLOYD = 10
"""steps of k-means in a round"""


@register("fedfast", summary="clients drawn from groups, rows weighed by how far they moved; user vectors leave the device")
@dataclass(frozen=True)
class FedFast(Algorithm):
    rounds: int = 400
    clients_per_round: int | None = None
    """clients a round (n); 100, or all if they are fewer, if not given"""
    local_epochs: int = 4
    groups: int = tuned(20, 5, 40)
    """groups of clients (k-means of their vectors) from which a round's clients are drawn evenly"""
    gamma: float = tuned(0.9, 0.0, 0.99)
    """clients that were not asked move by gamma^t of their group's mean change in round t; 0: not at all"""
    weigh: str = "change"
    """how clients count in the mean of an item row: by the size of their change of it, as published, or all the same (clients)"""
    optimizer: str = tuned("adam", choices=("adam", "sgd"))
    """of the local steps: adam or sgd"""
    lr: float = tuned(0.02, 3e-3, 2.0, log=True)
    """local learning rate"""
    init_scale: float = 0.01
    """standard deviation of the initial vectors"""

    usual_cohort = 100
    choices = {**Algorithm.choices, "weigh": ("change", "clients"), "optimizer": ("adam", "sgd")}
    published = {"local_epochs": 1, "gamma": 0.36787944117144233}  # e^(-t), as public code of others has it

    def check(self, world: World | None = None) -> None:
        self.must_be_positive("groups", "lr", "init_scale")
        if not 0 <= self.gamma <= 1:
            raise UsageError(f"--gamma must be from 0 to 1, not {self.gamma:g}")

    # ---- client ------------------------------------------------------------------------------------------------------
    def phases(self, sent: Tensors) -> tuple[Phase, ...]:
        return (Phase(("user", "items", "layer"), self.lr, self.optimizer),)

    def logits(self, model: Tensors, rows: Tensor) -> Tensor:
        """[B, d] -> [B]"""
        return rows @ (model["user"] * model["layer"][:-1]) + model["layer"][-1]

    def loss(self, held: Tensors, sent: Tensors, batch: Batch) -> Tensor:
        return bce(self.logits(held, held["items"][batch.items]), batch)

    def upload(self, held: Tensors, sent: Tensors, samples: Tensor) -> Tensors:
        return {**{name: held[name] - sent[name] for name in ("user", "items", "layer")}, "samples": samples}

    def score(self, own: Tensors, sent: Tensors) -> Tensor:
        return self.logits(sent, sent["items"])

    # ---- server ------------------------------------------------------------------------------------------------------
    def init_server(self, world: World, draw: Draw) -> Tensors:
        layer = draw.full(1.0, self.dim + 1)
        layer[-1] = 0  # a plain product at first
        return {
            "users": draw.normal("users", world.clients, self.dim) * self.init_scale,
            "items": draw.normal("items", world.items, self.dim) * self.init_scale,
            "layer": layer,
            "group": torch.zeros(world.clients, dtype=torch.long, device=layer.device),
        }

    def answer(self, server: Tensors) -> Answer:
        users = server["users"]
        return Answer({name: server[name] for name in ("items", "layer")}, {"user": users}, torch.arange(len(users), device=users.device))

    def choose(self, server: Tensors, world: World, n: int, draw: Draw) -> Tensor | None:
        group = server["group"]
        mixed = draw.uniform("choose", world.clients).argsort()
        order = mixed[group[mixed].argsort(stable=True)]  # group by group, in a random order in each
        sizes = members(group, self.groups)
        first = sizes.cumsum(0) - sizes
        place = torch.empty_like(group)
        place[order] = torch.arange(len(group), device=group.device) - first[group[order]]  # in the group
        return mixed[place[mixed].argsort(stable=True)[:n]]  # the first of all groups, then the second, …

    def aggregate(self, server: Tensors, uploads: Uploads, draw: Draw) -> Tensors:
        rows, delegates = uploads.rows("items"), uploads.clients
        size = rows.value.abs().sum(1, keepdim=True) if self.weigh == "change" else torch.ones_like(rows.value[:, :1])
        total = rows._replace(value=torch.cat([size * rows.value, size], dim=1)).combine(uploads.world.items, "sum")
        moved, users = uploads.dense("user"), server["users"].clone()
        users[delegates] += moved
        group = grouped(users, users[draw.subset("groups", len(users), min(self.groups, len(users))).to(users.device)])
        return {
            "users": users + self.gamma**draw.when * self.nudges(group, delegates, moved),
            "items": server["items"] + total[:, :-1] / total[:, -1:].clamp(min=1e-30),
            "layer": server["layer"] + weighted_mean(uploads.dense("layer"), uploads.dense("samples")),
            "group": group,
        }

    def nudges(self, group: Tensor, delegates: Tensor, moved: Tensor) -> Tensor:
        """[U], [n], [n, d] -> [U, d]: the mean change of the delegates of a client's group; 0 for delegates, and where there are none."""
        total = moved.new_zeros(self.groups, moved.shape[1]).index_add_(0, group[delegates], moved)
        count = members(group[delegates], self.groups)
        nudges = (total / count.clamp(min=1)[:, None])[group]
        nudges[delegates] = 0
        return nudges


def grouped(vectors: Tensor, centres: Tensor) -> Tensor:
    """[U, d], [k, d] -> [U]: the group of each vector, by k-means from these centres; an empty group keeps its centre."""
    for _ in range(LLOYD):
        group = nearest(vectors, centres)
        total = torch.zeros_like(centres).index_add_(0, group, vectors)
        count = members(group, len(centres))[:, None]
        centres = torch.where(count > 0, total / count.clamp(min=1), centres)
    return nearest(vectors, centres)


def members(group: Tensor, groups: int) -> Tensor:
    """[n] -> [k]: how many are in each; unlike bincount it waits for no device."""
    return torch.zeros(groups, dtype=group.dtype, device=group.device).index_add_(0, group, torch.ones_like(group))


def nearest(vectors: Tensor, centres: Tensor) -> Tensor:
    """[U, d], [k, d] -> [U]"""
    return ((centres**2).sum(1) - 2 * vectors @ centres.T).argmin(1)
