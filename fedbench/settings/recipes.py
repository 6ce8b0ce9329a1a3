"""Tuned recipes: recipes/<dataset>/<algo>.toml, which `python -m fedbench tune` writes and `--recipe tuned` takes.

A file has a table `search`, which says where it comes from, and a table `fields`, which is what it sets.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedbench import CHECKOUT, HERE, files
from fedbench.contract import registry
from fedbench.contract.algorithm import Algorithm
from fedbench.errors import UsageError
from fedbench.settings.flags import flags_of

FOLDER = "recipes"
HEAD = "# Written by `python -m fedbench tune`; `--recipe tuned` takes it. docs/tuning.md says what the keys mean.\n"


def place(folder: Path, cls: type[Algorithm], dataset: str) -> Path:
    """The file of a method and a dataset; of a dataset that is a file, by that file's name."""
    name = registry.dataset_name(dataset)
    return folder / re.sub(r"[^\w.-]", "_", Path(name).stem if "/" in name else name) / f"{cls.name}.toml"


def find(cls: type[Algorithm], dataset: str) -> Path | None:
    """Where the recipe is: below the folder that the command was started in, or among those that come with fedbench."""
    folders = (Path(FOLDER), (CHECKOUT or HERE) / FOLDER)
    return next((path for folder in folders if (path := place(folder, cls, dataset)).is_file()), None)


def tuned_fields(cls: type[Algorithm], dataset: str) -> dict[str, Any]:
    """What the tuned recipe sets, checked like any other value."""
    path = find(cls, dataset)
    if path is None:
        dataset = registry.dataset_name(dataset)
        raise UsageError(
            f"--recipe tuned: there is no {place(Path(FOLDER), cls, dataset)}; `python -m fedbench tune --algo {cls.name} "
            f"--dataset {dataset}` makes it"
        )
    try:
        fields = tomllib.loads(files.read_text(path))["fields"]
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"--recipe tuned: {path}: cannot be read ({files.reason(error)}); tune again, or remove it") from None
    flags = {flag.key: flag for flag in flags_of(cls, cls.choices)}
    if not isinstance(fields, dict):
        raise UsageError(f"--recipe tuned: {path}: fields must be a table")
    for key in fields:
        if key not in flags:
            raise UsageError(f"--recipe tuned: {path}: {cls.name} has no field {key!r}; tune again, or remove it")
    return {key: flags[key].read(value, f"--recipe tuned: {path}: {key}") for key, value in fields.items()}


def write(path: Path, search: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """A recipe with its head."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tables = {"search": {key: value for key, value in search.items() if value is not None}, "fields": fields}
    parts = [f"[{name}]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in table.items()) for name, table in tables.items()]
    files.write_text(path, HEAD + "\n" + "\n".join(parts))


def _toml(value: Any) -> str:
    """Numbers, words, switches and lists are spelled as in JSON; TOML has no none, so the word stands for it, as on the command line."""
    return '"none"' if value is None else json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
