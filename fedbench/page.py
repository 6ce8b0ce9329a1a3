"""A report as a page: tables, warnings and figures, written as one HTML file that asks for nothing, as Markdown and as plain text."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from fedbench.charts import Drawn
from fedbench.errors import UsageError
from fedbench.tracking import plain, write_text

TEMPLATE = Path(__file__).with_suffix(".html")


class Cell(NamedTuple):
    """A cell: its text, a second line in small print, and how it is marked (best, good, bad)."""

    text: str
    small: str = ""
    mark: str = ""


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
        links = [f'<a href="#s{number}">{escape(section.title)}</a>' for number, section in enumerate(self.sections)]
        parts = [
            f"<header><h1>{escape(self.title)}</h1>",
            f'<p class="lead">{escape(self.lead)}</p>',
            f"<nav>{''.join(links)}</nav></header>",
        ]
        parts += [_section_html(section, f"s{number}") for number, section in enumerate(self.sections)]
        parts += ["<section><h2>How this was computed</h2>", *(f"<p>{escape(text)}</p>" for text in self.method)]
        parts += [f"<details><summary>{len(self.sources)} runs</summary>"]
        parts += [f"<div><code>{escape(source)}</code></div>" for source in self.sources]
        parts += ["</details></section>"]
        return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(title=escape(self.title), body="\n".join(parts))

    def to_markdown(self) -> str:
        parts = [f"# {_md(self.title)}", _md(self.lead)]
        for section in self.sections:
            parts += [f"## {_md(section.title)}{' LEAKY' if section.leaky else ''}", _md(section.lead)]
            parts += ["\n".join(f"- **{_md(text)}**" for text in section.warnings), "\n".join(f"- {_md(text)}" for text in section.remarks)]
            for table in section.tables:
                head = [_md(name) for name in ("", *table.columns[1:])]
                lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
                lines += [f"| {' | '.join(_md(f'{cell.text} {cell.small}'.strip()) for cell in row)} |" for row in table.rows]
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
        (out / "figures").mkdir(parents=True, exist_ok=True)
        if (out / "report.html").exists():
            for old in (out / "figures").glob("*.png"):
                old.unlink()
        for figure in drawn:
            (out / "figures" / f"{figure.name}.png").write_bytes(figure.png)
        for name, text in (("report.md", markdown), ("report.json", facts), ("report.html", html)):
            write_text(out / name, text)
    except OSError as error:
        raise UsageError(f"--out {out}: cannot be written ({error.strerror}); choose another folder") from None
    return out / "report.html"


def slug(text: str) -> str:
    """A name as part of a file name."""
    return re.sub(r"[^A-Za-z0-9.=-]+", "-", text).strip("-.")[:60] or "x"


def _section_html(section: Section, anchor: str) -> str:
    leaky = ' <span class="leaky">LEAKY</span>' if section.leaky else ""
    parts = [f'<section id="{anchor}"><h2>{escape(section.title)}{leaky}</h2>']
    if section.lead:
        parts.append(f'<p class="lead">{escape(section.lead)}</p>')
    for kind, texts in (("warnings", section.warnings), ("remarks", section.remarks)):
        if texts:
            parts.append(f'<ul class="{kind}">{"".join(f"<li>{escape(text)}</li>" for text in texts)}</ul>')
    tables = [_table_html(table) for table in section.tables]
    figures = [f'<div class="figures">{"".join(map(_figure_html, section.figures))}</div>'] if section.figures else []
    parts += [*tables[:2], *figures, *tables[2:]]
    return "\n".join([*parts, "</section>"])


def _table_html(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in table.columns)
    rows = []
    for number, (first, *rest) in enumerate(table.rows):
        cells = "".join(
            f"<td{f' class={cell.mark}' if cell.mark else ''}>{escape(cell.text)}"
            f"{f'<small>{escape(cell.small)}</small>' if cell.small else ''}</td>"
            for cell in rest
        )
        kind = ' class="reference"' if number in table.references else ""
        rows.append(f'<tr{kind}><th scope="row">{escape(first.text)}</th>{cells}</tr>')
    caption = f'<p class="caption">{escape(table.caption)}</p>' if table.caption else ""
    body = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    return f"<h3>{escape(table.title)}</h3>\n{body}\n{caption}"


def _figure_html(figure: Figure) -> str:
    data = base64.b64encode(figure.drawn.svg).decode()
    image = f'<img alt="{escape(figure.drawn.alt)}" src="data:image/svg+xml;base64,{data}">'
    return f"<figure>{image}<figcaption>{escape(figure.caption)}</figcaption></figure>"


def _md(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return re.sub(r"([\\`*\[\]|])", r"\\\1", " ".join(text.split())).replace("<", "&lt;")


def _aligned(table: Table) -> list[str]:
    texts = [list(table.columns), *([cell.text for cell in row] for row in table.rows)]
    widths = [max(len(row[column]) for row in texts) for column in range(len(table.columns))]
    return ["  ".join([row[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True))]).rstrip()
            for row in texts]  # fmt: skip
