"""Explicit ratings from the split to the summary: folds, clients that never take part, predictions, and several runs in one command."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from fedbench.commands import cli
from fedbench.contract.algorithm import Algorithm, Answer, Batch, Extra, Stage, Tensors, World
from fedbench.contract.dataset import DatasetOptions, Interactions
from fedbench.contract.randomness import Draw
from fedbench.contract.uploads import Uploads
from fedbench.data.protocol import Protocol
from fedbench.data.sampling import sample_round
from fedbench.data.split import TEST, TRAIN, VAL, Split, in_query_half, split
from fedbench.datasets.synthetic import load
from fedbench.errors import DataError, UsageError
from fedbench.evaluation.baselines import rating_floors
from fedbench.evaluation.metrics import client_errors, metrics_of, rating_spread
from fedbench.experiment.summary import mean_table, over_runs
from fedbench.settings import command_line
from fedbench.simulation.federation import Federation

SMALL = "--dataset synthetic --users 40 --items 80 --interactions 12 --no-mlflow --quiet"
MEANS = """
from tests.test_ratings import Means as Base
class Means(Base):
    "item means"
"""


@dataclass(frozen=True)
class Means(Algorithm):
    """Predicts a client's mean rating, rebuilt from its ratings; the server counts who rated an item."""

    rounds: int = 1

    tables = {"count": "shared"}
    rating_split = "users"
    reconstructs = True

    @property
    def predicts_ratings(self) -> bool:
        return True

    def init_server(self, world: World, draw: Draw) -> Tensors:
        return {"count": torch.zeros(world.items, dtype=draw.dtype)}

    def answer(self, server: Tensors) -> Answer:
        return Answer(shared=server)

    def upload(self, held: Tensors, sent: Tensors, samples: Tensor) -> Tensors:
        return {"count": torch.ones_like(held["count"])}

    def aggregate(self, server: Tensors, uploads: Uploads, draw: Draw) -> Tensors:
        return {"count": server["count"] + uploads.rows("count").combine(len(server["count"]), "sum")}

    def stages(self, sent: Tensors) -> tuple[Stage, ...]:
        return (Stage(),)

    def solve(self, held: Tensors, sent: Tensors, batch: Batch) -> Tensors:
        return {"mean": (batch.weight * batch.label).sum() / batch.weight.sum().clamp(min=1)}

    def score(self, own: Tensors, sent: Tensors) -> Tensor:
        return own["mean"] + 0 * sent["count"]


@cache
def data() -> Interactions:
    return load(DatasetOptions(users=50, items=90, interactions=14))


def folds(count: int = 5, seed: int = 0) -> list[Split]:
    return [split(data(), Protocol(split="kfold", folds=count, fold=fold, split_seed=seed)) for fold in range(count)]


@cache
def users(seed: int = 0) -> Split:
    return split(data(), Protocol(split="users", split_seed=seed))


def pairs(ptr: np.ndarray, item: np.ndarray) -> set[tuple[int, int]]:
    return set(zip(np.repeat(np.arange(len(ptr) - 1), np.diff(ptr)).tolist(), item.tolist(), strict=True))


def test_every_rating_is_in_exactly_one_fold() -> None:
    parts = folds()
    everything = pairs(parts[0].seen_ptr, parts[0].seen_item)
    tested = [pairs(one.held["test"].ptr, one.held["test"].item) for one in parts]
    assert sum(map(len, tested)) == len(everything) == len(data().user) and set.union(*tested) == everything
    for one, test in zip(parts, tested, strict=True):
        assert pairs(one.train_ptr, one.train_item) == everything - test
        assert abs(len(test) - len(everything) / 5) < 4 * (len(everything) * 0.16) ** 0.5
    assert len({one.fingerprint for one in parts}) == 5


def test_a_rating_keeps_its_value_on_both_sides() -> None:
    known = {(u, i): r for u, i, r in zip(data().user.tolist(), data().item.tolist(), data().rating.tolist(), strict=True)}
    name_of = {name: code for code, name in enumerate(data().item_ids.tolist())}
    for parts in (folds()[1], users()):
        for ptr, item, rating in ((parts.train_ptr, parts.train_item, parts.train_rating), *parts.held.values()):
            client = np.repeat(np.arange(parts.clients), np.diff(ptr))
            for c, i, r in zip(client.tolist(), item.tolist(), rating.tolist(), strict=True):
                user = data().user_ids.tolist().index(parts.user_ids[c])
                assert known[user, name_of[parts.item_ids[i]]] == r


def test_folds_hang_on_the_split_seed_and_not_on_the_order_of_rows() -> None:
    shuffle = np.random.default_rng(0).permutation(len(data().user))
    rows = {name: getattr(data(), name)[shuffle] for name in ("user", "item", "rating", "time")}
    again = split(replace(data(), **rows), Protocol(split="kfold", fold=0))
    first, other = folds()[0], folds(seed=1)[0]
    assert (again.held["test"].item == first.held["test"].item).all() and (again.train_rating == first.train_rating).all()
    assert again.fingerprint == first.fingerprint != other.fingerprint
    assert len(other.held["test"].item) != len(first.held["test"].item) or (other.held["test"].item != first.held["test"].item).any()


def test_users_are_split_by_tenths_and_only_their_query_half_is_held_out() -> None:
    parts = users()
    role = parts.role
    assert role is not None and np.bincount(role).tolist() == [40, 5, 5]
    assert (parts.trainers == np.flatnonzero(role == TRAIN)).all()
    seen = np.diff(parts.seen_ptr)
    for name, which in (("val", VAL), ("test", TEST)):
        held = np.diff(parts.held[name].ptr)
        assert (held == np.where(role == which, seen // 2, 0)).all()
        inside = pairs(parts.held[name].ptr, parts.held[name].item) & pairs(parts.train_ptr, parts.train_item)
        assert not inside
    assert (parts.train_counts[role == TRAIN] == seen[role == TRAIN]).all()
    other = users(seed=1).role
    assert other is not None and (other != role).any()


def test_query_halves_differ_from_round_to_round() -> None:
    user, item = np.repeat(np.arange(30), 9), np.tile(np.arange(9), 30)
    first, second = in_query_half(0, 1, user, item), in_query_half(0, 2, user, item)
    assert (np.bincount(user[first]) == 4).all() and (np.bincount(user[second]) == 4).all() and (first != second).any()
    mixed = np.random.default_rng(0).permutation(len(user))
    assert (in_query_half(0, 1, user[mixed], item[mixed]) == first[mixed]).all()


def test_too_little_data_for_a_rating_split() -> None:
    few = load(DatasetOptions(users=2, items=20, interactions=6))
    with pytest.raises(DataError, match="2 users are too few to train, to validate and to test"):
        split(few, Protocol(split="users"))
    with pytest.raises(UsageError, match="name the fold"):
        split(few, Protocol(split="kfold"))


def test_samples_are_the_ratings_and_distinct_items_without_one() -> None:
    parts = folds()[0]
    cohort = np.array([3, 0, 41])
    plain = sample_round(parts, cohort, 0, 0, 1)
    assert (plain.row == np.concatenate([parts.train_item[parts.train_ptr[c] : parts.train_ptr[c + 1]] for c in cohort])).all()
    assert (plain.label == np.concatenate([parts.train_rating[parts.train_ptr[c] : parts.train_ptr[c + 1]] for c in cohort])).all()
    for rating in ("mean", "unknown"):
        filled = sample_round(parts, cohort, 3, 0, 1, rating)
        for c, client in enumerate(cohort):
            rows = filled.row[filled.row_ptr[c] : filled.row_ptr[c + 1]]
            label = filled.label[filled.ptr[c] : filled.ptr[c + 1]]
            rated = int(parts.train_counts[client])
            assert len(rows) == len(set(rows.tolist())) == rated + min(3 * rated, parts.items - rated)
            assert (filled.local[filled.ptr[c] : filled.ptr[c + 1]] == np.arange(len(rows))).all()
            assert not set(rows[rated:].tolist()) & set(rows[:rated].tolist())
            expected = label[:rated].mean() if rating == "mean" else np.nan
            np.testing.assert_allclose(label[rated:], expected, rtol=1e-6)
    again, later = sample_round(parts, cohort[1:], 3, 0, 1), sample_round(parts, cohort[1:], 3, 0, 2)
    alone = sample_round(parts, cohort[1:2], 3, 0, 1)
    assert (again.row[: len(alone.row)] == alone.row).all() and (again.row != later.row).any()


def test_extra_items_are_drawn_evenly() -> None:
    parts = folds()[0]
    client = int(np.argmin(parts.train_counts))
    rated = int(parts.train_counts[client])
    drawn = [sample_round(parts, np.array([client]), 2, 0, when).row[rated:] for when in range(400)]
    count = np.bincount(np.concatenate(drawn), minlength=parts.items)
    mine = parts.train_item[parts.train_ptr[client] : parts.train_ptr[client + 1]]
    share = 2 * rated / (parts.items - rated)
    others = np.delete(count, mine)
    assert count[mine].sum() == 0 and others.sum() == 400 * 2 * rated
    assert (np.abs(others - 400 * share) < 5 * (400 * share * (1 - share)) ** 0.5).all()


def test_metrics_by_hand() -> None:
    parts = folds()[2]
    held = parts.held["test"]
    predicted = held.rating + np.random.default_rng(0).normal(size=len(held.item))
    found = metrics_of(parts, {"test": predicted})["test"]
    errors = np.clip(predicted, 1, 5) - held.rating
    assert found["rmse"] == pytest.approx(np.sqrt((errors**2).mean())) and found["mae"] == pytest.approx(np.abs(errors).mean())
    each = client_errors(predicted, held, 1, 5)
    some = each["ratings"] > 0
    for client in np.flatnonzero(some)[:5]:
        mine = errors[held.ptr[client] : held.ptr[client + 1]]
        assert each["mse"][client] == pytest.approx((mine**2).mean()) and each["accuracy"][client] == (np.abs(mine) <= 0.5).mean()
    assert np.isnan(each["mse"][~some]).all()
    assert np.sqrt((each["mse"][some] * each["ratings"][some]).sum() / len(errors)) == pytest.approx(found["rmse"])
    rmse = np.sqrt(each["mse"][some])
    assert rating_spread(each["mse"])["rmse_p90"] == pytest.approx(np.percentile(rmse, 90))


@pytest.mark.parametrize("parts", [folds()[0], users()], ids=["kfold", "users"])
def test_floors_by_hand(parts: Split) -> None:
    table = pd.DataFrame({"user": np.repeat(np.arange(parts.clients), parts.train_counts), "item": parts.train_item})
    table["rating"] = parts.train_rating.astype(np.float64)
    training = table[table["user"].isin(parts.trainers)]
    mean, by_item, by_user = training["rating"].mean(), training.groupby("item")["rating"].mean(), table.groupby("user")["rating"].mean()
    held = parts.held["test"]
    expected = [
        np.clip(by_user.get(u, mean) + by_item.get(i, mean) - mean, 1, 5)
        for u, i in zip(held.client.tolist(), held.item.tolist(), strict=True)
    ]
    floors = rating_floors(parts)
    assert floors["user_item_mean"]["rmse"] == pytest.approx(np.sqrt(((expected - held.rating) ** 2).mean()))
    assert floors["global_mean"]["mae"] == pytest.approx(np.abs(mean - held.rating).mean())
    assert floors["user_item_mean"]["rmse"] < floors["global_mean"]["rmse"]


def test_a_client_that_never_took_part_is_scored_from_its_support_half() -> None:
    parts = users()
    federation = Federation.start(Means(), parts, 0)
    federation.next_round()
    assert set(np.flatnonzero(federation.visits).tolist()) == set(parts.trainers.tolist())
    found = federation.outcome()
    for name, held in parts.held.items():
        for client in np.flatnonzero(np.diff(held.ptr)):
            support = parts.train_rating[parts.train_ptr[client] : parts.train_ptr[client + 1]]
            np.testing.assert_allclose(found[name][held.ptr[client] : held.ptr[client + 1]], support.mean(), rtol=1e-6)


@pytest.fixture
def means(tmp_path: Path) -> str:
    (tmp_path / "means.py").write_text(MEANS)
    return str(tmp_path / "means.py")


def summary_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def test_a_users_run_from_end_to_end(means: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--algo", means, *SMALL.split(), "--rounds", "2", "--out", str(tmp_path / "r")]) == 0
    summary, printed = summary_of(tmp_path / "r"), capsys.readouterr().out
    assert summary["protocol_fields"]["split"] == "users" and not summary["leaky"]
    assert summary["val"].keys() == summary["test"].keys() >= {"rmse", "mae", "accuracy", "rmse_p90", "rmse_worst_decile"}
    assert "RMSE" in printed and "user + item mean" in printed and "HR@10" not in printed
    table = pd.read_parquet(tmp_path / "r" / "per_client.parquet")
    pooled = (table["mse_test"] * table["ratings_test"]).sum() / table["ratings_test"].sum()
    assert np.sqrt(pooled) == pytest.approx(summary["test"]["rmse"])
    lines = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    assert summary["best_round"] == 1 and lines[0]["val/rmse"] == summary["val"]["rmse"]
    assert (tmp_path / "r" / "figures" / "distribution.png").exists() and summary["clients_never_seen"] == 0


def test_all_folds_in_one_command(means: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--algo", means, *SMALL.split(), "--split", "kfold", "--folds", "3", "--seeds", "0-1", "--out", str(tmp_path / "r")]
    assert cli.main(words) == 0
    runs = [summary_of(tmp_path / "r" / f"seed-{seed}" / f"fold-{fold}") for seed in (0, 1) for fold in range(3)]
    summary = summary_of(tmp_path / "r")
    values = [run["test"]["rmse"] for run in runs]
    assert summary["test"]["rmse"] == pytest.approx(np.mean(values)) and summary["std"]["test"]["rmse"] == pytest.approx(
        np.std(values, ddof=1)
    )
    assert [(run["seed"], run["fold"]) for run in summary["runs"]] == [(seed, fold) for seed in (0, 1) for fold in range(3)]
    assert summary["val"] == {} and summary["seed"] is None and summary["protocol_fields"]["fold"] is None
    assert summary["protocol_fingerprint"] not in {run["protocol_fingerprint"] for run in runs}
    assert summary["protocol_fields"]["select_on"] == "last" and summary["best_round"] == 1
    out = capsys.readouterr().out
    assert f"test over seeds 0, 1 and folds 0, 1, 2:\n  rmse              {np.mean(values):.4f} ± {np.std(values, ddof=1):.4f}\n" in out
    assert "± standard deviation over 2 seeds × 3 folds\n" in out


def test_several_runs_without_a_folder_share_one(means: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["--algo", means, *SMALL.split(), "--split", "kfold", "--folds", "2"]) == 0
    (parent,) = (tmp_path / "runs" / "synthetic" / "means").iterdir()
    assert {path.name for path in parent.iterdir()} == {"fold-0", "fold-1", "summary.json"}


def test_a_folds_config_repeats_that_fold(means: str, tmp_path: Path) -> None:
    words = ["--algo", means, *SMALL.split(), "--split", "kfold", "--fold", "1", "--out", str(tmp_path / "r")]
    assert cli.main(words) == 0
    again = command_line.resolve(["--config", str(tmp_path / "r" / "config.json")])
    assert again.protocol.fold == 1 and again.hash8() == command_line.resolve(words).hash8()


def test_fold_fields_do_not_show_where_they_do_not_matter() -> None:
    shown = command_line.resolve(["--algo", "fedmf", *SMALL.split()]).to_dict()
    assert not {"fold", "folds"} & shown.keys()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--algo fedmf --split kfold", "--split kfold holds out ratings and fedmf only ranks; take an algorithm that predicts ratings"),
        ("--algo MEANS --split random", "--split random holds out items to rank and means predicts ratings; use --split kfold"),
        ("--algo MEANS --split kfold --fold 5", "--fold 5: name one of 0 to 4, or raise --folds"),
        ("--algo MEANS --fold 1", "--fold is for --split kfold; --split users would ignore it"),
        ("--algo fedmf --folds 3", "--folds is for --split kfold; --split auto would ignore it"),
        ("--algo MEANS --split kfold --folds 1", "--folds must be at least 2, not 1"),
        ("--algo MEANS --dataset likes.csv", "--split users needs ratings, and likes has none"),
        ("--algo MEANS --refit", "--refit needs a validation item of each client, and --split users has none"),
        ("--algo MEANS -n 33", "-n/--clients-per-round 33 is more than the 32 clients"),
    ],
)
def test_what_makes_no_sense_ends_in_one_line(
    words: str, says: str, means: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    likes, out = tmp_path / "likes.csv", tmp_path / "r"
    likes.write_text("".join(f"{user},{item}\n" for user in range(20) for item in range(user, user + 9)))
    first = SMALL if "--dataset" not in words else "--no-mlflow --quiet"
    words = words.replace("MEANS", means).replace("likes.csv", str(likes))
    assert cli.main([*words.split(), *first.split(), "--out", str(out)]) == 2
    assert says.replace("MEANS", means) in capsys.readouterr().err and not out.exists()


def test_means_and_deviations_over_runs() -> None:
    common = {"algo": "a", "dataset": "d", "protocol": "clean", "leaky": False, "best_round": 3, "protocol_fingerprint": "f", "notes": []}
    common |= {"data_checksum": "c", "protocol_fields": {"protocol": "clean", "fold": None}, "val": {}}
    runs = [{**common, "seed": seed, "beats": seed > 0, "test": {"hr_10": value}} for seed, value in enumerate((0.1, 0.2, 0.3))]
    merged = over_runs(runs)
    # mean .2; squared deviations .01, 0, .01 over n - 1 = 2 give .01, so .1
    assert merged["test"]["hr_10"] == pytest.approx(0.2) and merged["std"]["test"]["hr_10"] == pytest.approx(0.1)
    assert merged["beats"] is False and merged["seed"] is None and merged["protocol_fingerprint"] == "f"
    lines = mean_table(merged).splitlines()
    assert lines[0] == "a on d, protocol clean, test over seeds 0, 1, 2:" and lines[1].split() == ["hr_10", "0.2000", "±", "0.1000"]
    assert lines[-1] == "± standard deviation over 3 seeds"
    assert "LEAKY" not in lines[0] and "refit" not in mean_table(merged)
    assert "LEAKY" in mean_table(over_runs([{**run, "leaky": True} for run in runs]))
    refitted = over_runs([{**run, "refit": {"rounds": 3, "test": {"hr_10": run["test"]["hr_10"] + 0.5}}} for run in runs])
    assert mean_table(refitted).splitlines()[2].split() == ["refit", "hr_10", "0.7000", "±", "0.1000"]


def test_extra_is_negatives_only_where_items_are_ranked() -> None:
    assert Algorithm(negatives=4).extra(1) == Extra(4) and Means(negatives=4).extra(1) == Extra(0)
