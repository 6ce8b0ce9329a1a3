"""Tables that clients keep. In training a client holds the touched rows alone; here is what happens to whole tables.

`receive` merges all rows of what was sent, weight decay and pulls reach rows that no sample touches, and an own table is uploaded whole.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbench.contract.algorithm import Algorithm, Answer, Phase, Tensors
from fedbench.data.sampling import Samples
from fedbench.errors import UsageError
from fedbench.kernels.rows import move_rows
from fedbench.simulation import forward, kernel_check
from fedbench.simulation.blocks import Block
from fedbench.simulation.client_store import ClientStore
from fedbench.simulation.generic import vmapped
from fedbench.simulation.sending import LEVELS, lying, reaching, sent_rows, sent_whole
from fedbench.system_memory import free_gpu_memory

FULL_ROWS = 1 << 17
"""item rows of whole tables that are handled at once (merging and scoring), on a CPU"""
BYTES_A_NUMBER = 16
"""of such a row on a GPU: the number, the server's beside it, and what is made of both"""


# ---- receive ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Before:
    """What a cohort kept before own tables were merged: `receive` is called on it again, for what it makes beside them."""

    merged: Mapping[int, Mapping[str, str]]
    """whose own tables were merged, by what reached them, see sending.sent_to; and what else they hold as it was sent, by which name"""
    tensors: Tensors
    """own tables as touched rows [R, ...], all else [n, ...]; {} if `receive` makes nothing but what is kept, or was sent"""
    row_ptr: np.ndarray

    def rows(self, block: Block, algorithm: Algorithm) -> Tensors:
        """What the clients of a block kept: touched rows [C, T, ...] of tables."""
        at = self.row_ptr[block.position][:, None] + np.arange(block.rows.shape[1])
        rows = torch.from_numpy(np.minimum(at, max(0, int(self.row_ptr[-1]) - 1))).to(block.rows.device)
        who = torch.from_numpy(block.position).to(block.rows.device)
        return {name: value[rows if name in algorithm.tables else who] for name, value in self.tensors.items()}


def merge(
    algorithm: Algorithm, samples: Samples, answer: Answer, sent: np.ndarray, store: ClientStore, kernels: forward.Kernels | None = None
) -> Before:
    """`receive` on all rows of the cohort's own tables, which are written to the store; sent [n]: what reached each."""
    merged: dict[int, dict[str, str]] = {}
    new = False
    for some in range(LEVELS) if algorithm.own_tables else ():
        if (sent == some).any():
            # one client of a kind shows what `receive` does for all of them
            first = torch.from_numpy(samples.clients[sent == some][:1]).to(store.draw.device)
            own, known = one_row(store, reaching(answer, some), first, algorithm.tables)
            made = algorithm.receive(dict(own), dict(known))
            # another object was merged; the same one was passed on
            if any(name in made and made[name] is not own[name] for name in algorithm.own_tables):
                further = made.keys() - own.keys()
                merged[some] = {name: other for name in further for other in known if made[name] is known[other]}
                new |= bool(further - merged[some].keys())
    # before the merge below: training calls `receive` on the rows as they were
    before = Before(merged, _kept(store, samples, algorithm) if new else {}, samples.row_ptr)
    for some in merged:
        clients = torch.from_numpy(samples.clients[sent == some]).to(store.draw.device)
        merge_whole_tables(algorithm, clients, reaching(answer, some), store, kernels)
    return before


def one_row(store: ClientStore, answer: Answer, client: Tensor, tables: Collection[str]) -> tuple[Tensors, Tensors]:
    """What a client keeps and what it is sent, with one row of each table: enough to see what `receive` makes of it, and of what."""
    row = client.new_zeros(1, 1)
    both = store.rows(client, row, tables), sent_rows(answer, client, row, tables)
    own, sent = ({name: value[0] for name, value in some.items()} for some in both)
    return own, sent


def _kept(store: ClientStore, samples: Samples, algorithm: Algorithm) -> Tensors:
    device = store.draw.device
    everybody = torch.from_numpy(samples.clients).to(device)
    client = everybody.repeat_interleave(torch.from_numpy(samples.touched).to(device))
    rows = torch.from_numpy(samples.row.astype(np.int64)).to(device)
    place = store.place(everybody), store.place(client)
    return {name: t[place[1], rows] if name in algorithm.tables else t[place[0]].clone() for name, t in store.tensors.items()}


def rows_at_once(dim: int, device: str) -> int:
    """Rows of whole tables that are looked at together: on a GPU those that fit in a quarter of its free memory."""
    if not device.startswith("cuda"):
        return FULL_ROWS
    return max(FULL_ROWS, int(free_gpu_memory(device)) // 4 // (dim * BYTES_A_NUMBER))


def merge_whole_tables(
    algorithm: Algorithm, clients: Tensor, answer: Answer, store: ClientStore, kernels: forward.Kernels | None = None
) -> None:
    """`receive` on whole tables; what clients keep of the result is written: by a kernel where there is one."""
    items = max(store.tensors[name].shape[1] for name in algorithm.own_tables)
    if kernels is not None:
        agrees = partial(kernel_check.merging, algorithm, kernels, store, answer, clients)
        kernel = kernels.fitting(algorithm, "receive", store, answer, agrees)
        if kernel is not None:
            kernels.merge(kernel, clients.numpy(), answer, store, items)
            return
    for chunk in clients.split(max(1, rows_at_once(algorithm.dim, str(clients.device)) // items)):
        for name, value in vmapped(algorithm.receive, store.read(chunk), sent_whole(answer, chunk)).items():
            if name in store.tensors:
                store.write(chunk, name, value)


# ---- training --------------------------------------------------------------------------------------------------------------


def coefficients(name: str, phases: Sequence[Phase], steps: int) -> np.ndarray:
    """[steps + 1, 2] a and b: after k steps an untouched row is a[k]·row + b[k]·target.

    The gradient of the loss is 0 there, so a step is linear in the row and in its target, and the same for all rows.
    """
    found = np.tile([1.0, 0.0], (steps + 1, 1))
    velocity = np.zeros((len(phases), 2))
    for step in range(steps):
        row = found[step]
        for place, phase in enumerate(phases):
            if name in phase.names:
                pull = phase.pull[name].weight if name in phase.pull else 0.0
                slope = (phase.weight_decay + pull) * row - pull * np.array([0.0, 1.0])
                velocity[place] = phase.momentum * velocity[place] + slope
                row = row - phase.rate(name) * phase.lr_decay**step * velocity[place]
        found[step + 1] = row
    return found


def move_untouched(
    store: ClientStore,
    clients: Tensor,
    name: str,
    phases: Sequence[Phase],
    steps: Tensor,
    answer: Answer,
    spared: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
) -> None:
    """Weight decay and pulls on the rows of own tables that no sample touches, for clients that made so many steps [C].

    It also moves the touched rows, which are overwritten afterwards. On a CPU `spared` leaves them out, as lists: where each client's
    begins [C], how long it is [C], and the rows.
    """
    if not any(name in phase.names and (phase.weight_decay or name in phase.pull) for phase in phases):
        return
    targets = {phase.pull[name].target for phase in phases if name in phase.pull}
    if len(targets) > 1:
        raise UsageError(f"the rows of {name!r} are pulled to {' and to '.join(sorted(targets))}; one target a stage")
    table, at, made = store.tensors[name], store.place(clients), steps.long().cpu().numpy()
    factors = torch.from_numpy(coefficients(name, phases, int(made.max(initial=0)))[made]).to(table.device, table.dtype)
    if table.device.type == "cpu":
        # no target: an empty one, for numba wants an array
        goal, whose = table[:1, :0], torch.zeros(len(clients), dtype=torch.int64)
        for name in targets:
            sent = name in answer.shared or name in answer.personal
            goal, whose = lying(answer, name, clients) if sent else (store.tensors[name], at)
        both = table, goal.to(table.dtype).contiguous()
        rows, pulling = (one.view(*one.shape[:2], math.prod(one.shape[2:])).numpy() for one in both)
        none = np.zeros(len(clients), np.int64)
        lists = (none, none, np.zeros(0, np.int32)) if spared is None else spared
        move_rows(rows, at.numpy(), factors.numpy(), pulling, whose.numpy(), *lists)
        return
    keep, toward = (factors[:, which].view(-1, *[1] * (table.dim() - 1)) for which in range(2))
    moved = table[at] * keep
    if targets:
        (target,) = targets
        known = {**store.read(clients), **sent_whole(answer, clients)}
        moved = moved + known[target] * toward
    table[at] = moved


# ---- upload ----------------------------------------------------------------------------------------------------------------


class Read(dict[str, Tensor]):
    """A dict that remembers the names which were read, and whether anything was asked of it at all."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__(tensors)
        self.names: set[str] = set()
        self.asked = False

    def __getitem__(self, name: str) -> Tensor:
        self.asked = True
        self.names.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.asked = True
        self.names.add(name)
        return super().get(name, default)

    def __iter__(self) -> Iterator[str]:  # without it {**held} would not pass by here
        self.asked = True
        return super().__iter__()

    def keys(self) -> Any:
        return list(iter(self))

    def values(self) -> Any:
        return [self[name] for name in self]

    def items(self) -> Any:
        return [(name, self[name]) for name in self]

    def __contains__(self, name: object) -> bool:
        self.asked = True
        return super().__contains__(name)

    def __len__(self) -> int:
        self.asked = True
        return super().__len__()


def uploads_as_stored(algorithm: Algorithm, held: Tensors, sent: Tensors, samples: Tensor, store: ClientStore) -> bool:
    """Whether own tables are uploaded as the store has them after training: then they need not be copied block by block."""
    # a method that keeps something else has other tables in the store than it holds
    if type(algorithm).keep is not Algorithm.keep:
        return False
    mine, theirs = (Read({name: value[0] for name, value in tensors.items()}) for tensors in (held, sent))
    algorithm.upload(mine, theirs, samples[0])
    return not theirs.asked and mine.names <= store.tensors.keys()


def upload_whole(algorithm: Algorithm, block: Block, held: Tensors, samples: Tensor, answer: Answer, store: ClientStore) -> Tensors:
    """What a block uploads of own tables: `upload` on whole tables with the trained rows in their places."""
    sent = sent_whole(answer, block.clients)
    own = store.read(block.clients)
    # own tables are merged already: what `receive` makes of them here is thrown away
    whole = {**vmapped(algorithm.receive, own, sent), **{name: own[name] for name in algorithm.own_tables}}
    client = torch.arange(len(block.clients), device=block.rows.device)[:, None].expand_as(block.rows).reshape(-1)[block.valid]
    for name, value in held.items():
        if name in algorithm.tables:
            table = whole[name].clone(memory_format=torch.contiguous_format)
            table[client, block.rows.reshape(-1)[block.valid]] = value.flatten(0, 1)[block.valid]
            value = table
        whole[name] = value
    made = vmapped(algorithm.upload, whole, sent, samples)
    return {name: made[name] for name in algorithm.own_tables if name in made}
