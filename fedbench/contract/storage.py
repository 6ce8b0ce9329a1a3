"""Room for what many clients keep: memory of the run's device, or sparse files where that is too small."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from fedbench.errors import FedbenchError

CHUNK = 1 << 24
"""numbers drawn, saved or read at once"""


class Memory:
    """Room on the run's device. What is said of it here holds for `Disk` too, which shares its form."""

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
        """Room for one name of many clients; its content is not set."""
        return torch.empty(shape, dtype=dtype, device=device)

    def reserve(self, tensor: Tensor, rows: np.ndarray) -> None:
        """These rows of an allocated tensor are about to be written for the first time."""

    def release(self) -> None:
        """Nothing that was read or written so far is needed soon."""

    def forget(self, tensors: Iterable[Tensor]) -> None:
        """What was allocated for these goes with them."""


@dataclass
class Disk(Memory):
    """Room in sparse files of a folder. Pages that were touched count as this process's memory until they are released."""

    folder: Path
    files: dict[int, tuple[BinaryIO, mmap.mmap]] = field(default_factory=dict)
    """by the address of what they hold"""

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
        kind = torch.empty(0, dtype=dtype).numpy().dtype
        try:
            file: BinaryIO = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115 (open while it is mapped)
            file.truncate(max(1, math.prod(shape) * kind.itemsize))
            mapped = mmap.mmap(file.fileno(), 0)
        except OSError as error:
            raise self._full(error) from error
        tensor = torch.from_numpy(np.frombuffer(mapped, kind, math.prod(shape)).reshape(shape))
        self.files[tensor.data_ptr()] = file, mapped
        return tensor

    def reserve(self, tensor: Tensor, rows: np.ndarray) -> None:
        """A write to a mapped page for which the disk has no room would kill the process; asking before ends in an error."""
        if tensor.data_ptr() not in self.files or not len(rows):
            return
        handle, each = self.files[tensor.data_ptr()][0].fileno(), tensor[0].numel() * tensor.element_size()
        rows = np.unique(rows)
        try:
            for run in np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1):
                os.posix_fallocate(handle, int(run[0]) * each, len(run) * each)
        except OSError as error:
            raise self._full(error) from error
        except AttributeError:  # a system without it
            pass

    def release(self) -> None:
        for _, mapped in self.files.values():
            mapped.madvise(mmap.MADV_DONTNEED)

    def forget(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self.files.pop(tensor.data_ptr(), None)

    def _full(self, error: OSError) -> FedbenchError:
        return FedbenchError(
            f"{self.folder} has no room for what clients keep ({error.strerror}); make room, or name another folder with --client-store"
        )


@dataclass(frozen=True)
class RowView:
    """Some rows of a large tensor, read in chunks instead of gathered at once."""

    tensor: Tensor
    rows: Tensor
    room: Memory

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.rows), *self.tensor.shape[1:])

    def chunks(self) -> Iterator[Tensor]:
        for rows in self.rows.split(at_once(self.tensor)):
            yield self.tensor[rows]
            self.room.release()


def filled(room: Memory, rows: int, chunks: Iterable[Tensor]) -> Tensor:
    """[rows, ...] in `room`, the chunks first."""
    tensor, at = torch.empty(0), 0
    for chunk in chunks:
        tensor = tensor if at else room.allocate((rows, *chunk.shape[1:]), chunk.dtype, "cpu")
        room.reserve(tensor, np.arange(at, at + len(chunk)))
        tensor[at : at + len(chunk)] = chunk
        at += len(chunk)
        room.release()
    return tensor


def at_once(tensor: Tensor) -> int:
    """Rows of a tensor that are handled at once."""
    return max(1, CHUNK // max(1, math.prod(tensor.shape[1:])))
