"""PFedRec, FedRAP, CoLR and GPFedRec once more, from their equations, in plain loops: they share no code with the algorithms or kernels.

Only randomness is taken from the engine: initial tensors, samples, shuffles, and CoLR's draws. Clients train WHOLE tables here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedbench.algorithms.colr import CoLR
from fedbench.algorithms.fedrap import FedRAP
from fedbench.algorithms.gpfedrec import GPFedRec
from fedbench.algorithms.pfedrec import PFedRec
from fedbench.contract.algorithm import Algorithm
from fedbench.contract.randomness import Draw, keys
from fedbench.data.sampling import cohort_of, sample_round
from fedbench.data.split import Split
from fedbench.kernels.shuffling import orders
from fedbench.simulation.federation import Federation
from tests.conftest import small_split

SEED, ROUNDS = 5, 2
SMALL: dict[str, Any] = {"dim": 6, "batch_size": 32, "clients_per_round": 21}
State = dict[str, Tensor]


class Visit(NamedTuple):
    """One client in a round: its samples, and those of each batch of each epoch."""

    client: int
    item: Tensor
    label: Tensor
    epochs: list[list[Tensor]]


def visits(recipe: Algorithm, parts: Split) -> Iterator[tuple[int, list[Visit]]]:
    for round_ in range(1, ROUNDS + 1):
        cohort = cohort_of(round_, parts.clients, recipe.clients_per_round or parts.clients, recipe.sampling, SEED)
        samples, stream = sample_round(parts, cohort, recipe.negatives, SEED, round_), keys(SEED, round_, "shuffle", cohort)
        found = []
        for c, u in enumerate(cohort.tolist()):
            at = slice(samples.ptr[c], samples.ptr[c + 1])
            rows = samples.row[samples.row_ptr[c] : samples.row_ptr[c + 1]].astype(np.int64)
            label, epochs = torch.from_numpy(samples.label[at]).double(), []
            for epoch in range(recipe.local_epochs):
                order = np.empty(len(label), np.int64)
                orders(stream[c : c + 1], np.array([0, len(label)]), epoch, recipe.batch_size, order)
                epochs.append(list(torch.from_numpy(order).split(recipe.batch_size)))
            found.append(Visit(u, torch.from_numpy(rows[samples.local[at]]), label, epochs))
        yield round_, found


def bce(logit: Tensor, label: Tensor) -> Tensor:
    return nn.functional.softplus((1 - 2 * label) * logit).mean()


def optimizer(kind: str, groups: list[dict[str, Any]], **more: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(groups) if kind == "adam" else torch.optim.SGD(groups, lr=1.0, **more)


def move(optimizers: list[torch.optim.Optimizer], loss: Callable[[], Tensor]) -> float:
    """One step of each by a gradient of its own; the last loss."""
    value = 0.0
    for one in optimizers:
        one.zero_grad()
        found = loss()
        found.backward()
        one.step()
        value = found.item()
    return value


def next_server(server: State, tables: list[Tensor], seen: list[Visit], recipe: Any) -> State:
    """The mean of whole tables; or, row by row over the clients that have a sample of it, the mean or the sum, with or without Adam."""
    old = server["items"]
    if recipe.average == "cohort":
        return {"items": torch.stack(tables).mean(0)}
    total, senders = torch.zeros_like(old), torch.zeros(len(old))
    for table, visit in zip(tables, seen, strict=True):
        touched = visit.item.unique()
        total[touched] += (table - old)[touched]
        senders[touched] += 1
    change = total / senders.clamp(min=1)[:, None] if recipe.average == "touching" else total
    if recipe.server == "sgd":
        return {"items": old + recipe.server_lr * change}
    steps, first, second = (server.get(f"items/{name}", torch.zeros_like(old)).clone() for name in ("steps", "first", "second"))
    new = old.clone()
    for i in (senders > 0).nonzero()[:, 0].tolist():
        steps[i] += 1
        first[i] = 0.9 * first[i] + 0.1 * change[i]
        second[i] = 0.99 * second[i] + 0.01 * change[i] ** 2
        root = (second[i] / (1 - 0.99 ** steps[i])).sqrt() + 1e-8
        new[i] += recipe.server_lr * first[i] / (1 - 0.9 ** steps[i]) / root
    return {"items": new, "items/steps": steps, "items/first": first, "items/second": second}


def trained(*tensors: Tensor) -> list[Tensor]:
    return [tensor.clone().requires_grad_() for tensor in tensors]


def pfedrec(recipe: PFedRec, parts: Split, own: State, server: State) -> tuple[State, State]:
    rate = 80 * parts.items * recipe.lr if recipe.lr_items is None else recipe.lr_items
    for _, seen in visits(recipe, parts):
        tables = []
        for u, item, label, epochs in seen:
            w, b, q = trained(own["head"][u], own["bias"][u], server["items"])
            steps = [optimizer(recipe.optimizer, [{"params": [w, b], "lr": recipe.lr}])]
            steps += [optimizer(recipe.optimizer, [{"params": [q], "lr": rate}])]
            for some in (batch for epoch in epochs for batch in epoch):
                move(steps, lambda i=item[some], y=label[some], w=w, b=b, q=q: bce(q[i] @ w + b, y))
            own["head"][u], own["bias"][u], own["tuned"][u] = w.detach(), b.detach(), q.detach()
            tables.append(q.detach())
        server = next_server(server, tables, seen, recipe)
    return own, server


def fedrap(recipe: FedRAP, parts: Split, own: State, server: State) -> tuple[State, State]:
    for round_, seen in visits(recipe, parts):
        tables, fall = [], recipe.round_decay ** (round_ - 1)
        grown = np.tanh(round_ / 10) if recipe.curriculum == "tanh" else 1.0
        for u, item, label, epochs in seen:
            w, b, c, d = trained(own["head"][u], own["bias"][u], own["personal"][u], server["items"])
            rates = ((w, recipe.lr), (b, recipe.lr), (c, recipe.lr_personal), (d, recipe.lr_items))
            groups = [{"params": [tensor], "lr": rate * fall} for tensor, rate in rates]
            step = optimizer(recipe.optimizer, groups, **({} if recipe.optimizer == "adam" else {"weight_decay": recipe.weight_decay}))
            losses: list[float] = []
            before = None

            def loss(i: Tensor, y: Tensor, w: Tensor = w, b: Tensor = b, c: Tensor = c, d: Tensor = d) -> Tensor:
                terms = recipe.sparse * d[i].abs().mean() - recipe.apart * ((c[i] - d[i]) ** 2).mean()
                return bce((c[i] + d[i]) @ w + b, y) + float(grown) * terms  # noqa: B023

            for epoch in epochs:
                for some in epoch:
                    losses += [move([step], lambda i=item[some], y=label[some], f=loss: f(i, y))] * len(some)
                    for group in step.param_groups:
                        group["lr"] *= recipe.step_decay
                mean = float(np.mean(losses))
                if before is not None and abs(mean - before) / abs(before + 1e-5) < recipe.stop_below:
                    break
                before = mean
            own["head"][u], own["bias"][u], own["personal"][u] = w.detach(), b.detach(), c.detach()
            tables.append(d.detach())
        server = next_server(server, tables, seen, recipe)
    return own, server


def colr(recipe: CoLR, parts: Split, own: State, server: State) -> tuple[State, State]:
    """Its gradients by hand, and its basis by numpy."""
    q, r, d = server["items"].numpy(), recipe.rank, recipe.dim

    def directions(when: int) -> np.ndarray:
        drawn = Draw(SEED, when, dtype=torch.float64).normal("basis", r, d).numpy()
        if recipe.basis == "gaussian":
            return drawn / np.sqrt(r)
        left, _, right = np.linalg.svd(drawn, full_matrices=False)
        return left @ right * np.sqrt(d / r)

    for round_, seen in visits(recipe, parts):
        basis, total, senders = directions(round_ - 1), np.zeros((len(q), r)), np.zeros(len(q))
        for u, item, label, epochs in seen:
            p, a, i, y = own["user"][u].numpy().copy(), np.zeros((len(q), r)), item.numpy(), label.numpy()
            for some in (batch.numpy() for epoch in epochs for batch in epoch):
                rows = q[i[some]] + a[i[some]] @ basis
                error = 1 / (1 + np.exp(-rows @ p)) - y[some]
                slope = np.zeros_like(a)
                np.add.at(slope, i[some], (error[:, None] * p + 2 * recipe.l2 * rows) @ basis.T)
                p = p - recipe.lr * ((error[:, None] * rows).mean(0) + 2 * recipe.l2 * p)
                a -= recipe.lr * np.sqrt(r / d) * slope
            own["user"][u] = torch.from_numpy(p)
            total += a
            senders[np.unique(i)] += 1
        q = q + total / np.maximum(senders, 1)[:, None] @ basis
    return own, {"items": torch.from_numpy(q), "basis": torch.from_numpy(directions(ROUNDS))}


def graph(recipe: GPFedRec, vectors: np.ndarray) -> np.ndarray:
    """Weights of neighbours, client by client."""
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    close = 1 - unit @ unit.T if recipe.similarity == "distance" else unit @ unit.T
    if recipe.similarity == "distance":
        np.fill_diagonal(close, 0)
    weights, limit = np.zeros_like(close), recipe.threshold * close.mean()
    for u, row in enumerate(close):
        others = [v for v in range(len(row)) if v != u or not recipe.exclude_self]
        near = sorted(others, key=lambda v: -row[v])[: recipe.neighbours] if recipe.neighbours else [v for v in others if row[v] > limit]
        for v in near or [u]:
            weights[u, v] = 1 / len(near or [u])
    return weights


def gpfedrec(recipe: GPFedRec, parts: Split, own: State, server: State) -> tuple[State, State]:
    g, anchors = server["items"], {}
    rate = 80 * parts.items * recipe.lr - recipe.lr if recipe.lr_items is None else recipe.lr_items
    for round_, seen in visits(recipe, parts):
        tables = []
        for u, item, label, epochs in seen:
            layers: list[nn.Module] = []
            for sizes in zip(recipe.layers[:-1], recipe.layers[1:], strict=True):
                layers += [nn.Linear(*sizes, dtype=torch.float64), nn.ReLU()]
            net, r = nn.Sequential(*layers[:-1]), anchors.get(u, g)
            nn.utils.vector_to_parameters(own["mlp"][u], net.parameters())
            p, q = trained(own["user"][u], g)
            groups = [{"params": [*net.parameters()], "lr": recipe.lr}, {"params": [p], "lr": recipe.lr_user}]
            step = optimizer(recipe.optimizer, [*groups, {"params": [q], "lr": rate}])
            for some in (batch for epoch in epochs for batch in epoch):
                step.zero_grad()
                rows = q[item[some]]
                loss = bce(net(torch.cat([p.expand_as(rows), rows], 1))[:, 0], label[some])
                if recipe.pull is None:  # the published penalty
                    loss = loss + ((q - r) ** 2).mean()
                loss.backward()
                with torch.no_grad():
                    q += (recipe.pull or 0.0) * (r - q)
                step.step()
            own["user"][u], own["items"][u] = p.detach(), q.detach()
            own["mlp"][u] = nn.utils.parameters_to_vector(net.parameters()).detach()
            tables.append(q.detach())
        stacked = torch.stack(tables)
        compared = (stacked - g if recipe.similarity == "change" else stacked).numpy()
        if recipe.sketch:
            signs = np.where(Draw(SEED, round_, dtype=torch.float64).uniform("sketch", recipe.sketch, parts.items).numpy() > 0.5, 1, -1)
            compared = np.einsum("km,nmd->nkd", signs, compared)
        weights = torch.from_numpy(graph(recipe, compared.reshape(len(tables), -1)))
        means = g + recipe.reach * (torch.einsum("uv,vmd->umd", weights, stacked) - g)
        anchors = {**anchors, **dict(zip([visit.client for visit in seen], means, strict=True))}
        g = means.mean(0)
    return own, {"items": g, **{f"anchor {u}": table for u, table in anchors.items()}}


ORACLES: dict[type[Algorithm], Callable[..., tuple[State, State]]] = {PFedRec: pfedrec, FedRAP: fedrap, CoLR: colr, GPFedRec: gpfedrec}
ADAM = {"optimizer": "adam", "lr": 0.02, "lr_items": 0.02, "average": "touching", "server": "sgd", "server_lr": 1.0}
SLOWER = {"lr_items": 5.0, "lr_personal": 5.0}  # at 200 rounding grows to 1e-8 in two rounds
LAYERS = {"layers": (12, 5, 1)}
CASES: dict[str, Algorithm] = {
    "pfedrec": PFedRec(**SMALL),
    "pfedrec, adam": PFedRec(**SMALL, **ADAM),
    "pfedrec published": PFedRec(**{**PFedRec.published, **SMALL}),
    "fedrap": FedRAP(**SMALL),
    "fedrap, all terms": FedRAP(**SMALL, **ADAM, lr_personal=0.01, apart=0.1, sparse=0.1, curriculum="tanh", init_personal=0.3),
    "fedrap published": FedRAP(**{**FedRAP.published, **SMALL, **SLOWER, "batch_size": 2048}),
    "fedrap published, several batches": FedRAP(**{**FedRAP.published, **SMALL, **SLOWER, "stop_below": 0.05}),
    "colr": CoLR(**SMALL, rank=3),
    "colr, gaussian": CoLR(**SMALL, rank=2, basis="gaussian"),
    "gpfedrec": GPFedRec(**SMALL, **LAYERS),
    "gpfedrec, three neighbours": GPFedRec(**SMALL, **LAYERS, neighbours=3, sketch=0, reach=2.0, exclude_self=False, similarity="cosine"),
    "gpfedrec published": GPFedRec(**{**GPFedRec.published, **SMALL, **LAYERS, "dim": 6}),
}


KERNELS = [*((case, "off") for case in CASES), *((case, "auto") for case in ("pfedrec published", "fedrap published"))]
"""other kernels are compared with the loop, tests/test_personal_methods.py"""


@pytest.mark.parametrize(("case", "kernel"), KERNELS)
def test_equals_the_engine(case: str, kernel: str) -> None:
    recipe, parts = CASES[case], small_split(protocol="published" if "published" in case else "clean")
    federation = Federation.start(recipe, parts, SEED, dtype=torch.float64, kernel=kernel)
    copies = ({name: value.clone() for name, value in tensors.items()} for tensors in (federation.store.tensors, federation.server))
    own, server = ORACLES[type(recipe)](recipe, parts, *copies)
    for _ in range(ROUNDS):
        federation.next_round()
    if kernel == "auto":
        assert federation.engine.derived is not None and not federation.engine.derived.said, "a kernel trained it"
    found = dict(federation.server)
    if "slot" in found:
        found |= {f"anchor {u}": found["anchor"][slot] for u, slot in enumerate(found["slot"].tolist()) if slot >= 0}
        assert {name for name in found if name.startswith("anchor ")} == {name for name in server if name.startswith("anchor ")}
    for name, value in server.items():
        if name == "items/steps":  # one number a row
            value = value[:, :1]
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=lambda said, name=name: f"server {name}: {said}")
    for name, value in own.items():
        kept = federation.store.tensors[name]
        torch.testing.assert_close(kept, value, rtol=1e-9, atol=1e-9, msg=lambda said, name=name: f"own {name}: {said}")
