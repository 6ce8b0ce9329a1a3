"""A file of your own: columns user,item[,rating][,time] in UTF-8, with a header or without.

Cells are separated by commas, tabs, semicolons or `::`; a header may use the usual other names, such as MovieLens' userId,movieId.
Ids are any text. Without a rating column the feedback is implicit; time is in whole seconds.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as arrow_csv

from fedbench import files, text
from fedbench.contract.dataset import DatasetOptions, Interactions
from fedbench.errors import DataError

from .rows import assemble_coded


class Form(NamedTuple):
    """The columns that a file may have, in the order of a file without a header, and how many of them it must have."""

    columns: tuple[str, ...]
    needed: int

    def __str__(self) -> str:
        return ",".join(self.columns[: self.needed]) + "".join(f"[,{name}]" for name in self.columns[self.needed :])


INTERACTIONS = Form(("user", "item", "rating", "time"), 2)
HISTORY = Form(("item", "rating"), 1)
LONGEST_ID = 1000
"""characters; a longer one is a sign of a broken file"""
LARGEST_RATING = float(np.finfo(np.float32).max)
SEPARATORS = (",", "\t", ";", "::")
"""tried in this order"""
LOOKED_AT = 20
"""rows that say whether another separator than the comma would do too"""
NAMES = {
    "user": ("user", "users", "userid", "uid", "reviewerid", "customer", "customerid"),
    "item": (
        *("item", "items", "itemid", "iid", "movie", "movieid", "film", "filmid", "product", "productid", "asin"),
        *("book", "bookid", "isbn", "song", "songid", "track", "trackid", "artist", "artistid", "business", "businessid"),
    ),
    "rating": ("rating", "ratings", "stars", "score", "overall"),
    "time": ("time", "timestamp", "ts", "unixtime", "unixreviewtime"),
}
"""what a header may call a column; capitals, blanks, hyphens and underscores do not matter"""


class Table(NamedTuple):
    """A file's text, and how it is written."""

    content: bytes
    separator: str
    columns: tuple[str, ...]
    """ours, in the file's order"""
    first_row: int
    """the line on which to look for the first row of data"""
    said: str = ""
    """which column was taken for what, where that is not plain"""


def load_csv(path: Path, options: DatasetOptions) -> Interactions:
    """Read the file at `path`; nothing in `options` matters to it."""
    table = _table(_read(path, INTERACTIONS), path, INTERACTIONS)
    columns = _read_fast(table) or _read_exactly(table, path)
    coded = {name: pd.factorize(columns[name]) for name in ("user", "item")}
    rating = columns.get("rating")
    explicit = rating is not None and bool((rating != rating[0]).any())
    return assemble_coded(
        path.stem,
        coded["user"][0],
        coded["item"][0],
        np.asarray(coded["user"][1], dtype=object),
        np.asarray(coded["item"][1], dtype=object),
        rating if explicit else None,
        columns.get("time"),
        licence="not stated in the file",
        source=str(path),
        notes=(table.said,) if table.said else (),
    )


def load_history(path: Path) -> dict[str, np.ndarray]:
    """What one user has met: `item` as text and, if the file has it, `rating`."""
    return _read_exactly(_table(_read(path, HISTORY), path, HISTORY), path)


def _read(path: Path, form: Form) -> bytes:
    try:
        if path.is_dir():
            raise DataError(f"{path} is a folder; give the path of a CSV file in it")
        content = files.read_bytes(path)
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file; give the path of a CSV file with columns {form}") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise DataError(f"{path}:{line}: byte 0x{content[error.start]:02x} is not UTF-8; save the file as UTF-8 text") from error
    if not text.strip():
        raise DataError(f"{path} is empty; rows are {form}")
    return text.encode()


def _table(content: bytes, path: Path, form: Form) -> Table:
    """How the file is written: by its header if it has one, else the first separator that gives a row the right number of cells."""
    first = content.lstrip().partition(b"\n")[0]
    separators = [separator for separator in SEPARATORS if separator.encode() in first] or [","]
    for separator in separators:
        found = _header(content, separator, path, form)
        if found is not None:
            return found
    for separator in (",", *separators):
        text, mark = _single(content, separator, path)
        line, cells = next(_rows(text, mark, path))
        if form.needed <= len(cells) <= len(form.columns) and (form.needed > 1 or separator == "," or len(cells) > 1):
            if separator == "," and form.needed > 1:
                _refuse_doubt(content, len(cells), path, form)
            _refuse_half_header(cells, f"{path}:{line}", form)
            return _said(Table(text, mark, form.columns[: len(cells)], line), separator, ())
    line, cells = next(_rows(content, ",", path))
    raise DataError(f"{path}:{line}: {len(cells)} columns; rows are {form}")


def _header(content: bytes, separator: str, path: Path, form: Form) -> Table | None:
    """The file read with this separator, if its first line names the columns that it must have."""
    try:
        text, mark = _single(content, separator, path)
        line, cells = next(_rows(text, mark, path))
    except DataError:  # quoted for another separator
        return None
    names = tuple(_column(cell, form) for cell in cells)
    if not set(form.columns[: form.needed]) <= set(names):
        return None
    for cell, name in zip(cells, names, strict=True):
        if name is None:
            raise DataError(f"{path}:{line}: column {_short(cell.strip().lower())} is not known; leave only {form}")
        if names.count(name) > 1:
            raise DataError(f"{path}:{line}: column {name!r} stands there twice; leave one")
    return _said(Table(text, mark, tuple(name for name in names if name), line + 1), separator, cells)


def _column(cell: str, form: Form) -> str | None:
    """Our name of the column that a header calls so."""
    word = re.sub(r"[\s_-]", "", cell.lower())
    return next((name for name in form.columns if word in NAMES[name]), None)


def _single(content: bytes, separator: str, path: Path) -> tuple[bytes, str]:
    """The text with a separator of one character: readers know no longer ones."""
    if len(separator) == 1:
        return content, separator
    if b"\t" in content:
        line = content.partition(b"\t")[0].count(b"\n") + 1
        raise DataError(f"{path}:{line}: a tab in a file whose cells are separated by {separator}; use one separator")
    return content.replace(separator.encode(), b"\t"), "\t"


def _refuse_doubt(content: bytes, cells: int, path: Path, form: Form) -> None:
    """`1;2;3,5` is two cells by its comma and three by its semicolons: where every row is so, only a header can tell."""
    for separator in SEPARATORS[1:3]:
        rows = [row for row in itertools.islice(io.StringIO(content.decode()), LOOKED_AT) if row.strip()]
        counts = {row.count(separator) + 1 for row in rows}
        if '"' not in "".join(rows) and len(counts) == 1 and cells < (count := counts.pop()) <= len(form.columns):
            shown = {"\t": "tab", ";": ";"}[separator]
            raise DataError(
                f"{path}:1: {cells} columns by the comma, {count} by the {shown}; name them in a first line such as user{separator}item, "
                "and write numbers with a point"
            )


def _refuse_half_header(cells: list[str], where: str, form: Form) -> None:
    """A first line that names two columns and not all that there must be is a header with an unknown name, not a row."""
    found = [name for cell in cells if (name := _column(cell, form))]
    missing = [name for name in form.columns[: form.needed] if name not in found]
    if len(found) > 1 and missing:
        raise DataError(f"{where}: the header names {' and '.join(found)} and no {missing[0]}; call its column {missing[0]}")


def _said(table: Table, separator: str, cells: Sequence[str]) -> Table:
    """The table with a note of what was taken for what, where that is not plain."""
    pairs = [(cell.strip(), name) for cell, name in zip(cells, table.columns, strict=False)]
    if separator == "," and all(cell.lower() == name for cell, name in pairs):
        return table
    taken = [name if cell.lower() == name else f"{cell} ({name})" for cell, name in pairs] or list(table.columns)
    shown = {",": "commas", "\t": "tabs", ";": "semicolons"}.get(separator, separator)
    return table._replace(said=f"columns {', '.join(taken)}, separated by {shown}")


def _read_fast(table: Table) -> dict[str, np.ndarray] | None:
    """The columns, or None if anything is out of the ordinary: then the exact reader decides, and says where."""
    content, separator, names, first_row, _ = table
    # Arrow reads 0x10 as a number
    if any(mark in content for mark in (b'"', b"\0", b"0x", b"0X")) or content.count(b"\r") != content.count(b"\r\n"):
        return None
    start = 0
    for _ in range(first_row - 1):
        start = content.find(b"\n", start) + 1
        if start == 0:
            return None
    kinds = {"user": pa.large_string(), "item": pa.large_string(), "rating": pa.float64(), "time": pa.int64()}
    try:
        read = arrow_csv.read_csv(
            pa.BufferReader(memoryview(content)[start:]),
            read_options=arrow_csv.ReadOptions(column_names=list(names), use_threads=False),
            parse_options=arrow_csv.ParseOptions(delimiter=separator, quote_char=False),
            convert_options=arrow_csv.ConvertOptions(
                column_types={name: kinds[name] for name in names}, null_values=[], strings_can_be_null=False
            ),
        )
    except (pa.ArrowException, ValueError):
        return None
    if read.num_rows == 0 or any(column.null_count for column in read.columns):
        return None
    for name in ("user", "item"):
        length = pc.min_max(pc.utf8_length(read[name])).as_py()
        if length["min"] == 0 or length["max"] > LONGEST_ID:
            return None
    columns = {name: read[name].to_numpy() for name in names}
    if "rating" in columns and not (np.abs(columns["rating"]) <= LARGEST_RATING).all():
        return None
    return columns


def _read_exactly(table: Table, path: Path) -> dict[str, np.ndarray]:
    """The columns, row by row, with an error that names the line."""
    content, separator, names, first_row, _ = table
    cells: dict[str, list] = {name: [] for name in names}
    for line, row in _rows(content, separator, path):
        if line < first_row:
            continue
        if len(row) != len(names):
            raise DataError(f"{path}:{line}: {len(row)} columns where {len(names)} belong ({','.join(names)})")
        for name, cell in zip(names, row, strict=True):
            cells[name].append(_value(name, cell, f"{path}:{line}"))
    if not cells["item"]:
        raise DataError(f"{path} has a header and no rows; rows are {','.join(names)}")
    kinds: dict[str, type] = {"user": object, "item": object, "rating": np.float64, "time": np.int64}
    return {name: np.array(values, dtype=kinds[name]) for name, values in cells.items()}


def _rows(content: bytes, separator: str, path: Path) -> Iterator[tuple[int, list[str]]]:
    """Each row that is not blank, with the number of the line on which it starts."""
    reader = csv.reader(io.StringIO(content.decode(), newline=""), delimiter=separator, strict=True)
    while True:
        line = reader.line_num + 1
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise DataError(f'{path}:{line}: {error}; quote a cell as "..." or not at all') from error
        if row:
            yield line, row


def _value(name: str, cell: str, where: str) -> str | float | int:
    if name in ("user", "item"):
        if not cell:
            raise DataError(f"{where}: {name} is empty; every row needs one")
        if len(cell) > LONGEST_ID:
            raise DataError(f"{where}: {name} has {len(cell)} characters; an id has at most {LONGEST_ID}")
        return cell
    needs = "ratings are numbers such as 4.5" if name == "rating" else "times are whole seconds such as 978300760"
    hint = f"{needs} (a header line must name the columns)" if where.endswith(":1") else needs
    try:
        number = text.number(cell)
        exact = number if name == "rating" else _whole(cell)
    except (ValueError, OverflowError) as error:
        raise DataError(f"{where}: {name} {_short(cell)} is not a number; {hint}") from error
    if not math.isfinite(number) or (name == "rating" and abs(number) > LARGEST_RATING):
        raise DataError(f"{where}: {name} {_short(cell)} is not a finite number; {hint}")
    if name == "time" and not -(2**63) <= exact < 2**63:
        raise DataError(f"{where}: time {_short(cell)} is out of range; {hint}")
    return exact


def _whole(cell: str) -> int:
    """Seconds; a fraction is cut off."""
    try:
        return text.whole(cell)
    except ValueError:
        number = text.number(cell)
        return math.floor(number) if math.isfinite(number) else 0


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
