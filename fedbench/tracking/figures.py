"""Figures of runs and sweeps. They are built on Figure objects, without pyplot, so that no state is shared between runs or threads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedbench.files import replacing

HR, NDCG, LOSS, CHANCE, LEAK = "#1f6fb4", "#d9730d", "#3a3a3a", "#7a7a7a", "#c81e1e"
RATED = (
    ("test/rmse", "test RMSE", HR, "-"),
    ("val/rmse", "validation RMSE", HR, "--"),
    ("test/mae", "test MAE", NDCG, "-"),
    ("val/mae", "validation MAE", NDCG, "--"),
)
SERIES = (
    ("test/hr_10", "test HR@10", HR, "-"),
    ("val/hr_10", "validation HR@10", HR, "--"),
    ("test/ndcg_10", "test NDCG@10", NDCG, "-"),
    ("val/ndcg_10", "validation NDCG@10", NDCG, "--"),
)


def save(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG file."""
    with replacing(path) as file:
        figure.savefig(file, format="png")


def convergence(lines: Sequence[dict[str, Any]], leaky: bool, title: str, best_round: int | None = None, candidates: int = 100) -> Figure:
    """Loss, and HR@10 and NDCG@10 or RMSE and MAE, by round. Without `best_round` the best validation NDCG@10 is marked."""
    figure, (left, right) = _panels(leaky, title)
    _loss(left, lines)
    if any("test/rmse" in line for line in lines):
        _errors(right, lines, best_round)
    else:
        _quality(right, lines, _best(lines) if best_round is None else best_round, candidates)
    return figure


def distribution(per_client: pd.DataFrame, leaky: bool, title: str, candidates: int = 100) -> Figure:
    """How clients differ: the test rank among the candidates and HR@10, or the RMSE, by how much a client has to train on."""
    figure, (left, right) = _panels(leaky, title)
    if "mse_test" in per_client:
        rated = per_client[per_client["ratings_test"] > 0]
        _error_curve(left, np.sqrt(rated["mse_test"].to_numpy()))
        _error_by_size(right, rated["train_items"].to_numpy(), np.sqrt(rated["mse_test"].to_numpy()))
        return figure
    ranked = per_client[per_client["rank_test"] >= 1] if "rank_test" in per_client else per_client.iloc[:0]
    if ranked.empty:
        for axes in (left, right):
            _empty(axes, "no ranks in this run")
        return figure
    _rank_curve(left, ranked["rank_test"].to_numpy(), candidates)
    _hit_by_size(right, ranked["train_items"].to_numpy(), ranked["rank_test"].to_numpy() <= 10, candidates)
    return figure


def heatmap(means: pd.DataFrame, x: str, y: str, metric: str, names: tuple[str, str], title: str, said: str = "") -> Figure:
    """One cell a combination of x and y, with its mean and half of its interval (`<metric>_pm`; `said`: over what); leaky ones say so."""
    columns, rows = list(dict.fromkeys(means[x])), list(dict.fromkeys(means[y]))
    values = np.full((len(rows), len(columns)), np.nan)
    figure = Figure(figsize=(max(5.5, 2.2 + 1.15 * len(columns)), max(3.6, 1.8 + 0.62 * len(rows))), dpi=100, facecolor="white")
    axes = figure.subplots()
    for _, told in means.iterrows():
        values[rows.index(told[y]), columns.index(told[x])] = told[metric]
    image = axes.imshow(values, aspect="auto", cmap="viridis", origin="lower")
    middle = (np.nanmin(values) + np.nanmax(values)) / 2
    for _, told in means.iterrows():
        row, column = rows.index(told[y]), columns.index(told[x])
        interval = "" if np.isnan(told[f"{metric}_pm"]) else f"\n± {told[f'{metric}_pm']:.3f}"
        text = f"{told[metric]:.3f}{interval}" + ("\nLEAKY" if told["leaky"] else "")
        # grey levels, for black and white change places where a report's figures are shown on a dark page
        color = LEAK if told["leaky"] else "0.05" if told[metric] > middle else "0.95"
        warned: dict[str, Any] = (
            {"fontweight": "bold", "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 2}} if told["leaky"] else {}
        )
        axes.text(column, row, text, ha="center", va="center", fontsize=9, color=color, **warned)
    axes.set_xticks(range(len(columns)), [str(value) for value in columns])
    axes.set_yticks(range(len(rows)), [str(value) for value in rows])
    axes.set_xlabel(names[0])
    axes.set_ylabel(names[1])
    axes.set_title(title, loc="left", fontsize=11)
    figure.colorbar(image, ax=axes, fraction=0.05, pad=0.02)
    figure.supxlabel(said, fontsize=9, color=CHANCE)
    figure.tight_layout()
    return figure


def curve(means: pd.DataFrame, x: str, name: str, metric: str, label: str, title: str, said: str = "") -> Figure:
    """The mean by one axis, with its interval as bars (`said`: over what)."""
    figure = Figure(figsize=(7, 4.5), dpi=100, facecolor="white")
    axes = figure.subplots()
    # words have no distances: side by side, without a line
    numbers = all(isinstance(value, int | float) for value in means[x])
    places = list(means[x]) if numbers else list(range(len(means)))
    pairs = sorted(zip(places, means[metric], means[f"{metric}_pm"], strict=True))
    places, values, spread = ([pair[i] for pair in pairs] for i in range(3))
    axes.errorbar(places, values, yerr=np.nan_to_num(spread), color=HR, marker="o", capsize=3, linestyle="-" if numbers else "")
    if not numbers:
        labels = [f"{value}\nLEAKY" if leaky else str(value) for value, leaky in zip(means[x], means["leaky"], strict=True)]
        axes.set_xticks(places, labels)
    elif means["leaky"].any():
        axes.text(0.01, 0.97, "LEAKY", transform=axes.transAxes, color=LEAK, fontweight="bold", va="top")
    axes.set_xlabel(name)
    axes.set_ylabel(f"test {label}")
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    figure.supxlabel(said, fontsize=9, color=CHANCE)
    figure.tight_layout()
    return figure


def _loss(axes: Axes, lines: Sequence[dict[str, Any]]) -> None:
    _panel_title(axes, "training loss")
    rounds, values = _series(lines, "loss")
    if not values:
        return _empty(axes, "no training loss")
    axes.plot(rounds, values, color=LOSS, marker=_marker(values), markersize=4)
    _round_axis(axes, lines)
    axes.set_ylabel("loss")


def _quality(axes: Axes, lines: Sequence[dict[str, Any]], best: int | None, candidates: int) -> None:
    _panel_title(axes, "ranking quality" if best is None else f"ranking quality · best round {best} (dotted)")
    top = _curves(axes, lines, SERIES, best)
    if not axes.lines:
        return _empty(axes, "no ranking metrics")
    _chance(axes, candidates)
    # room for the highest point, and for the line of chance
    axes.set_ylim(0, min(1.02, max(1.12 * top, 1.5 * 10 / candidates)))
    axes.set_ylabel("HR@10, NDCG@10")


def _errors(axes: Axes, lines: Sequence[dict[str, Any]], best: int | None) -> None:
    _panel_title(axes, "error of predicted ratings" if best is None else f"error of predicted ratings · reported round {best} (dotted)")
    _curves(axes, lines, RATED, best)
    axes.set_ylabel("RMSE, MAE")


def _curves(axes: Axes, lines: Sequence[dict[str, Any]], series: Sequence[tuple[str, str, str, str]], best: int | None) -> float:
    """The series that have values, the best round dotted and a legend; returns the largest value."""
    top = 0.0
    for key, label, color, style in series:
        rounds, values = _series(lines, key)
        if values:
            face = color if style == "-" else "white"
            axes.plot(rounds, values, style, color=color, label=label, marker=_marker(values), markersize=5, markerfacecolor=face)
            top = max(top, *values)
    if axes.lines:
        if best is not None:
            axes.axvline(best, color=LOSS, linewidth=1, linestyle=":")
        _round_axis(axes, lines)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncol=2, frameon=False, fontsize=10)
    return top


def _rank_curve(axes: Axes, ranks: np.ndarray, candidates: int) -> None:
    """ECDF: its height at rank 10 is HR@10."""
    hit = float((ranks <= 10).mean())
    _panel_title(axes, f"test rank: HR@10 {hit:.3f}, median {np.median(ranks):.0f}")
    points = np.sort(ranks)
    share = np.arange(1, len(points) + 1) / len(points)
    # with both ends, so that the curve spans the axis
    axes.step([0, *points, candidates], [0, *share, 1], where="post", color=HR, label="clients")
    axes.plot([0, candidates], [0, 1], "--", color=CHANCE, linewidth=1.2, label="chance")
    axes.axvline(10, color=LOSS, linewidth=1, linestyle=":")
    axes.plot([10], [hit], "o", color=HR, markersize=7)
    axes.set_xlim(0, candidates)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel(f"test rank of the held-out item among {candidates} candidates (1 is best)")
    axes.set_ylabel("share of clients at or below")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncol=2, frameon=False, fontsize=10)


def _hit_by_size(axes: Axes, sizes: np.ndarray, hits: np.ndarray, candidates: int) -> None:
    """Bars by decile of the client's training items; equal sizes share a bar."""
    _panel_title(axes, "HR@10 by client size (deciles, ± 1 standard error)")
    top = _bars(axes, sizes, hits)
    _chance(axes, candidates)
    axes.set_ylim(0, min(1.02, max(1.12 * top, 1.5 * 10 / candidates)))
    axes.set_ylabel("mean test HR@10")


def _error_curve(axes: Axes, rmse: np.ndarray) -> None:
    """ECDF of the clients' own RMSE."""
    _panel_title(axes, f"test RMSE of a client: median {np.median(rmse):.3f}")
    axes.step(np.sort(rmse), np.arange(1, len(rmse) + 1) / len(rmse), where="post", color=HR)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("RMSE over the client's held-out ratings (0 is best)")
    axes.set_ylabel("share of clients at or below")


def _error_by_size(axes: Axes, sizes: np.ndarray, rmse: np.ndarray) -> None:
    _panel_title(axes, "RMSE by client size (deciles, ± 1 standard error)")
    axes.set_ylim(0, 1.12 * _bars(axes, sizes, rmse))
    axes.set_ylabel("mean test RMSE of a client")


def _bars(axes: Axes, sizes: np.ndarray, values: np.ndarray) -> float:
    """Means by decile of size with one standard error; returns the top of the highest."""
    # deciles that are equal fall together: many clients may have one size
    group = np.searchsorted(np.unique(np.quantile(sizes, np.arange(1, 10) / 10)), sizes, side="left")
    names, means, errors = [], [], []
    for decile in np.unique(group):
        inside = group == decile
        low, high = sizes[inside].min(), sizes[inside].max()
        names.append(f"{low}" if low == high else f"{low}–{high}")
        means.append(values[inside].mean())
        errors.append(values[inside].std() / np.sqrt(inside.sum()))
    axes.bar(names, means, yerr=errors, color=HR, alpha=0.85, width=0.75, error_kw={"elinewidth": 1.2, "ecolor": LOSS})
    if sum(map(len, names)) > 45:
        axes.set_xticks(range(len(names)), names, rotation=35, ha="right", rotation_mode="anchor")
    axes.set_xlabel("training items of the client")
    return float(max(mean + error for mean, error in zip(means, errors, strict=True)))


def _panels(leaky: bool, title: str) -> tuple[Figure, Sequence[Axes]]:
    """1200 × 500 pixels, two panels, and the title with the word LEAKY in red before it if it is due."""
    figure = Figure(figsize=(12, 5), dpi=100, facecolor="white")
    axes = figure.subplots(1, 2)
    figure.subplots_adjust(left=0.06, right=0.935, top=0.83, bottom=0.22, wspace=0.2)
    figure.text(0.075 if leaky else 0.012, 0.94, title if len(title) <= 110 else title[:109] + "…", fontsize=14, va="center")
    if leaky:
        figure.text(0.012, 0.94, "LEAKY", fontsize=14, fontweight="bold", color=LEAK, va="center")
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color="#e6e6e6", linewidth=0.8)
        panel.set_axisbelow(True)
        panel.tick_params(labelsize=10)
        panel.xaxis.label.set_size(11)
        panel.yaxis.label.set_size(11)
    return figure, axes


def _chance(axes: Axes, candidates: int) -> None:
    chance = 10 / candidates
    axes.axhline(chance, color=CHANCE, linewidth=1.2, linestyle="-.")
    label = f"chance\nHR@10\n{chance:.2f}"
    axes.text(1.01, chance, label, transform=axes.get_yaxis_transform(), color=CHANCE, va="center", fontsize=10)


def _empty(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=CHANCE, fontsize=12)
    axes.set_xticks([])
    axes.set_yticks([])


def _panel_title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=12)


def _round_axis(axes: Axes, lines: Sequence[dict[str, Any]]) -> None:
    """All rounds from the first to the last, whether evaluated or not."""
    rounds = [line["round"] for line in lines]
    margin = max(0.5, 0.02 * (max(rounds) - min(rounds)))
    axes.set_xlim(min(rounds) - margin, max(rounds) + margin)
    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _series(lines: Sequence[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """The rounds that have a value for `key`, and the values."""
    points = [(line["round"], line[key]) for line in lines if line.get(key) is not None and np.isfinite(line[key])]
    return [point[0] for point in points], [point[1] for point in points]


def _best(lines: Sequence[dict[str, Any]]) -> int | None:
    rounds, values = _series(lines, "val/ndcg_10")
    return rounds[int(np.argmax(values))] if values else None


def _marker(values: Sequence[float]) -> str:
    return "o" if len(values) <= 30 else ""
