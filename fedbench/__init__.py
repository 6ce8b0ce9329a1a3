"""fedbench: personalised federated recommendation, benchmarked honestly and fast.

`fedbench.run`, `sweep`, `load`, `report`, `algorithms()` and `datasets()` are the Python API, see fedbench/api.py and docs/api.md.
"""

import atexit
import hashlib
import importlib
import os
import shutil
import stat
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbench import old_names

if TYPE_CHECKING:
    from fedbench.api import Result, Sweep, load, report, run, sweep

    def algorithms() -> dict[str, str]: ...
    def datasets() -> dict[str, str]: ...


__all__ = ["Result", "Sweep", "__version__", "algorithms", "datasets", "load", "report", "run", "sweep"]
__version__ = "0.2.0"

# Here, because every command comes by before it meets a line that an older Python cannot read.
if sys.version_info < (3, 11):  # noqa: UP036
    found = f"this is {sys.version_info[0]}.{sys.version_info[1]}"
    todo = "run `make setup` once (or `make setup PYTHON=python3.11`), then use .venv/bin/python"
    print(f"fedbench: error: Python 3.11 or newer is needed, {found}: {todo}", file=sys.stderr)
    sys.exit(2)
if sys.platform == "win32":
    print("fedbench: error: Windows is not supported; run fedbench in WSL (wsl --install), on Linux or on macOS", file=sys.stderr)
    sys.exit(2)

HERE = Path(__file__).parent
CHECKOUT = None if (HERE / "algorithms").is_dir() else HERE.parent
"""the folder that has `algorithms` and `datasets` beside this package; None if it is installed, for then they are inside"""
if CHECKOUT is not None:
    __path__.append(str(CHECKOUT))
old_names.install()


def __getattr__(name: str) -> Any:
    """The API, imported when it is first asked for: `import fedbench` alone loads neither torch nor pandas."""
    if name in ("algorithms", "datasets"):  # packages that can be called
        return importlib.import_module(f"fedbench.{name}")
    if name in __all__:
        return getattr(importlib.import_module("fedbench.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def found_by_children() -> dict[str, str]:
    """What the environment of another Python process must say so that it finds this package: a checkout is not installed."""
    if CHECKOUT is None:
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(CHECKOUT), os.environ.get("PYTHONPATH"))))}


def compiled_kernels() -> Path:
    """Where compiled kernels are kept: a folder for these very sources, beside them or, where nothing can be written there, elsewhere.

    By itself numba looks at the file of a kernel alone: it would go on with one that calls what has changed in another file.
    """
    sources = hashlib.sha256()
    for file in sorted([*HERE.rglob("*.py"), *(CHECKOUT.glob("datasets/*.py") if CHECKOUT else ())]):
        text = file.read_bytes()
        if b"numba" in text:
            sources.update(text)
    name = f"kernels-{sources.hexdigest()[:16]}"
    user = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    for place in (HERE / "__pycache__" / name, Path(user) / "fedbench" / name):
        if _is_usable(place):
            return place
    return _own_temporary_folder() / name


def _is_usable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        return False


def _own_temporary_folder() -> Path:
    """This user's alone, for what numba finds in its cache it runs; where somebody has taken its name, one for this process."""
    folder = Path(tempfile.gettempdir()) / f"fedbench-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
            return folder
    except FileExistsError:
        pass
    folder = Path(tempfile.mkdtemp(prefix="fedbench-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


# Both must be set before torch and numba are imported.
# Threads that wait should sleep, not spin: on a machine with other work, spinning costs several times the work itself.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "NUMBA_CACHE_DIR" not in os.environ:
    try:
        os.environ["NUMBA_CACHE_DIR"] = str(compiled_kernels())
    except OSError:  # the commands say so
        os.environ["NUMBA_CACHE_DIR"] = ""
