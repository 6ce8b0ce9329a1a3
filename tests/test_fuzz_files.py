"""Damaged checkpoints, odd archives and whole runs with odd settings: one line of error, nothing half-written."""

from __future__ import annotations

import io
import json
import stat
import tarfile
import zipfile
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from fedbench.data.sources import SourceFailed, read_member
from fedbench.errors import FedbenchError
from fedbench.experiment import checkpoint, resume, run_state
from fedbench.experiment.summary import Best
from fedbench.settings import command_line
from fedbench.simulation.federation import Federation
from tests.conftest import small_split
from tests.test_fuzz import CASES, answer, fuzz, nested, no_hang, writes

# ---- checkpoints -----------------------------------------------------------------------------------------------------------

RUN = [
    "--algo",
    "fedmf",
    "--dataset",
    "synthetic",
    "--users",
    "24",
    "--items",
    "60",
    "--interactions",
    "12",
    "--dim",
    "4",
    "--rounds",
    "3",
    "--no-mlflow",
    "--quiet",
]


@cache
def saved() -> dict[str, bytes]:
    """The files of a run that stopped after its second round."""
    request = command_line.resolve(RUN)
    federation = Federation.start(request.algorithm, small_split(), 0)
    with TemporaryDirectory() as folder:
        for _ in range(2):
            federation.next_round()
            run_state.save(Path(folder), federation, Best(), request)
        return {file.name: file.read_bytes() for file in (Path(folder) / "checkpoint").iterdir()}


damages = st.tuples(st.sampled_from(["cut", "flip", "add", "gone", "swap"]), st.integers(0, 10**6), st.binary(min_size=1, max_size=4))


def damaged(content: bytes, how: str, place: int, extra: bytes) -> bytes | None:
    place %= max(1, len(content))
    if how == "cut":
        return content[:place]
    if how == "flip":
        return content[:place] + bytes([content[place] ^ (extra[0] or 1)]) + content[place + 1 :]
    if how == "add":
        return content[:place] + extra + content[place:]
    return None if how == "gone" else extra


def going_on(files: dict[str, bytes]) -> Federation | None:
    """The federation that goes on from these files, or None if it begins again."""
    request, parts = command_line.resolve(RUN), small_split()
    with TemporaryDirectory() as name, no_hang():
        folder = Path(name)
        (folder / "checkpoint").mkdir()
        for file, content in files.items():
            (folder / "checkpoint" / file).write_bytes(content)
        (folder / "config.json").write_text(json.dumps(request.to_dict()))
        (folder / "metrics.jsonl").write_text("".join(json.dumps({"round": number, "seconds": 0.1}) + "\n" for number in (1, 2)))
        _, state = resume.find_resume_point(folder, request, parts)
        if state is None:
            return None
        federation = Federation.start(request.algorithm, parts, 0)
        run_state.restore(state, federation, Best())
        return federation


@fuzz()
@given(
    st.dictionaries(
        st.sampled_from(sorted({"round-1.json", "round-1.safetensors", "round-2.json", "round-2.safetensors"})), damages, min_size=1
    )
)
@example({"round-2.json": ("swap", 0, b"1")})
@example({"round-2.json": ("swap", 0, b"[]")})
def test_damaged_checkpoints(hurt: dict[str, tuple[str, int, bytes]]) -> None:
    files: dict[str, bytes] = {}
    for name, content in saved().items():
        changed = damaged(content, *hurt[name]) if name in hurt else content
        if changed is not None:
            files[name] = changed
    federation = going_on(files)
    whole = [
        number
        for number in (2, 1)
        if all(files.get(name) == saved()[name] for name in (f"round-{number}.json", f"round-{number}.safetensors"))
    ]
    assert (federation.round if federation else None) == (whole[0] if whole else None)


FACTS = ["round", "bytes_up", "counts", "best_round", "best_score", "algo", "data_checksum", "x"]
TENSORS = ["server/items", "client/user", "visits", "best/val", "client/other"]
SHAPES = [torch.zeros(0), torch.zeros(3, dtype=torch.int64), torch.zeros(2, 2), torch.tensor(1.0), None]
odd_facts = st.dictionaries(st.sampled_from(FACTS), nested, max_size=3)
odd_tensors = st.dictionaries(st.sampled_from(TENSORS), st.sampled_from(SHAPES), max_size=2)


@fuzz()
@given(odd_facts, odd_tensors)
@example({"round": float("inf")}, {})
def test_checkpoints_that_vouch_for_nonsense(facts: dict[str, Any], tensors: dict[str, torch.Tensor | None]) -> None:
    """Whoever writes such a file can write the checksums too."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "checkpoint").mkdir()
        for file, content in saved().items():
            (folder / "checkpoint" / file).write_bytes(content)
        state = checkpoint.read(folder, "round-2")
        try:
            text = json.dumps(state.facts | facts)
        except (ValueError, TypeError):
            assume(False)
        found = {**state.tensors("cpu"), **tensors}
        checkpoint.save(folder, "round-2", json.loads(text), {key: value.clone() for key, value in found.items() if value is not None})
        files = {file.name: file.read_bytes() for file in (folder / "checkpoint").iterdir()}
    try:
        going_on(files)
    except FedbenchError as error:
        assert "\n" not in str(error)


# ---- archives --------------------------------------------------------------------------------------------------------------

member_names = st.lists(st.sampled_from(["a", "b", "..", ".", "", "c:", "~", "ü", "con"]), min_size=1, max_size=4).map(
    "/".join
) | st.sampled_from(["/etc/passwd", "..\\..\\x", "C:\\x", "a/../../x", "\\\\host\\x", "./a"])


member_names = member_names.filter(lambda name: name and not name.endswith("/"))  # those are folders


def unsafe(name: str) -> bool:
    parts = name.replace("\\", "/").split("/")
    return ".." in parts or name.startswith(("/", "\\")) or ":" in parts[0]


@fuzz()
@given(st.lists(member_names, min_size=1, max_size=4, unique=True), st.sampled_from(["zip", "tar"]), st.sampled_from([None, "sym", "hard"]))
def test_archives(members: list[str], form: str, link: str | None) -> None:
    packed = io.BytesIO()
    if form == "zip":
        with zipfile.ZipFile(packed, "w") as archive:
            for name in members:
                archive.writestr(name, b"rows")
            if link:
                info = zipfile.ZipInfo("link")
                info.external_attr = (stat.S_IFLNK | 0o777) << 16
                archive.writestr(info, b"/etc/passwd")
    else:
        with tarfile.open(fileobj=packed, mode="w:gz") as tar:
            for name in members:
                info_tar = tarfile.TarInfo(name)
                info_tar.size = 4
                tar.addfile(info_tar, io.BytesIO(b"rows"))
            if link:
                info_tar = tarfile.TarInfo("link")
                info_tar.type, info_tar.linkname = (tarfile.SYMTYPE if link == "sym" else tarfile.LNKTYPE), "/etc/passwd"
                tar.addfile(info_tar)
    with no_hang(), writes().only_below():
        try:
            assert read_member(packed.getvalue(), members[0]) == b"rows"
            assert not link and not any(map(unsafe, members))
        except SourceFailed as failure:
            assert str(failure)


# ---- whole runs ------------------------------------------------------------------------------------------------------------

settings_of_runs = st.fixed_dictionaries(
    {"algo": st.sampled_from(["fedmf", "local", "popularity", "random"])},
    optional={
        "clients-per-round": st.integers(1, 30),
        "local-epochs": st.integers(1, 2),
        "batch-size": st.integers(1, 40),
        "negatives": st.integers(0, 60),
        "eval-negatives": st.integers(1, 99),
        "min-interactions": st.integers(0, 20),
        "dropout": st.floats(0, 0.99),
        "stragglers": st.floats(0, 0.99),
        "corrupt": st.floats(0, 0.99),
        "max-upload-norm": st.sampled_from(["none", "auto", "1x", "0.001"]),
        "checkpoint-every": st.sampled_from(["1", "never", "1s"]),
        "keep-state": st.sampled_from(["best", "last", "none"]),
        "eval-every": st.integers(1, 4),
        "protocol": st.sampled_from(["clean", "published"]),
        "seed": st.integers(0, 2**62),
    },
)


@pytest.mark.slow
@fuzz(CASES // 10)
@given(settings_of_runs)
@example({"algo": "fedmf", "clients-per-round": 1, "corrupt": 0.5, "max-upload-norm": "none"})
def test_runs_write_where_they_are_told(flags: dict[str, Any]) -> None:
    words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    size = [
        "--dataset",
        "synthetic",
        "--users",
        "20",
        "--items",
        "40",
        "--interactions",
        "8",
        "--dim",
        "2",
        "--rounds",
        "2",
        "--no-mlflow",
        "--quiet",
        "--threads",
        "1",
    ]
    with TemporaryDirectory() as name:
        folder = Path(name)
        with writes().only_below(folder):
            code, said = answer([*words, *size, "--out", str(folder / "r")])
        if code == 0:
            summary = json.loads((folder / "r" / "summary.json").read_text())
            assert summary["rounds"] == 2 and "NaN" not in (folder / "r" / "metrics.jsonl").read_text()
