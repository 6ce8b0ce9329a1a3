"""Names to import by: ours, those of before, and those of others, for `datasets` is also a well-known package."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedbench import old_names

ROOT = Path(__file__).parents[1]


def run(code: str, cwd: Path, *path: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def stand_in(place: Path, name: str) -> None:
    """A package of others that has a name of our folders."""
    (place / name).mkdir(parents=True)
    (place / name / "__init__.py").write_text("from .deep import load_dataset\n")
    (place / name / "deep.py").write_text("def load_dataset(): return 'theirs'\n")


BOTH = """
import datasets, algorithms, algorithms.deep
print(datasets.load_dataset(), algorithms.deep.load_dataset())
from fedbench.contract import registry
from fedbench.algorithms.fedmf import FedMF
assert registry.algorithms()["fedmf"] is FedMF
print(*registry.datasets())
print(datasets.load_dataset(), algorithms.load_dataset())
"""


@pytest.mark.parametrize("first", [True, False])
def test_our_datasets_and_a_package_of_that_name_live_side_by_side(tmp_path: Path, first: bool) -> None:
    stand_in(tmp_path, "datasets")
    stand_in(tmp_path, "algorithms")
    places = [tmp_path, ROOT] if first else [ROOT, tmp_path]
    for code in (BOTH, "import fedbench.datasets.rows, fedbench.algorithms" + BOTH):
        done = run(code, tmp_path / "datasets", *places)
        assert done.returncode == 0 and done.stderr == "", done.stderr
        assert done.stdout.splitlines() == ["theirs theirs", "filmtrust lastfm-2k ml-100k ml-1m pinterest synthetic", "theirs theirs"]


def test_old_names_lead_to_the_modules_of_today() -> None:
    code = """
from algorithms.fedmf import FedMF
import datasets.rows
from fedbench.algorithm import Algorithm
from fedbench.data import Interactions
from fedbench import model, contract
import fedbench.algorithms.fedmf, fedbench.datasets.rows
from fedbench.contract import registry
assert FedMF is fedbench.algorithms.fedmf.FedMF is registry.algorithms()["fedmf"] and issubclass(FedMF, Algorithm)
assert datasets.rows is fedbench.datasets.rows and model.__name__ == "fedbench.experiment.saved_model"
assert contract.algorithm.Algorithm is Algorithm and Interactions is contract.dataset.Interactions
"""
    done = run(code, ROOT)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    for old, new in old_names.MOVED.items():
        assert importlib.util.find_spec(new) and old.startswith("fedbench."), old


def test_the_code_of_an_older_model_gives_the_modules_of_today(tmp_path: Path) -> None:
    """A model that MLflow keeps has the folders of its time, and its place comes first on the path."""
    for name in ("fedbench", "algorithms"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    (tmp_path / "algorithms" / "fedmf.py").write_text("raise ImportError('a second copy')")
    code = f"import sys, fedbench; sys.path.insert(0, {str(tmp_path)!r})\nfrom algorithms.fedmf import FedMF; print(FedMF.__module__)"
    assert run(code, ROOT).stdout == "fedbench.algorithms.fedmf\n"


def test_a_plug_in_of_before_still_runs(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from algorithms.fedmf import FedMF\nfrom fedbench.registry import register\n"
        "@register('mine', summary='as it was')\nclass Mine(FedMF):\n    pass\n"
    )
    words = ["--algo", str(tmp_path / "mine.py"), "--dataset", "synthetic", "--print-config"]
    done = subprocess.run([sys.executable, str(ROOT / "train.py"), *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr == "", done.stderr


def test_torch_and_mlflow_work_from_a_checkout() -> None:
    code = """
import fedbench.datasets, torch, mlflow
import mlflow.data, mlflow.tracking, mlflow.pytorch, sklearn.datasets
from mlflow.data.dataset_source_registry import resolve_dataset_source
import numpy
torch.func.vmap(torch.func.grad(lambda x: (x**2).sum()))(torch.ones(2, 3))
dataset = mlflow.data.from_numpy(numpy.ones((2, 2)))
assert dataset.profile["features_shape"] == (2, 2)
print(fedbench.datasets.__file__)
"""
    done = run(code, ROOT, ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(ROOT / "datasets" / "__init__.py")


def test_train_py_runs_from_any_folder(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(ROOT / "train.py"), "--list"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert done.stdout.startswith("algorithms\n  ")
    assert not list(tmp_path.iterdir())


def test_the_command_line_loads_no_mlflow() -> None:
    code = """
import sys
from fedbench.commands.cli import main
main(["--list"])
print([name for name in ("mlflow", "fedbench.experiment.run") if name in sys.modules])
"""
    done = run(code, ROOT)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_an_installed_plug_in_is_listed_and_a_broken_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "their_method.py").write_text(
        "from fedbench.contract.algorithm import Algorithm\nclass Theirs(Algorithm):\n    'A method of theirs.'\n"
    )
    info = tmp_path / "their_method-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-method\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fedbench.algorithms]\ntheirs = their_method:Theirs\nbroken = their_method:Nothing\n")
    done = run("from fedbench.commands.cli import main; raise SystemExit(main(['--list']))", ROOT, tmp_path)
    assert done.returncode == 0
    assert any(line.split() == ["theirs", "A", "method", "of", "theirs."] for line in done.stdout.splitlines())
    assert done.stderr.count("\n") == 1 and "broken" in done.stderr and "left out" in done.stderr


def test_kernels_are_compiled_anew_when_what_they_call_changes(tmp_path: Path) -> None:
    """numba alone would look at the kernel's own file only."""
    for folder in ("fedbench", "datasets"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))

    def kept() -> str:
        return run("import fedbench; print(fedbench.compiled_kernels())", tmp_path, tmp_path).stdout

    first = kept()
    (tmp_path / "fedbench" / "reporting" / "report.py").write_text("# calls no kernel\n")
    assert kept() == first != ""
    with (tmp_path / "fedbench" / "kernels" / "layers.py").open("a") as file:
        file.write("# another one\n")
    assert kept() not in (first, "")
