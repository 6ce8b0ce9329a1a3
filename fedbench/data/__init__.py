"""Where data comes from and how it is split."""

from typing import Any


def __getattr__(name: str) -> Any:
    """`from fedbench.data import Interactions`, as older plug-ins say it: what a dataset is stands in fedbench/contract/dataset.py."""
    if name in ("DatasetOptions", "Interactions"):
        from fedbench.contract import dataset

        return getattr(dataset, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
