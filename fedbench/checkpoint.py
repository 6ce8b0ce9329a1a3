"""A run's state on disk: safetensors and JSON, nothing that is unpickled.

`checkpoint/round-12.safetensors` holds the tensors after round 12, `checkpoint/round-12.json` the facts and the checksum of both.
The tensors come first and the JSON last, each written aside, synced and renamed: a state without its JSON is none, and a reader
finds a state whole or not at all. The last two are kept, so that a damaged one can be done without.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedbench.errors import FedbenchError, UsageError

FOLDER = "checkpoint"
MODEL = "model"
"""the state that a finished run keeps"""
KEPT = 2
AUTO_SECONDS, AUTO_SHARE = 60.0, 0.02
"""--checkpoint-every auto: this often, or less often where saving would take more than this share of the run"""

log = logging.getLogger("fedbench")


@dataclass(frozen=True)
class State:
    """A state found on disk whose checksums are right."""

    path: Path
    """of the tensors"""
    facts: dict[str, Any]

    def tensors(self, device: str) -> dict[str, Tensor]:
        return load_file(self.path, device=device)


@dataclass
class Cadence:
    """When the next checkpoint is due: after so many rounds or seconds."""

    rounds: int | None = None
    seconds: float | None = None
    share: float = 1.0
    """saving may take this share of the time"""

    def __post_init__(self) -> None:
        self._next = time.monotonic() + (self.seconds or 0)

    @staticmethod
    def of(text: str) -> Cadence:
        """`10` (rounds), `60s` (also m and h), `never` or `auto`."""
        if text == "auto":
            return Cadence(seconds=AUTO_SECONDS, share=AUTO_SHARE)
        if text == "never":
            return Cadence()
        match = re.fullmatch(r"(\d{1,9})([smh]?)", text, re.ASCII)
        if match is None or int(match[1]) == 0:
            raise UsageError(f"--checkpoint-every must be a number of rounds such as 10, a time such as 60s, auto or never, not {text!r}")
        number = int(match[1])
        return Cadence(seconds=number * {"s": 1, "m": 60, "h": 3600}[match[2]]) if match[2] else Cadence(rounds=number)

    def due(self, round_: int) -> bool:
        if self.rounds is not None:
            return round_ % self.rounds == 0
        return self.seconds is not None and time.monotonic() >= self._next

    def saved(self, took: float) -> None:
        """A checkpoint that took so many seconds is done."""
        self._next = time.monotonic() + max(self.seconds or 0, took / self.share)


def save(out: Path, name: str, facts: dict[str, Any], tensors: dict[str, Tensor]) -> int:
    """Write the state `name` of the run in `out`; returns its size in bytes. The states before stay as they are."""
    folder = out / FOLDER
    try:
        folder.mkdir(exist_ok=True)
        part, place = folder / f"{name}.safetensors.part", folder / f"{name}.safetensors"
        save_file(_apart(tensors), part)
        _sync(part)
        digest = _file_digest(part)
        (folder / f"{name}.json").unlink(missing_ok=True)  # it vouches for the tensors that are replaced now
        part.replace(place)
        vouched = {"facts": facts, "tensors": digest}
        part = folder / f"{name}.json.part"
        part.write_text(json.dumps({**vouched, "sha256": _digest(vouched)}), encoding="utf-8")
        _sync(part)
        part.replace(folder / f"{name}.json")
        _sync(folder)
        return place.stat().st_size
    except (OSError, SafetensorError) as error:
        for leftover in folder.glob("*.part"):
            leftover.unlink()
        before = rounds(out)
        intact = f"the checkpoint of round {before[0]} is intact" if before else "there is none before it"
        raise FedbenchError(
            f"the checkpoint {folder / name} cannot be written ({_why(error)}); {intact}: make room and go on with --resume {out}"
        ) from error


def save_round(out: Path, round_: int, facts: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write the state after a round, with the metrics up to it on disk before, and keep the last two."""
    if (out / "metrics.jsonl").exists():
        _sync(out / "metrics.jsonl")
    save(out, f"round-{round_}", facts, tensors)
    prune(out, KEPT)


def prune(out: Path, keep: int) -> None:
    """Remove all rounds' states but the newest `keep`, and what writes that were cut short left behind."""
    stays = {f"round-{round_}" for round_ in rounds(out)[:keep]} | {MODEL}
    files = list((out / FOLDER).glob("*"))
    gone = [file for file in files if file.suffix == ".part" or file.stem not in stays]
    for file in gone:
        file.unlink()
    if files and len(gone) == len(files):
        (out / FOLDER).rmdir()


def rounds(out: Path) -> list[int]:
    """Rounds whose state is there, whole or not, newest first."""
    found = [re.fullmatch(r"round-(\d+)\.json", path.name) for path in (out / FOLDER).glob("round-*.json")]
    return sorted((int(match[1]) for match in found if match), reverse=True)


def newest(out: Path) -> State | None:
    """The newest state that is whole; those before it that are not are named in the log."""
    for round_ in rounds(out):
        try:
            return read(out, f"round-{round_}")
        except FedbenchError as error:
            log.warning("%s; the checkpoint before it is used", error)
    return None


def read(out: Path, name: str) -> State:
    """The state `name`, its checksums verified."""
    path = out / FOLDER / f"{name}.json"
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        vouched = {"facts": dict(said["facts"]), "tensors": said["tensors"]}
        if said["sha256"] != _digest(vouched):
            raise ValueError("its checksum is wrong")
        tensors = path.with_suffix(".safetensors")
        if _file_digest(tensors) != vouched["tensors"]:
            raise ValueError(f"the checksum of {tensors.name} is wrong")
        return State(tensors, vouched["facts"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise FedbenchError(f"{path} cannot be read ({_why(error)})") from None


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


def _why(error: Exception) -> str:
    """An error's reason in one line."""
    return getattr(error, "strerror", None) or (f"no {error}" if isinstance(error, KeyError) else str(error).partition("\n")[0])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of files, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
