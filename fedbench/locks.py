"""One process at a time: locks that the system lets go of however their process ends."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedbench import files
from fedbench.errors import DISK_FULL, UsageError


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Hold a run's folder (made if it is not there) for this process alone, or refuse."""
    path = folder / ".lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files.refuse_links(folder)
        handle = _take(path)
    except files.InTheWay as error:
        raise UsageError(f"--out {folder}: {error}, or choose another folder") from None
    except BlockingIOError as error:
        raise UsageError(f"--out {folder} is in use by {error}; wait for it or choose another folder") from None
    except (FileExistsError, NotADirectoryError):
        raise UsageError(f"--out {folder} is a file or below one; choose a folder") from None
    except OSError as error:
        if error.errno in DISK_FULL:
            raise
        raise UsageError(f"--out {folder} cannot be written ({error.strerror}); choose another folder") from None
    try:
        yield
    finally:
        _release(path, handle)


@contextmanager
def alone(path: Path, patience: float) -> Iterator[None]:
    """Wait until no other process holds the lock, for so many seconds at most; where none can be made, go on without."""
    deadline = time.monotonic() + patience
    handle = None
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        while handle is None and time.monotonic() < deadline:
            try:
                handle = _take(path)
            except BlockingIOError:
                time.sleep(0.1)
    try:
        yield
    finally:
        if handle is not None:
            _release(path, handle)


def remove_if_free(path: Path) -> None:
    """Remove the file of a lock whose process was killed."""
    with suppress(OSError):  # BlockingIOError: somebody holds it
        if path.exists():
            _release(path, _take(path))


def _take(path: Path) -> int:
    """The open and locked file; BlockingIOError names the process that holds it."""
    while True:
        handle = files.opened(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            # a lock of the process, not of the open file: children do not inherit it
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(handle).st_nlink:  # else whoever held it before removed it after it was opened here
                os.truncate(handle, 0)
                os.write(handle, f"{os.getpid()}\n".encode())
                return handle
        except (BlockingIOError, PermissionError):
            pid = os.read(handle, 20).decode(errors="replace").strip()
            os.close(handle)
            raise BlockingIOError(f"process {pid}" if pid else "another process") from None
        except OSError:
            os.close(handle)
            raise
        os.close(handle)


def _release(path: Path, handle: int) -> None:
    path.unlink(missing_ok=True)
    os.close(handle)
