"""The vector type of kernels against numpy: single operations, turning, sums and products held in registers, rows side by side."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import njit

from fedbench.kernels.elementary import exp_minus, log_one_plus
from fedbench.kernels.layers import (
    SQUARE,
    compiled,
    copy,
    give_rows,
    mix_all,
    mix_onto,
    mix_onto_positive,
    mix_positive,
    padded,
    part,
    products,
    take_rows,
    zeros,
)
from fedbench.kernels.register_sums import mixer, multiplier, outer
from fedbench.kernels.vectors import WIDTH, across, halved, magnitude, pick, put, repeat, spread, square_root, take, turner, whole

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
@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize("side", [WIDTH, WIDTH // 2], ids=["AVX-512", "others"])
def test_turn(side: int, index: type, kind: type) -> None:
    turn_in, turn_out, turn_square = (turner(listed, side) for listed in ("source", "out", "neither"))

    @njit
    def turned(table: np.ndarray, row: np.ndarray, first: int, number: int, out: np.ndarray, to: int) -> None:
        turn_in(table.reshape(-1), row, first, table.shape[1], number, out, to)

    @njit
    def turned_back(source: np.ndarray, at: int, table: np.ndarray, row: np.ndarray, first: int, number: int) -> None:
        turn_out(source, at, table.reshape(-1), row, first, table.shape[1], number)

    @njit
    def square(source: np.ndarray, at: int, out: np.ndarray, to: int) -> None:
        turn_square(source, at, out, to)

    table, out, back, again = numbers(kind, 40, 21), np.zeros(300, kind), np.zeros((40, 21), kind), np.zeros(300, kind)
    row = np.random.default_rng(1).permutation(40)[: 3 + WIDTH].astype(index)
    turned(table, row, 3, 5, out, 7)
    assert (out[7 : 7 + WIDTH * WIDTH].reshape(WIDTH, WIDTH) == table[row[3:], 5:].T).all()
    assert not out[:7].any() and not out[7 + WIDTH * WIDTH :].any()
    turned_back(out, 7, back, row, 3, 5)
    assert (back[row[3:], 5:] == table[row[3:], 5:]).all() and not back[:, :5].any()
    assert not np.delete(back, row[3:], axis=0).any()
    square(out, 7, again, 9)
    assert (again[9 : 9 + WIDTH * WIDTH] == table[row[3:], 5:].reshape(-1)).all() and not again[9 + WIDTH * WIDTH :].any()


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
    by = (table.shape[1] + 2) * WIDTH  # two features more in a block, which stay as they are
    take_rows(table, row, block, WIDTH, by)
    give_rows(block[WIDTH:], by, row, other)


@KINDS
@pytest.mark.parametrize("d", [1, 5, 16, 20, 33])
@pytest.mark.parametrize("n", [1, 15, 16, 40])
def test_rows_side_by_side_and_back(d: int, n: int, kind: type) -> None:
    table, row = numbers(kind, 60, d), np.random.default_rng(n).permutation(60)[:n].astype(np.int32)
    block, other = np.zeros(padded(n) * (d + 2), kind), np.zeros_like(table)
    there_and_back(table, row, block, other)
    block = block.reshape(-1, d + 2, WIDTH)
    assert not block[:, 0].any() and not block[:, -1].any()
    beside = block[:, 1:-1].transpose(0, 2, 1).reshape(-1, d)
    assert (beside[:n] == table[row]).all() and (beside[n:] == table[row[-1]]).all()
    assert (other[row] == table[row]).all() and not np.delete(other, row, axis=0).any()


def side_by_side(rows: np.ndarray) -> np.ndarray:
    """[features, n] -> [n / WIDTH, features, WIDTH]"""
    return rows.reshape(len(rows), -1, WIDTH).transpose(1, 0, 2).copy()


def apart(blocks: np.ndarray) -> np.ndarray:
    """The other way."""
    return blocks.transpose(1, 0, 2).reshape(blocks.shape[1], -1)


@njit
def layer(values: np.ndarray, weights: np.ndarray, begin: np.ndarray, out: np.ndarray, grad: np.ndarray, spare: np.ndarray) -> None:
    blocks, ins, _ = values.shape
    outs, by, to = begin.size, ins * WIDTH, out.shape[1] * WIDTH
    x, y = values.reshape(-1), out.reshape(-1)
    mix_all(x, 0, by, ins, y, WIDTH, to, outs, begin, 0, 0, weights, 0, ins, 1, blocks)
    products(y, WIDTH, to, outs, x, 0, by, ins, grad, 0, blocks, spare)


@KINDS
@pytest.mark.parametrize("outs", [1, 3, 8, 17, 32])
@pytest.mark.parametrize("ins", [1, 7, 8, 20, 32])
@pytest.mark.parametrize("blocks", [1, 3, 8])
def test_weighted_sums_and_products(blocks: int, ins: int, outs: int, kind: type) -> None:
    n = blocks * WIDTH
    values, weights, begin = numbers(kind, ins, n), numbers(kind, outs, ins, seed=1), numbers(kind, outs, seed=2)
    out, grad, spare = np.zeros((blocks, outs + 2, WIDTH), kind), np.ones(outs * ins + 1, kind), np.zeros((blocks + 2) * SQUARE, kind)
    layer(side_by_side(values), weights.reshape(-1), begin, out, grad, spare)
    wanted = begin[:, None] + weights @ values
    np.testing.assert_allclose(apart(out)[1:-1], wanted, rtol=0, atol=300 * np.finfo(kind).eps)
    assert not out[:, 0].any() and not out[:, -1].any() and grad[-1] == 1
    np.testing.assert_allclose(grad[:-1].reshape(outs, ins), 1 + wanted @ values.T, rtol=0, atol=5000 * np.finfo(kind).eps)


@njit
def kept(values: np.ndarray, weights: np.ndarray, begin: np.ndarray, base: np.ndarray, out: np.ndarray) -> None:
    blocks, ins, _ = values.shape
    outs, by = begin.size, ins * WIDTH
    x = values.reshape(-1)
    mix_positive(x, 0, by, ins, out[0], 0, by, outs, begin, 0, 0, weights, 0, ins, 1, blocks)
    mix_onto(x, 0, by, ins, out[1], 0, by, outs, base, 0, by, weights, 0, ins, 1, blocks)
    mix_onto_positive(x, 0, by, ins, out[2], 0, by, outs, base, 0, by, weights, 0, ins, 1, blocks)


@KINDS
@pytest.mark.parametrize("outs", [1, 7, 16])
def test_sums_that_are_kept(outs: int, kind: type) -> None:
    values, weights, begin = numbers(kind, 16, 3 * WIDTH), numbers(kind, outs, 16, seed=1), numbers(kind, outs, seed=2)
    base = numbers(kind, 16, 3 * WIDTH, seed=3)
    begin[-1] = base[outs - 1, 0] = np.nan
    out = np.ones((3, 3, 16, WIDTH), kind)
    kept(side_by_side(values), weights.reshape(-1), begin, side_by_side(base).reshape(-1), out.reshape(3, -1))
    sums = weights @ values
    wanted, onto = begin[:, None] + sums, base[:outs] + sums
    positive, all_onto, positive_onto = (apart(one) for one in out)
    close = {"rtol": 0, "atol": 200 * np.finfo(kind).eps}
    np.testing.assert_allclose(positive[:outs], np.where(wanted < 0, 0, wanted), **close)  # what is not a number is seen
    np.testing.assert_allclose(all_onto[:outs], onto, **close)
    np.testing.assert_allclose(positive_onto[:outs], np.where(onto < 0, 0, onto), **close)
    assert (out[:, :, outs:] == 1).all()


@KINDS
@pytest.mark.parametrize(("outs", "ups", "wide"), [(8, 2, 16), (4, 1, 8)], ids=["AVX-512", "others"])
def test_sums_at_a_time_of_either_kind_of_machine(outs: int, ups: int, wide: int, kind: type) -> None:
    others, blocks = 8, 3
    mix, multiply, fill = mixer(outs, "all"), multiplier(ups, others, wide), outer(outs)

    @njit
    def run(
        values: np.ndarray,
        weights: np.ndarray,
        begin: np.ndarray,
        out: np.ndarray,
        grad: np.ndarray,
        square: np.ndarray,
    ) -> None:
        by = others * WIDTH
        for b in range(blocks):
            to = b * outs * WIDTH
            mix(values, b * by, 5, weights, 0, 5, 1, begin, 0, out, to)
        multiply(out, 0, outs * WIDTH, values, 0, by, blocks, grad, 0, others)
        fill(weights, 0, values, 0, by, blocks, square, 0)

    values, weights, begin = numbers(kind, 8, blocks * WIDTH), numbers(kind, blocks * WIDTH, WIDTH, seed=1), numbers(kind, outs, seed=2)
    out, grad, square = np.zeros((blocks, outs, WIDTH), kind), np.ones((ups, others), kind), np.zeros((outs, WIDTH), kind)
    flat = [one.reshape(-1) for one in (side_by_side(values), weights, begin, out, grad, square)]
    run(*flat)
    wanted = begin[:, None] + weights.reshape(-1)[: outs * 5].reshape(outs, 5) @ values[:5]
    np.testing.assert_allclose(apart(out), wanted, rtol=0, atol=100 * np.finfo(kind).eps)
    np.testing.assert_allclose(grad, 1 + wanted[:ups] @ values.T, rtol=0, atol=1000 * np.finfo(kind).eps)
    np.testing.assert_allclose(square, values[:outs] @ weights, rtol=0, atol=1000 * np.finfo(kind).eps)


@njit
def made(n: int, like: np.ndarray) -> tuple[np.ndarray, int]:
    array = zeros(n, like)
    return array, array.ctypes.data


@KINDS
def test_zeros_begin_with_a_cache_line(kind: type) -> None:
    for n in range(1, 200, 7):
        array, place = made(n, np.empty(0, kind))
        assert array.shape == (n,) and array.dtype == kind and not array.any() and place % 64 == 0


@compiled()
def shifted(x: np.ndarray, by: int, twice: bool) -> float:
    return x[by] * (2 if twice else 1)


@njit
def several(x: np.ndarray) -> float:
    return shifted(x, 0, True) + shifted(x, 1, False) + shifted(x, x.size - 1, x.size > 2)


def test_a_constant_is_no_reason_to_compile_again() -> None:
    assert several(np.array([1.0, 2.0, 4.0])) == 12
    assert len(shifted.signatures) == 1
