"""Newer Pythons: nothing is used that 3.12, 3.13 or 3.14 no longer have. (The workflow runs the tests on the first two.)"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
GONE = {
    *("asynchat", "asyncore", "distutils", "imp", "smtpd"),  # since 3.12
    *("aifc", "audioop", "cgi", "cgitb", "chunk", "crypt", "imghdr", "lib2to3", "mailcap", "msilib", "nis", "nntplib", "ossaudiodev"),
    *("pipes", "sndhdr", "spwd", "sunau", "telnetlib", "uu", "xdrlib"),  # since 3.13
}
GONE_NAMES = {
    *("configparser.SafeConfigParser", "pkgutil.ImpImporter", "pkgutil.ImpLoader", "ssl.wrap_socket", "ssl.match_hostname"),
    *("unittest.makeSuite", "unittest.findTestCases", "unittest.getTestCaseNames", "sqlite3.enable_shared_cache", "locale.format"),  # 3.12
    *("locale.resetlocale", "typing.io", "typing.re", "tempfile.template", "webbrowser.MacOSX", "re.template"),  # 3.13
    *("ast.Num", "ast.Str", "ast.Bytes", "ast.NameConstant", "ast.Ellipsis", "pkgutil.find_loader", "pkgutil.get_loader"),
    *("pty.master_open", "pty.slave_open", "sqlite3.version", "urllib.parse.Quoter", "importlib.abc.ResourceReader"),  # 3.14
}


def sources() -> list[Path]:
    folders = ("fedbench", "algorithms", "datasets", "sweeps", "tests", "docs")
    return [ROOT / "train.py", *(path for name in folders for path in sorted((ROOT / name).rglob("*.py")))]


def used(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of what a file imports, and of what it takes from a module by its name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield node.lineno, ast.unparse(node)


def gone(text: str) -> list[str]:
    """What a source uses that is gone, and escapes that will be errors."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        tree = ast.parse(text)
    found = [f"{line}: {name}" for line, name in used(tree) if name in GONE_NAMES]
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in imports:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        found += [f"{node.lineno}: {name}" for name in names if name.split(".")[0] in GONE and not getattr(node, "level", 0)]
    return found + [f"{warning.lineno}: {warning.message}" for warning in said]


def test_nothing_is_used_that_newer_pythons_lack() -> None:
    found = {path.relative_to(ROOT).as_posix(): what for path in sources() if (what := gone(path.read_text(encoding="utf-8")))}
    assert found == {} and len(sources()) > 200


def test_what_is_gone_is_found() -> None:
    assert gone("import pipes\nfrom distutils.version import LooseVersion\nimport ast\nast.Num\n") == [
        *("4: ast.Num", "1: pipes", "2: distutils.version")
    ]
    assert gone("from pkgutil import find_loader") == ["1: pkgutil.find_loader"]
    assert "invalid escape" in gone("word = '\\d'")[0]
    assert gone("from . import imp\nfrom chunks import chunk") == []
