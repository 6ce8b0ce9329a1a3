"""The state of a run as its checkpoints hold it: saved, restored, and rebuilt after a round that diverged."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from fedbench.contract.algorithm import Tensors
from fedbench.errors import FedbenchError
from fedbench.experiment import checkpoint
from fedbench.experiment.resume import ResumePoint, broadcast_point
from fedbench.experiment.summary import Best
from fedbench.settings.config import RunConfig
from fedbench.simulation import workers
from fedbench.simulation.federation import Federation
from fedbench.simulation.worker_state import gather_state, rows_in_files, scatter_state

log = logging.getLogger("fedbench")


def state_facts(federation: Federation, config: RunConfig) -> dict[str, Any]:
    """What a saved state belongs to: it is resumed by the same algorithm, data and protocol alone."""
    identity, split = config.identity(), federation.split
    return {
        "algo": identity["algo"],
        "dataset": identity["dataset"],
        "data_checksum": split.checksum,
        "protocol_fingerprint": split.fingerprint,
        "round": federation.round,
    }


def with_prefix(tensors: Mapping[str, Tensor], prefix: str) -> Tensors:
    """The tensors whose names start with `prefix`, by the rest of their names."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def save(out: Path, federation: Federation, best: Best, config: RunConfig) -> None:
    """Write a checkpoint of the last finished round."""
    best.rank_all()
    state = federation.state()
    tensors = gather_state(state, federation)
    tensors |= {f"best/{name}": torch.from_numpy(value) for name, value in best.outcome.items()}
    if best.round != federation.round:
        tensors |= {f"best_state/{name}": value for name, value in gather_state(best.state, federation).items()}
    tensors["visits"] = torch.from_numpy(federation.visits)
    facts = state_facts(federation, config) | {
        "bytes_up": federation.bytes_up,
        "bytes_down": federation.bytes_down,
        "counts": federation.counts,
        "best_round": best.round,
        "best_score": best.score,
    }
    workers.broadcast(lambda: checkpoint.save_round(out, federation.round, facts, tensors), [*rows_in_files(state).values()])


def save_last_good(out: Path, federation: Federation, round_: int, best: Best, config: RunConfig) -> None:
    """Train a fresh federation up to the last good round, from the newest checkpoint or the start, and save it.

    The round that diverged has overwritten that state.
    """
    state = broadcast_point(lambda: ResumePoint(True, checkpoint.newest(out))).state
    if state:
        restore(state, federation, Best())
    while federation.round < round_:
        federation.next_round()
    if round_:
        save(out, federation, best, config)
        log.warning("the state after round %d, the last good one, is in %s", round_, out / checkpoint.FOLDER)


def restore(state: checkpoint.State, federation: Federation, best: Best) -> None:
    """Set a fresh federation and the best round so far to a saved state."""
    facts = state.facts
    try:
        tensors = scatter_state(partial(state.tensors, federation.engine.device), federation)
        federation.set_state(tensors)
        federation.round, federation.bytes_up, federation.bytes_down = (int(facts[key]) for key in ("round", "bytes_up", "bytes_down"))
        federation.counts = dict(facts["counts"])
        federation.visits = tensors["visits"].cpu().numpy().copy()
        best.round, best.score = int(facts["best_round"]), float(facts["best_score"])
        best.outcome = {name: value.cpu().numpy() for name, value in with_prefix(tensors, "best/").items()}
        best.state = with_prefix(tensors, "best_state/")
        if workers.count() > 1:  # they were scattered into files that nobody reads any more
            federation.store.room.forget(tensors.values())
    except (SafetensorError, KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise FedbenchError(
            f"{state.path} does not fit this run ({' '.join(str(error).split())}); start again with another --out"
        ) from None
    log.info("resuming after round %d", federation.round)
