"""What a dataset loader returns: arrays and facts, nothing else."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Interactions:
    """One dataset: row r says that `user[r]` met `item[r]`.

    user, item   [N] int32, codes from 0 without gaps; the item code is the item's order of first appearance in the source
    rating       [N] float32 (1.0 everywhere for implicit feedback)
    time         [N] int64, seconds, or zeros when `has_time` is False
    user_ids, item_ids   what a code is called in the source: `item_ids[code]`
    held_out     [U] int32 or None: the item that the NCF paper's files hold out, by user code
    candidates   [U, 99] int32 or None: the NCF paper's own 99 items a user (duplicates as in the file)
    """

    name: str
    user: np.ndarray
    item: np.ndarray
    rating: np.ndarray
    time: np.ndarray
    user_ids: np.ndarray
    item_ids: np.ndarray
    has_time: bool
    explicit: bool
    """ratings carry a degree of liking, on the scale `rating_min` to `rating_max`"""
    rating_min: float
    rating_max: float
    licence: str
    source: str
    """where the rows came from this time: a path or an address, for the log"""
    merged_rows: int = 0
    """how many repeated (user, item) rows were merged away"""
    held_out: np.ndarray | None = None
    candidates: np.ndarray | None = None
    item_names: np.ndarray | None = None
    """[M] titles for people, by item code, where the source has them; no number depends on them"""
    notes: tuple[str, ...] = field(default=())
    """sentences the log must say about this copy of the data"""

    @property
    def users(self) -> int:
        return len(self.user_ids)

    @property
    def items(self) -> int:
        return len(self.item_ids)

    def checksum(self) -> str:
        """sha256 of the rows in canonical order: the same for every source of the same data."""
        order = np.lexsort((self.item, self.user))
        digest = hashlib.sha256()
        for column, kind in ((self.user, "<i4"), (self.item, "<i4"), (self.rating, "<f4"), (self.time, "<i8")):
            digest.update(np.ascontiguousarray(column[order], dtype=kind).tobytes())
        for extra in (self.held_out, self.candidates):
            digest.update(b"-" if extra is None else np.ascontiguousarray(extra, dtype="<i4").tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class DatasetOptions:
    """What the command line tells a loader."""

    data_dir: Path | None = None
    """look here first (`--data-dir` or FEDBENCH_DATA): <data_dir>/<dataset>/<file>"""
    cache_dir: Path | None = None
    """downloads are kept here; FEDBENCH_CACHE, else the user's cache folder, if not given"""
    ncf: bool = False
    """load the NCF paper's files (split and, where they can be had, candidates)"""
    users: int = 1000
    """synthetic: how many users"""
    items: int = 500
    """synthetic: how many items"""
    interactions: int = 40
    """synthetic: interactions a user, on average"""
    data_seed: int = 0
    """synthetic: the seed of the generator"""
