"""Whose Python files run. A config, a study or a run's folder may come from somebody else, and may name a .py file.

Such a file runs only if this command line names it, if this user has run the same content on this machine before, or if --trust-plugin
lets it. What has run is remembered by its SHA-256, in a file of the user's own; where none can be written nothing is remembered.
The hash is that of the file alone: what it imports is not looked at.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import sys
from contextlib import suppress
from pathlib import Path

from fedbench import files
from fedbench.errors import UsageError
from fedbench.locks import alone
from fedbench.text import say, shown

FLAG = "--trust-plugin"
HELP = "run the .py file that a config, a study or a run's folder names, though it was never run here; its hash is shown"
HANDED_ON = "FEDBENCH_RUN_BEFORE"
"""the environment variable by which a process tells those that it starts which files it runs, by their hashes"""
MOST = 10_000
"""hashes that are remembered; the oldest go first"""

_here: set[str] = set()
"""hashes of what this process has run"""


def admit(path: Path, content: bytes, named: bool, let_in: bool, where: str) -> None:
    """Return if the file may run, and remember it; else raise. `named`: by this command line; `where`: who names it otherwise."""
    digest = hashlib.sha256(content).hexdigest()
    known = digest in _here or digest in os.environ.get(HANDED_ON, "").split(",")
    if not named and not known and digest not in _remembered():
        if not let_in:
            raise UsageError(
                f"{where} names {path}, a Python file that was never run here (SHA-256 {digest}), so it was not run; "
                f"read it and give {FLAG} to run it"
            )
        say(f"trusted  {path}  SHA-256 {digest}", file=sys.stderr)
    if not known:
        _remember(digest, path)
    _here.add(digest)


def handed_on() -> dict[str, str]:
    """What the environment of a process must have that runs what this one has run."""
    return {HANDED_ON: ",".join(sorted(_here))} if _here else {}


def memory() -> Path:
    """The file that remembers."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state) / "fedbench" / "plug-ins-run"


def _lines() -> list[str]:
    """One a file: its hash, and the path that it had."""
    try:
        path = memory()
        if path.is_symlink():
            raise files.InTheWay(errno.ELOOP, f"{path} is a link", str(path))
        lines = files.read_bytes(path).decode("ascii", "replace").splitlines()
    except OSError:
        return []
    return [line for line in lines if re.match(r"[0-9a-f]{64} ", line)]


def _remembered() -> set[str]:
    return {line[:64] for line in _lines()}


def _remember(digest: str, path: Path) -> None:
    place = memory()
    with suppress(OSError):
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with alone(place.with_name("lock"), patience=5):
            lines = _lines()
            if any(line.startswith(digest) for line in lines):
                return
            where = shown(os.path.abspath(path)).encode("ascii", "backslashreplace").decode()
            files.write_text(place, "".join(f"{line}\n" for line in [*lines, f"{digest} {where}"][-MOST:]), mode=0o600)
