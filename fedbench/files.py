"""Files: only regular ones are read, all of one or nothing is written, and no link in the way is followed.

What lies in a run's folder may have been put there by somebody else. So a file is written aside under a name that was free, and renamed:
a link of either name is replaced, and what it leads to stays as it is. A named pipe is refused at once where reading it would wait forever.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from fedbench.errors import DataError, FedbenchError

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class InTheWay(FedbenchError, OSError):
    """Something else stands where a file or a folder of a run's own belongs."""

    def __str__(self) -> str:
        return str(self.strerror)


def read_bytes(path: Path) -> bytes:
    """The content of a regular file; a link to one is followed. Never waits."""
    refuse_special(path)
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb") as file:
        _refuse_kind(path, os.fstat(handle).st_mode)  # it may have been exchanged meanwhile
        return file.read()


def read_text(path: Path) -> str:
    return read_bytes(path).decode("utf-8")


def refuse_special(path: Path) -> None:
    """Raise if there is something that is no regular file."""
    _refuse_kind(path, os.stat(path).st_mode)


def _refuse_kind(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = KINDS.get(stat.S_IFMT(mode), "no regular file")
        raise InTheWay(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, f"{path} is {kind}, not a file", str(path))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file that fedbench wrote; {} if there is no file."""
    try:
        value = json.loads(read_text(path))
    except FileNotFoundError:
        return {}
    except InTheWay as error:
        raise DataError(f"{error}; remove it, or leave its folder out") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read ({reason(error)}); remove it, or leave its folder out") from None
    if not isinstance(value, dict):
        raise DataError(f"{path}: must hold an object, not a {type(value).__name__}; remove it, or leave its folder out")
    return value


def reason(error: BaseException) -> str:
    """Why a file could not be read, in one short line."""
    said = getattr(error, "strerror", None) or (str(error).splitlines() or [""])[0]
    return said[:200] or type(error).__name__


# ---- writing ----------------------------------------------------------------------------------------------------------------


@contextmanager
def created(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A new file; what has the name already, also a link, goes."""
    if path.is_dir() and not path.is_symlink():
        raise InTheWay(errno.EISDIR, f"{path} is a folder, not a file; remove it", str(path))
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode), "wb") as file:
        yield file


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` when it is whole and on the disk, also when the process is killed."""
    if path.is_dir() and not path.is_symlink():
        raise InTheWay(errno.EISDIR, f"{path} is a folder, not a file; remove it", str(path))
    part = path.with_name(path.name + ".part")
    try:
        with created(part, mode) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        if not part.is_dir():
            part.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str, mode: int = 0o666) -> None:
    with replacing(path, mode) as file:
        file.write(text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def opened(path: Path, flags: int, mode: int = 0o666) -> int:
    """A file of our own, opened in place: to be appended to, or to be locked. One that has a second name is no file of our own."""
    try:
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError:
        if path.is_symlink():
            raise InTheWay(errno.ELOOP, f"{path} is a link, which is not followed; remove it", str(path)) from None
        if path.exists():
            refuse_special(path)
        raise
    try:
        _refuse_kind(path, os.fstat(handle).st_mode)
        if os.fstat(handle).st_nlink > 1:
            raise InTheWay(errno.EMLINK, f"{path} has a second name elsewhere (a hard link); remove it", str(path))
    except InTheWay:
        os.close(handle)
        raise
    return handle


def appended(path: Path) -> BinaryIO:
    """A file to add to, made if it is not there."""
    return open(opened(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab")


def make_folder(path: Path) -> Path:
    """A folder inside a run's folder, made if it is not there."""
    if path.is_symlink():
        raise InTheWay(errno.ELOOP, f"{path} is a link, which is not followed; remove it", str(path))
    path.mkdir(exist_ok=True)
    return path


def refuse_links(folder: Path) -> None:
    """Raise if something in a folder to be written to leads elsewhere, or is neither a file nor a folder.

    The folder itself may be a link: that was asked for.
    """
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.is_symlink():
                path = folder / entry.name
                raise InTheWay(errno.ELOOP, f"{path} is a link, which is not followed; remove it", str(path))
            if not entry.is_dir() and not entry.is_file():
                kind = KINDS.get(stat.S_IFMT(entry.stat().st_mode), "no regular file")
                raise InTheWay(errno.EINVAL, f"{folder / entry.name} is {kind}; remove it", entry.name)
