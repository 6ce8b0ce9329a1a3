"""What clients are sent: the server's answer as the rows or whole tables of the clients that are asked for, and its size."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from torch import Tensor

from fedbench.contract.algorithm import Answer, Tensors
from fedbench.contract.uploads import number_size

NONE: Mapping[str, Any] = MappingProxyType({})
# LEVELS·epochs + level is one number for a kind of client, see Engine.run_cohort
NOTHING, ALL, COMMON = 0, 1, 2
LEVELS = 3


def bytes_down(answer: Answer, levels: np.ndarray, whole: Mapping[str, int] = NONE, bits: Mapping[str, float] = NONE) -> int:
    """Size of what reached clients [n], see `sent_to`; of the tables in `whole` that many rows to each, of `bits` see Algorithm.bits."""
    # whole bytes a tensor: codes of a bit a number are filled up
    shared = sum(math.ceil(t.numel() * number_size(t, bits.get(name)) / 8) for name, t in answer.shared.items())
    personal = sum(
        whole.get(name, 1) * math.ceil(math.prod(t.shape[1:]) * number_size(t, bits.get(name)) / 8) for name, t in answer.personal.items()
    )
    instead = sum(math.ceil(t.numel() * number_size(t, bits.get(name)) / 8) for name, t in answer.instead.items())
    return int((levels != NOTHING).sum()) * shared + int((levels == ALL).sum()) * personal + int((levels == COMMON).sum()) * instead


def sent_to(answer: Answer, clients: Tensor) -> np.ndarray:
    """[n] what reaches each of these clients: NOTHING, ALL of the answer, or what is COMMON to those that have no row of their own."""
    if answer.slot is None:
        return np.full(len(clients), ALL if answer.shared else NOTHING)
    return np.where((answer.slot[clients] >= 0).cpu().numpy(), ALL, COMMON if answer.shared or answer.instead else NOTHING)


def reaching(answer: Answer, level: int) -> Answer:
    """What reaches clients of a level, see `sent_to`."""
    return (Answer(), answer, Answer({**answer.shared, **answer.instead}))[level]


def lying(answer: Answer, name: str, clients: Tensor) -> tuple[Tensor, Tensor]:
    """[X, ...] a tensor that was sent, where it lies, and [C] which of them is each client's."""
    if name in answer.personal and answer.slot is not None:
        return answer.personal[name], answer.slot[clients]
    return answer.shared[name][None], clients.new_zeros(len(clients))


def sent_rows(answer: Answer, clients: Tensor, rows: Tensor, tables: Collection[str]) -> Tensors:
    """What these clients were sent: the rows [C, T, ...] of tables, everything else whole [C, ...]."""
    sent = {name: value[rows] if name in tables else value.expand(len(clients), *value.shape) for name, value in answer.shared.items()}
    if answer.slot is not None:
        slot = answer.slot[clients]
        sent |= {name: value[slot[:, None], rows] if name in tables else value[slot] for name, value in answer.personal.items()}
    return sent


def sent_whole(answer: Answer, clients: Tensor) -> Tensors:
    """What these clients were sent, with whole tables [C, M, ...]; shared tensors are not copied."""
    sent = {name: value.expand(len(clients), *value.shape) for name, value in answer.shared.items()}
    if answer.slot is not None:
        sent |= {name: value[answer.slot[clients]] for name, value in answer.personal.items()}
    return sent
