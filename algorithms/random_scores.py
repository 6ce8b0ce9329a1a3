"""Random scores: what a ranking is worth that knows nothing. HR@10 beside 99 candidates is .10."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedbench.contract.algorithm import OWN, Algorithm, Tensors, World
from fedbench.contract.randomness import Draw
from fedbench.contract.registry import register
from fedbench.contract.search import untuned


@register("random", summary="random scores: chance level")
@dataclass(frozen=True)
class Random(Algorithm):
    rounds: int = 1
    local_epochs: int = untuned(10)
    negatives: int = untuned(0)
    dim: int = untuned(16)

    tables = {"score": OWN}

    def init_client(self, world: World, draw: Draw) -> Tensors:
        return {"score": draw.uniform("score", world.items)}

    def score(self, own: Tensors, sent: Tensors) -> Tensor:
        return own["score"]
