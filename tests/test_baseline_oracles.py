"""FedNCF, FedCA, FedCIA, FedFast and LightFR once more, from their equations: they share no code with the algorithms or kernels.

Only randomness is taken from the engine: initial tensors, samples, shuffles, and what the server draws. Clients train WHOLE tables here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist
from sklearn.decomposition import PCA
from torch import Tensor, nn

from fedbench.algorithms.fedca import FedCA
from fedbench.algorithms.fedcia import FedCIA
from fedbench.algorithms.fedfast import FedFast
from fedbench.algorithms.fedncf import FedNCF
from fedbench.algorithms.lightfr import LightFR
from fedbench.contract.algorithm import Algorithm, World
from fedbench.contract.randomness import Draw
from fedbench.data.split import Split
from fedbench.simulation.federation import Federation
from tests.conftest import small_split
from tests.test_fedem_oracle import mixture, signature
from tests.test_personal_oracles import ROUNDS, SEED, Visit, bce, move, trained, visits

SMALL: dict[str, Any] = {"dim": 8, "batch_size": 32, "clients_per_round": 21, "local_epochs": 2}
State = dict[str, Tensor]


def train(visit: Visit, step: torch.optim.Optimizer, loss: Callable[[Tensor, Tensor], Tensor], stop_below: float = 0.0) -> None:
    """All epochs of a visit, or until the running mean loss hardly changes."""
    losses: list[float] = []
    before = None
    for epoch in visit.epochs:
        for some in epoch:
            losses += [move([step], lambda i=visit.item[some], y=visit.label[some]: loss(i, y))] * len(some)
        mean = float(np.mean(losses))
        if before is not None and abs(mean - before) / abs(before + 1e-5) < stop_below:
            return
        before = mean


def fedncf(recipe: FedNCF, parts: Split, own: State, server: State) -> tuple[State, State]:
    """One network of all layers; its last one is the engine's `head`."""
    sizes, cut = (*recipe.layers, 1), len(server["mlp"])
    for _, seen in visits(recipe, parts):
        total, weight, dense = torch.zeros_like(server["items"]), torch.zeros(parts.items), torch.zeros(cut + len(server["head"]))
        shares = np.array([len(visit.label) if recipe.weigh == "samples" else 1 for visit in seen])
        for visit, share in zip(seen, shares, strict=True):
            layers: list[nn.Module] = []
            for pair in zip(sizes[:-1], sizes[1:], strict=True):
                layers += [nn.Linear(*pair, dtype=torch.float64), nn.ReLU()]
            net = nn.Sequential(*layers[:-1])
            start = torch.cat([server["mlp"], server["head"]])
            nn.utils.vector_to_parameters(start.clone(), net.parameters())
            p, q = trained(own["user"][visit.client], server["items"])
            step = torch.optim.Adam([{"params": [p, q]}, {"params": [*net.parameters()], "weight_decay": recipe.l2}], lr=recipe.lr)

            def loss(i: Tensor, y: Tensor, p: Tensor = p, q: Tensor = q, net: nn.Module = net) -> Tensor:
                return bce(net(torch.cat([p.expand(len(i), -1), q[i]], 1))[:, 0], y)

            train(visit, step, loss, recipe.stop_below)
            own["user"][visit.client] = p.detach()
            touched = visit.item.unique()
            total[touched] += share * (q.detach() - server["items"])[touched]
            weight[touched] += share
            dense = dense + share / shares.sum() * (nn.utils.parameters_to_vector(net.parameters()).detach() - start)
        server = {
            "items": server["items"] + recipe.server_lr * total / weight.clamp(min=1)[:, None],
            "mlp": server["mlp"] + recipe.server_lr * dense[:cut],
            "head": server["head"] + recipe.server_lr * dense[cut:],
        }
    return own, server


def angle(one: np.ndarray, other: np.ndarray, recipe: FedCA) -> float:
    """How alike two subspaces are."""
    cosines = one @ other.T
    if recipe.angles == "principal":
        return float(np.mean(np.linalg.svd(cosines, compute_uv=False) ** 2))
    angles = []
    for _ in range(len(one)):
        i, j = np.unravel_index(cosines.argmax(), cosines.shape)
        angles.append(np.arccos(min(1, cosines[i, j])))
        cosines = np.delete(np.delete(cosines, i, 0), j, 1)
    return float(np.cos(np.mean(angles)))


def fedca(recipe: FedCA, parts: Split, own: State, server: State) -> tuple[State, State]:
    tables: dict[int, Tensor] = {}
    for round_, seen in visits(recipe, parts):
        for visit in seen:
            u = visit.client
            sent = tables.pop(u, None)
            p, q = trained(own["user"][u], own["items"][u] if sent is None else (1 - recipe.rho) * own["items"][u] + recipe.rho * sent)
            frozen = sent is not None and recipe.train_user == "first"

            def loss(i: Tensor, y: Tensor, p: Tensor = p, q: Tensor = q) -> Tensor:
                rows = q[i] if recipe.row_negatives else torch.where(y[:, None] > 0, q[i], q[i].detach())
                return bce(rows @ p, y)

            train(visit, torch.optim.Adam([q] if frozen else [p, q], lr=recipe.lr), loss, recipe.stop_below)
            axes = PCA(recipe.components, svd_solver="full").fit(q.detach()[visit.item].numpy()).components_
            signs = np.sign(axes[np.arange(len(axes)), np.abs(axes).argmax(1)])
            own["user"][u], own["items"][u], own["basis"][u] = p.detach(), q.detach(), torch.from_numpy(axes * signs[:, None])
        n = len(seen)
        picked = Draw(SEED, round_).subset("aggregated", n, max(1, int(n * recipe.agg_ratio))).tolist()
        who = [seen[c].client for c in picked]
        vectors = np.stack([signature(own["items"][u]) for u in who])
        close = 1 - cdist(vectors, vectors, "cosine") if recipe.similarity == "cos" else 1 / (1 + cdist(vectors, vectors))
        if recipe.similarity == "l2":
            close[close > 0.9] = 1
        spans = np.array([[angle(own["basis"][u].numpy(), own["basis"][v].numpy(), recipe) for v in who] for u in who])
        wanted = recipe.alpha * close + recipe.beta * (spans if recipe.complement == "aligned" else 1 - spans)
        if recipe.exclude_self:
            np.fill_diagonal(wanted, 0)
        share = np.array([len(seen[c].label) for c in picked]) / sum(len(seen[c].label) for c in picked)
        stacked = torch.stack([own["items"][u].clone() for u in who])
        for c, u in enumerate(who):
            weights = mixture((share + wanted[c]) / (1 + recipe.alpha if recipe.objective == "paper" else 1))
            others = np.delete(share, c)
            weights = (1 - recipe.floor) * weights + recipe.floor * np.insert(others / others.sum(), c, 0)
            tables[u] = torch.einsum("s,smd->md", torch.from_numpy(weights), stacked)
    return own, {f"tables {u}": table for u, table in tables.items()}


def turned(factor: Tensor, table: Tensor) -> Tensor:
    left, _, right = np.linalg.svd(factor.numpy().T @ table.numpy())
    return factor @ torch.from_numpy(left @ right)


def factor_of(recipe: FedCIA, tables: Tensor, round_: int) -> Tensor:
    """[n, M, d] -> [M, d], from the M x M mean of similarities."""
    mean, d = np.mean([table @ table.T for table in tables.numpy()], axis=0), recipe.dim
    if recipe.passes == 0:
        values, axes = np.linalg.eigh(mean)
    else:
        found = Draw(SEED, round_, dtype=torch.float64).normal("factor", len(mean), d + 8).numpy()
        for _ in range(recipe.passes):
            basis = np.linalg.qr(found)[0]
            found = mean @ basis
        values, axes = np.linalg.eigh(basis.T @ mean @ basis)
        axes = basis @ axes
    return torch.from_numpy(axes[:, -d:] * np.sqrt(values[-d:]))


def fedcia(recipe: FedCIA, parts: Split, own: State, server: State) -> tuple[State, State]:
    """Clients turn the factor, or descend, themselves, on their whole tables; each descends from where it was when the server saw it."""
    factor, met = server["factor"], {}
    for round_, seen in visits(recipe, parts):
        for visit in seen:
            u = visit.client
            if u not in met:
                own["items"][u] = factor
            elif recipe.align == "procrustes":
                goal = factor @ met[u]  # the rotation of its last visit
                own["items"][u] += recipe.tau * (goal - own["items"][u])
            else:
                own["items"][u] = own["items"][u] @ met[u][0] + factor @ met[u][1]
            p, q = trained(own["user"][u], own["items"][u])

            def loss(i: Tensor, y: Tensor, p: Tensor = p, q: Tensor = q) -> Tensor:
                fit = bce(q[i] @ p, y) if recipe.objective == "bce" else ((p * q[i] - y[:, None]) ** 2).mean()
                return fit + recipe.l2 / 2 * ((p**2).sum() + 2 * (q[i] ** 2).sum(1).mean())

            train(visit, torch.optim.Adam([p, q], lr=recipe.lr), loss)
            own["user"][u], own["items"][u] = p.detach(), q.detach()
        who = [visit.client for visit in seen]
        factor = turned(factor_of(recipe, own["items"][who], round_), factor)
        for u in who:
            if recipe.align == "procrustes":
                met[u] = torch.from_numpy(np.linalg.lstsq(factor.numpy(), turned(factor, own["items"][u]).numpy(), rcond=None)[0])
            else:
                (q,) = trained(own["items"][u])
                step = torch.optim.SGD([q], lr=recipe.align_lr, weight_decay=recipe.l2)
                for _ in range(recipe.align_steps):
                    move([step], lambda q=q: torch.linalg.norm(q @ q.T - factor @ factor.T))  # noqa: B023
                both = torch.cat([own["items"][u], factor], 1).numpy()
                met[u] = torch.from_numpy(np.linalg.lstsq(both, q.detach().numpy(), rcond=None)[0]).view(2, recipe.dim, recipe.dim)
    stay = (1 - recipe.tau) * torch.eye(recipe.dim, dtype=torch.float64)
    maps = met if recipe.align == "steps" else {u: torch.stack([stay, recipe.tau * turn]) for u, turn in met.items()}
    return own, {"factor": factor, **{f"maps {u}": both for u, both in maps.items()}}


def fedfast(recipe: FedFast, parts: Split, own: State, server: State) -> tuple[State, State]:
    """Item by item and client by client. Whom the server asks is the engine's draw, looked at in another test."""
    users, items, layer = (server[name].clone() for name in ("users", "items", "layer"))
    for round_, seen in visits(recipe, parts):
        changes, moved, dense = [], {}, torch.zeros_like(layer)
        for visit in seen:
            p, q, w = trained(users[visit.client], items, layer)

            def loss(i: Tensor, y: Tensor, p: Tensor = p, q: Tensor = q, w: Tensor = w) -> Tensor:
                return bce((p * q[i] * w[:-1]).sum(1) + w[-1], y)

            train(visit, torch.optim.Adam([p, q, w], lr=recipe.lr), loss)
            changes.append(q.detach() - items)
            moved[visit.client] = p.detach() - users[visit.client]
            dense = dense + len(visit.label) * (w.detach() - layer)
        new = items.clone()
        for i in range(len(items)):
            sizes = [float(change[i].abs().sum()) for change in changes]
            if sum(sizes) > 0:
                new[i] = sum(size * (items + change)[i] for size, change in zip(sizes, changes, strict=True)) / sum(sizes)
        items, layer = new, layer + dense / sum(len(visit.label) for visit in seen)
        for u, change in moved.items():
            users[u] = users[u] + change
        centres = users[Draw(SEED, round_).subset("groups", len(users), recipe.groups)].numpy()
        for _ in range(11):
            group = cdist(users.numpy(), centres).argmin(1)
            last, centres = (
                centres,
                np.stack([users.numpy()[group == k].mean(0) if (group == k).any() else centres[k] for k in range(len(centres))]),
            )
        group = cdist(users.numpy(), last).argmin(1)
        for s in set(range(len(users))) - moved.keys():
            alike = [change for u, change in moved.items() if group[u] == group[s]]
            if alike:
                users[s] = users[s] + recipe.gamma**round_ * torch.stack(alike).mean(0)
    return own, {"users": users, "items": items, "layer": layer, "group": torch.from_numpy(group)}


def lightfr(recipe: LightFR, parts: Split, own: State, server: State) -> tuple[State, State]:
    """Codes alone (no warm rounds), bit by bit, errors computed anew before every bit."""
    d, f = server["items"].numpy().copy(), recipe.dim
    users = own["user"].numpy().copy()
    for round_, seen in visits(recipe, parts):
        total, senders = np.zeros_like(d), np.zeros(len(d))
        for visit in seen:
            i, t = visit.item.numpy(), np.where(visit.label.numpy() > 0, f, -f)
            b = np.where(users[visit.client] < 0, -1.0, 1.0)
            for k in list(range(f)) * recipe.sweeps:
                wanted = ((t - d[i] @ b) * d[i, k]).sum() + (1.2 if recipe.inertia == "published" else 1) * len(i) * b[k]
                b[k] = b[k] if wanted == 0 else np.sign(wanted)
            users[visit.client] = b
            for item, error in zip(i, t - d[i] @ b, strict=True):
                total[item] += error * b
            senders[np.unique(i)] += 1
        for k in Draw(SEED, round_).subset("bits", f, max(1, int(f * recipe.bits_a_round))).tolist():
            wanted = total[:, k] + (senders if recipe.inertia == "exact" else len(seen)) * d[:, k]
            d[:, k] = np.where(wanted == 0, d[:, k], np.sign(wanted))
    return {"user": torch.from_numpy(users)}, {"items": torch.from_numpy(d)}


class UniformFast(FedFast):
    """With clients drawn as others draw them."""

    def choose(self, server: State, world: World, n: int, draw: Draw) -> Tensor | None:
        return None


ORACLES: dict[type[Algorithm], Callable[..., tuple[State, State]]] = {
    FedNCF: fedncf,
    FedCA: fedca,
    FedCIA: fedcia,
    UniformFast: fedfast,
    LightFR: lightfr,
}
NCF = {"layers": (16, 6, 4)}
CASES: dict[str, Algorithm] = {
    "fedncf": FedNCF(**SMALL, **NCF),
    "fedncf published": FedNCF(**{**FedNCF.published, **SMALL, **NCF, "stop_below": 0.05}),
    "fedca": FedCA(**SMALL, floor=0.0),
    "fedca, distinct": FedCA(**SMALL, complement="distinct", components=2, agg_ratio=0.5, init_items=0.1, floor=0.0),
    "fedcia": FedCIA(**SMALL),
    "fedcia, exact": FedCIA(**SMALL, passes=0, tau=0.5),
    "fedcia published": FedCIA(**{**FedCIA.published, **SMALL, "align_steps": 20}),
    "fedfast": UniformFast(**SMALL, groups=4),
    "lightfr": LightFR(**SMALL, warm=0),
    "lightfr published": LightFR(**{**LightFR.published, **SMALL, "negatives": 1}),
    "fedca published": FedCA(**{**FedCA.published, **SMALL, "agg_ratio": 0.5}),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_the_engine(case: str) -> None:
    recipe, parts = CASES[case], small_split(protocol="published" if "published" in case else "clean")
    federation = Federation.start(recipe, parts, SEED, dtype=torch.float64, kernel="off")
    copies = ({name: value.clone() for name, value in tensors.items()} for tensors in (federation.store.tensors, federation.server))
    own, server = ORACLES[type(recipe)](recipe, parts, *copies)
    for _ in range(ROUNDS):
        federation.next_round()
    found = dict(federation.server)
    for name in type(recipe).per_client_server_state:
        mail = {f"{name} {u}": found[name][slot] for u, slot in enumerate(found["slot"].tolist()) if slot >= 0}
        assert mail.keys() == {key for key in server if key.startswith(f"{name} ")}
        found |= mail
    for name, value in server.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=lambda said, name=name: f"server {name}: {said}")
    for name, value in own.items():
        kept = federation.store.tensors[name]
        torch.testing.assert_close(kept, value, rtol=1e-9, atol=1e-9, msg=lambda said, name=name: f"own {name}: {said}")
