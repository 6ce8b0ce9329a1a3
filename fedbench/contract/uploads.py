"""What the server sees of a round: the clients' uploads side by side, and what it may do with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from fedbench.contract.algorithm import World
from fedbench.contract.mixtures import SparseWeights, faster_form
from fedbench.contract.plugin_errors import Misuse, meant
from fedbench.contract.storage import Memory
from fedbench.kernels.item_item import pair_sums
from fedbench.kernels.rows import summed_by_item

AVERAGES = ("sum", "cohort", "touching")
MASKED_BYTES = 8
"""size of a number under a mask, see fedbench/parts/secure_sum.py"""


def alone(part: Tensor) -> Tensor:
    """The sum over all workers when there is only this one."""
    return part


class Rows(NamedTuple):
    """Rows of a shared table as the clients sent them, in the order of the cohort. A worker has those of its own clients."""

    counts: Tensor
    """[n] how many each client of the cohort sent; those of another worker's clients are not here"""
    item: Tensor
    """[R]"""
    value: Tensor
    """[R, ...]"""
    total: Callable[[Tensor], Tensor] = alone
    """adds up what every worker made of its rows, maybe in place; all of them must call it"""
    items: int | None = None
    """rows of the table that they belong to, if that is known"""

    @property
    def clients(self) -> int:
        """In the cohort."""
        return len(self.counts)

    @property
    def client(self) -> Tensor:
        """[R] position in the cohort."""
        return torch.arange(self.clients, device=self.item.device).repeat_interleave(self.counts)

    def combine(self, items: int, how: str, weight: Tensor | None = None) -> Tensor:
        """[M, ...]: summed item by item, divided by nothing (sum), the cohort's size (cohort) or a row's senders (touching).

        weight [n]: how much each client counts, in the sum and in what it is divided by; 1 if not given.
        """
        return self.combined(items, how, weight)[0]

    def combined(self, items: int, how: str, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """What `combine` returns, and how many clients sent each row [M], or how much they count together."""
        if how not in AVERAGES:
            raise Misuse(f"rows are combined by {', '.join(AVERAGES)}, not by {how!r}")
        self._check_place(items, "combine")
        shape = (-1, *[1] * (self.value.dim() - 1))
        each = self._each(weight)
        # every worker must come here, also one without rows: `total` is an exchange
        total, senders = map(self.total, summed_by_item(self.item, self.value, items, each))
        if how == "cohort":
            total /= self.clients if weight is None else weight.sum()
        elif how == "touching":
            total /= senders.clamp(min=torch.finfo(senders.dtype).tiny).view(shape)  # of an item that nobody sent the total is 0
        return total, senders

    def senders(self, items: int, weight: Tensor | None = None) -> Tensor:
        """[M]: how many clients sent a row of each item, or how much they count together."""
        self._check_place(items, "senders")
        each = self._each(weight)
        return self.total(torch.bincount(self.item, each, minlength=items).to(self.value.dtype))

    def sent(self) -> int:
        """How many rows, over all clients."""
        return self._over_workers(len(self.item))

    def gram(self, items: int, digits: int | None = None) -> Tensor:
        """[M, M]: Σ over clients of v vᵀ, v a client's numbers, one a row; digits: binary digits after the point of every product."""
        self._check_place(items, "gram")
        if self.value.dim() != 1:
            raise Misuse(f"gram takes rows of one number each, [R], not {list(self.value.shape)}")
        found = pair_sums(self.counts, self.item, self.value, items, digits)
        on_host = self.value.device.type == "cpu"  # a device may not hold float64
        return self.total(found if on_host else found.to(self.value)).to(self.value.dtype)

    def pairs(self) -> int:
        """How many pairs of its rows, each of them with itself too, the clients have, over all clients."""
        return self._over_workers(int((self.counts * (self.counts + 1) // 2).sum()))

    def _each(self, weight: Tensor | None) -> Tensor | None:
        """[R] what the client of each row weighs."""
        if weight is None:
            return None
        if not isinstance(weight, Tensor) or list(weight.shape) != [self.clients]:
            found = list(weight.shape) if isinstance(weight, Tensor) else f"a {type(weight).__name__}"
            raise Misuse(f"the weights of clients must be a tensor of shape [{self.clients}], a number a client of the cohort, not {found}")
        return weight.to(self.value)[self.client]

    def _check_place(self, items: int, what: str) -> None:
        """Raise Misuse unless the rows lie within a table of so many: kernels write where they are told to."""
        if isinstance(items, bool) or not isinstance(items, int):
            raise Misuse(f"{what} needs how many items there are, uploads.world.items, not {items!r}")
        if self.items is not None and items != self.items:
            raise Misuse(f"{what} makes a row an item, and there are {self.items} items here, not {items}: use uploads.world.items")
        if self.item.device.type != "cpu":  # where the host would wait, and what lies outside is refused by itself
            return
        if len(self.item) != len(self.value) or int(self.counts.sum()) != len(self.item):
            raise Misuse(f"{what} needs a number of an item for each row: there are {len(self.item)} for {len(self.value)} rows")
        low, high = map(int, self.item.aminmax()) if len(self.item) else (0, -1)
        if low < 0 or high >= items:
            raise Misuse(f"{what}: row {low if low < 0 else high} lies outside a table of {items} rows")

    def _over_workers(self, own: int) -> int:
        return own if self.total is alone else int(self.total(torch.tensor(own, device=self.item.device)))


def one_block(work: Callable[[], Tensor]) -> Iterator[Tensor]:
    """The rows of all workers when there is only this one."""
    yield work()


class Tables(NamedTuple):
    """Whole tables of the clients' own, in the order of the cohort. A worker has those of its own clients."""

    value: Tensor
    """[R, M, ...] those that are here, all S in one process"""
    start: int
    """position in the cohort of the first of them"""
    clients: int
    """S in the cohort"""
    passed: Callable[[Callable[[], Tensor]], Iterator[Tensor]] = one_block
    """the rows that every worker makes, in the order of the cohort, in chunks; all workers must call it and read to the end"""

    @property
    def own(self) -> slice:
        """The positions in the cohort of those that are here."""
        return slice(self.start, self.start + len(self.value))

    def picked(self, at: Tensor) -> Tables:
        """The tables at the ascending positions `at` of the cohort; no copy when all are picked."""
        if len(at) == self.clients:
            return self
        here = at[(at >= self.own.start) & (at < self.own.stop)]
        return Tables(self.value[here - self.start], int((at < self.start).sum()), len(at), self.passed)

    def each(self, make: Callable[[Tensor], Tensor]) -> Tensor:
        """[S, ...]: what `make` finds for each table, [R, M, ...] -> [R, ...], where it is."""
        blocks = list(self.passed(lambda: make(self.value)))
        return torch.cat(blocks) if len(blocks) > 1 else blocks[0]

    def mixed(self, weights: Tensor | SparseWeights) -> Tensor:
        """[R, S] -> [R, M, ...]: a mixture of all tables for each client whose table is here; [S] -> [1, M, ...]: one for all clients.

        What it costs depends on how many weights are not 0, in whichever form they come.
        """
        shape = [len(weights.share), len(weights.common)] if isinstance(weights, SparseWeights) else list(weights.shape)
        if len(shape) not in (1, 2) or shape[-1] != self.clients:
            raise Misuse(f"mixed needs a weight for each of the {self.clients} tables, [n, {self.clients}] or [n], not {shape}")
        if isinstance(weights, Tensor) and weights.dim() == 1:
            # a worker's share of one mixture for all; shares add up to it
            mine = weights[None, self.own]
            return reduce(torch.add, self.passed(lambda: weighted_tables(mine, self.value)))
        weights, mixed, at = faster_form(weights, self.value), self.value, 0
        # tables pass by in the order of the cohort: `at` is the position of the first one
        for tables in self.passed(lambda: self.value):
            if isinstance(weights, SparseWeights):
                mixed = weights.onto(mixed if at else None, tables, at)
            elif at == 0:
                mixed = weighted_tables(weights[:, : len(tables)], tables)
            else:
                mixed.flatten(1).addmm_(weights[:, at : at + len(tables)], tables.flatten(1))
            at += len(tables)
        return mixed


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
    """uploads that the server sees only as a sum, see fedbench/simulation/channel.py"""
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    unreadable: Tensor | None = None
    """[n] whether an upload arrived in another shape than asked for, so that its numbers here mean nothing"""
    bits: Mapping[str, float] = field(default_factory=dict)
    """name -> bits of one number on its way, see Algorithm.bits"""
    paired: tuple[str, ...] = ()
    """uploads that stand for products of pairs of items, see Algorithm.paired"""
    room: Memory = Memory()  # noqa: RUF009 (it holds nothing)
    """where the server lays what it keeps for each of many clients"""

    def rows(self, name: str) -> Rows:
        """Touched rows of a shared table; `combine` and `senders` look at all clients, wherever their rows are."""
        value = self._sent(name)
        if not isinstance(value, Rows):
            raise Misuse(f"{name!r} is no shared table, so it comes whole: use uploads.dense({name!r}), not uploads.rows")
        return value._replace(items=self.world.items)

    def dense(self, name: str, picked: Tensor | None = None) -> Tensor:
        """[n, ...] or, for the picked positions of the cohort, [S, ...]; no copy when all are picked."""
        value = self._sent(name)
        if isinstance(value, Tables):
            return self.tables(name, picked).each(lambda tables: tables)
        if isinstance(value, Rows):
            raise Misuse(f"{name!r} is a shared table and travels as rows: use uploads.rows({name!r}), not uploads.dense")
        return value if picked is None or len(picked) == len(value) else value[picked]

    def tables(self, name: str, picked: Tensor | None = None) -> Tables:
        """Whole tables of the cohort, or of its picked positions, left where they are: with torchrun on the client's own worker."""
        value = self._sent(name)
        if isinstance(value, Tables):
            return value if picked is None else value.picked(picked)
        every = self.dense(name, picked)
        return Tables(every, 0, len(every))

    def total(self, name: str) -> Tensor:
        """[...] the sum over the cohort of a sealed upload."""
        if name not in self.sums:
            hint = f"write summed = ({name!r},) in the class" if name in self.tensors else f"known: {', '.join(self.sums) or 'none'}"
            raise Misuse(f"no upload {name!r} is summed{meant(name, self.sums)}; {hint}")
        return self.sums[name]

    def _sent(self, name: str) -> Tensor | Rows | Tables:
        if name in self.sums:
            raise Misuse(f"{name!r} is in `summed`, so the server sees its sum alone: use uploads.total({name!r})")
        if name not in self.tensors:
            raise Misuse(f"no client uploads {name!r}{meant(name, self.tensors)}; upload returns {', '.join(self.tensors) or 'nothing'}")
        return self.tensors[name]

    def only(self, keep: Tensor) -> Uploads:
        """The uploads of the clients where `keep` [n] is true."""
        tensors: dict[str, Tensor | Rows | Tables] = {}
        keep = keep.to(self.clients.device)
        for name, value in self.tensors.items():
            if isinstance(value, Rows):
                # clients of other workers have no rows here, and a count of 0
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
        # a norm is infinite or NaN if any of its numbers is: one pass, and one number a client
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
            each = number_size(tensor, self.bits.get(name)) if name not in self.summed else 8 * MASKED_BYTES
            if isinstance(value, Rows) and name in self.paired:
                every = len(self.clients) * (self.world.items * (self.world.items + 1) // 2)  # v vᵀ is symmetric, so half of it travels
                total += every * MASKED_BYTES if name in self.summed else value.pairs() * math.ceil(each / 8) + sent * id_
                continue
            if name in self.whole:
                sent, id_ = len(self.clients) * self.whole[name], 0
            total += sent * (math.ceil(math.prod(tensor.shape[1:]) * each / 8) + id_)
        return total


def number_size(tensor: Tensor, bits: float | None) -> float:
    """Bits of one number: as many as its type has, unless the method says otherwise."""
    return 8 * tensor.element_size() if bits is None else bits


def flat(values: Tensor) -> Tensor:
    """[n, ...] -> [n, k], also of nobody."""
    return values.reshape(len(values), math.prod(values.shape[1:]))


def norm_of_each(values: Tensor) -> Tensor:
    """[n, ...] -> [n]"""
    return torch.linalg.vector_norm(flat(values), dim=1)


def times(value: Tensor, factor: Tensor) -> Tensor:
    """[n, ...], [n] -> [n, ...]"""
    return value * factor.to(value.dtype).view(-1, *[1] * (value.dim() - 1))


def weighted_tables(weights: Tensor, tables: Tensor) -> Tensor:
    """[R, S], [S, M, d] -> [R, M, d]: a mixture of all tables for each row of weights."""
    return (weights.to(tables) @ tables.flatten(1)).view(len(weights), *tables.shape[1:])
