"""Whether a run fits in memory, checked before anything is allocated: what it will ask for is counted, and too much is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedbench.contract.algorithm import Algorithm, Tensors, World
from fedbench.contract.randomness import Draw
from fedbench.data.split import Split
from fedbench.errors import FedbenchError
from fedbench.system_memory import free_gpu_memory, free_memory, memory_of
from fedbench.text import human

SAMPLE_BYTES = 12
"""of a training sample: the item, its place among the client's items, and the label"""
COPIES = 2
"""of the server's state: a round makes the new one beside the old one"""


class TooLarge(Exception):
    """A single tensor exceeds the limit."""

    def __init__(self, needed: float, shape: tuple[int, ...]) -> None:
        super().__init__(needed)
        self.needed, self.shape = needed, shape


@dataclass(frozen=True)
class Shapes(Draw):
    """A Draw that allocates uninitialised tensors instead of drawing numbers; raises TooLarge for one over the limit."""

    limit: float = math.inf

    def _tensor(self, purpose: str, shape: tuple[int, ...], fill: Callable[[np.ndarray, np.ndarray], None]) -> Tensor:
        shape = shape if self.clients is None else (len(self.clients), *shape)
        needed = math.prod(shape) * self.dtype.itemsize
        if needed > self.limit:
            raise TooLarge(needed, shape)
        return torch.empty(shape, dtype=self.dtype)

    def subset(self, purpose: str, n: int, k: int) -> Tensor:
        return torch.arange(k)


def check(algorithm: Algorithm, split: Split, world: World, dtype: torch.dtype, device: str, clients: int) -> None:
    """Raise if what the server holds, one client's own state or a round's samples cannot fit; `clients` train in this process."""
    free = free_on(device)
    for what, needed, form, lower in (
        *_held(algorithm, world, dtype, free),
        ("a round's training samples", samples(algorithm, split, clients), "", "--negatives or -n"),
    ):
        if needed > free:
            raise FedbenchError(
                f"{what} takes at least {human(needed)}{form}, and {human(free)} of {memory_of(device)} are free; lower {lower}"
            )


def _held(algorithm: Algorithm, world: World, dtype: torch.dtype, free: float) -> list[tuple[str, float, str, str]]:
    shapes = Shapes(0, 0, None, dtype, limit=free / COPIES)
    sizes = ", ".join(f"--{name.replace('_', '-')}" for name in ("dim", "layers", "adapter", "head") if hasattr(algorithm, name))
    lower = f"{sizes or '--dim'} or the number of items"
    server = counted(lambda: algorithm.init_server(world, shapes))
    client = counted(lambda: algorithm.init_client(world, replace(shapes, clients=np.arange(1))))
    return [
        (f"what the server of {algorithm.name} holds", COPIES * server[0], server[1], lower),
        (f"what one client of {algorithm.name} keeps", client[0], client[1], lower),
    ]


def counted(make: Callable[[], Tensors]) -> tuple[float, str]:
    """Bytes that tensors take, and the largest one's shape in words; 0 where uninitialised content makes the algorithm fail."""
    try:
        made = make()
    except TooLarge as error:
        return error.needed, f" ({_form(error.shape)})"
    except Exception as error:
        return (math.inf, "") if "allocate memory" in str(error) else (0, "")
    sizes = {name: value.numel() * value.element_size() for name, value in made.items() if isinstance(value, Tensor)}
    if not sizes:
        return 0, ""
    largest = max(sizes, key=lambda name: sizes[name])
    return sum(sizes.values()), f" ({largest}: {_form(made[largest].shape)})"


def _form(shape: Sequence[int]) -> str:
    return " x ".join(f"{size:,}" for size in shape)


def samples(algorithm: Algorithm, split: Split, clients: int) -> float:
    """Estimated bytes of a round's samples: a cohort of clients of average size."""
    trainers = len(split.train_counts)
    if not trainers:
        return 0
    positives = int(split.train_counts.sum()) / trainers * min(algorithm.cohort(trainers), clients)
    each = algorithm.extra(1).each
    if split.protocol.ratings:  # different items, so not more than there are
        return SAMPLE_BYTES * min(positives * (1 + each), clients * split.items)
    return SAMPLE_BYTES * positives * (1 + each)


def free_on(device: str) -> float:
    """Free bytes on a device."""
    return free_gpu_memory(device) if device.startswith("cuda") else free_memory()
