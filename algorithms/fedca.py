"""FedCA: composite aggregation.

Zhang et al., "Beyond Similarity: Personalized Federated Recommendation with Composite Aggregation", arXiv 2406.03933; the authors' code:
https://github.com/hongleizhang/FedCA

Every client keeps a user vector P and an item table Q of its own. The server mixes the uploaded tables into a table G for each client:
those of similar clients weigh more, and so do those whose trained rows span a like subspace, which the paper calls complementary. A
client takes a fixed share of G over before it trains. FedEM, by some of the same authors, learns that share: this is its code with
another merge and one more term.

    client   Q <- Q + rho·(G - Q); e epochs of BCE on P·q_i; B [k, d]: the first principal components of its samples' rows
    upload   Q, B and the number of samples; never P
    server   x_u = argmin |x|² - 2(p + alpha·sigma_u + beta·c_u)ᵀx,  x >= 0, Σx = 1;   G_u = Σ_v x_uv Q_v
             p: share of samples; sigma: similarity of the tables' first principal components; c: of the subspaces B_u and B_v

The published code takes for c the cosine of the mean of k angles, picked one after another, and of components whose signs are
arbitrary. The clean recipe takes the mean squared cosine of the true principal angles, |B_u B_vᵀ|²/k, which knows no signs and is one
product of matrices for all pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedbench.algorithms.fedem import FedEM
from fedbench.contract.algorithm import Batch, Stage, Tensors, World
from fedbench.contract.randomness import Draw
from fedbench.contract.registry import register
from fedbench.contract.search import tuned
from fedbench.contract.uploads import Tables
from fedbench.errors import UsageError
from fedbench.parts.mixing import similarity


@register("fedca", summary="own item tables mixed by similarity and by the subspaces that they span, a fixed share taken over")
@dataclass(frozen=True)
class FedCA(FedEM):
    merge: str = "static"
    rho: float = tuned(0.5, 0.0, 1.0)
    """the share of --merge static; the published code takes 0.1"""
    beta: float = tuned(0.3, 0.0, 1.0)
    """weight of the subspaces beside similarity (--alpha)"""
    components: int = tuned(4, 2, 8)
    """dimensions of a client's subspace (k)"""
    angles: str = "principal"
    """how two subspaces are compared: principal (mean squared cosine of the principal angles) or greedy, as published"""
    complement: str = "aligned"
    """who counts as complementary: clients whose subspaces are aligned, as the published code has it, or distinct"""

    _compared = "basis"
    choices = {**FedEM.choices, "angles": ("principal", "greedy"), "complement": ("aligned", "distinct")}
    published = {**FedEM.published, "lr": 0.01, "rho": 0.1, "alpha": 0.3, "beta": 0.3, "angles": "greedy"}

    def check(self, world: World | None = None) -> None:
        super().check(world)
        self.must_not_be_negative("beta")
        if self.beta and not self.alpha:
            raise UsageError("--alpha must be over 0 where --beta is: take a small one to compare subspaces alone")
        if not 1 <= self.components <= self.dim:
            raise UsageError(f"--components must be from 1 to --dim ({self.dim}), not {self.components}")

    # ---- client ------------------------------------------------------------------------------------------------------
    def init_client(self, world: World, draw: Draw) -> Tensors:
        return {**super().init_client(world, draw), "basis": draw.zeros(self.components, self.dim)}

    def stages(self, sent: Tensors) -> tuple[Stage, ...]:
        return *super().stages(sent), Stage()

    def solve(self, held: Tensors, sent: Tensors, batch: Batch) -> Tensors:
        rows, weight = held["items"][batch.items], batch.weight[:, None]
        centred = (rows - (weight * rows).sum(0) / weight.sum().clamp(min=1)).double()  # squares of small rows beside large ones
        axes = torch.linalg.eigh(centred.T @ (weight * centred)).eigenvectors.flip(1)[:, : self.components].T  # [k, d], the longest first
        largest = axes.gather(1, axes.abs().argmax(1, keepdim=True))
        return {"basis": torch.where(largest < 0, -axes, axes).to(rows.dtype)}

    def upload(self, held: Tensors, sent: Tensors, samples: Tensor) -> Tensors:
        return {**super().upload(held, sent, samples), "basis": held["basis"]}

    # ---- server ------------------------------------------------------------------------------------------------------
    def alike(self, tables: Tables, more: Tensor | None) -> Tensor:
        sigma = super().alike(tables, more)
        if not self.beta or more is None:
            return sigma
        close = overlap(more, tables.own) if self.angles == "principal" else greedy(more, tables.own)
        close = close if self.complement == "aligned" else 1 - close
        return sigma + (self.beta / self.alpha * close).to(sigma)  # what is asked for is alpha times the sum


def overlap(bases: Tensor, own: slice) -> Tensor:
    """[S, k, d] -> [R, S]: the mean squared cosine of the principal angles, for it is the cosine of the projections BᵀB."""
    return similarity((bases.mT @ bases).flatten(1), "cos", own)


def greedy(bases: Tensor, own: slice) -> Tensor:
    """[S, k, d] -> [R, S]: cosine of the mean of k angles: the largest cosine between two components, then of those that are left."""
    cosine = torch.einsum("rid,sjd->rsij", bases[own], bases)
    total = cosine.new_zeros(cosine.shape[:2])
    for _ in range(bases.shape[1]):
        best, at = cosine.flatten(2).max(2)
        total += best.clamp(-1, 1).arccos()
        row, column = (at // bases.shape[1])[..., None, None], (at % bases.shape[1])[..., None, None]
        cosine = cosine.scatter(2, row.expand(-1, -1, 1, bases.shape[1]), -torch.inf)
        cosine = cosine.scatter(3, column.expand(-1, -1, bases.shape[1], 1), -torch.inf)
    return (total / bases.shape[1]).cos()
