"""The site of docs/: every page is in its nav, it builds without a warning, asks nobody for anything, and fits a phone."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.browser import Browser, executable

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
GENERATED = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
"""pages that docs/site.py makes of files beside docs/"""
AT_ONCE = ("src", "srcset", "poster", "data")
"""attributes whose address is fetched when a page is shown; and href of <link>"""

needs_mkdocs = pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="needs mkdocs-material, see requirements-docs.txt")


def in_nav() -> list[str]:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    return re.findall(r": ([\w./-]+\.md)$", nav, flags=re.MULTILINE)


def test_every_page_is_in_the_nav() -> None:
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert sorted(pages - {*in_nav()}) == [], "give each a line in nav of mkdocs.yml"
    assert sorted({*in_nav()} - pages - GENERATED.keys()) == [], "nav of mkdocs.yml names pages that are not there"
    assert len(in_nav()) == len({*in_nav()}) and GENERATED.keys() <= {*in_nav()}


class Page(HTMLParser):
    """Where a built page leads, what it fetches, and the places in it that can be led to."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.places: set[str] = set()
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.places |= {given[name] for name in ("id", "name") if name in given}
        self.fetched += [given[name] for name in AT_ONCE if name in given]
        if tag == "link" and given.get("rel") not in ("canonical", "prev", "next"):
            self.fetched.append(given.get("href", ""))
        elif tag in ("a", "link") and given.get("href"):
            self.links.append(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


@needs_mkdocs
def test_every_link_leads_somewhere_and_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    pages = {file: Page(file) for file in site.rglob("*.html")}
    assert len(pages) >= len(in_nav()) and any("#" in link for page in pages.values() for link in page.links)
    wrong = []
    for file, page in pages.items():
        assert [address for address in page.fetched if urlsplit(address).netloc] == [], file
        for link in (*page.links, *page.fetched):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or file.name == "404.html":
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            target = target / "index.html" if target.is_dir() else target
            place = parts.fragment
            if not target.is_file() or (place and target in pages and unquote(place) not in pages[target].places):
                wrong.append(f"{file.relative_to(site)}: {link}")
    assert wrong == []
    styles = "".join(file.read_text(encoding="utf-8") for file in site.rglob("*.css"))
    assert re.findall(r"(?:url\(|@import )[\"']?(?:https?:)?//", styles) == []


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    class Silent(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Silent, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


@needs_mkdocs
@pytest.mark.browser
@pytest.mark.skipif(executable() is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [390, 1400])
def test_every_page_fits_and_asks_nobody(width: int, site: Path, address: str, tmp_path: Path) -> None:
    """Wide tables and code scroll by themselves; the page does not."""
    with Browser(tmp_path) as browser:
        browser.resize(width, 900)
        for file in sorted(site.rglob("index.html")):
            where = file.parent.relative_to(site).as_posix()
            browser.open(f"{address}{'' if where == '.' else where + '/'}")
            assert browser.wait_for("document.readyState == 'complete' && document.querySelector('article h1')", 60), where
            assert browser.evaluate("document.documentElement.scrollWidth") <= width, where
            assert browser.evaluate("[...document.images].every(image => image.loading == 'lazy' || image.naturalWidth > 0)"), where
        assert browser.hosts == {urlsplit(address).netloc}
