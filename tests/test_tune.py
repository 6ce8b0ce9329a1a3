"""Searches: what they try, that they never look at test, that a kill loses nothing, and the recipe that comes of them."""

from __future__ import annotations

import ast
import json
import multiprocessing
import os
import random
import signal
import threading
import time
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedbench.contract import registry
from fedbench.contract.search import search_space
from fedbench.errors import UsageError
from fedbench.settings import command_line
from fedbench.settings.recipes import place, tuned_fields
from fedbench.simulation.scoring import Evaluator
from fedbench.tracking import mirror_process
from fedbench.tuning import figures, running, search, trial, tune, worker, workers
from fedbench.tuning.space import read_span

ROOT = Path(__file__).parents[1]
TRIALS = 8
DATA = "--dataset synthetic --users 60 --items 150 --interactions 12"
WORDS = f"--algo fedmf {DATA} --rounds 9 --threads 1 --kernel off --quiet --trials {TRIALS}"
KILLS = int(os.environ.get("FEDBENCH_KILLS", "1"))
"""searches that are killed twice, at random moments"""


class InThreads(workers.Workers):
    """Workers that are threads of this process: one that runs trials has nothing to import then."""

    def start(self) -> workers.Worker:
        (orders, told), (answers, said) = os.pipe(), os.pipe()
        process = StandIn(os.fdopen(told, "w"), os.fdopen(answers))
        given = str(self.folder / "config.json"), self.algo, str(self.folder)
        made = workers.Worker(process, self.folder / "log")  # type: ignore[arg-type]

        def work() -> None:
            with suppress(ValueError, OSError), os.fdopen(orders) as hear, os.fdopen(said, "w") as say:
                worker.main(*given, hear, say)

        threading.Thread(target=work, daemon=True).start()
        threading.Thread(target=self._listen, args=(made,), daemon=True).start()
        self.all.append(made)
        return made


class StandIn:
    """What a Worker needs of a process."""

    def __init__(self, stdin: Any, stdout: Any) -> None:
        self.stdin, self.stdout = stdin, stdout

    def kill(self) -> None:
        with suppress(OSError):
            self.stdin.close()

    def wait(self) -> int:
        return 0


@pytest.fixture
def in_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(tune, "Workers", InThreads)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def undrawn(in_threads: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Without figures, which take longer than the trials."""
    monkeypatch.setattr(figures, "draw", lambda *_: None)
    return in_threads


def found_in(out: Path) -> list[dict[str, Any]]:
    """Every trial, the time that it took aside."""
    files = sorted((out / "trials").glob("*/trial.json"))
    return [{key: value for key, value in json.loads(file.read_text()).items() if key != "seconds"} for file in files]


def search_in(out: Path, more: str = "") -> list[dict[str, Any]]:
    assert tune.main([*WORDS.split(), *more.split(), "--no-mlflow", "--out", str(out)]) == 0
    return found_in(out)


# ---- what a search does ----------------------------------------------------------------------------------------------------


def test_a_search_leaves_trials_figures_and_a_recipe_that_train_takes(in_threads: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = search_in(in_threads / "s")
    assert [one["number"] for one in found] == list(range(TRIALS))
    assert len({json.dumps(one["values"]) for one in found}) == TRIALS
    assert found[0]["values"]["lr"] == 0.02 and found[0]["how"] == "complete", "first the settings that are there"
    assert {one["how"] for one in found} == {"complete", "pruned"}
    told = json.loads((in_threads / "s" / "search.json").read_text())
    best, visits = search.best_of(found), sum(one["visits"] for one in found)
    assert best is not None and told["best"]["number"] == best["number"] and told["visits"] == visits
    said = capsys.readouterr().out
    assert f"budget  {TRIALS} trials of at most 9 rounds, so at most {TRIALS * 9 * 60:,} client visits" in said
    assert f"spent   {TRIALS} trials, {visits:,} client visits" in said
    assert all((in_threads / "s" / f"{name}.png").stat().st_size > 5000 for name in ("history", "importance", "slice"))
    # the recipe
    content = tomllib.loads((in_threads / "recipes" / "synthetic" / "fedmf.toml").read_text())
    head = content["search"]
    assert (head["trials"], head["visits"], head["seed"], head["value"]) == (TRIALS, visits, 0, best["value"])
    assert head["curve"] == search.digest(best["curve"]) and len(head["commit"]) == 40
    assert (head["dataset"], head["protocol"]) == ("synthetic", "clean")
    (in_threads / "recipes" / "synthetic" / "fedmf.toml").unlink()
    assert search_in(in_threads / "s") == found, "nothing is left to run"
    assert tomllib.loads((in_threads / "recipes" / "synthetic" / "fedmf.toml").read_text()) == content
    config = command_line.resolve(f"--algo fedmf {DATA} --recipe tuned".split())
    assert config.recipe == "tuned" and config.algorithm.rounds == 9
    assert all(getattr(config.algorithm, name) == value for name, value in best["values"].items())
    assert command_line.resolve(f"--algo fedmf {DATA} --recipe tuned --lr 0.5".split()).algorithm.lr == 0.5  # type: ignore[attr-defined]
    # a config with all values is read where there is no recipe, and gives way to another recipe
    (in_threads / "c.json").write_text(json.dumps(config.to_dict()))
    (in_threads / "recipes" / "synthetic" / "fedmf.toml").unlink()
    assert command_line.resolve(["--config", "c.json"]).digest() == config.digest()
    plain = command_line.resolve(f"--algo fedmf {DATA}".split())
    assert command_line.resolve(["--config", "c.json", "--recipe", "clean", "--rounds", "100"]).algorithm == plain.algorithm
    with pytest.raises(UsageError, match="no recipes/synthetic/fedmf.toml; `python -m fedbench tune --algo fedmf --dataset synthetic`"):
        command_line.resolve(f"--algo fedmf {DATA} --recipe tuned".split())


def test_more_trials_go_on_and_other_flags_are_refused(undrawn: Path) -> None:
    before = search_in(undrawn / "s", "--trials 3")
    assert search_in(undrawn / "s", "--trials 5")[:3] == before
    assert len(search_in(undrawn / "s", "--trials 5 --jobs 2")) == 5
    with pytest.raises(UsageError, match="other flags or ranges"):
        search_in(undrawn / "s", "--seed 1")


def test_a_small_space_is_exhausted_and_a_setting_that_is_refused_costs_a_trial(undrawn: Path) -> None:
    fixed = "--dim 8 --average sum --server sgd --server-lr 1 --optimizer adam --lr 0.02 --init-scale 0.1 --negatives 2"
    found = search_in(undrawn / "s", f"{fixed} --space local_epochs=1,2 lr_items=0.3,0.5")
    assert len(found) == len({json.dumps(one["values"]) for one in found}) < TRIALS
    assert {one["how"] for one in found} >= {"refused"} and all(one["visits"] == 0 for one in found if one["how"] == "refused")


# ---- test is never looked at -----------------------------------------------------------------------------------------------


def bench(words: str, monkeypatch: pytest.MonkeyPatch, other_tests: bool = False) -> trial.Bench:
    """The data of a search; `other_tests`: with test items and candidates that mean nothing."""
    if other_tests:
        prepared = trial.prepare_checked

        def changed(config: Any, device: str) -> Any:
            split, data = prepared(config, device)
            chance = np.random.default_rng(0)
            for name in ("test_item", "test_candidates"):
                getattr(split, name)[:] = chance.integers(0, split.items, getattr(split, name).shape)
            return split, data

        monkeypatch.setattr(trial, "prepare_checked", changed)
    return trial.Bench.prepared(command_line.resolve(words.split()))


@pytest.mark.parametrize("algo", ["fedmf", pytest.param("fedem", marks=pytest.mark.long), "fedrecon", "central_mf"])
def test_the_test_split_is_never_scored(algo: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only validation items and their candidates are given to `score`; and with other test items a trial says the same, bit for bit."""
    words = f"--algo {algo} {DATA} --rounds 2 --threads 1 --kernel off --quiet"
    asked: list[np.ndarray] = []
    scores = Evaluator.scores

    def recorded(self: Evaluator, store: Any, answer: Any, clients: Any, sent: bool, items: Any = None) -> Any:
        split = self.split
        assert items is not None, "a ranking among all items"
        at = clients.numpy()
        # the rehearsal asks for the same candidates in another order too
        expected = np.concatenate([split.val_item[at, None], split.val_candidates[at]], axis=1)
        assert np.array_equal(np.sort(items.numpy(), axis=1), np.sort(expected, axis=1))
        asked.append(at)
        return scores(self, store, answer, clients, sent, items)

    monkeypatch.setattr(Evaluator, "scores", recorded)
    lines: list[list[dict[str, float]]] = []
    for other in (False, True):
        told: list[dict[str, float]] = []
        ended = bench(words, monkeypatch, other).run({}, lambda line, value, told=told: bool(told.append(line)), tmp_path)  # type: ignore[misc]
        assert ended.how == "complete", ended.error
        lines.append([{key: value for key, value in line.items() if key != "seconds"} for line in told])
    assert asked and lines[0] == lines[1] and len(lines[0]) == 2
    assert not [key for line in lines[0] for key in line if "test" in key]


def test_the_code_of_a_search_does_not_name_test() -> None:
    """By reading it: no word `test` or `test/...`, nothing that holds test items but what takes them out, no summary of a run."""
    for file in sorted((ROOT / "fedbench" / "tuning").glob("*.py")):
        tree = ast.parse(file.read_text())
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        words = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in docs]
        assert not [word for word in words if isinstance(word, str) and (word == "test" or "test/" in word)], file
        names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} | {
            alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
        }
        assert not {name for name in names if "test" in name.split("_")} - {"without_test"}, file
        assert not names & {"summarise", "full_ranks", "rank_all", "ranking_results"}, file


# ---- kills -----------------------------------------------------------------------------------------------------------------


def started(out: Path) -> Any:
    """A search in a process of its own, forked from one that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.test_tune"])
    process = context.Process(target=whole_life, args=(str(out),))
    process.start()
    return process


def whole_life(out: str) -> None:
    os.chdir(Path(out).parent)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    tune.Workers = InThreads  # type: ignore[misc]
    figures.draw = lambda *_: None  # type: ignore[assignment]
    tune.main([*WORDS.split(), "--no-mlflow", "--out", out])


@pytest.mark.parametrize("run", range(KILLS))
def test_a_killed_search_equals_the_undisturbed_one(run: int, undrawn: Path) -> None:
    out, chance = undrawn / "s", random.Random(run)
    for _ in range(2):
        process = started(out)
        # some trials further than before, and a little
        wanted, deadline = len(found_in(out)) + chance.randrange(3), time.monotonic() + 300
        while process.is_alive() and (len(found_in(out)) < wanted or not (out / search.JOURNAL).exists()):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.05))
        os.kill(process.pid, signal.SIGKILL)
        process.join(300)
    with (out / search.JOURNAL).open("ab") as journal:
        # as a kill in mid-write leaves it
        journal.write(b'{"op_code":6,"wor')
    assert search_in(out) == search_in(undrawn / "undisturbed")


def test_a_trial_whose_worker_dies_is_begun_again_and_given_up_the_second_time(undrawn: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deaths = {0: 1, 2: 2}
    assign = running.Runner._assign

    def dying(self: running.Runner, one: workers.Worker) -> None:
        assign(self, one)
        if one.trial is not None and deaths.get(one.trial.trial.number, 0):
            deaths[one.trial.trial.number] -= 1
            one.process.kill()

    monkeypatch.setattr(running.Runner, "_assign", dying)
    monkeypatch.setattr(workers.Worker, "error", lambda self: "killed by SIGKILL")
    monkeypatch.setattr(workers.Worker, "tell", told_unless_dead)
    found = search_in(undrawn / "s", "--trials 4")
    assert [one["how"] == "failed" for one in found] == [False, False, True, False] and found[2]["error"] == "killed by SIGKILL"


def told_unless_dead(self: workers.Worker, **word: Any) -> None:
    with suppress(OSError, ValueError):
        self.process.stdin.write(json.dumps(word) + "\n")  # type: ignore[union-attr]
        self.process.stdin.flush()  # type: ignore[union-attr]


def test_the_recipes_that_come_with_fedbench_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from another folder, and each says where it comes from."""
    monkeypatch.chdir(tmp_path)
    found = sorted((ROOT / "recipes").glob("*/*.toml"))
    assert found
    for path in found:
        head = tomllib.loads(path.read_text())["search"]
        assert (head["dataset"], head["algo"]) == (path.parent.name, path.stem) and head["trials"] > 9 and head["visits"] > 0
        fields = tuned_fields(registry.algorithm(path.stem), path.parent.name)
        assert fields and search_space(registry.algorithm(path.stem)).keys() & fields.keys()


# ---- processes and MLflow --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_each_trial_is_a_child_in_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a worker that is a process, as it is outside of these tests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    line = [*WORDS.split(), "--trials", "3", "--experiment", "tuning", "--out", str(tmp_path / "s")]
    assert tune.main(line) == 0
    assert tune.main(line) == 0, "nothing is run or copied again"
    client = mirror_process.import_client()(f"sqlite:///{tmp_path}/mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name("tuning").experiment_id])
    (parent,) = (run for run in runs if run.data.tags["kind"] == "search")
    children = {run.info.run_name: run for run in runs if run.data.tags["kind"] == "trial"}
    assert set(children) == {"trial 0", "trial 1", "trial 2"} and len(runs) == 4
    assert {run.data.tags["mlflow.parentRunId"] for run in children.values()} == {parent.info.run_id}
    for one in found_in(tmp_path / "s"):
        metrics = children[f"trial {one['number']}"].data.metrics
        assert metrics["best/val/ndcg_10"] == one["value"] and not [name for name in metrics if "test" in name]
    assert {file.path for file in client.list_artifacts(parent.info.run_id)} >= {"history.png", "importance.png", "slice.png"}


# ---- the command line ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "says"), [
    ("--space lr=log:0:1", "must begin over 0"),
    ("--space lr=0.1", "to hold it fixed write --lr 0.1"),
    ("--space lrr=0:1", "fedmf has no such field; did you mean lr"),
    ("--space optimizer=adam,sgdd", "must be one of adam, sgd"),
    ("--space rounds=1:9", "how much a trial may spend"),
    ("--space lr", "write name=low:high"),
    ("--lr 0.1 --space lr=0.1:1", "--lr is given too"),
    ("--protocol published", "tune chooses on validation alone"),
    ("--seeds 0-2", "trains with one seed"),
    ("--trials 0", "must be a whole number from 1"),
    ("--trails 9", "unknown flag --trails"),
])  # fmt: skip
def test_a_bad_line_is_one_error(words: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=says):
        tune.read(f"--algo fedmf {DATA} --out {tmp_path / 's'} {words}".split())
    assert not (tmp_path / "s").exists()


def test_a_split_without_validation_is_refused() -> None:
    with pytest.raises(UsageError, match="--split kfold has none"):
        trial.Bench.prepared(command_line.resolve(f"--algo fedrec_mf {DATA} --split kfold --fold 0".split()))


def test_what_has_nothing_to_search_says_so() -> None:
    with pytest.raises(UsageError, match="popularity declares nothing to search"):
        tune.read(f"--algo popularity {DATA}".split())


def test_spans_of_the_command_line_overrule_and_fixed_flags_leave_the_space() -> None:
    plan = tune.read(f"--algo fedmf {DATA} --dim 8 --space lr=log:1e-3:0.3 batch-size=32,256 local_epochs=1:3".split())
    assert "dim" not in plan.space and str(plan.space["lr"]) == "0.001 to 0.3 by logarithm"
    assert plan.space["batch_size"].choices == (32, 256) and plan.space["local_epochs"].whole
    assert plan.config.eval_every == 5 and plan.out.parent == tune.PLACE
    assert read_span(type(plan.config.algorithm), "server=sgd,yogi")[1].choices == ("sgd", "yogi")
    assert place(Path("r"), type(plan.config.algorithm), "/data/my set.csv") == Path("r/my_set/fedmf.toml")
