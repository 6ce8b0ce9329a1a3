"""One run: load, split, rounds, evaluate, choose a round, log."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import numba
import numpy as np
import torch
from numba.core.event import Event, Listener, install_listener
from safetensors import SafetensorError
from torch import Tensor
from tqdm import tqdm

from fedbench import trust
from fedbench.console import fitted
from fedbench.contract import registry
from fedbench.contract.algorithm import Algorithm, Tensors
from fedbench.contract.dataset import Interactions
from fedbench.data.protocol import Protocol
from fedbench.data.split import Split, split
from fedbench.errors import DataError, FedbenchError, Interrupted, UsageError
from fedbench.evaluation.metrics import metrics_of
from fedbench.experiment import checkpoint, finished, folder, memory, processes
from fedbench.experiment.kept_model import Aside, beginning, keep_model, lent, reported_server, state_facts, whole
from fedbench.experiment.summary import Best, final_table, human, mean_table, over_runs, peak_rss_mb, per_client, refit_summary, summarise
from fedbench.files import write_json
from fedbench.kernels import fused
from fedbench.locks import claimed
from fedbench.parts.central import Central
from fedbench.settings.config import RunConfig, placed
from fedbench.simulation import kernel_check, new_users, workers
from fedbench.simulation.client_store import Disk
from fedbench.simulation.exposure import exposure
from fedbench.simulation.federation import Diverged, Federation, world_of
from fedbench.simulation.probe import check_local_work
from fedbench.text import say
from fedbench.tracking import mirror_process
from fedbench.tracking.copier import mlflow_at_hand
from fedbench.tracking.run_log import NoLog, RunLog, plain, setup_logging
from fedbench.tracking.sweep_parent import join

log = logging.getLogger("fedbench")

SELECT = {"val": "ndcg_10", "test": "hr_10"}
"""the metric that chooses the reported round of a ranking; of ratings it is the RMSE"""


def run_several(configs: Sequence[RunConfig], parent: Path | None, jobs: int = 1) -> dict[str, Any]:
    """Runs each in a folder of its own below `parent`, one after another or `jobs` at once, and their means in its summary.json."""
    if workers.count() > 1:
        raise UsageError("torchrun shares out one run; give it one seed and one fold, or leave it out and use --jobs")
    again = "the same command goes on"
    if parent is None:
        parent = new_folder(configs[0])
        configs = placed(configs, parent)
        again = f"the same flags with --out {parent} go on"
    try:
        with claimed(parent):
            finished.refuse_single_run(parent)
            summaries = [plain(run(config)) for config in configs] if jobs == 1 else in_processes(configs, parent / "work", jobs)
            summary = mean_of(summaries, [config.out for config in configs if config.out], parent)
            write_json(parent / "summary.json", plain(summary))
        table, first = mean_table(summary), configs[0]
        say(fitted(f"\n{table}\nfolder  {parent}"))
        if first.mlflow and (link := join([one.out for one in configs if one.out], first.experiment, parent, summary, table)):
            say(f"charts  {link}")
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; {again}") from None
    return summary


def mean_of(summaries: Sequence[dict[str, Any]], folders: Sequence[Path], parent: Path) -> dict[str, Any]:
    """The summary of several runs; those that were finished before may have been tampered with."""
    try:
        return over_runs(summaries, [folder.read_clients(one) for one in folders])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{parent}: the summaries of its runs do not fit together ({error}); remove the one that is damaged") from None


def in_processes(configs: Sequence[RunConfig], work: Path, at_once: int) -> list[dict[str, Any]]:
    """The summaries of runs in processes of their own, each into its config's folder; those that are finished are not started."""
    folders = {str(number): config.out for number, config in enumerate(configs) if config.out}
    threads = processes.threads_each(configs[0].threads, at_once)
    failed = []
    missing = [key for key, out in folders.items() if not finished.skip(out, configs[int(key)])]
    if not missing:
        return [folder.read_summary(out) for out in folders.values()]
    done = len(folders) - len(missing)
    bar = tqdm(total=len(folders), initial=done, desc=configs[0].algo, unit="run", disable=configs[0].quiet, dynamic_ncols=True)
    with bar, mlflow_at_hand(configs[0].mlflow) as here:
        environment = {**here, **trust.handed_on()}
        jobs = [processes.job(key, configs[int(key)].to_dict(), folders[key], work, threads, **environment) for key in missing]
        with closing(processes.run(jobs, at_once)) as events:
            for event in events:
                if event.code is not None:
                    bar.update()
                if event.code:
                    failed.append(f"{folders[event.key]}: {processes.last_error(work / f'{event.key}.log', event.code)}")
    if failed:
        raise FedbenchError(f"{len(failed)} of {len(folders)} runs failed: {'; '.join(failed)}")
    return [folder.read_summary(out) for out in folders.values()]


def run(config: RunConfig) -> dict[str, Any]:
    """Carry out a run; returns the summary that was written."""
    setup_logging(config.quiet, config.debug)
    log.disabled = not workers.is_first()
    describe_cache()
    device = choose_device(config.device)
    if config.threads or workers.count() > 1:
        set_threads(processes.threads_each(config.threads, workers.on_this_machine()))
    if workers.count() > 1:
        check_shared(config.algorithm)
        device = workers.own_device(device)
    workers.join(device)
    workers.agree("other flags", config.hash8)
    parts, dataset = workers.together(lambda: prepare(config.dataset, config.protocol, config.data))
    workers.agree("other data", lambda: f"{parts.checksum} {parts.fingerprint}")
    check_cohort(config.algorithm, parts)
    dtype = torch.float64 if config.dtype == "float64" else torch.float32
    memory.check(config.algorithm, parts, world_of(parts), dtype, device, -(-parts.clients // workers.count()))
    check_local_work(config.algorithm, parts, config.seed)
    if parts.newcomers:
        new_users.check_before_training(config.algorithm, parts, config.seed)
    if workers.anywhere(workers.restarted())[0]:
        config = once_more(config)
    out = Path(workers.told(lambda: str(choose_folder(config))))
    with claimed(out) if workers.is_first() else nullcontext(), install_listener("numba:compile", Compiling()):
        if summary := workers.told(lambda: finished.find(out, config, parts)):
            if workers.is_first():
                finished.say(out, config, summary, parts)
            return summary
        resume, state = told_state(lambda: going_on(out, config, parts))
        return carry_out(config, parts, dataset, device, out, resume, state)


class Compiling(Listener):
    """Says once that a kernel of local training is being compiled: the first round waits for it."""

    said = False

    def on_start(self, event: Event) -> None:
        if not self.said and event.data["dispatcher"].py_func.__module__ == fused.__name__:
            self.said = True
            with tqdm.external_write_mode():  # the bar makes way for a line
                log.info("compiling the kernels of this method for this machine: a minute or so, once; later runs find them")

    def on_end(self, event: Event) -> None:
        """Nothing to say: the round goes on."""


def carry_out(
    config: RunConfig, parts: Split, dataset: Interactions, device: str, out: Path, resume: bool, state: checkpoint.State | None
) -> dict[str, Any]:
    """Start or go on with a run whose folder belongs to this process."""
    leaky, fold = parts.protocol.leaky, parts.protocol.fold
    run_log = (RunLog if workers.is_first() else NoLog).open(
        out,
        {key: value for key, value in config.to_dict().items() if key not in ("out", "resume")},
        {
            "protocol_fingerprint": parts.fingerprint,
            "leaky": "LEAKY" if leaky else "no",
            "data_checksum": parts.checksum,
            "dataset": dataset.name,
            "data_source": dataset.source,
            "split": parts.protocol.split,
        },
        mlflow=config.mlflow,
        run_name=f"{config.algo}-{dataset.name}-{parts.protocol.name}-s{config.seed}" + ("" if fold is None else f"-f{fold}"),
        experiment=config.experiment,
        resume=resume,
    )
    try:
        describe(dataset, parts, config, device, out)
        dtype = torch.float64 if config.dtype == "float64" else torch.float32
        how: dict[str, Any] = {"kernel": config.kernel, "block_rows": config.block_rows, "compile": config.compile}
        how |= {"client_store": config.client_store, "folder": out}
        start = partial(Federation.start, config.algorithm, seed=config.seed, device=device, dtype=dtype, failures=config.failures, **how)
        federation = start(split=parts)
        describe_store(federation)
        best = Best()
        if state:
            restore(state, federation, best)
            run_log.go_on(federation.round)
        elif resume:
            log.warning("no checkpoint of the run in %s; it begins again", out)
        try:
            train(federation, best, run_log, config, out)
        except Diverged:
            federation.close()  # two of them need not fit in memory
            if config.checkpoint_every != "never":
                save_again(out, start(split=parts), federation.round - 1, best, config)
            raise
        lines = mirror_process.read_lines(out / "metrics.jsonl") if workers.is_first() else []
        summary = summarise(config, dataset, federation, best, lines, device)
        if parts.newcomers and workers.is_first():
            log.info("%s new users learn what is private to them", f"{parts.newcomers.clients:,}")
            round_, server = reported_server(out, federation, best)
            summary |= {"new_user": {"round": round_, **new_users.metrics(federation.engine, server, parts.newcomers)}}
        refitted = None
        if config.refit:
            save(out, federation, best, config)
            federation.close()  # two of them need not fit in memory
            federation = start(split=parts.with_validation_in_training())
            refitted = refit(federation, best.round, run_log, config, out)
            summary |= {"refit": refit_summary(best.round, refitted), "peak_rss_mb": peak_rss_mb()}
        keep_model(out, federation, best, config)
        run_log.finish(summary, per_client(parts, best.outcome, refitted), partial(checkpoint.prune, out, keep=0))
    except KeyboardInterrupt as end:
        with suppress(KeyboardInterrupt):  # a second one: MLflow is not waited for
            run_log.end("KILLED")
        raise end if isinstance(end, Interrupted) else Interrupted(f"interrupted; {how_to_go_on(config, out)}") from None
    except BaseException:
        run_log.end("FAILED")
        raise
    if workers.is_first():
        say(fitted(final_table(summary, parts)))
        say(f"folder  {out}")
    if run_log.link:
        say(f"charts  {run_log.link}")
    return summary


def prepare(name: str, protocol: Protocol, options: Any) -> tuple[Split, Interactions]:
    """Load a dataset and apply a protocol."""
    ncf = protocol.split == "ncf" or protocol.candidates == "ncf"
    data = registry.dataset(name)(dataclasses.replace(options, ncf=ncf))
    return split(data, protocol), data


def train(federation: Federation, best: Best, run_log: RunLog, config: RunConfig, out: Path) -> None:
    """All rounds that are left."""
    limit, unit = config.limit, config.budget
    cadence = checkpoint.Cadence.of(config.checkpoint_every)
    aside = Aside(federation, config, out)
    parts, on = federation.split, federation.split.protocol.select_on
    name, shown = ("rmse", "RMSE") if parts.held else ("hr_10", "HR@10")
    spent, counts = federation.spent(unit), dict(federation.counts)
    if federation.round and best.round == federation.round and spent < limit:
        aside.put(federation, best)  # a checkpoint does not hold it twice
    bar = tqdm(
        total=limit,
        initial=spent,
        desc=config.algo,
        unit=unit[:-1],
        unit_scale=unit == "bytes",
        disable=config.quiet or not workers.is_first(),
        dynamic_ncols=True,
    )
    with bar, interrupts_between_rounds() as interrupted:
        while spent < limit:
            started = time.perf_counter()
            result = federation.next_round()
            before, spent = spent, federation.spent(unit)
            if spent == 0 and len(result.loss):
                raise UsageError(f"--budget {unit}: {config.algo} uses none, so no budget would end it; use --rounds")
            line: dict[str, float] = {"round": federation.round}
            if result.updates:
                line["loss"] = float(result.loss.mean())
            if federation.round % config.eval_every == 0 or spent >= limit:
                outcome = federation.outcome()
                scores = metrics_of(parts, outcome)
                line |= {f"{part}/{key}": value for part, metrics in scores.items() for key, value in metrics.items()}
                own = federation.store.clients
                line |= exposure(result.uploads, federation.algorithm.tables, parts, config.seed, federation.round, own)
                if on == "last":
                    score, better = 0.0, spent >= limit
                else:
                    # a later round wins a tie on test, as in the published code; on validation the earlier one stands
                    score = -scores[on]["rmse"] if parts.held else scores[on][SELECT[on]]
                    better = score > best.score or (on == "test" and score == best.score)
                if workers.anywhere(better)[0]:
                    best.round, best.score, best.outcome = federation.round, score, outcome
                    if not parts.held:  # the next round may be better: if the model is small its full ranking can wait
                        best.unranked = federation.frozen() or federation
                        if best.unranked is federation:
                            best.rank_all()
                    if spent < limit:  # after the last round it is what the federation holds
                        aside.put(federation, best)
                bar.set_postfix_str(" ".join(f"{part} {shown} {scores[part][name]:.3f}" for part in scores), refresh=False)
            line["seconds"] = time.perf_counter() - started
            line |= {"bytes_up": federation.bytes_up, "bytes_down": federation.bytes_down}
            line |= {"client_visits": int(federation.visits.sum())}
            line |= counted(federation, counts)
            counts = dict(federation.counts)
            run_log.round(line)
            bar.update(min(spent, limit) - before)
            stop, due = workers.anywhere(interrupted(), cadence.due(federation.round))
            if stop:
                save(out, federation, best, config)
                log.info("the state after round %d is saved", federation.round)
                raise Interrupted(f"interrupted after round {federation.round}; {how_to_go_on(config, out)}")
            if due and spent < limit:
                started = time.perf_counter()
                save(out, federation, best, config)
                cadence.saved(time.perf_counter() - started)
    best.rank_all()


def counted(federation: Federation, before: dict[str, int]) -> dict[str, int]:
    """How many clients failed in this round, in which way; nothing if none could and none did."""
    now = {name: total - before[name] for name, total in federation.counts.items()}
    return now if federation.failures.happen() or any(now.values()) else {}


def refit(federation: Federation, rounds: int, run_log: RunLog, config: RunConfig, out: Path) -> dict[str, np.ndarray]:
    """From scratch for the chosen number of rounds; returns test and full_test [U], looked at once, at the end.

    The algorithm is as it was, so a schedule over all its rounds takes the course that led to the choice, and stops there.
    """
    quiet = config.quiet or not workers.is_first()
    bar = tqdm(total=rounds, desc=f"{config.algo} refit", unit="round", disable=quiet, dynamic_ncols=True)
    with bar, interrupts_between_rounds() as interrupted:
        while federation.round < rounds:
            started = time.perf_counter()
            result = federation.next_round()
            line: dict[str, float] = {"round": federation.round}
            if result.updates:
                line["loss"] = float(result.loss.mean())
            run_log.refit_round({**line, "seconds": time.perf_counter() - started})
            bar.update()
            if workers.anywhere(interrupted())[0]:
                again = "goes on, and begins the refit again"
                raise Interrupted(f"interrupted after round {federation.round} of the refit; {how_to_go_on(config, out, again)}")
    return {"test": federation.sampled_ranks()["test"], "full_test": federation.full_ranks()["test"]}


def how_to_go_on(config: RunConfig, out: Path, what: str = "goes on") -> str:
    """What to do after an interrupt: without --out the next run of the same command would be a new one."""
    named = config.out is not None or config.resume not in ("auto", "never")
    return f"the same command {what}" if named and config.resume != "never" else f"the same flags with --resume {out}: it {what}"


@contextmanager
def interrupts_between_rounds() -> Iterator[Callable[[], bool]]:
    """Ctrl-C waits for the end of the round: half a round's state could not be gone on with. A second one does not wait."""
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        # torchrun hands a Ctrl-C on that may have come from the terminal already, and does not wait for ever
        signal.signal(signal.SIGINT, before if workers.count() == 1 else signal.SIG_IGN)

    before = signal.getsignal(signal.SIGINT)
    mine = threading.current_thread() is threading.main_thread() and before is signal.default_int_handler
    if mine:
        signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        if mine:
            signal.signal(signal.SIGINT, before)


def check_cohort(algorithm: Algorithm, parts: Split) -> None:
    n, most = algorithm.clients_per_round, len(parts.trainers)
    if n is not None and n > most:
        raise UsageError(f"-n/--clients-per-round {n} is more than the {most} clients of this dataset and protocol; lower it")
    algorithm.check(world_of(parts))


def check_shared(algorithm: Algorithm) -> None:
    """Refuse what ranks cannot share out."""
    if isinstance(algorithm, Central):
        raise UsageError(f"{algorithm.name} has all data in one place: there are no clients to share out; run it without torchrun")


def set_threads(count: int) -> None:
    most = os.cpu_count() or 1
    if count > most:
        raise UsageError(f"--threads {count}: this machine has {most} CPU threads; use at most that many")
    torch.set_num_threads(count)
    numba.set_num_threads(count)


def choose_device(name: str) -> str:
    """auto: a GPU if there is one."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(index or 0) >= count:
            raise UsageError(
                f"--device {name}: this machine has {count or 'no'} CUDA device{'s' if count > 1 else ''}; use --device cpu or auto"
            )
    if kind == "mps" and not torch.backends.mps.is_available():
        raise UsageError("--device mps: this machine has no Apple GPU that torch can use; use --device cpu or auto")
    return name


def choose_folder(config: RunConfig) -> Path:
    """The run's folder: the one to go on with, the one given, or a new one."""
    if config.resume not in ("auto", "never"):
        return Path(config.resume)
    if config.out is not None:
        return config.out
    return new_folder(config)


def new_folder(config: RunConfig) -> Path:
    """runs/<dataset>/<algo>/<time>-<hash>, with a number behind if that is taken."""
    place = folder_of_runs(config) / f"{time.strftime('%Y%m%d-%H%M%S')}-{config.hash8()}"
    folder, again = place, 1
    while folder.exists():
        again += 1
        folder = place.with_name(f"{place.name}-{again}")
    return folder


def once_more(config: RunConfig) -> RunConfig:
    """The same after ranks were lost and started again: to go on, and without --out in the newest folder that has such a run unfinished."""
    if config.resume not in ("auto", "never") or config.out:
        return dataclasses.replace(config, resume="auto" if config.resume == "never" else config.resume)
    begun = sorted(folder_of_runs(config).glob(f"*-{config.hash8()}*"))
    last = begun[-1] if begun and not (begun[-1] / "summary.json").exists() else None
    return dataclasses.replace(config, resume="auto", out=last)


def folder_of_runs(config: RunConfig) -> Path:
    return Path("runs") / Path(config.dataset).stem / Path(config.algo).stem


def told_state(find: Callable[[], tuple[bool, checkpoint.State | None]]) -> tuple[bool, checkpoint.State | None]:
    """What the first rank finds in the run's folder."""

    def words() -> tuple[bool, tuple[str, dict[str, Any]] | None]:
        resume, state = find()
        return resume, (str(state.path), state.facts) if state else None

    resume, state = workers.told(words)
    return resume, checkpoint.State(Path(state[0]), state[1]) if state else None


def going_on(out: Path, config: RunConfig, parts: Split) -> tuple[bool, checkpoint.State | None]:
    """Whether a run that stopped in the folder goes on, and after which state (None: it begins again).

    The state of another configuration, dataset or protocol is refused before anything in the folder is touched.
    """
    named = config.resume not in ("auto", "never")
    if not (out / "config.json").exists():
        if named:
            raise UsageError(f"--resume {out}: no run and no checkpoint there; give the folder of a run that was interrupted")
        finished.refuse_several(out)
        return False, None
    if config.resume == "never":
        return False, None
    here = config.to_dict()
    if differs := finished.difference(out, config):
        if not named and (out / "summary.json").exists():
            raise UsageError(f"--out {out} already holds a run: {differs}; choose another folder")
        refuse(out, f"{differs}; give the same flags")
    if (out / "summary.json").exists():
        refuse(out, f"{out / 'summary.json'} is no summary of a run; remove it, or start again with another --out")
    state = checkpoint.newest(out)
    if state is None:
        if named and checkpoint.rounds(out):
            raise UsageError(f"--resume {out}: no checkpoint there can be read; start again with another --out")
        return True, None
    for key, mine in (("algo", config.identity()["algo"]), ("dataset", config.identity()["dataset"])):
        if state.facts.get(key) != mine:
            refuse(out, f"the content of {here[key]} has changed since that run began; start again with another --out")
    for key, mine in (("data_checksum", parts.checksum), ("protocol_fingerprint", parts.fingerprint)):
        if state.facts.get(key) != mine:
            words = key.replace("_", " ")
            refuse(out, f"that run's {words} is {state.facts.get(key)}, here it is {mine}; use the data and the flags that it had")
    if isinstance(config.algorithm, Central) and (kernel := state.facts.get("kernel", config.kernel)) != config.kernel:
        # its optimizer's moments stay between rounds, and kernels keep them on another scale
        refuse(out, f"that run has --kernel {kernel}, here it is {config.kernel}; a centralised method goes on with the same")
    if isinstance(state.facts.get("round"), int):
        folder.check_rounds(out, state.facts["round"])
    return True, state


def refuse(out: Path, why: str) -> NoReturn:
    raise UsageError(f"--resume {out}: {why}")


def describe(dataset: Interactions, parts: Split, config: RunConfig, device: str, out: Path) -> None:
    """Say what is about to run."""
    log.info("%s: %s users, %s items, %s interactions from %s (licence: %s)", dataset.name, f"{dataset.users:,}", f"{dataset.items:,}",
             f"{len(dataset.user):,}", dataset.source, dataset.licence)  # fmt: skip
    for note in dataset.notes:
        log.info("%s: %s", dataset.name, note)
    if dataset.merged_rows:
        log.info("%d repeated (user, item) rows merged: the latest stands", dataset.merged_rows)
    log.info("protocol %s [%s]: %s clients, %s items, split by %s", parts.protocol.name, parts.fingerprint, f"{parts.clients:,}",
             f"{parts.items:,}", parts.protocol.split)  # fmt: skip
    if parts.newcomers:
        log.info("%s more clients are kept out of training, to be tested as new users", f"{parts.newcomers.clients:,}")
    if parts.role is not None:
        log.info("%s clients take part; %s are for validation and %s for test", *(f"{n:,}" for n in np.bincount(parts.role)))
    if parts.protocol.eval_negatives < config.protocol.eval_negatives:
        log.info("%d items are ranked beside the held-out one, not %d", parts.protocol.eval_negatives, config.protocol.eval_negatives)
    if parts.protocol.leaky:
        log.warning("LEAKY protocol: numbers of this run are inflated and labelled so; use --protocol clean for true ones")
    if config.compile and config.kernel == "auto" and device == "cpu":
        log.info("--compile concerns the generic path; where a fused kernel fits it runs instead (--kernel off takes the generic path)")
    if config.kernel == "auto" and (note := kernel_check.note(config.algorithm, config.algo)):
        log.warning(note)
    log.info("%s, recipe %s, seed %d, on %s, into %s", config.algo, config.recipe, config.seed, device, out)


def describe_cache() -> None:
    """Say where compiled kernels are kept, if not beside their sources."""
    beside, kernels = Path(__file__).parents[1] / "__pycache__", Path(os.environ["NUMBA_CACHE_DIR"])
    if kernels.name.startswith("kernels-") and kernels.parent != beside:
        log.info("compiled kernels are kept in %s, for %s cannot be written; NUMBA_CACHE_DIR names another folder", kernels, beside)


def describe_store(federation: Federation) -> None:
    """Say where clients' state lies, if not in memory."""
    store = federation.store
    if isinstance(store.room, Disk):
        most = store.client_bytes * federation.split.clients
        log.info(
            "what clients keep is in a sparse file in %s, which goes when the run ends: %s if all take part", store.room.folder, human(most)
        )


def save(out: Path, federation: Federation, best: Best, config: RunConfig) -> None:
    """The state after the last finished round."""
    best.rank_all()
    state = federation.state()
    tensors = whole(state, federation)
    tensors |= {f"best/{name}": torch.from_numpy(value) for name, value in best.outcome.items()}
    if best.round != federation.round:
        tensors |= {f"best_state/{name}": value for name, value in whole(best.state, federation).items()}
    tensors["visits"] = torch.from_numpy(federation.visits)
    facts = state_facts(federation, config) | {
        "bytes_up": federation.bytes_up,
        "bytes_down": federation.bytes_down,
        "counts": federation.counts,
        "best_round": best.round,
        "best_score": best.score,
    }
    workers.told(lambda: checkpoint.save_round(out, federation.round, facts, tensors), [*lent(state).values()])


def save_again(out: Path, federation: Federation, round_: int, best: Best, config: RunConfig) -> None:
    """The last good state, which the round that diverged has overwritten: made again from the last checkpoint, or from the start."""
    _, state = told_state(lambda: (True, checkpoint.newest(out)))
    if state:
        restore(state, federation, Best())
    while federation.round < round_:
        federation.next_round()
    if round_:
        save(out, federation, best, config)
        log.warning("the state after round %d, the last good one, is in %s", round_, out / checkpoint.FOLDER)


def restore(state: checkpoint.State, federation: Federation, best: Best) -> None:
    """Go on from a saved state."""
    facts = state.facts
    try:
        tensors = own_part(state, federation)
        federation.set_state(tensors)
        federation.round, federation.bytes_up, federation.bytes_down = (int(facts[key]) for key in ("round", "bytes_up", "bytes_down"))
        federation.counts = dict(facts["counts"])
        federation.visits = tensors["visits"].cpu().numpy().copy()
        best.round, best.score = int(facts["best_round"]), float(facts["best_score"])
        best.outcome = {name: value.cpu().numpy() for name, value in beginning(tensors, "best/").items()}
        best.state = beginning(tensors, "best_state/")
        if workers.count() > 1:
            federation.store.room.forget(tensors.values())
    except (SafetensorError, KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise FedbenchError(
            f"{state.path} does not fit this run ({' '.join(str(error).split())}); start again with another --out"
        ) from None
    log.info("going on after round %d", federation.round)


def own_part(state: checkpoint.State, federation: Federation) -> Mapping[str, Tensor]:
    """The tensors of a state, of what clients hold and are sent that of this rank's clients: the first rank reads, and deals them out."""
    device, own, room = federation.engine.device, federation.store.clients, federation.store.room
    tensors = state.tensors(device) if workers.is_first() else {}
    if workers.count() == 1:
        return tensors
    names = workers.told(lambda: list(tensors))
    found: Tensors = {}
    rows = own
    if "clients" in names:  # those alone that have taken part
        clients = workers.dealt(lambda: tensors["clients"], device)
        rows = range(*torch.searchsorted(clients, torch.tensor([own.start, own.stop], device=device)).tolist())
        found["clients"] = clients[rows.start : rows.stop]
    for server in ("server/", "best_state/server/"):
        mail = [f"{server}{name}" for name in federation.algorithm.mailed if f"{server}{name}" in names]
        if mail:
            slots = workers.dealt(partial(tensors.__getitem__, f"{server}slot"), device)
            letters, found[f"{server}slot"] = own_mail(slots, own)
            found |= {name: workers.dealt(partial(tensors.__getitem__, name), device, letters.tolist(), room) for name in mail}
    for name in names:
        if name not in found:
            theirs = name.startswith(("client/", "best_state/client/"))
            found[name] = workers.dealt(partial(tensors.__getitem__, name), device, rows if theirs else None, room)
    return found


def own_mail(slot: Tensor, own: range) -> tuple[Tensor, Tensor]:
    """The rows of what is mailed that some of the clients `own` are sent, and `slot` [U] for these rows and clients alone."""
    mine, has = torch.full_like(slot, -1), torch.zeros_like(slot, dtype=torch.bool)
    has[own.start : own.stop] = slot[own.start : own.stop] >= 0
    rows, mine[has] = slot[has].unique(return_inverse=True)
    return rows, mine
