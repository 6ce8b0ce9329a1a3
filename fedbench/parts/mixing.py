"""What a server does with a round's stacked uploads: sums, means, and weights from similarity. Parts that algorithms choose from."""

from __future__ import annotations

import warnings
from functools import lru_cache, reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbench.contract.algorithm import Tensors
from fedbench.contract.storage import Disk, RowView, at_once, filled
from fedbench.contract.uploads import Rows, Uploads
from fedbench.errors import FedbenchError, NotFinite, UsageError
from fedbench.kernels.mixing import in_float64 as in_float64
from fedbench.kernels.mixing import signatures as signatures
from fedbench.kernels.mixtures import project

STRIP = 512
"""vectors whose products with all others are made at once"""
HALVINGS = 64
"""of the interval in which a threshold lies: more than float64 can tell apart"""


def mean_of_whole_tables(rows: Rows, table: Tensor, kept: Tensor) -> Tensor:
    """[M, ...]: the mean change over the cohort of whole tables, though only touched rows were sent.

    kept [n]: what weight decay left of each number that client did not touch.
    """
    lost = kept - 1
    untouched = (lost.sum() - rows.senders(len(table), lost)) / rows.clients
    return rows.combine(len(table), "cohort") + table * untouched.view(-1, *[1] * (table.dim() - 1))


def similarity(vectors: Tensor, measure: str, own: slice = slice(None)) -> Tensor:
    """[S, M] -> [S, S]: 1 / (1 + distance) with values over 0.9 taken as 1 (l2, in float64), or the cosine (cos, in the vectors' type).

    own: the rows that are asked for, if not all of them.
    """
    vectors = in_float64(vectors) if measure == "l2" or vectors.device.type == "mps" else vectors
    if measure == "cos":
        return _products(torch.nn.functional.normalize(vectors, dim=1), own)
    square = (vectors * vectors).sum(dim=1)
    # In float32 this difference of squares would cancel for vectors that are close.
    distance = _products(vectors, own).mul_(-2).add_(square[own, None]).add_(square).clamp_(min=0).sqrt_()
    distance.diagonal(own.start or 0).zero_()  # rounding leaves a vector a little apart from itself
    close = distance.add_(1).reciprocal_()
    return close.masked_fill_(close > 0.9, 1.0)


def _products(vectors: Tensor, own: slice) -> Tensor:
    """[S, M] -> [R, S]: the product of each of the own vectors with every one."""
    mine = vectors[own]
    if len(mine) < len(vectors):
        return mine @ vectors.T
    # Only from the diagonal on: the other half of the products is the same.
    out = vectors.new_empty(len(vectors), len(vectors))
    for start in range(0, len(vectors), STRIP):
        stop = min(start + STRIP, len(vectors))
        out[start:stop, start:] = vectors[start:stop] @ vectors[start:].T
        out[stop:, start:stop] = out[start:stop, stop:].T
    return out


def project_to_simplex(target: Tensor) -> Tensor:
    """[..., S] -> [..., S]: the nearest point with entries >= 0 that sum to 1; exact."""
    if target.device.type == "cpu" and target.dtype in (torch.float32, torch.float64):
        rows = target.contiguous().view(-1, target.shape[-1])
        out = torch.empty_like(rows)
        project(rows.numpy(), out.numpy())
        return out.view(target.shape)
    ordered = target.sort(dim=-1, descending=True).values
    excess = ordered.cumsum(dim=-1) - 1
    position = torch.arange(1, target.shape[-1] + 1, device=target.device, dtype=target.dtype)
    # Entries that stay above 0 are a prefix of the sorted ones; its length gives the one threshold to subtract.
    support = (ordered * position > excess).sum(dim=-1, keepdim=True)
    threshold = excess.gather(-1, support - 1) / support
    return (target - threshold).clamp(min=0)


def project_below(target: Tensor, most: float) -> Tensor:
    """[R, S] -> [R, S]: the nearest point with entries from 0 to `most` that sum to 1; exact.

    It is target - threshold, cut off at 0 and `most`. Halving finds which entries are cut off; the others then give the threshold.
    """
    low, high = target.amin(-1, keepdim=True) - most, target.amax(-1, keepdim=True)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        over = (target - middle).clamp(0, most).sum(-1, keepdim=True) > 1
        low, high = torch.where(over, middle, low), torch.where(over, high, middle)
    left = target - (low + high) / 2
    free = (left > 0) & (left < most)
    given = torch.where(free, left, most * (left >= most).to(left)).sum(-1, keepdim=True)
    return (left + free * (1 - given) / free.sum(-1, keepdim=True).clamp(min=1)).clamp(0, most)


@lru_cache(maxsize=8)
def _problem(size: int, max_weight: float) -> tuple[Any, Any, Any]:
    """One parametrised quadratic program for every row: minimise |x|² - 2 targetᵀx over the simplex with a cap."""
    import cvxpy as cp

    x, target = cp.Variable(size), cp.Parameter(size)
    limits = [x >= 0, cp.sum(x) == 1] + ([x <= max_weight] if max_weight < 1 else [])
    return cp.Problem(cp.Minimize(cp.sum_squares(x) - 2 * target @ x), limits), x, target


def solve_weights(target: Tensor, solver: str, max_weight: float = 1.0) -> Tensor:
    """[R, S] -> [R, S]: each row's x of `minimise |x|² - 2 targetᵀx, x >= 0, Σx = 1`, no entry over max_weight.

    That is a projection, onto the simplex or what a cap leaves of it (exact); on request cvxpy solves it.
    """
    if not target.isfinite().all():
        raise NotFinite("a weight of the uploads")
    size = target.shape[-1]
    if max_weight * size < 1 - 1e-9:
        raise UsageError(f"--max-weight {max_weight:g} cannot hold for {size} aggregated clients: their weights must sum to 1; "
                         f"use at least {np.ceil(1e6 / size) / 1e6:g} or aggregate more clients")  # fmt: skip
    if solver == "exact":
        return project_to_simplex(target) if max_weight >= 1 else project_below(in_float64(target), max_weight).to(target)
    problem, x, parameter = _problem(size, max_weight)
    rows = []
    for row in target.cpu().double().numpy():
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


def delivered(server: Tensors, name: str, value: Tensor, to: Tensor, uploads: Uploads, spent: Tensor | None = None) -> Tensors:
    """The server with `value` [R, ...] ready for the clients `to` [R], beside what still waits for others: `name` and `slot` [U].

    `value` may be one for all of them, [1, ...]. Workers that share a run keep what is for their own clients.
    spent: the clients for whom nothing older is kept; the round's if not given
    """
    if not value.sum().isfinite():
        raise NotFinite(f"the server's {name}")
    slot = torch.full((uploads.world.clients,), -1, device=value.device)
    slot[to] = torch.arange(len(to), device=value.device) if len(value) > 1 else 0
    waiting = torch.zeros_like(slot, dtype=torch.bool) if "slot" not in server else server["slot"] >= 0
    waiting[uploads.clients if spent is None else spent] = False  # they came this round, and have used up what lay there for them
    who = waiting.nonzero()[:, 0]
    if not len(who):
        return {name: value, "slot": slot}
    before, rows = server[name], server["slot"][who]
    # In memory the rows are packed anew each round. On disk they stay where they are, and new ones go to free places.
    if not isinstance(uploads.room, Disk):
        at = torch.arange(len(who), device=value.device)
        if len(before) < len(rows):  # one for many clients stays one
            kept = rows.unique()
            rows, at = kept, torch.searchsorted(kept, rows)
        slot[who] = len(value) + at
        return {name: torch.cat([value, before[rows]]), "slot": slot}
    free = torch.ones(len(before), dtype=torch.bool)
    free[server["slot"][server["slot"] >= 0]] = False  # nothing of the server before is overwritten: the step may be taken again
    if free.sum() < len(to):
        before = filled(uploads.room, len(slot) + len(uploads.clients), RowView(before, rows, uploads.room).chunks())
        rows, free = torch.arange(len(who)), torch.arange(len(before)) >= len(who)
    new = free.nonzero()[: len(to), 0]
    uploads.room.reserve(before, new.numpy())
    before[new] = value
    slot[to], slot[who] = new, rows
    return {name: before, "slot": slot}


def mean_delivered(server: Tensors, name: str) -> Tensor:
    """[...]: the mean of what lies there for the clients, see `delivered`; on disk other rows lie between."""
    value, slot = server[name], server["slot"]
    rows = slot[slot >= 0]
    return reduce(torch.add, (value[some].sum(0) for some in rows.split(at_once(value)))) / len(rows)
