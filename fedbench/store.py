"""What clients keep between rounds: name -> [U, ...]. Only a block's clients are read and written.

A process that shares the clients out with others holds a range of them only; the first of the range is in row 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from fedbench.algorithm import Algorithm, Tensors, World
from fedbench.draw import Draw
from fedbench.errors import FedbenchError

CHUNK = 1 << 24
"""numbers drawn at once while clients are initialised"""

Clients = TypeVar("Clients", Tensor, np.ndarray)
Allocate = Callable[[tuple[int, ...], torch.dtype, str], Tensor]


def in_memory(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Room for one name of all clients; a store on disk is another function of this form."""
    return torch.empty(shape, dtype=dtype, device=device)


class ClientStore:
    """The private state of all clients, or of a range of them, initialised chunk by chunk."""

    def __init__(
        self, algorithm: Algorithm, world: World, draw: Draw, allocate: Allocate = in_memory, clients: range | None = None
    ) -> None:
        self.tensors: Tensors = {}
        self.clients = range(world.clients) if clients is None else clients
        one = algorithm.init_client(world, draw_for(draw, np.arange(1)))
        needed = len(self.clients) * sum(t[0].numel() * t.element_size() for t in one.values())
        if draw.device == "cpu" and needed > free_memory():
            raise FedbenchError(
                f"what {len(self.clients):,} clients keep takes {needed / 1e9:.1f} GB and {free_memory() / 1e9:.1f} GB of memory are free; "
                "lower --dim, raise --min-interactions, or take a method whose clients keep less"
            )
        size = max(1, CHUNK // max(1, sum(t[0].numel() for t in one.values())))
        for name, value in one.items():
            self.tensors[name] = allocate((len(self.clients), *value.shape[1:]), value.dtype, draw.device)
        for start in range(0, len(self.clients) if one else 0, size):
            some = np.array(self.clients[start : start + size])
            for name, value in algorithm.init_client(world, draw_for(draw, some)).items():
                self.tensors[name][start : start + len(some)] = value

    @classmethod
    def of(cls, tensors: Tensors) -> ClientStore:
        """The state given, name -> [U, ...]."""
        store = cls.__new__(cls)
        store.tensors, store.clients = tensors, range(len(next(iter(tensors.values()))) if tensors else 0)
        return store

    def place(self, clients: Clients) -> Clients:
        """The rows of these clients."""
        return clients - self.clients.start if self.clients.start else clients

    def read(self, clients: Tensor, whole: bool = False) -> Tensors:
        """[C, ...] of each name; a view without a copy when `whole` says that `clients` are all of them in order."""
        return {name: tensor if whole else tensor[self.place(clients)] for name, tensor in self.tensors.items()}

    def rows(self, clients: Tensor, rows: Tensor, tables: tuple[str, ...]) -> Tensors:
        """The same with only the given rows [C, T] of tables."""
        at = self.place(clients)
        return {name: t[at[:, None], rows] if name in tables else t[at] for name, t in self.tensors.items()}

    def write(self, clients: Tensor, name: str, value: Tensor) -> None:
        self.tensors[name][self.place(clients)] = value


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
