"""Whose fault an error is. What goes wrong in an algorithm's own code is told with its file, line and function, in one line."""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import linecache
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FrameType, TracebackType

from fedbench.errors import FedbenchError, UsageError

LONGEST = 300
"""characters of an exception's own words that are shown; torch's can fill a page"""
BY_PATH = "fedbench_file_"
"""what the module name of a file begins with that was named by its path"""
HINTS = (
    (r"\.item\(\) on a Tensor", "the function runs for many clients at once, so no number can be taken out of a tensor; drop .item()"),
    (r"data-dependent control flow|__bool__", "no `if` or `while` on a tensor's value here; use torch.where(condition, a, b)"),
    (r"dynamic shape", "a shape cannot depend on values here; use torch.where or multiply with a mask"),
    (r"in-place arithmetic|in-place operation|vmap: .*_\(.*is not possible", "do not change a tensor in place here; make a new one"),
    (r"doesn't have storage|Can't call numpy\(\)", "no numpy and no numbers here: the function runs for many clients at once"),
    (r"randomness error mode|called random operation", "draw random numbers in init_client, init_server or aggregate, with `draw`"),
    (r"must only return Tensors", "return tensors alone"),
    (r"cannot inherit non-frozen dataclass", "write @dataclass(frozen=True)"),
    (r"non-default argument '\w+' follows", "every field needs a default, such as `lr: float = 0.1`"),
    (r"cannot assign to field", "an algorithm is frozen: what changes belongs to the tensors of server or client"),
    (r"mutable default", "use a tuple, or drop the annotation of what is no flag"),
)
"""what to say beside an exception's own words"""
MOVED = {"secure": "parts.secure_sum", "split": "data.split", "protocol": "data.protocol", "config": "settings.config"}
"""modules of before that no longer answer to their old name (see fedbench/old_names.py), and where they are now"""
MAY_IMPORT = (
    *("errors", "contract.algorithm", "contract.uploads", "contract.randomness", "contract.registry", "contract.dataset"),
    *("parts.mixing", "parts.merging", "parts.central", "parts.newton", "parts.server_optimizer", "parts.secure_sum"),
)
"""where a name may be that a plug-in imports from a wrong place"""

_homes: set[str] = set()
"""modules and packages whose code is an algorithm's"""


class PluginError(UsageError):
    """A fault in an algorithm's own code; it names the file, the line and the function."""


class Misuse(UsageError):
    """What the contract's own code raises if an algorithm asks for something wrong; `blamed` adds where that was."""


def remember(module: str) -> None:
    """The code of this module, or of its package if it is an installed one, is an algorithm's."""
    home, _, rest = module.rpartition(".")
    # a file of its own, or a built-in method: the module alone; an installed package: all of it
    if module.startswith(BY_PATH) or not rest or module.startswith("fedbench.") and home != "fedbench.algorithms":
        _homes.add(module)
    else:
        _homes.add(home if home == "fedbench.algorithms" else module.partition(".")[0])


@contextmanager
def blamed() -> Iterator[None]:
    """An exception from an algorithm's own code becomes a PluginError; all others pass."""
    try:
        yield
    except (Exception, SystemExit) as error:  # a method that exits would end the run as if it had succeeded
        if said := blame(error):
            raise said from error
        raise


def blame(error: BaseException) -> PluginError | None:
    """The error as one of an algorithm's code, if any of that was running when it was raised; what others raised on purpose stands."""
    if isinstance(error, FedbenchError | MemoryError) and not isinstance(error, Misuse):
        return None
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:  # the error itself, then what led to it
        seen.add(id(found))
        if isinstance(found, FedbenchError) and not isinstance(found, Misuse):
            return None
        if place := _last_own_frame(found.__traceback__):
            frame, line = place.tb_frame, place.tb_lineno
            return PluginError(f"{short(frame.f_code.co_filename)}, line {line}{_inside(frame.f_code)}: {_words(found, place)}")
        # `raise ... from` says what led to an error; else what was being handled
        found = found.__cause__ or found.__context__
    return None


def placed(error: UsageError) -> str:
    """What an error says, with its place if an algorithm raised it itself, in another function than `check`."""
    places = list(_walk(error.__traceback__))
    if type(error) is not UsageError or not places or not _is_algorithms(last := places[-1].tb_frame) or last.f_code.co_name == "check":
        return str(error)
    return f"{short(last.f_code.co_filename)}, line {places[-1].tb_lineno}{_inside(last.f_code)}: {error}"


def where(cls: type, name: str = "") -> str:
    """File, line and name of what a class says under `name`, wherever it inherits that from; of the class itself without one."""
    owner = next((base for base in cls.__mro__ if name in vars(base)), None) if name else None
    if owner is None or is_ours(owner):  # a default of the contract: it is the class that lacks something
        owner, name = cls, ""
    thing = inspect.getattr_static(owner, name) if name else owner
    return f"{short(_file(owner))}, line {_line(owner, name, thing)}, in {name or owner.__qualname__.rpartition('.')[2]}"


def is_ours(cls: type) -> bool:
    """Whether a class is part of fedbench itself."""
    return cls is object or (cls.__module__.startswith("fedbench.") and not cls.__module__.startswith("fedbench.algorithms."))


def fault(cls: type, name: str, said: str) -> PluginError:
    """An error in what a class says under `name`, a function or a field."""
    return PluginError(f"{where(cls, name)}: {said}")


def meant(word: object, known: Collection[str]) -> str:
    """` (did you mean 'items'?)`, or nothing if no known word is near."""
    near = difflib.get_close_matches(str(word), [str(one) for one in known], n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def short(path: str) -> str:
    """A path as it is best read: from the working directory if it lies below."""
    try:
        below = os.path.relpath(path)
    except (ValueError, OSError):
        return path
    return path if below.startswith("..") else below


def of_import(error: BaseException, path: str) -> str:
    """What went wrong while a file was imported, with the line: `, line 3: NameError: ...`."""
    if isinstance(error, SyntaxError) and error.lineno and os.path.realpath(error.filename or "") == os.path.realpath(path):
        return f", line {error.lineno}: cannot be imported: {type(error).__name__}: {error.msg}"
    places = [place for place in _walk(error.__traceback__) if place.tb_frame.f_code.co_filename == path]
    if not places:
        return f": cannot be imported: {_words(error, None)}"
    last = places[-1]
    return f", line {last.tb_lineno}{_inside(last.tb_frame.f_code)}: cannot be imported: {_words(error, last)}"


def _inside(code: CodeType) -> str:
    """`, in loss`: the function that has a name, around a lambda or a comprehension; nothing at the level of the module."""
    named = [part for part in code.co_qualname.split(".") if not part.startswith("<")]
    return f", in {named[-1]}" if named else ""


def _walk(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _last_own_frame(traceback: TracebackType | None) -> TracebackType | None:
    # what dataclasses generate has no file, and runs as the algorithm's
    own = [place for place in _walk(traceback) if _is_algorithms(place.tb_frame) and not place.tb_frame.f_code.co_filename.startswith("<")]
    return own[-1] if own else None


def _is_algorithms(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__", ""))
    return any(module == home or module.startswith(f"{home}.") for home in _homes)


def _words(error: BaseException, place: TracebackType | None) -> str:
    """`KeyError: 'item'; held has items, user (did you mean 'items'?)`"""
    said = " ".join(str(error).split())
    hint = next((hint for pattern, hint in HINTS if re.search(pattern, said)), "") or _hint(error, place)
    if isinstance(error, Misuse):
        return said
    if len(said) > LONGEST:
        said = said[:LONGEST].rstrip() + "..."
    return f"{type(error).__name__}{': ' if said else ''}{said}{f'; {hint}' if hint else ''}"


def _hint(error: BaseException, place: TracebackType | None) -> str:
    if isinstance(error, ImportError):
        return _hint_of_import(error)
    if isinstance(error, KeyError) and place is not None and error.args:
        return _hint_of_key(error.args[0], place)
    if isinstance(error, AttributeError) and error.name:
        return meant(error.name, dir(error.obj)).strip(" ()")
    if isinstance(error, NameError) and error.name and place is not None:
        return meant(error.name, [*place.tb_frame.f_locals, *place.tb_frame.f_globals]).strip(" ()")
    return ""


def _hint_of_import(error: ImportError) -> str:
    said = re.search(r"cannot import name '(\w+)' from '(fedbench[\w.]*)'", str(error))
    if said:
        for module in MAY_IMPORT:
            try:
                if hasattr(importlib.import_module(f"fedbench.{module}"), said[1]):
                    return f"it is in fedbench.{module}"
            except ImportError:
                continue
    package, _, rest = (error.name or "").partition(".")
    return f"it is fedbench.{MOVED[rest]} now" if package == "fedbench" and rest in MOVED else ""


def _hint_of_key(key: object, place: TracebackType) -> str:
    """What the dict holds in which a key was looked up, if the line shows which dict that is."""
    mapping = _looked_up(place, key)
    if mapping is None:
        return ""
    name, held = mapping
    return f"{name} has {', '.join(map(str, held)) or 'nothing'}{meant(key, list(map(str, held)))}"


def _looked_up(place: TracebackType, key: object) -> tuple[str, Mapping[object, object]] | None:
    # the very expression that failed, for a line may look up several keys
    segment = _segment(place.tb_frame.f_code, place.tb_lasti)
    try:
        node = ast.parse(segment.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        return None
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        value = place.tb_frame.f_locals.get(node.value.id)
        if isinstance(value, Mapping) and key not in value:
            return node.value.id, value
    return None


def _segment(code: CodeType, instruction: int) -> str:
    """The source of the expression that a frame was at."""
    # an instruction has two bytes
    start, end, first, last = list(code.co_positions())[instruction // 2]
    if start is None or start != end or first is None or last is None:
        return ""
    return linecache.getline(code.co_filename, start).encode()[first:last].decode(errors="replace")


def _file(cls: type) -> str:
    try:
        return inspect.getsourcefile(cls) or cls.__module__
    except (TypeError, OSError):
        return cls.__module__


def _line(cls: type, name: str, thing: object) -> int:
    thing = thing.fget if isinstance(thing, property) else getattr(thing, "__func__", thing)
    code = getattr(inspect.unwrap(thing) if callable(thing) else thing, "__code__", None)
    if isinstance(code, CodeType):
        return _line_of_def(code)
    try:
        lines, first = inspect.getsourcelines(cls)
    except (TypeError, OSError):
        return 1
    for number, line in enumerate(lines):
        if re.match(rf"\s*{name}\s*[:=]" if name else r"\s*class\s", line):
            return first + number
    return first


def _line_of_def(code: CodeType) -> int:
    """The line of `def`, below its decorators."""
    line = code.co_firstlineno
    while re.match(r"\s*@", linecache.getline(code.co_filename, line)):
        line += 1
    return line
