"""Every input at random: whatever a file or a command line holds, the answer is a result or one line of error.

Few cases here; `FEDBENCH_FUZZ=10000 python -m pytest tests/test_fuzz.py` tries that many on each target. Cases that once went wrong
stand beside the targets as examples.
"""

from __future__ import annotations

import io
import json
import os
import signal
import stat
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, example, given, settings
from hypothesis import strategies as st

from fedbench.__main__ import main as command
from fedbench.commands import cli
from fedbench.contract import registry
from fedbench.contract.dataset import DatasetOptions
from fedbench.data.protocol import PRESETS
from fedbench.data.sources import SourceFailed, read_member
from fedbench.data.split import split
from fedbench.datasets.csv_file import load_history
from fedbench.errors import DataError, FedbenchError, UsageError
from fedbench.experiment import checkpoint, resume, run_state
from fedbench.experiment.summary import Best
from fedbench.settings import command_line
from fedbench.settings.flags import flag_groups
from fedbench.simulation.federation import Federation
from fedbench.sweeping import study
from tests.conftest import small_split

CASES = int(os.environ.get("FEDBENCH_FUZZ", "40"))
CPU_SECONDS = 30
"""a case that computes for so long hangs"""


def fuzz(cases: int = CASES) -> Any:
    """So many cases; without shrinking in the long form, which would take as long again."""
    phases = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)
    return settings(max_examples=max(2, cases), deadline=None, phases=phases, suppress_health_check=list(HealthCheck), database=None)


@contextmanager
def no_hang() -> Iterator[None]:
    """Fail after CPU_SECONDS of computing; a busy machine is no hang."""

    def late(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"still computing after {CPU_SECONDS} s")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


class Writes:
    """Which files this process opens for writing, makes, renames or removes, as Python's audit hooks tell."""

    def __init__(self) -> None:
        self.paths: list[str] | None = None
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.paths is None:
            return
        if event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
            flags = arguments[2] or 0
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                self.paths.append(os.fsdecode(arguments[0]))
        elif event in ("os.mkdir", "os.remove", "os.rmdir", "os.rename"):
            self.paths += [os.fsdecode(path) for path in arguments[:2] if isinstance(path, str | bytes | os.PathLike)]

    @contextmanager
    def only_below(self, *folders: Path) -> Iterator[None]:
        self.paths = []
        try:
            yield
            allowed = [os.path.realpath(folder) for folder in (*folders, "/dev/null")]
            strays = [path for path in map(os.path.realpath, self.paths) if not any(path == a or path.startswith(a + "/") for a in allowed)]
            caches = ("__pycache__", "/numba", "/matplotlib")  # what libraries keep for themselves, wherever they are told to
            assert [path for path in strays if not any(cache in path for cache in caches)] == []
        finally:
            self.paths = None


@cache
def writes() -> Writes:
    return Writes()


def answer(words: list[str], main: Any = cli.main) -> tuple[int, str]:
    """Exit code and standard error of a command; anything but a known code and at most one line of error fails."""
    out, err = io.StringIO(), io.StringIO()
    with no_hang(), redirect_stdout(out), redirect_stderr(err):
        code = main(words)
    said = err.getvalue()
    assert code in (0, 1, 2, 3), (words, said)
    assert "Traceback" not in said and "internal error" not in said, (words, said)
    assert sum(line.startswith("fedbench: ") for line in said.splitlines()) == (code != 0), (words, said)
    return code, said


# ---- words and values ------------------------------------------------------------------------------------------------------

ALGORITHMS = ("fedem", "fedmf", "fedavg_ncf", "local", "popularity", "random")
KEYS = sorted({flag.key for name in ALGORITHMS for group in flag_groups(registry.algorithm(name)).values() for flag in group} - {"debug"})
"""--debug asks for a traceback"""
odd_text = st.text(max_size=12) | st.sampled_from(
    ["", " ", "-", "--", "\0", "nan", "inf", "-0", "1e999", "../..", "~", "~root", "/", "²", "٣"]
)
numbers = st.integers(-(2**70), 2**70) | st.integers(-2, 20) | st.floats() | st.sampled_from([0.0, -0.0, 1e-320, 1e308])
scalars = st.none() | st.booleans() | numbers | odd_text | st.sampled_from(ALGORITHMS)
good = {
    "algo": st.sampled_from(ALGORITHMS),
    "dataset": st.just("synthetic"),
    "protocol": st.sampled_from(["clean", "published", "ncf"]),
    "split": st.sampled_from(["auto", "time", "random", "item-order", "ncf", "kfold", "users"]),
    "device": st.sampled_from(["cpu", "auto", "cuda:99", "mps"]),
    "seeds": st.sampled_from(["0-2", "3,1", "0-99999999999", "2-1", "0--1"]),
    "checkpoint_every": st.sampled_from(["1", "10", "5s", "never", "auto", "0", "s", "1.5"]),
    "max_upload_norm": st.sampled_from(["1", "10x", "none", "auto", "x", "-1", "1e400"]),
    "out": st.sampled_from(["r", "a/b", ".", "..", "/proc/x", "/dev/null", "\0"]),
    "resume": st.sampled_from(["auto", "never", "r", "/", "nowhere"]),
}


def value_for(key: str) -> st.SearchStrategy[Any]:
    return good[key] | scalars if key in good else scalars | st.integers(1, 5) | st.floats(0, 1)


# ---- CSV files -------------------------------------------------------------------------------------------------------------

ids = st.sampled_from(["1", "2", "3", "u", "ü", '"', '"a"', '""', ",", " ", "", "0x10", "\0", "x" * 300]) | st.text(max_size=4)
cells = ids | numbers.map(str) | st.sampled_from(["5", "4.5", "-1", "nan", "1e400", "978300760"])
lines = st.lists(cells, min_size=0, max_size=5).map(",".join)
headers = st.sampled_from(["", "user,item", "user,item,rating,time", "item,user,time", "user,item,user", "USER,Item,x", "a,b"])
tables = st.builds(
    lambda head, rows, end: end.join([head, *rows]), headers, st.lists(lines, max_size=30), st.sampled_from(["\n", "\r\n", "\r"])
)
dense = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12), numbers), min_size=20, max_size=120).map(
    lambda rows: "\n".join(f"{user},{item},{rating}" for user, item, rating in rows)
)


@fuzz()
@given(
    st.one_of(st.binary(max_size=200), tables.map(lambda text: text.encode(errors="replace")), dense.map(str.encode)),
    st.sampled_from(list(PRESETS)),
)
@example(b"\xef\xbb\xbf", "clean")
@example(b"user,item\n", "clean")
@example(b"1,2,3,4,5\n", "clean")
def test_csv_files(content: bytes, protocol: str) -> None:
    with TemporaryDirectory() as folder, no_hang():
        path = Path(folder) / "rows.csv"
        path.write_bytes(content)
        try:
            parts = split(registry.dataset(str(path))(DatasetOptions()), PRESETS[protocol])
            assert parts.clients > 0 and parts.items > 0
        except (DataError, UsageError) as error:
            assert "\n" not in str(error)


@fuzz()
@given(st.binary(max_size=100) | st.builds(lambda head, rows: "\n".join([head, *rows]).encode(errors="replace"),
       st.sampled_from(["", "item", "item,rating", "rating,item", "item,item"]), st.lists(lines, max_size=9)))  # fmt: skip
@example(b"item,rating\n1,nan\n")
@example(b"item\n")
def test_history_files(content: bytes) -> None:
    with TemporaryDirectory() as folder, no_hang():
        path = Path(folder) / "seen.csv"
        path.write_bytes(content)
        try:
            found = load_history(path)
            assert len(found["item"]) and all(np.isfinite(found.get("rating", np.zeros(1))))
        except DataError as error:
            assert "\n" not in str(error)


# ---- config files ----------------------------------------------------------------------------------------------------------

keys = st.sampled_from([*KEYS, "config", "list", "no_mlflow", "roundz", "", "-", "a b"]) | odd_text
nested = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=6)
configs = st.builds(
    lambda base, more: base | more,
    st.fixed_dictionaries({}, optional={key: value_for(key) for key in ("algo", "dataset", "rounds", "seeds", "dim")}),
    st.dictionaries(keys, nested, max_size=6),
)


def toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return {"null": '"none"', "NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}.get(json.dumps(value), json.dumps(value))


def toml(values: dict[str, Any]) -> str:
    return "\n".join(f"{json.dumps(key)} = {toml_value(value)}" for key, value in values.items())


texts = st.one_of(configs.map(json.dumps), configs.map(toml), st.text(max_size=60), nested.map(json.dumps))


@fuzz()
@given(texts, st.sampled_from(["c.json", "c.toml", "c.txt"]))
@example("[" * 100_000, "c.json")
@example("{" * 5_000, "c.json")
@example("a = " + "[" * 5_000, "c.toml")
@example('{"algo": "fedmf", "dataset": "synthetic", "layers": [[]]}', "c.json")
@example('{"algo": "fedmf", "dataset": "\\u0000"}', "c.json")
@example('{"algo": "fedmf", "dataset": "synthetic", "out": "\\ud800"}', "c.json")
def test_config_files(text: str, name: str) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(text.encode(errors="surrogatepass"))
        with writes().only_below():
            answer(["--config", str(path), "--print-config"])


# ---- study files -----------------------------------------------------------------------------------------------------------

axes = st.dictionaries(keys, st.lists(scalars, max_size=3) | scalars, max_size=3)
fixed = st.fixed_dictionaries({}, optional={key: value_for(key) for key in ("algo", "dataset", "rounds", "budget", "budget_value")})
studies = st.fixed_dictionaries(
    {},
    optional={
        "about": scalars,
        "metrics": st.lists(scalars, max_size=2) | scalars,
        "fixed": fixed | scalars,
        "axes": axes | st.just({"dim": [4, 8]}) | st.just({"seeds": "0-99999"}),
        "grid": st.lists(st.fixed_dictionaries({}, optional={"name": scalars, "fixed": fixed, "axes": axes}), max_size=2) | scalars,
        "other": scalars,
    },
)


@fuzz()
@given(studies.map(toml) | texts)
@example('grid = [{"axes" = {"dim" = [4, 8]}}]')
@example("grid = []")
def test_study_files(text: str) -> None:
    with TemporaryDirectory() as folder, no_hang(), writes().only_below(Path(folder)):
        path = Path(folder) / "study.toml"
        path.write_bytes(text.encode(errors="surrogatepass"))
        try:
            assert study.read([], path).points
        except (UsageError, DataError) as error:
            assert str(error)


# ---- command lines ---------------------------------------------------------------------------------------------------------


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    words: list[str] = []
    if draw(st.booleans()):
        words += ["--algo", draw(st.sampled_from(ALGORITHMS)), "--dataset", "synthetic"]
    for _ in range(draw(st.integers(0, 5))):
        key = draw(st.sampled_from(KEYS))
        option = draw(st.sampled_from(["--", "--no-", "-", ""])) + key.replace("_", draw(st.sampled_from("-_")))
        value = draw(value_for(key) | st.just("0.5,8"))
        words += draw(st.sampled_from([[option], [option, str(value)], [f"{option}={value}"], [str(value)]]))
    return words


@fuzz()
@given(command_lines())
@example(["--algo", "fedmf", "--dataset", "synthetic", "--dataset"])
@example(["--algo", "fedmf", "--dataset", "\0"])
@example(["--algo", "\0.py", "--dataset", "synthetic"])
@example(["--algo", "fedmf", "--dataset", "synthetic", "--resume", "\0"])
@example(["--algo", "fedmf", "--dataset", "synthetic", "--out", "x" * 5000])
@example(["--config", "\0.json"])
def test_command_lines(words: list[str]) -> None:
    with writes().only_below():
        answer([*words, "--print-config"])


COMMANDS = ["train", "audit", "bench", "fetch", "list", "sweep", "report", "recommend", "evaluate", "log-model", "--help", "-h", "tain"]


@fuzz()
@given(st.lists(st.sampled_from(COMMANDS) | odd_text, max_size=1), command_lines())
def test_commands(name: list[str], words: list[str]) -> None:
    """Only what ends before any work: a flag that nobody has stands at the end."""
    with writes().only_below():
        answer([*name, *words, "--no-such-flag"], command)


# ---- plug-in files ---------------------------------------------------------------------------------------------------------

kinds = st.sampled_from(
    ["int", "float", "str", "bool", "tuple[int, ...]", "int | None", "list", "dict[str, int]", "Nothing", "torch.Tensor", "1", ""]
)
defaults = st.sampled_from(["1", "0.5", "'a'", "None", "(1, 2)", "[]", "{}", "True", "field(default_factory=list)", "1/0", "..."])
names = st.sampled_from(
    ["lr", "rounds", "dim", "config", "out", "help", "seed", "class", "_x", "name", "tables", "published", "choices", "é"]
)
fields = st.builds(
    lambda name, kind, default: f"    {name}: {kind} = {default}" if kind else f"    {name} = {default}", names, kinds, defaults
)
bodies = st.lists(
    fields | st.sampled_from(["    pass", "    def check(self, world=None): raise ValueError", "    def score(self): return 1"]), max_size=4
)
heads = st.sampled_from(
    [
        "",
        "@dataclass(frozen=True)",
        "@dataclass",
        "@register('mine', summary='x')",
        "@register('fedmf', summary='')",
        "@register('a b', summary='')",
    ]
)
bases = st.sampled_from(["Algorithm", "FedMF", "object", "Missing", "Algorithm, FedMF", "SharedModel"])
classes = st.builds(lambda head, name, base, body: "\n".join([*head, f"class {name}({base}):", *(body or ["    pass"])]),
                    st.lists(heads, max_size=2), st.sampled_from(["A", "B", "fedmf"]), bases, bodies)  # fmt: skip
statements = st.sampled_from(
    ["import nothing", "raise SystemExit(0)", "raise KeyError", "1/0", "x = ", "return", "raise BaseException", "\0", "print('hi')"]
)
PREAMBLE = """from dataclasses import dataclass, field
import torch
from fedbench.contract.algorithm import Algorithm
from fedbench.contract.registry import register
from fedbench.parts.server_optimizer import SharedModel
from fedbench.algorithms.fedmf import FedMF
"""
plug_ins = st.lists(classes | statements, max_size=3).map(lambda parts: PREAMBLE + "\n".join(parts)) | st.text(max_size=40)


@fuzz()
@given(plug_ins)
@example(PREAMBLE + "class A(Algorithm):\n    published = {'rounds': object()}")
@example(PREAMBLE + "class A(Algorithm):\n    choices = 5")
@example(PREAMBLE + "class A(Algorithm):\n    published = 3")
@example(PREAMBLE + "class A(Algorithm):\n    tables = 7")
@example(PREAMBLE + "@dataclass(frozen=True)\nclass A(Algorithm):\n    def check(self, world=None): raise ValueError('no')")
@example("\ud800")
def test_plug_in_files(text: str) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "mine.py"
        path.write_bytes(text.encode(errors="surrogatepass"))
        with writes().only_below(Path(folder), Path(os.environ["XDG_STATE_HOME"])):
            answer(["--algo", str(path), "--dataset", "synthetic", "--print-config"])


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
