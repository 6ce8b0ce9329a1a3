"""The way of an upload from the client to the server: one ordered list of hops, each from Uploads to Uploads.

    client   what a device does before it sends: clip, add noise, quantise (none yet)
    wire     bytes are counted, uploads are damaged
    server   what arrives is screened, then summed where the server may see a sum alone, then handed to `aggregate`

A run without failures and secure sums has the first hop alone, and its uploads arrive as they were sent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

from fedbench.contract.uploads import Rows, Uploads
from fedbench.parts.secure_sum import masked_sum, pair_sum, row_sum
from fedbench.simulation.failures import Failures

CLIENT, WIRE, SERVER = "client", "wire", "server"
SIDES = (CLIENT, WIRE, SERVER)


@dataclass
class Trip:
    """What a hop may know of the round, and what it counts."""

    seed: int
    when: int
    bytes: int = 0


class Hop(Protocol):
    """One thing that happens to a round's uploads."""

    side: ClassVar[str]
    """where it happens: client, wire or server; hops of a channel stand in this order"""
    sums: ClassVar[bool] = False
    """the server cannot tell clients apart behind it, so it is the last one; it is repeated if an upload must be left out"""

    def __call__(self, uploads: Uploads, trip: Trip) -> Uploads: ...


class CountBytes(Hop):
    """What travels, whatever becomes of it."""

    side = WIRE

    def __call__(self, uploads: Uploads, trip: Trip) -> Uploads:
        trip.bytes += uploads.bytes()
        return uploads


@dataclass(frozen=True)
class Damage(Hop):
    """Some uploads arrive damaged, as --corrupt says."""

    failures: Failures
    side = WIRE

    def __call__(self, uploads: Uploads, trip: Trip) -> Uploads:
        return self.failures.damaged(uploads, trip.seed, trip.when)


@dataclass(frozen=True)
class Screen(Hop):
    """The server rejects what is not finite, cannot be read or is far too large."""

    failures: Failures
    side = SERVER

    def __call__(self, uploads: Uploads, trip: Trip) -> Uploads:
        return self.failures.screened(uploads)


class SecureSum(Hop):
    """The server sees of uploads in `summed` the sum of the clients' masked parts and nothing else."""

    side = SERVER
    sums = True

    def __call__(self, uploads: Uploads, trip: Trip) -> Uploads:
        clients = uploads.clients.cpu().numpy()
        names = [name for name in uploads.summed if name in uploads.tensors]
        sums = {}
        for name in names:
            value = uploads.tensors[name]
            if isinstance(value, Rows):
                sums[name] = (pair_sum if name in uploads.paired else row_sum)(value, uploads.world.items)
            else:
                sums[name] = masked_sum(uploads.dense(name), clients, trip.seed, trip.when)
        return replace(uploads, tensors={name: value for name, value in uploads.tensors.items() if name not in sums}, sums=sums)


def channel(failures: Failures, summed: tuple[str, ...]) -> tuple[Hop, ...]:
    """The hops of a run."""
    hops: list[Hop] = [CountBytes()]
    if failures.corrupt:
        hops.append(Damage(failures))
    if failures.corrupt or failures.limit():
        hops.append(Screen(failures))
    if summed:
        hops.append(SecureSum())
    return tuple(hops)


def ordered(hops: tuple[Hop, ...]) -> tuple[tuple[Hop, ...], tuple[Hop, ...]]:
    """The hops up to the one that sums, and the rest; ValueError if they do not stand in the order of their sides."""
    sides = [SIDES.index(hop.side) for hop in hops]
    summing = [hop for hop in hops if hop.sums]
    if sides != sorted(sides) or summing != list(hops[len(hops) - len(summing) :]):
        raise ValueError(f"hops must go from client over wire to server, sums last: {', '.join(type(hop).__name__ for hop in hops)}")
    return hops[: len(hops) - len(summing)], tuple(summing)
