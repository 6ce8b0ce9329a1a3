"""The area under the ROC curve that an upload gives the server, against scikit-learn on dense scores."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from fedbench.contract.uploads import Rows, Uploads
from fedbench.data.split import Split
from fedbench.experiment import run
from fedbench.settings.command_line import resolve
from fedbench.simulation.exposure import MOST_CLIENTS, exposure
from fedbench.simulation.federation import world_of
from tests.conftest import small_split

SMALL = "--dataset synthetic --users 30 --items 80 --interactions 10 --rounds 2 --dim 4 -e 1 --no-mlflow --quiet"


def rated(parts: Split, client: int) -> np.ndarray:
    out = np.zeros(parts.items, bool)
    out[parts.train_item[parts.train_ptr[client] : parts.train_ptr[client + 1]]] = True
    return out


def test_rows_against_scikit_learn() -> None:
    """Half of a client's items and some others are sent; changes take few values, so that there are ties."""
    parts, rng = small_split(), np.random.default_rng(0)
    clients = np.array([1, 4, 9, 20])
    item, value, bias, expected = [], [], [], []
    for one in clients:
        truth = rated(parts, one)
        sent = np.flatnonzero(rng.random(parts.items) < np.where(truth, 0.7, 0.2))
        change, shift = rng.integers(0, 3, (len(sent), 2)).astype(np.float32), rng.integers(0, 2, len(sent)).astype(np.float32)
        guess = np.full(parts.items, -1.0)
        guess[sent] = (change**2).sum(1) + shift**2
        expected.append((roc_auc_score(truth, guess), roc_auc_score(truth, guess >= 0)))
        item.append(sent)
        value.append(change)
        bias.append(shift)
    index = torch.tensor([len(sent) for sent in item]), torch.from_numpy(np.concatenate(item))
    tensors = {
        "items": Rows(*index, torch.from_numpy(np.concatenate(value))),
        "bias": Rows(*index, torch.from_numpy(np.concatenate(bias))),
        "layer": torch.ones(len(clients), 3),
    }
    uploads = Uploads(world_of(parts), torch.from_numpy(clients), tensors)
    found = exposure(uploads, ("items", "bias"), parts, 0, 1)
    assert [found["exposure/auc"], found["exposure/auc_rows"]] == pytest.approx(np.mean(expected, axis=0))


def test_whole_tables_against_scikit_learn() -> None:
    parts = small_split()
    tables = torch.randn(parts.clients, parts.items, 3, generator=torch.Generator().manual_seed(0))
    uploads = Uploads(world_of(parts), torch.arange(parts.clients), {"items": tables, "samples": torch.ones(parts.clients)})
    guess = ((tables - tables.mean(0)) ** 2).sum(2).numpy()
    expected = np.mean([roc_auc_score(rated(parts, client), guess[client]) for client in range(parts.clients)])
    found = exposure(uploads, ("items",), parts, 0, 1)
    assert found["exposure/auc"] == pytest.approx(expected, abs=1e-6) and found["exposure/auc_rows"] == 0.5
    assert abs(expected - 0.5) < 0.1


def test_a_table_that_is_not_finite_ends() -> None:
    parts = small_split()
    uploads = Uploads(world_of(parts), torch.arange(parts.clients), {"items": torch.full((parts.clients, parts.items, 2), torch.nan)})
    assert exposure(uploads, ("items",), parts, 0, 1)["exposure/auc"] == 0.5


def test_nothing_is_said_without_a_table() -> None:
    parts = small_split()
    uploads = Uploads(world_of(parts), torch.arange(parts.clients), {"samples": torch.ones(parts.clients)})
    assert exposure(uploads, ("items",), parts, 0, 1) == {}


def test_a_large_cohort_is_sampled_by_seed_and_round() -> None:
    parts = small_split(MOST_CLIENTS + 150)
    tables = torch.randn(parts.clients, parts.items, 2, generator=torch.Generator().manual_seed(0))
    uploads = Uploads(world_of(parts), torch.arange(parts.clients), {"items": tables})
    found = {(seed, when): exposure(uploads, ("items",), parts, seed, when)["exposure/auc"] for seed in (0, 1) for when in (1, 2)}
    assert len(set(found.values())) == 4 and found[0, 1] == exposure(uploads, ("items",), parts, 0, 1)["exposure/auc"]


@pytest.mark.parametrize(
    ("algo", "low", "high"),
    [
        ("fedmf", 0.6, 1.0),
        ("fedavg_ncf -n 20", 0.6, 1.0),
        ("fedem --adapter 8,1", 0.5, 1.0),
        ("popularity", 1.0, 1.0),
        ("local", None, None),
    ],
)
def test_every_method_that_uploads_a_table_logs_it(algo: str, low: float | None, high: float, tmp_path: Path) -> None:
    summary = run.run(resolve([*f"--algo {algo} {SMALL}".split(), "--out", str(tmp_path / "r")]))
    lines = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    if low is None:
        assert "exposure" not in summary and "exposure/auc" not in lines[0]
    else:
        assert summary["exposure"]["auc"] == lines[summary["best_round"] - 1]["exposure/auc"]
        assert all(low <= line["exposure/auc"] <= high for line in lines)
