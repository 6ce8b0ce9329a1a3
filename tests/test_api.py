"""fedbench from Python: keywords are flags, errors are raised, results are objects."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedbench
from fedbench import api
from fedbench.algorithms.fedmf import FedMF
from fedbench.errors import UsageError
from tests.test_imports import ROOT, run

SMALL: dict[str, Any] = {"dataset": "synthetic", "users": 30, "items": 160, "interactions": 8, "rounds": 2, "threads": 1, "kernel": "off"}
SMALL |= {"mlflow": False, "quiet": True}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> fedbench.Result:
    return fedbench.run(FedMF, out=tmp_path_factory.mktemp("api") / "one", n=5, e=np.int64(1), lr=0.03, **SMALL)


def test_a_run_comes_back_as_an_object(result: fedbench.Result, capsys: pytest.CaptureFixture[str]) -> None:
    assert result.test == json.loads((result.folder / "summary.json").read_text())["test"] and 0 <= result.test["ndcg_10"] <= 1
    assert result.val["hr_10"] >= 0 and len(result.per_client) == 30 and list(result.rounds["round"]) == [1, 2]
    told = {key: result.config[key] for key in ("algo", "clients_per_round", "local_epochs", "lr", "mlflow")}
    assert told == {"algo": "fedmf", "clients_per_round": 5, "local_epochs": 1, "lr": 0.03, "mlflow": False}
    assert len(result.recommend(user=1, k=3)) == 3 and len(result.recommend(k=2)) == 60
    assert result.plot().axes and "fedmf" in repr(result)
    assert "popularity" in result._repr_html_() and "<table" in result._repr_html_()
    with pytest.raises(UsageError, match="--user nobody: not among the 30 users"):
        result.recommend(user="nobody")
    assert fedbench.load(result.folder).summary == result.summary
    assert capsys.readouterr().out == ""


def test_the_same_call_finds_the_finished_run(result: fedbench.Result) -> None:
    before = (result.folder / "summary.json").stat().st_mtime_ns
    again = fedbench.run("FedMF", out=result.folder, n=5, e=1, lr=0.03, **SMALL)
    assert again.test == result.test and (result.folder / "summary.json").stat().st_mtime_ns == before


@pytest.mark.long
def test_several_seeds_and_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    several = fedbench.run("popularity", seeds=range(2), **SMALL)
    assert [one.summary["seed"] for one in several.runs] == [0, 1] and several.folder.parts[0] == "runs"
    assert len(several.per_client) == 60 and set(several.per_client["seed"]) == {0, 1}
    assert several.test["hr_10"] == pytest.approx(np.mean([one.test["hr_10"] for one in several.runs]))
    swept = fedbench.sweep(algo="random", seed=[0, 1], jobs=2, out="s", **{**SMALL, "rounds": 1})
    assert len(swept.table) == len(swept.runs) == 2 and {one.summary["seed"] for one in swept.runs} == {0, 1}
    page = fedbench.report([several, "s"], out="r")
    assert page == Path("r/report.html") and page.is_file()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"algo": "fedmf", "ruonds": 3}, "unknown flag --ruonds; did you mean --rounds?"),
        ({"algo": "fedmff"}, "no such algorithm; did you mean fedmf"),
        ({"algo": "fedmf", "dataset": None}, "--dataset is missing"),
        ({"algo": "fedmf", "lr": "high"}, "--lr must be a number"),
        ({"algo": "fedmf", "lr": {}}, "lr must be a number, a word, True, False or a list of them, not dict"),
        ({"algo": "fedmf", "list": True}, "list is for the command line"),
        ({"algo": int}, "algo must be a name"),
    ],
)
def test_a_wrong_word_is_an_error_that_is_raised(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as error:
        fedbench.run(**{"dataset": "synthetic", **flags})
    assert said in str(error.value) and error.value.exit_code == 2


def test_a_class_of_no_file_is_refused() -> None:
    @dataclass(frozen=True)
    class Mine(FedMF):
        pass

    Mine.__module__ = "__main__"
    with pytest.raises(UsageError, match="put it into a .py file of its own"):
        fedbench.run(Mine, "synthetic")


def test_values_are_written_as_the_command_line_has_them() -> None:
    given = {"n": 5, "lr": 0.1, "layers": (32, 16), "refit": True, "mlflow": False, "out": Path("a b"), "seeds": range(2)}
    words = ["--clients-per-round=5", "--lr=0.1", "--layers=32,16", "--refit", "--no-mlflow", "--out=a b", "--seeds=0,1"]
    assert api._words(given) == words
    assert api._words({"e": [1, 3], "layers": [(8, 4), (2,)]}, axes=True) == ["--local-epochs", "1", "3", "--layers", "8,4", "2"]


def test_import_is_light_and_names_stay_functions() -> None:
    code = """
import sys, fedbench
assert not {"torch", "numpy", "pandas", "numba", "mlflow"} & set(sys.modules)
assert {"run", "sweep", "load", "report"} <= set(dir(fedbench))
import fedbench.experiment.run, fedbench.sweeping.sweep, fedbench.reporting.report, fedbench.algorithms.fedmf, fedbench.datasets.rows
from fedbench import algorithms, run
assert all(callable(getattr(fedbench, name)) for name in ("run", "sweep", "load", "report", "algorithms", "datasets"))
assert run is fedbench.run and fedbench.run.__module__ == "fedbench.api"
assert "fedmf" in fedbench.algorithms() and "ml-100k" in fedbench.datasets() and algorithms.fedmf.FedMF
"""
    done = run(code, ROOT)
    assert done.returncode == 0 and done.stderr == "", done.stderr


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(ROOT / "docs" / "quickstart.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert {"text/html", "image/png"} <= kinds and "did you mean --rounds?" in outputs[-1]["text"]
    assert (tmp_path / "report" / "report.html").is_file()


def test_windows_is_told_in_one_line() -> None:
    code = "import shutil, sys, tempfile; sys.platform = 'win32'; import fedbench"  # newer Pythons look at it in these
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "Windows" in done.stderr
