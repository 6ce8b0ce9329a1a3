"""From text to compiled code. A kernel's text is kept in a file named by its hash, and numba keeps what it compiled beside it.

The name covers all that a kernel depends on: the text, the sources of what it calls, the versions of numba, llvmlite and numpy, and the
processor.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import tempfile
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import llvmlite
import numba
import numpy as np
from numba.core.registry import cpu_target

DERIVED = "fedbench_derived"
"""the package that kernels say they are of"""
HEAD = '''"""Derived from {what} by fedbench/kernels/compiler; written anew when that changes."""

import math

import numpy as np

from fedbench.kernels.elementary import (
    exp_minus, exponential, hyperbolic_tangent, lanes_of, least, log1p, log_one_plus, most, sigmoid, sign,
)
from fedbench.kernels.layers import (
    SQUARE, add_rows, compiled, copy, fetch, fetch_rows, give_rows, list_awake, listed_weights, mix_all, mix_onto, mix_onto_positive,
    mix_positive, padded, part, part_rows, products, store_changes, store_rows, take_rows, zeros,
)
from fedbench.kernels.optimizers import (
    BETA1, BETA2, FORGET, add_momentum, add_pull, adamw, catch_up, corrections, first_steps, joined_slope, moments, pull, settled, sgd,
    square_of, steps as steps_of,
)
from fedbench.kernels.optimizers import paces as paces_of, rates as paces_at
from fedbench.kernels.shuffling import permute
from fedbench.kernels.vectors import (
    WIDTH, across, cosine, logarithm, magnitude, pick, prefetch, put, repeat, root, sine, spread, square_root, take,
)

# {machine}
ACTS = {acts}


'''


@cache
def machine() -> str:
    """What compiled code depends on besides its sources."""
    target = cpu_target.target_context.codegen().magic_tuple()
    facts = hashlib.sha256(repr(target).encode()).hexdigest()[:12]
    ours = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(Path(__file__).parents[1].glob("*.py")))).hexdigest()[:12]
    found = f"numba {numba.__version__}, llvmlite {llvmlite.__version__}, numpy {np.__version__}, processor {facts}"
    return f"{found}, functions {ours}"


def folder() -> Path:
    """Where kernels lie; numba's own cache is in the same place."""
    given = os.environ.get("NUMBA_CACHE_DIR")
    return Path(given) / "derived" if given else Path(tempfile.mkdtemp(prefix="fedbench-kernels-"))


@cache
def load(text: str) -> ModuleType:
    """The module of a text, from the folder of kernels; written once, whoever comes first."""
    name = f"kernel_{hashlib.sha256(text.encode()).hexdigest()[:20]}"
    file = folder() / f"{name}.kernel"  # not .py: it lies among the package's files, and is none of its sources
    if not file.exists() or file.read_text() != text:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".tmp", delete=False) as made:
            made.write(text)
        os.replace(made.name, file)
    name = f"{DERIVED}.{name}"
    spec = importlib.util.spec_from_file_location(name, file, loader=SourceFileLoader(name, str(file)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def module_text(what: str, acts: int, *parts: str) -> str:
    return HEAD.format(what=what, machine=machine(), acts=acts) + "\n".join(parts)
