"""Users who were not in training learn what is private to them, nothing else moves, and they are measured like the others."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from fedbench.__main__ import main
from fedbench.algorithms.central_mf import CentralMF
from fedbench.algorithms.fedavg_ncf import FedAvgNCF
from fedbench.algorithms.fedem import FedEM
from fedbench.algorithms.fedmf import FedMF
from fedbench.algorithms.fedrec_mf import FedRecMF
from fedbench.algorithms.fedrecon import FedRecon
from fedbench.algorithms.local import Local
from fedbench.algorithms.popularity import Popularity
from fedbench.algorithms.random_scores import Random
from fedbench.contract.algorithm import Algorithm
from fedbench.contract.dataset import DatasetOptions
from fedbench.contract.randomness import Draw
from fedbench.data.protocol import Protocol
from fedbench.data.sampling import sample_round
from fedbench.data.split import Split, split
from fedbench.datasets.synthetic import load
from fedbench.errors import DataError, UsageError
from fedbench.evaluation.baselines import popularity_ranks
from fedbench.evaluation.metrics import client_metrics, new_item_metrics
from fedbench.experiment import saved_model
from fedbench.experiment.run import run
from fedbench.settings.command_line import resolve
from fedbench.simulation import new_users
from fedbench.simulation.client_store import ClientStore
from fedbench.simulation.engine import Engine
from fedbench.simulation.federation import Federation, world_of
from fedbench.tracking.run_log import final_metrics

SIZE = DatasetOptions(users=40, items=150, interactions=12)
DATA = "--dataset synthetic --users 40 --items 150 --interactions 12 --no-mlflow --quiet"


def parts() -> Split:
    return split(load(SIZE), Protocol(new_users=0.2))


def lists(part: Split) -> dict[str, tuple[list[int], list[int], int, int, list[int]]]:
    """By user: training items, all items, validation item, test item, test candidates."""
    return {
        str(user): (
            part.train_item[part.train_ptr[u] : part.train_ptr[u + 1]].tolist(),
            part.seen_item[part.seen_ptr[u] : part.seen_ptr[u + 1]].tolist(),
            int(part.val_item[u]),
            int(part.test_item[u]),
            part.test_candidates[u].tolist(),
        )
        for u, user in enumerate(part.user_ids)
    }


def test_new_users_are_kept_apart_and_keep_their_own_split() -> None:
    some, whole = parts(), split(load(SIZE), Protocol())
    assert some.cold_start is not None and (some.clients, some.cold_start.clients) == (32, 8)
    assert lists(some) | lists(some.cold_start) == lists(whole)
    assert some.items == some.cold_start.items == whole.items and whole.cold_start is None
    other = split(load(SIZE), Protocol(new_users=0.2, split_seed=1)).cold_start
    assert other is not None and set(other.user_ids) != set(some.cold_start.user_ids)
    with pytest.raises(DataError, match="none is left to train"):
        split(load(replace(SIZE, users=2)), Protocol(new_users=0.9))


def test_the_fingerprint_tells_them_only_where_there_are_any() -> None:
    plain = split(load(SIZE), Protocol())
    fields = {"name": "clean", "split": "time", "ties": "hash", "train_negatives": "clean", "select_on": "val", "min_interactions": 5,
              "eval_negatives": 99, "candidates": "apart", "split_seed": 0, "data": plain.checksum}  # fmt: skip
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    assert plain.fingerprint == hashlib.sha256(text.encode()).hexdigest()[:16] != parts().fingerprint
    told = [resolve(["--algo", "fedmf", "--dataset", "synthetic", *words]).identity() for words in ([], ["--new-users", "0.1"])]
    assert "new_users" not in told[0] and told[1] == told[0] | {"new_users": 0.1}


def test_only_the_user_vector_moves_as_plain_torch_moves_it() -> None:
    """One batch a client, so that no shuffle matters; Adam starts anew in each round."""
    algorithm = FedMF(dim=4, batch_size=10_000, local_epochs=3)
    new = parts().cold_start
    assert new is not None
    engine = Engine(algorithm, world_of(new), 0, dtype=torch.float64)
    draw = Draw(0, 0, None, torch.float64)
    server = algorithm.init_server(engine.world, draw)
    items = server["items"].clone()
    learnt = new_users.learn(engine, server, new, rounds=2).tensors["user"]
    assert (server["items"] == items).all()
    for u, start in enumerate(ClientStore(algorithm, engine.world, draw).tensors["user"]):
        user = start.clone().requires_grad_()
        for when in (1, 2):
            samples = sample_round(new, np.arange(new.clients), algorithm.negatives, 0, when)
            mine = slice(samples.ptr[u], samples.ptr[u + 1])
            rows = items[torch.from_numpy(samples.row[samples.row_ptr[u] + samples.local[mine]].astype(np.int64))]
            label = torch.from_numpy(samples.label[mine]).double()
            adam = torch.optim.Adam([user], lr=algorithm.lr)
            for _ in range(algorithm.local_epochs):
                adam.zero_grad()
                torch.nn.functional.binary_cross_entropy_with_logits(rows @ user, label).backward()
                adam.step()
        torch.testing.assert_close(learnt[u], user.detach(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("algorithm", [FedAvgNCF(dim=4, layers=(8, 4)), FedRecMF(dim=4, feedback="implicit"), FedRecon(dim=4)], ids=repr)
def test_what_is_shared_stays_as_it_is_and_what_is_private_moves(algorithm: Algorithm) -> None:
    new = parts().cold_start
    assert new is not None
    engine, draw = Engine(algorithm, world_of(new), 0), Draw(0)
    server = algorithm.init_server(engine.world, draw)
    before = {name: value.clone() for name, value in server.items()}
    learnt = new_users.learn(engine, server, new, rounds=2).tensors["user"]
    assert all((server[name] == value).all() for name, value in before.items()) and learnt.isfinite().all()
    start = ClientStore(algorithm, engine.world, draw).tensors.get("user", torch.zeros_like(learnt))
    assert (learnt != start).any(dim=1).all()


@pytest.mark.parametrize(
    "algorithm", [FedEM(floor=0.0), Local(), Random(), CentralMF(), FedAvgNCF(share_users=True)], ids=lambda algorithm: algorithm.name
)
def test_methods_without_a_shared_part_say_so_before_they_train(algorithm: Algorithm) -> None:
    with pytest.raises(UsageError, match=f"^{algorithm.name} "):
        new_users.check_before_training(algorithm, parts(), 0)


@pytest.mark.parametrize("n", [None, 9], ids=["everybody", "some"])
def test_fedem_sends_new_users_what_all_have_in_common(n: int | None) -> None:
    some = parts()
    new = some.cold_start
    assert new is not None
    algorithm = FedEM(dim=4, adapter=(8, 1), clients_per_round=n, merge="replace")
    new_users.check_before_training(algorithm, some, 0)
    federation = Federation.start(algorithm, some, 0, kernel="off")
    federation.next_round()
    server = federation.server
    here = federation.visits > 0
    common = federation.store.tensors["items"][torch.from_numpy(here)].mean(0)  # as they were uploaded
    torch.testing.assert_close(server["common"], common)
    without = {name: value for name, value in server.items() if name != "common"}  # a run that expected no new users
    assert algorithm.for_new_users(without)["items"].shape == common.shape
    found = new_users.metrics(federation.engine, server, new, rounds=1)
    user = ClientStore(algorithm, world_of(new), Draw(0)).tensors["user"]  # stays as it is: the server has answered
    ranks = []
    for u, scores in enumerate(user @ common.T):
        others = np.setdiff1d(new.test_candidates[u], new.test_item[u])
        ranks.append(1 + int((scores[others] >= scores[new.test_item[u]]).sum()))
    assert found["mrr"] == pytest.approx(np.mean(1 / np.array(ranks)), abs=1e-9)


def test_popularity_needs_no_learning() -> None:
    some = parts()
    new = some.cold_start
    assert new is not None
    federation = Federation.start(Popularity(), some, 0)
    federation.next_round()
    found = new_users.metrics(federation.engine, federation.server, new)
    count = np.bincount(some.train_item, minlength=some.items)
    rank = 1 + (count[new.test_candidates] >= count[new.test_item][:, None]).sum(axis=1)
    expected = {name: float(values.mean()) for name, values in client_metrics(rank).items()}
    assert {name: found[name] for name in expected} == pytest.approx(expected) and found["clients"] == 8


def test_new_items_are_counted_and_ranked() -> None:
    some = parts()
    ranks = popularity_ranks(some)
    found = new_item_metrics(some, {"test": ranks["test"], "full_test": ranks["full_test"]})
    trained = set(some.train_item.tolist())
    mine = np.array([int(item) not in trained for item in some.test_item])
    assert found["items"] == some.items - len(trained) and found["clients"] == mine.sum() > 0
    assert found["hr_10"] == pytest.approx((ranks["test"][mine] <= 10).mean())
    known = replace(some, test_item=np.full_like(some.test_item, some.train_item[0]))
    assert new_item_metrics(known, ranks) == {"items": found["items"], "clients": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that kept a fifth of the users out."""
    out = tmp_path_factory.mktemp("runs") / "new"
    run(resolve([*f"--algo fedrecon {DATA} --dim 8 --rounds 3 --new-users 0.2".split(), "--out", str(out)]))
    return out


def test_a_run_reports_new_users_beside_its_own(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["clients"], summary["new_user"]["clients"], summary["protocol_fields"]["new_users"]) == (32, 8, 0.2)
    assert len(pd.read_parquet(folder / "per_client.parquet")) == 32
    named = final_metrics(summary, {})
    assert named["new_user/hr_10"] == summary["new_user"]["hr_10"] and named["new_item/hr_10"] == summary["new_item"]["hr_10"]
    assert main(["evaluate", "--run", str(folder), "--new-users"]) == 0
    *_, columns, trained, new = capsys.readouterr().out.splitlines()
    assert columns.split()[:2] == ["HR@10", "NDCG@10"]
    for line, part in ((trained, "test"), (new, "new_user")):
        assert line.split("users")[1].split()[:2] == [f"{summary[part][name]:.4f}" for name in ("hr_10", "ndcg_10")]
    assert main(["report", str(folder), "--out", str(tmp_path)]) == 0
    assert "New users" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_closed_form_finds_for_a_history_what_it_finds_for_the_user(folder: Path) -> None:
    loaded = saved_model.load(folder)
    assert not set(loaded.split.user_ids) & set(loaded.split.cold_start.user_ids if loaded.split.cold_start else [])
    mine = loaded.split.train_item[: loaded.split.train_ptr[1]]
    as_new = loaded.with_history(mine[::-1].astype(np.int64), np.ones(len(mine)))
    known = loaded.recommend(np.array([0]), 50).set_index("item")["score"]
    found = as_new.recommend(np.array([0]), as_new.split.items).set_index("item")["score"]
    np.testing.assert_allclose(found[known.index], known, rtol=1e-5)
    assert not set(loaded.split.item_ids[mine].astype(str)) & set(found.index)


def test_a_history_file(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = saved_model.load(folder).split.item_ids.astype(str)
    table = tmp_path / "seen.csv"

    def ask(text: str) -> tuple[int, str, str]:
        table.write_text(text)
        code = main(["recommend", "--run", str(folder), "--history", str(table), "-k", "5"])
        return code, *capsys.readouterr()

    code, plain, said = ask("item\n" + "\n".join(ids[:4]) + "\n")
    assert code == 0 and "4 items that this user has (in the file)" in plain and not said
    assert len(plain.splitlines()) == 9 and not {line.split()[1] for line in plain.splitlines()[4:]} & set(ids[:4])
    code, again, said = ask("item,rating\n" + "\n".join(f"{item},5" for item in [*ids[:4], "nothing", ids[0]]) + "\n")
    assert code == 0 and again == plain and "1 of 6 items are not in synthetic and are skipped: nothing" in said
    code, _, said = ask("item\nnothing\nnowhere\n")
    assert code == 3 and "none of its items is in synthetic (nothing, nowhere)" in said
    code, _, said = ask("item,rating\n1,good\n")
    assert code == 3 and f"{table}:2: rating 'good' is not a number" in said
    code, _, said = ask("")
    assert code == 3 and "is empty; rows are item[,rating]" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (f"train --algo fedem --floor 0 {DATA} --new-users 0.1 --out {{out}}", "fedem cannot serve users who were not in training"),
        (f"train --algo fedmf {DATA} --new-users 1 --out {{out}}", "--new-users must be a share below 1"),
        (f"train --algo fedrec_mf {DATA} --new-users 0.1 --out {{out}}", "--new-users is for rankings"),
        ("evaluate --new-users", "--run is missing"),
        ("evaluate --run {folder} --rounds 0", "--rounds must be at least 1"),
        ("evaluate --run {folder} --new-user", "unknown flag --new-user; did you mean --new-users?"),
    ],
)
def test_errors_are_one_line(words: str, said: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.format(folder=folder, out=tmp_path / "out").split()) == 2
    printed = capsys.readouterr()
    assert said in printed.err and printed.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_run_with_everybody_in_training_has_no_new_users(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(resolve([*f"--algo random {DATA}".split(), "--out", str(tmp_path / "all")]))
    capsys.readouterr()
    assert main(["evaluate", "--run", str(tmp_path / "all"), "--new-users"]) == 2
    assert "all users were in training; train with --new-users 0.1" in capsys.readouterr().err
    (tmp_path / "seen.csv").write_text("0\n1\n")
    assert main(["recommend", "--run", str(tmp_path / "all"), "--history", str(tmp_path / "seen.csv")]) == 2
    assert "random cannot serve users who were not in training" in capsys.readouterr().err
