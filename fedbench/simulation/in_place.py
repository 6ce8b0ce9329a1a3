"""Training where the state lies: a cohort by one call of a derived kernel for each stage, without blocks and copies.

Closed forms between them are solved for all clients at once. It fits an algorithm whose client holds what it keeps and what it was sent
as they are, and private vectors that it makes anew; that uploads of tables how touched rows changed or what they are now, maybe times a
number; and that keeps of tables the rows that it trained. Others are trained in blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedbench.contract.algorithm import SHARED, Algorithm, Answer, Stage, Tensors
from fedbench.contract.uploads import Rows
from fedbench.data.sampling import Samples
from fedbench.kernels.compiler import trace
from fedbench.kernels.compiler.graph import Graph, Value, is_uniform
from fedbench.parts.ridge import Lists, solve_lists
from fedbench.simulation import closed_forms, derived
from fedbench.simulation.blocks import host_type, part_of
from fedbench.simulation.client_store import ClientStore
from fedbench.simulation.closed_forms import Closed
from fedbench.simulation.generic import vmapped
from fedbench.simulation.own_tables import Before, move_untouched, one_row
from fedbench.simulation.sending import LEVELS, lying, reaching, sent_rows

if TYPE_CHECKING:
    from fedbench.simulation.engine import Engine

CHANGE, VALUE = 1, 2
"""what the rows of an upload hold: the numbers that kernels read"""
Work = tuple[tuple[Stage, derived.Kernel | Closed | None], ...]
"""the stages of a client's work, and a kernel or a closed form for each; None: ridge regression"""
Shapes = tuple[derived.Shapes, derived.Shapes, derived.Shapes]
"""of what a client holds, was sent and keeps"""


@dataclass(frozen=True)
class Places:
    """Where the tensors lie that a client holds; what is not named here was sent."""

    kept: frozenset[str]
    """names that lie in the store"""
    copied: tuple[tuple[str, str], ...]
    """further names of what lies in the store, as it was when the round began; no phase moves them"""
    made: frozenset[str]
    """names that `receive` makes, of no table"""


@dataclass(frozen=True)
class Left:
    """What becomes of the tensors that a client holds after training: uploads, and what it keeps."""

    rows: dict[str, tuple[str, int]]
    """uploaded table -> the trained table that its rows are made of, and how: CHANGE or VALUE"""
    stored: tuple[str, ...]
    """own tables that are uploaded as the store has them"""
    counts: tuple[str, ...]
    """uploads that are the number of samples"""
    dense: bool
    """there are other uploads, or rows are multiplied by a number"""
    into: dict[str, str]
    """trained table -> the own table that keeps its rows, if that is another one"""
    rewritten: tuple[str, ...]
    """what else `keep` makes"""


@dataclass(frozen=True)
class Plan:
    """How clients that the same answer reaches are trained in place."""

    work: Work
    places: Places
    left: Left


def plan(engine: Engine, algorithm: Algorithm, client: int, answer: Answer, store: ClientStore, merged: bool) -> Plan | None:
    """How clients like this one are trained in place; None if they are not. merged: `receive` was called on whole own tables before."""
    one, tables, kernels = torch.tensor([client]), algorithm.tables, engine.derived
    own, sent = one_row(store, answer, one, tables)
    held = algorithm.receive(dict(own), dict(sent))
    # identity, not equality: a tensor that `receive` passes on lies where it lay
    kept = {name for name in held if held[name] is own.get(name) or (merged and name in algorithm.own_tables)}
    copied = {name: other for name in held.keys() - kept for other in own if held[name] is own[other] and other not in tables}
    made = {name for name in held.keys() - kept - copied.keys() if held[name] is not sent.get(name)}
    # rows that `receive` makes, or a kept name that now holds something else, have no place to lie
    if made & {*tables} or (own.keys() - kept - made) & held.keys():
        return None
    places = Places(frozenset(kept), tuple(sorted(copied.items())), frozenset(made))
    shapes: Any = [{name: derived.shape_of(value, name in tables) for name, value in some.items()} for some in (held, sent, own)]
    work = worked(engine, algorithm, answer, sent, places, shapes)
    if work is None or kernels is None:
        return None
    modules = tuple(one and one.module for _, one in work)
    key = modules, places, tuple(tuple(sorted(some.items())) for some in shapes)
    if key not in kernels.plans:
        watching, context = derived.watched(algorithm)
        found = left_behind(watching, work, places, shapes)
        if context.asked:  # what is uploaded may be another thing in the next round
            return Plan(work, places, found) if found else None
        kernels.plans[key] = found
    known: Left | None = kernels.plans[key]
    return Plan(work, places, known) if known else None


def worked(engine: Engine, algorithm: Algorithm, answer: Answer, sent: Tensors, places: Places, shapes: Shapes) -> Work | None:
    """The stages with their kernels; None if one has none, or if a stage needs rows that an earlier one trained and that no store has."""
    work: list[tuple[Stage, derived.Kernel | Closed | None]] = []
    moved: set[str] = set()
    assert engine.derived is not None
    for stage in algorithm.stages(sent):
        one: derived.Kernel | Closed | None = None
        if stage.phases:
            one = engine.derived.training(algorithm, stage, shapes[:2])
        elif stage.ridge is None or not engine.knows_ridge:
            one = closed_form(engine, algorithm, shapes)
        # the kernel for least squares reads what all were sent, and comes first: nothing has moved yet
        elif work or answer.personal or not {"items", "gram", "size"} <= answer.shared.keys() or "user" not in places.made:
            return None
        else:
            work.append((stage, None))
            continue
        # rows that an earlier stage trained lie in the upload, maybe as changes: no kernel reads them there
        if one is None or any(("held", name) in one.tables for name in moved):
            return None
        if isinstance(one, derived.Kernel):
            # a copy is of the past: a phase that moves it would need another one
            if dict(places.copied).keys() & {name for phase in stage.phases for name in phase.names}:
                return None
            moved |= one.model.trained_tables.keys() - places.kept
        work.append((stage, one))
    return tuple(work) if any(one for _, one in work) else None


def closed_form(engine: Engine, algorithm: Algorithm, shapes: Shapes) -> Closed | None:
    """How `solve` is made of sums where rows lie; None if it is not, or if it makes a table."""
    held, sent, _ = (tuple(sorted(some.items())) for some in shapes)
    assert engine.derived is not None
    found: Closed | None = engine.derived.looked_up(
        ("solve", held, sent, engine.dtype), algorithm, lambda: closed_forms.made(algorithm, shapes[:2], engine.dtype)
    )
    return found


# ---- what a method does with what it holds -----------------------------------------------------------------------------------


def left_behind(algorithm: Algorithm, work: Work, places: Places, shapes: Shapes) -> Left | None:
    """What `upload` and `keep` make of what is held, read from what torch records of them; None if it is more than can be done in place."""
    held, sent, own = ({name: trace.example(shape) for name, shape in some.items()} for some in shapes)
    kernels = [one for _, one in work if one is not None]
    trained = {name for one in kernels for name in one.names}
    try:
        if any(made_of_tables(algorithm, algorithm.receive, {"own": own, "sent": sent}, places.made)):
            return None
        keeping = kept_rows(algorithm, kernels, places, (held, sent, own), trained)
        return uploaded(algorithm, places, (held, sent), trained, keeping) if keeping else None
    except trace.Unsupported:
        return None


def leaves_of(given: Mapping[str, Tensors]) -> dict[trace.Key, Tensor]:
    return {(kind, name): value for kind, tensors in given.items() for name, value in tensors.items()}


def call(function: Callable[..., Tensors], given: Mapping[str, Tensors], *tensors: Tensor) -> Tensors:
    """A function of dicts of tensors, and single ones, on other tensors in their place."""
    others: dict[str, Any] = {kind: {} for kind in given}
    for (kind, name), value in zip(leaves_of(given), tensors, strict=True):
        others[kind][name] = value
    return function(*(some.get("", some) for some in others.values()))


def made_of_tables(algorithm: Algorithm, function: Callable[..., Tensors], given: Mapping[str, Tensors], names: Any) -> list[bool]:
    """Whether each of these names, which a function of a client makes, is made of rows of tables or depends on how many they are."""
    names = list(names)
    if not names:
        return []
    leaves = leaves_of(given)
    found = trace.read(lambda *tensors: [call(function, given, *tensors)[name] for name in names], leaves)
    return [any(name in algorithm.tables for _, name in some) for some in found]


def kept_rows(
    algorithm: Algorithm, kernels: list[derived.Kernel | Closed], places: Places, given: tuple[Tensors, Tensors, Tensors], trained: set[str]
) -> tuple[dict[str, str], tuple[str, ...]] | None:
    """`Left.into` and `Left.rewritten`; None if `keep` does something else."""
    held, sent, own = given
    if type(algorithm).keep is Algorithm.keep:
        return {}, tuple(sorted(places.made & own.keys()))
    kept = algorithm.keep(dict(held), dict(sent))
    as_held = {name: other for name, value in kept.items() for other in held if value is held[other]}
    into: dict[str, str] = {}
    for name in algorithm.own_tables:
        table = as_held.get(name)
        if table == name and name in places.kept:
            continue
        # trained rows are written to this table at once, so nobody may read or train it under its own name
        read = any(("held", name) in kernel.tables for kernel in kernels)
        if table is None or table == name or table not in trained or name in trained or read or table in into:
            return None
        into[table] = name
    rest = own.keys() - {*algorithm.tables}
    if kept.keys() - own.keys() or (rest - kept.keys()) & trained:
        return None
    rewritten = sorted(name for name in rest & kept.keys() if not (as_held.get(name) == name and name in places.kept))
    inputs = {"held": held, "sent": sent}
    # all that is kept is recorded, so that nothing is missed that changes a tensor in place or looks at its numbers
    reads = dict(zip(kept, made_of_tables(algorithm, algorithm.keep, inputs, kept), strict=True))
    return None if any(reads[name] for name in rewritten) else (into, tuple(rewritten))


def uploaded(
    algorithm: Algorithm, places: Places, given: tuple[Tensors, Tensors], trained: set[str], keeping: tuple[dict[str, str], tuple[str, ...]]
) -> Left | None:
    """What `upload` makes; None if it makes more of tables than rows as they are, or how they changed."""
    into, rewritten = keeping
    inputs = {"held": given[0], "sent": given[1], "samples": {"": trace.example(())}}
    made = algorithm.upload(*given, inputs["samples"][""])
    tables = [name for name in made if name in algorithm.tables]
    # identity again: the number of samples as it was given
    counts = [name for name in made if made[name] is inputs["samples"][""]]
    others = [name for name in made if name not in (*tables, *counts)]
    if any(made_of_tables(algorithm, algorithm.upload, inputs, others)):
        return None
    graph, values = trace.trace(
        lambda *tensors: [call(algorithm.upload, inputs, *tensors)[name] for name in tables], leaves_of(inputs), tables
    )
    rows: dict[str, tuple[str, int]] = {}
    stored, dense = [], bool(others)
    for name, v in values.items():
        if algorithm.tables[name] == SHARED:
            form = rows_of(graph, v)
            if form is None or form[0] not in trained or form[0] in places.kept:
                return None
            rows[name], dense = form[:2], dense or form[2]
        elif v.op == "table" and v.how["key"] == ("held", name) and name in places.kept and name not in into.values():
            stored.append(name)
        else:
            return None
    sources = [table for table, _ in rows.values()]
    # rows are written once, to one upload; a trained table that is neither uploaded nor kept would be lost
    if len({*sources}) < len(sources) or not (trained & {*algorithm.tables}) - places.kept <= {*sources}:
        return None
    return Left(rows, tuple(stored), tuple(counts), dense, into, rewritten)


def rows_of(graph: Graph, v: Value) -> tuple[str, int, bool] | None:
    """The table, the form (CHANGE or VALUE), and whether a number is multiplied in, of rows that are uploaded."""
    parts = graph.factors(v)
    lane = [one for one in parts if not is_uniform(one)]
    if len(lane) != 1:
        return None
    core, scaled = lane[0], len(parts) > 1
    if core.op == "table" and core.how["key"][0] == "held":
        return core.how["key"][1], VALUE, scaled
    if core.f == "sub" and all(one.op == "table" for one in core.args):
        (kind, name), (other, base) = (one.how["key"] for one in core.args)
        return (name, CHANGE, scaled) if (kind, other) == ("held", "sent") and name == base else None
    return None


# ---- training ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """Results of the clients of one kind."""

    loss: np.ndarray
    updates: int
    dense: Tensors
    """uploads that are no rows"""


def train(
    algorithm: Algorithm,
    how: Plan,
    samples: Samples,
    at: Any,
    given: tuple[np.ndarray, np.ndarray, Answer, ClientStore],
    out: dict[str, np.ndarray],
) -> Trained:
    """Train clients `at` of a cohort. given: keys of shuffles and of halves, what they are sent, the store. out: rows to fill in."""
    stream, halves, answer, store = given
    clients = torch.from_numpy(samples.clients[at])
    touched, begin = samples.touched[at], samples.row_ptr[:-1][at]
    copies = copied(algorithm, how, clients, answer, store)
    keeps = {table: (store.tensors[name].numpy(), np.asarray(store.place(clients))) for table, name in how.left.into.items()}
    loss, updates, epoch = np.zeros(len(clients)), 0, 0
    for stage, kernel in how.work:
        mine = part_of(samples, stage, halves)
        first, counts = mine.ptr[:-1][at], mine.counts[at]
        if kernel is None:
            lists = Lists(first, first + counts, mine.local, mine.label, begin, mine.row)
            copies["user"] = solve_lists(stage.ridge, lists, answer.shared)
        elif isinstance(kernel, Closed):
            arrays = placed(kernel, how.places, clients, answer, store, copies)
            for name, value in kernel.solve((first, counts, mine.local, mine.label, begin, touched, mine.row), arrays).items():
                if name in how.places.kept:
                    store.write(clients, name, value)
                else:
                    copies[name] = value
        else:
            arrays = placed(kernel, how.places, clients, answer, store, copies)
            outs = {table: (out[name], form) for name, (table, form) in how.left.rows.items() if table in kernel.model.trained_tables}
            into = {table: where for table, where in keeps.items() if table in kernel.model.trained_tables}
            layout = (stream[at], first, counts, mine.local, mine.label, begin, touched, mine.row)
            batch = min(stage.batch_size or derived.NO_LIMIT, 1 << 62)
            most = derived.NO_LIMIT if stage.max_steps is None else stage.max_steps
            limits = (epoch, stage.epochs, batch, most, algorithm.stop_below)
            loss, steps = kernel.train(layout, arrays, outs, into, stage.phases, limits)
            updates += sum(int((steps * one.width * (touched if one.table else 1)).sum()) for one in kernel.model.updates)
            for name in algorithm.own_tables:
                move_untouched(store, clients, name, stage.phases, torch.from_numpy(steps), answer, (begin, touched, mine.row))
        epoch += stage.epochs
    counted = torch.from_numpy(samples.counts[at]).to(store.draw.dtype)
    dense: Tensors = {name: counted for name in how.left.counts}
    if how.left.dense or how.left.rewritten:
        held, sent = beside(algorithm, how.places, clients, answer, store, copies)
    if how.left.dense:
        dense = vmapped(algorithm.upload, held, sent, counted)
        # made of one row of ones (held) and zeros (sent), it is the factor, for values and changes alike
        for name in how.left.rows:
            factor = dense.pop(name).numpy()
            if not (factor == 1).all():
                scale_rows(out[name], factor.reshape(len(clients), -1), begin, touched)
    if how.left.rewritten:
        kept = vmapped(algorithm.keep, held, sent)
        for name in how.left.rewritten:
            store.write(clients, name, kept[name])
    return Trained(loss, updates, {name: value for name, value in dense.items() if name not in how.left.stored})


def kernels_of(how: Plan) -> list[derived.Kernel]:
    """The kernels of the stages that train."""
    return [kernel for _, kernel in how.work if isinstance(kernel, derived.Kernel)]


def copied(algorithm: Algorithm, how: Plan, clients: Tensor, answer: Answer, store: ClientStore) -> Tensors:
    """[C, ...] what each client has a copy of: what `receive` makes, the past of what it keeps, and what was sent to all and is trained."""
    place, dtype = store.place(clients), store.draw.dtype
    copies = {name: store.tensors[other][place] for name, other in how.places.copied}
    if how.places.made:
        one = torch.zeros(len(clients), 1, dtype=torch.int64)
        own, sent = store.rows(clients, one, algorithm.tables), sent_rows(answer, clients, one, algorithm.tables)
        held = vmapped(algorithm.receive, own, sent)
        copies |= {name: held[name].clone(memory_format=torch.contiguous_format) for name in how.places.made}
    # what was sent to all and is trained: every client moves a copy
    moved = {one.name for kernel in kernels_of(how) for one in kernel.model.updates if not one.table}
    for name in moved - copies.keys() - how.places.kept:
        value, at = lying(answer, name, clients)
        copies[name] = value.to(dtype)[at]
    return copies


def placed(
    kernel: derived.Kernel | Closed, places: Places, clients: Tensor, answer: Answer, store: ClientStore, copies: Tensors
) -> dict[Any, tuple[np.ndarray, np.ndarray]]:
    """Arrays of a kernel, and which of them is each client's."""
    arrays = {}
    for kind, name in (*kernel.tables, *kernel.params):
        if kind == "held" and name in places.kept:
            value, at = store.tensors[name], store.place(clients)
        elif kind == "held" and name in copies:
            value, at = copies[name], torch.arange(len(clients))
        else:
            value, at = lying(answer, name, clients)
        arrays[kind, name] = derived.as_array(value, store.draw.dtype), at.numpy()
    return arrays


def beside(
    algorithm: Algorithm, places: Places, clients: Tensor, answer: Answer, store: ClientStore, copies: Tensors
) -> tuple[Tensors, Tensors]:
    """What clients hold and were sent [C, ...], with one made-up row of each table: 1 if it is held, 0 if it was sent.

    `upload` makes of it all that is no table, and the number that rows are multiplied by.
    """
    tables, place = algorithm.tables, store.place(clients)
    sent = sent_rows(answer, clients, torch.zeros(len(clients), 1, dtype=torch.int64), tables)
    held = {name: torch.ones_like(value) if name in tables else value for name, value in sent.items() if name not in places.kept}
    for name in places.kept:
        value = store.tensors[name]
        held[name] = torch.ones_like(value[place, :1]) if name in tables else value[place]
    sent = {name: torch.zeros_like(value) if name in tables else value for name, value in sent.items()}
    return held | copies, sent


def scale_rows(rows: np.ndarray, factor: np.ndarray, begin: np.ndarray, touched: np.ndarray) -> None:
    """Each client's rows times its factor."""
    which = np.repeat(begin - np.concatenate([[0], np.cumsum(touched)[:-1]]), touched) + np.arange(touched.sum())
    rows[which] *= np.repeat(factor, touched, axis=0)


# ---- a cohort ----------------------------------------------------------------------------------------------------------------


def plans(
    engine: Engine, given: tuple[Answer, ClientStore, Before | None], clients: np.ndarray, kind: np.ndarray
) -> dict[int, Plan] | None:
    """How each kind of client (LEVELS·epochs + sent) is trained in place; None if one of them is not. given: answer, store, before."""
    answer, store, before = given
    # before.tensors: `receive` makes more of tables than what is kept, and must see them as they were
    if engine.derived is None or engine.on_gpu or engine.derived.off or (before is not None and before.merged and before.tensors):
        return None
    found = {}
    for some in np.flatnonzero(np.bincount(kind)).tolist():
        epochs, level = divmod(some, LEVELS)
        merged = before is not None and level in before.merged
        client = int(clients[np.flatnonzero(kind == some)[0]])
        one = plan(engine, engine.algorithm.with_epochs(epochs), client, reaching(answer, level), store, merged)
        if one is None:
            return None
        found[some] = one
    same = {(tuple(sorted(one.left.rows)), one.left.stored) for one in found.values()}
    return found if len(same) == 1 else None  # the uploads of a round have one form


def train_cohort(
    engine: Engine, how: dict[int, Plan], samples: Samples, kind: np.ndarray, given: tuple[np.ndarray, np.ndarray, Answer, ClientStore]
) -> tuple[dict[str, Tensor | Rows], Tensor, int]:
    """The whole cohort at once. given: keys of shuffles and halves, answer, store. Returns uploads, losses and how many numbers moved."""
    stream, halves, answer, store = given
    losses, updates = np.zeros(len(samples.clients)), 0
    first, number = next(iter(how.values())), host_type(engine.dtype)
    wide = {name: n for kernel in kernels_of(first) for name, n in kernel.model.trained_tables.items()}
    widths = {name: wide[table] for name, (table, _) in first.left.rows.items()}
    rows = {name: engine.pool.empty(f"rows of {name}", len(samples.row) * n, number).reshape(-1, n) for name, n in widths.items()}
    dense: dict[str, Tensor] = {}
    for some, one in how.items():
        at = np.arange(len(kind)) if len(how) == 1 else np.flatnonzero(kind == some)
        epochs, level = divmod(some, LEVELS)
        done = train(engine.algorithm.with_epochs(epochs), one, samples, at, (stream, halves, reaching(answer, level), store), rows)
        losses[at], updates = done.loss, updates + done.updates
        for name, value in done.dense.items():
            if len(how) == 1:
                dense[name] = value
            else:
                dense.setdefault(name, value.new_zeros(len(kind), *value.shape[1:]))[at] = value
    tensors: dict[str, Tensor | Rows] = {}
    for name, array in rows.items():
        value = torch.from_numpy(array).reshape(-1, *row_shape(first.left.rows[name][0], answer, store))
        tensors[name] = Rows(torch.from_numpy(samples.touched), torch.from_numpy(samples.row), value)
    if first.left.stored:
        everybody = np.array_equal(samples.clients, np.arange(store.clients.start, store.clients.stop))
        own = store.read(torch.from_numpy(samples.clients), whole=everybody)
        tensors |= {name: own[name] for name in first.left.stored}
    return {**tensors, **dense}, torch.from_numpy(losses), updates


def row_shape(table: str, answer: Answer, store: ClientStore) -> torch.Size:
    """Shape of one row of a table."""
    if table in store.tensors:
        return store.tensors[table].shape[2:]
    return answer.personal[table].shape[2:] if table in answer.personal else answer.shared[table].shape[1:]
