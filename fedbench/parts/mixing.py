"""What a server does with a round's stacked uploads: sums, means, and weights from similarity. Parts that algorithms choose from."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache, reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from fedbench.errors import FedbenchError, NotFinite, UsageError
from fedbench.kernels.layers import DIVIDE, FAST, SQUARE, TILE, fetch, padded, products, take_rows, zeros
from fedbench.kernels.vectors import WIDTH, put, repeat, spread, take
from fedbench.simulation.client_store import Disk, Picked, filled

if TYPE_CHECKING:
    from fedbench.contract.algorithm import Tensors
    from fedbench.simulation.engine import Uploads

AVERAGES = ("sum", "cohort", "touching")
BLOCK = 1 << 26
"""numbers a chunk of a large product may hold"""
AHEAD = 16
"""rows that are fetched while as many others are added"""


def alone(part: Tensor) -> Tensor:
    """The sum over all ranks if there is one."""
    return part


class Rows(NamedTuple):
    """Rows of a shared table as the clients sent them, in the order of the cohort. Where ranks share a run, each has its own clients'."""

    counts: Tensor
    """[n] how many each client of the cohort sent; of another rank's clients none are here"""
    item: Tensor
    """[R]"""
    value: Tensor
    """[R, ...]"""
    total: Callable[[Tensor], Tensor] = alone
    """sums what every rank made of its rows, maybe in place; all of them must ask for it"""

    @property
    def clients(self) -> int:
        """In the cohort."""
        return len(self.counts)

    @property
    def client(self) -> Tensor:
        """[R] position in the cohort."""
        return torch.arange(self.clients, device=self.item.device).repeat_interleave(self.counts)

    def combine(self, items: int, how: str, weight: Tensor | None = None) -> Tensor:
        """[M, ...]: summed item by item, divided by nothing (sum), the cohort's size (cohort) or a row's senders (touching).

        weight [n]: how much each client counts, in the sum and in what it is divided by; 1 if not given.
        """
        return self.combined(items, how, weight)[0]

    def combined(self, items: int, how: str, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The same, and how many clients sent each row [M], or how much they count together."""
        if how not in AVERAGES:
            raise UsageError(f"rows are combined by {', '.join(AVERAGES)}, not by {how!r}")
        shape = (-1, *[1] * (self.value.dim() - 1))
        each = None if weight is None else weight.to(self.value)[self.client]
        total, senders = map(self.total, summed_by_item(self.item, self.value, items, each))
        if how == "cohort":
            total /= self.clients if weight is None else weight.sum()
        elif how == "touching":
            total /= senders.clamp(min=torch.finfo(senders.dtype).tiny).view(shape)  # of an item that nobody sent the total is 0
        return total, senders

    def senders(self, items: int, weight: Tensor | None = None) -> Tensor:
        """[M]: how many clients sent a row of each item, or how much they count together."""
        each = None if weight is None else weight.to(self.value)[self.client]
        return self.total(torch.bincount(self.item, each, minlength=items).to(self.value.dtype))

    def sent(self) -> int:
        """How many rows, over all clients."""
        own = len(self.item)
        return own if self.total is alone else int(self.total(torch.tensor(own, device=self.item.device)))


def one_block(work: Callable[[], Tensor]) -> Iterator[Tensor]:
    """The rows of all ranks if there is one."""
    yield work()


class Tables(NamedTuple):
    """Whole tables of the clients' own, in the order of the cohort. Where ranks share a run, each has its own clients'."""

    value: Tensor
    """[R, M, ...] those that are here, all S in one process"""
    start: int
    """position in the cohort of the first of them"""
    clients: int
    """S in the cohort"""
    passed: Callable[[Callable[[], Tensor]], Iterator[Tensor]] = one_block
    """the rows that every rank makes, in the order of the cohort and some at once; all must ask for it, and see the end of it"""

    @property
    def own(self) -> slice:
        """The positions in the cohort of those that are here."""
        return slice(self.start, self.start + len(self.value))

    def picked(self, at: Tensor) -> Tables:
        """Those at the ascending positions `at` of the cohort; no copy when all are picked."""
        if len(at) == self.clients:
            return self
        here = at[(at >= self.own.start) & (at < self.own.stop)]
        return Tables(self.value[here - self.start], int((at < self.start).sum()), len(at), self.passed)

    def each(self, make: Callable[[Tensor], Tensor]) -> Tensor:
        """[S, ...]: what `make` finds for each table, [R, M, ...] -> [R, ...], where it is."""
        blocks = list(self.passed(lambda: make(self.value)))
        return torch.cat(blocks) if len(blocks) > 1 else blocks[0]

    def mixed(self, weights: Tensor) -> Tensor:
        """[R, S] -> [R, M, ...]: a mixture of all tables for each client whose table is here; [S] -> [1, M, ...]: one for all clients."""
        if weights.dim() == 1:
            return reduce(torch.add, self.passed(lambda: weighted_tables(weights[None, self.own], self.value)))
        mixed, at = self.value, 0
        for tables in self.passed(lambda: self.value):
            some = weights[:, at : at + len(tables)]
            if at == 0:
                mixed = weighted_tables(some, tables)
            else:
                mixed.flatten(1).addmm_(some.to(tables.dtype), tables.flatten(1))
            at += len(tables)
        return mixed


def summed_by_item(item: Tensor, value: Tensor, items: int, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """[R], [R, ...] -> [M, ...], [M]: the rows of each item added up, in order, and how many they are; weight [R]: what each counts."""
    total, count = value.new_zeros(items, *value.shape[1:]), value.new_zeros(items)
    if value.device.type != "cpu":
        each = value.new_ones(len(item)) if weight is None else weight
        rows = value if weight is None else value * weight.view(-1, *[1] * (value.dim() - 1))
        return total.index_add_(0, item, rows), count.index_add_(0, item, each)
    each = value.new_ones(1) if weight is None else weight
    _add_rows(
        item.numpy(),
        value.contiguous().view(len(item), math.prod(value.shape[1:])).numpy(),
        each.numpy(),
        total.view(items, -1).numpy(),
        count.numpy(),
    )
    return total, count


@njit(nogil=True, cache=True)
def _add_rows(item: np.ndarray, value: np.ndarray, weight: np.ndarray, total: np.ndarray, count: np.ndarray) -> None:
    """weight: [R], or [1] for all."""
    for start in range(0, item.size, AHEAD):
        fetch(total, item[start + AHEAD : start + 2 * AHEAD])
        for r in range(start, min(start + AHEAD, item.size)):
            row, add, one = total[item[r]], value[r], weight[r if weight.size > 1 else 0]
            for j in range(add.size):
                row[j] += one * add[j]
            count[item[r]] += one


def mean_of_whole_tables(rows: Rows, table: Tensor, kept: Tensor) -> Tensor:
    """[M, ...]: the mean change over the cohort of whole tables, though only touched rows were sent.

    kept [n]: what weight decay left of each number that client did not touch.
    """
    lost = kept - 1
    untouched = (lost.sum() - rows.senders(len(table), lost)) / rows.clients
    return rows.combine(len(table), "cohort") + table * untouched.view(-1, *[1] * (table.dim() - 1))


def signatures(tables: Tensor) -> Tensor:
    """[S, M, d] -> [S, M]: each client's items along the first principal component of its table, the largest entry positive."""
    scores = (_scores_on_cpu if tables.device.type == "cpu" else _scores_in_chunks)(tables)
    largest = scores.gather(1, scores.abs().argmax(dim=1, keepdim=True))
    return scores.mul_(torch.where(largest < 0, -1.0, 1.0))


def _scores_in_chunks(tables: Tensor) -> Tensor:
    """The same but for the sign, on any device."""
    scores = tables.new_empty(tables.shape[:2])
    size = max(1, BLOCK // max(1, tables[0].numel()))
    for chunk, out in zip(tables.split(size), scores.split(size), strict=True):
        centred = chunk - chunk.mean(dim=1, keepdim=True)
        direction = _direction((centred.transpose(1, 2) @ centred).double(), tables.dtype)
        out.copy_((centred @ direction.unsqueeze(-1)).squeeze(-1))
    return scores


def _scores_on_cpu(tables: Tensor) -> Tensor:
    """The same by kernels, without a centred copy."""
    mean, scores = tables.mean(dim=1), tables.new_empty(tables.shape[:2])
    covariance = torch.zeros(len(tables), tables.shape[2], tables.shape[2], dtype=torch.float64)
    _covariances(tables.numpy(), mean.numpy(), covariance.numpy())
    _along(tables.numpy(), mean.numpy(), _direction(covariance, tables.dtype).numpy(), scores.numpy())
    return scores


def _direction(covariance: Tensor, dtype: torch.dtype) -> Tensor:
    """[S, d, d] -> [S, d] the first principal components."""
    if not covariance.isfinite().all():
        raise NotFinite("an uploaded item table")
    return torch.linalg.eigh(covariance).eigenvectors[:, :, -1].to(dtype)


@njit(parallel=True, nogil=True, fastmath=FAST, error_model=DIVIDE, cache=True)
def _covariances(tables: np.ndarray, mean: np.ndarray, out: np.ndarray) -> None:
    """out [S, d, d] += the products of every table's columns less their means, which are summed in float64 over tiles of items."""
    clients, items, d = tables.shape
    everything = np.arange(items, dtype=np.int32)
    for c in prange(clients):
        beside, part, spare = zeros(d * TILE, tables), zeros(d * d, tables), zeros((TILE // WIDTH + 2) * SQUARE, tables)
        for start in range(0, items, TILE):
            some = everything[start : start + TILE]
            n, wide = padded(some.size), d * WIDTH
            take_rows(tables[c], some, beside, 0, wide)
            for y in range(0, n * d, WIDTH):
                put(beside, y, take(beside, y) - repeat(mean[c], y // WIDTH % d))
            for s in range(some.size, n):
                beside[(n - WIDTH) * d + s % WIDTH : n * d : WIDTH] = 0
            products(beside, 0, wide, d, beside, 0, wide, d, part, 0, n // WIDTH, spare)
            for j in range(d):
                for k in range(d):
                    out[c, j, k] += part[j * d + k]
            part[:] = 0


@njit(parallel=True, nogil=True, fastmath=FAST, error_model=DIVIDE, cache=True)
def _along(tables: np.ndarray, mean: np.ndarray, direction: np.ndarray, out: np.ndarray) -> None:
    """out [S, M]: each row of a table less the mean, along the table's direction [S, d]."""
    clients, items, d = tables.shape
    everything = np.arange(items, dtype=np.int32)
    for c in prange(clients):
        beside, scores = zeros(d * TILE, tables), zeros(TILE, tables)
        for start in range(0, items, TILE):
            some = everything[start : start + TILE]
            take_rows(tables[c], some, beside, 0, d * WIDTH)
            for s in range(0, some.size, WIDTH):
                score = spread(tables.dtype.type(0))
                for j in range(d):
                    score = score + repeat(direction[c], j) * (take(beside, s * d + j * WIDTH) - repeat(mean[c], j))
                put(scores, s, score)
            out[c, start : start + TILE] = scores[: some.size]


def similarity(vectors: Tensor, measure: str, own: slice = slice(None)) -> Tensor:
    """[S, M] -> [S, S] in float64: 1 / (1 + distance) with values over 0.9 taken as 1 (l2), or the cosine (cos).

    own: the rows that are asked for, if not all of them.
    """
    vectors = vectors.double()
    if measure == "cos":
        unit = torch.nn.functional.normalize(vectors, dim=1)
        return unit[own] @ unit.T
    square = (vectors * vectors).sum(dim=1)
    distance = (square[own, None] + square[None, :] - 2 * (vectors[own] @ vectors.T)).clamp(min=0).sqrt()
    distance.diagonal(own.start or 0).zero_()
    close = 1 / (1 + distance)
    return torch.where(close > 0.9, 1.0, close)


def project_to_simplex(target: Tensor) -> Tensor:
    """[..., S] -> [..., S]: the nearest point with entries >= 0 that sum to 1; exact, by sorting."""
    ordered = target.sort(dim=-1, descending=True).values
    excess = ordered.cumsum(dim=-1) - 1
    position = torch.arange(1, target.shape[-1] + 1, device=target.device, dtype=target.dtype)
    support = (ordered * position > excess).sum(dim=-1, keepdim=True)
    threshold = excess.gather(-1, support - 1) / support
    return (target - threshold).clamp(min=0)


@lru_cache(maxsize=8)
def _problem(size: int, max_weight: float) -> tuple[Any, Any, Any]:
    """One parametrised quadratic program for every row: minimise |x|² - 2 targetᵀx over the simplex with a cap."""
    import cvxpy as cp

    x, target = cp.Variable(size), cp.Parameter(size)
    limits = [x >= 0, cp.sum(x) == 1] + ([x <= max_weight] if max_weight < 1 else [])
    return cp.Problem(cp.Minimize(cp.sum_squares(x) - 2 * target @ x), limits), x, target


def solve_weights(target: Tensor, solver: str, max_weight: float = 1.0) -> Tensor:
    """[R, S] -> [R, S]: each row's x of `minimise |x|² - 2 targetᵀx, x >= 0, Σx = 1`, no entry over max_weight.

    Without a cap that is the projection onto the simplex (exact); with one, and on request, cvxpy solves it.
    """
    if not target.isfinite().all():
        raise NotFinite("a weight of the uploads")
    size = target.shape[-1]
    if max_weight * size < 1 - 1e-9:
        raise UsageError(f"--max-weight {max_weight:g} cannot hold for {size} aggregated clients: their weights must sum to 1; "
                         f"use at least {np.ceil(1e6 / size) / 1e6:g} or aggregate more clients")  # fmt: skip
    if solver == "exact" and max_weight >= 1:
        return project_to_simplex(target)
    problem, x, parameter = _problem(size, max_weight)
    rows = []
    for row in target.double().cpu().numpy():
        parameter.value = row
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            problem.solve(solver="CLARABEL", tol_gap_abs=1e-12, tol_gap_rel=1e-12, tol_feas=1e-12)
        if x.value is None:
            raise FedbenchError(f"the aggregation weights could not be solved (cvxpy: {problem.status}); use --solver exact")
        rows.append(_onto_limits(x.value, max_weight))
    return torch.from_numpy(np.reshape(rows, target.shape)).to(target)


def _onto_limits(x: np.ndarray, max_weight: float) -> np.ndarray:
    """Remove a numerical solver's last rounding: entries within [0, max_weight] and a sum of 1, exactly."""
    x = np.clip(x, 0, max_weight)
    gap = 1 - x.sum()
    room = (max_weight - x) if gap > 0 else x
    return np.clip(x + gap * room / max(room.sum(), 1e-300), 0, max_weight)


def weighted_tables(weights: Tensor, tables: Tensor) -> Tensor:
    """[R, S], [S, M, d] -> [R, M, d]: a mixture of all tables for each row of weights."""
    return (weights.to(tables.dtype) @ tables.flatten(1)).view(len(weights), *tables.shape[1:])


def delivered(server: Tensors, name: str, value: Tensor, to: Tensor, uploads: Uploads) -> Tensors:
    """The server with `value` [R, ...] for the clients `to` [R], beside what others have not come for yet: `name` and `slot` [U].

    `value` may be one for all of them, [1, ...]. Where ranks share a run, each keeps what is for its own clients.
    """
    if not value.sum().isfinite():
        raise NotFinite(f"the server's {name}")
    slot = torch.full((uploads.world.clients,), -1, device=value.device)
    slot[to] = torch.arange(len(to), device=value.device) if len(value) > 1 else 0
    waiting = torch.zeros_like(slot, dtype=torch.bool) if not server else server["slot"] >= 0
    waiting[uploads.clients] = False
    who = waiting.nonzero()[:, 0]
    if not len(who):
        return {name: value, "slot": slot}
    before, rows = server[name], server["slot"][who]
    if not isinstance(uploads.room, Disk):
        slot[who] = len(value) + torch.arange(len(who), device=value.device)
        return {name: torch.cat([value, before[rows]]), "slot": slot}
    free = torch.ones(len(before), dtype=torch.bool)
    free[server["slot"][server["slot"] >= 0]] = False  # nothing of the server before is overwritten: the step may be taken again
    if free.sum() < len(to):
        before = filled(uploads.room, len(slot) + len(uploads.clients), Picked(before, rows, uploads.room).chunks())
        rows, free = torch.arange(len(who)), torch.arange(len(before)) >= len(who)
    new = free.nonzero()[: len(to), 0]
    uploads.room.reserve(before, new.numpy())
    before[new] = value
    slot[to], slot[who] = new, rows
    return {name: before, "slot": slot}
