"""Flags and config keys: each is a field of RunConfig, Protocol, DatasetOptions, Failures or of the chosen algorithm.

A value from the command line and one from a file pass through the same `Flag.read`, so both are checked alike.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from fedbench import text
from fedbench.contract import registry
from fedbench.contract.algorithm import Algorithm
from fedbench.contract.dataset import DatasetOptions
from fedbench.contract.plugin_errors import fault
from fedbench.data import protocol as protocols
from fedbench.data.protocol import PRESETS, Protocol
from fedbench.errors import UsageError
from fedbench.settings.config import RunConfig
from fedbench.settings.naming import SHORT
from fedbench.simulation.failures import Failures

RECIPES = ("clean", "published", "tuned")
CHOICES = {
    "protocol": tuple(PRESETS),
    "recipe": RECIPES,
    "dtype": ("float32", "float64"),
    "kernel": ("auto", "off"),
    "keep_state": ("auto", "best", "last", "none"),
    "budget": ("rounds", "visits", "bytes"),
}
AT_LEAST = {
    **dict.fromkeys(("rounds", "clients_per_round", "local_epochs", "batch_size", "dim", "eval_negatives", "eval_clients"), 1),
    **dict.fromkeys(("users", "items", "interactions", "threads", "block_rows", "eval_every", "budget_value", "jobs"), 1),
    **dict.fromkeys(("negatives", "stop_below", "min_interactions", "seed", "split_seed", "data_seed", "fold", "new_users"), 0),
    "folds": 2,
}
OR_NUMBER = ("checkpoint_every", "max_upload_norm")
"""flags of type str that a config file may give as a number"""
MOST_SEEDS = 1000


@dataclass(frozen=True)
class Flag:
    """One flag or config key."""

    key: str
    kind: Any
    default: Any
    help: str
    choices: tuple[str, ...] = ()

    @property
    def option(self) -> str:
        return "--" + self.key.replace("_", "-")

    @property
    def spelling(self) -> str:
        return f"{SHORT[self.key]}/{self.option}" if self.key in SHORT else self.option

    @property
    def item_kind(self) -> Any:
        """The type without `None`, and of one member if it is a tuple."""
        kinds = [kind for kind in _members(self.kind) if kind is not NoneType]
        return get_args(kinds[0])[0] if get_origin(kinds[0]) is tuple else kinds[0]

    @property
    def is_tuple(self) -> bool:
        return any(get_origin(kind) is tuple for kind in _members(self.kind))

    def read(self, value: object, where: str) -> Any:
        """Convert a command-line word or a config-file value to this flag's type; a UsageError starts with `where`."""
        if NoneType in _members(self.kind) and (value is None or value == "none"):
            return None
        if not self.is_tuple:
            return self._read_one(value, where)
        if isinstance(value, str):
            value = [word.strip() for word in value.split(",")]
        if not isinstance(value, list | tuple):
            raise UsageError(f"{where} must be a list such as 32,16,8, not {value!r}")
        return tuple(self._read_one(member, where) for member in value)

    def _read_one(self, value: object, where: str) -> Any:
        if self.key in OR_NUMBER and isinstance(value, int | float) and not isinstance(value, bool):
            value = str(value)
        try:
            result: Any = _READ[self.item_kind](value)
        except (ValueError, TypeError, OverflowError):
            shown = value if isinstance(value, int | float) and not isinstance(value, bool) else repr(value)
            several = f"; several seeds are --seeds {value}" if self.key == "seed" and re.fullmatch(r"\d+[-,][\d,-]+", str(value)) else ""
            raise UsageError(f"{where} must be {_EXPECTED[self.item_kind]}, not {shown}{several}") from None
        if self.choices and isinstance(result, str):
            result = text.matching(result, self.choices) or result
        if self.choices and result not in self.choices:
            raise UsageError(f"{where} must be one of {', '.join(self.choices)}, not {value!r}")
        if self.key in AT_LEAST and result < AT_LEAST[self.key]:
            raise UsageError(f"{where} must be at least {AT_LEAST[self.key]}, not {result}")
        return result


def _read_int(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError
    number = text.whole(value) if isinstance(value, str) else value
    if abs(number) >= 2**63:
        raise OverflowError
    return number


def _read_float(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError
    number = text.number(value) if isinstance(value, str) else float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def _read_str(value: object) -> str:
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise TypeError
    return value


def _read_bool(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _read_path(value: object) -> Path:
    return Path(os.path.expanduser(_read_str(value)))  # unlike Path.expanduser it leaves an unknown ~name alone


_READ = {int: _read_int, float: _read_float, str: _read_str, bool: _read_bool, Path: _read_path}
_EXPECTED = {int: "a whole number", float: "a number", str: "a word", bool: "true or false", Path: "a path"}


def _members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def read_seeds(value: object, where: str) -> tuple[int, ...]:
    """`0-4`, `0,1,2`, `0-2,7` or a list of numbers."""
    parts = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    seeds: list[int] = []
    for part in parts:
        match = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", str(part).strip(), re.ASCII)
        if match is None or isinstance(part, bool):
            raise UsageError(f"{where} must be like 0-4 or 0,1,2, not {value!r}")
        low, high = int(match[1]), int(match[2] or match[1])
        if high < low:
            raise UsageError(f"{where}: {part} runs backwards; write {high}-{low}")
        if len(seeds) + high - low >= MOST_SEEDS:
            raise UsageError(f"{where}: {value} names more than {MOST_SEEDS} seeds")
        seeds += range(low, high + 1)
    if not seeds or len(set(seeds)) != len(seeds):
        raise UsageError(f"{where} must name each seed once, not {value!r}")
    return tuple(seeds)


class _SeedsFlag(Flag):
    def read(self, value: object, where: str) -> tuple[int, ...]:
        return read_seeds(value, where)


def flag_groups(cls: type[Algorithm] | None) -> dict[str, list[Flag]]:
    """Help groups by title, in order; with the algorithm's own flags if there is one."""
    run = {flag.key: flag for flag in flags_of(RunConfig, CHOICES, skip=("algorithm", "data", "failures"))}
    run["protocol"] = dataclasses.replace(run["protocol"], kind=str, default="clean")
    run["recipe"] = dataclasses.replace(run["recipe"], kind=str | None, default=None)
    seeds = _SeedsFlag("seeds", str, None, "several runs, one a seed, such as 0-4 or 0,1,2; ends with mean, deviation and interval")
    shared = {field.name for field in dataclasses.fields(Algorithm)}
    trained = flags_of(cls or Algorithm, (cls or Algorithm).choices)
    groups = {
        "run": [run[key] for key in ("algo", "dataset", "protocol", "recipe", "seed")] + [seeds, run["refit"]],
        "training": [flag for flag in trained if flag.key in shared] + [run["budget"], run["budget_value"]],
    }
    if cls is not None:
        groups[f"{cls.name}: {cls.summary}"] = [flag for flag in trained if flag.key not in shared]
    groups["protocol (defaults by preset)"] = flags_of(Protocol, protocols.CHOICES, skip=("name",))
    groups["failures"] = flags_of(Failures, {})
    groups["data"] = flags_of(DatasetOptions, {}, skip=("ncf",))
    groups["machine"] = [run[key] for key in ("device", "dtype", "threads", "compile", "kernel", "block_rows", "client_store")]
    groups["output"] = [
        run[key] for key in ("eval_every", "out", "resume", "checkpoint_every", "keep_state", "mlflow", "experiment", "quiet", "debug")
    ]
    _refuse_clashes(groups, cls)
    return groups


def flags_of(cls: type, choices: Mapping[str, tuple[str, ...]], skip: tuple[str, ...] = ()) -> list[Flag]:
    """One flag for each field of a dataclass."""
    sentences = registry.field_help(cls)
    try:
        kinds = get_type_hints(cls)
    except (NameError, TypeError) as error:
        raise UsageError(f"{cls.__module__}.{cls.__qualname__}: the type of a field cannot be read: {error}") from error
    flags = []
    for field in dataclasses.fields(cls):
        if field.name in skip or not field.init:
            continue
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        flag = Flag(field.name, kinds[field.name], default, sentences.get(field.name, ""), choices.get(field.name, ()))
        if cls is not RunConfig:
            _refuse_odd(flag, cls)
        flags.append(flag)
    return flags


def _refuse_odd(flag: Flag, cls: type) -> None:
    where = f"{cls.__module__}.{cls.__qualname__}.{flag.key}"
    allowed = "int, float, str, bool, Path, tuple[int, ...] or X | None"
    kinds = [kind for kind in _members(flag.kind) if kind is not NoneType]
    if len(kinds) != 1 or flag.item_kind not in _READ or (flag.is_tuple and get_args(kinds[0])[1:] != (...,)):
        raise UsageError(f"{where}: {flag.kind} cannot be a flag's type; use {allowed}")
    if flag.default is dataclasses.MISSING:
        raise UsageError(f"{where}: a flag needs a default")


def _refuse_clashes(groups: Mapping[str, list[Flag]], cls: type[Algorithm] | None) -> None:
    taken = {"help", "config", "list", "print_config", "jobs", "trust_plugin"}
    for flag in (flag for group in groups.values() for flag in group):
        if flag.key in taken:
            said = f"the field {flag.key!r} is a flag of every run too; rename it"
            raise UsageError(said) if cls is None else fault(cls, flag.key, said)
        taken.add(flag.key)
