"""exp and log of the kernels against numpy's in a longer type."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import njit

from fedbench.kernels.elementary import LEAST, exp_minus, log_one_plus


@njit
def exps(x: np.ndarray, out: np.ndarray) -> None:
    for i in range(x.size):
        out[i] = exp_minus(x[i])


@njit
def logs(x: np.ndarray, out: np.ndarray) -> None:
    for i in range(x.size):
        out[i] = log_one_plus(x[i])


def of(function: Any, x: np.ndarray) -> np.ndarray:
    out = np.empty_like(x)
    function(x, out)
    return out


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_within_two_units_in_the_last_place(kind: type) -> None:
    least = {np.dtype(str(key)).type: value for key, value in LEAST.items()}[kind]
    x = np.concatenate([np.linspace(0, -np.log(least) * 0.99, 20001), np.geomspace(1e-9, 1, 2001)]).astype(kind)
    exact = np.exp(-x.astype(np.longdouble))
    assert (np.abs(of(exps, x) - exact) <= np.finfo(kind).eps * exact).all()
    x = np.concatenate([np.linspace(0, 1, 20001), np.geomspace(1e-12, 1, 2001)]).astype(kind)
    exact = np.log1p(x.astype(np.longdouble))
    assert (np.abs(of(logs, x) - exact) <= 2 * np.finfo(kind).eps * exact).all()


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_far_out(kind: type) -> None:
    least = {np.dtype(str(key)).type: value for key, value in LEAST.items()}[kind]
    far = of(exps, np.array([1e4, np.inf], kind))
    assert far == pytest.approx([least, least], rel=1e-4, abs=0)
    assert np.isnan(of(exps, np.array([np.nan], kind)))[0]
    assert of(exps, np.zeros(1, kind))[0] == 1 and of(logs, np.zeros(1, kind))[0] == 0


def test_outside_kernels_they_are_the_library_functions() -> None:
    assert exp_minus(2.0) == np.exp(-2.0) and log_one_plus(0.5) == np.log1p(0.5)
