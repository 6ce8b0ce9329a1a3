"""The engine: write one client, run all of them.

A cohort is cut into blocks of like clients; a block is one set of tensors with a leading client dimension C. The algorithm's
functions for one client are mapped over it (torch.func.vmap), or, where the algorithm describes itself as something a fused kernel
knows, the kernel runs the whole local training. Nothing inside a step waits for the device.
"""

from __future__ import annotations

import copy
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor
from torch.func import grad_and_value, vmap

from fedbench.contract.algorithm import Algorithm, Answer, Batch, Phase, Stage, Tensors, World, check_stages
from fedbench.contract.randomness import keys
from fedbench.data.split import Samples, orders
from fedbench.kernels import fused, ridge
from fedbench.parts.mixing import Rows, Tables
from fedbench.parts.secure_sum import BYTES, masked_sum
from fedbench.simulation import kernel_check
from fedbench.simulation.client_store import ClientStore, Memory

WIDE = 16
"""a block of clients that only rebuild a private part is so many times as large: no gradients and moments need to stay in the cache"""
FULL_ROWS = 1 << 17
"""item rows of whole tables that are handled at once (merging and scoring)"""


@dataclass(frozen=True)
class Uploads:
    """All that the server sees of a round, in the order of the cohort."""

    world: World
    clients: Tensor
    """[n] client numbers"""
    tensors: Mapping[str, Tensor | Rows | Tables] = field(default_factory=dict)
    whole: Mapping[str, int] = field(default_factory=dict)
    """tables that travel whole, see Algorithm.travels_whole"""
    summed: tuple[str, ...] = ()
    """uploads that the server sees only as a sum, see `sealed`"""
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    unreadable: Tensor | None = None
    """[n] whether an upload arrived in another shape than asked for, so that its numbers here mean nothing"""
    room: Memory = Memory()  # noqa: RUF009 (it holds nothing)
    """where the server lays what it keeps for each of many clients"""

    def rows(self, name: str) -> Rows:
        """Touched rows of a shared table; `combine` and `senders` look at all clients, wherever their rows are."""
        value = self.tensors[name]
        assert isinstance(value, Rows)
        return value

    def dense(self, name: str, picked: Tensor | None = None) -> Tensor:
        """[n, ...] or, for the picked positions of the cohort, [S, ...]; no copy when all are picked."""
        value = self.tensors[name]
        if isinstance(value, Tables):
            return self.tables(name, picked).each(lambda tables: tables)
        assert isinstance(value, Tensor)
        return value if picked is None or len(picked) == len(value) else value[picked]

    def tables(self, name: str, picked: Tensor | None = None) -> Tables:
        """The same of whole tables, which stay where they are: with torchrun on the rank that has the client."""
        value = self.tensors[name]
        if isinstance(value, Tables):
            return value if picked is None else value.picked(picked)
        every = self.dense(name, picked)
        return Tables(every, 0, len(every))

    def sealed(self, seed: int, when: int) -> Uploads:
        """What reaches the server: uploads in `summed` are gone but for the sum of the clients' masked parts."""
        if not self.summed:
            return self
        clients = self.clients.cpu().numpy()
        sums = {name: masked_sum(self.dense(name), clients, seed, when) for name in self.summed if name in self.tensors}
        return replace(self, tensors={name: value for name, value in self.tensors.items() if name not in sums}, sums=sums)

    def total(self, name: str) -> Tensor:
        """[...] the sum over the cohort of a sealed upload."""
        return self.sums[name]

    def only(self, keep: Tensor) -> Uploads:
        """The uploads of the clients where `keep` [n] is true."""
        tensors: dict[str, Tensor | Rows | Tables] = {}
        for name, value in self.tensors.items():
            if isinstance(value, Rows):
                mine = keep.repeat_interleave(value.counts)
                tensors[name] = Rows(value.counts[keep], value.item[mine], value.value[mine], value.total)
            elif isinstance(value, Tables):
                tensors[name] = value.picked(keep.nonzero()[:, 0])
            else:
                tensors[name] = value[keep]
        return replace(self, clients=self.clients[keep], tensors=tensors, unreadable=None)

    def scaled(self, factor: Tensor) -> Uploads:
        """Every number of a client's upload times its factor [n]; a copy."""
        tensors: dict[str, Tensor | Rows | Tables] = {}
        for name, value in self.tensors.items():
            if isinstance(value, Rows):
                tensors[name] = value._replace(value=times(value.value, factor[value.client]))
            elif isinstance(value, Tables):
                tensors[name] = value._replace(value=times(value.value, factor[value.own]))
            else:
                tensors[name] = times(value, factor)
        return replace(self, tensors=tensors)

    def finite(self) -> Tensor:
        """[n] whether all that a client sent is finite."""
        return torch.stack([torch.ones_like(self.clients, dtype=torch.bool), *(norm.isfinite() for norm in self.norms().values())]).all(0)

    def norms(self) -> dict[str, Tensor]:
        """Name -> [n]: the norm of what each client sent under that name."""
        found = {}
        for name, value in self.tensors.items():
            if isinstance(value, Rows):
                square = flat(value.value).square().sum(1)
                found[name] = value.total(square.new_zeros(value.clients).index_add_(0, value.client, square)).sqrt()
            else:
                found[name] = value.each(norm_of_each) if isinstance(value, Tables) else norm_of_each(value)
        return found

    def bytes(self) -> int:
        """Size of everything in here that travelled: values, and 4 bytes for the id of each row."""
        total = 0
        for name, value in self.tensors.items():
            tensor = value if isinstance(value, Tensor) else value.value
            sent, id_ = (value.sent(), 4) if isinstance(value, Rows) else (len(self.clients), 0)
            numbers = math.prod(tensor.shape[1:])
            if name in self.whole:
                total += len(self.clients) * self.whole[name] * numbers * tensor.element_size()
            elif name in self.summed:
                total += sent * numbers * BYTES
            else:
                total += sent * (numbers * tensor.element_size() + id_)
        return total


def flat(values: Tensor) -> Tensor:
    """[n, ...] -> [n, k], also of nobody."""
    return values.reshape(len(values), math.prod(values.shape[1:]))


def norm_of_each(values: Tensor) -> Tensor:
    """[n, ...] -> [n]"""
    return torch.linalg.vector_norm(flat(values), dim=1)


@dataclass(frozen=True)
class Round:
    """What one round of a cohort left behind."""

    uploads: Uploads
    loss: Tensor
    """[n] each client's running mean loss"""
    bytes_down: int
    updates: int
    """numbers that optimizers moved: steps times the size of what a client trains, over all clients"""


@dataclass(frozen=True)
class Block:
    """C like clients packed in one tensor, on the run's device; short ones are padded."""

    position: np.ndarray
    """[C] positions in the cohort, on the host"""
    clients: Tensor
    """[C] client numbers"""
    rows: Tensor
    """[C, T] item numbers of the touched rows, padded with 0"""
    valid: Tensor
    """[R] positions in the flattened [C·T] that are not padding"""
    real: Tensor
    """[C, T] whether a row is not padding"""
    local: Tensor
    """[C, S] index into the touched rows"""
    label: Tensor
    """[C, S]"""
    count: Tensor
    """[C] samples"""
    counts: np.ndarray
    """[C] samples, on the host"""
    touched: np.ndarray
    """[C] rows, on the host"""
    stream: np.ndarray
    """[C] keys of the shuffles, on the host"""
    halves: np.ndarray
    """[C] keys of the support and query halves, on the host"""
    sent: bool
    """the server has something for these clients"""
    epochs: int
    """local epochs that these clients finish"""

    def order(self, epoch: int, batch: int) -> Tensor:
        """[C, S] the order of samples in an epoch; padding stays at the end."""
        return moved(self._shuffled(self.stream, epoch, batch), self.local.device)

    def _shuffled(self, stream: np.ndarray, epoch: int, batch: int) -> np.ndarray:
        flat = np.empty(int(self.counts.sum()), np.int64)
        ptr = np.concatenate([[0], np.cumsum(self.counts)])
        orders(stream, ptr, epoch, batch, flat)
        out = np.broadcast_to(np.arange(self.local.shape[1]), self.local.shape).copy()
        pad(flat, ptr, np.arange(len(self.counts)), out)
        return out

    def part(self, stage: Stage) -> Block:
        """The same clients with the samples of a stage alone: of the shuffled ones the first half (support) or the second (query)."""
        if stage.part == "all" and stage.max_samples is None:
            return self
        half = -(-self.counts // 2)
        first = half if stage.part == "query" else np.zeros_like(half)
        counts = {"all": self.counts, "support": half, "query": self.counts - half}[stage.part]
        counts = counts if stage.max_samples is None else np.minimum(counts, stage.max_samples)
        where = first[:, None] + np.arange(max(1, int(counts.max())))
        order = self._shuffled(self.halves, 0, 1)
        take = moved(np.take_along_axis(order, np.minimum(where, order.shape[1] - 1), axis=1), self.local.device)
        count = moved(counts, self.local.device)
        return replace(self, local=self.local.gather(1, take), label=self.label.gather(1, take), count=count, counts=counts)


@njit(parallel=True, cache=True)
def pad(values: np.ndarray, ptr: np.ndarray, which: np.ndarray, out: np.ndarray) -> None:
    """out [C, W]: the CSR lists `which`, each at the start of its row; the rest of a row is left as it is."""
    for c in prange(which.size):
        start = ptr[which[c]]
        for i in range(ptr[which[c] + 1] - start):
            out[c, i] = values[start + i]


def blocks(samples: Samples, kind: np.ndarray, batch: int, block_rows: int) -> Iterator[np.ndarray]:
    """Positions in the cohort in blocks of at most `block_rows` padded rows: kinds apart, like sizes together."""
    size = np.maximum(samples.touched, 1)
    order = np.lexsort((size, -(-samples.counts // batch), kind))
    start = 0
    while start < len(order):
        stop = start + 1
        widest = size[order[start]]
        while (
            stop < len(order)
            and kind[order[stop]] == kind[order[start]]
            and max(widest, size[order[stop]]) * (stop + 1 - start) <= block_rows
        ):
            widest = max(widest, size[order[stop]])
            stop += 1
        yield order[start:stop]
        start = stop


def pack(
    samples: Samples,
    position: np.ndarray,
    stream: np.ndarray,
    halves: np.ndarray,
    sent: bool,
    dtype: torch.dtype,
    device: str,
    epochs: int,
) -> Block:
    """One block's tensors, made on the host and moved once."""
    count, touched = samples.counts[position], samples.touched[position]
    rows = np.zeros((len(position), max(1, int(touched.max()))), np.int64)
    local = np.zeros((len(position), max(1, int(count.max()))), np.int64)
    label: np.ndarray = np.zeros(local.shape, host_type(dtype))
    pad(samples.row, samples.row_ptr, position, rows)
    pad(samples.local, samples.ptr, position, local)
    pad(samples.label, samples.ptr, position, label)
    real = np.arange(rows.shape[1]) < touched[:, None]

    def move(array: np.ndarray) -> Tensor:
        return moved(array, device)

    return Block(position, move(samples.clients[position]), move(rows), move(np.flatnonzero(real)), move(real), move(local), move(label),
                 move(count), count, touched, stream[position], halves[position], sent, epochs)  # fmt: skip


def moved(array: np.ndarray, device: str | torch.device) -> Tensor:
    """An array of the host on the run's device; a GPU fetches it by itself, from memory that stays where it is, while the host goes on."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if torch.device(device).type == "cuda" else tensor.to(device)


def gpu_kernels() -> Any:
    """The fused kernels for GPUs. They need Triton, which comes with PyTorch's builds for GPUs."""
    return importlib.import_module("fedbench.kernels.fused_gpu")


class Spare:
    """Arrays of a round, used again once nobody holds them: memory fresh from the system costs a fault for every page."""

    def __init__(self) -> None:
        self.kept: dict[str, list[np.ndarray]] = {}
        """by what they are for, two at most: a round's uploads are often held until the next one is done"""

    def empty(self, name: str, size: int, kind: type) -> np.ndarray:
        """[size] of any content."""
        kept = self.kept.setdefault(name, [])
        free = [at for at in range(len(kept)) if sys.getrefcount(kept[at]) == 2]
        fits = [at for at in free if kept[at].size >= size and kept[at].dtype == kind]
        if not fits:
            busy = [array for at, array in enumerate(kept) if at not in free]
            kept[:] = [*busy[-1:], np.empty(size + size // 8, kind)]  # the next cohort may be somewhat larger
            fits = [-1]
        return kept[fits[0]][:size]


class Engine:
    """Runs cohorts of one algorithm. Holds how to run (device, block size, kernels), not what was learnt."""

    def __init__(
        self,
        algorithm: Algorithm,
        world: World,
        seed: int,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        kernel: str = "auto",
        block_rows: int | None = None,
        compile: bool | None = None,
    ) -> None:
        """kernel: auto (numba's on a CPU, Triton's on a GPU), off, or triton. compile: the generic step, on a GPU unless said otherwise."""
        self.algorithm, self.world, self.seed, self.device, self.dtype = algorithm, world, seed, device, dtype
        speaks = not kernel_check.overridden(algorithm)
        self.kernels = speaks and kernel == "auto" and device == "cpu"
        on_gpu = device.startswith("cuda") and importlib.util.find_spec("triton") is not None
        self.gpu_kernels: Any = gpu_kernels() if speaks and (kernel == "triton" or (kernel == "auto" and on_gpu)) else None
        self.block_rows = block_rows or rows_that_fit(algorithm.dim, device)
        self.spare = Spare()
        compiles = on_gpu if compile is None else compile
        self.step: Callable[..., Any] = torch.compile(step, dynamic=True) if compiles else step
        self.compared: set[str] | None = set()
        """uses of kernels that were compared with the generic path, see kernel_check; None: this engine is one of the two"""

    def of_world(self, world: World) -> Engine:
        """The same for another federation."""
        other = copy.copy(self)
        other.world = world
        return other

    def twin(self, kernels: bool, dtype: torch.dtype | None = None) -> Engine:
        """One of two engines that are compared: with kernels or without, in arrays of its own, never compiled."""
        other = copy.copy(self)
        other.compared, other.spare, other.step = None, Spare(), partial(step, gradients=kernel_check.gradients)
        other.dtype = dtype or self.dtype
        if not kernels:
            other.kernels, other.gpu_kernels = False, None
        return other

    def run_cohort(self, server: Tensors, store: ClientStore, samples: Samples, when: int, epochs: np.ndarray | None = None) -> Round:
        """Every client of the cohort receives, trains and uploads; `store` is updated. Where a cohort runs is decided here alone.

        epochs [n]: how many local epochs each client finishes, if not all of them. Clients of a kind (as many epochs, sent something
        or not) are trained together.
        """
        store.take_part(samples.clients)
        answer = self.algorithm.answer(server)
        clients = torch.from_numpy(samples.clients).to(self.device)
        sent = sent_to(answer, clients)
        kernel_check.training(self, server, store, samples, sent, when)
        stream = keys(self.seed, when, "shuffle", samples.clients)
        epochs = np.full(len(clients), self.algorithm.local_epochs) if epochs is None else epochs
        kind = 2 * epochs + sent
        kinds = np.flatnonzero(np.bincount(kind)).tolist()
        places = {some: self.places(samples.clients[kind == some], some % 2 == 1, answer, store) for some in kinds}
        own_tables = any(name in store.tensors for name in self.algorithm.tables)
        stay = all(place and (own_tables or place[0].changes) for place in places.values())
        elastic = any(place and isinstance(place[0], fused.ElasticBCE) for place in places.values())
        if own_tables and sent.any() and not (stay and elastic):
            # before the cohort is cut: the last bits of a batched product depend on how many clients are in it
            merge_whole_tables(self.algorithm, clients[torch.from_numpy(sent).to(self.device)], answer, store)
        if stay:
            uploads, losses, updates = self.train_in_place(places, samples, kind, stream, store)
        else:
            uploads, losses, updates = self.train_in_blocks(answer, samples, kind, when, store)
        return Round(uploads, losses, bytes_down(answer, int(sent.sum()), uploads.whole), updates)

    def places(self, clients: np.ndarray, sent: bool, answer: Answer, store: ClientStore) -> tuple[fused.DotBCE, fused.Clients] | None:
        """The plan of a kernel that trains these clients where their state lies, and where that is."""
        in_one_stage = type(self.algorithm).stages is Algorithm.stages  # these kernels know no other
        plan = self.algorithm.fused(sent) if self.kernels and in_one_stage else None
        place = in_place(plan, clients, answer, store)
        return (plan, place) if plan and place else None

    def train_in_place(
        self,
        places: dict[int, tuple[fused.DotBCE, fused.Clients] | None],
        samples: Samples,
        kind: np.ndarray,
        stream: np.ndarray,
        store: ClientStore,
    ) -> tuple[Uploads, Tensor, int]:
        """The whole cohort at once, no block and no copy: kernels take a client's rows into the cache and write them back."""
        a, counts, touched = self.algorithm, samples.counts, samples.touched
        losses, updates = np.zeros(len(counts)), 0
        own_tables = any(name in store.tensors for name in a.tables)
        change: np.ndarray | None = None
        if not own_tables:
            width = next(place[1].tables.shape[2] for place in places.values() if place)
            change = self.spare.empty("change", len(samples.row) * width, host_type(self.dtype)).reshape(-1, width)
        for some, place in places.items():
            assert place is not None
            plan, clients = place
            at = slice(None) if len(places) == 1 else np.flatnonzero(kind == some)
            begin, row_begin = samples.ptr[:-1][at], samples.row_ptr[:-1][at]
            layout = (begin, counts[at], samples.local, samples.label, row_begin, touched[at], samples.row)
            losses[at], steps = fused.train_in_place(
                plan, (stream[at], *layout), clients, some // 2, a.samples_a_step, a.stop_below, isinstance(plan, fused.ElasticBCE), change
            )
            updates += int((steps * plan.trained(clients, touched[at])).sum())
        if change is None:
            return self.collect_own(store, samples), torch.from_numpy(losses), updates
        rows = Rows(torch.from_numpy(touched), torch.from_numpy(samples.row), torch.from_numpy(change))
        return self.uploads(samples.clients, {plan.items: rows}), torch.from_numpy(losses), updates

    def train_in_blocks(
        self, answer: Answer, samples: Samples, kind: np.ndarray, when: int, store: ClientStore
    ) -> tuple[Uploads, Tensor, int]:
        """The cohort in blocks of like clients, each of which receives, trains, keeps and uploads."""
        losses = torch.zeros(len(samples.clients), dtype=torch.float64)
        parts: list[tuple[Block, Tensors]] = []
        updates = 0
        for block in self.packed(samples, kind, when, self.block_rows):
            loss, part, moved = self.run_block(block, answer, store)
            losses[block.position] = loss.double().cpu()
            parts.append((block, part))
            updates += moved
        own_tables = any(name in store.tensors for name in self.algorithm.tables)
        return self.collect_own(store, samples) if own_tables else self.collect(parts, samples), losses, updates

    def packed(self, samples: Samples, kind: np.ndarray, when: int, block_rows: int, purpose: str = "") -> Iterator[Block]:
        """The cohort in blocks of one kind (2·epochs + sent) each; `purpose` sets the randomness of another use apart."""
        stream, halves = (keys(self.seed, when, f"{name}{purpose}", samples.clients) for name in ("shuffle", "halves"))
        for position in blocks(samples, kind, self.algorithm.samples_a_step, block_rows):
            epochs, sent = divmod(int(kind[position[0]]), 2)
            yield pack(samples, position, stream, halves, bool(sent), self.dtype, self.device, epochs)

    def reconstruct(self, server: Tensors, samples: Samples, when: int) -> Tensors:
        """name -> [U, ...]: the private part of clients that keep nothing, rebuilt by their first stage on all of these samples."""
        kernel_check.rebuilding(self, server, samples, when)
        answer = self.algorithm.answer(server)
        rebuilt: Tensors = {}
        kind = 2 * self.algorithm.local_epochs + sent_to(answer, torch.from_numpy(samples.clients).to(self.device))
        for block in self.packed(samples, kind, when, self.block_rows * WIDE, "/evaluation"):
            sent = sent_rows(answer, block.clients, block.rows, self.algorithm.tables)
            held = vmapped(self.algorithm.receive, {}, sent)
            stage = self.algorithm.stages(sent)[0]._replace(part="all")
            held, _, _ = self.work(block.part(stage), held, sent, stage)
            for name in held.keys() - sent.keys():
                if name not in rebuilt:
                    rebuilt[name] = held[name].new_zeros(self.world.clients, *held[name].shape[1:])
                rebuilt[name][block.clients] = held[name]
        return rebuilt

    def adapt(self, server: Tensors, store: ClientStore, samples: Samples, when: int) -> None:
        """Clients learn what is private to them, all that they are sent being frozen; `store` is updated and nothing is uploaded."""
        answer = self.algorithm.answer(server)
        clients = torch.from_numpy(samples.clients).to(self.device)
        sent = sent_to(answer, clients)
        if sent.any() and any(name in store.tensors for name in self.algorithm.tables):
            merge_whole_tables(self.algorithm, clients[torch.from_numpy(sent).to(self.device)], answer, store)
        for block in self.packed(samples, 2 * self.algorithm.local_epochs + sent, when, self.block_rows):
            self.run_block(block, answer, store, frozen=True)

    def run_block(self, block: Block, answer: Answer, store: ClientStore, frozen: bool = False) -> tuple[Tensor, Tensors, int]:
        """Receive (own tables are merged by now), train, keep; returns the losses [C] and what is uploaded of shared tables.

        frozen: only what is private is trained.
        """
        algorithm = self.algorithm if block.epochs == self.algorithm.local_epochs else replace(self.algorithm, local_epochs=block.epochs)
        own_tables = [name for name in algorithm.tables if name in store.tensors]
        own = store.rows(block.clients, block.rows, algorithm.tables)
        sent = sent_rows(answer, block.clients, block.rows, algorithm.tables) if block.sent else {}
        held = own if own_tables and block.sent else vmapped(algorithm.receive, own, sent)
        loss = torch.zeros(len(block.clients), dtype=self.dtype, device=self.device)
        moved = epoch = 0
        stages = algorithm.stages(sent)
        check_stages(algorithm, stages, held)
        for stage in of_private(stages, store.tensors) if frozen else stages:
            held, loss, steps = self.work(block.part(stage), held, sent, stage, epoch)
            epoch += stage.epochs
            for name in own_tables:
                shrink_untouched(store, block.clients, name, stage.phases, steps)
            sizes = [trained_size(held[n], n in algorithm.tables, block) for phase in stage.phases for n in phase.names]
            moved += int((steps.cpu().numpy() * np.sum(sizes, axis=0)).sum()) if sizes else 0
        for name in store.tensors:
            if name in algorithm.tables:
                flat = held[name].flatten(0, 1)[block.valid]
                client = store.place(block.clients)[:, None].expand_as(block.rows).reshape(-1)[block.valid]
                store.tensors[name][client, block.rows.reshape(-1)[block.valid]] = flat
            else:
                store.write(block.clients, name, held[name])
        if own_tables or frozen:
            return loss, {}, moved
        return loss, vmapped(algorithm.upload, held, sent, block.count.to(self.dtype)), moved

    def work(self, block: Block, held: Tensors, sent: Tensors, stage: Stage, epoch: int = 0) -> tuple[Tensors, Tensor, Tensor]:
        """One stage of a block: its closed form, a fused kernel where one fits, else step by step over the mapped functions.

        Returns what is held then, and each client's running mean loss and steps. `epoch` is the number of the stage's first one.
        """
        plan = stage.fused if self.kernels else None
        if not stage.phases:
            return self.solve(block, held, sent, plan)
        counts_steps = stage.max_steps is not None  # which no kernel does
        if self.gpu_kernels and isinstance(stage.fused, fused.DotBCE) and stage.fused.plain and not counts_steps:
            return self.train_on_gpu(block, held, stage, epoch)
        if plan is None or counts_steps or epoch:  # kernels shuffle from the first epoch on
            return self.train_generic(block, held, sent, stage, epoch)
        # Kernels train in place, and the algorithm's functions may have returned what they were given.
        held = {name: value.clone(memory_format=torch.contiguous_format) for name, value in held.items()}
        loss, steps = fused.train(
            plan,
            (block.stream, block.local.numpy(), block.label.numpy(), block.counts, block.touched),
            {name: value.numpy() for name, value in held.items()},
            {name: value.contiguous().numpy() for name, value in sent.items()},
            stage.epochs,
            stage.batch_size or block.local.shape[1],
            self.algorithm.stop_below,
        )
        return held, torch.from_numpy(loss), torch.from_numpy(steps)

    def solve(self, block: Block, held: Tensors, sent: Tensors, plan: Any) -> tuple[Tensors, Tensor, Tensor]:
        """The algorithm's closed form over all samples of a client."""
        nothing = torch.zeros(len(block.clients), dtype=self.dtype, device=self.device)
        if plan is not None:
            solved = ridge.solve(plan, block.local.numpy(), block.label.numpy(), block.counts, {n: t.numpy() for n, t in sent.items()})
            return {**held, **{name: torch.from_numpy(value) for name, value in solved.items()}}, nothing, nothing
        weight = torch.arange(block.local.shape[1], device=self.device) < block.count[:, None]
        batch = Batch(block.local, block.label, weight.to(self.dtype))
        return {**held, **vmapped(self.algorithm.solve, held, sent, batch)}, nothing, nothing

    def train_on_gpu(self, block: Block, held: Tensors, stage: Stage, epoch: int = 0) -> tuple[Tensors, Tensor, Tensor]:
        """The same by a fused kernel for GPUs, which takes the samples in the order of every epoch at once."""
        size = stage.batch_size or block.local.shape[1]
        code = (2 * block.local + (block.label > 0)).to(torch.int32)
        codes = torch.stack([code.gather(1, block.order(e, size)) for e in range(epoch, epoch + stage.epochs)])
        held = {name: value.clone(memory_format=torch.contiguous_format) for name, value in held.items()}
        touched = moved(block.touched, self.device)
        return held, *self.gpu_kernels.train(stage.fused, held, codes, block.count, touched, size, self.algorithm.stop_below)

    def train_generic(self, block: Block, held: Tensors, sent: Tensors, stage: Stage, epoch: int = 0) -> tuple[Tensors, Tensor, Tensor]:
        """The same for any algorithm: vmap(grad) and a per-client optimizer, finished clients frozen by a mask."""
        a, phases = self.algorithm, stage.phases
        size = stage.batch_size or block.local.shape[1]
        optimizer = {n: new_state(held[n]) for phase in phases for n in phase.names}
        progress = Progress.start(block.count, self.dtype)
        real = {name: block.real.to(self.dtype) for name in a.tables}
        batches = -(-block.counts[block.counts > 0] // size)
        for e in range(epoch, epoch + stage.epochs):
            order = block.order(e, size)
            for start in range(0, order.shape[1], size):
                made = (e - epoch) * batches + np.minimum(start // size, batches)
                if stage.max_steps is not None and (made >= stage.max_steps).all():
                    break
                take = order[:, start : start + size]
                weight = (take < block.count[:, None]).to(self.dtype)
                batch = Batch(block.local.gather(1, take), block.label.gather(1, take), weight)
                held, optimizer, progress = self.step(a.loss, phases, held, sent, batch, optimizer, progress, real)
                if stage.max_steps is not None:
                    progress = progress.until(stage.max_steps)
            progress = progress.after_epoch(e - epoch, a.stop_below)
        return held, progress.mean(), progress.steps

    def uploads(self, clients: np.ndarray, tensors: Mapping[str, Tensor | Rows]) -> Uploads:
        return Uploads(
            self.world, torch.from_numpy(clients).to(self.device), tensors, self.algorithm.travels_whole(self.world), self.algorithm.summed
        )

    def collect_own(self, store: ClientStore, samples: Samples) -> Uploads:
        """What clients with tables of their own upload: whole, from the store."""
        everybody = np.array_equal(samples.clients, np.arange(store.clients.start, store.clients.stop))
        own = store.read(torch.from_numpy(samples.clients).to(self.device), whole=everybody)
        counts = torch.from_numpy(samples.counts).to(self.device, self.dtype)
        return self.uploads(samples.clients, vmapped(self.algorithm.upload, own, {}, counts))

    def collect(self, parts: list[tuple[Block, Tensors]], samples: Samples) -> Uploads:
        """Stack what the blocks uploaded in the order of the cohort, so that sums do not depend on how it was cut."""
        tables = self.algorithm.tables
        tensors: dict[str, Tensor | Rows] = {}
        position = torch.from_numpy(np.concatenate([block.position for block, _ in parts])).to(self.device)
        for name in parts[0][1]:
            if name not in tables:
                stacked = torch.cat([part[name] for _, part in parts])
                tensors[name] = torch.empty_like(stacked).index_copy_(0, position, stacked)
                continue
            value = torch.cat([part[name].flatten(0, 1)[block.valid] for block, part in parts])
            item = torch.cat([block.rows.reshape(-1)[block.valid] for block, _ in parts])
            client = np.concatenate([np.repeat(block.position, block.touched) for block, _ in parts])
            order = torch.from_numpy(np.argsort(client, kind="stable")).to(self.device)
            tensors[name] = Rows(torch.from_numpy(samples.touched).to(self.device), item[order], value[order])
        return self.uploads(samples.clients, tensors)


def in_place(
    plan: fused.DotBCE | None, clients: np.ndarray, answer: Answer, store: ClientStore, sent_users: bool = False
) -> fused.Clients | None:
    """Where the state of these clients lies, if a kernel for `plan` can work on it there.

    sent_users: their vectors may be with the server, to be read.
    """
    if plan is None or isinstance(plan, fused.IN_BLOCKS):
        return None
    if plan.user in store.tensors:
        user, at = store.tensors[plan.user].numpy(), store.place(clients)
    elif sent_users and plan.user in answer.personal and answer.slot is not None:
        user, at = answer.personal[plan.user].contiguous().numpy(), answer.slot[clients].numpy()
    else:
        return None
    sent = answer.shared.get(plan.items)
    shared = None if sent is None else sent.contiguous().numpy()[None]
    nobody = np.zeros(len(clients), np.int64)
    if plan.items not in store.tensors:
        return None if shared is None else fused.Clients(shared, nobody, user, at)
    tables = store.tensors[plan.items].numpy()
    if not isinstance(plan, fused.ElasticBCE):
        return fused.Clients(tables, at, user, at)
    adapter = store.tensors[plan.adapter].numpy()
    if shared is not None:
        return fused.Clients(tables, at, user, at, shared, nobody, adapter)
    assert answer.slot is not None
    return fused.Clients(tables, at, user, at, answer.personal[plan.items].numpy(), answer.slot[clients].numpy(), adapter)


def of_private(stages: tuple[Stage, ...], private: Collection[str]) -> Iterator[Stage]:
    """The stages with the optimizer steps of private names alone; closed forms as they are, for only what is private is kept of them."""
    for stage in stages:
        phases = [phase._replace(names=tuple(name for name in phase.names if name in private)) for phase in stage.phases]
        left = tuple(phase for phase in phases if phase.names)
        if left or not stage.phases:
            yield stage._replace(phases=left, fused=None)


def rows_that_fit(dim: int, device: str) -> int:
    """Rows of a block: on a CPU such that they, their gradients and Adam's moments stay in the L2 cache; on a GPU in a quarter of it."""
    if device.startswith("cuda"):
        room = torch.cuda.mem_get_info(device)[0] // 4
    else:
        try:
            room = os.sysconf("SC_LEVEL2_CACHE_SIZE")
        except (ValueError, OSError):
            room = 0
        room = room if room > 0 else 1 << 21
    return min(max(room // (dim * 4 * 4), 1 << 10), 1 << 20)


def host_type(dtype: torch.dtype) -> type:
    """The same kind of number in numpy."""
    return np.float64 if dtype == torch.float64 else np.float32


def times(value: Tensor, factor: Tensor) -> Tensor:
    """[n, ...], [n] -> [n, ...]"""
    return value * factor.to(value.dtype).view(-1, *[1] * (value.dim() - 1))


def trained_size(value: Tensor, table: bool, block: Block) -> np.ndarray:
    """[C] numbers of one name that each client trains."""
    each = int(np.prod(value.shape[2:] if table else value.shape[1:]))
    return each * (block.touched if table else np.ones(len(block.touched), np.int64))


def shrink_untouched(store: ClientStore, clients: Tensor, name: str, phases: tuple[Phase, ...], steps: Tensor) -> None:
    """Weight decay on the rows of the clients' own tables that no sample touches: (1 - lr·weight_decay)^steps, all at once.

    It also meets the touched rows, which are written afterwards.
    """
    decay = math.prod(phase.decay(name) for phase in phases)
    if decay != 1:
        table = store.tensors[name]
        factor = decay ** steps.to(table.device, table.dtype)
        at = store.place(clients)
        table[at] = table[at] * factor.view(-1, *[1] * (table.dim() - 1))


def vmapped(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function`, written for one client, over the leading client dimension of all tensors in its arguments."""
    return vmap(function)(*arguments)


def bytes_down(answer: Answer, clients: int, whole: Mapping[str, int] = MappingProxyType({})) -> int:
    """Size of what the server sent to that many clients; of the tables in `whole` that many rows to each."""
    shared = sum(t.numel() * t.element_size() for t in answer.shared.values())
    personal = sum(whole.get(name, 1) * math.prod(t.shape[1:]) * t.element_size() for name, t in answer.personal.items())
    return clients * (shared + personal)


def sent_to(answer: Answer, clients: Tensor) -> np.ndarray:
    """[n] whether the server has something for each of these clients."""
    return np.full(len(clients), bool(answer.shared)) if answer.slot is None else (answer.slot[clients] >= 0).cpu().numpy()


def sent_rows(answer: Answer, clients: Tensor, rows: Tensor, tables: tuple[str, ...]) -> Tensors:
    """What these clients were sent: the rows [C, T, ...] of tables, everything else whole [C, ...]."""
    sent = {name: value[rows] if name in tables else value.expand(len(clients), *value.shape) for name, value in answer.shared.items()}
    if answer.slot is not None:
        slot = answer.slot[clients]
        sent |= {name: value[slot[:, None], rows] if name in tables else value[slot] for name, value in answer.personal.items()}
    return sent


def sent_whole(answer: Answer, clients: Tensor) -> Tensors:
    """The same with whole tables [C, M, ...]; shared tensors are not copied."""
    sent = {name: value.expand(len(clients), *value.shape) for name, value in answer.shared.items()}
    if answer.slot is not None:
        sent |= {name: value[answer.slot[clients]] for name, value in answer.personal.items()}
    return sent


def merge_whole_tables(algorithm: Algorithm, clients: Tensor, answer: Answer, store: ClientStore) -> None:
    """`receive` on all rows of the clients' own tables: rows that no sample touches are merged too."""
    items = max(store.tensors[name].shape[1] for name in algorithm.tables if name in store.tensors)
    for chunk in clients.split(max(1, FULL_ROWS // items)):
        for name, value in vmapped(algorithm.receive, store.read(chunk), sent_whole(answer, chunk)).items():
            if name in store.tensors:
                store.write(chunk, name, value)


# ---- the generic local step ------------------------------------------------------------------------------------------------


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
    optimizer: dict[str, tuple[Tensor, Tensor]],
    progress: Progress,
    real: Tensors,
    gradients: Callable[..., tuple[Tensors, Tensor]] = lambda loss, *given: vmapped(grad_and_value(loss), *given),
) -> tuple[Tensors, dict[str, tuple[Tensor, Tensor]], Progress]:
    """One batch of every client in a block: each phase in turn, clients with nothing in this batch or finished unmoved.

    real: for each table [C, T], 1 for a row and 0 for padding.
    gradients: of a loss by its first argument, with its values [C].
    """
    size = batch.weight.sum(dim=1)
    moves = progress.active & (size > 0)
    steps = progress.steps + moves.to(progress.steps.dtype)
    optimizer = dict(optimizer)
    value = progress.total.new_zeros(())
    for phase in phases:

        def of(part: Tensors, rest: Tensors, sent: Tensors, batch: Batch) -> Tensor:
            return loss({**rest, **part}, sent, batch)

        part = {name: held[name] for name in phase.names}
        rest = {name: tensor for name, tensor in held.items() if name not in part}
        gradient, value = gradients(of, part, rest, sent, batch)
        if phase.clip:
            gradient = clipped(gradient, phase.clip, real)
        for name in phase.names:
            moved, optimizer[name] = update(held[name], gradient[name], optimizer[name], steps, moves, phase)
            held = {**held, name: moved}
    total = progress.total + torch.where(moves, value * size, torch.zeros_like(size))
    seen = progress.seen + torch.where(moves, size, torch.zeros_like(size))
    return held, optimizer, Progress(steps, progress.active, total, seen, progress.before)


def clipped(gradient: Tensors, limit: float, real: Tensors) -> Tensors:
    """Each client's gradient over all names scaled down to norm `limit`, as torch.nn.utils.clip_grad_norm_; padding does not count."""
    squares = [(g * g).flatten(2).sum(2) * real[name] if name in real else g * g for name, g in gradient.items()]
    norm = torch.stack([square.reshape(len(square), -1).sum(1) for square in squares]).sum(0).sqrt()
    factor = (limit / (norm + 1e-6)).clamp(max=1)
    return {name: g * factor.view(-1, *[1] * (g.dim() - 1)) for name, g in gradient.items()}


def update(
    parameter: Tensor, gradient: Tensor, state: tuple[Tensor, Tensor], steps: Tensor, moves: Tensor, phase: Phase
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """One optimizer step of every client that moves; parameter and gradient [C, ...], steps and moves [C]."""
    shape = (-1, *[1] * (parameter.dim() - 1))
    moves = moves.view(shape)
    if phase.optimizer == "sgd":
        return torch.where(moves, parameter - phase.lr * gradient, parameter), state
    steps = steps.clamp(min=1).view(shape)
    first = fused.BETA1 * state[0] + (1 - fused.BETA1) * gradient
    second = fused.BETA2 * state[1] + (1 - fused.BETA2) * gradient * gradient
    rate = phase.lr / (1 - fused.BETA1**steps)
    moved = parameter * (1 - phase.lr * phase.weight_decay) if phase.optimizer == "adamw" else parameter
    moved = moved - rate * first / (second.sqrt() / (1 - fused.BETA2**steps).sqrt() + fused.EPSILON)
    return torch.where(moves, moved, parameter), (torch.where(moves, first, state[0]), torch.where(moves, second, state[1]))
