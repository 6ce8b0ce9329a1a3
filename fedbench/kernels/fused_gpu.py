"""The fused kernel on a GPU, in Triton: one program a client, whose rows stay in the cache for all of its local steps.

It does what `fused.DotBCE` says, as the CPU's kernel and the generic path do; tests hold all of them to the loop engine. No atomic
operations: a program counts by comparing how often a batch uses each of its rows, so that the same run gives the same numbers.
Triton comes with PyTorch's builds for GPUs. Import this module only where there is one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedbench.kernels.fused import BETA1, BETA2, EPSILON, DotBCE

TILE = 32
"""rows of a client that are looked at together"""
SAMPLES = 128
"""samples of a batch that are compared with them at once"""


@triton.jit
def _adam(x, m, v, gradient, rate, scale, b1: tl.constexpr, b2: tl.constexpr, eps: tl.constexpr):
    """x and its moments after a step of Adam; rate = lr / (1 - b1^step), scale = 1 / sqrt(1 - b2^step)."""
    m = b1 * m + (1 - b1) * gradient
    v = b2 * v + (1 - b2) * gradient * gradient
    return x - rate * m / (tl.sqrt(v) * scale + eps), m, v


@triton.jit
def _train_dot(
    users, tables, first, second, codes, count, touched, pace, losses, steps,
    clients, width, longest, epochs, batch, tolerance,
    d: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, SAMPLES: tl.constexpr,
    b1: tl.constexpr, b2: tl.constexpr, eps: tl.constexpr,
):  # fmt: skip
    """All local steps of a client, in place on its vector [d] and its rows [width, d]; D is the next power of 2 from d on."""
    c = tl.program_id(0).to(tl.int64)
    n, t = tl.load(count + c), tl.load(touched + c)
    kind = users.dtype.element_ty
    j = tl.arange(0, D)
    p = tl.load(users + c * d + j, mask=j < d, other=0)
    m_p, v_p = tl.zeros([D], kind), tl.zeros([D], kind)
    step, epoch, active = 0, 0, n > 0
    total, before = tl.sum(m_p), tl.sum(m_p)
    while (epoch < epochs) & active:
        for start in range(0, n, batch):
            end = tl.minimum(start + batch, n)
            rate, scale = tl.load(pace + 2 * step), tl.load(pace + 2 * step + 1)
            share = 1.0 / (end - start).to(kind)
            slope_p = tl.zeros([D], kind)
            for top in range(0, t, TILE):
                row = top + tl.arange(0, TILE)
                pos, neg = tl.zeros([TILE], kind), tl.zeros([TILE], kind)
                for s in range(start, end, SAMPLES):
                    at = s + tl.arange(0, SAMPLES)
                    code = tl.load(codes + (epoch * clients + c) * longest + at, mask=at < end, other=-1)
                    uses = (code >> 1)[None, :] == row[:, None]
                    positive = (code & 1)[None, :]
                    pos += tl.sum(tl.where(uses, positive, 0), axis=1).to(kind)
                    neg += tl.sum(tl.where(uses, 1 - positive, 0), axis=1).to(kind)
                where = (c * width + row[:, None]) * d + j[None, :]
                real = (row[:, None] < t) & (j[None, :] < d)
                q = tl.load(tables + where, mask=real, other=0)
                x = tl.sum(q * p[None, :], axis=1)
                tail = tl.exp(-tl.abs(x))
                large = 1.0 / (1.0 + tail)
                small = tail * large
                slope = share * (neg * tl.where(x > 0, large, small) - pos * tl.where(x > 0, small, large))
                total += tl.sum(pos * tl.maximum(-x, 0.0) + neg * tl.maximum(x, 0.0) + (pos + neg) * tl.log(1.0 + tail))
                slope_p += tl.sum(slope[:, None] * q, axis=0)
                m = tl.load(first + where, mask=real, other=0)
                v = tl.load(second + where, mask=real, other=0)
                q, m, v = _adam(q, m, v, slope[:, None] * p[None, :], rate, scale, b1, b2, eps)
                tl.store(tables + where, q, mask=real)
                tl.store(first + where, m, mask=real)
                tl.store(second + where, v, mask=real)
            p, m_p, v_p = _adam(p, m_p, v_p, slope_p, rate, scale, b1, b2, eps)
            step += 1
            tl.debug_barrier()  # the next step may read a row by another thread than the one that wrote it
        epoch += 1
        mean = total / (epoch * n).to(kind)
        active = (epoch == 1) | (tl.abs(mean - before) >= tolerance * tl.abs(before + 1e-5))
        before = mean
    tl.store(users + c * d + j, p, mask=j < d)
    tl.store(losses + c, before)
    tl.store(steps + c, step)


def train(
    plan: DotBCE, held: dict[str, Tensor], codes: Tensor, count: Tensor, touched: Tensor, batch: int, tolerance: float
) -> tuple[Tensor, Tensor]:
    """Local training of a block, in place on `held`; returns running mean losses and steps, [C] each.

    codes [epochs, C, S] int32: the samples in the order of each epoch, twice the row, and 1 more for a positive.
    """
    user, rows = held[plan.user], held[plan.items]
    epochs, clients, longest = codes.shape
    step = torch.arange(1, 1 + epochs * -(-longest // batch), dtype=torch.float64, device=user.device)
    pace = torch.stack([plan.lr / (1 - BETA1**step), (1 - BETA2**step).rsqrt()], dim=1).to(user.dtype)
    losses, steps = torch.zeros_like(user[:, 0]), torch.zeros_like(count, dtype=torch.int32)
    with torch.cuda.device_of(user):  # Triton launches on the current device, whatever the tensors' is
        _train_dot[(clients,)](
            user, rows, torch.zeros_like(rows), torch.zeros_like(rows), codes, count.int(), touched.int(), pace, losses, steps,
            clients, rows.shape[1], longest, epochs, batch, tolerance,
            d=user.shape[1], D=triton.next_power_of_2(user.shape[1]), TILE=TILE, SAMPLES=SAMPLES, b1=BETA1, b2=BETA2, eps=EPSILON,
        )  # fmt: skip
    return losses, steps
