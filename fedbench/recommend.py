"""`python -m fedbench recommend`: what a trained model recommends, to one user or to all."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from fedbench import config, model, registry
from fedbench.errors import UsageError
from fedbench.model import Model
from fedbench.tracking import setup_logging

EPILOG = """Ids are those of the dataset's own file. Items that the user has in the dataset are left out, whether they were in training,
validation or test; so are items that nobody trained on. Without --keep-state none a run keeps the state that is needed.

examples:
  python train.py --algo fedmf --dataset ml-100k --out runs/mine
  python -m fedbench recommend --run runs/mine --user 42
  python -m fedbench recommend --run runs/mine --all -k 20 --out top20.parquet
"""


def parser() -> config.Parser:
    made = config.Parser(
        prog="python -m fedbench recommend",
        usage="python -m fedbench recommend --run DIR (--user ID | --all --out FILE.parquet) [flags]",
        description="Recommend items with the model that a finished run kept.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--run", type=Path, metavar="DIR", help="folder of a finished run")
    made.add_argument("--user", metavar="ID", help="a user of the dataset, as its file calls them")
    made.add_argument("--all", action="store_true", help="every user that took part; needs --out")
    made.add_argument("-k", type=int, default=10, metavar="N", help="how many items (default: 10)")
    made.add_argument(
        "--out", type=Path, metavar="FILE", help="a .parquet file to write: user, rank, item, score, and titles if there are any"
    )
    made.add_argument("--data-dir", type=Path, metavar="DIR", help="where the dataset is now (default: as in the run)")
    made.add_argument("--debug", action="store_true", help="show tracebacks")
    return made


def main(argv: list[str]) -> int:
    given = parser().read(argv)
    if given.run is None:
        raise UsageError("--run is missing: give the folder of a finished run")
    if (given.user is not None) + given.all != 1:
        raise UsageError("say for whom: --user ID or --all")
    if given.all and given.out is None:
        raise UsageError("--all needs --out FILE.parquet: there is a row for each user and item")
    if given.out is not None and given.out.suffix != ".parquet":
        raise UsageError(f"--out {given.out}: must end in .parquet")
    setup_logging(quiet=True, debug=given.debug)
    loaded = model.load(given.run, given.data_dir)
    clients = np.arange(loaded.split.clients) if given.all else np.array([client_of(loaded, given.user)])
    tables = loaded.tables(clients, given.k)
    if given.out is not None:
        rows = write(tables, given.out)
        print(f"{rows:,} recommendations for {len(clients):,} users in {given.out}")
    else:
        print(shown(loaded, pd.concat(list(tables)), int(clients[0])))
    return 0


def client_of(loaded: Model, user: str) -> int:
    """The client that a user is, or what is wrong with the id."""
    if user in loaded.number:
        return loaded.number[user]
    near = registry.nearest(user, loaded.number)
    hint = f"did you mean {near[0]}?" if near else f"ids look like {', '.join(list(loaded.number)[:3])}"
    least = loaded.split.protocol.min_interactions
    raise UsageError(
        f"--user {user}: not among the {loaded.split.clients:,} users of {loaded.config.dataset} that took part "
        f"(those with {least} interactions or more); {hint}"
    )


def write(tables: Iterable[pd.DataFrame], out: Path) -> int:
    """One row group a block, written aside and renamed: all of it or nothing. How many rows there are."""
    part, rows, writer = out.with_name(out.name + ".part"), 0, None
    try:
        for table in tables:
            block = pa.Table.from_pandas(table, preserve_index=False)
            writer = writer or pq.ParquetWriter(part, block.schema)
            writer.write_table(block)
            rows += len(table)
        assert writer is not None
        writer.close()
        os.replace(part, out)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UsageError(f"--out {out} cannot be written ({error.strerror or error}); choose another place") from None
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return rows


def shown(loaded: Model, found: pd.DataFrame, client: int) -> str:
    """A table for people, and what was left out of it."""
    split, made = loaded.split, loaded.config
    met, unknown = int(np.diff(split.seen_ptr)[client]), int((~loaded.known).sum())
    head = f"{made.algo} on {made.dataset}, round {loaded.round}: for user {split.user_ids[client]}, {len(found)} of {split.items:,} items"
    left_out = f"left out: {met:,} items that this user has (training, validation and test), {unknown:,} that nobody trained on"
    rows = found.drop(columns="user").assign(score=found["score"].map("{:.4f}".format)).astype(str)
    widths = {name: max(len(name), int(rows[name].str.len().max())) for name in rows}
    right = {name: ">" if name in ("rank", "score") else "<" for name in rows}
    lines = [rows.columns.to_list(), *rows.to_numpy().tolist()]
    table = ["  ".join(f"{cell:{right[name]}{widths[name]}}" for name, cell in zip(rows, line, strict=True)).rstrip() for line in lines]
    return "\n".join([head, left_out, "", *table])
