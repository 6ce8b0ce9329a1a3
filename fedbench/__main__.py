"""`python -m fedbench COMMAND ...`"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from fedbench.cli import guard
from fedbench.errors import UsageError
from fedbench.registry import nearest

COMMANDS = {
    "train": ("fedbench.cli:train", "one run, as train.py"),
    "sweep": ("fedbench.sweep:main", "many runs: grids and studies"),
    "audit": ("fedbench.audit:main", "prove that a protocol does not leak"),
    "bench": ("fedbench.bench:main", "measure speed"),
    "fetch": ("fedbench.cli:fetch", "bring datasets into the cache"),
    "list": ("fedbench.cli:show_list", "show algorithms and datasets"),
    "report": ("fedbench.report:main", "compare finished runs in one page"),
    "evaluate": ("fedbench.measure:main", "measure a finished run's model again, also on new users"),
    "recommend": ("fedbench.recommend:main", "what a trained model recommends"),
    "log-model": ("fedbench.log_model:main", "put a trained model into MLflow, to be served"),
}
USAGE = "usage: python -m fedbench COMMAND [flags]\n\n" + "\n".join(f"  {name:<10} {what}" for name, (_, what) in COMMANDS.items())


def dispatch(argv: list[str]) -> int:
    """Hand the rest of the command line to the command's own module, which only now is imported."""
    if not argv:
        raise UsageError(f"a command is missing; use one of {', '.join(COMMANDS)}")
    name, *rest = argv
    if name in ("-h", "--help"):
        print(f"{USAGE}\n\npython -m fedbench COMMAND --help shows a command's flags.")
        return 0
    if name not in COMMANDS:
        near = nearest(name, COMMANDS)
        hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(COMMANDS)}"
        raise UsageError(f"unknown command {name!r}; {hint}")
    module, _, function = COMMANDS[name][0].partition(":")
    return int(getattr(importlib.import_module(module), function)(rest))


def main(argv: Sequence[str] | None = None) -> int:
    return guard(dispatch, list(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())
