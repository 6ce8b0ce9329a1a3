"""Popularity at the time: every user gets the items that were popular when it was last seen, old interactions counting less.

With all data in one place. An interaction loses half its weight every `--half-life` days. The counts are kept at a number of moments, and
a user is scored by the last moment before its own last training interaction: nothing that happened later counts, and no held-out item.
Where the data has times, this is the floor that a model without a notion of time must clear; without them, `popularity` is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedbench.contract.algorithm import Tensors, World
from fedbench.contract.central import Central, Pool
from fedbench.contract.randomness import Draw
from fedbench.contract.registry import register
from fedbench.contract.search import tuned

DAY = 86400.0
"""seconds"""


@register("popularity_recent", summary="rank items by how many users had them lately, at each user's own time: needs data with times")
@dataclass(frozen=True)
class PopularityRecent(Central):
    rounds: int = 1
    """passes over all data: the first says it all"""
    negatives: int = 0
    dim: int = tuned(100, choices=(10, 100, 1000))
    """moments at which items are counted: as many users were last seen between one and the next"""
    half_life: float = tuned(10.0, 1.0, 1000.0, log=True)
    """days after which an interaction counts half"""

    unused = (*Central.unused, "batch_size", "negatives")
    reads_time = True

    def check(self, world: World | None = None) -> None:
        super().check(world)
        self.must_be_positive("dim", "half_life")

    def init_server(self, world: World, draw: Draw) -> Tensors:
        return {"user": draw.zeros(world.clients, self.dim), "items": draw.zeros(world.items, self.dim)}

    def epoch(self, server: Tensors, pool: Pool, draw: Draw, kernels: bool) -> tuple[Tensors, Tensor]:
        assert pool.time is not None
        day = pool.time.double() / DAY
        last = day.new_full((len(server["user"]),), -torch.inf).scatter_reduce(0, pool.user, day, "amax")
        moment = last[last.isfinite()].quantile(torch.arange(self.dim, device=day.device).double() / self.dim)
        at = torch.searchsorted(moment, day)  # the first moment that it counts for
        counts = at < self.dim
        weight = 0.5 ** ((moment[at[counts]] - day[counts]) / self.half_life)
        items = day.new_zeros(len(server["items"]), self.dim).index_put((pool.item[counts], at[counts]), weight, accumulate=True)
        for now in range(1, self.dim):
            items[:, now] += items[:, now - 1] * 0.5 ** ((moment[now] - moment[now - 1]) / self.half_life)
        mine = (torch.searchsorted(moment, last, right=True) - 1).clamp(min=0)
        return {"user": one_hot(mine, self.dim).to(server["user"]), "items": items.to(server["items"])}, day.new_zeros(())
