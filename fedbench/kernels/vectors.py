"""Sixteen numbers at a time: a vector type for kernels.

The compiler makes vector instructions of a plain loop only where it can prove that arrays do not overlap, and it keeps no sums in
registers over an outer loop. A kernel that works on `Lanes` says both itself, and says in which order sums are taken. What is no
vector instruction of the machine becomes several. What works lane by lane takes numbers too. All of it is for compiled code only.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
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


def filled(builder: Any, value: Any, vector: Any) -> Any:
    """All lanes the same number."""
    # the form in which LLVM recognises a broadcast
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(ir.IntType(32), WIDTH), [0] * WIDTH))


def _as(context: Any, builder: Any, value: Any, given: Any, wanted: Any) -> Any:
    """A number or Lanes as what an operation results in."""
    if isinstance(given, Lanes) or not isinstance(wanted, Lanes):
        return value if given == wanted else context.cast(builder, value, given, wanted)
    return filled(builder, context.cast(builder, value, given, wanted.kind), context.get_value_type(wanted))


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
        # two plain numbers keep numba's own operator
        return (lambda x, y: apply(x, y)) if isinstance(x, Lanes) or isinstance(y, Lanes) else None

    overload(operation, strict=False)(chosen)


for _operation, _instruction in (("add", "fadd"), ("sub", "fsub"), ("mul", "fmul"), ("truediv", "fdiv")):
    _with_lanes(getattr(operator, _operation), _instruction)


def known(builder: Any, name: str, kind: Any, *values: Any) -> Any:
    """A call of one of LLVM's own functions."""
    scalar = kind.element if isinstance(kind, ir.VectorType) else kind
    name += f".{'v16' if scalar is not kind else ''}{'f32' if isinstance(scalar, ir.FloatType) else 'f64'}"
    # a module may declare a function once only
    function = builder.module.globals.get(name) or ir.Function(builder.module, ir.FunctionType(kind, [kind] * len(values)), name)
    return builder.call(function, values)


def _library(name: str, builder: Any, x: Any, kind: Any) -> Any:
    """A function of the C library for each number."""
    if not isinstance(kind, ir.VectorType):
        return known(builder, name, kind, x)
    out = x
    for lane in range(WIDTH):
        at = ir.Constant(ir.IntType(32), lane)
        out = builder.insert_element(out, known(builder, name, kind.element, builder.extract_element(x, at)), at)
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
    # 2^-k by its bits: an exponent and nothing else
    power = builder.shl(builder.sub(ir.Constant(whole, bias), builder.fptosi(times, whole)), ir.Constant(whole, shift))
    return builder.fmul(x, builder.bitcast(power, kind), flags=EXACT)


def _square_root(builder: Any, x: Any, kind: Any) -> Any:
    """Where an instruction guesses 1/√x of sixteen numbers: that and a step of Newton's, in less time than the machine's own root takes."""
    if not isinstance(kind, ir.VectorType) or not isinstance(kind.element, ir.FloatType) or not has_avx512():
        return known(builder, "llvm.sqrt", kind, x)
    name, mask = "llvm.x86.avx512.rsqrt14.ps.512", ir.IntType(16)
    guess = builder.module.globals.get(name) or ir.Function(builder.module, ir.FunctionType(kind, [kind, kind, mask]), name)
    half, one = (ir.Constant(kind, [value] * WIDTH) for value in (0.5, 1.0))
    inverse = builder.call(guess, [x, x, ir.Constant(mask, -1)])
    # x·g is about √x, for a guess g of 1/√x to 14 bits; Newton: + √x / 2 · (1 - √x·g)
    root = builder.fmul(x, inverse, flags=EXACT)
    wrong = builder.fsub(one, builder.fmul(root, inverse, flags=EXACT), flags=EXACT)
    return builder.fadd(root, builder.fmul(builder.fmul(root, half, flags=EXACT), wrong, flags=EXACT), flags=EXACT)


square_root = _elementwise(_square_root, 1)
"""of numbers over 0 that are neither subnormal nor infinite; exact but for the last bit"""
magnitude = _elementwise(lambda builder, x, kind: known(builder, "llvm.fabs", kind, x), 1)
root = _elementwise(lambda builder, x, kind: known(builder, "llvm.sqrt", kind, x), 1)
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
        return filled(builder, values[0], context.get_value_type(signature.return_type))

    return Lanes(value)(value), generate


def pointer(context: Any, builder: Any, signature: Any, values: Any, array: int = 0, lanes: bool = False) -> Any:
    """Where number values[array + 1] of values[array] lies. No check, and none for an index that counts from the end."""
    place = builder.gep(context.make_array(signature.args[array])(context, builder, values[array]).data, [values[array + 1]])
    return builder.bitcast(place, context.get_value_type(Lanes(signature.args[array].dtype)).as_pointer()) if lanes else place


@intrinsic
def take(typing: Any, array: Any, at: Any) -> Any:
    """The numbers of a flat array from `at` on. Nothing checks that they are there."""
    lanes = Lanes(array.dtype)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        # aligned as one number: a row of a table may begin anywhere
        return builder.load(pointer(context, builder, signature, values, lanes=True), align=array.dtype.bitwidth // 8)

    return lanes(array, types.intp), generate


@intrinsic
def repeat(typing: Any, array: Any, at: Any) -> Any:
    """One number of a flat array in all lanes, unchecked as well."""
    lanes = Lanes(array.dtype)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return filled(builder, builder.load(pointer(context, builder, signature, values)), context.get_value_type(lanes))

    return lanes(array, types.intp), generate


@intrinsic
def put(typing: Any, array: Any, at: Any, value: Any) -> Any:
    """Write Lanes to a flat array from `at` on. Nothing checks that there is room."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        builder.store(values[2], pointer(context, builder, signature, values, lanes=True), align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, value), generate


@intrinsic
def prefetch(typing: Any, array: Any, at: Any) -> Any:
    """Have a number's cache line fetched, without waiting for it: many may be on their way at a time."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        place, whole = builder.bitcast(pointer(context, builder, signature, values), ir.IntType(8).as_pointer()), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [place.type, whole, whole, whole])
        function = builder.module.globals.get("llvm.prefetch.p0") or ir.Function(builder.module, kind, "llvm.prefetch.p0")
        # LLVM's flags: to read; kept in the second cache and those behind it; data
        read, keep, data = (ir.Constant(whole, value) for value in (0, 2, 1))
        builder.call(function, [place, read, keep, data])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


def turner(listed: str, side: int, onto: bool = False) -> Any:
    """A function that turns sixteen times sixteen numbers; onto: they are added to those of `out`, row after row.

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
                row = pointer(context, builder, signature, values, array + 1)
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
                    there = place(out, left + j, top)
                    now = builder.fadd(builder.load(there, align=align), rows[j]) if onto else rows[j]
                    builder.store(now, there, align=align)

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
turn_onto = turner("out", SIDE, onto=True)


def fold(builder: Any, left: Any, right: Any, half: int) -> Any:
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
            left = fold(builder, left, left, half)
        return builder.extract_element(left, ir.Constant(ir.IntType(32), 0))

    return value.kind(value), generate
