"""The vector type of kernels against numpy: single operations, turning, sums and products held in registers, rows side by side."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import njit

from fedbench.elementary import exp_minus, log_one_plus
from fedbench.lanes import (
    WIDTH,
    across,
    halved,
    magnitude,
    mixer,
    multiplier,
    pick,
    put,
    repeat,
    spread,
    square_root,
    take,
    turner,
    whole,
)
from fedbench.layers import TILE, copy, give_rows, mix_gated, mix_positive, mix_rows, padded, part, products, take_rows, zeros

KINDS = pytest.mark.parametrize("kind", [np.float32, np.float64])


def numbers(kind: type, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(kind)


@njit
def many(x: np.ndarray, y: np.ndarray, out: np.ndarray) -> float:
    for s in range(0, x.size, WIDTH):
        a, b = take(x, s), take(y, s)
        out[0, s] = across(a)
        put(out[1], s, a + b)
        put(out[2], s, a - 2)
        put(out[3], s, 0.5 * b)
        put(out[4], s, a / b)
        put(out[5], s, square_root(magnitude(a)))
        put(out[6], s, pick(a, b, a, spread(y[0])))
        put(out[7], s, halved(a, whole(magnitude(b) * 3)))
        put(out[8], s, exp_minus(magnitude(a)))
        put(out[9], s, log_one_plus(magnitude(b) / (magnitude(b) + 1)))
        put(out[10], s, a * repeat(y, s + 3))
    return pick(x[0], y[0], x[0], y[0])


@KINDS
def test_operations(kind: type) -> None:
    x, y = numbers(kind, 2, 5 * WIDTH)
    out = np.zeros((11, x.size), kind)
    largest: Any = many(x, y, out)
    assert largest == max(x[0], y[0])
    within = np.abs(y) / (np.abs(y) + 1)
    wanted = [
        x + y,
        x - 2,
        y / 2,
        x / y,
        np.sqrt(np.abs(x)),
        np.where(x > y, x, y[0]),
        x / 2 ** np.trunc(np.abs(y) * 3),
        np.exp(-np.abs(x)),
    ]
    wanted += [np.log1p(within), x * np.repeat(y[3::WIDTH], WIDTH)]
    close = {"rtol": 4 * np.finfo(kind).eps, "atol": 0}
    np.testing.assert_allclose(out[0, ::WIDTH], x.reshape(-1, WIDTH).sum(axis=1), rtol=0, atol=20 * np.finfo(kind).eps)
    for row, want in zip(out[1:], wanted, strict=True):
        np.testing.assert_allclose(row, want, **close)


def test_not_a_number_is_not_larger() -> None:
    x, y = np.full(WIDTH, np.nan), np.ones(WIDTH)
    out = np.zeros((11, WIDTH))
    many(x, y, out)
    assert (out[6] == 1).all() and np.isnan(out[8]).all()


@njit
def roots(x: np.ndarray, out: np.ndarray) -> None:
    for s in range(0, x.size, WIDTH):
        put(out, s, square_root(take(x, s)))


@KINDS
def test_roots_of_all_sizes(kind: type) -> None:
    most = np.log10(np.finfo(kind).max)
    x = (10 ** np.random.default_rng(0).uniform(-most + 1, most - 1, 1000 * WIDTH)).astype(kind)
    out = np.zeros_like(x)
    roots(x, out)
    np.testing.assert_allclose(out, np.sqrt(x), rtol=1.5 * np.finfo(kind).eps, atol=0)


@KINDS
@pytest.mark.parametrize("side", [WIDTH, WIDTH // 2], ids=["AVX-512", "others"])
def test_turn(side: int, kind: type) -> None:
    turn_in, turn_out = turner(True, side), turner(False, side)

    @njit
    def turned(source: np.ndarray, here: np.ndarray, out: np.ndarray, to: int, by: int) -> None:
        turn_in(source, here, out, to, by)

    @njit
    def turned_back(source: np.ndarray, at: int, out: np.ndarray, there: np.ndarray, by: int) -> None:
        turn_out(source, at, out, there, by)

    source, out, back = numbers(kind, 40, WIDTH), np.zeros((WIDTH, 50), kind), np.zeros((40, WIDTH), kind)
    rows = np.random.default_rng(1).permutation(40)[:WIDTH]
    turned(source.reshape(-1), rows * WIDTH, out.reshape(-1), 7, 50)
    assert (out[:, 7 : 7 + WIDTH] == source[rows].T).all()
    assert not out[:, :7].any() and not out[:, 7 + WIDTH :].any()
    turned_back(out.reshape(-1), 7, back.reshape(-1), rows * WIDTH, 50)
    assert (back[rows] == source[rows]).all() and not np.delete(back, rows, axis=0).any()


@njit
def copied(source: np.ndarray, at: int, room: np.ndarray, n: int) -> int:
    first, begin = part(room, 0, 3)
    second, end = part(room, begin, n)
    copy(source, at, second, 0, n)
    return end


@KINDS
@pytest.mark.parametrize("n", [1, WIDTH, 2 * WIDTH + 5])
def test_parts_of_a_room(n: int, kind: type) -> None:
    source, room = numbers(kind, 60), np.zeros(80, kind)
    end: Any = copied(source, 4, room, n)
    assert end == WIDTH + padded(n)
    assert (room[WIDTH : WIDTH + n] == source[4 : 4 + n]).all() and not room[:WIDTH].any() and not room[WIDTH + n :].any()


@njit
def there_and_back(table: np.ndarray, row: np.ndarray, block: np.ndarray, other: np.ndarray) -> None:
    take_rows(table, row, block, 0, table.shape[1] * WIDTH, WIDTH)
    give_rows(block, row, other)


@KINDS
@pytest.mark.parametrize("d", [1, 5, 16, 20, 33])
@pytest.mark.parametrize("n", [1, 15, 16, 40])
def test_rows_side_by_side_and_back(d: int, n: int, kind: type) -> None:
    table, row = numbers(kind, 60, d), np.random.default_rng(n).permutation(60)[:n].astype(np.int32)
    block, other = np.zeros(padded(n) * d, kind), np.zeros_like(table)
    there_and_back(table, row, block, other)
    beside = block.reshape(-1, d, WIDTH).transpose(0, 2, 1).reshape(-1, d)
    assert (beside[:n] == table[row]).all() and (beside[n:] == table[row[-1]]).all()
    assert (other[row] == table[row]).all() and not np.delete(other, row, axis=0).any()


@njit
def layer(values: np.ndarray, weights: np.ndarray, begin: np.ndarray, n: int, out: np.ndarray, grad: np.ndarray) -> None:
    outs, ins = begin.size, weights.size // begin.size
    mix_rows(values, 0, ins, out, 1, begin, weights, 0, ins, 1, n, out)
    products(out, 1, outs, values, 0, ins, grad, 0, n)


@KINDS
@pytest.mark.parametrize("outs", [1, 3, 8, 17])
@pytest.mark.parametrize("ins", [1, 7, 8, 20])
@pytest.mark.parametrize("n", [WIDTH, 3 * WIDTH, TILE])
def test_weighted_sums_and_products(n: int, ins: int, outs: int, kind: type) -> None:
    values, weights, begin = numbers(kind, ins, TILE), numbers(kind, outs, ins, seed=1), numbers(kind, outs, seed=2)
    out, grad = np.zeros((outs + 1, TILE), kind), np.ones(outs * ins, kind)
    layer(values.reshape(-1), weights.reshape(-1), begin, n, out.reshape(-1), grad)
    wanted = begin[:, None] + weights @ values[:, :n]
    close = {"rtol": 0, "atol": 200 * np.finfo(kind).eps}
    np.testing.assert_allclose(out[1:, :n], wanted, **close)
    assert not out[0].any() and not out[:, n:].any()
    np.testing.assert_allclose(grad.reshape(outs, ins), 1 + wanted @ values[:, :n].T, rtol=0, atol=2000 * np.finfo(kind).eps)


@njit
def kept(values: np.ndarray, weights: np.ndarray, begin: np.ndarray, n: int, positive: np.ndarray, gated: np.ndarray) -> None:
    ins = weights.size // begin.size
    mix_positive(values, 0, ins, positive, 0, begin, weights, 0, ins, 1, n, values)
    mix_gated(values, 0, ins, gated, 0, begin, weights, 0, ins, 1, n, values)


@KINDS
@pytest.mark.parametrize("outs", [1, 7, 16])
def test_sums_that_are_kept(outs: int, kind: type) -> None:
    values, weights, begin = numbers(kind, 16, TILE), numbers(kind, outs, 16, seed=1), numbers(kind, outs, seed=2)
    begin[-1] = np.nan
    positive, gated = np.ones((outs, TILE), kind), np.ones((outs, TILE), kind)
    kept(values.reshape(-1), weights.reshape(-1), begin, 48, positive.reshape(-1), gated.reshape(-1))
    wanted = (begin[:, None] + weights @ values)[:, :48]
    close = {"rtol": 0, "atol": 200 * np.finfo(kind).eps}
    np.testing.assert_allclose(positive[:, :48], np.where(wanted < 0, 0, wanted), **close)  # what is not a number is seen
    np.testing.assert_allclose(gated[:, :48], np.where(values[:outs, :48] > 0, wanted, 0), **close)
    assert (positive[:, 48:] == 1).all() and (gated[:, 48:] == 1).all()


@KINDS
@pytest.mark.parametrize(("outs", "blocks", "ups", "wide"), [(8, 2, 2, 16), (4, 1, 1, 8)], ids=["AVX-512", "others"])
def test_sums_at_a_time_of_either_kind_of_machine(outs: int, blocks: int, ups: int, wide: int, kind: type) -> None:
    others = 8
    mix, multiply = mixer(outs, blocks, "all"), multiplier(ups, others, wide)

    @njit
    def run(values: np.ndarray, weights: np.ndarray, begin: np.ndarray, out: np.ndarray, grad: np.ndarray) -> None:
        mix(values, 0, 5, weights, 0, 5, 1, begin, 0, out, 0, TILE, out)
        multiply(out, 0, values, 0, WIDTH, TILE, grad, 0, others)

    values, weights, begin = numbers(kind, 8, TILE), numbers(kind, outs, 5, seed=1), numbers(kind, outs, seed=2)
    out, grad = np.zeros((outs, TILE), kind), np.ones((ups, others), kind)
    run(values.reshape(-1), weights.reshape(-1), begin, out.reshape(-1), grad.reshape(-1))
    end = blocks * WIDTH
    np.testing.assert_allclose(out[:, :end], begin[:, None] + weights @ values[:5, :end], rtol=0, atol=100 * np.finfo(kind).eps)
    assert not out[:, end:].any()
    wanted = 1 + out[:ups, :WIDTH] @ values[:others, :WIDTH].T
    np.testing.assert_allclose(grad, wanted, rtol=0, atol=1000 * np.finfo(kind).eps)


@njit
def made(n: int, like: np.ndarray) -> tuple[np.ndarray, int]:
    array = zeros(n, like)
    return array, array.ctypes.data


@KINDS
def test_zeros_begin_with_a_cache_line(kind: type) -> None:
    for n in range(1, 200, 7):
        array, place = made(n, np.empty(0, kind))
        assert array.shape == (n,) and array.dtype == kind and not array.any() and place % 64 == 0
