"""The two figures of a run: what they show, and that they survive what runs really give."""

from __future__ import annotations

import io
import re
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import same_color
from matplotlib.figure import Figure
from matplotlib.text import Text

from fedbench.reporting import charts
from fedbench.reporting.charts import Point
from fedbench.tracking import figures


def lines(rounds: int, evaluate_every: int = 1) -> list[dict[str, Any]]:
    """Validation NDCG@10 peaks in round 4."""
    out: list[dict[str, Any]] = []
    for number in range(1, rounds + 1):
        line: dict[str, Any] = {"round": number, "loss": 1 / number}
        if number % evaluate_every == 0:
            quality = 0.3 - 0.01 * abs(number - 4)
            line |= {"val/hr_10": quality, "val/ndcg_10": quality / 2, "test/hr_10": quality, "test/ndcg_10": quality / 2}
        out.append(line)
    return out


def clients(count: int, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    ranks = {name: rng.integers(1, 101, count) for name in ("rank_val", "rank_test", "full_rank_val", "full_rank_test")}
    return pd.DataFrame({"user": [f"u{i}" for i in range(count)], "train_items": rng.integers(3, 60, count), **ranks})


def png_size(figure: Figure) -> tuple[int, int]:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    data = buffer.getvalue()
    return int.from_bytes(data[16:20]), int.from_bytes(data[20:24])


def words(figure: Figure) -> str:
    return " ".join([text.get_text() for text in figure.texts] + [t.get_text() for ax in figure.axes for t in ax.texts])


@pytest.mark.parametrize("leaky", [False, True])
def test_leaky_stands_in_red_in_the_title_and_only_then(leaky: bool) -> None:
    for figure in (figures.convergence(lines(3), leaky, "t"), figures.distribution(clients(50), leaky, "t")):
        red = [text for text in figure.texts if text.get_text() == "LEAKY"]
        assert bool(red) == leaky
        assert all(same_color(text.get_color(), figures.LEAK) for text in red)


def test_convergence_has_all_series_best_round_and_chance() -> None:
    figure = figures.convergence(lines(10), False, "fedmf · toy")
    loss, quality = figure.axes
    assert len(loss.lines) == 1
    assert {text.get_text() for text in quality.get_legend().get_texts()} == {label for _, label, _, _ in figures.SERIES}
    assert "best round 4" in quality.get_title(loc="left")
    assert "chance" in words(figure) and "0.10" in words(figure)
    assert png_size(figure) == (1200, 500)


def test_the_reported_round_is_the_one_marked() -> None:
    figure = figures.convergence(lines(10), True, "t", best_round=7)
    assert "best round 7" in figure.axes[1].get_title(loc="left")


def test_rounds_without_evaluation_leave_no_gap() -> None:
    curve = figures.convergence(lines(10, evaluate_every=5), False, "t").axes[1].lines[0]
    assert list(curve.get_xdata()) == [5, 10]


@pytest.mark.parametrize(
    "odd",
    [
        [],
        [{"round": 1, "val/hr_10": 0.1, "val/ndcg_10": 0.05, "test/hr_10": 0.1, "test/ndcg_10": 0.05}],
        [{"round": 1, "loss": None}, {"round": 2, "loss": float("nan")}],
        [{"round": 1, "loss": 0.5, "val/rmse": 1.0}],
    ],
    ids=["no rounds", "no loss", "diverged", "ratings"],
)
def test_convergence_of_odd_runs(odd: list[dict[str, Any]]) -> None:
    assert png_size(figures.convergence(odd, False, "t")) == (1200, 500)


def test_distribution_reads_hr_at_rank_ten_and_counts_every_client_once() -> None:
    table = clients(400)
    ranks, by_size = figures.distribution(table, False, "t").axes
    hit = (table["rank_test"] <= 10).mean()
    assert f"HR@10 {hit:.3f}" in ranks.get_title(loc="left")
    # equal sizes share a bar, so that a decile never splits clients that do not differ
    assert 8 <= len(by_size.patches) <= 10
    lows = [int(label.get_text().split("–")[0]) for label in by_size.get_xticklabels()]
    assert lows == sorted(set(lows))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_distribution_of_few_clients(count: int) -> None:
    assert png_size(figures.distribution(clients(count), True, "t")) == (1200, 500)


def test_distribution_without_ranks() -> None:
    table = pd.DataFrame({"user": ["a"], "train_items": [3], "rmse": [1.0]})
    assert "no ranks" in words(figures.distribution(table, False, "t"))


def test_a_long_title_is_cut() -> None:
    assert max(len(text.get_text()) for text in figures.convergence(lines(2), False, "x" * 300).texts) <= 110


def crowd(count: int) -> list[Point]:
    """Methods of nearly one quality at three costs, as a grid gives them; some trained in one place."""
    rng = np.random.default_rng(3)
    costs, qualities = rng.choice([2e6, 2.2e6, 9e9], count), 0.82 + 0.002 * rng.random(count)
    return [
        Point(f"method {i}", i + 1, 0 if i % 5 == 4 else costs[i], qualities[i], front=i in (2, 3), central=i % 5 == 4)
        for i in range(count)
    ]


@pytest.mark.parametrize(("count", "numbered"), [(1, 1), (15, 15), (40, 8)])
def test_numbers_of_a_crowd_cover_neither_each_other_nor_a_point(count: int, numbered: int) -> None:
    points = crowd(count)
    figure = charts.trade_off(points, "bytes", "NDCG@10", "t", False, str, ("popularity", 0.821))
    (axes,) = figure.axes
    numbers = [text for text in axes.texts if text.get_text().isdigit()]
    assert [text.get_text() for text in numbers] == [str(place + 1) for place in range(numbered)]
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in numbers]  # an annotation's own would have its line too
    spots = [axes.transData.transform((point.cost, point.quality)) for point in points]
    assert not [(a, b) for a, b in combinations(boxes, 2) if a.shrunk(0.8, 0.8).overlaps(b.shrunk(0.8, 0.8))]
    assert not [box for box in boxes for x, y in spots if box.contains(x, y)]
    (key,) = figure.legends
    assert [text.get_text() for text in key.get_texts()] == [f"{place + 1} method {place}" for place in range(numbered)]


def test_a_charts_svg_has_its_colours_light_and_dark() -> None:
    drawn = charts.draw("name", "alt", charts.trade_off, crowd(3), "bytes", "NDCG@10", "t", True, str, None)
    svg = drawn.svg.decode()
    assert not re.search(r"(fill|stroke): #", svg) and f"--c{figures.LEAK[1:]}:{charts.DARK[figures.LEAK]}" in svg
    used = set(re.findall(r"var\((--c[0-9a-f]{6})\)", svg))
    assert used and used <= set(re.findall(r"(--c[0-9a-f]{6}):#", svg))
