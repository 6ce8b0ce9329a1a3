"""The machine's limit for training: element updates a second of a plain Adam loop over rows that stay in the cache."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
from numba import njit

from fedbench.kernels.layers import DIVIDE, FAST, zeros
from fedbench.kernels.optimizers import BETA1, BETA2, EPSILON


@njit(fastmath=FAST, error_model=DIVIDE, cache=True)
def _adam_loop(param: np.ndarray, grad: np.ndarray, first: np.ndarray, second: np.ndarray, steps: int) -> None:
    """Adam as textbooks have it: a root and a quotient for every number."""
    kind = param.dtype.type
    b1, b2, c1, c2 = kind(BETA1), kind(BETA2), kind(1 - BETA1), kind(1 - BETA2)
    for step in range(steps):
        rate, scale = kind(0.1 / (1 - BETA1 ** (step + 1))), kind(1 / math.sqrt(1 - BETA2 ** (step + 1)))
        eps = kind(EPSILON)
        for i in range(param.size):
            first[i] = b1 * first[i] + c1 * grad[i]
            second[i] = b2 * second[i] + c2 * grad[i] * grad[i]
            param[i] -= rate * first[i] / (np.sqrt(second[i]) * scale + eps)


def adam_limit(kind: type) -> float:
    """Element updates a CPU second of a tight Adam loop over 256 rows of 16, which stay in the cache; best of several.

    The arrays begin where a cache line does: elsewhere, as chance has it, the loop is up to a fifth slower.
    """
    size, steps = 256 * 16, 2000
    arrays: list[Any] = [zeros(size, np.empty(0, kind)) for _ in range(4)]
    for array in arrays:
        array[:] = 0.1
    run: Any = _adam_loop
    run(*arrays, 1)
    best = float("inf")
    for _ in range(5):
        began = time.process_time()
        run(*arrays, steps)
        best = min(best, time.process_time() - began)
    return size * steps / best
