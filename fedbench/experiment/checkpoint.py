"""A run's state on disk: safetensors and JSON, nothing that is unpickled.

`checkpoint/round-12.safetensors` holds the tensors after round 12, `checkpoint/round-12.json` the facts and the checksum of both.
The tensors come first and the JSON last, each written aside, synced and renamed: a state without its JSON is none, so a reader
finds a complete state or none. The last two are kept, in case the newest is damaged.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from fedbench import files
from fedbench.contract.storage import RowView
from fedbench.errors import FedbenchError

FOLDER = "checkpoint"
MODEL = "model"
"""the state that a finished run keeps"""
BEST = "best"
"""the state of the best round so far, where it is not kept in memory"""
KEPT = 2

DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
          torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}  # fmt: skip
"""what safetensors calls them"""

log = logging.getLogger("fedbench")


@dataclass(frozen=True)
class State:
    """A saved state whose checksums were verified."""

    path: Path
    """the safetensors file"""
    facts: dict[str, Any]

    def tensors(self, device: str) -> Saved:
        return Saved(self.path, device)


class Saved(Mapping[str, Tensor]):
    """The tensors of a safetensors file, by name. Each is memory-mapped when it is read, so they need not fit in memory."""

    def __init__(self, path: Path, device: str) -> None:
        self.path, self.device = path, device
        with safe_open(path, "pt", device=device) as file:
            self.names = tuple(file.keys())

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.names:
            raise KeyError(name)
        with safe_open(self.path, "pt", device=self.device) as file:
            found: Tensor = file.get_tensor(name)
            return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def save(out: Path, name: str, facts: dict[str, Any], tensors: Mapping[str, Tensor | RowView]) -> int:
    """Write the state `name` of the run in `out`; returns its size in bytes. Other states are not touched."""
    folder = out / FOLDER
    try:
        files.make_folder(folder)
        part, place = folder / f"{name}.safetensors.part", folder / f"{name}.safetensors"
        digest = save_file(tensors, part)
        _sync(part)
        (folder / f"{name}.json").unlink(missing_ok=True)  # its checksum is of the tensors that are replaced now
        part.replace(place)
        vouched = {"facts": facts, "tensors": digest}
        files.write_text(folder / f"{name}.json", json.dumps({**vouched, "sha256": _digest(vouched)}))
        _sync(folder)
        return place.stat().st_size
    except OSError as error:
        for leftover in [] if folder.is_symlink() else folder.glob("*.part"):
            leftover.unlink()
        before = rounds(out)
        intact = f"the checkpoint of round {before[0]} is intact" if before else "there is none before it"
        raise FedbenchError(
            f"the checkpoint {folder / name} cannot be written ({_why(error)}); {intact}: make room and resume with --resume {out}"
        ) from error


def save_round(out: Path, round_: int, facts: dict[str, Any], tensors: Mapping[str, Tensor | RowView]) -> None:
    """Write the state after a round, once metrics.jsonl is on disk, and keep the last two."""
    # a checkpoint must not know of rounds whose lines are not on disk yet
    if (out / "metrics.jsonl").exists():
        _sync(out / "metrics.jsonl")
    save(out, f"round-{round_}", facts, tensors)
    prune(out, KEPT)


def rename(out: Path, name: str, to: str) -> int:
    """Link the state `name` as `to`; returns its size. It stays under both names until `prune` removes the first."""
    tensors, place = out / FOLDER / f"{name}.safetensors", out / FOLDER / f"{to}.safetensors"
    try:
        for old in (place.with_suffix(".json"), place):
            old.unlink(missing_ok=True)
        try:
            os.link(tensors, place)
        except OSError:  # a file system without links
            shutil.copyfile(tensors, place)
        files.write_text(place.with_suffix(".json"), files.read_text(tensors.with_suffix(".json")))
        _sync(out / FOLDER)
        return place.stat().st_size
    except OSError as error:
        raise FedbenchError(f"{place} cannot be written ({_why(error)}); make room and resume with --resume {out}") from error


def prune(out: Path, keep: int) -> None:
    """Remove all checkpoints of rounds but the newest `keep`, and leftovers of interrupted writes; with keep=0 the best round's too."""
    stays = {f"round-{round_}" for round_ in rounds(out)[:keep]} | ({MODEL, BEST} if keep else {MODEL})
    there = [] if (out / FOLDER).is_symlink() else [file for file in (out / FOLDER).glob("*") if not file.is_dir()]
    gone = [file for file in there if file.suffix == ".part" or file.stem not in stays]
    for file in gone:
        file.unlink()
    if len(gone) == len(there) and (out / FOLDER).is_dir() and not (out / FOLDER).is_symlink():
        with suppress(OSError):  # somebody else's folder is in it
            (out / FOLDER).rmdir()


def rounds(out: Path) -> list[int]:
    """Rounds that have a checkpoint, damaged ones too, newest first."""
    found = [re.fullmatch(r"round-(\d{1,18})\.json", path.name, re.ASCII) for path in (out / FOLDER).glob("round-*.json")]
    return sorted((int(match[1]) for match in found if match), reverse=True)


def newest(out: Path) -> State | None:
    """The newest checkpoint that is intact; newer ones that are damaged are named in the log."""
    for round_ in rounds(out):
        try:
            return read(out, f"round-{round_}")
        except FedbenchError as error:
            log.warning("%s; the checkpoint before it is used", error)
    return None


def read(out: Path, name: str) -> State:
    """Open the state `name` after verifying its checksums."""
    path = out / FOLDER / f"{name}.json"
    try:
        said = json.loads(files.read_text(path))
        vouched = {"facts": dict(said["facts"]), "tensors": said["tensors"]}
        if said["sha256"] != _digest(vouched):
            raise ValueError("its checksum is wrong")
        tensors = path.with_suffix(".safetensors")
        if _file_digest(tensors) != vouched["tensors"]:
            raise ValueError(f"the checksum of {tensors.name} is wrong")
        return State(tensors, vouched["facts"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise FedbenchError(f"{path} cannot be read ({_why(error)})") from None


def save_file(tensors: Mapping[str, Tensor | RowView], path: Path) -> str:
    """Write a safetensors file, rows of stores chunk by chunk; returns its SHA-256.

    The format: the length of the header (8 bytes), the header in JSON with every tensor's offsets, then the numbers.
    """
    order = sorted(
        tensors, key=lambda name: (-_dtype(tensors[name]).itemsize, name)
    )  # largest numbers first, so that each tensor is aligned
    header: dict[str, Any] = {}
    end = 0
    for name in order:
        start, kind = end, _dtype(tensors[name])
        end += math.prod(tensors[name].shape) * kind.itemsize
        header[name] = {"dtype": DTYPES[kind], "shape": list(tensors[name].shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    # the numbers begin at a multiple of 8, so that they can be mapped
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with files.created(path) as file:
        for part in (len(text).to_bytes(8, "little"), text):
            file.write(part)
            digest.update(part)
        for name in order:
            value = tensors[name]
            for chunk in [value] if isinstance(value, Tensor) else value.chunks():
                numbers = memoryview(chunk.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
                file.write(numbers)
                digest.update(numbers)
    return digest.hexdigest()


def _dtype(value: Tensor | RowView) -> torch.dtype:
    return value.dtype if isinstance(value, Tensor) else value.tensor.dtype


def _why(error: Exception) -> str:
    """An error's reason in one line."""
    return getattr(error, "strerror", None) or (f"no {error}" if isinstance(error, KeyError) else str(error).partition("\n")[0])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _file_digest(path: Path) -> str:
    files.refuse_special(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of files, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
