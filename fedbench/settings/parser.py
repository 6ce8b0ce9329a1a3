"""The argument parser of every command: errors are raised, an unknown flag is answered with the nearest known one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from fedbench import text, trust
from fedbench.errors import UsageError


def whole_number(word: str) -> int:
    """A whole number of a command line, for argparse."""
    try:
        return text.whole(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, not {word!r}") from None


def number(word: str) -> float:
    """A number of a command line, for argparse."""
    try:
        return text.number(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, not {word!r}") from None


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UsageError; `cli.guard` prints it."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message.removeprefix("argument "))

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse the command line; the error for an unknown flag names the nearest known one."""
        given, unknown = self.parse_known_args(argv)
        if unknown:
            near = text.nearest(unknown[0], [option for action in self._actions for option in action.option_strings])
            hint = f"did you mean {near[0]}?" if near else f"{self.prog.split()[-1]} --help shows all flags"
            raise UsageError(f"unknown flag {unknown[0]}; {hint}")
        if "run" in given and given.run is None:
            raise UsageError("--run is missing: give the folder of a finished run")
        return given


def run_parser(command: str, usage: str, about: str, epilog: str) -> Parser:
    """The parser of a command on a finished run, with the flags that all of them have."""
    made = Parser(
        prog=f"python -m fedbench {command}",
        usage=f"python -m fedbench {command} --run DIR {usage}",
        description=about,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--run", type=Path, metavar="DIR", help="folder of a finished run")
    made.add_argument("--data-dir", type=Path, metavar="DIR", help="where the dataset is now (default: as in the run)")
    made.add_argument(trust.FLAG, action="store_true", help=trust.HELP)
    made.add_argument("--debug", action="store_true", help="show tracebacks")
    return made
