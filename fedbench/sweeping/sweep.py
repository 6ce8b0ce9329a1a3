"""Many runs of train.py that differ in some flags: `python -m fedbench sweep`, `python sweeps/grid.py`.

A sweep lives in one folder: `sweep.json` says what it is and how far it has come, every point is a run folder named by its key,
`work/` holds each point's config and what its process printed. A point is finished when its summary.json is there and its config
fits; that alone decides what the next call does, so a sweep may be killed at any moment.
"""

from __future__ import annotations

import argparse
import csv
import io
import logging
import re
import shlex
import shutil
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from fedbench import files, trust
from fedbench.console import fitted
from fedbench.errors import DataError, Interrupted, UsageError
from fedbench.experiment import processes
from fedbench.experiment.folder import read_settings, read_summary
from fedbench.files import read_json, write_json
from fedbench.locks import claimed
from fedbench.settings import naming
from fedbench.settings.parser import Parser
from fedbench.sweeping import study
from fedbench.sweeping.study import Point, Study
from fedbench.text import nearest, say, shown
from fedbench.tracking.copier import mlflow_at_hand
from fedbench.tracking.run_log import plain, setup_logging
from fedbench.tracking.sweep_parent import Parent

log = logging.getLogger("fedbench")

PLACE = Path("runs/sweeps")
OUTPUTS = ("sweep.json", "table.*", "*.png")
"""files of a sweep's folder that go to MLflow"""
NEEDED = ("val", "rounds", "client_visits", "bytes_up", "bytes_down", "seconds_per_round")
"""keys of a point's summary that the result tables need"""
NOT_HERE = ("--list", "--print-config", "--resume")
EPILOG = """Every flag of train.py can be given. One with several values is an axis, and the points are all combinations:
  python sweeps/grid.py --algo fedavg_ncf --dataset ml-100k -n 10 20 50 -e 1 3 5 --seeds 0-1 --rounds 20 --jobs 2
  python sweeps/grid.py --algo fedem --dataset filmtrust --alpha 0 0.5 0.9 --exclude-self true false --dry-run
  python sweeps/grid.py --study sweeps/n_and_e.toml --seeds 0-2

Finished points are skipped: the same command resumes a sweep that was interrupted or killed, and runs failed points again.
When n varies, say what is held fixed: --rounds 100, or --budget visits --budget-value 20000 (or bytes).
`python train.py --algo NAME --help` shows the flags of train.py.
"""


def main(argv: list[str]) -> int:
    what, options = read(argv)
    return execute(what, options, argv)


def read(argv: Sequence[str]) -> tuple[Study, argparse.Namespace]:
    """What is to be run, and the sweep's own flags; `out` is its folder."""
    own, line = split_line(argv)
    options = parser().parse_args(own)
    try:
        what = study.read(line, options.study, options.name)
    except UsageError as error:
        raise better_hint(error) from None
    options.out = options.out or PLACE / f"{what.name}-{what.hash8()}"
    return what, options


def parser() -> argparse.ArgumentParser:
    own = Parser(
        prog="python -m fedbench sweep",
        usage="python -m fedbench sweep --algo NAME --dataset NAME -n 10 20 50 ... [flags]",
        description="Run train.py for every combination of the values given, several at once, and compare the results.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    own.add_argument("--study", type=Path, metavar="FILE", help="a .toml file with axes and fixed values; flags given here overrule it")
    own.add_argument("--name", help="name of the sweep (default: the study's, or algorithm and dataset)")
    own.add_argument("--out", type=Path, metavar="DIR", help=f"folder of the sweep (default: {PLACE}/<name>-<hash>)")
    own.add_argument("--dry-run", action="store_true", help="show the points and how long they may take, by short trials; run nothing")
    own.add_argument("--jobs", type=whole_number, default=1, metavar="N", help="points at once; they share the CPU threads (default: 1)")
    own.add_argument("--backend", choices=("pool", "ray"), default="pool", help="processes here, or tasks on a Ray cluster (default: pool)")
    own.add_argument("--cpus-per-point", type=whole_number, default=1, metavar="N", help="with ray: CPUs of a point (default: 1)")
    own.add_argument("--gpus-per-point", type=share, default=0.0, metavar="X", help="with ray: GPUs of a point; 0.25 puts four on one GPU")
    return own


def whole_number(word: str) -> int:
    if not (word.isascii() and word.isdecimal()) or int(word) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1, not {word!r}")
    return int(word)


def share(word: str) -> float:
    if not re.fullmatch(r"\d{1,6}(\.\d*)?|\.\d+", word, re.ASCII):
        raise argparse.ArgumentTypeError(f"must be a number from 0, not {word!r}")
    return float(word)


def own_options() -> set[str]:
    return {option for action in parser()._actions for option in action.option_strings}


def split_line(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of the sweep's own flags, and those that are for train.py."""
    own: list[str] = []
    line: list[str] = []
    place, mine = line, own_options()
    for word in argv:
        if study.is_flag(word):
            option = word.partition("=")[0]
            if option in NOT_HERE:
                raise UsageError(f"{option} is for train.py; a sweep has --dry-run, and resumes by itself")
            place = own if option in mine else line
        place.append(word)
    return own, line


def better_hint(error: UsageError) -> UsageError:
    """The error with a hint to the sweep's own flags, which train.py's parser does not know."""
    unknown = re.search(r"unknown flag (--[\w-]+)", str(error))
    near = nearest(unknown[1], own_options()) if unknown and "did you mean" not in str(error) else []
    return UsageError(f"unknown flag {unknown[1]}; did you mean {near[0]}?") if unknown and near else error


def check_plug_ins(what: Study) -> None:
    """Raise for a mistake in somebody's own algorithm, once and before anything is written; every trial looks at its own flags again."""
    named = {type(point.config.algorithm): point.config for point in what.points.values()}
    for cls, config in named.items():
        if not cls.__module__.startswith("fedbench."):
            import torch

            from fedbench.simulation.probe import check_local_work

            check_local_work(config.algorithm, getattr(torch, config.dtype))


def execute(what: Study, options: argparse.Namespace, argv: Sequence[str]) -> int:
    """Show the points, or run those that are missing and compare them all."""
    first = next(iter(what.points.values())).config
    setup_logging(first.quiet, first.debug)
    check_plug_ins(what)
    folder = options.out
    if options.dry_run:
        show_plan(Progress.read(folder, what), options.jobs)
        return 0
    # a second call in this folder would run the same points
    with claimed(folder):
        progress = Progress.read(folder, what)
        progress.write()
        parent = Parent(first.experiment, what.name, folder) if first.mlflow else None
        if parent:
            parent.tidy(*progress.folders())
        try:
            ran = run_missing(progress, options, parent)
        except BaseException as error:
            progress.stop()
            if parent:
                parent.finish("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED", {}, {}, [])
            if isinstance(error, KeyboardInterrupt):
                raise Interrupted("interrupted; the same command goes on") from None
            raise
        return conclude(progress, parent, argv, ran)


@dataclass
class Progress:
    """The status of every point, written to sweep.json."""

    folder: Path
    what: Study
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    """by key: status (waiting, running, finished, failed), seconds, error"""

    @classmethod
    def read(cls, folder: Path, what: Study) -> Progress:
        """Read the status of every point from its folder and from sweep.json."""
        before = earlier_points(folder / "sweep.json")
        progress = cls(folder, what)
        for key, point in what.points.items():
            earlier = before.get(key, {})
            status = "finished" if finished(folder / key, point) else "failed" if earlier.get("status") == "failed" else "waiting"
            told = {"seconds": earlier.get("seconds"), "error": earlier.get("error") if status == "failed" else None}
            progress.entries[key] = {"key": key, "values": plain(point.values), "status": status, **told}
        return progress

    def keys(self, *status: str) -> list[str]:
        return [key for key, entry in self.entries.items() if entry["status"] in status]

    def folders(self) -> tuple[dict[Path, str], list[Path]]:
        """Folders of the finished points with their names, and folders of the others."""
        finished = {self.folder / key: self.what.points[key].label for key in self.keys("finished")}
        return finished, [self.folder / key for key in self.keys("waiting", "running", "failed")]

    def note(self, key: str, **facts: Any) -> None:
        self.entries[key].update(facts)
        self.write()

    def stop(self) -> None:
        """Set running points back to waiting: the next call resumes them."""
        for key in self.keys("running"):
            self.entries[key]["status"] = "waiting"
        self.write()

    def write(self) -> None:
        what = self.what
        common = [item for item in what.grids[0].fixed.items() if all(item in grid.fixed.items() for grid in what.grids)]
        units = {point.config.budget for point in what.points.values()}
        limits = {point.config.limit for point in what.points.values()}
        told = {
            "name": what.name,
            "hash": what.hash8(),
            "about": what.about,
            "axes": what.axes,
            "fixed": dict(common),
            "budget": {"what": units.pop() if len(units) == 1 else None, "value": limits.pop() if len(limits) == 1 else None},
            "grids": [{"name": grid.name, "axes": grid.axes, "fixed": grid.fixed, "points": list(grid.keys)} for grid in what.grids],
            "points": list(self.entries.values()),
        }
        write_json(self.folder / "sweep.json", plain(told))


def earlier_points(path: Path) -> dict[str, dict[str, Any]]:
    """What sweep.json says of each point, by key."""
    found = read_json(path).get("points", [])
    kinds = {"key": str, "status": str, "error": str | None, "seconds": int | float | None}
    if not isinstance(found, list) or not all(isinstance(entry, dict) and isinstance(entry.get("key"), str) for entry in found):
        raise DataError(f"{path}: points must be a list of the sweep's points; remove the file, finished points are kept")
    for entry in found:
        for key, kind in kinds.items():
            if not isinstance(entry.get(key, ""), kind) and key in entry:
                raise DataError(f"{path}: {key} of point {entry['key']} has the wrong type; remove the file, finished points are kept")
    return {entry["key"]: entry for entry in found}


def finished(folder: Path, point: Point) -> bool:
    """Whether the folder holds the point's result: a summary, and the point's config. (Files count by content, which is in the key.)"""
    if not read_summary(folder, NEEDED):
        return False
    there, here = read_settings(folder), point.config.to_dict()
    return all(there.get(key) == here[key] for key in point.config.identity() if key not in ("algo", "dataset"))


def show_plan(progress: Progress, jobs: int) -> None:
    """Print the points, and the size and expected time of the missing ones."""
    points = progress.what.points
    done, missing = progress.keys("finished"), progress.keys("waiting", "failed")
    for key, entry in progress.entries.items():
        say(fitted(f"{key}  {entry['status']:<8}  {points[key].label}"))
    say(f"{len(points)} points, {len(done)} finished, into {progress.folder}")
    if missing:
        say(fitted(forecast(progress, jobs)))


def forecast(progress: Progress, jobs: int) -> str:
    """The missing points' size and time: by the finished ones of their algorithm and data, or by short trials."""
    from fedbench.sweeping import trials

    points, missing = progress.what.points, progress.keys("waiting", "failed")
    known = {kind(points[key]) for key in progress.keys("finished")}
    tried = {kind(points[key]): points[key].config for key in sorted(missing, key=lambda key: -work(points[key])[2])}  # the smallest stays
    unknown = {one: tried[one] for one in dict.fromkeys(kind(points[key]) for key in missing) if one not in known}
    began = time.monotonic()
    found = trials.run(unknown, processes.threads_each(next(iter(points.values())).config.threads, jobs)) if unknown else {}
    took = time.monotonic() - began
    trial = {one: told for one, told in found.items() if isinstance(told, trials.Trial)}
    by_finished = estimate(progress)
    seconds = {key: by_finished[key] for key in missing if kind(points[key]) in known}
    seconds |= {key: trial[kind(points[key])].seconds(points[key].config) for key in missing if kind(points[key]) in trial}
    sized = {key: (trial[kind(points[key])], points[key].config) for key in missing if kind(points[key]) in trial}
    lines = [f"{algo} on {dataset}: {told}" for (algo, dataset), told in found.items() if isinstance(told, str)]
    if untold := [" on ".join(one) for one in unknown if one not in found]:
        lines.append(f"not tried within {trials.SECONDS:.0f} s, so without an estimate: {', '.join(untold)}")
    if sized:
        visits = sum(one.rounds(run) * one.visits(run) for one, run in sized.values())
        lines.append(f"{sum(one.rounds(run) for one, run in sized.values()):,.0f} rounds, {visits:,.0f} client visits")
    if seconds:
        by = " and ".join(filter(None, ["the finished ones" if known else "", f"trials of {took:.0f} s" if trial else ""]))
        count = f"{len(seconds)} of the {len(missing)} missing" if len(seconds) < len(missing) else f"the missing {len(missing)}"
        lines.append(f"{count} may take {clock(sum(seconds.values()) / jobs)} with --jobs {jobs}, by {by}")
    return "\n".join(lines)


def estimate(progress: Progress) -> dict[str, float]:
    """Seconds of each point that is missing: start + a·rounds + b·visits·epochs, fitted to the finished ones of its algorithm and data."""
    from scipy.optimize import nnls

    points = progress.what.points
    known = {key: seconds for key in progress.keys("finished") if (seconds := seconds_of(progress, key))}
    out = {}
    for key in progress.keys("waiting", "running", "failed"):
        like = [other for other in known if kind(points[other]) == kind(points[key])]
        # three coefficients need three different amounts of work
        if len({work(points[other]) for other in like}) > 2:
            # no part of the time shrinks as work grows, so the coefficients are kept from going below 0
            fit, _ = nnls(np.array([work(points[other]) for other in like]), np.array([known[other] for other in like]))
            out[key] = float(np.dot(fit, work(points[key])))
        else:  # too few to tell what the time grows with
            out[key] = float(np.mean([known[other] for other in like or known])) if known else 0.0
    return out


def seconds_of(progress: Progress, key: str) -> float:
    """A finished point's time: measured, or, where the sweep was killed before it noted that, what its rounds took."""
    if measured := progress.entries[key]["seconds"]:
        return float(measured)
    summary = read_summary(progress.folder / key, NEEDED)
    return float((summary["seconds_per_round"] or 0) * (summary["rounds"] or 0))


def kind(point: Point) -> tuple[str, str]:
    return point.config.algo, point.config.dataset


def work(point: Point) -> tuple[float, float, float]:
    """Features of the time model: a constant, rounds, and visits × epochs."""
    algorithm = point.config.algorithm
    n = algorithm.clients_per_round or algorithm.usual_cohort or 1
    rounds = {"rounds": point.config.limit, "visits": point.config.limit / n, "bytes": 1.0}[point.config.budget]
    return 1.0, rounds, rounds * n * algorithm.local_epochs


def clock(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{seconds:.0f} s" if seconds < 100 else f"{minutes} min" if minutes < 100 else f"{minutes / 60:.1f} h"


def run_missing(progress: Progress, options: argparse.Namespace, parent: Parent | None) -> bool:
    """Run every point that is not finished; a failed point does not stop the others. Returns whether any was missing."""
    missing = progress.keys("waiting", "failed")
    if not missing:
        return False
    points = progress.what.points
    # a failed point starts from its first round: what it left may be why it failed
    for key in progress.keys("failed"):
        clear(progress.folder / key)
    quiet = points[missing[0]].config.quiet
    bar = tqdm(
        total=len(points),
        initial=len(points) - len(missing),
        desc=shown(progress.what.name),
        unit="point",
        disable=quiet,
        dynamic_ncols=True,
        bar_format="{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} points [{elapsed}{postfix}]",
    )
    began: dict[str, float] = {}
    with (
        mlflow_at_hand(parent is not None and options.backend == "pool") as environment,
        bar,
        closing(events(progress, missing, options, parent, environment)) as happened,
    ):
        for event in happened:
            if event.code is None:
                began[event.key] = time.monotonic()
                progress.note(event.key, status="running")
            else:
                began.pop(event.key, None)
                ended(progress, event, bar)
            passed = sum(time.monotonic() - start for start in began.values())
            left = (sum(estimate(progress).values()) - passed) / options.jobs
            bar.set_postfix_str(f"about {clock(left)} left" if left > 0 and options.backend == "pool" else "")
    return True


def events(
    progress: Progress, keys: Sequence[str], options: argparse.Namespace, parent: Parent | None, here: dict[str, str]
) -> Generator[processes.Event, None, None]:
    """Start the points on this machine (with `here` added to their environment) or on a cluster, and yield how each ends."""
    points, folder = progress.what.points, progress.folder
    environment = trust.handed_on() | ({"FEDBENCH_PARENT_RUN": parent.run_id} if parent and parent.run_id else {})
    names = {key: {"MLFLOW_RUN_NAME": points[key].label} for key in keys}
    if options.backend == "ray":
        from fedbench.sweeping import ray_backend

        tasks = {key: ray_backend.Task(points[key].config.to_dict(), {**environment, **names[key]}) for key in keys}
        return ray_backend.run(tasks, folder, options.cpus_per_point, options.gpus_per_point)
    threads = processes.threads_each(points[keys[0]].config.threads, options.jobs)
    work = folder / "work"
    jobs = [
        processes.job(key, points[key].config.to_dict(), folder / key, work, threads, **environment, **here, **names[key]) for key in keys
    ]
    return processes.run(jobs, options.jobs)


def clear(folder: Path) -> None:
    """Remove the files of a failed run, unless a process still writes there: the new run then reports that."""
    with suppress(UsageError), claimed(folder):
        for entry in folder.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name != ".lock":
                entry.unlink()


def ended(progress: Progress, event: processes.Event, bar: Any) -> None:
    """Note how a point ended."""
    point = progress.what.points[event.key]
    assert event.code is not None
    if event.code == 0 and finished(progress.folder / event.key, point):
        progress.note(event.key, status="finished", seconds=round(event.seconds, 3), error=None)
        said = naming.headline(read_summary(progress.folder / event.key, NEEDED))
    else:
        error = processes.last_error(progress.folder / "work" / f"{event.key}.log", event.code)
        progress.note(event.key, status="failed", error=error)
        said = f"FAILED: {error}"
    bar.update()
    if not bar.disable:
        bar.write(shown(f"{point.label}: {said} ({clock(event.seconds)})"), file=sys.stderr)


def points_in_tables(folder: Path) -> set[str] | None:
    """Keys of the finished points in the result tables on disk; None if there are no tables yet."""
    try:
        rows = csv.DictReader(io.StringIO(files.read_text(folder / "table.csv"), newline=""))
        return {row["key"] for row in rows if row["status"] == "finished"} if files.read_text(folder / "table.md") else None
    except (OSError, ValueError, KeyError, csv.Error):
        return None


def conclude(progress: Progress, parent: Parent | None, argv: Sequence[str], ran: bool) -> int:
    """Write result tables and figures, print failures and how to run them again; returns the exit code."""
    done, failed = progress.keys("finished"), progress.keys("failed")
    summaries = {key: read_summary(progress.folder / key, NEEDED) for key in done}
    # tables that cover these points are as they would be written now
    if ran or points_in_tables(progress.folder) != set(done):
        from fedbench.sweeping import result_tables

        result_tables.write(progress.what, summaries, progress.entries, progress.folder)
    table = files.read_text(progress.folder / "table.md")
    say(fitted(table))
    link = None
    if parent:
        parent.tidy(*progress.folders())
        link = parent.view(progress.what.axes) if done else None
        best = [line for line in table.splitlines() if line.startswith("best on validation")]
        parent.note(best, table.partition("\n\n")[2], link)  # without its heading
        axes = {key: ",".join(map(str, values)) for key, values in progress.what.axes.items()}
        fixed = {key: str(value) for key, value in progress.what.grids[0].fixed.items() if len(progress.what.grids) == 1}
        figures: dict[str, float] = {"points": len(progress.entries), "points_finished": len(done), "points_failed": len(failed)}
        parent.finish(
            "FAILED" if failed else "FINISHED",
            {**fixed, **axes},
            figures,
            [file for pattern in OUTPUTS for file in sorted(progress.folder.glob(pattern))],
        )
    for key in failed:
        say(f"failed  {key}  {progress.what.points[key].label}: {progress.entries[key]['error']}", file=sys.stderr)
    if failed:
        say(f"redo    python -m fedbench sweep {shlex.join(argv)}", file=sys.stderr)
        say(f"logs    {progress.folder / 'work'}/<point>.log", file=sys.stderr)
    say(f"folder  {progress.folder}")
    if parent and parent.run_id:
        say(f"charts  {link or parent.plain_link(naming.main_metric(summaries.values()))}")
    return 1 if failed else 0
