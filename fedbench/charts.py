"""Figures over several runs, one panel each, readable on a phone. Colours and marks belong to a method, not to a figure."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedbench.figures import CHANCE, LEAK, LOSS

COLORS = ("#1f6fb4", "#d9730d", "#1a8a5a", "#b0368c", "#6b4fbb", "#8c6d1f", "#2aa0b8", "#c0392b")
STYLES = ("-", "--", "-.", ":")
MOST_CURVES = 8
"""more lines than that cannot be told apart"""
SETTINGS: Any = {
    "text.parse_math": False,  # a name with two dollar signs is a name
    "svg.hashsalt": "fedbench",
    "font.size": 12,
    "axes.labelsize": 12,
    "legend.fontsize": 11,
    "axes.unicode_minus": False,
}


class Bar(NamedTuple):
    """A value and its interval."""

    name: str
    value: float
    low: float
    high: float
    leaky: bool = False


class Curve(NamedTuple):
    """A line with a band."""

    name: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray
    high: np.ndarray


class Drawn(NamedTuple):
    """A figure as files."""

    name: str
    alt: str
    png: bytes
    svg: bytes


def draw(name: str, alt: str, figure: Callable[..., Figure], *arguments: Any) -> Drawn:
    """Both files of a figure that a function here or in figures.py makes; the same figure gives the same bytes."""
    files = []
    with matplotlib.rc_context(SETTINGS):
        made = figure(*arguments)
        for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
            buffer = io.BytesIO()
            made.savefig(buffer, format=kind, dpi=130, metadata=metadata, bbox_inches="tight", pad_inches=0.12)
            files.append(buffer.getvalue())
    return Drawn(name, alt, *files)


def intervals(bars: Sequence[Bar], label: str, title: str, leaky: bool, references: Sequence[tuple[str, float]] = ()) -> Figure:
    """One row a method, the best on top: a dot with its interval; dotted lines for what must be beaten."""
    figure, axes = _panel(title, leaky, height=1.3 + 0.42 * len(bars))
    for row, bar in enumerate(bars):
        color = LEAK if bar.leaky else COLORS[row % len(COLORS)]
        axes.plot([bar.low, bar.high], [row, row], color=color, linewidth=2.2, solid_capstyle="butt")
        axes.plot([bar.value], [row], "o", color=color, markersize=7)
    axes.set_yticks(range(len(bars)), [f"{_short(bar.name)}{' LEAKY' if bar.leaky else ''}" for bar in bars])
    for tick, bar in zip(axes.get_yticklabels(), bars, strict=True):
        if bar.leaky:
            tick.set_color(LEAK)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.grid(axis="x", color="#e6e6e6", linewidth=0.8)
    for name, value in references:
        axes.axvline(value, color=CHANCE, linestyle=":", linewidth=1.4)
        axes.text(value, 1.01, name, transform=axes.get_xaxis_transform(), color=CHANCE, ha="center", va="bottom", fontsize=10)
    axes.set_xlabel(label)
    return figure


def curves(
    lines: Sequence[Curve], x_label: str, y_label: str, title: str, leaky: bool, references: Sequence[tuple[str, float]] = ()
) -> Figure:
    """A line and its band for each method."""
    figure, axes = _panel(title, leaky)
    for number, line in enumerate(lines):
        color, style = COLORS[number % len(COLORS)], STYLES[number // len(COLORS) % len(STYLES)]
        marker = "o" if len(line.x) < 20 else None
        axes.plot(line.x, line.y, style, color=color, linewidth=1.8, marker=marker, markersize=4, label=_short(line.name))
        axes.fill_between(line.x, line.low, line.high, color=color, alpha=0.18, linewidth=0)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    for name, value in references:
        axes.axhline(value, color=CHANCE, linestyle=":", linewidth=1.4)
        axes.text(1.01, value, name, transform=axes.get_yaxis_transform(), color=CHANCE, va="center", fontsize=10)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    _legend(axes, len(lines))
    return figure


def trade_off(
    cost: Sequence[float],
    quality: Sequence[float],
    front: Sequence[int],
    x_label: str,
    y_label: str,
    title: str,
    leaky: bool,
    amount: Callable[[float], str],
) -> Figure:
    """Quality against cost (log scale, 0 at its left end): a numbered point a method, and the front that nothing beats in both."""
    figure, axes = _panel(title, leaky)
    positive = [value for value in cost if value > 0]
    if positive:
        axes.set_xscale("symlog", linthresh=min(positive) / 2, linscale=0.4)
        axes.xaxis.set_major_formatter(lambda value, _: amount(value) if value == 0 or value >= min(positive) / 2 else "")
        axes.xaxis.set_minor_formatter("")
    axes.plot([cost[i] for i in front], [quality[i] for i in front], color=LOSS, linewidth=1.2, drawstyle="steps-post", zorder=1)
    for number, (x, y) in enumerate(zip(cost, quality, strict=True)):
        on = number in front
        axes.plot([x], [y], "o", color=COLORS[number % len(COLORS)], markersize=16 if on else 13, alpha=1 if on else 0.55, zorder=2)
        axes.annotate(str(number + 1), (x, y), ha="center", va="center", color="white", fontsize=10, fontweight="bold", zorder=3)
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.margins(0.08, 0.12)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return figure


def mean_ranks(names: Sequence[str], ranks: np.ndarray, difference: float, title: str) -> Figure:
    """Methods on a line by their mean rank, the best first; a bar joins those that are not told apart."""
    order = np.argsort(ranks, kind="stable")
    figure, axes = _panel(title, leaky=False, height=1.5 + 0.42 * len(names))
    for row, method in enumerate(order):
        axes.plot([ranks[method]], [row], "o", color=COLORS[row % len(COLORS)], markersize=8, zorder=3)
        near = [i for i in order if abs(ranks[i] - ranks[method]) < difference]
        axes.plot([min(ranks[near]), max(ranks[near])], [row, row], color=LOSS, linewidth=1.6, zorder=2)
    axes.set_yticks(range(len(names)), [_short(names[method]) for method in order])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0.8, len(names) + 0.2)
    axes.grid(axis="x", color="#e6e6e6", linewidth=0.8)
    axes.set_xlabel(f"mean rank over datasets (1 is best); critical difference {difference:.2f}")
    return figure


def _panel(title: str, leaky: bool, height: float = 3.7) -> tuple[Figure, Axes]:
    """One panel, and its title with the word LEAKY in red above it if it is due."""
    figure = Figure(figsize=(5.8, height), facecolor="white")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.set_title(_short(title, 58), loc="left", fontsize=12, pad=20)
    if leaky:
        axes.text(1, 1, "LEAKY", transform=axes.transAxes, ha="right", va="bottom", color=LEAK, fontweight="bold", fontsize=14)
    return figure, axes


def _legend(axes: Axes, count: int) -> None:
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.19), ncol=1 if count == 1 else 2, frameon=False)


def _short(text: str, most: int = 34) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
