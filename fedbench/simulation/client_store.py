"""What clients keep between rounds: name -> [U, ...]. Only a block's clients are read and written.

A process that shares the clients out with others holds a range of them only; the first of the range is in row 0.

It lies in memory or, where it does not fit, in memory-mapped files. Those are sparse and hold only the clients that have taken part:
what another one starts with is drawn anew from its own stream whenever it is asked for. The files have no name in their folder, so
nothing is left behind however a process ends; what a run goes on from is its checkpoint.
"""

from __future__ import annotations

import copy
import math
import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedbench.contract.algorithm import Algorithm, Tensors, World
from fedbench.contract.randomness import Draw
from fedbench.errors import FedbenchError, UsageError

CHUNK = 1 << 24
"""numbers drawn, saved or read at once"""
STORES = ("auto", "ram", "mmap")

Clients = TypeVar("Clients", Tensor, np.ndarray)


class Memory:
    """Room on the run's device. What is said of it here holds for `Disk` too, which shares its form."""

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
        """Room for one name of many clients; its content is not set."""
        return torch.empty(shape, dtype=dtype, device=device)

    def reserve(self, tensor: Tensor, rows: np.ndarray) -> None:
        """These rows of an allocated tensor are about to be written for the first time."""

    def release(self) -> None:
        """Nothing that was read or written so far is needed soon."""

    def forget(self, tensors: Iterable[Tensor]) -> None:
        """What was allocated for these goes with them."""


@dataclass
class Disk(Memory):
    """Room in sparse files of a folder. Pages that were touched count as this process's memory until they are released."""

    folder: Path
    files: dict[int, tuple[BinaryIO, mmap.mmap]] = field(default_factory=dict)
    """by the address of what they hold"""

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
        kind = torch.empty(0, dtype=dtype).numpy().dtype
        try:
            file: BinaryIO = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115 (open while it is mapped)
            file.truncate(max(1, math.prod(shape) * kind.itemsize))
            mapped = mmap.mmap(file.fileno(), 0)
        except OSError as error:
            raise self._full(error) from error
        tensor = torch.from_numpy(np.frombuffer(mapped, kind, math.prod(shape)).reshape(shape))
        self.files[tensor.data_ptr()] = file, mapped
        return tensor

    def reserve(self, tensor: Tensor, rows: np.ndarray) -> None:
        """A write to a mapped page for which the disk has no room would kill the process; asking before ends in an error."""
        if tensor.data_ptr() not in self.files or not len(rows):
            return
        handle, each = self.files[tensor.data_ptr()][0].fileno(), tensor[0].numel() * tensor.element_size()
        rows = np.unique(rows)
        try:
            for run in np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1):
                os.posix_fallocate(handle, int(run[0]) * each, len(run) * each)
        except OSError as error:
            raise self._full(error) from error
        except AttributeError:  # a system without it
            pass

    def release(self) -> None:
        for _, mapped in self.files.values():
            mapped.madvise(mmap.MADV_DONTNEED)

    def forget(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self.files.pop(tensor.data_ptr(), None)

    def _full(self, error: OSError) -> FedbenchError:
        return FedbenchError(
            f"{self.folder} has no room for what clients keep ({error.strerror}); make room, or name another folder with --client-store"
        )


@dataclass(frozen=True)
class Picked:
    """Rows of a tensor that is too large to gather them all at once."""

    tensor: Tensor
    rows: Tensor
    room: Memory

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.rows), *self.tensor.shape[1:])

    def chunks(self) -> Iterator[Tensor]:
        for rows in self.rows.split(at_once(self.tensor)):
            yield self.tensor[rows]
            self.room.release()


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
        one = self.initial(np.arange(1))
        self.client_bytes = sum(t.numel() * t.element_size() for t in one.values())
        self.lent = 0
        needed = len(self.clients) * self.client_bytes
        if isinstance(self.room, Disk):
            self.kept = np.zeros(world.clients, bool)
        elif draw.device == "cpu" and needed > free_memory():
            raise FedbenchError(
                f"what {len(self.clients):,} clients keep takes {needed / 1e9:.1f} GB and {free_memory() / 1e9:.1f} GB of memory are free; "
                "use --client-store mmap, lower --dim or raise --min-interactions"
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
        """The same state in memory of its own."""
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
        """These clients' rows are about to change: from now on they are in the tensors."""
        if self.kept is not None:
            new = clients[~self.kept[clients]]
            self._keep(new)
            self._draw(new)

    def overwrite(self, clients: np.ndarray) -> None:
        """These clients and no others have rows in the tensors, which are about to be written."""
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
        if not self.kept[clients.numpy()].all():
            return Lent.of({name: value.contiguous() for name, value in self.initial(clients.numpy()).items()})
        self.lent += len(clients) * self.client_bytes
        if self.lent > 8 * CHUNK:
            self.room.release()
            self.lent = 0
        return self

    def read(self, clients: Tensor, whole: bool = False) -> Tensors:
        """[C, ...] of each name; a view without a copy when `whole` says that `clients` are all of them in order."""
        return {name: tensor if whole else tensor[self.place(clients)] for name, tensor in self.tensors.items()}

    def rows(self, clients: Tensor, rows: Tensor, tables: tuple[str, ...]) -> Tensors:
        """The same with only the given rows [C, T] of tables."""
        at = self.place(clients)
        return {name: t[at[:, None], rows] if name in tables else t[at] for name, t in self.tensors.items()}

    def write(self, clients: Tensor, name: str, value: Tensor) -> None:
        self.tensors[name][self.place(clients)] = value

    def close(self) -> None:
        """Give all room back."""
        self.tensors.clear()
        self.room = Memory()


class Lent(ClientStore):
    """What those clients hold that it is asked for, in their order."""

    def place(self, clients: Clients) -> Clients:
        return torch.arange(len(clients)) if isinstance(clients, Tensor) else np.arange(len(clients))


class SomeClients(ClientStore):
    """The state given of some `clients` [W], name -> [W, ...]; the others are as they start."""

    def __init__(self, algorithm: Algorithm, world: World, draw: Draw, tensors: Tensors, clients: np.ndarray) -> None:
        self.algorithm, self.world, self.draw, self.room = algorithm, world, draw, Memory()
        self.tensors, self.clients, self.client_bytes, self.lent = tensors, range(world.clients), 0, 0
        self.kept = np.zeros(world.clients, bool)
        self.kept[clients] = True
        self.row = np.cumsum(self.kept) - 1

    def place(self, clients: Clients) -> Clients:
        return torch.from_numpy(self.row)[clients] if isinstance(clients, Tensor) else self.row[clients]


def filled(room: Memory, rows: int, chunks: Iterable[Tensor]) -> Tensor:
    """[rows, ...] in `room`, the chunks first."""
    tensor, at = torch.empty(0), 0
    for chunk in chunks:
        tensor = tensor if at else room.allocate((rows, *chunk.shape[1:]), chunk.dtype, "cpu")
        room.reserve(tensor, np.arange(at, at + len(chunk)))
        tensor[at : at + len(chunk)] = chunk
        at += len(chunk)
        room.release()
    return tensor


def at_once(tensor: Tensor) -> int:
    """Rows of a tensor that are handled at once."""
    return max(1, CHUNK // max(1, math.prod(tensor.shape[1:])))


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
    folder.mkdir(parents=True, exist_ok=True)  # the run's folder is on the machine of the first rank
    return Disk(folder)


def fits(algorithm: Algorithm, world: World, draw: Draw, clients: int) -> bool:
    """Whether the state of so many clients fits in memory now, with what the server keeps for each."""
    one = algorithm.init_client(world, draw_for(draw, np.arange(1)))
    needed = clients * sum(t.numel() * t.element_size() for t in one.values())
    return needed * (2 if algorithm.mailed else 1) <= free_memory()


def free_memory() -> float:
    """Bytes that can still be had without swapping; infinite where the system does not say."""
    try:
        with open("/proc/meminfo") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return float("inf")


def draw_for(draw: Draw, clients: np.ndarray) -> Draw:
    """The same randomness with one stream for each of `clients`."""
    return Draw(draw.seed, draw.when, clients, draw.dtype, draw.device)
