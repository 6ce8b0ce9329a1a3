"""Nobody else's code runs unasked: a .py file that a config, a study or a run's folder names must be known, named or let in."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import py_compile
import stat
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from fedbench import trust
from fedbench.__main__ import main
from fedbench.commands import cli
from fedbench.contract import registry

PLUG_IN = """
from pathlib import Path
with Path({mark!r}).open("a") as file:
    file.write("ran")
from fedbench.algorithms.popularity import Popularity
class Mine(Popularity):
    "Mine."
"""
DATA = "--dataset synthetic --users 30 --items 150 --interactions 12 --eval-negatives 50 --no-mlflow --quiet --threads 1"


class Place:
    """A folder with a plug-in that leaves a mark when it runs, and a config that names it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.mark, self.plug_in, self.config = folder, folder / "mark", folder / "mine.py", folder / "c.json"
        self.plug_in.write_text(PLUG_IN.format(mark=str(self.mark)))
        self.config.write_text(json.dumps({"algo": str(self.plug_in), "dataset": "synthetic"}))
        (folder / "s.toml").write_text(f'[fixed]\nalgo = "{self.plug_in}"\ndataset = "synthetic"\n[axes]\nseed = [0, 1]\n')

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.plug_in.read_bytes()).hexdigest()

    def ran(self) -> bool:
        """Whether it has run since this was asked last."""
        there = self.mark.exists()
        self.mark.unlink(missing_ok=True)
        return there


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    forget(tmp_path / "state", monkeypatch)
    monkeypatch.chdir(tmp_path)
    return Place(tmp_path)


def forget(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on it is as if this user had never run anything here."""
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    monkeypatch.setattr(trust, "_here", set())


def ask(*words: str | Path) -> tuple[int, str]:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([str(word) for word in words])
    return code, err.getvalue()


@pytest.mark.parametrize(
    "words",
    [
        "train --config c.json",
        "train --config c.json --print-config",
        "train --config c.json --help",
        "train --config c.json --seed 3",
        "sweep --study s.toml --dry-run",
        "sweep --config c.json --seeds 0-1 --dry-run",
        "bench --config c.json",
    ],
)
def test_what_a_file_names_does_not_run_unasked(place: Place, words: str) -> None:
    code, said = ask(*words.split())
    assert code == 2 and said.count("\n") == 1 and not place.ran()
    assert str(place.plug_in) in said and place.digest in said and "--trust-plugin" in said
    assert not trust.memory().exists()


@pytest.mark.parametrize("words", ["train --config c.json --print-config", "sweep --study s.toml --dry-run"])
def test_it_runs_when_it_is_let_in_and_is_known_from_then_on(place: Place, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = ask(*words.split(), "--trust-plugin")
    assert code == 0 and place.ran()
    assert f"trusted  {place.plug_in}  SHA-256 {place.digest}" in said
    monkeypatch.setattr(trust, "_here", set())  # another process
    assert ask(*words.split()) == (0, "") and place.ran()
    place.plug_in.write_text(place.plug_in.read_text() + "# changed\n")
    code, said = ask(*words.split())
    assert code == 2 and place.digest in said and not place.ran()


def test_what_the_command_line_names_runs_and_is_remembered(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask("train", "--algo", place.plug_in, "--dataset", "synthetic", "--print-config") == (0, "")
    assert place.ran() and stat.S_IMODE(trust.memory().stat().st_mode) == 0o600
    monkeypatch.setattr(trust, "_here", set())
    assert ask("train", "--config", place.config, "--print-config") == (0, "") and place.ran()
    forget(place.folder / "other", monkeypatch)
    assert ask("sweep", "--study", "s.toml", "--algo", place.plug_in, "--dry-run") == (0, "") and place.ran()


def test_a_file_cannot_let_itself_in(place: Place) -> None:
    place.config.write_text(json.dumps({"algo": str(place.plug_in), "dataset": "synthetic", "trust_plugin": True}))
    assert ask("train", "--config", place.config, "--print-config")[0] == 2 and not place.ran()
    for table in ("fixed", "axes"):
        value = "true" if table == "fixed" else "[true]"
        (place.folder / "s.toml").write_text(
            f'grid = [{{fixed = {{algo = "{place.plug_in}", dataset = "synthetic"}}}}]\n[{table}]\ntrust-plugin = {value}\n'
        )
        code, said = ask("sweep", "--study", "s.toml", "--dry-run")
        assert code == 2 and "on the command line only" in said and not place.ran()


def test_a_runs_folder_is_somebody_elses_file(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    out = place.folder / "r"
    assert ask("train", "--algo", place.plug_in, *DATA.split(), "--rounds", "1", "--out", out)[0] == 0 and place.ran()
    forget(place.folder / "other", monkeypatch)
    for words in (["recommend", "--user", "1"], ["evaluate"], ["log-model"]):
        code, said = ask(*words, "--run", out)
        assert code == 2 and said.count("\n") == 1 and place.digest in said and not place.ran()
    assert ask("report", out, "--out", place.folder / "report")[0] == 0 and not place.ran()
    code, said = ask("recommend", "--run", out, "--user", "1", "--trust-plugin")
    assert code == 0 and place.digest in said and place.ran()
    assert ask("evaluate", "--run", out)[0] == 0


@pytest.mark.long
def test_runs_in_processes_of_their_own_know_it_where_nothing_can_be_remembered(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    state = place.folder / "state"
    state.write_text("in the way")
    several = ["--seeds", "0-1", "--jobs", "2", "--rounds", "1", *DATA.split(), "--out", str(place.folder / "r")]
    assert ask("train", "--algo", place.plug_in, *several) == (0, "") and place.ran()
    assert (place.folder / "r" / "seed-1" / "summary.json").exists() and state.read_text() == "in the way"


def test_the_memory_is_not_written_through_a_link(place: Place) -> None:
    precious = place.folder / "precious"
    precious.write_text("keep")
    trust.memory().parent.mkdir(parents=True)
    for name in (trust.memory().name, trust.memory().name + ".part", "lock"):
        (trust.memory().parent / name).symlink_to(precious)
    assert ask("train", "--algo", place.plug_in, "--dataset", "synthetic", "--print-config") == (0, "")
    assert precious.read_text() == "keep"


def test_a_compiled_copy_beside_the_file_is_not_what_runs(place: Place) -> None:
    """It would run in the file's place, while the hash is the file's."""
    source = place.plug_in.read_text()
    cached = Path(importlib.util.cache_from_source(str(place.plug_in)))
    place.plug_in.write_text(source.replace('"ran"', '"bad"'))
    py_compile.compile(str(place.plug_in), cfile=str(cached), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    place.plug_in.write_text(source)
    registry.algorithm(str(place.plug_in))
    assert place.mark.read_text() == "ran"


def test_only_python_source_is_a_plug_in(place: Place) -> None:
    for name in ("mine.so", "mine.pyc", "mine"):
        (place.folder / name).write_bytes(b"\0")
        assert "must end in .py" in ask("train", "--algo", place.folder / name, "--dataset", "synthetic")[1]


def test_the_environment_tells_children_by_hash(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(trust.HANDED_ON, f"{'0' * 64},{place.digest}")
    assert cli.main(["--config", str(place.config), "--print-config"]) == 0 and place.ran()
    monkeypatch.setenv(trust.HANDED_ON, "")
    monkeypatch.setattr(trust, "_here", set())
    assert cli.main(["--config", str(place.config), "--print-config"]) == 2 and not place.ran()
