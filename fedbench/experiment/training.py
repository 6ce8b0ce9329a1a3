"""The rounds of a run."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import numpy as np
from tqdm.auto import tqdm

from fedbench.errors import Interrupted, UsageError
from fedbench.evaluation.metrics import metrics_of
from fedbench.experiment.kept_model import Aside
from fedbench.experiment.resume import how_to_go_on
from fedbench.experiment.run_state import save
from fedbench.experiment.summary import Best
from fedbench.settings.cadence import Cadence
from fedbench.settings.config import RunConfig
from fedbench.simulation import workers
from fedbench.simulation.exposure import exposure
from fedbench.simulation.federation import Federation
from fedbench.tracking.run_log import RunLog

log = logging.getLogger("fedbench")
SELECT = {"val": "ndcg_10", "test": "hr_10"}
"""the metric that chooses the reported round of a ranking; of ratings it is the RMSE"""


def train(federation: Federation, best: Best, run_log: RunLog, config: RunConfig, out: Path) -> None:
    """All rounds that are left."""
    limit, unit = config.limit, config.budget
    cadence = Cadence.of(config.checkpoint_every)
    aside = Aside(federation, config, out)
    parts, on = federation.split, federation.split.protocol.select_on
    name, shown = ("rmse", "RMSE") if parts.held else ("hr_10", "HR@10")
    spent, counts = federation.spent(unit), dict(federation.counts)
    if federation.round and best.round == federation.round and spent < limit:
        aside.put(federation, best)  # a checkpoint does not hold it twice
    bar = tqdm(
        total=limit,
        initial=spent,
        desc=config.algorithm.name,
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
                raise UsageError(f"--budget {unit}: {config.algorithm.name} uses none, so no budget would end it; use --rounds")
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
                if workers.on_any(better):
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
            stop, due = workers.on_any(interrupted()), workers.on_any(cadence.due(federation.round))
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
    bar = tqdm(total=rounds, desc=f"{config.algorithm.name} refit", unit="round", disable=quiet, dynamic_ncols=True)
    with bar, interrupts_between_rounds() as interrupted:
        while federation.round < rounds:
            started = time.perf_counter()
            result = federation.next_round()
            line: dict[str, float] = {"round": federation.round}
            if result.updates:
                line["loss"] = float(result.loss.mean())
            run_log.refit_round({**line, "seconds": time.perf_counter() - started})
            bar.update()
            if workers.on_any(interrupted()):
                again = "goes on, and begins the refit again"
                raise Interrupted(f"interrupted after round {federation.round} of the refit; {how_to_go_on(config, out, again)}")
    return {"test": federation.sampled_ranks()["test"], "full_test": federation.full_ranks()["test"]}


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
