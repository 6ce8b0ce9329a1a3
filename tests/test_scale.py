"""What a large federation needs: cohorts drawn without sorting everybody, rows made on disk, and a sample of clients to rank for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedbench.algorithms.fedmf import FedMF
from fedbench.algorithms.fedrecon import FedRecon
from fedbench.commands import cli
from fedbench.contract.algorithm import Algorithm
from fedbench.contract.dataset import DatasetOptions, Interactions
from fedbench.contract.randomness import keys
from fedbench.data.protocol import Protocol
from fedbench.data.sampling import cohort_of
from fedbench.data.split import Split, split
from fedbench.datasets import synthetic
from fedbench.evaluation.baselines import chance_metrics, popularity_ranks
from fedbench.simulation.federation import Federation
from tests.test_run import summary_of


@pytest.mark.parametrize(("clients", "n"), [(5000, 40), (5000, 1), (200, 99), (50, 20)])
def test_a_cohort_is_those_with_the_smallest_keys(clients: int, n: int) -> None:
    for when in range(1, 20):
        expected = np.sort(np.argsort(keys(3, when, "cohort", np.arange(clients)), kind="stable")[:n])
        assert np.array_equal(cohort_of(when, clients, n, "uniform", 3), expected)


# ---- rows on disk ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> DatasetOptions:
    monkeypatch.setattr(synthetic, "LARGE", 0)
    monkeypatch.setattr(synthetic, "CHUNK_USERS", 64)
    return DatasetOptions(users=300, items=2000, interactions=12, cache_dir=tmp_path)


def assert_same(found: Interactions, expected: Interactions) -> None:
    for name in ("user", "item", "rating", "time", "user_ids", "item_ids"):
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name


@pytest.mark.parametrize("items", [60, 2000])
def test_rows_made_on_disk_are_those_asked_for(large: DatasetOptions, items: int) -> None:
    data = synthetic.load(replace(large, items=items))
    counts = np.bincount(data.user)
    assert data.users == len(counts) == 300 and counts.min() >= 6 and abs(counts.mean() - 12) < 1
    assert len(np.unique(data.user.astype(np.int64) * items + data.item)) == len(data.user)
    assert set(np.unique(data.rating)) == {1, 2, 3, 4, 5}
    assert np.array_equal(np.lexsort((data.time, data.user)), np.arange(len(data.user)))
    first = np.unique(data.item, return_index=True)[1]
    assert len(first) == data.items and (np.diff(first) > 0).all(), "codes count first appearances"
    assert len(np.unique(data.item_ids)) == data.items and data.item_ids.max() < items
    parts = split(data, Protocol())
    assert parts.clients == 300 and parts.train_item.dtype == parts.seen_item.dtype == np.int32


def test_taste_and_popularity_show_in_rows_made_on_disk(large: DatasetOptions) -> None:
    """Drawn by popularity alone, a user's items would agree with its taste no more than other users' items do."""
    options = replace(large, users=2000)
    data = synthetic.load(options)
    traits = np.random.default_rng(0).normal(size=(2000, synthetic.RANK))[data.item_ids]
    mean = np.stack([np.bincount(data.user, traits[data.item, k]) for k in range(synthetic.RANK)], axis=1) / np.bincount(data.user)[:, None]
    mine, other = (traits[data.item] * mean[data.user]).sum(1), (traits[data.item] * mean[(data.user + 1) % 2000]).sum(1)
    assert mine.mean() > other.mean() + 1
    met = np.sort(np.bincount(data.item))[::-1]
    assert met[:20].mean() > 10 * np.median(met)


def test_rows_made_on_disk_are_made_once_and_depend_on_the_seed_alone(
    large: DatasetOptions, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    data = synthetic.load(large)
    other = synthetic.load(replace(large, data_seed=1))
    assert other.checksum() != data.checksum()
    assert_same(synthetic.load(replace(large, cache_dir=tmp_path / "again")), data)
    (folder,) = (tmp_path / "synthetic").glob("300-2000-12-0")
    (folder / synthetic.DONE).unlink()  # as if the generator had been killed
    (folder / "item.npy").write_bytes(b"")
    assert_same(synthetic.load(large), data)
    monkeypatch.delattr(synthetic, "_generate")
    assert_same(synthetic.load(large), data)


# ---- a sample of clients -----------------------------------------------------------------------------------------------------


def parts_of(eval_clients: int | None) -> Split:
    return split(synthetic.load(DatasetOptions(users=40, items=90, interactions=10)), Protocol(eval_clients=eval_clients))


@pytest.mark.parametrize("algorithm", [FedMF(dim=8, clients_per_round=9), FedRecon(dim=8, clients_per_round=9)], ids=["fedmf", "fedrecon"])
def test_ranks_of_a_sample_are_those_of_all(algorithm: Algorithm) -> None:
    whole, some = (Federation.start(algorithm, parts_of(n), 0) for n in (None, 7))
    for federation in (whole, some):
        federation.next_round()
    sample = some.split.evaluated
    assert len(sample) == 7 and (np.diff(sample) > 0).all() and np.array_equal(sample, parts_of(7).evaluated)
    for ranks in (Federation.sampled_ranks, Federation.full_ranks):
        for name, value in ranks(whole).items():
            assert np.array_equal(ranks(some)[name], value[sample])
    for name, value in popularity_ranks(whole.split).items():
        assert np.array_equal(popularity_ranks(some.split)[name], value[sample])
    free = whole.split.items - whole.split.train_counts[sample] - 1
    assert chance_metrics(some.split)["full_hr_10"] == pytest.approx((10 / free).mean())


def test_a_sample_is_another_protocol() -> None:
    assert parts_of(7).fingerprint != parts_of(None).fingerprint != parts_of(8).fingerprint
    assert parts_of(40).fingerprint == parts_of(99).fingerprint == parts_of(None).fingerprint, "all of them are no sample"


def test_a_run_that_ranks_for_a_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--algo fedmf --dim 4 --rounds 2 -n 9 --dataset synthetic --users 40 --items 90 --interactions 10 --no-mlflow --quiet"
    assert cli.main([*f"{words} --eval-clients 7".split(), "--out", str(tmp_path / "r")]) == 0
    assert "40 clients (7 of them ranked for)" in capsys.readouterr().out
    assert len(pd.read_parquet(tmp_path / "r" / "per_client.parquet")) == 7
    assert summary_of(tmp_path / "r")["protocol_fields"]["eval_clients"] == 7
    assert cli.main([*f"{words} --algo fedrec_mf --eval-clients 7 --fold 0".split(), "--out", str(tmp_path / "s")]) == 2
    assert "--eval-clients is for ranking" in capsys.readouterr().err
