"""Training where the state lies: a cohort by one call of a derived kernel, without blocks and copies.

It fits an algorithm whose client holds what it keeps and what it was sent as they are, works in one stage on all its samples, keeps what
it holds, and uploads of tables how touched rows changed or what they are now, maybe times a number. Others are trained in blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedbench.contract.algorithm import SHARED, Algorithm, Answer, Stage, Tensors
from fedbench.contract.uploads import Rows
from fedbench.data.sampling import Samples
from fedbench.kernels.compiler import trace
from fedbench.kernels.compiler.graph import LANE, Graph, Value, is_uniform
from fedbench.kernels.compiler.schedule import reached
from fedbench.simulation import derived
from fedbench.simulation.blocks import host_type
from fedbench.simulation.client_store import ClientStore
from fedbench.simulation.generic import vmapped
from fedbench.simulation.own_tables import Before, move_untouched
from fedbench.simulation.sending import LEVELS, reaching, sent_whole

if TYPE_CHECKING:
    from fedbench.simulation.engine import Engine

CHANGE, VALUE = 1, 2
"""what the rows of an upload hold, as kernels are told"""


@dataclass(frozen=True)
class Plan:
    """How clients that the same answer reaches are trained in place."""

    stage: Stage
    kernel: derived.Kernel
    kept: frozenset[str]
    """names that lie in the store; the others were sent"""
    rows: dict[str, tuple[str, int]]
    """uploaded table -> the trained table that its rows are made of, and how: CHANGE or VALUE"""
    stored: tuple[str, ...]
    """own tables that are uploaded as the store has them"""
    dense: bool
    """there are other uploads, or rows are multiplied by a number"""


def plan(kernels: derived.Kernels, algorithm: Algorithm, client: int, answer: Answer, store: ClientStore, merged: bool) -> Plan | None:
    """How clients like this one are trained in place; None if they are not. merged: `receive` was called on whole own tables before."""
    if type(algorithm).keep is not Algorithm.keep:
        return None
    one = torch.tensor([client])
    own = {name: value[0] for name, value in store.read(one).items()}
    sent = {name: value[0] for name, value in sent_whole(answer, one).items()}
    held = algorithm.receive(dict(own), dict(sent))
    kept = {name for name in held if held[name] is own.get(name) or (merged and name in algorithm.own_tables)}
    if any(held[name] is not sent.get(name) for name in held.keys() - kept) or (own.keys() - kept) & held.keys():
        return None
    if any(not value.is_floating_point() for value in (*held.values(), *sent.values())):
        return None
    stages = algorithm.stages(sent)
    if len(stages) != 1 or not stages[0].phases or stages[0].part != "all" or stages[0].max_samples is not None:
        return None
    shapes = tuple(
        {name: (LANE, *value.shape[1:]) if name in algorithm.tables else tuple(value.shape) for name, value in tensors.items()}
        for tensors in (held, sent)
    )
    kernel = kernels.training(algorithm, stages[0], shapes)  # type: ignore[arg-type]
    if kernel is None:
        return None
    key = kernel, frozenset(kept)
    if key not in kernels.plans:
        watching, context = derived.watched(algorithm)
        found = uploaded(watching, stages[0], kernel, frozenset(kept), shapes)  # type: ignore[arg-type]
        if context.asked:  # what is uploaded may be another thing in the next round
            return found
        kernels.plans[key] = found
    known: Plan | None = kernels.plans[key]
    return known and replace(known, stage=stages[0])


def uploaded(
    algorithm: Algorithm, stage: Stage, kernel: derived.Kernel, kept: frozenset[str], shapes: tuple[derived.Shapes, derived.Shapes]
) -> Plan | None:
    """What `upload` makes of tables, read from its graph; None if it is more than rows as they are, or how they changed."""
    leaves: dict[trace.Key, Tensor] = {("held", name): trace.example(shape) for name, shape in shapes[0].items()}
    leaves |= {("sent", name): trace.example(shape) for name, shape in shapes[1].items()} | {("count", "samples"): trace.example(())}

    def call(*tensors: Tensor) -> Tensors:
        given = dict(zip(leaves, tensors, strict=True))
        held, sent = ({name: value for (kind, name), value in given.items() if kind == which} for which in ("held", "sent"))
        return algorithm.upload(held, sent, given["count", "samples"])

    names = list(call(*leaves.values()))
    try:
        graph, values = trace.trace(lambda *tensors: [*call(*tensors).values()], leaves, names)
    except trace.Unsupported:
        return None
    rows: dict[str, tuple[str, int]] = {}
    stored, dense = [], False
    for name, v in values.items():
        if name in algorithm.own_tables:
            if v.op != "table" or v.how["key"] != ("held", name) or name not in kept:
                return None
            stored.append(name)
        elif algorithm.tables.get(name) == SHARED:
            form = rows_of(graph, v)
            if form is None or form[0] not in kernel.model.trained_tables or (form[1] == CHANGE and form[0] in kept):
                return None
            rows[name], dense = form[:2], dense or form[2]
        elif any(one.op == "table" for one in reached([v])):
            return None
        else:
            dense = True
    trained = set(kernel.model.trained_tables)
    if len({table for table, _ in rows.values()}) < len(rows) or any(table in kept for table, _ in rows.values()):
        return None
    return Plan(stage, kernel, kept, rows, tuple(stored), dense) if trained - kept <= {table for table, _ in rows.values()} else None


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


@dataclass(frozen=True)
class Trained:
    """What the clients of one kind left behind."""

    loss: np.ndarray
    updates: int
    rows: dict[str, np.ndarray]
    """uploaded table -> rows of the whole cohort, of which these clients' are filled in"""
    dense: Tensors


def train(
    algorithm: Algorithm,
    how: Plan,
    samples: Samples,
    at: Any,
    given: tuple[np.ndarray, int, Answer, ClientStore],
    out: dict[str, np.ndarray],
) -> Trained:
    """Train clients `at` of a cohort. given: keys of the shuffles, epochs, what they are sent, the store. out: rows to fill in."""
    stream, epochs, answer, store = given
    clients = samples.clients[at]
    counts, touched, kernel = samples.counts[at], samples.touched[at], how.kernel
    arrays, copies = placed(how, clients, answer, store)
    layout = (stream[at], samples.ptr[:-1][at], counts, samples.local, samples.label, samples.row_ptr[:-1][at], touched, samples.row)
    batch = min(how.stage.batch_size or derived.NO_LIMIT, 1 << 62)
    most = derived.NO_LIMIT if how.stage.max_steps is None else how.stage.max_steps
    outs = {table: (out[name], form) for name, (table, form) in how.rows.items()}
    loss, steps = kernel.train(layout, arrays, outs, how.stage.phases, (0, epochs, batch, most, algorithm.stop_below))
    updates = sum(int((steps * one.width * (touched if one.table else 1)).sum()) for one in kernel.model.updates)
    decay_untouched(algorithm, how, samples, at, steps, answer, store)
    dense: Tensors = {}
    if how.dense:
        dense = uploaded_beside(algorithm, how, clients, counts, (answer, store, copies))
        for name in how.rows:
            factor = dense.pop(name).numpy()
            if not (factor == 1).all():
                scale_rows(out[name], factor.reshape(len(clients), -1), samples.row_ptr[:-1][at], touched)
    return Trained(loss, updates, out, {name: value for name, value in dense.items() if name not in how.stored})


def placed(how: Plan, clients: np.ndarray, answer: Answer, store: ClientStore) -> tuple[dict[Any, Any], dict[str, np.ndarray]]:
    """Arrays of the kernel and whose each is; and copies of what was sent to all and is trained by each."""
    nobody, place = np.zeros(len(clients), np.int64), np.asarray(store.place(clients))
    model, copies = how.kernel.model, {}
    trained = {one.name for one in model.updates if not one.table}
    arrays: dict[Any, Any] = {}
    for key in (*model.tables, *model.params):
        kind, name = key
        if kind == "held" and name in how.kept:
            arrays[key] = store.tensors[name].numpy(), place
            continue
        if name in answer.personal and answer.slot is not None:
            value, at = answer.personal[name].contiguous().numpy(), np.asarray(answer.slot[torch.from_numpy(clients)])
        else:
            value, at = answer.shared[name].contiguous().numpy()[None], nobody
        if kind == "held" and name in trained:
            copies[name] = value[at]
            value, at = copies[name], np.arange(len(clients))
        arrays[key] = value, at
    return arrays, copies


def decay_untouched(
    algorithm: Algorithm, how: Plan, samples: Samples, at: Any, steps: np.ndarray, answer: Answer, store: ClientStore
) -> None:
    """Weight decay and pulls on rows of own tables that no sample touches; touched rows stay as the kernel left them."""
    for name in algorithm.own_tables:
        if not any(name in phase.names and (phase.weight_decay or name in phase.pull) for phase in how.stage.phases):
            continue
        clients = torch.from_numpy(samples.clients[at])
        touched, begin = samples.touched[at], samples.row_ptr[:-1][at]
        which = np.repeat(begin - np.concatenate([[0], np.cumsum(touched)[:-1]]), touched) + np.arange(touched.sum())
        rows = torch.from_numpy(samples.row[which].astype(np.int64))
        place = torch.as_tensor(store.place(clients)).repeat_interleave(torch.from_numpy(touched))
        trained = store.tensors[name][place, rows]
        move_untouched(store, clients, name, how.stage.phases, torch.from_numpy(steps), answer)
        store.tensors[name][place, rows] = trained


def uploaded_beside(
    algorithm: Algorithm, how: Plan, clients: np.ndarray, counts: np.ndarray, given: tuple[Answer, ClientStore, dict[str, np.ndarray]]
) -> Tensors:
    """`upload` on one made-up row of each table: all that is no table, and the number that rows are multiplied by."""
    answer, store, copies = given
    who, tables = torch.from_numpy(clients), algorithm.tables
    sent = {name: value[:, :1] * 0 if name in tables else value for name, value in sent_whole(answer, who).items()}
    own = {name: value for name, value in store.tensors.items() if name not in tables}
    place = store.place(who)
    held = {name: value[place] for name, value in own.items() if name in how.kept}
    held |= {name: torch.ones_like(value) if name in tables else value for name, value in sent.items() if name not in how.kept}
    held |= {name: value[place, :1] * 0 + 1 for name, value in store.tensors.items() if name in tables and name in how.kept}
    held |= {name: torch.from_numpy(value) for name, value in copies.items()}
    samples = torch.from_numpy(counts).to(next(iter(held.values())).dtype)
    return vmapped(algorithm.upload, held, sent, samples)


def scale_rows(rows: np.ndarray, factor: np.ndarray, begin: np.ndarray, touched: np.ndarray) -> None:
    """Each client's rows times its factor."""
    which = np.repeat(begin - np.concatenate([[0], np.cumsum(touched)[:-1]]), touched) + np.arange(touched.sum())
    rows[which] *= np.repeat(factor, touched, axis=0)


# ---- a cohort ----------------------------------------------------------------------------------------------------------------


def plans(
    kernels: derived.Kernels, algorithm: Algorithm, given: tuple[Answer, ClientStore, Before | None], clients: np.ndarray, kind: np.ndarray
) -> dict[int, Plan] | None:
    """How each kind of client (LEVELS·epochs + sent) is trained in place; None if one of them is not. given: answer, store, before."""
    answer, store, before = given
    if kernels.off or (before is not None and before.merged and before.tensors):
        return None
    found = {}
    for some in np.flatnonzero(np.bincount(kind)).tolist():
        epochs, level = divmod(some, LEVELS)
        merged = before is not None and level in before.merged
        client = int(clients[np.flatnonzero(kind == some)[0]])
        one = plan(kernels, algorithm.with_epochs(epochs), client, reaching(answer, level), store, merged)
        if one is None:
            return None
        found[some] = one
    same = {(tuple(sorted(one.rows)), one.stored) for one in found.values()}
    return found if len(same) == 1 else None  # the uploads of a round have one form


def train_cohort(
    engine: Engine, how: dict[int, Plan], samples: Samples, kind: np.ndarray, given: tuple[np.ndarray, Answer, ClientStore]
) -> tuple[dict[str, Tensor | Rows], Tensor, int]:
    """The whole cohort at once. given: keys of the shuffles, answer, store. Returns uploads, losses and how many numbers moved."""
    stream, answer, store = given
    losses, updates = np.zeros(len(samples.clients)), 0
    first, number = next(iter(how.values())), host_type(engine.dtype)
    widths = {name: first.kernel.model.trained_tables[table] for name, (table, _) in first.rows.items()}
    rows = {name: engine.pool.empty(f"rows of {name}", len(samples.row) * n, number).reshape(-1, n) for name, n in widths.items()}
    dense: dict[str, Tensor] = {}
    for some, one in how.items():
        at = np.arange(len(kind)) if len(how) == 1 else np.flatnonzero(kind == some)
        epochs, level = divmod(some, LEVELS)
        done = train(engine.algorithm.with_epochs(epochs), one, samples, at, (stream, epochs, reaching(answer, level), store), rows)
        losses[at], updates = done.loss, updates + done.updates
        for name, value in done.dense.items():
            dense.setdefault(name, value.new_zeros(len(kind), *value.shape[1:]))[at] = value
    tensors: dict[str, Tensor | Rows] = {}
    for name, array in rows.items():
        value = torch.from_numpy(array).reshape(-1, *row_shape(first.rows[name][0], answer, store))
        tensors[name] = Rows(torch.from_numpy(samples.touched), torch.from_numpy(samples.row), value)
    if first.stored:
        everybody = np.array_equal(samples.clients, np.arange(store.clients.start, store.clients.stop))
        own = store.read(torch.from_numpy(samples.clients), whole=everybody)
        tensors |= {name: own[name] for name in first.stored}
    return {**tensors, **dense}, torch.from_numpy(losses), updates


def row_shape(table: str, answer: Answer, store: ClientStore) -> torch.Size:
    """Of one row of a table."""
    if table in store.tensors:
        return store.tensors[table].shape[2:]
    return answer.personal[table].shape[2:] if table in answer.personal else answer.shared[table].shape[1:]
