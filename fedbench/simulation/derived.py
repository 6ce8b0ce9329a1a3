"""Kernels derived from an algorithm's own loss: built at the first use, compared with the generic path, and refused if they differ.

What a kernel cannot do takes the generic path; the log says why, once, with the line of the method's file.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numba.core.errors import NumbaError
from torch import Tensor
from torch.func import grad_and_value

from fedbench.contract.algorithm import Algorithm, Batch, Context, Phase, Stage, Tensors
from fedbench.kernels import fused
from fedbench.kernels.compiler import build, driver, trace
from fedbench.kernels.compiler.graph import LANE, Value
from fedbench.kernels.compiler.schedule import reached
from fedbench.kernels.compiler.step import Constants, Step
from fedbench.kernels.compiler.weights import Degrees
from fedbench.kernels.optimizers import TINY
from fedbench.simulation.blocks import Block

log = logging.getLogger("fedbench")

NO_LIMIT = 1 << 60
"""of the steps, where a stage has none"""
SLOW = 2.0
"""seconds of compiling that are worth a line in the log"""
COPIED = 6
"""what it costs to put a number of a row into a batch and back, in operations on numbers that lie there already"""
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

    def train(
        self,
        samples: tuple[np.ndarray, ...],
        arrays: Mapping[driver.Key, tuple[np.ndarray, np.ndarray]],
        outs: Mapping[str, tuple[np.ndarray, int]],
        phases: tuple[Phase, ...],
        plan: tuple[int, int, int, int, float],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Running mean losses and steps, [C] each. What is held and trained changes in place.

        samples: see driver.SAMPLES. arrays: key -> [X, ...] and which of them is each client's. outs: trained table -> rows of the upload
        and what they are to hold: 0 nothing (the table itself is written), 1 changes, 2 values.
        plan: first epoch, epochs, samples a step, steps at most, tolerance of the early stop.
        """
        some = next(iter(arrays.values()))[0]
        kind, clients = some.dtype.type, len(samples[0])
        given: list[Any] = [*samples]
        for key, width in self.model.tables.items():
            array, at = arrays[key]
            given += [array.reshape(len(array), -1, width), at]
        for key in self.model.params:
            array, at = arrays[key]
            given += [array.reshape(len(array), -1), at]
        for name, width in self.model.trained_tables.items():
            array, what = outs.get(name, (np.empty((0, width), some.dtype), 0))
            given += [array.reshape(-1, width), what]
        how, clips = driver.how_rows(self.model, phases)
        first, epochs, batch, most, tolerance = plan
        numbers = np.array(self.numbers or (0.0,), some.dtype)
        loss, steps = np.zeros(clients), np.zeros(clients, np.int64)
        given += [first, epochs, batch, most, float(tolerance), kind(TINY[some.itemsize]), np.array(how), np.array(clips), numbers]
        try:
            fused.share_out(self.module.train, clients, *given, loss, steps)
        except NumbaError as error:
            raise trace.Unsupported(f"numba cannot compile it ({str(error).splitlines()[0]})") from error
        return loss, steps


class Kernels:
    """The derived kernels of one engine."""

    def __init__(self) -> None:
        self.known: dict[Any, Kernel | None] = {}
        self.said: set[str] = set()
        self.usual: tuple[int, int] | None = None
        """rows that a client touches, and the most samples of one"""
        self.plans: dict[Any, Any] = {}
        """how cohorts are trained in place, by kernel and what lies in the store, see in_place.py"""
        self.off = False
        """a kernel differed from the generic path: none is used any more"""
        self.compared: dict[Kernel, bool] = {}
        """kernels that were compared with the generic path, and whether they agreed"""

    def fitting(self, algorithm: Algorithm, block: Block, held: Tensors, sent: Tensors, stage: Stage) -> Kernel | None:
        """The kernel for a stage of a block; None if there is none."""
        if any(not value.is_floating_point() for value in (*held.values(), *sent.values())):
            self.refuse(algorithm, "a tensor of whole numbers is not what kernels are made of")
            return None
        shapes = shapes_of(algorithm, held), shapes_of(algorithm, sent)
        self.size_up(block.touched, block.counts)
        return self.training(algorithm, stage, shapes)

    def size_up(self, touched: np.ndarray, counts: np.ndarray) -> None:
        """Rows and samples of clients, by which the way to hold rows is chosen, once for a run."""
        if self.usual is None and len(counts):
            self.usual = int(np.median(touched)), int(counts.max())

    def refuse(self, algorithm: Algorithm, reason: str) -> None:
        if reason not in self.said:
            self.said.add(reason)
            log.info("%s: no kernel, for %s; the generic path runs it (slower)", algorithm.name or type(algorithm).__name__, reason)

    def training(self, algorithm: Algorithm, stage: Stage, shapes: tuple[Shapes, Shapes]) -> Kernel | None:
        """The kernel for a stage, made now if it is new; None if there is none.

        shapes: of what a client holds and was sent, "n" for touched rows.
        """
        structure = tuple(map(structure_of, stage.phases))
        key = structure, tuple(sorted(shapes[0].items())), tuple(sorted(shapes[1].items()))
        known = self.known.get(key)
        if key in self.known and (known is None or not known.changes):
            return known
        try:
            self.known[key] = made(algorithm, stage, shapes, *(self.usual or (1, 1)))
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


def made(algorithm: Algorithm, stage: Stage, shapes: tuple[Shapes, Shapes], typical: int, most_samples: int) -> Kernel:
    """Trace, write and load a kernel; numba compiles it when it is first called."""
    held, sent = shapes
    watching, context = watched(algorithm)
    constants, graphs = Constants(), []
    all_rows = False
    for phase in stage.phases:
        graph, outputs = gradient_graph(watching, phase, held, sent)
        all_rows |= Degrees().needs_all_rows(outputs)
        graphs.append((graph, outputs))
    updates = tuple(update(algorithm, number, name, phase, held, sent) for number, phase in enumerate(stage.phases) for name in phase.names)
    batch = stage.batch_size or NO_LIMIT
    tables = [one for one in updates if one.table]
    once = len({one.name for one in tables}) == len(tables)
    gather = batch < most_samples and not all_rows and costs_less_to_gather(graphs, tables, batch, typical)
    steps = []
    for number, (phase, (graph, outputs)) in enumerate(zip(stage.phases, graphs, strict=True)):
        plain = phase.optimizer == "adam" and not phase.clip and not phase.pull and not gather
        ready = [one.name for one in updates if one.phase == number and one.table and plain and len(held[one.name]) == 2]
        steps.append(Step(f"step_{number}", graph, outputs, constants, ready))
    lazy = once and not any(one.moves_all for one in tables) and all(phase.lr_decay == 1 for phase in stage.phases)
    model = driver.Model(tuple(steps), updates, lazy)
    text = build.module_text(
        type(algorithm).__name__, model.acts, *(step.text for step in steps), driver.train_text(model, gather, not gather)
    )
    return Kernel(model, build.load(text), tuple(constants.values), context.asked)


def costs_less_to_gather(graphs: list[Any], tables: list[driver.Update], batch: int, typical: int) -> bool:
    """Whether a batch's rows are better put together for each step than all rows taken along with weight 0."""
    work = sum(lane_work(outputs) for _, outputs in graphs)
    copied = COPIED * sum(one.width for one in tables)
    return min(batch, typical) * (work + copied) < typical * work


def lane_work(outputs: Mapping[str, Value]) -> int:
    """Operations on the numbers of one sample."""
    total = 0
    for v in reached(outputs.values()):
        if v.op in ("mix", "prod"):
            total += int(np.prod([n for one in v.args for n in one.features])) // max(1, int(v.args[1].shape[0]) if v.op == "mix" else 1)
        elif v.lane and v.op in ("ew", "feature_sum", "lane_sum", "column_sums"):
            total += max(one.size for one in v.inputs) if v.inputs else v.size
    return total


def gradient_graph(algorithm: Algorithm, phase: Phase, held: Shapes, sent: Shapes) -> tuple[Any, dict[str, Value]]:
    """The graph of the loss and of its gradient by the names of a phase."""
    leaves: dict[trace.Key, Tensor] = {("held", name): trace.example(shape) for name, shape in held.items()}
    leaves |= {("sent", name): trace.example(shape) for name, shape in sent.items()}
    leaves[("index", "items")] = torch.zeros(trace.SAMPLES, dtype=torch.int64)
    leaves |= {("sample", name): torch.ones(trace.SAMPLES, dtype=torch.float64) for name in ("label", "weight")}
    leaves[("sample", "rows")] = torch.ones(trace.ROWS, dtype=torch.float64)

    def function(*tensors: Tensor) -> list[Tensor]:
        given = dict(zip(leaves, tensors, strict=True))
        mine = {name: value for (kind, name), value in given.items() if kind == "held"}
        theirs = {name: value for (kind, name), value in given.items() if kind == "sent"}
        batch = Batch(given["index", "items"], given["sample", "label"], given["sample", "weight"], given["sample", "rows"])
        part = {name: mine[name] for name in phase.names}
        slopes, value = grad_and_value(lambda part: algorithm.loss({**mine, **part}, theirs, batch))(part)
        return [*(slopes[name] for name in phase.names), value]

    return trace.trace(function, leaves, [*phase.names, "loss"])


def update(algorithm: Algorithm, number: int, name: str, phase: Phase, held: Shapes, sent: Shapes) -> driver.Update:
    width = int(np.prod([n for n in held[name] if isinstance(n, int)], initial=1))
    target = None
    if name in phase.pull:
        to = phase.pull[name].target
        target = ("sent" if to in sent else "held", to)
    decays = phase.weight_decay > 0
    return driver.Update(number, name, name in algorithm.tables, width, phase.optimizer, decays, phase.momentum > 0, target, phase.clip > 0)


def shapes_of(algorithm: Algorithm, tensors: Tensors) -> Shapes:
    """Of blocks [C, ...]: of one client, "n" in place of touched rows."""
    return {name: (LANE, *value.shape[2:]) if name in algorithm.tables else tuple(value.shape[1:]) for name, value in tensors.items()}


def train_block(
    kernel: Kernel, algorithm: Algorithm, block: Block, held: Tensors, sent: Tensors, stage: Stage, epoch: int
) -> tuple[Tensors, Tensor, Tensor]:
    """Train a block by a derived kernel. Returns what is held then, running mean losses and steps."""
    held = {name: value.clone(memory_format=torch.contiguous_format) for name, value in held.items()}
    everyone = np.arange(len(block.counts))
    width, rows = block.local.shape[1], block.rows.shape[1]
    samples = (
        *(block.stream, everyone * width, block.counts, block.local.reshape(-1).numpy().astype(np.int32)),
        *(block.label.reshape(-1).numpy().astype(np.float32), 0 * everyone, block.touched, np.arange(rows, dtype=np.int32)),
    )
    arrays = {("held", name): (value.numpy(), everyone) for name, value in held.items()}
    arrays |= {("sent", name): (value.contiguous().numpy(), everyone) for name, value in sent.items()}
    most = NO_LIMIT if stage.max_steps is None else stage.max_steps
    size = min(stage.batch_size or NO_LIMIT, max(1, width))
    began = time.perf_counter()
    known = len(kernel.module.train.signatures)
    loss, steps = kernel.train(samples, arrays, {}, stage.phases, (epoch, stage.epochs, size, most, algorithm.stop_below))
    if len(kernel.module.train.signatures) > known and time.perf_counter() - began > SLOW:
        log.info("compiled a kernel for %s in %.0f s; it is kept for the next time", algorithm.name, time.perf_counter() - began)
    return held, torch.from_numpy(loss), torch.from_numpy(steps)


def few_of(block: Block, clients: int) -> Block:
    """The first clients of a block alone."""
    some = slice(0, clients)
    kept = block.real[some].reshape(-1).nonzero().reshape(-1)
    names = ("position", "clients", "rows", "real", "local", "label", "count", "counts", "touched", "stream", "halves")
    return replace(block, valid=kept, **{name: getattr(block, name)[some] for name in names})
