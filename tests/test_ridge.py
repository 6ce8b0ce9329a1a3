"""The kernels of ridge regression against numpy's solution of each client's normal equations."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedbench.kernels.layers import padded
from fedbench.parts import ridge

EXACT = {torch.float32: 1e-4, torch.float64: 1e-11}
COUNTS = np.array([0, 1, 3, 15, 16, 17, 63, 64, 65, 130, 200])
"""samples of the clients: around whole vectors and around the chunks of the kernel"""
ITEMS = 210


def some_samples(labels: int) -> ridge.Lists:
    """Lists of different items, used in another order than they are listed, with labels from 0 on."""
    draw = np.random.default_rng(0)
    ptr = np.concatenate([[0], np.cumsum(COUNTS)])
    local = np.concatenate([draw.permutation(count) for count in COUNTS]).astype(np.int32)
    row = np.concatenate([draw.choice(ITEMS, count, replace=False) for count in COUNTS]).astype(np.int32)
    return ridge.Lists(ptr[:-1], ptr[1:], local, draw.integers(0, labels, ptr[-1]).astype(np.float32), ptr[:-1], row)


def expected_user(plan: ridge.Ridge, table: np.ndarray, samples: ridge.Lists, c: int) -> np.ndarray:
    mine = slice(samples.begin[c], samples.end[c])
    items, label = samples.row[samples.row_begin[c] + samples.local[mine]], samples.label[mine].astype(np.float64)
    if plan.positives:
        items, label = items[label > 0], label[label > 0]
    if not len(items):
        return np.zeros(table.shape[1])
    shrink = plan.l2 * (len(items) + plan.everywhere * len(table)) * np.eye(table.shape[1])
    return np.linalg.solve(table[items].T @ table[items] + plan.everywhere * table.T @ table + shrink, table[items].T @ label)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dim", [1, 6, 16, 50, 64, 128])
@pytest.mark.parametrize("plan", [ridge.Ridge(0.3, 0.006, True), ridge.Ridge(0.0, 0.05, False)], ids=["implicit", "ratings"])
def test_user_vectors_are_those_of_the_normal_equations(plan: ridge.Ridge, dim: int, dtype: torch.dtype) -> None:
    samples = some_samples(2 if plan.positives else 6)
    table = torch.from_numpy(np.random.default_rng(1).normal(size=(ITEMS, dim)) * 0.3).to(dtype)
    sent = {"items": table, "gram": table.T @ table, "size": torch.tensor(float(ITEMS), dtype=dtype)}
    found = ridge.solve_where_they_lie(plan, samples, sent)
    assert found.dtype == dtype and padded(max(COUNTS[:6])) < 50 < padded(COUNTS[-1]), "both forms of the solution are used"
    shape = len(COUNTS), COUNTS.max()
    items = np.zeros((*shape, dim), table.numpy().dtype)
    local, label = np.zeros(shape, np.int64), np.zeros(shape, items.dtype)
    for c, count in enumerate(COUNTS):
        mine = slice(samples.begin[c], samples.end[c])
        items[c, :count], local[c, :count], label[c, :count] = table.numpy()[samples.row[mine]], samples.local[mine], samples.label[mine]
    everywhere = {"items": items, "gram": np.stack([sent["gram"].numpy()] * len(COUNTS)), "size": np.full(len(COUNTS), ITEMS, items.dtype)}
    in_block = ridge.solve(plan, local, label, COUNTS, everywhere)["user"]
    assert np.array_equal(ridge.solve_lists(plan, samples, sent)[1:], in_block[1:]) and COUNTS[0] == 0 < COUNTS[1]
    for c, count in enumerate(COUNTS):
        expected = expected_user(plan, table.double().numpy(), samples, c)
        close = {"rtol": 0, "atol": EXACT[dtype] * max(1e-3, float(np.abs(expected).max()))}
        np.testing.assert_allclose(found[c], expected, **close)
        if count:
            np.testing.assert_allclose(in_block[c], expected, **close)


def test_a_table_without_any_vector_gives_none() -> None:
    table = torch.zeros(ITEMS, 16)
    sent = {"items": table, "gram": table.T @ table, "size": torch.tensor(float(ITEMS))}
    assert not ridge.solve_where_they_lie(ridge.Ridge(0.3, 0.006, True), some_samples(2), sent).any()
