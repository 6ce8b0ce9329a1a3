"""`python -m fedbench check FILE.py`: is an algorithm what the engine takes it for? One line a check, and exit code 1 if one fails."""

from __future__ import annotations

import inspect
import json
import logging
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import SkipTest

import numba
import torch

from fedbench.console import fitted
from fedbench.contract import plugin_errors
from fedbench.contract.algorithm import Algorithm
from fedbench.errors import FedbenchError, UsageError
from fedbench.settings import command_line
from fedbench.simulation.federation import Federation
from fedbench.simulation.probe import check_local_work
from fedbench.testing.algorithm_tests import AlgorithmTests
from fedbench.testing.small_federation import Differs, small_instance, split_of
from fedbench.text import say
from fedbench.tracking.run_log import setup_logging

USAGE = "python -m fedbench check FILE.py [flags of the algorithm] [--may-leave NAME,NAME] [--json]"
HELP = f"""usage: {USAGE}

Looks at an algorithm, in a file or by its name (--algo NAME), in about half a minute, on small synthetic federations:
  - its class: names, signatures, fields; and what each of its functions returns
  - all clients at once give the numbers of one client after another by torch.optim, to 1e-9: padding, blocks and threads change nothing
  - nothing private leaves the device; a run that stopped resumes bit for bit; no step waits for the device
  - without a server it is at chance
Exit code 0: all is well. 1: a check failed. 2: the file cannot be loaded.

  --may-leave NAMES   private tensors that upload may show
  --json              the result as JSON
example: python -m fedbench check algorithms/fedmf.py --lr 0.1
"""
TOLERANCE = 1e-8
"""what the tests of a small instance hold to 1e-9; at any --dim a server that solves for something magnifies rounding"""


class Result(NamedTuple):
    """Of one check."""

    name: str
    result: str
    """ok, FAILED or skipped"""
    said: str
    seconds: float


def main(argv: list[str]) -> int:
    """0 if every check passes, 1 otherwise."""
    if {"-h", "--help"} & set(argv):
        say(HELP)
        return 0
    words, may_leave, as_json = own_flags(argv)
    config = command_line.parse([*words, "--dataset", "synthetic", "--no-mlflow"]).configs[0]  # one of several folds
    setup_logging(quiet=True, debug=config.debug)
    for handler in logging.getLogger("fedbench").handlers:  # what is said of data is of no interest in data that was made up
        handler.setLevel(logging.DEBUG if config.debug else logging.ERROR)
    torch.set_num_threads(1)
    numba.set_num_threads(1)
    algorithm = config.algorithm
    if not as_json:
        say(fitted(f"check of {algorithm.name} ({config.algo})"))
    done: list[Result] = []
    for one in checks(algorithm, may_leave, config.debug):
        done.append(one)
        if not as_json:
            shown = f"  {one.result:<7}  {one.name}{f': {one.said}' if one.said else ''}"
            say(fitted(shown if one.result == "skipped" else f"{shown}  ({one.seconds:.1f} s)"))
            sys.stdout.flush()
    failed = sum(one.result == "FAILED" for one in done)
    if as_json:
        say(json.dumps({"algorithm": algorithm.name, "passed": not failed, "checks": [one._asdict() for one in done]}, indent=2))
    else:
        took = sum(one.seconds for one in done)
        say(f"{f'{failed} of {len(done)} checks FAILED' if failed else 'all is well'} ({took:.0f} s)")
    return int(failed > 0)


def own_flags(argv: list[str]) -> tuple[list[str], tuple[str, ...], bool]:
    """The words of the algorithm with --algo before its file, the names that may leave, and whether JSON is wanted."""
    words = [word for word in argv if word != "--json"]
    may_leave: tuple[str, ...] = ()
    for at, word in enumerate(words):
        if word.split("=")[0] == "--may-leave":
            rest = words[at : at + (1 if "=" in word else 2)]
            may_leave = tuple(name for name in rest[-1].removeprefix("--may-leave").removeprefix("=").split(",") if name)
            if not may_leave:
                raise UsageError("--may-leave needs names of private tensors, such as --may-leave bias")
            words = words[:at] + words[at + len(rest) :]
            break
    if words and not words[0].startswith("-"):
        words = ["--algo", *words]
    if not any(word.split("=")[0] == "--algo" for word in words):
        raise UsageError(f"check needs an algorithm: {USAGE}")
    if refused := [word for word in words if word.split("=")[0] in ("--dataset", "--out", "--seeds", "--config")]:
        raise UsageError(f"check takes no {refused[0].split('=')[0]}: it makes small synthetic federations of its own")
    return words, may_leave, "--json" in argv


def checks(algorithm: Algorithm, may_leave: tuple[str, ...], debug: bool = False) -> Iterator[Result]:
    """The class was looked at when it was loaded. What a rehearsal finds would fail in all that comes after it."""
    yield Result("its class: names, signatures, fields", "ok", "", 0.0)
    start = time.perf_counter()
    said = failure(lambda: check_local_work(algorithm), debug)[1]
    yield Result("rehearsal: two rounds, each answer looked at", "FAILED" if said else "ok", said, time.perf_counter() - start)
    if said:
        return
    yield derived(algorithm)
    tests = type("Checked", (AlgorithmTests,), {"algorithm": algorithm, "may_leave": may_leave, "tolerance": TOLERANCE})()
    names = [name for name in vars(AlgorithmTests) if name.startswith("test_") and (name != "test_quality" or tests.band)]
    for place, name in enumerate(names, 1):
        with progress(f"{place} of {len(names)}: {name.removeprefix('test_').replace('_', ' ')}"):
            result = tested(tests, name, debug)
        yield result


def derived(algorithm: Algorithm) -> Result:
    """Whether kernels could be made of its loss and of its score; a method without runs too, only slower."""
    start, small = time.perf_counter(), small_instance(algorithm)
    federation = Federation.start(small, split_of(small), 0)
    for _ in range(2):  # in the first round some clients may have been sent nothing
        federation.next_round()
        federation.outcome()
    said = sorted(federation.without_kernel())
    return Result("kernels derived from its code", "skipped" if said else "ok", "; ".join(said), time.perf_counter() - start)


def tested(tests: AlgorithmTests, name: str, debug: bool) -> Result:
    """One test with kernels and without; the first failure counts."""
    test, start, said = getattr(tests, name), time.perf_counter(), ("", "")
    for case in tests.cases(getattr(AlgorithmTests, name)):
        with tempfile.TemporaryDirectory(prefix="fedbench-check-") as folder:
            given = {**case, "tmp_path": Path(folder)} if "tmp_path" in inspect.signature(test).parameters else case
            said = failure(partial(test, **given), debug)
        if said[1]:
            path = f" (--kernel {case['kernel']})" if said[0] == "FAILED" and "kernel" in case else ""
            said = said[0], said[1] + path
            break
    return Result(name.removeprefix("test_").replace("_", " "), said[0] or "ok", said[1], time.perf_counter() - start)


def failure(work: Callable[[], None], debug: bool) -> tuple[str, str]:
    """FAILED or skipped and why, in one line; two empty words if it went well."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            work()
    except SkipTest as reason:
        return "skipped", str(reason)
    except (Differs, FedbenchError) as error:
        said = str(error)
    except (Exception, SystemExit) as error:
        said = str(plugin_errors.blame(error) or f"{type(error).__name__}: {error}")
    else:
        return "", ""
    if debug:
        say(traceback.format_exc().rstrip(), file=sys.stderr)
    return "FAILED", " ".join(said.split())


@contextmanager
def progress(text: str) -> Iterator[None]:
    """A line that says what runs, while it runs, on a terminal."""
    line = f"  ...      {text}" if sys.stderr.isatty() else ""
    sys.stderr.write(f"{line}\r" if line else "")
    sys.stderr.flush()
    try:
        yield
    finally:
        sys.stderr.write(f"{' ' * len(line)}\r" if line else "")
