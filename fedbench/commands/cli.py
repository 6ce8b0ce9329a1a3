"""The edge: every command ends here, in an exit code and at most one line of error."""

from __future__ import annotations

import json
import os
import select
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec

from fedbench import __version__
from fedbench.console import fitted
from fedbench.errors import DISK_FULL, DataError, FedbenchError, UsageError
from fedbench.text import prepare_output, say

Command = Callable[[list[str]], int]

PACKAGES = (
    *("numpy", "torch", "numba", "llvmlite", "pandas", "scipy", "pyarrow", "safetensors"),
    *("mlflow", "matplotlib", "tqdm", "coloredlogs", "pooch", "requests", "filelock", "packaging", "shtab", "optuna"),
)
"""what the commands import"""
HELP = """usage: python train.py --algo NAME --dataset NAME [flags]

Train one personalised federated recommender and report honest numbers.
`python` is .venv/bin/python, which `make setup` makes.

most used:
  --algo NAME          an algorithm of --list, or a path to a .py file
  --dataset NAME       a dataset of --list, or a path to a .csv file
  --protocol NAME      clean (default), ncf (the NCF paper's split of ml-1m), or
                       published (as papers often do it: LEAKS)
  --rounds N           rounds of training
  -n N                 clients a round
  -e N                 epochs that a client trains in a round
  --lr X, --dim N      learning rate, length of the vectors
  --seed N             another seed; --seeds 0-4 for several, with their mean
  --jobs N             how many of several seeds to run at once
  --out DIR            folder of the run; the same command goes on with it
  --config FILE        read flags from a .json or .toml file
  --device cuda        train on a GPU
  --no-mlflow, --quiet less tracking, less output

more:
  --list               all algorithms and datasets
  --algo NAME --help   the flags of one algorithm, with their defaults
  --help all           every flag of every run
  --version            the version
  python -m fedbench   the other commands: sweep, report, recommend, audit, ...

examples:
  python train.py --algo fedem --dataset filmtrust --alpha 0.9
  python train.py --algo fedmf --dataset synthetic --rounds 5
  python train.py --algo fedrecon --dataset ml-100k --seeds 0-2 --jobs 2
  python train.py --algo fedrecon --dataset ml-100k --print-config
"""
"""what `train.py --help` prints; it stands here as text, so that it takes no second to come"""


def main(argv: Sequence[str] | None = None) -> int:
    """`train.py`: one run, or one a seed and fold; under torchrun a rank's part of one."""
    return leave(guard(train, list(sys.argv[1:] if argv is None else argv)))


def leave(code: int) -> int:
    """The exit code; of several of torchrun's processes none leaves before the others may."""
    if "fedbench.simulation.workers" in sys.modules:
        from fedbench.simulation import workers

        workers.leave(code)
    return code


def train(argv: list[str]) -> int:
    """What `main` does, with errors raised."""
    if "--version" in argv:
        say(f"fedbench {__version__}")
        return 0
    if argv[:1] in (["-h"], ["--help"]) and len(argv) == 1:
        say(HELP.rstrip("\n"))
        return 0
    require_packages()
    from fedbench.settings import command_line

    if how := command_line.wants_help(argv):
        command_line.print_help(argv, how)
        return 0
    request = command_line.parse(argv)
    if request.list:
        say(listing())
    elif request.print_config:
        say(json.dumps(request.shown(), indent=2))
    else:
        from fedbench import api

        api.execute(request)
    return 0


def require_packages() -> None:
    """Raise UsageError if this Python is not the one that `make setup` prepares, or has no place for compiled kernels."""
    if not os.environ.get("NUMBA_CACHE_DIR"):
        raise UsageError("compiled kernels can be kept nowhere: set NUMBA_CACHE_DIR to a folder that can be written")
    missing = [name for name in PACKAGES if name not in sys.modules and find_spec(name) is None]
    if missing:
        line = shlex.join([".venv/bin/python", *sys.orig_argv[1:]])
        raise UsageError(f"{missing[0]} is not installed for {sys.executable}: run `make setup` once, then `{line}`")


def show_list(argv: list[str]) -> int:
    """`python -m fedbench list`"""
    if argv:
        raise UsageError(f"list takes no flags, but was given {argv[0]!r}")
    say(listing())
    return 0


def fetch(argv: list[str]) -> int:
    """`python -m fedbench fetch filmtrust ml-1m`: what a later run would download, now."""
    from fedbench.contract import registry
    from fedbench.contract.dataset import DatasetOptions

    if argv and argv[0] in ("-h", "--help"):
        say("usage: python -m fedbench fetch DATASET [DATASET ...]\n\nBrings datasets into the cache, so that later runs need no network.")
        return 0
    if not argv or any(word.startswith("-") for word in argv):
        raise UsageError("fetch takes names of datasets, such as `fetch filmtrust ml-1m`; `list` shows them")
    loaders = {registry.dataset_name(name): registry.dataset(name) for name in argv}
    for name, load in loaders.items():
        with suppress(DataError):
            load(DatasetOptions(ncf=True))  # --protocol ncf reads other files
        data = load(DatasetOptions())
        say(f"{name}: {data.users:,} users, {data.items:,} items, {len(data.user):,} interactions from {data.source}")
    return 0


def listing() -> str:
    """Algorithms and datasets, one line each."""
    from fedbench.contract import registry

    rows = [("algorithms", "")]
    rows += [(f"  {name}", cls.summary) for name, cls in registry.algorithms().items()]
    rows += [("datasets", "")]
    for name, entry in registry.datasets().items():
        also = f" (also: {', '.join(entry.aliases)})" if entry.aliases else ""
        rows.append((f"  {name}", entry.summary + also))
    width = max(len(name) for name, _ in rows)
    return fitted("\n".join(f"{name:<{width}}  {summary}".rstrip() for name, summary in rows))


def guard(command: Command, argv: list[str]) -> int:
    """Run a command; whatever it raises becomes one line on stderr and an exit code."""
    debug = "--debug" in argv
    prepare_output()
    try:
        code = _exit_code(command, argv)
        sys.stdout.flush()
        return code
    except FedbenchError as error:
        return report_error(_placed(error), error.exit_code, debug)
    except MemoryError:
        return report_error("not enough memory; lower --dim, --negatives, --block-rows or the data's size", 1, debug)
    except KeyboardInterrupt as end:
        return report_error(str(end) or "interrupted", 130, debug, kind="")
    except BrokenPipeError as error:
        if _stdout_is_closed():
            return 1
        return _report_internal(error, debug)
    except OSError as error:
        if error.errno not in DISK_FULL:
            return _report_internal(error, debug)
        where = f"{error.filename}: " if error.filename else ""
        hint = "make room and give the same command again; with --out it goes on from its last checkpoint"
        return report_error(f"the disk is full ({where}{error.strerror}); {hint}", 1, debug)
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's, which need not be loaded
            said = "the GPU's memory is full; lower --block-rows, --dim, --negatives or -n, or use --device cpu"
            return report_error(said, 1, debug)
        return _report_internal(error, debug)


def _blamed(error: BaseException) -> str:
    """What to say if the error is that of an algorithm's own code; "" otherwise. Where no algorithm was loaded there is none to blame."""
    if "fedbench.contract.plugin_errors" not in sys.modules:
        return ""
    from fedbench.contract import plugin_errors

    return str(plugin_errors.blame(error) or "")


def _placed(error: FedbenchError) -> str:
    """What to say of an error, with its place in an algorithm's code if that raised it."""
    if "fedbench.contract.plugin_errors" not in sys.modules or not isinstance(error, UsageError):
        return str(error)
    from fedbench.contract import plugin_errors

    return plugin_errors.placed(error)


def _exit_code(command: Command, argv: list[str]) -> int:
    try:
        return command(argv)
    except SystemExit as end:  # argparse, after --help; or an algorithm's own code, which must not end a command as if all were well
        if said := _blamed(end):
            return report_error(said, UsageError.exit_code, "--debug" in argv)
        return end.code if isinstance(end.code, int) else int(end.code is not None)


def report_error(message: str, code: int, debug: bool = False, kind: str = "error") -> int:
    """One line on stderr, after the traceback if wanted; gives the exit code back. Of torchrun's ranks the first speaks for all.

    kind: what the line begins with; empty for what is no error.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and not debug:
        from fedbench.simulation import workers

        if not workers.speaks():
            return code
    if debug:
        say(traceback.format_exc().rstrip(), file=sys.stderr)
    begins = f"fedbench: {kind}: " if kind else "fedbench: "
    say(begins + " ".join(message.split()), file=sys.stderr)
    return code


def _report_internal(error: Exception, debug: bool) -> int:
    if said := _blamed(error):
        return report_error(said, UsageError.exit_code, debug)
    hint = "" if debug else " (run again with --debug for the traceback)"
    return report_error(f"{type(error).__name__}: {error}{hint}", 1, debug, kind="internal error")


def _stdout_is_closed() -> bool:
    """True if nobody reads stdout any more; then what is left in the buffer goes nowhere, so that Python ends in silence."""
    try:
        stdout = sys.stdout.fileno()
    except OSError:  # not a real file
        return False
    poll = select.poll()
    poll.register(stdout, 0)
    closed = any(event & select.POLLERR for _, event in poll.poll(0))
    if closed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout)
    return closed
