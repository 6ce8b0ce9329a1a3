"""Adam, AdamW and SGD for kernels: steps of flat arrays in place, and rows that catch up on steps they missed."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from fedbench.kernels.layers import compiled
from fedbench.kernels.vectors import WIDTH, magnitude, put, square_root, take

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8
"""Adam's constants, as in torch.optim.Adam"""
TINY = {4: 1e-17, 8: 1e-150}
"""by bytes a number: its square is added to that of every slope, so that no second moment is 0, or subnormal and a hundred times slower to
compute with; next to EPSILON it is below rounding"""
FORGET = (160, 360)
"""for float32, float64: steps without a gradient after which what is left of Adam's first moment is below rounding"""


@njit(inline="always")
def corrections(step: int, lr: float) -> tuple[float, float]:
    """What a step of Adam (from 1) multiplies the first moment by, and the second one's root.

    Kernels keep moments without their factors 1 - b1 and 1 - b2, a product less for each number and step: those factors are in here, beside
    the corrections 1 / (1 - b1^step) and 1 / sqrt(1 - b2^step).
    """
    return lr * (1 - BETA1) / (1 - BETA1**step), math.sqrt((1 - BETA2) / (1 - BETA2**step))


@njit(inline="always")
def rates(step: int, lr: float) -> tuple[float, float]:
    """Adam's corrections (a, b) folded such that a step is a · first moment / (root of the second + b): one product less a number."""
    rate, root = corrections(step, lr)
    return rate / root, EPSILON / root


@njit
def paces(steps: int) -> np.ndarray:
    """[steps, 2]: Adam's corrections of every step, for a learning rate of 1."""
    found = np.empty((steps, 2))
    for t in range(steps):
        found[t, 0], found[t, 1] = rates(t + 1, 1.0)
    return found


@compiled(inline="always")
def moments(first: np.ndarray, second: np.ndarray, at: int, g: float, tiny: float) -> tuple[float, float]:
    """Adam's moments of the lanes at `at` after a gradient, without the factors that are in `corrections`."""
    kind = first.dtype.type
    m = kind(BETA1) * take(first, at) + g
    v = kind(BETA2) * take(second, at) + (g * g + tiny * tiny)
    put(first, at, m)
    put(second, at, v)
    return m, v


@compiled(inline="always")
def _quotients(m0: float, v0: float, m1: float, v1: float, pace: tuple[float, float]) -> tuple[float, float]:
    """pace[0]·m / (v + pace[1]) of both: by one division, which takes longer than the products; right up to divisors of 1e18 each."""
    d0, d1 = v0 + pace[1], v1 + pace[1]
    both = pace[0] / (d0 * d1)
    return m0 * (d1 * both), m1 * (d0 * both)


@compiled(inline="always")
def steps(
    first: np.ndarray, second: np.ndarray, at: int, g0: float, g1: float, pace: tuple[float, float], tiny: float
) -> tuple[float, float]:
    """How far Adam moves the lanes at `at` and the ones after them."""
    m0, v0 = moments(first, second, at, g0, tiny)
    m1, v1 = moments(first, second, at + WIDTH, g1, tiny)
    return _quotients(m0, square_root(v0), m1, square_root(v1), pace)


@compiled(inline="always")
def first_steps(
    first: np.ndarray, second: np.ndarray, at: int, g0: float, g1: float, pace: tuple[float, float], tiny: float
) -> tuple[float, float]:
    """How far Adam's first step moves the lanes: there are no moments yet, so the root of the second is the gradient without its sign."""
    put(first, at, g0)
    put(first, at + WIDTH, g1)
    put(second, at, g0 * g0 + tiny * tiny)
    put(second, at + WIDTH, g1 * g1 + tiny * tiny)
    return _quotients(g0, magnitude(g0), g1, magnitude(g1), pace)


@compiled(inline="always")
def adamw(
    param: np.ndarray,
    grad: np.ndarray,
    first: np.ndarray,
    second: np.ndarray,
    pace: tuple[float, float],
    decay: float,
    slope: float,
    tiny: float,
) -> None:
    """One AdamW step over flat arrays, in place, along slope·grad; constants in the arrays' type: a float64 would halve the speed."""
    kind = param.dtype.type
    b1, b2 = kind(BETA1), kind(BETA2)
    pairs, lanes = param.size // (2 * WIDTH) * (2 * WIDTH), param.size // WIDTH * WIDTH
    # pairs of vectors, for two quotients share a division
    for at in range(0, pairs, 2 * WIDTH):
        x0, x1 = steps(first, second, at, slope * take(grad, at), slope * take(grad, at + WIDTH), pace, tiny)
        put(param, at, decay * take(param, at) - x0)
        put(param, at + WIDTH, decay * take(param, at + WIDTH) - x1)
    for at in range(pairs, lanes, WIDTH):
        m, v = moments(first, second, at, slope * take(grad, at), tiny)
        put(param, at, decay * take(param, at) - pace[0] * m / (square_root(v) + pace[1]))
    # what fills no vector, by the same formula
    for i in range(lanes, param.size):
        g = slope * grad[i]
        first[i] = b1 * first[i] + g
        second[i] = b2 * second[i] + (g * g + tiny * tiny)
        param[i] = decay * param[i] - pace[0] * first[i] / (np.sqrt(second[i]) + pace[1])


@compiled(inline="always")
def settled(total: float, seen: int, before: float, tolerance: float, epoch: int) -> tuple[float, bool]:
    """Running mean loss, and whether it hardly changed since the epoch before."""
    # 1e-5: the loss before may be 0
    mean = total / seen
    return mean, epoch > 0 and abs(mean - before) / abs(before + 1e-5) < tolerance


@compiled(inline="always")
def sgd(param: np.ndarray, grad: np.ndarray, rate: float) -> None:
    for i in range(param.size):
        param[i] -= rate * grad[i]


@compiled(inline="always")
def joined_slope(grad: np.ndarray, scale: float, param: np.ndarray, decay: float) -> None:
    """The gradient, scaled, with weight decay, as SGD takes it."""
    for i in range(param.size):
        grad[i] = scale * grad[i] + decay * param[i]


@compiled(inline="always")
def add_pull(grad: np.ndarray, param: np.ndarray, target: np.ndarray, weight: float) -> None:
    for i in range(param.size):
        grad[i] += weight * (param[i] - target[i])


@compiled(inline="always")
def pull(param: np.ndarray, target: np.ndarray, share: float) -> None:
    """A decoupled pull: so far towards the target."""
    for i in range(param.size):
        param[i] -= share * (param[i] - target[i])


@compiled(inline="always")
def add_momentum(velocity: np.ndarray, grad: np.ndarray, momentum: float) -> None:
    """The velocity after a gradient; the gradient becomes it."""
    for i in range(grad.size):
        velocity[i] = momentum * velocity[i] + grad[i]
        grad[i] = velocity[i]


@compiled(inline="always")
def square_of(grad: np.ndarray) -> float:
    total = grad.dtype.type(0)
    for i in range(grad.size):
        total += grad[i] * grad[i]
    return total


@compiled()
def catch_up(
    param: np.ndarray,
    first: np.ndarray,
    second: np.ndarray,
    since: int,
    now: int,
    fade: np.ndarray,
    rate_at: np.ndarray,
    root_at: np.ndarray,
    share: np.ndarray,
    scale: np.ndarray,
    box: np.ndarray,
) -> None:
    """The AdamW steps since + 1 .. now of one row whose gradient was 0 in all of them.

    Both moments only fade, so with s the root of the second the row moves by -first · Σ share_t / (s · scale_t + eps), where share and
    scale hold for all its numbers; four fractions are brought to one division. fade [3, .]: powers of b1, sqrt(b2) and the decay.
    """
    kind = param.dtype.type
    eps, zero, one = kind(EPSILON), kind(0), kind(1)
    missed = now - since
    if missed == 0:
        return
    # older terms are below rounding, see FORGET
    terms = min(missed, share.size - 3)
    for k in range(terms):
        share[k] = rate_at[since + k] * fade[0, k + 1] * fade[2, missed - 1 - k]
        scale[k] = root_at[since + k] * fade[1, k + 1]
    # whole fours, by terms of 0
    while terms % 4:
        share[terms] = zero
        scale[terms] = one
        terms += 1
    wide = param.size
    # one root for all steps: the second moment only shrinks, and scale_t says by how much
    for i in range(wide):
        box[i] = np.sqrt(second[i])
        box[wide + i] = zero
    for k in range(0, terms, 4):
        c0, c1, c2, c3 = share[k], share[k + 1], share[k + 2], share[k + 3]
        r0, r1, r2, r3 = scale[k], scale[k + 1], scale[k + 2], scale[k + 3]
        for i in range(wide):
            x0, x1, x2, x3 = box[i] * r0 + eps, box[i] * r1 + eps, box[i] * r2 + eps, box[i] * r3 + eps
            # c0 / x0 + c1 / x1 + c2 / x2 + c3 / x3, over one divisor
            left, right = x0 * x1, x2 * x3
            box[wide + i] += ((c0 * x1 + c1 * x0) * right + (c2 * x3 + c3 * x2) * left) / (left * right)
    decayed, first_left = fade[2, missed], fade[0, missed]
    # fade[1] holds powers of sqrt(b2)
    second_left = fade[1, missed] * fade[1, missed]
    for i in range(wide):
        param[i] = decayed * param[i] - first[i] * box[wide + i]
        first[i] *= first_left
        second[i] *= second_left
