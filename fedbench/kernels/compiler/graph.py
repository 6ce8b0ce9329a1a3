"""A graph of values over the samples of one client, and the algebra that makes a kernel of it cheap.

Every value has a shape in which LANE stands for the axis of samples (or of touched rows: a kernel works on one number of sixteen of them
at a time). A value without that axis is *uniform*: the same for all samples of a client. Views cost nothing, they only change how an
index is computed. Equal values are made once.

The rules that find what a careful person would write by hand:
    [a, b] @ W            = a @ W1 + b @ W2; a part that is uniform becomes a bias
    sum over samples of u·x = u · sum over samples of x, for a uniform u; likewise inside of products with samples
    (sum of x) @ W        in place of the sum of x @ W
    slices move through elementwise operations, zero padding that is added up becomes a concatenation, constants fold
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fedbench.kernels.compiler.indices import LANE, Axis, Index, Shape, broadcast, linear, parted, plus, strides

KNOWN_SUMS = {"weight": "size", "rows": "touched"}
"""sums over samples that need not be made: how many they are, and how many rows are held"""


class Value:
    """One value of the graph: an operation on others."""

    __slots__ = ("op", "shape", "args", "how", "number")

    def __init__(self, number: int, op: str, shape: Shape, args: tuple[Any, ...], how: dict[str, Any]) -> None:
        self.number, self.op, self.shape, self.args, self.how = number, op, shape, args, how

    @property
    def lane(self) -> bool:
        """Whether it differs from sample to sample."""
        return LANE in self.shape

    @property
    def features(self) -> tuple[int, ...]:
        """The shape for one sample."""
        return tuple(n for n in self.shape if isinstance(n, int))

    @property
    def size(self) -> int:
        return math.prod(self.features)

    @property
    def f(self) -> str:
        """Name of an elementwise function; "" for other operations."""
        return self.how.get("f", "")

    @property
    def inputs(self) -> tuple[Value, ...]:
        return tuple(one for one in self.args if isinstance(one, Value))

    def __repr__(self) -> str:
        said = ", ".join(f"%{one.number}" if isinstance(one, Value) else repr(one) for one in self.args)
        return f"%{self.number}:{self.op}{list(self.shape)}{self.f or self.how.get('key', '')}({said})"


def source(value: Value) -> Value:
    """What a view looks at."""
    while value.op in ("view", "flat"):
        value = value.args[0]
    return value


FOLD: dict[str, Callable[..., float]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "neg": operator.neg, "max": max, "min": min, "abs": abs,
    "div": lambda a, b: a / b if b else math.nan,
}  # fmt: skip


class Graph:
    """Makes values, each once."""

    def __init__(self) -> None:
        self.known: dict[Any, Value] = {}

    def make(self, op: str, shape: Iterable[Axis], args: Iterable[Any] = (), **how: Any) -> Value:
        shape, args = tuple(shape), tuple(args)
        parts = tuple(one.number if isinstance(one, Value) else ("literal", one) for one in args)
        # `fn` is no part of the key: no two functions are equal; `key` says what a view does
        key = op, shape, parts, tuple(sorted((name, value) for name, value in how.items() if name != "fn"))
        if key not in self.known:
            self.known[key] = Value(len(self.known), op, shape, args, how)
        return self.known[key]

    def const(self, value: float, shape: Iterable[Axis] = ()) -> Value:
        return self.make("const", shape, (float(value),))

    # ---- views -------------------------------------------------------------------------------------------------------

    def view(self, of: Value, shape: Iterable[Axis], fn: Callable[[tuple[Index, ...]], tuple[Index, ...]]) -> Value:
        """fn: index of the view -> index of what it looks at."""
        shape = tuple(shape)
        if of.op == "const":
            return self.const(of.args[0], shape)
        if of.op == "view":
            # a view of a view is one view: reshapes would otherwise pile up in every index
            of, fn = of.args[0], _after(of.how["fn"], fn)
        # by named indices: two views that map them alike are one value
        names = tuple(None if n == LANE else 0 if n == 1 else f"i{axis}" for axis, n in enumerate(shape))
        found = fn(names)
        if shape == of.shape and found == names:
            return of
        return self.make("view", shape, (of,), fn=fn, key=repr(found))

    def reshape(self, v: Value, shape: Iterable[Axis]) -> Value:
        new, old = tuple(shape), v.shape
        if new == old:
            return v
        if (LANE in old) != (LANE in new):
            raise NotImplementedError("a reshape that mixes samples and features")
        if LANE in old:
            # samples keep their order: only features before or after their axis may be grouped anew
            before = [math.prod(x for x in given[: given.index(LANE)] if isinstance(x, int)) for given in (old, new)]
            if before[0] != before[1]:
                raise NotImplementedError("a reshape that mixes samples and features")

        def fn(index: tuple[Index, ...]) -> tuple[Index, ...]:
            given = [one for one, n in zip(index, new, strict=True) if n != LANE]
            ours, theirs = [n for n in old if isinstance(n, int)], [n for n in new if isinstance(n, int)]
            if [n for n in ours if n != 1] == [n for n in theirs if n != 1]:  # axes of 1 alone come or go: no division in the index
                rest = iter([one for one, n in zip(given, theirs, strict=True) if n != 1])
                found = [0 if n == 1 else next(rest) for n in ours]
            else:
                found = list(parted(linear(given, theirs), ours))  # type: ignore[arg-type]
            left = iter(found)
            return tuple(None if n == LANE else next(left) for n in old)

        if v.op == "flat" and v.args[0].shape == new:
            return v.args[0]
        # no plain view: where all of it is written, the numbers go over as they lie
        if [n for n in old if n != 1] != [n for n in new if n != 1] and v.op != "const":
            return self.make("flat", new, (v,), fn=fn, key=("reshape", old, new))
        return self.view(v, new, fn)

    def permute(self, v: Value, axes: Sequence[int]) -> Value:
        axes = [axis % len(v.shape) for axis in axes]

        def fn(index: tuple[Index, ...]) -> tuple[Index, ...]:
            out: list[Index] = [None] * len(axes)
            for one, axis in zip(index, axes, strict=True):
                out[axis] = one
            return tuple(out)

        return self.view(v, (v.shape[axis] for axis in axes), fn)

    def turned(self, v: Value) -> Value:
        return self.permute(v, (1, 0))

    def slice(self, v: Value, axis: int, start: int | None, stop: int | None) -> Value:
        axis %= len(v.shape)
        n = v.shape[axis]
        if not isinstance(n, int):
            return v
        start, stop = (one + n if one < 0 else one for one in (start or 0, n if stop is None else stop))
        start, stop = max(0, start), min(stop, n)
        if (start, stop) == (0, n):
            return v
        # a part of a layer's outputs needs a part of its weights alone
        if v.op == "mix" and axis == 1:
            return self.mm(v.args[0], self.slice(v.args[1], 1, start, stop))
        # slices move to the leaves: what nobody reads is never made
        if v.op == "ew" and v.lane:
            return self.ew(
                v.f, *(self.const(a.args[0]) if a.op == "const" else self.slice(self.expand(a, v.shape), axis, start, stop) for a in v.args)
            )
        first = start

        def fn(index: tuple[Index, ...]) -> tuple[Index, ...]:
            return tuple(plus(one, first) if at == axis and one is not None else one for at, one in enumerate(index))

        return self.view(v, (*v.shape[:axis], stop - start, *v.shape[axis + 1 :]), fn)

    def expand(self, v: Value, shape: Iterable[Axis]) -> Value:
        shape, old = tuple(shape), v.shape
        before = len(shape) - len(old)
        shape = tuple(old[axis - before] if n == -1 else n for axis, n in enumerate(shape))
        if shape == old:
            return v

        def fn(index: tuple[Index, ...]) -> tuple[Index, ...]:
            pairs = zip(index[before:], old, shape[before:], strict=True)
            return tuple(0 if ours == 1 and theirs != 1 else one for one, ours, theirs in pairs)

        return self.view(v, shape, fn)

    def cat(self, shape: Shape, axis: int, parts: Sequence[tuple[int, int, Value]]) -> Value:
        """parts (start, stop, value) of an axis, added where they overlap, 0 where none is."""
        # cut at all edges, so that parts overlap wholly or not at all
        edges = sorted({0, int(shape[axis]), *(edge for start, stop, _ in parts for edge in (start, stop))})
        out = []
        for low, high in zip(edges[:-1], edges[1:], strict=True):
            over = [self.slice(v, axis, low - start, high - start) for start, stop, v in parts if start <= low and high <= stop]
            total = over[0] if over else self.const(0.0, (*shape[:axis], high - low, *shape[axis + 1 :]))
            for one in over[1:]:
                total = self.ew("add", total, one)
            out.append((low, high, total))
        if len(out) == 1:
            return out[0][2]
        return self.make("cat", shape, (v for _, _, v in out), axis=axis, bounds=tuple((low, high) for low, high, _ in out))

    def pad(self, v: Value, shape: Shape, axis: int, start: int) -> Value:
        """v as a part of a larger axis, zeros around it."""
        if shape[axis] == v.shape[axis]:
            return v
        return self.cat(shape, axis, [(start, start + int(v.shape[axis]), v)])

    # ---- arithmetic --------------------------------------------------------------------------------------------------

    def ew(self, f: str, *given: Value | float) -> Value:
        """An elementwise function, its arguments broadcast."""
        args = [one if isinstance(one, Value) else self.const(one) for one in given]
        shape = broadcast(*(one.shape for one in args))
        known = [one.args[0] if one.op == "const" else None for one in args]
        if all(one is not None for one in known) and f in FOLD:
            return self.const(FOLD[f](*known), shape)
        if f == "mul" and 1.0 in known:
            return self.expand(args[1 - known.index(1.0)], shape)
        if f == "mul" and 0.0 in known:
            return self.const(0.0, shape)
        if f == "mul" and -1.0 in known:
            return self.ew("neg", self.expand(args[1 - known.index(-1.0)], shape))
        if (f in ("add", "sub") and known[1] == 0.0) or (f == "div" and known[1] == 1.0):
            return self.expand(args[0], shape)
        if f == "add" and known[0] == 0.0:
            return self.expand(args[1], shape)
        if f == "neg" and args[0].f == "neg":
            return args[0].args[0]
        if f == "pick" and self.expand(args[2], shape) is self.expand(args[3], shape):
            return self.expand(args[2], shape)
        # gradients of slices are padded with zeros: added up they are a concatenation again
        if f == "add":
            pieces = [_pieces(self.expand(one, shape)) for one in args]
            if pieces[0] and pieces[1] and pieces[0][0] == pieces[1][0]:
                return self.cat(shape, pieces[0][0], pieces[0][1] + pieces[1][1])
        return self.make("ew", shape, args, f=f)

    def factors(self, v: Value) -> list[Value]:
        """A product as its factors, each with v's shape."""
        if v.f == "mul":
            return [part for one in v.args for part in self.factors(self.expand(one, v.shape))]
        if v.f == "neg":
            parts = self.factors(self.expand(v.args[0], v.shape))
            return [self.const(-1.0, v.shape), *parts] if len(parts) > 1 else [v]
        inner = v.args[0] if v.op == "view" else v
        if v.lane and v.size > 1 and inner.f == "mul" and inner.lane and inner.size == 1:  # a scalar of a sample, for all its features
            small = tuple(LANE if n == LANE else 1 for n in v.shape)
            scalars = (self.reshape(self.expand(one, inner.shape), small) for one in inner.args)
            return [part for one in scalars for part in self.factors(self.expand(one, v.shape))]
        return [v]

    def product(self, values: Sequence[Value]) -> Value:
        out = values[0]
        for one in values[1:]:
            out = self.ew("mul", out, one)
        return out

    def sum(self, v: Value, axes: Sequence[int] | None, keep: bool) -> Value:
        chosen = sorted(axis % len(v.shape) for axis in (axes or range(len(v.shape))))
        out = v
        for axis in reversed(chosen):
            out = self.lane_sum(out, axis) if out.shape[axis] == LANE else self.feature_sum(out, axis)
        return self.reshape(out, (1 if axis in chosen else n for axis, n in enumerate(v.shape))) if keep else out

    def largest(self, v: Value, axes: Sequence[int] | None, keep: bool) -> Value:
        """The largest number along axes of features."""
        chosen = sorted(axis % len(v.shape) for axis in (axes or range(len(v.shape))))
        out = v
        for axis in reversed(chosen):
            if v.shape[axis] == LANE:
                raise NotImplementedError("a maximum over samples or rows")
            out = self.feature_max(out, axis)
        return self.reshape(out, (1 if axis in chosen else n for axis, n in enumerate(v.shape))) if keep else out

    def feature_max(self, v: Value, axis: int) -> Value:
        shape = tuple(n for at, n in enumerate(v.shape) if at != axis)
        if v.op == "const" or v.shape[axis] == 1:
            return self.reshape(self.slice(v, axis, 0, 1), shape)
        return self.make("feature_max", shape, (v,), axis=axis)

    def lane_sum(self, v: Value, axis: int) -> Value:
        """The sum over samples: uniform factors leave it, and a sum of products with weights is the product of the sums."""
        shape = tuple(n for at, n in enumerate(v.shape) if at != axis)
        if v.op == "const" or is_uniform(v):
            raise NotImplementedError("a sum over samples of what is the same for all of them")
        if v.op == "sample" and v.how["key"] in KNOWN_SUMS:
            return self.make("param", (), (), key=("batch", KNOWN_SUMS[v.how["key"]]))
        parts = self.factors(v)
        uniform, lane = [p for p in parts if is_uniform(p)], [p for p in parts if not is_uniform(p)]
        # multiplied once, after the sum
        if uniform and lane:
            outside = [self._dropped(p, axis, shape) for p in uniform]
            return self.product([self.lane_sum(self.product(lane), axis), *outside])
        if v.op == "mix" and axis == 0:
            total = self.reshape(self.lane_sum(v.args[0], 0), (1, v.args[0].shape[1]))
            return self.reshape(self.mm(total, v.args[1]), shape)
        if v.op == "cat":
            sums = [(low, high, self.lane_sum(one, axis)) for (low, high), one in zip(v.how["bounds"], v.args, strict=True)]
            return self.cat(shape, v.how["axis"] - (axis < v.how["axis"]), sums)
        vectors = [p for p in parts if self._scalar(p) is None]
        if len(shape) == 1 and len(parts) > 1 and len(vectors) == 1:  # a vector of a sample times its scalars
            rest = self.product([self.reshape(self._scalar(p), (LANE,)) for p in parts if p is not vectors[0]])  # type: ignore[arg-type]
            vector = vectors[0] if vectors[0].shape[0] == LANE else self.turned(vectors[0])
            return self.reshape(self.prod(self.reshape(rest, (1, LANE)), vector), shape)
        if math.prod(n for n in shape if isinstance(n, int)) == 1:
            scalar = self._scalar(v)
            return self.reshape(self.make("lane_sum", (), (self.reshape(v if scalar is None else scalar, (LANE,)),)), shape)
        if len(shape) != 1:
            raise NotImplementedError(f"a sum over samples of {len(shape)}-dimensional features")
        layers = [p for p in parts if p.op == "mix"]
        if len(layers) == 1 and len(parts) > 1 and axis == 0:  # a gate's: the weights times products that the layer's gradient needs too
            a, weights = layers[0].args
            both = self.prod(self.turned(a), self.product([p for p in parts if p is not layers[0]]))
            return self.feature_sum(self.ew("mul", both, weights), 0)
        return self.make("column_sums", shape, (self.lying(v if v.shape[0] == LANE else self.turned(v)),))

    def _dropped(self, v: Value, axis: int, shape: Shape) -> Value:
        """A uniform value without the axis of samples."""
        return self.view(v, shape, lambda index: (*index[:axis], None, *index[axis:]))

    def _scalar(self, v: Value) -> Value | None:
        """The one number of a sample that v repeats for all features; None if it has several."""
        if v.op == "view" and v.args[0].lane and v.args[0].size == 1:
            return v.args[0]
        return v if v.size == 1 else None

    def feature_sum(self, v: Value, axis: int) -> Value:
        shape = tuple(n for at, n in enumerate(v.shape) if at != axis)
        n = int(v.shape[axis])
        if n == 1:
            return self.reshape(v, shape)
        if v.op == "const":
            return self.const(v.args[0] * n, shape)
        outside, inside = [], []
        for part in self.factors(v):
            scalar = part.args[0] if part.op == "view" and part.args[0].lane and part.args[0].size == 1 else None
            if len(v.features) == 1 and scalar is not None:
                outside.append(self.reshape(scalar, shape))
            elif part.op == "const":
                outside.append(self.const(part.args[0], shape))
            else:
                inside.append(part)
        if outside and inside:
            return self.product([self.feature_sum(self.product(inside), axis), *outside])
        return self.make("feature_sum", shape, (v,), axis=axis)

    def mm(self, a: Value, b: Value) -> Value:
        """[m, k] @ [k, n], one of the three axes may be that of samples."""
        if a.shape[1] == LANE:
            return self.prod(a, b)
        if b.lane:
            return self.turned(self.mm(self.turned(b), self.turned(a)))
        if not a.lane:
            return self.make("uniform_mm", (a.shape[0], b.shape[1]), (a, b))
        k, n = int(b.shape[0]), int(b.shape[1])
        if a.op == "const":
            return self.expand(self.ew("mul", a.args[0], self.feature_sum(b, 0)), (LANE, n))
        if a.op == "cat" and a.how["axis"] == 1:
            terms = [(self.slice(b, 0, *bounds), one) for bounds, one in zip(a.how["bounds"], a.args, strict=True) if not is_zero(one)]
            out = self.mm(terms[0][1], terms[0][0])
            for weights, one in terms[1:]:
                out = self.ew("add", out, self.mm(one, weights))
            return out
        if k == 1:
            return self.ew("mul", a, b)
        if is_uniform(a):
            row = self.view(a, (1, k), lambda index: (None, index[1]))
            return self.expand(self.reshape(self.make("uniform_mm", (1, n), (row, b)), (n,)), (LANE, n))
        parts = self.factors(a)
        uniform = [p for p in parts if is_uniform(p)]
        if uniform and len(uniform) < len(parts):
            # (x · u) @ W = x @ (u · W): weights are multiplied, not samples
            column = self.product([self.view(p, (k, 1), lambda index: (None, index[0])) for p in uniform])
            rest = self.product([p for p in parts if p not in uniform])
            return self.mm(rest, self.ew("mul", self.expand(column, (k, n)), b))
        if n == 1:
            row = self.view(b, (k,), lambda index: (index[0], 0))
            return self.reshape(self.feature_sum(self.ew("mul", a, row), 1), (LANE, 1))
        return self.make("mix", (LANE, n), (self.lying(a), self.lying(b)))

    def prod(self, a: Value, b: Value) -> Value:
        """[m, samples] @ [samples, n]: sums of products over samples."""
        m, n = int(a.shape[0]), int(b.shape[1])
        if not a.lane or not b.lane or a.op == "const" or b.op == "const":
            raise NotImplementedError("a product over samples with what is the same for all of them")
        if n == 1 and m > 1:  # a single vector is a row: other rules look for m = 1
            return self.turned(self.prod(self.turned(b), self.turned(a)))
        if b.op == "cat" and b.how["axis"] == 1:
            return self.cat((m, n), 1, [(*bounds, self._prod(a, one, m)) for bounds, one in zip(b.how["bounds"], b.args, strict=True)])
        if is_uniform(b):
            total = self.reshape(self.lane_sum(a, 1), (m, 1))
            return self.ew("mul", total, self.view(b, (1, n), lambda index: (None, index[1])))
        parts = self.factors(b)
        uniform = [p for p in parts if is_uniform(p)]
        if uniform and len(uniform) < len(parts):
            row = self.product([self.view(p, (1, n), lambda index: (None, index[1])) for p in uniform])
            return self.ew("mul", self.prod(a, self.product([p for p in parts if p not in uniform])), row)
        return self.make("prod", (m, n), (self.lying(a), self.lying(b)))

    def rows_of_categories(self, weights: Value, category: Value) -> Value:
        """weights [G, d] or [G] -> [samples, d] or [samples]: the row that each sample's category has."""
        wide = weights if len(weights.shape) == 2 else self.reshape(weights, (*weights.shape, 1))
        found = self.make("gather", (LANE, wide.shape[1]), (self.lying(wide), category))
        return self.reshape(found, (LANE, *weights.shape[1:]))

    def lying(self, v: Value) -> Value:
        """v, or a copy of it if its numbers do not lie evenly, those of a sample one after another."""
        found = layout(v)
        if (
            found is None
            or found[0].op == "const"
            or (v.lane and any(by != 1 for by, n in zip(found[2], v.features, strict=True) if n > 1))
        ):
            return self.make("ew", v.shape, (v,), f="copy")
        return v

    def _prod(self, a: Value, b: Value, m: int) -> Value:
        return self.const(0.0, (m, b.shape[1])) if is_zero(b) else self.prod(a, b)

    def bmm(self, a: Value, b: Value) -> Value:
        """[b, m, k] @ [b, k, n]"""
        if a.shape[0] == 1 and b.shape[0] == 1:
            out = self.mm(self.reshape(a, a.shape[1:]), self.reshape(b, b.shape[1:]))
            return self.reshape(out, (1, *out.shape))
        left = self.reshape(a, (*a.shape, 1))
        right = self.reshape(b, (b.shape[0], 1, *b.shape[1:]))
        return self.sum(self.ew("mul", left, right), [2], False)


def place_in(v: Value, index: Iterable[Index]) -> tuple[Value, int | str]:
    """What a view looks at, and where an element lies in it, of one sample."""
    at = tuple(index)
    while v.op in ("view", "flat"):
        at, v = v.how["fn"](at), v.args[0]
    return v, linear([one for one in at if one is not None], v.features)


def same_numbers(v: Value) -> Value | None:
    """What a view looks at if it differs in axes of size 1 alone; None if it differs in more."""
    of = v.args[0]
    wide = [n for n in of.shape if n != 1]
    if v.op != "view" or [n for n in v.shape if n != 1] != wide:
        return None
    found = layout(v)
    plain = [by for by, n in zip(strides(of.features), of.features, strict=True) if n > 1]
    return of if found and found[1] == 0 and [by for by, n in zip(found[2], v.features, strict=True) if n > 1] == plain else None


def layout(v: Value) -> tuple[Value, int, list[int]] | None:
    """What a view looks at, its first element there and a stride for each feature axis; None if its elements lie otherwise."""

    def at(index: Iterable[int]) -> int:
        left = iter(index)
        return int(place_in(v, [None if not isinstance(n, int) else next(left) for n in v.shape])[1])

    sizes = v.features
    first = at([0] * len(sizes))
    by = [at([int(axis == here) for axis in range(len(sizes))]) - first if sizes[here] > 1 else 0 for here in range(len(sizes))]
    for axis, n in enumerate(sizes):
        for k in range(n):
            if at([k if here == axis else 0 for here in range(len(sizes))]) != first + k * by[axis]:
                return None
    # axes that look even one by one may not be so together: the far corner tells
    last = [n - 1 for n in sizes]
    if at(last) != first + sum(k * one for k, one in zip(last, by, strict=True)):
        return None
    return source(v), first, by


def _after(inner: Callable[[Any], Any], first: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda index: inner(first(index))


def is_uniform(v: Value) -> bool:
    """A value without samples, repeated for all of them."""
    return v.lane and (v.op == "const" or (v.op in ("view", "flat") and not source(v).lane))


def is_zero(v: Value) -> bool:
    return v.op == "const" and v.args[0] == 0


def _pieces(v: Value) -> tuple[int, list[tuple[int, int, Value]]] | None:
    """A concatenation as its axis and the parts that are not zero."""
    if v.op != "cat":
        return None
    return v.how["axis"], [(*bounds, one) for bounds, one in zip(v.how["bounds"], v.args, strict=True) if not is_zero(one)]
