"""Sums of layers over the same inputs: x @ A + x @ B is x @ (A + B), one product in place of two."""

from __future__ import annotations

from fedbench.kernels.compiler.graph import Graph, Value

Term = tuple[int, Value]
"""1 or -1, and what is added or taken away"""


def together(graph: Graph, v: Value) -> Value:
    """v, its layers over the same inputs taken together."""
    if v.op == "cat":
        parts = [(*bounds, together(graph, one)) for bounds, one in zip(v.how["bounds"], v.args, strict=True)]
        return graph.cat(v.shape, v.how["axis"], parts)
    if v.f == "pick":
        return graph.ew("pick", *v.args[:2], *(together(graph, graph.expand(one, v.shape)) for one in v.args[2:]))
    groups: dict[int, list[Term]] = {}
    rest: list[Term] = []
    for sign, one in terms(graph, v, 1):
        if one.op == "mix":
            groups.setdefault(one.args[0].number, []).append((sign, one))
        else:
            rest.append((sign, one))
    if all(len(group) == 1 for group in groups.values()):
        return v
    for group in groups.values():
        weights = total(graph, [(sign, one.args[1]) for sign, one in group])
        rest.append((1, graph.make("mix", v.shape, (group[0][1].args[0], graph.lying(weights)))))
    return total(graph, rest)


def terms(graph: Graph, v: Value, sign: int) -> list[Term]:
    """What is added up in v."""
    if v.f in ("add", "sub"):
        left, right = (graph.expand(one, v.shape) for one in v.args)
        return terms(graph, left, sign) + terms(graph, right, -sign if v.f == "sub" else sign)
    if v.f == "neg":
        return terms(graph, graph.expand(v.args[0], v.shape), -sign)
    return [(sign, v)]


def total(graph: Graph, parts: list[Term]) -> Value:
    """The sum of terms."""
    ordered = sorted(parts, key=lambda term: -term[0])
    sign, found = ordered[0]
    found = found if sign > 0 else graph.ew("neg", found)
    for sign, one in ordered[1:]:
        found = graph.ew("add" if sign > 0 else "sub", found, one)
    return found
