"""Merging the server's item rows into a client's own, row by row (FedEM's merge), for any method.

A method whose server sends an item table takes `--merge` by one word: `class Mine(Mergeable, Algorithm)`. With `--merge replace` nothing of
this runs. Otherwise every client keeps the rows as it left them, X, and begins a round with X + rho·(Y - X), Y being what was sent:
static says rho for all rows, elastic has a small MLP on the client, its adapter, choose it from [X, Y - X] for each row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedbench.contract.algorithm import OWN, Algorithm, Batch, Phase, Tensors, World
from fedbench.contract.randomness import Draw
from fedbench.errors import UsageError

MERGES = ("replace", "static", "elastic")
MERGE_LOSSES = ("inside", "beside")
HIDDEN = (16, 8, 1)
"""layer sizes of an adapter behind its input, if --adapter does not say them"""


def static(own: Tensor, sent: Tensor, rho: float) -> Tensor:
    """[T, d], [T, d] -> [T, d]: a fixed share of the way from the client's rows to the server's; rho 1 replaces them."""
    return own + rho * (sent - own)


def elastic(own: Tensor, sent: Tensor, adapter: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """[T, d], [T, d], [A] -> [T, d]: as far towards the server's row as the client's adapter says, item by item."""
    change = sent - own
    rho = torch.sigmoid(mlp(adapter, sizes, torch.cat([own, change], dim=-1)))
    return own + rho * change


def mlp(weights: Tensor, sizes: tuple[int, ...], x: Tensor) -> Tensor:
    """[A], [T, sizes[0]] -> [T, sizes[-1]]: linear layers with ReLU between, their weights and biases laid end to end in one vector."""
    at = 0
    for layer, (fan_in, fan_out) in enumerate(zip(sizes[:-1], sizes[1:], strict=True)):
        if layer:
            x = torch.relu(x)
        weight = weights[at : at + fan_in * fan_out].view(fan_out, fan_in)
        bias = weights[at + fan_in * fan_out : at + (fan_in + 1) * fan_out]
        x = x @ weight.T + bias
        at += (fan_in + 1) * fan_out
    return x


def init_mlp(draw: Draw, purpose: str, sizes: tuple[int, ...]) -> Tensor:
    """[..., A] every weight and bias uniform within 1/sqrt(fan in) of zero."""
    layers = [
        (draw.uniform(f"{purpose}/{layer}", (fan_in + 1) * fan_out) * 2 - 1) / math.sqrt(fan_in)
        for layer, (fan_in, fan_out) in enumerate(zip(sizes[:-1], sizes[1:], strict=True))
    ]
    return torch.cat(layers, dim=-1)


@dataclass(frozen=True)
class Merging(Algorithm):
    """The flags of a merge, and what they do to rows."""

    merge: str = "replace"
    """how the server's item rows enter a client's own: replace (a client keeps none), static (a fixed share of the way, --rho) or elastic
    (an adapter on the client decides row by row)"""
    rho: float = 0.5
    """the share of --merge static"""
    adapter: tuple[int, ...] | None = None
    """layer sizes of the adapter, an MLP; the first must be twice the size of an item row, the last 1. If not given: that, 16, 8 and 1"""
    lr_adapter: float = 0.1
    """local learning rate of Adam for the adapter"""
    merge_loss: str = "inside"
    """what trains the adapter: inside (every forward pass merges again, so that rows learn through it) or beside (rows learn as they
    are; the adapter learns from the loss of merged rows, with all else frozen)"""

    choices = {**Algorithm.choices, "merge": MERGES, "merge_loss": MERGE_LOSSES}

    def __init_subclass__(cls) -> None:
        """The words of all bases: a method that derives from two of them need not add them up."""
        cls.choices = {name: words for kind in reversed(cls.__mro__) for name, words in vars(kind).get("choices", {}).items()}

    @property
    def width(self) -> int:
        """Numbers of an item row."""
        return self.dim

    @property
    def sizes(self) -> tuple[int, ...]:
        """Layer sizes of the adapter."""
        return self.adapter or (2 * self.width, *HIDDEN)

    def check(self, world: World | None = None) -> None:
        super().check(world)
        self.must_be_positive("lr_adapter")
        if not 0 <= self.rho <= 1:
            raise UsageError(f"--rho must be from 0 to 1, not {self.rho:g}")
        if self.adapter is None:
            return
        given = ",".join(map(str, self.adapter))
        if len(self.adapter) < 2 or min(self.adapter) < 1:
            raise UsageError(f"--adapter {given}: give two layer sizes or more, each at least 1")
        if self.merge == "elastic" and (self.adapter[0] != 2 * self.width or self.adapter[-1] != 1):
            raise UsageError(f"--adapter {given} does not fit --dim {self.dim}: it must start with {2 * self.width} and end with 1")

    def merged_rows(self, own: Tensor, sent: Tensor, adapter: Tensor | None) -> Tensor:
        """[T, w], [T, w] -> [T, w]: the client's rows after one merge with the server's."""
        if self.merge == "elastic":
            assert adapter is not None
            return elastic(own, sent, adapter, self.sizes)
        return static(own, sent, 1.0 if self.merge == "replace" else self.rho)


@dataclass(frozen=True)
class Mergeable(Merging):
    """Base of methods whose server sends an item table, and whose clients may keep rows of their own: gives them `--merge`.

    What such a method's functions say stands: they are given merged rows in the place of those that were sent.
    """

    merges: ClassVar[tuple[str, ...]] = ("items",)
    """the table that is merged, as the server sends it; of several names the first that was sent. The last one is trained"""
    keeps: ClassVar[str] = "mine"
    """the own table that keeps a client's rows; one that the method has, or a new one"""
    later = ("merge", "rho", "adapter", "lr_adapter", "merge_loss")

    def __new__(cls, *args: Any, **fields: Any) -> Any:
        # another class, not a flag within: which tables clients keep is a fact of a class
        on = fields.get("merge", cls.merge) != "replace" and not issubclass(cls, Keeping)
        return object.__new__(keeping(cls) if on else cls)  # type: ignore[arg-type]

    def kept_rows(self, held: Tensors, sent: Tensors) -> Tensor:
        """[T, w]: a client's rows after training."""
        return held[self.merges[-1]]


@dataclass(frozen=True, eq=False)
class Merged:
    """Rows that are merged when they are read."""

    how: Merging
    own: Tensor
    sent: Tensor
    adapter: Tensor

    def __getitem__(self, at: Any) -> Tensor:
        return self.how.merged_rows(self.own[at], self.sent[at], self.adapter)


class Keeping(Mergeable):
    """A `Mergeable` method with `--merge` on: what its clients do, in terms of what the method itself does."""

    _host: ClassVar[type[Mergeable]]
    scores = ("own", "sent")

    @property
    def host(self) -> Mergeable:
        """The method itself, with these flags, in this round."""
        # not by the constructor, which would turn merging on again
        made: Mergeable = object.__new__(self._host)
        made.__dict__.update(self.__dict__)
        return made

    def init_client(self, world: World, draw: Draw) -> Tensors:
        made = self.host.init_client(world, draw)
        if self.keeps not in made:
            # clients begin with the server's first rows: merging these changes nothing
            first = self.host.init_server(world, Draw(draw.seed, draw.when, None, draw.dtype, draw.device))[self.merges[-1]]
            made = {**made, self.keeps: first if draw.clients is None else first.expand(len(draw.clients), *first.shape)}
        # all adapters begin alike
        return {**made, "adapter": init_mlp(draw.same, "adapter", self.sizes)} if self.merge == "elastic" else made

    def rows_of(self, sent: Tensors) -> Tensor:
        """[T, w]: what the server sends of the table that is merged."""
        return next(sent[name] for name in self.merges if name in sent)

    def after_merge(self, own: Tensors, sent: Tensors) -> Tensor:
        """[T, w]: what a client keeps, merged with what it was sent."""
        return self.merged_rows(own[self.keeps], self.rows_of(sent), own.get("adapter"))

    def receive(self, own: Tensors, sent: Tensors) -> Tensors:
        rows = self.after_merge(own, sent)
        # trained under the method's name, kept under its own
        return {**own, **self.host.receive(own, sent), self.merges[-1]: rows, self.keeps: rows}

    def phases(self, sent: Tensors) -> tuple[Phase, ...]:
        phases = self.host.phases(sent)
        return (Phase(("adapter",), self.lr_adapter), *phases) if self.merge == "elastic" else phases

    def loss(self, held: Tensors, sent: Tensors, batch: Batch) -> Tensor:
        if self.merge != "elastic":
            return self.host.loss(held, sent, batch)

        def through_the_merge(held: Tensors) -> Tensor:
            rows: Any = Merged(self, held[self.merges[-1]], self.rows_of(sent), held["adapter"])
            return self.host.loss({**held, self.merges[-1]: rows}, sent, batch)

        if self.merge_loss == "inside":
            return through_the_merge(held)
        # rows learn as they are, above; here the adapter alone learns
        frozen = {name: value if name == "adapter" else value.detach() for name, value in held.items()}
        return self.host.loss(held, sent, batch) + gradient_alone(through_the_merge(frozen))

    def upload(self, held: Tensors, sent: Tensors, samples: Tensor) -> Tensors:
        return self.host.upload(held, sent, samples)

    def keep(self, held: Tensors, sent: Tensors) -> Tensors:
        kept = {**self.host.keep(held, sent), self.keeps: self.host.kept_rows(held, sent)}
        kept |= {"adapter": held["adapter"]} if self.merge == "elastic" else {}
        return {name: value for name, value in kept.items() if name in kept_names(self)}

    def scored_with(self, rows: Tensor, own: Tensors, sent: Tensors) -> Tensor:
        return self.host.score({**own, self.keeps: rows}, {**sent, **{name: rows for name in self.merges if name in sent}})

    def score(self, own: Tensors, sent: Tensors) -> Tensor:
        return self.scored_with(self.after_merge(own, sent), own, sent)

    def score_own(self, own: Tensors, sent: Tensors) -> Tensor:
        return self.scored_with(own[self.keeps], own, sent)

    def score_sent(self, own: Tensors, sent: Tensors) -> Tensor:
        return self.scored_with(self.rows_of(sent), own, sent)


@cache
def keeping(cls: type[Mergeable]) -> type[Mergeable]:
    """The class of a method with `--merge` on."""
    facts = {"_host": cls, "tables": {**cls.tables, cls.keeps: OWN}, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (Keeping, cls), facts)


@cache
def kept_names(algorithm: Algorithm) -> frozenset[str]:
    """What `init_client` makes."""
    return frozenset(algorithm.init_client(World(1, 1), Draw(0, 0, np.arange(1))))


def gradient_alone(loss: Tensor) -> Tensor:
    """0, with the gradient of a loss."""
    return loss - loss.detach()
