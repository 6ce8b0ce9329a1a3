"""What a user sees: the MLflow UI behind a run's printed link, and the report, in a real browser. `make test-browser` runs it."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import Browser, executable

ROOT = Path(__file__).parents[1]
SMALL = "--dataset synthetic --users 60 --items 120 --interactions 10 --dim 4 --threads 1 --quiet"
GRID = "--algo fedmf -n 10 40 -e 1 2 --rounds 3 --jobs 2"

pytestmark = [pytest.mark.browser, pytest.mark.skipif(executable() is None, reason="no Chromium: install the system's chromium package")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A folder with a run, a sweep and their database, and the links that the two printed."""
    place = tmp_path_factory.mktemp("trained")
    run = command(place, str(ROOT / "train.py"), "--algo", "popularity", *SMALL.split())
    sweep = command(place, str(ROOT / "sweeps" / "grid.py"), *GRID.split(), *SMALL.split())
    return place, printed_link(run), printed_link(sweep)


def printed_link(output: str) -> str:
    found = re.search(r"^charts +(\S+)$", output, flags=re.MULTILINE)
    assert found is not None, output
    return found[1]


@pytest.fixture(scope="module")
def server(trained: tuple[Path, str, str]) -> Iterator[str]:
    """The real UI on this database, on a free port of this machine."""
    place, *_ = trained
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    words = ["--backend-store-uri", "sqlite:///mlflow.db", "--host", "127.0.0.1", "--port", address.partition(":")[2], "--workers", "1"]
    with open(place / "server.log", "wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "mlflow", "ui", *words], cwd=place, stdout=log, stderr=log, env=environment())
        try:
            wait_until_healthy(address, process, place / "server.log")
            yield address
        finally:
            process.terminate()
            process.wait(30)


def wait_until_healthy(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + 300
    while time.monotonic() < until:
        assert process.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(f"http://{address}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise AssertionError(f"the UI did not come up: {log.read_text()}")


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


def test_a_sweeps_link_shows_its_points_alone_and_charts(trained: tuple[Path, str, str], server: str, browser: Browser) -> None:
    browser.open(trained[2].replace("127.0.0.1:5000", server))
    assert browser.wait_for("document.body.innerText.includes('4 matching runs')"), browser.text
    assert browser.wait_for(CHART), browser.text
    assert all(f"n={n} e={e}" in browser.text for n in (10, 40) for e in (1, 2))
    assert "popularity-synthetic" not in browser.text
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
