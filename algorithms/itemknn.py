"""Item-based nearest neighbours with all data in one place (Sarwar et al., 2001): the classical collaborative filter.

Two items are alike by the cosine of their columns of the 0/1 matrix of users and items, shrunk for items that few users have:
G_ij / (√(G_ii·G_jj) + shrink). An item's score is the sum over those of the user's items that are among its nearest neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedbench.contract.algorithm import Tensors, World
from fedbench.contract.central import Pool
from fedbench.contract.randomness import Draw
from fedbench.contract.registry import register
from fedbench.contract.search import tuned
from fedbench.parts.item_item import CentralItems, cosine, nearest


@register("itemknn", summary="ceiling: item-based nearest neighbours, cosine with shrinkage, with all data in one place")
@dataclass(frozen=True)
class ItemKNN(CentralItems):
    neighbours: int = tuned(50, 10, 500, log=True)
    """most similar items that count for each item (k)"""
    shrink: float = tuned(20.0, 1.0, 500.0, log=True)
    """added to the denominator of the cosine, so that rare items are less alike"""

    def check(self, world: World | None = None) -> None:
        super().check(world)
        self.must_be_positive("neighbours")
        self.must_not_be_negative("shrink")

    def epoch(self, server: Tensors, pool: Pool, draw: Draw, kernels: bool) -> tuple[Tensors, Tensor]:
        user, gram = self.everybody(server, pool)
        return self.fitted(server, user, nearest(cosine(gram, self.shrink), self.neighbours))
