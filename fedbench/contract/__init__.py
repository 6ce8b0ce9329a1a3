"""The contract: all that an algorithm or a dataset needs from fedbench, beside the parts in fedbench.parts.

from fedbench.contract import OWN, SHARED, Algorithm, Answer, Batch, Draw, Phase, Tensors, Uploads, World, bce, register
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedbench.contract.algorithm import (
        OWN,
        SHARED,
        Algorithm,
        Answer,
        Batch,
        Context,
        Extra,
        Phase,
        Pull,
        Stage,
        Tensors,
        World,
        bce,
    )
    from fedbench.contract.central import Central, Pool
    from fedbench.contract.dataset import DatasetOptions, Interactions
    from fedbench.contract.mixtures import SparseWeights
    from fedbench.contract.randomness import Draw
    from fedbench.contract.registry import register, register_dataset
    from fedbench.contract.search import tuned, untuned
    from fedbench.contract.uploads import Rows, Tables, Uploads
    from fedbench.errors import UsageError

_PLACES = {
    **dict.fromkeys(("OWN", "SHARED", "Algorithm", "Answer", "Batch", "Context", "Extra"), "fedbench.contract.algorithm"),
    **dict.fromkeys(("Phase", "Pull", "Stage", "Tensors", "World", "bce"), "fedbench.contract.algorithm"),
    **dict.fromkeys(("Central", "Pool"), "fedbench.contract.central"),
    **dict.fromkeys(("DatasetOptions", "Interactions"), "fedbench.contract.dataset"),
    **dict.fromkeys(("register", "register_dataset"), "fedbench.contract.registry"),
    **dict.fromkeys(("tuned", "untuned"), "fedbench.contract.search"),
    **dict.fromkeys(("Rows", "Tables", "Uploads"), "fedbench.contract.uploads"),
    "Draw": "fedbench.contract.randomness",
    "SparseWeights": "fedbench.contract.mixtures",
    "UsageError": "fedbench.errors",
}

__all__ = [
    "OWN",
    "SHARED",
    "Algorithm",
    "Answer",
    "Batch",
    "Central",
    "Context",
    "DatasetOptions",
    "Draw",
    "Extra",
    "Interactions",
    "Phase",
    "Pool",
    "Pull",
    "Rows",
    "SparseWeights",
    "Stage",
    "Tables",
    "Tensors",
    "Uploads",
    "UsageError",
    "World",
    "bce",
    "register",
    "register_dataset",
    "tuned",
    "untuned",
]


def __getattr__(name: str) -> Any:
    """Names are looked up when they are asked for: a command that needs no tensors should not wait for torch."""
    if name in _PLACES:
        return getattr(importlib.import_module(_PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
