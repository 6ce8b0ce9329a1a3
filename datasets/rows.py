"""From the bytes of a verified file to `Interactions`."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from fedbench.contract.dataset import Interactions
from fedbench.data.sources import Fetched
from fedbench.errors import DataError
from fedbench.text import number, whole


@dataclass(frozen=True)
class RowFormat:
    """How a row is written: the separator (None: white space) and each column's name and kind (int or float)."""

    separator: str | None
    columns: tuple[tuple[str, type], ...]

    def read(self, content: bytes) -> dict[str, np.ndarray]:
        """The columns of a file whose checksum is right."""
        separator = self.separator or r"\s+"
        if len(separator) == 2 and self.separator:  # pandas reads only one-byte separators fast
            content, separator = content.replace(separator.encode(), b"\t"), "\t"
        kinds = {name: "int64" if kind is int else "float64" for name, kind in self.columns}
        table = pd.read_csv(io.BytesIO(content), sep=separator, header=None, names=list(kinds), dtype=kinds, engine="c")
        return {name: table[name].to_numpy() for name in kinds}

    def check(self, content: bytes, origin: str) -> None:
        """Raise DataError at the first row that is not written so."""
        if not content.strip():
            raise DataError(f"{origin} is empty; get the file anew")
        separator = self.separator.encode() if self.separator else None
        for place, line in enumerate(content.splitlines(), start=1):
            cells = line.split(separator)
            if len(cells) != len(self.columns):
                names = ", ".join(name for name, _ in self.columns)
                raise DataError(f"{origin}:{place}: {len(cells)} columns where {len(self.columns)} belong ({names}); get the file anew")
            for cell, (name, kind) in zip(cells, self.columns, strict=True):
                if not _is_number(cell, kind):
                    text = cell[:40].decode("utf-8", "replace")
                    raise DataError(f"{origin}:{place}: {name} {text!r} is not a number; get the file anew")


@dataclass(frozen=True)
class TitleFormat:
    """How a line says what an item is called: its number, the separator, its title, and whatever follows; Latin-1, as MovieLens is."""

    separator: str

    def read(self, content: bytes) -> dict[int, str]:
        """Item -> title."""
        lines = (line.split(self.separator) for line in content.decode("latin-1").splitlines())
        return {int(cells[0]): cells[1] for cells in lines}

    def check(self, content: bytes, origin: str) -> None:
        """Raise DataError at the first line that is not written so."""
        for place, line in enumerate(content.decode("latin-1").splitlines(), start=1):
            cells = line.split(self.separator)
            if len(cells) < 2 or not _is_number(cells[0].encode("latin-1"), int):
                raise DataError(f"{origin}:{place}: a line is an item's number, {self.separator} and its title; get the file anew")

    def named(self, data: Interactions, file: Fetched | None) -> Interactions:
        """The data with its items' titles, if there is a file of them; an item that the file does not know has none."""
        if file is None:
            return data
        self.check(*file)
        titles = self.read(file.content)
        return replace(data, item_names=np.array([titles.get(int(item), "") for item in data.item_ids], dtype=object))


def assemble(
    name: str, user: np.ndarray, item: np.ndarray, rating: np.ndarray | None, time: np.ndarray | None, **facts: Any
) -> Interactions:
    """Code raw ids by first appearance and merge repeats; no rating: 1.0 everywhere, no time: zeros."""
    user_code, user_ids = pd.factorize(user)
    item_code, item_ids = pd.factorize(item)
    return assemble_coded(name, user_code, item_code, user_ids, item_ids, rating, time, **facts)


def assemble_coded(
    name: str,
    user: np.ndarray,
    item: np.ndarray,
    user_ids: np.ndarray,
    item_ids: np.ndarray,
    rating: np.ndarray | None,
    time: np.ndarray | None,
    **facts: Any,
) -> Interactions:
    """Merge repeats in rows whose ids are coded already. The rating scale is what the rows show unless `facts` say otherwise."""
    rows = latest_rows(user, item, time)
    ratings = np.ones(len(rows), np.float32) if rating is None else rating[rows].astype(np.float32)
    facts = {"explicit": rating is not None, "rating_min": float(ratings.min()), "rating_max": float(ratings.max())} | facts
    return Interactions(
        name=name,
        user=user[rows].astype(np.int32),
        item=item[rows].astype(np.int32),
        rating=ratings,
        time=np.zeros(len(rows), np.int64) if time is None else time[rows].astype(np.int64),
        user_ids=user_ids,
        item_ids=item_ids,
        has_time=time is not None,
        merged_rows=len(user) - len(rows),
        **facts,
    )


def latest_rows(user: np.ndarray, item: np.ndarray, time: np.ndarray | None) -> np.ndarray:
    """Which rows stay when a (user, item) pair repeats: the latest, at equal time the last in the file; in file order."""
    pair = user.astype(np.int64) * (int(item.max()) + 1) + item
    if len(pd.unique(pair)) == len(pair):
        return np.arange(len(pair))
    by_time = np.arange(len(pair)) if time is None else np.argsort(time, kind="stable")
    order = by_time[np.argsort(pair[by_time], kind="stable")]
    last = np.append(pair[order][1:] != pair[order][:-1], True)
    return np.sort(order[last])


def _is_number(cell: bytes, kind: type) -> bool:
    try:
        word = cell.decode("ascii")
        return math.isfinite(whole(word) if kind is int else number(word))
    except (ValueError, OverflowError):
        return False
