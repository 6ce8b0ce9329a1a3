"""`python -m fedbench evaluate`: the test metrics of a finished run's model, computed anew, for its own users and for new ones."""

from __future__ import annotations

import numpy as np

from fedbench.commands.recommend import ROUNDS_HELP
from fedbench.console import fitted
from fedbench.errors import UsageError
from fedbench.evaluation.metrics import metrics_of, ranking_metrics
from fedbench.experiment import saved_model
from fedbench.experiment.summary import metric_rows
from fedbench.settings.parser import Parser, run_parser, whole_number
from fedbench.simulation import new_users
from fedbench.text import say
from fedbench.tracking.run_log import setup_logging

EPILOG = """--new-users needs a run that kept users out of training. They learn what is private to them from their own training items, with
all that is shared frozen, and are tested as the others are: the same leave-one-out, candidates drawn in the same way.

examples:
  python train.py --algo fedmf --dataset ml-100k --new-users 0.1 --out runs/new
  python -m fedbench evaluate --run runs/new --new-users
"""
COLUMNS = ("hr_10", "ndcg_10", "mrr", "full_hr_10", "full_ndcg_10", "rmse", "mae", "accuracy")


def parser() -> Parser:
    made = run_parser("evaluate", "[--new-users] [flags]", "Measure the model that a finished run kept.", EPILOG)
    made.add_argument("--new-users", action="store_true", help="also the users that the run kept out of training")
    made.add_argument("--rounds", type=whole_number, default=new_users.ROUNDS, metavar="N", help=ROUNDS_HELP)
    return made


def main(argv: list[str]) -> int:
    given = parser().read(argv)
    if given.rounds < 1:
        raise UsageError(f"--rounds must be at least 1, not {given.rounds}")
    setup_logging(quiet=True, debug=given.debug)
    if given.new_users and not saved_model.config_of(given.run, given.trust_plugin).protocol.new_users:
        raise UsageError(f"--run {given.run}: all users were in training; train with --new-users 0.1 to keep a tenth of them out")
    loaded = saved_model.load(given.run, given.data_dir, given.trust_plugin)
    made, split = loaded.config, loaded.split
    store, answer = loaded.private(np.arange(split.clients)), loaded.algorithm.answer(loaded.server)
    mine = metrics_of(split, loaded.evaluator.outcome(store, answer))["test"]
    if not split.held:
        mine |= ranking_metrics(loaded.evaluator.full_ranks(store, answer)["test"], "full_")
    rows = [(f"{split.clients:,} users", mine)]
    if given.new_users and split.cold_start:
        found = new_users.metrics(loaded.engine, loaded.server, split.cold_start, given.rounds, loaded.evaluator.settles_ties)
        rows.append((f"{split.cold_start.clients:,} new users", found))
    columns = [name for name in COLUMNS if name in mine]
    say(fitted(f"{made.algo} on {made.dataset}, protocol {split.protocol.name} [{split.fingerprint}], test at round {loaded.round}"))
    say("\n".join(metric_rows(rows, columns)))
    return 0
