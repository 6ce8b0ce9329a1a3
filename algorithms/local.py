"""A client alone: its own user vector and item table, no server at all.

Nothing that a client learns from its own items says which unseen item it will like next, so on an honest protocol this must stay
at chance. Where it does better, the protocol tells the client which item is held out.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedbench.contract.algorithm import OWN, Algorithm, Batch, Phase, Tensors, World, bce
from fedbench.contract.randomness import Draw
from fedbench.contract.registry import register
from fedbench.contract.search import tuned


@register("local", summary="every client alone, no server: must stay at chance on an honest protocol")
@dataclass(frozen=True)
class Local(Algorithm):
    rounds: int = 40
    lr: float = tuned(0.1, 0.01, 1.0, log=True)
    """local learning rate of Adam"""
    init_scale: float = tuned(1.0, 0.01, 1.0, log=True)
    """standard deviation of the initial vectors; each client draws its own, or all would hit or miss together"""

    tables = {"items": OWN}

    def check(self, world: World | None = None) -> None:
        self.must_be_positive("lr", "init_scale")

    def init_client(self, world: World, draw: Draw) -> Tensors:
        return {
            "user": draw.normal("user", self.dim) * self.init_scale,
            "items": draw.normal("items", world.items, self.dim) * self.init_scale,
        }

    def phases(self, sent: Tensors) -> tuple[Phase, ...]:
        return (Phase(("user", "items"), self.lr),)

    def loss(self, held: Tensors, sent: Tensors, batch: Batch) -> Tensor:
        return bce(held["items"][batch.items] @ held["user"], batch)

    def score(self, own: Tensors, sent: Tensors) -> Tensor:
        return own["items"] @ own["user"]
