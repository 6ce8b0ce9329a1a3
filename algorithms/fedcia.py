"""FedCIA: aggregate what items have to do with each other, not parameters.

Han et al., "FedCIA: Federated Collaborative Information Aggregation for Privacy-Preserving Recommendation", SIGIR 2025, arXiv 2504.14208;
the authors' code: https://github.com/Mingzhe-Han/FedCIA

Every client keeps a user vector p and an item table Q of its own. Tables of clients that were trained apart may say the same in other
bases, so that their mean says nothing; the similarities of items, S = Q Qᵀ, do not depend on the basis. The server averages S, and every
client then changes its table until its own similarities are the mean ones.

    client   moves Q to the mean similarities; e epochs of BCE on p·q_i
    upload   Q, which is S up to a rotation; never p
    server   F [M, d]: the best factor of rank d of the mean, F Fᵀ ~ 1/n Σ Q_v Q_vᵀ

The paper sends S, M x M numbers, and takes a hundred gradient steps (`--align steps`). What those steps lead to has a closed form: F,
turned by the rotation R_u that brings it nearest to Q_u (`--align procrustes`), Q_u <- Q_u + tau·(F R_u - Q_u). In both forms the new
table is Q_u A_u + F B_u with two small matrices, for the gradient stays in the span of Q_u and F. A client can make them from its
table and F; here the server does, so that a row of the new table is a function of that row alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce

import torch
from torch import Tensor

from fedbench.contract.algorithm import OWN, SHARED, Algorithm, Answer, Batch, Phase, Tensors, World, bce
from fedbench.contract.randomness import Draw
from fedbench.contract.registry import register
from fedbench.contract.search import tuned
from fedbench.contract.uploads import Tables, Uploads
from fedbench.errors import UsageError
from fedbench.parts.mixing import delivered, in_float64

CHUNK, SPARE = 256, 8
"""tables whose products are made at once; directions that subspace iteration follows beside the d that are asked for"""


@register("fedcia", summary="own item tables, turned towards the mean of all clients' item similarities")
@dataclass(frozen=True)
class FedCIA(Algorithm):
    local_epochs: int = 2
    lr: float = tuned(0.1, 0.01, 0.5, log=True)
    """local learning rate of Adam; the published code takes 0.01"""
    objective: str = "bce"
    """the loss: bce of p·q, or squares as published: every coordinate of p∘q is to be 1, for a negative 0"""
    l2: float = tuned(0.0, 0.0, 0.01)
    """weight of the squared user vector and rows, halved; --align steps decays by it too; the published code takes 0.001"""
    align: str = "procrustes"
    """how a table is moved to the mean similarities: procrustes (closed form) or steps (gradient descent, as published)"""
    tau: float = tuned(1.0, 0.25, 1.0, when={"align": ("procrustes",)})
    """procrustes: the share of the way to the turned factor"""
    align_steps: int = 100
    """steps: how many"""
    align_lr: float = 0.1
    """steps: learning rate"""
    passes: int = 4
    """passes over all tables in which the server finds the factor, by subspace iteration; 0: exactly, from the M x M mean"""
    init_scale: float = 0.1
    """standard deviation of the initial vectors; all clients start from one table"""

    tables = {"items": OWN, "factor": SHARED}
    scores = ("own",)
    per_client_server_state = ("maps",)
    choices = {**Algorithm.choices, "objective": ("bce", "squares"), "align": ("procrustes", "steps")}
    published = {
        **{"rounds": 500, "local_epochs": 1, "negatives": 1, "dim": 256, "lr": 0.01, "objective": "squares", "l2": 1e-3},
        **{"align": "steps"},
    }

    def check(self, world: World | None = None) -> None:
        self.must_be_positive("lr", "align_steps", "align_lr", "init_scale")
        self.must_not_be_negative("l2", "passes")
        if not 0 <= self.tau <= 1:
            raise UsageError(f"--tau must be from 0 to 1, not {self.tau:g}")

    # ---- client ------------------------------------------------------------------------------------------------------
    def init_client(self, world: World, draw: Draw) -> Tensors:
        items = draw.same.normal("items", world.items, self.dim) * self.init_scale  # the server's first factor
        return {"user": draw.normal("user", self.dim) * self.init_scale, "items": items}

    def aligned(self, own: Tensors, sent: Tensors) -> Tensor:
        """[T, d]: the client's rows at the mean similarities. One that the server has not met yet takes the factor as it is."""
        if "maps" not in sent:
            return sent["factor"] if "factor" in sent else own["items"]
        return own["items"] @ sent["maps"][0] + sent["factor"] @ sent["maps"][1]

    def receive(self, own: Tensors, sent: Tensors) -> Tensors:
        return {**own, "items": self.aligned(own, sent)}

    def phases(self, sent: Tensors) -> tuple[Phase, ...]:
        return (Phase(("user", "items"), self.lr),)

    def loss(self, held: Tensors, sent: Tensors, batch: Batch) -> Tensor:
        rows, user = held["items"][batch.items], held["user"]
        samples = batch.weight.sum().clamp(min=1)
        if self.objective == "bce":
            fit = bce(rows @ user, batch)
        else:
            fit = (batch.weight * ((rows * user - batch.label[:, None]) ** 2).mean(1)).sum() / samples
        if not self.l2:
            return fit
        return fit + self.l2 / 2 * ((user**2).sum() + 2 * (batch.weight * (rows**2).sum(1)).sum() / samples)

    def upload(self, held: Tensors, sent: Tensors, samples: Tensor) -> Tensors:
        return {"items": held["items"]}

    def score(self, own: Tensors, sent: Tensors) -> Tensor:
        return self.aligned(own, sent) @ own["user"]

    def score_own(self, own: Tensors, sent: Tensors) -> Tensor:
        return own["items"] @ own["user"]

    # ---- server ------------------------------------------------------------------------------------------------------
    def init_server(self, world: World, draw: Draw) -> Tensors:
        return {"factor": draw.normal("items", world.items, self.dim) * self.init_scale}

    def answer(self, server: Tensors) -> Answer:
        shared = {"factor": server["factor"]}
        return Answer(shared, {"maps": server["maps"]}, server["slot"]) if "slot" in server else Answer(shared)

    def bits(self, world: World) -> dict[str, float]:
        return {"maps": 0}  # a client makes them itself, from its table and the factor

    def aggregate(self, server: Tensors, uploads: Uploads, draw: Draw) -> Tensors:
        tables, before = uploads.tables("items"), server["factor"]
        factor = self.factor(tables, draw)
        factor = factor @ nearest_rotation(factor.T @ before)  # any basis does; near the last one for those who miss a round
        products = torch.cat([some.mT @ factor for some in tables.value.split(CHUNK)]).mT  # [R, d, d]: Fᵀ Q
        if self.align == "procrustes":
            stay = (1 - self.tau) * torch.eye(self.dim, dtype=factor.dtype, device=factor.device).expand_as(products)
            maps = torch.stack([stay, self.tau * nearest_rotation(products)], dim=1)
        else:
            grams = torch.cat([some.mT @ some for some in tables.value.split(CHUNK)])
            maps = descended(grams, products, factor.T @ factor, self.align_steps, self.align_lr, self.l2)
        return {**server, **delivered(server, "maps", maps, uploads.clients[tables.own], uploads), "factor": factor}

    def factor(self, tables: Tables, draw: Draw) -> Tensor:
        """[R, M, d] of S -> [M, d]: the best F for F Fᵀ = 1/S Σ Q Qᵀ."""
        items, size = tables.value.shape[1], min(self.dim, tables.value.shape[1])
        if self.passes:
            found = draw.normal("factor", items, min(items, self.dim + SPARE))
            for _ in range(self.passes):
                basis = torch.linalg.qr(found).Q
                found = over_all(tables, partial(similarities_times, basis))
            inner = basis.T @ found
            values, axes = torch.linalg.eigh((inner + inner.T) / 2)
            axes = basis @ axes
        else:
            values, axes = torch.linalg.eigh(over_all(tables, lambda some: torch.einsum("rmd,rkd->mk", some, some)))
        found = axes[:, -size:] * values[-size:].clamp(min=0).sqrt()
        return torch.nn.functional.pad(found, (0, self.dim - size))  # fewer items than dimensions


def over_all(tables: Tables, product: Callable[[Tensor], Tensor]) -> Tensor:
    """The mean over all clients of a product, summed over some tables [r, M, d] at a time."""

    def here() -> Tensor:
        return reduce(torch.add, map(product, tables.value.split(CHUNK)))[None] / tables.clients

    return reduce(torch.add, tables.passed(here))[0]


def similarities_times(x: Tensor, some: Tensor) -> Tensor:
    """[M, k], [r, M, d] -> [M, k]: Σ Q Qᵀ x, without an M x M matrix."""
    return torch.einsum("rmd,rdk->mk", some, some.mT @ x)


def nearest_rotation(product: Tensor) -> Tensor:
    """[..., d, d] = Fᵀ Q -> [..., d, d]: the orthogonal R for which F R is nearest to Q."""
    left, _, right = torch.linalg.svd(product)
    return left @ right


def descended(gram: Tensor, product: Tensor, factor: Tensor, steps: int, lr: float, decay: float) -> Tensor:
    """[n, 2, d, d] A and B: descent on |Q Qᵀ - F Fᵀ| leads from Q to Q A + F B. Given QᵀQ, Fᵀ Q [n, d, d] and Fᵀ F [d, d]."""
    kind, d = gram.dtype, gram.shape[1]
    gram, product, factor = (in_float64(some) for some in (gram, product, factor))  # the norm is a small difference of large numbers
    whole = torch.cat([torch.cat([gram, product.mT], 2), torch.cat([product, factor.expand_as(gram)], 2)], 1)  # of [Q F]
    eye = torch.eye(d, dtype=gram.dtype, device=gram.device).expand_as(gram)
    maps, size = torch.cat([eye, torch.zeros_like(eye)], 1), (factor**2).sum()  # [n, 2d, d]: A over B
    for _ in range(steps):
        now = whole @ maps
        inner, cross = maps.mT @ now, now[:, d:]  # of the table as it is now: its gram, and Fᵀ times it
        square = (inner**2).sum((1, 2)) - 2 * (cross**2).sum((1, 2)) + size
        slope = maps @ inner - torch.cat([torch.zeros_like(cross), cross], 1)
        maps = (1 - lr * decay) * maps - 2 * lr * slope / square.clamp(min=1e-12 * size).sqrt()[:, None, None]
    return maps.unflatten(1, (2, -1)).to(kind)
