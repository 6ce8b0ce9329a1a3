"""Randomness from who and when, never from order: every number is a hash of (seed, round, client, purpose, position).

So a result does not depend on the size of a block, on the number of threads or workers, or on where a run was resumed.
The generator is the splitmix64 finaliser over a counter; a key stands for (seed, round, client, purpose).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numba import njit
from torch import Tensor

from fedbench.kernels.hashing import GOLDEN, mix
from fedbench.kernels.hashing import unit as unit
from fedbench.kernels.threads import shared


@njit(cache=True)
def _keys(base: np.uint64, who: np.ndarray) -> np.ndarray:
    out = np.empty(who.size, np.uint64)
    for i in range(who.size):
        # + 2: the server is -1, and its key must differ from the bare base too
        out[i] = mix(base + np.uint64(who[i] + 2) * GOLDEN)
    return out


@shared()
def _fill_uniform(low: int, high: int, keys: np.ndarray, out: np.ndarray) -> None:
    for c in range(low, high):
        for i in range(out.shape[1]):
            out[c, i] = unit(keys[c], i)


@shared()
def _fill_normal(low: int, high: int, keys: np.ndarray, out: np.ndarray) -> None:
    """Box-Muller: positions 2i and 2i+1 of a row share two uniforms."""
    width = out.shape[1]
    for c in range(low, high):
        for i in range(0, width, 2):
            # 1 - unit is over 0, so its logarithm is finite
            radius = math.sqrt(-2.0 * math.log(1.0 - unit(keys[c], i)))
            angle = 2.0 * math.pi * unit(keys[c], i + 1)
            out[c, i] = radius * math.cos(angle)
            if i + 1 < width:
                out[c, i + 1] = radius * math.sin(angle)


def purpose_base(seed: int, when: int, purpose: str) -> np.uint64:
    """uint64 that stands for (seed, round, purpose)."""
    # equal on every machine and version; Python's own hash is salted
    digest = hashlib.blake2b(f"{seed}/{when}/{purpose}".encode(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


def keys(seed: int, when: int, purpose: str, who: np.ndarray) -> np.ndarray:
    """[n] uint64: one key for each of `who` (client numbers; -1 is the server)."""
    return _keys(purpose_base(seed, when, purpose), np.ascontiguousarray(who, np.int64))


@dataclass(frozen=True)
class Draw:
    """The randomness an algorithm may use. With `clients` [C] every tensor has a leading client dimension, a stream for each row."""

    seed: int
    when: int = 0
    clients: np.ndarray | None = None
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    alike: bool = False

    @property
    def same(self) -> Draw:
        """Draws that are equal for all clients."""
        return replace(self, alike=True)

    def _tensor(self, purpose: str, shape: tuple[int, ...], fill: Callable[[np.ndarray, np.ndarray], None]) -> Tensor:
        who = np.array([-1]) if self.alike or self.clients is None else self.clients
        flat = np.empty((len(who), math.prod(shape)), np.float64 if self.dtype == torch.float64 else np.float32)
        # made on the host and moved: every device gets the same numbers
        fill(keys(self.seed, self.when, purpose, who), flat)
        out = torch.from_numpy(flat).view(len(who), *shape).to(self.device)
        if self.clients is None:
            return out[0]
        return out.expand(len(self.clients), *shape) if self.alike else out

    def normal(self, purpose: str, *shape: int) -> Tensor:
        """Standard normal numbers; `purpose` names the stream."""
        return self._tensor(purpose, shape, _fill_normal)

    def uniform(self, purpose: str, *shape: int) -> Tensor:
        """Uniform numbers from 0 to 1; `purpose` names the stream."""
        return self._tensor(purpose, shape, _fill_uniform)

    def subset(self, purpose: str, n: int, k: int) -> Tensor:
        """[k] different numbers of 0 .. n-1, ascending."""
        order = np.empty((1, n))
        _fill_uniform(keys(self.seed, self.when, purpose, np.array([-1])), order)
        # the k smallest of n keys: every subset is equally likely
        return torch.from_numpy(np.sort(np.argsort(order[0], kind="stable")[:k])).to(self.device)

    def zeros(self, *shape: int) -> Tensor:
        """Zeros in the run's precision, on its device; for each client where the other numbers are."""
        return self.full(0.0, *shape)

    def full(self, value: float, *shape: int) -> Tensor:
        """One number everywhere, as `zeros`."""
        each = shape if self.clients is None else (len(self.clients), *shape)
        return torch.full(each, float(value), dtype=self.dtype, device=self.device)
