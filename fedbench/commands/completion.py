"""`python -m fedbench completion bash`: what a shell needs to complete the command `fedbench`, its flags and the names they take."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from fedbench.contract import registry
from fedbench.errors import UsageError
from fedbench.settings.flags import Flag, flag_groups
from fedbench.settings.naming import SHORT
from fedbench.text import say

SHELLS = ("bash", "zsh")
HELP = """usage: fedbench completion bash|zsh

Prints what a shell needs to complete the commands of `fedbench`, their flags, and names of algorithms and datasets.

  bash:  fedbench completion bash > ~/.local/share/bash-completion/completions/fedbench
  zsh:   fedbench completion zsh > ~/.zfunc/_fedbench     with `fpath+=~/.zfunc; autoload -U compinit; compinit` in ~/.zshrc
"""
TRAINS = ("train", "sweep", "tune", "audit", "check", "bench", "warm")
"""commands that take the flags of a run"""


def main(argv: list[str]) -> int:
    if not argv or {"-h", "--help"} & set(argv):
        say(HELP.rstrip("\n"))
        return 0 if argv else UsageError.exit_code
    if argv[0] not in SHELLS or len(argv) > 1:
        raise UsageError(f"completion takes one of {', '.join(SHELLS)}, not {' '.join(argv)!r}")
    try:
        import shtab
    except ImportError:
        raise UsageError("completion needs shtab: python -m pip install shtab") from None
    sys.stdout.write(shtab.complete(commands(shtab.FILE), argv[0]))
    return 0


def commands(files: Mapping[str, object]) -> argparse.ArgumentParser:
    """Every command and flag in one parser, which nothing is parsed with; `files`: what completes a path, by shell."""
    from fedbench.__main__ import COMMANDS

    whole = argparse.ArgumentParser(prog="fedbench", add_help=False)
    inside = whole.add_subparsers()
    for name, (where, what) in COMMANDS.items():
        make = getattr(importlib.import_module(where.partition(":")[0]), "parser", None)
        own = [make()] if make else []
        made = inside.add_parser(name, help=what, description=what, parents=own, add_help=False, conflict_handler="resolve")
        if name in TRAINS:
            for flag in every_flag():
                add(made, flag)
            made.add_argument("--config", type=Path)
        if name == "fetch":
            made.add_argument("datasets", nargs="*", choices=registry.dataset_names())
        if name == "completion":
            made.add_argument("shell", choices=SHELLS)
        for action in made._actions:
            if action.type is Path:
                action.complete = files  # type: ignore[attr-defined]
    return whole


def every_flag() -> Iterator[Flag]:
    """The flags of every run, and those of every algorithm: a shell does not know which one is meant."""
    found: dict[str, Flag] = {}
    for cls in (None, *registry.algorithms().values()):
        for group in flag_groups(cls).values():
            for flag in group:
                found.setdefault(flag.key, flag)
    yield from found.values()


def add(parser: argparse.ArgumentParser, flag: Flag) -> None:
    choices = {"algo": list(registry.algorithms()), "dataset": registry.dataset_names()}.get(flag.key) or flag.choices or None
    names = [SHORT[flag.key], flag.option] if flag.key in SHORT else [flag.option]
    if flag.item_kind is bool:
        parser.add_argument(*names, f"--no-{flag.option[2:]}", action="store_true", help=first_words(flag.help))
    else:
        parser.add_argument(*names, choices=choices, type=flag.item_kind, help=first_words(flag.help))


def first_words(text: str) -> str:
    """A help text short enough for a list of flags."""
    return text.partition(";")[0].partition(" (")[0].replace("%", "%%")[:80]
