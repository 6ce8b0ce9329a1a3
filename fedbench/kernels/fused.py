"""Fused CPU kernels: a client's rows stay in the cache for all of its local steps.

An algorithm whose client scores by a dot product and trains with binary cross-entropy and Adam says so in `Algorithm.fused`
(`DotBCE`, or `ElasticBCE` when the rows are merged with the server's inside the forward pass); the engine then takes the kernel
here instead of the generic path. Both do the same arithmetic; tests hold them to the loop engine.
"""

from __future__ import annotations

import functools
import math
import os
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import get_num_threads, njit

from fedbench.kernels.elementary import exp_minus, log_one_plus
from fedbench.kernels.layers import (
    SQUARE,
    TILE,
    backward,
    compiled,
    copy,
    everybody,
    fetch,
    find_awake,
    forward,
    give_rows,
    gradient,
    mix_all,
    mix_onto_positive,
    mixed,
    padded,
    part,
    products,
    take_rows,
    zeros,
)
from fedbench.kernels.shuffling import permute, shuffle
from fedbench.kernels.vectors import WIDTH, across, magnitude, pick, prefetch, put, repeat, spread, square_root, take

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8
"""Adam's constants, as in torch.optim.Adam"""
TINY = {4: 1e-17, 8: 1e-150}
"""by bytes a number: its square is added to that of every slope, so that no second moment is 0, or subnormal and a hundred times slower to
compute with; next to EPSILON it is below rounding"""
FORGET = (160, 360)
"""for float32, float64: steps without a gradient after which what is left of Adam's first moment is below rounding"""
PARTS = 4
"""portions of the clients that a thread takes one after another: who is through sooner takes more of them"""
Moving = tuple[np.ndarray, np.ndarray, np.ndarray]
"""numbers and their two moments in Adam"""


@dataclass(frozen=True)
class DotBCE:
    """logit of item i = user · items[i]; one Adam step a batch on both."""

    lr: float
    user: str = "user"
    items: str = "items"
    changes: bool = False
    """the client uploads how its item rows changed, and nothing else"""
    row_negatives: bool = True
    """samples of label 0 move the item rows too; if not, they move the rest alone"""
    trains_user: bool = True
    """if not, the user vector stays as it is"""

    @property
    def plain(self) -> bool:
        """Every sample moves the user and its row: all that the kernel for GPUs knows."""
        return type(self) is DotBCE and self.row_negatives and self.trains_user

    def trained(self, clients: Clients, touched: np.ndarray) -> np.ndarray:
        """[C] how many numbers a step of each client moves."""
        return clients.user.shape[1] * (self.trains_user + touched)


@dataclass(frozen=True)
class ElasticBCE(DotBCE):
    """Dot-product logits on item rows merged with the server's: item + ρ·(sent − item), ρ = adapter MLP of [item, sent − item].

    Two steps a batch: first the adapter, then user and items.
    """

    adapter: str = "adapter"
    sizes: tuple[int, ...] = ()
    lr_adapter: float = 0.1

    def trained(self, clients: Clients, touched: np.ndarray) -> np.ndarray:
        assert clients.adapter is not None
        return super().trained(clients, touched) + clients.adapter.shape[1]


@dataclass(frozen=True)
class NeuMFBCE(DotBCE):
    """logit = head · [user ∘ item, MLP([user', item'])] + bias, a row holding both embeddings side by side; AdamW, clipped gradient."""

    mlp: str = "mlp"
    head: str = "head"
    kept: str = "kept"
    """a number that no sample touches, if the client holds one"""
    layers: tuple[int, ...] = ()
    weight_decay: float = 0.0
    clip: float = 0.0


@dataclass(frozen=True)
class BiasedMSE(DotBCE):
    """rating of item i = mean + both biases (the last number of a vector) + user · items[i]; squared error and a penalty on both vectors.

    Two gradient steps a batch: first the user, then items and mean. A label that is not a number is what the model predicts as the round
    begins. The server sends the share of the learning rate that is left.
    """

    penalty: float = 0.0
    summed: bool = False
    """a step takes the gradient of the sum over the batch, not of the mean"""
    mean: str = "mean"
    before: str = "before"
    rate: str = "rate"


@dataclass(frozen=True)
class BiasedBCE(DotBCE):
    """logit of item i = mean + both biases + user · items[i]; the mean is not trained; one Adam step a batch on user and items."""

    mean: str = "mean"


IN_BLOCKS = (NeuMFBCE, BiasedMSE, BiasedBCE)
"""kernel models that work on blocks of clients; the others' train them where their state lies"""


@njit
def _paces(steps: int) -> np.ndarray:
    """[steps, 2]: Adam's corrections of every step, for a learning rate of 1."""
    paces = np.empty((steps, 2))
    for t in range(steps):
        paces[t, 0], paces[t, 1] = _rates(t + 1, 1.0)
    return paces


@njit(inline="always")
def _corrections(step: int, lr: float) -> tuple[float, float]:
    """What a step of Adam (from 1) multiplies the first moment by, and the second one's root.

    Kernels keep moments without their factors 1 - b1 and 1 - b2, a product less for each number and step: those factors are in here, beside
    the corrections 1 / (1 - b1^step) and 1 / sqrt(1 - b2^step).
    """
    return lr * (1 - BETA1) / (1 - BETA1**step), math.sqrt((1 - BETA2) / (1 - BETA2**step))


@njit(inline="always")
def _rates(step: int, lr: float) -> tuple[float, float]:
    """Adam's corrections (a, b) folded such that a step is a · first moment / (root of the second + b): one product less a number."""
    rate, root = _corrections(step, lr)
    return rate / root, EPSILON / root


@compiled(inline="always")
def _moments(first: np.ndarray, second: np.ndarray, at: int, g: float, tiny: float) -> tuple[float, float]:
    """Adam's moments of the lanes at `at` after a gradient, without the factors that are in _corrections."""
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
def _steps(
    first: np.ndarray, second: np.ndarray, at: int, g0: float, g1: float, pace: tuple[float, float], tiny: float
) -> tuple[float, float]:
    """How far Adam moves the lanes at `at` and the ones after them."""
    m0, v0 = _moments(first, second, at, g0, tiny)
    m1, v1 = _moments(first, second, at + WIDTH, g1, tiny)
    return _quotients(m0, square_root(v0), m1, square_root(v1), pace)


@compiled(inline="always")
def _first_steps(
    first: np.ndarray, second: np.ndarray, at: int, g0: float, g1: float, pace: tuple[float, float], tiny: float
) -> tuple[float, float]:
    """How far Adam's first step moves the lanes: there are no moments yet, so the root of the second is the gradient without its sign."""
    put(first, at, g0)
    put(first, at + WIDTH, g1)
    put(second, at, g0 * g0 + tiny * tiny)
    put(second, at + WIDTH, g1 * g1 + tiny * tiny)
    return _quotients(g0, magnitude(g0), g1, magnitude(g1), pace)


@compiled(inline="always")
def _adamw(
    param: np.ndarray,
    grad: np.ndarray,
    first: np.ndarray,
    second: np.ndarray,
    rates: tuple[float, float],
    decay: float,
    slope: float,
    tiny: float,
) -> None:
    """One AdamW step over flat arrays, in place, along slope·grad; constants in the arrays' type: a float64 would halve the speed."""
    kind = param.dtype.type
    pace, b1, b2 = (kind(rates[0]), kind(rates[1])), kind(BETA1), kind(BETA2)
    pairs, lanes = param.size // (2 * WIDTH) * (2 * WIDTH), param.size // WIDTH * WIDTH
    for at in range(0, pairs, 2 * WIDTH):
        x0, x1 = _steps(first, second, at, slope * take(grad, at), slope * take(grad, at + WIDTH), pace, tiny)
        put(param, at, decay * take(param, at) - x0)
        put(param, at + WIDTH, decay * take(param, at + WIDTH) - x1)
    for at in range(pairs, lanes, WIDTH):
        m, v = _moments(first, second, at, slope * take(grad, at), tiny)
        put(param, at, decay * take(param, at) - pace[0] * m / (square_root(v) + pace[1]))
    for i in range(lanes, param.size):
        g = slope * grad[i]
        first[i] = b1 * first[i] + g
        second[i] = b2 * second[i] + (g * g + tiny * tiny)
        param[i] = decay * param[i] - pace[0] * first[i] / (np.sqrt(second[i]) + pace[1])


@compiled(inline="always")
def _adam(param: np.ndarray, grad: np.ndarray, first: np.ndarray, second: np.ndarray, rates: tuple[float, float], tiny: float) -> None:
    """One Adam step over flat arrays, in place."""
    one = param.dtype.type(1)
    _adamw(param, grad, first, second, rates, one, one, tiny)


@compiled(inline="always")
def _settled(total: float, seen: int, before: float, tolerance: float, epoch: int) -> tuple[float, bool]:
    """Running mean loss, and whether it hardly changed since the epoch before."""
    mean = total / seen
    return mean, epoch > 0 and abs(mean - before) / abs(before + 1e-5) < tolerance


@compiled(inline="always")
def _slope(x: float, tail: float, pos: float, neg: float, share: float, one: float) -> tuple[float, float]:
    """A logit with pos samples of label 1 and neg of label 0: share times the slope of their cross-entropy, and that. Numbers or Lanes.

    tail: exp(-|x|)
    """
    zero = one - one
    large = one / (one + tail)
    small = tail * large
    error = share * (neg * pick(x, zero, large, small) - pos * pick(x, zero, small, large))
    return error, magnitude(x) * pick(x, zero, neg, pos) + (pos + neg) * log_one_plus(tail)


@compiled()
def _slopes(logit: np.ndarray, pos: np.ndarray, neg: np.ndarray, n: int, share: float, error: np.ndarray) -> float:
    """_slope of n logits; returns the sum of cross-entropies."""
    kind = logit.dtype.type
    summed = kind(0)
    for s in range(n):
        error[s], value = _slope(logit[s], exp_minus(abs(logit[s])), pos[s], neg[s], share, kind(1))
        summed += value
    return summed


@compiled(forceinline=True)
def _dot_step(
    rows: Moving,
    person: Moving,
    pos: np.ndarray,
    neg: np.ndarray,
    share: float,
    rates: tuple[float, float],
    fresh: bool,
    tiny: float,
    slopes: np.ndarray,
    tails: np.ndarray,
    gp: np.ndarray,
    row_negatives: bool,
    trains_user: bool,
) -> float:
    """One batch of a client: an Adam step of its rows, WIDTH of them side by side, and its vector [d]; returns the summed loss.

    If the step is `fresh`, rows have no moments before. Without `row_negatives` samples of label 0 have no part in the rows' gradient.
    """
    q, first, second = rows
    p, first_p, second_p = person
    d, kind = p.size, p.dtype.type
    pace, zero = (kind(rates[0]), kind(rates[1])), kind(0)
    loss = spread(zero)
    four, by = 4 * WIDTH, d * WIDTH
    for s in range(0, pos.size - four + 1, four):  # four sums at a time: one alone would wait for each of its products
        a, b, c, e = spread(zero), spread(zero), spread(zero), spread(zero)
        for j in range(d):
            factor, at = repeat(p, j), s * d + j * WIDTH
            a = a + factor * take(q, at)
            b = b + factor * take(q, at + by)
            c = c + factor * take(q, at + 2 * by)
            e = e + factor * take(q, at + 3 * by)
        put(slopes, s, a)
        put(slopes, s + WIDTH, b)
        put(slopes, s + 2 * WIDTH, c)
        put(slopes, s + 3 * WIDTH, e)
    for s in range(pos.size // four * four, pos.size, WIDTH):
        put(slopes, s, mixed(spread(zero), q, s * d, d, p, 0, 1))
    for s in range(0, pos.size, WIDTH):  # a loop of its own: what a number waits for is short, and more of them are under way at a time
        put(tails, s, exp_minus(magnitude(take(slopes, s))))
    for s in range(0, pos.size, WIDTH):
        error, value = _slope(take(slopes, s), take(tails, s), take(pos, s), take(neg, s), share, kind(1))
        of_rows = error
        if not row_negatives:
            of_rows, _ = _slope(take(slopes, s), take(tails, s), take(pos, s), spread(zero), share, kind(1))
        put(slopes, s, error)
        put(tails, s, of_rows)
        loss = loss + value
    if trains_user:
        gp[:] = zero
        products(slopes, 0, WIDTH, 1, q, 0, by, d, gp, 0, pos.size // WIDTH, slopes)
    for s in range(0, pos.size, WIDTH):
        error, at = take(tails, s), s * d
        if fresh:
            for j in range(0, d - 1, 2):
                y = at + j * WIDTH
                x0, x1 = _first_steps(first, second, y, repeat(p, j) * error, repeat(p, j + 1) * error, pace, tiny)
                put(q, y, take(q, y) - x0)
                put(q, y + WIDTH, take(q, y + WIDTH) - x1)
        else:
            for j in range(0, d - 1, 2):
                y = at + j * WIDTH
                x0, x1 = _steps(first, second, y, repeat(p, j) * error, repeat(p, j + 1) * error, pace, tiny)
                put(q, y, take(q, y) - x0)
                put(q, y + WIDTH, take(q, y + WIDTH) - x1)
        if d % 2:
            y = at + (d - 1) * WIDTH
            if fresh:
                put(first, y, spread(zero))
                put(second, y, spread(zero))
            m, v = _moments(first, second, y, repeat(p, d - 1) * error, tiny)
            put(q, y, take(q, y) - pace[0] * m / (square_root(v) + pace[1]))
    if trains_user:
        _adam(p, gp, first_p, second_p, rates, tiny)
    return across(loss)


@compiled(inline="always")
def _less(x: np.ndarray, at: int, by: int, n: int, out: np.ndarray) -> None:
    """out[at + i] = x[at + i] - x[by + i] for i < n."""
    for i in range(0, n - WIDTH + 1, WIDTH):
        put(out, at + i, take(x, at + i) - take(x, by + i))
    for i in range(n // WIDTH * WIDTH, n):
        out[at + i] = x[at + i] - x[by + i]


@compiled()
def _see(w: np.ndarray, sizes: np.ndarray, seen: np.ndarray) -> None:
    """Numbers of a network that gives for [own, sent] what w gives for [own, sent - own]: no row has to be subtracted from another."""
    d = sizes[0] // 2
    copy(w, 0, seen, 0, w.size)
    for at in range(0, sizes[0] * sizes[1], 2 * d):
        _less(w, at, at + d, d, seen)


@compiled(forceinline=True)
def _elastic_step(
    acts: np.ndarray,
    delta: np.ndarray,
    base: np.ndarray,
    fresh: bool,
    person: Moving,
    adapter: Moving,
    sizes: np.ndarray,
    pos: np.ndarray,
    neg: np.ndarray,
    blocks: int,
    share: float,
    rates: tuple[float, float],
    rates_adapter: tuple[float, float],
    tiny: float,
    room: tuple[np.ndarray, ...],
    awake: np.ndarray,
    many: np.ndarray,
    row_negatives: bool,
    trains_user: bool,
) -> float:
    """One batch of a client over blocks of its rows, own and sent side by side in `acts`: a step of the adapter, then of p [d].

    The first features of `delta` become the gradient of its own rows; returns the summed loss. base: what bias and the server's rows add to
    the first layer: the adapter's second step leaves it as the next batch's first one needs it, unless the rows are `fresh`. room: for what
    `_see` makes, p · own and p · (sent - own), which both steps need, slopes, p's gradient and the adapter's, and for `products`.
    """
    p, first_p, second_p = person
    w, first_w, second_w = adapter
    d, hidden, kind = p.size, sizes[1], p.dtype.type
    by, last, one, zero = sizes.sum() * WIDTH, (sizes.sum() - 1) * WIDTH, kind(1), kind(0)
    seen, mine, change, slopes, gp, gw, nothing, ones, spare = room
    loss = spread(zero)
    gp[:], gw[:] = zero, zero
    for phase in range(2):
        if fresh or phase == 1:
            _see(w, sizes, seen)
            mix_all(acts, d * WIDTH, by, d, base, 0, hidden * WIDTH, hidden, seen, 2 * d * hidden, 0, seen, d, 2 * d, 1, blocks)
        mix_onto_positive(acts, 0, by, d, acts, 2 * d * WIDTH, by, hidden, base, 0, hidden * WIDTH, seen, 0, 2 * d, 1, blocks)
        forward(seen, sizes, acts, blocks, 1, True)
        find_awake(sizes, acts, ones, blocks, spare, awake, many)
        for b in range(blocks):
            x, s = b * by, b * WIDTH
            if phase == 0:
                ours = mixed(spread(zero), acts, x, d, p, 0, 1)
                put(mine, s, ours)
                put(change, s, mixed(spread(zero), acts, x + d * WIDTH, d, p, 0, 1) - ours)
            rho, moved = take(acts, x + last), take(change, s)
            logit = take(mine, s) + rho * moved
            tail = exp_minus(magnitude(logit))
            error, value = _slope(logit, tail, take(pos, s), take(neg, s), share, one)
            if phase == 1:
                put(slopes, 2 * s, error - error * rho)
                put(slopes, 2 * s + WIDTH, error * rho)
                loss = loss + value
                if not row_negatives:  # what goes back from here on ends in the own rows alone
                    error, _ = _slope(logit, tail, take(pos, s), spread(zero), share, one)
            top = error * moved * rho * (one - rho)
            put(delta, x + last, pick(magnitude(top), tiny, top, spread(zero)))
            if phase == 1:
                rest = error - error * rho
                for j in range(d):
                    put(delta, x + j * WIDTH, repeat(p, j) * rest)
        backward(seen, sizes, acts, delta, nothing, blocks, d * phase, awake, many)
        if phase == 0:
            gradient(sizes, acts, delta, gw, ones, blocks, spare, awake, many)
            for at in range(0, sizes[0] * sizes[1], 2 * d):  # from slopes of `seen` to those of w: weights of the change are in both halves
                _less(gw, at + d, at, d, gw)
            _adam(w, gw, first_w, second_w, rates_adapter, tiny)
    if trains_user:
        for half in range(2):
            products(slopes, half * WIDTH, 2 * WIDTH, 1, acts, half * d * WIDTH, by, d, gp, 0, blocks, spare)
        _adam(p, gp, first_p, second_p, rates, tiny)
    return across(loss)


@compiled()
def _codes(local: np.ndarray, label: np.ndarray, half: int) -> np.ndarray:
    """Where each sample is counted: at its row, those of label 0 in the second half."""
    codes = np.empty(local.size, np.int32)
    for s in range(local.size):
        codes[s] = local[s] + (label[s] <= 0) * half
    return codes


@compiled()
def _count(codes: np.ndarray, counts: np.ndarray) -> None:
    """How many samples of label 1, and then how many of label 0, each row has in a batch."""
    counts[:] = 0
    for s in range(codes.size):
        counts[np.uint32(codes[s])] += counts.dtype.type(1)  # unsigned: no check for what counts from the end


@njit
def _room(t: int, d: int, batch: int, sizes: np.ndarray, adapter: int) -> int:
    """How many numbers the merging and training of a client with t rows needs room for."""
    most, features = padded(min(t, batch)), sizes.sum()
    of_client = (4 * d + 2) * padded(t) + 3 * padded(d) + 4 * padded(adapter) + padded(features) + WIDTH
    of_batch = (2 * features + sizes[1] + 6 + WIDTH) * most + 2 * SQUARE
    return max(of_client + of_batch, features * TILE + padded(adapter))


@compiled()
def _train_dot(
    key: np.uint64,
    local: np.ndarray,
    label: np.ndarray,
    row: np.ndarray,
    table: np.ndarray,
    p: np.ndarray,
    epochs: int,
    batch: int,
    lr: float,
    paces: np.ndarray,
    tolerance: float,
    tiny: float,
    change: np.ndarray,
    room: np.ndarray,
    later: np.ndarray,
    theirs: np.ndarray,
    row_negatives: bool,
    trains_user: bool,
) -> tuple[float, int]:
    """All local steps of one client on the rows of `table` that it touches; p is trained in place.

    The trained rows go back to the table, or, if `change` has room, how they changed goes there. Returns running mean loss and steps.
    Within a step a row is looked at once however many samples use it; WIDTH rows lie side by side, a number of each next to the others'.
    later, theirs: the next client's table and rows, of which every step has a portion fetched.
    """
    n, t, d, kind = local.size, row.size, p.size, p.dtype.type
    width = padded(t)
    q, at = part(room, 0, d * width)
    first, at = part(room, at, d * width)
    second, at = part(room, at, d * width)
    counts, at = part(room, at, 2 * width)
    slopes, at = part(room, at, width)
    tails, at = part(room, at, width)
    first_p, at = part(room, at, d)
    second_p, at = part(room, at, d)
    gp, at = part(room, at, d)
    first_p[:], second_p[:] = 0, 0
    rows, person, pos, neg = (q, first, second), (p, first_p, second_p), counts[:width], counts[width:]
    take_rows(table, row, q, 0, d * WIDTH)
    codes = _codes(local, label, width)
    order = codes.copy() if n > batch else codes
    portion = -(-theirs.size // max(1, epochs * -(-n // batch)))
    step, summed, seen, mean = 0, 0.0, 0, 0.0
    for epoch in range(epochs):
        if n > batch:
            for s in range(n):
                order[s] = codes[s]
            permute(order, key, epoch, batch)
        for start in range(0, n, batch):
            stop = min(start + batch, n)
            if n > batch or epoch == 0:
                _count(order[start:stop], counts)
            rates = lr * paces[step, 0], paces[step, 1]
            fetch(later, theirs[step * portion : (step + 1) * portion])
            summed += _dot_step(rows, person, pos, neg, kind(1 / (stop - start)), rates, step == 0, tiny, slopes, tails, gp,
                                row_negatives, trains_user)  # fmt: skip
            step += 1
            seen += stop - start
        mean, settled = _settled(summed, seen, mean, tolerance, epoch)
        if settled:
            break
    if len(change):
        take_rows(table, row, first, 0, d * WIDTH)
        for y in range(0, d * width, WIDTH):
            put(q, y, take(q, y) - take(first, y))
        give_rows(q, d * WIDTH, np.arange(t), change)
    else:
        give_rows(q, d * WIDTH, row, table)
    return mean, step


@compiled()
def _train_elastic(
    key: np.uint64,
    local: np.ndarray,
    label: np.ndarray,
    row: np.ndarray,
    table: np.ndarray,
    p: np.ndarray,
    sent: np.ndarray,
    w: np.ndarray,
    sizes: np.ndarray,
    epochs: int,
    batch: int,
    lr: float,
    lr_adapter: float,
    paces: np.ndarray,
    tolerance: float,
    tiny: float,
    room: np.ndarray,
    row_negatives: bool,
    trains_user: bool,
) -> tuple[float, int]:
    """Train one client whose rows every step merges with those of `sent`; p and w change in place, the rows go back to the table.

    A client with one batch keeps its rows side by side in `acts`; of one with several, those of a batch are put there for a step.
    """
    n, t, d, features, kind = local.size, row.size, p.size, sizes.sum(), p.dtype.type
    cut, width, most, by = n > batch, padded(t), padded(min(t, batch)), features * WIDTH
    first, at = part(room, 0, d * width)
    second, at = part(room, at, d * width)
    first_p, at = part(room, at, d)
    second_p, at = part(room, at, d)
    first_w, at = part(room, at, w.size)
    second_w, at = part(room, at, w.size)
    nothing, at = part(room, at, features)
    ones, at = part(room, at, WIDTH)
    room[:at], ones[:] = 0, 1
    q, at = part(room, at, d * width)
    gq, at = part(room, at, d * width)
    counts, at = part(room, at, 2 * width)
    some, at = part(room, at, 2 * most)
    mine, at = part(room, at, most)
    change, at = part(room, at, most)
    slopes, at = part(room, at, 2 * most)
    gp, at = part(room, at, d)
    seen_w, at = part(room, at, w.size)
    gw, at = part(room, at, w.size)
    acts, at = part(room, at, features * most)
    delta, at = part(room, at, features * most)
    base, at = part(room, at, sizes[1] * most)
    spare, at = part(room, at, WIDTH * most + 2 * SQUARE)
    person, adapter = (p, first_p, second_p), (w, first_w, second_w)
    rest = seen_w, mine, change, slopes, gp, gw, nothing, ones, spare
    pos, neg = (some[:most], some[most:]) if cut else (counts[:width], counts[width:])
    whole, lying, slope = table.reshape(-1), q[: t * d].reshape(t, d), gq[: t * d].reshape(t, d)
    used, which, codes = np.empty(t + 1, np.int64), np.empty(t + 1, np.int64), _codes(local, label, width)
    order, awake, many = codes.copy(), np.empty(features, np.int64), np.empty(sizes.size, np.int64)
    everybody(sizes, awake, many)
    if cut:
        for i in range(t):
            copy(whole, row[i] * d, q, i * d, d)
    else:
        take_rows(table, row, acts, 0, by)
        take_rows(sent, row, acts, d * WIDTH, by)
    step, summed, seen, mean, blocks = 0, 0.0, 0, 0.0, width // WIDTH
    for epoch in range(epochs):
        if cut:
            for s in range(n):
                order[s] = codes[s]
            permute(order, key, epoch, batch)
        for start in range(0, n, batch):
            stop, k = min(start + batch, n), 0
            if cut or epoch == 0:
                _count(order[start:stop], counts)
            if cut:
                some[:] = 0
                for i in range(t):  # a row that is not in the batch is written over by the next
                    used[k], which[k] = i, row[i]
                    k += counts[i] + counts[width + i] > 0
                for i in range(k):
                    pos[i], neg[i] = counts[used[i]], counts[width + used[i]]
                take_rows(lying, used[:k], acts, 0, by)
                take_rows(sent, which[:k], acts, d * WIDTH, by)
                blocks = padded(k) // WIDTH
            rates, rates_w = (lr * paces[step, 0], paces[step, 1]), (lr_adapter * paces[step, 0], paces[step, 1])
            summed += _elastic_step(acts, delta, base, cut or step == 0, person, adapter, sizes, pos, neg, blocks, kind(1 / (stop - start)),
                                    rates, rates_w, tiny, rest, awake, many, row_negatives, trains_user)  # fmt: skip
            if cut:
                gq[:] = 0
                give_rows(delta, by, used[:k], slope)
                _adam(q, gq, first, second, rates, tiny)
            else:
                for b in range(blocks):
                    here, x = slice(b * by, b * by + d * WIDTH), slice(b * d * WIDTH, (b + 1) * d * WIDTH)
                    _adam(acts[here], delta[here], first[x], second[x], rates, tiny)
            step += 1
            seen += stop - start
        mean, settled = _settled(summed, seen, mean, tolerance, epoch)
        if settled:
            break
    if cut:
        for i in range(t):
            copy(q, i * d, whole, row[i] * d, d)
    else:
        give_rows(acts, by, row, table)
    return mean, step


@compiled()
def _merge_weights_of(item: np.ndarray, table: np.ndarray, sent: np.ndarray, seen: np.ndarray, sizes: np.ndarray, acts: np.ndarray) -> None:
    """Fill acts with [own, sent] of these items, TILE of them at most, and all layers; blocks of it end with rho."""
    take_rows(table, item, acts, 0, sizes.sum() * WIDTH)
    take_rows(sent, item, acts, table.shape[1] * WIDTH, sizes.sum() * WIDTH)
    forward(seen, sizes, acts, padded(item.size) // WIDTH, 0, True)


@compiled()
def _merge(table: np.ndarray, sent: np.ndarray, everything: np.ndarray, w: np.ndarray, sizes: np.ndarray, room: np.ndarray) -> None:
    """Every row of a client's table moves towards the same of `sent`, as far as its adapter w says."""
    d, by = table.shape[1], sizes.sum() * WIDTH
    acts, at = part(room, 0, sizes.sum() * TILE)
    seen, at = part(room, at, w.size)
    own, other = table.reshape(-1), sent.reshape(-1)
    _see(w, sizes, seen)
    for start in range(0, everything.size, TILE):
        item = everything[start : start + TILE]
        _merge_weights_of(item, table, sent, seen, sizes, acts)
        for first in range(0, item.size, WIDTH):
            rho, at = (first // WIDTH + 1) * by - WIDTH, (start + first) * d
            for s in range(min(WIDTH, item.size - first)):
                prefetch(own, at + TILE * d)  # for the next rows, if there are any: what lies elsewhere is not fetched, and nothing fails
                prefetch(other, at + TILE * d)
                for y in range(at, at + d - WIDTH + 1, WIDTH):
                    put(own, y, take(own, y) + repeat(acts, rho + s) * (take(other, y) - take(own, y)))
                for y in range(at + d // WIDTH * WIDTH, at + d):
                    own[y] += acts[rho + s] * (other[y] - own[y])
                at += d


@compiled(nogil=True, cache=True)
def train_rows(
    low: int,
    high: int,
    stream: np.ndarray,
    begin: np.ndarray,
    count: np.ndarray,
    local: np.ndarray,
    label: np.ndarray,
    row_begin: np.ndarray,
    touched: np.ndarray,
    row: np.ndarray,
    tables: np.ndarray,
    place: np.ndarray,
    user: np.ndarray,
    who: np.ndarray,
    epochs: int,
    batch: int,
    lr: float,
    tolerance: float,
    tiny: float,
    row_negatives: bool,
    trains_user: bool,
    change: np.ndarray,
    loss: np.ndarray,
    steps: np.ndarray,
) -> None:
    """Local training of clients from low up to high: their samples and touched rows lie one after another from begin[c], row_begin[c] on.

    Client c trains the rows of tables[place[c]] and user[who[c]]. Tables are trained in place, or `change` [R, d] takes how each touched
    row changed and they stay as they are.
    """
    d, paces = user.shape[1], _paces(epochs * -(-count[low:high].max() // batch))
    need = (3 * d + 4) * padded(touched[low:high].max()) + 3 * padded(d)
    room = zeros(need, user)
    for c in range(low, high):
        mine, rows = slice(begin[c], begin[c] + count[c]), slice(row_begin[c], row_begin[c] + touched[c])
        later = min(c + 1, high - 1)
        theirs = row[row_begin[later] : row_begin[later] + touched[later]]
        if count[c]:
            loss[c], steps[c] = _train_dot(
                stream[c], local[mine], label[mine], row[rows], tables[place[c]], user[who[c]], epochs, batch, lr, paces, tolerance,
                tiny, change[rows] if len(change) else change, room, tables[place[later]], theirs, row_negatives, trains_user)  # fmt: skip


@compiled(nogil=True, cache=True)
def train_elastic_rows(
    low: int,
    high: int,
    stream: np.ndarray,
    begin: np.ndarray,
    count: np.ndarray,
    local: np.ndarray,
    label: np.ndarray,
    row_begin: np.ndarray,
    touched: np.ndarray,
    row: np.ndarray,
    tables: np.ndarray,
    place: np.ndarray,
    user: np.ndarray,
    who: np.ndarray,
    sent: np.ndarray,
    slot: np.ndarray,
    adapter: np.ndarray,
    sizes: np.ndarray,
    epochs: int,
    batch: int,
    lr: float,
    lr_adapter: float,
    tolerance: float,
    tiny: float,
    row_negatives: bool,
    trains_user: bool,
    merges: bool,
    loss: np.ndarray,
    steps: np.ndarray,
) -> None:
    """Train clients low to high where their tables lie, with sent[slot[c]] merged in; adapter[who[c]] is trained too.

    If a client `merges`, all rows of its table are merged with those of sent[slot[c]] before: so they are in the cache for its training.
    """
    paces = _paces(epochs * -(-count[low:high].max() // batch))
    need = _room(touched[low:high].max(), user.shape[1], batch, sizes, adapter.shape[1])
    everything = np.arange(tables.shape[1], dtype=np.int32)
    room = zeros(need, user)
    for c in range(low, high):
        mine, rows = slice(begin[c], begin[c] + count[c]), slice(row_begin[c], row_begin[c] + touched[c])
        if merges:
            _merge(tables[place[c]], sent[slot[c]], everything, adapter[who[c]], sizes, room)
        if count[c]:
            loss[c], steps[c] = _train_elastic(
                stream[c], local[mine], label[mine], row[rows], tables[place[c]], user[who[c]], sent[slot[c]], adapter[who[c]], sizes,
                epochs, batch, lr, lr_adapter, paces, tolerance, tiny, room, row_negatives, trains_user)  # fmt: skip


@compiled(nogil=True, cache=True)
def score_rows(
    low: int,
    high: int,
    tables: np.ndarray,
    place: np.ndarray,
    user: np.ndarray,
    who: np.ndarray,
    sent: np.ndarray,
    slot: np.ndarray,
    adapter: np.ndarray,
    sizes: np.ndarray,
    items: np.ndarray,
    out: np.ndarray,
) -> None:
    """out [C, K]: user[who[c]] · the rows items[c] (or items[0] for all) of tables[place[c]], merged with sent[slot[c]] if that is >= 0."""
    kind = tables.dtype.type
    d = user.shape[1]
    for c in range(low, high):
        table, p, item = tables[place[c]], user[who[c]], items[c % len(items)]
        if len(items) > 1:
            fetch(table, item)
        for s in range(item.size):
            i, logit = item[s], kind(0)
            for j in range(d):
                logit += p[j] * table[i, j]
            out[c, s] = logit
        if slot[c] >= 0:
            acts, seen, change = zeros(sizes.sum() * TILE, tables), zeros(adapter.shape[1], tables), zeros(TILE, tables)
            _see(adapter[who[c]], sizes, seen)
            for start in range(0, item.size, TILE):
                some, x = item[start : start + TILE], 0
                _merge_weights_of(some, table, sent[slot[c]], seen, sizes, acts)
                for s in range(0, some.size, WIDTH):
                    theirs = mixed(spread(kind(0)), acts, x + d * WIDTH, d, p, 0, 1)
                    theirs = theirs - mixed(spread(kind(0)), acts, x, d, p, 0, 1)
                    x += sizes.sum() * WIDTH
                    put(change, s, take(acts, x - WIDTH) * theirs)
                for s in range(some.size):
                    out[c, start + s] += change[s]


@compiled()
def _catch_up(
    param: np.ndarray,
    first: np.ndarray,
    second: np.ndarray,
    since: int,
    now: int,
    fade: np.ndarray,
    rates: np.ndarray,
    roots: np.ndarray,
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
    steps = now - since
    if steps == 0:
        return
    terms = min(steps, share.size - 3)
    for k in range(terms):
        share[k] = rates[since + k] * fade[0, k + 1] * fade[2, steps - 1 - k]
        scale[k] = roots[since + k] * fade[1, k + 1]
    while terms % 4:
        share[terms] = zero
        scale[terms] = one
        terms += 1
    wide = param.size
    for i in range(wide):
        box[i] = np.sqrt(second[i])
        box[wide + i] = zero
    for k in range(0, terms, 4):
        c0, c1, c2, c3 = share[k], share[k + 1], share[k + 2], share[k + 3]
        r0, r1, r2, r3 = scale[k], scale[k + 1], scale[k + 2], scale[k + 3]
        for i in range(wide):
            x0, x1, x2, x3 = box[i] * r0 + eps, box[i] * r1 + eps, box[i] * r2 + eps, box[i] * r3 + eps
            left, right = x0 * x1, x2 * x3
            box[wide + i] += ((c0 * x1 + c1 * x0) * right + (c2 * x3 + c3 * x2) * left) / (left * right)
    decayed, first_left = fade[2, steps], fade[0, steps]
    second_left = fade[1, steps] * fade[1, steps]
    for i in range(wide):
        param[i] = decayed * param[i] - first[i] * box[wide + i]
        first[i] *= first_left
        second[i] *= second_left


@compiled(nogil=True, cache=True)
def train_neumf(
    low: int,
    high: int,
    stream: np.ndarray,
    local: np.ndarray,
    label: np.ndarray,
    count: np.ndarray,
    touched: np.ndarray,
    user: np.ndarray,
    rows: np.ndarray,
    mlp: np.ndarray,
    head: np.ndarray,
    sizes: np.ndarray,
    epochs: int,
    batch: int,
    lr: float,
    weight_decay: float,
    clip: float,
    tolerance: float,
    tiny: float,
    loss: np.ndarray,
    steps: np.ndarray,
) -> None:
    """As train_rows for NeuMF, on blocks: user [C, w], rows [C, T, w], mlp [C, A] and head [C, d + h + 1] are trained in place.

    Two savings, both exact. The user's half of the MLP's input is the same for all samples of a batch: it enters the first layer as a
    bias, so `sizes` starts with the item's half. And a row that a batch does not touch takes its steps later, when it is needed.
    """
    kind = user.dtype.type
    one, zero = kind(1), kind(0)
    decay = kind(1 - lr * weight_decay)
    half, hidden, deep = sizes[0], sizes[1], sizes[-1]
    wide = user.shape[1]
    d = wide - half
    layers = sizes.sum()
    by, top = layers * WIDTH, (layers - deep) * WIDTH
    longest = epochs * -(-max(count[low:high].max(), 1) // batch)
    rates, roots = np.empty(longest, user.dtype), np.empty(longest, user.dtype)
    for t in range(longest):
        rates[t], roots[t] = _corrections(t + 1, lr)
    fade = np.empty((3, longest + 1), user.dtype)
    for t in range(longest + 1):
        fade[0, t], fade[1, t], fade[2, t] = BETA1**t, BETA2 ** (t / 2), (1 - lr * weight_decay) ** t
    awake, many = np.empty(layers, np.int64), np.empty(sizes.size, np.int64)
    everybody(sizes, awake, many)
    for c in range(low, high):
        n, t = count[c], touched[c]
        if n == 0:
            continue
        p, q, w, h = user[c], rows[c], mlp[c], head[c]
        order = np.empty(n, np.int64)
        mq, vq, gq = np.empty((t, wide), user.dtype), np.empty((t, wide), user.dtype), np.empty((t, wide), user.dtype)
        mp, vp, gp = np.zeros(wide, user.dtype), np.zeros(wide, user.dtype), np.empty(wide, user.dtype)
        mw, vw, gw = np.zeros(w.size, user.dtype), np.zeros(w.size, user.dtype), np.empty(w.size, user.dtype)
        mh, vh, gh = np.zeros(h.size, user.dtype), np.zeros(h.size, user.dtype), np.empty(h.size, user.dtype)
        gmf, acts, delta = zeros(d * TILE, user), zeros(layers * TILE, user), zeros(layers * TILE, user)
        ones, spare = np.ones(WIDTH, user.dtype), zeros((TILE // WIDTH + 2) * SQUARE, user)
        small, gsmall = np.empty(w.size - hidden * half, user.dtype), np.empty(w.size - hidden * half, user.dtype)
        error, pos, neg = zeros(TILE, user), zeros(TILE, user), zeros(TILE, user)
        box = np.empty(2 * wide, user.dtype)
        terms = min(longest, FORGET[0] if user.itemsize == 4 else FORGET[1]) + 3
        share_at, scale_at = np.empty(terms, user.dtype), np.empty(terms, user.dtype)
        both, sums, nothing = np.empty(d, user.dtype), np.empty(d, user.dtype), np.zeros(layers, user.dtype)
        moved_at, in_batch, distinct = np.full(t, -1), np.full(t, -1), np.empty(min(batch, n), np.int64)
        step, summed, seen, mean = 0, 0.0, 0, 0.0
        for epoch in range(epochs):
            shuffle(order, stream[c], epoch, batch)
            for start in range(0, n, batch):
                stop = min(start + batch, n)
                share = kind(1 / (stop - start))
                used = 0
                for s in range(start, stop):
                    i = local[c, order[s]]
                    if in_batch[i] != step:
                        in_batch[i] = step
                        distinct[used] = i
                        used += 1
                        gq[i] = zero
                        if moved_at[i] < 0:
                            mq[i] = zero
                            vq[i] = zero
                            q[i] *= fade[2, step]
                        else:
                            _catch_up(q[i], mq[i], vq[i], moved_at[i], step, fade, rates, roots, share_at, scale_at, box)
                        moved_at[i] = step + 1
                # the first layer's weights of the item's half; the user's half goes into its bias
                for o in range(hidden):
                    bias = w[hidden * 2 * half + o]
                    for j in range(half):
                        small[o * half + j] = w[o * 2 * half + half + j]
                    for j in range(half):
                        bias += w[o * 2 * half + j] * p[d + j]
                    small[hidden * half + o] = bias
                small[hidden * half + hidden :] = w[hidden * 2 * half + hidden :]
                for j in range(d):
                    both[j] = h[j] * p[j]
                sums[:], gh[:], gsmall[:] = zero, zero, zero
                for tile in range(start, stop, TILE):
                    b = min(TILE, stop - tile)
                    for s in range(b):
                        at = order[tile + s]
                        i = local[c, at]
                        pos[s], neg[s] = label[c, at], one - label[c, at]
                        first, second = s // WIDTH * d * WIDTH + s % WIDTH, s // WIDTH * by + s % WIDTH
                        for j in range(d):
                            gmf[first + j * WIDTH] = q[i, j]
                        for j in range(half):
                            acts[second + j * WIDTH] = q[i, d + j]
                    pos[b:], neg[b:] = zero, zero
                    blocks = padded(b) // WIDTH
                    forward(small, sizes, acts, blocks, 0, False)
                    for k in range(blocks):
                        x, s = k * by, k * WIDTH
                        logit = mixed(mixed(spread(h[d + deep]), gmf, s * d, d, both, 0, 1), acts, x + top, deep, h, d, 1)
                        slope, value = _slope(logit, exp_minus(magnitude(logit)), take(pos, s), take(neg, s), share, one)
                        put(error, s, slope)
                        summed += across(value)
                        gh[d + deep] += across(slope)
                        for o in range(half):
                            put(delta, x + o * WIDTH, spread(zero))
                        for o in range(deep):
                            at = x + top + o * WIDTH
                            put(delta, at, pick(take(acts, at), zero, slope * h[d + o], spread(zero)))
                    products(error, 0, WIDTH, 1, gmf, 0, d * WIDTH, d, sums, 0, blocks, spare)
                    products(error, 0, WIDTH, 1, acts, top, by, deep, gh, d, blocks, spare)
                    backward(small, sizes, acts, delta, nothing, blocks, half, awake, many)
                    gradient(sizes, acts, delta, gsmall, ones, blocks, spare, awake, many)
                    for s in range(b):
                        row, slope = gq[local[c, order[tile + s]]], error[s]
                        for j in range(d):
                            row[j] += slope * both[j]
                        for j in range(half):
                            row[d + j] += delta[s // WIDTH * by + j * WIDTH + s % WIDTH]
                for j in range(d):
                    gh[j] = p[j] * sums[j]
                    gp[j] = h[j] * sums[j]
                gp[d:] = zero
                for o in range(hidden):
                    slope = gsmall[hidden * half + o]
                    gw[hidden * 2 * half + o] = slope
                    for j in range(half):
                        gw[o * 2 * half + j] = slope * p[d + j]
                        gw[o * 2 * half + half + j] = gsmall[o * half + j]
                        gp[d + j] += slope * w[o * 2 * half + j]
                gw[hidden * 2 * half + hidden :] = gsmall[hidden * half + hidden :]
                scale = one
                if clip > 0:
                    square = (gp * gp).sum() + (gw * gw).sum() + (gh * gh).sum()
                    for r in range(used):
                        row = gq[distinct[r]]
                        for j in range(wide):
                            square += row[j] * row[j]
                    scale = min(one, kind(clip / (math.sqrt(square) + 1e-6)))
                pace = _rates(step + 1, lr)
                for r in range(used):
                    i = distinct[r]
                    _adamw(q[i], gq[i], mq[i], vq[i], pace, decay, scale, tiny)
                _adamw(p, gp, mp, vp, pace, decay, scale, tiny)
                _adamw(w, gw, mw, vw, pace, decay, scale, tiny)
                _adamw(h, gh, mh, vh, pace, decay, scale, tiny)
                step += 1
                seen += stop - start
            mean, settled = _settled(summed, seen, mean, tolerance, epoch)
            if settled:
                break
        for i in range(t):
            _catch_up(q[i], mq[i], vq[i], moved_at[i], step, fade, rates, roots, share_at, scale_at, box)
        loss[c] = mean
        steps[c] = step


@compiled(nogil=True, cache=True)
def score_neumf(
    low: int,
    high: int,
    base: np.ndarray,
    both: np.ndarray,
    first: np.ndarray,
    rows: np.ndarray,
    items: np.ndarray,
    sizes: np.ndarray,
    upper: np.ndarray,
    head: np.ndarray,
    out: np.ndarray,
) -> None:
    """out [C, K]: NeuMF's logits of items[c] (or items[0] for all), from what depends on the user or the item alone.

    The first layer's products are base [C, h] (of the user, bias included) and first [M, h] (of the items); both [C, d] is the user's
    row times the head, rows [M, d] the items' rows; `sizes` and `upper` are the layers above the first.
    """
    zero = base.dtype.type(0)
    d, hidden, deep, by = rows.shape[1], sizes[0], sizes[-1], sizes.sum() * WIDTH
    acts, theirs, gmf, logit = zeros(by * TILE // WIDTH, base), zeros(hidden * TILE, base), zeros(d * TILE, base), zeros(TILE, base)
    alike = high - low if len(items) == 1 else 1  # clients that have the same items scored: these are put side by side once
    for c in range(low, high, alike):
        mine = items[c % len(items)]
        for start in range(0, mine.size, TILE):
            some = mine[start : start + TILE]
            blocks = padded(some.size) // WIDTH
            if alike == 1:
                fetch(first, some)
                fetch(rows, some)
            take_rows(first, some, theirs, 0, hidden * WIDTH)
            take_rows(rows, some, gmf, 0, d * WIDTH)
            for who in range(c, c + alike):
                for b in range(blocks):
                    for o in range(hidden):
                        value = take(theirs, (b * hidden + o) * WIDTH) + repeat(base[who], o)
                        put(acts, b * by + o * WIDTH, pick(value, zero, value, spread(zero)))
                forward(upper, sizes, acts, blocks, 0, False)
                for b in range(blocks):
                    part = mixed(spread(head[d + deep]), gmf, b * d * WIDTH, d, both[who], 0, 1)
                    put(logit, b * WIDTH, mixed(part, acts, (b + 1) * by - deep * WIDTH, deep, head, d, 1))
                for s in range(some.size):
                    out[who, start + s] = logit[s]


@compiled(inline="always")
def _rating(user: np.ndarray, item: np.ndarray, mean: float) -> float:
    d = user.size - 1
    rating = mean + user[d] + item[d]
    for j in range(d):
        rating += user[j] * item[j]
    return rating


@compiled(nogil=True, cache=True)
def train_biased(
    low: int,
    high: int,
    stream: np.ndarray,
    local: np.ndarray,
    label: np.ndarray,
    count: np.ndarray,
    touched: np.ndarray,
    user: np.ndarray,
    rows: np.ndarray,
    mean: np.ndarray,
    before: np.ndarray,
    sent_rows: np.ndarray,
    sent_mean: np.ndarray,
    rate: np.ndarray,
    epochs: int,
    batch: int,
    lr: float,
    penalty: float,
    summed: bool,
    tolerance: float,
    loss: np.ndarray,
    steps: np.ndarray,
) -> None:
    """As `train_dot` for BiasedMSE, with mean [C] trained too. A client has one sample a row, so that a row can step at once."""
    d = user.shape[1] - 1
    kind = user.dtype.type
    shrink, half = kind(penalty), kind(0.5)
    for c in range(low, high):
        n = count[c]
        if n == 0:
            continue
        p, q = user[c], rows[c]
        order, target, gp = np.empty(n, np.int64), np.empty(n, user.dtype), np.empty(d + 1, user.dtype)
        for s in range(n):
            target[s] = label[c, s] if label[c, s] == label[c, s] else _rating(before[c], sent_rows[c, local[c, s]], sent_mean[c])
        step, total, seen, running = 0, 0.0, 0, 0.0
        for epoch in range(epochs):
            shuffle(order, stream[c], epoch, batch)
            for start in range(0, n, batch):
                stop = min(start + batch, n)
                size = kind(stop - start)
                pace = kind(lr) * rate[c] * (size if summed else kind(1))
                share = pace / size
                for j in range(d + 1):
                    gp[j] = size * shrink * p[j]
                for s in range(start, stop):
                    item = q[local[c, order[s]]]
                    error = _rating(p, item, mean[c]) - target[order[s]]
                    for j in range(d):
                        gp[j] += error * item[j]
                    gp[d] += error
                for j in range(d + 1):
                    p[j] -= share * gp[j]
                square, drift = kind(0), kind(0)
                for j in range(d + 1):
                    square += p[j] * p[j]
                for s in range(start, stop):
                    item = q[local[c, order[s]]]
                    error = _rating(p, item, mean[c]) - target[order[s]]
                    sizes = square
                    for j in range(d + 1):
                        sizes += item[j] * item[j]
                    for j in range(d + 1):
                        item[j] -= share * (error * (p[j] if j < d else kind(1)) + shrink * item[j])
                    total += half * (error * error + shrink * sizes)
                    drift += error
                mean[c] -= share * drift
                seen += stop - start
                step += 1
            running, settled = _settled(total, seen, running, tolerance, epoch)
            if settled:
                break
        loss[c] = running
        steps[c] = step


@compiled(nogil=True, cache=True)
def train_biased_bce(
    low: int,
    high: int,
    stream: np.ndarray,
    local: np.ndarray,
    label: np.ndarray,
    count: np.ndarray,
    touched: np.ndarray,
    user: np.ndarray,
    rows: np.ndarray,
    mean: np.ndarray,
    epochs: int,
    batch: int,
    lr: float,
    tolerance: float,
    tiny: float,
    loss: np.ndarray,
    steps: np.ndarray,
) -> None:
    """Train clients low to high of a BiasedBCE: samples may share a row, and every step moves all rows, as Adam's moments do."""
    d = user.shape[1] - 1
    for c in range(low, high):
        n, used = count[c], touched[c] * (d + 1)
        if n == 0:
            continue
        p, q, flat = user[c], rows[c], rows[c].reshape(-1)[:used]
        gp, gq = np.empty_like(p), np.empty(used, user.dtype)
        table = gq.reshape(-1, d + 1)
        moments, own = np.zeros((2, used), user.dtype), np.zeros((2, d + 1), user.dtype)
        logit, error = np.empty(min(batch, n), user.dtype), np.empty(min(batch, n), user.dtype)
        pos, neg, order = np.empty_like(logit), np.empty_like(logit), np.empty(n, np.int64)
        step, total, seen, running = 0, 0.0, 0, 0.0
        for epoch in range(epochs):
            shuffle(order, stream[c], epoch, batch)
            for start in range(0, n, batch):
                size = min(batch, n - start)
                for s in range(size):
                    one = order[start + s]
                    logit[s], pos[s], neg[s] = _rating(p, q[local[c, one]], mean[c]), label[c, one], 1 - label[c, one]
                total += _slopes(logit, pos, neg, size, user.dtype.type(1 / size), error)
                gp[:], gq[:] = 0, 0
                for s in range(size):
                    at = local[c, order[start + s]]
                    item, change, slope = q[at], table[at], error[s]
                    for j in range(d):
                        gp[j] += slope * item[j]
                        change[j] += slope * p[j]
                    gp[d] += slope
                    change[d] += slope
                step += 1
                rates = _rates(step, lr)
                _adam(p, gp, own[0], own[1], rates, tiny)
                _adam(flat, gq, moments[0], moments[1], rates, tiny)
                seen += size
            running, settled = _settled(total, seen, running, tolerance, epoch)
            if settled:
                break
        loss[c] = running
        steps[c] = step


@compiled(nogil=True, cache=True)
def train_pool(
    user: np.ndarray,
    item: np.ndarray,
    label: np.ndarray,
    users: np.ndarray,
    items: np.ndarray,
    first_users: np.ndarray,
    first_items: np.ndarray,
    second_users: np.ndarray,
    second_items: np.ndarray,
    step: int,
    batch: int,
    lr: float,
    l2: float,
    tiny: float,
) -> float:
    """One pass over pooled samples [S] of a dot product with BCE and an L2 penalty on a sample's rows; tables [U, d], [M, d] in place.

    Adam moves every row in every step, as torch.optim.Adam does; returns the mean BCE.
    """
    d = users.shape[1]
    kind = users.dtype.type
    one, zero = kind(1), kind(0)
    grad_users, grad_items = np.empty_like(users), np.empty_like(items)
    total = 0.0
    for start in range(0, label.size, batch):
        stop = min(start + batch, label.size)
        share = kind(1 / (stop - start))
        shrink = kind(2 * l2 / (stop - start))
        grad_users[:] = 0
        grad_items[:] = 0
        for s in range(start, stop):
            p, q, gp, gq = users[user[s]], items[item[s]], grad_users[user[s]], grad_items[item[s]]
            logit = zero
            for j in range(d):
                logit += p[j] * q[j]
            tail = exp_minus(abs(logit))
            sign = label[s] + label[s] - one
            total += max(-sign * logit, zero) + log_one_plus(tail)
            error = -share * sign * (tail if sign * logit > zero else one) / (one + tail)
            for j in range(d):
                gp[j] += error * q[j] + shrink * p[j]
                gq[j] += error * p[j] + shrink * q[j]
        step += 1
        rates = _rates(step, lr)
        _adam(users.reshape(-1), grad_users.reshape(-1), first_users.reshape(-1), second_users.reshape(-1), rates, tiny)
        _adam(items.reshape(-1), grad_items.reshape(-1), first_items.reshape(-1), second_items.reshape(-1), rates, tiny)
    return total / label.size


@dataclass(frozen=True)
class Clients:
    """Where C clients' state lies in whole arrays; what has an index is trained in place."""

    tables: np.ndarray
    """[X, M, d]"""
    place: np.ndarray
    """[C] each client's table in there"""
    user: np.ndarray
    """[Y, d]"""
    who: np.ndarray
    """[C] each client's vector in there, and its adapter"""
    sent: np.ndarray | None = None
    """[Z, M, d] the server's tables"""
    slot: np.ndarray | None = None
    """[C] each client's in there"""
    adapter: np.ndarray | None = None
    """[Y, A]"""

    def of(self, plan: DotBCE) -> tuple[np.ndarray, ...]:
        """The kernels' arguments; without a merge stand-ins that are never read."""
        if isinstance(plan, ElasticBCE):
            assert self.sent is not None and self.slot is not None and self.adapter is not None
            return self.tables, self.place, self.user, self.who, self.sent, self.slot, self.adapter, np.array(plan.sizes)
        return self.tables, self.place, self.user, self.who, self.tables, np.full(len(self.who), -1), self.user, np.zeros(0, np.int64)


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """So many threads, which stay: to start them anew would take longer than scoring a few clients."""
    return ThreadPoolExecutor(threads)


os.register_at_fork(after_in_child=_pool.cache_clear)


def share_out(kernel: Any, clients: int, *arguments: Any) -> None:
    """kernel(low, high, *arguments) for parts of so many clients, on as many threads as numba is told to use.

    Not by numba's own parallel loops: those have what they call compiled three times over, which took 20 s for FedEM's training.
    """
    threads = min(get_num_threads(), clients)
    if threads < 2:
        if clients:
            kernel(0, clients, *arguments)
        return
    parts = min(PARTS * threads, clients)
    done = [_pool(threads).submit(kernel, i * clients // parts, (i + 1) * clients // parts, *arguments) for i in range(parts)]
    wait(done)  # for all of them, also if one fails: what they are given is used again
    for one in done:
        one.result()


def train_in_place(
    plan: DotBCE,
    samples: tuple[np.ndarray, ...],
    clients: Clients,
    epochs: int,
    batch: int,
    tolerance: float,
    merges: bool = False,
    change: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Local training of C clients; returns running mean losses and steps, [C] each. With `change` [R, d] their tables stay as they are.

    merges: the plan is ElasticBCE, and all rows of the clients' tables are merged with the server's first
    samples: (stream [C], begin [C], count [C], local, label, row_begin [C], touched [C], row), see train_rows
    """
    user = clients.user
    loss, steps = np.zeros(len(clients.who)), np.zeros(len(clients.who), np.int64)
    tiny = user.dtype.type(TINY[user.itemsize])
    moves = plan.row_negatives, plan.trains_user
    if isinstance(plan, ElasticBCE):
        rates = plan.lr, plan.lr_adapter
        share_out(
            train_elastic_rows, len(loss), *samples, *clients.of(plan), epochs, batch, *rates, tolerance, tiny, *moves, merges, loss, steps
        )
    else:
        room = np.empty((0, user.shape[1]), user.dtype) if change is None else change
        share_out(
            train_rows, len(loss), *samples, *clients.of(plan)[:4], epochs, batch, plan.lr, tolerance, tiny, *moves, room, loss, steps
        )
    return loss, steps


def score(plan: DotBCE, clients: Clients, items: np.ndarray) -> np.ndarray:
    """[C, K] or [1, K] items -> [C, K] the clients' scores for them."""
    out = np.empty((len(clients.who), items.shape[1]), clients.user.dtype)
    share_out(score_rows, len(out), *clients.of(plan), items, out)
    return out


@dataclass(frozen=True)
class Layers:
    """A NeuMF that all clients share, with the products of its first layer and all item rows."""

    of_user: np.ndarray
    """[h, w'] the first layer's weights of the user's half"""
    bias: np.ndarray
    """[h]"""
    first: np.ndarray
    """[M, h] the first layer's products with the items' half"""
    rows: np.ndarray
    """[M, d] the items' embeddings that are multiplied"""
    sizes: np.ndarray
    upper: np.ndarray
    """numbers of the layers above the first"""
    head: np.ndarray

    @classmethod
    def of(cls, plan: NeuMFBCE, model: dict[str, np.ndarray]) -> Layers:
        table, mlp, head = (model[name] for name in (plan.items, plan.mlp, plan.head))
        half, hidden = plan.layers[0] // 2, plan.layers[1]
        d = table.shape[1] - half
        weights, bias, upper = np.split(mlp, [2 * half * hidden, (2 * half + 1) * hidden])
        of_user, of_item = np.split(weights.reshape(hidden, 2 * half), 2, axis=1)
        return cls(of_user, bias, table[:, d:] @ of_item.T, table[:, :d].copy(), np.array(plan.layers[1:]), upper, head)

    def score(self, user: np.ndarray, items: np.ndarray) -> np.ndarray:
        """Users [C, w] and their items, [C, K] or [1, K] -> [C, K]"""
        d = self.rows.shape[1]
        base, both = user[:, d:] @ self.of_user.T + self.bias, user[:, :d] * self.head[:d]
        out = np.empty((len(user), items.shape[1]), user.dtype)
        share_out(score_neumf, len(out), base, both, self.first, self.rows, items, self.sizes, self.upper, self.head, out)
        return out


def train(
    plan: DotBCE,
    samples: Any,
    held: dict[str, np.ndarray],
    sent: dict[str, np.ndarray],
    epochs: int,
    batch: int,
    tolerance: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Local training of a block of the kernel model `plan`, in place on `held`; returns running mean losses and steps, [C] each.

    samples: (stream [C], local [C, S], label [C, S], count [C], touched [C])
    """
    user, rows = held[plan.user], held[plan.items]
    if not isinstance(plan, IN_BLOCKS):
        stream, local, label, count, touched = samples
        everyone = np.arange(len(user))
        layout = (
            stream,
            everyone * local.shape[1],
            count,
            local.reshape(-1).astype(np.int32),
            label.reshape(-1).astype(np.float32),
            0 * everyone,
            touched,
            np.arange(rows.shape[1], dtype=np.int32),
        )
        merged = (sent[plan.items], everyone, held[plan.adapter]) if isinstance(plan, ElasticBCE) else ()
        return train_in_place(plan, layout, Clients(rows, everyone, user, everyone, *merged), epochs, batch, tolerance)
    loss, steps = np.zeros(len(user)), np.zeros(len(user), np.int64)
    if isinstance(plan, BiasedMSE):
        given = held[plan.mean], held[plan.before], sent[plan.items], sent[plan.mean], sent[plan.rate]
        how = epochs, batch, plan.lr, plan.penalty, plan.summed, tolerance
        share_out(train_biased, len(loss), *samples, user, rows, *given, *how, loss, steps)
        return loss, steps
    tiny = user.dtype.type(TINY[user.itemsize])
    if isinstance(plan, BiasedBCE):
        share_out(train_biased_bce, len(loss), *samples, user, rows, held[plan.mean], epochs, batch, plan.lr, tolerance, tiny, loss, steps)
        return loss, steps
    sizes = np.array((plan.layers[0] // 2, *plan.layers[1:]))
    dense = epochs, batch, plan.lr, plan.weight_decay, plan.clip, tolerance, tiny
    share_out(train_neumf, len(loss), *samples, user, rows, held[plan.mlp], held[plan.head], sizes, *dense, loss, steps)
    if plan.kept in held:
        held[plan.kept] *= (1 - plan.lr * plan.weight_decay) ** steps
    return loss, steps
