"""Mixtures of tables by listed weights are those of a product of whole matrices."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from fedbench.contract import mixtures
from fedbench.contract.mixtures import SparseWeights, collected, faster_form, in_blocks
from fedbench.contract.uploads import Tables
from fedbench.parts.mixing import STRIP, project_to_simplex, similarity

EXACT = {torch.float32: 1e-5, torch.float64: 1e-12}


def some_weights(rows: int, tables: int, density: float) -> Tensor:
    draw = np.random.default_rng(rows * tables)
    return torch.from_numpy(draw.random((rows, tables)) * (draw.random((rows, tables)) < density))


def some_tables(tables: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.random.default_rng(1).normal(size=(tables, *shape))).to(dtype)


def listed(weights: Tensor, seed: int = 0) -> tuple[SparseWeights, Tensor]:
    """Weights with a share of common ones, and all of them as a matrix."""
    draw = np.random.default_rng(seed)
    share, common = (torch.from_numpy(draw.random(size)) for size in weights.shape)
    return SparseWeights.of(in_blocks(weights), share, common), weights + share[:, None] * common


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1,), (5, 3), (64, 2), (40, 16), (9,)], ids=str)
@pytest.mark.parametrize(("rows", "tables", "density"), [(1, 1, 1.0), (7, 7, 0.0), (7, 7, 0.3), (30, 50, 0.1), (3, 3, 1.0)])
def test_listed_weights_mix_as_a_matrix_does(rows: int, tables: int, density: float, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    sparse, matrix = listed(some_weights(rows, tables, density))
    value = some_tables(tables, shape, dtype)
    expected = torch.einsum("rs,s...->r...", matrix, value.double())
    mixed = sparse.onto(None, value, 0)
    assert mixed.dtype == dtype and mixed.shape == (rows, *shape)
    torch.testing.assert_close(mixed.double(), expected, rtol=EXACT[dtype], atol=EXACT[dtype])
    torch.testing.assert_close(sparse.dense(), matrix, rtol=0, atol=0)
    assert sparse.dense(torch.float32).equal(matrix.float())


def test_a_mixture_of_one_table_is_that_table() -> None:
    value = some_tables(6, (11, 4), torch.float32)
    order = torch.tensor([3, 3, 0, 5])
    one = torch.nn.functional.one_hot(order, 6).double()
    sparse = SparseWeights.of(in_blocks(one), torch.zeros(4).double(), torch.ones(6).double())
    assert sparse.onto(None, value, 0).equal(value[order])


@pytest.mark.parametrize("sizes", [(9,), (4, 5), (1, 0, 6, 2)], ids=str)
@pytest.mark.parametrize("density", [0.0, 0.1, 0.9])
def test_tables_that_come_in_chunks_add_up(sizes: tuple[int, ...], density: float) -> None:
    value = some_tables(9, (7, 3), torch.float64)
    sparse, matrix = listed(some_weights(9, 9, density))
    some = Tables(value, 0, 9, lambda make: iter(value.split(sizes)))
    expected = torch.einsum("rs,s...->r...", matrix, value)
    for weights in (sparse, matrix):
        torch.testing.assert_close(some.mixed(weights), expected, rtol=1e-12, atol=1e-12)
    plain = some_weights(9, 9, density)
    torch.testing.assert_close(some.mixed(plain), torch.einsum("rs,s...->r...", plain, value), rtol=1e-12, atol=1e-12)


def test_a_worker_without_clients_has_no_mixtures() -> None:
    value = some_tables(5, (4, 2), torch.float32)
    nobody = SparseWeights.of(iter(()), torch.zeros(0).double(), torch.rand(5).double())
    assert Tables(value[:0], 5, 5, lambda make: iter([value])).mixed(nobody).shape == (0, 4, 2)


def test_the_form_follows_from_how_many_weights_are_not_0() -> None:
    value = some_tables(40, (3,), torch.float32)
    few, many = some_weights(40, 40, mixtures.DENSE_FROM / 2), some_weights(40, 40, 0.9)
    for weights in (few, listed(few)[0]):
        assert isinstance(faster_form(weights, value), SparseWeights)
    for weights in (many, listed(many)[0]):
        matrix = faster_form(weights, value)
        assert isinstance(matrix, Tensor) and matrix.dtype == torch.float32


def test_weights_come_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixtures, "BLOCK", 100)
    weights = some_weights(30, 40, 0.2)
    share, common = torch.rand(30).double(), torch.rand(40).double()
    seen = []

    def blocks() -> Iterator[Tensor]:
        for block in in_blocks(weights):
            seen.append(len(block))
            yield block

    found = collected(blocks(), share, common)
    assert isinstance(found, SparseWeights) and seen == [2] * 15
    assert found.dense().equal(weights + share[:, None] * common)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_the_projection_is_that_by_sorting(dtype: torch.dtype, scale: float) -> None:
    target = some_tables(50, (37,), dtype) * scale
    target[0], target[1] = 0.5, 0
    target[2, 3:] = target[2, 2]
    ordered = target.double().sort(dim=1, descending=True).values
    excess = ordered.cumsum(dim=1) - 1
    support = (ordered * torch.arange(1, 38) > excess).sum(dim=1, keepdim=True)
    expected = (target - excess.gather(1, support - 1) / support).clamp(min=0)
    found = project_to_simplex(target)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=scale * EXACT[dtype] + EXACT[dtype])
    torch.testing.assert_close(found.sum(dim=1).double(), torch.ones(50).double(), rtol=0, atol=scale * EXACT[dtype] + EXACT[dtype])


@pytest.mark.parametrize("measure", ["cos", "l2"])
def test_half_of_a_similarity_is_copied(measure: str) -> None:
    vectors = some_tables(2 * STRIP + 5, (3,), torch.float64)
    whole = similarity(vectors, measure)
    torch.testing.assert_close(whole, whole.T, rtol=0, atol=1e-7)
    for own in (slice(0, 9), slice(STRIP - 3, STRIP + 3), slice(STRIP, 2 * STRIP + 5)):
        torch.testing.assert_close(similarity(vectors, measure, own), whole[own], rtol=0, atol=1e-7)
