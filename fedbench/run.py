"""One run: load, split, rounds, evaluate, choose a round, log."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numba
import numpy as np
import torch
from tqdm import tqdm

from fedbench import checkpoint, registry
from fedbench.algorithm import Algorithm, World
from fedbench.config import RunConfig
from fedbench.data import Interactions
from fedbench.errors import UsageError
from fedbench.evaluate import ranking_metrics
from fedbench.federation import Federation
from fedbench.protocol import Protocol
from fedbench.results import Best, final_table, peak_rss_mb, per_client, refit_summary, summarise
from fedbench.split import Split, split
from fedbench.tracking import RunLog, read_metrics, setup_logging

log = logging.getLogger("fedbench")

SELECT = {"val": ("val", "ndcg_10"), "test": ("test", "hr_10")}
"""the metric that chooses the reported round"""


def run(config: RunConfig) -> dict[str, Any]:
    """Carry out a run; returns the summary that was written."""
    setup_logging(config.quiet, config.debug)
    device = choose_device(config.device)
    if config.threads:
        set_threads(config.threads)
    parts, dataset = prepare(config.dataset, config.protocol, config.data)
    algorithm = config.algorithm
    check_cohort(algorithm, parts)
    out, resume = choose_folder(config)
    if resume:
        check_resumable(out, config, parts)
    leaky = parts.protocol.leaky
    run_log = RunLog.open(
        out,
        {key: value for key, value in config.to_dict().items() if key not in ("out", "resume")},
        {
            "protocol_fingerprint": parts.fingerprint,
            "leaky": "LEAKY" if leaky else "no",
            "data_checksum": parts.checksum,
            "dataset": dataset.name,
            "split": parts.protocol.split,
        },
        mlflow=config.mlflow,
        run_name=f"{config.algo}-{dataset.name}-{parts.protocol.name}-s{config.seed}",
        experiment=config.experiment,
        resume=resume,
    )
    try:
        describe(dataset, parts, config, device, out)
        dtype = torch.float64 if config.dtype == "float64" else torch.float32
        how: dict[str, Any] = {"kernel": config.kernel, "block_rows": config.block_rows, "compile": config.compile}
        federation = Federation.start(algorithm, parts, config.seed, device, dtype, **how)
        best = Best()
        if resume:
            restore(out, federation, best)
        train(federation, best, run_log, config, out)
        seconds = [line["seconds"] for line in read_metrics(out / "metrics.jsonl")]
        summary = summarise(config, dataset, federation, best, seconds, device)
        save(out, federation, best, config)
        refitted = None
        if config.refit:
            del federation  # two of them need not fit in memory
            federation = Federation.start(algorithm, parts.with_validation_in_training(), config.seed, device, dtype, **how)
            refitted = refit(federation, best.round, run_log, config, out)
            summary |= {"refit": refit_summary(best.round, refitted), "peak_rss_mb": peak_rss_mb()}
        run_log.finish(summary, per_client(parts, best.ranks, refitted))
    except KeyboardInterrupt:
        run_log.end("KILLED")
        raise
    except BaseException:
        run_log.end("FAILED")
        raise
    print(final_table(summary, parts))
    print(f"folder  {out}")
    if run_log.link:
        print(f"charts  {run_log.link}")
    return summary


def prepare(name: str, protocol: Protocol, options: Any) -> tuple[Split, Interactions]:
    """Load a dataset and apply a protocol."""
    ncf = protocol.split == "ncf" or protocol.candidates == "ncf"
    data = registry.dataset(name)(dataclasses.replace(options, ncf=ncf))
    return split(data, protocol), data


def train(federation: Federation, best: Best, run_log: RunLog, config: RunConfig, out: Path) -> None:
    """All rounds that are left."""
    rounds = federation.algorithm.rounds
    which, metric = SELECT[federation.split.protocol.select_on]
    bar = tqdm(total=rounds, initial=federation.round, desc=config.algo, unit="round", disable=config.quiet, dynamic_ncols=True)
    with bar, interrupts_between_rounds() as interrupted:
        while federation.round < rounds:
            started = time.perf_counter()
            result = federation.next_round()
            line: dict[str, float] = {"round": federation.round}
            if result.updates:
                line["loss"] = float(result.loss.mean())
            if federation.round % config.eval_every == 0 or federation.round == rounds:
                ranks = federation.sampled_ranks()
                scores = {name: ranking_metrics(rank) for name, rank in ranks.items()}
                line |= {f"{name}/{key}": value for name, metrics in scores.items() for key, value in metrics.items()}
                # a later round wins a tie on test, as in the published code; on validation the earlier one stands
                score = scores[which][metric]
                if score > best.score or (which == "test" and score == best.score):
                    full = federation.full_ranks()
                    best.round, best.score = federation.round, score
                    best.ranks = {**ranks, "full_val": full["val"], "full_test": full["test"]}
                bar.set_postfix_str(f"val HR@10 {scores['val']['hr_10']:.3f} test HR@10 {scores['test']['hr_10']:.3f}", refresh=False)
            line["seconds"] = time.perf_counter() - started
            line |= {"bytes_up": federation.bytes_up, "bytes_down": federation.bytes_down}
            line |= {"client_visits": int(federation.visits.sum())}
            run_log.round(line)
            bar.update()
            if interrupted():
                log.warning("interrupted after round %d; go on with --resume %s", federation.round, out)
                save(out, federation, best, config)
                raise KeyboardInterrupt


def refit(federation: Federation, rounds: int, run_log: RunLog, config: RunConfig, out: Path) -> dict[str, np.ndarray]:
    """From scratch for the chosen number of rounds; returns test and full_test [U], looked at once, at the end.

    The algorithm is as it was, so a schedule over all its rounds takes the course that led to the choice, and stops there.
    """
    bar = tqdm(total=rounds, desc=f"{config.algo} refit", unit="round", disable=config.quiet, dynamic_ncols=True)
    with bar, interrupts_between_rounds() as interrupted:
        while federation.round < rounds:
            started = time.perf_counter()
            result = federation.next_round()
            line: dict[str, float] = {"round": federation.round}
            if result.updates:
                line["loss"] = float(result.loss.mean())
            run_log.refit_round({**line, "seconds": time.perf_counter() - started})
            bar.update()
            if interrupted():
                log.warning("interrupted in round %d of the refit; --resume %s begins the refit again", federation.round, out)
                raise KeyboardInterrupt
    return {"test": federation.sampled_ranks()["test"], "full_test": federation.full_ranks()["test"]}


@contextmanager
def interrupts_between_rounds() -> Iterator[Callable[[], bool]]:
    """Ctrl-C waits for the end of the round: half a round's state could not be gone on with. A second one does not wait."""
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, before)

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
    n = algorithm.clients_per_round
    if n is not None and n > parts.clients:
        raise UsageError(f"-n/--clients-per-round {n} is more than the {parts.clients} clients of this dataset and protocol; lower it")
    algorithm.check(World(parts.clients, parts.items))


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


def choose_folder(config: RunConfig) -> tuple[Path, bool]:
    """The run's folder, and whether a run that stopped in it goes on."""
    if config.resume not in ("auto", "never"):
        folder = Path(config.resume)
        if not checkpoint.exists(folder):
            raise UsageError(f"--resume {folder}: no checkpoint there; give the folder of a run that was interrupted")
        return folder, True
    if config.out is not None:
        stopped = checkpoint.exists(config.out) and not (config.out / "summary.json").exists()
        return config.out, config.resume == "auto" and stopped
    label = Path(config.algo).stem, Path(config.dataset).stem
    place = Path("runs") / label[1] / label[0] / f"{time.strftime('%Y%m%d-%H%M%S')}-{config.hash8()}"
    folder, again = place, 1
    while folder.exists():
        again += 1
        folder = place.with_name(f"{place.name}-{again}")
    return folder, False


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
    if parts.protocol.eval_negatives < config.protocol.eval_negatives:
        log.info("%d items are ranked beside the held-out one, not %d", parts.protocol.eval_negatives, config.protocol.eval_negatives)
    if parts.protocol.leaky:
        log.warning("LEAKY protocol: numbers of this run are inflated and labelled so; use --protocol clean for true ones")
    if config.compile and config.kernel == "auto" and device == "cpu":
        log.info("--compile concerns the generic path; where a fused kernel fits it runs instead (--kernel off takes the generic path)")
    log.info("%s, recipe %s, seed %d, on %s, into %s", config.algo, config.recipe, config.seed, device, out)


def save(out: Path, federation: Federation, best: Best, config: RunConfig) -> None:
    """The state after the last finished round."""
    tensors = {f"server/{name}": value for name, value in federation.server.items()}
    tensors |= {f"client/{name}": value for name, value in federation.store.tensors.items()}
    tensors |= {f"best/{name}": torch.from_numpy(value) for name, value in best.ranks.items()}
    tensors["visits"] = torch.from_numpy(federation.visits)
    facts = {
        "config": config.hash8(),
        "fingerprint": federation.split.fingerprint,
        "round": federation.round,
        "bytes_up": federation.bytes_up,
        "bytes_down": federation.bytes_down,
        "best_round": best.round,
        "best_score": best.score,
    }
    checkpoint.save(out, facts, tensors)


def check_resumable(out: Path, config: RunConfig, parts: Split) -> None:
    """Refuse the state of another configuration or protocol, before anything in its folder is touched."""
    facts = checkpoint.facts(out)
    for key, mine in (("config", config.hash8()), ("fingerprint", parts.fingerprint)):
        if facts.get(key) != mine:
            raise UsageError(f"--resume {out}: that run has another {key} ({facts.get(key)}, here {mine}); give the same flags")


def restore(out: Path, federation: Federation, best: Best) -> None:
    """Go on from a saved state."""
    state = checkpoint.load(out, federation.engine.device)
    if state is None:
        raise UsageError(f"--resume {out}: no checkpoint there")
    facts, tensors = state
    federation.round, federation.bytes_up, federation.bytes_down = facts["round"], facts["bytes_up"], facts["bytes_down"]
    federation.visits = tensors["visits"].cpu().numpy().copy()
    federation.server = {name.removeprefix("server/"): value for name, value in tensors.items() if name.startswith("server/")}
    for name in federation.store.tensors:
        federation.store.tensors[name].copy_(tensors[f"client/{name}"])
    best.round, best.score = facts["best_round"], facts["best_score"]
    best.ranks = {name.removeprefix("best/"): value.cpu().numpy() for name, value in tensors.items() if name.startswith("best/")}
    log.info("going on after round %d", federation.round)
