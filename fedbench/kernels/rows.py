"""Rows of tables: sums of those that clients sent, item by item, and moves of those that no sample touches."""

from __future__ import annotations

import math

import numpy as np
from numba import njit
from torch import Tensor

from fedbench.kernels.layers import fetch
from fedbench.kernels.threads import shared

AHEAD = 16
"""rows that are fetched while as many others are added"""


def summed_by_item(item: Tensor, value: Tensor, items: int, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """[R], [R, ...] -> [M, ...], [M]: the rows of each item added up, in order, and how many they are; weight [R]: what each counts."""
    total, count = value.new_zeros(items, *value.shape[1:]), value.new_zeros(items)
    if value.device.type != "cpu":
        each = value.new_ones(len(item)) if weight is None else weight
        rows = value if weight is None else value * weight.view(-1, *[1] * (value.dim() - 1))
        return total.index_add_(0, item, rows), count.index_add_(0, item, each)
    each = value.new_ones(1) if weight is None else weight
    _add_rows(
        item.numpy(),
        value.contiguous().view(len(item), math.prod(value.shape[1:])).numpy(),
        each.numpy(),
        total.view(items, -1).numpy(),
        count.numpy(),
    )
    return total, count


@njit(nogil=True, cache=True)
def _add_rows(item: np.ndarray, value: np.ndarray, weight: np.ndarray, total: np.ndarray, count: np.ndarray) -> None:
    """weight: [R], or [1] for all."""
    # one thread: rows of an item are added in the order in which they were sent, so sums are the same in every run
    for start in range(0, item.size, AHEAD):
        fetch(total, item[start + AHEAD : start + 2 * AHEAD])
        for r in range(start, min(start + AHEAD, item.size)):
            row, add, one = total[item[r]], value[r], weight[r if weight.size > 1 else 0]
            for j in range(add.size):
                row[j] += one * add[j]
            count[item[r]] += one


@shared(rows=lambda table, place, *_: len(place))
def move_rows(
    low: int,
    high: int,
    table: np.ndarray,
    place: np.ndarray,
    factors: np.ndarray,
    target: np.ndarray,
    at: np.ndarray,
    begin: np.ndarray,
    touched: np.ndarray,
    row: np.ndarray,
) -> None:
    """Rows of client c's table, table[place[c]] [M, n], that are not in its list row[begin[c] :][: touched[c]], become a·row + b·target.

    a, b: factors[c]. target [X, M, n], of which target[at[c]] is the client's; [1, 0, n] if there is none.
    """
    # set and cleared by the list: clearing all of it for each client would cost a pass over all items
    listed = np.zeros(table.shape[1], np.bool_)
    for c in range(low, high):
        mine, toward, mask = table[place[c]], target[at[c]], row[begin[c] : begin[c] + touched[c]]
        for i in mask:
            listed[i] = True
        keep, share = factors[c, 0], factors[c, 1]
        for i in range(mine.shape[0]):
            if listed[i]:
                continue
            for j in range(mine.shape[1]):
                moved = keep * mine[i, j]
                mine[i, j] = moved + share * toward[i, j] if toward.size else moved
        for i in mask:
            listed[i] = False
