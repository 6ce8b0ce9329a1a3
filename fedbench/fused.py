"""Fused CPU kernels: a client's rows stay in the cache for all of its local steps.

An algorithm whose client scores by a dot product and trains with binary cross-entropy and Adam says so in `Algorithm.fused`
(`DotBCE`, or `ElasticBCE` when the rows are merged with the server's inside the forward pass); the engine then takes the kernel
here instead of the generic path. Both do the same arithmetic; tests hold them to the loop engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numba import njit, prange

from fedbench.split import shuffle

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8
"""Adam's constants, as in torch.optim.Adam"""


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


@njit(inline="always", fastmath=True)
def _adam(param, grad, first, second, step, lr, one):  # noqa: ANN001, ANN202
    """One Adam step over flat arrays, in place."""
    b1, b2 = one * BETA1, one * BETA2
    c1, c2 = one - b1, one - b2
    rate = one * (lr / (1.0 - BETA1**step))
    root = one * (1.0 / math.sqrt(1.0 - BETA2**step))
    eps = one * EPSILON
    for i in range(param.size):
        g = grad[i]
        first[i] = b1 * first[i] + c1 * g
        second[i] = b2 * second[i] + c2 * g * g
        param[i] -= rate * first[i] / (np.sqrt(second[i]) * root + eps)


@njit(inline="always", fastmath=True)
def _log_loss(logit, label):  # noqa: ANN001, ANN202
    """Binary cross-entropy of one logit."""
    return max(logit, 0.0) - logit * label + math.log1p(math.exp(-abs(logit)))


@njit(inline="always", fastmath=True)
def _settled(total, seen, before, tolerance, epoch):  # noqa: ANN001, ANN202
    """Running mean loss, and whether it hardly changed since the epoch before."""
    mean = total / seen
    return mean, epoch > 0 and abs(mean - before) / abs(before + 1e-5) < tolerance


@njit(parallel=True, fastmath=True, cache=True)
def train_dot(stream, local, label, count, touched, user, rows, epochs, batch, lr, tolerance, loss):  # noqa: ANN001, ANN201
    """[C] clients at once; user [C, d] and rows [C, T, d] are trained in place, loss [C] is the running mean."""
    d = user.shape[1]
    one = user.dtype.type(1)
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
                share = one / (stop - start)
                gq[:] = 0
                gp[:] = 0
                for s in range(start, stop):
                    at = order[s]
                    i = local[c, at]
                    logit = one * 0
                    for j in range(d):
                        logit += p[j] * q[i, j]
                    error = (one / (one + np.exp(-logit)) - label[c, at]) * share
                    for j in range(d):
                        gp[j] += error * q[i, j]
                        gq[i, j] += error * p[j]
                    total += _log_loss(logit, label[c, at])
                seen += stop - start
                step += 1
                _adam(flat, gq.reshape(t * d), mq, vq, step, lr, one)
                _adam(p, gp, mp, vp, step, lr, one)
            mean, settled = _settled(total, seen, mean, tolerance, epoch)
            if settled:
                break
        loss[c] = mean


@njit(inline="always", fastmath=True)
def _forward(weights, sizes, acts, n):  # noqa: ANN001, ANN202
    """acts [sum(sizes), B], features by samples: fill every layer after the input; ReLU inside, sigmoid at the end."""
    source, at = 0, 0
    for layer in range(sizes.size - 1):
        fan_in, fan_out = sizes[layer], sizes[layer + 1]
        target = source + fan_in
        bias = at + fan_in * fan_out
        last = layer == sizes.size - 2
        for o in range(fan_out):
            out = acts[target + o]
            b = weights[bias + o]
            for s in range(n):
                out[s] = b
            for i in range(fan_in):
                w = weights[at + o * fan_in + i]
                a = acts[source + i]
                for s in range(n):
                    out[s] += w * a[s]
            for s in range(n):
                out[s] = 1 / (1 + np.exp(-out[s])) if last else max(out[s], 0)
        source = target
        at = bias + fan_out


@njit(inline="always", fastmath=True)
def _backward(weights, sizes, acts, delta, grad, n, of_weights):  # noqa: ANN001, ANN202
    """delta's last row holds d loss / d logit; fill `grad` (of the weights), or the first rows of `delta` (of the input)."""
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
                sum_up = weights[0] * 0
                for s in range(n):
                    sum_up += up[s]
                grad[bias + o] = sum_up
                for i in range(fan_in):
                    a = acts[source + i]
                    dot = weights[0] * 0
                    for s in range(n):
                        dot += up[s] * a[s]
                    grad[at + o * fan_in + i] = dot
        if layer > 0 or not of_weights:
            for i in range(fan_in):
                down = delta[source + i]
                for s in range(n):
                    down[s] = 0
                for o in range(fan_out):
                    w = weights[at + o * fan_in + i]
                    up = delta[target + o]
                    for s in range(n):
                        down[s] += w * up[s]
                if layer > 0:
                    a = acts[source + i]
                    for s in range(n):
                        if a[s] <= 0:
                            down[s] = 0
        target = source
        end = at


@njit(parallel=True, fastmath=True, cache=True)
def train_elastic(stream, local, label, count, touched, user, rows, sent, adapter, sizes, epochs, batch, lr, lr_adapter, tolerance, loss):  # noqa: ANN001, ANN201, E501
    """As train_dot, on rows merged with `sent` [C, T, d] by each client's adapter [C, A]; all three are trained in place."""
    d = user.shape[1]
    one = user.dtype.type(1)
    layers = sizes.sum()
    for c in prange(count.size):
        n, t = count[c], touched[c]
        if n == 0:
            continue
        p, q, g, w = user[c], rows[c], sent[c], adapter[c]
        kind = user.dtype
        flat = q[:t].reshape(t * d)
        order = np.empty(n, np.int64)
        wide = min(batch, n)
        acts, delta = np.empty((layers, wide), kind), np.empty((layers, wide), kind)
        gq, mq, vq = np.empty((t, d), kind), np.zeros(t * d, kind), np.zeros(t * d, kind)
        gp, mp, vp = np.empty(d, kind), np.zeros(d, kind), np.zeros(d, kind)
        gw, mw, vw = np.empty(w.size, kind), np.zeros(w.size, kind), np.zeros(w.size, kind)
        step, total, seen, mean = 0, 0.0, 0, 0.0
        for epoch in range(epochs):
            shuffle(order, stream[c], epoch, batch)
            for start in range(0, n, batch):
                b = min(batch, n - start)
                share = one / b
                for s in range(b):
                    i = local[c, order[start + s]]
                    for j in range(d):
                        acts[j, s] = q[i, j]
                        acts[d + j, s] = g[i, j] - q[i, j]
                step += 1
                for phase in range(2):
                    _forward(w, sizes, acts, b)
                    rho, top = acts[layers - 1], delta[layers - 1]
                    gq[:] = 0
                    gp[:] = 0
                    for s in range(b):
                        at = order[start + s]
                        i = local[c, at]
                        own, change = one * 0, one * 0
                        for j in range(d):
                            own += p[j] * acts[j, s]
                            change += p[j] * acts[d + j, s]
                        logit = own + rho[s] * change
                        error = (one / (one + np.exp(-logit)) - label[c, at]) * share
                        top[s] = error * change * rho[s] * (one - rho[s])
                        if phase == 1:
                            total += _log_loss(logit, label[c, at])
                            for j in range(d):
                                gp[j] += error * (acts[j, s] + rho[s] * acts[d + j, s])
                                gq[i, j] += error * p[j] * (one - rho[s])
                    _backward(w, sizes, acts, delta, gw, b, phase == 0)
                    if phase == 0:
                        _adam(w, gw, mw, vw, step, lr_adapter, one)
                    else:
                        for s in range(b):
                            i = local[c, order[start + s]]
                            for j in range(d):
                                gq[i, j] += delta[j, s] - delta[d + j, s]
                        _adam(flat, gq.reshape(t * d), mq, vq, step, lr, one)
                        _adam(p, gp, mp, vp, step, lr, one)
                seen += b
            mean, settled = _settled(total, seen, mean, tolerance, epoch)
            if settled:
                break
        loss[c] = mean
