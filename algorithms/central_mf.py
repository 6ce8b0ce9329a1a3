"""Matrix factorisation with all data in one place: what a federated item table gives up, and by how much.

logit of user u and item i = user_u · item_i;   BCE on interactions and fresh negatives, and an L2 penalty on the rows that a
sample uses, so that a row is held back as often as it is trained;   one Adam step a minibatch
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedbench.contract.algorithm import Tensors, World
from fedbench.contract.randomness import Draw
from fedbench.contract.registry import register
from fedbench.parts.central import Descent


@register("central_mf", summary="ceiling: matrix factorisation by Adam with all data in one place")
@dataclass(frozen=True)
class CentralMF(Descent):
    batch_size: int = 4096
    dim: int = 64
    lr: float = 0.003
    """learning rate of Adam"""
    l2: float = 0.005
    """weight of the squared norms of a sample's user and item rows, added to its loss"""

    def init_model(self, world: World, draw: Draw) -> Tensors:
        return {
            "user": draw.normal("user", world.clients, self.dim) * self.init_scale,
            "items": draw.normal("items", world.items, self.dim) * self.init_scale,
        }

    def logits(self, model: Tensors, user: Tensor, items: Tensor) -> Tensor:
        return (user * items).sum(1)
