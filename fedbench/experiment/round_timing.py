"""Timing the parts of a round, on as many of a dataset's clients as fit into a memory limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fedbench.contract.randomness import Draw
from fedbench.data.split import Held, Split
from fedbench.evaluation.metrics import metrics_of
from fedbench.settings.config import RunConfig
from fedbench.simulation.client_store import draw_for
from fedbench.simulation.exposure import exposure
from fedbench.simulation.federation import Federation, world_of

Clock = Callable[[], float]
PARTS = ("sample", "train", "aggregate", "evaluate", "full ranking")
WHOLE = PARTS[:4]
"""the parts of every round; the full ranking is made for the reported round alone, or, for large models, for each best round so far"""


def kept_bytes(run: RunConfig, split: Split, dtype: torch.dtype, device: str) -> int:
    """Bytes of state that one client keeps between rounds."""
    one = run.algorithm.init_client(world_of(split), draw_for(Draw(run.seed, 0, None, dtype, device), np.arange(1)))
    return sum(value[0].numel() * value.element_size() for value in one.values())


def bounded_split(run: RunConfig, split: Split, state_mb: float | None, dtype: torch.dtype, device: str) -> Split:
    """The split, cut to as many first clients as keep at most `state_mb` together."""
    kept = kept_bytes(run, split, dtype, device)
    return split if state_mb is None or kept * split.clients <= state_mb * 1e6 else first_clients(split, max(1, int(state_mb * 1e6 / kept)))


def first_clients(split: Split, n: int) -> Split:
    """The first n clients alone, with all items."""
    train, seen = split.train_ptr[: n + 1], split.seen_ptr[: n + 1]
    by_client = ("val_item", "val_rating", "test_item", "val_candidates", "test_candidates", "user_ids")
    held = {name: Held(one.ptr[: n + 1], one.item[: one.ptr[n]], one.rating[: one.ptr[n]]) for name, one in split.held.items()}
    return replace(
        split,
        train_ptr=train,
        train_item=split.train_item[: train[-1]],
        train_rating=split.train_rating[: train[-1]],
        seen_ptr=seen,
        seen_item=split.seen_item[: seen[-1]],
        held=held,
        role=None if split.role is None else split.role[:n],
        **{name: getattr(split, name)[:n] for name in by_client},
    )


def round_parts(federation: Federation, clock: Clock) -> dict[str, float]:
    """Seconds of each part of the federation's next round, evaluated as a run does it.

    What is neither sampling nor training counts as aggregation: screening, sums, the server's step, checks. With all data in one
    place it counts as sampling: there everybody's samples are shuffled.
    """
    split, central = federation.split, not federation.algorithm.federated
    trainer, trains = (federation, "central_round") if central else (federation.engine, "run_cohort")
    with watched(federation, "samples", clock) as sampling, watched(trainer, trains, clock) as training:
        began = clock()
        result = federation.next_round()
        rest = clock() - began - sum(sampling) - sum(training)
    began = clock()
    metrics_of(split, federation.outcome())
    exposure(result.uploads, federation.algorithm.tables, split, federation.seed, federation.round)
    ranked = clock()
    if not split.held:
        federation.full_ranks()
    seconds = (sum(sampling) + rest * central, sum(training), rest * (not central), ranked - began, clock() - ranked)
    return dict(zip(PARTS, seconds, strict=True))


@contextmanager
def watched(owner: object, method: str, clock: Clock) -> Iterator[list[float]]:
    """Time each call of a method inside the `with` block; yields the list of seconds."""
    seconds: list[float] = []
    original = getattr(owner, method)

    def timed(*arguments: Any, **named: Any) -> Any:
        began = clock()
        value = original(*arguments, **named)
        seconds.append(clock() - began)
        return value

    setattr(owner, method, timed)
    try:
        yield seconds
    finally:
        delattr(owner, method)
