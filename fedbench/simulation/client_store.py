"""What clients keep between rounds: name -> [U, ...]. Only a block's clients are read and written.

A process that shares the clients out with others holds a range of them only; the first of the range is in row 0.

It lies in memory or, where it does not fit, in memory-mapped files. Those are sparse and hold only the clients that have taken part:
what another one starts with is drawn anew from its own stream whenever it is asked for. The files have no name in their folder, so
nothing is left behind however a process ends; a run resumes from its checkpoint, not from these.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from fedbench.contract.algorithm import Algorithm, Tensors, World
from fedbench.contract.randomness import Draw
from fedbench.contract.storage import CHUNK, Disk, Memory
from fedbench.errors import FedbenchError, UsageError
from fedbench.system_memory import free_gpu_memory, free_memory, memory_of

STORES = ("auto", "ram", "mmap")

Clients = TypeVar("Clients", Tensor, np.ndarray)


class ClientStore:
    """The private state of all clients, or of a range of them.

    In memory it is initialised chunk by chunk, on disk client by client when they first take part.
    """

    def __init__(self, algorithm: Algorithm, world: World, draw: Draw, room: Memory | None = None, clients: range | None = None) -> None:
        self.algorithm, self.world, self.draw, self.room = algorithm, world, draw, room or Memory()
        self.tensors: Tensors = {}
        self.clients = range(world.clients) if clients is None else clients
        self.kept: np.ndarray | None = None
        """[U] whether a client's rows are in the tensors; None: all are"""
        # one client tells names, shapes and size of all
        one = self.initial(np.arange(1))
        self.client_bytes = sum(t.numel() * t.element_size() for t in one.values())
        self.lent = 0
        needed = len(self.clients) * self.client_bytes
        if isinstance(self.room, Disk):
            self.kept = np.zeros(world.clients, bool)
        elif needed > (free := free_gpu_memory(draw.device) if draw.device.startswith("cuda") else free_memory()):
            files = "--client-store mmap" if draw.device == "cpu" else "--device cpu, with --client-store mmap if need be"
            raise FedbenchError(
                f"what {len(self.clients):,} clients keep takes {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB of "
                f"{memory_of(draw.device)} are free; use {files}, lower --dim or raise --min-interactions"
            )
        for name, value in one.items():
            self.tensors[name] = self.room.allocate((len(self.clients), *value.shape[1:]), value.dtype, draw.device)
        if self.kept is None:
            self._draw(np.array(self.clients))

    @classmethod
    def of(cls, tensors: Tensors) -> ClientStore:
        """The state given, name -> [U, ...]."""
        store = cls.__new__(cls)
        store.tensors, store.clients = tensors, range(len(next(iter(tensors.values()))) if tensors else 0)
        store.room, store.kept = Memory(), None
        return store

    def copied(self) -> ClientStore:
        """A copy of the state, in memory of its own."""
        store = copy.copy(self)
        store.tensors = {name: value.clone() for name, value in self.tensors.items()}
        return store

    def place(self, clients: Clients) -> Clients:
        """The rows of these clients."""
        return clients - self.clients.start if self.clients.start else clients

    def initial(self, clients: np.ndarray) -> Tensors:
        """[C, ...] of each name: what these clients start with."""
        return self.algorithm.init_client(self.world, draw_for(self.draw, clients))

    def _draw(self, clients: np.ndarray) -> None:
        size = max(1, CHUNK // max(1, sum(t[0].numel() for t in self.tensors.values()))) if self.tensors and len(clients) else 1
        for start in range(0, len(clients) if self.tensors else 0, size):
            some = clients[start : start + size]
            for name, value in self.initial(some).items():
                self.tensors[name][self.place(some)] = value

    def take_part(self, clients: np.ndarray) -> None:
        """Give these clients rows in the tensors: they are about to change."""
        if self.kept is not None:
            # only now, as their rows are about to change: until then the file has no blocks for them
            new = clients[~self.kept[clients]]
            self._keep(new)
            self._draw(new)

    def overwrite(self, clients: np.ndarray) -> None:
        """Give these clients, and no others, rows in the tensors: they are about to be written."""
        if self.kept is not None:
            self.kept[:] = False
            self._keep(clients)

    def _keep(self, clients: np.ndarray) -> None:
        for tensor in self.tensors.values():
            self.room.reserve(tensor, self.place(clients))
        if self.kept is not None:
            self.kept[clients] = True

    def fresh(self, clients: Tensor) -> Tensor | None:
        """[C] whether a client is as it started and has no rows in the tensors; None: no client can be."""
        return None if self.kept is None else torch.from_numpy(~self.kept[clients.numpy()])

    def lend(self, clients: Tensor) -> ClientStore:
        """A store that holds what these clients keep, to be read. They must all be fresh, or none."""
        if self.kept is None:
            return self
        # from the same streams as at the start, so the same numbers
        if not self.kept[clients.numpy()].all():
            return Lent.of({name: value.contiguous() for name, value in self.initial(clients.numpy()).items()})
        # pages of a mapped file that were read stay in memory until they are released
        self.lent += len(clients) * self.client_bytes
        if self.lent > 8 * CHUNK:
            self.room.release()
            self.lent = 0
        return self

    def read(self, clients: Tensor, whole: bool = False) -> Tensors:
        """[C, ...] of each name; a view without a copy when `whole` says that `clients` are all of them in order."""
        return {name: tensor if whole else tensor[self.place(clients)] for name, tensor in self.tensors.items()}

    def rows(self, clients: Tensor, rows: Tensor, tables: Collection[str]) -> Tensors:
        """State [C, ...] of these clients; of tables only the given rows [C, T]."""
        at = self.place(clients)
        return {name: t[at[:, None], rows] if name in tables else t[at] for name, t in self.tensors.items()}

    def write(self, clients: Tensor, name: str, value: Tensor) -> None:
        self.tensors[name][self.place(clients)] = value

    def close(self) -> None:
        """Give all room back."""
        self.tensors.clear()
        self.room = Memory()


class Lent(ClientStore):
    """What the clients hold that it was made for, in their order."""

    def place(self, clients: Clients) -> Clients:
        return torch.arange(len(clients)) if isinstance(clients, Tensor) else np.arange(len(clients))


class SomeClients(ClientStore):
    """The state given of some `clients` [W], name -> [W, ...]; the others are as they start."""

    def __init__(self, algorithm: Algorithm, world: World, draw: Draw, tensors: Tensors, clients: np.ndarray) -> None:
        self.algorithm, self.world, self.draw, self.room = algorithm, world, draw, Memory()
        self.tensors, self.clients, self.client_bytes, self.lent = tensors, range(world.clients), 0, 0
        self.kept = np.zeros(world.clients, bool)
        self.kept[clients] = True
        # a row for each kept client; what others point at is never read
        self.row = np.cumsum(self.kept) - 1

    def place(self, clients: Clients) -> Clients:
        return torch.from_numpy(self.row)[clients] if isinstance(clients, Tensor) else self.row[clients]


def room_for(choice: str, folder: Path | None, device: str) -> Memory:
    """Where clients' state lies: in memory (ram), in `folder` (mmap) or in the folder that is named."""
    if choice == "ram":
        return Memory()
    if device != "cpu":
        raise UsageError(f"--client-store {choice}: only a CPU can work on mapped files; use ram, or --device cpu")
    if choice != "mmap":
        return Disk(Path(choice))
    if folder is None:
        raise UsageError(f"--client-store {choice}: there is no run folder; name a folder")
    folder.mkdir(parents=True, exist_ok=True)  # the run's folder is on the machine of the first worker
    return Disk(folder)


def fits(algorithm: Algorithm, world: World, draw: Draw, clients: int) -> bool:
    """Whether the state of so many clients fits in memory now, with what the server keeps for each."""
    one = algorithm.init_client(world, draw_for(draw, np.arange(1)))
    needed = clients * sum(t.numel() * t.element_size() for t in one.values())
    return needed * (2 if algorithm.per_client_server_state else 1) <= free_memory()


def draw_for(draw: Draw, clients: np.ndarray) -> Draw:
    """Draws of this seed and round, with one stream for each of `clients`."""
    return Draw(draw.seed, draw.when, clients, draw.dtype, draw.device)
