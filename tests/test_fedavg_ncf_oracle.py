"""Federated NCF once more, as a module and plain loops: whole nn.Embedding tables, torch.optim.AdamW, averages of state dicts.

It shares no code with the algorithm, its parts or the kernels. Only randomness is taken from the engine: initial tensors, samples and
shuffles.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedbench.algorithms.fedavg_ncf import FedAvgNCF
from fedbench.contract.algorithm import Tensors
from fedbench.contract.randomness import keys
from fedbench.data.sampling import Samples, cohort_of, sample_round
from fedbench.data.split import Split
from fedbench.kernels.shuffling import orders
from fedbench.simulation.federation import Federation
from tests.conftest import small_split

SEED, ROUNDS = 3, 3
SMALL: dict[str, Any] = {
    "dim": 4,
    "layers": (12, 6, 3),
    "batch_size": 32,
    "clients_per_round": 15,
    "lr": 0.02,
    "weight_decay": 0.4,
    "clip": 0.05,
    "local_epochs": 3,
    "server_lr": 1.0,
}
PUBLISHED = {**FedAvgNCF.published, **SMALL}


class NeuMF(nn.Module):
    """All users and all items, four embeddings."""

    def __init__(self, users: Tensor, items: Tensor, mlp: Tensor, head: Tensor, dim: int, layers: tuple[int, ...]) -> None:
        super().__init__()
        self.user_gmf, self.user_mlp = (
            nn.Embedding.from_pretrained(part.clone(), freeze=False) for part in (users[:, :dim], users[:, dim:])
        )
        self.item_gmf, self.item_mlp = (
            nn.Embedding.from_pretrained(part.clone(), freeze=False) for part in (items[:, :dim], items[:, dim:])
        )
        parts: list[nn.Module] = []
        for fan_in, fan_out in zip(layers[:-1], layers[1:], strict=True):
            parts += [nn.Linear(fan_in, fan_out, dtype=torch.float64), nn.ReLU()]
        self.mlp = nn.Sequential(*parts)
        self.head = nn.Linear(dim + layers[-1], 1, dtype=torch.float64)
        nn.utils.vector_to_parameters(mlp, self.mlp.parameters())
        nn.utils.vector_to_parameters(head, self.head.parameters())

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        deep = self.mlp(torch.cat([self.user_mlp(user), self.item_mlp(item)], dim=1))
        return self.head(torch.cat([self.user_gmf(user) * self.item_gmf(item), deep], dim=1))[:, 0]

    def train_locally(self, u: int, item: Tensor, label: Tensor, shuffles: list[Tensor], recipe: FedAvgNCF) -> None:
        optimizer = torch.optim.AdamW(self.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay)
        for order in shuffles:
            for batch in order.split(recipe.batch_size):
                optimizer.zero_grad()
                logits = self(torch.full_like(batch, u), item[batch])
                nn.functional.binary_cross_entropy_with_logits(logits, label[batch]).backward()
                if recipe.clip:
                    nn.utils.clip_grad_norm_(self.parameters(), recipe.clip)
                optimizer.step()


def of_client(samples: Samples, c: int) -> tuple[Tensor, Tensor]:
    rows = samples.row[samples.row_ptr[c] : samples.row_ptr[c + 1]]
    at = slice(samples.ptr[c], samples.ptr[c + 1])
    return torch.from_numpy(rows[samples.local[at]].astype(np.int64)), torch.from_numpy(samples.label[at]).double()


def shuffles_of(stream: np.ndarray, samples: int, recipe: FedAvgNCF) -> list[Tensor]:
    found = []
    for epoch in range(recipe.local_epochs):
        order = np.empty(samples, np.int64)
        orders(stream, np.array([0, samples]), epoch, recipe.batch_size, order)
        found.append(torch.from_numpy(order))
    return found


def averaged(server: NeuMF, clients: list[NeuMF], cohort: list[int], items: list[Tensor], recipe: FedAvgNCF) -> None:
    """The mean of all weights; with private users each user's own rows, and with `touching` item rows over those that trained them."""
    models = [dict(client.named_parameters()) for client in clients]
    for name, weight in server.named_parameters():
        stacked = torch.stack([model[name].detach() for model in models])
        new = stacked.mean(0)
        if name.startswith("user") and not recipe.share_users:
            new = weight.detach().clone()
            for c, u in enumerate(cohort):
                new[u] = stacked[c, u]
        elif name.startswith("item") and recipe.average == "touching":
            for i in range(len(weight)):
                touching = [c for c in range(len(cohort)) if i in items[c].tolist()]
                new[i] = stacked[touching, i].mean(0) if touching else weight[i].detach()
        weight.data = new


def oracle(recipe: FedAvgNCF, parts: Split, start: Tensors) -> NeuMF:
    server = NeuMF(start["user"], start["items"], start["mlp"], start["head"], recipe.dim, recipe.layers)
    for round_ in range(1, ROUNDS + 1):
        cohort = cohort_of(round_, parts.clients, recipe.clients_per_round or parts.clients, recipe.sampling, SEED)
        samples = sample_round(parts, cohort, recipe.negatives, SEED, round_)
        stream = keys(SEED, round_, "shuffle", cohort)
        clients, touched = [], []
        for c, u in enumerate(cohort.tolist()):
            item, label = of_client(samples, c)
            client = copy.deepcopy(server)
            client.train_locally(u, item, label, shuffles_of(stream[c : c + 1], len(label), recipe), recipe)
            clients.append(client)
            touched.append(item)
        averaged(server, clients, cohort.tolist(), touched, recipe)
    return server


RECIPES = {
    "clean": FedAvgNCF(**SMALL),
    "clean, no decay, no clip": FedAvgNCF(**{**SMALL, "clip": 0.0, "weight_decay": 0.0}),
    "whole tables, private users": FedAvgNCF(**SMALL, average="cohort"),
    "published": FedAvgNCF(**PUBLISHED),
    "published, no decay": FedAvgNCF(**{**PUBLISHED, "weight_decay": 0.0}),
}


# other kernels are compared with the loop, tests/test_algorithms.py
@pytest.mark.parametrize(("case", "kernel"), [(case, "off") for case in RECIPES])
def test_equals_the_engine(case: str, kernel: str) -> None:
    recipe, parts = RECIPES[case], small_split()
    federation = Federation.start(recipe, parts, SEED, dtype=torch.float64, kernel=kernel)
    start = {name: value.clone() for name, value in {**federation.server, **federation.store.tensors}.items()}
    expected = oracle(recipe, parts, start)
    for _ in range(ROUNDS):
        federation.next_round()
    found = {**federation.server, **federation.store.tensors}
    for name, value in {
        "user": torch.cat([expected.user_gmf.weight, expected.user_mlp.weight], dim=1),
        "items": torch.cat([expected.item_gmf.weight, expected.item_mlp.weight], dim=1),
        "mlp": nn.utils.parameters_to_vector(expected.mlp.parameters()),
        "head": nn.utils.parameters_to_vector(expected.head.parameters()),
    }.items():
        assert not torch.equal(found[name], start[name])
        torch.testing.assert_close(found[name], value.detach(), rtol=1e-8, atol=1e-8)


def test_bytes_of_both_forms() -> None:
    """Private users: touched rows and layers go up, the item table and layers down. As published: the whole model both ways."""
    parts = small_split()
    dense = (12 * 6 + 6 + 6 * 3 + 3) + (4 + 3 + 1)
    width, n = 4 + 6, 15
    federation = Federation.start(FedAvgNCF(**SMALL), parts, SEED)
    result = federation.next_round()
    assert result.uploads.bytes() == 4 * (len(result.uploads.rows("items").item) * (width + 1) + n * dense)
    assert result.bytes_down == 4 * n * (parts.items * width + dense)
    federation = Federation.start(FedAvgNCF(**PUBLISHED), parts, SEED)
    result = federation.next_round()
    model = (parts.items + parts.clients) * width + dense
    assert result.uploads.bytes() == 4 * n * (model + 1)  # 1: the factor that stands for the decay of untouched rows
    assert result.bytes_down == 4 * n * model
