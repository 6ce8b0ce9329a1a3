"""Where a cohort runs: in this process alone, or shared out over the workers that torchrun starts.

    torchrun --standalone --nproc-per-node 2 train.py --algo fedmf --dataset ml-1m

A worker holds a range of the clients; it trains and evaluates them. Every worker takes the server's step as one process would. Tables
and rows of tables that clients upload stay on their worker, which sums its rows for all workers and mixes tables for its own clients;
everything else goes to every worker in the order of the cohort. With one worker everything here is the identity. Workers exchange
tensors and JSON, nothing that is unpickled.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import secrets
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fedbench.contract import plugin_errors
from fedbench.contract.algorithm import Tensors
from fedbench.contract.storage import Memory, RowView, at_once
from fedbench.contract.uploads import Rows, Tables, Uploads
from fedbench.errors import DataError, FedbenchError, NotFinite, UsageError
from fedbench.kernels.mixing import BLOCK
from fedbench.simulation.engine import Round

TIMEOUT = timedelta(minutes=30)
"""a worker that says nothing for so long is lost; one that ended is noticed at once"""
PATIENCE = timedelta(seconds=20)
"""how long the others wait for the first worker to print why the run failed"""
OVER = 1
"""tag of that message"""
DTYPES = {str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.int64, torch.int32, torch.bool)}

Made = TypeVar("Made")
Given = ParamSpec("Given")


_alone = False


def count() -> int:
    """How many workers share this run."""
    return int(os.environ["WORLD_SIZE"]) if dist.is_torchelastic_launched() and not _alone else 1


@contextmanager
def alone() -> Iterator[None]:
    """Meanwhile each worker does everything by itself: what is tried out on the side has nothing to share."""
    global _alone
    _alone, before = True, _alone
    try:
        yield
    finally:
        _alone = before


def number() -> int:
    """This process among the workers, from 0."""
    return int(os.environ["RANK"]) if dist.is_torchelastic_launched() else 0


def is_first() -> bool:
    """Whether this is worker 0, which alone writes files, logs and prints."""
    return number() == 0


def on_this_machine() -> int:
    """How many workers share this machine's cores."""
    return int(os.environ["LOCAL_WORLD_SIZE"]) if dist.is_torchelastic_launched() else 1


def restarted() -> bool:
    """Whether torchrun has started the workers again after one was lost."""
    return dist.is_torchelastic_launched() and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def own_device(device: str) -> str:
    """This worker's device: the GPUs of a machine go to its workers in turn."""
    if device == "cpu":
        return device
    if device != "cuda":
        raise UsageError(f"--device {device}: workers take a GPU each, or the CPU; use --device cuda or cpu")
    return f"cuda:{int(os.environ['LOCAL_RANK']) % torch.cuda.device_count()}"


def join(device: str) -> None:
    """Connect to the other workers, if there are any and it is not connected yet."""
    if count() == 1 or dist.is_initialized():
        return
    if on_this_machine() == count():
        # gloo picks an interface by the host's name, which need not be reachable; on one machine loopback always is
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    with lost_workers_end_the_run():
        store, rank, size = next(dist.rendezvous("env://", timeout=TIMEOUT))
        # a prefix for this start alone: keys of workers that died would be taken for those of this start
        own = dist.PrefixStore(session_key(store), store)
        backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
        dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=TIMEOUT)


def session_key(store: dist.Store) -> str:
    """A key that all workers of this start share: torchrun's store still holds entries of workers from before a restart.

    Each worker registers under a fresh name. Worker 0 answers every name that it finds, stale ones too, until all have acknowledged.
    """
    mine = secrets.token_hex(8)
    # no barrier of torch can be used here: barriers need the process group that this key is for
    if not is_first():
        store.set(f"name/{number()}", mine)
        word = store.get(f"answer/{mine}").decode()
        store.set(f"heard/{word}/{number()}", "")
        return word
    others = range(1, count())
    deadline = time.monotonic() + TIMEOUT.total_seconds()
    while not store.check([f"heard/{mine}/{worker}" for worker in others]):
        for worker in others:
            if store.check([f"name/{worker}"]):
                store.set(f"answer/{store.get(f'name/{worker}').decode()}", mine)
        if time.monotonic() > deadline:
            raise RuntimeError(f"not all {count()} workers have connected")
        time.sleep(0.02)
    return mine


def speaks() -> bool:
    """Whether this worker prints the error: worker 0, which learns of everybody's errors.

    Before the workers are connected another one may: it waits first, for torchrun ends all others as soon as worker 0 has failed.
    """
    if not is_first() and not dist.is_initialized():
        time.sleep(PATIENCE.total_seconds())
        return True
    return is_first()


def leave(code: int) -> None:
    """Disconnect and end this worker; alone, nothing. If the run failed, worker 0 ends first, with its message printed: torchrun ends all
    others as soon as one has ended.
    """
    if not dist.is_initialized():
        return
    over = torch.zeros(1)
    with suppress(RuntimeError):
        if code and is_first():
            for worker in range(1, count()):
                dist.isend(over, worker, tag=OVER)
        elif code and (waits := dist.irecv(over, 0, tag=OVER)):
            waits.wait(PATIENCE)
    dist.destroy_process_group()
    # All is written. What is left is Python's own end, which now and then aborts where a thread of gloo's is still there, and torchrun
    # would take that for a worker lost.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextmanager
def lost_workers_end_the_run() -> Iterator[None]:
    """Around every exchange: torch's error for a lost worker becomes one line that says how to resume."""
    try:
        yield
    except RuntimeError as error:
        why = " ".join(str(error).split())[:200]
        raise FedbenchError(
            f"another worker is gone ({why}); give the same command again, or let torchrun do that (--max-restarts 3): "
            "with --out the run resumes from its last checkpoint"
        ) from error


def share(cost: np.ndarray) -> range:
    """This worker's clients, of U with these costs: the workers' ranges have about equal cost and length."""
    if count() == 1:
        return range(len(cost))
    # + 1: a client costs its evaluation too, which is about the same for all
    done = np.cumsum(cost / max(1e-300, cost.mean()) + 1)
    bounds = np.searchsorted(done, done[-1] * np.arange(1, count()) / count())
    bounds = np.concatenate([[0], bounds, [len(cost)]])
    return range(int(bounds[number()]), int(bounds[number() + 1]))


def gather(work: Callable[[], Any]) -> list[Any]:
    """What `work` returns on each worker, in JSON's types. What it raises on one worker is raised on all."""
    if count() == 1:
        return [work()]
    mine: Exception | None = None
    # an error is sent as a value: a worker that just raised would leave the others waiting for its part
    try:
        with plugin_errors.blamed():
            word = {"said": work()}
    except Exception as error:
        mine = error
        said = str(error) if isinstance(error, FedbenchError) else f"{type(error).__name__}: {error}"
        word = {"error": said, "code": getattr(error, "exit_code", 1), "not_finite": error.what if isinstance(error, NotFinite) else None}
    words = _all_gather_json(json.dumps(word).encode())
    for worker, word in enumerate(words):
        if "error" in word:
            if mine and worker == number():
                raise mine
            if word["not_finite"]:
                raise NotFinite(word["not_finite"]) from mine
            raise {2: UsageError, 3: DataError}.get(word["code"], FedbenchError)(f"{word['error']} (on worker {worker})") from mine
    return [word["said"] for word in words]


def _all_gather_json(mine: bytes) -> list[Any]:
    with lost_workers_end_the_run():
        # all_gather wants equal sizes: the longest is found first, and the others are padded with blanks, which JSON ignores
        sizes = torch.zeros(count(), dtype=torch.int64)
        sizes[number()] = len(mine)
        dist.all_reduce(sizes)
        padded = torch.frombuffer(bytearray(mine.ljust(int(sizes.max()))), dtype=torch.uint8)
        found = [torch.empty_like(padded) for _ in range(count())]
        dist.all_gather(found, padded)
    return [json.loads(word.numpy().tobytes()) for word in found]


def run_on_all(make: Callable[[], Made]) -> Made:
    """What `make` returns here, after it has succeeded on every worker."""
    made: list[Made] = []
    gather(lambda: made.append(make()))
    return made[0]


def on_first(work: Callable[Given, Made], *given: Given.args, **named: Given.kwargs) -> Made | None:
    """What `work` returns on worker 0; elsewhere it is not run, and None comes back. The workers do not wait for each other."""
    return work(*given, **named) if is_first() else None


def agree(what: str, word: Callable[[], str]) -> None:
    """Refuse to run if a worker's word differs from that of worker 0."""
    words = gather(word)
    for worker, other in enumerate(words):
        if other != words[0]:
            raise UsageError(f"worker {worker} has {what} than worker 0 ({other}, not {words[0]}); give all machines the same")


def broadcast(work: Callable[[], Any], streamed: Sequence[RowView] = ()) -> Any:
    """What `work` returns on worker 0, where alone it runs; values of JSON. Meanwhile the others send it the rows of `StreamedRows`."""
    return gather(lambda: _run_served(work, len(streamed)) if is_first() else _serve_rows(streamed))[0]


def _run_served(work: Callable[[], Any], streamed: int) -> Any:
    try:
        return work()
    finally:
        for worker in range(1, count()) if streamed else ():
            with lost_workers_end_the_run():
                # also after an error, or the others would serve for ever
                dist.send(torch.tensor([-1, 0, 0]), worker)


def _serve_rows(streamed: Sequence[RowView]) -> None:
    """Send worker 0 the rows that it asks for, until it asks for none."""
    while streamed:
        asked = torch.empty(3, dtype=torch.int64)
        with lost_workers_end_the_run():
            dist.recv(asked, 0)
            which, start, stop = asked.tolist()
            if which < 0:
                return
            dist.send(streamed[which].tensor[streamed[which].rows[start:stop]], 0)
        streamed[which].room.release()


@dataclass(frozen=True)
class StreamedRows(RowView):
    """Rows of all workers, in the workers' order, read on worker 0 in chunks while the others serve theirs (see `broadcast`)."""

    counts: Sequence[int] = ()
    """rows on each worker"""
    which: int = 0
    """its place among all that is streamed at once"""

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(self.counts), *self.tensor.shape[1:])

    def chunks(self) -> Iterator[Tensor]:
        """Each chunk is asked for when it is needed: the reader may fail in between."""
        yield from super().chunks()
        size = at_once(self.tensor)
        for worker, rows in enumerate(self.counts[1:], start=1):
            for start in range(0, rows, size):
                stop = min(start + size, rows)
                chunk = self.tensor.new_empty(stop - start, *self.shape[1:])
                with lost_workers_end_the_run():
                    dist.send(torch.tensor([self.which, start, stop]), worker)
                    dist.recv(chunk, worker)
                yield chunk


def streamed(pieces: Mapping[str, RowView]) -> dict[str, RowView]:
    """Pieces that hold the rows of all workers, for worker 0 to read; names and their order must be equal on all workers."""
    if not pieces:
        return {}
    counts = gather(lambda: [len(piece.rows) for piece in pieces.values()])
    return {
        name: StreamedRows(piece.tensor, piece.rows, piece.room, [rows[which] for rows in counts], which)
        for which, (name, piece) in enumerate(pieces.items())
    }


def totals(*numbers: int) -> list[int]:
    """Each number's sum over the workers."""
    if count() == 1:
        return list(numbers)
    return [int(value) for value in total(torch.tensor(numbers))]


def total(part: Tensor) -> Tensor:
    """Its sum over the workers, in place, equal on all of them to the last bit."""
    with lost_workers_end_the_run():
        dist.all_reduce(part)
    return part


def on_any(flag: bool) -> bool:
    """Whether it is true on any worker."""
    return totals(int(flag))[0] > 0


def gather_tensors(work: Callable[[], Tensors], device: str, first_only: bool = False) -> Tensors:
    """The tensors that `work` returns on each worker, concatenated along their first dimension in the order of the workers.

    A name that a worker does not return counts as empty there. first_only: only worker 0 receives them, the others get {}.
    """
    if count() == 1:
        return work()
    mine: Tensors = {}

    def facts() -> dict[str, Any]:
        mine.update(work())
        return {name: [str(value.dtype), list(value.shape)] for name, value in mine.items()}

    facts_of_all = gather(facts)
    whole_of: Tensors = {}
    with lost_workers_end_the_run():
        for name, (dtype, shape) in {name: fact for one in facts_of_all for name, fact in one.items()}.items():
            ends = np.cumsum([one[name][1][0] if name in one else 0 for one in facts_of_all])
            # point to point, so that only worker 0 needs memory for all of it
            if first_only and not is_first():
                if name in mine and len(mine[name]):
                    dist.send(mine[name].to(device).contiguous(), 0)
                continue
            whole = torch.empty(int(ends[-1]), *shape[1:], dtype=DTYPES[dtype], device=device)
            parts = whole.tensor_split(tuple(map(int, ends[:-1])))
            if name in mine:
                parts[number()].copy_(mine[name])
            if first_only:
                for worker, part in enumerate(parts):
                    if worker != number() and len(part):
                        dist.recv(part, worker)
            else:
                # one broadcast a worker, for all_gather would want equal sizes; all at once, to overlap
                under_way = [dist.broadcast(part, worker, async_op=True) for worker, part in enumerate(parts) if len(part)]
                for transfer in under_way:
                    transfer.wait()
            whole_of[name] = whole
    return whole_of


def gather_blocks(work: Callable[[], Tensor]) -> Iterator[Tensor]:
    """The rows that `work` returns on each worker, in the order of the workers, BLOCK numbers at a time: they need not all fit in memory.

    Every worker must exhaust the iterator. What `work` raises on one of them is raised on all.
    """
    mine = torch.empty(0)

    def shape() -> list[int]:
        nonlocal mine
        mine = work().contiguous()
        return list(mine.shape)

    for worker, (rows, *each) in enumerate(gather(shape)):
        size = max(1, BLOCK // max(1, math.prod(each)))
        # at least one block, empty or not: whoever reads learns the shape from it
        for start in range(0, max(1, rows), size):
            some = mine[start : start + size] if worker == number() else mine.new_empty(min(size, rows - start), *each)
            with lost_workers_end_the_run():
                if some.numel():
                    dist.broadcast(some, worker)
            yield some


def scatter_rows(work: Callable[[], Tensor], device: str, own: range | list[int] | None = None, room: Memory = Memory()) -> Tensor:  # noqa: B008
    """This worker's rows (None: all) of the tensor that `work` returns on worker 0; copied into `room` chunk by chunk."""
    if count() == 1:
        return work()
    whole = torch.empty(0)

    def facts() -> list[Any]:
        nonlocal whole
        whole = work() if is_first() else whole
        return [str(whole.dtype), list(whole.shape), {"from": own.start, "to": own.stop} if isinstance(own, range) else own]

    def part_of(rows: dict[str, int] | list[int] | None) -> Tensor | RowView:
        if isinstance(rows, list):
            return RowView(whole, torch.tensor(rows, dtype=torch.int64, device=whole.device), Memory())
        return whole if rows is None else whole[rows["from"] : rows["to"]]

    words = gather(facts)
    dtype, shape, rows = words[0]
    if is_first():
        for worker, (_, _, theirs) in enumerate(words[1:], start=1):
            for chunk in in_chunks(part_of(theirs)):
                with lost_workers_end_the_run():
                    dist.send(chunk.to(device).contiguous(), worker)
        found = part_of(rows)
        if isinstance(found, Tensor):
            return found
        come = in_chunks(found)
    room, shape = (Memory(), shape) if own is None else (room, [len(own), *shape[1:]])
    # the rows go straight to their place, which may be a file, so that memory holds one chunk at a time
    part = room.allocate(tuple(shape), DTYPES[dtype], device)
    room.reserve(part, np.arange(shape[0] if shape else 0))
    for chunk in in_chunks(part):
        if is_first():
            chunk.copy_(next(come))
        else:
            with lost_workers_end_the_run():
                dist.recv(chunk, 0)
        room.release()
    return part


def in_chunks(value: Tensor | RowView) -> Iterator[Tensor]:
    """Its rows in chunks of bounded size; nothing if it is empty."""
    if not math.prod(value.shape):
        return
    if isinstance(value, RowView):
        yield from value.chunks()
    else:
        yield from value.split(at_once(value)) if value.dim() else [value]


def merge_round(work: Callable[[], Round | None], make: Callable[[], Uploads], start: int, tables: Collection[str]) -> Round:
    """The round of a whole cohort, of which each worker runs a part: its clients begin at `start`, and None means that it has none.

    Uploads named in `tables`, whole or as rows, stay on their worker; everything else goes to every worker.
    make: returns the cohort's uploads with no tensors in them yet.
    """
    if count() == 1:
        alone = work()
        assert alone is not None
        return alone
    nobody = make()
    rows: dict[str, Rows] = {}
    whole: Tensors = {}

    def part() -> Tensors:
        result = work()
        if result is None:
            return {"sizes": torch.zeros(1, 2, dtype=torch.int64)}
        found = {"sizes": torch.tensor([[result.bytes_down, result.updates]]), "loss": result.loss}
        for name, value in result.uploads.tensors.items():
            # of tables only an empty slice travels: workers without a client learn names, shapes and dtypes from it
            if isinstance(value, Rows):
                rows[name], found[f"rows/{name}"] = value, value.value[:0]
            elif isinstance(value, Tensor) and name in tables:
                whole[name], found[f"tables/{name}"] = value, value[:0]
            elif isinstance(value, Tensor):
                found[f"dense/{name}"] = value
        return found

    tensors = gather_tensors(part, str(nobody.clients.device))
    uploads: dict[str, Tensor | Rows | Tables] = {}
    for key, found in tensors.items():
        kind, _, name = key.partition("/")
        if kind == "rows":
            uploads[name] = place_rows(rows.get(name), found, len(nobody.clients), start)
        elif kind == "tables":
            uploads[name] = Tables(whole.get(name, found), start, len(nobody.clients), gather_blocks)
        elif kind == "dense":
            uploads[name] = found
    down, updates = tensors["sizes"].sum(0).tolist()
    return Round(replace(nobody, tensors=uploads), tensors["loss"].cpu(), down, updates)


def place_rows(own: Rows | None, none: Tensor, clients: int, start: int) -> Rows:
    """This worker's rows as part of the whole cohort, in which its clients begin at `start`; `none` [0, ...] if it has no client there."""
    counts = torch.zeros(clients, dtype=torch.int64, device=none.device)
    if own is None:
        return Rows(counts, counts[:0], none, total)
    counts[start : start + own.clients] = own.counts
    return Rows(counts, own.item, own.value, total)
