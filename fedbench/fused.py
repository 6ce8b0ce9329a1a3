"""Fused CPU kernels: a client's rows stay in the cache for all of its local steps.

An algorithm whose client scores by a dot product and trains with binary cross-entropy and Adam says so in `Algorithm.fused`
(`DotBCE`, or `ElasticBCE` when the rows are merged with the server's inside the forward pass); the engine then takes the kernel
here instead of the generic path. Both do the same arithmetic; tests hold them to the loop engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numba import njit, prange

from fedbench.split import shuffle

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8
"""Adam's constants, as in torch.optim.Adam"""
FAST = {"reassoc", "contract", "arcp", "nsz"}
"""sums may be reordered, as vector instructions need; infinities and NaN keep their meaning"""
DIVIDE: Final = "numpy"
"""no check for a zero divisor: it would keep every loop that divides from being vectorised"""
TINY = {4: 1e-17, 8: 1e-150}
"""by bytes a number: a slope below this is 0, for its square would be subnormal and a hundred times slower to compute with"""
FORGET = (160, 360)
"""for float32, float64: steps without a gradient after which what is left of Adam's first moment is below rounding"""
LOGS = 256
"""factors between 1 and 2 that are multiplied before a logarithm is taken"""


@dataclass(frozen=True)
class DotBCE:
    """logit of item i = user · items[i]; one Adam step a batch on both."""

    lr: float
    user: str = "user"
    items: str = "items"


@dataclass(frozen=True)
class ElasticBCE(DotBCE):
    """The same on rows merged with the server's: item + ρ·(sent − item), ρ = adapter MLP of [item, sent − item].

    Two steps a batch: first the adapter, then user and items.
    """

    adapter: str = "adapter"
    sizes: tuple[int, ...] = ()
    lr_adapter: float = 0.1


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


@njit(inline="always", fastmath=FAST, error_model=DIVIDE)
def _adam(param: np.ndarray, grad: np.ndarray, first: np.ndarray, second: np.ndarray, step: int, lr: float, tiny: float) -> None:
    """One Adam step over flat arrays, in place. Constants take the arrays' type: a float64 among them would halve the speed."""
    kind = param.dtype.type
    b1, b2, c1, c2 = kind(BETA1), kind(BETA2), kind(1 - BETA1), kind(1 - BETA2)
    rate = kind(lr / (1 - BETA1**step))
    root = kind(1 / math.sqrt(1 - BETA2**step))
    eps, zero = kind(EPSILON), kind(0)
    for i in range(param.size):
        g = grad[i] if abs(grad[i]) > tiny else zero
        first[i] = b1 * first[i] + c1 * g
        second[i] = b2 * second[i] + c2 * g * g
        param[i] -= rate * first[i] / (np.sqrt(second[i]) * root + eps)


@njit(inline="always", fastmath=FAST, error_model=DIVIDE)
def _tail(x: float, one: float, tiny: float) -> tuple[float, float]:
    """exp(-|x|) and sigmoid(x), neither below tiny."""
    tail = max(np.exp(-abs(x)), tiny)
    return tail, (one if x > 0 else tail) / (one + tail)


@njit(inline="always", fastmath=FAST, error_model=DIVIDE)
def _bce(logit: float, label: float, one: float, tiny: float) -> tuple[float, float, float]:
    """Binary cross-entropy of one logit, with the label as a sign (see fedbench.algorithm.bce): a + log(b), and its slope."""
    sign = label + label - one
    tail, wrong = _tail(-sign * logit, one, tiny)
    return max(-sign * logit, one - one), 1.0 + tail, -sign * wrong


@njit(inline="always", fastmath=FAST, error_model=DIVIDE)
def _settled(total: float, seen: int, before: float, tolerance: float, epoch: int) -> tuple[float, bool]:
    """Running mean loss, and whether it hardly changed since the epoch before."""
    mean = total / seen
    return mean, epoch > 0 and abs(mean - before) / abs(before + 1e-5) < tolerance


@njit(parallel=True, nogil=True, fastmath=FAST, error_model=DIVIDE, cache=True)
def train_dot(
    stream: np.ndarray,
    local: np.ndarray,
    label: np.ndarray,
    count: np.ndarray,
    touched: np.ndarray,
    user: np.ndarray,
    rows: np.ndarray,
    epochs: int,
    batch: int,
    lr: float,
    tolerance: float,
    tiny: float,
    loss: np.ndarray,
    steps: np.ndarray,
) -> None:
    """[C] clients at once; user [C, d] and rows [C, T, d] are trained in place, loss [C] is the running mean, steps [C] the batches."""
    d = user.shape[1]
    kind = user.dtype.type
    one, zero = kind(1), kind(0)
    for c in prange(count.size):
        n, t = count[c], touched[c]
        if n == 0:
            continue
        p, q = user[c], rows[c]
        flat = q[:t].reshape(t * d)
        order = np.empty(n, np.int64)
        gq, mq, vq = np.empty((t, d), user.dtype), np.zeros(t * d, user.dtype), np.zeros(t * d, user.dtype)
        gp, mp, vp = np.empty(d, user.dtype), np.zeros(d, user.dtype), np.zeros(d, user.dtype)
        step, total, seen, mean = 0, 0.0, 0, 0.0
        for epoch in range(epochs):
            shuffle(order, stream[c], epoch, batch)
            for start in range(0, n, batch):
                stop = min(start + batch, n)
                share = kind(1 / (stop - start))
                gq[:] = 0
                gp[:] = 0
                product = 1.0  # one logarithm for many samples: each factor is between 1 and 2
                for s in range(start, stop):
                    at = order[s]
                    i = local[c, at]
                    logit = zero
                    for j in range(d):
                        logit += p[j] * q[i, j]
                    linear, factor, slope = _bce(logit, label[c, at], one, tiny)
                    total += linear
                    product *= factor
                    if s % LOGS == 0:
                        total += math.log(product)
                        product = 1.0
                    error = slope * share
                    for j in range(d):
                        gp[j] += error * q[i, j]
                        gq[i, j] += error * p[j]
                total += math.log(product)
                seen += stop - start
                step += 1
                _adam(flat, gq.reshape(t * d), mq, vq, step, lr, tiny)
                _adam(p, gp, mp, vp, step, lr, tiny)
            mean, settled = _settled(total, seen, mean, tolerance, epoch)
            if settled:
                break
        loss[c] = mean
        steps[c] = step


@njit(fastmath=FAST, error_model=DIVIDE)
def _add_products(out: np.ndarray, values: np.ndarray, first: int, weights: np.ndarray, at: int, stride: int, count: int, n: int) -> None:
    """out[s] += sum over k < count of weights[at + k·stride] · values[first + k, s]; eight or four k at a time."""
    k = 0
    while k + 8 <= count:
        w0, w1 = weights[at + k * stride], weights[at + (k + 1) * stride]
        w2, w3 = weights[at + (k + 2) * stride], weights[at + (k + 3) * stride]
        w4, w5 = weights[at + (k + 4) * stride], weights[at + (k + 5) * stride]
        w6, w7 = weights[at + (k + 6) * stride], weights[at + (k + 7) * stride]
        a0, a1, a2, a3 = values[first + k], values[first + k + 1], values[first + k + 2], values[first + k + 3]
        a4, a5, a6, a7 = values[first + k + 4], values[first + k + 5], values[first + k + 6], values[first + k + 7]
        for s in range(n):
            out[s] += (w0 * a0[s] + w1 * a1[s] + w2 * a2[s] + w3 * a3[s]) + (w4 * a4[s] + w5 * a5[s] + w6 * a6[s] + w7 * a7[s])
        k += 8
    while k + 4 <= count:
        w0, w1 = weights[at + k * stride], weights[at + (k + 1) * stride]
        w2, w3 = weights[at + (k + 2) * stride], weights[at + (k + 3) * stride]
        a0, a1, a2, a3 = values[first + k], values[first + k + 1], values[first + k + 2], values[first + k + 3]
        for s in range(n):
            out[s] += w0 * a0[s] + w1 * a1[s] + w2 * a2[s] + w3 * a3[s]
        k += 4
    while k < count:
        w0, a0 = weights[at + k * stride], values[first + k]
        for s in range(n):
            out[s] += w0 * a0[s]
        k += 1


@njit(fastmath=FAST, error_model=DIVIDE)
def _forward(weights: np.ndarray, sizes: np.ndarray, acts: np.ndarray, n: int, squash: bool, tiny: float) -> None:
    """acts [sum(sizes), B], features by samples: fill every layer after the input; ReLU inside, sigmoid (squash) or ReLU at the end."""
    one, zero = weights.dtype.type(1), weights.dtype.type(0)
    source, at = 0, 0
    for layer in range(sizes.size - 1):
        fan_in, fan_out = sizes[layer], sizes[layer + 1]
        target = source + fan_in
        bias = at + fan_in * fan_out
        last = squash and layer == sizes.size - 2
        for o in range(fan_out):
            out = acts[target + o]
            b = weights[bias + o]
            for s in range(n):
                out[s] = b
            _add_products(out, acts, source, weights, at + o * fan_in, 1, fan_in, n)
            if last:
                for s in range(n):
                    out[s] = _tail(out[s], one, tiny)[1]
            else:
                for s in range(n):
                    out[s] = max(out[s], zero)
        source = target
        at = bias + fan_out


@njit(fastmath=FAST, error_model=DIVIDE)
def _weight_gradient(up: np.ndarray, acts: np.ndarray, source: int, fan_in: int, grad: np.ndarray, at: int, n: int, zero: float) -> None:
    """grad[at + i] = sum over samples of up · acts[source + i]; four i at a time."""
    i = 0
    while i + 4 <= fan_in:
        a0, a1, a2, a3 = acts[source + i], acts[source + i + 1], acts[source + i + 2], acts[source + i + 3]
        d0, d1, d2, d3 = zero, zero, zero, zero
        for s in range(n):
            d0 += up[s] * a0[s]
            d1 += up[s] * a1[s]
            d2 += up[s] * a2[s]
            d3 += up[s] * a3[s]
        grad[at + i], grad[at + i + 1], grad[at + i + 2], grad[at + i + 3] = d0, d1, d2, d3
        i += 4
    while i < fan_in:
        a0, d0 = acts[source + i], zero
        for s in range(n):
            d0 += up[s] * a0[s]
        grad[at + i] = d0
        i += 1


@njit(fastmath=FAST, error_model=DIVIDE)
def _backward(
    weights: np.ndarray, sizes: np.ndarray, acts: np.ndarray, delta: np.ndarray, grad: np.ndarray, n: int, of_weights: bool, of_input: bool
) -> None:
    """delta ends with the slopes of the last layer; fill `grad` (of the weights) and the first rows of `delta` (of the input)."""
    zero = weights.dtype.type(0)
    target, end = 0, 0
    for layer in range(sizes.size - 1):
        target += sizes[layer]
        end += sizes[layer] * sizes[layer + 1] + sizes[layer + 1]
    for layer in range(sizes.size - 2, -1, -1):
        fan_in, fan_out = sizes[layer], sizes[layer + 1]
        source = target - fan_in
        bias = end - fan_out
        at = bias - fan_in * fan_out
        if of_weights:
            for o in range(fan_out):
                up = delta[target + o]
                sum_up = zero
                for s in range(n):
                    sum_up += up[s]
                grad[bias + o] = sum_up
                _weight_gradient(up, acts, source, fan_in, grad, at + o * fan_in, n, zero)
        if layer > 0 or of_input:
            for i in range(fan_in):
                down = delta[source + i]
                for s in range(n):
                    down[s] = zero
                _add_products(down, delta, target, weights, at + i, fan_in, fan_out, n)
                if layer > 0:
                    a = acts[source + i]
                    for s in range(n):
                        down[s] = down[s] if a[s] > 0 else zero
        target = source
        end = at


@njit(parallel=True, nogil=True, fastmath=FAST, error_model=DIVIDE, cache=True)
def train_elastic(
    stream: np.ndarray,
    local: np.ndarray,
    label: np.ndarray,
    count: np.ndarray,
    touched: np.ndarray,
    user: np.ndarray,
    rows: np.ndarray,
    sent: np.ndarray,
    adapter: np.ndarray,
    sizes: np.ndarray,
    epochs: int,
    batch: int,
    lr: float,
    lr_adapter: float,
    tolerance: float,
    tiny: float,
    loss: np.ndarray,
    steps: np.ndarray,
) -> None:
    """As train_dot, on rows merged with `sent` [C, T, d] by each client's adapter [C, A]; all three are trained in place."""
    d = user.shape[1]
    kind = user.dtype.type
    one, zero = kind(1), kind(0)
    layers = sizes.sum()
    for c in prange(count.size):
        n, t = count[c], touched[c]
        if n == 0:
            continue
        p, q, g, w = user[c], rows[c], sent[c], adapter[c]
        flat = q[:t].reshape(t * d)
        order = np.empty(n, np.int64)
        wide = min(batch, n)
        acts, delta = np.empty((layers, wide), user.dtype), np.empty((layers, wide), user.dtype)
        gq, mq, vq = np.empty((t, d), user.dtype), np.zeros(t * d, user.dtype), np.zeros(t * d, user.dtype)
        gp, mp, vp = np.empty(d, user.dtype), np.zeros(d, user.dtype), np.zeros(d, user.dtype)
        gp_change, own, change, error = (
            np.empty(d, user.dtype),
            np.empty(wide, user.dtype),
            np.empty(wide, user.dtype),
            np.empty(wide, user.dtype),
        )
        gw, mw, vw = np.empty(w.size, user.dtype), np.zeros(w.size, user.dtype), np.zeros(w.size, user.dtype)
        step, total, seen, mean = 0, 0.0, 0, 0.0
        for epoch in range(epochs):
            shuffle(order, stream[c], epoch, batch)
            for start in range(0, n, batch):
                b = min(batch, n - start)
                share = kind(1 / b)
                for s in range(b):
                    i = local[c, order[start + s]]
                    for j in range(d):
                        acts[j, s] = q[i, j]
                        acts[d + j, s] = g[i, j] - q[i, j]
                step += 1
                rho, top = acts[layers - 1], delta[layers - 1]
                for phase in range(2):  # the adapter's step, then that of user and items
                    _forward(w, sizes, acts, b, True, tiny)
                    for s in range(b):
                        own[s] = zero
                        change[s] = zero
                    _add_products(own, acts, 0, p, 0, 1, d, b)
                    _add_products(change, acts, d, p, 0, 1, d, b)
                    product = 1.0
                    for s in range(b):
                        linear, factor, slope = _bce(own[s] + rho[s] * change[s], label[c, order[start + s]], one, tiny)
                        error[s] = slope * share
                        if phase == 1:
                            total += linear
                            product *= factor
                            if s % LOGS == 0:
                                total += math.log(product)
                                product = 1.0
                    total += math.log(product)
                    for s in range(b):
                        slope = error[s] * change[s] * rho[s] * (one - rho[s])
                        top[s] = slope if abs(slope) > tiny else zero
                    _backward(w, sizes, acts, delta, gw, b, phase == 0, phase == 1)
                    if phase == 0:
                        _adam(w, gw, mw, vw, step, lr_adapter, tiny)
                for s in range(b):
                    own[s] = error[s] * rho[s]
                    change[s] = error[s] - own[s]
                _weight_gradient(error, acts, 0, d, gp, 0, b, zero)
                _weight_gradient(own, acts, d, d, gp_change, 0, b, zero)
                for j in range(d):
                    gp[j] += gp_change[j]
                    down, down_change, share_j = delta[j], delta[d + j], p[j]
                    for s in range(b):
                        down[s] += change[s] * share_j - down_change[s]
                gq[:] = 0
                for s in range(b):
                    i = local[c, order[start + s]]
                    for j in range(d):
                        gq[i, j] += delta[j, s]
                _adam(flat, gq.reshape(t * d), mq, vq, step, lr, tiny)
                _adam(p, gp, mp, vp, step, lr, tiny)
                seen += b
            mean, settled = _settled(total, seen, mean, tolerance, epoch)
            if settled:
                break
        loss[c] = mean
        steps[c] = step


@njit(inline="always", fastmath=FAST, error_model=DIVIDE)
def _adamw(
    param: np.ndarray,
    grad: np.ndarray,
    first: np.ndarray,
    second: np.ndarray,
    rate: float,
    root: float,
    decay: float,
    scale: float,
    tiny: float,
) -> None:
    """One AdamW step over flat arrays, in place, along scale·grad. rate = lr / (1 - b1^t), root = 1 / sqrt(1 - b2^t)."""
    kind = param.dtype.type
    b1, b2, c1, c2 = kind(BETA1), kind(BETA2), kind(1 - BETA1), kind(1 - BETA2)
    eps, zero = kind(EPSILON), kind(0)
    for i in range(param.size):
        g = scale * grad[i]
        g = g if abs(g) > tiny else zero
        first[i] = b1 * first[i] + c1 * g
        second[i] = b2 * second[i] + c2 * g * g
        param[i] = decay * param[i] - rate * first[i] / (np.sqrt(second[i]) * root + eps)


@njit(fastmath=FAST, error_model=DIVIDE)
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


@njit(parallel=True, nogil=True, fastmath=FAST, error_model=DIVIDE, cache=True)
def train_neumf(
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
    """As train_dot for NeuMF: user [C, w], rows [C, T, w], mlp [C, A] and head [C, d + h + 1] are trained in place.

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
    top = layers - deep
    longest = epochs * -(-max(count.max(), 1) // batch)
    rates, roots = np.empty(longest, user.dtype), np.empty(longest, user.dtype)
    for t in range(longest):
        rates[t] = lr / (1 - BETA1 ** (t + 1))
        roots[t] = 1 / math.sqrt(1 - BETA2 ** (t + 1))
    fade = np.empty((3, longest + 1), user.dtype)
    for t in range(longest + 1):
        fade[0, t], fade[1, t], fade[2, t] = BETA1**t, BETA2 ** (t / 2), (1 - lr * weight_decay) ** t
    for c in prange(count.size):
        n, t = count[c], touched[c]
        if n == 0:
            continue
        p, q, w, h = user[c], rows[c], mlp[c], head[c]
        size = min(batch, n)
        order = np.empty(n, np.int64)
        mq, vq, gq = np.empty((t, wide), user.dtype), np.empty((t, wide), user.dtype), np.empty((t, wide), user.dtype)
        mp, vp, gp = np.zeros(wide, user.dtype), np.zeros(wide, user.dtype), np.empty(wide, user.dtype)
        mw, vw, gw = np.zeros(w.size, user.dtype), np.zeros(w.size, user.dtype), np.empty(w.size, user.dtype)
        mh, vh, gh = np.zeros(h.size, user.dtype), np.zeros(h.size, user.dtype), np.empty(h.size, user.dtype)
        gmf, acts, delta = np.empty((d, size), user.dtype), np.empty((layers, size), user.dtype), np.empty((layers, size), user.dtype)
        small, gsmall = np.empty(w.size - hidden * half, user.dtype), np.empty(w.size - hidden * half, user.dtype)
        logit, error, box = np.empty(size, user.dtype), np.empty(size, user.dtype), np.empty(2 * wide, user.dtype)
        terms = min(longest, FORGET[0] if user.itemsize == 4 else FORGET[1]) + 3
        share_at, scale_at = np.empty(terms, user.dtype), np.empty(terms, user.dtype)
        both, sums = np.empty(d, user.dtype), np.empty(d, user.dtype)
        moved_at, in_batch, distinct = np.full(t, -1), np.full(t, -1), np.empty(size, np.int64)
        step, total, seen, mean = 0, 0.0, 0, 0.0
        for epoch in range(epochs):
            shuffle(order, stream[c], epoch, batch)
            for start in range(0, n, batch):
                b = min(batch, n - start)
                share = kind(1 / b)
                used = 0
                for s in range(b):
                    i = local[c, order[start + s]]
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
                    for j in range(d):
                        gmf[j, s] = q[i, j]
                    for j in range(half):
                        acts[j, s] = q[i, d + j]
                # the first layer's weights of the item's half; the user's half goes into its bias
                for o in range(hidden):
                    bias = w[hidden * 2 * half + o]
                    for j in range(half):
                        small[o * half + j] = w[o * 2 * half + half + j]
                        bias += w[o * 2 * half + j] * p[d + j]
                    small[hidden * half + o] = bias
                small[hidden * half + hidden :] = w[hidden * 2 * half + hidden :]
                _forward(small, sizes, acts, b, False, tiny)
                for j in range(d):
                    both[j] = h[j] * p[j]
                for s in range(b):
                    logit[s] = h[d + deep]
                _add_products(logit, gmf, 0, both, 0, 1, d, b)
                _add_products(logit, acts, top, h, d, 1, deep, b)
                product, error_sum = 1.0, zero
                for s in range(b):
                    linear, factor, slope = _bce(logit[s], label[c, order[start + s]], one, tiny)
                    error[s] = slope * share
                    error_sum += error[s]
                    total += linear
                    product *= factor
                    if s % LOGS == 0:
                        total += math.log(product)
                        product = 1.0
                total += math.log(product)
                _weight_gradient(error, gmf, 0, d, sums, 0, b, zero)
                _weight_gradient(error, acts, top, deep, gh, d, b, zero)
                gh[d + deep] = error_sum
                for j in range(d):
                    gh[j] = p[j] * sums[j]
                    gp[j] = h[j] * sums[j]
                for o in range(deep):
                    out, down, weight = acts[top + o], delta[top + o], h[d + o]
                    for s in range(b):
                        down[s] = error[s] * weight if out[s] > 0 else zero
                _backward(small, sizes, acts, delta, gsmall, b, True, True)
                gp[d:] = zero
                for o in range(hidden):
                    slope = gsmall[hidden * half + o]
                    gw[hidden * 2 * half + o] = slope
                    for j in range(half):
                        gw[o * 2 * half + j] = slope * p[d + j]
                        gw[o * 2 * half + half + j] = gsmall[o * half + j]
                        gp[d + j] += slope * w[o * 2 * half + j]
                gw[hidden * 2 * half + hidden :] = gsmall[hidden * half + hidden :]
                for s in range(b):
                    row, slope = gq[local[c, order[start + s]]], error[s]
                    for j in range(d):
                        row[j] += slope * both[j]
                    for j in range(half):
                        row[d + j] += delta[j, s]
                scale = one
                if clip > 0:
                    square = (gp * gp).sum() + (gw * gw).sum() + (gh * gh).sum()
                    for r in range(used):
                        row = gq[distinct[r]]
                        for j in range(wide):
                            square += row[j] * row[j]
                    scale = min(one, kind(clip / (math.sqrt(square) + 1e-6)))
                rate, root = rates[step], roots[step]
                for r in range(used):
                    i = distinct[r]
                    _adamw(q[i], gq[i], mq[i], vq[i], rate, root, decay, scale, tiny)
                _adamw(p, gp, mp, vp, rate, root, decay, scale, tiny)
                _adamw(w, gw, mw, vw, rate, root, decay, scale, tiny)
                _adamw(h, gh, mh, vh, rate, root, decay, scale, tiny)
                step += 1
                seen += b
            mean, settled = _settled(total, seen, mean, tolerance, epoch)
            if settled:
                break
        for i in range(t):
            _catch_up(q[i], mq[i], vq[i], moved_at[i], step, fade, rates, roots, share_at, scale_at, box)
        loss[c] = mean
        steps[c] = step


@njit(nogil=True, fastmath=FAST, error_model=DIVIDE, cache=True)
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
            linear, factor, slope = _bce(logit, label[s], one, tiny)
            total += linear + math.log(factor)
            error = slope * share
            for j in range(d):
                gp[j] += error * q[j] + shrink * p[j]
                gq[j] += error * p[j] + shrink * q[j]
        step += 1
        _adam(users.reshape(-1), grad_users.reshape(-1), first_users.reshape(-1), second_users.reshape(-1), step, lr, tiny)
        _adam(items.reshape(-1), grad_items.reshape(-1), first_items.reshape(-1), second_items.reshape(-1), step, lr, tiny)
    return total / label.size


def train(
    plan: DotBCE,
    samples: Any,
    held: dict[str, np.ndarray],
    sent: dict[str, np.ndarray],
    epochs: int,
    batch: int,
    tolerance: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Local training of a block as `plan` says, in place on `held`; returns running mean losses and steps, [C] each.

    samples: (stream [C], local [C, S], label [C, S], count [C], touched [C])
    """
    user, rows = held[plan.user], held[plan.items]
    loss, steps = np.zeros(len(user)), np.zeros(len(user), np.int64)
    tiny = user.dtype.type(TINY[user.itemsize])
    if isinstance(plan, ElasticBCE):
        extra = (sent[plan.items], held[plan.adapter], np.array(plan.sizes))
        kernel: Any = train_elastic
        kernel(*samples, user, rows, *extra, epochs, batch, plan.lr, plan.lr_adapter, tolerance, tiny, loss, steps)
    elif isinstance(plan, NeuMFBCE):
        sizes = np.array((plan.layers[0] // 2, *plan.layers[1:]))
        kernel = train_neumf
        kernel(*samples, user, rows, held[plan.mlp], held[plan.head], sizes, epochs, batch, plan.lr, plan.weight_decay, plan.clip,
               tolerance, tiny, loss, steps)  # fmt: skip
        if plan.kept in held:
            held[plan.kept] *= (1 - plan.lr * plan.weight_decay) ** steps
    else:
        kernel = train_dot
        kernel(*samples, user, rows, epochs, batch, plan.lr, tolerance, tiny, loss, steps)
    return loss, steps
