"""FedEM: elastic merging.

Chen et al., "Breaking the Aggregation Bottleneck in Federated Recommendation: A Personalized Model Merging Approach", AAAI-26,
arXiv 2508.12386; the authors' code: https://github.com/jundongchen13/FedEM

Every client keeps a user vector P, an item table Q of its own and an adapter, a small MLP. The server mixes the uploaded tables
into a table G for each client: those of similar clients weigh more. Before it trains, a client moves each of its item rows towards
G's: Q <- Q + rho·(G - Q), where its adapter chooses rho from [Q, G - Q] item by item, so that what is personal can stay.

    client   merge G into Q; e epochs of BCE on P·(merged row); a client that was sent G first steps its adapter, then P and Q
    upload   Q and the number of samples; never P, never the adapter
    server   x_u = argmin |x|² - 2(p + alpha·sigma_u)ᵀx,  x >= 0, Σx = 1;   G_u = Σ_v x_uv Q_v
             p: share of samples; sigma: similarity of the tables' first principal components

The clean recipe differs from the published one where the published one fails without its leak (docs/algorithms/fedem.md): negatives do
not train a client's own rows, all samples are one step, the user vector stays once the server has answered, a share of every mixture
(--floor) goes to all other clients. What then ranks well is the mixture, a vote of similar clients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedbench.contract.algorithm import OWN, Algorithm, Answer, Batch, Phase, Tensors, World, bce
from fedbench.contract.mixtures import SparseWeights, collected, in_blocks
from fedbench.contract.randomness import Draw
from fedbench.contract.registry import register
from fedbench.contract.uploads import Tables, Uploads
from fedbench.errors import UsageError
from fedbench.parts.fused_models import DotBCE, ElasticBCE
from fedbench.parts.merging import MERGES, elastic, init_mlp, static
from fedbench.parts.mixing import delivered, in_float64, signatures, similarity, solve_weights


@register("fedem", summary="elastic merging: own item tables, similarity-weighted aggregation, a learned merge")
@dataclass(frozen=True)
class FedEM(Algorithm):
    rounds: int = 10
    local_epochs: int = 4
    batch_size: int = 1 << 20
    """samples a local step; by default all that a client has, so that all clients take equally many steps and their tables compare; the
    published code takes 256"""
    stop_below: float = 1e-4
    alpha: float = 0.9
    """weight of similarity beside the share of samples; at 0 all clients are averaged. With a client's similarity to itself counted
    (--no-exclude-self) 0.9 leaves it almost alone"""
    adapter: tuple[int, ...] = (32, 16, 8, 1)
    """layer sizes of the adapter MLP; the first must be twice --dim, the last 1"""
    lr: float = 0.1
    """local learning rate of Adam for the user vector and the item rows"""
    lr_adapter: float = 0.1
    """local learning rate of Adam for the adapter"""
    merge: str = "elastic"
    """how the server's table enters the client's: replace, static (a fixed share, --rho) or elastic (the adapter decides)"""
    rho: float = 0.5
    """the share of --merge static"""
    aggregation: str = "both"
    """weights from samples alone (avg), from similarity alone (sim), or from the quadratic program over both (both)"""
    objective: str = "paper"
    """quadratic program of the authors' paper (project (p + alpha·sigma)/(1 + alpha)) or of their code (project p + alpha·sigma)"""
    similarity: str = "cos"
    """similarity of two clients' signatures: cos, or l2 (1/(1 + distance)) as in the published code"""
    floor: float = 0.05
    """share of every mixture that goes to all other clients by their samples, however similar they are; the published code has none. At
    alpha 0 all clients are averaged anyway"""
    row_negatives: bool = False
    """negatives train a client's own item rows too, as published; a held-out item that is drawn once is then lost to that client"""
    train_user: str = "first"
    """when the user vector is trained: first (until the server first answers the client) or always, as published"""
    agg_ratio: float = 1.0
    """share of the round's clients whose tables are aggregated and that are sent a mixture; the published code takes 0.1"""
    exclude_self: bool = True
    """leave a client's similarity to itself (always 1) out; the published code counts it"""
    solver: str = "exact"
    """exact (sorting) or cvxpy (a quadratic programming solver)"""
    max_weight: float = 1.0
    """no single client may weigh more than this in a mixture, the floor's share included; below 1 cvxpy solves it"""
    init_items: float = 1e-4
    """standard deviation of the initial item table; the published code takes 1"""
    init_user: float = 0.1
    """standard deviation of the initial user vector; the published code takes 1"""
    same_start: bool = True
    """all clients start from one user vector and one adapter; apart, their item tables point nowhere in common and cannot be mixed"""
    same_items: bool = False
    """with --same-start, all start from one item table too, as in the published code; else each client draws its own"""

    published = {
        "rounds": 100,
        "local_epochs": 10,
        "batch_size": 256,
        "agg_ratio": 0.1,
        "init_items": 1.0,
        "init_user": 1.0,
        "same_items": True,
        "objective": "code",
        "exclude_self": False,
        "similarity": "l2",
        "floor": 0.0,
        "row_negatives": True,
        "train_user": "always",
    }
    tables = {"items": OWN}
    per_client_server_state = ("tables",)
    choices = {
        **Algorithm.choices,
        "merge": MERGES,
        "aggregation": ("avg", "sim", "both"),
        "objective": ("code", "paper"),
        "similarity": ("l2", "cos"),
        "solver": ("exact", "cvxpy"),
        "train_user": ("first", "always"),
    }

    def check(self, world: World | None = None) -> None:
        if not 0 <= self.alpha <= 1e6:
            raise UsageError(f"--alpha must be 0 or more (1e6 at most), not {self.alpha:g}")
        given = ",".join(map(str, self.adapter))
        if len(self.adapter) < 2 or min(self.adapter) < 1:
            raise UsageError(f"--adapter {given}: give two layer sizes or more, each at least 1")
        if self.merge == "elastic" and (self.adapter[0] != 2 * self.dim or self.adapter[-1] != 1):
            raise UsageError(f"--adapter {given} does not fit --dim {self.dim}: it must start with {2 * self.dim} and end with 1")
        for name in ("agg_ratio", "max_weight"):
            if not 0 < getattr(self, name) <= 1:
                raise UsageError(f"--{name.replace('_', '-')} must be over 0 and at most 1, not {getattr(self, name):g}")
        self.must_be_positive("lr", "lr_adapter", "init_items", "init_user")
        for name in ("rho", "floor"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"--{name} must be from 0 to 1, not {getattr(self, name):g}")
        if world and self.max_weight * self.aggregated(self.cohort(world.clients)) < 1 - 1e-9:
            raise UsageError(
                f"--max-weight {self.max_weight:g}: the weights of so few aggregated clients cannot sum to 1; raise it or --agg-ratio"
            )

    # ---- client ------------------------------------------------------------------------------------------------------
    def init_client(self, world: World, draw: Draw) -> Tensors:
        mine = draw.same if self.same_start else draw
        rows = mine if self.same_items else draw
        return {
            "user": mine.normal("user", self.dim) * self.init_user,
            "items": rows.normal("items", world.items, self.dim) * self.init_items,
            "adapter": init_mlp(mine, "adapter", self.adapter),
        }

    def merged(self, own: Tensors, sent: Tensors) -> Tensor:
        """[T, d]: the client's rows after one merge with the server's."""
        if "items" not in sent:
            return own["items"]
        if self.merge == "elastic":
            return elastic(own["items"], sent["items"], own["adapter"], self.adapter)
        return static(own["items"], sent["items"], 1.0 if self.merge == "replace" else self.rho)

    def receive(self, own: Tensors, sent: Tensors) -> Tensors:
        return {**own, "items": self.merged(own, sent)}

    def learns_merge(self, sent: bool) -> bool:
        """The merge is part of the forward pass, and the adapter takes a step of its own."""
        return sent and self.merge == "elastic"

    def trains_user(self, sent: bool) -> bool:
        """Whether the user vector takes part in local training, with an answer from the server or without."""
        return not sent or self.train_user == "always"

    def phases(self, sent: Tensors) -> tuple[Phase, ...]:
        model = Phase(("user", "items") if self.trains_user(bool(sent)) else ("items",), self.lr)
        return (Phase(("adapter",), self.lr_adapter), model) if self.learns_merge(bool(sent)) else (model,)

    def loss(self, held: Tensors, sent: Tensors, batch: Batch) -> Tensor:
        items = held["items"][batch.items]
        if not self.row_negatives:
            items = torch.where(batch.label[:, None] > 0, items, items.detach())
        own = {**held, "items": items}
        rows = self.merged(own, {"items": sent["items"][batch.items]}) if self.learns_merge(bool(sent)) else own["items"]
        return bce(rows @ held["user"], batch)

    def fused(self, sent: bool) -> DotBCE:
        plan = ElasticBCE(self.lr, sizes=self.adapter, lr_adapter=self.lr_adapter) if self.learns_merge(sent) else DotBCE(self.lr)
        return replace(plan, row_negatives=self.row_negatives, trains_user=self.trains_user(sent))

    def fused_score(self, sent: bool) -> DotBCE | None:
        return self.fused(sent) if self.merge == "elastic" or not sent else None

    def upload(self, held: Tensors, sent: Tensors, samples: Tensor) -> Tensors:
        return {"items": held["items"], "samples": samples}

    def score(self, own: Tensors, sent: Tensors) -> Tensor:
        return self.merged(own, sent) @ own["user"]

    # ---- server ------------------------------------------------------------------------------------------------------
    def answer(self, server: Tensors) -> Answer:
        return Answer(personal={"items": server["tables"]}, slot=server["slot"]) if server else Answer()

    def aggregated(self, n: int) -> int:
        """How many of n clients the server aggregates."""
        return max(1, int(n * self.agg_ratio))

    def aggregate(self, server: Tensors, uploads: Uploads, draw: Draw) -> Tensors:
        n = len(uploads.clients)
        picked = draw.subset("aggregated", n, self.aggregated(n))
        tables = uploads.tables("items", picked)
        mixed = tables.mixed(self.weights(tables, uploads.dense("samples", picked)))
        return delivered(server, "tables", mixed, uploads.clients[picked][tables.own], uploads)

    def weights(self, tables: Tables, samples: Tensor) -> Tensor | SparseWeights:
        """[R, M, d] of S, [S] -> [R, S]: row u says how much each table weighs in client u's mixture; [S] if that is the same for all."""
        samples = in_float64(samples)
        p = samples / samples.sum().clamp(min=1)
        cap = max(self.max_weight, 1 / len(p))  # fewer clients than expected may have answered
        if self.aggregation == "avg" or (self.aggregation == "both" and self.alpha == 0):
            return solve_weights(p[None], self.solver, cap)[0]
        sigma = similarity(tables.each(signatures), self.similarity, tables.own)
        if self.exclude_self:
            sigma.diagonal(tables.start).zero_()
        solved = (solve_weights(self.target(in_float64(some), p), self.solver, cap) for some in in_blocks(sigma))
        return self.with_floor(solved, samples, cap, tables.own)

    def target(self, sigma: Tensor, p: Tensor) -> Tensor:
        """[r, S], [S] -> [r, S]: what the quadratic program takes the nearest weights to."""
        if self.aggregation == "sim":
            sigma = sigma.clamp(min=0)
            return sigma / sigma.sum(dim=1, keepdim=True).clamp(min=1e-12)
        return torch.add(p, sigma, alpha=self.alpha) / (1 + self.alpha if self.objective == "paper" else 1)

    def with_floor(self, solved: Iterable[Tensor], samples: Tensor, cap: float, own: slice) -> Tensor | SparseWeights:
        """Rows of weights [r, S], in turn those of all `own` clients -> [R, S]: `floor` of each goes to the others by their samples.

        Both parts of a row obey the cap, so their sum does. A client without others that have samples keeps its row as it is.
        """
        mine = samples[own]
        left = samples.sum() - mine
        floor = self.floor * (left > 0).to(left)
        # All clients but oneself is everybody, which is the same for all rows, less oneself: the rows keep their zeros.
        share = floor / left.clamp(min=1e-300) if cap == 1 else torch.zeros_like(mine)

        def floored() -> Iterator[Tensor]:
            at = 0
            for weights in solved:
                some = slice(at, at + len(weights))
                weights *= 1 - floor[some, None]
                if cap < 1 and self.floor:
                    others = samples.expand_as(weights).clone()
                    others.diagonal(own.start + at).zero_()
                    weights += floor[some, None] * solve_weights(others / left[some, None].clamp(min=1e-300), self.solver, cap)
                weights.diagonal(own.start + at).sub_(share[some] * mine[some])
                at = some.stop
                yield weights

        return collected(floored(), share, samples)
