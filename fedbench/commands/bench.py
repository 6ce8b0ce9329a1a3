"""`python -m fedbench bench`: what a round costs, against the loop engine and against the machine's limit, in one run."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedbench import files, found_by_children
from fedbench.console import columns, fitted
from fedbench.contract import registry
from fedbench.data.sampling import Samples
from fedbench.errors import UsageError
from fedbench.experiment import processes
from fedbench.experiment.machine import choose_device, set_threads
from fedbench.experiment.prepare import check_cohort, prepare
from fedbench.experiment.round_timing import PARTS, WHOLE, Clock, bounded_split, kept_bytes, round_parts
from fedbench.experiment.summary import peak_rss_mb
from fedbench.files import write_json
from fedbench.kernels.machine_limit import adam_limit
from fedbench.settings import command_line, config
from fedbench.settings.parser import number, whole_number
from fedbench.simulation.blocks import host_type
from fedbench.simulation.federation import Federation
from fedbench.testing import loop_engine
from fedbench.text import say
from fedbench.tracking.run_log import environment, setup_logging

Figures = dict[str, Any]

SCHEMA = 1
"""of the file that --json writes; larger once a key goes or changes its meaning"""
WARM_ROUNDS = 2
"""rounds before the measured ones: kernels compile, and clients have been sent something"""
REPEATS, CALM = 3, 10.0
"""measured rounds and turns of the two engines, of which the best counts; more turns while they take less than CALM seconds together,
because a disturbance such as another program's use of memory often lasts for seconds"""
MOMENT, MANY = 1.0, 20
"""short rounds are measured for MOMENT seconds, at most MANY times: other programs disturb them more"""
PATIENCE = 20.0
"""seconds after which a slow combination is not measured again"""
LOOP_CLIENTS = 100
"""clients that the loop engine trains in --all; its seconds are scaled to the cohort by samples"""
STATE_MB = 256.0
"""what the clients of a point of --all may keep together; where it would be more, fewer clients are taken"""
DATASETS = ("filmtrust", "ml-100k", "ml-1m", "pinterest")
"""what --all measures unless --datasets says otherwise"""
HELP = """usage: python -m fedbench bench --algo A --dataset D [any flag of train.py]
       python -m fedbench bench --all [--datasets A,B] [--algos A,B] [any flag of train.py]
       python -m fedbench bench --growth --algo A [--plot FILE.png]

Times the parts of whole rounds; one round's local training in the batched engine and in the loop engine (one client after another,
autograd and torch.optim on touched rows), in turns, on the same state and samples; and how far training is from the machine's limit:
element updates a second against a plain Adam loop over rows that stay in the cache. One thread unless --threads says otherwise; with
one thread all seconds are CPU seconds, so that other programs on the machine matter less, with more they are wall-clock seconds.

  --all               every algorithm on every dataset, a line each; n/a where a method has no clients to loop over
  --datasets A,B      the datasets of --all (filmtrust,ml-100k,ml-1m,pinterest)
  --algos A,B         the algorithms of --all (all that are known)
  --growth            cost against clients, cohort, items and dimension on synthetic data, with fitted exponents
  --plot FILE.png     a plot of --growth
  --loop-clients N    the loop engine trains only N clients, spread over the cohort, and its seconds are scaled up by samples; 0 leaves
                      it out (all of them by default, 100 in --all)
  --state-mb X        take only so many of the dataset's clients that what they keep stays below X MB (no limit by default, 256 in --all)
  --json FILE         write all figures there
  --page FILE.md      write the table of --all into a page, between its lines <!-- bench:begin --> and <!-- bench:end -->; with --json
  --compare FILE      print how many times faster than the figures in FILE, which --json wrote
Of several seeds or folds the first is measured. In --all and --growth each point is a process of its own: its peak memory is its own.
example: python -m fedbench bench --algo fedem --dataset filmtrust
"""


def main(argv: list[str]) -> int:
    from fedbench.commands.bench_page import check_page, write_page

    if {"-h", "--help"} & set(argv):
        say(HELP)
        return 0
    try:
        mine, rest = parser().parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UsageError(f"bench: {error}; see --help") from None
    check(mine)
    if mine.page:
        check_page(mine.page)
    before = read(mine.compare) if mine.compare else []
    setup_logging(quiet=True, debug="--debug" in rest)
    if mine.growth:
        from fedbench.commands.growth import growth

        return growth(rest, mine.json, mine.plot)
    if mine.all:
        figures, failed = every(rest, mine)
        if mine.page and not failed:
            write_page(mine.page, files.read_json(mine.json))
    else:
        figures, failed = [measure(first_run(rest), mine.loop_clients, mine.state_mb)], False
        say(fitted(render(figures[0])))
        write(mine.json, figures)
    if before:
        say(compared(figures, before))
    return int(failed)


def parser() -> argparse.ArgumentParser:
    """The flags that are bench's own; the others are those of a run."""
    made = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("--all", "--growth"):
        made.add_argument(name, action="store_true")
    for name in ("--datasets", "--algos"):
        made.add_argument(name, type=lambda words: words.split(","), default=None)
    for name in ("--json", "--page", "--compare", "--plot"):
        made.add_argument(name, type=Path, default=None)
    made.add_argument("--loop-clients", type=whole_number, default=None)
    made.add_argument("--state-mb", type=number, default=None)
    return made


def check(mine: argparse.Namespace) -> None:
    if mine.all and mine.growth:
        raise UsageError("--all and --growth do not go together; use one of them")
    for name, given, with_ in (("datasets", mine.datasets, "all"), ("algos", mine.algos, "all"), ("plot", mine.plot, "growth")):
        if given and not getattr(mine, with_):
            raise UsageError(f"--{name} goes with --{with_}")
    if mine.page and not (mine.all and mine.json):
        raise UsageError("--page goes with --all and --json: the table shows what is in that file")
    if mine.compare and mine.growth:
        raise UsageError("--compare does not go with --growth")
    if mine.loop_clients is not None and mine.loop_clients < 0:
        raise UsageError(f"--loop-clients must be 0 or more, not {mine.loop_clients}")
    if mine.state_mb is not None and not mine.state_mb > 0:
        raise UsageError(f"--state-mb must be over 0, not {mine.state_mb:g}")
    for name in mine.algos or ():
        registry.algorithm(name)
    for name, file in (("json", mine.json), ("plot", mine.plot)):
        if file and not file.absolute().parent.is_dir():
            raise UsageError(f"--{name} {file}: cannot be written; give a file in a folder that exists")


def first_run(flags: Sequence[str]) -> config.RunConfig:
    """The run that the flags describe; of several seeds or folds the first."""
    configs = command_line.parse([*flags, "--no-mlflow"]).configs
    if not configs:
        raise UsageError("bench: the flags name no run; leave --list out")
    return configs[0]


def every(flags: Sequence[str], mine: argparse.Namespace) -> tuple[list[Figures], bool]:
    """All algorithms on all datasets, a line each as it is measured, and whether one failed; the file is complete after every line."""
    bounds = ["--loop-clients", str(LOOP_CLIENTS if mine.loop_clients is None else mine.loop_clients)]
    bounds += ["--state-mb", str(STATE_MB if mine.state_mb is None else mine.state_mb)]
    pairs = [(algo, dataset) for dataset in mine.datasets or DATASETS for algo in mine.algos or registry.algorithms()]
    figures: list[Figures] = []
    failed = False
    say(heading())
    points = [[*flags, *bounds, "--algo", algo, "--dataset", dataset] for algo, dataset in pairs]
    for (algo, dataset), (code, found) in zip(pairs, in_processes(points), strict=True):
        if isinstance(found, str):
            failed |= code != UsageError.exit_code
            why = "does not fit" if code == UsageError.exit_code else "failed"
            say(fitted(f"{algo:<13} {dataset:<10} {why}: {found}"))
            continue
        figures.append(found)
        say(line(found))
        write(mine.json, figures)
    if not figures and not failed:
        raise UsageError("bench --all: these flags fit no algorithm; leave out those that only some of them know")
    return figures, failed


def in_processes(points: Sequence[Sequence[str]]) -> Iterator[tuple[int, Figures | str]]:
    """Measure one point after another, each in a process of its own: exit code, and its figures or why there are none."""
    with tempfile.TemporaryDirectory() as work:
        jobs = []
        for number, flags in enumerate(points):
            file = Path(work) / str(number)
            command = processes.python("-m", "fedbench", "bench", *flags, "--json", f"{file}.json")
            jobs.append(processes.Job(str(file), command, Path(f"{file}.log"), found_by_children()))
        for event in processes.run(jobs, at_once=1):
            if event.code == 0:
                yield 0, read(Path(f"{event.key}.json"))[0]
            elif event.code is not None:
                yield event.code, processes.last_error(Path(f"{event.key}.log"), event.code).removeprefix("fedbench: error: ")


# ---- measuring -------------------------------------------------------------------------------------------------------------


def measure(run: config.RunConfig, loop_clients: int | None = None, state_mb: float | None = None) -> Figures:
    """All figures of one algorithm on one dataset."""
    base = peak_rss_mb()
    threads = run.threads or 1
    set_threads(threads)
    clock = time.process_time if threads == 1 else time.perf_counter
    split, data = prepare(run.dataset, run.protocol, run.data)
    algorithm, device = run.algorithm, choose_device(run.device)
    check_cohort(algorithm, split)
    dtype = torch.float64 if run.dtype == "float64" else torch.float32
    kept, everybody = kept_bytes(run, split, dtype, device), split.clients
    split = bounded_split(run, split, state_mb, dtype, device)
    check_cohort(algorithm, split)
    engine: dict[str, Any] = {"kernel": run.kernel, "block_rows": run.block_rows, "compile": run.compile}
    federation = Federation.start(algorithm, split, run.seed, device, dtype, **engine)
    rounds = several_rounds(federation, clock)
    parts = min(rounds, key=lambda parts: sum(parts[name] for name in WHOLE))
    peak = max(base, peak_rss_mb())  # the kernel counts pages roughly: of two readings the later can be a little lower
    samples = federation.samples(federation.round + 1)
    figures: Figures = {
        "algo": run.algo,
        "dataset": data.name,
        "protocol": split.protocol.name,
        "threads": threads,
        "clients": len(samples.clients),
        "taken": split.clients,
        "everybody": everybody,
        "samples": len(samples.label) * algorithm.local_epochs,
        "repeats": len(rounds),
        "parts": parts,
        "least": {name: min(one[name] for one in rounds) for name in PARTS},
        "no_kernel": sorted(federation.without_kernel()),
        "round": sum(parts[name] for name in WHOLE),
        "peak_mb": peak,
        "base_mb": base,
        "state_mb": kept * split.clients / 1e6,
    }
    if not algorithm.federated or loop_clients == 0 or not len(samples.clients):  # some methods ask nobody after the first round
        return figures
    batched, loop, updates, limit = both_engines(federation, samples, clock, loop_clients)
    return figures | {
        "batched": batched,
        "loop": loop,
        "loop_clients": min(loop_clients or len(samples.clients), len(samples.clients)),
        "ratio": loop / batched,
        "updates": updates,
        "updates_per_second": updates / batched,
        "limit": limit * threads,
    }


def several_rounds(federation: Federation, clock: Clock) -> list[dict[str, float]]:
    """The parts of each of several rounds after those that warm up; a slow one is measured once."""
    for _ in range(WARM_ROUNDS):
        round_parts(federation, clock)
    measured: list[dict[str, float]] = []
    began = clock()
    while True:
        measured.append(round_parts(federation, clock))
        rounds = sum(parts[name] for parts in measured for name in WHOLE)
        if clock() - began > PATIENCE or (len(measured) >= REPEATS and (len(measured) >= MANY or rounds > MOMENT)):
            return measured


def both_engines(federation: Federation, samples: Samples, clock: Clock, loop_clients: int | None) -> tuple[float, float, int, float]:
    """Seconds of one round in the batched and in the loop engine, element updates, and the machine's limit of updates a second.

    Each is the best of several, measured in turns, so that other programs disturb all of them alike.
    """
    algorithm, engine, store = federation.algorithm, federation.engine, federation.store
    when = federation.round + 1
    few = spread_over(samples, loop_clients or len(samples.clients))
    cohort = torch.from_numpy(samples.clients).to(engine.device)
    start = store.read(cohort)
    server = {name: tensor.cpu() for name, tensor in federation.server.items()}
    batched: list[float] = []
    loop: list[float] = []
    updates, limit = 0, 0.0
    while sum(batched) + sum(loop) < (PATIENCE if len(loop) < REPEATS else CALM) and len(loop) < MANY:
        few_seconds = sum(batched) + MOMENT
        for _ in range(MANY):
            began = clock()
            updates = engine.run_cohort(federation.server, store, samples, when).updates
            batched.append(clock() - began)
            restore(store.tensors, cohort, start)
            if sum(batched) > few_seconds:
                break
        limit = max(limit, adam_limit(host_type(engine.dtype)))
        kept = {name: tensor.cpu() for name, tensor in store.tensors.items()}
        began = clock()
        loop_engine.run_cohort(algorithm, engine.world, server, kept, few, federation.seed, when)
        loop.append(clock() - began)
        restore(store.tensors, cohort, start)
    scale = max(1, len(samples.label)) / max(1, len(few.label))
    return min(batched), min(loop) * scale, updates, limit


def restore(tensors: dict[str, torch.Tensor], clients: torch.Tensor, start: dict[str, torch.Tensor]) -> None:
    for name, value in start.items():
        tensors[name][clients] = value


def spread_over(samples: Samples, n: int) -> Samples:
    """The samples of n clients, from the one with fewest to the one with most at even distances."""
    if n >= len(samples.clients):
        return samples
    order = np.argsort(samples.counts, kind="stable")
    keep = np.zeros(len(order), bool)
    keep[order[np.linspace(0, len(order) - 1, n).round().astype(np.int64)]] = True
    return replace(
        samples,
        clients=samples.clients[keep],
        ptr=np.concatenate([[0], np.cumsum(samples.counts[keep])]),
        local=samples.local[np.repeat(keep, samples.counts)],
        label=samples.label[np.repeat(keep, samples.counts)],
        row_ptr=np.concatenate([[0], np.cumsum(samples.touched[keep])]),
        row=samples.row[np.repeat(keep, samples.touched)],
    )


# ---- what is printed and written -------------------------------------------------------------------------------------------


def share(figures: Figures) -> float | None:
    """Element updates as a share of the machine's limit; None where nothing is trained by an optimizer."""
    return figures["updates_per_second"] / figures["limit"] if figures.get("updates") else None


def bounded(figures: Figures) -> str:
    """How a slow combination was reduced, in words; empty if it was not."""
    cut = [f"first {figures['taken']:,} of {figures['everybody']:,} clients"] if figures["taken"] < figures["everybody"] else []
    return ", ".join(cut + ([f"{figures['repeats']} round(s)"] if figures["repeats"] < REPEATS else []))


def render(figures: Figures) -> str:
    parts, kind = figures["parts"], "CPU s" if figures["threads"] == 1 else "s"
    cut = bounded(figures)
    lines = [
        f"{figures['algo']} on {figures['dataset']} ({figures['protocol']}): {figures['clients']:,} clients, "
        f"{figures['samples']:,} samples a round over all epochs, {figures['threads']} thread(s), best of {figures['repeats']}"
        + (f" ({cut})" if cut else "")
    ]
    if "loop" in figures:
        scaled = "" if figures["loop_clients"] == figures["clients"] else f"   ({figures['loop_clients']} clients, scaled)"
        lines += [
            f"  batched engine   {figures['batched']:.4f} {kind} a round   {figures['samples'] / figures['batched']:,.0f} samples/s",
            f"  loop engine      {figures['loop']:.4f} {kind} a round   {figures['samples'] / figures['loop']:,.0f} samples/s{scaled}",
            f"  ratio            {figures['ratio']:.1f}",
        ]
    if (part := share(figures)) is not None:
        lines.append(
            f"  element updates  {figures['updates']:,} a round, {figures['updates_per_second']:.3g}/s: "
            f"{part:.0%} of the limit ({figures['limit']:.3g}/s measured)"
        )
    said = ", ".join(f"{name} {seconds:.4f}" for name, seconds in parts.items())
    whole = figures["round"] + parts[PARTS[-1]]
    lines += [f"  no kernel        {reason}" for reason in figures.get("no_kernel", ())]
    lines.append(f"  a whole round    {figures['round']:.4f} {kind}, {whole:.4f} with the full ranking: {said}")
    lines.append(
        f"  peak memory      {figures['peak_mb']:,.0f} MB, {figures['base_mb']:,.0f} of them before the data; "
        f"{figures['state_mb']:,.1f} MB are what clients keep"
    )
    return "\n".join(lines)


COLUMNS = ("clients", "round", *PARTS, "clients/s", "samples/s", "x loop", "limit", "MB")
NARROW, WIDE = ("clients", "round", "train", "evaluate", "x loop", "limit"), 24 + 13 * len(COLUMNS)
"""what of a table fits a terminal of 80 columns, and how many the whole table needs"""


def shown(cells: Mapping[str, str]) -> str:
    """The columns that the terminal has room for."""
    narrow = (columns() or WIDE) < WIDE
    return "".join(f"{cell:>9}" if narrow else f"{cell:>13}" for name, cell in cells.items() if not narrow or name in NARROW)


def heading() -> str:
    return f"{'algorithm':<13} {'dataset':<10}" + shown({name: name for name in COLUMNS})


def line(figures: Figures) -> str:
    """One row of the table; seconds a round, and n/a where something does not apply."""
    parts, part = figures["parts"], share(figures)
    train = figures.get("batched", parts["train"])
    cells = [f"{figures['clients']:,}", f"{figures['round']:.4f}", *(f"{parts[name]:.4f}" for name in PARTS)]
    cells += [f"{figures['clients'] / figures['round']:,.0f}", f"{figures['samples'] / train:,.0f}" if train else "n/a"]
    cells += [f"{figures['ratio']:.1f}" if "ratio" in figures else "n/a", "n/a" if part is None else f"{part:.0%}"]
    row = shown(dict(zip(COLUMNS, [*cells, f"{figures['peak_mb']:,.0f}"], strict=True)))
    return fitted(f"{figures['algo']:<13} {figures['dataset']:<10}{row}   {bounded(figures)}".rstrip())


def write(file: Path | None, figures: list[Figures]) -> None:
    if file is None:
        return
    try:
        where = {**environment(), "processor": processor(), "command": ["fedbench", *sys.argv[1:]]}
        write_json(file, {"schema": SCHEMA, "environment": where, "figures": figures})
    except OSError as error:
        raise UsageError(f"--json {file}: cannot be written ({error.strerror}); give a file in a folder that exists") from None


def processor() -> str:
    try:
        return next(row.split(":", 1)[1].strip() for row in Path("/proc/cpuinfo").read_text().splitlines() if row.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def read(file: Path) -> list[Figures]:
    try:
        figures = json.loads(files.read_text(file))["figures"]
        return [one for one in figures if one.keys() >= {"algo", "dataset", "protocol", "threads", "clients", "round", "parts"}]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"--compare {file}: no figures there; give a file that bench --json wrote") from None


def compared(figures: list[Figures], before: list[Figures]) -> str:
    """How many times faster each part is than it was; above 1 is faster."""

    def key(one: Figures) -> tuple[Any, ...]:
        return one["algo"], one["dataset"], one["protocol"], one["threads"], one["clients"]

    old = {key(one): one for one in before}
    both = [(one, old[key(one)]) for one in figures if key(one) in old]
    if not both:
        return "nothing to compare: no algorithm, dataset, protocol, threads and clients in common"
    names = ("round", *PARTS)
    rows = ["times faster than before", f"{'algorithm':<13} {'dataset':<10}" + shown({name: name for name in names})]
    for now, then in both:
        pairs = [(then["round"], now["round"]), *((then["parts"].get(name), now["parts"][name]) for name in PARTS)]
        cells = shown({name: f"{a / b:.2f}" if a and b else "n/a" for name, (a, b) in zip(names, pairs, strict=True)})
        rows.append(f"{now['algo']:<13} {now['dataset']:<10}{cells}")
    return "\n".join(rows)
