"""`python -m fedbench bench --growth`: how the cost of a round grows with clients, cohort, items and dimension, on synthetic data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
from matplotlib.figure import Figure

from fedbench.commands.bench import Figures, in_processes, write
from fedbench.errors import FedbenchError, UsageError
from fedbench.text import say

BASE = {"users": 8000, "clients-per-round": 500, "items": 500, "dim": 16}
AXES = {
    "users": (2000, 8000, 32000),
    "clients-per-round": (500, 2000, 8000),
    "items": (250, 1000, 4000),
    "dim": (8, 32, 128),
}
"""one grows, the others stay at BASE; cohorts from what methods take by default to everybody"""
INTERACTIONS = 20
QUANTITIES = ("round", "train", "aggregate", "memory", "state")
"""seconds of a round without evaluation (in which all clients take part) and of two of its parts; MB over those before the data was
loaded, and MB of what all clients keep"""


def growth(
    flags: Sequence[str],
    file: Path | None,
    plot: Path | None,
    base: Mapping[str, int] = MappingProxyType(BASE),
    axes: Mapping[str, Sequence[int]] = MappingProxyType(AXES),
) -> int:
    """Measure every point, print a table with fitted exponents, write the JSON and the plot that were asked for."""
    points = [(axis, size) for axis, sizes in axes.items() for size in sizes]
    figures: list[Figures] = []
    say(f"{'axis':<20}{'size':>10}" + "".join(f"{name:>10}" for name in QUANTITIES))
    given = [[*flags, *sized({**base, axis: size}), "--loop-clients", "0"] for axis, size in points]
    for (axis, size), (code, found) in zip(points, in_processes(given), strict=True):
        if isinstance(found, str):
            if code != UsageError.exit_code or not figures:
                raise (UsageError if code == UsageError.exit_code else FedbenchError)(f"bench --growth, {axis} {size}: {found}")
            say(f"{axis:<20}{size:>10,}  does not fit: {found}")
            continue
        figures.append({**found, "axis": axis, "size": size, **quantities(found)})
        say(f"{axis:<20}{size:>10,}" + "".join(f"{figures[-1][f'{name}_cost']:>10.4f}" for name in QUANTITIES))
        write(file, figures)
    say("\neach grows as the axis to the power of (least squares on logarithms)")
    for axis in axes:
        say(f"{axis:<30}" + "".join(f"{exponent(figures, axis, name):>10.2f}" for name in QUANTITIES))
    if "clients-per-round" in axes:
        say("\nwhat a round costs however few clients take part (where a straight line through the cohorts' costs begins)")
        say(f"{'fixed':<30}" + "".join(f"{fixed(figures, 'clients-per-round', name):>10.4f}" for name in QUANTITIES))
    if plot:
        drawn(figures).savefig(plot, dpi=100)
    return 0


def sized(at: Mapping[str, int]) -> list[str]:
    """The flags of one point."""
    words = [word for name, value in at.items() for word in (f"--{name}", str(value))]
    return [*words, "--dataset", "synthetic", "--interactions", str(INTERACTIONS)]


def quantities(figures: Figures) -> dict[str, float]:
    """The costs that are fitted, by name and `_cost`; for the short parts the least over all rounds."""
    parts = figures["least"]
    values = (
        parts["sample"] + parts["train"] + parts["aggregate"],
        parts["train"],
        parts["aggregate"],
        figures["peak_mb"] - figures["base_mb"],
        figures["state_mb"],
    )
    return {f"{name}_cost": value for name, value in zip(QUANTITIES, values, strict=True)}


def exponent(figures: Sequence[Figures], axis: str, name: str = "round") -> float:
    """The slope of log(cost) over log(size); NaN where the cost is 0 or there is one size only."""
    size, cost = along(figures, axis, name)
    return float(np.polyfit(np.log(size), np.log(cost), 1)[0]) if len(size) > 1 and (cost > 0).all() else float("nan")


def fixed(figures: Sequence[Figures], axis: str, name: str = "round") -> float:
    """Intercept of a straight line fitted with relative weights: the cost at size 0. NaN as for `exponent`."""
    size, cost = along(figures, axis, name)
    return float(np.polyfit(size, cost, 1, w=1 / cost)[1]) if len(size) > 1 and (cost > 0).all() else float("nan")


def along(figures: Sequence[Figures], axis: str, name: str) -> np.ndarray:
    """[2, n] sizes and costs."""
    return np.array([(one["size"], one[f"{name}_cost"]) for one in figures if one["axis"] == axis]).reshape(-1, 2).T


def drawn(figures: Sequence[Figures]) -> Figure:
    """One panel an axis: seconds of a round, its training and its aggregation."""
    axes = list(dict.fromkeys(one["axis"] for one in figures))
    figure = Figure(figsize=(3 * len(axes), 2.8), layout="constrained")
    panels = figure.subplots(1, len(axes), sharey=True, squeeze=False)[0]
    for panel, axis in zip(panels, axes, strict=True):
        mine = [one for one in figures if one["axis"] == axis]
        for name in QUANTITIES[:3]:
            panel.loglog([one["size"] for one in mine], [one[f"{name}_cost"] for one in mine], marker="o", markersize=3, label=name)
        panel.set_xlabel(axis)
        sizes = [one["size"] for one in mine]
        panel.set_xticks(sizes, [f"{size:,}" for size in sizes])
        panel.set_xticks([], minor=True)
        panel.set_title(f"round: exponent {exponent(figures, axis):.2f}", fontsize=9)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("CPU seconds a round")
    panels[0].legend(fontsize=7, frameon=False)
    figure.suptitle(f"{figures[0]['algo']}, synthetic data", fontsize=10)
    return figure
