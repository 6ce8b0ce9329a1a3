"""The model that a run keeps: the state of the reported round, copied whenever a round becomes the best.

The copy is in memory where that fits beside the run, else in `checkpoint/best.safetensors`. A run that is killed repeats the
rounds after its last checkpoint, with those that became the best: in the end it keeps what an undisturbed run keeps.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from fedbench.contract.algorithm import Tensors
from fedbench.contract.storage import Disk, RowView
from fedbench.experiment import checkpoint
from fedbench.experiment.run_state import state_facts, with_prefix
from fedbench.experiment.summary import Best
from fedbench.settings.config import RunConfig
from fedbench.simulation import workers
from fedbench.simulation.federation import Federation
from fedbench.simulation.worker_state import gather_state, rows_in_files
from fedbench.system_memory import free_memory
from fedbench.text import human

log = logging.getLogger("fedbench")

SMALL_BYTES = 64 * 2**20
"""a state of this size or less is copied in memory without asking how much is free"""
FREE_SHARE = 0.25
"""a larger one may take this share of the free memory at the start of training"""


class Aside:
    """Keeps the state of the best round so far during training."""

    def __init__(self, federation: Federation, config: RunConfig, out: Path) -> None:
        self.config, self.out = config, out
        self.place = self.chosen(federation)
        self.copies: Tensors = {}
        """reused by every best round: fresh memory costs a page fault for every page"""

    def chosen(self, federation: Federation) -> str:
        """Where: `memory`, `file`, or `nowhere` if it is not wanted or does not fit; all workers choose alike."""
        if self.config.refit or self.config.keep_state in ("last", "none"):
            return "nowhere"
        size = state_bytes(federation)
        # each worker copies its own clients' share, and the machine's workers share its memory
        mine = size * workers.on_this_machine() / workers.count()
        fits = size <= SMALL_BYTES or (federation.engine.device == "cpu" and mine <= FREE_SHARE * free_memory())
        if not workers.on_any(isinstance(federation.store.room, Disk) or not fits):
            return "memory"
        what = f"the reported round's state (up to {human(size)})"
        if self.config.keep_state == "best" or workers.broadcast(lambda: 2 * size <= shutil.disk_usage(self.out).free):
            log.info("%s is written aside whenever a round becomes the best; --keep-state last saves that", what)
            return "file"
        log.warning("there is no room to set aside %s: the last round's is kept", what)
        return "nowhere"

    def put(self, federation: Federation, best: Best) -> None:
        """Keep the state of the round that has just ended, which is the best."""
        best.state = {}  # dropped first, or two copies would be in memory at once
        if self.place == "memory":
            best.state = self.copies = copied(federation.state(), self.copies)
        elif self.place == "file":
            write(self.out, checkpoint.BEST, federation.state(), federation, federation.round, best, self.config)


def state_bytes(federation: Federation) -> int:
    """The size of the whole state once every client has taken part and been answered."""
    tensors = {name: value for name, value in federation.state().items() if isinstance(value, Tensor)}
    shared = sum(value.numel() * value.element_size() for name, value in tensors.items() if not federation.is_own(name))
    return shared + federation.split.clients * federation.store.client_bytes * (2 if federation.algorithm.per_client_server_state else 1)


def copied(tensors: Mapping[str, Tensor | RowView], onto: Mapping[str, Tensor] | None = None) -> Tensors:
    """A copy of the tensors, into those of `onto` that have the same shape and dtype."""
    copies = {}
    for name, value in tensors.items():
        if isinstance(value, Tensor):
            there = (onto or {}).get(name)
            fits = there is not None and there.shape == value.shape and there.dtype == value.dtype
            copies[name] = there.copy_(value) if there is not None and fits else value.clone()
    return copies


def reported_server(out: Path, federation: Federation, best: Best) -> tuple[int, Tensors]:
    """The server's state of the reported round, or of the last one if only that is left; and which it is."""
    if best.round == federation.round:
        return federation.round, federation.server
    if best.state:
        return best.round, with_prefix(best.state, "server/")
    saved = written(out, best)
    if saved:
        return best.round, with_prefix(saved.tensors(federation.engine.device), "server/")
    return federation.round, federation.server


def written(out: Path, best: Best) -> checkpoint.State | None:
    """The reported round's state on disk."""
    if not (out / checkpoint.FOLDER / f"{checkpoint.BEST}.json").exists():
        return None
    saved = checkpoint.read(out, checkpoint.BEST)
    return saved if saved.facts["round"] == best.round else None


def keep_model(out: Path, federation: Federation, best: Best, config: RunConfig) -> None:
    """Write the state that the finished run keeps, and say which it is; after a refit, the refitted one."""
    if config.keep_state == "none":
        return
    wants_last = config.keep_state == "last" or best.round == federation.round
    # whichever place the best round's state was put in; the last round's is what the federation holds
    if not wants_last and best.state:
        size, round_ = write(out, checkpoint.MODEL, best.state, federation, best.round, best, config), best.round
    elif not wants_last and workers.broadcast(lambda: written(out, best) is not None):
        size, round_ = workers.broadcast(lambda: checkpoint.rename(out, checkpoint.BEST, checkpoint.MODEL)), best.round
    else:
        size, round_ = write(out, checkpoint.MODEL, federation.state(), federation, federation.round, best, config), federation.round
    hint = "" if round_ == best.round else f", not of the reported round {best.round}: --keep-state best keeps that"
    log.info("kept: the state of round %d (%s)%s", round_, human(size), hint)


def write(
    out: Path, name: str, state: Mapping[str, Tensor | RowView], federation: Federation, round_: int, best: Best, config: RunConfig
) -> int:
    """Write the whole state under `name`, on worker 0; returns its size in bytes."""
    tensors, facts = gather_state(state, federation), state_facts(federation, config) | {"round": round_, "best_round": best.round}

    def save() -> int:
        if name == checkpoint.MODEL:  # a checkpoint less makes room on a disk that is nearly full
            checkpoint.prune(out, keep=1)
        return checkpoint.save(out, name, facts, tensors)

    size: int = workers.broadcast(save, [*rows_in_files(state).values()])
    return size
