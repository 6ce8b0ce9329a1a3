"""Federated EASE (the model: Steck, 2019): each item's presence is predicted from all other items, by one ridge regression an item.

    client   sends its part of the Gram matrix G = Σ_u r_u r_uᵀ, r_u its items as 0 and 1; the server sees the sum alone
    server   P = (G + l2·I)⁻¹,  B = -P / diag(P) column by column, with a diagonal of 0
    score    x·B, x the client's own items

The regression has a closed form in G, so one visit a client gives exactly what all data in one place would (`central_ease`).
"""

from __future__ import annotations

from dataclasses import dataclass

from fedbench.contract.algorithm import Tensors, World
from fedbench.contract.randomness import Draw
from fedbench.contract.registry import register
from fedbench.contract.search import tuned
from fedbench.contract.uploads import Uploads
from fedbench.parts.item_item import FederatedItems, ease


@register("fedease", summary="federated EASE: a securely summed Gram matrix, one ridge regression an item, one visit a client")
@dataclass(frozen=True)
class FedEASE(FederatedItems):
    l2: float = tuned(0.0, 10.0, 3000.0, log=True)
    """weight of the squared regression weights (λ); 0 chooses: the root of the number of interactions"""

    def check(self, world: World | None = None) -> None:
        super().check(world)
        self.must_not_be_negative("l2", "user_power")

    def aggregate(self, server: Tensors, uploads: Uploads, draw: Draw) -> Tensors:
        gram = self.gram(server, uploads)
        return {"gram": gram, "items": ease(gram, self.l2)}
