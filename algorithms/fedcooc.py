"""Federated neighbourhoods: items are alike if the same clients have both, which a securely summed count of pairs tells.

    client   sends r_u r_uᵀ / |I_u|^p, r_u its items as 0 and 1; the server sees the sum S over all clients alone
    server   none     S as it is
             cosine   S_ij / (√(S_ii·S_jj) + shrink): item-based nearest neighbours
             rp3      S_ij / (d_i·d_j^beta), d the sums of the rows: a random walk from an item to a client to an item, with popular ends
                      made rarer (RP3beta: Paudel et al., 2017)
    score    x·S, x the client's own items

One visit a client. With p 1 and `none` it is the parameter-free form of FedCIA (Han et al., 2025) for clients of one user each.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedbench.contract.algorithm import Tensors, World
from fedbench.contract.randomness import Draw
from fedbench.contract.registry import register
from fedbench.contract.search import tuned
from fedbench.contract.uploads import Uploads
from fedbench.parts.item_item import FederatedItems, cosine, nearest, random_walk, without_diagonal


@register("fedcooc", summary="federated neighbourhoods: securely summed co-occurrence of items, one visit a client, nothing trained")
@dataclass(frozen=True)
class FedCooc(FederatedItems):
    user_power: float = 1.0
    normalise: str = tuned("rp3", choices=("cosine", "rp3"))
    """what the server makes of the sums: none, cosine (item-based neighbours) or rp3 (a random walk)"""
    shrink: float = tuned(20.0, 1.0, 500.0, log=True, when={"normalise": ("cosine",)})
    """cosine: added to the denominator, so that rare items are less alike"""
    beta: float = tuned(0.3, 0.0, 1.0, when={"normalise": ("rp3",)})
    """rp3: how much rarer popular items become; 0: not at all"""
    neighbours: int = tuned(400, 20, 800, log=True)
    """most similar items that count for each item; 0: all"""

    choices = {**FederatedItems.choices, "normalise": ("none", "cosine", "rp3")}
    published = {"normalise": "none", "neighbours": 0}

    def check(self, world: World | None = None) -> None:
        super().check(world)
        self.must_not_be_negative("user_power", "shrink", "beta", "neighbours")

    def aggregate(self, server: Tensors, uploads: Uploads, draw: Draw) -> Tensors:
        gram = self.gram(server, uploads)
        if self.normalise == "cosine":
            items = cosine(gram, self.shrink)
        else:
            items = random_walk(gram, self.beta) if self.normalise == "rp3" else without_diagonal(gram.clone())
        return {"gram": gram, "items": nearest(items, self.neighbours)}
