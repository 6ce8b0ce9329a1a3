"""Sizes that cannot fit are refused at once, with how much they take; and kernels are kept where there is a place for them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedbench.commands import cli
from fedbench.contract.registry import algorithms
from fedbench.datasets import synthetic
from fedbench.experiment import memory
from fedbench.settings.command_line import parse
from fedbench.simulation.federation import world_of
from tests.conftest import small_split

ROOT = Path(__file__).parents[1]
DATA = "--dataset synthetic --users 30 --items 150 --interactions 12 --eval-negatives 50 --no-mlflow --quiet --threads 1"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--algo fedmf --dim 1000000000", "what the server of fedmf holds takes at least"),
        ("--algo fedmf --dim 1000000000000000", "TB"),
        ("--algo local --dim 1000000000", "what one client of local keeps takes at least"),
        ("--algo fedavg_ncf --layers 1000000000,8", "lower --dim, --layers"),
        ("--algo central_mf --dim 1000000000", "what the server of central_mf holds"),
        ("--algo fedmf --negatives 1000000000", "a round's training samples takes at least"),
    ],
)
def test_what_cannot_fit_is_refused_before_it_is_made(
    flags: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedbench.experiment.run.Federation.start", lambda *_, **__: pytest.fail("it was begun"))
    monkeypatch.setattr(memory, "free_memory", lambda: 16e9)
    assert cli.main([*flags.split(), *DATA.split(), "--out", str(tmp_path / "r")]) == 1
    error = capsys.readouterr().err
    assert said in error and "16 GB of memory are free" in error and error.count("\n") == 1 and not (tmp_path / "r").exists()


def test_every_algorithm_is_counted_as_it_is() -> None:
    """What is counted without making anything is what an algorithm makes."""
    for name in algorithms():
        split = small_split(ratings=name == "fedrec_mf")
        algorithm = parse(["--algo", name, "--dataset", "synthetic"]).configs[0].algorithm
        world, draw = world_of(split), memory.Draw(0, 0, None, torch.float32)
        made = algorithm.init_server(world, draw)
        counted, _ = memory.counted(lambda a=algorithm, w=world: a.init_server(w, memory.Shapes(0, 0, None, torch.float32)))
        assert counted == sum(value.numel() * value.element_size() for value in made.values()), name
        memory.check(algorithm, split, world, torch.float32, "cpu", split.clients)


@pytest.mark.parametrize("flags", ["--users 1000000000000", "--users 100000 --items 100000000000", "--users 1000000000 --interactions 200"])
def test_synthetic_data_that_cannot_fit(
    flags: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synthetic, "_generate", lambda *_: pytest.fail("it was begun"))
    monkeypatch.setattr(synthetic, "free_memory", lambda: 16e9)
    words = f"--algo popularity --dataset synthetic {flags} --cache-dir {tmp_path} --no-mlflow --quiet"
    assert cli.main(words.split()) == 2
    error = capsys.readouterr().err
    assert "GB" in error and "lower --users" in error and error.count("\n") == 1


def test_a_billion_folds(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--algo", "fedrec_mf", "--dataset", "synthetic", "--folds", "1000000000", "--print-config"]) == 2
    assert "is the most" in capsys.readouterr().err


# ---- where compiled kernels are kept ---------------------------------------------------------------------------------------------


def chosen(package: Path, **environment: str) -> str:
    """NUMBA_CACHE_DIR as a copy of the package chooses it."""
    kept = {key: value for key, value in os.environ.items() if key not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")}
    said = "import fedbench, os; print(os.environ['NUMBA_CACHE_DIR'])"
    done = subprocess.run(
        [sys.executable, "-B", "-c", said], cwd=package, env={**kept, **environment}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package in which nothing can be kept: a file has the folder's name."""
    place = tmp_path / "package"
    shutil.copytree(ROOT / "fedbench", place / "fedbench", ignore=shutil.ignore_patterns("__pycache__"))
    (place / "fedbench" / "__pycache__").write_text("in the way")
    (tmp_path / "tmp").mkdir()
    (tmp_path / "no").write_text("no home here")
    return place


@pytest.mark.long
def test_a_read_only_installation_compiles_into_the_users_cache_and_once(tmp_path: Path, package: Path) -> None:
    """`warm` leaves all that the next run needs: that run compiles nothing, and says nothing of it."""
    for name in ("algorithms", "datasets"):
        shutil.copytree(ROOT / name, package / "fedbench" / name, ignore=shutil.ignore_patterns("__pycache__"))
    unset = ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "PYTHONPATH")
    environment = {key: value for key, value in os.environ.items() if key not in unset} | {"HOME": str(tmp_path / "home")}
    words = "--algo central_mf --dataset synthetic --users 60 --items 150 --interactions 12 --dim 5 --batch-size 100"

    def done(*given: str) -> str:
        line = [sys.executable, "-B", "-m", "fedbench", *given, *words.split()]
        ran = subprocess.run(line, cwd=package, env=environment, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout + ran.stderr

    def kept() -> set[str]:
        return {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*") if path.suffix in (".kernel", ".nbc", ".nbi")}

    assert re.fullmatch(r"central_mf: \d+ compiled in \S+ s\n", done("warm"))
    first = kept()
    assert {Path(name).suffix for name in first} == {".kernel", ".nbc", ".nbi"}
    assert all(name.startswith("home/.cache/fedbench/kernels-") for name in first)
    said = done("train", "--rounds", "2", "--no-mlflow", "--out", str(tmp_path / "r"))
    assert kept() == first and "compil" not in said.replace("compiled kernels are kept in", "")
    assert done("warm") == "central_mf: nothing to compile\n"


def test_kernels_are_kept_in_the_users_cache_or_a_temporary_folder(tmp_path: Path, package: Path) -> None:
    temporary = {"TMPDIR": str(tmp_path / "tmp")}
    assert chosen(package, HOME=str(tmp_path / "home"), **temporary).startswith(str(tmp_path / "home" / ".cache" / "fedbench" / "kernels-"))
    own = tmp_path / "tmp" / f"fedbench-{os.getuid()}"
    assert chosen(package, HOME=str(tmp_path / "no"), **temporary).startswith(f"{own}/kernels-")
    assert own.stat().st_mode & 0o777 == 0o700
    own.chmod(0o777)  # then others could have put something there, and numba runs what it finds
    instead = Path(chosen(package, HOME=str(tmp_path / "no"), **temporary))  # its name may begin as that of the other does
    assert own not in instead.parents and tmp_path / "tmp" in instead.parents
    (package / "fedbench" / "__pycache__").unlink()
    assert chosen(package, HOME=str(tmp_path / "no")).startswith(str(package / "fedbench" / "__pycache__" / "kernels-"))


def test_nowhere_to_keep_kernels_is_one_line(tmp_path: Path, package: Path) -> None:
    """numba's own words are a traceback."""
    said = "import sys, tempfile; tempfile.tempdir = '/proc/none'; from fedbench.__main__ import main; sys.exit(main(['list']))"
    environment = {key: value for key, value in os.environ.items() if key not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")}
    environment["HOME"] = str(tmp_path / "no")
    done = subprocess.run([sys.executable, "-B", "-c", said], cwd=package, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "set NUMBA_CACHE_DIR" in done.stderr
