"""What the site needs beside mkdocs.yml: README.md and its neighbours as pages, and the sources that pages link to as text.

Pages are written for the code host, where a link may lead anywhere in the repository and a list needs no empty line before it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""files beside docs/ that are pages, and their places on the site"""
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")


def sources() -> dict[str, Path]:
    """Every page's file, by its place on the site."""
    return {place: ROOT / name for name, place in PAGES.items()} | {page.relative_to(DOCS).as_posix(): page for page in DOCS.rglob("*.md")}


def targets(page: Path) -> Iterator[Path]:
    """Files that a page links to."""
    for _, target, _ in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" not in target:
            yield (page.parent / target).resolve()


def place_of(target: Path) -> str:
    """Where a file is on the site: a source keeps its path, with an ending that a browser shows."""
    if target.is_relative_to(DOCS):
        return target.relative_to(DOCS).as_posix()
    name = target.relative_to(ROOT).as_posix()
    return PAGES.get(name, f"source/{name}.txt")


def on_files(files: Any, config: Any) -> Any:
    for name, place in PAGES.items():
        files.append(File.generated(config, place, content=(ROOT / name).read_text(encoding="utf-8")))
    outside = {target for page in sources().values() for target in targets(page) if not target.is_relative_to(DOCS)}
    for target in sorted(outside):
        if place_of(target) not in PAGES.values():
            files.append(File.generated(config, place_of(target), content=target.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    here, place = sources()[page.file.src_uri], Path(page.file.src_uri).parent

    def moved(found: re.Match[str]) -> str:
        if "://" in found[2]:
            return found[0]
        return f"{found[1]}{os.path.relpath(place_of((here.parent / found[2]).resolve()), place)}{found[3]}"

    return spaced(LINK.sub(moved, markdown))


def spaced(markdown: str) -> str:
    """With an empty line before every list, which this Markdown wants."""
    lines: list[str] = []
    inside = False
    for line in markdown.splitlines():
        inside ^= line.lstrip().startswith("```")
        before = lines[-1] if lines else ""
        if not inside and re.match(r"([-*]|\d+\.) ", line) and before.strip() and not re.match(r"\s*([-*]|\d+\.) |  ", before):
            lines.append("")
        lines.append(line)
    return "\n".join(lines)
