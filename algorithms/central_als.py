"""Implicit ALS with all data in one place (Hu, Koren and Volinsky, 2008; regularised as Rendle et al., 2022): the strongest ceiling here.

    minimise  Σ interactions (1 - w·v)² + a0 Σ all pairs (w·v)² + λ Σ users (|I_u| + a0·M)|w|² + λ Σ items (c_i + a0·U)|v|²

with M items, U users, |I_u| a user's items and c_i an item's users. With the items fixed every user's vector is the solution of a
d × d system, and the other way round: a round solves all items, then all users, exactly. The sum over all pairs costs one d × d
product, so nothing is sampled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedbench.contract.algorithm import Tensors, World
from fedbench.contract.central import Central, Pool
from fedbench.contract.randomness import Draw
from fedbench.contract.registry import register
from fedbench.contract.search import tuned

ROWS = 1 << 14
"""padded rows that are solved with at once"""


@register("central_als", summary="ceiling: implicit ALS, exact alternating solves with all data in one place")
@dataclass(frozen=True)
class CentralALS(Central):
    rounds: int = 20
    """alternating solves of all items and all users; the best round is chosen on validation"""
    negatives: int = 0
    dim: int = 128
    a0: float = tuned(0.3, 0.03, 3.0, log=True)
    """weight of the squared score of every (user, item) pair, seen or not"""
    l2: float = tuned(0.006, 6e-4, 0.06, log=True)
    """weight of the squared norms (λ), times how much data a row has"""
    init_scale: float = 0.1
    """standard deviation of the initial user vectors, divided by the root of their size"""

    unused = (*Central.unused, "batch_size", "negatives")

    def check(self, world: World | None = None) -> None:
        super().check(world)
        self.must_be_positive("a0", "l2", "init_scale")

    def init_server(self, world: World, draw: Draw) -> Tensors:
        user = draw.normal("user", world.clients, self.dim) * self.init_scale / self.dim**0.5
        return {"user": user, "items": user.new_zeros(world.items, self.dim)}

    def epoch(self, server: Tensors, pool: Pool, draw: Draw, kernels: bool) -> tuple[Tensors, Tensor]:
        items = self.best_rows(server["user"], pool.item, pool.user, len(server["items"]))
        user = self.best_rows(items, pool.user, pool.item, len(server["user"]))
        return {"user": user, "items": items}, self.objective(user, items, pool) / len(pool.user)

    def best_rows(self, fixed: Tensor, group: Tensor, member: Tensor, groups: int) -> Tensor:
        """The best row of each group, [groups, d], given the rows `fixed` [N, d]; interaction s joins group[s] and member[s]."""
        count = torch.bincount(group, minlength=groups)
        member = member[torch.argsort(group, stable=True)]
        start = count.cumsum(0) - count
        everything = self.a0 * fixed.T @ fixed
        solved = fixed.new_zeros(groups, self.dim)
        by_size = torch.argsort(count, stable=True)
        sizes, at = count[by_size].tolist(), 0
        while at < groups:
            stop = at + 1
            while stop < groups and max(sizes[stop], self.dim) * (stop + 1 - at) <= ROWS:
                stop += 1
            rows = by_size[at:stop]
            offset = torch.arange(max(1, sizes[stop - 1]), device=fixed.device)
            real = offset < count[rows, None]
            theirs = fixed[member[(start[rows, None] + offset).where(real, 0)]] * real[..., None]
            ridge = self.l2 * (count[rows].to(fixed.dtype) + self.a0 * len(fixed))
            system = theirs.mT @ theirs + everything + torch.diag_embed(ridge[:, None].expand(-1, self.dim))
            solved[rows] = torch.cholesky_solve(theirs.sum(1)[..., None], torch.linalg.cholesky(system))[..., 0]
            at = stop
        return solved

    def objective(self, user: Tensor, items: Tensor, pool: Pool) -> Tensor:
        """What the solves minimise: a scalar."""
        scores = torch.cat([(user[u] * items[i]).sum(1) for u, i in zip(pool.user.split(ROWS), pool.item.split(ROWS), strict=True)])
        fit = ((1 - scores) ** 2).sum() + self.a0 * ((user.T @ user) * (items.T @ items)).sum()
        of_users = torch.bincount(pool.user, minlength=len(user)).to(fit.dtype) + self.a0 * len(items)
        of_items = torch.bincount(pool.item, minlength=len(items)).to(fit.dtype) + self.a0 * len(user)
        return fit + self.l2 * ((of_users[:, None] * user**2).sum() + (of_items[:, None] * items**2).sum())
