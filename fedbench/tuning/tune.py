"""`python -m fedbench tune`: search a method's settings on validation, under a budget that is counted, and write them as a recipe."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import logging
import shlex
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from fedbench import files
from fedbench.console import fitted
from fedbench.errors import Interrupted, UsageError
from fedbench.files import read_json, write_json
from fedbench.locks import claimed
from fedbench.settings import command_line, naming, recipes
from fedbench.settings.config import RunConfig
from fedbench.settings.parser import Parser
from fedbench.sweeping.study import is_flag, words_of_line
from fedbench.sweeping.sweep import clock, whole_number
from fedbench.text import say, shown
from fedbench.tracking.run_log import environment, setup_logging
from fedbench.tuning.copies import Copies
from fedbench.tuning.running import Runner
from fedbench.tuning.search import Search, best_of, digest
from fedbench.tuning.space import Space, changed, set_to, space_of
from fedbench.tuning.workers import Workers

log = logging.getLogger("fedbench")

PLACE = Path("runs/searches")
SCHEMA = 1
POINTS = 20
"""how often a trial is evaluated, unless --eval-every says otherwise"""
NOT_HERE = ("--list", "--print-config", "--resume", "--seeds", "--refit")
EPILOG = """What is searched: the fields for which the method declares a range. --dry-run shows them.
  --space lr=log:1e-3:0.3      another range for lr, drawn by its logarithm
  --space rho=0:1 dim=8,16,32  an even range, and some values; several at once
  --lr 0.05                    a flag of train.py: held fixed, not searched

What it costs: a trial is a training run of --rounds rounds. Successive halving ends it
after a ninth or a third of them unless it is among the best third so far. The budget is
counted in trials and in client visits, and printed.

What it looks at: validation. The test items are taken out of the data before the first
trial, so nothing can be chosen on them. Train with the recipe to see test metrics.

What it leaves: recipes/<dataset>/<algo>.toml, which `train.py --recipe tuned` takes, and
a folder with every trial, history.png, importance.png, slice.png and MLflow's copies.
The same command goes on with a search that was stopped or killed; a larger --trials
adds trials.

examples:
  python -m fedbench tune --algo fedmf --dataset ml-100k --trials 30 --jobs 2
  python -m fedbench tune --algo fedmf --dataset ml-1m --protocol ncf --rounds 40 --dry-run
  python train.py --algo fedmf --dataset ml-100k --recipe tuned
"""


def parser() -> Parser:
    own = Parser(
        prog="python -m fedbench tune",
        usage="python -m fedbench tune --algo NAME --dataset NAME [--trials N] [--space ...] [flags]",
        description="Search a method's settings on validation, and write the best ones as a recipe.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    own.add_argument("--trials", type=whole_number, default=40, metavar="N", help="settings to try (default: 40)")
    own.add_argument("--space", nargs="+", action="extend", default=[], metavar="NAME=...", help="what to try for a field: low:high, "
                     "log:low:high or a,b,c")  # fmt: skip
    own.add_argument("--jobs", type=whole_number, default=1, metavar="N", help="trials at once, each a process of one thread (default: 1)")
    own.add_argument(
        "--search-seed", type=int, default=0, metavar="N", help="seed of what is tried; --seed is that of training (default: 0)"
    )
    own.add_argument("--out", type=Path, metavar="DIR", help=f"folder of the search (default: {PLACE}/<algo>-<dataset>-<hash>)")
    own.add_argument("--recipes", type=Path, default=Path(recipes.FOLDER), metavar="DIR", help="where the recipe goes (default: recipes)")
    own.add_argument("--dry-run", action="store_true", help="show what is searched and what it may cost; search nothing")
    return own


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is to be searched."""

    config: RunConfig
    space: Space
    trials: int
    seed: int
    jobs: int
    out: Path
    recipes: Path
    dry_run: bool
    words: tuple[str, ...]
    """the command line, to be given again"""

    @property
    def title(self) -> str:
        return f"{self.config.algorithm.name} on {Path(self.config.dataset).stem}, protocol {self.config.protocol.name}"


def main(argv: list[str]) -> int:
    plan = read(argv)
    setup_logging(plan.config.quiet, plan.config.debug)
    if plan.dry_run:
        return dry_run(plan)
    with claimed(plan.out):
        return execute(plan)


def read(argv: Sequence[str]) -> Plan:
    """The plan that a command line describes: the search's own flags, and those of train.py."""
    own, line = split_line(argv)
    options = parser().read(own)
    given = set(words_of_line(line))
    config = command_line.resolve(line)
    if config.protocol.leaky or config.protocol.select_on != "val":
        on = "its training sees what is held out" if config.protocol.leaky else f"it chooses on {config.protocol.select_on}"
        raise UsageError(f"tune chooses on validation alone, which --protocol {config.protocol.name} does not allow ({on}); use clean")
    if config.protocol.new_users:
        raise UsageError("--new-users is for a run, whose new users are measured at the end; a search measures validation alone")
    if "eval_every" not in given and config.eval_every == RunConfig.eval_every and config.budget == "rounds":
        config = dataclasses.replace(config, eval_every=max(1, config.limit // POINTS))
    space = space_of(config.algorithm, sorted(given), options.space)
    spans = {name: str(span) for name, span in space.items()}
    identity = json.dumps([config.identity(), spans, options.search_seed], sort_keys=True)
    name = f"{config.algorithm.name}-{Path(config.dataset).stem}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"
    return Plan(
        *(config, space, options.trials, options.search_seed, options.jobs, options.out or PLACE / name),
        *(options.recipes, options.dry_run, tuple(argv)),
    )


def split_line(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of the search's own flags, and those that are for train.py."""
    mine = {option for action in parser()._actions for option in action.option_strings}
    own: list[str] = []
    line: list[str] = []
    place = line
    for word in argv:
        if is_flag(word):
            option = word.partition("=")[0]
            if option in NOT_HERE:
                raise UsageError(f"{option} is for train.py; a search trains with one seed and resumes by itself")
            place = own if option in mine else line
        place.append(word)
    return own, line


def budget(plan: Plan, visits: int) -> str:
    """The most that a search may cost; `visits`: of a round."""
    config = plan.config
    said = f"{plan.trials:,} trials of at most {config.limit:,} {config.budget}"
    most = plan.trials * (config.limit * visits if config.budget == "rounds" else config.limit if config.budget == "visits" else 0)
    return said + (f", so at most {human(most)} client visits" if most else "")


def human(count: int) -> str:
    return f"{count / 1e6:.1f} M" if count >= 1_000_000 else f"{count:,}"


def show(plan: Plan, visits: int) -> None:
    wide = max(map(len, plan.space))
    lines = [f"search  {plan.title}", f"budget  {budget(plan, visits)}"]
    lines += [f"space   {name:<{wide}}  {span}" for name, span in plan.space.items()]
    say(fitted("\n".join(lines)))


def dry_run(plan: Plan) -> int:
    """Show the space and the budget, and how long it may take, by three evaluations of the settings that are there."""
    with tempfile.TemporaryDirectory(prefix="fedbench-") as folder:
        workers = Workers(plan.config, Path(folder) / "work", plan.config.threads or 1)
        try:
            worker = workers.start()
            times: list[tuple[float, float]] = []
            while True:
                _, word = workers.hear()
                if word is None:
                    raise UsageError(f"the trial ended: {worker.error()}")
                if "error" in word:
                    raise UsageError(word["error"])
                if "ready" in word:
                    show(plan, word["ready"]["visits"])
                    worker.tell(values={})
                elif "line" in word:
                    times.append((time.monotonic(), word["line"]["round"]))
                    worker.tell(stop=len(times) == 3)
                else:
                    break
        finally:
            workers.end()
    if len(times) > 1 and plan.config.budget == "rounds":
        # the first stretch compiles kernels
        each = (times[-1][0] - times[-2][0]) / (times[-1][1] - times[-2][1])
        most = plan.trials * plan.config.limit * each / plan.jobs
        say(f"time    at most {clock(most)} with --jobs {plan.jobs}; about {clock(most * 0.4)} if halving ends trials as it usually does")
    return 0


def execute(plan: Plan) -> int:
    """Run the trials that are missing, and say what they found."""
    plan.out.mkdir(parents=True, exist_ok=True)
    refuse_other(plan)
    (plan.out / "trials").mkdir(exist_ok=True)
    search = Search(plan.out, plan.space, plan.config.algorithm, plan.config.limit, plan.seed)
    done = len(search.ended())
    workers = Workers(plan.config, plan.out / "work", plan.config.threads or 1)
    bar = tqdm(total=plan.trials, initial=min(done, plan.trials), desc=shown(f"tune {plan.config.algorithm.name}"), unit="trial",
               disable=plan.config.quiet, dynamic_ncols=True)  # fmt: skip
    with bar, ThreadPoolExecutor(1) as beside:
        copies = Copies(plan.config, plan.out, search) if plan.config.mlflow else None
        # beside the trials, which need not wait for MLflow to be imported
        opened = beside.submit(copies.open) if copies else None

        def on_end(found: dict[str, Any]) -> None:
            bar.update()
            best = best_of(search.ended())
            bar.set_postfix_str("" if best is None else f"best {best['value']:.4f}", refresh=False)
            log.info("%s", told(found))
            if copies:
                beside.submit(copies.add, found)

        def on_ready(facts: dict[str, Any]) -> None:
            # a later call that finds nothing left to run needs them for the recipe
            write_json(plan.out / "search.json", {**read_json(plan.out / "search.json"), "data": facts})
            show(plan, facts["visits"])

        runner = Runner(search, plan.trials, workers, on_end)
        try:
            runner.run(plan.jobs, on_ready)
        except BaseException as error:
            if copies:
                beside.submit(copies.end, "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED", {}, {}, [])
            if isinstance(error, KeyboardInterrupt):
                raise Interrupted(f"interrupted after {len(search.ended())} trials; the same command goes on") from None
            raise
        finally:
            workers.end()
        if opened:
            opened.result()
    return conclude(plan, search, copies)


def refuse_other(plan: Plan) -> None:
    """A folder holds one search: other data, flags or ranges need another one."""
    path = plan.out / "search.json"
    now = {"config": plan.config.identity(), "space": {name: str(span) for name, span in plan.space.items()}, "search_seed": plan.seed}
    now = json.loads(json.dumps(now))
    before = read_json(path)
    if before and any(before.get(key) != value for key, value in now.items()):
        raise UsageError(f"--out {plan.out}: holds a search with other flags or ranges; choose another folder")
    write_json(path, {"schema": SCHEMA, **before, **now})


def told(found: dict[str, Any]) -> str:
    """A trial in one line."""
    values = " ".join(f"{naming.short(name)}={value:.4g}" if isinstance(value, float) else f"{naming.short(name)}={value}"
                      for name, value in found["values"].items())  # fmt: skip
    result = found["how"] if found["value"] is None else f"{found['value']:.4f} at round {found['best_round']}"
    how = f", {found['how']} at {found['rounds']}" if found["how"] == "pruned" else ""
    return f"trial {found['number']}: {result}{how} ({values})"


def conclude(plan: Plan, search: Search, copies: Copies | None) -> int:
    """Write the recipe, figures and search.json, and print the best trial beside the first."""
    from fedbench.tuning import figures

    path = plan.out / "search.json"
    before = read_json(path)
    ended, facts = search.ended(), before.get("data", {})
    best = best_of(ended)
    visits = sum(found["visits"] for found in ended)
    metric = "-rmse" if plan.config.protocol.ratings else "ndcg_10"
    spent = f"{len(ended):,} trials, {human(visits)} client visits"
    if search.begun() < plan.trials:
        spent += "; the space has no more"
    best_told = best and {key: best[key] for key in ("number", "value", "best_round", "values")}
    write_json(
        path,
        {**before, "data": facts, "trials": len(ended), "visits": visits, "budget": spent, "metric": f"val/{metric}", "best": best_told},
    )
    if best is None:
        raise UsageError(f"none of {len(ended)} trials came to a value; {plan.out / 'trials'} says why; try smaller rates with --space")
    figures.draw(plan.space, ended, f"validation {naming.title(metric)}", f"{plan.title}, {spent}", plan.out)
    recipe = write_recipe(plan, best, facts, {"trials": len(ended), "visits": visits})
    first = ended[0]["value"]
    lines = ["", f"spent   {spent}", f"best    {told(best)}"]
    lines += ["" if first is None else f"first   {first:.4f}, with the settings that were there"]
    lines += [f"recipe  {recipe}", f"folder  {plan.out}"]
    say(fitted("\n".join(line for line in lines if line or line == lines[0])))
    train = ["python", "train.py", "--algo", plan.config.algo, "--dataset", plan.config.dataset, "--recipe", "tuned"]
    train += [] if plan.config.protocol.name == "clean" else ["--protocol", plan.config.protocol.name]
    say(f"next    {shlex.join(train)}")
    if copies:
        link = copies.conclude(best, spent, {"trials": len(ended), "visits": visits, "best/val/" + metric.lstrip("-"): abs(best["value"])})
        if link:
            say(f"charts  {link}")
    return 0


def write_recipe(plan: Plan, best: dict[str, Any], facts: dict[str, Any], spent: dict[str, int]) -> Path:
    """The best trial's settings, where they differ from the method's defaults."""
    path = recipes.place(plan.recipes, type(plan.config.algorithm), plan.config.dataset)
    data = {key: facts.get(key) for key in ("dataset", "protocol", "protocol_fingerprint", "data_checksum")}
    made = {
        "algo": plan.config.algorithm.name,
        **data,
        **spent,
        "seed": plan.config.seed,
        "search_seed": plan.seed,
        "eval_every": plan.config.eval_every,
        "commit": environment()["git_commit"],
        "value": best["value"],
        "best_round": best["best_round"],
        "curve": digest(best["curve"]),
    }
    recipes.write(path, made, changed(set_to(plan.config.algorithm, best["values"])))
    files.write_text(plan.out / "recipe.toml", files.read_text(path))
    return path
