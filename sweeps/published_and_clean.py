"""Every method as published and honest, side by side: docs/results/published_and_clean.md and its chart.

    python sweeps/published_and_clean.py --jobs 2                    # measure what is missing, then write the page and the chart
    python sweeps/published_and_clean.py --datasets filmtrust        # of these datasets only
    python sweeps/published_and_clean.py --write                     # measure nothing

Each run is saved in docs/results/published_and_clean.json as it ends, so that a study that was stopped goes on with the next one.
Seeds 0 to 2 where the run of seed 0 takes less than five minutes of one core, else seed 0 alone. A run that would take more than
--hours, by a trial of three rounds, is left out and the page says how long it would be.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from fedbench.experiment import table_rows
from fedbench.experiment.table_rows import DIGITS, METRICS, POINTS, READINGS, evaluated_every

RESULTS = Path(__file__).parents[1] / "docs" / "results"
FILE = RESULTS / "published_and_clean.json"
DATASETS = ("filmtrust", "ml-100k", "ml-1m")
SEEDS, LONG = (0, 1, 2), 300
"""seeds; seconds of one core after which one seed is enough"""
TRIAL = 3
"""rounds of a trial"""


class Paper(NamedTuple):
    """What was published of a method: HR@10/NDCG@10 by dataset, each with where it was read and under which protocol."""

    year: str
    figures: dict[str, tuple[str, str]]


LEAKY = "negatives avoid the held-out items"
METHODS: dict[str, Paper] = {
    "fedmf": Paper("2019", {"ml-1m": (".4912/.2751", f"as FedAvg in FedCA's table; {LEAKY}, round chosen on test")}),
    "fedavg_ncf": Paper("2022", {}),
    "fedncf": Paper("2022", {"ml-1m": (".6054/.3417", f"in PFedRec's table; {LEAKY}")}),
    "fedrecon": Paper("2021", {}),
    "fedfast": Paper("2020", {"ml-1m": (".5061/.2898", f"in FedCA's table; {LEAKY}, round chosen on test")}),
    "lightfr": Paper("2022", {"ml-1m": (".5014/.2709", "its table; 49 candidates (chance .20), ties count for the held-out item")}),
    "pfedrec": Paper(
        "2023",
        {
            "ml-1m": (".7326/.4436", f"its table; {LEAKY}, round chosen on validation, 5 runs"),
            "ml-100k": (".7105/.4389", f"in CoFedRec's table; {LEAKY}"),
        },
    ),
    "gpfedrec": Paper(
        "2024", {"ml-1m": (".7217/.4361", f"in CoFedRec's table; {LEAKY}"), "ml-100k": (".7265/–", f"cited by others; {LEAKY}")}
    ),
    "fedrap": Paper("2024", {"ml-100k": (".9894/.8923", f"its log; {LEAKY}, round chosen on test")}),
    "colr": Paper("2024", {"ml-1m": (".643/–", "off its figure, half of the payload; NCF's files, honest ranks, last round")}),
    "fedca": Paper("2024", {"ml-1m": (".8348/.7118", f"its table; {LEAKY}, round chosen on test")}),
    "fedcia": Paper("2025", {}),
    "fedem": Paper("2026", {"filmtrust": (".8972/.7724", f"its code, run once, seed 0; {LEAKY}, round chosen on test")}),
    "fedcooc": Paper("here", {}),
    "fedease": Paper("here", {}),
}
BESIDE = ("popularity", "local", "central_ease")
"""what every method stands beside: no personal part, no server, no federation"""


class Cell(NamedTuple):
    dataset: str
    algo: str
    reading: str
    seed: int

    @property
    def key(self) -> str:
        return table_rows.key(*self)

    def flags(self) -> dict[str, Any]:
        return table_rows.flags(*self)


def cells(datasets: Iterable[str], seed: int) -> list[Cell]:
    """What is to be run, a key once."""
    found = [Cell(dataset, algo, reading, seed) for dataset in datasets for algo in (*BESIDE, *METHODS) for reading in READINGS]
    return list({cell.key: cell for cell in found}.values())


def missing(found: dict[str, Any], datasets: Iterable[str], seed: int, hours: float = 0.0) -> list[Cell]:
    """What is still to be run with a seed, and what was left out but takes at most `hours`; seeds after 0 only where seed 0's was short."""
    todo = [cell for cell in cells(datasets, seed) if cell.key not in found or found[cell.key].get("hours", float("inf")) <= hours]
    return [cell for cell in todo if not seed or found.get(cell._replace(seed=0).key, {}).get("seconds", LONG) < LONG]


def measure(cell: Cell, hours: float) -> dict[str, Any]:
    """One run, in a process of its own; given again after a kill, it resumes from its last checkpoint. A run over `hours` is not made."""
    import fedbench

    flags = cell.flags()
    rounds = table_rows.config_of(flags).algorithm.rounds
    out = Path("runs") / "published_and_clean" / cell.key.replace(" ", "-")
    if not out.exists() and (needed := hours_of(flags, rounds)) > hours:
        return {"hours": round(needed, 1)}
    started = time.process_time()
    run = fedbench.run(**flags, eval_every=evaluated_every(rounds), threads=1, mlflow=False, quiet=True, keep_state="none", out=str(out))
    told = run.summary
    return {
        **{name: round(float(run.test[name]), DIGITS) for name in METRICS},
        "round": told["best_round"],
        "rounds": rounds,
        "clients": told["clients"],
        "seconds": round(time.process_time() - started, 1),
        "leaky": told["leaky"],
        "config": told["config_hash"],
        "commit": json.loads((out / "env.json").read_text(encoding="utf-8"))["git_commit"],
    }


def hours_of(flags: dict[str, Any], rounds: int) -> float:
    """How many hours of one core a run would take, by a trial; by a second one if the first may have compiled kernels for long."""
    import fedbench

    if rounds <= 2 * TRIAL:
        return 0.0
    hours = [float("inf")]
    while len(hours) == 1 or (len(hours) == 2 and 1 < hours[1] < 5):
        with tempfile.TemporaryDirectory(prefix="fedbench-") as folder:
            started = time.process_time()
            short = {"rounds": TRIAL, "eval_every": TRIAL, "threads": 1, "mlflow": False, "quiet": True, "keep_state": "none"}
            fedbench.run(**flags, **short, out=f"{folder}/trial")
            hours.append((time.process_time() - started) / TRIAL * rounds / 3600)
    return hours[-1]


def read() -> dict[str, Any]:
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}


def save(found: dict[str, Any]) -> None:
    part = FILE.with_suffix(".part")
    part.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n", encoding="utf-8")
    part.replace(FILE)


def study(datasets: Iterable[str], jobs: int, hours: float) -> dict[str, Any]:
    """Measure what is missing, `jobs` runs at a time; a run that fails is named, and the others go on."""
    found = read()
    for seed in SEEDS:
        todo = missing(found, datasets, seed, hours)
        # a fresh process a run: what one leaves behind cannot reach the next
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
            running: dict[Future[dict[str, Any]], Cell] = {}
            while todo or running:
                while todo and len(running) < jobs:
                    cell = todo.pop(0)
                    running[pool.submit(measure, cell, hours)] = cell
                for ended in wait(running, return_when=FIRST_COMPLETED).done:
                    cell = running.pop(ended)
                    if error := ended.exception():
                        print(f"{cell.key}: {error}", file=sys.stderr, flush=True)
                        continue
                    found[cell.key] = told = ended.result()
                    save(found)
                    said = f"HR@10 {told['hr_10']:.4f} in {told['seconds']:.0f} s" if "hr_10" in told else f"left out, {told['hours']} h"
                    print(f"{cell.key}: {said}", flush=True)
    return found


def runs_of(found: dict[str, Any], dataset: str, algo: str, reading: str) -> list[dict[str, Any]]:
    keys = (Cell(dataset, algo, reading, seed).key for seed in SEEDS)
    return [found[key] for key in keys if "hr_10" in found.get(key, {})]


def mean(found: dict[str, Any], dataset: str, algo: str, reading: str, metric: str) -> float:
    """Over seeds; NaN where nothing was measured."""
    runs = runs_of(found, dataset, algo, reading)
    return float(np.mean([one[metric] for one in runs])) if runs else float("nan")


def shown(found: dict[str, Any], dataset: str, algo: str, reading: str) -> str:
    runs = runs_of(found, dataset, algo, reading)
    if not runs:
        hours = found.get(Cell(dataset, algo, reading, 0).key, {}).get("hours")
        return "not run" if hours is None else f"not run, {hours:.0f} h"
    hr, ndcg = (mean(found, dataset, algo, reading, metric) for metric in ("hr_10", "ndcg_10"))
    words = f"{hr:.3f}/{ndcg:.3f}".replace("0.", ".")
    return words if len(runs) == len(SEEDS) else f"{words} ({len(runs)})"


def ordered(found: dict[str, Any], dataset: str) -> list[str]:
    """Methods, best under the clean protocol first; those without a run at the end."""
    return sorted(METHODS, key=lambda algo: -np.nan_to_num(mean(found, dataset, algo, "clean", "hr_10"), nan=-1.0))


def table(found: dict[str, Any], dataset: str, notes: dict[str, int]) -> str:
    heads = ["method", "year", "its paper", *(name for _, name in READINGS.values())]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for algo in ordered(found, dataset):
        figure, where = METHODS[algo].figures.get(dataset, ("–", ""))
        note = f" [{notes.setdefault(where, len(notes) + 1)}]" if where else ""
        page = next((one for one in (algo, "fedavg_ncf") if (RESULTS.parent / "algorithms" / f"{one}.md").exists()), algo)
        row = [f"[{algo}](../algorithms/{page}.md)", METHODS[algo].year, figure + note]
        lines.append("| " + " | ".join([*row, *(shown(found, dataset, algo, reading) for reading in READINGS)]) + " |")
    for algo in BESIDE:
        lines.append("| " + " | ".join([f"*{algo}*", "", "", *(shown(found, dataset, algo, reading) for reading in READINGS)]) + " |")
    return "\n".join(lines)


def lesson(found: dict[str, Any], dataset: str) -> str:
    """What a table says, in one line that is counted from it."""
    both = [
        (algo, *pair)
        for algo in METHODS
        if not np.isnan(pair := [mean(found, dataset, algo, reading, "hr_10") for reading in ("published", "closed")]).any()
    ]
    if len(both) < len(METHODS):
        return ""
    algo, high, low = max(both, key=lambda one: one[1] - one[2])
    floor = mean(found, dataset, "popularity", "clean", "hr_10")
    above = [algo for algo in METHODS if mean(found, dataset, algo, "clean", "hr_10") > floor]
    run = [algo for algo in METHODS if runs_of(found, dataset, algo, "clean")]
    return (
        f"The widest gap: {algo} falls from {high:.3f} to {low:.3f} when its two leaks are closed. "
        f"Under the clean protocol {len(above)} of {len(run)} methods are above popularity ({floor:.3f}); "
        f"the best of them is {ordered(found, dataset)[0]}."
    )


def page(found: dict[str, Any]) -> str:
    """docs/results/published_and_clean.md"""
    notes: dict[str, int] = {}
    left = len(missing(found, DATASETS, 0))
    state = (
        f"**Not finished:** {left} of {len(cells(DATASETS, 0))} runs of seed 0 are to be done, and most of the other seeds." if left else ""
    )
    parts = [
        f"## {dataset}\n\n{lesson(found, dataset)}\n\n{table(found, dataset, notes)}" for dataset in DATASETS if measured(found, dataset)
    ]
    sources = "\n".join(f"{number}. {where}" for where, number in notes.items())
    return f"""# As published and honest

{state}

One row a method. Test HR@10/NDCG@10: the held-out item among 99 others. Chance is .100/.045.

- **its paper**: what was published. The note says where it was read and under which protocol.
- **as published** (LEAKY): our run of the method's published recipe under `--protocol published`. There training negatives avoid the
  held-out items and the round is chosen on test (pfedrec, gpfedrec: on validation, as they did). [Why that leaks](../protocol.md#the-leak).
- **its leaks closed**: the same recipe on the same split; negatives are drawn among all items but the training ones, and the round is
  chosen on validation. The difference to the column before is the leak, and nothing else.
- **clean, same recipe**: the same recipe under `--protocol clean`, whose split and clients differ: compare it with the clean column alone.
- **clean, clean recipe**: the settings that this project recommends, chosen on validation.

`popularity` has no personal part, `local` no server, `central_ease` no federation. A method that is not above popularity has learnt
nothing of its users. Means over seeds 0 to 2; *(1)*: one seed, where a run takes more than five minutes of one core; *not run, 9 h*: by
a trial of three rounds a run would take so long.

![Published to clean, method by method](published_and_clean.png)

{chr(10).join(f"{part}{chr(10)}" for part in parts)}
## Where papers' figures were read

{sources}

## How it was made

```bash
python sweeps/published_and_clean.py --jobs 2
```

measures what [published_and_clean.json](published_and_clean.json) lacks, a run at a time, and writes this page and its chart.
Each run is evaluated {POINTS} times. The file has each run's round, seconds, configuration and commit.
"""


def measured(found: dict[str, Any], dataset: str) -> bool:
    return any(key.startswith(f"{dataset} ") for key in found)


def draw(found: dict[str, Any], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    datasets = [dataset for dataset in DATASETS if measured(found, dataset)]
    figure, axes = plt.subplots(
        1, len(datasets), figsize=(4.4 * len(datasets), 0.36 * len(METHODS) + 2), layout="constrained", squeeze=False
    )
    looks = {"published": ("o", "white", "C3"), "closed": ("o", "C3", "C3"), "clean": ("D", "C0", "C0")}
    for axis, dataset in zip(axes[0], datasets, strict=True):
        algos = ordered(found, dataset)[::-1]
        for at, algo in enumerate(algos):
            values = {reading: mean(found, dataset, algo, reading, "hr_10") for reading in looks}
            axis.plot([values["published"], values["closed"]], [at, at], color="C3", linewidth=2, alpha=0.5, zorder=1)
            for reading, value in values.items():
                mark, face, edge = looks[reading]
                axis.scatter(value, at, marker=mark, facecolor=face, edgecolor=edge, s=34, zorder=2)
        axis.axvline(0.1, color="gray", linestyle=":")
        axis.text(0.1, len(algos) - 0.4, "chance", ha="center", va="bottom", fontsize=8, color="gray")
        for reading, colour in (("closed", "C3"), ("clean", "C0")):  # each column's own split
            axis.axvline(mean(found, dataset, "popularity", reading, "hr_10"), color=colour, linestyle="--", linewidth=1)
        floor = mean(found, dataset, "popularity", "clean", "hr_10")
        axis.text(floor, len(algos) - 0.4, "popularity", ha="center", va="bottom", fontsize=8)
        axis.set(title=f"{dataset}\n", xlabel="test HR@10", xlim=(0, 1.02), ylim=(-0.6, len(algos) - 0.4), yticks=range(len(algos)))
        axis.set_yticklabels(algos)
        axis.grid(axis="x", alpha=0.3)
    for reading, (mark, face, edge) in looks.items():
        label = READINGS[reading][1] + (" (LEAKY)" if reading == "published" else "")
        axes[0, 0].scatter([], [], marker=mark, facecolor=face, edgecolor=edge, s=34, label=label)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at once (default: 1)")
    parser.add_argument(
        "--datasets", nargs="+", choices=DATASETS, default=DATASETS, metavar="NAME", help="measure these (default: all three)"
    )
    parser.add_argument("--hours", type=float, default=1.0, metavar="X", help="leave out what takes longer (default: 1)")
    parser.add_argument("--write", action="store_true", help="write page and chart of what is measured; measure nothing")
    given = parser.parse_args()
    found = read() if given.write else study(given.datasets, given.jobs, given.hours)
    FILE.with_suffix(".md").write_text(page(found), encoding="utf-8")
    draw(found, FILE.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
