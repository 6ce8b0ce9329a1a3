"""Files: what is planted in a folder is not followed, and what would never end is not read."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import FrameType

import pytest

from fedbench import files
from fedbench.__main__ import main
from fedbench.errors import DataError, FedbenchError

DATA = "--dataset synthetic --users 30 --items 150 --interactions 12 --eval-negatives 50 --kernel off --no-mlflow --quiet --threads 1"
RUN = f"train --algo popularity {DATA} --rounds 2"
SECONDS = 60


@contextmanager
def no_waiting() -> Iterator[None]:
    """Fail where a system call waits, as opening a named pipe does that nobody writes to."""

    def late(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"still waiting after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def ask(words: str, *more: str | Path) -> tuple[int, str]:
    """Exit code and standard error; at most one line of error."""
    out, err = io.StringIO(), io.StringIO()
    with no_waiting(), redirect_stdout(out), redirect_stderr(err):
        code = main([*words.split(), *map(str, more)])
    said = err.getvalue()
    assert "Traceback" not in said and "internal error" not in said, said
    assert sum(line.startswith("fedbench: ") for line in said.splitlines()) == (code != 0), said
    return code, said


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small finished run; not to be changed."""
    out = tmp_path_factory.mktemp("finished") / "r"
    assert ask(RUN, "--out", out)[0] == 0
    return out


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A folder with a file that nobody but its owner may change."""
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "file").write_text("keep")
    return tmp_path / "victim"


def untouched(victim: Path) -> bool:
    return [path.name for path in victim.iterdir()] == ["file"] and (victim / "file").read_text() == "keep"


# ---- one file ---------------------------------------------------------------------------------------------------------------


def test_a_file_is_written_whole_and_beside_any_link(tmp_path: Path, victim: Path) -> None:
    path = tmp_path / "a.json"
    for name in ("a.json", "a.json.part"):
        (tmp_path / name).symlink_to(victim / "file")
    files.write_json(path, {"a": 1})
    assert files.read_json(path) == {"a": 1} and not path.is_symlink() and untouched(victim)
    assert {entry.name for entry in tmp_path.iterdir()} == {"a.json", "victim"}


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a"
    files.write_text(path, "before")
    with pytest.raises(ValueError, match="half"), files.replacing(path) as file:
        file.write(b"after")
        raise ValueError("half")
    assert path.read_text() == "before" and [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_what_is_added_to_in_place_is_no_link(tmp_path: Path, victim: Path) -> None:
    (tmp_path / "soft").symlink_to(victim / "file")
    os.link(victim / "file", tmp_path / "hard")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name, said in (("soft", "is a link"), ("hard", "hard link"), ("pipe", "named pipe"), ("folder", "is a folder")):
        with no_waiting(), pytest.raises(files.InTheWay, match=f"{name}.*{said}"):
            files.appended(tmp_path / name)
    assert untouched(victim)
    with files.appended(tmp_path / "new") as file:
        file.write(b"1")
    assert (tmp_path / "new").read_text() == "1"


def test_only_an_object_in_a_regular_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    assert files.read_json(path) == {}
    for content in (b"[]", b"1", b"{", b"\xff", b"[" * 100_000, b""):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"a\.json"):
            files.read_json(path)
    path.unlink()
    os.mkfifo(path)
    with no_waiting(), pytest.raises(DataError, match=r"a\.json is a named pipe"):
        files.read_json(path)


# ---- links in a run's folder --------------------------------------------------------------------------------------------------

PLANTED = "config.json env.json metrics.jsonl refit.jsonl log.txt summary.json per_client.parquet figures checkpoint .lock config.json.part"


@pytest.mark.parametrize("name", PLANTED.split())
def test_a_link_in_the_folder_is_refused_and_named(tmp_path: Path, victim: Path, name: str) -> None:
    out = tmp_path / "r"
    out.mkdir()
    (out / name).symlink_to(victim if name in ("figures", "checkpoint") else victim / "file")
    code, said = ask(RUN, "--out", out)
    assert code == 2 and f"{out / name} is a link" in said
    assert untouched(victim) and [path.name for path in out.iterdir()] == [name]


@pytest.mark.parametrize("name", [".lock", "log.txt"])
def test_a_second_name_of_somebodys_file_is_refused(tmp_path: Path, victim: Path, name: str) -> None:
    out = tmp_path / "r"
    out.mkdir()
    os.link(victim / "file", out / name)
    code, said = ask(RUN, "--out", out)
    assert code == 2 and str(out / name) in said and untouched(victim)


def test_links_deeper_down_are_replaced_not_followed(tmp_path: Path, victim: Path) -> None:
    out = tmp_path / "r"
    names = "figures/convergence.png figures/convergence.png.part checkpoint/model.safetensors checkpoint/model.safetensors.part"
    for name in f"{names} checkpoint/model.json checkpoint/model.json.part checkpoint/round-1.json".split():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).symlink_to(victim / "file")
    assert ask(RUN, "--out", out, "--checkpoint-every", "1") == (0, "")
    assert untouched(victim) and not any(path.is_symlink() for path in out.rglob("*"))
    assert {path.name for path in (out / "checkpoint").iterdir()} == {"model.json", "model.safetensors"}


def test_the_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "large-disk").mkdir()
    (tmp_path / "r").symlink_to(tmp_path / "large-disk")
    assert ask(RUN, "--out", tmp_path / "r") == (0, "")
    assert (tmp_path / "large-disk" / "summary.json").exists()


def test_a_sweep_clears_no_folder_that_a_link_leads_to(tmp_path: Path, victim: Path) -> None:
    """Of a point that failed what is left is removed: not behind a link that somebody has put in its place."""
    sweep = f"sweep --algo popularity {DATA} --rounds 1 2 --out {tmp_path / 's'}"
    assert ask(sweep, "--dry-run") == (0, "")
    (tmp_path / "s").mkdir()
    found = io.StringIO()
    with redirect_stdout(found):
        main([*sweep.split(), "--dry-run"])
    keys = [line.split()[0] for line in found.getvalue().splitlines()[:2]]
    (tmp_path / "s" / "sweep.json").write_text(json.dumps({"points": [{"key": key, "status": "failed"} for key in keys]}))
    (tmp_path / "s" / keys[0]).symlink_to(victim)
    code, said = ask(sweep)
    assert code == 2 and f"{tmp_path / 's' / keys[0]} is a link" in said and untouched(victim)


def test_recommendations_and_reports_are_not_written_through_links(tmp_path: Path, finished: Path, victim: Path) -> None:
    (tmp_path / "top.parquet.part").symlink_to(victim / "file")
    assert ask("recommend --all -k 3", "--run", finished, "--out", tmp_path / "top.parquet") == (0, "")
    (tmp_path / "report").mkdir()
    for name in ("report.md", "report.html.part"):
        (tmp_path / "report" / name).symlink_to(victim / "file")
    assert ask("report", finished, "--out", tmp_path / "report") == (0, "") and untouched(victim)
    shutil.rmtree(tmp_path / "report" / "figures")
    (tmp_path / "report" / "figures").symlink_to(victim)
    code, said = ask("report", finished, "--out", tmp_path / "report")
    assert code == 2 and "figures is a link" in said and untouched(victim)


# ---- named pipes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("train --config {}", "c.json"),
        ("train --config {}", "c.toml"),
        ("sweep --study {} --dry-run", "s.toml"),
        ("train --algo {} --dataset synthetic", "a.py"),
        ("train --algo popularity --dataset {}", "d.csv"),
        ("recommend --run {run} --history {}", "h.csv"),
        ("train --algo popularity --dataset filmtrust --data-dir {folder}", "filmtrust/ratings.txt"),
    ],
)
def test_a_named_pipe_is_refused_at_once(tmp_path: Path, finished: Path, words: str, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)
    code, said = ask(words.format(path, run=finished, folder=tmp_path), *(["--no-mlflow"] if words.startswith("train") else []))
    assert code in (2, 3) and str(path) in said and "named pipe" in said


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("report {run} --out {other}", ("summary.json", "config.json", "metrics.jsonl", "per_client.parquet")),
        ("recommend --run {run} --user 1", ("config.json", "checkpoint/model.json", "checkpoint/model.safetensors")),
        ("evaluate --run {run}", ("config.json", "checkpoint/model.json")),
        (f"{RUN} --out {{run}}", ("summary.json", "config.json")),
    ],
)
def test_a_named_pipe_in_a_runs_folder_is_refused(tmp_path: Path, finished: Path, words: str, names: tuple[str, ...]) -> None:
    for name in names:
        out = tmp_path / name.replace("/", "-")
        shutil.copytree(finished, out)
        (out / name).unlink()
        os.mkfifo(out / name)
        code, said = ask(words.format(run=out, other=tmp_path / "other"))
        assert code in (1, 2, 3) and str(out) in said, (name, said)


def test_a_run_goes_on_past_no_named_pipe(tmp_path: Path) -> None:
    out = tmp_path / "r"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedbench.experiment.run.RunLog.finish", lambda *_: (_ for _ in ()).throw(FedbenchError("stopped")))
        assert ask(RUN, "--out", out, "--checkpoint-every", "1")[0] == 1
    assert (out / "checkpoint" / "round-1.json").exists()
    for name in ("env.json", "metrics.jsonl", "log.txt"):
        there = tmp_path / name
        shutil.copytree(out, there)
        (there / name).unlink()
        os.mkfifo(there / name)
        code, said = ask(RUN, "--out", there, "--checkpoint-every", "1")
        assert code in (1, 2, 3) and str(there) in said, (name, said)
    for name in ("round-1.json", "round-1.safetensors"):  # a damaged state: done without
        there = tmp_path / name
        shutil.copytree(out, there)
        (there / "checkpoint" / name).unlink()
        os.mkfifo(there / "checkpoint" / name)
        assert ask(RUN, "--out", there, "--checkpoint-every", "1")[0] == 0


@pytest.mark.parametrize("name", ["checkpoint", "figures", "per_client.parquet", "summary.json.part"])
def test_a_named_pipe_where_a_run_will_write_is_refused_before_it_trains(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    code, said = ask(RUN, "--out", tmp_path)
    assert code == 2 and f"{tmp_path / name} is a named pipe" in said
    assert [path.name for path in tmp_path.iterdir()] == [name]
