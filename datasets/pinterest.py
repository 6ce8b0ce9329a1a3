"""Pinterest: users and the images they pinned, implicit and without times, in the NCF paper's split (He et al., WWW 2017).

Only the NCF paper's files exist. A folder may hold a subset of them, the first 37,501 users.
"""

from __future__ import annotations

from fedbench.contract.dataset import DatasetOptions, Interactions
from fedbench.contract.registry import register_dataset
from fedbench.data.sources import DataFile, Web, obtain

from .ncf import REPOSITORY, ROWS, check_negatives, read_ncf

TRAIN = DataFile(
    "pinterest-20.train.rating",
    "git:99813f8ed7486c36fa0f405e3f400db5d6fed0be",
    ROWS.check,
    (Web(f"{REPOSITORY}/pinterest-20.train.rating"),),
)
TEST = DataFile(
    "pinterest-20.test.rating",
    "git:87fdbd13bced61c51f2842e2a667e83b9b0084e3",
    ROWS.check,
    (Web(f"{REPOSITORY}/pinterest-20.test.rating"),),
)
NEGATIVE = DataFile(
    "pinterest-20.test.negative",
    "git:b752ccdc14df423b9484771440ff4a73e4a4a304",
    check_negatives,
    (Web(f"{REPOSITORY}/pinterest-20.test.negative"),),
    optional=True,
)
SUBSET_TRAIN = DataFile("first37501.train.rating", "sha256:ad21bdf19ace62c7f8e935d6e1396d614b63ba43573259dc284c6c6bf496a9eb", ROWS.check)
SUBSET_TEST = DataFile("first37501.test.rating", "sha256:cd594e27b04a7eb1b7e201080ab3d4dd8e33b3a63f95e3d5fd7b26b4d3c74762", ROWS.check)


@register_dataset("pinterest", summary="55,187 users, 9,916 images, 1,500,809 pins, implicit, no times, the NCF paper's split")
def load(options: DatasetOptions) -> Interactions:
    files = obtain("pinterest", [[TRAIN, TEST, NEGATIVE], [SUBSET_TRAIN, SUBSET_TEST]], options)
    whole = TRAIN.name in files
    train, test = (TRAIN, TEST) if whole else (SUBSET_TRAIN, SUBSET_TEST)
    return read_ncf(
        "pinterest",
        files[train.name],
        files[test.name],
        files.get(NEGATIVE.name),
        held_out=True,
        timed=False,
        licence="none stated",
        notes=() if whole else ("a SUBSET of 37,501 users of the NCF paper's 55,187",),
    )
