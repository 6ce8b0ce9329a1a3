"""`python -m fedbench doctor`: whether this machine is ready, on one screen."""

from __future__ import annotations

import logging
import os
import platform
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from fedbench import CHECKOUT, HERE, __version__
from fedbench.commands.log_model import DISTRIBUTION
from fedbench.console import fitted
from fedbench.contract import registry
from fedbench.contract.dataset import DatasetOptions
from fedbench.data.sources import cache_folder, data_folder
from fedbench.errors import UsageError
from fedbench.text import say
from fedbench.tracking import mirror_process

GROUPS = ("algorithms", "datasets")


class Finding(NamedTuple):
    """One line: fine, or what to do about it."""

    name: str
    said: str
    fine: bool = True


def main(argv: list[str]) -> int:
    """0 if all is fine, 1 if something must be mended."""
    if argv and argv[0] in ("-h", "--help"):
        say("usage: python -m fedbench doctor\n\nSays whether this machine is ready for fedbench; exit code 1 if something must be mended.")
        return 0
    if argv:
        raise UsageError(f"doctor takes no flags, but was given {argv[0]!r}")
    installed = list(plug_ins())  # first, for what is broken is said once, when it is first looked for
    findings = [*system(), *packages(), *machine(), *data(), store(), *installed]
    for finding in findings:
        say(fitted(f"{'ok  ' if finding.fine else 'BAD '} {finding.name:<10}  {finding.said}"))
    wrong = sum(not finding.fine for finding in findings)
    say(f"{wrong} to mend" if wrong else "ready")
    return int(wrong > 0)


def system() -> Iterator[Finding]:
    where = f"checkout {CHECKOUT}" if CHECKOUT else f"installed in {HERE}"
    yield Finding("fedbench", f"{__version__}, {where}")
    yield Finding("python", f"{platform.python_version()}, {sys.executable}")
    notes = {"linux": "", "darwin": "; the runs of a sweep that is killed go on there"}
    yield Finding("system", f"{platform.system()} {platform.machine()}" + notes.get(sys.platform, ": not tried; Linux and macOS are"))


def packages() -> Iterator[Finding]:
    """Each package that is needed and is missing or outside of its range; one line if all are fine."""
    from packaging.requirements import Requirement

    wrong, found = [], []
    for line in needed():
        asked = Requirement(line)
        try:
            has = version(asked.name)
        except PackageNotFoundError:
            wrong.append(Finding("package", f"{asked.name} is missing: pip install '{asked}'", fine=False))
            continue
        found.append(f"{asked.name} {has}")
        if not asked.specifier.contains(has, prereleases=True):
            wrong.append(Finding("package", f"{asked.name} {has} is not {asked.specifier}: pip install '{asked}'", fine=False))
    yield from wrong or [Finding("packages", ", ".join(found))]


def needed() -> list[str]:
    """Requirements with their ranges: of the checkout's pyproject.toml, or of the installed package."""
    if CHECKOUT is not None and (CHECKOUT / "pyproject.toml").is_file():
        told = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))
        return list(told["project"]["dependencies"])
    try:
        return [line for line in requires(DISTRIBUTION) or [] if "extra ==" not in line]
    except PackageNotFoundError:  # copied by hand, or the code of a model in MLflow
        return []


def machine() -> Iterator[Finding]:
    import torch

    cards = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    apple = ["mps (on request: --device mps)"] if torch.backends.mps.is_available() else []
    yield Finding("devices", ", ".join([f"cpu with {os.cpu_count()} threads, {torch.get_num_threads()} in use", *cards, *apple]))
    yield accelerated(bool(cards), bool(apple))
    kernels = os.environ.get("NUMBA_CACHE_DIR", "")
    if is_writable(Path(kernels)) and kernels:
        yield Finding("kernels", f"kept in {kernels}")
    else:
        yield Finding("kernels", "can be kept nowhere: set NUMBA_CACHE_DIR to a folder that can be written", fine=False)


def accelerated(cuda: bool, mps: bool) -> Finding:
    """What trains on the machine's accelerators."""
    if not cuda:
        rest = "; mps has none: the generic path" if mps else ""
        return Finding("kernels", f"numba's on the CPU, derived from each method's loss{rest}")
    if find_spec("triton") is None:
        return Finding("kernels", "Triton is missing: without it a GPU has none, and takes the generic path (slower)", fine=False)
    return Finding("kernels", f"Triton {version('triton')}'s on a GPU, numba's on the CPU, derived from each method's loss")


def is_writable(folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def data() -> Iterator[Finding]:
    """Where data is looked for, and which datasets lie there; the others are fetched when they are first used."""
    own, cache = data_folder(DatasetOptions()), cache_folder(DatasetOptions())
    if own is not None and not own.is_dir():
        yield Finding("data", f"FEDBENCH_DATA names {own}, which is no folder: correct it or unset it", fine=False)
    places = [place for place in (own, cache) if place is not None]
    here = [name for name in registry.dataset_names() if any((place / name).is_dir() for place in places)]
    yield Finding("data", f"{', '.join(here) or 'nothing yet'} in {' and '.join(map(str, places))}")
    above = next(place for place in (cache, *cache.parents) if place.exists())
    if not os.access(above, os.W_OK):
        yield Finding("cache", f"{cache} cannot be written: set FEDBENCH_CACHE to a folder that can", fine=False)


def store() -> Finding:
    """Whether runs can be copied to MLflow. Nothing is made there."""
    uri = mirror_process.tracking_uri()
    if uri.startswith("sqlite:///"):
        database = Path(uri.removeprefix("sqlite:///").partition("?")[0]).absolute()
        fine = os.access(database if database.exists() else database.parent, os.W_OK)
        return Finding("mlflow", f"{database}" if fine else f"{database} cannot be written: set MLFLOW_TRACKING_URI", fine)
    if not uri.startswith("http"):
        return Finding("mlflow", "MLFLOW_TRACKING_URI names neither a server nor an SQLite file; not looked at")
    shown = uri.rpartition("@")[2]  # an address may hold a password
    import requests

    try:
        requests.get(f"{uri.rstrip('/')}/health", timeout=5).raise_for_status()
    except requests.RequestException as error:
        return Finding("mlflow", f"{shown} does not answer ({type(error).__name__}): start it, or set MLFLOW_TRACKING_URI", fine=False)
    return Finding("mlflow", f"{shown} answers")


def plug_ins() -> Iterator[Finding]:
    """Installed plug-ins, and what is left out because it is broken."""
    complaints: list[str] = []
    ear = logging.Handler(logging.WARNING)
    ear.emit = lambda record: complaints.append(record.getMessage())  # type: ignore[method-assign]
    registry.log.addHandler(ear)
    heard, registry.log.propagate = registry.log.propagate, False
    try:
        known = {"algorithms": len(registry.algorithms()), "datasets": len(registry.datasets())}
    finally:
        registry.log.removeHandler(ear)
        registry.log.propagate = heard
    names = [point.name for group in GROUPS for point in entry_points(group=f"fedbench.{group}")]
    yield Finding("plug-ins", f"{', '.join(names) or 'none'} ({known['algorithms']} algorithms and {known['datasets']} datasets in all)")
    yield from (Finding("plug-in", f"{said}: mend or uninstall it", fine=False) for said in complaints)
