"""The rehearsal's questions that have one right answer: the same again, with padding, with the candidates in another order.

What `answers_checked` looks at is one answer at a time. A mistake that shows in no single answer shows here: hidden state or own chance,
padding that counts, a score that reads the position of an item, a loss without a gradient.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import grad

from fedbench.contract.algorithm import Algorithm, Batch, Stage, Tensors
from fedbench.contract.plugin_errors import PluginError, fault, where
from fedbench.simulation.comparing import CLOSE, same
from fedbench.simulation.federation import Federation
from fedbench.simulation.plain_answers import kind
from fedbench.simulation.sending import reaching, sent_to, sent_whole

log = logging.getLogger("fedbench")

CLIENTS = 3
"""of the tiny federation that are asked"""


def ask(algorithm: Algorithm, federation: Federation) -> None:
    """Raise PluginError for a function of one client whose answer changes where it must not. What cannot be asked is passed over."""
    world = federation.engine.world
    algorithm = algorithm.at(federation.round, world)
    answer = algorithm.answer(federation.server)
    moved: dict[str, bool] = {}
    if type(algorithm).for_new_users is not Algorithm.for_new_users:
        served = algorithm.for_new_users(federation.server)
        if not isinstance(served, Mapping) or not all(isinstance(value, Tensor) for value in served.values()):
            said = f"for_new_users returned {kind(served)}; expected the server's dict of tensors"
            raise fault(type(algorithm), "for_new_users", said)
    for number in np.linspace(0, world.clients - 1, CLIENTS).astype(int):
        client = torch.tensor([int(number)])
        sent = {name: value[0] for name, value in sent_whole(reaching(answer, int(sent_to(answer, client)[0])), client).items()}
        kept = federation.private().read(client)
        own = {name: value[0] for name, value in kept.items()}
        _passed_over(lambda own=own, sent=sent: _scores(algorithm, own, sent, world.items))  # type: ignore[misc]
        if algorithm.federated:
            own = {} if algorithm.reconstructs else own
            _passed_over(lambda own=own, sent=sent, number=number: _work(algorithm, federation, own, sent, int(number), moved))  # type: ignore[misc]
    _gradients(type(algorithm), moved)


def _passed_over(question: Callable[[], None]) -> None:
    try:
        question()
    except PluginError:
        raise
    except Exception:
        log.debug("a question of the rehearsal could not be asked", exc_info=True)


def _scores(algorithm: Algorithm, own: Tensors, sent: Tensors, items: int) -> None:
    """The order of candidates must not matter to their scores."""
    tables = algorithm.tables
    if not any(name in tables for name in (*own, *sent)):
        return
    draw = torch.Generator().manual_seed(0)
    rows = torch.randperm(items, generator=draw)[:23]
    for hook in ("score", *(f"score_{name}" for name in algorithm.scores)):
        score = getattr(algorithm, hook)
        first = score(_picked(own, rows, tables), _picked(sent, rows, tables)).double()
        for mixed in (torch.arange(len(rows)).flip(0), torch.randperm(len(rows), generator=draw)):
            again = score(_picked(own, rows[mixed], tables), _picked(sent, rows[mixed], tables)).double()
            if not same(again, first[mixed]) and not _one_order(again, first[mixed]):
                said = "reads the position of an item: the same items in another order get another order of scores"
                raise fault(type(algorithm), hook, f"{hook} {said}; a score may depend on the item's own rows alone")


def _one_order(one: Tensor, other: Tensor) -> bool:
    """Whether two scores of the same items put them in the same order, as far as scores are not nearly equal."""
    apart = [score[:, None] - score[None, :] for score in (one, other)]
    clear = [gap.abs() > CLOSE * gap.abs().max() for gap in apart]
    return not bool((clear[0] & clear[1] & (apart[0].sign() != apart[1].sign())).any() or (clear[0] != clear[1]).double().mean() > 0.2)


def _picked(tensors: Tensors, rows: Tensor, tables: Mapping[str, str]) -> Tensors:
    return {name: value[rows] if name in tables else value for name, value in tensors.items()}


def _work(algorithm: Algorithm, federation: Federation, own: Tensors, sent: Tensors, client: int, moved: dict[str, bool]) -> None:
    """A client's local work, up to each function that trains it. moved: which names had a gradient so far."""
    samples = federation.samples(federation.round, np.array([client]))
    if not len(samples.local):
        return
    tables, rows = algorithm.tables, torch.from_numpy(samples.row.astype(np.int64))
    sent = _picked(sent, rows, tables)
    held = algorithm.receive(_picked(own, rows, tables), sent)
    label = torch.from_numpy(samples.label)
    batch = Batch(torch.from_numpy(samples.local.astype(np.int64)), label, torch.ones_like(label), torch.ones(len(rows)))
    for stage in algorithm.stages(sent):
        hook = "loss" if stage.phases else "solve"
        if getattr(type(algorithm), hook) is getattr(Algorithm, hook):
            return
        noisy = _shaken(held), _shaken(sent)
        try:
            _padding(algorithm, hook, (*noisy, batch), torch.float64, 1e-6)
        except PluginError:
            raise
        except Exception:  # it makes numbers of its own, in the type of the run
            _padding(algorithm, hook, (*noisy, batch), federation.engine.dtype, 1e-3)
        if stage.phases:
            _note_gradients(algorithm, stage, (*noisy, batch), federation.engine.dtype, moved)
        else:
            held = {**held, **algorithm.solve(held, sent, in_type(batch, federation.engine.dtype))}


def in_type(one: Any, dtype: torch.dtype) -> Any:
    """Tensors, or a batch of them, in numbers of that type."""
    if isinstance(one, Tensor):
        return one.to(dtype) if one.is_floating_point() else one
    return Batch(*(in_type(part, dtype) for part in one)) if isinstance(one, Batch) else {n: in_type(v, dtype) for n, v in one.items()}


def _shaken(tensors: Tensors) -> Tensors:
    """With noise: what begins at 0 may have no gradient there, and samples that are all alike hide what is counted twice."""
    draw = torch.Generator().manual_seed(1)
    return {
        name: value + 0.3 * torch.randn(value.shape, generator=draw, dtype=value.dtype) if value.is_floating_point() else value
        for name, value in tensors.items()
    }


def _padding(algorithm: Algorithm, hook: str, given: tuple[Tensors, Tensors, Batch], dtype: torch.dtype, close: float) -> None:
    """As many samples and rows again that are padding must change nothing."""
    held, sent, batch = (in_type(one, dtype) for one in given)
    function, rows = getattr(algorithm, hook), len(batch.rows)

    def longer(tensors: Tensors) -> Tensors:
        return {name: torch.cat([v, v[:1].expand_as(v)]) if name in algorithm.tables else v for name, v in tensors.items()}

    nothing = torch.zeros_like(batch.label)
    padded = Batch(
        torch.cat([batch.items, torch.zeros_like(batch.items)]),
        torch.cat([batch.label, nothing]),
        torch.cat([batch.weight, nothing]),
        torch.cat([batch.rows, torch.zeros_like(batch.rows)]),
    )
    plain, with_padding = function(held, sent, batch), function(longer(held), longer(sent), padded)
    if isinstance(plain, Mapping):
        with_padding = {name: value[:rows] if name in algorithm.tables else value for name, value in with_padding.items()}
    if not same(with_padding, plain, close):
        said = "padding is counted: weigh samples by batch.weight and held rows by batch.rows, and divide by their sums"
        raise fault(type(algorithm), hook, f"{hook} changes when samples and rows that are padding are added; {said}")


def _note_gradients(
    algorithm: Algorithm, stage: Stage, given: tuple[Tensors, Tensors, Batch], dtype: torch.dtype, moved: dict[str, bool]
) -> None:
    """Of each name that phases move, whether the loss has a gradient by it."""
    held, sent, batch = (in_type(one, dtype) for one in given)
    for phase in stage.phases:
        part = {name: held[name] for name in phase.names}

        def of(part: Tensors) -> Tensor:
            return algorithm.loss({**held, **part}, sent, batch)

        for name, value in grad(of)(part).items():
            if not phase.weight_decay and name not in phase.pull:
                moved[name] = moved.get(name, False) or bool((value != 0).any())


def _gradients(cls: type[Algorithm], moved: Mapping[str, bool]) -> None:
    """A loss that moves nothing is a mistake; one that leaves a single name where it is may be meant."""
    still = [name for name, has in moved.items() if not has]
    if still and len(still) == len(moved):
        said = "look for .detach(), torch.no_grad() or a loss that is a constant"
        raise fault(cls, "loss", f"loss has no gradient, so nothing trains: it is 0 for {', '.join(still)}; {said}")
    for name in still:
        log.warning("%s: a phase moves %r, but the gradient of loss is 0 for it; look for .detach()", where(cls, "loss"), name)
