"""Sums and products of lanes that stay in registers over an outer loop: what layers, mixtures and factorisations are made of."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from fedbench.kernels.vectors import EXACT, WIDTH, Lanes, filled, fold, intrinsic, known, pointer


def _times(builder: Any, place: Any, left: Any, right: Any) -> None:
    """Add a product to the lanes at a place."""
    # with `contract` in EXACT this is one instruction where the machine has a fused multiply-add
    builder.store(builder.fadd(builder.load(place), builder.fmul(left, right, flags=EXACT), flags=EXACT), place)


def _addresses(context: Any, builder: Any, signature: Any, given: Any) -> tuple[Callable[..., Any], Callable[[int, Any], Any]]:
    """For functions that unroll themselves: at(array, offsets...), where given[array][given[array + 1] + offsets...] lies, and times."""

    def at(array: int, *offsets: Any) -> Any:
        place = pointer(context, builder, signature, given, array)
        for offset in offsets:
            place = builder.gep(place, [ir.Constant(ir.IntType(64), offset) if isinstance(offset, int) else offset])
        return place

    def times(number: int, factor: Any) -> Any:
        return builder.mul(ir.Constant(ir.IntType(64), number), factor)

    return at, times


def mixer(outs: int, keeps: str, onto: bool = False) -> Any:
    """A function that fills the lanes of `outs` features with weighted sums of others. All its sums are in registers at once.

    mix(values, x, count, weights, w, by_out, by_in, begin, b, out, y): the lanes at out[y + o·WIDTH] become begin[b + o] (onto: the
    lanes at begin[b + o·WIDTH]) + sum over k < count of weights[w + o·by_out + k·by_in] · those at values[x + k·WIDTH]
    Of these sums it keeps all, or the positive ones, the others become 0: to do so afterwards would cost more than the sums, for of lanes
    that are read, picked from and written back the compiler makes masked writes.
    """

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        array = signature.args[0].dtype
        vector, align = context.get_value_type(Lanes(array)), array.bitwidth // 8
        at, times = _addresses(context, builder, signature, given)

        def lanes(place: Any) -> Any:
            return builder.bitcast(place, vector.as_pointer())

        # only loads and stores use these places: LLVM keeps them in registers
        sums = [cgutils.alloca_once(builder, vector) for _ in range(outs)]
        for o, place in enumerate(sums):
            first = builder.load(lanes(at(7, o * WIDTH)), align=align) if onto else filled(builder, builder.load(at(7, o)), vector)
            builder.store(first, place)
        with cgutils.for_range(builder, given[2]) as loop:
            cell = builder.load(lanes(at(0, times(WIDTH, loop.index))), align=align)
            weight = at(3, builder.mul(loop.index, given[6]))
            for o, place in enumerate(sums):
                _times(builder, place, filled(builder, builder.load(builder.gep(weight, [times(o, given[5])])), vector), cell)
        nothing = ir.Constant(vector, [0.0] * WIDTH)
        for o, place in enumerate(sums):
            value = builder.load(place)
            if keeps == "positive":
                # ordered, and this way round: NaN is not below 0 and stays NaN, as in torch's relu
                value = builder.select(builder.fcmp_ordered(">", nothing, value), nothing, value)
            builder.store(value, lanes(at(9, o * WIDTH)), align=align)
        return context.get_dummy_value()

    n = types.intp

    def mix(
        typing: Any, values: Any, x: Any, count: Any, weights: Any, w: Any, by_out: Any, by_in: Any, begin: Any, b: Any, out: Any, y: Any
    ) -> Any:
        return types.void(values, n, n, weights, n, n, n, begin, n, out, n), generate

    return intrinsic(mix)


def multiplier(ups: int, others: int, wide: int) -> Any:
    """A function that adds the products of `ups` features with `others` (2, 4 or 8) to an array, all of them in registers at once.

    multiply(up, x, by_up, acts, y, by_acts, blocks, out, at, by): out[at + u·by + i] += sum over b < blocks of the lanes at
    up[x + b·by_up + u·WIDTH] · those at acts[y + b·by_acts + i·WIDTH], i < others; `wide` (16 or 8) numbers at a time
    """
    halves = [half for half in (8, 4, 2, 1) if half < wide]

    def multiply(typing: Any, up: Any, x: Any, by_up: Any, acts: Any, y: Any, by_acts: Any, blocks: Any, out: Any, to: Any, by: Any) -> Any:
        whole, align = types.intp, up.dtype.bitwidth // 8

        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            vector = ir.VectorType(context.get_value_type(up.dtype), wide)
            at, times = _addresses(context, builder, signature, given)
            sums = [[cgutils.alloca_once(builder, vector) for _ in range(others)] for _ in range(ups)]
            for place in sum(sums, []):
                builder.store(ir.Constant(vector, None), place)
            with cgutils.for_range(builder, given[6]) as loop:

                def lanes(array: int, feature: int, first: int) -> Any:
                    place = at(array, builder.mul(loop.index, given[array + 2]), feature * WIDTH + first)
                    return builder.load(builder.bitcast(place, vector.as_pointer()), align=align)

                # without AVX-512, sixteen numbers are two registers: half a block at a time leaves room for more sums
                for first in range(0, WIDTH, wide):
                    left, right = [lanes(0, u, first) for u in range(ups)], [lanes(3, i, first) for i in range(others)]
                    for u in range(ups):
                        for i in range(others):
                            _times(builder, sums[u][i], left[u], right[i])
            for u in range(ups):
                values = [builder.load(place) for place in sums[u]]
                # two sums share each step of folding: one addition for both
                for half in halves:
                    pairs = zip(values[::2], values[1::2], strict=True) if len(values) > 1 else [(values[0], values[0])]
                    values = [fold(builder, *pair, half) for pair in pairs]
                place = builder.bitcast(at(7, times(u, given[9])), values[0].type.as_pointer())
                builder.store(builder.fadd(builder.load(place, align=align), values[0], flags=EXACT), place, align=align)
            return context.get_dummy_value()

        return types.void(up, whole, whole, acts, whole, whole, whole, out, whole, whole), generate

    return intrinsic(multiply)


def outer(many: int) -> Any:
    """A function that multiplies `many` features with WIDTH others that lie turned, all sums in registers at once, none over lanes.

    fill(turned, t, values, x, by, blocks, out, y): the lanes at out[y + i·WIDTH] become the sum over b < blocks and s < WIDTH of
    values[x + b·by + i·WIDTH + s] · the lanes at turned[t + (b·WIDTH + s)·WIDTH], i < many
    """

    def fill(typing: Any, turned: Any, t: Any, values: Any, x: Any, by: Any, blocks: Any, out: Any, y: Any) -> Any:
        whole, align = types.intp, values.dtype.bitwidth // 8

        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            vector = context.get_value_type(Lanes(values.dtype))
            at, _ = _addresses(context, builder, signature, given)
            sums = [cgutils.alloca_once(builder, vector) for _ in range(many)]
            for place in sums:
                builder.store(ir.Constant(vector, None), place)
            with cgutils.for_range(builder, given[5]) as loop:
                block = builder.mul(loop.index, ir.Constant(ir.IntType(64), WIDTH * WIDTH))
                for s in range(WIDTH):
                    lanes = builder.load(builder.bitcast(at(0, block, s * WIDTH), vector.as_pointer()), align=align)
                    for i, place in enumerate(sums):
                        factor = builder.load(at(2, builder.mul(loop.index, given[4]), i * WIDTH + s))
                        _times(builder, place, filled(builder, factor, vector), lanes)
            for i, place in enumerate(sums):
                builder.store(builder.load(place), builder.bitcast(at(6, i * WIDTH), vector.as_pointer()), align=align)
            return context.get_dummy_value()

        return types.void(turned, whole, values, whole, whole, whole, out, whole), generate

    return intrinsic(fill)


def gatherer(many: int) -> Any:
    """A function that adds weighted blocks of numbers, listed by their places, to one such block; all its sums are in registers at once.

    add(values, x, which, w, weights, v, count, out, y): the lanes at out[y + o·WIDTH] += sum over k < count of weights[v + k] · those at
    values[x + (which[w + k]·many + o)·WIDTH], o < many
    """

    def add(typing: Any, values: Any, x: Any, which: Any, w: Any, weights: Any, v: Any, count: Any, out: Any, y: Any) -> Any:
        n, align = types.intp, values.dtype.bitwidth // 8

        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            vector = context.get_value_type(Lanes(values.dtype))
            at, times = _addresses(context, builder, signature, given)

            def lanes(place: Any) -> Any:
                return builder.bitcast(place, vector.as_pointer())

            sums = [cgutils.alloca_once(builder, vector) for _ in range(many)]
            for o, place in enumerate(sums):
                builder.store(builder.load(lanes(at(7, o * WIDTH)), align=align), place)
            with cgutils.for_range(builder, given[6]) as loop:
                # lists of tables are int32, addresses are not
                block = times(many * WIDTH, builder.sext(builder.load(at(2, loop.index)), ir.IntType(64)))
                weight = filled(builder, builder.load(at(4, loop.index)), vector)
                for o, place in enumerate(sums):
                    _times(builder, place, weight, builder.load(lanes(at(0, block, o * WIDTH)), align=align))
            for o, place in enumerate(sums):
                builder.store(builder.load(place), lanes(at(7, o * WIDTH)), align=align)
            return context.get_dummy_value()

        return types.void(values, n, which, n, weights, n, n, out, n), generate

    return intrinsic(add)


def tiler(ups: int, many: int, less: bool = False) -> Any:
    """A function that adds a sum of outer products to a tile of `ups` rows of `many` lanes, or subtracts it (less), all in registers.

    tile(left, x, right, y, step, block, count, out, at, by): the lanes at out[at + u·by + i·WIDTH] += sum over k < count of
    left[x + k·step + u] · the lanes at right[y + k·step + i·block], u < ups, i < many
    """

    def tile(typing: Any, left: Any, x: Any, right: Any, y: Any, step: Any, block: Any, count: Any, out: Any, to: Any, by: Any) -> Any:
        n, align = types.intp, left.dtype.bitwidth // 8

        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            vector = context.get_value_type(Lanes(left.dtype))
            at, times = _addresses(context, builder, signature, given)

            def lanes(place: Any) -> Any:
                return builder.bitcast(place, vector.as_pointer())

            places = [[lanes(at(7, times(u, given[9]), i * WIDTH)) for i in range(many)] for u in range(ups)]
            sums = [[cgutils.alloca_once(builder, vector) for _ in range(many)] for _ in range(ups)]
            for u, i in itertools.product(range(ups), range(many)):
                builder.store(builder.load(places[u][i], align=align), sums[u][i])
            with cgutils.for_range(builder, given[6]) as loop:
                ahead = builder.mul(loop.index, given[4])
                cells = [builder.load(lanes(at(2, ahead, times(i, given[5]))), align=align) for i in range(many)]
                for u in range(ups):
                    factor = filled(builder, builder.load(at(0, ahead, u)), vector)
                    factor = builder.fneg(factor) if less else factor
                    for i in range(many):
                        _times(builder, sums[u][i], factor, cells[i])
            for u, i in itertools.product(range(ups), range(many)):
                builder.store(builder.load(sums[u][i]), places[u][i], align=align)
            return context.get_dummy_value()

        return types.void(left, n, right, n, n, n, n, out, n, n), generate

    return intrinsic(tile)


def _less(builder: Any, value: Any, factor: Any, other: Any) -> Any:
    return builder.fsub(value, builder.fmul(factor, other, flags=EXACT), flags=EXACT)


@intrinsic
def factor_square(typing: Any, matrix: Any, at: Any, by: Any, inverse: Any, to: Any) -> Any:
    """Sixteen lanes, one every `by` numbers from matrix[at] on: their upper triangle becomes its Cholesky factor U, UᵀU as before.

    inverse[to + r] = 1 / U[r, r]. What is below the diagonal has no meaning afterwards.
    """
    n, align = types.intp, matrix.dtype.bitwidth // 8

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        kind = context.get_value_type(matrix.dtype)
        vector = context.get_value_type(Lanes(matrix.dtype))
        first = pointer(context, builder, signature, given)
        last = pointer(context, builder, signature, given, 3)
        whole = ir.IntType(64)
        places = [
            builder.bitcast(builder.gep(first, [builder.mul(ir.Constant(whole, r), given[2])]), vector.as_pointer()) for r in range(WIDTH)
        ]
        rows = [builder.load(place, align=align) for place in places]
        for r in range(WIDTH):
            # row r of what is left, over the root of its pivot, is row r of U: one division for sixteen numbers
            pivot = builder.extract_element(rows[r], ir.Constant(ir.IntType(32), r))
            turned = builder.fdiv(ir.Constant(kind, 1.0), known(builder, "llvm.sqrt", kind, pivot))
            builder.store(turned, builder.gep(last, [ir.Constant(whole, r)]))
            rows[r] = builder.fmul(rows[r], filled(builder, turned, vector), flags=EXACT)
            builder.store(rows[r], places[r], align=align)
            # take from the rows below what row r accounts for
            for later in range(r + 1, WIDTH):
                factor = filled(builder, builder.extract_element(rows[r], ir.Constant(ir.IntType(32), later)), vector)
                rows[later] = _less(builder, rows[later], factor, rows[r])
        return context.get_dummy_value()

    return types.void(matrix, n, n, inverse, n), generate


@intrinsic
def solve_square(typing: Any, matrix: Any, at: Any, by: Any, inverse: Any, to: Any, factor: Any, f: Any) -> Any:
    """Sixteen lanes X, one every `by` numbers from matrix[at] on, become U⁻ᵀX.

    U at factor[f], with the same step, and `inverse` are as `factor_square` left them.
    """
    n, align = types.intp, matrix.dtype.bitwidth // 8

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        vector, whole = context.get_value_type(Lanes(matrix.dtype)), ir.IntType(64)
        first, last, known = (pointer(context, builder, signature, given, array) for array in (0, 3, 5))
        ahead = [builder.mul(ir.Constant(whole, r), given[2]) for r in range(WIDTH)]
        # solved rows, of which every later one has its share taken off
        done: list[Any] = []
        for r in range(WIDTH):
            place = builder.bitcast(builder.gep(first, [ahead[r]]), vector.as_pointer())
            row = builder.load(place, align=align)
            for q, above in enumerate(done):
                number = builder.load(builder.gep(builder.gep(known, [ahead[q]]), [ir.Constant(whole, r)]))
                row = _less(builder, row, filled(builder, number, vector), above)
            done.append(builder.fmul(row, filled(builder, builder.load(builder.gep(last, [ir.Constant(whole, r)])), vector), flags=EXACT))
            builder.store(done[-1], place, align=align)
        return context.get_dummy_value()

    return types.void(matrix, n, n, inverse, n, factor, n), generate
