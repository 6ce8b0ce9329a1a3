"""Item-to-item models: a client scores an item by the weights that lead there from its own items, x·B with B [M, M].

All that such a model needs of a client is its part of a Gram matrix, G = Σ_u r_u r_uᵀ over 0/1 vectors of items, so one visit is enough.
B follows from G on the server: by ridge regression (`ease`), as cosines (`cosine`) or as steps of a random walk (`random_walk`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedbench.contract.algorithm import SHARED, Algorithm, Answer, Batch, Stage, Tensors, World
from fedbench.contract.central import Central, Pool
from fedbench.contract.randomness import Draw
from fedbench.contract.search import tuned, untuned
from fedbench.contract.uploads import Uploads
from fedbench.errors import UsageError
from fedbench.kernels.item_item import pair_sums, profile_scores


def profile_score(user: Tensor, items: Tensor, index: Tensor) -> Tensor:
    """[M], [M, M], numbers of K items -> [K]"""
    return (user.to(items.dtype) @ items)[index]


@dataclass(frozen=True)
class AskedOnce(Algorithm):
    """Base of methods that ask every client once, for a sum over all of them."""

    rounds: int = 1
    """rounds; every client is asked once, n in a round, so with --clients-per-round n it takes U/n of them; more change nothing"""
    local_epochs: int = untuned(1)
    negatives: int = untuned(0)
    dim: int = untuned(16)

    @property
    def in_the_clear(self) -> bool:
        """The server sees what each client sends, not the sum alone."""
        return False

    def check(self, world: World | None = None) -> None:
        if self.negatives:
            raise UsageError(f"--negatives means nothing to {self.name}: leave it out")
        if not world:
            return
        n = self.cohort(world.clients)
        if not self.in_the_clear and (n == 1 or (world.clients % n == 1 and self.rounds * n > world.clients)):
            raise UsageError(
                f"a round of one client is left, whose sum is that client's own part: use another --clients-per-round than {n}"
            )

    def choose(self, server: Tensors, world: World, n: int, draw: Draw) -> Tensor:
        """Everybody in turn, then nobody, so that no client counts twice."""
        return torch.arange(world.clients)[(self.context.round - 1) * n :][:n]


@dataclass(frozen=True)
class FederatedItems(AskedOnce):
    """Base of the federated ones: what a client sends, and how it scores. A method writes `aggregate`.

    A client keeps nothing: `user` [M], which of the items it has, is made anew where it is needed. `index` numbers the rows that it holds.
    """

    secure: bool = True
    """sum what clients send under masks: the server sees the sum alone, and each client sends all M(M+1)/2 pairs of items"""
    user_power: float = tuned(0.0, 0.0, 1.0)
    """a client of k items counts as k to the power of minus this; 0: all count alike, 1: a client with many items counts as any other"""

    tables = {"index": SHARED, "gram": SHARED, "pairs": SHARED}
    paired = ("gram", "pairs")
    summed = ("gram",)
    reconstructs = True

    @property
    def in_the_clear(self) -> bool:
        return not self.secure

    def init_server(self, world: World, draw: Draw) -> Tensors:
        return {name: draw.zeros(world.items, world.items) for name in ("gram", "items")}

    def answer(self, server: Tensors) -> Answer:
        # client code sees rows: this says which items they are
        return Answer({"items": server["items"], "index": torch.arange(len(server["items"]), device=server["items"].device)})

    def bits(self, world: World) -> dict[str, float]:
        # both sides can number the items, so nothing travels
        return {"index": 0}

    def receive(self, own: Tensors, sent: Tensors) -> Tensors:
        # a byte an item: every client has M of them
        return {**sent, "user": torch.zeros_like(sent["items"][0], dtype=torch.uint8)}

    def stages(self, sent: Tensors) -> tuple[Stage, ...]:
        return (Stage(),)

    def solve(self, held: Tensors, sent: Tensors, batch: Batch) -> Tensors:
        return {"user": held["user"].scatter_add(0, sent["index"][batch.items], (batch.label * batch.weight).to(torch.uint8))}

    def upload(self, held: Tensors, sent: Tensors, samples: Tensor) -> Tensors:
        size = held["user"].to(samples.dtype).sum().clamp(min=1)
        # v vᵀ has v twice: half of the power in each
        return {"gram" if self.secure else "pairs": held["user"][sent["index"]].to(samples.dtype) * size ** (-self.user_power / 2)}

    def gram(self, server: Tensors, uploads: Uploads) -> Tensor:
        """[M, M] the sum over all clients so far."""
        here = uploads.total("gram") if self.secure else uploads.rows("pairs").gram(uploads.world.items)
        return server["gram"] + here

    def score(self, own: Tensors, sent: Tensors) -> Tensor:
        return profile_score(own["user"], sent["items"], sent["index"])

    def score_clients(self, own: Tensors, sent: Tensors, items: Tensor | None) -> Tensor:
        return profile_scores(own["user"], sent["items"], items)


@dataclass(frozen=True)
class CentralItems(Central):
    """Base of the centralised ones, which are done after one pass. A method writes `epoch`, by `everybody` and `fitted`."""

    rounds: int = 1
    """passes over all data: the first says it all"""
    negatives: int = untuned(0)
    dim: int = untuned(16)

    tables = {"index": SHARED}
    unused = (*Central.unused, "batch_size", "negatives", "dim")

    def init_server(self, world: World, draw: Draw) -> Tensors:
        user = torch.zeros(world.clients, world.items, dtype=torch.uint8, device=draw.device)
        return {"user": user, "items": draw.zeros(world.items, world.items)}

    def answer(self, server: Tensors) -> Answer:
        index = torch.arange(len(server["items"]), device=server["items"].device)
        given = super().answer(server)
        return Answer({**given.shared, "index": index}, given.personal, given.slot)

    def everybody(self, server: Tensors, pool: Pool) -> tuple[Tensor, Tensor]:
        """[U, M] who has which items, and [M, M] their Gram matrix."""
        user = torch.zeros_like(server["user"])
        user[pool.user, pool.item] = 1
        order = torch.argsort(pool.user, stable=True)
        counts = torch.bincount(pool.user, minlength=len(user))
        return user, pair_sums(counts, pool.item[order], torch.ones_like(pool.label), len(server["items"])).to(server["items"])

    def fitted(self, server: Tensors, user: Tensor, items: Tensor) -> tuple[Tensors, Tensor]:
        """What `epoch` returns; there is no loss. Of fewer items than the server knows (kernels are compared so) the rest weigh 0."""
        return {"user": user, "items": pad(items, (0, server["items"].shape[1] - len(items)))}, items.new_zeros(())

    def score(self, own: Tensors, sent: Tensors) -> Tensor:
        return profile_score(sent["user"], sent["items"], sent["index"])

    def score_clients(self, own: Tensors, sent: Tensors, items: Tensor | None) -> Tensor:
        return profile_scores(sent["user"], sent["items"], items)


def ease(gram: Tensor, l2: float) -> Tensor:
    """[M, M] -> [M, M]: argmin |X - X·B|² + l2·|B|² with a diagonal of 0, from G = XᵀX: -P/diag(P) by column, P the inverse of G + l2·I.

    l2 0: the root of the trace of G, which is the number of interactions; near the best on all data that we tried.
    """
    # a copy, for it is changed in place; in float64, for the inverse of a badly conditioned matrix loses digits
    inverse = gram.cpu().to(torch.float64, copy=True)
    inverse.diagonal().add_(l2 or float(inverse.trace().clamp(min=1).sqrt()))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(inverse))
    inverse /= -inverse.diagonal().clone()
    return without_diagonal(inverse).to(gram)


def cosine(gram: Tensor, shrink: float) -> Tensor:
    """[M, M] -> [M, M]: G_ij / (√(G_ii·G_jj) + shrink)."""
    exact = gram.cpu().double()
    size = exact.diagonal().sqrt()
    return without_diagonal(exact / (torch.outer(size, size) + shrink).clamp(min=1e-12)).to(gram)


def random_walk(gram: Tensor, beta: float) -> Tensor:
    """[M, M] -> [M, M]: G_ij / (d_i·d_j^beta), d the sums of the rows: a step from i to a client that has it, and from there to j."""
    exact = gram.cpu().double()
    size = exact.sum(1).clamp(min=1e-12)
    return without_diagonal(exact / torch.outer(size, size**beta)).to(gram)


def nearest(weights: Tensor, neighbours: int) -> Tensor:
    """[M, M] -> [M, M]: of each column the largest weights, so many (0: all of them); the others 0."""
    if not 0 < neighbours < len(weights):
        return weights
    kept = weights.topk(neighbours, dim=0)
    return torch.zeros_like(weights).scatter_(0, kept.indices, kept.values)


def without_diagonal(weights: Tensor) -> Tensor:
    """The weights, their diagonal set to 0 in place: an item says nothing about itself."""
    weights.diagonal().zero_()
    return weights
