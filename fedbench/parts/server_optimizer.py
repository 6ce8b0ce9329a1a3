"""The server's own optimizer (FedOpt): what clients changed is taken as a gradient, and the server steps along it.

A part that every algorithm with shared tensors can take: derive from `SharedModel` and return `self.step(...)` from `aggregate`.
State is kept row by row: a row that nobody sent in a round does not move, and its moments and step count stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedbench.contract.algorithm import Algorithm, Tensors, World
from fedbench.contract.search import tuned
from fedbench.contract.uploads import AVERAGES, Rows
from fedbench.errors import UsageError
from fedbench.parts.mixing import mean_of_whole_tables

OPTIMIZERS = ("sgd", "momentum", "adagrad", "adam", "yogi")
BETA1, BETA2, EPSILON = 0.9, 0.99, 1e-8
STATE = {
    "sgd": (),
    "momentum": ("first",),
    "adagrad": ("second",),
    "adam": ("first", "second", "steps"),
    "yogi": ("first", "second", "steps"),
}
"""what each keeps between rounds, under <name>/<this> in the server's dict"""


@dataclass(frozen=True)
class SharedModel(Algorithm):
    """Base of the algorithms whose server moves shared tensors by what the clients changed."""

    average: str = tuned("touching", choices=("touching", "sum"))
    """how changes of an item row are combined: sum, cohort (mean over the round) or touching (mean over those that sent it)"""
    server: str = tuned("sgd", choices=("sgd", "adam"))
    """the server's optimizer on the combined change: sgd, momentum, adagrad, adam or yogi; state is kept row by row"""
    server_lr: float = tuned(1.0, 0.01, 2.0, log=True)
    """learning rate of the server's optimizer; with sgd 1 is plain averaging, with adam 0.05 is a good start"""
    server_decay: str = "none"
    """how the server's learning rate falls over the rounds: linear (to 0) or none"""

    choices = {**Algorithm.choices, "average": AVERAGES, "server": OPTIMIZERS, "server_decay": ("linear", "none")}

    def check(self, world: World | None = None) -> None:
        if self.server_lr <= 0:
            raise UsageError(f"--server-lr must be over 0, not {self.server_lr:g}")

    def server_rate(self, when: int) -> float:
        """The server's learning rate in a round."""
        return self.server_lr * (max(1, self.rounds + 1 - when) / self.rounds if self.server_decay == "linear" else 1)

    def step(
        self, server: Tensors, changes: Mapping[str, Rows | Tensor], when: int, kept: Tensor | None = None, weight: Tensor | None = None
    ) -> Tensors:
        """The server after round `when`: rows of tables combined as `average` says, other tensors [n, ...] averaged over the cohort.

        kept [n]: what is left of a number that a client did not touch, if clients decay their weights and whole tables are averaged.
        weight [n]: how much each client counts; all the same if not given.
        """
        moved = dict(server)
        for name, change in changes.items():
            value = server[name]
            if isinstance(change, Tensor):
                # no table: everybody sent all of it, so all of it moves
                moves, mean = value.new_ones((), dtype=torch.bool), weighted_mean(change, weight)
            elif kept is not None and self.average == "cohort":
                moves, mean = value.new_ones((), dtype=torch.bool), mean_of_whole_tables(change, value, kept)
            else:
                mean, senders = change.combined(len(value), self.average, weight)
                moves = (senders > 0).view(-1, *[1] * (value.dim() - 1))
            state = {part: server.get(f"{name}/{part}") for part in STATE[self.server]}
            new, state = optimizer_step(self.server, self.server_rate(when), value, mean, state, moves)
            moved |= {name: new, **{f"{name}/{part}": tensor for part, tensor in state.items() if tensor is not None}}
        return moved


def weighted_mean(values: Tensor, weight: Tensor | None) -> Tensor:
    """[n, ...] -> [...]"""
    if weight is None:
        return values.mean(0)
    share = weight.to(values)
    return torch.tensordot(share / share.sum().clamp(min=1), values, 1)


def optimizer_step(
    kind: str, lr: float, value: Tensor, change: Tensor, state: Mapping[str, Tensor | None], moves: Tensor
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """One step of `value` along `change`, which may be overwritten, where `moves` (broadcast to it); a state that is None starts at 0.

    adam is torch.optim.Adam on the negative change, with as many steps as the row has moved; yogi is adam with Yogi's second moment.
    """
    if kind == "sgd":  # what does not move has a change of 0
        return torch.add(value, change, alpha=lr, out=change), {}
    old = {
        part: (torch.zeros_like(moves if part == "steps" else value, dtype=value.dtype) if s is None else s) for part, s in state.items()
    }
    new = dict(old)
    direction = change
    if kind == "momentum":
        direction = new["first"] = BETA1 * old["first"] + change
    elif kind == "adagrad":
        new["second"] = old["second"] + change**2
        direction = change / (new["second"].sqrt() + EPSILON)
    elif kind in ("adam", "yogi"):
        new["steps"] = old["steps"] + 1
        new["first"] = BETA1 * old["first"] + (1 - BETA1) * change
        toward = change**2 - old["second"]
        new["second"] = old["second"] + (1 - BETA2) * (toward if kind == "adam" else toward.sign() * change**2)
        root = (new["second"] / (1 - BETA2 ** new["steps"])).sqrt()
        direction = new["first"] / (1 - BETA1 ** new["steps"]) / (root + EPSILON)
    return torch.where(moves, value + lr * direction, value), {part: torch.where(moves, new[part], old[part]) for part in new}
