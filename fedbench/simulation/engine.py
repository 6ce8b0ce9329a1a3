"""The engine: write one client, run all of them.

A cohort is trained where its state lies by a kernel derived from the algorithm's own loss, or cut into blocks of like clients; a block
is one set of tensors with a leading client dimension C, over which the algorithm's functions for one client are mapped (torch.func.vmap).
Nothing inside a step waits for the device.
"""

from __future__ import annotations

import copy
import importlib.util
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedbench.contract.algorithm import SHARED, Algorithm, Answer, Batch, Stage, Tensors, World, check_stages
from fedbench.contract.plugin_errors import fault
from fedbench.contract.randomness import keys
from fedbench.contract.uploads import Rows, Uploads
from fedbench.data.sampling import Samples
from fedbench.kernels.compiler.trace import Unsupported
from fedbench.parts import ridge
from fedbench.simulation import forward, in_place, kernel_check, rebuilding
from fedbench.simulation.answers_checked import refuse_lost_tables, refuse_wrongly_kept
from fedbench.simulation.blocks import ArrayPool, Block, blocks, pack
from fedbench.simulation.client_store import ClientStore
from fedbench.simulation.derived import Kernel, Kernels, few_of
from fedbench.simulation.derived_gpu import GpuKernels
from fedbench.simulation.generic import Progress, mapped_gradients, new_state, step, vmapped
from fedbench.simulation.own_tables import Before, merge, move_untouched, upload_whole, uploads_as_stored
from fedbench.simulation.sending import LEVELS, bytes_down, reaching, sent_rows, sent_to

WIDE = 16
"""a block of clients that only rebuild a private part is so many times as large: no gradients and moments need to stay in the cache"""


@dataclass(frozen=True)
class Round:
    """The result of one round of a cohort."""

    uploads: Uploads
    loss: Tensor
    """[n] each client's running mean loss"""
    bytes_down: int
    updates: int
    """numbers that optimizers moved: steps times the size of what a client trains, over all clients"""


class Done(NamedTuple):
    """The result of a block."""

    block: Block
    loss: Tensor
    """[C]"""
    uploaded: Tensors
    """shared tables as touched rows [C, T, ...], own tables whole [C, M, ...], all else [C, ...]"""
    stored: tuple[str, ...]
    """own tables that are uploaded as they lie in the store"""
    updates: Tensor
    """a whole number; it and the losses stay on the device until the round ends"""


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
        self.kernels = kernel == "auto" and device == "cpu"
        on_gpu = device.startswith("cuda") and importlib.util.find_spec("triton") is not None
        self.on_gpu = kernel == "triton" or (kernel == "auto" and on_gpu)
        """kernels are Triton's, which work on blocks"""
        self.derived = GpuKernels() if self.on_gpu else Kernels() if self.kernels else None
        """kernels made from the algorithm's own loss"""
        self.forward = forward.Kernels() if self.kernels else None
        """kernels made from `score` and `receive`"""
        self.knows_ridge = self.kernels and kernel_check.knows(type(algorithm), "stages", "solve")
        """closed forms are solved by the kernel for ridge regression, where a stage says that `solve` is one"""
        self.block_rows = block_rows or rows_that_fit(algorithm.dim, device)
        self.pool = ArrayPool()
        compiles = on_gpu if compile is None else compile
        self.step: Callable[..., Any] = torch.compile(partial(step, gradients=mapped_gradients), dynamic=True) if compiles else step
        self.compared: set[str] | None = set()
        """uses of kernels that were compared with the generic path, see kernel_check; None: this engine is one of the two"""

    def of_world(self, world: World) -> Engine:
        """An engine with these settings for another federation."""
        other = copy.copy(self)
        other.world = world
        return other

    def twin(self, kernels: bool, dtype: torch.dtype | None = None) -> Engine:
        """One of two engines that are compared: with kernels or without, in arrays of its own, never compiled."""
        other = copy.copy(self)
        # never compiled: that would take longer than the comparison
        other.compared, other.pool, other.step = None, ArrayPool(), step
        other.dtype = dtype or self.dtype
        if not kernels:
            other.kernels, other.derived, other.forward, other.knows_ridge = False, None, None, False
        return other

    def use_generic_path(self, reason: str) -> None:
        """No kernel trains any more; the log says why."""
        self.knows_ridge = False
        if self.derived is not None:
            self.derived.off = True
            self.derived.refuse(self.algorithm, reason)

    def enter(self, when: int) -> None:
        """From here on the algorithm's functions see this round as `self.context`."""
        self.algorithm = self.algorithm.at(when, self.world)

    def run_cohort(self, server: Tensors, store: ClientStore, samples: Samples, when: int, epochs: np.ndarray | None = None) -> Round:
        """Every client of the cohort receives, trains and uploads; `store` is updated. Where a cohort runs is decided here alone.

        epochs [n]: how many local epochs each client finishes, if not all of them. Clients of a kind (as many epochs, sent something
        or not) are trained together.
        """
        self.enter(when)
        store.take_part(samples.clients)
        answer = self.algorithm.answer(server)
        clients = torch.from_numpy(samples.clients).to(self.device)
        sent = sent_to(answer, clients)
        # first, while the store is as clients left it: the merge below writes to it
        kernel_check.training(self, server, store, samples, sent, when)
        epochs = np.full(len(clients), self.algorithm.local_epochs) if epochs is None else epochs
        kind = LEVELS * epochs + sent  # one number for both, so that equal clients are found by counting
        before = merge(self.algorithm, samples, answer, sent, store, self.forward)
        plans = in_place.plans(self, (answer, store, before), samples.clients, kind)
        if plans:
            stream, halves = (keys(self.seed, when, purpose, samples.clients) for purpose in ("shuffle", "halves"))
            tensors, losses, updates = in_place.train_cohort(self, plans, samples, kind, (stream, halves, answer, store))
            uploads = self.uploads(samples.clients, tensors)
        else:
            uploads, losses, updates = self.train_in_blocks(answer, samples, kind, when, store, before)
        return Round(uploads, losses, bytes_down(answer, sent, uploads.whole, uploads.bits), updates)

    def train_in_blocks(
        self, answer: Answer, samples: Samples, kind: np.ndarray, when: int, store: ClientStore, before: Before | None
    ) -> tuple[Uploads, Tensor, int]:
        """The cohort in blocks of like clients, each of which receives, trains, keeps and uploads."""
        losses = torch.zeros(len(samples.clients), dtype=torch.float64)
        done = [self.run_block(block, answer, store, before) for block in self.packed(samples, kind, when, self.block_rows)]
        uploads = self.collect(done, samples, store)
        if not done:
            return uploads, losses, 0
        losses[np.concatenate([one.block.position for one in done])] = torch.cat([one.loss for one in done]).cpu().double()
        return uploads, losses, int(torch.stack([one.updates for one in done]).sum())

    def packed(self, samples: Samples, kind: np.ndarray, when: int, block_rows: int, purpose: str = "") -> Iterator[Block]:
        """The cohort in blocks of one kind (LEVELS·epochs + sent) each; `purpose` sets the randomness of another use apart."""
        stream, halves = (keys(self.seed, when, f"{name}{purpose}", samples.clients) for name in ("shuffle", "halves"))
        for position in blocks(samples, kind, self.algorithm.samples_a_step, block_rows):
            epochs, sent = divmod(int(kind[position[0]]), LEVELS)
            yield pack(samples, position, stream, halves, sent, self.dtype, self.device, epochs)

    def reconstruct(self, server: Tensors, samples: Samples, when: int) -> Tensors:
        """name -> [U, ...]: the private part of clients that keep nothing, rebuilt by their first stage on all of these samples."""
        self.enter(when)
        kernel_check.rebuilding(self, server, samples, when)
        answer = self.algorithm.answer(server)
        found = rebuilding.rebuilt_in_place(self.algorithm, answer, samples, self.world.clients) if self.knows_ridge else None
        if found is not None:
            return found
        rebuilt: Tensors = {}
        kind = LEVELS * self.algorithm.local_epochs + sent_to(answer, torch.from_numpy(samples.clients).to(self.device))
        for block in self.packed(samples, kind, when, self.block_rows * WIDE, "/evaluation"):
            sent = sent_rows(reaching(answer, block.sent), block.clients, block.rows, self.algorithm.tables)
            held = vmapped(self.algorithm.receive, {}, sent)
            # evaluation rebuilds from all training samples, also where training uses half of them
            stage = self.algorithm.stages(sent)[0]._replace(part="all")
            held, _, _ = self.work(block.part(stage), held, sent, stage)
            # what `receive` adds to what was sent is private
            for name in held.keys() - sent.keys():
                if name not in rebuilt:
                    rebuilt[name] = held[name].new_zeros(self.world.clients, *held[name].shape[1:])
                rebuilt[name][block.clients] = held[name]
        return rebuilt

    def adapt(self, server: Tensors, store: ClientStore, samples: Samples, when: int) -> None:
        """Clients learn what is private to them, all that they are sent being frozen; `store` is updated and nothing is uploaded."""
        self.enter(when)
        answer = self.algorithm.answer(server)
        clients = torch.from_numpy(samples.clients).to(self.device)
        sent = sent_to(answer, clients)
        before = merge(self.algorithm, samples, answer, sent, store, self.forward)
        for block in self.packed(samples, LEVELS * self.algorithm.local_epochs + sent, when, self.block_rows):
            self.run_block(block, answer, store, before, frozen=True)

    def run_block(self, block: Block, answer: Answer, store: ClientStore, before: Before | None, frozen: bool = False) -> Done:
        """Receive (own tables are merged by now), train, upload, keep.

        before: what clients kept before the merge. frozen: only what is private is trained, and nothing uploaded.
        """
        algorithm = self.algorithm.with_epochs(block.epochs)
        answer = reaching(answer, block.sent)
        sent = sent_rows(answer, block.clients, block.rows, algorithm.tables)
        held = self.received(block, sent, store, before)
        loss = torch.zeros(len(block.clients), dtype=self.dtype, device=self.device)
        epoch, updates = 0, block.count.new_zeros(())
        stages = algorithm.stages(sent)
        check_stages(algorithm, stages, held, sent)
        for stage in of_private(stages, store.tensors) if frozen else stages:
            held, found, steps = self.work(block.part(stage), held, sent, stage, epoch)
            # a closed form has no loss: that of the last stage which trains stays
            loss, epoch = found if stage.phases else loss, epoch + stage.epochs
            # all rows of a whole table; the touched ones are written over by write_back
            for name in algorithm.own_tables:
                move_untouched(store, block.clients, name, stage.phases, steps, answer)
            for name in (name for phase in stage.phases for name in phase.names):
                updates = updates + (steps.to(updates.dtype) * trained_size(held[name], name in algorithm.tables, block)).sum()
        samples = block.count.to(self.dtype)
        uploaded = {} if frozen else vmapped(algorithm.upload, held, sent, samples)
        stored = tuple(name for name in algorithm.own_tables if name in uploaded)
        uploaded = {name: value for name, value in uploaded.items() if name not in stored}
        if stored and not uploads_as_stored(algorithm, held, sent, samples, store):
            uploaded, stored = {**uploaded, **upload_whole(algorithm, block, held, samples, answer, store)}, ()
        # last, for uploads of whole tables are read from the store above
        self.write_back(block, vmapped(algorithm.keep, held, sent), store)
        return Done(block, loss, uploaded, stored, updates)

    def received(self, block: Block, sent: Tensors, store: ClientStore, before: Before | None) -> Tensors:
        """What the clients of a block hold when they begin to train."""
        algorithm, merged = self.algorithm, before is not None and block.sent in before.merged
        own = store.rows(block.clients, block.rows, algorithm.tables)
        if merged and before is not None and not before.tensors:  # all else that receive makes is in the store by now
            return own | {name: sent[other] for name, other in before.merged[block.sent].items()}
        held = vmapped(algorithm.receive, before.rows(block, algorithm) if merged and before is not None else own, sent)
        refuse_lost_tables(type(algorithm), "receive", held)
        return {**held, **{name: own[name] for name in algorithm.own_tables}} if merged else held

    def write_back(self, block: Block, kept: Tensors, store: ClientStore) -> None:
        """What clients keep goes into the store: touched rows of own tables, everything else whole."""
        if type(self.algorithm).keep is not Algorithm.keep:
            refuse_wrongly_kept(type(self.algorithm), kept, store.tensors)
        for name in store.tensors.keys() & kept.keys():
            if name in self.algorithm.tables:
                client = store.place(block.clients)[:, None].expand_as(block.rows).reshape(-1)[block.valid]
                store.tensors[name][client, block.rows.reshape(-1)[block.valid]] = kept[name].flatten(0, 1)[block.valid]
            else:
                store.write(block.clients, name, kept[name])

    def work(self, block: Block, held: Tensors, sent: Tensors, stage: Stage, epoch: int = 0) -> tuple[Tensors, Tensor, Tensor]:
        """One stage of a block: its closed form, a derived kernel where there is one, else step by step over the mapped functions.

        Returns what is held then, and each client's running mean loss and steps. `epoch` is the number of the stage's first one.
        """
        if not stage.phases:
            return self.solve(block, held, sent, stage)
        done = self.train_derived(block, held, sent, stage, epoch)
        return self.train_generic(block, held, sent, stage, epoch) if done is None else done

    def train_derived(self, block: Block, held: Tensors, sent: Tensors, stage: Stage, epoch: int) -> tuple[Tensors, Tensor, Tensor] | None:
        """Train a block by a kernel derived from the loss, compared with the generic path before its first use; None if there is none."""
        if self.derived is None or self.derived.off:
            return None
        kernel = self.derived.fitting(self.algorithm, block, held, sent, stage)
        # once a module: blocks that differ in size alone share a kernel
        if kernel is not None and kernel.module not in self.derived.compared:
            few = few_of(block, min(kernel_check.CLIENTS, len(block.counts)))
            size, short = len(few.counts), stage._replace(epochs=min(stage.epochs, kernel_check.EPOCHS))
            mine, theirs = ({name: value[:size] for name, value in tensors.items()} for tensors in (held, sent))
            self.derived.compared[kernel.module] = self.agrees(kernel, few, (mine, theirs), short, epoch)
        if kernel is None or not self.derived.compared[kernel.module]:
            return None
        return self.derived.train(kernel, self.algorithm, block, held, sent, stage, epoch)

    def agrees(self, kernel: Kernel, few: Block, given: tuple[Tensors, Tensors], stage: Stage, epoch: int) -> bool:
        """Whether a derived kernel leaves what the generic path does, for a few clients of a block; if not, the log says so."""
        assert self.derived is not None

        def real(tensors: Tensors) -> Tensors:
            return {name: value[few.real] if name in self.algorithm.tables else value for name, value in tensors.items()}

        def expected(one: Engine) -> Tensors:
            held, sent = (kernel_check.in_type(tensors, one.dtype) for tensors in given)
            left, loss, _ = one.train_generic(replace(few, label=few.label.to(one.dtype)), held, sent, stage, epoch)
            return {**real(left), "loss": loss}

        try:
            held, loss, _ = self.derived.train(kernel, self.algorithm, few, *given, stage, epoch)
        except Unsupported as error:
            self.derived.refuse(self.algorithm, str(error))
            return False
        apart = kernel_check.apart(self, {**real(held), "loss": loss}, expected, real(given[0]))
        if apart:
            self.derived.refuse(self.algorithm, f"its numbers differ from the loss's own in {apart}")
        return not apart

    def solve(self, block: Block, held: Tensors, sent: Tensors, stage: Stage) -> tuple[Tensors, Tensor, Tensor]:
        """The algorithm's closed form over all samples of a client."""
        nothing = torch.zeros(len(block.clients), dtype=self.dtype, device=self.device)
        if stage.ridge is not None and self.knows_ridge:
            arrays = {name: value.numpy() for name, value in sent.items()}
            solved = ridge.solve(stage.ridge, block.local.numpy(), block.label.numpy(), block.counts, arrays)
            return {**held, **{name: torch.from_numpy(value) for name, value in solved.items()}}, nothing, nothing
        weight = torch.arange(block.local.shape[1], device=self.device) < block.count[:, None]
        batch = Batch(block.local, block.label, weight.to(self.dtype), block.real.to(self.dtype))
        return {**held, **vmapped(self.algorithm.solve, held, sent, batch)}, nothing, nothing

    def train_generic(self, block: Block, held: Tensors, sent: Tensors, stage: Stage, epoch: int = 0) -> tuple[Tensors, Tensor, Tensor]:
        """Train a block of any algorithm by vmap(grad) and a per-client optimizer; clients that are done are frozen by a mask."""
        a, phases = self.algorithm, stage.phases
        size = stage.batch_size or block.local.shape[1]
        optimizer = {f"{place}/{name}": new_state(held[name]) for place, phase in enumerate(phases) for name in phase.names}
        progress = Progress.start(block.count, self.dtype)
        rows = block.real.to(self.dtype)
        tables = tuple(a.tables)
        batches = -(-block.counts[block.counts > 0] // size)
        for e in range(epoch, epoch + stage.epochs):
            order = block.order(e, size)
            for start in range(0, order.shape[1], size):
                # steps of this stage that each client has made by now; those with few samples make fewer an epoch
                made = (e - epoch) * batches + np.minimum(start // size, batches)
                if stage.max_steps is not None and (made >= stage.max_steps).all():
                    break
                take = order[:, start : start + size]
                weight = (take < block.count[:, None]).to(self.dtype)
                batch = Batch(block.local.gather(1, take), block.label.gather(1, take), weight, rows)
                held, (optimizer, progress) = self.step(a.loss, phases, held, sent, batch, tables, (optimizer, progress))
                if stage.max_steps is not None:
                    progress = progress.until(stage.max_steps)
            progress = progress.after_epoch(e - epoch, a.stop_below)
        return held, progress.mean(), progress.steps

    def uploads(self, clients: np.ndarray, tensors: Mapping[str, Tensor | Rows]) -> Uploads:
        a = self.algorithm
        who = torch.from_numpy(clients).to(self.device)
        return Uploads(self.world, who, tensors, a.travels_whole(self.world), a.summed, bits=a.bits(self.world), paired=a.paired)

    def from_store(self, store: ClientStore, samples: Samples) -> Tensors:
        """What clients upload that keep all they hold: whole tables as they lie in the store."""
        everybody = np.array_equal(samples.clients, np.arange(store.clients.start, store.clients.stop))
        own = store.read(torch.from_numpy(samples.clients).to(self.device), whole=everybody)
        counts = torch.from_numpy(samples.counts).to(self.device, self.dtype)
        return vmapped(self.algorithm.upload, own, {}, counts)

    def of_one_shape(self, name: str, values: list[Tensor]) -> Tensor:
        """What blocks of clients uploaded under a name that is no shared table, one after another."""
        shapes = sorted({tuple(value.shape[1:]) for value in values})
        if len(shapes) > 1:
            said = f"upload returned {name!r} as {list(shapes[0])} of one client and {list(shapes[1])} of another; "
            raise fault(type(self.algorithm), "upload", f"{said}what has a row an item is a table: write {name!r}: SHARED in tables")
        return torch.cat(values)

    def collect(self, done: list[Done], samples: Samples, store: ClientStore) -> Uploads:
        """Stack what the blocks uploaded in the order of the cohort, so that sums do not depend on how it was cut."""
        tables = self.algorithm.tables
        tensors: dict[str, Tensor | Rows] = {}
        for name in dict.fromkeys(name for one in done for name in (*one.uploaded, *one.stored)):
            having = [one for one in done if name in one.uploaded]
            if tables.get(name) == SHARED:
                value = torch.cat([one.uploaded[name].flatten(0, 1)[one.block.valid] for one in done])
                item = torch.cat([one.block.rows.reshape(-1)[one.block.valid] for one in done])
                # blocks go by size: rows return to the order of the cohort
                client = np.concatenate([np.repeat(one.block.position, one.block.touched) for one in done])
                order = torch.from_numpy(np.argsort(client, kind="stable")).to(self.device)
                tensors[name] = Rows(torch.from_numpy(samples.touched).to(self.device), item[order], value[order])
            elif not having:
                tensors[name] = self.from_store(store, samples)[name]
            else:
                stacked = self.of_one_shape(name, [one.uploaded[name] for one in having])
                everyone = self.from_store(store, samples)[name].clone() if len(having) < len(done) else torch.empty_like(stacked)
                position = np.concatenate([one.block.position for one in having])
                tensors[name] = everyone.index_copy_(0, torch.from_numpy(position).to(self.device), stacked)
        return self.uploads(samples.clients, tensors)


def of_private(stages: tuple[Stage, ...], private: Collection[str]) -> Iterator[Stage]:
    """The stages with the optimizer steps of private names alone; closed forms as they are, for only what is private is kept of them."""
    for stage in stages:
        phases = [phase._replace(names=tuple(name for name in phase.names if name in private)) for phase in stage.phases]
        left = tuple(phase for phase in phases if phase.names)
        if left or not stage.phases:
            yield stage._replace(phases=left, ridge=None)


def rows_that_fit(dim: int, device: str) -> int:
    """Rows of a block: on a CPU such that they, their gradients and Adam's moments stay in the L2 cache; on a GPU in a quarter of it."""
    if device.startswith("cuda"):
        room = torch.cuda.mem_get_info(device)[0] // 4
    else:
        try:
            room = os.sysconf("SC_LEVEL2_CACHE_SIZE")
        except (ValueError, OSError):
            room = 0
        # the system does not say: 2 MB
        room = room if room > 0 else 1 << 21
    # four arrays (rows, gradients, two moments) of four bytes a number
    return min(max(room // (dim * 4 * 4), 1 << 10), 1 << 20)


def trained_size(value: Tensor, table: bool, block: Block) -> Tensor | int:
    """[C] numbers of one name that each client trains, or one number if they are as many for all."""
    return int(np.prod(value.shape[2:])) * block.height if table else int(np.prod(value.shape[1:]))
