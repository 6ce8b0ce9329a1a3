"""Small federations for tests: planted tastes, a few rounds by the engine or by the slow loop, and what they left behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedbench.contract import registry
from fedbench.contract.algorithm import Algorithm, Tensors, World
from fedbench.contract.dataset import DatasetOptions
from fedbench.contract.randomness import Draw
from fedbench.contract.uploads import Rows, Uploads
from fedbench.data.protocol import PRESETS
from fedbench.data.sampling import Samples, cohort_of, sample_round
from fedbench.data.split import Split, split
from fedbench.simulation.channel import SecureSum, Trip
from fedbench.simulation.client_store import ClientStore
from fedbench.simulation.engine import Engine
from fedbench.simulation.federation import world_of
from fedbench.testing import loop_engine

ROUNDS = 3
SEED = 0
COHORT = 17
SMALL: dict[str, Any] = {"dim": 8, "batch_size": 32, "local_epochs": 3, "clients_per_round": COHORT}
"""17 of 24 clients with 25 to 80 samples: one to three batches each"""


class Differs(AssertionError):
    """Two things that should be equal are not. One line: what, by how much, and what to do."""


@cache
def small_split(users: int = 24, items: int = 60, interactions: int = 12, protocol: str = "clean", ratings: bool = False) -> Split:
    """Planted tastes. The defaults with batches of 32 give clients of one batch and clients of many."""
    chosen = replace(PRESETS[protocol], split="kfold", fold=0) if ratings else PRESETS[protocol]
    return split(registry.dataset("synthetic")(DatasetOptions(users=users, items=items, interactions=interactions)), chosen)


def without_samples(samples: Samples, position: int) -> Samples:
    """A round's samples without those of the client at `position`, who stays in the cohort."""
    keep = np.arange(len(samples.clients)) != position
    counts, touched = samples.counts * keep, samples.touched * keep
    return Samples(
        clients=samples.clients,
        ptr=np.concatenate([[0], np.cumsum(counts)]),
        local=samples.local[np.repeat(keep, samples.counts)],
        label=samples.label[np.repeat(keep, samples.counts)],
        row_ptr=np.concatenate([[0], np.cumsum(touched)]),
        row=samples.row[np.repeat(keep, samples.touched)],
    )


def small_instance(algorithm: Algorithm) -> Algorithm:
    """The algorithm with few epochs and small batches, in a cohort that is not everybody."""
    few = {"local_epochs": min(algorithm.local_epochs, 3), "batch_size": min(algorithm.batch_size, 32), "clients_per_round": COHORT}
    return replace(algorithm, **few)  # type: ignore[arg-type]


def split_of(algorithm: Algorithm, *size: int) -> Split:
    return small_split(*size, ratings=algorithm.predicts_ratings)


def small_world(algorithm: Algorithm) -> World:
    return world_of(split_of(algorithm))


def drawn(split: Split, cohort: np.ndarray, algorithm: Algorithm, round_: int) -> Samples:
    """What a cohort trains on in a round."""
    extra = algorithm.extra(round_)
    return sample_round(split, cohort, extra.each, SEED, round_, extra.rating)


def samples_of(algorithm: Algorithm, round_: int) -> Samples:
    """A round's samples; the fifth client of the cohort has none."""
    split = split_of(algorithm)
    cohort = cohort_of(round_, split.clients, algorithm.clients_per_round or split.clients, algorithm.sampling, SEED)
    return without_samples(drawn(split, cohort, algorithm, round_), 4)


class Trace(NamedTuple):
    """What a few rounds left behind."""

    store: Tensors
    server: Tensors
    losses: list[Tensor]
    uploads: list[Tensors]


def flat(uploads: Uploads) -> Tensors:
    """Every tensor of an upload by name, copied: those of own tables are views of the store."""
    tensors: Tensors = {}
    for name, value in uploads.tensors.items():
        parts = value._asdict() if isinstance(value, Rows) else {"": value}
        tensors |= {f"{name}.{part}": tensor.clone() for part, tensor in parts.items() if isinstance(tensor, Tensor)}
    return tensors


def trace(
    algorithm: Algorithm, dtype: torch.dtype, run_cohort: Callable[[Tensors, ClientStore, Samples, int], tuple[Uploads, Tensor]]
) -> Trace:
    """The first rounds, each cohort run by `run_cohort`."""
    world, draw = small_world(algorithm), Draw(SEED, 0, None, dtype)
    server, store = algorithm.init_server(world, draw), ClientStore(algorithm, world, draw)
    losses, uploads = [], []
    for round_ in range(1, ROUNDS + 1):
        uploaded, loss = run_cohort(server, store, samples_of(algorithm, round_), round_)
        losses.append(loss)
        uploads.append(flat(uploaded))
        now = algorithm.at(round_, world)
        server = now.aggregate(server, SecureSum()(uploaded, Trip(SEED, round_)), Draw(SEED, round_, None, dtype))
    return Trace(store.tensors, server, losses, uploads)


def by_engine(algorithm: Algorithm, dtype: torch.dtype = torch.float64, epochs: np.ndarray | None = None, **options: Any) -> Trace:
    """epochs [n]: how many each client of a cohort finishes, if not all."""
    engine = Engine(algorithm, small_world(algorithm), SEED, dtype=dtype, **options)

    def run_cohort(server: Tensors, store: ClientStore, samples: Samples, when: int) -> tuple[Uploads, Tensor]:
        result = engine.run_cohort(server, store, samples, when, epochs)
        return result.uploads, result.loss

    return trace(algorithm, dtype, run_cohort)


@cache
def by_loop(algorithm: Algorithm, epochs: tuple[int, ...] | None = None) -> Trace:
    """One client after another."""
    finished = None if epochs is None else np.array(epochs)

    def run_cohort(server: Tensors, store: ClientStore, samples: Samples, when: int) -> tuple[Uploads, Tensor]:
        world = small_world(algorithm)
        uploads, losses = loop_engine.run_cohort(algorithm, world, server, store.tensors, samples, SEED, when, finished)
        return uploads, torch.tensor(losses, dtype=torch.float64)

    return trace(algorithm, torch.float64, run_cohort)


def assert_same(found: Tensors, expected: Tensors, tolerance: float, where: str = "", hint: str = "") -> None:
    """Equal names, shapes and numbers; bit for bit with tolerance 0. `where` and `hint` begin and end what is said otherwise."""
    before, after = f"{where}: " if where else "", f"; {hint}" if hint else ""
    if found.keys() != expected.keys():
        raise Differs(f"{before}{', '.join(sorted(found)) or 'nothing'} instead of {', '.join(sorted(expected)) or 'nothing'}{after}")
    for name, there in expected.items():
        here = found[name]
        if here.shape != there.shape:
            raise Differs(f"{before}{name} has the shape {list(here.shape)} instead of {list(there.shape)}{after}")
        if not here.numel() or bool(torch.isclose(here.double(), there.double(), tolerance, tolerance, equal_nan=True).all()):
            continue
        gap = (here.double() - there.double()).abs()
        apart, largest = float(gap.nan_to_num(torch.inf).max()), float(there.double().abs().max())
        share = f"{int((gap > tolerance).sum())} of {gap.numel()} numbers"
        raise Differs(f"{before}{name} differs by {apart:.2g} ({share}; the largest is {largest:.2g}){after}")


def assert_same_trace(found: Trace, expected: Trace, tolerance: float, hint: str = "") -> None:
    """What happens first is compared first."""
    for round_ in range(ROUNDS):
        where = f"round {round_ + 1}"
        assert_same(found.uploads[round_], expected.uploads[round_], tolerance, f"{where}, upload", hint)
        assert_same({"loss": found.losses[round_]}, {"loss": expected.losses[round_]}, tolerance, where, hint)
    assert_same(found.store, expected.store, tolerance, "what clients keep", hint)
    assert_same(found.server, expected.server, tolerance, "the server", hint)
