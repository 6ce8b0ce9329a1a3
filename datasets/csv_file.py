"""A file of your own: columns user,item[,rating][,time], comma-separated UTF-8, with a header or without.

Ids are any text. Without a rating column the feedback is implicit; time is in whole seconds.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as arrow_csv

from datasets.rows import assemble_coded
from fedbench.data import DatasetOptions, Interactions
from fedbench.errors import DataError


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


def load_csv(path: Path, options: DatasetOptions) -> Interactions:
    """Read the file at `path`; nothing in `options` matters to it."""
    content = _read(path, INTERACTIONS)
    names, first_row = _columns(content, path, INTERACTIONS)
    columns = _read_fast(content, names, first_row) or _read_exactly(content, names, first_row, path)
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
    )


def load_history(path: Path) -> dict[str, np.ndarray]:
    """What one user has met: `item` as text and, if the file has it, `rating`."""
    content = _read(path, HISTORY)
    return _read_exactly(content, *_columns(content, path, HISTORY), path)


def _read(path: Path, form: Form) -> bytes:
    try:
        if path.is_dir():
            raise DataError(f"{path} is a folder; give the path of a CSV file in it")
        if path.exists() and not path.is_file():
            raise DataError(f"{path} is not a regular file; give the path of a CSV file")
        content = path.read_bytes()
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


def _columns(content: bytes, path: Path, form: Form) -> tuple[tuple[str, ...], int]:
    """The columns in the file's order, and the line on which to look for the first row of data."""
    line, cells = next(_rows(content, path))
    names = tuple(cell.strip().lower() for cell in cells)
    if not set(form.columns[: form.needed]) <= set(names):
        if not form.needed <= len(cells) <= len(form.columns):
            raise DataError(f"{path}:{line}: {len(cells)} columns; rows are {form}")
        return form.columns[: len(cells)], line
    for name in names:
        if name not in form.columns:
            raise DataError(f"{path}:{line}: column {_short(name)} is not known; leave only {form}")
        if names.count(name) > 1:
            raise DataError(f"{path}:{line}: column {name!r} stands there twice; leave one")
    return names, line + 1


def _read_fast(content: bytes, names: tuple[str, ...], first_row: int) -> dict[str, np.ndarray] | None:
    """The columns, or None if anything is out of the ordinary: then the exact reader decides, and says where."""
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
        table = arrow_csv.read_csv(
            pa.BufferReader(memoryview(content)[start:]),
            read_options=arrow_csv.ReadOptions(column_names=list(names), use_threads=False),
            parse_options=arrow_csv.ParseOptions(quote_char=False),
            convert_options=arrow_csv.ConvertOptions(
                column_types={name: kinds[name] for name in names}, null_values=[], strings_can_be_null=False
            ),
        )
    except (pa.ArrowException, ValueError):
        return None
    if table.num_rows == 0 or any(column.null_count for column in table.columns):
        return None
    for name in ("user", "item"):
        length = pc.min_max(pc.utf8_length(table[name])).as_py()
        if length["min"] == 0 or length["max"] > LONGEST_ID:
            return None
    columns = {name: table[name].to_numpy() for name in names}
    if "rating" in columns and not (np.abs(columns["rating"]) <= LARGEST_RATING).all():
        return None
    return columns


def _read_exactly(content: bytes, names: tuple[str, ...], first_row: int, path: Path) -> dict[str, np.ndarray]:
    """The columns, row by row, with an error that names the line."""
    cells: dict[str, list] = {name: [] for name in names}
    for line, row in _rows(content, path):
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


def _rows(content: bytes, path: Path) -> Iterator[tuple[int, list[str]]]:
    """Each row that is not blank, with the number of the line on which it starts."""
    reader = csv.reader(io.StringIO(content.decode(), newline=""), strict=True)
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
        number = float(cell)
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
        return int(cell)
    except ValueError:
        number = float(cell)
        return math.floor(number) if math.isfinite(number) else 0


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
