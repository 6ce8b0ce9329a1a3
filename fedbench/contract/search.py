"""What a search may try for a field, said where the field is declared: `lr: float = tuned(0.02, 0.001, 0.3, log=True)`.

`python -m fedbench tune` searches the fields that are declared so. A subclass that sets another default keeps the range it inherits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
Value = int | float | str | bool
KEY = "search"
"""of a field's metadata"""
Condition = tuple[str, tuple[Value, ...]]
"""another field, and those of its values that are meant"""


@dataclass(frozen=True)
class Span:
    """What may be tried for one field: all numbers between two ends, or some values."""

    low: float = 0.0
    high: float = 0.0
    log: bool = False
    """numbers are drawn by their logarithm"""
    choices: tuple[Value, ...] = ()
    """the values, if not a range"""
    when: tuple[Condition, ...] = ()
    """where this field counts; elsewhere it keeps its default"""
    whole: bool = False
    """whole numbers alone"""

    def __post_init__(self) -> None:
        if problem := self.problem():
            raise ValueError(problem)

    def problem(self) -> str:
        """What is wrong with it; "" if nothing is."""
        if self.choices:
            fits = all(isinstance(value, Value) for value in self.choices) and len(set(self.choices)) == len(self.choices) > 1
            return "" if fits else f"choices must be two or more different numbers, words, or True and False, not {self.choices!r}"
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            return f"the range must go from a number to a larger one, not from {self.low} to {self.high}"
        return f"a range by logarithm must begin over 0, not at {self.low:g}" if self.log and self.low <= 0 else ""

    def holds(self, value: object) -> bool:
        if self.choices:
            return value in self.choices
        return isinstance(value, int | float) and not isinstance(value, bool) and self.low <= value <= self.high

    def reaching(self, value: Any) -> Span:
        """This span with that value in it: a subclass may set a default that its base did not think of."""
        if value is None or self.holds(value):
            return self
        if self.choices:
            return dataclasses.replace(self, choices=(*self.choices, value))
        if not isinstance(value, int | float) or (self.log and value <= 0):
            return self
        return dataclasses.replace(self, low=min(self.low, value), high=max(self.high, value))

    def __str__(self) -> str:
        if self.choices:
            words = ", ".join(str(value).lower() if isinstance(value, bool) else str(value) for value in self.choices)
        else:
            words = f"{self.low:g} to {self.high:g}{' by logarithm' if self.log else ''}"
        given = " and ".join(f"{name} is {' or '.join(map(str, values))}" for name, values in self.when)
        return f"{words}, where {given}" if given else words


def tuned(
    default: T,
    low: float | None = None,
    high: float | None = None,
    *,
    log: bool = False,
    choices: tuple[Any, ...] = (),
    when: Mapping[str, tuple[Any, ...]] | None = None,
) -> T:
    """A field with this default that a search may set: from `low` to `high`, or to one of `choices`.

    log: by the number's logarithm, as learning rates are. when: only where other fields have these values: {"optimizer": ("sgd",)}.
    """
    if bool(choices) == (low is not None and high is not None):
        raise ValueError("tuned needs a range, such as tuned(0.02, 0.001, 0.3, log=True), or choices=(8, 16, 32)")
    whole = isinstance(default, int) and isinstance(low, int)
    span = Span(low or 0.0, high or 0.0, log, tuple(choices), tuple((when or {}).items()), whole)
    made: T = dataclasses.field(default=default, metadata={KEY: span})
    return made


def untuned(default: T) -> T:
    """A field with this default that is not searched, though its base declares a range."""
    made: T = dataclasses.field(default=default, metadata={KEY: None})
    return made


def search_space(cls: type) -> dict[str, Span]:
    """The fields of an algorithm that a search sets, in their order; `unused` ones are left out."""
    declared: dict[str, Span | None] = {}
    for base in reversed(cls.__mro__):
        if "__dataclass_fields__" in vars(base):
            declared |= {field.name: field.metadata[KEY] for field in dataclasses.fields(base) if KEY in field.metadata}
    unused, found = getattr(cls, "unused", ()), {}
    for field in dataclasses.fields(cls):
        span = declared.get(field.name)
        if span is not None and field.name not in unused:
            found[field.name] = span.reaching(field.default)
    return found
