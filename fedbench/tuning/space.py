"""What a search tries: the spans that an algorithm declares and those of --space, for one run's settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from fedbench.contract.algorithm import Algorithm
from fedbench.contract.search import Span, Value, search_space
from fedbench.errors import UsageError
from fedbench.settings.flags import Flag, flags_of
from fedbench.text import nearest

Space = dict[str, Span]
Values = dict[str, Value]
FORM = "name=low:high, name=log:low:high or name=a,b,c"
NOT_SEARCHED = ("rounds", "clients_per_round", "stop_below")
"""flags of every algorithm that say how much a trial may spend, so that no search may set them"""


def space_of(algorithm: Algorithm, fixed: Sequence[str], words: Sequence[str]) -> Space:
    """The fields that a search sets: those declared, without what the command line fixes, and those of --space in their place."""
    cls = type(algorithm)
    named = dict(read_span(cls, word) for word in words)
    if both := [name for name in named if name in fixed]:
        raise UsageError(f"--space {both[0]}: --{both[0].replace('_', '-')} is given too; drop one of them")
    declared = {name: span for name, span in search_space(cls).items() if name not in fixed}
    fields = [field.name for field in dataclasses.fields(cls)]
    # the order of the fields, whatever the order on the command line
    space = {name: named.get(name, declared.get(name)) for name in fields if name in named or name in declared}
    found = {name: span.reaching(getattr(algorithm, name)) for name, span in space.items() if span is not None}
    if not found:
        raise UsageError(f"{cls.name} declares nothing to search, or the flags fix all of it; name a field with --space {FORM}")
    return found


def read_span(cls: type[Algorithm], word: str) -> tuple[str, Span]:
    """`lr=log:1e-3:0.3` -> the field's name and its span."""
    name, equals, what = word.partition("=")
    name = name.strip().lstrip("-").replace("-", "_")
    flags = {flag.key: flag for flag in flags_of(cls, cls.choices)}
    if not equals or not what:
        raise UsageError(f"--space {word}: write {FORM}")
    if name not in flags:
        near = nearest(name, flags)
        raise UsageError(f"--space {name}: {cls.name} has no such field" + (f"; did you mean {near[0]}?" if near else ""))
    if name in NOT_SEARCHED:
        raise UsageError(f"--space {name}: it says how much a trial may spend; give --{name.replace('_', '-')} one value")
    flag = flags[name]
    if flag.is_tuple or flag.item_kind not in (int, float, str, bool):
        raise UsageError(f"--space {name}: only numbers, words and switches can be searched")
    try:
        return name, _range(flag, what) if ":" in what else _choices(flag, what)
    except ValueError as error:
        raise UsageError(f"--space {name}: {error}") from None


def _range(flag: Flag, what: str) -> Span:
    ends = what.split(":")
    log = ends[0] == "log"
    if len(ends) != 2 + log or flag.item_kind not in (int, float):
        raise ValueError(f"{what!r} is no range of a number; write {FORM}")
    low, high = (flag.read(end, f"--space {flag.key}") for end in ends[log:])
    return Span(low, high, log, whole=flag.item_kind is int)


def _choices(flag: Flag, what: str) -> Span:
    words = [word.strip() for word in what.split(",")]
    if len(words) == 1:
        raise ValueError(f"one value is no search; to hold it fixed write {flag.option} {words[0]}")
    switches: dict[str, Any] = {"true": True, "false": False} if flag.item_kind is bool else {}
    return Span(choices=tuple(flag.read(switches.get(word, word), f"--space {flag.key}") for word in words))


def counts(span: Span, values: Mapping[str, Value], algorithm: Algorithm) -> bool:
    """Whether a field is set at all, beside the values that were chosen before it."""
    return all(values.get(name, getattr(algorithm, name)) in wanted for name, wanted in span.when)


def in_order(space: Space) -> Space:
    """A field after those that decide whether it counts."""
    placed: Space = {}
    while len(placed) < len(space):
        ready = [name for name, span in space.items() if name not in placed and all(on in placed or on not in space for on, _ in span.when)]
        if not ready:
            raise UsageError("fields of the search space wait for each other; see `when` where they are declared")
        placed[ready[0]] = space[ready[0]]
    return placed


def set_to(algorithm: Algorithm, values: Mapping[str, Value]) -> Algorithm:
    """The algorithm with these values, checked as train.py checks them."""
    given: dict[str, Any] = dict(values)
    made = dataclasses.replace(algorithm, **given)
    made.check(None)
    return made


def changed(algorithm: Algorithm) -> dict[str, Any]:
    """The fields that differ from the method's defaults."""
    values = {field.name: getattr(algorithm, field.name) for field in dataclasses.fields(algorithm) if field.init}
    return {name: value for name, value in values.items() if value != getattr(type(algorithm), name)}
