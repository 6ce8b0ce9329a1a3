"""FedRAP: additive personalisation.

Li et al., "Federated Recommendation with Additive Personalization", ICLR 2024, arXiv 2301.09109; the authors' code:
https://github.com/mtics/FedRAP

An item has two rows that are added up: D, which all clients share, and C, a table that each client keeps for itself. A private linear
head scores the sum: logit = w·(C + D)_i + b. The loss drives the two tables apart (-lambda·mean (C - D)²), so that they do not learn
the same, and makes the shared one sparse (mu·mean |D|).

    client   loads D; e epochs, one gradient, a rate for the head and one for the two tables
    upload   how the touched rows of D changed; never C, w or b
    server   mean of the changes

The clean recipe starts C at 0, so that a row that no sample touched says nothing, and lets it learn slowly: what is private in the row
of an unseen item is noise from drawn negatives. `sent` is the reading without C.
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
from fedbench.errors import UsageError
from fedbench.parts.merging import Mergeable
from fedbench.parts.server_optimizer import SharedModel


@register("fedrap", summary="a shared and a personal item table added up, scored by a private head")
@dataclass(frozen=True)
class FedRAP(Mergeable, SharedModel):
    local_epochs: int = 2
    dim: int = 32
    average: str = "sum"
    server: str = "adam"
    server_lr: float = 0.05
    optimizer: str = "sgd"
    """of the local steps: sgd, as published, or adam"""
    lr: float = tuned(4.0, 0.1, 20.0, log=True)
    """local learning rate of the head; the published code takes 0.5"""
    lr_items: float = tuned(0.1, 0.01, 5.0, log=True)
    """local learning rate of the shared table; the published code takes 200"""
    lr_personal: float = tuned(0.01, 1e-3, 1.0, log=True)
    """local learning rate of the personal table; the published code takes 200"""
    weight_decay: float = 0.0
    """of sgd, on every row of both tables, touched or not"""
    step_decay: float = 1.0
    """what the local rates are multiplied by after every step; the published code takes 0.95"""
    round_decay: float = 1.0
    """what the local rates are multiplied by after every round; the published code takes 0.97"""
    apart: float = tuned(0.0, 0.0, 0.3)
    """how strongly the two tables are driven apart (lambda); the published code takes 0.1"""
    sparse: float = tuned(0.0, 0.0, 0.3)
    """weight of the mean absolute value of the shared rows (mu); the published code takes 0.1"""
    curriculum: str = "none"
    """how both weights grow over the rounds: tanh (round/10), as in the paper, or none, as its code has it"""
    init_items: float = 0.01
    """standard deviation of the initial shared table; the published code takes 1"""
    init_personal: float = 0.0
    """standard deviation of the initial personal table, one for all clients; the published code takes 1"""
    score_with: str = "own"
    """what a client scores with: own (both tables, as published) or sent (the shared table alone)"""

    tables = {"items": SHARED, "personal": OWN}
    scores = ("own", "sent")
    choices = {**SharedModel.choices, "optimizer": ("adam", "sgd"), "curriculum": ("tanh", "none"), "score_with": ("own", "sent")}
    published = {
        **{
            "rounds": 100,
            "local_epochs": 10,
            "batch_size": 2048,
            "stop_below": 1e-4,
            "average": "cohort",
            "server": "sgd",
            "server_lr": 1.0,
        },
        **{"optimizer": "sgd", "lr": 0.5, "lr_items": 200.0, "lr_personal": 200.0, "weight_decay": 1e-4, "step_decay": 0.95},
        **{"round_decay": 0.97, "apart": 0.1, "sparse": 0.1, "init_items": 1.0, "init_personal": 1.0},
    }

    def check(self, world: World | None = None) -> None:
        super().check(world)
        self.must_be_positive("lr", "lr_items", "init_items")
        self.must_not_be_negative("lr_personal", "weight_decay", "apart", "sparse", "init_personal")
        for name in ("step_decay", "round_decay"):
            if not 0 < getattr(self, name) <= 1:
                raise UsageError(f"--{name.replace('_', '-')} must be over 0 and at most 1, not {getattr(self, name):g}")
        if self.weight_decay and self.optimizer == "adam":
            raise UsageError("--weight-decay belongs to --optimizer sgd")

    @property
    def averages_whole(self) -> bool:
        """Untouched rows enter the mean, shrunk by weight decay."""
        return self.average == "cohort" and self.weight_decay > 0

    # ---- client ------------------------------------------------------------------------------------------------------
    def init_client(self, world: World, draw: Draw) -> Tensors:
        mine = draw.same  # all start from one model
        head, bias = mine.uniform("head", self.dim), mine.uniform("bias")
        return {
            "head": (2 * head - 1) / math.sqrt(self.dim),
            "bias": (2 * bias - 1) / math.sqrt(self.dim),
            "personal": mine.normal("personal", world.items, self.dim) * self.init_personal,
        }

    def receive(self, own: Tensors, sent: Tensors) -> Tensors:
        held = {**own, **sent}
        if self.averages_whole:
            held["kept"] = own["bias"].new_ones(())  # no sample touches it: weight decay leaves of it what it leaves of an untouched row
        return held

    def phases(self, sent: Tensors) -> tuple[Phase, ...]:
        fall = self.round_decay ** (self.context.round - 1)
        rates = {"head": self.lr, "bias": self.lr, "items": self.lr_items, "personal": self.lr_personal}
        rates |= {"kept": self.lr_items} if self.averages_whole else {}
        rates = {name: rate * fall for name, rate in rates.items()}
        return (Phase(tuple(rates), rates, self.optimizer, self.weight_decay, lr_decay=self.step_decay),)

    def loss(self, held: Tensors, sent: Tensors, batch: Batch) -> Tensor:
        shared, personal = held["items"][batch.items], held["personal"][batch.items]  # [B, d] both
        fit = bce((shared + personal) @ held["head"] + held["bias"], batch)
        if not (self.apart or self.sparse):
            return fit
        grown = math.tanh(self.context.round / 10) if self.curriculum == "tanh" else 1.0
        each = self.sparse * shared.abs().mean(1) - self.apart * ((personal - shared) ** 2).mean(1)  # [B]
        return fit + grown * (batch.weight * each).sum() / batch.weight.sum().clamp(min=1)

    def upload(self, held: Tensors, sent: Tensors, samples: Tensor) -> Tensors:
        kept = {"kept": held["kept"]} if self.averages_whole else {}
        return {"items": held["items"] - sent["items"], **kept}

    def score_own(self, own: Tensors, sent: Tensors) -> Tensor:
        return (sent["items"] + own["personal"]) @ own["head"] + own["bias"]

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
        return self.step(server, {"items": uploads.rows("items")}, draw.when, uploads.dense("kept") if self.averages_whole else None)
