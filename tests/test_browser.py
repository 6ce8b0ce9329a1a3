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
SMALL = "--dataset synthetic --users 60 --items 120 --interactions 10 --rounds 3 --dim 4 --threads 1 --quiet"

pytestmark = [pytest.mark.browser, pytest.mark.skipif(executable() is None, reason="no Chromium: install the system's chromium package")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with three runs and their database, and the link that the last one printed."""
    place = tmp_path_factory.mktemp("trained")
    printed = ""
    for algo, seed in (("fedmf", 0), ("fedmf", 1), ("popularity", 0)):
        printed = command(place, str(ROOT / "train.py"), *f"--algo {algo} --seed {seed} --out runs/{algo}-{seed} {SMALL}".split())
    link = re.search(r"^charts +(\S+)$", printed, flags=re.MULTILINE)
    assert link is not None, printed
    return place, link[1]


@pytest.fixture(scope="module")
def server(trained: tuple[Path, str]) -> Iterator[str]:
    """The real UI on this database, on a free port of this machine."""
    place, _ = trained
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


def test_the_printed_link_shows_runs_and_charts_and_asks_nobody_else(trained: tuple[Path, str], server: str, browser: Browser) -> None:
    _, link = trained
    browser.open(link.replace("127.0.0.1:5000", server))
    for run in ("fedmf-synthetic-clean-s0", "fedmf-synthetic-clean-s1", "popularity-synthetic-clean-s0"):
        assert browser.wait_for(f"document.body.innerText.includes('{run}')"), browser.text
    assert browser.wait_for("document.querySelector('.js-plotly-plot .plot, .js-plotly-plot svg.main-svg') !== null"), browser.text
    assert browser.hosts == {server}


def test_the_report_shows_all_its_figures_and_asks_nobody(trained: tuple[Path, str], browser: Browser) -> None:
    place, _ = trained
    command(place, "-m", "fedbench", "report", "runs")
    browser.open((place / "report" / "report.html").as_uri())
    assert browser.wait_for("document.images.length > 0 && [...document.images].every(image => image.naturalWidth > 0)")
    assert "1. fedmf" in browser.text or "2. fedmf" in browser.text
    assert browser.hosts == {""}  # the file itself
    browser.call("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=True)
    assert browser.evaluate("document.documentElement.scrollWidth") <= 390
