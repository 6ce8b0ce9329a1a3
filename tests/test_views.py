"""Ready views in the MLflow UI: what they hold, and that they stay within the UI's limits. The browser test opens them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedbench.__main__ import main as fedbench_main
from fedbench.commands import ui
from fedbench.errors import FedbenchError, UsageError
from fedbench.tracking import mirror_process, views
from fedbench.tracking.views import View

ROOT = Path(__file__).parents[1]
RANKING = {"best/val/ndcg_10": 0.4, "best/test/ndcg_10": 0.5, "best/test/hr_10": 0.6, "summary/cohort": 40.0}
RATING = {"best/test/rmse": 0.9, "best/test/mae": 0.7}
CHILDREN = "tags.`mlflow.parentRunId` = 'abc'"


def run(metrics: dict[str, float] = RANKING, leaky: str = "no", **params: object) -> Any:
    words = {"algo": "fedmf", "dataset": "filmtrust", "protocol": "clean", "seed": "0", "threads": "1", "select_on": "val"}
    texts = {**words, **{key: str(value) for key, value in params.items()}}
    return SimpleNamespace(data=SimpleNamespace(params=texts, metrics=metrics, tags={"leaky": leaky}))


def grid(n: list[Any], e: list[int], seeds: int = 2, **more: Any) -> list[Any]:
    return [run(n=a, clients_per_round=a, e=b, local_epochs=b, seed=seed, **more) for a, b, seed in product(n, e, range(seeds))]


def view(runs: list[Any], *axes: str) -> View:
    return View.of("key", "a sweep", CHILDREN, runs, axes)


def charts(made: View) -> dict[str, dict[str, Any]]:
    return {chart["type"]: chart for chart in made.state()["compareRunCharts"]}


def test_n_and_e_are_groups_seeds_are_averaged_and_all_runs_shown() -> None:
    made = view(grid([50, 200], [1, 3]), "clients_per_round", "local_epochs", "seed")
    state, drawn = made.state(), charts(made)
    assert state["groupBy"] == {
        "aggregateFunction": "average",
        "groupByKeys": [{"mode": "param", "groupByData": "n"}, {"mode": "param", "groupByData": "e"}],
    }
    assert state["runsHiddenMode"] == "SHOW_ALL" and state["searchFilter"] == CHILDREN
    assert (state["orderByKey"], state["orderByAsc"]) == ("metrics.`best/test/ndcg_10`", False)
    # rounds are chosen on validation, results are those on test
    assert drawn["LINE"]["selectedMetricKeys"] == ["val/ndcg_10"] and drawn["BAR"]["metricKey"] == "best/test/ndcg_10"
    assert (drawn["PARALLEL"]["selectedParams"], drawn["PARALLEL"]["selectedMetrics"]) == (["n", "e"], ["best/test/ndcg_10"])
    assert [drawn["CONTOUR"][axis]["key"] for axis in ("xaxis", "yaxis", "zaxis")] == ["n", "e", "best/test/ndcg_10"]
    sections = {section["uuid"] for section in state["compareRunSections"]}
    assert {chart["metricSectionId"] for chart in drawn.values()} == sections


def test_n_all_stands_on_the_axes_as_the_clients_of_a_round() -> None:
    """The UI draws no words: it would leave such runs out of the contour, and refuse the parallel coordinates."""
    made = view(grid([50, "all"], [1, 3]), "clients_per_round", "local_epochs")
    drawn = charts(made)
    assert made.groups == ("n", "e")
    assert drawn["CONTOUR"]["xaxis"] == {"key": "summary/cohort", "type": "METRIC"}
    assert drawn["PARALLEL"]["selectedParams"] == ["e"]
    assert drawn["PARALLEL"]["selectedMetrics"] == ["summary/cohort", "best/test/ndcg_10"]


def test_groups_are_what_differs_and_no_setting_that_follows_from_another() -> None:
    methods = [run(algo=algo, alpha=alpha, threads=threads) for algo, alpha, threads in (("a", "0.1", 1), ("b", "0.2", 2))]
    assert view(methods).groups == ("algo",)
    assert view([*methods, run(algo="b", alpha="0.3")]).groups == ("algo", "alpha")
    assert view([run(seed=seed) for seed in range(3)], "seed", "fold").groups == ("algo",)
    many = [run(**{f"setting_{place}": place == one for place in range(9)}) for one in range(9)]
    assert len(view(many).groups) == views.MOST_KEYS


def test_the_fourth_chart_fits_the_axes() -> None:
    words = charts(view([run(algo=algo) for algo in ("a", "b")]))
    assert words["SCATTER"]["xaxis"] == {"key": "summary/bytes_up", "type": "METRIC"}
    assert words["PARALLEL"]["selectedParams"] == [] and len(words["PARALLEL"]["selectedMetrics"]) > 1
    assert charts(view([run(dim=dim) for dim in (4, 8)], "dim"))["SCATTER"]["xaxis"] == {"key": "dim", "type": "PARAM"}
    # of two algorithms on one grid a contour would show whichever point comes last
    assert "SCATTER" in charts(view([*grid([50, 200], [1, 3]), *grid([50, 200], [1, 3], algo="fedem")]))


def test_ratings_are_best_when_low_and_have_no_validation_to_show() -> None:
    made = view([run(RATING, dim=dim) for dim in (4, 8)], "dim")
    state = made.state()
    assert (state["orderByKey"], state["orderByAsc"]) == ("metrics.`best/test/rmse`", True)
    assert charts(made)["LINE"]["selectedMetricKeys"] == ["test/rmse"]


def test_leaky_runs_are_called_so_and_show_what_chose_their_round() -> None:
    leaky = [run(leaky="LEAKY", select_on="test", protocol="published", n=n) for n in (1, 2)]
    made = view(leaky)
    assert made.name == "a sweep LEAKY" and made.lines == "test"
    assert "LEAKY" in made.state()["compareRunSections"][0]["name"]
    both = view([*leaky, run(n=1)])
    assert both.name.endswith("(clean and LEAKY)") and "protocol" in both.groups


def test_runs_beyond_a_page_are_told_and_not_chosen_by_their_result() -> None:
    made = view(grid([*range(6)], [*range(6)], seeds=3), "clients_per_round", "local_epochs")
    assert "the first 100 of 108 runs" in made.name
    assert made.state()["orderByKey"] == "params.`seed`"
    assert len(made.state()["groupsExpanded"]) == 36 and made.state()["groupsExpanded"]["param.n.0,param.e.5"] is False
    assert len(made.value(1)) < views.LONGEST


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("views") / "mlflow.db"


@pytest.fixture
def store(database: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> tuple[Any, str]:
    """A client and the id of an experiment of the test's own."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database}")
    return mirror_process.open_store(request.node.name)


def kept(store: tuple[Any, str]) -> dict[str, Any]:
    tags = store[0].get_experiment(store[1]).tags
    return {key.removeprefix(views.TAG): json.loads(value) for key, value in tags.items() if key.startswith(views.TAG)}


def test_a_view_is_replaced_not_doubled_and_has_a_note(store: tuple[Any, str]) -> None:
    first = views.save(*store, view(grid([50], [1, 3]), "local_epochs"), now=1)
    again = views.save(*store, view(grid([50, 200], [1, 3]), "clients_per_round", "local_epochs"), now=2)
    assert first == again and again is not None and again.endswith("&viewStateShareKey=fedbench-key")
    assert {key: saved["createdAt"] for key, saved in kept(store).items()} == {"fedbench-key": 2}
    tags = store[0].get_experiment(store[1]).tags
    assert f"[a sweep]({again})" in tags[views.NOTE] and tags[views.LEADS] == "best/test/ndcg_10"


def test_the_oldest_of_ours_go_and_the_users_stay(store: tuple[Any, str]) -> None:
    client, experiment = store
    for number in range(4):
        client.set_experiment_tag(experiment, f"{views.TAG}mine-{number}", json.dumps({"name": "mine", "createdAt": 0, "state": "{}"}))
    client.set_experiment_tag(experiment, views.NOTE, "somebody's own words")
    for number in range(34):
        views.save(client, experiment, View.of(f"{number}", f"{number}", CHILDREN, grid([50], [1])), now=100 + number)
    names = kept(store)
    assert len(names) == views.MOST_VIEWS - views.ROOM and sum(name.startswith("mine-") for name in names) == 4
    assert "fedbench-2" not in names and {"fedbench-3", "fedbench-33"} <= names.keys()
    assert client.get_experiment(experiment).tags[views.NOTE] == "somebody's own words"


def test_a_view_that_is_too_long_for_a_tag_is_not_written(store: tuple[Any, str]) -> None:
    assert views.save(*store, View.of("long", "x", f"attributes.run_id IN ({'0' * views.LONGEST})", grid([50], [1]))) is None
    assert kept(store) == {}


def test_a_failure_is_a_warning(store: tuple[Any, str], caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> str:
        raise OSError("no such store")

    assert views.guarded(fail) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "plain link" in caplog.text


SEEDS = ["--algo", "popularity", "--dataset", "synthetic", "--users", "40", "--items", "80", "--interactions", "10", "--seeds", "0-1"]


@pytest.fixture(scope="module")
def seeds(database: Path) -> str:
    """What `train.py --seeds` printed."""
    env = {**os.environ, "MLFLOW_TRACKING_URI": f"sqlite:///{database}"}
    command = [sys.executable, str(ROOT / "train.py"), *SEEDS, "--out", "seeds", "--threads", "1", "--quiet"]
    done = subprocess.run(command, cwd=database.parent, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "MLflow" not in done.stderr, done.stderr
    return done.stdout


def test_seeds_have_a_parent_with_their_means_and_a_view(seeds: str, database: Path) -> None:
    client = mirror_process.import_client()(f"sqlite:///{database}")
    experiment = client.get_experiment_by_name("fedbench")
    (parent,) = client.search_runs([experiment.experiment_id], "tags.kind = 'seeds'")
    children = client.search_runs([experiment.experiment_id], f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'")
    assert {one.data.params["seed"] for one in children} == {"0", "1"} and parent.info.status == "FINISHED"
    summary = json.loads((database.parent / "seeds" / "summary.json").read_text())
    assert parent.data.metrics["mean/test/ndcg_10"] == pytest.approx(summary["test"]["ndcg_10"])
    assert "Mean on test: HR@10" in parent.data.tags[views.NOTE] and "± standard deviation" in parent.data.tags[views.NOTE]
    key = re.findall(r"^charts .*viewStateShareKey=(\S+)$", seeds, flags=re.MULTILINE)[-1]
    state = json.loads(json.loads(experiment.tags[views.TAG + key])["state"])
    assert parent.info.run_id in state["searchFilter"] and state["groupBy"]["groupByKeys"][0]["groupByData"] == "algo"


def test_a_report_has_a_view_of_its_runs(
    seeds: str, database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database}")
    runs = str(database.parent / "seeds")
    assert fedbench_main(["report", runs]) == 0
    key = capsys.readouterr().out.split("viewStateShareKey=")[1].strip()
    tags = mirror_process.import_client()(f"sqlite:///{database}").get_experiment_by_name("fedbench").tags
    state = json.loads(json.loads(tags[views.TAG + key])["state"])
    assert state["searchFilter"].count("'") == 4  # two runs by their ids
    # a store that is not there, or has not got these runs, is left alone
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'none.db'}")
    assert fedbench_main(["report", runs]) == 0
    assert "charts" not in capsys.readouterr().out and not (tmp_path / "none.db").exists()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def server(seeds: str, database: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    port = free_port()
    env = {**os.environ, "MLFLOW_TRACKING_URI": f"sqlite:///{database}", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "fedbench", "ui", "--port", str(port)]
    with subprocess.Popen(command, cwd=database.parent, env=env, stdout=subprocess.PIPE, text=True) as process:
        yield process, port
        process.kill()


@pytest.mark.slow
def test_the_ui_answers_when_it_says_so_and_ends_with_ctrl_c(
    server: tuple[subprocess.Popen[str], int], database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, port = server
    assert process.stdout is not None
    said = [process.stdout.readline() for _ in range(3)]
    assert said[1].startswith(f"charts  http://127.0.0.1:{port}/#/experiments/") and "viewStateShareKey=fedbench-all-runs" in said[1]
    assert said[2] == "ready (Ctrl-C ends it)\n" and ui.answers(f"http://127.0.0.1:{port}")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database}")
    with pytest.raises(UsageError, match=f"--port {port} cannot be used"):
        ui.main(["--port", str(port)])
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0 and not ui.answers(f"http://127.0.0.1:{port}")


def test_a_ui_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    sleeping = [sys.executable, "-c", "import time; print('busy', flush=True); time.sleep(600)"]

    def start(uri: str, port: int, output: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(sleeping, stdout=output, start_new_session=True)

    monkeypatch.setattr(ui, "start", start)
    monkeypatch.setattr(ui, "START_SECONDS", 5.0)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(FedbenchError, match="did not start: busy"):
            ui.serve("sqlite:///mlflow.db", free_port(), [])
    finally:
        signal.signal(signal.SIGTERM, before)
