"""The generic local step, for any algorithm: vmap(grad) of its loss and an optimizer for each client."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from fedbench.contract.algorithm import Batch, Phase, Tensors
from fedbench.kernels.compiler.record import slopes
from fedbench.kernels.optimizers import BETA1, BETA2, EPSILON

Moments = dict[str, tuple[Tensor, Tensor]]
"""of the optimizers, by place of the phase and name"""


def vmapped(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function`, written for one client, over the leading client dimension of all tensors in its arguments."""
    return vmap(function)(*arguments)


def gradients(loss: Callable[..., Tensor], part: Tensors, *given: Any) -> tuple[Tensors, Tensor]:
    """Each client's gradient of its loss by `part`, and the losses [C]; of their sum, for clients have nothing in common.

    The gradient of torch.func would do the same, but takes a second to load.
    """
    return slopes(lambda leaves: vmapped(loss, leaves, *given), part)


def mapped_gradients(loss: Callable[..., Tensor], part: Tensors, *given: Any) -> tuple[Tensors, Tensor]:
    """`gradients` in the form that torch.compile understands."""
    found: tuple[Tensors, Tensor] = vmap(grad_and_value(loss))(part, *given)
    return found


@dataclass(frozen=True)
class Progress:
    """Where each client of a block stands in its local training; all [C]."""

    steps: Tensor
    active: Tensor
    total: Tensor
    seen: Tensor
    before: Tensor

    @staticmethod
    def start(count: Tensor, dtype: torch.dtype) -> Progress:
        # four tensors, not one for all: a step that is compiled for the same ones is compiled again when they differ
        steps, total, seen, before = torch.zeros(4, *count.shape, dtype=dtype, device=count.device)
        return Progress(steps, count > 0, total, seen, before)

    def mean(self) -> Tensor:
        return self.total / self.seen.clamp(min=1)

    def until(self, steps: int) -> Progress:
        """Freeze the clients that have made so many steps."""
        return replace(self, active=self.active & (self.steps < steps))

    def after_epoch(self, epoch: int, tolerance: float) -> Progress:
        """Freeze the clients whose running mean loss hardly changed."""
        mean = self.mean()
        active = self.active
        if tolerance > 0 and epoch > 0:
            active = active & ((mean - self.before).abs() / (self.before + 1e-5).abs() >= tolerance)
        return Progress(self.steps, active, self.total, self.seen, torch.where(self.active, mean, self.before))


def new_state(parameter: Tensor) -> tuple[Tensor, Tensor]:
    """Adam's two moments."""
    return torch.zeros_like(parameter), torch.zeros_like(parameter)


def step(
    loss: Callable[[Tensors, Tensors, Batch], Tensor],
    phases: tuple[Phase, ...],
    held: Tensors,
    sent: Tensors,
    batch: Batch,
    tables: tuple[str, ...],
    state: tuple[Moments, Progress],
    gradients: Callable[..., tuple[Tensors, Tensor]] = gradients,
) -> tuple[Tensors, tuple[Moments, Progress]]:
    """One batch of every client in a block: each phase in turn, clients with nothing in this batch or finished unmoved.

    tables: names of tables, whose rows may be padding. state: the optimizers' moments, and where each client stands.
    gradients: of a loss by its first argument, with its values [C].
    """
    optimizer, progress = dict(state[0]), state[1]
    size = batch.weight.sum(dim=1)
    # a client without samples in this batch stays as it is, moments and step count included
    moves = progress.active & (size > 0)
    steps = progress.steps + moves.to(progress.steps.dtype)
    value = progress.total.new_zeros(())
    for place, phase in enumerate(phases):

        def of(part: Tensors, rest: Tensors, sent: Tensors, batch: Batch) -> Tensor:
            return loss({**rest, **part}, sent, batch)

        part = {name: held[name] for name in phase.names}
        rest = {name: tensor for name, tensor in held.items() if name not in part}
        gradient, value = gradients(of, part, rest, sent, batch)
        if phase.clip:
            gradient = clipped(gradient, phase.clip, dict.fromkeys(tables, batch.rows))
        known = {**held, **sent}  # a target is what was sent, for touched rows as for others
        for name in phase.names:
            toward = known[phase.pull[name].target] if name in phase.pull else None
            moments = optimizer[f"{place}/{name}"]
            moved, moments = update(name, held[name], gradient[name], toward, moments, (steps, moves), phase)
            held, optimizer[f"{place}/{name}"] = {**held, name: moved}, moments
    total = progress.total + torch.where(moves, value * size, torch.zeros_like(size))
    seen = progress.seen + torch.where(moves, size, torch.zeros_like(size))
    return held, (optimizer, Progress(steps, progress.active, total, seen, progress.before))


def clipped(gradient: Tensors, limit: float, real: Tensors) -> Tensors:
    """Each client's gradient over all names scaled down to norm `limit`, as torch.nn.utils.clip_grad_norm_; padding does not count."""
    # a row may be one number: [C, T]
    rows = {name: (g * g).flatten(2).sum(2) if g.dim() > 2 else g * g for name, g in gradient.items() if name in real}
    squares = [rows[name] * real[name] if name in real else g * g for name, g in gradient.items()]
    norm = torch.stack([square.reshape(len(square), -1).sum(1) for square in squares]).sum(0).sqrt()
    factor = (limit / (norm + 1e-6)).clamp(max=1)
    return {name: g * factor.view(-1, *[1] * (g.dim() - 1)) for name, g in gradient.items()}


def update(
    name: str,
    parameter: Tensor,
    gradient: Tensor,
    toward: Tensor | None,
    state: tuple[Tensor, Tensor],
    progress: tuple[Tensor, Tensor],
    phase: Phase,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """One optimizer step of every client that moves; parameter, gradient and toward (where it is pulled to) [C, ...].

    progress: steps and moves [C], how many steps a client has made with this one and whether it makes it.
    """
    shape = (-1, *[1] * (parameter.dim() - 1))
    # at least 1, for clients that have made no step yet must not divide by 0
    steps, moves = progress[0].clamp(min=1).view(shape), progress[1].view(shape)
    rate = phase.rate(name) if phase.lr_decay == 1 else phase.rate(name) * phase.lr_decay ** (steps - 1)
    pull = 0.0 if toward is None else phase.pull[name].weight * (parameter - toward)
    if phase.optimizer == "sgd":
        slope = gradient + phase.weight_decay * parameter + pull if phase.weight_decay or toward is not None else gradient
        first = phase.momentum * state[0] + slope if phase.momentum else slope
        moved = torch.where(moves, parameter - rate * first, parameter)
        return moved, (torch.where(moves, first, state[0]), state[1]) if phase.momentum else state
    first = BETA1 * state[0] + (1 - BETA1) * gradient
    second = BETA2 * state[1] + (1 - BETA2) * gradient * gradient
    corrected = rate / (1 - BETA1**steps)
    moved = parameter * (1 - rate * phase.weight_decay) if phase.optimizer == "adamw" else parameter
    moved = moved if toward is None else moved - rate * pull
    moved = moved - corrected * first / (second.sqrt() / (1 - BETA2**steps).sqrt() + EPSILON)
    return torch.where(moves, moved, parameter), (torch.where(moves, first, state[0]), torch.where(moves, second, state[1]))
