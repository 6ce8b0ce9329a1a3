"""What a run's folder holds, read back and checked. It may come from somebody else or be damaged: DataError names the file."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from fedbench import files
from fedbench.data.protocol import Protocol
from fedbench.errors import DataError, UsageError
from fedbench.text import is_number
from fedbench.tracking import mirror_process

WORDS = ("algo", "dataset", "protocol", "protocol_fingerprint")
NUMBERS = ("rounds", "best_round", "items", "clients", "bytes_up", "bytes_down", "client_visits", "clients_never_seen", "seconds_per_round")
TABLES = ("val", "test", "popularity", "chance", "user_item_mean", "global_mean", "new_user")
"""parts of a summary that hold numbers by name"""
FLOOR = {
    **{"rank_test": "rank_popularity", "full_rank_test": "full_rank_popularity"},
    **{"mse_test": "mse_means", "mae_test": "mae_means", "accuracy_test": "accuracy_means"},
}
"""columns of per_client.parquet that metrics come from, and the column of the reference (popularity, or the means) for each"""
SPREAD = ("mrr_p10", "mrr_worst_decile", "rmse_p90", "rmse_worst_decile")
"""metrics of a result, beside those of the full ranking, that its rounds do not have: how unequal clients fare"""
MOST_CANDIDATES = 10**8
LARGEST = 2**63
"""whole numbers are below it"""


def read_summary(folder: Path, needed: Sequence[str] = ()) -> dict[str, Any]:
    """A finished run's summary.json; {} if there is none. `needed`: keys that it must have beside those of every run."""
    path = folder / "summary.json"
    summary = files.read_json(path)
    if not summary:
        return {}
    for key in (*WORDS, "leaky", "seed", "test", *needed):
        if key not in summary:
            raise _damaged(path, f"has no {key!r}, so it is no run's summary")
    for key in WORDS:
        if not isinstance(summary[key], str):
            raise _damaged(path, f"{key} must be a word")
    if not isinstance(summary["leaky"], bool) or not _is_whole(summary["seed"]):
        raise _damaged(path, "leaky must be true or false, and seed a whole number")
    for key in NUMBERS:
        if not _is_number_or_none(summary.get(key)):
            raise _damaged(path, f"{key} must be a number")
    for key in TABLES:
        if key in summary and not (isinstance(summary[key], dict) and all(map(_is_number_or_none, summary[key].values()))):
            raise _damaged(path, f"{key} must hold numbers")
    fields = summary.get("protocol_fields", {})
    candidates = fields.get("eval_negatives", 1) if isinstance(fields, dict) else None
    if candidates is None or not _is_whole(candidates) or not 0 < candidates <= MOST_CANDIDATES:
        raise _damaged(path, "protocol_fields must hold the protocol's flags")
    if fields.get("fold") is not None and not _is_whole(fields["fold"]):
        raise _damaged(path, "fold must be a whole number")
    return summary


def read_settings(folder: Path) -> dict[str, Any]:
    """A run's config.json: words, numbers and lists of them."""
    path = folder / "config.json"
    settings = files.read_json(path)
    for key, value in settings.items():
        for member in value if isinstance(value, list) else [value]:
            if isinstance(member, list | dict):
                raise _damaged(path, f"{key!r} is not a flag's value")
    for key in ("clients_per_round", "local_epochs"):
        if settings.get(key) is not None and not _is_whole(settings[key]):
            raise _damaged(path, f"{key} must be a whole number")
    return settings


def read_clients(folder: Path) -> pd.DataFrame:
    """A run's per_client.parquet: the columns of a ranking or of ratings, and of the reference where there are any."""
    path = folder / "per_client.parquet"
    try:
        table = pq.read_table(io.BytesIO(files.read_bytes(path)))
        clients = table.to_pandas(ignore_metadata=True)
    except FileNotFoundError:
        raise DataError(f"{path}: is missing; run it again or leave the folder out") from None
    except (OSError, ValueError, TypeError, KeyError, OverflowError, pa.ArrowException) as error:
        raise _damaged(path, f"cannot be read ({files.reason(error)})") from None
    ranked = "rank_test" in clients
    numbers = ["train_items", *(name for name in FLOOR if ("rank" in name) == ranked), *(() if ranked else ["ratings_test"])]
    for name in ("user", *numbers):
        if list(clients.columns).count(name) != 1:
            raise _damaged(path, f"has no column {name}")
    for name in [*numbers, *(name for name in FLOOR.values() if name in clients)]:
        column = clients[name]
        if isinstance(column, pd.DataFrame) or not pd.api.types.is_numeric_dtype(column) or np.iscomplexobj(column):
            raise _damaged(path, f"the column {name} must hold numbers")
        values = column.to_numpy(np.float64)
        if "rank" in name and not (np.isfinite(values) & (values >= 1)).all():
            raise _damaged(path, f"the column {name} must hold ranks")
        if name in ("train_items", "ratings_test") and not (np.isfinite(values) & (values >= 0)).all():
            raise _damaged(path, f"the column {name} must hold counts")
    if not len(clients) or (not ranked and not clients["ratings_test"].sum()):
        raise _damaged(path, "has no client that was tested")
    return clients


def read_rounds(folder: Path, rounds: object = None) -> list[dict[str, Any]]:
    """A finished run's metrics.jsonl: each of its `rounds` once and in order. [] if there is none."""
    path = folder / "metrics.jsonl"
    lines = mirror_process.read_lines(path)
    for number, line in enumerate(lines, 1):
        if line["round"] != number:
            raise _damaged(path, f"round {line['round']} stands where round {number} belongs")
    if lines and isinstance(rounds, int) and len(lines) != rounds:
        raise _damaged(path, f"has {len(lines)} rounds of {rounds}")
    return lines


def contradictions(summary: Mapping[str, Any], lines: Sequence[Mapping[str, Any]], select_on: str) -> list[str]:
    """What a result says that its rounds do not: another metric, another best round than was to be chosen, other totals."""
    best = summary.get("best_round")
    if not isinstance(best, int) or not 1 <= best <= len(lines):
        return [f"its best round is {best} of {len(lines)}"]
    found = []
    for part in ("val", "test"):
        said = {key.removeprefix(f"{part}/"): value for key, value in lines[best - 1].items() if key.startswith(f"{part}/")}
        mine = {name: value for name, value in summary.get(part, {}).items() if not name.startswith("full_") and name not in SPREAD}
        for name in {**mine, **said}:
            if name not in said or name not in mine:
                there, where = ("its result", f"round {best}") if name in mine else (f"round {best}", "its result")
                found.append(f"{part}/{name} is in {there} and not in {where}")
            elif mine[name] != said[name]:
                found.append(f"{part}/{name} is {mine[name]} in its result and {said[name]} in round {best}")
    right = chosen_round(lines, select_on, "rmse" in summary.get("test", {}))
    if right is None:
        found.append(f"no round says what {select_on} chooses by")
    elif right != best:
        what = "validation" if select_on == "val" else select_on
        found.append(f"{what} chooses round {right} of its rounds, it reports {best}")
    for key, reference, name, sign in (("beats_popularity", "popularity", "ndcg_10", 1), ("beats_means", "user_item_mean", "rmse", -1)):
        mine, theirs = (summary.get(part, {}).get(name) for part in ("test", reference))
        if key in summary and None not in (mine, theirs) and summary[key] is not (sign * mine > sign * theirs):
            found.append(f"{key} is {summary[key]} in its result, and test/{name} is {mine} beside {theirs} of {reference}")
    last = lines[-1]
    found += [
        f"{key} is {summary[key]} in its result and {last[key]} in its last round"
        for key in ("bytes_up", "bytes_down", "client_visits")
        if key in summary and last.get(key, summary[key]) != summary[key]
    ]
    return found


def chosen_round(lines: Sequence[Mapping[str, Any]], select_on: str, ratings: bool) -> int | None:
    """The round that a run with these rounds reports; None if they do not say. As `Selection` of observers.py chooses."""
    if select_on == "last":
        return len(lines)
    name = f"{select_on}/{'rmse' if ratings else 'hr_10' if select_on == 'test' else 'ndcg_10'}"
    scores = [(-line[name] if ratings else line[name], line["round"]) for line in lines if line.get(name) is not None]
    # of equal ones the first counts on validation, the last on test
    return max(scores, key=lambda one: (one[0], one[1] if select_on == "test" else -one[1]))[1] if scores else None


def check_rounds(out: Path, done: int) -> None:
    """Raise unless metrics.jsonl has each round up to `done` once and in order: a resumed run does not repeat them."""
    path = out / "metrics.jsonl"
    lines = [line for line in mirror_process.read_lines(path) if line["round"] <= done]
    found = [line["round"] for line in lines]
    wrong = next((at for at, number in enumerate(found) if number != at + 1), len(found))
    if wrong < done or len(found) > done:
        what = f"round {wrong + 1} is missing" if wrong + 1 not in found else f"round {found[wrong]} stands where round {wrong + 1} belongs"
        raise UsageError(f"--resume {out}: {path}: {what}, so the run cannot be resumed; start again with another --out")
    for line in lines:
        if not is_number(line.get("seconds")):
            what = f"round {line['round']} has no seconds, so no run wrote it"
            raise UsageError(f"--resume {out}: {path}: {what}; start again with another --out")


def over_folds(summary: dict[str, Any]) -> str:
    """The fingerprint of all folds together."""
    fields = {key: value for key, value in summary["protocol_fields"].items() if key != "protocol"}
    return Protocol(summary["protocol"], **{**fields, "fold": None}).fingerprint(summary["data_checksum"])


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST


def _is_number_or_none(value: object) -> bool:
    return value is None or is_number(value)


def _damaged(path: Path, what: str) -> DataError:
    return DataError(f"{path}: {what}; run it again or leave the folder out")
