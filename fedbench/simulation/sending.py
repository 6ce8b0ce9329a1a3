"""What clients are sent: the server's answer as the rows or whole tables of the clients that are asked for, and its size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from torch import Tensor

from fedbench.contract.algorithm import Answer, Tensors


def bytes_down(answer: Answer, clients: int, whole: Mapping[str, int] = MappingProxyType({})) -> int:
    """Size of what the server sent to that many clients; of the tables in `whole` that many rows to each."""
    shared = sum(t.numel() * t.element_size() for t in answer.shared.values())
    personal = sum(whole.get(name, 1) * math.prod(t.shape[1:]) * t.element_size() for name, t in answer.personal.items())
    return clients * (shared + personal)


def sent_to(answer: Answer, clients: Tensor) -> np.ndarray:
    """[n] whether the server has something for each of these clients."""
    return np.full(len(clients), bool(answer.shared)) if answer.slot is None else (answer.slot[clients] >= 0).cpu().numpy()


def sent_rows(answer: Answer, clients: Tensor, rows: Tensor, tables: tuple[str, ...]) -> Tensors:
    """What these clients were sent: the rows [C, T, ...] of tables, everything else whole [C, ...]."""
    sent = {name: value[rows] if name in tables else value.expand(len(clients), *value.shape) for name, value in answer.shared.items()}
    if answer.slot is not None:
        slot = answer.slot[clients]
        sent |= {name: value[slot[:, None], rows] if name in tables else value[slot] for name, value in answer.personal.items()}
    return sent


def sent_whole(answer: Answer, clients: Tensor) -> Tensors:
    """The same with whole tables [C, M, ...]; shared tensors are not copied."""
    sent = {name: value.expand(len(clients), *value.shape) for name, value in answer.shared.items()}
    if answer.slot is not None:
        sent |= {name: value[answer.slot[clients]] for name, value in answer.personal.items()}
    return sent
