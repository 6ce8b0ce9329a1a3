"""Popularity: every client gets the items that most clients have. The floor that a personalised method must clear."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedbench.contract.algorithm import SHARED, Algorithm, Answer, Tensors, World
from fedbench.contract.randomness import Draw
from fedbench.contract.registry import register
from fedbench.contract.search import untuned
from fedbench.contract.uploads import Uploads


@register("popularity", summary="rank items by how many clients have them: the floor to clear")
@dataclass(frozen=True)
class Popularity(Algorithm):
    rounds: int = 1
    local_epochs: int = untuned(10)
    negatives: int = untuned(0)
    dim: int = untuned(16)

    tables = {"count": SHARED}

    def init_server(self, world: World, draw: Draw) -> Tensors:
        return {"count": torch.zeros(world.items, dtype=draw.dtype, device=draw.device)}

    def answer(self, server: Tensors) -> Answer:
        return Answer(shared={"count": server["count"]})

    def upload(self, held: Tensors, sent: Tensors, samples: Tensor) -> Tensors:
        return {"count": torch.ones_like(sent["count"])}

    def aggregate(self, server: Tensors, uploads: Uploads, draw: Draw) -> Tensors:
        return {"count": server["count"] + uploads.rows("count").combine(len(server["count"]), "sum")}

    def score(self, own: Tensors, sent: Tensors) -> Tensor:
        return sent["count"]
