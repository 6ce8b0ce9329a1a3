"""A report as a page: tables, warnings and figures, written as one HTML file without external resources, as Markdown and as plain text."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from fedbench.errors import UsageError
from fedbench.files import make_folder, replacing, write_text
from fedbench.reporting.charts import Drawn
from fedbench.text import shown
from fedbench.tracking.run_log import plain

TEMPLATE = Path(__file__).with_suffix(".html")


class Cell(NamedTuple):
    """A cell: its text, a second line in small print, and how it is marked (best, good, bad)."""

    text: str
    small: str = ""
    mark: str = ""
    value: float | None = None
    """what its column is sorted by; a column without values is sorted as text"""
    tip: str = ""
    """what the pointer shows"""


@dataclass(frozen=True)
class Table:
    """The first cell of a row is its heading."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    references: frozenset[int] = frozenset()
    """rows that are no method: what must be beaten"""


class Figure(NamedTuple):
    drawn: Drawn
    caption: str


@dataclass(frozen=True)
class Section:
    title: str
    lead: str = ""
    leaky: bool = False
    warnings: Sequence[str] = ()
    remarks: Sequence[str] = ()
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()


@dataclass(frozen=True)
class Page:
    title: str
    lead: str
    sections: Sequence[Section]
    method: Sequence[str]
    """how the figures were computed, a paragraph each"""
    sources: Sequence[str]
    """the folders it was made of"""
    facts: dict[str, Any] = field(default_factory=dict)
    """the numbers, for report.json"""

    def to_html(self) -> str:
        links = [f'<a href="#s{number}">{_text(section.title)}</a>' for number, section in enumerate(self.sections)]
        parts = [
            f"<header><h1>{_text(self.title)}</h1>",
            f'<p class="lead">{_text(self.lead)}</p>',
            f"<nav>{''.join(links)}</nav></header>",
        ]
        parts += [_section_html(section, f"s{number}") for number, section in enumerate(self.sections)]
        parts += ["<section><h2>How this was computed</h2>", *(f"<p>{_text(text)}</p>" for text in self.method)]
        parts += [f"<details><summary>{len(self.sources)} runs</summary>"]
        parts += [f"<div><code>{_text(source)}</code></div>" for source in self.sources]
        parts += ["</details></section>"]
        template = TEMPLATE.read_text(encoding="utf-8")
        allowed = {tag: _hash(template.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]) for tag in ("style", "script")}
        return Template(template).substitute(title=_text(self.title), body="\n".join(parts), **allowed)

    def to_markdown(self) -> str:
        parts = [f"# {_md(self.title)}", _md(self.lead)]
        for section in self.sections:
            parts += [f"## {_md(section.title)}{' LEAKY' if section.leaky else ''}", _md(section.lead)]
            parts += ["\n".join(f"- **{_md(text)}**" for text in section.warnings), "\n".join(f"- {_md(text)}" for text in section.remarks)]
            for table in section.tables:
                head = [_md(name) for name in ("", *table.columns[1:])]
                lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
                lines += [f"| {' | '.join(map(_cell_md, row))} |" for row in table.rows]
                parts += [f"### {_md(table.title)}", "\n".join(lines), _md(table.caption)]
            parts += [f"![{_md(one.drawn.alt)}](figures/{one.drawn.name}.png)\n\n{_md(one.caption)}" for one in section.figures]
        parts += ["## How this was computed", *map(_md, self.method)]
        return "\n\n".join(part for part in parts if part) + "\n"

    def to_text(self) -> str:
        """Each section's first table, without its small print, and what must be said about it."""
        lines = []
        for section in self.sections:
            lines += ["", f"{section.title}{' LEAKY' if section.leaky else ''}"]
            lines += _aligned(section.tables[0]) if section.tables else []
            lines += [f"! {text}" for text in section.warnings]
            lines += [f"- {text}" for text in section.remarks]
        return "\n".join(lines)


def write(page: Page, out: Path) -> Path:
    """report.html, report.md, report.json and figures/*.png; figures of an earlier report in that folder go."""
    drawn = [figure.drawn for section in page.sections for figure in section.figures]
    html, markdown = page.to_html(), page.to_markdown()
    facts = json.dumps(plain(page.facts), indent=2, allow_nan=False) + "\n"
    try:
        out.mkdir(parents=True, exist_ok=True)
        make_folder(out / "figures")
        if (out / "report.html").exists():
            for old in (out / "figures").glob("*.png"):
                old.unlink()
        for figure in drawn:
            with replacing(out / "figures" / f"{figure.name}.png") as file:
                file.write(figure.png)
        # the page last: where it is, the rest is
        for name, text in (("report.md", markdown), ("report.json", facts), ("report.html", html)):
            write_text(out / name, text)
    except OSError as error:
        raise UsageError(f"--out {out}: cannot be written ({error.strerror}); choose another folder") from None
    return out / "report.html"


def listed(names: Sequence[str], most: int = 12) -> str:
    """Names in a sentence; of very many, the first ones and how many more there are."""
    return ", ".join(names) if len(names) <= most + 1 else f"{', '.join(names[:most])} and {len(names) - most} more"


def slug(text: str) -> str:
    """A name as part of a file name."""
    return re.sub(r"[^A-Za-z0-9.=-]+", "-", text).strip("-.")[:60] or "x"


def _section_html(section: Section, anchor: str) -> str:
    leaky = ' <span class="leaky">LEAKY</span>' if section.leaky else ""
    parts = [f'<section id="{anchor}"><h2>{_text(section.title)}{leaky}</h2>']
    if section.lead:
        parts.append(f'<p class="lead">{_text(section.lead)}</p>')
    for kind, texts in (("warnings", section.warnings), ("remarks", section.remarks)):
        if texts:
            parts.append(f'<ul class="{kind}">{"".join(f"<li>{_text(text)}</li>" for text in texts)}</ul>')
    tables = [_table_html(table) for table in section.tables]
    figures = [f'<div class="figures">{"".join(map(_figure_html, section.figures))}</div>'] if section.figures else []
    parts += [*tables[:2], *figures, *tables[2:]]
    return "\n".join([*parts, "</section>"])


def _table_html(table: Table) -> str:
    head = "".join(f'<th scope="col">{_text(name)}</th>' for name in table.columns)
    rows = []
    for number, (first, *rest) in enumerate(table.rows):
        kind = ' class="reference"' if number in table.references else ""
        rows.append(f'<tr{kind}><th scope="row">{_text(first.text)}</th>{"".join(map(_cell_html, rest))}</tr>')
    caption = f'<p class="caption">{_text(table.caption)}</p>' if table.caption else ""
    body = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    # what scrolls must be reached by keyboard too
    region = f'<div class="scroll" tabindex="0" role="region" aria-label="{_text(table.title)}">{body}</div>'
    return f"<h3>{_text(table.title)}</h3>\n{region}\n{caption}"


def _cell_html(cell: Cell) -> str:
    mark = f' class="{cell.mark}"' if cell.mark else ""
    value = f' data-value="{cell.value:.10g}"' if cell.value is not None and math.isfinite(cell.value) else ""
    tip = f' title="{_text(cell.tip)}"' if cell.tip else ""
    return f"<td{mark}{value}{tip}>{_text(cell.text)}{f'<small>{_text(cell.small)}</small>' if cell.small else ''}</td>"


def _figure_html(figure: Figure) -> str:
    data = base64.b64encode(figure.drawn.svg).decode()
    image = f'<img alt="{_text(figure.drawn.alt)}" src="data:image/svg+xml;base64,{data}">'
    return f"<figure>{image}<figcaption>{_text(figure.caption)}</figcaption></figure>"


def _hash(inline: str) -> str:
    """What the page's policy allows a style or script by: nothing else of that kind is applied or run."""
    return f"sha256-{base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()}"


def _text(text: str) -> str:
    """Text as HTML: markup and control characters are shown, and have no effect."""
    return escape(shown(text, keep="\n\t"))


def _cell_md(cell: Cell) -> str:
    text = f"**{_md(cell.text)}**" if cell.mark == "best" else _md(cell.text)
    return f"{text} {_md(cell.small)}".strip()


def _md(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return re.sub(r"([\\`*\[\]|])", r"\\\1", shown(" ".join(text.split()))).replace("<", "&lt;")


def _aligned(table: Table) -> list[str]:
    texts = [list(map(shown, table.columns)), *([shown(cell.text) for cell in row] for row in table.rows)]
    widths = [max(len(row[column]) for row in texts) for column in range(len(table.columns))]
    return ["  ".join([row[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True))]).rstrip()
            for row in texts]  # fmt: skip
