"""The files that the NCF paper published for ml-1m and pinterest (He et al., WWW 2017): ids from 0, one held-out item a user.

train.rating and test.rating have rows `user item rating time`; test.negative has `(user,item)` and then 99 items a line.
"""

from __future__ import annotations

import io
import re
from typing import Any

import numpy as np
import pandas as pd

from fedbench.contract.dataset import Interactions
from fedbench.data.sources import Fetched
from fedbench.errors import DataError

from .rows import RowFormat, assemble_coded

REPOSITORY = "https://raw.githubusercontent.com/hexiangnan/neural_collaborative_filtering/4aab159e81c44b062c091bdaed0ab54ac632371f/Data"
ROWS = RowFormat("\t", (("user", int), ("item", int), ("rating", float), ("time", int)))
NO_NEGATIVES = "the NCF paper's own 99 negatives are not here; 99 seeded ones are used"


def read_ncf(
    name: str, train: Fetched, test: Fetched, negative: Fetched | None, *, held_out: bool, timed: bool, **facts: Any
) -> Interactions:
    """Train and test rows together; with `held_out` also what the files hold out, and their candidates if they are there."""
    parts = [ROWS.read(train.content), ROWS.read(test.content)]
    rows = {column: np.concatenate([part[column] for part in parts]) for column, _ in ROWS.columns}
    # the ids count first appearances in the authors' own source, so their order is the code
    user_ids, user = np.unique(rows["user"], return_inverse=True)
    item_ids, item = np.unique(rows["item"], return_inverse=True)
    facts["source"] = train.origin
    if held_out:
        tested = parts[1]
        if not np.array_equal(np.sort(tested["user"]), user_ids):
            raise DataError(f"{test.origin}: not exactly one held-out item for every user of {train.origin}; get both files anew")
        order = np.argsort(tested["user"], kind="stable")
        held = np.searchsorted(item_ids, tested["item"][order]).astype(np.int32)
        facts["held_out"] = held
        if negative is None:
            facts["notes"] = (*facts.get("notes", ()), NO_NEGATIVES)
        else:
            facts["candidates"] = _read_candidates(negative, user_ids, item_ids, held)
    return assemble_coded(name, user, item, user_ids, item_ids, rows["rating"] if timed else None, rows["time"] if timed else None, **facts)


def check_negatives(content: bytes, origin: str) -> None:
    """Raise DataError at the first line that is not `(user,item)` and 99 items."""
    line_form = re.compile(rb"\(\d+,\d+\)(\t\d+){99}")
    for number, line in enumerate(content.splitlines(), start=1):
        if not line_form.fullmatch(line.rstrip()):
            raise DataError(f"{origin}:{number}: not `(user,item)` and 99 items, tab-separated; get the file anew")


def _read_candidates(negative: Fetched, user_ids: np.ndarray, item_ids: np.ndarray, held_out: np.ndarray) -> np.ndarray:
    """[U, 99] item codes, by user code."""
    plain = negative.content.replace(b"(", b"").replace(b")", b"").replace(b",", b"\t")
    # some copies end a line with a tab: the columns are named, so that it makes no column of its own
    table = pd.read_csv(io.BytesIO(plain), sep="\t", header=None, usecols=range(101), dtype="int64").to_numpy()
    table = table[np.argsort(table[:, 0], kind="stable")]
    items = table[:, 1:]
    codes = np.minimum(np.searchsorted(item_ids, items), len(item_ids) - 1).astype(np.int32)
    fits = np.array_equal(table[:, 0], user_ids) and np.array_equal(item_ids[codes], items)
    if not fits or not np.array_equal(codes[:, 0], held_out):
        raise DataError(f"{negative.origin}: does not belong to the train and test files; get all three anew")
    return codes[:, 1:]
