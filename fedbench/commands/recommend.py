"""`python -m fedbench recommend`: what a trained model recommends, to one user, to all, or to somebody who was not in training."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from fedbench import files
from fedbench.datasets.csv_file import load_history
from fedbench.errors import DataError, UsageError
from fedbench.experiment import saved_model
from fedbench.experiment.saved_model import Model
from fedbench.settings.parser import Parser, run_parser, whole_number
from fedbench.simulation import new_users
from fedbench.text import say
from fedbench.text import shown as printable
from fedbench.tracking.run_log import setup_logging

EPILOG = """Ids are those of the dataset's own file. Items that the user has in the dataset are left out, whether they were in training,
validation or test; so are items that nobody trained on. Without --keep-state none a run keeps the state that is needed.

examples:
  python train.py --algo fedmf --dataset ml-100k --out runs/mine
  python -m fedbench recommend --run runs/mine --user 42
  python -m fedbench recommend --run runs/mine --all -k 20 --out top20.parquet
  python -m fedbench recommend --run runs/mine --history seen.csv

--history is for a user who was not in training. The file has a column item and, for methods that predict ratings, rating. What is private
to a user is learnt from it as in training, with all that is shared frozen, and forgotten afterwards. Methods without a shared part say so.
"""


ROUNDS_HELP = (
    f"how often a new user trains the private part on freshly drawn negatives; closed forms need none (default: {new_users.ROUNDS})"
)
MOST_NAMED = 5
"""unknown items that a message names"""

log = logging.getLogger("fedbench")


def parser() -> Parser:
    who = "(--user ID | --all --out FILE.parquet | --history FILE.csv) [flags]"
    made = run_parser("recommend", who, "Recommend items with the model that a finished run kept.", EPILOG)
    made.add_argument("--user", metavar="ID", help="a user of the dataset, as its file calls them")
    made.add_argument("--all", action="store_true", help="every user that took part; needs --out")
    made.add_argument("--history", type=Path, metavar="FILE", help="a .csv file with the items of a user who was not in training")
    made.add_argument("--rounds", type=whole_number, default=new_users.ROUNDS, metavar="N", help=ROUNDS_HELP)
    made.add_argument("-k", type=whole_number, default=10, metavar="N", help="how many items (default: 10)")
    made.add_argument(
        "--out", type=Path, metavar="FILE", help="a .parquet file to write: user, rank, item, score, and titles if there are any"
    )
    return made


def main(argv: list[str]) -> int:
    given = parser().read(argv)
    if (given.user is not None) + given.all + (given.history is not None) != 1:
        raise UsageError("say for whom: --user ID, --all or --history FILE")
    if given.rounds < 1:
        raise UsageError(f"--rounds must be at least 1, not {given.rounds}")
    if given.all and given.out is None:
        raise UsageError("--all needs --out FILE.parquet: there is a row for each user and item")
    if given.out is not None and given.out.suffix != ".parquet":
        raise UsageError(f"--out {given.out}: must end in .parquet")
    setup_logging(quiet=True, debug=given.debug)
    loaded = saved_model.load(given.run, given.data_dir, given.trust_plugin)
    if given.history is not None:
        loaded = loaded.with_history(*read_history(loaded, given.history), given.rounds)
    clients = np.array([loaded.client(given.user)]) if given.user is not None else np.arange(loaded.split.clients)
    tables = loaded.tables(clients, given.k)
    if given.out is not None:
        rows = write(tables, given.out)
        say(f"{rows:,} recommendations for {len(clients):,} users in {given.out}")
    else:
        say(shown(loaded, pd.concat(list(tables)), int(clients[0])))
    return 0


def read_history(loaded: Model, path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Numbers and ratings of a file's items; of an item that stands there twice the last counts, unknown ones are named and skipped."""
    rows = load_history(path)
    if loaded.split.protocol.ratings and "rating" not in rows:
        raise DataError(f"{path}: {loaded.config.algorithm.name} predicts ratings and learns from them; add a column rating")
    number = {str(item): place for place, item in enumerate(loaded.split.item_ids)}
    found = {
        number[item]: rating
        for item, rating in zip(rows["item"], rows.get("rating", np.ones(len(rows["item"]))), strict=True)
        if item in number
    }
    unknown = [item for item in dict.fromkeys(rows["item"]) if item not in number]
    named = ", ".join(unknown[:MOST_NAMED]) + (", ..." if len(unknown) > MOST_NAMED else "")
    if not found:
        raise DataError(f"{path}: none of its items is in {loaded.config.dataset} ({named}); use the ids of the dataset's own file")
    if unknown:
        log.warning(
            "%s: %d of %d items are not in %s and are skipped: %s", path, len(unknown), len(rows["item"]), loaded.config.dataset, named
        )
    return np.array(list(found), np.int64), np.array(list(found.values()))


def write(tables: Iterable[pd.DataFrame], out: Path) -> int:
    """One row group a block, written aside and renamed: all of it or nothing. How many rows there are."""
    rows, writer = 0, None
    try:
        with files.replacing(out) as file:
            for table in tables:
                block = pa.Table.from_pandas(table, preserve_index=False)
                writer = writer or pq.ParquetWriter(file, block.schema)
                writer.write_table(block)
                rows += len(table)
            assert writer is not None
            writer.close()
    except OSError as error:
        raise UsageError(f"--out {out} cannot be written ({error.strerror or error}); choose another place") from None
    return rows


def shown(loaded: Model, found: pd.DataFrame, client: int) -> str:
    """A table for people, and what was left out of it."""
    split, made = loaded.split, loaded.config
    met, unknown = int(np.diff(split.seen_ptr)[client]), int((~loaded.known).sum())
    new = split.user_ids.tolist() == [saved_model.NEW_USER]
    who, kind = ("a new user", "in the file") if new else (f"user {split.user_ids[client]}", "training, validation and test")
    head = f"{made.algo} on {made.dataset}, round {loaded.round}: for {who}, {len(found)} of {split.items:,} items"
    left_out = f"left out: {met:,} items that this user has ({kind}), {unknown:,} that nobody trained on"
    rows = found.drop(columns="user").assign(score=found["score"].map("{:.4f}".format)).map(printable)
    widths = {name: max([len(name), *rows[name].str.len()]) for name in rows}
    right = {name: ">" if name in ("rank", "score") else "<" for name in rows}
    lines = [rows.columns.to_list(), *rows.to_numpy().tolist()]
    table = ["  ".join(f"{cell:{right[name]}{widths[name]}}" for name, cell in zip(rows, line, strict=True)).rstrip() for line in lines]
    return "\n".join([head, left_out, "", *table])
