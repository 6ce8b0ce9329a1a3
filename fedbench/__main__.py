"""`python -m fedbench COMMAND ...`"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from fedbench import __version__
from fedbench.commands.cli import guard, leave, require_packages
from fedbench.errors import UsageError
from fedbench.text import nearest, say

COMMANDS = {
    "train": ("fedbench.commands.cli:train", "one run, as train.py"),
    "sweep": ("fedbench.sweeping.sweep:main", "many runs: grids and studies"),
    "tune": ("fedbench.tuning.tune:main", "search a method's settings on validation"),
    "audit": ("fedbench.commands.audit:main", "prove that a protocol does not leak"),
    "check": ("fedbench.commands.check:main", "test an algorithm, your own or a built-in one"),
    "bench": ("fedbench.commands.bench:main", "measure speed"),
    "warm": ("fedbench.commands.warm:main", "compile kernels ahead of the first run"),
    "fetch": ("fedbench.commands.cli:fetch", "bring datasets into the cache"),
    "list": ("fedbench.commands.cli:show_list", "show algorithms and datasets"),
    "report": ("fedbench.reporting.report:main", "compare finished runs in one page"),
    "ui": ("fedbench.commands.ui:main", "open all runs in the MLflow UI"),
    "evaluate": ("fedbench.commands.evaluate:main", "measure a finished run's model again, also on new users"),
    "recommend": ("fedbench.commands.recommend:main", "what a trained model recommends"),
    "doctor": ("fedbench.commands.doctor:main", "say whether this machine is ready"),
    "submit": ("fedbench.commands.submit:main", "write a finished run as one file that others can verify"),
    "verify": ("fedbench.commands.verify:main", "run such a file again and compare"),
    "reproduce": ("fedbench.commands.reproduce:main", "run a row of a table of results again and compare"),
    "log-model": ("fedbench.commands.log_model:main", "put a trained model into MLflow, to be served"),
    "completion": ("fedbench.commands.completion:main", "what a shell needs to complete commands and flags"),
}
USAGE = f"""usage: python -m fedbench COMMAND [flags]

{chr(10).join(f"  {name:<10} {what}" for name, (_, what) in COMMANDS.items())}

python -m fedbench COMMAND --help shows a command's flags."""


def dispatch(argv: list[str]) -> int:
    """Hand the rest of the command line to the command's own module, which only now is imported."""
    if not argv:
        say(USAGE, file=sys.stderr)
        return UsageError.exit_code
    name, *rest = argv
    if name in ("-h", "--help", "help") and not rest:
        say(USAGE)
        return 0
    if name == "help":  # help audit, as git and others have it
        name, rest = rest[0], ["--help"]
    if name == "--version":
        say(f"fedbench {__version__}")
        return 0
    if name not in COMMANDS:
        near = nearest(name, COMMANDS)
        hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(COMMANDS)}"
        raise UsageError(f"unknown command {name!r}; {hint}")
    if name != "train":  # which has help without them
        require_packages()
    module, _, function = COMMANDS[name][0].partition(":")
    return int(getattr(importlib.import_module(module), function)(rest))


def main(argv: Sequence[str] | None = None) -> int:
    return leave(guard(dispatch, list(sys.argv[1:] if argv is None else argv)))


if __name__ == "__main__":
    sys.exit(main())
