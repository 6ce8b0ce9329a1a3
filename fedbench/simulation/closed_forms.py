"""Closed forms of a cohort, where the state lies: sums over samples by a kernel derived from `solve`, the rest of it by torch, for all
clients at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from fedbench.contract.algorithm import Algorithm, Tensors
from fedbench.kernels.compiler import build, closed
from fedbench.kernels.compiler.expressions import Constants
from fedbench.kernels.compiler.trace import Key, Unsupported, compiling
from fedbench.kernels.threads import share_out
from fedbench.simulation.derived import Shapes, examples, given_to_client, watched

AT_ONCE = 1 << 22
"""numbers of sums that are made before the rest is: as many as a few megabytes hold, for calls of torch cost the same for any"""


@dataclass(frozen=True, eq=False)
class Closed:
    """The closed form of one algorithm."""

    parts: closed.Cut
    module: ModuleType
    numbers: tuple[float, ...]
    names: tuple[str, ...]
    """what `solve` replaces"""
    changes: bool
    """it depends on the round, so it is recorded in every round"""

    @property
    def tables(self) -> dict[Key, int]:
        """Tables whose rows it reads, and the numbers in a row of each."""
        return dict(sorted(self.parts.sums.tables.items()))

    @property
    def params(self) -> tuple[Key, ...]:
        """Tensors that it reads."""
        return *self.parts.sums.params, *(key for key in self.parts.reads if key not in self.parts.sums.params)

    def solve(self, samples: tuple[np.ndarray, ...], arrays: Mapping[Key, tuple[np.ndarray, np.ndarray]]) -> Tensors:
        """name -> [C, ...]. samples: see closed.SAMPLES. arrays: key -> [X, ...] and which of them is each client's."""
        clients = len(samples[0])
        size = max(1, AT_ONCE // sum(max(1, math.prod(shape)) for shape in self.parts.shapes.values()))
        done = [self.of_some(samples, arrays, slice(low, min(low + size, clients))) for low in range(0, clients, size)]
        return {name: torch.cat(values) for name, values in zip(self.names, zip(*done, strict=True), strict=True)}

    def of_some(
        self, samples: tuple[np.ndarray, ...], arrays: Mapping[Key, tuple[np.ndarray, np.ndarray]], some: slice
    ) -> tuple[Tensor, ...]:
        """What `solve` makes for some of the clients."""
        parts, clients, kept = self.parts, some.stop - some.start, next(iter(arrays.values()))[0].dtype
        kind = np.float64 if parts.wide else kept
        begin, count, local, label, row_begin, touched, row = samples
        given: list[Any] = [begin[some], count[some], local, label, row_begin[some], touched[some], row]
        for key, width in self.tables.items():
            array, at = arrays[key]
            given += [array.reshape(len(array), -1, width), at[some]]
        # parameters are few: copied in the type of the sums; rows of tables are widened by the kernel
        for key in sorted(parts.sums.params):
            array, at = arrays[key]
            given += [array.reshape(len(array), -1).astype(kind), at[some]]
        outs = {name: np.empty((clients, max(1, math.prod(shape))), kind) for name, shape in parts.shapes.items()}
        with compiling():
            share_out(self.module.sums, clients, *given, *outs.values(), np.array(self.numbers or (0.0,), kind))
        sums = [torch.from_numpy(out).reshape(clients, *parts.shapes[name]).to(parts.kinds[name]) for name, out in outs.items()]
        beside = [torch.from_numpy(arrays[key][0])[torch.from_numpy(arrays[key][1][some])] for key in parts.reads]
        return tuple(vmap(parts.rest)(*sums, *beside))


def made(algorithm: Algorithm, shapes: tuple[Shapes, Shapes], dtype: torch.dtype) -> Closed:
    """Record `solve`, cut it, and write and load the kernel of its sums. shapes: of what a client holds and was sent."""
    watching, context = watched(algorithm)
    leaves, constants = examples(*shapes, dtype), Constants()
    # called once for the names and shapes that it returns
    found = watching.solve(*given_to_client(leaves))
    names, shape = list(found), {name: leaf.shape for (kind, name), leaf in leaves.items() if kind == "held"}

    def function(*tensors: Tensor) -> list[Tensor]:
        solved = watching.solve(*given_to_client(dict(zip(leaves, tensors, strict=True))))
        return [solved[name] for name in names]

    if algorithm.tables.keys() & names:
        raise Unsupported("a closed form that makes rows of a table")
    if any(shape.get(name) != value.shape for name, value in found.items()):
        raise Unsupported("a closed form that makes what was not held, or of another shape")
    parts = closed.cut(function, leaves, constants)
    if any(not leaves[key].is_floating_point() for key in (*parts.sums.tables, *parts.sums.params, *parts.reads)):
        raise Unsupported("whole numbers in a closed form")
    # two made-up clients: what torch cannot map fails here, not in the middle of a round
    try:
        two = [torch.ones(2, *shape, dtype=parts.kinds[name]) for name, shape in parts.shapes.items()]
        vmap(parts.rest)(*two, *(leaves[key].expand(2, *leaves[key].shape) for key in parts.reads))
    except (RuntimeError, ValueError) as error:
        raise Unsupported(f"torch cannot map what is made of sums ({str(error).splitlines()[0]})") from error
    text = build.module_text(f"{type(algorithm).__name__}.solve", max(1, parts.sums.acts), parts.text)
    return Closed(parts, build.load(text), tuple(constants.values), tuple(names), context.asked)
