"""`datasets` is also the name of a well-known package: from a checkout ours is meant, and nothing else breaks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(code: str, cwd: Path, *path: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def test_datasets_is_ours_even_beside_a_package_of_that_name(tmp_path: Path) -> None:
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "__init__.py").write_text("raise ImportError('the other one')")
    done = run("import datasets, algorithms; print(datasets.__file__); print(algorithms.__file__)", ROOT, tmp_path)
    assert done.stdout.split() == [str(ROOT / "datasets" / "__init__.py"), str(ROOT / "algorithms" / "__init__.py")], done.stderr


def test_torch_and_mlflow_work_from_a_checkout() -> None:
    code = """
import datasets, torch, mlflow
import mlflow.data, mlflow.tracking, mlflow.pytorch, sklearn.datasets
from mlflow.data.dataset_source_registry import resolve_dataset_source
import numpy
torch.func.vmap(torch.func.grad(lambda x: (x**2).sum()))(torch.ones(2, 3))
dataset = mlflow.data.from_numpy(numpy.ones((2, 2)))
assert dataset.profile["features_shape"] == (2, 2)
print(datasets.__file__)
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
