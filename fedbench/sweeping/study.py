"""What a sweep runs: a grid is a train.py command line in which flags have several values, a study is a file of such grids.

Every point is read by train.py's own parser, one command line a point, so that a flag means the same here and errors are the same.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedbench.errors import UsageError
from fedbench.settings import command_line, config_file, hints
from fedbench.settings.config import RunConfig
from fedbench.settings.flags import read_seeds
from fedbench.settings.naming import NOT_HASHED, REPLICATES, SHORT, short
from fedbench.text import nearest

KEY_DIGITS = 12
MOST_POINTS = 10_000
STUDY_KEYS = ("about", "metrics", "fixed", "axes", "grid")
GRID_KEYS = ("name", "fixed", "axes")
LONG = {short: "--" + key.replace("_", "-") for key, short in SHORT.items()}

Words = dict[str, list[str]]
"""the values of each flag, as words of a command line, by the flag's key"""


@dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    key: str
    """hash of what determines its result: its seed is in it, no path is"""
    config: RunConfig
    values: dict[str, Any]
    """its values on the axes of the study"""

    @property
    def label(self) -> str:
        """Its place in words: n=10 e=3 seed=0."""
        return " ".join(f"{short(key)}={_word(value)}" for key, value in self.values.items()) or self.config.algorithm.name


@dataclass(frozen=True)
class Grid:
    """Every combination of the axes' values."""

    name: str
    axes: dict[str, list[Any]]
    fixed: dict[str, Any]
    keys: tuple[str, ...]
    """of its points, the last axis fastest"""


@dataclass(frozen=True)
class Study:
    """Grids that belong together. A point that stands in two of them is run once."""

    name: str
    about: str
    grids: list[Grid]
    points: dict[str, Point] = field(repr=False)
    metrics: tuple[str, ...] = ()
    """test metrics that tables and figures show; chosen by what the runs report if empty"""

    @property
    def axes(self) -> dict[str, list[Any]]:
        """Every axis with the values it has in any grid."""
        axes: dict[str, list[Any]] = {}
        for grid in self.grids:
            for key, values in grid.axes.items():
                axes.setdefault(key, []).extend(value for value in values if value not in axes.get(key, ()))
        return axes

    def hash8(self) -> str:
        return hashlib.sha256(" ".join(sorted(self.points)).encode()).hexdigest()[:8]


def read(line: Sequence[str], file: Path | None = None, name: str | None = None) -> Study:
    """The study that a command line describes, or the file's with the command line's values in place of its own."""
    on_line = words_of_line(line)
    if file is None:
        return _build(name, "", [("", on_line)], (), "", True)
    values = config_file.read_config(file, "--study")
    where = f"--study {file}: "
    _refuse_unknown(values, STUDY_KEYS, where)
    grids = values.get("grid", [{}])
    if not isinstance(grids, list) or not grids or not all(isinstance(grid, dict) for grid in grids):
        raise UsageError(f"{where}grid must be one table or more, each opened by [[grid]]")
    common = _words_of_table(values.get("fixed", {}), f"{where}fixed", many=False) | _words_of_table(values.get("axes", {}), f"{where}axes")
    read_grids = []
    for number, grid in enumerate(grids, 1):
        _refuse_unknown(grid, GRID_KEYS, where)
        its = f"{where}grid {number}, "
        own = _words_of_table(grid.get("fixed", {}), f"{its}fixed", many=False) | _words_of_table(grid.get("axes", {}), f"{its}axes")
        # a study may be somebody else's file: it must not say that its own code is to be trusted
        for key in ({**common, **own}).keys() & {"trust_plugin"}:
            raise UsageError(f"{where}{key} can be given on the command line only")
        read_grids.append((str(grid.get("name", number if len(grids) > 1 else "")), _overruled(_overruled(common, own), on_line)))
    metrics = values.get("metrics", [])
    if not isinstance(metrics, list) or not all(isinstance(metric, str) for metric in metrics):
        raise UsageError(f"{where}metrics must be a list of words such as ndcg_10")
    return _build(name or file.stem, str(values.get("about", "")), read_grids, tuple(metrics), where, "algo" in on_line)


def _overruled(words: Words, by: Words) -> Words:
    """`words` updated with `by`; rounds and a budget exclude each other."""
    gone = {"budget", "budget_value"} if "rounds" in by else {"rounds"} if "budget_value" in by else set()
    return {**{key: value for key, value in words.items() if key not in gone}, **by}


def is_flag(word: str) -> bool:
    """A flag, not a value such as -0.5."""
    return word.startswith("-") and not re.match(r"-\.?\d", word, re.ASCII)


def words_of_line(line: Sequence[str]) -> Words:
    """`-n 10 20 --algo fedmf` -> {"clients_per_round": ["10", "20"], "algo": ["fedmf"]}; seeds such as 0-4 become the axis `seed`."""
    found: Words = {}
    values: list[str] | None = None
    for word in line:
        if is_flag(word):
            option, equals, value = word.partition("=")
            key = LONG.get(option, option).lstrip("-").replace("-", "_")
            values = found[key] = [value] if equals else []
        elif values is None:
            strays = list(itertools.takewhile(lambda word: not is_flag(word), line))
            raise UsageError(hints.for_strays(strays, None) or f"unexpected word {word!r}: values follow a flag, such as -n 10 20 50")
        else:
            values.append(word)
    if "seeds" in found:
        if "seed" in found:
            raise UsageError("--seed and --seeds are both given; use one of them")
        found["seed"] = [str(seed) for seed in read_seeds(",".join(found.pop("seeds")), "--seeds")]
    return found


def _words_of_table(table: object, where: str, many: bool = True) -> Words:
    """A study's fixed values (one each) or axes (a list each) as words."""
    if not isinstance(table, dict):
        raise UsageError(f"{where} must be a table of flag names and values")
    found: Words = {}
    for key, value in table.items():
        key = key.replace("-", "_")
        if key == "seeds":
            found["seed"] = [str(seed) for seed in read_seeds(value, f"{where}: seeds")]
        elif not many:
            found[key] = [_word(value)]
        elif isinstance(value, list) and value:
            found[key] = [_word(member) for member in value]
        else:
            raise UsageError(f"{where}: {key} must be a list of values, not {value!r}")
    return found


def _word(value: object) -> str:
    """A value as the command line spells it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ",".join(map(_word, value))
    return "none" if value is None else str(value)


def _build(name: str | None, about: str, grids: Sequence[tuple[str, Words]], metrics: tuple[str, ...], where: str, named: bool) -> Study:
    """Resolve every grid to its points. named: the command line itself names the algorithm, so its file is trusted."""
    read_grids: list[tuple[str, dict[str, list[Any]], dict[str, Any], list[RunConfig]]] = []
    for title, words in grids:
        words = {key: list(dict.fromkeys(values)) for key, values in words.items()}
        axes = [key for key, values in words.items() if len(values) > 1]
        configs = list(_configs(words, axes, where, named))
        told = [run.to_dict() for run in configs]
        # a flag with one value, such as --split kfold, can stand for several runs: those are axes too
        axes += [key for key in REPLICATES if key not in axes and len(_distinct(one.get(key) for one in told)) > 1]
        values = {key: _distinct(one.get(key) for one in told) for key in axes}
        fixed = {key: told[0][key] for key in words if key not in axes and key in told[0]}
        read_grids.append((title, values, fixed, configs))
    all_axes = dict.fromkeys(key for _, values, _, _ in read_grids for key in values)
    points: dict[str, Point] = {}
    finished = []
    for title, values, fixed, configs in read_grids:
        keys = []
        for run in configs:
            told_one = run.to_dict()
            point = Point(run.digest()[:KEY_DIGITS], run, {key: told_one[key] for key in all_axes if key in told_one})
            points.setdefault(point.key, point)  # grids may overlap: the point is run once
            keys.append(point.key)
        finished.append(Grid(title, values, fixed, tuple(dict.fromkeys(keys))))
    first = next(iter(points.values())).config
    return Study(name or f"{first.algorithm.name}-{Path(first.dataset).stem}", about, finished, points, metrics)


def _configs(words: Words, axes: Sequence[str], where: str, named: bool) -> Iterator[RunConfig]:
    """One run for each combination of values, and for each fold where folds are tested."""
    for key in axes:
        if key in NOT_HASHED and key != "recipe":
            raise UsageError(f"{where}--{key.replace('_', '-')} changes no result, so it cannot be an axis; give it one value")
    # counted before any point is made: a few long lists are soon millions
    count = 1
    for key in axes:
        count *= len(words[key])
    if count > MOST_POINTS:
        raise UsageError(f"{where}these axes have {count:,} points; {MOST_POINTS:,} is the most")
    for values in itertools.product(*(words[key] for key in axes)):
        chosen = dict(zip(axes, values, strict=True))
        argv = [word for key, given in words.items() for word in _spelled(key, [chosen[key]] if key in chosen else given)]
        try:
            yield from command_line.parse(argv, None if named else "the study").configs
        except UsageError as error:
            raise UsageError(f"{where}{error}") from None


def _spelled(key: str, values: Sequence[str]) -> list[str]:
    """One flag of a train.py command line; `true` and `false` as the flag and its `--no-` form."""
    option = key.replace("_", "-")
    if not values or values[0] == "true":
        return [f"--{option}"]
    return [f"--no-{option}"] if values[0] == "false" else [f"--{option}={values[0]}"]


def _distinct(values: Iterator[Any]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def _refuse_unknown(table: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in table:
        if key not in known:
            near = nearest(key, known)
            raise UsageError(f"{where}unknown key {key!r}; " + (f"did you mean {near[0]}?" if near else f"use {', '.join(known)}"))
