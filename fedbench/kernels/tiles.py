"""Functions of numbers for kernels in Triton, which derived kernels call. Triton comes with PyTorch's builds for GPUs."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def positive(x):
    return tl.where(x > 0, x, 0.0)


@triton.jit
def sigmoid(x):
    """By the exponential of a number below 0, which does not overflow."""
    tail = tl.exp(-tl.abs(x))
    return tl.where(x > 0, 1.0, tail) / (1.0 + tail)


@triton.jit
def log1p(x):
    """log(1 + x): what 1 + x rounds away is given back by the quotient."""
    one = 1.0 + x
    # where 1 + x rounds to 1, log(1 + x) is x; the divisor is kept from 0 there, for both branches are computed
    return tl.where(one == 1.0, x, tl.log(one) * (x / tl.where(one == 1.0, 1.0, one - 1.0)))


@triton.jit
def hyperbolic_tangent(x):
    """By a series near 0, where the quotient would lose digits."""
    tail = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - tail) / (1.0 + tail)
    y = x * x
    near = x * (1.0 - y * (1.0 / 3.0 - y * (2.0 / 15.0 - y * (17.0 / 315.0 - y * (62.0 / 2835.0)))))
    return tl.where(y < 0.01, near, tl.where(x > 0, far, -far))


@triton.jit
def sign(x):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))


@triton.jit
def times_used(first, place, r, real, start, stop, most):
    """How many samples of a batch use each of the rows r.

    The samples of row i are those from first[i] to first[i + 1], `most` at most, and place says where in the epoch's order each of them is.
    """
    low = tl.load(first + r, mask=real, other=0)
    high = tl.load(first + r + 1, mask=real, other=0)
    found = tl.zeros_like(low)
    # comparisons, no atomic additions: the same run gives the same numbers
    for k in range(0, most):
        at = tl.load(place + low + k, mask=real & (low + k < high), other=-1)
        found += ((at >= start) & (at < stop)).to(tl.int32)
    return found
