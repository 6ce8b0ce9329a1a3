"""Text that fits the terminal it is printed on; in a file or a pipe it stays as it is."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Sequence

UNBROKEN = ("folder  ", "charts  ", "redo  ", "logs  ")
"""lines that one copies: a terminal wraps them itself"""
NARROWEST = 40


def columns() -> int | None:
    """Of the terminal that stdout is; None if it is none."""
    return max(NARROWEST, shutil.get_terminal_size().columns) if sys.stdout.isatty() else None


def fitted(text: str, width: int | None = None) -> str:
    """Lines broken between words where they are wider than the terminal, the rest indented; tables of markdown narrowed."""
    width = width or columns()
    if width is None:
        return text
    lines: list[str] = []
    table: list[str] = []
    for line in [*text.split("\n"), ""]:
        if line.startswith("|"):
            table.append(line)
            continue
        if table:
            lines += narrowed(table, width)
            table = []
        lines += [line] if len(line) <= width or line.startswith(UNBROKEN) else broken(line, width)
    return "\n".join(lines[:-1])


def broken(line: str, width: int) -> list[str]:
    """A line in several; what follows stands below the text after its first gap, as in `  fedem   words`, or a little in."""
    lead = re.match(r"\s*\S+\s{2,}(?=\S)|\s*", line)
    indent = len(lead[0]) if lead and len(lead[0]) <= width // 2 else 0
    return textwrap.wrap(line, width, subsequent_indent=" " * (indent or 2), break_long_words=False, break_on_hyphens=False)


def narrowed(rows: Sequence[str], width: int) -> list[str]:
    """A table of markdown with aligned columns; the last ones, which are costs, are left out where they have no room."""
    found = [re.match(r"\|(.*)\|\s*([^|]*)$", row) for row in rows if not re.fullmatch(r"[|:\- ]+", row)]
    cells = [[cell.strip() for cell in row[1].split("|")] for row in found if row]
    notes = [row[2] for row in found if row]  # LEAKY stands behind the last bar
    count = shown = len(cells[0])
    sizes = [max(len(row[column]) for row in cells if column < len(row)) for column in range(count)]
    room = width - max(len(note) + 2 if note else 0 for note in notes)
    while shown > 1 and sum(sizes[:shown]) + 2 * (shown - 1) > room:
        shown -= 1
    lines = []
    for row, note in zip(cells, notes, strict=True):
        line = "  ".join(cell.ljust(size) for cell, size in zip(row[:shown], sizes, strict=False))
        lines.append(f"{line}  {note}".rstrip())
    return lines + ([f"({', '.join(cells[0][shown:])}: see table.md)"] if shown < count else [])
