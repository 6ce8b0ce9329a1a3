"""Federated matrix factorisation (federated collaborative filtering, Ammad-ud-din et al. 2019): items shared, users private.

A client downloads the item table, trains its own user vector and the item rows that its samples touch, and sends back how those
rows changed. The server steps its table along the combined change. This is what every personalised method has to beat.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedbench.contract.algorithm import Answer, Batch, Phase, Tensors, World, bce
from fedbench.contract.randomness import Draw
from fedbench.contract.registry import register
from fedbench.contract.search import tuned
from fedbench.contract.uploads import Uploads
from fedbench.errors import UsageError
from fedbench.parts.merging import Mergeable
from fedbench.parts.server_optimizer import SharedModel


@register("fedmf", summary="federated matrix factorisation: item table shared, user vectors private")
@dataclass(frozen=True)
class FedMF(Mergeable, SharedModel):
    local_epochs: int = 2
    optimizer: str = tuned("adam", choices=("adam", "sgd"))
    """of the local steps: adam, or sgd, whose changes keep the size of their gradients: it goes with --average sum --server adam"""
    lr: float = tuned(0.02, 5e-3, 5.0, log=True)
    """local learning rate"""
    lr_items: float | None = tuned(None, 0.03, 3.0, log=True, when={"optimizer": ("sgd",)})
    """local learning rate of the item rows, with --optimizer sgd; --lr if not given"""
    init_scale: float = 0.01
    """standard deviation of the initial vectors"""

    choices = {**SharedModel.choices, "optimizer": ("adam", "sgd")}

    def check(self, world: World | None = None) -> None:
        super().check(world)
        self.must_be_positive("lr", "init_scale", *(["lr_items"] if self.lr_items is not None else []))
        if self.lr_items is not None and self.optimizer == "adam":
            raise UsageError("--lr-items belongs to --optimizer sgd")

    def init_server(self, world: World, draw: Draw) -> Tensors:
        return {"items": draw.normal("items", world.items, self.dim) * self.init_scale}

    def init_client(self, world: World, draw: Draw) -> Tensors:
        return {"user": draw.normal("user", self.dim) * self.init_scale}

    def answer(self, server: Tensors) -> Answer:
        return Answer(shared={"items": server["items"]})

    def phases(self, sent: Tensors) -> tuple[Phase, ...]:
        if self.optimizer == "adam":
            return (Phase(("user", "items"), self.lr),)
        return (Phase(("user", "items"), {"user": self.lr, "items": self.lr_items or self.lr}, "sgd"),)

    def loss(self, held: Tensors, sent: Tensors, batch: Batch) -> Tensor:
        return bce(held["items"][batch.items] @ held["user"], batch)

    def upload(self, held: Tensors, sent: Tensors, samples: Tensor) -> Tensors:
        return {"items": held["items"] - sent["items"]}

    def aggregate(self, server: Tensors, uploads: Uploads, draw: Draw) -> Tensors:
        return self.step(server, {"items": uploads.rows("items")}, draw.when)

    def score(self, own: Tensors, sent: Tensors) -> Tensor:
        return sent["items"] @ own["user"]
