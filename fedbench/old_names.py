"""Names of before, which older plug-ins, models in MLflow and notebooks still say: modules that have moved, and the packages
`algorithms` and `datasets`, which a checkout had of its own and now has as `fedbench.algorithms` and `fedbench.datasets`.

An old name leads to the very module of today: a class imported by both names is one class, and is registered once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

MOVED = {
    "fedbench.aggregate": "fedbench.parts.mixing",
    "fedbench.algorithm": "fedbench.contract.algorithm",
    "fedbench.central": "fedbench.parts.central",
    "fedbench.draw": "fedbench.contract.randomness",
    "fedbench.engine": "fedbench.simulation.engine",
    "fedbench.lock": "fedbench.locks",
    "fedbench.merge": "fedbench.parts.merging",
    "fedbench.model": "fedbench.experiment.saved_model",
    "fedbench.newton": "fedbench.parts.newton",
    "fedbench.registry": "fedbench.contract.registry",
    "fedbench.ridge": "fedbench.kernels.ridge",
    "fedbench.server": "fedbench.parts.server_optimizer",
    "fedbench.sources": "fedbench.data.sources",
}
"""what the pages on adding an algorithm or a dataset named, and what a model in MLflow imports"""
OURS = ("algorithms", "datasets")


class OldNames(MetaPathFinder, Loader):
    """Leads the import system from an old name to today's module."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return spec_from_loader(fullname, self) if _today(fullname) else None

    def create_module(self, spec: ModuleSpec) -> None:
        """As usual; it is replaced below."""

    def exec_module(self, module: ModuleType) -> None:
        # the import system takes what stands here afterwards
        sys.modules[module.__name__] = import_module(_today(module.__name__) or "")


def _today(name: str) -> str | None:
    package, dot, _ = name.partition(".")
    if package in OURS and dot and _is_ours(package):
        return f"fedbench.{name}"
    return MOVED.get(name)


def _is_ours(package: str) -> bool:
    """The package of that name is today's, or that of an older checkout or model: beside a fedbench that has none inside."""
    found = sys.modules.get(package)
    if found is sys.modules.get(f"fedbench.{package}", False):
        return True
    file = getattr(found, "__file__", None)
    beside = Path(file).parents[1] / "fedbench" if file else None
    return beside is not None and (beside / "__init__.py").is_file() and not (beside / package).is_dir()


def give_way(name: str, file: str) -> None:
    """What `algorithms` or `datasets` means when a checkout's folder is found by that name: another package on the path, or ours."""
    folder = str(Path(file).resolve().parents[1])
    elsewhere = [place for place in sys.path if str(Path(place or ".").resolve()) != folder]
    spec = PathFinder.find_spec(name, elsewhere)
    if spec is None or spec.loader is None:  # no loader: a mere folder
        sys.modules[name] = import_module(f"fedbench.{name}")
        return
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)


def install() -> None:
    if not any(isinstance(finder, OldNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, OldNames())
