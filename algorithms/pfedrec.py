"""PFedRec: dual personalisation.

Zhang et al., "Dual Personalization on Federated Recommendation", IJCAI 2023, arXiv 2301.08143; the authors' code:
https://github.com/Zhangcx19/IJCAI-23-PFedRec

The item table is shared, and what scores an item row is private: a linear head, logit = w·q_i + b, so that w takes the place of a
user vector. A client fits its head to the server's rows, then the rows to its head, and keeps both: the rows as it tuned them are its
second personal part.

    client   loads the table; each batch first moves w and b, then the rows by a new gradient
    upload   how the touched rows changed; never w, never b
    server   mean of the changes
    score    own: with the rows as the client left them, as in the paper;   sent: with the server's

A client's rows of items that it has not met were moved by drawn negatives alone, the held-out item's as often as any other's. So the
clean recipe scores with the server's rows; both readings are measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from fedbench.contract.algorithm import OWN, SHARED, Answer, Batch, Phase, Tensors, World, bce
from fedbench.contract.randomness import Draw
from fedbench.contract.registry import register
from fedbench.contract.search import tuned
from fedbench.contract.uploads import Uploads
from fedbench.parts.merging import Mergeable
from fedbench.parts.server_optimizer import SharedModel


@register("pfedrec", summary="a private linear head on shared item rows, and rows tuned by each client")
@dataclass(frozen=True)
class PFedRec(Mergeable, SharedModel):
    local_epochs: int = 2
    dim: int = 32
    average: str = "sum"
    server: str = "adam"
    server_lr: float = 0.05
    optimizer: str = "sgd"
    """of the local steps: sgd, as published, or adam"""
    lr: float = tuned(4.0, 0.1, 20.0, log=True)
    """local learning rate of the head; the published code takes 0.1"""
    lr_items: float | None = tuned(0.1, 0.01, 5.0, log=True)
    """local learning rate of the item rows; none: 80 times the number of items times --lr, as published"""
    init_items: float = 0.01
    """standard deviation of the initial item table; the published code takes 1"""
    score_with: str = "sent"
    """the item rows that a client scores with: sent (the server's) or own (as the client tuned them), as published"""

    tables = {"items": SHARED, "tuned": OWN}
    keeps = "tuned"
    scores = ("own", "sent")
    choices = {**SharedModel.choices, "optimizer": ("adam", "sgd"), "score_with": ("own", "sent")}
    published = {
        **{"rounds": 100, "local_epochs": 1, "batch_size": 256, "optimizer": "sgd", "lr": 0.1, "lr_items": None},
        **{"init_items": 1.0, "average": "cohort", "server": "sgd", "server_lr": 1.0, "score_with": "own"},
    }

    def check(self, world: World | None = None) -> None:
        super().check(world)
        self.must_be_positive("lr", "init_items")
        if self.lr_items is not None:
            self.must_not_be_negative("lr_items")

    # ---- client ------------------------------------------------------------------------------------------------------
    def init_client(self, world: World, draw: Draw) -> Tensors:
        mine = draw.same  # all start from one model
        head, bias = mine.uniform("head", self.dim), mine.uniform("bias")
        return {
            "head": (2 * head - 1) / math.sqrt(self.dim),
            "bias": (2 * bias - 1) / math.sqrt(self.dim),
            "tuned": mine.normal("items", world.items, self.dim) * self.init_items,  # the server's
        }

    def receive(self, own: Tensors, sent: Tensors) -> Tensors:
        return {**own, **sent, "tuned": sent["items"]}  # rows that no sample touches will be the server's

    def phases(self, sent: Tensors) -> tuple[Phase, ...]:
        rate = 80 * self.context.world.items * self.lr if self.lr_items is None else self.lr_items
        return Phase(("head", "bias"), self.lr, self.optimizer), Phase(("items",), rate, self.optimizer)

    def loss(self, held: Tensors, sent: Tensors, batch: Batch) -> Tensor:
        return bce(held["items"][batch.items] @ held["head"] + held["bias"], batch)

    def keep(self, held: Tensors, sent: Tensors) -> Tensors:
        return {"head": held["head"], "bias": held["bias"], "tuned": held["items"]}

    def upload(self, held: Tensors, sent: Tensors, samples: Tensor) -> Tensors:
        return {"items": held["items"] - sent["items"]}

    def score_own(self, own: Tensors, sent: Tensors) -> Tensor:
        return own["tuned"] @ own["head"] + own["bias"]

    def score_sent(self, own: Tensors, sent: Tensors) -> Tensor:
        return sent["items"] @ own["head"] + own["bias"]

    def score(self, own: Tensors, sent: Tensors) -> Tensor:
        return self.score_own(own, sent) if self.score_with == "own" else self.score_sent(own, sent)

    # ---- server ------------------------------------------------------------------------------------------------------
    def init_server(self, world: World, draw: Draw) -> Tensors:
        return {"items": draw.normal("items", world.items, self.dim) * self.init_items}

    def answer(self, server: Tensors) -> Answer:
        return Answer(shared={"items": server["items"]})

    def travels_whole(self, world: World) -> dict[str, int]:
        return {"items": world.items} if self.average == "cohort" else {}  # a mean of whole tables: rows that did not change travel too

    def aggregate(self, server: Tensors, uploads: Uploads, draw: Draw) -> Tensors:
        return self.step(server, {"items": uploads.rows("items")}, draw.when)
