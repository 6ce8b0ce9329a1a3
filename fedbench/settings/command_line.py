"""The command line of train.py: read in two steps, first the algorithm, then all flags, that algorithm's own included; and its help."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedbench import trust
from fedbench.contract import registry
from fedbench.contract.algorithm import Algorithm
from fedbench.data.protocol import PRESETS, Protocol
from fedbench.errors import UsageError
from fedbench.settings import hints
from fedbench.settings.config import RunConfig
from fedbench.settings.config_file import read_config, read_values
from fedbench.settings.flags import Flag, flag_groups
from fedbench.settings.naming import SHORT
from fedbench.settings.parser import Parser
from fedbench.settings.precedence import configs_of

JOBS = Flag("jobs", int, 1, "with several seeds or folds: runs at once, each a process; they share the CPU threads (default: 1)")
_METAVAR = {
    int: "N",
    float: "X",
    str: "WORD",
    Path: "PATH",
    "algo": "NAME",
    "dataset": "NAME",
    "seeds": "N-N",
    "resume": "HOW",
    "client_store": "WHERE",
}


class Request(NamedTuple):
    """What the command line asks for."""

    configs: list[RunConfig]
    """one a seed and fold; empty with --list"""
    list: bool
    print_config: bool
    out: Path | None = None
    """parent folder of all runs, if --out names one"""
    jobs: int = 1
    """runs at once"""

    def shown(self) -> dict[str, Any]:
        """All runs as one config that --config reads back."""
        told = self.configs[0].to_dict()
        if len(self.configs) == 1:
            return told
        seeds = list(dict.fromkeys(run.seed for run in self.configs))
        if len({run.protocol.fold for run in self.configs}) > 1:
            told["fold"] = None
        told["out"] = None if self.out is None else str(self.out)
        return {"seeds" if key == "seed" else key: seeds if key == "seed" else value for key, value in told.items()}


def resolve(argv: Sequence[str], names: str | None = None) -> RunConfig:
    """The one run that the command line describes; UsageError if it describes several. `names`: see `parse`."""
    configs = parse(argv, names).configs
    if len(configs) != 1:
        raise UsageError(f"expected one run, but the flags name {len(configs)}; use --seed, and --fold if folds are tested")
    return configs[0]


def parse(argv: Sequence[str], names: str | None = None) -> Request:
    """Read the command line in two steps: first the algorithm, then all flags, that algorithm's own included.

    names: where the algorithm's name comes from, if not from the user's own command line; a .py file must then be trusted, see `trust`.
    """
    algo, cls, file, in_file = _named_algorithm(argv, names)
    groups = flag_groups(cls)
    flags = {flag.key: flag for group in groups.values() for flag in group}
    hints.refuse_single_dash(argv, flags)
    given, unknown = _parser(algo, cls, groups).parse_known_args(argv)
    negated = [f"no_{key}" for key in flags if flags[key].item_kind is bool and not key.startswith("no_")]
    hints.refuse_unknown(unknown, [*flags, "config", "jobs", "list", "print_config", "trust_plugin", "help", "version", *negated], cls)
    if given.list:
        return Request([], list=True, print_config=False)
    on_line = {key: flags[key].read(value, flags[key].spelling) for key, value in vars(given).items() if key in flags}
    from_file = read_values(in_file, file, flags, cls)
    if cls is None:
        raise UsageError("--algo is missing: name an algorithm (python train.py --list shows them) or a path to a .py file")
    if "dataset" not in on_line | from_file:
        raise UsageError("--dataset is missing: name a dataset (python train.py --list shows them) or a path to a .csv file")
    out = on_line.get("out", from_file.get("out"))
    jobs = JOBS.read(given.jobs, "--jobs")
    return Request(configs_of(cls, on_line, from_file), list=False, print_config=given.print_config, out=out, jobs=jobs)


def _named_algorithm(
    argv: Sequence[str], names: str | None = None
) -> tuple[str | None, type[Algorithm] | None, str | None, dict[str, Any]]:
    """The algorithm that the command line or its config file names, its class, and that file with its values."""
    first = Parser(add_help=False, allow_abbrev=False)
    first.add_argument("--algo")
    first.add_argument("--config")
    first.add_argument(trust.FLAG, action="store_true")
    early, _ = first.parse_known_args(argv)
    in_file = read_config(Path(early.config)) if early.config is not None else {}
    algo = early.algo if early.algo is not None else in_file.get("algo")
    if algo is not None and not isinstance(algo, str):
        raise UsageError(f"{early.config}: algo must be a word, not {algo!r}")
    names = names or (f"--config {early.config}" if early.algo is None else None)
    cls = registry.algorithm(algo, names is None, early.trust_plugin, names or "--algo") if algo is not None else None
    return algo, cls, early.config, in_file


_EPILOG = """A config file (.json or .toml) has flag names as keys; flags overrule it,
it overrules the recipe, and the recipe the defaults.

examples:
  python train.py --algo {algo} --dataset synthetic --rounds 5
  python train.py --algo {algo} --dataset filmtrust --seeds 0-2
"""


def wants_help(argv: Sequence[str]) -> str | None:
    """`--help` asks for the flags most used ("short"), `--help all` for every one ("all")."""
    for word, after in zip(argv, [*argv[1:], ""], strict=False):
        if word in ("-h", "--help", "--help=all"):
            return "all" if after == "all" or word.endswith("all") else "short"
    return None


def print_help(argv: Sequence[str], how: str) -> None:
    """The flags of the algorithm that the command line names, or of every run; "all" adds those of protocol, data, machine and output."""
    algo, cls = _named_algorithm([word for word in argv if word not in ("-h", "--help", "--help=all")])[:2]
    groups = flag_groups(cls)
    if how == "short":
        groups = dict(list(groups.items())[: 3 if cls else 2])
    more = f"python train.py --algo {algo or 'NAME'} --help all shows the flags of protocol,\ndata, machine and output too.\n\n"
    _parser(algo, cls, groups, more if how == "short" else "").print_help()


def _parser(algo: str | None, cls: type[Algorithm] | None, groups: Mapping[str, list[Flag]], more: str = "") -> argparse.ArgumentParser:
    about = "Train one personalised federated recommender and report honest numbers."
    if cls is None:
        about += "\nEach algorithm has flags and defaults of its own:\n`python train.py --algo NAME --help` shows them."
    parser = Parser(
        prog="python train.py",
        usage="python train.py --algo NAME --dataset NAME [flags]",
        description=about,
        epilog=more + _EPILOG.format(algo=algo or "fedem"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for title, flags in groups.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            _add(group, flag, cls)
        if title == "run":
            group.add_argument("--config", metavar="FILE", help="read flags from a .json or .toml file")
            group.add_argument(trust.FLAG, action="store_true", default=False, help=trust.HELP)
            group.add_argument("--jobs", metavar="N", default=JOBS.default, help=JOBS.help)
            group.add_argument("--list", action="store_true", default=False, help="show algorithms and datasets, and end")
            group.add_argument(
                "--print-config", action="store_true", default=False, help="show the resolved configuration as JSON, and end"
            )
    return parser


def _add(group: argparse._ArgumentGroup, flag: Flag, cls: type[Algorithm] | None) -> None:
    text = f"{flag.help} ({_default_text(flag, cls)})".replace("%", "%%").strip()
    names = [SHORT[flag.key], flag.option] if flag.key in SHORT else [flag.option]
    if flag.item_kind is bool:
        how = "store_true" if flag.key.startswith("no_") else argparse.BooleanOptionalAction  # which would read --no-server as no
        group.add_argument(*names, dest=flag.key, action=how, help=text)
        return
    metavar = "{" + ",".join(flag.choices) + "}" if flag.choices else _METAVAR.get(flag.key) or _METAVAR[flag.item_kind]
    group.add_argument(*names, dest=flag.key, metavar=f"{metavar},..." if flag.is_tuple else metavar, help=text)


def _default_text(flag: Flag, cls: type[Algorithm] | None) -> str:
    if flag.default is dataclasses.MISSING:
        return "required"
    text = f"default: {_shown(flag.default)}"
    if flag.key in {field.name for field in dataclasses.fields(Protocol)}:
        values = {name: _shown(getattr(preset, flag.key)) for name, preset in PRESETS.items()}
        if len(set(values.values())) > 1:
            text = ", ".join(f"{name}: {value}" for name, value in values.items())
    elif cls is not None and flag.key in cls.published:
        text += f"; published: {_shown(cls.published[flag.key])}"
    return text


def _shown(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
