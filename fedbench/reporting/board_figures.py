"""The figures of a leaderboard: intervals, convergence, spread over clients, costs, and heat maps where n and e vary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from fedbench.evaluation import significance
from fedbench.evaluation.significance import LEVEL
from fedbench.reporting import charts
from fedbench.reporting.boards import RANKING, Board, Method, Row
from fedbench.reporting.charts import MOST_CURVES, MOST_KEYED, Bar, Curve, Point
from fedbench.reporting.page import Figure, listed, slug
from fedbench.text import human
from fedbench.tracking.figures import heatmap

MOST_BARS = 30
"""methods of one figure; a grid can have a hundred"""


def figures(board: Board, rows: Sequence[Row]) -> Iterator[Figure]:
    """Leaderboard, convergence, spread, costs, and heat maps where n and e vary."""
    lead, title, leaky, name = board.lead, board.title, board.leaky, slug(board.title)
    label, marks = lead.label, [(of, values[lead.key]) for of, values in board.references]
    told, places = "", not_controls(board)
    if len(places) < len(rows):
        told, marks = " Controls and chance are in the table alone.", [mark for mark in marks if mark[0] != "chance"]
    methods = [board.methods[place] for place in places]
    curves, drawn = methods[:MOST_CURVES], _drawn(MOST_CURVES, len(methods)) + told

    bars = [Bar(f"{place + 1}. {board.methods[place].name}", *rows[place].estimates[lead.key]) for place in places[:MOST_BARS]]
    what = f"{title}: {label} and its interval"
    yield Figure(
        charts.draw(f"{name}-leaderboard", what, charts.intervals, bars, f"test {label}", what, leaky, marks),
        f"{label} on test with its {LEVEL:.0%} bootstrap interval over seeds and clients.{_drawn(MOST_BARS, len(methods))}{told}",
    )
    sampled = label.removeprefix("full ")
    lines = [curve for method in curves if (curve := convergence(method, lead.key.removeprefix("full_"))) is not None]
    if lines:
        what, beside = f"{title}: {sampled} by round", marks if sampled == label else []
        yield Figure(
            charts.draw(f"{name}-convergence", what, charts.curves, lines, "round", f"test {sampled}", what, leaky, beside),
            f"Test {sampled} by round, mean over seeds; the band goes from the lowest seed to the highest.{drawn}",
        )
    if lead in RANKING:
        what, axes = f"{title}: spread over clients", ("rank of the test item among the candidates", "share of clients at or below")
        ranks = [rank_curve(method, board) for method in curves]
        yield Figure(
            charts.draw(f"{name}-spread", what, charts.curves, ranks, *axes, what, leaky),
            f"How many clients have their test item at most at a rank; the height at 10 is HR@10.{drawn}",
        )
    sent = [method.mean("bytes_up") + method.mean("bytes_down") for method in board.methods]
    visits = [method.mean("client_visits") for method in board.methods]
    yield from trade_off(board, rows, "bytes", "bytes up and down", sent, human)
    yield from trade_off(board, rows, "visits", "client visits", visits, "{:,.0f}".format)
    yield from heat_maps(board, rows)


def not_controls(board: Board) -> list[int]:
    """Places of the methods to draw: without controls, which at chance would squeeze the scale, unless a leak lifts them."""
    others = [place for place, method in enumerate(board.methods) if not method.control]
    return others if others and not board.leaky else list(range(len(board.methods)))


def _drawn(most: int, methods: int) -> str:
    return "" if methods <= most else f" The best {most} of {methods} methods are drawn."


def trade_off(
    board: Board, rows: Sequence[Row], key: str, label: str, cost: Sequence[float], amount: Callable[[float], str]
) -> Iterator[Figure]:
    """The leading metric against a cost, of two methods or more."""
    lead, what = board.lead, f"{board.title}: {board.lead.label} against {label}"
    quality = [row.estimates[lead.key].value for row in rows]
    shown = [i for i in not_controls(board) if np.isfinite([cost[i], quality[i]]).all()]
    if len(shown) < 2:
        return
    # what is trained in one place sends nothing, and would be ahead of all
    sending = [i for i in shown if board.methods[i].mean("client_visits") > 0]
    front = [sending[i] for i in significance.pareto([cost[i] for i in sending], [lead.sign * quality[i] for i in sending])]
    central = set(shown) - set(sending)
    points = [Point(board.methods[i].name, i + 1, cost[i], quality[i], i in front, i in central) for i in shown]
    floor = board.floor and (board.floor[0], board.floor[1][lead.key])
    axes = (f"{label} of the whole run", f"test {lead.label}")
    drawn = charts.draw(f"{slug(board.title)}-{key}", what, charts.trade_off, points, *axes, what, board.leaky, amount, floor)
    told = ["Numbers are places in the leaderboard."]
    if len(shown) > MOST_KEYED:
        told = [f"Numbers, of the best {MOST_CURVES} and of those on the line, are places in the leaderboard."]
    if front:
        told.append(f"On the line, which nothing beats in both: {listed([f'{i + 1} {board.methods[i].name}' for i in front])}.")
    if central:
        told.append("Diamonds are trained in one place and send nothing; they do not count for the line.")
    yield Figure(drawn, " ".join(told))


def convergence(method: Method, key: str) -> Curve | None:
    """Test metric by round, over the rounds that all seeds evaluated."""
    found = [{line["round"]: line[f"test/{key}"] for line in run.rounds if line.get(f"test/{key}") is not None} for run in method.runs]
    rounds = sorted(set.intersection(*map(set, found)))
    if not rounds:
        return None
    values = np.array([[one[number] for number in rounds] for one in found])
    return Curve(method.name, np.array(rounds), values.mean(axis=0), values.min(axis=0), values.max(axis=0))


def rank_curve(method: Method, board: Board) -> Curve:
    """Share of clients whose test item is ranked at k or better, by k."""
    candidates = int(board.first.summary.get("protocol_fields", {}).get("eval_negatives", 99)) + 1
    places = np.arange(1, candidates + 1)
    share = np.stack([np.searchsorted(np.sort(run.clients["rank_test"]), places, side="right") / len(run.clients) for run in method.runs])
    return Curve(method.name, places, share.mean(axis=0), share.min(axis=0), share.max(axis=0))


def heat_maps(board: Board, rows: Sequence[Row]) -> Iterator[Figure]:
    """n × e, one map for each of the other settings that differ."""
    axes = ("clients_per_round", "local_epochs")
    maps: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        settings = row.method.settings
        if settings.keys() >= set(axes):
            rest = " ".join(f"{key}={value}" for key, value in settings.items() if key not in axes)
            found = row.estimates[board.lead.key]
            cell = {"n": settings[axes[0]], "e": settings[axes[1]], "mean": found.value, "mean_pm": (found.high - found.low) / 2}
            maps.setdefault(f"{row.method.runs[0].name} {rest}".strip(), []).append({**cell, "leaky": board.leaky})
    for name, cells in maps.items():
        if min(len({str(cell[axis]) for cell in cells}) for axis in "ne") > 1:
            yield heat_map(board, name, cells)


def heat_map(board: Board, name: str, cells: list[dict[str, Any]]) -> Figure:
    best = cells[0]  # rows are sorted so
    cells = sorted(cells, key=lambda cell: (cell["n"] is None, cell["n"] or 0, cell["e"] is None, cell["e"] or 0))
    table = pd.DataFrame([{**cell, "n": _all(cell["n"]), "e": _all(cell["e"])} for cell in cells])
    what, axes = f"{board.title}: {name}", ("n, clients a round", "e, local epochs")
    said = f"± half of the {LEVEL:.0%} bootstrap interval over seeds and clients"
    told = f"Test {board.lead.label} of {name} by n (clients a round) and e (local epochs), {said}."
    return Figure(
        charts.draw(slug(f"{what}-n-e"), f"{what}, by n and e", heatmap, table, "n", "e", "mean", axes, what, said),
        f"{told} The best is {best['mean']:.4f} at n={_all(best['n'])}, e={_all(best['e'])}.",
    )


def _all(value: Any) -> str:
    return "all" if value is None else str(value)
