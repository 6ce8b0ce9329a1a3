"""Result tables of a sweep: one row for each point, one table for each grid with means over seeds, heat maps and curves."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from fedbench.files import write_text
from fedbench.settings.naming import HEADLINE, REPLICATES, SELECT, short, title
from fedbench.sweeping.study import Grid, Study
from fedbench.text import human, shown
from fedbench.tracking import figures

SHOWN = ("hr_10", "ndcg_10", "full_hr_10", "full_ndcg_10", "rmse", "mae", "accuracy")
"""metrics of a result table, where runs report them"""
COSTS = ("rounds", "client_visits", "bytes_up", "bytes_down")
LEVEL = 0.95
ABOUT = "Test metrics at the round that validation chose."


def write(what: Study, summaries: Mapping[str, dict[str, Any]], entries: Mapping[str, dict[str, Any]], folder: Path) -> None:
    """Write the figures, table.md and, last, table.csv, whose keys tell which points all of them cover. Grids of one name share a table."""
    rows = pd.DataFrame([row(what, key, entry, summaries.get(key)) for key, entry in entries.items()])
    # an earlier call may have drawn grids that are no longer asked for
    for old in [*folder.glob("heatmap-*.png"), *folder.glob("curve-*.png")]:
        old.unlink()
    parts = []
    for name in dict.fromkeys(grid.name for grid in what.grids):
        grids = [grid for grid in what.grids if grid.name == name]
        inside = rows[rows["key"].isin({key for grid in grids for key in grid.keys}) & (rows["status"] == "finished")]
        if inside.empty:
            continue
        metrics = [name for name in what.metrics or SHOWN if f"test_{name}" in inside and inside[f"test_{name}"].notna().any()]
        shared = [axis for axis in grids[0].axes if axis not in REPLICATES and all(axis in grid.axes for grid in grids)]
        axes = shared if len(grids) == 1 else list(dict.fromkeys(["algo", *shared]))
        means = over_replicates(inside, axes, metrics)
        if axes and all(pd.api.types.is_numeric_dtype(means[axis]) for axis in axes):
            means = means.sort_values(axes)  # points that an earlier grid has too came first
        said = interval_of(means, inside)
        lines = [f"**{name}**\n" if name else "", markdown(means, metrics), f"\n{said}" if said else "", *best(inside, axes)]
        parts.append("\n".join(filter(None, lines)))
        if len(grids) == 1:
            draw(what, grids[0], means, [name for name in metrics if name in (what.metrics or HEADLINE)], folder, said)
    text = "\n\n".join([ABOUT, *parts]) if parts else "no point is finished"
    page = f"# {what.name}\n\n{what.about}\n\n{text}\n".replace("\n\n\n", "\n")
    write_text(folder / "table.md", shown(page, keep="\n\t"))
    write_text(folder / "table.csv", rows.to_csv(index=False))


def row(what: Study, key: str, entry: dict[str, Any], summary: dict[str, Any] | None) -> dict[str, Any]:
    """One line of table.csv."""
    point = what.points[key]
    told = {"key": key, "status": entry["status"], **{axis: plain_word(point.values.get(axis)) for axis in what.axes}}
    if summary is None:
        return told
    facts = ("algo", "dataset", "protocol", "protocol_fingerprint", "leaky", "best_round", *COSTS, "seconds_per_round")
    told |= {name: summary[name] for name in facts if name not in what.axes and name in summary}
    told["leaky"] = summary["leaky"]
    return (
        told
        | {f"{part}_{name}": value for part in ("val", "test") for name, value in summary[part].items()}
        | {"seconds": entry["seconds"]}
    )


def plain_word(value: Any) -> Any:
    """An axis value that a table can group by."""
    return value if isinstance(value, int | float | str) else "all" if value is None else ",".join(map(str, value))


def over_replicates(rows: pd.DataFrame, axes: list[str], metrics: list[str]) -> pd.DataFrame:
    """One row a combination: the mean of each metric over seeds and folds, and half of its interval (`..._pm`)."""
    found = []
    for values, group in rows.groupby(axes, sort=False) if axes else [((), rows)]:
        told: dict[str, Any] = dict(zip(axes, values if isinstance(values, tuple) else (values,), strict=True))
        told |= {"runs": len(group), "leaky": bool(group["leaky"].any())}
        for name in metrics:
            told[name], told[f"{name}_pm"] = mean_and_interval(group[f"test_{name}"].to_numpy(float))
        found.append(told | {name: group[name].mean() for name in COSTS})
    return pd.DataFrame(found)


def mean_and_interval(values: np.ndarray) -> tuple[float, float]:
    """The mean, and half of its 95 % interval by Student's t; not a number for a single value."""
    if len(values) < 2:
        return float(values.mean()), float("nan")
    return float(values.mean()), float(stats.t.ppf((1 + LEVEL) / 2, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5)


def interval_of(means: pd.DataFrame, rows: pd.DataFrame) -> str:
    """What "±" is and over what, in words; empty if every row of the table is a single run."""
    counts = sorted({int(count) for count in means["runs"] if count > 1})
    if not counts:
        return ""
    varied = [f"{axis}s" for axis in REPLICATES if axis in rows and rows[axis].nunique() > 1]
    over = varied[0] if len(varied) == 1 else f"runs ({' and '.join(varied)})" if varied else "runs"
    return f"± half of the {LEVEL:.0%} t interval of the mean over {' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} {over}"


def markdown(means: pd.DataFrame, metrics: list[str]) -> str:
    axes = list(means.columns[: means.columns.get_loc("runs")])
    head = [*map(short, axes), "runs", *map(title, metrics), "rounds", "visits", "up", "down"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for _, told in means.iterrows():
        words = [f"{told[axis]}" for axis in axes] + [f"{told['runs']}"]
        words += [f"{told[name]:.4f}" + ("" if np.isnan(told[f"{name}_pm"]) else f" ± {told[f'{name}_pm']:.4f}") for name in metrics]
        words += [f"{told['rounds']:,.0f}", f"{told['client_visits']:,.0f}", human(told["bytes_up"]), human(told["bytes_down"])]
        lines.append(f"| {' | '.join(words)} |" + (" LEAKY" if told["leaky"] else ""))
    return "\n".join(lines)


def best(rows: pd.DataFrame, axes: list[str]) -> list[str]:
    """The setting with the best mean on validation, one for each protocol and dataset, which are never compared."""
    name = next((name for name in SELECT if f"val_{name}" in rows and rows[f"val_{name}"].notna().all()), None)
    if name is None or not axes:
        return []
    said = []
    for fingerprint, group in rows.groupby("protocol_fingerprint", sort=False):
        means = group.groupby(axes, sort=False)[[f"val_{name}", f"test_{name}"]].mean()
        if len(means) > 1:
            # SELECT is -1 where lower is better
            top = (SELECT[name] * means[f"val_{name}"]).idxmax()
            where = " ".join(f"{short(axis)}={value}" for axis, value in zip(axes, top if isinstance(top, tuple) else (top,), strict=True))
            val, test = means.loc[top]
            leaky = " LEAKY" if group["leaky"].any() else ""
            said.append(f"\nbest on validation [{fingerprint}]{leaky}: {where}, {title(name)} {val:.4f} on validation, {test:.4f} on test")
    return said


def draw(what: Study, grid: Grid, means: pd.DataFrame, metrics: list[str], folder: Path, said: str) -> None:
    """A heat map for each metric where there are two axes or more, a curve where there is one."""
    axes = [axis for axis in grid.axes if axis not in REPLICATES]
    name = re.sub(r"\W+", "-", "-".join(filter(None, [grid.name]))).strip("-")
    fixed = " · ".join(str(grid.fixed[key]) for key in ("algo", "dataset", "protocol") if key in grid.fixed)
    for metric in metrics:
        if len(axes) == 1:
            path = folder / f"curve-{'-'.join(filter(None, [name, metric]))}.png"
            figure = figures.curve(means, axes[0], short(axes[0]), metric, title(metric), fixed or what.name, said)
            figures.save(figure, path)
        elif axes:
            rest = axes[2:]
            for values, part in means.groupby(rest, sort=False) if rest else [((), means)]:
                where = [f"{short(key)}={value}" for key, value in zip(rest, values, strict=True)]
                path = folder / f"heatmap-{'-'.join(filter(None, [name, metric, *where]))}.png"
                heading = " · ".join(filter(None, [f"test {title(metric)}", fixed, *where]))
                figures.save(figures.heatmap(part, axes[0], axes[1], metric, (short(axes[0]), short(axes[1])), heading, said), path)
