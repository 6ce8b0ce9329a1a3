"""Exit codes, commands, and what a real process says."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedbench.__main__ import COMMANDS
from fedbench.__main__ import main as fedbench_main
from fedbench.commands import cli
from fedbench.contract import plugin_errors
from fedbench.errors import DataError, FedbenchError, UsageError
from tests.test_cli import AGAIN
from tests.test_cli import args as args
from tests.test_cli import tiny as tiny

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (FedbenchError("it\nfailed"), 1, "fedbench: error: it failed\n"),
        (UsageError("wrong"), 2, "fedbench: error: wrong\n"),
        (DataError("gone"), 3, "fedbench: error: gone\n"),
        (KeyboardInterrupt(), 130, "fedbench: interrupted\n"),
        (ValueError("odd"), 1, f"fedbench: internal error: ValueError: odd {AGAIN}\n"),
        (BrokenPipeError("socket"), 1, f"fedbench: internal error: BrokenPipeError: socket {AGAIN}\n"),
    ],
)
def test_errors_become_exit_codes(
    error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin_errors, "_homes", set())  # other tests define algorithms in this package

    def command(argv: list[str]) -> int:
        raise error

    assert cli.guard(command, []) == code
    assert capsys.readouterr().err == line
    assert cli.guard(command, ["--debug"]) == code
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("adit", 2, "unknown command 'adit'; did you mean audit?"),
        ("qqq", 2, "use one of train, sweep, tune, audit, check, bench, warm, fetch, list"),
        ("fetch", 2, "fetch takes names of datasets"),
        ("fetch filmtrst", 2, "did you mean filmtrust?"),
        ("list x", 2, "list takes no flags"),
        ("train", 2, "--algo is missing"),
        ("train --alog x", 2, "did you mean --algo?"),
    ],
)
def test_bad_commands(words: str, code: int, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert fedbench_main(words.split()) == code
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1


def test_good_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert fedbench_main([]) == 2
    usage = capsys.readouterr().err
    assert all(f"\n  {name} " in usage for name in COMMANDS)
    for words in (["--help"], ["help"]):
        assert fedbench_main(words) == 0 and capsys.readouterr().out == usage
    assert fedbench_main(["help", "audit"]) == 0 and "canaries" in capsys.readouterr().out
    assert fedbench_main(["list"]) == 0 and "datasets" in capsys.readouterr().out


def started(*words: str, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)


def bare_python(*words: str) -> subprocess.CompletedProcess[str]:
    """As `started`, by a Python that has none of the packages."""
    return started("-I", "-S", "-c", f"import sys, runpy; sys.path.insert(0, {str(ROOT)!r}); {words[0]}", *words[1:])


def test_without_the_virtual_environment_one_line_says_make_setup() -> None:
    ran = 'runpy.run_path("train.py", run_name="__main__")'
    done = bare_python(ran, "--algo", "fedem", "--dataset", "filmtrust")
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert "is not installed" in done.stderr and "`make setup`" in done.stderr and ".venv/bin/python" in done.stderr
    assert bare_python(ran, "--help").stdout == cli.HELP
    for module in ("runpy.run_module('fedbench', run_name='__main__')", "runpy.run_path('sweeps/grid.py', run_name='__main__')"):
        done = bare_python(module, "list")
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and "`make setup`" in done.stderr


def test_an_older_python_is_told_what_is_needed() -> None:
    done = bare_python("sys.version_info = (3, 8, 1); runpy.run_path('train.py', run_name='__main__')", "--help")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "Python 3.11 or newer is needed, this is 3.8" in done.stderr and "`make setup`" in done.stderr
    for file in ("train.py", "sweeps/grid.py", "fedbench/__init__.py"):  # what it reads until then
        ast.parse((ROOT / file).read_text(), feature_version=(3, 7))


def test_every_package_that_is_imported_is_asked_for() -> None:
    files = [file for room in ("fedbench", "algorithms", "datasets") for file in (ROOT / room).rglob("*.py")]
    trees = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    names = {alias.name for node in trees if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in trees if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    known = {*sys.stdlib_module_names, "fedbench", "algorithms", "datasets", "tests", "ray", "triton", "cvxpy"}
    assert {name.partition(".")[0] for name in names} - known == set(cli.PACKAGES)


def test_help_imports_no_package() -> None:
    code = (
        "import sys; from fedbench.commands import cli; cli.main(['--help']); print([name for name in cli.PACKAGES if name in sys.modules])"
    )
    assert started("-c", code).stdout.splitlines()[-1] == "[]"


def test_train_py_as_a_process(args: list[str]) -> None:
    bad = started("train.py", *args, "--wieght", "1")
    assert (bad.returncode, bad.stdout, bad.stderr) == (2, "", "fedbench: error: unknown flag --wieght; did you mean --weight?\n")
    good = started("train.py", *args, "--print-config", "--seeds", "0-1")
    assert good.returncode == 0 and good.stderr == "" and json.loads(good.stdout)["seeds"] == [0, 1]


@pytest.mark.parametrize("words", ["train.py --help", "-m fedbench list"])
def test_a_closed_pipe_is_silent(words: str) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        assert started(*words.split(), stdout=write).stderr == ""
    finally:
        os.close(write)
