"""One process a run folder."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedbench.errors import UsageError


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Hold the folder (made if it is not there) for this process alone. The system lets go of it however the process ends."""
    path = folder / ".lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = _take(path)
    except (FileExistsError, NotADirectoryError):
        raise UsageError(f"--out {folder} is a file or below one; choose a folder") from None
    except OSError as error:
        raise UsageError(f"--out {folder} cannot be written ({error.strerror}); choose another folder") from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def _take(path: Path) -> int:
    """The open and locked file. Its pid is for the message that the next process prints."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
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
            who = f"process {pid}" if pid else "another process"
            raise UsageError(f"--out {path.parent} is in use by {who}; wait for it or choose another folder") from None
        except OSError:
            os.close(handle)
            raise
        os.close(handle)
