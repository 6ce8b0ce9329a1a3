"""A trained model is used: it recommends what its own scores say, by the dataset's ids, and nothing that a user has met."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from fedbench.__main__ import main
from fedbench.experiment import saved_model
from fedbench.experiment.run import run
from fedbench.settings.command_line import resolve
from fedbench.simulation.federation import Federation
from fedbench.simulation.sending import sent_whole

DATA = "--dataset synthetic --users 40 --items 150 --interactions 12 --data-seed 3 --no-mlflow --quiet"
METHODS = {
    "fedmf": "--dim 8 --rounds 2",
    "fedem": "--dim 4 --adapter 8,1 --rounds 2 -e 2 -n 30",
    "fedrecon": "--dim 8 --rounds 2",
    "fedrec_mf": "--dim 4 --rounds 2 --fold 0",
    "central_mf": "--dim 4 --rounds 2",
    "popularity": "",
    "random": "",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of a small finished run of each method, trained when it is first asked for."""
    parent = tmp_path_factory.mktemp("runs")

    def folder(method: str) -> Path:
        if not (parent / method).exists():
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # not into what the test looks at
                run(resolve([*f"--algo {method} {METHODS[method]} {DATA}".split(), "--out", str(parent / method)]))
        return parent / method

    return folder


def ask(*words: str | Path) -> int:
    return main(["recommend", *map(str, words)])


def one_by_one(loaded: saved_model.Model, k: int) -> list[tuple[str, int, str, float]]:
    """User, rank, item and score as the algorithm's own `score` gives them, client after client."""
    algorithm, split = loaded.config.algorithm, loaded.split
    federation = Federation.start(algorithm, split, loaded.config.seed, kernel="off")
    federation.server, federation.round = loaded.server, loaded.round
    own = federation.private().tensors if algorithm.reconstructs else loaded.store.tensors
    answer, rows = algorithm.answer(loaded.server), []
    trained = {int(item) for item in split.train_item}
    for u, user in enumerate(split.user_ids):
        has = answer.slot is None or bool(answer.slot[u] >= 0)
        sent = {name: value[0] for name, value in sent_whole(answer, torch.tensor([u])).items()} if has else {}
        score = algorithm.score({name: value[u] for name, value in own.items()}, sent)
        met = {int(item) for item in split.seen_item[split.seen_ptr[u] : split.seen_ptr[u + 1]]}
        free = sorted((i for i in range(split.items) if i in trained and i not in met), key=lambda i: (-float(score[i]), i))
        rows += [(str(user), rank, str(split.item_ids[i]), float(score[i])) for rank, i in enumerate(free[:k], start=1)]
    return rows


@pytest.mark.parametrize("method", METHODS)
def test_everybody_gets_the_best_of_what_they_have_not_met(method: str, folders: Any, tmp_path: Path) -> None:
    assert ask("--run", folders(method), "--all", "-k", 7, "--out", tmp_path / "all.parquet") == 0
    found = pd.read_parquet(tmp_path / "all.parquet")
    expected = pd.DataFrame(one_by_one(saved_model.load(folders(method)), 7), columns=["user", "rank", "item", "score"])
    found, expected = (table.sort_values(["user", "rank"], ignore_index=True) for table in (found, expected))
    assert found[["user", "rank"]].equals(expected[["user", "rank"]].astype({"rank": "int32"}))
    np.testing.assert_allclose(found["score"], expected["score"], rtol=1e-5, atol=1e-6)
    same = found["item"] == expected["item"]  # two scores that differ in their last bits may change places
    assert same.mean() > 0.99
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.parquet"]


def test_one_user_gets_what_all_get(folders: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loaded = saved_model.load(folders("fedmf"))
    user = str(loaded.split.user_ids[5])
    expected = loaded.recommend(np.arange(loaded.split.clients), 4).query("user == @user")
    assert ask("--run", folders("fedmf"), "--user", user, "-k", 4) == 0
    head, left_out, _, columns, *rows = capsys.readouterr().out.splitlines()
    assert f"for user {user}, 4 of" in head and f"{int(np.diff(loaded.split.seen_ptr)[5])} items that this user has" in left_out
    assert columns.split() == ["rank", "item", "score"]
    assert [row.split()[1] for row in rows] == expected["item"].to_list()
    assert ask("--run", folders("fedmf"), "--user", user, "-k", 4, "--out", tmp_path / "one.parquet") == 0
    assert pd.read_parquet(tmp_path / "one.parquet")["item"].to_list() == expected["item"].to_list()


def test_titles_and_the_order_asked_for(folders: Any) -> None:
    loaded = saved_model.load(folders("fedmf"))
    titled = saved_model.Model(
        **{**vars_of(loaded), "item_names": np.array([f"film {item}" for item in loaded.split.item_ids], dtype=object)}
    )
    found = titled.recommend(np.array([7, 3]), 2)
    assert found["user"].to_list() == [str(loaded.split.user_ids[u]) for u in (7, 7, 3, 3)]
    assert found["title"].to_list() == [f"film {item}" for item in found["item"]]


def vars_of(loaded: saved_model.Model) -> dict[str, Any]:
    return {name: getattr(loaded, name) for name in ("config", "split", "known", "item_names", "server", "store", "round")}


def test_what_nobody_trained_on_is_not_recommended(folders: Any) -> None:
    loaded = saved_model.load(folders("popularity"))
    everything = loaded.recommend(np.array([0]), loaded.split.items)
    met = int(np.diff(loaded.split.seen_ptr)[0])
    mine = loaded.split.seen_item[:met]
    assert len(everything) == loaded.known.sum() - loaded.known[mine].sum()
    assert (everything["score"] > 0).all()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--run {run}", "say for whom: --user ID, --all or --history FILE"),
        ("--user 1", "--run is missing"),
        ("--run {run} --user 1 --all", "say for whom"),
        ("--run {run} --all", "--all needs --out FILE.parquet"),
        ("--run {run} --all --out x.csv", "must end in .parquet"),
        ("--run {run} --user nobody", "--user nobody: not among the 40 users"),
        ("--run {run} --user 1 -k 0", "-k 0: must be from 1 to"),
        ("--run {run} --user 1 -k 9999", "-k 9999: must be from 1 to"),
        ("--run {run} --user 1 -k many", "-k"),
        ("--run {run} --user 1 --kk 3", "unknown flag --kk"),
        ("--run {run}/.. --user 1", "give one of the runs in it"),
        ("--run {empty} --user 1", "there is no run (no config.json)"),
    ],
)
def test_errors_are_one_line(words: str, said: str, folders: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(*words.format(run=folders("fedmf"), empty=tmp_path).split()) == 2
    printed = capsys.readouterr()
    assert said in printed.err and printed.err.count("\n") == 1 and not printed.out
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_state_or_with_other_data_is_refused(folders: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(resolve([*f"--algo popularity {DATA} --keep-state none".split(), "--out", str(tmp_path / "bare")]))
    assert ask("--run", tmp_path / "bare", "--user", "1") == 2
    assert "it ran with --keep-state none; train again without that" in capsys.readouterr().err
    table = tmp_path / "own.csv"
    table.write_text("user,item\n" + "".join(f"{u},{i}\n" for u in range(9) for i in range(u, u + 6)))
    run(resolve(["--algo", "popularity", "--dataset", str(table), "--no-mlflow", "--quiet", "--out", str(tmp_path / "own")]))
    assert ask("--run", tmp_path / "own", "--user", "3", "-k", "2") == 0
    table.write_text(table.read_text() + "3,1\n")
    assert ask("--run", tmp_path / "own", "--user", "3") == 3
    assert "its data checksum is" in capsys.readouterr().err


def test_nothing_half_written(folders: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask("--run", folders("fedmf"), "--all", "--out", tmp_path / "missing" / "all.parquet") == 2
    assert "cannot be written" in capsys.readouterr().err
    assert ask("--run", folders("fedmf"), "--all", "-k", "0", "--out", tmp_path / "all.parquet") == 2
    assert list(tmp_path.iterdir()) == []
