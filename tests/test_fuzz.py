"""Every input at random: whatever a file or a command line holds, the answer is a result or one line of error.

Few cases here; `FEDBENCH_FUZZ=10000 python -m pytest tests/test_fuzz.py` tries that many on each target. Cases that once went wrong
stand beside the targets as examples.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from fedbench.__main__ import main as command
from fedbench.commands import cli
from fedbench.contract import registry
from fedbench.contract.dataset import DatasetOptions
from fedbench.data.protocol import PRESETS
from fedbench.data.split import split
from fedbench.datasets.csv_file import load_history
from fedbench.errors import DataError, UsageError
from fedbench.settings.flags import flag_groups
from fedbench.sweeping import study

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
