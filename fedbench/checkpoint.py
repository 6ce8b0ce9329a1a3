"""A run's state on disk: safetensors and JSON, written aside and renamed, so that a reader finds the old state or the new one."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from fedbench.errors import FedbenchError

PLACES = ("checkpoint", "checkpoint.old")
"""where a state is looked for, in order; the second only remains if a save was cut short"""


def save(folder: Path, facts: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Replace folder/checkpoint by this state."""
    fresh, place, old = folder / "checkpoint.new", folder / "checkpoint", folder / "checkpoint.old"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    save_file(_apart(tensors), fresh / "state.safetensors")
    (fresh / "state.json").write_text(json.dumps(facts))
    for file in fresh.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
    if place.exists():
        shutil.rmtree(old, ignore_errors=True)
        place.rename(old)
    fresh.rename(place)
    shutil.rmtree(old, ignore_errors=True)


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous, and no two in the same memory: the format refuses those."""
    out: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, tensor in tensors.items():
        whole = tensor.contiguous()
        place = whole.untyped_storage().data_ptr()
        out[name] = whole.clone() if place in taken else whole
        taken.add(place)
    return out


def load(folder: Path, device: str) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """The saved state, or None if there is none."""
    for place in (folder / name for name in PLACES):
        if (place / "state.json").exists():
            try:
                return json.loads((place / "state.json").read_text()), load_file(place / "state.safetensors", device=device)
            except Exception as error:
                raise FedbenchError(f"{place} cannot be read ({error}); start again with another --out") from None
    return None


def facts(folder: Path) -> dict[str, Any]:
    """The JSON part of the saved state."""
    for name in PLACES:
        if (folder / name / "state.json").exists():
            try:
                return dict(json.loads((folder / name / "state.json").read_text()))
            except (ValueError, TypeError, OSError) as error:
                raise FedbenchError(f"{folder / name} cannot be read ({error}); start again with another --out") from None
    return {}


def exists(folder: Path) -> bool:
    """True if `load` would find a state."""
    return any((folder / name / "state.json").exists() for name in PLACES)
