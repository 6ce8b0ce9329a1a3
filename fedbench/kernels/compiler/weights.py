"""Proof, on the graph, that samples of one item may be taken together: as one, with a weight that says how many they are.

Every sum over samples must be linear in `batch.weight`, and every sum over held rows must be weighed by `batch.rows`. A value is a sum of
terms, each a product with weight^w · rows^m; what is followed here are the pairs (w, m > 0) of its terms.
"""

from __future__ import annotations

from fedbench.kernels.compiler.graph import Value, is_zero

Terms = frozenset[tuple[int, bool]]
PLAIN: Terms = frozenset({(0, False)})
ONCE = frozenset({(1, False), (1, True)})
"""linear in the weight"""
SHAPE_ONLY = ("view", "flat", "feature_sum")


class NotLinear(NotImplementedError):
    """A sum over samples that is not linear in their weights."""


class Degrees:
    """Finds the terms of values, each once."""

    def __init__(self) -> None:
        self.known: dict[int, Terms] = {}

    def of(self, v: Value) -> Terms:
        if v.number not in self.known:
            # without samples, it has been summed: needs_all_rows looks at the sums themselves
            self.known[v.number] = self._of(v) if v.lane or v.op == "const" else PLAIN
        return self.known[v.number]

    def _of(self, v: Value) -> Terms:
        if v.op == "const":
            # 0 has no terms, so it may stand beside anything
            return frozenset() if is_zero(v) else PLAIN
        if v.op == "sample":
            return {"weight": frozenset({(1, False)}), "rows": frozenset({(0, True)})}.get(v.how["key"], PLAIN)
        if v.op in SHAPE_ONLY or v.f in ("neg", "copy"):
            return self.of(v.args[0])
        if v.op in ("cat",) or v.f in ("add", "sub"):
            return frozenset().union(*map(self.of, v.inputs))
        if v.op == "mix" or v.f == "mul":
            # exponents of the weight add up; rows² is rows, for it is 0 or 1
            return frozenset((a + c, b or d) for a, b in self.of(v.args[0]) for c, d in self.of(v.args[1]))
        if v.f == "div" and self.of(v.args[1]) == PLAIN:
            return self.of(v.args[0])
        # a choice by weight would not be linear in it, a choice between weights is
        if v.f == "pick" and all(self.of(one) <= PLAIN for one in v.args[:2]):
            return self.of(v.args[2]) | self.of(v.args[3])
        if any(self.of(one) - PLAIN for one in v.inputs):
            raise NotLinear(f"{v.f or v.op} of batch.weight or batch.rows")
        return PLAIN

    def needs_all_rows(self, outputs: dict[str, Value]) -> bool:
        """Whether terms over all held rows are among these outputs and the sums they are made of; raises NotLinear."""
        seen: set[int] = set()
        masked = False

        def look(terms: Terms, what: str) -> None:
            nonlocal masked
            # weight¹ counts samples and rows¹ rows; all else counts padding, or some samples twice
            for weight, rows in terms - ONCE:
                if weight or not rows:
                    how = "is not weighed by batch.weight (or batch.rows)" if not weight else "has batch.weight more than once as a factor"
                    raise NotLinear(f"{what} that {how}")
                masked = True

        def walk(v: Value) -> None:
            if v.number in seen:
                return
            seen.add(v.number)
            if v.op in ("lane_sum", "column_sums", "scatter"):
                look(self.of(v.args[0]), "a sum over samples")
            elif v.op == "prod":
                pairs = [(p, q) for p in self.of(v.args[0]) for q in self.of(v.args[1])]
                look(frozenset((p[0] + q[0], p[1] or q[1]) for p, q in pairs), "a product over samples")
            for one in v.inputs:
                walk(one)

        for name, v in outputs.items():
            if v.lane:
                look(self.of(v), f"a gradient of {name}")
            walk(v)
        return masked
