"""One run, or several: load, split, train, evaluate, log."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from fedbench import files, trust
from fedbench.console import fitted
from fedbench.contract import plugin_errors, registry
from fedbench.contract.dataset import Interactions
from fedbench.data.split import Split
from fedbench.errors import DataError, FedbenchError, Interrupted, UsageError
from fedbench.experiment import checkpoint, finished, folder, machine, processes
from fedbench.experiment.describe import describe, describe_store
from fedbench.experiment.kept_model import keep_model, reported_server
from fedbench.experiment.prepare import dtype_of, prepare_checked
from fedbench.experiment.resume import ResumePoint, agreed_folder, broadcast_point, find_resume_point, how_to_resume, new_folder
from fedbench.experiment.run_state import restore, save, save_last_good
from fedbench.experiment.summary import Best, final_table, mean_table, over_runs, peak_rss_mb, per_client, refit_summary, summarise
from fedbench.experiment.training import refit, train
from fedbench.files import write_json
from fedbench.locks import claimed
from fedbench.settings.config import RunConfig, placed
from fedbench.simulation import new_users, workers
from fedbench.simulation.federation import Diverged, Federation
from fedbench.simulation.probe import check_local_work
from fedbench.text import say
from fedbench.tracking.copier import mlflow_at_hand
from fedbench.tracking.run_log import NoLog, RunLog, plain, setup_logging
from fedbench.tracking.sweep_parent import join

log = logging.getLogger("fedbench")


PLUGIN = "plugin.py"
"""the copy of an algorithm's file from outside fedbench, in the run's folder"""


def run_several(configs: Sequence[RunConfig], parent: Path | None, jobs: int = 1) -> dict[str, Any]:
    """Execute runs in folders of their own below `parent`, one after another or `jobs` at once; their means go into its summary.json."""
    if workers.count() > 1:
        raise UsageError("torchrun shares out one run; give it one seed and one fold, or leave it out and use --jobs")
    # mistakes in a method show before any folder is made
    check_local_work(configs[0].algorithm, dtype_of(configs[0]))
    again = "the same command resumes them"
    if parent is None:
        parent = new_folder(configs[0])
        configs = placed(configs, parent)
        again = f"the same flags with --out {parent} resume them"
    try:
        # a second call with the same folder would write its mean over this one's
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
    """The summary over several runs. Summaries of runs that were finished before are read from disk, so they may be damaged."""
    try:
        return over_runs(summaries, [folder.read_clients(one) for one in folders])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{parent}: the summaries of its runs do not fit together ({error}); remove the one that is damaged") from None


def in_processes(configs: Sequence[RunConfig], work: Path, at_once: int) -> list[dict[str, Any]]:
    """Execute runs in processes of their own, each in its config's folder, and return their summaries; finished ones are not started."""
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
    """Execute one run, or find it finished in its folder; returns the summary that was written."""
    setup_logging(config.quiet, config.debug)
    device = machine.set_up(config)
    split, dataset = prepare_checked(config, device)
    config, out = agreed_folder(config)
    with claimed(out) if workers.is_first() else nullcontext():
        # within the claim: a process that had it before may just have finished this run
        if summary := workers.broadcast(lambda: find_finished(out, config, split)):
            workers.on_first(finished.say, out, config, summary, split)
            return summary
        point = broadcast_point(lambda: find_resume_point(out, config, split))
        return execute(config, split, dataset, device, out, point)


def find_finished(out: Path, config: RunConfig, split: Split) -> dict[str, Any] | None:
    """The summary of this very run, if it is finished; refuses a folder whose run had another version of an installed algorithm.

    The content of an algorithm that is a path is part of the config's identity, that of an installed one is not.
    """
    source, kept = registry.source(type(config.algorithm)), out / PLUGIN
    if source and source.package and kept.is_file() and files.read_bytes(kept) != source.content:
        raise UsageError(f"--out {out}: the content of {config.algo} has changed since that run; start again with another --out")
    return finished.find(out, config, split)


def execute(config: RunConfig, split: Split, dataset: Interactions, device: str, out: Path, point: ResumePoint) -> dict[str, Any]:
    """Start or resume a run whose folder belongs to this process, up to its summary."""
    run_log = open_log(config, split, dataset, out, point.resumes)
    try:
        if source := registry.source(type(config.algorithm)):
            run_log.keep(PLUGIN, source.content)
        describe(dataset, split, config, device, out)
        start = partial(start_federation, config, device, out)
        federation, best = start(split), Best()
        describe_store(federation)
        if point.state:
            restore(point.state, federation, best)
            run_log.resume(federation.round)
        elif point.resumes:
            log.warning("no checkpoint of the run in %s; it starts from the first round", out)
        try:
            train(federation, best, run_log, config, out)
        except Diverged:
            federation.close()  # two of them need not fit in memory
            if config.checkpoint_every != "never":
                save_last_good(out, start(split), federation.round - 1, best, config)
            raise
        summary = summarise(config, dataset, federation, best, run_log.rounds(), device)
        summary |= workers.on_first(new_user_summary, out, federation, best) or {}
        refitted = None
        if config.refit:
            # the refit has no checkpoints: a run that is killed in it resumes here
            save(out, federation, best, config)
            federation.close()  # two of them need not fit in memory
            federation = start(split.with_validation_in_training())
            refitted = refit(federation, best.round, run_log, config, out)
            summary |= {"refit": refit_summary(best.round, refitted), "peak_rss_mb": peak_rss_mb()}
        # before the summary, whose presence says that all is there
        keep_model(out, federation, best, config)
        run_log.finish(summary, per_client(split, best.outcome, refitted), partial(checkpoint.prune, out, keep=0))
    except KeyboardInterrupt as end:
        with suppress(KeyboardInterrupt):  # a second one: MLflow is not waited for
            run_log.end("KILLED")
        raise end if isinstance(end, Interrupted) else Interrupted(f"interrupted; {how_to_resume(config, out)}") from None
    except BaseException:
        run_log.end("FAILED")
        raise
    workers.on_first(say_result, summary, split, out, run_log.link)
    return summary


def open_log(config: RunConfig, split: Split, dataset: Interactions, out: Path, resume: bool) -> RunLog:
    """The run's folder and its copy in MLflow, written by worker 0 alone."""
    fold = "" if split.protocol.fold is None else f"-f{split.protocol.fold}"
    source = registry.source(type(config.algorithm))
    return (RunLog if workers.is_first() else NoLog).open(
        out,
        {key: value for key, value in config.to_dict().items() if key not in ("out", "resume")},
        {
            "protocol_fingerprint": split.fingerprint,
            "leaky": "LEAKY" if split.protocol.leaky else "no",
            **({"control": "no server"} if config.failures.no_server else {}),
            "data_checksum": split.checksum,
            "dataset": dataset.name,
            "data_source": dataset.source,
            "split": split.protocol.split,
            "algo": config.algorithm.name,
            **(source.facts() if source else {}),
        },
        mlflow=config.mlflow,
        run_name=f"{config.algorithm.name}-{dataset.name}-{split.protocol.name}-s{config.seed}{fold}",
        experiment=config.experiment,
        resume=resume,
    )


def start_federation(config: RunConfig, device: str, out: Path, split: Split) -> Federation:
    """Round 0 of the federation that a config describes."""
    return Federation.start(
        config.algorithm,
        split,
        config.seed,
        device,
        dtype_of(config),
        config.failures,
        config.client_store,
        out,
        kernel=config.kernel,
        block_rows=config.block_rows,
        compile=config.compile,
    )


def new_user_summary(out: Path, federation: Federation, best: Best) -> dict[str, Any]:
    """What the summary says of cold-start users, who learn their private state from the reported round's server; {} without any."""
    users = federation.split.cold_start
    if not users:
        return {}
    log.info("%s new users learn what is private to them", f"{users.clients:,}")
    round_, server = reported_server(out, federation, best)
    return {"new_user": {"round": round_, **new_users.metrics(federation.engine, server, users, ties=federation.evaluator.settles_ties)}}


def say_result(summary: dict[str, Any], split: Split, out: Path, link: str | None) -> None:
    """Print the final table, the folder and the charts' address."""
    say(fitted(final_table(summary, split)))
    say(f"folder  {out}")
    if link:
        say(f"charts  {link}")
