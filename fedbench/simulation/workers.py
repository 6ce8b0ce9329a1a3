"""Where a cohort runs: in this process alone, or shared out over the ranks of torchrun.

    torchrun --standalone --nproc-per-node 2 train.py --algo fedmf --dataset ml-1m

A rank holds a range of the clients. It trains and ranks them, and each takes the same server's step as one process would: the tables
and rows of tables that clients upload stay on their rank, which sums its rows for all and mixes tables for its own clients; everything
else goes to every rank in the order of the cohort. In one process everything here is the identity. What ranks say to each other is
tensors and JSON.
"""

from __future__ import annotations

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
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fedbench.contract import plugin_errors
from fedbench.contract.algorithm import Tensors
from fedbench.contract.storage import Memory, Picked, at_once
from fedbench.contract.uploads import Rows, Tables, Uploads
from fedbench.errors import DataError, FedbenchError, NotFinite, UsageError
from fedbench.kernels.mixing import BLOCK
from fedbench.simulation.engine import Round

TIMEOUT = timedelta(minutes=30)
"""a rank that says nothing for so long is lost; one that ended is noticed at once"""
PATIENCE = timedelta(seconds=20)
"""a run that failed waits so long for the first rank to say why"""
OVER = 1
"""tag of that message"""
DTYPES = {str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.int64, torch.int32, torch.bool)}

Made = TypeVar("Made")


_alone = False


def count() -> int:
    """How many ranks share this run."""
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
    """Which of them this process is."""
    return int(os.environ["RANK"]) if dist.is_torchelastic_launched() else 0


def is_first() -> bool:
    """The first rank writes, logs and speaks for all."""
    return number() == 0


def on_this_machine() -> int:
    """How many ranks this machine's cores are shared by."""
    return int(os.environ["LOCAL_WORLD_SIZE"]) if dist.is_torchelastic_launched() else 1


def restarted() -> bool:
    """Ranks were lost, and torchrun has started all of them again."""
    return dist.is_torchelastic_launched() and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def own_device(device: str) -> str:
    """The rank's own: GPUs are dealt out to the ranks of a machine."""
    if device == "cpu":
        return device
    if device != "cuda":
        raise UsageError(f"--device {device}: ranks take a GPU each, or the CPU; use --device cuda or cpu")
    return f"cuda:{int(os.environ['LOCAL_RANK']) % torch.cuda.device_count()}"


def join(device: str) -> None:
    """Meet the other ranks, if there are any and that was not done yet."""
    if count() == 1 or dist.is_initialized():
        return
    if on_this_machine() == count():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    with peers():
        store, rank, size = next(dist.rendezvous("env://", timeout=TIMEOUT))
        own = dist.PrefixStore(password(store), store)
        backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
        dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=TIMEOUT)


def password(store: dist.Store) -> str:
    """A word that the ranks of this start share: torchrun's store still has what ranks said before they were started again.

    Each calls itself by a new name; the first answers every name that it finds, an old one in vain, until all have heard it.
    """
    mine = secrets.token_hex(8)
    if not is_first():
        store.set(f"name/{number()}", mine)
        word = store.get(f"answer/{mine}").decode()
        store.set(f"heard/{word}/{number()}", "")
        return word
    others = range(1, count())
    deadline = time.monotonic() + TIMEOUT.total_seconds()
    while not store.check([f"heard/{mine}/{rank}" for rank in others]):
        for rank in others:
            if store.check([f"name/{rank}"]):
                store.set(f"answer/{store.get(f'name/{rank}').decode()}", mine)
        if time.monotonic() > deadline:
            raise RuntimeError(f"not all of {count()} ranks have come")
        time.sleep(0.02)
    return mine


def speaks() -> bool:
    """Whether this rank is the one to say what went wrong: the first, which hears of everybody's errors.

    Before they have met another one does if the first has not failed too, for then torchrun ends all others.
    """
    if not is_first() and not dist.is_initialized():
        time.sleep(PATIENCE.total_seconds())
        return True
    return is_first()


def leave(code: int) -> None:
    """Part from the other ranks. If the run failed the first goes first: torchrun ends all others as soon as one has."""
    if not dist.is_initialized():
        return
    over = torch.zeros(1)
    with suppress(RuntimeError):
        if code and is_first():
            for rank in range(1, count()):
                dist.isend(over, rank, tag=OVER)
        elif code and (waits := dist.irecv(over, 0, tag=OVER)):
            waits.wait(PATIENCE)
    dist.destroy_process_group()


@contextmanager
def peers() -> Iterator[None]:
    """Words with the others: if one of them is gone, this run ends too."""
    try:
        yield
    except RuntimeError as error:
        why = " ".join(str(error).split())[:200]
        raise FedbenchError(
            f"another rank is gone ({why}); give the same command again, or let torchrun do that (--max-restarts 3): "
            "with --out the run goes on from its last checkpoint"
        ) from error


def share(cost: np.ndarray) -> range:
    """This rank's clients, of U that cost so much each: ranges of about equal cost and length."""
    if count() == 1:
        return range(len(cost))
    done = np.cumsum(cost / max(1e-300, cost.mean()) + 1)
    bounds = np.searchsorted(done, done[-1] * np.arange(1, count()) / count())
    bounds = np.concatenate([[0], bounds, [len(cost)]])
    return range(int(bounds[number()]), int(bounds[number() + 1]))


def exchanged(work: Callable[[], Any]) -> list[Any]:
    """What `work` gives on each rank, as JSON says it. What it raises on one rank is raised on all."""
    if count() == 1:
        return [work()]
    mine: Exception | None = None
    try:
        with plugin_errors.blamed():
            word = {"said": work()}
    except Exception as error:
        mine = error
        said = str(error) if isinstance(error, FedbenchError) else f"{type(error).__name__}: {error}"
        word = {"error": said, "code": getattr(error, "exit_code", 1), "not_finite": error.what if isinstance(error, NotFinite) else None}
    words = _words(json.dumps(word).encode())
    for rank, word in enumerate(words):
        if "error" in word:
            if mine and rank == number():
                raise mine
            if word["not_finite"]:
                raise NotFinite(word["not_finite"]) from mine
            raise {2: UsageError, 3: DataError}.get(word["code"], FedbenchError)(f"{word['error']} (on rank {rank})") from mine
    return [word["said"] for word in words]


def _words(mine: bytes) -> list[Any]:
    with peers():
        sizes = torch.zeros(count(), dtype=torch.int64)
        sizes[number()] = len(mine)
        dist.all_reduce(sizes)
        padded = torch.frombuffer(bytearray(mine.ljust(int(sizes.max()))), dtype=torch.uint8)
        found = [torch.empty_like(padded) for _ in range(count())]
        dist.all_gather(found, padded)
    return [json.loads(word.numpy().tobytes()) for word in found]


def together(make: Callable[[], Made]) -> Made:
    """What each rank makes for itself, if all of them can."""
    made: list[Made] = []
    exchanged(lambda: made.append(make()))
    return made[0]


def agree(what: str, word: Callable[[], str]) -> None:
    """Refuse to go on if a rank's word is not that of the first."""
    words = exchanged(word)
    for rank, other in enumerate(words):
        if other != words[0]:
            raise UsageError(f"rank {rank} has {what} than rank 0 ({other}, not {words[0]}); give all machines the same")


def told(work: Callable[[], Any], lent: Sequence[Picked] = ()) -> Any:
    """What `work` gives on the first rank, where alone it is done; values of JSON. Meanwhile the others lend it rows, see `Spread`."""
    return exchanged(lambda: _served(work, len(lent)) if is_first() else _serve(lent))[0]


def _served(work: Callable[[], Any], lent: int) -> Any:
    try:
        return work()
    finally:
        for rank in range(1, count()) if lent else ():
            with peers():
                dist.send(torch.tensor([-1, 0, 0]), rank)


def _serve(lent: Sequence[Picked]) -> None:
    """Send the first rank the rows that it asks for, until it needs no more."""
    while lent:
        asked = torch.empty(3, dtype=torch.int64)
        with peers():
            dist.recv(asked, 0)
            which, start, stop = asked.tolist()
            if which < 0:
                return
            dist.send(lent[which].tensor[lent[which].rows[start:stop]], 0)
        lent[which].room.release()


@dataclass(frozen=True)
class Spread(Picked):
    """Rows that lie on all ranks, in their order: the first, whose own these are, reads the others' while those serve."""

    counts: Sequence[int] = ()
    """rows on each rank"""
    which: int = 0
    """of all that is lent"""

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(self.counts), *self.tensor.shape[1:])

    def chunks(self) -> Iterator[Tensor]:
        """Asked for one by one: who reads may give up in between."""
        yield from super().chunks()
        size = at_once(self.tensor)
        for rank, rows in enumerate(self.counts[1:], start=1):
            for start in range(0, rows, size):
                stop = min(start + size, rows)
                chunk = self.tensor.new_empty(stop - start, *self.shape[1:])
                with peers():
                    dist.send(torch.tensor([self.which, start, stop]), rank)
                    dist.recv(chunk, rank)
                yield chunk


def spread(pieces: Mapping[str, Picked]) -> dict[str, Picked]:
    """The same with the rows of all ranks, for the first to read; names and their order are the same everywhere."""
    if not pieces:
        return {}
    counts = exchanged(lambda: [len(piece.rows) for piece in pieces.values()])
    return {
        name: Spread(piece.tensor, piece.rows, piece.room, [rank[which] for rank in counts], which)
        for which, (name, piece) in enumerate(pieces.items())
    }


def totals(*numbers: int) -> list[int]:
    """Each number's sum over the ranks."""
    if count() == 1:
        return list(numbers)
    return [int(value) for value in total(torch.tensor(numbers))]


def total(part: Tensor) -> Tensor:
    """Its sum over the ranks, in place, the same on all of them to the last bit."""
    with peers():
        dist.all_reduce(part)
    return part


def anywhere(*flags: bool) -> list[bool]:
    """Whether each is true on any rank."""
    return [number > 0 for number in totals(*map(int, flags))]


def gathered(work: Callable[[], Tensors], device: str, first_only: bool = False) -> Tensors:
    """The tensors that `work` gives on each rank, joined along their first dimension in the order of the ranks.

    A name that a rank does not give counts as empty there. first_only: elsewhere than on the first rank nothing comes back.
    """
    if count() == 1:
        return work()
    mine: Tensors = {}

    def facts() -> dict[str, Any]:
        mine.update(work())
        return {name: [str(value.dtype), list(value.shape)] for name, value in mine.items()}

    told = exchanged(facts)
    joined: Tensors = {}
    with peers():
        for name, (dtype, shape) in {name: fact for rank in told for name, fact in rank.items()}.items():
            ends = np.cumsum([rank[name][1][0] if name in rank else 0 for rank in told])
            if first_only and not is_first():
                if name in mine and len(mine[name]):
                    dist.send(mine[name].to(device).contiguous(), 0)
                continue
            whole = torch.empty(int(ends[-1]), *shape[1:], dtype=DTYPES[dtype], device=device)
            parts = whole.tensor_split(tuple(map(int, ends[:-1])))
            if name in mine:
                parts[number()].copy_(mine[name])
            if first_only:
                for rank, part in enumerate(parts):
                    if rank != number() and len(part):
                        dist.recv(part, rank)
            else:
                under_way = [dist.broadcast(part, rank, async_op=True) for rank, part in enumerate(parts) if len(part)]
                for transfer in under_way:
                    transfer.wait()
            joined[name] = whole
    return joined


def passed(work: Callable[[], Tensor]) -> Iterator[Tensor]:
    """The rows that `work` gives on each rank, in the order of the ranks: BLOCK numbers at once, so that they need not all fit in memory.

    All ranks must see the end of it. What `work` raises on one of them is raised on all.
    """
    mine = torch.empty(0)

    def shape() -> list[int]:
        nonlocal mine
        mine = work().contiguous()
        return list(mine.shape)

    for rank, (rows, *each) in enumerate(exchanged(shape)):
        size = max(1, BLOCK // max(1, math.prod(each)))
        for start in range(0, max(1, rows), size):
            some = mine[start : start + size] if rank == number() else mine.new_empty(min(size, rows - start), *each)
            with peers():
                if some.numel():
                    dist.broadcast(some, rank)
            yield some


def dealt(work: Callable[[], Tensor], device: str, own: range | list[int] | None = None, room: Memory = Memory()) -> Tensor:  # noqa: B008
    """This rank's rows, or all of it, of the tensor that `work` gives on the first rank; in `room`, where they go in chunks."""
    if count() == 1:
        return work()
    whole = torch.empty(0)

    def facts() -> list[Any]:
        nonlocal whole
        whole = work() if is_first() else whole
        return [str(whole.dtype), list(whole.shape), {"from": own.start, "to": own.stop} if isinstance(own, range) else own]

    def part_of(rows: dict[str, int] | list[int] | None) -> Tensor | Picked:
        if isinstance(rows, list):
            return Picked(whole, torch.tensor(rows, dtype=torch.int64, device=whole.device), Memory())
        return whole if rows is None else whole[rows["from"] : rows["to"]]

    words = exchanged(facts)
    dtype, shape, rows = words[0]
    if is_first():
        for rank, (_, _, theirs) in enumerate(words[1:], start=1):
            for chunk in in_chunks(part_of(theirs)):
                with peers():
                    dist.send(chunk.to(device).contiguous(), rank)
        found = part_of(rows)
        if isinstance(found, Tensor):
            return found
        come = in_chunks(found)
    room, shape = (Memory(), shape) if own is None else (room, [len(own), *shape[1:]])
    part = room.allocate(tuple(shape), DTYPES[dtype], device)
    room.reserve(part, np.arange(shape[0] if shape else 0))
    for chunk in in_chunks(part):
        if is_first():
            chunk.copy_(next(come))
        else:
            with peers():
                dist.recv(chunk, 0)
        room.release()
    return part


def in_chunks(value: Tensor | Picked) -> Iterator[Tensor]:
    """Its rows, some at once, if there are any numbers."""
    if not math.prod(value.shape):
        return
    if isinstance(value, Picked):
        yield from value.chunks()
    else:
        yield from value.split(at_once(value)) if value.dim() else [value]


def joined(work: Callable[[], Round | None], make: Callable[[], Uploads], start: int, tables: Collection[str]) -> Round:
    """The round of a whole cohort, of which each rank runs a part (None if it has no client of it), its clients from `start` on.

    Uploads named in `tables`, whole or rows of them, stay where they are; all else goes to every rank.
    make: gives the uploads of the cohort with nothing in them yet.
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
            if isinstance(value, Rows):
                rows[name], found[f"rows/{name}"] = value, value.value[:0]
            elif isinstance(value, Tensor) and name in tables:
                whole[name], found[f"tables/{name}"] = value, value[:0]
            elif isinstance(value, Tensor):
                found[f"dense/{name}"] = value
        return found

    tensors = gathered(part, str(nobody.clients.device))
    uploads: dict[str, Tensor | Rows | Tables] = {}
    for key, found in tensors.items():
        kind, _, name = key.partition("/")
        if kind == "rows":
            uploads[name] = placed(rows.get(name), found, len(nobody.clients), start)
        elif kind == "tables":
            uploads[name] = Tables(whole.get(name, found), start, len(nobody.clients), passed)
        elif kind == "dense":
            uploads[name] = found
    down, updates = tensors["sizes"].sum(0).tolist()
    return Round(replace(nobody, tensors=uploads), tensors["loss"].cpu(), down, updates)


def placed(own: Rows | None, none: Tensor, clients: int, start: int) -> Rows:
    """This rank's rows in the whole cohort, where its first client stands at `start`; `none` [0, ...] if it has no client there."""
    counts = torch.zeros(clients, dtype=torch.int64, device=none.device)
    if own is None:
        return Rows(counts, counts[:0], none, total)
    counts[start : start + own.clients] = own.counts
    return Rows(counts, own.item, own.value, total)
