"""The contract between an algorithm and the engine.

An algorithm is a frozen dataclass: its fields are its flags (the sentence under a field is its --help text) and its methods are
small pure functions. Those that run on a device are written for ONE client; the engine maps them over many.

Names of tensors. A *table* has one row an item: [M, ...]. `tables` says which names are tables and who keeps each: SHARED (the server,
which sends it) or OWN (the client, from round to round). While a client trains it holds only the rows that its samples touch, [T, ...],
and `batch.items` indexes into those rows; so an algorithm never needs to know.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from fedbench import text
from fedbench.contract.plugin_errors import fault
from fedbench.contract.search import tuned
from fedbench.errors import UsageError

if TYPE_CHECKING:
    from fedbench.contract.randomness import Draw
    from fedbench.contract.uploads import Uploads

Tensors = dict[str, Tensor]
SHARED, OWN = "shared", "own"
"""who keeps a table: the server, or each client its own"""
KEEPERS = (SHARED, OWN)
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
    new_users: bool = False
    """there are clients that are not in training and come when it is over, see `for_new_users`"""


@dataclass(frozen=True)
class Context:
    """What an algorithm's functions may know beside their tensors, as `self.context`."""

    round: int = 0
    """the round, from 1; in evaluation the last one that was trained"""
    world: World = World(0, 0)


class Batch(NamedTuple):
    """One step's samples of one client."""

    items: Tensor
    """[B] index into the rows that the client holds"""
    label: Tensor
    """[B] 1 for an interaction, 0 for a negative; on a rating split the rating, or what `Algorithm.extra` says of an item without one"""
    weight: Tensor
    """[B] 1 for a sample, 0 for padding"""
    rows: Tensor = torch.ones(())
    """[T] 1 for a row of the held tables, 0 for padding: a term over held rows must be weighed by it"""


class Extra(NamedTuple):
    """Items outside its training items that a client adds to its samples of a round."""

    each: int
    """so many for each training item"""
    rating: str = "mean"
    """the label they get on a rating split: mean (the client's mean rating) or unknown (not a number: the loss knows what to do)"""


class Pull(NamedTuple):
    """weight/2·|row - target|², for every row of a table that the client holds, touched by a sample or not."""

    target: str
    """the tensor that the rows are pulled to, of the same shape: as it was sent or, if it was not, as the client holds it"""
    weight: float


class Phase(NamedTuple):
    """One optimizer step a batch: the names it moves and how. All names move by one gradient, taken before any of them does."""

    names: tuple[str, ...]
    lr: float | Mapping[str, float]
    """the learning rate, or one for each name: {"user": 0.1, "items": 5.0}"""
    optimizer: str = "adam"
    """adam, adamw or sgd; its state is new each round"""
    weight_decay: float = 0.0
    """adamw: every step first multiplies what it moves by 1 - lr·weight_decay. sgd: weight_decay·value joins the gradient, as in torch"""
    clip: float = 0.0
    """largest norm of a client's gradient over all names of the phase; 0: not clipped"""
    momentum: float = 0.0
    """of sgd, as in torch"""
    lr_decay: float = 1.0
    """what the rate is multiplied by after every step"""
    pull: Mapping[str, Pull] = MappingProxyType({})
    """name -> where its rows are pulled to. It joins sgd's gradient; with adam and adamw it is decoupled, as adamw's decay is: every step
    first moves a row by lr·weight of the way. Not part of the loss that is reported. Rows that no sample touches move too, in own tables"""

    def problem(self, held: Collection[str], sent: Collection[str] = ()) -> str:
        """What is wrong with it for a client that holds these names and was sent those; "" if nothing is."""
        if isinstance(self.names, str) or not self.names:
            return f"names must be a tuple of the tensors it moves, such as ('items',), not {self.names!r}"
        if not isinstance(self.names, tuple | list) or not all(isinstance(name, str) for name in self.names):
            return f"names must be a tuple of the tensors it moves, such as ('items',), not {self.names!r}"
        if twice := [name for name in self.names if list(self.names).count(name) > 1]:
            return f"it moves {twice[0]!r} twice; name it once"
        if unknown := [name for name in self.names if name not in held]:
            return f"it moves {unknown[0]!r}, which the client does not hold{nearest(unknown[0], held)}"
        if self.optimizer not in OPTIMIZERS:
            return f"there is no optimizer {self.optimizer!r}{nearest(self.optimizer, OPTIMIZERS)}"
        if isinstance(self.lr, Mapping) and set(self.lr) != set(self.names):
            return f"lr must have a rate for each of {', '.join(self.names)}, not for {', '.join(self.lr) or 'none'}"
        rates = {f"lr of {name}": rate for name, rate in self.lr.items()} if isinstance(self.lr, Mapping) else {"lr": self.lr}
        for what, value in {**rates, "weight_decay": self.weight_decay, "clip": self.clip, "momentum": self.momentum}.items():
            # True is an int to Python, but no rate
            if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value >= 0):
                return f"{what} must be a number, 0 or more, not {value!r}"
        if not (isinstance(self.lr_decay, int | float) and 0 < self.lr_decay <= 1):
            return f"lr_decay must be over 0 and at most 1, not {self.lr_decay!r}"
        if self.weight_decay and self.optimizer == "adam":
            return "weight_decay belongs to adamw and sgd; adam would ignore it"
        if self.momentum and (self.optimizer != "sgd" or self.momentum >= 1):
            return f"momentum belongs to sgd and is below 1, not {self.momentum:g} for {self.optimizer}"
        return self._pull_problem({*held, *sent})

    def _pull_problem(self, known: Collection[str]) -> str:
        if not isinstance(self.pull, Mapping):
            return f"pull must map names to Pull(target, weight), not be {self.pull!r}"
        for name, pull in self.pull.items():
            if name not in self.names:
                return f"it pulls {name!r}, which it does not move{nearest(name, self.names)}"
            if not isinstance(pull, Pull):
                return f"pull must map names to Pull(target, weight), not {name!r} to {pull!r}"
            if pull.target not in known:
                return f"it pulls {name!r} to {pull.target!r}, which the client neither holds nor was sent{nearest(pull.target, known)}"
            if not isinstance(pull.weight, int | float) or not (math.isfinite(pull.weight) and pull.weight >= 0):
                return f"the weight of a pull must be a number, 0 or more, not {pull.weight!r}"
        return ""

    def rate(self, name: str) -> float:
        """The learning rate of a name in the first step."""
        return self.lr[name] if isinstance(self.lr, Mapping) else self.lr


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
    ridge: Any = None
    """of a closed form: the least squares that `solve` solves, a Ridge of fedbench/parts/ridge.py, for which there is a kernel"""

    def problem(self, held: Collection[str], sent: Collection[str] = ()) -> str:
        """What is wrong with it for a client that holds these names and was sent those; "" if nothing is."""
        several = isinstance(self.phases, tuple | list) and not isinstance(self.phases, Phase)
        if not several or not all(isinstance(phase, Phase) for phase in self.phases):
            return "phases must be a tuple of Phase, such as (Phase(('items',), 0.1),)"
        if self.part not in PARTS:
            return f"there is no part {self.part!r} of the samples{nearest(self.part, PARTS)}"
        for what, value, least in (("epochs", self.epochs, 0), ("batch_size", self.batch_size, 1), ("max_steps", self.max_steps, 0),
                                   ("max_samples", self.max_samples, 1)):  # fmt: skip
            if value is None and what != "epochs":
                continue
            if isinstance(value, bool) or not isinstance(value, Integral):
                return f"{what} must be a whole number, not {value!r}"
            if value < least:
                return f"{what} must be {least} or more, not {value}"
        said = (f"phase {place}: {problem}" for place, phase in enumerate(self.phases, 1) if (problem := phase.problem(held, sent)))
        if wrong := next(said, ""):
            return wrong
        moved = {name for phase in self.phases for name in phase.names} - {*sent}
        for target in (pull.target for phase in self.phases for pull in phase.pull.values() if isinstance(pull, Pull)):
            if target in moved:
                return f"rows are pulled to {target!r}, which moves itself; pull them to what was sent, or to a tensor that no phase moves"
        return ""


@dataclass(frozen=True)
class Answer:
    """What the server sends: the same tensors to everybody (`shared`), or row `slot[u]` of each of `personal` to client u."""

    shared: Tensors = field(default_factory=dict)
    personal: Tensors = field(default_factory=dict)
    slot: Tensor | None = None
    """[U] row of `personal` for each client, -1 for a client that is sent nothing personal"""
    instead: Tensors = field(default_factory=dict)
    """the same tensors to every client whose slot is -1, and to nobody else"""


@dataclass(frozen=True)
class Algorithm:
    """Base of all algorithms. A subclass overrides a default by declaring the field again."""

    rounds: int = 100
    """communication rounds"""
    clients_per_round: int | None = None
    """clients a round (n); all of them if not given"""
    local_epochs: int = tuned(10, 1, 10, log=True)
    """passes over its own data that a client makes in a round (e)"""
    batch_size: int = 256
    """samples a local step"""
    negatives: int = tuned(4, 1, 8)
    """negative items drawn anew for each training interaction in each round"""
    dim: int = tuned(16, choices=(8, 16, 32, 64))
    """size of an embedding (d)"""
    sampling: str = "uniform"
    """how a round's clients are chosen: uniform (anew each round) or queue (a shuffled queue that rotates, so that all take part)"""
    stop_below: float = 0.0
    """a client ends its local training when its running mean loss changes by less than this share in an epoch; 0: never"""

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    """one line for --list"""
    federated: ClassVar[bool] = True
    """False for centralised methods, which have a contract of their own: fedbench/contract/central.py"""
    context: ClassVar[Context] = Context()
    """the round and the size of the federation, for every function but `check`"""
    tables: ClassVar[Mapping[str, str]] = MappingProxyType({"items": SHARED})
    """names of tables, and who keeps each: SHARED or OWN. A name that only `upload` returns is SHARED too: it travels as touched rows"""
    scores: ClassVar[tuple[str, ...]] = ()
    """further readings of the model that every evaluation measures beside `score`: for each name a function `score_<name>(own, sent)`"""
    published: ClassVar[Mapping[str, Any]] = {}
    """what `--recipe published` sets: the paper's own switches and hyper-parameters"""
    summed: ClassVar[tuple[str, ...]] = ()
    """uploads (no own tables) that the server may see only as a sum over the cohort, by secure aggregation; see
    fedbench/parts/secure_sum.py. Of a shared table masks cover every row, so it travels whole: say so in `travels_whole`"""
    paired: ClassVar[tuple[str, ...]] = ()
    """shared tables of one number a touched row, v [T], that only `upload` returns and that stand for v vᵀ: what travels is the product of
    every pair of items, [M, M]. In `summed` too: the server sees the sum over the cohort; else each client's touched pairs"""
    per_client_server_state: ClassVar[tuple[str, ...]] = ()
    """names of server tensors that hold one row a client, such as FedEM's mixtures: client u's is row `server["slot"][u]`, see
    `delivered` in fedbench/parts/mixing.py. Workers that share a run keep only the rows of their own clients"""
    usual_cohort: ClassVar[int | None] = None
    """clients a round if --clients-per-round is not given: so many, or all if they are fewer; all if None"""
    reconstructs: ClassVar[bool] = False
    """clients keep nothing: evaluation rebuilds what `receive` adds to what was sent, by the first stage on all training samples"""
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"sampling": ("uniform", "queue")}
    """allowed words of the fields that take one; subclasses add theirs with `{**Algorithm.choices, ...}`"""
    later: ClassVar[tuple[str, ...]] = ()
    """fields that came when there were runs without them: at their defaults they are no part of a run's hash"""
    rating_split: ClassVar[str] = "kfold"
    """what `--split auto` means where the algorithm predicts ratings"""

    @property
    def own_tables(self) -> tuple[str, ...]:
        """The tables that clients keep."""
        return tuple(name for name, keeper in self.tables.items() if keeper == OWN)

    def at(self, round_: int, world: World) -> Self:
        """This algorithm in a round of a federation."""
        other = copy.copy(self)
        # a class variable, not a field: it is no flag and no part of equality, and frozen fields stay as they are
        object.__setattr__(other, "context", Context(round_, world))
        return other

    def with_epochs(self, epochs: int) -> Self:
        """This algorithm for clients that finish so many local epochs."""
        # `replace` makes a new object, which does not know its round
        return self if epochs == self.local_epochs else replace(self, local_epochs=epochs).at(self.context.round, self.context.world)

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

    def bits(self, world: World) -> Mapping[str, float]:
        """Name -> bits that one number of it takes on its way, up or down, where that is not what its type takes.

        1 for a binary code, 0 for what both sides make from a seed.
        """
        return {}

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

    def choose(self, server: Tensors, world: World, n: int, draw: Draw) -> Tensor | None:
        """[n] different client numbers: the cohort of the next round, where the server picks it. None: as `sampling` says."""
        return None

    def for_new_users(self, server: Tensors) -> Tensors:
        """Server state sent to cold-start users, with nothing personal in its answer; restarts any learning-rate schedule.

        Called on its own result, it returns the same again. It is called before the first round too.
        """
        return server

    # ---- one client --------------------------------------------------------------------------------------------------
    def init_client(self, world: World, draw: Draw) -> Tensors:
        """What a client keeps between rounds: private, never sent unless `upload` returns it."""
        return {}

    def receive(self, own: Tensors, sent: Tensors) -> Tensors:
        """What the client holds this round, from what it keeps and what it was sent (`sent` is {} if nothing).

        It is called on whole tables and on touched rows alike, so a row of the result may depend on that row of the tables alone.
        """
        return {**own, **sent}

    def phases(self, sent: Tensors) -> tuple[Phase, ...]:
        """The optimizer steps of a batch, in order; () if the client does not train."""
        return ()

    def stages(self, sent: Tensors) -> tuple[Stage, ...]:
        """The client's local work, in order: by default its phases over all samples; () if there is none."""
        phases = self.phases(sent)
        return (Stage(phases, self.local_epochs, self.samples_a_step),) if phases else ()

    def solve(self, held: Tensors, sent: Tensors, batch: Batch) -> Tensors:
        """The closed form of a stage without phases: what it replaces in `held`, from all of the client's samples in the stage."""
        raise NotImplementedError

    def loss(self, held: Tensors, sent: Tensors, batch: Batch) -> Tensor:
        """One client's mean loss over a batch: a scalar."""
        raise NotImplementedError

    def upload(self, held: Tensors, sent: Tensors, samples: Tensor) -> Tensors:
        """Everything that leaves the device. SHARED tables travel as the touched rows [T, ...] with their ids, OWN tables whole.

        held: what the client holds after training; sent: what it was sent. Rows of the result may depend on that row of the tables alone.
        samples: the number of samples the client trained on; it leaves the device only if it is returned.
        """
        return {}

    def keep(self, held: Tensors, sent: Tensors) -> Tensors:
        """What stays on the client after training, of the names that `init_client` made; of other names nothing stays.

        By default all of them as they are held. A tensor that is not returned stays as it was; own tables must be returned.
        """
        return held

    def score(self, own: Tensors, sent: Tensors) -> Tensor:
        """[K] the client's score for each of the K item rows it is given: higher is better, or the predicted rating."""
        raise NotImplementedError

    def score_clients(self, own: Tensors, sent: Tensors, items: Tensor | None) -> Tensor:
        """[C, K] what `score` gives C clients, where many are better scored at once; the base has none, and `score` is mapped.

        own: [C, ...] each, whole tables. sent: what is sent to all as it is, personal parts [C, ...]. items: [C, K], None: all of them.
        """
        raise NotImplementedError

    def travels_whole(self, world: World) -> Mapping[str, int]:
        """Name -> rows of the table that the method sends whole in both directions, though only the rows that matter move here.

        Bytes are counted by it.
        """
        return {}


def check_stages(algorithm: Algorithm, stages: tuple[Stage, ...], held: Collection[str], sent: Collection[str] = ()) -> None:
    """Raise UsageError for local work that makes no sense to a client that holds these names and was sent those."""
    cls = type(algorithm)

    def wrong(said: str) -> UsageError:
        # of a built-in method it is a flag that makes no sense, not a line of the method
        return UsageError(f"{algorithm.name}: {said}") if cls.__module__.startswith("fedbench.") else fault(cls, hook, said)

    hook = "stages" if cls.stages is not Algorithm.stages else "phases"
    if isinstance(stages, Stage) or not all(isinstance(stage, Stage) for stage in stages):
        raise wrong("stages must return a tuple of Stage, such as (Stage(self.phases(sent)),)")
    for place, stage in enumerate(stages, 1):
        if problem := stage.problem(held, sent):
            raise wrong(f"{f'stage {place}: ' if len(stages) > 1 else ''}{problem}")


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
