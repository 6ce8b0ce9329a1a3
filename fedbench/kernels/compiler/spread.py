"""The graph of a step on a CPU: sums of rows that lie there already are taken apart, so that no such sum has to be made and kept.

    p · (x + r·(y - x))          = p·x + r·(p·y - p·x), for a number r of each sample
    [x, y - x] @ W               = x @ (W1 - W2) + y @ W2
    sums over samples of a·(y - x) = those of a·y less those of a·x
    sums over samples of a·(x + r·(y - x)) = those of (a - a·r)·x and of a·r·y

The parts depend on less than the whole: what the rows of one table add need not be made again when those of another have moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fedbench.kernels.compiler.graph import Graph, Value, is_uniform, layout, source
from fedbench.kernels.compiler.indices import LANE, Shape


class Term(NamedTuple):
    sign: int
    scalars: tuple[Value, ...]
    """numbers of each sample that the rows are multiplied by, in the rows' shape"""
    rows: Value


class BatchGraph(Graph):
    def ew(self, f: str, *given: Value | float) -> Value:
        """A sum of weights that are read column by column is made as they lie, and looked at from the side."""
        # only matrices without samples: of these, layers read columns
        args = [one for one in given if isinstance(one, Value) and len(one.shape) == 2 and not one.lane]
        if f in ("add", "sub", "neg") and len(args) == len(given) and all(one.shape == args[0].shape and turned(one) for one in args):
            return self.turned(super().ew(f, *map(self.turned, args)))
        return super().ew(f, *given)

    def terms(self, v: Value) -> list[Term] | None:
        """v [samples, features] as a sum of rows of tables, maybe times numbers of each sample; None if it is anything else."""
        # a row of one number is no row, but a scalar of its sample
        if source(v).op == "table" and v.size > 1:
            return [Term(1, (), v)]
        if v.f in ("add", "sub", "neg"):
            parts = [self.terms(self.expand(one, v.shape)) for one in v.args]
            signs = (-1,) if v.f == "neg" else (1, -1 if v.f == "sub" else 1)
            if any(part is None for part in parts):
                return None
            return [term._replace(sign=sign * term.sign) for sign, part in zip(signs, parts, strict=True) for term in part or ()]
        if v.f == "mul":
            for one, other in (v.args, v.args[::-1]):
                scalar = self.expand(one, v.shape)
                if self._scalar(scalar) is not None and (found := self.terms(self.expand(other, v.shape))) is not None:
                    return [term._replace(scalars=(*term.scalars, scalar)) for term in found]
        return None

    def several(self, v: Value) -> list[Term]:
        """The terms of a sum of rows; none if it is no such sum."""
        found = self.terms(v) if v.f in ("add", "sub") and v.shape[:1] == (LANE,) and len(v.shape) == 2 and v.size > 1 else None
        return found or []

    def added(self, signed: Sequence[tuple[int, Value]]) -> Value:
        # those with a plus first: a sum that begins with a minus needs an operation more
        ordered = sorted(signed, key=lambda term: -term[0])
        sign, total = ordered[0]
        total = total if sign > 0 else self.ew("neg", total)
        for sign, one in ordered[1:]:
            total = self.ew("add" if sign > 0 else "sub", total, one)
        return total

    def feature_sum(self, v: Value, axis: int) -> Value:
        parts = self.factors(v)
        sums = [one for one in parts if self.several(one)]
        # a product of two such sums would have a term for each pair
        if len(sums) != 1 or axis != 1:
            return super().feature_sum(v, axis)
        rest = [one for one in parts if one is not sums[0]]
        groups: dict[tuple[int, ...], list[Term]] = {}
        for term in self.several(sums[0]):
            # terms with the same scalars are added up before these are multiplied
            groups.setdefault(tuple(one.number for one in term.scalars), []).append(term)
        made = []
        for group in groups.values():
            total = self.added([(term.sign, self.feature_sum(self.product([term.rows, *self.vectors(rest)]), axis)) for term in group])
            made.append(
                (1, self.product([total, *(self.one_a_sample(one, total.shape) for one in (*group[0].scalars, *self.scalars(rest)))]))
            )
        return self.added(made)

    def scalars(self, values: Sequence[Value]) -> list[Value]:
        """The values that repeat one number of a sample for all features."""
        return [one for one in values if not is_uniform(one) and self._scalar(one) is not None]

    def vectors(self, values: Sequence[Value]) -> list[Value]:
        return [one for one in values if is_uniform(one) or self._scalar(one) is None]

    def one_a_sample(self, v: Value, shape: Shape) -> Value:
        """The number that a value repeats for all features, once."""
        found = self._scalar(v)
        assert found is not None
        return self.reshape(found, shape)

    def mm(self, a: Value, b: Value) -> Value:
        shared = self.shared_rows(a) if a.lane and not b.lane else None
        if shared is None:
            return super().mm(a, b)
        # sums of weights are made once a step, sums of rows once a sample
        weights = [self.slice(b, 0, *bounds) for bounds in a.how["bounds"]]
        rows = {term.rows.number: term.rows for part in shared for term in part}
        made = []
        for number, one in rows.items():
            signed = [(t.sign, w) for part, w in zip(shared, weights, strict=True) for t in part if t.rows.number == number]
            made.append(self.mm(one, self.added(signed)))
        total = made[0]
        for one in made[1:]:
            total = self.ew("add", total, one)
        return total

    def prod(self, a: Value, b: Value) -> Value:
        # one row of products: the scalars join it, and rows are read as they lie
        if a.shape[0] == 1 and len(terms := self.several(b)) > 1:
            scalars = [(t.sign, self.product([a, *(self.one_a_sample(one, (1, LANE)) for one in t.scalars)])) for t in terms]
            rows = {term.rows.number: term.rows for term in terms}
            groups = [[one for t, one in zip(terms, scalars, strict=True) if t.rows.number == number] for number in rows]
            signs = [group[0][0] if len(group) == 1 else 1 for group in groups]
            each = [group[0][1] if len(group) == 1 else self.added(group) for group in groups]
            return self.added([(sign, self.prod(one, of)) for sign, one, of in zip(signs, each, rows.values(), strict=True)])
        shared = self.shared_rows(b) if b.lane and a.lane else None
        if shared is None:
            return super().prod(a, b)
        parts = []
        for (low, high), part in zip(b.how["bounds"], shared, strict=True):
            parts.append((low, high, self.added([(term.sign, self.prod(a, term.rows)) for term in part])))
        return self.cat((a.shape[0], b.shape[1]), 1, parts)

    def shared_rows(self, v: Value) -> list[list[Term]] | None:
        """The terms of inputs side by side, some of them sums of rows, if made of no more rows than there are inputs; else None."""
        if v.op != "cat" or v.how["axis"] != 1:
            return None
        parts = [self.several(one) or self.terms(one) for one in v.args]
        if not any(part and len(part) > 1 for part in parts):
            return None
        if any(part is None or any(term.scalars for term in part) for part in parts):
            return None
        rows = {term.rows.number for part in parts for term in part or ()}
        return [part or [] for part in parts] if len(rows) <= len(parts) else None


def turned(v: Value) -> bool:
    """Whether a matrix is looked at from the side: the numbers of a column lie one after another, those of a row do not."""
    found = layout(v) if v.op == "view" else None
    return found is not None and 0 < found[2][0] < found[2][1]
