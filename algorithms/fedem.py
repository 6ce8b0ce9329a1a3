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

Where a round does not reach everybody, or new users come later, the server keeps a common table C beside the mixtures, the mean over the
clients seen so far. Who has no mixture scores with C in its place, and trains alone; new users merge C. A mixture of n tables of U takes
the share common·(1 - n/U) of C.

The clean recipe differs from the published one where the published one fails without its leak (docs/algorithms/fedem.md): negatives do
not train a client's own rows, all samples are one step, the user vector stays once the server has answered, a share of every mixture
(--floor) goes to all other clients. What then ranks well is the mixture, a vote of similar clients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fedbench.contract.algorithm import OWN, Answer, Batch, Phase, Tensors, World, bce
from fedbench.contract.mixtures import SparseWeights, collected, in_blocks
from fedbench.contract.randomness import Draw
from fedbench.contract.registry import register
from fedbench.contract.search import tuned, untuned
from fedbench.contract.uploads import Tables, Uploads
from fedbench.errors import UsageError
from fedbench.parts.merging import Merging, gradient_alone, init_mlp
from fedbench.parts.mixing import delivered, in_float64, mean_delivered, signatures, similarity, solve_weights


@register("fedem", summary="elastic merging: own item tables, similarity-weighted aggregation, a learned merge")
@dataclass(frozen=True)
class FedEM(Merging):
    rounds: int = 10
    local_epochs: int = 4
    dim: int = untuned(16)
    batch_size: int = 1 << 20
    """samples a local step; by default all that a client has, so that all clients take equally many steps and their tables compare; the
    published code takes 256"""
    stop_below: float = 1e-4
    alpha: float = tuned(0.9, 0.0, 1.0)
    """weight of similarity beside the share of samples; at 0 all clients are averaged. With a client's similarity to itself counted
    (--no-exclude-self) 0.9 leaves it almost alone"""
    adapter: tuple[int, ...] | None = (32, 16, 8, 1)
    """layer sizes of the adapter MLP; the first must be twice --dim, the last 1; none: that, 16, 8 and 1"""
    lr: float = tuned(0.1, 0.01, 0.5, log=True)
    """local learning rate of Adam for the user vector and the item rows"""
    merge: str = "elastic"
    """how the server's table enters the client's: replace, static (a fixed share, --rho) or elastic (the adapter decides)"""
    aggregation: str = "both"
    """weights from samples alone (avg), from similarity alone (sim), or from the quadratic program over both (both)"""
    objective: str = "paper"
    """quadratic program of the authors' paper (project (p + alpha·sigma)/(1 + alpha)) or of their code (project p + alpha·sigma)"""
    similarity: str = "cos"
    """similarity of two clients' signatures: cos, or l2 (1/(1 + distance)) as in the published code"""
    floor: float = tuned(0.05, 0.0, 0.5)
    """share of every mixture that goes to all other clients by their samples, however similar they are; the published code has none. At
    alpha 0 all clients are averaged anyway"""
    row_negatives: bool = False
    """negatives train a client's own item rows too, as published; a held-out item that is drawn once is then lost to that client"""
    train_user: str = "first"
    """when the user vector is trained: first (until the server first answers the client) or always, as published"""
    common: float = tuned(0.3, 0.0, 1.0)
    """share of a mixture of very few tables that the mean of all clients seen so far has; the more tables, the less. Who has no mixture
    scores with that mean, and who is not aggregated keeps its last mixture. With --floor 0, as published, there is no such mean"""
    agg_ratio: float = 1.0
    """share of the round's clients whose tables are aggregated and that are sent a mixture; the published code takes 0.1"""
    exclude_self: bool = True
    """leave a client's similarity to itself (always 1) out; the published code counts it"""
    solver: str = "exact"
    """exact (a projection) or cvxpy (a quadratic programming solver)"""
    max_weight: float = 1.0
    """no single client may weigh more than this in a mixture, the floor's share included"""
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
    scores = ("own", "sent")
    later = ("merge_loss", "common")
    per_client_server_state = ("tables",)
    _compared = ""
    """name of an upload that clients are compared by beside their tables, in methods that derive from this one"""
    choices = {
        **Merging.choices,
        "aggregation": ("avg", "sim", "both"),
        "objective": ("code", "paper"),
        "similarity": ("l2", "cos"),
        "solver": ("exact", "cvxpy"),
        "train_user": ("first", "always"),
    }

    def check(self, world: World | None = None) -> None:
        super().check(world)
        if not 0 <= self.alpha <= 1e6:
            raise UsageError(f"--alpha must be 0 or more (1e6 at most), not {self.alpha:g}")
        for name in ("agg_ratio", "max_weight"):
            if not 0 < getattr(self, name) <= 1:
                raise UsageError(f"--{name.replace('_', '-')} must be over 0 and at most 1, not {getattr(self, name):g}")
        self.must_be_positive("lr", "init_items", "init_user")
        for name in ("floor", "common"):
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
            "adapter": init_mlp(mine, "adapter", self.sizes),
        }

    def merged(self, own: Tensors, sent: Tensors) -> Tensor:
        """[T, d]: the client's rows after one merge with the server's."""
        return self.merged_rows(own["items"], sent["items"], own["adapter"]) if "items" in sent else own["items"]

    def receive(self, own: Tensors, sent: Tensors) -> Tensors:
        return {**own, "items": self.merged(own, sent)} if mixture_in(sent) else own

    def learns_merge(self, sent: bool) -> bool:
        """The adapter takes a step of its own, if a mixture was sent."""
        return sent and self.merge == "elastic"

    def trains_user(self, sent: bool) -> bool:
        """Whether the user vector takes part in local training, with a mixture from the server or without."""
        return not sent or self.train_user == "always"

    def phases(self, sent: Tensors) -> tuple[Phase, ...]:
        model = Phase(("user", "items") if self.trains_user(mixture_in(sent)) else ("items",), self.lr)
        return (Phase(("adapter",), self.lr_adapter), model) if self.learns_merge(mixture_in(sent)) else (model,)

    def loss(self, held: Tensors, sent: Tensors, batch: Batch) -> Tensor:
        items = held["items"][batch.items]
        if not self.row_negatives:
            items = torch.where(batch.label[:, None] > 0, items, items.detach())
        if not self.learns_merge(mixture_in(sent)):
            return bce(items @ held["user"], batch)
        own, theirs = {**held, "items": items}, {"items": sent["items"][batch.items]}
        if self.merge_loss == "inside":
            return bce(self.merged(own, theirs) @ held["user"], batch)
        merged = self.merged({**own, "items": items.detach()}, theirs)
        return bce(items @ held["user"], batch) + gradient_alone(bce(merged @ held["user"].detach(), batch))

    def upload(self, held: Tensors, sent: Tensors, samples: Tensor) -> Tensors:
        return {"items": held["items"], "samples": samples}

    def score(self, own: Tensors, sent: Tensors) -> Tensor:
        return self.merged(own, sent) @ own["user"]

    def score_own(self, own: Tensors, sent: Tensors) -> Tensor:
        return own["items"] @ own["user"]

    def score_sent(self, own: Tensors, sent: Tensors) -> Tensor:
        return sent.get("items", own["items"]) @ own["user"]

    # ---- server ------------------------------------------------------------------------------------------------------
    def answer(self, server: Tensors) -> Answer:
        if "tables" not in server:
            return Answer(server)
        instead = {"items": server["common"], "common": server["common"].new_zeros(())} if "common" in server else {}
        return Answer(personal={"items": server["tables"]}, slot=server["slot"], instead=instead)

    def for_new_users(self, server: Tensors) -> Tensors:
        """To new users the common table is the server's, which they merge into their own as others do a mixture."""
        if not self.floor or "items" in server:
            return server
        if not server:  # nobody was heard yet
            return {"items": torch.zeros(self.context.world.items, self.dim)}
        return {"items": server["common"] if "common" in server else mean_delivered(server, "tables")}

    def aggregated(self, n: int) -> int:
        """How many of n clients the server aggregates."""
        return max(1, int(n * self.agg_ratio))

    def aggregate(self, server: Tensors, uploads: Uploads, draw: Draw) -> Tensors:
        n = len(uploads.clients)
        picked = draw.subset("aggregated", n, self.aggregated(n))
        tables = uploads.tables("items", picked)
        more = uploads.dense(self._compared, picked) if self._compared else None
        mixed = tables.mixed(self.weights(tables, uploads.dense("samples", picked), more))
        common = self.in_common(server, tables, uploads.world)
        for table in common.values():
            mixed.lerp_(table, self.common * (1 - len(picked) / uploads.world.clients))
        spent = uploads.clients[picked] if common else uploads.clients
        return {**delivered(server, "tables", mixed, uploads.clients[picked][tables.own], uploads, spent), **common}

    def in_common(self, server: Tensors, tables: Tables, world: World) -> Tensors:
        """The common table after a round of S tables; there is none as long as every round has reached all who need one.

        It is the mean over rounds until all clients can have been seen, then over about as many rounds as it takes to see all.
        """
        size, clients = tables.clients, world.clients
        if not self.floor or (size == clients and not world.new_users and "common" not in server):
            return {}
        now = tables.mixed(tables.value.new_full((size,), 1 / size))[0]
        new = max(1 / max(1, self.context.round), size / clients)
        return {"common": torch.lerp(server["common"], now, new) if "common" in server else now}

    def alike(self, tables: Tables, more: Tensor | None) -> Tensor:
        """[R, M, d] of S -> [R, S]: how similar each two clients are. more [S, ...]: what `_compared` names."""
        return similarity(tables.each(signatures), self.similarity, tables.own)

    def weights(self, tables: Tables, samples: Tensor, more: Tensor | None = None) -> Tensor | SparseWeights:
        """[R, M, d] of S, [S] -> [R, S]: row u says how much each table weighs in client u's mixture; [S] if that is the same for all."""
        samples = in_float64(samples)
        p = samples / samples.sum().clamp(min=1)
        cap = max(self.max_weight, 1 / len(p))  # fewer clients than expected may have answered
        if self.aggregation == "avg" or (self.aggregation == "both" and self.alpha == 0):
            return solve_weights(p[None], self.solver, cap)[0]
        sigma = self.alike(tables, more)
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


def mixture_in(sent: Tensors) -> bool:
    """Whether a client was sent a mixture, and not the common table, which has a word beside it that says so."""
    return "items" in sent and "common" not in sent
