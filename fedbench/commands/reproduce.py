"""`python -m fedbench reproduce`: run one row of a committed table of results again, and say whether it is the same."""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from fedbench import CHECKOUT, files
from fedbench.console import fitted
from fedbench.contract import registry
from fedbench.errors import DataError, FedbenchError, UsageError
from fedbench.evaluation.metrics import client_metrics
from fedbench.experiment import folder, run, table_rows
from fedbench.settings.naming import title
from fedbench.settings.parser import Parser, whole_number
from fedbench.text import is_number, nearest, say
from fedbench.tracking.run_log import setup_logging

NEAR = 2.0
"""standard errors within which two figures count as alike"""
TABLES = Path("docs/results")
EPILOG = f"""TABLE is a JSON file of docs/results, or its name. A row is a method on a dataset, in one
of the table's readings: {", ".join(table_rows.READINGS)}.

It says "the same" if every metric has the table's digits. Otherwise it says how far each
is off, in standard errors over the clients of the new run. Exit code 0 if all are within
{NEAR:g} of them, 1 if one is not. Other machines sum in another order, so the last digits
may differ; a method that branches on them may differ more.

examples:
  python -m fedbench reproduce published_and_clean --row fedmf --dataset filmtrust
  python -m fedbench reproduce docs/results/published_and_clean.json --row fedmf --dataset ml-100k --reading closed --seed 1
"""


def parser() -> Parser:
    made = Parser(
        prog="python -m fedbench reproduce",
        usage="python -m fedbench reproduce TABLE --row NAME --dataset NAME [--reading NAME] [--seed N] [flags]",
        description="Run one row of a table of results again and compare.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("table", nargs="?", metavar="TABLE", help="a JSON file of docs/results, or its name")
    made.add_argument("--row", metavar="NAME", help="the method")
    made.add_argument("--dataset", metavar="NAME", help="the dataset")
    made.add_argument("--reading", choices=tuple(table_rows.READINGS), default="clean", help="the column (default: clean)")
    made.add_argument("--seed", type=whole_number, default=0, metavar="N", help="which seed's run (default: 0)")
    made.add_argument("--threads", type=whole_number, default=1, metavar="N", help="CPU threads (default: 1, as for the tables)")
    made.add_argument("--data-dir", type=Path, metavar="DIR", help="look for datasets here first")
    made.add_argument("--out", type=Path, metavar="DIR", help="keep the run in this folder")
    made.add_argument("--debug", action="store_true", help="show tracebacks")
    return made


def main(argv: list[str]) -> int:
    given = parser().read(argv)
    for name, value in {"TABLE": given.table, "--row": given.row, "--dataset": given.dataset}.items():
        if value is None:
            raise UsageError(f"{name} is missing: name a table, a method and a dataset; reproduce --help has examples")
    setup_logging(quiet=True, debug=given.debug)
    path = table_path(given.table)
    algo, dataset = registry.algorithm_name(given.row), registry.dataset_name(given.dataset)
    registry.algorithm(algo, where="--row")
    key, row = find_row(path, dataset, algo, given.reading, given.seed)
    say(f"row     {key}, of {path}" + (f", commit {row['commit'][:12]}" if row.get("commit") else ""))
    flags = {**table_rows.flags(dataset, algo, given.reading, given.seed), "threads": given.threads, "no_mlflow": None, "quiet": None}
    found, errors = run_again(flags, row, given)
    return compare(row, found, errors)


def table_path(name: str) -> Path:
    """The table's file; a bare name is looked for in docs/results, here and in the checkout."""
    bare = Path(name) if name.endswith(".json") else Path(f"{name}.json")
    places = [Path(name), TABLES / bare, *([CHECKOUT / TABLES / bare] if CHECKOUT else [])]
    path = next((path for path in places if path.is_file()), None)
    if path is None:
        raise UsageError(f"TABLE {name}: no such file, and {TABLES} has none of that name")
    return path


def find_row(path: Path, dataset: str, algo: str, reading: str, seed: int) -> tuple[str, dict[str, Any]]:
    """The run's key in the table, and what the table has of it."""
    try:
        table = files.read_json(path)
    except DataError as error:
        raise DataError(f"TABLE {error}") from None
    key = table_rows.key(dataset, algo, reading, seed)
    row = table.get(key)
    if not isinstance(row, dict):
        rows = sorted(name for name in table if name.startswith(f"{dataset} {algo} "))
        hint = f"it has {', '.join(rows)}" if rows else "did you mean " + " or ".join(nearest(key, table) or sorted(table)[:1]) + "?"
        raise UsageError(f"{path} has no row {key!r}; {hint}")
    if "hours" in row and "hr_10" not in row:
        raise UsageError(f"{path}: {key!r} was not run, for it would take {row['hours']} h, so there is nothing to compare with")
    if not all(is_number(row.get(name)) for name in table_rows.METRICS):
        raise DataError(f"{path}: the row {key!r} must have {', '.join(table_rows.METRICS)}")
    return key, row


def run_again(flags: dict[str, Any], row: dict[str, Any], given: argparse.Namespace) -> tuple[dict[str, float], dict[str, float]]:
    """The new run's test metrics, and the standard error of each over clients."""
    words = {name: value for name, value in flags.items() if value is not None}
    config = dataclasses.replace(table_rows.config_of(words), mlflow=False, quiet=True, debug=given.debug, keep_state="none")
    if given.data_dir:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, data_dir=given.data_dir))
    if row.get("config") not in (None, config.digest()):
        say("note    the settings are not those of the table: a default has changed since. What follows compares two settings")
    with tempfile.TemporaryDirectory(prefix="fedbench-") as place:
        out = given.out or Path(place) / "run"
        with redirect_stdout(StringIO()):
            summary = run.run(dataclasses.replace(config, out=out))
        clients = folder.read_clients(out)
    ranks = {"": clients["rank_test"].to_numpy(), "full_": clients["full_rank_test"].to_numpy()}
    values = {f"{prefix}{name}": each for prefix, rank in ranks.items() for name, each in client_metrics(rank).items()}
    errors = {name: float(values[name].std(ddof=1) / np.sqrt(len(values[name]))) for name in table_rows.METRICS}
    return {name: float(summary["test"][name]) for name in table_rows.METRICS}, errors


def compare(row: dict[str, Any], found: dict[str, float], errors: dict[str, float]) -> int:
    """Print the table's figures beside the new ones; 0 if they are alike."""
    off = {}
    wide = max(len(title(name)) for name in found)
    say(f"{'':<{wide}}  {'table':>8}  {'now':>8}")
    for name, value in found.items():
        # the table's digits, so that what was rounded there is not a difference here
        now = round(value, table_rows.DIGITS)
        if now != row[name]:
            off[name] = abs(now - row[name]) / errors[name] if errors[name] else float("inf")
        said = f"{off[name]:.2f} standard errors {'above' if now > row[name] else 'below'}" if name in off else "the same"
        say(fitted(f"{title(name):<{wide}}  {row[name]:>8.4f}  {now:>8.4f}  {said}"))
    if not off:
        say("the same")
        return 0
    worst = max(off, key=lambda name: off[name])
    say(f"not the same: {title(worst)} is {off[worst]:.2f} standard errors off, " + ("which is alike" if off[worst] <= NEAR else "too far"))
    return 0 if off[worst] <= NEAR else FedbenchError.exit_code
