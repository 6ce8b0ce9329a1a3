"""Kernels derived from an algorithm's own loss: built at the first use, compared with the generic path, and refused if they differ.

What a kernel cannot do takes the generic path; the log says why, once, with the line of the method's file.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbench.contract.algorithm import Algorithm, Batch, Context, Phase, Stage, Tensors
from fedbench.kernels.compiler import build, driver, trace
from fedbench.kernels.compiler.expressions import Constants
from fedbench.kernels.compiler.graph import Graph, Value
from fedbench.kernels.compiler.indices import LANE
from fedbench.kernels.compiler.keeping import kept
from fedbench.kernels.compiler.record import slopes
from fedbench.kernels.compiler.schedule import reached
from fedbench.kernels.compiler.spread import BatchGraph
from fedbench.kernels.compiler.step import Step
from fedbench.kernels.compiler.sums import together
from fedbench.kernels.compiler.weights import Degrees
from fedbench.kernels.optimizers import TINY
from fedbench.kernels.threads import share_out
from fedbench.simulation.blocks import Block

log = logging.getLogger("fedbench")

NO_LIMIT = 1 << 60
"""of the steps, where a stage has none"""
COPIED = 15
"""what it costs to put a number of a row into a batch and back, in operations on numbers that lie there already"""
IN_A_LAYER = 0.15
"""what a product of a layer costs, whose sums stay in registers; both measured on fedmf, FedEM, fedavg_ncf and a linear scorer, ml-100k"""
WORTH_BOTH = 0.1
"""share of the work that must be saved before a kernel is compiled in both ways to hold rows"""
Shapes = dict[str, tuple[int | str, ...]]


class Watched(Context):
    """A context that remembers whether the round was asked for."""

    asked = False

    def __getattribute__(self, name: str) -> Any:
        if name == "round":
            object.__setattr__(self, "asked", True)
        return super().__getattribute__(name)


def watched(algorithm: Algorithm) -> tuple[Algorithm, Watched]:
    """The algorithm in its round, and what tells whether it asked for it."""
    context = Watched(algorithm.context.round, algorithm.context.world)
    object.__setattr__(context, "asked", False)
    other = algorithm.at(algorithm.context.round, algorithm.context.world)
    object.__setattr__(other, "context", context)
    return other, context


@dataclass(frozen=True, eq=False)
class Kernel:
    """A compiled way to train the clients of one algorithm by the phases of one stage."""

    model: driver.Model
    module: ModuleType
    numbers: tuple[float, ...]
    changes: bool
    """the loss depends on the round, so its numbers are looked up in every round"""

    @property
    def tables(self) -> dict[driver.Key, int]:
        return self.model.tables

    @property
    def params(self) -> dict[driver.Key, int]:
        return self.model.params

    @property
    def names(self) -> tuple[str, ...]:
        """What it trains."""
        return tuple(one.name for one in self.model.updates)

    def train(
        self,
        samples: tuple[np.ndarray, ...],
        arrays: Mapping[driver.Key, tuple[np.ndarray, np.ndarray]],
        outs: Mapping[str, tuple[np.ndarray, int]],
        keeps: Mapping[str, tuple[np.ndarray, np.ndarray]],
        phases: tuple[Phase, ...],
        plan: tuple[int, int, int, int, float],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Running mean losses and steps, [C] each. What is held and trained changes in place.

        samples: see driver.SAMPLES. arrays: key -> [X, ...] and which of them is each client's. outs: trained table -> rows of the upload
        and what they are to hold: 0 nothing (the table itself is written), 1 changes, 2 values. keeps: trained table -> another that
        keeps its rows too, [X, ...], and which of them is each client's.
        plan: first epoch, epochs, samples a step, steps at most, tolerance of the early stop.
        """
        some = next(iter(arrays.values()))[0]
        kind, clients = some.dtype.type, len(samples[0])
        given: list[Any] = [*samples]
        # array[at[c]] is client c's; rows follow one another, whatever shape each has
        for key, width in self.model.tables.items():
            array, at = arrays[key]
            given += [array.reshape(len(array), -1, width), at]
        for key in self.model.params:
            array, at = arrays[key]
            given += [array.reshape(len(array), -1), at]
        for name, width in self.model.trained_tables.items():
            # numba compiles for types: an argument that is not used must still have one
            array, what = outs.get(name, (np.empty((0, width), some.dtype), 0))
            given += [array.reshape(-1, width), what]
            array, at = keeps.get(name, (np.empty((1, 0, width), some.dtype), np.zeros(clients, np.int64)))
            given += [array.reshape(len(array), array.shape[1], width), at]
        how, clips = driver.how_rows(self.model.updates, phases)
        first, epochs, batch, most, tolerance = plan
        numbers = np.array(self.numbers or (0.0,), some.dtype)
        loss, steps = np.zeros(clients), np.zeros(clients, np.int64)
        given += [first, epochs, batch, most, float(tolerance), kind(TINY[some.itemsize]), np.array(how), np.array(clips), numbers]
        with trace.compiling():
            share_out(self.module.train, clients, *given, loss, steps)
        return loss, steps


@dataclass(frozen=True, eq=False)
class Usual:
    """Clients as the data has them, by which the way to hold rows is chosen: the same for every process and after every restart."""

    samples: np.ndarray
    """[U] of each client in a round"""
    rows: np.ndarray
    """[U] that each is expected to touch"""

    @classmethod
    def of(cls, train_counts: np.ndarray, items: int, each: int) -> Usual:
        """From how many training items clients have; each: negatives for each of them, drawn from the other items."""
        mine = train_counts[train_counts > 0]
        others = np.maximum(1, items - mine)
        # k draws among n others reach n · (1 - (1 - 1/n)^k), about n · (1 - exp(-k/n)), different ones
        return cls(mine * (1 + each), mine + others * (1 - np.exp(-each * mine / others)))

    def steps(self, batch: int) -> tuple[np.ndarray, np.ndarray]:
        """[U] rows that all steps of an epoch go over: all rows of a client in each, or those of the batch alone."""
        whole = -(-self.samples // batch) * self.rows
        return whole, np.minimum(whole, self.samples)


NOBODY = Usual(np.zeros(0, np.int64), np.zeros(0))


class Kernels:
    """The derived kernels of one engine."""

    def __init__(self) -> None:
        self.known: dict[Any, Any] = {}
        """kernels and closed forms, None where there can be none"""
        self.made_in: dict[Any, int] = {}
        """the round in which the numbers of each were looked up"""
        self.said: set[str] = set()
        self.usual = NOBODY
        self.plans: dict[Any, Any] = {}
        """how cohorts are trained in place, by kernel and what lies in the store, see in_place.py"""
        self.off = False
        """a kernel differed from the generic path: none is used any more"""
        self.compared: dict[ModuleType, bool] = {}
        """kernels that were compared with the generic path, and whether they agreed"""

    def fitting(self, algorithm: Algorithm, block: Block, held: Tensors, sent: Tensors, stage: Stage) -> Kernel | None:
        """The kernel for a stage of a block; None if there is none."""
        shapes = shapes_of(algorithm, held), shapes_of(algorithm, sent)
        return self.training(algorithm, stage, shapes)

    def refuse(self, algorithm: Algorithm, reason: str) -> None:
        if reason not in self.said:
            self.said.add(reason)
            log.info("%s: no kernel, for %s; the generic path runs it (slower)", algorithm.name or type(algorithm).__name__, reason)

    def made(self, algorithm: Algorithm, stage: Stage, shapes: tuple[Shapes, Shapes]) -> Kernel:
        return made(algorithm, stage, shapes, self.usual)

    def train(
        self, kernel: Kernel, algorithm: Algorithm, block: Block, held: Tensors, sent: Tensors, stage: Stage, epoch: int
    ) -> tuple[Tensors, Tensor, Tensor]:
        return train_block(kernel, algorithm, block, held, sent, stage, epoch)

    def training(self, algorithm: Algorithm, stage: Stage, shapes: tuple[Shapes, Shapes]) -> Kernel | None:
        """The kernel for a stage, made now if it is new; None if there is none.

        shapes: of what a client holds and was sent, "n" for touched rows.
        """
        structure = tuple(map(structure_of, stage.phases))
        key = structure, tuple(sorted(shapes[0].items())), tuple(sorted(shapes[1].items()))
        return self.looked_up(key, algorithm, lambda: self.made(algorithm, stage, shapes))

    def looked_up(self, key: Any, algorithm: Algorithm, make: Callable[[], Any]) -> Any:
        """What was made for a key, made now if it is new or changes from round to round; None if it cannot be, and the log says why."""
        known = self.known.get(key)
        if key in self.known and (known is None or not known.changes or self.made_in[key] == algorithm.context.round):
            return known
        try:
            self.known[key], self.made_in[key] = make(), algorithm.context.round
        except Exception as error:  # whatever it is: the generic path runs the method, and says what is wrong with it if anything is
            log.debug("no kernel was derived", exc_info=True)
            said = isinstance(error, trace.Unsupported | NotImplementedError)
            self.refuse(algorithm, str(error) if said else f"{type(error).__name__} while it was derived ({error})")
            self.known[key] = None
        return self.known[key]


def structure_of(phase: Phase) -> tuple[Any, ...]:
    """What of a phase is part of a kernel's text; rates and weights are its arguments."""
    switches = bool(phase.weight_decay), bool(phase.clip), bool(phase.momentum), phase.lr_decay == 1
    return phase.names, phase.optimizer, switches, tuple(sorted((name, pull.target) for name, pull in phase.pull.items()))


def made(algorithm: Algorithm, stage: Stage, shapes: tuple[Shapes, Shapes], usual: Usual) -> Kernel:
    """Trace, write and load a kernel; numba compiles it when it is first called."""
    held, sent = shapes
    watching, context = watched(algorithm)
    constants, graphs, common = Constants(), [], BatchGraph()
    all_rows = False
    for phase in stage.phases:
        graph, outputs = gradient_graph(watching, phase, held, sent, common)
        all_rows |= Degrees().needs_all_rows(outputs)
        graphs.append((graph, outputs))
    updates = tuple(update(algorithm, number, name, phase, held, sent) for number, phase in enumerate(stage.phases) for name in phase.names)
    batch = stage.batch_size or NO_LIMIT
    tables = [one for one in updates if one.table]
    # of a table that two phases move, each phase has moments: there is no one step to catch up on
    once = len({one.name for one in tables}) == len(tables)
    gather, dense = (False, True) if all_rows else ways_to_hold(graphs, usual, batch)
    for _, outputs in graphs[:-1]:
        del outputs["loss"]  # the running mean is that of the last phase
    # missed steps are made up for at one rate, so not where rates decay
    lazy = once and not any(one.moves_all for one in tables) and all(phase.lr_decay == 1 for phase in stage.phases)
    models: dict[bool, driver.Model] = {}
    found = kept(common, [(outputs, set(phase.names)) for phase, (_, outputs) in zip(stage.phases, graphs, strict=True)])
    # dense first: steps that move no table at once serve both ways, and are written once
    for fuse in [True] * dense + [False] * gather:
        steps = []
        for number, (phase, (graph, outputs)) in enumerate(zip(stage.phases, graphs, strict=True)):
            # a table steps while its gradient is made only if nothing must be known first: a clip needs the whole norm, a pull its target
            plain = fuse and phase.optimizer == "adam" and not phase.clip and not phase.pull
            ready = [one.name for one in updates if one.phase == number and one.table and plain and len(held[one.name]) == 2]
            other = models[True].steps[number] if models else None
            same = other is not None and not other.fused
            name = f"step_{number}" if other is None else f"step_{number}_of_batch"
            steps.append(other if same and other is not None else Step(name, graph, outputs, constants, ready, found[number]))
        models[fuse] = driver.Model(tuple(steps), updates, lazy)
    model = next(iter(models.values()))
    texts = {step.name: step.text for one in models.values() for step in one.steps}
    acts = max(one.acts for one in models.values())
    text = build.module_text(type(algorithm).__name__, acts, *texts.values(), driver.train_text(models.get(False), models.get(True)))
    return Kernel(model, build.load(text), tuple(constants.values), context.asked)


def ways_to_hold(graphs: list[Any], usual: Usual, batch: int) -> tuple[bool, bool]:
    """Whether a kernel is to put the rows of a batch together for each step, and whether it is to take all rows along.

    Both, for clients with several batches and with one, where that saves a tenth of the work or more: it takes longer to compile.
    """
    whole, used = usual.steps(batch)
    gather = costs_less_to_gather(graphs, float(whole.sum()), float(used.sum()))
    work, copied = work_of(graphs)
    still, put = whole * work, used * (work + copied)
    each = np.where(usual.samples > batch, put, still).sum()
    both = bool(each < (1 - WORTH_BOTH) * min(still.sum(), put.sum()))
    return gather or both, not gather or both


def work_of(graphs: list[Any]) -> tuple[float, float]:
    """Operations of all phases on the numbers of a row, and those of putting a row into a batch and back."""
    tables = {v.how["key"]: v.size for _, outputs in graphs for v in reached(outputs.values()) if v.op == "table"}
    return sum(lane_work(outputs, IN_A_LAYER) for _, outputs in graphs), COPIED * sum(tables.values())


def costs_less_to_gather(graphs: list[Any], whole: float, used: float) -> bool:
    """Whether a batch's rows are better put together for each step than all rows taken along with weight 0.

    whole, used: rows that the steps then go over
    """
    work, copied = work_of(graphs)
    return used * (work + copied) < whole * work


def lane_work(outputs: Mapping[str, Value], in_a_layer: float = 1.0) -> float:
    """Operations on the numbers of one sample; in_a_layer: what a product of a layer counts."""
    total = 0.0
    for v in reached(outputs.values()):
        if v.op in ("mix", "prod"):
            products = math.prod(n for one in v.args for n in one.features)
            total += in_a_layer * (products // (int(v.args[1].shape[0]) if v.op == "mix" else 1))
        elif v.lane and v.op in ("ew", "feature_sum", "feature_max", "lane_sum", "column_sums"):
            total += max(one.size for one in v.inputs) if v.inputs else v.size
    return total


def gradient_graph(
    algorithm: Algorithm, phase: Phase, held: Shapes, sent: Shapes, within: Graph | None = None
) -> tuple[Any, dict[str, Value]]:
    """The graph of the loss and of its gradient by the names of a phase. within: a graph to add it to."""
    # in float64, so that constants keep their digits whatever a run's type is
    leaves = examples(held, sent, torch.float64)

    def function(*tensors: Tensor) -> list[Tensor]:
        mine, theirs, batch = given_to_client(dict(zip(leaves, tensors, strict=True)))
        part = {name: mine[name] for name in phase.names}
        found, value = slopes(lambda part: algorithm.loss({**mine, **part}, theirs, batch), part)
        return [*(found[name] for name in phase.names), value]

    graph, outputs = trace.trace(function, leaves, [*phase.names, "loss"], within)
    return graph, {name: together(graph, v) if v.lane else v for name, v in outputs.items()}


def examples(held: Shapes, sent: Shapes, dtype: torch.dtype) -> dict[trace.Key, Tensor]:
    """What a function of held, sent and a batch is recorded with."""
    leaves: dict[trace.Key, Tensor] = {("held", name): trace.example(shape, dtype) for name, shape in held.items()}
    leaves |= {("sent", name): trace.example(shape, dtype) for name, shape in sent.items()}
    leaves[("index", "items")] = torch.zeros(trace.SAMPLES, dtype=torch.int64)
    leaves |= {("sample", name): torch.ones(trace.SAMPLES, dtype=dtype) for name in ("label", "weight")}
    leaves[("sample", "rows")] = torch.ones(trace.ROWS, dtype=dtype)
    return leaves


def given_to_client(given: Mapping[trace.Key, Tensor]) -> tuple[Tensors, Tensors, Batch]:
    """Held, sent and batch of such leaves."""
    mine = {name: value for (kind, name), value in given.items() if kind == "held"}
    theirs = {name: value for (kind, name), value in given.items() if kind == "sent"}
    batch = Batch(given["index", "items"], given["sample", "label"], given["sample", "weight"], given["sample", "rows"])
    return mine, theirs, batch


def update(algorithm: Algorithm, number: int, name: str, phase: Phase, held: Shapes, sent: Shapes) -> driver.Update:
    width = int(np.prod([n for n in held[name] if isinstance(n, int)], initial=1))
    target = None
    if name in phase.pull:
        to = phase.pull[name].target
        target = ("sent" if to in sent else "held", to)
    decays = phase.weight_decay > 0
    return driver.Update(number, name, name in algorithm.tables, width, phase.optimizer, decays, phase.momentum > 0, target, phase.clip > 0)


def shapes_of(algorithm: Algorithm, tensors: Tensors) -> Shapes:
    """Shapes of one client's tensors, from those of a block [C, ...]; "n" in place of touched rows."""
    return {name: shape_of(value[0], name in algorithm.tables) for name, value in tensors.items()}


def shape_of(value: Tensor, table: bool) -> tuple[int | str, ...]:
    """Shape of one client's tensor; "n" in place of the rows of a table."""
    shape = (LANE, *value.shape[1:]) if table else tuple(value.shape)
    return shape if value.is_floating_point() else (*shape, trace.WHOLE)


def as_array(value: Tensor, dtype: torch.dtype) -> np.ndarray:
    """For a kernel, in which whole numbers lie as numbers of its type too."""
    return value.to(dtype).contiguous().numpy()


def train_block(
    kernel: Kernel, algorithm: Algorithm, block: Block, held: Tensors, sent: Tensors, stage: Stage, epoch: int
) -> tuple[Tensors, Tensor, Tensor]:
    """Train a block by a derived kernel. Returns what is held then, running mean losses and steps."""
    # kernels write in place, and what was sent to all is one tensor seen by many clients
    held = {name: value.clone(memory_format=torch.contiguous_format) for name, value in held.items()}
    dtype = next(value.dtype for value in held.values() if value.is_floating_point())
    everyone = np.arange(len(block.counts))
    width, rows = block.local.shape[1], block.rows.shape[1]
    # in a block, a client's table is its touched rows alone: row t is number t, and all lists of rows are 0, 1, 2, ...
    samples = (
        *(block.stream, everyone * width, block.counts, block.local.reshape(-1).numpy().astype(np.int32)),
        *(block.label.reshape(-1).numpy().astype(np.float32), 0 * everyone, block.touched, np.arange(rows, dtype=np.int32)),
    )
    arrays = {("held", name): (as_array(value, dtype), everyone) for name, value in held.items()}
    arrays |= {("sent", name): (as_array(value, dtype), everyone) for name, value in sent.items()}
    most = NO_LIMIT if stage.max_steps is None else stage.max_steps
    size = min(stage.batch_size or NO_LIMIT, max(1, width))
    loss, steps = kernel.train(samples, arrays, {}, {}, stage.phases, (epoch, stage.epochs, size, most, algorithm.stop_below))
    return held, torch.from_numpy(loss), torch.from_numpy(steps)


def few_of(block: Block, clients: int) -> Block:
    """The first clients of a block alone."""
    some = slice(0, clients)
    kept = block.real[some].reshape(-1).nonzero().reshape(-1)
    names = ("position", "clients", "rows", "real", "local", "label", "count", "counts", "height", "touched", "key", "stream", "halves")
    return replace(block, valid=kept, **{name: getattr(block, name)[some] for name in names})
