"""One run: load, split, rounds, evaluate, choose a round, log."""

from __future__ import annotations

import dataclasses
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numba
import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from fedbench import checkpoint, registry
from fedbench.algorithm import Algorithm, Tensors, World
from fedbench.config import RunConfig
from fedbench.data import Interactions
from fedbench.draw import Draw
from fedbench.engine import Engine, Round, Uploads
from fedbench.errors import FedbenchError, UsageError
from fedbench.evaluate import Evaluator, chance_metrics, popularity_ranks, ranking_metrics, spread
from fedbench.protocol import Protocol
from fedbench.split import Split, cohort_of, sample_round, split
from fedbench.store import ClientStore
from fedbench.tracking import RunLog, setup_logging

log = logging.getLogger("fedbench")

SELECT = {"val": ("val", "ndcg_10"), "test": ("test", "hr_10")}
"""the metric that chooses the reported round"""


@dataclass
class Federation:
    """A federation under way: everything that changes from round to round."""

    algorithm: Algorithm
    split: Split
    engine: Engine
    server: Tensors
    store: ClientStore
    evaluator: Evaluator
    seed: int
    round: int = 0
    visits: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    bytes_up: int = 0
    bytes_down: int = 0
    channel: tuple[Callable[[Uploads], Uploads], ...] = ()
    """what happens to the uploads on their way to the server, in order, after their bytes are counted"""

    @classmethod
    def start(
        cls, algorithm: Algorithm, split: Split, seed: int, device: str = "cpu", dtype: torch.dtype = torch.float32, **engine: Any
    ) -> Federation:
        """Round 0: the server and all clients initialised."""
        world = World(split.clients, split.items)
        draw = Draw(seed, 0, None, dtype, device)
        return cls(
            algorithm,
            split,
            Engine(algorithm, world, seed, device, dtype, **engine),
            algorithm.init_server(world, draw),
            ClientStore(algorithm, world, draw),
            Evaluator(algorithm, split, device),
            seed,
            visits=np.zeros(split.clients, np.int64),
        )

    def next_round(self) -> Round:
        """One communication round."""
        self.round += 1
        a, engine = self.algorithm, self.engine
        cohort = cohort_of(self.round, self.split.clients, a.clients_per_round or self.split.clients, a.sampling, self.seed)
        samples = sample_round(self.split, cohort, a.negatives, self.seed, self.round)
        result = engine.run_cohort(self.server, self.store, samples, self.round)
        if not torch.isfinite(result.loss).all():
            raise FedbenchError(f"the training loss is not finite in round {self.round}: training diverged; lower the learning rate")
        self.bytes_up += result.uploads.bytes()
        uploads = result.uploads
        for hop in self.channel:
            uploads = hop(uploads)
        self.server = a.aggregate(self.server, uploads, Draw(self.seed, self.round, None, engine.dtype, engine.device))
        self.visits[cohort] += 1
        self.bytes_down += result.bytes_down
        return result

    def sampled_ranks(self) -> dict[str, np.ndarray]:
        return self.evaluator.sampled_ranks(self.store, self.algorithm.answer(self.server))

    def full_ranks(self) -> dict[str, np.ndarray]:
        return self.evaluator.full_ranks(self.store, self.algorithm.answer(self.server))


@dataclass
class Best:
    """The reported round so far: its score on the selection metric and every client's ranks in it."""

    round: int = 0
    score: float = -1.0
    ranks: dict[str, np.ndarray] = field(default_factory=dict)
    """val, test, full_val, full_test: [U] each"""


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
        federation = Federation.start(
            algorithm, parts, config.seed, device, dtype, kernel=config.kernel, block_rows=config.block_rows, compile=config.compile
        )
        best = Best()
        if resume:
            restore(out, federation, best)
        seconds = train(federation, best, run_log, config, out)
        summary = summarise(config, dataset, federation, best, seconds, device)
        save(out, federation, best, config)
        run_log.finish(summary, per_client(parts, best.ranks))
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


def train(federation: Federation, best: Best, run_log: RunLog, config: RunConfig, out: Path) -> list[float]:
    """All rounds that are left; returns the seconds of each."""
    rounds, seconds = federation.algorithm.rounds, []
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
            seconds.append(line["seconds"])
            run_log.round(line)
            bar.update()
            if interrupted():
                log.warning("interrupted after round %d; go on with --resume %s", federation.round, out)
                save(out, federation, best, config)
                raise KeyboardInterrupt
    return seconds


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


def summarise(
    config: RunConfig, dataset: Interactions, federation: Federation, best: Best, seconds: list[float], device: str
) -> dict[str, Any]:
    """summary.json"""
    parts = federation.split
    metrics = {
        name: {**ranking_metrics(best.ranks[name]), **ranking_metrics(best.ranks[f"full_{name}"], "full_"), **spread(best.ranks[name])}
        for name in ("val", "test")
    }
    floor = popularity_ranks(parts)
    popularity = {**ranking_metrics(floor["test"]), **ranking_metrics(floor["full_test"], "full_")}
    summary = {
        "algo": config.algo,
        "dataset": dataset.name,
        "protocol": parts.protocol.name,
        "protocol_fields": protocol_fields(parts.protocol),
        "protocol_fingerprint": parts.fingerprint,
        "leaky": parts.protocol.leaky,
        "recipe": config.recipe,
        "seed": config.seed,
        "rounds": federation.round,
        "best_round": best.round,
        **metrics,
        "popularity": popularity,
        "chance": chance_metrics(parts),
        "beats_popularity": metrics["test"]["ndcg_10"] > popularity["ndcg_10"],
        "clients": parts.clients,
        "items": parts.items,
        "bytes_up": federation.bytes_up,
        "bytes_down": federation.bytes_down,
        "client_visits": int(federation.visits.sum()),
        "clients_never_seen": int((federation.visits == 0).sum()),
        "seconds_per_round": float(np.median(seconds)) if seconds else 0.0,
        "peak_rss_mb": peak_rss_mb(),
        "device": device,
    }
    return summary | {"notes": notes(summary, parts)}


def notes(summary: dict[str, Any], parts: Split) -> list[str]:
    """What must be said beside the numbers, in words."""
    said = []
    if parts.protocol.leaky:
        why = []
        if parts.protocol.train_negatives == "leaky":
            why.append("held-out items are never drawn as training negatives")
        if parts.protocol.select_on == "test":
            why.append("the round is chosen on test")
        said.append(f"LEAKY: {' and '.join(why)}; these numbers are inflated (see docs/protocol.md)")
    mine, floor = summary["test"], summary["popularity"]
    if all(mine[key] == value for key, value in floor.items()):
        return said
    figures = f"HR@10 {mine['hr_10']:.4f} against {floor['hr_10']:.4f}, NDCG@10 {mine['ndcg_10']:.4f} against {floor['ndcg_10']:.4f}"
    if not summary["beats_popularity"]:
        said.append(f"{summary['algo']} does NOT beat popularity: {figures}")
    elif mine["hr_10"] <= floor["hr_10"]:
        said.append(f"{summary['algo']} beats popularity on NDCG@10 but not on HR@10: {figures}")
    return said


def final_table(summary: dict[str, Any], parts: Split) -> str:
    """The result beside popularity and chance, and what must be said about it."""
    columns = ("hr_10", "ndcg_10", "mrr", "full_hr_10", "full_ndcg_10")
    rows = [(summary["algo"], summary["test"]), ("popularity", summary["popularity"]), ("random (exact)", summary["chance"])]
    width = max(len(name) for name, _ in rows) + 2
    protocol = f"{summary['protocol']}{' LEAKY' if summary['leaky'] else ''}"
    head = f"{summary['dataset']}, protocol {protocol} [{summary['protocol_fingerprint']}]"
    head += f", test at round {summary['best_round']} of {summary['rounds']}"
    lines = ["", f"{head} (chosen on {parts.protocol.select_on}), {parts.clients:,} clients, {parts.items:,} items"]
    lines.append(" " * width + "".join(f"{name.replace('_10', '@10').replace('_', ' ').upper():>14}" for name in columns))
    for name, metrics in rows:
        lines.append(f"{name:<{width}}" + "".join(f"{metrics[column]:>14.4f}" for column in columns))
    lines.append(f"{summary['seconds_per_round']:.2f} s a round, {human(summary['bytes_up'])} up, {human(summary['bytes_down'])} down, "
                 f"{summary['client_visits']:,} client visits")  # fmt: skip
    return "\n".join([*lines, *(f"! {note}" for note in summary["notes"])])


def human(size: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def per_client(parts: Split, ranks: dict[str, np.ndarray]) -> pd.DataFrame:
    """One row a client: its name in the source, how much it trained on, the ranks of its held-out items."""
    return pd.DataFrame(
        {
            "user": parts.user_ids.astype(str),
            "train_items": parts.train_counts,
            "rank_val": ranks["val"],
            "rank_test": ranks["test"],
            "full_rank_val": ranks["full_val"],
            "full_rank_test": ranks["full_test"],
        }
    )


def protocol_fields(protocol: Protocol) -> dict[str, Any]:
    """The resolved protocol, as flags name it."""
    fields = dataclasses.asdict(protocol)
    return {"protocol": fields.pop("name"), **fields}


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


def peak_rss_mb() -> float:
    """Largest resident memory of this process so far, in MB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak / 1e3


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
