"""GPFedRec: guided by a graph of clients.

Zhang et al., "GPFedRec: Graph-guided Personalization for Federated Recommendation", KDD 2024, arXiv 2305.07866; the authors' code:
https://github.com/Zhangcx19/GPFedRec

A client keeps a user vector p, an MLP that scores [p, q_i], and an item table Q. The server links clients whose tables are alike and
sends each the mean r of its neighbours' tables, beside the table g of all. Training starts from g, and all rows are pulled to r, those
of items that the client never met too: so what it learns of its neighbours reaches the items that it is asked to rank.

    client   Q <- g; e epochs of BCE on MLP([p, q_i]); every step pulls every row of Q to r
    upload   Q; never p, never the MLP
    server   a link where the similarity is above its mean; r_u = mean of u's neighbours; g = mean of all r_u

The published code takes cosine DISTANCE for similarity, so that it links the least alike. The clean recipe compares how the tables
changed from g, which they all share, and reduces each to a few random sums over the items, so that comparing many clients costs little.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedbench.contract.algorithm import OWN, SHARED, Algorithm, Answer, Batch, Phase, Pull, Tensors, World, bce
from fedbench.contract.randomness import Draw
from fedbench.contract.registry import register
from fedbench.contract.search import tuned, untuned
from fedbench.contract.uploads import Tables, Uploads
from fedbench.errors import UsageError
from fedbench.parts.merging import Mergeable, init_mlp, mlp
from fedbench.parts.mixing import delivered, similarity


@register("gpfedrec", summary="own item tables pulled to the mean of similar clients' tables, which the server's graph finds")
@dataclass(frozen=True)
class GPFedRec(Mergeable):
    local_epochs: int = 2
    dim: int = untuned(16)
    layers: tuple[int, ...] = (32, 16, 8, 1)
    """layer sizes of the MLP; the first must be twice --dim, the last 1"""
    optimizer: str = "adam"
    """of the local steps: adam, or sgd as published"""
    lr: float = tuned(0.02, 2e-3, 0.2, log=True)
    """local learning rate of the MLP"""
    lr_user: float = tuned(0.02, 2e-3, 0.2, log=True)
    """local learning rate of the user vector"""
    lr_items: float | None = tuned(0.02, 2e-3, 0.2, log=True)
    """local learning rate of the item rows; none: 80 times the number of items times --lr, less --lr, as published"""
    pull: float | None = tuned(0.1, 0.01, 0.5, log=True)
    """the share of the way to the neighbours' mean that a step moves every row; none: as the published penalty does, 16/dim"""
    similarity: str = "change"
    """of two clients: cosine of how their tables changed (change), of the tables (cosine), or 1 less that, as published (distance)"""
    sketch: int = 16
    """random sums over all items to which a table is reduced before tables are compared, d numbers each; 0: they are compared whole"""
    threshold: float = 1.0
    """clients are linked if their similarity is over this many times the mean of all"""
    neighbours: int = 0
    """link each client to so many that are most like it, instead of by --threshold; 0: by --threshold"""
    exclude_self: bool = True
    """a client is no neighbour of its own; by distance it never is"""
    reach: float = tuned(4.0, 1.0, 10.0, log=True)
    """how far the server goes from its table to a mean of tables: 1 is the mean, more makes up for clients that did not touch a row"""
    init_items: float = 0.1
    """standard deviation of the initial item table; the published code takes 1"""
    init_user: float = 0.1
    """standard deviation of the initial user vector, one for all clients; the published code takes 1"""
    score_with: str = "sent"
    """the item rows that a client scores with: sent (its neighbours' mean) or own (as it trained them), as published"""

    tables = {"items": OWN, "anchor": SHARED}
    merges = ("anchor", "items")
    keeps = "items"
    per_client_server_state = ("anchor",)
    scores = ("own", "sent")
    choices = {
        **Algorithm.choices,
        **{"optimizer": ("adam", "sgd"), "similarity": ("change", "cosine", "distance"), "score_with": ("own", "sent")},
    }
    published = {
        **{"rounds": 100, "local_epochs": 1, "batch_size": 256, "dim": 32, "layers": (64, 32, 16, 8, 1), "optimizer": "sgd"},
        **{"lr": 0.1, "lr_user": 7.9, "lr_items": None, "pull": None, "similarity": "distance", "sketch": 0, "reach": 1.0},
        **{"exclude_self": False, "init_items": 1.0, "init_user": 1.0, "score_with": "own"},
    }

    def check(self, world: World | None = None) -> None:
        super().check(world)
        self.must_be_positive("lr", "lr_user", "reach", "init_items", "init_user")
        self.must_not_be_negative("sketch", "neighbours")
        if self.lr_items is not None:
            self.must_be_positive("lr_items")
        if self.pull is not None and not 0 <= self.pull <= 1:
            raise UsageError(f"--pull must be from 0 to 1, not {self.pull:g}")
        if len(self.layers) < 2 or min(self.layers) < 1 or self.layers[0] != 2 * self.dim or self.layers[-1] != 1:
            given = ",".join(map(str, self.layers))
            raise UsageError(f"--layers {given} does not fit --dim {self.dim}: it must start with {2 * self.dim} and end with 1")

    # ---- client ------------------------------------------------------------------------------------------------------
    def init_client(self, world: World, draw: Draw) -> Tensors:
        mine = draw.same  # all start from one model, so that their tables can be compared
        return {
            "user": mine.normal("user", self.dim) * self.init_user,
            "mlp": init_mlp(mine, "mlp", self.layers),
            "items": mine.normal("items", world.items, self.dim) * self.init_items,  # the server's
        }

    def receive(self, own: Tensors, sent: Tensors) -> Tensors:
        return {**own, "items": sent["items"]}

    def phases(self, sent: Tensors) -> tuple[Phase, ...]:
        items = max(1, self.context.world.items)
        rates = {"user": self.lr_user, "mlp": self.lr, "items": (80 * items - 1) * self.lr if self.lr_items is None else self.lr_items}
        weight = 2 / (items * self.dim) if self.pull is None else self.pull / rates["items"]
        return (Phase(tuple(rates), rates, self.optimizer, pull={"items": Pull("anchor" if "anchor" in sent else "items", weight)}),)

    def logits(self, user: Tensor, weights: Tensor, rows: Tensor) -> Tensor:
        """[d], [A], [B, d] -> [B]"""
        return mlp(weights, self.layers, torch.cat([user.expand(len(rows), -1), rows], dim=-1))[:, 0]

    def loss(self, held: Tensors, sent: Tensors, batch: Batch) -> Tensor:
        return bce(self.logits(held["user"], held["mlp"], held["items"][batch.items]), batch)

    def upload(self, held: Tensors, sent: Tensors, samples: Tensor) -> Tensors:
        return {"items": held["items"]}

    def score_own(self, own: Tensors, sent: Tensors) -> Tensor:
        return self.logits(own["user"], own["mlp"], own["items"])

    def score_sent(self, own: Tensors, sent: Tensors) -> Tensor:
        return self.logits(own["user"], own["mlp"], sent["anchor" if "anchor" in sent else "items"])

    def score(self, own: Tensors, sent: Tensors) -> Tensor:
        return self.score_own(own, sent) if self.score_with == "own" else self.score_sent(own, sent)

    # ---- server ------------------------------------------------------------------------------------------------------
    def init_server(self, world: World, draw: Draw) -> Tensors:
        return {"items": draw.normal("items", world.items, self.dim) * self.init_items}

    def answer(self, server: Tensors) -> Answer:
        shared = {"items": server["items"]}
        return Answer(shared, {"anchor": server["anchor"]}, server["slot"]) if "slot" in server else Answer(shared)

    def alike(self, tables: Tables, common: Tensor, draw: Draw) -> Tensor:
        """[R, M, d] of S, [M, d] -> [S, S]: how similar each two clients' tables are."""
        signs = (2 * (draw.uniform("sketch", self.sketch, len(common)) > 0.5) - 1).to(common) if self.sketch else None  # [k, M]
        origin = common if self.similarity == "change" else torch.zeros_like(common)

        def vectors(some: Tensor) -> Tensor:
            reduced, start = (some, origin) if signs is None else (signs @ some, signs @ origin)
            return (reduced - start).flatten(1)

        cosine = similarity(tables.each(vectors), "cos")
        return (1 - cosine).fill_diagonal_(0) if self.similarity == "distance" else cosine

    def weights(self, alike: Tensor) -> Tensor:
        """[S, S] -> [S, S]: row u is how much each table counts in u's mean; a client without neighbours has itself."""
        limit = self.threshold * alike.mean()
        if self.exclude_self:
            alike = alike.clone().fill_diagonal_(-torch.inf)
        if self.neighbours:
            best = alike.topk(min(self.neighbours, len(alike)), dim=1).indices
            linked = torch.zeros_like(alike, dtype=torch.bool).scatter_(1, best, True) & alike.isfinite()
        else:
            linked = alike > limit
        linked |= torch.eye(len(alike), dtype=torch.bool, device=alike.device) & ~linked.any(1, keepdim=True)
        return linked / linked.sum(1, keepdim=True, dtype=torch.float64)

    def aggregate(self, server: Tensors, uploads: Uploads, draw: Draw) -> Tensors:
        tables, common = uploads.tables("items"), server["items"]
        weights = self.weights(self.alike(tables, common, draw)).to(common.device)
        means, mean = tables.mixed(weights[tables.own]), tables.mixed(weights.mean(0))[0]
        if self.reach != 1:
            means, mean = (common + self.reach * (some - common) for some in (means, mean))
        return {**server, **delivered(server, "anchor", means, uploads.clients[tables.own], uploads), "items": mean}
