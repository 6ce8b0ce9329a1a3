"""The walls between the rooms of fedbench/ and the size of what is in them, by reading the source: nothing is imported to check it."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ("fedbench", "algorithms", "datasets", "train.py")
ROOMS = ["ground", "kernels", "contract", "data", "parts", "evaluation", "simulation", "settings", "tracking", "experiment", "sweeping"]
ROOMS += ["tuning", "reporting", "testing", "commands"]
"""from the ground up: a room imports from itself and from those before it"""
PLACED = {"fedbench/served.py": "experiment", "fedbench/__main__.py": "door", "fedbench/api.py": "door", "train.py": "door"}
"""files whose room is not the folder they are in: MLflow imports the first by its name, people start or import the others"""
ONLY = {"algorithms": {"contract", "parts", "algorithms"}, "datasets": {"ground", "contract", "data", "datasets"}}
NEVER = {"kernels": ("torch.nn",), "evaluation": ("torch", "numba"), "reporting": ("torch", "numba")}
"""packages that a room does without"""
TESTERS = ("fedbench/commands/check.py", "fedbench/commands/bench.py")
"""the commands that run what fedbench.testing holds"""
LOADER = "fedbench/contract/registry.py"
"""the one file below commands/ that loads algorithms and datasets"""

KNOWN_IMPORTS: set[tuple[str, str]] = set()
"""(file, room or package) that are still to be mended; one that is mended must go from here"""
KNOWN_SIZES: set[str] = set()
"""files and functions that are still too long, or have too many arguments"""


def files_of(root: Path) -> Iterator[Path]:
    for name in SOURCES:
        yield from sorted((root / name).rglob("*.py")) if name != "train.py" else [root / name]


def imports_of(tree: ast.AST, package: list[str]) -> Iterator[tuple[int, str]]:
    """Line and dotted name of all that a file imports, anywhere in it; `from a import b` is a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            yield from ((node.lineno, ".".join([*above, *filter(None, [node.module]), alias.name])) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(word := node.args[0], ast.Constant):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called in ("import_module", "__import__") and isinstance(word.value, str):
                yield node.lineno, word.value


def room_of(parts: list[str]) -> str:
    """The room of a module's or a file's dotted name; "" if it is not ours."""
    if parts[0] in ONLY:
        return parts[0]
    if parts[0] != "fedbench":
        return ""
    return parts[1] if len(parts) > 1 and (parts[1] in ROOMS or parts[1] in ONLY) else "ground"


def refusal(file: str, room: str, module: str) -> str:
    """Why a file of this room may not import the module; "" if it may."""
    there = room_of(module.split("."))
    if any(module == name or module.startswith(f"{name}.") for name in NEVER.get(room, ())):
        return f"{room} does without {module.split('.')[0]}"
    if room in ONLY:
        ours = there in ONLY[room] or (there == "ground" and module.startswith("fedbench.errors."))
        others = module.split(".")[0] in {"torch", "numpy", *sys.stdlib_module_names}
        return "" if (ours if there else others or room == "datasets") else f"{room} may import {', '.join(sorted(ONLY[room]))} alone"
    if there in ONLY:
        return "" if file == LOADER or room in ("commands", "door") else f"only {LOADER} and commands load {there}"
    if there == "testing" and room not in ("testing", "door") and file not in TESTERS:
        return f"testing is for {' and '.join(TESTERS)}"
    if there and room != "door" and ROOMS.index(there) > ROOMS.index(room):
        return f"{there} is above {room}"
    return ""


def known(file: str, module: str) -> tuple[str, str]:
    """How KNOWN_IMPORTS names an import: by the room, or by the package of others."""
    return file, room_of(module.split(".")) or module.split(".")[0]


def broken_walls(root: Path) -> dict[tuple[str, str], str]:
    """(file, module) -> "file:line: imports module: why not"."""
    found = {}
    for path in files_of(root):
        file = path.relative_to(root).as_posix()
        dotted = path.relative_to(root).with_suffix("").parts
        if dotted[0] in ONLY and dotted[-1] == "__init__":
            continue  # leads an older name of the folder to its present one
        room = PLACED.get(file) or room_of(list(dotted))
        package = list(dotted[:-1]) if dotted[0] == "fedbench" else ["fedbench", *dotted[:-1]]
        for line, module in imports_of(ast.parse(path.read_text(encoding="utf-8")), package):
            if why := refusal(file, room, module):
                found[file, module] = f"{file}:{line}: imports {module}: {why}"
    return found


def test_no_room_imports_from_above_its_walls() -> None:
    found = broken_walls(ROOT)
    new = [text for key, text in found.items() if known(*key) not in KNOWN_IMPORTS]
    assert not new, "\n" + "\n".join(new)
    assert not KNOWN_IMPORTS - {known(*key) for key in found}, "mended: take these out of KNOWN_IMPORTS"


FORBIDDEN = [
    ("fedbench/files.py", "from fedbench import kernels", "fedbench.kernels"),
    ("fedbench/contract/dataset.py", "def f():\n    from fedbench.simulation import engine", "fedbench.simulation.engine"),
    ("fedbench/data/protocol.py", "import fedbench.settings.config", "fedbench.settings.config"),
    (
        "fedbench/parts/newton.py",
        "if TYPE_CHECKING:\n    from fedbench.simulation.engine import Uploads",
        "fedbench.simulation.engine.Uploads",
    ),
    ("fedbench/settings/naming.py", "importlib.import_module('fedbench.experiment.run')", "fedbench.experiment.run"),
    ("fedbench/tracking/views.py", "from ..sweeping import study", "fedbench.sweeping.study"),
    ("fedbench/experiment/memory.py", "from fedbench.commands.bench import measure", "fedbench.commands.bench.measure"),
    ("fedbench/served.py", "from fedbench.commands import cli", "fedbench.commands.cli"),
    ("fedbench/sweeping/trials.py", "from fedbench.algorithms import fedem", "fedbench.algorithms.fedem"),
    ("fedbench/reporting/page.py", "import torch", "torch"),
    ("fedbench/reporting/charts.py", "from fedbench.testing import loop_engine", "fedbench.testing.loop_engine"),
    ("fedbench/commands/audit.py", "from fedbench.testing import loop_engine", "fedbench.testing.loop_engine"),
    ("fedbench/kernels/elementary.py", "from torch import nn", "torch.nn"),
    ("fedbench/kernels/layers.py", "from fedbench.contract.algorithm import Algorithm", "fedbench.contract.algorithm.Algorithm"),
    ("algorithms/fedmf.py", "from fedbench.data.split import Split", "fedbench.data.split.Split"),
    ("algorithms/local.py", "import pandas", "pandas"),
    ("algorithms/popularity.py", "from fedbench import files", "fedbench.files"),
    ("datasets/filmtrust.py", "from fedbench.parts import mixing", "fedbench.parts.mixing"),
]


def test_each_forbidden_import_is_found(tmp_path: Path) -> None:
    for name in SOURCES[:3]:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "train.py", tmp_path)
    before = broken_walls(tmp_path)
    lines = {}
    for file, code, _ in FORBIDDEN:
        with (tmp_path / file).open("a") as source:
            source.write(f"\n{code}\n")
        lines[file] = len((tmp_path / file).read_text().splitlines())
    after = broken_walls(tmp_path)
    assert after.keys() - before.keys() == {(file, module) for file, _, module in FORBIDDEN}
    for file, _, module in FORBIDDEN:
        assert after[file, module].startswith(f"{file}:{lines[file]}: imports {module}: ")


def test_a_report_is_made_without_torch() -> None:
    code = """
import importlib, pkgutil, sys
from fedbench import reporting
for module in pkgutil.iter_modules(reporting.__path__):
    importlib.import_module("fedbench.reporting." + module.name)
print(*(name for name in ("torch", "numba", "mlflow") if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def too_big(root: Path) -> dict[str, str]:
    """Files over 500 lines; outside kernels/, functions over 80 lines or with over 8 arguments."""
    found = {}
    for path in files_of(root):
        file = path.relative_to(root).as_posix()
        text = path.read_text(encoding="utf-8")
        if (length := len(text.splitlines())) > 500:
            found[file] = f"{file}: {length} lines; 500 is the most"
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or file.startswith("fedbench/kernels/"):
                continue
            given = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs) if one.arg not in ("self", "cls")]
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > 80 or len(given) > 8:
                key = f"{file}: {node.name}"
                found[key] = f"{file}:{node.lineno}: {node.name} has {lines} lines (80 at most) and {len(given)} arguments (8 at most)"
    return found


def test_files_and_functions_are_of_a_size_to_be_read() -> None:
    found = too_big(ROOT)
    new = [text for key, text in found.items() if key not in KNOWN_SIZES]
    assert not new, "\n" + "\n".join(new)
    assert not KNOWN_SIZES - found.keys(), "small enough now: take these out of KNOWN_SIZES"


def test_what_is_too_big_is_found(tmp_path: Path) -> None:
    (tmp_path / "fedbench").mkdir()
    (tmp_path / "train.py").write_text("\n" * 501)
    wide, long = "def wide(self, a, b, c, d, e, f, g, *, h, i): ...\n", "def long():\n" + "    pass\n" * 80
    fits = "def fits(self, a, b, c, d, e, f, g, h):\n" + "    pass\n" * 79
    (tmp_path / "fedbench" / "one.py").write_text(wide + long + fits)
    assert too_big(tmp_path).keys() == {"train.py", "fedbench/one.py: wide", "fedbench/one.py: long"}
