"""Figures over several runs, one panel each, readable on a phone. Colours and marks belong to a method, not to a figure."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox

from fedbench.text import shown
from fedbench.tracking.figures import CHANCE, LEAK, LOSS

COLORS = ("#1f6fb4", "#d9730d", "#1a8a5a", "#b0368c", "#6b4fbb", "#8c6d1f", "#2aa0b8", "#c0392b")
INK, PAPER, GRID = "#1c2430", "#ffffff", "#e6e6e6"
DARK = {
    **dict(zip(COLORS, ("#6db3f2", "#f2a154", "#55c896", "#e887c8", "#b19cf5", "#d6b25e", "#62cfe3", "#ff8f80"), strict=True)),
    **{INK: "#e4e9f0", PAPER: "#14181e", GRID: "#2c343e", LOSS: "#c3cbd5", CHANCE: "#9aa5b3", LEAK: "#ff6b61"},
}
"""colours for a dark page, by their light ones"""
STYLES = ("-", "--", "-.", ":")
MOST_CURVES = 8
"""more lines than that cannot be told apart"""
MOST_KEYED = 20
"""with more methods, a figure of costs names the best and those on the front"""
SETTINGS: Any = {
    "text.parse_math": False,  # a name with two dollar signs is a name
    "svg.hashsalt": "fedbench",
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
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
    """PNG and SVG of what `figure(*arguments)` draws; equal figures give equal bytes."""
    files = []
    with matplotlib.rc_context(SETTINGS):
        made = figure(*arguments)
        for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
            buffer = io.BytesIO()
            made.savefig(buffer, format=kind, dpi=130, metadata=metadata)
            files.append(buffer.getvalue())
    return Drawn(name, alt, files[0], follow_the_reader(files[1]))


def follow_the_reader(svg: bytes) -> bytes:
    """The SVG with its colours as variables, so that it is dark where the reader's system is."""
    text = svg.decode()
    names = {color: f"--c{color[1:]}" for color in DARK}
    for color, name in names.items():
        text = text.replace(color, f"var({name})")
    light, dark = (";".join(f"{names[color]}:{of}" for color, of in pairs) for pairs in (((c, c) for c in DARK), DARK.items()))
    # paper is white, and an image does not know that it is printed: the page asks for light figures then
    return text.replace("</style>", f":root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}</style>", 1).encode()


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
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    for name, value in references:
        axes.axvline(value, color=CHANCE, linestyle=":", linewidth=1.4)
        others = [other for _, other in references if other != value]
        # names of neighbours lean away from each other
        side = "center" if not others else "right" if value < min(others) else "left" if value > max(others) else "center"
        axes.text(value, 1.01, name, transform=axes.get_xaxis_transform(), color=CHANCE, ha=side, va="bottom", fontsize=10)
    axes.set_xlabel(label)
    return figure


def curves(
    lines: Sequence[Curve], x_label: str, y_label: str, title: str, leaky: bool, references: Sequence[tuple[str, float]] = ()
) -> Figure:
    """A line and its band for each method."""
    figure, axes = _panel(title, leaky, height=3.7 + 0.25 * math.ceil(len(lines) / 2))
    for number, line in enumerate(lines):
        color, style = COLORS[number % len(COLORS)], STYLES[number // len(COLORS) % len(STYLES)]
        marker = "o" if len(line.x) < 20 else None
        axes.plot(line.x, line.y, style, color=color, linewidth=1.8, marker=marker, markersize=4, label=_short(line.name))
        axes.fill_between(line.x, line.low, line.high, color=color, alpha=0.18, linewidth=0)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    for name, value in references:
        axes.axhline(value, color=CHANCE, linestyle=":", linewidth=1.4)
        axes.text(1.01, value, name, transform=axes.get_yaxis_transform(), color=CHANCE, va="center", fontsize=10)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    _legend(figure, len(lines))
    return figure


class Point(NamedTuple):
    """A method in a figure of quality against cost."""

    name: str
    place: int
    """in the leaderboard"""
    cost: float
    quality: float
    front: bool = False
    """on the Pareto front"""
    central: bool = False
    """trained centrally: nothing is sent"""


def trade_off(
    points: Sequence[Point],
    x_label: str,
    y_label: str,
    title: str,
    leaky: bool,
    amount: Callable[[float], str],
    floor: tuple[str, float] | None,
) -> Figure:
    """Quality against cost (log scale, 0 at its left end): numbered points with a key, and the front that nothing beats in both."""
    keyed = points if len(points) <= MOST_KEYED else [point for point in points if point.front or point.place <= MOST_CURVES]
    figure, axes = _panel(title, leaky, height=4.1 + 0.21 * math.ceil(len(keyed) / 2))
    positive = [point.cost for point in points if point.cost > 0]
    if positive:
        near = max(positive) < 20 * min(positive)
        axes.set_xscale("symlog", linthresh=min(positive) / 2, linscale=0.3, subs=[2, 5] if near else None)
        axes.xaxis.set_major_formatter(lambda value, _: amount(value) if value == 0 or value >= min(positive) / 2 else "")
        axes.xaxis.set_minor_formatter(lambda value, _: amount(value) if value >= min(positive) / 2 else "")
        axes.tick_params(axis="x", which="both", labelsize=10.5)
    if floor is not None:
        axes.axhline(floor[1], color=CHANCE, linestyle=":", linewidth=1.4)
        axes.text(1.01, floor[1], floor[0], transform=axes.get_yaxis_transform(), color=CHANCE, va="center", fontsize=10)
    front = sorted((point for point in points if point.front), key=lambda point: point.cost)
    axes.plot([p.cost for p in front], [p.quality for p in front], color=LOSS, linewidth=1.2, drawstyle="steps-post", zorder=1)
    for number, point in enumerate(points):
        axes.plot([point.cost], [point.quality], **_mark(point, number), markersize=9 if point.front else 7, zorder=2)
    axes.grid(color=GRID, linewidth=0.8)
    axes.margins(0.07, 0.1)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    marks = [Line2D([], [], **_mark(point, number), markersize=6) for number, point in enumerate(points) if point in keyed]
    names = [f"{point.place} {_short(point.name, 30)}" for point in keyed]
    figure.legend(marks, names, loc="outside lower center", ncol=2, frameon=False, fontsize=10, labelspacing=0.3, handletextpad=0.2)
    figure.draw_without_rendering()  # so that the layout is final, and numbers can be placed by it
    _place_numbers(axes, points, keyed)
    return figure


def _mark(point: Point, number: int) -> dict[str, Any]:
    color = COLORS[number % len(COLORS)]
    face = {"marker": "D", "markerfacecolor": PAPER} if point.central else {"marker": "o"}
    return {"color": color, "linestyle": "", **face}


def _place_numbers(axes: Axes, points: Sequence[Point], keyed: Sequence[Point]) -> None:
    """The keyed points' numbers, each where it covers no point and no other number; a line leads to one that had to move away."""
    scale = 72 / axes.get_figure(root=True).dpi  # type: ignore[union-attr]
    spots = {point: axes.transData.transform((point.cost, point.quality)) * scale for point in points}
    left, bottom, right, top = np.asarray(axes.bbox.extents) * scale
    taken = [_box(spot, 9, 9) for spot in spots.values()]
    for point in keyed:
        spot, width = spots[point], 7.0 * len(str(point.place)) + 2
        boxes = {offset: _box(spot + offset, width, 11) for offset in _around()}
        inside = [o for o, box in boxes.items() if box.x0 > left and box.x1 < right + 8 and box.y0 > bottom and box.y1 < top + 8]
        others = [other for of, other in spots.items() if of != point]
        crowded = {
            offset: sum(_shared(boxes[offset], box) for box in taken)
            + sum(max(0.0, math.hypot(*offset) + 3 - math.dist(spot + offset, other)) for other in others)  # it would seem to be theirs
            for offset in inside or boxes
        }
        offset = min(crowded, key=lambda offset: crowded[offset])  # the first of the best, and so the nearest
        taken.append(boxes[offset])
        line = {"arrowstyle": "-", "color": CHANCE, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 3} if math.hypot(*offset) > 14 else None
        axes.annotate(
            str(point.place), (point.cost, point.quality), offset, textcoords="offset points", ha="center", va="center_baseline",
            fontsize=10.5, fontweight="bold" if point.front else "normal", arrowprops=line, zorder=4,
            path_effects=[withStroke(linewidth=2.5, foreground=PAPER)],
        ).set_in_layout(False)  # fmt: skip


def _around() -> Iterator[tuple[float, float]]:
    """Places for a number around its point, in points of print: above first, then further and further away."""
    for radius in (11, 13, 17, 22, 28, 35, 43, 52):
        for step in (3, 1, 9, 11, 0, 6, 4, 2, 8, 10, 5, 7):
            yield radius * math.cos(step * math.pi / 6), radius * math.sin(step * math.pi / 6)


def _box(middle: np.ndarray, width: float, height: float) -> Bbox:
    return Bbox.from_bounds(middle[0] - width / 2, middle[1] - height / 2, width, height)


def _shared(one: Bbox, other: Bbox) -> float:
    """The area that both cover."""
    both = Bbox.intersection(one, other)
    return 0.0 if both is None else both.width * both.height


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
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_xlabel(f"mean rank over datasets (1 is best); critical difference {difference:.2f}")
    return figure


def _panel(title: str, leaky: bool, height: float = 3.7) -> tuple[Figure, Axes]:
    """One panel as wide as all others, so that letters have one size; its title, and LEAKY in red if it is due."""
    figure = Figure(figsize=(6.4, height), facecolor=PAPER, layout="constrained")
    axes = figure.subplots()
    axes.set_facecolor(PAPER)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    figure.suptitle(_short(title, 68), x=0.01, ha="left", fontsize=12)
    if leaky:
        axes.text(1, 1, "LEAKY", transform=axes.transAxes, ha="right", va="bottom", color=LEAK, fontweight="bold", fontsize=14)
    return figure, axes


def _legend(figure: Figure, count: int) -> None:
    figure.legend(loc="outside lower center", ncol=1 if count == 1 else 2, frameon=False)


def _short(text: str, most: int = 34) -> str:
    text = shown(text)  # else a control character would make a broken SVG
    return text if len(text) <= most else text[: most - 1] + "…"
