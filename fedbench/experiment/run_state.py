"""The state of a run as its checkpoints hold it: gathered from all workers to be written, and scattered to them when it is read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from fedbench.contract.algorithm import Tensors
from fedbench.contract.storage import Picked
from fedbench.errors import FedbenchError
from fedbench.experiment import checkpoint
from fedbench.experiment.summary import Best
from fedbench.settings.config import RunConfig
from fedbench.simulation import workers
from fedbench.simulation.federation import Federation

log = logging.getLogger("fedbench")


def state_facts(federation: Federation, config: RunConfig) -> dict[str, Any]:
    """What a state belongs to."""
    identity, split = config.identity(), federation.split
    return {
        "algo": identity["algo"],
        "dataset": identity["dataset"],
        "data_checksum": split.checksum,
        "protocol_fingerprint": split.fingerprint,
        "round": federation.round,
        "kernel": config.kernel,
    }


def whole(state: Mapping[str, Tensor | Picked], federation: Federation) -> dict[str, Tensor | Picked]:
    """The full state, gathered on the first rank. What is picked is streamed from the ranks that have it while it is written."""
    if workers.count() == 1:
        return dict(state)
    mine = {name: value for name, value in state.items() if federation.is_own(name) and isinstance(value, Tensor)}
    mail = [value for name, value in state.items() if federation.is_own(name) and name.startswith("server/")]
    slot, own = state.get("server/slot"), federation.store.clients
    if mail and isinstance(slot, Tensor):
        before = sum(workers.gather(lambda: mail[0].shape[0])[: workers.number()])
        mine["server/slot"] = torch.where(slot < 0, slot, slot + before)[own.start : own.stop]
    gathered = workers.gather_tensors(lambda: mine, federation.engine.device, first_only=True)
    return {**state, **gathered, **workers.streamed(lent(state))}


def lent(state: Mapping[str, Tensor | Picked]) -> dict[str, Picked]:
    """What the first rank reads piece by piece where other ranks have it."""
    return {name: value for name, value in state.items() if isinstance(value, Picked)}


def beginning(tensors: Mapping[str, Tensor], prefix: str) -> Tensors:
    """The tensors whose names begin so, without that beginning."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def save(out: Path, federation: Federation, best: Best, config: RunConfig) -> None:
    """The state after the last finished round."""
    best.rank_all()
    state = federation.state()
    tensors = whole(state, federation)
    tensors |= {f"best/{name}": torch.from_numpy(value) for name, value in best.outcome.items()}
    if best.round != federation.round:
        tensors |= {f"best_state/{name}": value for name, value in whole(best.state, federation).items()}
    tensors["visits"] = torch.from_numpy(federation.visits)
    facts = state_facts(federation, config) | {
        "bytes_up": federation.bytes_up,
        "bytes_down": federation.bytes_down,
        "counts": federation.counts,
        "best_round": best.round,
        "best_score": best.score,
    }
    workers.broadcast(lambda: checkpoint.save_round(out, federation.round, facts, tensors), [*lent(state).values()])


def save_again(out: Path, federation: Federation, round_: int, best: Best, config: RunConfig) -> None:
    """The last good state, which the round that diverged has overwritten: made again from the last checkpoint, or from the start."""
    _, state = told_state(lambda: (True, checkpoint.newest(out)))
    if state:
        restore(state, federation, Best())
    while federation.round < round_:
        federation.next_round()
    if round_:
        save(out, federation, best, config)
        log.warning("the state after round %d, the last good one, is in %s", round_, out / checkpoint.FOLDER)


def restore(state: checkpoint.State, federation: Federation, best: Best) -> None:
    """Go on from a saved state."""
    facts = state.facts
    try:
        tensors = own_part(state, federation)
        federation.set_state(tensors)
        federation.round, federation.bytes_up, federation.bytes_down = (int(facts[key]) for key in ("round", "bytes_up", "bytes_down"))
        federation.counts = dict(facts["counts"])
        federation.visits = tensors["visits"].cpu().numpy().copy()
        best.round, best.score = int(facts["best_round"]), float(facts["best_score"])
        best.outcome = {name: value.cpu().numpy() for name, value in beginning(tensors, "best/").items()}
        best.state = beginning(tensors, "best_state/")
        if workers.count() > 1:
            federation.store.room.forget(tensors.values())
    except (SafetensorError, KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise FedbenchError(
            f"{state.path} does not fit this run ({' '.join(str(error).split())}); start again with another --out"
        ) from None
    log.info("going on after round %d", federation.round)


def told_state(find: Callable[[], tuple[bool, checkpoint.State | None]]) -> tuple[bool, checkpoint.State | None]:
    """What the first rank finds in the run's folder."""

    def words() -> tuple[bool, tuple[str, dict[str, Any]] | None]:
        resume, state = find()
        return resume, (str(state.path), state.facts) if state else None

    resume, state = workers.broadcast(words)
    return resume, checkpoint.State(Path(state[0]), state[1]) if state else None


def own_part(state: checkpoint.State, federation: Federation) -> Mapping[str, Tensor]:
    """The tensors of a state, of what clients hold and are sent that of this rank's clients: the first rank reads, and deals them out."""
    device, own, room = federation.engine.device, federation.store.clients, federation.store.room
    tensors = state.tensors(device) if workers.is_first() else {}
    if workers.count() == 1:
        return tensors
    names = workers.broadcast(lambda: list(tensors))
    found: Tensors = {}
    rows = own
    if "clients" in names:  # those alone that have taken part
        clients = workers.scatter_rows(lambda: tensors["clients"], device)
        rows = range(*torch.searchsorted(clients, torch.tensor([own.start, own.stop], device=device)).tolist())
        found["clients"] = clients[rows.start : rows.stop]
    for server in ("server/", "best_state/server/"):
        mail = [f"{server}{name}" for name in federation.algorithm.mailed if f"{server}{name}" in names]
        if mail:
            slots = workers.scatter_rows(partial(tensors.__getitem__, f"{server}slot"), device)
            letters, found[f"{server}slot"] = own_mail(slots, own)
            found |= {name: workers.scatter_rows(partial(tensors.__getitem__, name), device, letters.tolist(), room) for name in mail}
    for name in names:
        if name not in found:
            theirs = name.startswith(("client/", "best_state/client/"))
            found[name] = workers.scatter_rows(partial(tensors.__getitem__, name), device, rows if theirs else None, room)
    return found


def own_mail(slot: Tensor, own: range) -> tuple[Tensor, Tensor]:
    """The rows of what is mailed that some of the clients `own` are sent, and `slot` [U] for these rows and clients alone."""
    mine, has = torch.full_like(slot, -1), torch.zeros_like(slot, dtype=torch.bool)
    has[own.start : own.stop] = slot[own.start : own.stop] >= 0
    rows, mine[has] = slot[has].unique(return_inverse=True)
    return rows, mine
