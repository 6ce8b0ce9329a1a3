"""A federation under way: the server, the clients, and what one round does to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fedbench.contract.algorithm import Algorithm, Answer, Tensors, World
from fedbench.contract.central import Central, Pool
from fedbench.contract.randomness import Draw
from fedbench.contract.storage import Disk, RowView, at_once, filled
from fedbench.contract.uploads import Uploads
from fedbench.data.sampling import Samples, cohort_of, pool_of, sample_round, with_time
from fedbench.data.split import TRAIN, Split
from fedbench.errors import FedbenchError, NotFinite, UsageError
from fedbench.simulation import kernel_check, workers
from fedbench.simulation.channel import Hop, Trip, channel, ordered
from fedbench.simulation.client_store import ClientStore, fits, room_for
from fedbench.simulation.derived import Usual
from fedbench.simulation.engine import Engine, Round
from fedbench.simulation.failures import Failures
from fedbench.simulation.plain_answers import chosen_cohort
from fedbench.simulation.scoring import Evaluator

COUNTED = ("dropped", "stragglers", "rejected")
FROZEN_BYTES = 1 << 26
"""how much a frozen copy may take"""


class Diverged(FedbenchError):
    """Training diverged: NaN or infinity that no rejected upload explains."""

    def __init__(self, round_: int, what: str) -> None:
        super().__init__(f"{what} is not finite in round {round_}: training diverged; lower the learning rate")


@dataclass
class Federation:
    """A federation under way: everything that changes from round to round."""

    algorithm: Algorithm
    split: Split
    engine: Engine
    server: Tensors
    store: ClientStore
    evaluator: Evaluator
    seed: int
    round: int = 0
    visits: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    bytes_up: int = 0
    bytes_down: int = 0
    hops: tuple[Hop, ...] = ()
    """what happens to the uploads on their way to the server, in order"""
    rebuilt: tuple[Tensors, ClientStore] | None = None
    """a server, and what clients that keep nothing rebuilt to be evaluated with its answer; forgotten when the next round begins"""
    failures: Failures = Failures()
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))
    """how often clients dropped out, finished less or had their upload rejected, so far"""

    @classmethod
    def start(
        cls,
        algorithm: Algorithm,
        split: Split,
        seed: int,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        failures: Failures = Failures(),  # noqa: B008 (frozen)
        client_store: str = "ram",
        folder: Path | None = None,
        **engine: Any,
    ) -> Federation:
        """Round 0: the server and all clients initialised.

        client_store: see `room_for`, or auto: in memory if it fits there now, else in `folder`, on all workers alike
        """
        world = world_of(split)
        draw = Draw(seed, 0, None, dtype, device)
        runs = Engine(algorithm, world, seed, device, dtype, **engine)
        if runs.derived is not None and algorithm.federated:
            # from the data alone: a run that is resumed must hold rows in the same way, for the same bits
            runs.derived.usual = Usual.of(split.train_counts, split.items, algorithm.extra(1).each)
        own = workers.share(split.train_counts)
        if client_store == "auto":
            # workers of a machine share its memory, and all of them must store alike: a checkpoint has one form
            roomy = device != "cpu" or folder is None or fits(algorithm, world, draw, len(own) * workers.on_this_machine())
            client_store = "mmap" if workers.on_any(not roomy) else "ram"
        return cls(
            algorithm,
            split,
            runs,
            algorithm.init_server(world, draw),
            ClientStore(algorithm, world, draw, room_for(client_store, folder, device), own),
            Evaluator(algorithm, split, device, runs.derived is not None, own, seed if failures.no_server else None),
            seed,
            visits=np.zeros(split.clients, np.int64),
            failures=failures,
            hops=channel(failures, algorithm.summed),
        )

    def without_kernel(self) -> set[str]:
        """What runs on the generic path so far, and why: the operation, and the line of the method's file that it comes from."""
        makers = (self.engine.derived, self.engine.forward, self.evaluator.kernels)
        return {reason for maker in makers if maker is not None for reason in maker.said}

    def chosen(self, when: int) -> np.ndarray:
        """The clients that a round asks to take part."""
        a, split = self.algorithm, self.split
        trainers = None if split.role is None else split.trainers
        count = split.clients if trainers is None else len(trainers)
        if (picked := self.picked(when, a.cohort(count))) is not None:
            return picked
        cohort = cohort_of(when, count, a.cohort(count), a.sampling, self.seed)
        return cohort if trainers is None else trainers[cohort]

    def picked(self, when: int, n: int) -> np.ndarray | None:
        """The cohort that the method's server chooses itself, if it does."""
        a, world = self.algorithm, self.engine.world
        if type(a).choose is Algorithm.choose:
            return None
        chosen = a.at(when, world).choose(self.server, world, n, Draw(self.seed, when, None, self.engine.dtype, self.engine.device))
        if chosen is None:
            return None
        if self.split.role is not None:
            raise UsageError(f"{a.name} chooses its clients itself, which --split users does not allow; use another split")
        return chosen_cohort(type(a), chosen, n, world.clients)

    def samples(self, when: int, cohort: np.ndarray | None = None) -> Samples:
        """What the chosen clients, or those given, train on in a round."""
        cohort = self.chosen(when) if cohort is None else cohort
        extra = self.algorithm.extra(when)
        return sample_round(self.split, cohort, extra.each, self.seed, when, extra.rating, empty=self.engine.pool.empty)

    def next_round(self) -> Round:
        """One communication round; the uploads that come back are those that the server saw.

        If nobody answers it changes nothing but the number of rounds.
        """
        self.round += 1
        self.rebuilt = None
        a, engine, failures, now = self.algorithm, self.engine, self.failures, (self.seed, self.round)
        chosen = self.chosen(self.round)
        if not a.federated:
            pool = pool_of(self.samples(self.round, chosen), *now, engine.dtype, engine.device)
            return self.central_round(with_time(pool, self.split, a.name) if cast(Central, a).reads_time else pool)
        cohort = failures.answering(chosen, *now)
        self.counts["dropped"] += len(chosen) - len(cohort)
        if not len(cohort):
            return Round(Uploads(engine.world, torch.empty(0, dtype=torch.int64)), torch.empty(0), 0, 0)
        epochs = failures.epochs(cohort, *now, a.local_epochs)
        self.counts["stragglers"] += int((epochs < a.local_epochs).sum()) if failures.stragglers else 0
        mine = self.own(cohort)

        def part() -> Round | None:
            if not len(cohort[mine]):
                # a worker without clients in this cohort runs nothing, but joins the exchange below
                return None
            return engine.run_cohort(self.server, self.store, self.samples(self.round, cohort[mine]), self.round, epochs[mine])

        result = workers.merge_round(part, lambda: engine.uploads(cohort, {}), mine.start, a.tables)
        # one sum tells of NaN or infinity anywhere
        if not math.isfinite(result.loss.sum()):
            lost = ~result.loss.isfinite()
            if lost.all() or not a.reconstructs:
                first = self.split.user_ids[cohort[int(lost.nonzero()[0])]]
                raise Diverged(self.round, f"the training loss of {int(lost.sum())} of {len(cohort)} clients (the first is user {first})")
            # a client that keeps nothing carries no damage on: it sends nothing this time
            result = replace(result, uploads=result.uploads.only(~lost), loss=result.loss[~lost])
        uploads, trip = result.uploads, Trip(*now)
        hops, sums = ordered(self.hops)
        for hop in hops:
            uploads = hop(uploads, trip)
        self.bytes_up += trip.bytes
        self.counts["rejected"] += len(cohort) - len(uploads.clients)
        self.server, seen = self.aggregated(uploads, sums, trip)
        self.visits[cohort] += 1
        self.bytes_down += result.bytes_down
        # pages of mapped files that this round has read or written
        self.store.room.release()
        return replace(result, uploads=seen)

    def own(self, cohort: np.ndarray) -> slice:
        """Where those of the ascending client numbers stand that are in this worker's store."""
        own = self.store.clients
        return slice(0, len(cohort)) if len(own) == len(self.visits) else slice(*np.searchsorted(cohort, [own.start, own.stop]))

    def central_round(self, pool: Pool) -> Round:
        """One pass over everybody's samples in one place: nobody is visited and nothing travels."""
        engine, algorithm = self.engine, cast(Central, self.algorithm)
        draw = Draw(self.seed, self.round, None, engine.dtype, engine.device)
        kernel_check.pooled(engine, algorithm, self.server, pool, draw)
        server, loss = algorithm.epoch(self.server, pool, draw, engine.derived is not None and not engine.derived.off)
        loss = torch.as_tensor(loss)
        try:
            finite({"loss": loss, **server})
        except NotFinite as error:
            raise Diverged(self.round, error.what) from None
        self.server = server
        nobody = Uploads(engine.world, torch.zeros(0, dtype=torch.int64))
        return Round(nobody, loss.reshape(1), bytes_down=0, updates=sum(value.numel() for value in self.server.values()))

    def aggregated(self, uploads: Uploads, sums: tuple[Hop, ...], trip: Trip) -> tuple[Tensors, Uploads]:
        """The server after its step, and what it saw of the uploads.

        Only if the step is not finite are uploads looked at one by one: a pass over all of them costs time. What is summed under masks
        is looked at before, for a sum in fixed point cannot show it. Workers that keep rows of their own clients alone check them together.
        """
        if not len(uploads.clients):
            return self.server, uploads
        sound = uploads.finite() if uploads.summed else None
        if sound is None or sound.all():
            arrived = replace(uploads, room=self.store.room)
            for hop in sums:
                arrived = hop(arrived, trip)
            draw, lost = Draw(self.seed, self.round, None, self.engine.dtype, self.engine.device), None
            try:
                server = self.server
                if not self.failures.no_server:
                    server = self.algorithm.at(self.round, self.engine.world).aggregate(server, arrived, draw)
                finite({name: value for name, value in server.items() if name not in self.algorithm.per_client_server_state})
            except NotFinite as error:
                # a value, not an exception: the other workers may have found nothing, and all must go the same way
                lost = error.what
            said = [what for what in workers.gather(lambda: lost) if what]
            if not said:
                return server, arrived
            sound = uploads.finite()
            # every upload is finite: the fault is in the server's own step
            if sound.all():
                raise Diverged(self.round, said[0])
        self.counts["rejected"] += int((~sound).sum())
        # again with at least one client less, so it ends
        return self.aggregated(uploads.only(sound), sums, trip)

    def is_own(self, name: str) -> bool:
        """Whether workers that share the run keep a part each of this entry of `state`."""
        return name == "clients" or name.startswith("client/") or name.removeprefix("server/") in self.algorithm.per_client_server_state

    def state(self) -> dict[str, Tensor | RowView]:
        """What the server and all clients hold, by name; not copied. On disk: what the `clients` hold that have taken part."""
        server: dict[str, Tensor | RowView] = {f"server/{name}": value for name, value in self.server.items()}
        room, kept = self.store.room, self.store.kept
        if kept is None:
            return server | {f"client/{name}": value for name, value in self.store.tensors.items()}
        for name in self.algorithm.per_client_server_state if "slot" in self.server else ():
            # only rows in use are written, so slots are numbered anew
            slot = self.server["slot"]
            has = slot >= 0
            server[f"server/{name}"] = RowView(self.server[name], slot[has], room)
            server["server/slot"] = torch.where(has, has.cumsum(0) - 1, -1)
        clients = torch.from_numpy(np.flatnonzero(kept))
        rows = self.store.place(clients)
        return server | {"clients": clients} | {f"client/{name}": RowView(value, rows, room) for name, value in self.store.tensors.items()}

    def set_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state` gave; names and shapes of what clients hold must be those of this federation."""
        store = self.store
        clients = state["clients"].cpu() if "clients" in state else torch.arange(store.clients.start, store.clients.stop)
        store.overwrite(clients.numpy())
        for name, tensor in store.tensors.items():
            check_form(state[f"client/{name}"], (len(clients), *tensor.shape[1:]), tensor.dtype)
            for start in range(0, len(clients), at_once(tensor)):
                some = slice(start, start + at_once(tensor))
                tensor[store.place(clients[some])] = state[f"client/{name}"][some]
                store.room.release()
        self.server = {name.removeprefix("server/"): value for name, value in state.items() if name.startswith("server/")}
        if isinstance(store.room, Disk):
            for name in self.algorithm.per_client_server_state if "slot" in self.server else ():
                rows, size = len(self.server[name]), at_once(self.server[name])
                chunks = (state[f"server/{name}"][start : start + size] for start in range(0, rows, size))
                self.server[name] = filled(store.room, len(self.visits) + rows, chunks)

    def frozen(self) -> Federation | None:
        """A copy that stays as it is, to be evaluated later; None if it would be large."""
        held = (*self.server.values(), *self.store.tensors.values())
        large = self.store.kept is not None or sum(value.numel() * value.element_size() for value in held) > FROZEN_BYTES
        # decided together, for all workers evaluate the copy or none
        if workers.on_any(large):
            return None
        server = {name: value.clone() for name, value in self.server.items()}
        rebuilt = (server, self.rebuilt[1]) if self.rebuilt and self.rebuilt[0] is self.server else None
        return replace(self, server=server, store=self.store.copied(), rebuilt=rebuilt)

    def close(self) -> None:
        """Give the room of what server and clients hold back."""
        self.store.close()
        self.server, self.rebuilt = {}, None

    def spent(self, unit: str) -> int:
        """How much of a budget in rounds, visits or bytes is used."""
        return {"rounds": self.round, "visits": int(self.visits.sum()), "bytes": self.bytes_up + self.bytes_down}[unit]

    def readings(self) -> dict[str, dict[str, np.ndarray]]:
        """What metrics of the method's further readings (`scores`) are made of, by name."""
        return {name: self.evaluated(self.evaluator.reading(name).outcome) for name in self.algorithm.scores}

    def outcome(self) -> dict[str, np.ndarray]:
        """What metrics are made of, see Evaluator.outcome."""
        return self.evaluated(self.evaluator.outcome)

    def evaluated(self, evaluate: Callable[[ClientStore, Answer], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """What an evaluation finds for all clients, each worker for its own."""

        self.evaluator.algorithm = self.algorithm.at(self.round, self.engine.world)

        def part() -> Tensors:
            found, own = evaluate(self.private(), self.evaluator.algorithm.answer(self.server)), self.store.clients
            held, sample = self.split.held, self.split.sample
            ends = (own.start, own.stop) if sample is None else np.searchsorted(sample, (own.start, own.stop))
            mine = {name: held[name].ptr[[own.start, own.stop]] if held else ends for name in found}
            return {name: torch.from_numpy(value[slice(*mine[name])]) for name, value in found.items()}

        return {name: value.numpy() for name, value in workers.gather_tensors(part, "cpu").items()}

    def private(self) -> ClientStore:
        """What clients score with: what they keep or, if they keep nothing, what they rebuild from all their training items."""
        if not self.algorithm.reconstructs:
            return self.store
        if self.rebuilt is None or self.rebuilt[0] is not self.server:
            split, a = self.split, self.algorithm
            who = split.evaluated if split.role is None else np.flatnonzero(split.role != TRAIN)
            samples = sample_round(split, who[self.own(who)], a.evaluation_negatives, self.seed, self.round, purpose="negatives/evaluation")
            self.rebuilt = self.server, ClientStore.of(self.engine.reconstruct(self.server, samples, self.round))
        return self.rebuilt[1]

    def sampled_ranks(self) -> dict[str, np.ndarray]:
        return self.evaluated(self.evaluator.sampled_ranks)

    def full_ranks(self) -> dict[str, np.ndarray]:
        return self.evaluated(self.evaluator.full_ranks)


def world_of(split: Split) -> World:
    return World(split.clients, split.items, split.rating_min, split.rating_max, split.cold_start is not None)


def finite(server: Tensors) -> Tensors:
    """The server's tensors, if their sums are finite."""
    fine = [torch.isfinite(value.sum()) for value in server.values()]
    if fine and not torch.stack(fine).all():  # looked at together: a device is waited for once
        raise NotFinite(f"the server's {next(name for name, one in zip(server, fine, strict=True) if not one)}")
    return server


def check_form(found: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise ValueError unless a tensor that was read has this shape and type."""
    if found.shape != shape or found.dtype != dtype:
        raise ValueError(f"{tuple(found.shape)} {found.dtype} where {shape} {dtype} belongs")
