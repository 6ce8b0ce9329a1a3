"""fedbench: personalised federated recommendation, benchmarked honestly and fast."""

import hashlib
import os
import sys
from pathlib import Path

__version__ = "0.1.0"

# Here, because every command comes by before it meets a line that an older Python cannot read.
if sys.version_info < (3, 11):  # noqa: UP036
    found = f"this is {sys.version_info[0]}.{sys.version_info[1]}"
    todo = "run `make setup` once (or `make setup PYTHON=python3.11`), then use .venv/bin/python"
    print(f"fedbench: error: Python 3.11 or newer is needed, {found}: {todo}", file=sys.stderr)
    sys.exit(2)


def compiled_kernels() -> Path:
    """Where compiled kernels are kept: a folder for these very sources.

    By itself numba looks at the file of a kernel alone: it would go on with one that calls what has changed in another file.
    """
    here, sources = Path(__file__).parent, hashlib.sha256()
    for file in sorted([*here.glob("*.py"), *here.parent.glob("datasets/*.py")]):
        text = file.read_bytes()
        if b"numba" in text:
            sources.update(text)
    return here / "__pycache__" / f"kernels-{sources.hexdigest()[:16]}"


# Both must be set before torch and numba are imported.
# Threads that wait should sleep, not spin: on a machine with other work, spinning costs several times the work itself.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("NUMBA_CACHE_DIR", str(compiled_kernels()))
