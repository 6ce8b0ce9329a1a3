"""Whether two answers of an algorithm's function are the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedbench.contract.algorithm import Answer
from fedbench.contract.uploads import Uploads

CLOSE = 1e-4
"""share of the largest number by which two answers that should be equal may differ"""


def same(one: object, other: object, close: float = CLOSE) -> bool:
    """Whether two answers of a function are the same up to rounding; of what cannot be compared, yes."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if not one.is_floating_point():
            return torch.equal(one, other)
        room = close * max(1e-30, float(one.detach().abs().nan_to_num(0, 0, 0).max())) if one.numel() else 0.0
        return bool(torch.isclose(one.double(), other.double(), rtol=0, atol=room, equal_nan=True).all())
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[name], other[name], close) for name in one)
    if isinstance(one, Answer) and isinstance(other, Answer):
        return all(same(getattr(one, part), getattr(other, part), close) for part in ("shared", "personal", "slot", "instead"))
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    try:
        return bool(one == other) or (one != one and other != other)
    except Exception:
        return True


def copied(argument: Any) -> Any:
    """A round's uploads with tensors of their own, which a function that is asked twice may change; anything else as it is."""
    if not isinstance(argument, Uploads):
        return argument
    tensors = {
        name: value.clone() if isinstance(value, Tensor) else value._replace(value=value.value.clone())
        for name, value in argument.tensors.items()
    }
    return replace(argument, tensors=tensors, sums={name: value.clone() for name, value in argument.sums.items()})
