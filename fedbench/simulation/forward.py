"""Kernels derived from `score` and `receive`: a client's scores of its items, and own tables that are merged, where the state lies.

They are built at the first use, compared with the generic path, and refused if they differ; the log says why, once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbench.contract.algorithm import Algorithm, Answer, Tensors
from fedbench.kernels.compiler import build, forward, trace
from fedbench.kernels.compiler.cut import RowGraph, reads
from fedbench.kernels.compiler.expressions import Constants
from fedbench.kernels.compiler.graph import Value
from fedbench.kernels.compiler.indices import LANE
from fedbench.kernels.threads import share_out
from fedbench.simulation.client_store import ClientStore
from fedbench.simulation.derived import Shapes, watched

log = logging.getLogger("fedbench")


SCORE = "score"
"""the output of a kernel that scores"""
NUMBERS = (torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class Kernel:
    """A compiled function of what clients keep and what they were sent."""

    common: forward.Program | None
    each: forward.Program
    module: ModuleType
    numbers: np.ndarray
    changes: bool
    """the function depends on the round, so its numbers are looked up in every round"""

    def run(self, clients: int, arrays: Mapping[forward.Key, Any], outs: Mapping[str, Any], items: np.ndarray) -> None:
        """For so many clients. items: [C, K], or [1, M] for all of them; see forward.given."""
        call(self.module.each, clients, *forward.given(self.each, arrays, outs), items, self.numbers)

    def made_for_all(self, arrays: Mapping[forward.Key, Any], items: int) -> dict[forward.Key, np.ndarray]:
        """What is the same for all clients, [1, ...] each."""
        if self.common is None:
            return {}
        outs = {name: np.empty((1, items, width), self.numbers.dtype) for name, width in self.common.rows.items()}
        outs |= {name: np.empty((1, size), self.numbers.dtype) for name, size in self.common.dense.items()}
        one = np.zeros(1, np.int64)
        given = forward.given(self.common, arrays, {name: (out, one) for name, out in outs.items()})
        call(self.module.common, 1, *given, np.arange(items)[None], self.numbers)
        return {("made", name): out for name, out in outs.items()}


def call(function: Any, clients: int, *given: Any) -> None:
    with trace.compiling():
        share_out(function, clients, *given)


class Kernels:
    """The kernels of one algorithm that need no gradient."""

    def __init__(self) -> None:
        self.known: dict[Any, tuple[int, Kernel | None]] = {}
        self.agreed: dict[Any, bool] = {}
        """functions whose kernels were compared with the generic path, and whether they agreed"""
        self.said: set[str] = set()
        self.ready: dict[Kernel, tuple[Tensors, dict[str, int], dict[forward.Key, np.ndarray]]] = {}
        """what was made for all clients, and of what"""

    def fitting(
        self, algorithm: Algorithm, what: str, store: ClientStore, answer: Answer, agrees: Callable[[Kernel], bool]
    ) -> Kernel | None:
        """The kernel for a function of clients that this answer reaches; None if there is none.

        agrees: the comparison with the generic path, before its first use
        """
        own = {name: shape(value.shape[1:], name in algorithm.tables) for name, value in store.tensors.items()}
        sent = {name: shape(value.shape, name in algorithm.tables) for name, value in answer.shared.items()}
        sent |= {name: shape(value.shape[1:], name in algorithm.tables) for name, value in answer.personal.items()}
        tensors = {**answer.shared, **answer.personal, **store.tensors}
        kinds = tuple((name, value.dtype) for name, value in tensors.items())
        key = what, tuple(own.items()), tuple(sent.items()), tuple(answer.personal), kinds
        when, known = self.known.get(key, (0, None))
        # a function that asked for the round may have other constants in this one
        if key not in self.known or (known is not None and known.changes and when != algorithm.context.round):
            if known is not None:
                self.ready.pop(known, None)
            known = self.derived(algorithm, what, (own, sent), store.tensors, answer)
            self.known[key] = algorithm.context.round, known
        if known is None or self.agreed.get(key) is False:
            return None
        if key not in self.agreed:
            try:
                self.agreed[key] = agrees(known)
                reason = "its numbers differ from the algorithm's own"
            except trace.Unsupported as error:
                self.agreed[key], reason = False, str(error)
            if not self.agreed[key]:
                self.refuse(algorithm, what, reason)
                return None
        return known

    def refuse(self, algorithm: Algorithm, what: str, reason: str) -> None:
        said = f"{algorithm.name or type(algorithm).__name__}: no kernel for {what}, for {reason}; the generic path runs it (slower)"
        if said not in self.said:
            self.said.add(said)
            log.info("%s", said)

    def derived(self, algorithm: Algorithm, what: str, shapes: tuple[Shapes, Shapes], own: Tensors, answer: Answer) -> Kernel | None:
        try:
            return made(algorithm, what, shapes, own, answer)
        except Exception as error:  # whatever it is: the generic path runs the method, and says what is wrong with it if anything is
            log.debug("no kernel was derived", exc_info=True)
            known = isinstance(error, trace.Unsupported | NotImplementedError)
            self.refuse(algorithm, what, str(error) if known else f"{type(error).__name__} while it was derived ({error})")
            return None

    def arrays(self, kernel: Kernel, clients: np.ndarray, answer: Answer, store: ClientStore, items: int) -> dict[forward.Key, Any]:
        """What a kernel reads, and which of it is each client's."""
        programs = [one for one in (kernel.common, kernel.each) if one is not None]
        keys = {key for one in programs for key in (*one.tables, *one.params)}
        nobody, place = np.zeros(len(clients), np.int64), np.asarray(store.place(clients))
        found: dict[forward.Key, Any] = {}
        for kind, name in sorted(keys):
            if kind == "own":
                found[kind, name] = store.tensors[name].numpy(), place
            elif kind == "sent" and name in answer.personal:
                assert answer.slot is not None
                found[kind, name] = answer.personal[name].contiguous().numpy(), answer.slot[torch.from_numpy(clients)].numpy()
            elif kind == "sent":
                found[kind, name] = answer.shared[name].contiguous().numpy()[None], nobody
        return found | {key: (value, nobody) for key, value in self.made_once(kernel, answer, found, items).items()}

    def made_once(self, kernel: Kernel, answer: Answer, arrays: Mapping[forward.Key, Any], items: int) -> dict[forward.Key, np.ndarray]:
        """What is the same for all clients: made when what was sent to all changes."""
        if kernel.common is None:
            return {}
        names = [name for _, name in (*kernel.common.tables, *kernel.common.params)]
        known = self.ready.get(kernel)
        # by identity and version: the same tensors, not changed in place since; numbers need not be compared
        if known is None or any(answer.shared[name] is not known[0][name] for name in names) or known[1] != versions(known[0]):
            sent = {name: answer.shared[name] for name in names}
            known = self.ready[kernel] = sent, versions(sent), kernel.made_for_all(arrays, items)
        return known[2]

    def scores(self, kernel: Kernel, clients: np.ndarray, answer: Answer, store: ClientStore, items: np.ndarray, all_items: int) -> Tensor:
        """[C, K] scores of each client's items [C, K], or of all items [1, M]."""
        arrays = self.arrays(kernel, clients, answer, store, all_items)
        out = np.empty((len(clients), items.shape[1]), kernel.numbers.dtype)
        kernel.run(len(clients), arrays, {SCORE: (out, np.arange(len(clients)))}, items)
        return torch.from_numpy(out)

    def merge(self, kernel: Kernel, clients: np.ndarray, answer: Answer, store: ClientStore, items: int) -> None:
        """What `receive` makes of what clients keep takes its place in the store."""
        place = np.asarray(store.place(clients))
        outs = {name: (store.tensors[name].numpy(), place) for name in (*kernel.each.rows, *kernel.each.dense, *kernel.each.copies)}
        kernel.run(len(clients), self.arrays(kernel, clients, answer, store, items), outs, np.arange(items)[None])


def versions(tensors: Tensors) -> dict[str, int]:
    """How often each tensor was changed in place."""
    return {name: value._version for name, value in tensors.items()}


def shape(size: torch.Size, table: bool) -> tuple[int | str, ...]:
    return (LANE, *size[1:]) if table else tuple(size)


def made(algorithm: Algorithm, what: str, shapes: tuple[Shapes, Shapes], kept: Tensors, answer: Answer) -> Kernel:
    """Trace, write and load a kernel; numba compiles it when it is first called."""
    watching, context = watched(algorithm)
    tensors = {("own", name): value for name, value in kept.items()}
    tensors |= {("sent", name): value for name, value in (*answer.shared.items(), *answer.personal.items())}
    graph, outputs = traced(watching, what, shapes, {key: value.dtype for key, value in tensors.items()})
    # a kernel computes in one type
    kinds = {tensors[key].dtype for key in reads([*outputs.values()])}
    if not kinds or len(kinds) > 1 or not kinds <= set(NUMBERS):
        raise trace.Unsupported(f"numbers of the type {' and '.join(sorted(str(kind) for kind in kinds)) or 'none'}")
    if what == SCORE or what.startswith(f"{SCORE}_"):
        if outputs[SCORE].shape != (LANE,):
            raise trace.Unsupported(f"scores of the shape {outputs[SCORE].shape}")
    else:
        # what `receive` passes on lies in the store already
        outputs = {name: v for name, v in outputs.items() if v.how.get("key") != ("own", name)}
        if changed := [name for name, v in outputs.items() if v.shape != shapes[0][name]]:
            raise trace.Unsupported(f"another shape of {changed[0]}")

    def shared(key: forward.Key) -> bool:
        return key[0] == "sent" and key[1] not in answer.personal

    constants = Constants()
    common, each = forward.programs(graph, outputs, constants, shared, what == "receive")
    programs = [one for one in (common, each) if one is not None]
    text = build.module_text(f"{type(algorithm).__name__}.{what}", max(one.acts for one in programs), *(one.text for one in programs))
    numbers = np.array(constants.values or [0.0], np.float32 if kinds == {torch.float32} else np.float64)
    return Kernel(common, each, build.load(text), numbers, context.asked)


def traced(
    algorithm: Algorithm, what: str, shapes: tuple[Shapes, Shapes], kinds: Mapping[forward.Key, torch.dtype]
) -> tuple[Any, dict[str, Value]]:
    """The graph of a function of one client, items being its rows: of scores, or of what `receive` makes of what is kept."""
    leaves: dict[trace.Key, Tensor] = {}
    for kind, sizes in zip(("own", "sent"), shapes, strict=True):
        for name, size in sizes.items():
            number = kinds[kind, name]
            leaves[kind, name] = trace.example(size, torch.float64 if number.is_floating_point else number)

    def call(*tensors: Tensor) -> Tensors:
        given = dict(zip(leaves, tensors, strict=True))
        own, sent = ({name: value for (kind, name), value in given.items() if kind == which} for which in ("own", "sent"))
        found = getattr(algorithm, what)(own, sent)
        return {SCORE: found} if isinstance(found, Tensor) else {name: value for name, value in found.items() if name in own}

    # called once for the names that it returns
    names = list(call(*leaves.values()))
    return trace.trace(lambda *tensors: [*call(*tensors).values()], leaves, names, RowGraph())
