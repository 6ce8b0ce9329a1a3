"""The package as others get it: a wheel, alone in an environment of its own and in another folder."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from fedbench import __version__
from tests.test_imports import BOTH, ROOT, stand_in

pytestmark = pytest.mark.slow
SMALL = ["--dataset", "synthetic", "--users", "30", "--items", "160", "--rounds", "1", "--threads", "1", "--no-mlflow", "--quiet"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling")
    place = tmp_path_factory.mktemp("dist")
    words = ["--no-build-isolation", "--no-deps", "--disable-pip-version-check", "--wheel-dir", str(place), str(ROOT)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", *words], check=True)
    (made,) = place.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel; all that it needs comes from this one."""
    place = tmp_path_factory.mktemp("env")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    (packages,) = place.glob("lib/python*/site-packages")
    (packages / "shared.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    return place / "bin" / "python"


def run(python: Path, cwd: Path, *words: str, path: tuple[Path, ...] = ()) -> str:
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "NUMBA_CACHE_DIR")}
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, path))} if path else {}
    done = subprocess.run([python, *words], cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_has_what_it_needs_and_no_more(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert wheel.name == f"fedbench_rec-{__version__}-py3-none-any.whl"
    assert {"fedbench/py.typed", "fedbench/reporting/page.html", "fedbench/algorithms/fedmf.py", "fedbench/datasets/rows.py"} <= names
    assert {name.partition("/")[0] for name in names} == {"fedbench", f"fedbench_rec-{__version__}.dist-info"}
    scripts = zipfile.ZipFile(wheel).read(f"fedbench_rec-{__version__}.dist-info/entry_points.txt").decode()
    assert "fedbench = fedbench.__main__:main" in scripts
    here = {str(path.relative_to(ROOT)) for room in ("fedbench", "algorithms", "datasets") for path in (ROOT / room).rglob("*.py")}
    here |= {str(path.relative_to(ROOT)) for path in (ROOT / "recipes").rglob("*.toml")}
    assert {name if name.startswith("fedbench/") else f"fedbench/{name}" for name in here} <= names


def test_it_trains_sweeps_and_reports_in_an_empty_folder(python: Path, tmp_path: Path) -> None:
    fedbench = ("-m", "fedbench")
    assert run(python, tmp_path, *fedbench, "--version") == f"fedbench {__version__}\n"
    run(python, tmp_path, *fedbench, "train", "--algo", "popularity", *SMALL, "--out", "one")
    run(python, tmp_path, *fedbench, "sweep", "--algo", "popularity", "random", *SMALL, "--jobs", "2", "--out", "sweep")
    assert len(list(tmp_path.glob("sweep/*/summary.json"))) == 2
    run(python, tmp_path, *fedbench, "report", "one", "sweep")
    assert (tmp_path / "report" / "report.html").is_file()
    code = "import fedbench; print(fedbench.load('one').recommend(k=1).shape, fedbench.__file__)"
    assert run(python, tmp_path, "-c", code) == f"(30, 4) {next(python.parents[1].glob('lib/*/site-packages'))}/fedbench/__init__.py\n"


@pytest.mark.parametrize("first", [True, False])
def test_packages_of_others(python: Path, tmp_path: Path, first: bool) -> None:
    """One with entry points, and ones that are called as our folders are, before ours on the path or behind it."""
    for name in ("datasets", "algorithms"):
        stand_in(tmp_path, name)
    (tmp_path / "theirs.py").write_text(
        "from fedbench.algorithms.popularity import Popularity\n"
        "from fedbench.datasets.synthetic import load\n"
        "class Theirs(Popularity):\n    'A method of theirs.'\n"
    )
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[fedbench.algorithms]\ntheirs = theirs:Theirs\n[fedbench.datasets]\ntheirs-data = theirs:load\n"
    )
    code = BOTH if first else f"import sys; sys.path.append({str(tmp_path)!r})\n" + BOTH
    said = run(python, tmp_path.parent, "-c", code, path=(tmp_path,) if first else ())
    names = "filmtrust lastfm-2k ml-100k ml-1m pinterest synthetic theirs-data"
    assert said.splitlines() == ["theirs theirs", names, "theirs theirs"]
    if first:
        words = ["-m", "fedbench", "train", "--algo", "theirs", "--dataset", "theirs-data", "--rounds", "1", "--no-mlflow", "--quiet"]
        run(python, tmp_path, *words, "--out", "r", path=(tmp_path,))
        assert (tmp_path / "r" / "summary.json").is_file()


def test_the_tests_run_with_what_the_package_allows() -> None:
    """Every requirement of the package is in requirements.txt, and what is installed here is within both ranges."""
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line and not line.startswith("#")]
    pinned = {Requirement(line).name: Requirement(line) for line in lines}
    for asked in map(Requirement, [*told["dependencies"], *told["optional-dependencies"]["test"]]):
        assert asked.name in pinned, asked
    for asked in map(Requirement, told["dependencies"]):
        assert asked.specifier.contains(version(asked.name)) and pinned[asked.name].specifier.contains(version(asked.name)), asked


def test_numba_is_held_to_the_minor_version_that_is_tested() -> None:
    """Vectors of sixteen numbers are made of its inner parts, which may change in any minor version."""
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (asked,) = (Requirement(line).specifier for line in told if line.startswith("numba"))
    major, minor = map(int, version("numba").split(".")[:2])
    assert asked.contains(version("numba"))
    assert not asked.contains(f"{major}.{minor + 1}.0") and not asked.contains(f"{major}.{minor - 1}.9")
