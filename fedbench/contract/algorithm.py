"""The contract between an algorithm and the engine.

An algorithm is a frozen dataclass: its fields are its flags (the sentence under a field is its --help text) and its methods are
small pure functions. Those that run on a device are written for ONE client; the engine maps them over many.

Names of tensors. A *table* has one row an item: [M, ...]. Which names are tables is said in `tables`. While a client trains it
holds only the rows that its samples touch, [T, ...], and `batch.items` indexes into those rows; so an algorithm never needs to know.
A table that `init_client` returns is the client's own (it is kept between rounds); one that only the server sends is shared.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedbench import text
from fedbench.errors import UsageError

if TYPE_CHECKING:
    from fedbench.contract.randomness import Draw
    from fedbench.contract.uploads import Uploads

Tensors = dict[str, Tensor]
OPTIMIZERS = ("adam", "adamw", "sgd")
PARTS = ("all", "support", "query")


@dataclass(frozen=True)
class World:
    """What an algorithm may know about the federation."""

    clients: int
    items: int
    rating_min: float = 0.0
    """the rating scale"""
    rating_max: float = 1.0


class Batch(NamedTuple):
    """One step's samples of one client."""

    items: Tensor
    """[B] index into the rows that the client holds"""
    label: Tensor
    """[B] 1 for an interaction, 0 for a negative; on a rating split the rating, or what `Algorithm.extra` says of an item without one"""
    weight: Tensor
    """[B] 1 for a sample, 0 for padding"""


class Extra(NamedTuple):
    """Items outside its training items that a client adds to its samples of a round."""

    each: int
    """so many for each training item"""
    rating: str = "mean"
    """the label they get on a rating split: mean (the client's mean rating) or unknown (not a number: the loss knows what to do)"""


class Phase(NamedTuple):
    """One optimizer step a batch: the names it moves and how."""

    names: tuple[str, ...]
    lr: float
    optimizer: str = "adam"
    """adam, adamw or sgd; its state is new each round"""
    weight_decay: float = 0.0
    """decoupled decay of adamw: every step first multiplies what it moves by 1 - lr·weight_decay"""
    clip: float = 0.0
    """largest norm of a client's gradient over all names of the phase; 0: not clipped"""

    def problem(self, held: Collection[str]) -> str:
        """What is wrong with it for a client that holds these names; "" if nothing is."""
        if isinstance(self.names, str) or not self.names:
            return f"names must be a tuple of the tensors it moves, such as ('items',), not {self.names!r}"
        if unknown := [name for name in self.names if name not in held]:
            return f"it moves {unknown[0]!r}, which the client does not hold{nearest(unknown[0], held)}"
        if self.optimizer not in OPTIMIZERS:
            return f"there is no optimizer {self.optimizer!r}{nearest(self.optimizer, OPTIMIZERS)}"
        for what, value in (("lr", self.lr), ("weight_decay", self.weight_decay), ("clip", self.clip)):
            if not (math.isfinite(value) and value >= 0):
                return f"{what} must be 0 or more, not {value}"
        if self.weight_decay and self.optimizer != "adamw":
            return f"weight_decay belongs to adamw; {self.optimizer} would ignore it"
        return ""

    def decay(self, name: str) -> float:
        """What a step multiplies a number of `name` by that no sample touches."""
        return 1 - self.lr * self.weight_decay if self.optimizer == "adamw" and name in self.names else 1.0


class Stage(NamedTuple):
    """A part of a client's local work: optimizer steps over batches, or a closed form."""

    phases: tuple[Phase, ...] = ()
    """the optimizer steps of a batch, in order; none: `Algorithm.solve` is called once with all samples of the stage"""
    epochs: int = 1
    batch_size: int | None = None
    """samples a step; all of the stage's if not given"""
    max_steps: int | None = None
    """steps at most"""
    part: str = "all"
    """the samples it works on: all, or the support or query half, which each client draws anew each round"""
    max_samples: int | None = None
    """samples at most, drawn anew each round"""
    fused: Any = None
    """a description that lets the engine take a fused kernel instead of the generic path (see fedbench/kernels/fused.py and ridge.py)"""

    def problem(self, held: Collection[str]) -> str:
        """What is wrong with it for a client that holds these names; "" if nothing is."""
        if isinstance(self.phases, Phase) or not all(isinstance(phase, Phase) for phase in self.phases):
            return "phases must be a tuple of Phase, such as (Phase(('items',), 0.1),)"
        if self.part not in PARTS:
            return f"there is no part {self.part!r} of the samples{nearest(self.part, PARTS)}"
        for what, value, least in (("epochs", self.epochs, 0), ("batch_size", self.batch_size, 1), ("max_steps", self.max_steps, 0),
                                   ("max_samples", self.max_samples, 1)):  # fmt: skip
            if value is not None and value < least:
                return f"{what} must be {least} or more, not {value}"
        said = (f"phase {place}: {problem}" for place, phase in enumerate(self.phases, 1) if (problem := phase.problem(held)))
        return next(said, "")


@dataclass(frozen=True)
class Answer:
    """What the server sends: the same tensors to everybody (`shared`), or row `slot[u]` of each of `personal` to client u."""

    shared: Tensors = field(default_factory=dict)
    personal: Tensors = field(default_factory=dict)
    slot: Tensor | None = None
    """[U] row of `personal` for each client, -1 for a client that is sent nothing"""


@dataclass(frozen=True)
class Algorithm:
    """Base of all algorithms. A subclass overrides a default by declaring the field again."""

    rounds: int = 100
    """communication rounds"""
    clients_per_round: int | None = None
    """clients a round (n); all of them if not given"""
    local_epochs: int = 10
    """passes over its own data that a client makes in a round (e)"""
    batch_size: int = 256
    """samples a local step"""
    negatives: int = 4
    """negative items drawn anew for each training interaction in each round"""
    dim: int = 16
    """size of an embedding (d)"""
    sampling: str = "uniform"
    """how a round's clients are chosen: uniform (anew each round) or queue (a shuffled queue that rotates, so that all take part)"""
    stop_below: float = 0.0
    """a client ends its local training when its running mean loss changes by less than this share in an epoch; 0: never"""

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    """one line for --list"""
    tables: ClassVar[tuple[str, ...]] = ("items",)
    published: ClassVar[Mapping[str, Any]] = {}
    """what `--recipe published` sets: the paper's own switches and hyper-parameters"""
    summed: ClassVar[tuple[str, ...]] = ()
    """uploads (no tables) that the server may see only as a sum over the cohort, by secure aggregation; see fedbench/parts/secure_sum.py"""
    mailed: ClassVar[tuple[str, ...]] = ()
    """the server's tensors that hold something for each of many clients: row `server["slot"][u]` is client u's, see aggregate.delivered.
    Where ranks share a run, each has its own clients'"""
    usual_cohort: ClassVar[int | None] = None
    """clients a round if --clients-per-round is not given: so many, or all if they are fewer; all if None"""
    reconstructs: ClassVar[bool] = False
    """clients keep nothing: evaluation rebuilds what `receive` adds to what was sent, by the first stage on all training samples"""
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"sampling": ("uniform", "queue")}
    """allowed words of the fields that take one; subclasses add theirs with `{**Algorithm.choices, ...}`"""
    rating_split: ClassVar[str] = "kfold"
    """what `--split auto` means where the algorithm predicts ratings"""

    @property
    def predicts_ratings(self) -> bool:
        """With these flags `score` is a rating, on the data's scale, and not only an order of items."""
        return False

    @property
    def samples_a_step(self) -> int:
        """Samples of a local step, where a method's flags decide it otherwise than by `batch_size`."""
        return self.batch_size

    def extra(self, when: int) -> Extra:
        """What a client adds to its training items in round `when`."""
        return Extra(0 if self.predicts_ratings else self.negatives)

    def check(self, world: World | None = None) -> None:
        """Raise UsageError for values that make no sense. Called with no world before the data is loaded, with it afterwards."""

    def must_be_positive(self, *names: str) -> None:
        """Raise UsageError if one of these fields is not over 0."""
        for name in names:
            if getattr(self, name) <= 0:
                raise UsageError(f"--{name.replace('_', '-')} must be over 0, not {getattr(self, name):g}")

    def must_not_be_negative(self, *names: str) -> None:
        """Raise UsageError if one of these fields is below 0."""
        for name in names:
            if getattr(self, name) < 0:
                raise UsageError(f"--{name.replace('_', '-')} must be 0 or more, not {getattr(self, name):g}")

    @property
    def evaluation_negatives(self) -> int:
        """Negatives a training item among the samples from which evaluation rebuilds a private part."""
        return 0 if self.predicts_ratings else self.negatives

    def cohort(self, clients: int) -> int:
        """How many of so many clients take part in a round."""
        return self.clients_per_round or min(self.usual_cohort or clients, clients)

    # ---- the server -------------------------------------------------------------------------------------------------
    def init_server(self, world: World, draw: Draw) -> Tensors:
        """What the server starts with."""
        return {}

    def answer(self, server: Tensors) -> Answer:
        """What the server sends to the clients of the next round, and to all clients in evaluation."""
        return Answer()

    def aggregate(self, server: Tensors, uploads: Uploads, draw: Draw) -> Tensors:
        """The server's step over a round's stacked uploads [n, ...]; it sees nothing else. `draw` is this round's randomness."""
        return server

    def for_new_users(self, server: Tensors) -> Tensors:
        """The server as clients meet it that were not in training and learn what is private to them; a schedule begins anew."""
        return server

    # ---- one client --------------------------------------------------------------------------------------------------
    def init_client(self, world: World, draw: Draw) -> Tensors:
        """What a client keeps between rounds: private, never sent unless `upload` returns it."""
        return {}

    def receive(self, own: Tensors, sent: Tensors) -> Tensors:
        """What the client trains this round, from what it keeps and what it was sent (`sent` is {} if nothing). Row by row on tables."""
        return {**own, **sent}

    def phases(self, sent: Tensors) -> tuple[Phase, ...]:
        """The optimizer steps of a batch, in order; () if the client does not train."""
        return ()

    def stages(self, sent: Tensors) -> tuple[Stage, ...]:
        """The client's local work, in order: by default its phases over all samples; () if there is none."""
        phases = self.phases(sent)
        return (Stage(phases, self.local_epochs, self.samples_a_step, fused=self.fused(bool(sent))),) if phases else ()

    def solve(self, held: Tensors, sent: Tensors, batch: Batch) -> Tensors:
        """The closed form of a stage without phases: what it replaces in `held`, from all of the client's samples in the stage."""
        raise NotImplementedError

    def loss(self, held: Tensors, sent: Tensors, batch: Batch) -> Tensor:
        """One client's mean loss over a batch: a scalar."""
        raise NotImplementedError

    def upload(self, held: Tensors, sent: Tensors, samples: Tensor) -> Tensors:
        """Everything that leaves the device. Shared tables appear as the touched rows [T, ...] (their ids travel too), own tables whole.

        `samples` is the number of samples the client trained on; it leaves the device only if it is returned.
        """
        return {}

    def score(self, own: Tensors, sent: Tensors) -> Tensor:
        """[K] the client's score for each of the K item rows it is given: higher is better, or the predicted rating."""
        raise NotImplementedError

    def travels_whole(self, world: World) -> Mapping[str, int]:
        """Name -> rows of the table that the method sends whole in both directions, though only the rows that matter move here.

        Bytes are counted by it.
        """
        return {}

    def fused(self, sent: bool) -> Any:
        """A description that lets the engine take a fused kernel instead of the generic path, or None (see fedbench/kernels/fused.py).

        It stands for `receive`, `phases` and `loss`, with and without an answer from the server.
        """
        return None

    def fused_score(self, sent: bool) -> Any:
        """The same for `score`."""
        return None


def check_stages(algorithm: Algorithm, stages: tuple[Stage, ...], held: Collection[str]) -> None:
    """Raise UsageError for local work that makes no sense to a client that holds these names."""
    if isinstance(stages, Stage) or not all(isinstance(stage, Stage) for stage in stages):
        raise UsageError(f"{algorithm.name}: stages must return a tuple of Stage, such as (Stage(self.phases(sent)),)")
    for place, stage in enumerate(stages, 1):
        if problem := stage.problem(held):
            raise UsageError(f"{algorithm.name}: {f'stage {place}: ' if len(stages) > 1 else ''}{problem}")


def nearest(word: str, known: Collection[str]) -> str:
    """What to say after a word that is not among the known ones."""
    near = text.nearest(str(word), known)
    return f" ({f'did you mean {near[0]}? ' if near else ''}known: {', '.join(sorted(known)) or 'none'})"


def bce(logits: Tensor, batch: Batch) -> Tensor:
    """[B] -> scalar: mean binary cross-entropy over the samples that are not padding.

    Written with the label as a sign: sigmoid(logit) - 1 would lose all its digits for a large logit, and Adam would magnify the rest.
    """
    losses = -torch.nn.functional.logsigmoid((2 * batch.label - 1) * logits)
    return (batch.weight * losses).sum() / batch.weight.sum().clamp(min=1)
