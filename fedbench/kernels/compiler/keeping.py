"""What phases keep for each other: values that are made of nothing that moved in between.

The phases of a step take turns, and each moves its names alone. What a layer adds of rows that were sent, say, is the same until the
layer's weights move: of such a layer the part that is still is made apart, its base, and kept from one step to the next. What samples of
a batch have a part in is kept from phase to phase of one step, where rows lie still from step to step too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fedbench.kernels.compiler.graph import Graph, Value
from fedbench.kernels.compiler.schedule import LEAVES, Affine, Schedule, reached
from fedbench.kernels.vectors import WIDTH

OF_BATCH = {"weight", "size"}
"""leaves that are others in every batch"""


@dataclass
class Kept:
    """What one phase keeps or finds."""

    slots: dict[int, int] = field(default_factory=dict)
    """values -> where they are kept in acts, or in tmp if they have no samples: the same for all phases"""
    bases: Mapping[int, tuple[Value, Affine]] = field(default_factory=dict)
    """layers -> the part of them that is made apart"""
    there: set[int] = field(default_factory=set)
    """values that an earlier phase of the step left"""
    once: set[int] = field(default_factory=set)
    """values that the step before left: made anew where there was none, or where it had other rows"""
    acts: int = 0
    tmp: int = 0


def kept(graph: Graph, phases: Sequence[tuple[dict[str, Value], set[str]]]) -> list[Kept]:
    """For each phase. phases: their outputs, and the names of what they move."""
    plans = [Schedule(graph, outputs) for outputs, _ in phases]

    def still(v: Value, phase: int, made: Callable[[int], bool]) -> tuple[bool, bool]:
        """Whether v is, where a phase needs it, what it was when a phase last `made` it; and whether that was in the step before."""
        # phases take turns: how many of them ago it was made last, this one a step ago included
        back = next((n for n in range(1, len(phases) + 1) if made((phase - n) % len(phases))), 0)
        moved = set().union(*(phases[(phase - n) % len(phases)][1] for n in range(1, back + 1)))
        leaves = [one for one in reached([v]) if one.op in ("table", "param", "sample")]
        names = {("held", name) for name in moved}
        before = back > phase  # made before this step's first phase: in the step before
        fixed = all(isinstance(one.how["key"], str) or one.how["key"] not in names for one in leaves)
        of_batch = any((one.how["key"] if one.op == "sample" else one.how["key"][1]) in OF_BATCH for one in leaves)
        return bool(back) and fixed and not (before and of_batch), before

    bases: dict[int, tuple[Value, Affine]] = {}
    for phase, plan in enumerate(plans):
        for v in plan.order:
            # below a gate there are awake units alone, and those are others in every step: nothing to keep
            if v.number in plan.affine and v.number not in plan.below_gate:
                mixes, bias, _, _ = plan.affine[v.number]
                made = [v.number in other.affine for other in plans]
                # nor what is made of a gate; and a base must leave something to add to it
                part = [mix for mix in mixes if still(mix, phase, made.__getitem__)[0] and mix.args[0].number not in plan.gates]
                if 0 < len(part) < len(mixes) and (bias is None or still(bias, phase, made.__getitem__)[0]):
                    inputs = [one for mix in part for one in mix.args]
                    bases[v.number] = graph.make("base", v.shape, [*inputs, *([] if bias is None else [bias])]), Affine(part, bias, False)
    # planned anew: bases are statements of their own, and the rest of a layer shrinks
    plans = [Schedule(graph, outputs, (), Kept(bases=bases)) for outputs, _ in phases]
    found = [Kept(bases=bases) for _ in phases]
    makes = [{v.number for v in plan.statements} for plan in plans]
    for phase, plan in enumerate(plans):
        for v in plan.statements:
            if worth_it(plan, v):
                same, before = still(v, phase, lambda other, v=v: v.number in makes[other])  # type: ignore[misc]
                if same:
                    (found[phase].once if before else found[phase].there).add(v.number)
    acts = tmp = 0
    slots: dict[int, int] = {}
    # one slot for all phases: a phase finds a value where another has left it
    for v in [v for plan in plans for v in plan.statements]:
        if v.number not in slots and any(v.number in one.once | one.there for one in found):
            slots[v.number] = acts if v.lane else tmp
            acts, tmp = acts + v.size * v.lane, tmp + -(-v.size // WIDTH) * WIDTH * (not v.lane)
    for one in found:
        one.slots, one.acts, one.tmp = slots, acts, tmp
    return found


def worth_it(plan: Schedule, v: Value) -> bool:
    """Whether to find a value again is cheaper than to make it: layers, sums over features, weights that are made of others."""
    if not v.lane:
        return v.size > WIDTH and (v.op == "uniform_mm" or (v.op == "ew" and len(v.shape) > 1))
    if v.number in plan.affine:
        return not any(layer is v for layer in plan.gates.values()) and v.number not in plan.below_gate
    return v.op == "feature_sum" and v.size == 1 and all(one.op in LEAVES or one.op == "ew" for one in v.inputs)
