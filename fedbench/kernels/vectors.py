"""Sixteen numbers at a time: a vector type for kernels.

The compiler makes vector instructions of a plain loop only where it can prove that arrays do not overlap, and it keeps no sums in
registers over an outer loop. A kernel that works on `Lanes` says both itself, and says in which order sums are taken. What is no
vector instruction of the machine becomes several. What works lane by lane takes numbers too. All of it is for compiled code only.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.core.registry import cpu_target
from numba.extending import intrinsic as typed_intrinsic
from numba.extending import overload, register_model

intrinsic: Any = typed_intrinsic
"""as kernels see them, without the first argument, which only the compiler gives"""
WIDTH = 16
"""numbers in one Lanes: 512 bits of float32"""
EXACT = ("contract", "nsz")
"""a product and a sum may become one instruction; nothing is reordered"""


class Lanes(types.Type):
    def __init__(self, kind: types.Float) -> None:
        self.kind = kind
        super().__init__(f"Lanes({kind})")


@register_model(Lanes)
class LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, given: Lanes) -> None:
        super().__init__(manager, given, ir.VectorType(manager.lookup(given.kind).get_value_type(), WIDTH))


def kind_of(given: Any) -> Any:
    """float32 or float64 of Lanes or of a number."""
    return given.kind if isinstance(given, Lanes) else given


def _common(*given: Any) -> Any:
    """What an operation on these results in: Lanes if one of them is."""
    return next((one for one in given if isinstance(one, Lanes)), given[0])


def _filled(builder: Any, value: Any, vector: Any) -> Any:
    """All lanes the same number."""
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(ir.IntType(32), WIDTH), [0] * WIDTH))


def _as(context: Any, builder: Any, value: Any, given: Any, wanted: Any) -> Any:
    """A number or Lanes as what an operation results in."""
    if isinstance(given, Lanes) or not isinstance(wanted, Lanes):
        return value if given == wanted else context.cast(builder, value, given, wanted)
    return _filled(builder, context.cast(builder, value, given, wanted.kind), context.get_value_type(wanted))


def _elementwise(make: Callable[..., Any], arity: int) -> Any:
    """An operation on each lane, or on numbers: make(builder, values..., their LLVM type) builds it."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        wanted = signature.return_type
        cast = [_as(context, builder, *pair, wanted) for pair in zip(values, signature.args, strict=True)]
        return make(builder, *cast, context.get_value_type(wanted))

    def one(typing: Any, x: Any) -> Any:
        return x(x), generate

    def two(typing: Any, x: Any, y: Any) -> Any:
        return _common(x, y)(x, y), generate

    def four(typing: Any, x: Any, y: Any, yes: Any, no: Any) -> Any:
        return _common(x, y, yes, no)(x, y, yes, no), generate

    return intrinsic({1: one, 2: two, 4: four}[arity])


def _with_lanes(operation: Any, instruction: str) -> None:
    """Python's operator for Lanes, with Lanes or a number on the other side."""
    apply = _elementwise(lambda builder, x, y, _: getattr(builder, instruction)(x, y, flags=EXACT), 2)

    def chosen(x: Any, y: Any) -> Any:
        return (lambda x, y: apply(x, y)) if isinstance(x, Lanes) or isinstance(y, Lanes) else None

    overload(operation, strict=False)(chosen)


for _operation, _instruction in (("add", "fadd"), ("sub", "fsub"), ("mul", "fmul"), ("truediv", "fdiv")):
    _with_lanes(getattr(operator, _operation), _instruction)


def _known(builder: Any, name: str, kind: Any, *values: Any) -> Any:
    """A call of one of LLVM's own functions."""
    scalar = kind.element if isinstance(kind, ir.VectorType) else kind
    name += f".{'v16' if scalar is not kind else ''}{'f32' if isinstance(scalar, ir.FloatType) else 'f64'}"
    function = builder.module.globals.get(name) or ir.Function(builder.module, ir.FunctionType(kind, [kind] * len(values)), name)
    return builder.call(function, values)


def _library(name: str, builder: Any, x: Any, kind: Any) -> Any:
    """A function of the C library for each number."""
    if not isinstance(kind, ir.VectorType):
        return _known(builder, name, kind, x)
    out = x
    for lane in range(WIDTH):
        at = ir.Constant(ir.IntType(32), lane)
        out = builder.insert_element(out, _known(builder, name, kind.element, builder.extract_element(x, at)), at)
    return out


def _integers(kind: Any) -> tuple[Any, int, int]:
    """Integers of a float type's size, how far its exponent is shifted, and the exponent of 1."""
    scalar = kind.element if isinstance(kind, ir.VectorType) else kind
    bits, shift, bias = (32, 23, 127) if isinstance(scalar, ir.FloatType) else (64, 52, 1023)
    return ir.VectorType(ir.IntType(bits), WIDTH) if scalar is not kind else ir.IntType(bits), shift, bias


@functools.cache
def has_avx512() -> bool:
    """Whether kernels are compiled for a machine with AVX-512, whose 32 registers hold the Lanes of float32 each; others need two of 16."""
    return "+avx512f" in cpu_target.target_context.codegen().magic_tuple()[2].split(",")


def _halved(builder: Any, x: Any, times: Any, kind: Any) -> Any:
    whole, shift, bias = _integers(kind)
    power = builder.shl(builder.sub(ir.Constant(whole, bias), builder.fptosi(times, whole)), ir.Constant(whole, shift))
    return builder.fmul(x, builder.bitcast(power, kind), flags=EXACT)


def _square_root(builder: Any, x: Any, kind: Any) -> Any:
    """Where an instruction guesses 1/√x of sixteen numbers: that and a step of Newton's, in less time than the machine's own root takes."""
    if not isinstance(kind, ir.VectorType) or not isinstance(kind.element, ir.FloatType) or not has_avx512():
        return _known(builder, "llvm.sqrt", kind, x)
    name, mask = "llvm.x86.avx512.rsqrt14.ps.512", ir.IntType(16)
    guess = builder.module.globals.get(name) or ir.Function(builder.module, ir.FunctionType(kind, [kind, kind, mask]), name)
    half, one = (ir.Constant(kind, [value] * WIDTH) for value in (0.5, 1.0))
    inverse = builder.call(guess, [x, x, ir.Constant(mask, -1)])
    root = builder.fmul(x, inverse, flags=EXACT)
    wrong = builder.fsub(one, builder.fmul(root, inverse, flags=EXACT), flags=EXACT)
    return builder.fadd(root, builder.fmul(builder.fmul(root, half, flags=EXACT), wrong, flags=EXACT), flags=EXACT)


square_root = _elementwise(_square_root, 1)
"""of numbers over 0 that are neither subnormal nor infinite; exact but for the last bit"""
magnitude = _elementwise(lambda builder, x, kind: _known(builder, "llvm.fabs", kind, x), 1)
root = _elementwise(lambda builder, x, kind: _known(builder, "llvm.sqrt", kind, x), 1)
"""of any number, exact"""
logarithm, sine, cosine = (_elementwise(partial(_library, f"llvm.{name}"), 1) for name in ("log", "sin", "cos"))
"""the C library's, one number after another"""
whole = _elementwise(lambda builder, x, kind: builder.sitofp(builder.fptosi(x, _integers(kind)[0]), kind), 1)
"""without its fraction"""
halved = _elementwise(_halved, 2)
"""halved(x, k): x / 2^k, k whole and at most the type's largest exponent"""
pick = _elementwise(lambda builder, x, y, yes, no, _: builder.select(builder.fcmp_ordered(">", x, y), yes, no), 4)
"""pick(x, y, a, b): a where x > y, else b"""


@intrinsic
def spread(typing: Any, value: Any) -> Any:
    """A number as Lanes."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return _filled(builder, values[0], context.get_value_type(signature.return_type))

    return Lanes(value)(value), generate


def _pointer(context: Any, builder: Any, signature: Any, values: Any, array: int = 0, lanes: bool = False) -> Any:
    """Where number values[array + 1] of values[array] lies. No check, and none for an index that counts from the end."""
    place = builder.gep(context.make_array(signature.args[array])(context, builder, values[array]).data, [values[array + 1]])
    return builder.bitcast(place, context.get_value_type(Lanes(signature.args[array].dtype)).as_pointer()) if lanes else place


@intrinsic
def take(typing: Any, array: Any, at: Any) -> Any:
    """The numbers of a flat array from `at` on. Nothing checks that they are there."""
    lanes = Lanes(array.dtype)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load(_pointer(context, builder, signature, values, lanes=True), align=array.dtype.bitwidth // 8)

    return lanes(array, types.intp), generate


@intrinsic
def repeat(typing: Any, array: Any, at: Any) -> Any:
    """One number of a flat array in all lanes, unchecked as well."""
    lanes = Lanes(array.dtype)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return _filled(builder, builder.load(_pointer(context, builder, signature, values)), context.get_value_type(lanes))

    return lanes(array, types.intp), generate


@intrinsic
def put(typing: Any, array: Any, at: Any, value: Any) -> Any:
    """Write them there."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        builder.store(values[2], _pointer(context, builder, signature, values, lanes=True), align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, value), generate


@intrinsic
def prefetch(typing: Any, array: Any, at: Any) -> Any:
    """Have a number's cache line fetched, without waiting for it: many may be on their way at a time."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        place, whole = builder.bitcast(_pointer(context, builder, signature, values), ir.IntType(8).as_pointer()), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [place.type, whole, whole, whole])
        function = builder.module.globals.get("llvm.prefetch.p0") or ir.Function(builder.module, kind, "llvm.prefetch.p0")
        read, keep, data = (ir.Constant(whole, value) for value in (0, 2, 1))
        builder.call(function, [place, read, keep, data])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


def turner(listed: str, side: int) -> Any:
    """A function that turns sixteen times sixteen numbers.

    turn(source, here, out, there): number j of the lanes at source[here + i·WIDTH] becomes number i of those at out[there + j·WIDTH], for
    all i and j. Where they are those of listed rows of a table, of the `source` or the `out`, four numbers stand for a place: a list, where
    its sixteen rows begin, how many numbers a row of the table has, and which of them is the first. Unchecked.
    In squares of `side` (16 or 8), each read, turned and written before the next: source and out must not overlap.
    """

    def square(context: Any, builder: Any, signature: Any, values: Any, out: int) -> None:
        whole = ir.IntType(64)
        vector = ir.VectorType(context.get_value_type(signature.args[0].dtype), side)
        index, align = ir.VectorType(ir.IntType(32), side), signature.args[0].dtype.bitwidth // 8

        def place(array: int, i: int, first: int) -> Any:
            if listed == ("out" if array else "source"):
                row = _pointer(context, builder, signature, values, array + 1)
                row = builder.sext(builder.load(builder.gep(row, [ir.Constant(whole, i)])), whole)
                # an empty instruction hides what it is: else sixteen of them would be computed as lanes and taken apart again
                row = builder.asm(ir.FunctionType(whole, [whole]), "", "=r,0", [row], False)
                at = builder.add(builder.mul(row, values[array + 3]), values[array + 4])
            else:
                at = builder.add(values[array + 1], ir.Constant(whole, i * WIDTH))
            data = context.make_array(signature.args[array])(context, builder, values[array]).data
            return builder.bitcast(builder.gep(data, [builder.add(at, ir.Constant(whole, first))]), vector.as_pointer())

        for top in range(0, WIDTH, side):
            for left in range(0, WIDTH, side):
                rows = [builder.load(place(0, top + i, left), align=align) for i in range(side)]
                step = side // 2
                while step:  # swap the blocks of this size that lie across the diagonal
                    for i in range(side):
                        if not i & step:
                            low, high = rows[i], rows[i + step]
                            first = [lane if not lane & step else side + lane - step for lane in range(side)]
                            second = [lane + step if not lane & step else side + lane for lane in range(side)]
                            pairs = (ir.Constant(index, pair) for pair in (first, second))
                            rows[i], rows[i + step] = (builder.shuffle_vector(low, high, pair) for pair in pairs)
                    step //= 2
                for j in range(side):
                    builder.store(rows[j], place(out, left + j, top), align=align)

    def generator(out: int) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            square(context, builder, signature, values, out)
            return context.get_dummy_value()

        return generate

    n = types.intp

    def from_list(typing: Any, source: Any, row: Any, first: Any, size: Any, number: Any, out: Any, there: Any) -> Any:
        return types.void(source, row, n, n, n, out, n), generator(5)

    def to_list(typing: Any, source: Any, here: Any, out: Any, row: Any, first: Any, size: Any, number: Any) -> Any:
        return types.void(source, n, out, row, n, n, n), generator(2)

    def plain(typing: Any, source: Any, here: Any, out: Any, there: Any) -> Any:
        return types.void(source, n, out, n), generator(2)

    return intrinsic({"source": from_list, "out": to_list, "neither": plain}[listed])


SIDE = WIDTH if has_avx512() else WIDTH // 2
"""as large as there are registers for: larger squares would be written to memory and read back half turned"""
turn_in, turn_out, turn_square = (turner(listed, SIDE) for listed in ("source", "out", "neither"))


def _fold(builder: Any, left: Any, right: Any, half: int) -> Any:
    """From one or two vectors with sums of 2·half lanes each, one with the same sums of `half` lanes each, left's first."""
    lanes = range(left.type.count * (1 + (right is not left)))

    def some(chosen: list[int]) -> Any:
        return builder.shuffle_vector(left, right, ir.Constant(ir.VectorType(ir.IntType(32), len(chosen)), chosen))

    return builder.fadd(some([i for i in lanes if not i & half]), some([i for i in lanes if i & half]), flags=EXACT)


@intrinsic
def across(typing: Any, value: Any) -> Any:
    """The sum of all lanes, halves first."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        left = values[0]
        for half in (8, 4, 2, 1):
            left = _fold(builder, left, left, half)
        return builder.extract_element(left, ir.Constant(ir.IntType(32), 0))

    return value.kind(value), generate


def _times(builder: Any, place: Any, left: Any, right: Any) -> None:
    """Add a product to the lanes at a place."""
    builder.store(builder.fadd(builder.load(place), builder.fmul(left, right, flags=EXACT), flags=EXACT), place)


def _addresses(context: Any, builder: Any, signature: Any, given: Any) -> tuple[Callable[..., Any], Callable[[int, Any], Any]]:
    """For functions that unroll themselves: at(array, offsets...), where given[array][given[array + 1] + offsets...] lies, and times."""

    def at(array: int, *offsets: Any) -> Any:
        place = _pointer(context, builder, signature, given, array)
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
    Of these sums it keeps all, or the positive ones; or, if it is gated, those where the same place of `gate` is positive, and the sum is
    over which[first + k] instead of k: mix(..., gate, which, first). The others become 0. To do so afterwards would cost more than the
    sums: of lanes that are read, picked from and written back the compiler makes masked writes.
    """

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        array = signature.args[0].dtype
        vector, align = context.get_value_type(Lanes(array)), array.bitwidth // 8
        at, times = _addresses(context, builder, signature, given)

        def lanes(place: Any) -> Any:
            return builder.bitcast(place, vector.as_pointer())

        sums = [cgutils.alloca_once(builder, vector) for _ in range(outs)]
        for o, place in enumerate(sums):
            first = builder.load(lanes(at(7, o * WIDTH)), align=align) if onto else _filled(builder, builder.load(at(7, o)), vector)
            builder.store(first, place)
        with cgutils.for_range(builder, given[2]) as loop:
            k = builder.load(at(12, loop.index)) if keeps == "gated" else loop.index
            cell = builder.load(lanes(at(0, times(WIDTH, k))), align=align)
            weight = at(3, builder.mul(k, given[6]))
            for o, place in enumerate(sums):
                _times(builder, place, _filled(builder, builder.load(builder.gep(weight, [times(o, given[5])])), vector), cell)
        nothing = ir.Constant(vector, [0.0] * WIDTH)
        for o, place in enumerate(sums):
            value = builder.load(place)
            if keeps == "positive":
                value = builder.select(builder.fcmp_ordered(">", nothing, value), nothing, value)
            elif keeps == "gated":
                gates = context.make_array(signature.args[11])(context, builder, given[11]).data
                place = builder.gep(gates, [builder.add(given[10], ir.Constant(ir.IntType(64), o * WIDTH))])
                opens = builder.load(lanes(place), align=align)
                value = builder.select(builder.fcmp_ordered(">", opens, nothing), value, nothing)
            builder.store(value, lanes(at(9, o * WIDTH)), align=align)
        return context.get_dummy_value()

    n = types.intp

    def mix(
        typing: Any, values: Any, x: Any, count: Any, weights: Any, w: Any, by_out: Any, by_in: Any, begin: Any, b: Any, out: Any, y: Any
    ) -> Any:
        return types.void(values, n, n, weights, n, n, n, begin, n, out, n), generate

    def mix_gated(
        typing: Any,
        values: Any,
        x: Any,
        count: Any,
        weights: Any,
        w: Any,
        by_out: Any,
        by_in: Any,
        begin: Any,
        b: Any,
        out: Any,
        y: Any,
        gate: Any,
        which: Any,
        first: Any,
    ) -> Any:
        return types.void(values, n, n, weights, n, n, n, begin, n, out, n, gate, which, n), generate

    return intrinsic(mix_gated if keeps == "gated" else mix)


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

                for first in range(0, WIDTH, wide):
                    left, right = [lanes(0, u, first) for u in range(ups)], [lanes(3, i, first) for i in range(others)]
                    for u in range(ups):
                        for i in range(others):
                            _times(builder, sums[u][i], left[u], right[i])
            for u in range(ups):
                values = [builder.load(place) for place in sums[u]]
                for half in halves:
                    pairs = zip(values[::2], values[1::2], strict=True) if len(values) > 1 else [(values[0], values[0])]
                    values = [_fold(builder, *pair, half) for pair in pairs]
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
                        _times(builder, place, _filled(builder, factor, vector), lanes)
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
                block = times(many * WIDTH, builder.sext(builder.load(at(2, loop.index)), ir.IntType(64)))
                weight = _filled(builder, builder.load(at(4, loop.index)), vector)
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
                    factor = _filled(builder, builder.load(at(0, ahead, u)), vector)
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
        first = _pointer(context, builder, signature, given)
        last = _pointer(context, builder, signature, given, 3)
        whole = ir.IntType(64)
        places = [
            builder.bitcast(builder.gep(first, [builder.mul(ir.Constant(whole, r), given[2])]), vector.as_pointer()) for r in range(WIDTH)
        ]
        rows = [builder.load(place, align=align) for place in places]
        for r in range(WIDTH):
            pivot = builder.extract_element(rows[r], ir.Constant(ir.IntType(32), r))
            turned = builder.fdiv(ir.Constant(kind, 1.0), _known(builder, "llvm.sqrt", kind, pivot))
            builder.store(turned, builder.gep(last, [ir.Constant(whole, r)]))
            rows[r] = builder.fmul(rows[r], _filled(builder, turned, vector), flags=EXACT)
            builder.store(rows[r], places[r], align=align)
            for later in range(r + 1, WIDTH):
                factor = _filled(builder, builder.extract_element(rows[r], ir.Constant(ir.IntType(32), later)), vector)
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
        first, last, known = (_pointer(context, builder, signature, given, array) for array in (0, 3, 5))
        ahead = [builder.mul(ir.Constant(whole, r), given[2]) for r in range(WIDTH)]
        done: list[Any] = []
        for r in range(WIDTH):
            place = builder.bitcast(builder.gep(first, [ahead[r]]), vector.as_pointer())
            row = builder.load(place, align=align)
            for q, above in enumerate(done):
                number = builder.load(builder.gep(builder.gep(known, [ahead[q]]), [ir.Constant(whole, r)]))
                row = _less(builder, row, _filled(builder, number, vector), above)
            done.append(builder.fmul(row, _filled(builder, builder.load(builder.gep(last, [ir.Constant(whole, r)])), vector), flags=EXACT))
            builder.store(done[-1], place, align=align)
        return context.get_dummy_value()

    return types.void(matrix, n, n, inverse, n, factor, n), generate
