"""A kernel never overrules what an algorithm says: before its first use in a run, it and the algorithm's own code work side by side.

They make the first steps of a few clients, score a few items or merge a few tables, on copies. If they differ by more than rounding
explains, the kernel is not used, and the log says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from fedbench.contract.algorithm import Algorithm, Answer, Tensors
from fedbench.contract.uploads import Rows
from fedbench.data.sampling import Samples
from fedbench.kernels.compiler.trace import Unsupported
from fedbench.simulation.client_store import ClientStore, SomeClients
from fedbench.simulation.sending import LEVELS, sent_whole

if TYPE_CHECKING:
    from fedbench.contract.central import Central, Pool
    from fedbench.contract.randomness import Draw
    from fedbench.simulation import forward
    from fedbench.simulation.engine import Engine
    from fedbench.simulation.scoring import Evaluator

log = logging.getLogger("fedbench")

CLIENTS = 4
EPOCHS = 2
FEW_ITEMS = 40
"""items of a client whose scores are compared, beside all of them"""
SAMPLES = 64
"""samples of a client that are enough for a comparison; two batches if those are more"""
FAR = {torch.float32: 1e-3, torch.float64: 1e-7}
"""how far the paths may be apart, as a share of how far the largest number of a tensor moved; measured: up to 1e-4 and 1e-12. Adam's first
steps have the size of the learning rate however small a gradient is, and so magnify its rounding"""
NEAR = {torch.float32: 1e-4, torch.float64: 1e-8}
"""the share of the largest number for losses and scores, which no optimizer comes after; measured: up to 3e-6"""
ROUNDINGS = 64
"""last digits of a tensor's largest number that do not count as a difference"""
ISOLATED = 16
"""numbers of a large tensor that may be apart: Adam turns about where rounding decides the sign of a gradient"""
FARTHER = 4
"""times the generic path's own rounding that a kernel's may be; measured: up to 1.6 where rounding shows at all, 1e4 for a wrong formula"""


def knows(cls: type[Algorithm], name: str, other: str) -> bool:
    """Whether `name` still stands for `other`: not if a subclass overrides `other` alone, nor if `name` is the contract's default."""
    place, theirs = (next(at for at, kind in enumerate(cls.__mro__) if one in vars(kind)) for one in (name, other))
    return cls.__mro__[place] is not Algorithm and place <= theirs


def training(engine: Engine, server: Tensors, store: ClientStore, samples: Samples, sent: np.ndarray, when: int) -> None:
    """Compare a round of a few clients of the cohort: what they keep and upload. sent [n]: what reaches each, see sending.sent_to."""
    for some in range(LEVELS):
        who = np.flatnonzero((sent == some) & (samples.counts > 0))
        if not len(who) or not first_use(engine, f"training, sent {some}"):
            continue
        few = first_samples(samples, who, engine.algorithm.samples_a_step)
        kept = store.read(torch.from_numpy(few.clients).to(engine.device))

        def outcome(one: Engine, few: Samples = few, kept: Tensors = kept) -> Tensors:
            # on copies: a comparison leaves no trace in the run
            copies = {name: value.to(one.dtype, copy=True) for name, value in kept.items()}
            alone = SomeClients(store.algorithm, store.world, store.draw, copies, few.clients)
            result = one.run_cohort(in_type(server, one.dtype), alone, few, when, np.full(len(few.clients), EPOCHS))
            uploads = {name: value if isinstance(value, Tensor) else value.value for name, value in result.uploads.tensors.items()}
            assert all(isinstance(value, Tensor | Rows) for value in result.uploads.tensors.values())
            return {**copies, **{f"the upload of {name}": value for name, value in uploads.items()}, "loss": result.loss}

        compare(engine, outcome, kept)


def rebuilding(engine: Engine, server: Tensors, samples: Samples, when: int) -> None:
    """Compare what a few clients that keep nothing rebuild."""
    who = np.flatnonzero(samples.counts > 0)
    if len(who) and first_use(engine, "rebuilding"):
        few = first_samples(samples, who, engine.algorithm.samples_a_step)
        # numbered anew, for the result has a row for each client of the world
        few, world = replace(few, clients=np.arange(len(few.clients))), replace(engine.world, clients=len(few.clients))
        compare(engine, lambda one: one.of_world(world).reconstruct(in_type(server, one.dtype), few, when), {})


def pooled(engine: Engine, algorithm: Central, server: Tensors, pool: Pool, draw: Draw) -> None:
    """Compare the first two steps of a centralised method, on the rows of the users and items in them; its optimizer starts anew."""
    if not len(pool.label) or not first_use(engine, "pool"):
        return
    few = pool._replace(**{name: column[: algorithm.batch_size + SAMPLES] for name, column in pool._asdict().items() if column is not None})
    (users, user), (items, item) = (torch.unique(column, return_inverse=True) for column in (few.user, few.item))
    rows = {"user": users, "items": items}
    model = {name: value[rows[name.split("/")[0]]] if name.split("/")[0] in rows else value for name, value in server.items()}
    model = {name: torch.zeros_like(value) if "/" in name else value for name, value in model.items()}
    few = few._replace(user=user, item=item)

    def outcome(one: Engine) -> Tensors:
        found, loss = algorithm.epoch(in_type(model, one.dtype), few._replace(label=few.label.to(one.dtype)), draw, one.derived is not None)
        return {**{name: value for name, value in found.items() if "/" not in name}, "loss": torch.as_tensor(loss)}

    compare(engine, outcome, model)


def many_at_once(evaluator: Evaluator, store: ClientStore, answer: Answer, clients: Tensor, sent: bool, items: Tensor | None) -> bool:
    """Whether `score_clients` gives a few clients the scores that `score` gives; the log says if not."""
    some = clients[: max(1, min(CLIENTS, len(clients)))]
    given = store, answer, some, sent, None if items is None else items[: len(some)]
    expected, found = evaluator.mapped_scores(*given), evaluator.scores_of_many(*given)
    if distance(found, expected, None, expected.dtype, NEAR):
        log.warning("%s: score_clients gives other scores than score, which is used instead (slower)", evaluator.algorithm.name)
        return False
    return True


def scoring(evaluator: Evaluator, store: ClientStore, answer: Answer, clients: Tensor, sent: bool, kernel: forward.Kernel) -> bool:
    """Whether a kernel's scores of a few clients are those of the algorithm's own function, for a few items and for all of them."""
    wide = evaluator.split.items
    # spread over all clients; fewer where items are many, for each is scored on all of them
    some = clients[torch.arange(0, len(clients), -(-len(clients) // max(1, min(CLIENTS, (1 << 17) // wide))))]
    fresh = store.fresh(some)
    some = some if fresh is None else some[fresh == fresh[0]]
    # other items for each client, spread over all
    few = (torch.arange(len(some))[:, None] * 7 + torch.arange(min(wide, FEW_ITEMS)) * (wide // FEW_ITEMS + 1)) % wide
    for items in (few, None):
        given = store, answer, some, sent, items
        expected = evaluator.mapped_scores(*given)  # first: what does not fit raises there, where a kernel would read beyond its arrays
        found = evaluator.kernel_scores(kernel, *given)
        if distance(found, expected, None, expected.dtype, NEAR):
            exact = evaluator.mapped_scores(*given, dtype=torch.float64)
            if expected.dtype == torch.float64 or not explained({"score": found}, {"score": expected}, {"score": exact}, {}):
                return False
    return True


def merging(
    algorithm: Algorithm, kernels: forward.Kernels, store: ClientStore, answer: Answer, clients: Tensor, kernel: forward.Kernel
) -> bool:
    """Whether a kernel leaves in the store of a few clients what `receive` makes of what they keep."""
    some = clients[:CLIENTS]
    kept, sent = store.read(some), sent_whole(answer, some)
    expected = {name: value for name, value in vmap(algorithm.receive)(kept, sent).items() if name in kept}
    alone = ClientStore.of({name: value.clone(memory_format=torch.contiguous_format) for name, value in kept.items()})
    theirs = replace(answer, slot=None if answer.slot is None else answer.slot[some])
    kernels.merge(kernel, np.arange(len(some)), theirs, alone, max(store.tensors[name].shape[1] for name in algorithm.own_tables))
    found = {name: alone.tensors[name] for name in expected}
    if not any(distance(found[name], value, None, value.dtype, NEAR) for name, value in expected.items()):
        return True
    if all(value.dtype == torch.float64 for value in expected.values()):
        return False
    exact = vmap(algorithm.receive)(in_type(kept, torch.float64), in_type(sent, torch.float64))
    return explained(found, expected, {name: exact[name] for name in expected}, {})


def first_use(engine: Engine, what: str) -> bool:
    """Whether kernels may run that nobody has compared yet; from now on somebody has."""
    if engine.compared is None or what in engine.compared or not engine.kernels:
        return False
    engine.compared.add(what)
    return True


def compare(engine: Engine, outcome: Callable[[Engine], Mapping[str, Tensor]], before: Mapping[str, Tensor]) -> None:
    """Turn an engine's kernels off, and say so, if what they leave is further from what the code itself leaves than rounding explains."""
    expected = outcome(engine.twin(kernels=False))  # first: what does not fit raises there, where a kernel would read beyond its arrays
    try:
        found = outcome(engine.twin(kernels=True))
    except Unsupported as error:
        engine.use_generic_path(str(error))
        return
    for name in sorted(expected.keys() ^ found.keys()):
        engine.use_generic_path(f"it makes {name}, or leaves it out, as the algorithm's own code does not")
        return
    limits = {name: NEAR if name == "loss" else FAR for name in expected}
    differ = [name for name, value in expected.items() if distance(found[name], value, before.get(name), engine.dtype, limits[name])]
    if not differ:
        return
    exact = engine.dtype == torch.float64
    if exact or not explained(found, expected, outcome(engine.twin(kernels=False, dtype=torch.float64)), before):
        engine.use_generic_path(f"its numbers differ from the algorithm's own in {differ[0]}")


def apart(
    engine: Engine, found: Mapping[str, Tensor], outcome: Callable[[Engine], Mapping[str, Tensor]], before: Mapping[str, Tensor]
) -> str:
    """The first tensor in which what a derived kernel left is further from the generic path than rounding explains; "" if none is."""
    expected = outcome(engine.twin(kernels=False))
    near = {name: NEAR if name == "loss" else FAR for name in expected}
    differ = [name for name, value in expected.items() if distance(found[name], value, before.get(name), engine.dtype, near[name])]
    if not differ:
        return ""
    if engine.dtype != torch.float64 and explained(found, expected, outcome(engine.twin(kernels=False, dtype=torch.float64)), before):
        return ""
    return differ[0]


def explained(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], exact: Mapping[str, Tensor], before: Mapping[str, Tensor]
) -> bool:
    """Whether rounding explains a difference: a kernel's numbers are about as near to those of longer arithmetic as the generic path's.

    With a large learning rate or an ill-conditioned system the last digit of a float32 soon shows in the first.
    """
    noise, error = 0.0, 0.0
    for name, value in exact.items():
        if found[name].shape != value.shape:
            return False
        moved = value - before[name].double() if name in before else value
        size = moved.nan_to_num(0.0, 0.0, 0.0).abs().max().item() or 1.0
        # means: a few numbers may differ by luck, a wrong formula moves most of them
        noise = max(noise, (expected[name] - value).abs().nan_to_num(0.0, 0.0, 0.0).mean().item() / size)
        error = max(error, (found[name] - value).abs().nan_to_num(0.0, 0.0, 0.0).mean().item() / size)
    return error <= FARTHER * noise


def distance(found: Tensor, expected: Tensor, before: Tensor | None, kind: torch.dtype, far: Mapping[torch.dtype, float]) -> float:
    """0 if two tensors are the same up to rounding of `kind`; else the largest difference, in units of how far the largest number moved."""
    if found.shape != expected.shape:
        return float("inf")
    found, expected = found.double(), expected.double()
    # both infinite, or both NaN, are equal; one alone is as far apart as can be
    gap = torch.where(found.isfinite() | expected.isfinite(), (found - expected).abs(), 0.0).nan_to_num(torch.inf)
    size = expected.nan_to_num(0.0, 0.0, 0.0).abs().max().item() if expected.numel() else 0.0
    moved = size if before is None else (expected - before.double()).nan_to_num(0.0, 0.0, 0.0).abs().max().item()
    limit = far[kind] * moved + ROUNDINGS * torch.finfo(kind).eps * size
    isolated = min(ISOLATED, gap.numel() // 64) if kind == torch.float32 else 0
    return gap.max().item() / (moved or size or 1.0) if int((gap > limit).sum()) > isolated else 0.0


def first_samples(samples: Samples, who: np.ndarray, batch: int) -> Samples:
    """The first samples of a few of the clients at the positions `who`: the smallest and, if there is one, one with two batches."""
    by_size = who[np.argsort(samples.counts[who], kind="stable")]
    longer = by_size[samples.counts[by_size] > batch][:1]
    middle = by_size[[0, len(by_size) // 4, len(by_size) // 2]]
    few = np.unique(np.concatenate([middle, longer]))[:CLIENTS]
    most = max(2 * batch, SAMPLES)
    local, label, row = [], [], []
    for c in few:
        mine = slice(samples.ptr[c], min(samples.ptr[c] + most, samples.ptr[c + 1]))
        used, at = np.unique(samples.local[mine], return_inverse=True)
        local.append(at.astype(samples.local.dtype))
        label.append(samples.label[mine])
        row.append(samples.row[samples.row_ptr[c] + used])
    ends = [np.concatenate([[0], np.cumsum([len(part) for part in parts])]) for parts in (label, row)]
    return Samples(samples.clients[few], ends[0], np.concatenate(local), np.concatenate(label), ends[1], np.concatenate(row))


def in_type(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in tensors.items()}
