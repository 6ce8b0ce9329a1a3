"""What a row of a committed table of results stands for: the flags of its run, and its key in the table's JSON."""

from __future__ import annotations

from typing import Any

from fedbench.contract import registry
from fedbench.settings import command_line
from fedbench.settings.config import RunConfig

POINTS = 20
"""how often a run of a table is evaluated, the last round included"""
METRICS = ("hr_10", "ndcg_10", "full_hr_10", "full_ndcg_10")
"""what a row holds of a run's test metrics"""
DIGITS = 6
CLOSED = {"train_negatives": "clean", "select_on": "val"}
READINGS: dict[str, tuple[dict[str, str], str]] = {
    "published": ({"protocol": "published", "recipe": "published"}, "as published"),
    "closed": ({"protocol": "published", "recipe": "published", **CLOSED}, "its leaks closed"),
    "same": ({"protocol": "clean", "recipe": "published"}, "clean, same recipe"),
    "clean": ({"protocol": "clean", "recipe": "clean"}, "clean, clean recipe"),
}
"""flags by name of a column, and what a page calls it; the first two differ in the two leaks alone"""
OWN: dict[str, dict[str, Any]] = {"pfedrec": {"select_on": "val"}, "gpfedrec": {"select_on": "val"}}
"""what a paper's own protocol does differently from the others"""


def key(dataset: str, algo: str, reading: str, seed: int) -> str:
    """Of a run; a method without a published recipe has one run for both clean columns."""
    reading = "clean" if reading == "same" and not registry.algorithm(algo).published else reading
    return f"{dataset} {algo} {reading} {seed}"


def flags(dataset: str, algo: str, reading: str, seed: int) -> dict[str, Any]:
    own = OWN.get(algo, {}) if reading == "published" else {}
    return {"algo": algo, "dataset": dataset, "seed": seed, **READINGS[reading][0], **own}


def evaluated_every(rounds: int) -> int:
    return max(1, rounds // POINTS)


def words(flags: dict[str, Any]) -> list[str]:
    """Flags as a command line spells them."""
    return [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def config_of(flags: dict[str, Any]) -> RunConfig:
    """The run that these flags describe, evaluated as often as a table's runs are."""
    rounds = command_line.resolve(words(flags)).algorithm.rounds
    return command_line.resolve(words({"eval_every": evaluated_every(rounds), **flags}))
