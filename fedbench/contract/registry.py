"""Names of algorithms and datasets: built in, from an installed package (entry points), or from a file."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import importlib
import importlib.util
import inspect
import linecache
import logging
import os
import pkgutil
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.machinery import SourceFileLoader
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, TypeVar

from fedbench import files, trust
from fedbench.contract import plugin_errors, static_checks
from fedbench.contract.algorithm import Algorithm
from fedbench.contract.dataset import DatasetOptions, Interactions
from fedbench.errors import UsageError
from fedbench.text import matching, nearest

log = logging.getLogger(__name__)

Loader = Callable[[DatasetOptions], Interactions]
AlgorithmClass = TypeVar("AlgorithmClass", bound=type[Algorithm])
LoaderFunction = TypeVar("LoaderFunction", bound=Loader)


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A registered loader."""

    name: str
    load: Loader
    summary: str
    aliases: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Source:
    """The file that an algorithm from outside fedbench was read from."""

    content: bytes
    package: str = ""
    """name and version of the installed package that it came with"""

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    def facts(self) -> dict[str, str]:
        """What is kept of it beside a result."""
        return {"plugin_sha256": self.sha256, **({"plugin_package": self.package} if self.package else {})}


TABLES = (".csv", ".tsv")
"""endings of a file of rows, which make a name a path even if there is no such file"""
_algorithms: dict[str, type[Algorithm]] = {}
_sources: dict[type[Algorithm], Source] = {}
_datasets: dict[str, Dataset] = {}
"""by name and by alias"""


def register(name: str, *, summary: str | None = None) -> Callable[[AlgorithmClass], AlgorithmClass]:
    """Class decorator, above `@dataclass(frozen=True)`: make an algorithm known as `--algo name`."""
    if not isinstance(name, str) or not isinstance(summary, str):
        raise TypeError('register needs a name and a summary: @register("name", summary="what it is, in one line")')

    def add(cls: AlgorithmClass) -> AlgorithmClass:
        _add_algorithm(name, cls, summary)
        return cls

    return add


def register_dataset(name: str, *, summary: str, aliases: Iterable[str] = ()) -> Callable[[LoaderFunction], LoaderFunction]:
    """Function decorator: make a loader known as `--dataset name`."""

    def add(load: LoaderFunction) -> LoaderFunction:
        _add_dataset(Dataset(name, load, summary, tuple(aliases)))
        return load

    return add


def algorithm(name_or_path: str, named: bool = True, let_in: bool = False, where: str = "--algo") -> type[Algorithm]:
    """The algorithm of that name (capitals, hyphens and underscores do not matter), or the one in that .py file.

    The rest says who names the file, see `trust.admit`.
    """
    known, name = algorithms(), algorithm_name(name_or_path)
    if name in known:
        return known[name]
    if _is_algorithm_file(name_or_path):
        path = Path(os.path.expanduser(name_or_path))
        content = _python_file(path)
        if (ours := next((cls for cls in known.values() if _is_file_of(cls, path)), None)) is not None:
            return ours
        trust.admit(path, content, named, let_in, where)
        found = _algorithm_in(path, content)
        _sources[found] = Source(content)
        return found
    raise UsageError(f"--algo {name_or_path}: no such algorithm{_suggest(name_or_path, known)}; a path to a .py works too")


def _is_file_of(cls: type[Algorithm], path: Path) -> bool:
    """Whether an algorithm that is known by its name was loaded from this very file."""
    loaded = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return loaded is not None and os.path.samefile(loaded, path)


def source(cls: type[Algorithm]) -> Source | None:
    """Where an algorithm came from, if it was named by its path or belongs to an installed package."""
    return next((_sources[kind] for kind in cls.__mro__ if kind in _sources), None)


def dataset(name_or_path: str) -> Loader:
    """The loader of that name or alias (capitals, hyphens and underscores do not matter), or one that reads that file of rows."""
    name = dataset_name(name_or_path)
    if name in _datasets:
        return _datasets[name].load
    if _is_dataset_file(name_or_path):
        path = Path(os.path.expanduser(name_or_path))
        return lambda options: importlib.import_module("fedbench.datasets.csv_file").load_csv(path, options)
    raise UsageError(f"--dataset {name_or_path}: no such dataset{_suggest(name_or_path, _datasets)}; a path to a .csv works too")


def algorithms() -> dict[str, type[Algorithm]]:
    """All algorithms that have a name, sorted by it."""
    _discover("algorithms")
    return dict(sorted(_algorithms.items()))


def datasets() -> dict[str, Dataset]:
    """All datasets that have a name, sorted by it; aliases left out."""
    _discover("datasets")
    return {name: entry for name, entry in sorted(_datasets.items()) if name == entry.name}


class Listed(ModuleType):
    """The package of the algorithms or of the datasets, which can also be called: `fedbench.algorithms()`."""

    def __call__(self) -> dict[str, str]:
        """Every name, built in or of an installed plug-in, and what it is in one line."""
        known: dict[str, Any] = dict(algorithms() if self.__name__.endswith("algorithms") else datasets())
        return {name: entry.summary for name, entry in known.items()}


def dataset_names() -> list[str]:
    """Names of the datasets, sorted; aliases left out."""
    return list(datasets())


def algorithm_name(name_or_path: str) -> str:
    """The real name of an algorithm, as it is registered; a path, or what is not known, as it is."""
    known = algorithms()
    if name_or_path in known or _is_algorithm_file(name_or_path):
        return name_or_path
    return matching(name_or_path, known) or name_or_path


def dataset_name(name_or_path: str) -> str:
    """The real name of a dataset or of its alias, as it is registered; a path, or what is not known, as it is."""
    _discover("datasets")
    if name_or_path not in _datasets and not _is_dataset_file(name_or_path):
        name_or_path = matching(name_or_path, _datasets) or name_or_path
    return _datasets[name_or_path].name if name_or_path in _datasets else name_or_path


def _is_algorithm_file(name: str) -> bool:
    return name.endswith(".py") or _has_separator(name)


def _is_dataset_file(name: str) -> bool:
    return name.endswith(TABLES) or _has_separator(name) or os.path.isfile(os.path.expanduser(name))


@cache
def field_help(cls: type) -> dict[str, str]:
    """The sentence under each field of a dataclass, inherited ones included."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            found |= _sentences(base)
    names = {field.name for field in dataclasses.fields(cls)}
    return {name: sentence for name, sentence in found.items() if name in names}


def _sentences(cls: type) -> dict[str, str]:
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, TypeError, SyntaxError):  # made without a source file
        return {}
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            found[field.target.id] = " ".join(below.value.value.split())
    return found


def _add_algorithm(name: str, cls: type[Algorithm], summary: str) -> None:
    _check_name(name)
    if not (isinstance(cls, type) and issubclass(cls, Algorithm)):
        raise TypeError(f"{cls!r} is not a subclass of fedbench.contract.algorithm.Algorithm")
    plugin_errors.remember(cls.__module__)
    static_checks.check_class(cls)
    _refuse_twice("algorithm", name, cls, _algorithms.get(name))
    cls.name, cls.summary = name, summary
    _algorithms[name] = cls


def _add_dataset(entry: Dataset) -> None:
    if not callable(entry.load):
        raise TypeError(f"{entry.load!r} is not a function that loads a dataset")
    names = (entry.name, *entry.aliases)
    for name in names:
        _check_name(name)
        known = _datasets.get(name)
        _refuse_twice("dataset", name, entry.load, known.load if known else None)
    _datasets.update(dict.fromkeys(names, entry))


def _check_name(name: str) -> None:
    if not re.fullmatch(r"\w[\w.-]*", name):  # names become folders
        raise ValueError(f"{name!r} cannot be a name; use letters, digits, '_', '-' and '.'")


def _refuse_twice(what: str, name: str, new: Any, known: Any) -> None:
    if known is not None and known is not new:
        raise UsageError(f"two {what}s are called {name!r}: one in {_origin(known)}, one in {_origin(new)}; rename one")


def _origin(thing: Any) -> str:
    """A class's or function's module, or its file if it was named by path."""
    module = sys.modules.get(thing.__module__)
    return str(module.__file__) if module and thing.__module__.startswith(plugin_errors.BY_PATH) else str(thing.__module__)


@cache
def _discover(package: str) -> None:
    """Import every built-in module of a package and then every installed plug-in of that kind, each on its own."""
    _import_built_ins(package)
    for point in entry_points(group=f"fedbench.{package}"):
        with _left_out_if_broken(f"the plug-in {point.name} ({point.value})"):
            _add_plug_in(package, point)


@cache
def _import_built_ins(package: str) -> None:
    for module in pkgutil.iter_modules(importlib.import_module(f"fedbench.{package}").__path__):
        if module.name.startswith("_"):  # something to copy, such as algorithms/_template.py
            continue
        with _left_out_if_broken(f"{package}/{module.name}.py"):
            importlib.import_module(f"fedbench.{package}.{module.name}")


def _add_plug_in(package: str, point: EntryPoint) -> None:
    with _registrations_undone():  # the entry point's name is its only one
        thing = point.load()
    if package == "algorithms":
        _add_algorithm(point.name, thing, _summary(thing))
        if (file := inspect.getsourcefile(thing)) is not None:
            _sources[thing] = Source(files.read_bytes(Path(file)), f"{point.dist.name} {point.dist.version}" if point.dist else "")
    else:
        _add_dataset(Dataset(point.name, thing, _summary(thing)))


@contextmanager
def _left_out_if_broken(what: str) -> Iterator[None]:
    before = dict(_algorithms), dict(_datasets)
    try:
        yield
    except (Exception, SystemExit) as error:
        _restore(*before)
        log.warning("%s is left out: %s", what, _one_line(error))


@contextmanager
def _registrations_undone() -> Iterator[None]:
    for package in ("algorithms", "datasets"):  # a module registers when it is first imported, and then for good
        _import_built_ins(package)
    before = dict(_algorithms), dict(_datasets)
    try:
        yield
    finally:
        _restore(*before)


def _restore(algorithms: dict[str, type[Algorithm]], datasets: dict[str, Dataset]) -> None:
    _algorithms.clear()
    _algorithms.update(algorithms)
    _datasets.clear()
    _datasets.update(datasets)


def _algorithm_in(path: Path, content: bytes) -> type[Algorithm]:
    """The one algorithm of a file. It is not kept among the named ones, but may not take the name of one."""
    before = set(_algorithms)
    with _registrations_undone():
        module = _imported(path, content)
        registered = [cls for name, cls in _algorithms.items() if name not in before]
        found = registered or [cls for cls in vars(module).values() if _is_defined_in(module, cls)]
        if len(found) != 1:
            names = ", ".join(sorted(cls.__name__ for cls in found)) or "none"
            raise UsageError(f"--algo {path}: must hold exactly one Algorithm subclass, found {names}; @register one")
        if not registered:
            try:
                _add_algorithm(re.sub(r"[^\w.-]", "_", path.stem), found[0], _summary(found[0]))
            except ValueError as error:
                raise UsageError(f"--algo {path}: {error}") from error
    return found[0]


def _is_defined_in(module: ModuleType, thing: object) -> bool:
    return isinstance(thing, type) and issubclass(thing, Algorithm) and thing.__module__ == module.__name__


def _python_file(path: Path) -> bytes:
    if path.suffix != ".py":
        raise UsageError(f"--algo {path}: not a Python file; it must end in .py")
    if not os.path.exists(path):
        raise UsageError(f"--algo {path}: no such file")
    try:
        return files.read_bytes(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"--algo {path}: cannot be read ({files.reason(error)})") from None


class _Source(SourceFileLoader):
    """Runs the very content that was looked at, and no compiled copy of it that may lie beside the file."""

    def __init__(self, name: str, path: str, content: bytes) -> None:
        super().__init__(name, path)
        self.content = content

    def get_data(self, path: str) -> bytes:
        return self.content

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.content, self.path)


def _imported(path: Path, content: bytes) -> ModuleType:
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    name = f"{plugin_errors.BY_PATH}{re.sub(r'[^A-Za-z0-9]', '_', path.stem)}_{digest}"
    place = str(path.resolve())
    spec = importlib.util.spec_from_file_location(name, place, loader=_Source(name, place, content))
    assert spec is not None and spec.loader is not None
    linecache.checkcache(place)  # where the source of a class is looked up
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and inspect look there
    try:
        spec.loader.exec_module(module)
    except (UsageError, KeyboardInterrupt):
        del sys.modules[name]
        raise
    except BaseException as error:
        del sys.modules[name]
        raise UsageError(f"--algo {path}{plugin_errors.of_import(error, place)}") from error
    return module


def _summary(thing: object) -> str:
    """What a class or function says of itself in one line."""
    said = vars(thing).get("summary") if isinstance(thing, type) else None
    return str(said or (inspect.getdoc(thing) or "").partition("\n")[0])


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _has_separator(name: str) -> bool:
    return "/" in name or os.sep in name


def _suggest(word: str, known: Iterable[str]) -> str:
    near = nearest(word, known)
    return (f"; did you mean {' or '.join(near)}?" if near else "") + f" (known: {', '.join(sorted(known)) or 'none'})"
