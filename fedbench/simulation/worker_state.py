"""The state of a federation whose clients are shared out over workers: gathered to be written, scattered when it is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from fedbench.contract.algorithm import Tensors
from fedbench.contract.storage import RowView
from fedbench.simulation import workers
from fedbench.simulation.federation import Federation


def gather_state(state: Mapping[str, Tensor | RowView], federation: Federation) -> dict[str, Tensor | RowView]:
    """The full state on worker 0. Rows that lie in files are not copied: they are streamed from their worker while worker 0 writes."""
    if workers.count() == 1:
        return dict(state)
    mine = {name: value for name, value in state.items() if federation.is_own(name) and isinstance(value, Tensor)}
    mail = [value for name, value in state.items() if federation.is_own(name) and name.startswith("server/")]
    # a slot is a place among one worker's rows: it moves on by the rows of the workers before
    slot, own = state.get("server/slot"), federation.store.clients
    if mail and isinstance(slot, Tensor):
        before = sum(workers.gather(lambda: mail[0].shape[0])[: workers.number()])
        mine["server/slot"] = torch.where(slot < 0, slot, slot + before)[own.start : own.stop]
    gathered = workers.gather_tensors(lambda: mine, federation.engine.device, first_only=True)
    return {**state, **gathered, **workers.streamed(rows_in_files(state))}


def rows_in_files(state: Mapping[str, Tensor | RowView]) -> dict[str, RowView]:
    """The tensors of a state that worker 0 reads in chunks from the worker that has them."""
    return {name: value for name, value in state.items() if isinstance(value, RowView)}


def scatter_state(read: Callable[[], Mapping[str, Tensor]], federation: Federation) -> Mapping[str, Tensor]:
    """The tensors of a saved state with the rows of this worker's clients alone; `read` opens the state, on worker 0."""
    device, own, room = federation.engine.device, federation.store.clients, federation.store.room
    tensors = read() if workers.is_first() else {}
    if workers.count() == 1:
        return tensors
    names = workers.broadcast(lambda: list(tensors))
    found: Tensors = {}
    rows = own
    if "clients" in names:  # those alone that have taken part
        clients = workers.scatter_rows(partial(tensors.__getitem__, "clients"), device)
        rows = range(*torch.searchsorted(clients, torch.tensor([own.start, own.stop], device=device)).tolist())
        found["clients"] = clients[rows.start : rows.stop]
    for server in ("server/", "best_state/server/"):
        mail = [f"{server}{name}" for name in federation.algorithm.per_client_server_state if f"{server}{name}" in names]
        if mail:
            slots = workers.scatter_rows(partial(tensors.__getitem__, f"{server}slot"), device)
            mine, found[f"{server}slot"] = own_rows(slots, own)
            found |= {name: workers.scatter_rows(partial(tensors.__getitem__, name), device, mine.tolist(), room) for name in mail}
    for name in names:
        if name not in found:
            theirs = name.startswith(("client/", "best_state/client/"))
            found[name] = workers.scatter_rows(partial(tensors.__getitem__, name), device, rows if theirs else None, room)
    return found


def own_rows(slot: Tensor, own: range) -> tuple[Tensor, Tensor]:
    """The rows of per-client server state that belong to the clients `own`, and `slot` [U] renumbered for these rows and clients alone."""
    mine, has = torch.full_like(slot, -1), torch.zeros_like(slot, dtype=torch.bool)
    has[own.start : own.stop] = slot[own.start : own.stop] >= 0
    rows, mine[has] = slot[has].unique(return_inverse=True)
    return rows, mine
