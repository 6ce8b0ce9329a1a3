"""The table of `bench --all` on a page of the documentation, written between two marked lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedbench import files
from fedbench.commands.bench import PARTS, Figures, bounded, share
from fedbench.errors import UsageError

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
COLUMNS = ("clients", "round", *PARTS, "× loop", "limit", "MB")


def markdown(written: dict[str, Any]) -> str:
    """What `bench --json` wrote, as a table with a line above it that says where and with what it was measured."""
    where, figures = written["environment"], written["figures"]
    packages = ", ".join(f"{name} {where['packages'][name]}" for name in ("torch", "numpy", "numba") if where["packages"].get(name))
    kind = "CPU seconds" if all(one["threads"] == 1 for one in figures) else "seconds"
    machine = f"{where['processor']}, {where['cpu_count']} cores, {where['platform']}"
    said = f"Measured on {machine}; Python {where['python']}, {packages}. All times are {kind}."
    head = ["| algorithm | dataset | " + " | ".join(COLUMNS) + " | |", "|---|---|" + "---:|" * len(COLUMNS) + "---|"]
    return "\n".join([said, "", *head, *(row(one) for one in figures)])


def row(figures: Figures) -> str:
    """One algorithm on one dataset; n/a where something does not apply."""
    part = share(figures)
    cells = [figures["algo"], figures["dataset"], f"{figures['clients']:,}", f"{figures['round']:.4f}"]
    cells += [f"{figures['parts'][name]:.4f}" for name in PARTS]
    cells += [f"{figures['ratio']:.1f}" if "ratio" in figures else "n/a", "n/a" if part is None else f"{part:.0%}"]
    return "| " + " | ".join([*cells, f"{figures['peak_mb']:,.0f}", bounded(figures)]) + " |"


def check_page(page: Path) -> tuple[str, str]:
    """What stands before and after the table on the page."""
    try:
        text = files.read_text(page)
    except (OSError, ValueError):
        text = ""
    before, found, rest = text.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not (found and ended):
        raise UsageError(f"--page {page}: there is no place for the table; give a page with the lines {BEGIN} and {END}")
    return before, after


def write_page(page: Path, written: dict[str, Any]) -> None:
    """Put the table in the place of the one that is there."""
    before, after = check_page(page)
    files.write_text(page, f"{before}{BEGIN}\n{markdown(written)}\n{END}{after}")
