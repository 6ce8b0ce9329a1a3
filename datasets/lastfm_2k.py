"""Last.fm 2K: who tagged which artist and when (HetRec 2011, Cantador et al.); implicit, one row a (user, artist) pair.

The federated papers use the 1,600 of 1,892 users with at least 5 tag assignments. The third column is the id of a tag, not a
rating, and is not read as one; a pair's time is its latest tag.
"""

from __future__ import annotations

import io

import pandas as pd

from fedbench.contract.dataset import DatasetOptions, Interactions
from fedbench.contract.registry import register_dataset
from fedbench.data.sources import DataFile, Package, Web, obtain

from .rows import RowFormat, assemble

MIN_ASSIGNMENTS = 5
COLUMNS = ["user", "artist", "tag", "milliseconds"]
ROWS = RowFormat(",", tuple((column, int) for column in COLUMNS))


def from_official(content: bytes) -> bytes:
    """ratings.dat from user_taggedartists-timestamps.dat: tab-separated, with a header."""
    return _active_users(pd.read_csv(io.BytesIO(content), sep="\t", header=0, names=COLUMNS, dtype="int64"))


def from_parquet(content: bytes) -> bytes:
    """ratings.dat from the package's table, where artist ids are shifted by 10,000."""
    table = pd.read_parquet(io.BytesIO(content), columns=["sourceNodeId", "targetNodeId", "tagID", "timestamp"])
    table.columns = COLUMNS
    return _active_users(table.assign(artist=table["artist"] - 10_000))


def _active_users(table: pd.DataFrame) -> bytes:
    kept = table[table.groupby("user")["user"].transform("size") >= MIN_ASSIGNMENTS]
    return kept.to_csv(header=False, index=False, lineterminator="\r\n").encode()


RATINGS = DataFile(
    "ratings.dat",
    "sha256:bb52112eff195b50e6386b5cbc634d6dc737feb3ad62aff74f6e7552952e61d9",
    ROWS.check,
    (
        Web(
            "https://files.grouplens.org/datasets/hetrec2011/hetrec2011-lastfm-2k.zip",
            "md5:296d61afe4e8632b173fc2dd3be20ce2",
            "user_taggedartists-timestamps.dat",
            from_official,
        ),
        Package(
            "graphdatascience==2.2",
            "1e978c3bf5c2cece4282338d224d1efcffa8681733113d576c2205c4d06f549b",
            "graphdatascience/resources/lastfm/user_tag_artist_rels.parquet.gzip",
            from_parquet,
        ),
    ),
)


@register_dataset("lastfm-2k", summary="1,600 users, 12,454 artists, 70,508 tagged pairs, implicit, with times")
def load(options: DatasetOptions) -> Interactions:
    fetched = obtain("lastfm-2k", [[RATINGS]], options)[RATINGS.name]
    rows = ROWS.read(fetched.content)
    return assemble(
        "lastfm-2k",
        rows["user"],
        rows["artist"],
        None,
        rows["milliseconds"] // 1000,
        licence="HetRec 2011: non-commercial use",
        source=fetched.origin,
        notes=("users with at least 5 tag assignments; tag ids are not read as ratings",),
    )
