"""Config files: .json or .toml, with flag names as keys."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedbench import files
from fedbench.contract.algorithm import Algorithm
from fedbench.errors import UsageError
from fedbench.settings import hints
from fedbench.settings.flags import Flag


def read_config(path: Path, flag: str = "--config") -> dict[str, Any]:
    """A .json or .toml file as a dict; keys with underscores. Errors name the flag that gave the file."""
    if path.suffix not in (".json", ".toml"):
        raise UsageError(f"{flag} {path}: must end in .json or .toml")
    try:
        content = files.read_bytes(path).decode("utf-8-sig")
        values = json.loads(content, object_pairs_hook=_pairs) if path.suffix == ".json" else tomllib.loads(content)
    except OSError as error:
        raise UsageError(f"{flag} {path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UsageError(f"{flag} {path}, line {line}: not UTF-8 text") from error
    except json.JSONDecodeError as error:
        raise UsageError(f"{flag} {path}, line {error.lineno}: {error.msg}") from error
    except tomllib.TOMLDecodeError as error:
        # 3.11 gives the line in the message only: "... (at line 2, column 5)" or "(at end of document)".
        found = re.search(r" \(at (?:line (\d+), .*|end of document)\)$", str(error))
        line = int(found[1]) if found and found[1] else content.count("\n") + 1
        raise UsageError(f"{flag} {path}, line {line}: {str(error)[: found.start()] if found else error}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{flag} {path}: {error}") from error
    if not isinstance(values, dict):
        raise UsageError(f"{flag} {path}, line 1: must hold an object of flag names and values, not a {type(values).__name__}")
    plain = {key.replace("-", "_"): value for key, value in values.items()}
    if len(plain) < len(values):
        raise UsageError(f"{flag} {path}: a key stands there twice, with - and with _")
    return plain


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands there twice")
    return found


def read_values(values: Mapping[str, Any], path: str | None, flags: Mapping[str, Flag], cls: type[Algorithm] | None) -> dict[str, Any]:
    """A config file's values, checked against the flags; `no_mlflow = true` means `mlflow = false`."""
    read: dict[str, Any] = {}
    for key, value in values.items():
        where = f"--config {path}: {key}"
        positive = key.removeprefix("no_")
        if key not in flags and positive in flags and flags[positive].item_kind is bool:
            if positive in values:
                raise UsageError(f"{where}: {positive} stands there too; keep one of them")
            read[positive] = not flags[positive].read(value, where)
        elif key in flags:
            read[key] = flags[key].read(value, where)
        elif cls is not None or not hints.owners(key):
            raise UsageError(f"--config {path}: unknown key {key!r}" + hints.for_key(key, list(flags), cls, str))
    return read
