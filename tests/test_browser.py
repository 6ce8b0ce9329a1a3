"""What a user sees: the MLflow UI behind a run's printed link, and the report, in a real browser. `make test-browser` runs it."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import PLOTS, Browser, executable

ROOT = Path(__file__).parents[1]
SMALL = "--dataset synthetic --users 60 --items 120 --interactions 10 --dim 4 --threads 1 --quiet"
GRID = "--algo fedmf -n 10 40 -e 1 2 --seeds 0-1 --rounds 3 --jobs 2"
GROUPS = [f"n: {n}, e: {e}" for n in (10, 40) for e in (1, 2)]

pytestmark = [pytest.mark.browser, pytest.mark.skipif(executable() is None, reason="no Chromium: install the system's chromium package")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A folder with a run, a sweep and their database, and the links that the two printed."""
    place = tmp_path_factory.mktemp("trained")
    run = command(place, str(ROOT / "train.py"), "--algo", "popularity", *SMALL.split())
    sweep = command(place, str(ROOT / "sweeps" / "grid.py"), *GRID.split(), *SMALL.split())
    return place, printed_link(run), printed_link(sweep)


def printed_link(output: str) -> str:
    """The last one: with --seeds every run has one too."""
    found = re.findall(r"^charts +(\S+)$", output, flags=re.MULTILINE)
    assert found, output
    return found[-1]


@pytest.fixture(scope="module")
def served(trained: tuple[Path, str, str]) -> Iterator[tuple[str, str]]:
    """What `make ui` starts, on a free port of this machine, and the link that it prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = [sys.executable, "-m", "fedbench", "ui", "--port", port]
    with subprocess.Popen(words, cwd=trained[0], stdout=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stdout is not None
        said = "".join(process.stdout.readline() for _ in range(3))
        yield f"127.0.0.1:{port}", printed_link(said)
        process.terminate()
        assert process.wait(60) == 0


@pytest.fixture
def server(served: tuple[str, str]) -> str:
    return served[0]


def environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key != "MLFLOW_TRACKING_URI"}
    return {**kept, "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "PYTHONPATH": str(ROOT)}


def command(place: Path, *words: str) -> str:
    done = subprocess.run([sys.executable, *words], cwd=place, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path / "profile") as made:
        yield made


CHART = "document.querySelector('.js-plotly-plot svg.main-svg') !== null"


def test_a_runs_link_shows_it_and_charts_and_asks_nobody_else(trained: tuple[Path, str, str], server: str, browser: Browser) -> None:
    browser.open(trained[1].replace("127.0.0.1:5000", server))
    assert browser.wait_for("document.body.innerText.includes('popularity-synthetic-clean-s0')"), browser.text
    assert browser.wait_for(CHART), browser.text
    assert browser.hosts == {server}


def traces(browser: Browser) -> dict[str, list[int]]:
    """How many points each trace of Plotly's charts has, by its type, as Plotly itself knows it."""
    told = "[...document.querySelectorAll('.js-plotly-plot')].flatMap(plot => plot.data.map(one => [one.type, (one.x || []).length]))"
    found: dict[str, list[int]] = {}
    for kind, points in json.loads(browser.evaluate(f"JSON.stringify({told})")):
        found.setdefault(kind, []).append(points)
    return found


def test_a_sweeps_link_opens_four_charts_of_every_group(trained: tuple[Path, str, str], server: str, browser: Browser) -> None:
    """n x e with two seeds, in a browser that was never there: no click, and no point left out."""
    browser.resize(1440, 1200)
    browser.open(trained[2].replace("127.0.0.1:5000", server))
    assert browser.wait_for("document.body.innerText.includes('8 matching runs')"), browser.text
    assert browser.wait_for(PLOTS), browser.text
    assert "NDCG@10, mean over seeds" in browser.text and "n × e: fedmf-synthetic" in browser.text
    found = traces(browser)
    assert found["bar"] == [4] and found["contour"] == [4], found
    # a line a group, in two layers, beside the contour's points
    assert found["scatter"].count(3) >= 4 and 4 in found["scatter"], found
    assert all(group in browser.text for group in GROUPS), browser.text
    assert all(f"n={n} e={e} seed={seed}" in browser.text for n in (10, 40) for e in (1, 2) for seed in (0, 1))
    assert "popularity-synthetic" not in browser.text
    assert browser.hosts == {server}


def test_the_link_of_make_ui_compares_all_runs(served: tuple[str, str], browser: Browser) -> None:
    browser.resize(1440, 1200)
    server, link = served
    browser.open(link)
    assert browser.wait_for("document.body.innerText.includes('9 matching runs')"), browser.text
    assert browser.wait_for(PLOTS), browser.text
    assert traces(browser)["bar"] == [5]
    assert all(f"algo: fedmf, {group}" in browser.text for group in GROUPS) and "algo: popularity" in browser.text
    assert browser.hosts == {server}


def test_the_report_shows_all_its_figures_and_asks_nobody(trained: tuple[Path, str, str], browser: Browser) -> None:
    place, *_ = trained
    command(place, "-m", "fedbench", "report", "runs")
    browser.open((place / "report" / "report.html").as_uri())
    assert browser.wait_for("document.images.length > 0 && [...document.images].every(image => image.naturalWidth > 0)")
    assert all(f"fedmf n={n} e={e}" in browser.text for n in (10, 40) for e in (1, 2))
    assert browser.hosts == {""}  # the file itself
    browser.call("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=True)
    assert browser.evaluate("document.documentElement.scrollWidth") <= 390
