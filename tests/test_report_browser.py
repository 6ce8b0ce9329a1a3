"""The report as a reader uses it, in a real browser: sorting, dark mode, a phone, print. `make test-browser` runs it."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from fedbench.__main__ import main
from tests.browser import Browser, executable
from tests.test_report import write_run

pytestmark = [pytest.mark.browser, pytest.mark.skipif(executable() is None, reason="no Chromium: install the system's chromium package")]
PHONE = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
SKILLS = {"bold": 4.0, "apt": 3.0, "common": 2.5, "dull": 1.4, "with_a_rather_long_name": 1.2}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of five methods; one of them has two seeds."""
    place = tmp_path_factory.mktemp("report")
    for algo, skill in SKILLS.items():
        write_run(place / "runs" / algo, algo, 0, skill)
    write_run(place / "runs" / "again", "dull", 1, 1.4)
    assert main(["report", str(place / "runs"), "--out", str(place / "r")]) == 0
    return place / "r" / "report.html"


@pytest.fixture
def browser(page: Path, tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path / "profile") as made:
        show(made, page)
        yield made


def show(browser: Browser, page: Path) -> None:
    browser.open(page.as_uri())
    assert browser.wait_for("document.images.length > 0 && [...document.images].every(image => image.naturalWidth > 0)")


def prefer(browser: Browser, scheme: str, media: str = "") -> None:
    browser.call("Emulation.setEmulatedMedia", media=media, features=[{"name": "prefers-color-scheme", "value": scheme}])


def column(browser: Browser, number: int) -> list[str]:
    """The leaderboard's cells of a column, from top to bottom, without their small print."""
    return browser.evaluate(f"[...document.querySelector('tbody').rows].map(row => row.cells[{number}].childNodes[0]?.textContent ?? '')")


def click(browser: Browser, number: int) -> str | None:
    """Click a heading of the leaderboard; what it then says of the order."""
    browser.evaluate(f"document.querySelectorAll('thead')[0].rows[0].cells[{number}].querySelector('button').click()")
    return browser.evaluate(f"document.querySelectorAll('thead')[0].rows[0].cells[{number}].getAttribute('aria-sort')")


def brightness(color: str) -> float:
    """0 to 255, of what getComputedStyle tells."""
    return sum(float(part) for part in color.removeprefix("rgb(").removesuffix(")").split(",")) / 3


def test_a_click_on_a_heading_sorts_turns_round_and_puts_back(browser: Browser) -> None:
    given, scores = column(browser, 0), column(browser, 3)  # HR@10
    assert click(browser, 3) == "descending" and column(browser, 3) == sorted(scores, key=float, reverse=True)
    assert click(browser, 3) == "ascending" and column(browser, 3) == sorted(scores, key=float)
    assert click(browser, 3) is None and column(browser, 0) == given
    # popularity and chance have no seeds: last both ways, and what is equal keeps its order
    assert click(browser, 1) == "descending" and column(browser, 1) == ["2", "1", "1", "1", "1", "", ""]
    assert [name for name in column(browser, 0)[1:5]] == [name for name in given if name[0].isdigit() and "dull" not in name]
    assert click(browser, 1) == "ascending" and column(browser, 1) == ["1", "1", "1", "1", "2", "", ""]
    assert click(browser, 0) == "ascending" and [name.split(". ")[-1] for name in column(browser, 0)] == sorted(
        [*SKILLS, "popularity", "chance"]
    )
    assert browser.evaluate("document.querySelectorAll('thead')[0].querySelectorAll('[aria-sort]').length") == 1


def test_a_heading_is_reached_and_used_by_keyboard(browser: Browser) -> None:
    browser.evaluate("document.querySelector('thead button').focus()")
    key: dict[str, Any] = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
    for kind in ("keyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, **key)
    assert browser.evaluate("document.querySelector('thead th').getAttribute('aria-sort')") == "ascending"


def test_the_policy_runs_the_pages_script_and_no_other(browser: Browser) -> None:
    browser.evaluate(
        "{ const made = document.createElement('script'); made.textContent = 'document.title = 1'; document.body.append(made) }"
    )
    assert browser.evaluate("document.title").startswith("fedbench report")


@pytest.mark.parametrize(("scheme", "dark"), [("light", False), ("dark", True)])
def test_colours_follow_the_readers_system_in_figures_too(scheme: str, dark: bool, page: Path, browser: Browser) -> None:
    prefer(browser, scheme)
    show(browser, page)
    colors = browser.evaluate(
        "['body', 'tbody th', 'thead th', 'ul.warnings li', 'tr.reference td'].map("
        "of => { const style = getComputedStyle(document.querySelector(of)); return [style.color, style.backgroundColor] })"
    )
    for ink, paper in colors:
        assert (brightness(ink) > 130) == dark
        assert paper == "rgba(0, 0, 0, 0)" or (brightness(paper) < 60) == dark
    where = browser.evaluate(
        "(() => { const box = document.images[0].getBoundingClientRect(); return [box.x + scrollX, box.y + scrollY] })()"
    )
    clip = {"x": where[0] + 2, "y": where[1] + 2, "width": 4, "height": 4, "scale": 1}
    png = base64.b64decode(browser.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"])
    pixel = Image.open(io.BytesIO(png)).convert("L").getpixel((1, 1))
    assert isinstance(pixel, int | float) and (pixel < 60) == dark


def test_print_is_light_and_shows_no_sorting(page: Path, browser: Browser) -> None:
    prefer(browser, "dark", "print")
    show(browser, page)
    assert brightness(browser.evaluate("getComputedStyle(document.querySelector('td')).color")) < 60
    assert browser.evaluate("getComputedStyle(document.querySelector('thead button'), '::after').content") == "none"
    assert browser.evaluate("getComputedStyle(document.querySelector('tbody th')).position") == "static"


def test_on_a_phone_the_page_fits_and_the_first_column_stays(page: Path, browser: Browser) -> None:
    browser.call("Emulation.setDeviceMetricsOverride", **PHONE)
    show(browser, page)
    assert browser.evaluate("document.documentElement.scrollWidth") <= 390
    table = "document.querySelector('.scroll')"
    box = "(() => { const box = document.querySelector('tbody th').getBoundingClientRect(); return [box.x, box.right] })()"
    before = browser.evaluate(box)
    assert browser.evaluate(f"({table}.scrollLeft = 200, {table}.scrollLeft)") == 200
    assert browser.evaluate(box) == pytest.approx(before, abs=1.5) and before[1] < 200
    # what scrolled below it does not shine through
    assert brightness(browser.evaluate("getComputedStyle(document.querySelector('tbody th')).backgroundColor")) == 255


def test_without_script_the_page_has_its_tables(page: Path, browser: Browser) -> None:
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    show(browser, page)
    assert browser.evaluate("document.querySelectorAll('button').length") == 0
    assert "1. bold" in browser.text
