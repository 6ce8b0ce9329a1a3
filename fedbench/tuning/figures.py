"""The figures of a search: its history, which fields mattered, and the value over each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
from matplotlib.figure import Figure

from fedbench.contract.search import Span
from fedbench.tuning.search import START
from fedbench.tuning.space import Space

DPI = 120


def draw(space: Space, ended: list[dict[str, Any]], metric: str, title: str, folder: Path) -> None:
    """history.png, importance.png and slice.png"""
    valued = [found for found in ended if found["value"] is not None]
    if not valued:
        return
    figures = {"history": history(ended, metric), "importance": importance(space, valued), "slice": slices(space, valued, metric)}
    for name, figure in figures.items():
        figure.suptitle(f"{title}: {name}", fontsize=10)
        figure.savefig(folder / f"{name}.png", dpi=DPI)


def history(ended: list[dict[str, Any]], metric: str) -> Figure:
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axis = figure.subplots()
    for how, mark, colour in (("complete", "o", "C0"), ("pruned", "x", "gray")):
        some = [found for found in ended if found["how"] == how and found["value"] is not None]
        axis.scatter([found["number"] for found in some], [found["value"] for found in some], marker=mark, color=colour, label=how, s=22)
    if lost := [found["number"] for found in ended if found["value"] is None]:
        floor = min(found["value"] for found in ended if found["value"] is not None)
        axis.scatter(lost, [floor] * len(lost), marker="v", color="C3", s=22, label="diverged or refused")
    numbers: list[int] = []
    values: list[float] = []
    for found in ended:
        if found["value"] is not None:
            numbers.append(found["number"])
            values.append(max([found["value"], *values[-1:]]))
    axis.step(numbers, values, where="post", color="C1", label="best so far")
    axis.set(xlabel="trial", ylabel=metric)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    return figure


def importances(space: Space, valued: list[dict[str, Any]]) -> dict[str, float]:
    """How much each field decides the value (PED-ANOVA), of all trials, those that ended early by what they had reached; {} if too few."""
    study = optuna.create_study(direction="maximize")
    for found in valued:
        spans = {name: distribution(space[name]) for name in found["values"]}
        study.add_trial(optuna.trial.create_trial(params=found["values"], distributions=spans, value=found["value"]))
    try:
        told = optuna.importance.get_param_importances(
            study, evaluator=optuna.importance.PedAnovaImportanceEvaluator(evaluate_on_local=False)
        )
    except (ValueError, RuntimeError, ZeroDivisionError):
        return {}
    return {name: float(value) for name, value in told.items()}


def distribution(span: Span) -> optuna.distributions.BaseDistribution:
    if span.choices:
        return optuna.distributions.CategoricalDistribution(span.choices)
    if span.whole:
        return optuna.distributions.IntDistribution(int(span.low), int(span.high), log=span.log)
    return optuna.distributions.FloatDistribution(span.low, span.high, log=span.log)


def importance(space: Space, valued: list[dict[str, Any]]) -> Figure:
    told = importances(space, valued) if len(valued) >= START else {}
    figure = Figure(figsize=(6.4, 0.8 + 0.32 * max(3, len(told))), layout="constrained")
    axis = figure.subplots()
    if told:
        axis.barh(list(told)[::-1], list(told.values())[::-1])
        axis.set(xlabel="share of importance (PED-ANOVA)")
    else:
        axis.text(0.5, 0.5, f"{len(valued)} trials are too few to tell", ha="center")
        axis.set_axis_off()
    return figure


def slices(space: Space, valued: list[dict[str, Any]], metric: str) -> Figure:
    """One panel a field: the value of each trial over what it had there."""
    columns = min(4, len(space))
    rows = -(-len(space) // columns)
    figure = Figure(figsize=(2.6 * columns + 0.6, 2.3 * rows + 0.4), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for axis, name in zip(panels.flat, space, strict=False):
        some = [found for found in valued if name in found["values"]]
        words = [str(value) for value in space[name].choices]
        at = [words.index(str(found["values"][name])) if words else found["values"][name] for found in some]
        axis.scatter(at, [found["value"] for found in some], c=[found["number"] for found in some], cmap="viridis", s=16)
        if words:
            axis.set_xticks(range(len(words)), words, fontsize=8)
            axis.set_xlim(-0.5, len(words) - 0.5)
        elif space[name].log:
            axis.set_xscale("log")
        axis.set_xlabel(name)
        axis.grid(alpha=0.3)
    for axis in list(panels.flat)[len(space) :]:
        axis.set_axis_off()
    for row in panels:
        row[0].set_ylabel(metric)
    return figure
