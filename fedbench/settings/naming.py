"""Names of settings and metrics: short forms, settings that do not change a result, metrics that results are ordered by.

Imports nothing heavy: reports and MLflow views need these names without torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

SHORT = {"clients_per_round": "-n", "local_epochs": "-e"}
NOT_HASHED = (
    *("recipe", "device", "threads", "compile", "kernel", "block_rows", "client_store", "out", "resume", "mlflow", "experiment"),
    *("checkpoint_every", "keep_state", "quiet", "debug", "data_dir", "cache_dir"),
)
"""settings that change no result beyond rounding, and `recipe`, whose effect is in other fields"""
REPLICATES = ("seed", "fold")
"""axes that results are averaged over"""
CANARIES = ("random", "local")
"""methods that cannot know the held-out item: every client scores at random, or learns alone with no server"""
HEADLINE = ("hr_10", "ndcg_10", "rmse")
"""metrics of a one-line result, where runs report them"""
SELECT = {"ndcg_10": 1, "rmse": -1}
"""metrics that choose the best point on validation: 1 if higher is better, -1 if lower"""


def short(key: str) -> str:
    """The short name of a setting: n for clients_per_round, e for local_epochs, else the name itself."""
    return SHORT.get(key, key).lstrip("-")


def title(name: str) -> str:
    """hr_10 -> HR@10"""
    return re.sub(r"_(\d+)$", r"@\1", name).replace("_", " ").upper() if name not in ("accuracy",) else name


def main_metric(summaries: Iterable[dict[str, Any]]) -> str:
    """The metric that runs are ordered by: the first of SELECT that one of them reports."""
    return next((name for summary in summaries for name in SELECT if name in summary["test"]), next(iter(SELECT)))


def headline(summary: dict[str, Any]) -> str:
    """A run's result in a few words."""
    test = summary["test"]
    marks = (" LEAKY" if summary["leaky"] else "") + (" CONTROL" if "control" in summary else "")
    return ", ".join(f"{title(name)} {test[name]:.4f}" for name in HEADLINE if name in test) + marks
