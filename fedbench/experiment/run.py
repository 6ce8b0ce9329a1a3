"""One run, or several: load, split, train, evaluate, log."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from fedbench import files, trust
from fedbench.console import fitted
from fedbench.contract import plugin_errors, registry
from fedbench.contract.dataset import Interactions
from fedbench.data.split import Split
from fedbench.errors import DataError, FedbenchError, Interrupted, UsageError
from fedbench.experiment import checkpoint, finished, folder, memory, processes
from fedbench.experiment.describe import describe, describe_store
from fedbench.experiment.kept_model import keep_model, reported_server
from fedbench.experiment.machine import choose_device, compiling_is_said, describe_cache, set_threads
from fedbench.experiment.prepare import check_cohort, check_shared, prepare
from fedbench.experiment.resume import choose_folder, going_on, how_to_resume, new_folder, once_more
from fedbench.experiment.run_state import restore, save, save_again, told_state
from fedbench.experiment.summary import Best, final_table, mean_table, over_runs, peak_rss_mb, per_client, refit_summary, summarise
from fedbench.experiment.training import refit, train
from fedbench.files import write_json
from fedbench.locks import claimed
from fedbench.settings.config import RunConfig, placed
from fedbench.simulation import new_users, workers
from fedbench.simulation.federation import Diverged, Federation, world_of
from fedbench.simulation.probe import check_local_work
from fedbench.text import say
from fedbench.tracking import mirror_process
from fedbench.tracking.copier import mlflow_at_hand
from fedbench.tracking.run_log import NoLog, RunLog, plain, setup_logging
from fedbench.tracking.sweep_parent import join

log = logging.getLogger("fedbench")


PLUGIN = "plugin.py"
"""the copy of an algorithm's file from outside fedbench, in the run's folder"""


def run_several(configs: Sequence[RunConfig], parent: Path | None, jobs: int = 1) -> dict[str, Any]:
    """Runs each in a folder of its own below `parent`, one after another or `jobs` at once, and their means in its summary.json."""
    if workers.count() > 1:
        raise UsageError("torchrun shares out one run; give it one seed and one fold, or leave it out and use --jobs")
    check_local_work(configs[0].algorithm, getattr(torch, configs[0].dtype))
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
    failed: dict[str, int] = {}
    missing = [key for key, out in folders.items() if not finished.skip(out, configs[int(key)])]
    if not missing:
        return [folder.read_summary(out) for out in folders.values()]
    done = len(folders) - len(missing)
    bar = tqdm(total=len(folders), initial=done, desc=configs[0].algorithm.name, unit="run", disable=configs[0].quiet, dynamic_ncols=True)
    with bar, mlflow_at_hand(configs[0].mlflow) as here:
        environment = {**here, **trust.handed_on()}
        jobs = [processes.job(key, configs[int(key)].to_dict(), folders[key], work, threads, **environment) for key in missing]
        with closing(processes.run(jobs, at_once)) as events:
            for event in events:
                if event.code is not None:
                    bar.update()
                if event.code:
                    failed[f"{folders[event.key]}: {processes.last_error(work / f'{event.key}.log', event.code)}"] = event.code
    if failed:
        kind = UsageError if set(failed.values()) == {UsageError.exit_code} else FedbenchError
        raise kind(f"{len(failed)} of {len(folders)} runs failed: {'; '.join(failed)}")
    return [folder.read_summary(out) for out in folders.values()]


@plugin_errors.blamed()
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
    parts, dataset = workers.run_on_all(lambda: prepare(config.dataset, config.protocol, config.data))
    workers.agree("other data", lambda: f"{parts.checksum} {parts.fingerprint}")
    check_cohort(config.algorithm, parts)
    dtype = getattr(torch, config.dtype)
    check_local_work(config.algorithm, dtype)
    memory.check(config.algorithm, parts, world_of(parts), dtype, device, -(-parts.clients // workers.count()))
    if parts.newcomers:
        new_users.check_before_training(config.algorithm, parts, config.seed)
    if workers.on_any(workers.restarted()):
        config = once_more(config)
    out = Path(workers.broadcast(lambda: str(choose_folder(config))))
    with claimed(out) if workers.is_first() else nullcontext(), compiling_is_said():
        workers.broadcast(lambda: refuse_other_package(out, config))
        if summary := workers.broadcast(lambda: finished.find(out, config, parts)):
            if workers.is_first():
                finished.say(out, config, summary, parts)
            return summary
        resume, state = told_state(lambda: going_on(out, config, parts))
        return carry_out(config, parts, dataset, device, out, resume, state)


def refuse_other_package(out: Path, config: RunConfig) -> None:
    """Raise if the folder's run had another version of an installed algorithm; a path's content is part of the config's identity."""
    source = registry.source(type(config.algorithm))
    kept = out / PLUGIN
    if source and source.package and kept.is_file() and files.read_bytes(kept) != source.content:
        raise UsageError(f"--out {out}: the content of {config.algo} has changed since that run; start again with another --out")


def carry_out(
    config: RunConfig, parts: Split, dataset: Interactions, device: str, out: Path, resume: bool, state: checkpoint.State | None
) -> dict[str, Any]:
    """Start or go on with a run whose folder belongs to this process."""
    leaky, fold = parts.protocol.leaky, parts.protocol.fold
    source = registry.source(type(config.algorithm))
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
            **(source.facts() if source else {}),
        },
        mlflow=config.mlflow,
        run_name=f"{config.algorithm.name}-{dataset.name}-{parts.protocol.name}-s{config.seed}" + ("" if fold is None else f"-f{fold}"),
        experiment=config.experiment,
        resume=resume,
    )
    try:
        if source and workers.is_first():
            with files.replacing(out / PLUGIN) as file:
                file.write(source.content)
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
        raise end if isinstance(end, Interrupted) else Interrupted(f"interrupted; {how_to_resume(config, out)}") from None
    except BaseException:
        run_log.end("FAILED")
        raise
    if workers.is_first():
        say(fitted(final_table(summary, parts)))
        say(f"folder  {out}")
    if run_log.link:
        say(f"charts  {run_log.link}")
    return summary
