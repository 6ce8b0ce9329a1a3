"""The edge: every command ends here, in an exit code and at most one line of error."""

from __future__ import annotations

import json
import os
import select
import sys
import traceback
from collections.abc import Callable, Sequence

from fedbench import registry
from fedbench.errors import DISK_FULL, FedbenchError, UsageError

Command = Callable[[list[str]], int]


def main(argv: Sequence[str] | None = None) -> int:
    """`train.py`: one run, or one a seed and fold; under torchrun a rank's part of one."""
    code = guard(train, list(sys.argv[1:] if argv is None else argv))
    if "fedbench.ranks" in sys.modules:
        from fedbench import ranks

        ranks.leave(code)
    return code


def train(argv: list[str]) -> int:
    """What `main` does, with errors raised."""
    from fedbench import config

    request = config.parse(argv)
    if request.list:
        print(listing())
    elif request.print_config:
        print(json.dumps(request.shown(), indent=2))
    else:
        from fedbench.run import run, run_several

        if len(request.configs) == 1:
            run(request.configs[0])
        else:
            run_several(request.configs, request.out, request.jobs)
    return 0


def show_list(argv: list[str]) -> int:
    """`python -m fedbench list`"""
    if argv:
        raise UsageError(f"list takes no flags, but was given {argv[0]!r}")
    print(listing())
    return 0


def fetch(argv: list[str]) -> int:
    """`python -m fedbench fetch filmtrust ml-1m`: what a later run would download, now."""
    from fedbench.data import DatasetOptions

    if argv and argv[0] in ("-h", "--help"):
        print(
            "usage: python -m fedbench fetch DATASET [DATASET ...]\n\nBrings datasets into the cache, so that later runs need no network."
        )
        return 0
    if not argv or any(word.startswith("-") for word in argv):
        raise UsageError("fetch takes names of datasets, such as `fetch filmtrust ml-1m`; `list` shows them")
    for name in argv:
        data = registry.dataset(name)(DatasetOptions())
        print(f"{name}: {data.users:,} users, {data.items:,} items, {len(data.user):,} interactions from {data.source}")
    return 0


def listing() -> str:
    """Algorithms and datasets, one line each."""
    rows = [("algorithms", "")]
    rows += [(f"  {name}", cls.summary) for name, cls in registry.algorithms().items()]
    rows += [("datasets", "")]
    for name, entry in registry.datasets().items():
        also = f" (also: {', '.join(entry.aliases)})" if entry.aliases else ""
        rows.append((f"  {name}", entry.summary + also))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {summary}".rstrip() for name, summary in rows)


def guard(command: Command, argv: list[str]) -> int:
    """Run a command; whatever it raises becomes one line on stderr and an exit code."""
    debug = "--debug" in argv
    try:
        code = _exit_code(command, argv)
        sys.stdout.flush()
        return code
    except FedbenchError as error:
        return report_error(str(error), error.exit_code, debug)
    except MemoryError:
        return report_error("not enough memory; lower --dim, --negatives, --block-rows or the data's size", 1, debug)
    except KeyboardInterrupt:
        return report_error("interrupted", 130, debug)
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
        return _report_internal(error, debug)


def _exit_code(command: Command, argv: list[str]) -> int:
    try:
        return command(argv)
    except SystemExit as end:  # argparse, after --help
        return end.code if isinstance(end.code, int) else int(end.code is not None)


def report_error(message: str, code: int, debug: bool = False, kind: str = "error") -> int:
    """One line on stderr, after the traceback if wanted; gives the exit code back. Of torchrun's ranks the first speaks for all."""
    if "TORCHELASTIC_RUN_ID" in os.environ and not debug:
        from fedbench import ranks

        if not ranks.speaks():
            return code
    if debug:
        traceback.print_exc()
    line = " ".join(message.split())
    print(f"fedbench: {kind}: {''.join(c if c.isprintable() else ascii(c)[1:-1] for c in line)}", file=sys.stderr)
    return code


def _report_internal(error: Exception, debug: bool) -> int:
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
