"""`python -m fedbench audit`: check that a protocol reveals no held-out item to a client; prints LEAK with the figures if it does."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from fedbench.console import fitted
from fedbench.data.sampling import sample_round
from fedbench.data.split import Split
from fedbench.errors import UsageError
from fedbench.evaluation.metrics import ranking_metrics
from fedbench.experiment.prepare import prepare
from fedbench.settings import command_line, config
from fedbench.settings.naming import CANARIES
from fedbench.simulation.federation import Federation
from fedbench.text import say
from fedbench.tracking.run_log import setup_logging

ROUNDS = 10
"""rounds of negatives that are drawn and counted, and that a canary trains; `--rounds` overrides"""
CHOSEN = {"val": "on validation", "test": "on TEST", "last": "none: the last round is reported, whatever it scores"}
"""what the audit prints, by --select-on"""
HELP = f"""usage: python -m fedbench audit --dataset D [--protocol P] [protocol flags] [--rounds {ROUNDS}] [--seed 0]

Proves a protocol on a dataset, or exits 1 and says LEAK:
  - no held-out item among a client's training items, no item it has met among the candidates
  - training negatives are never positives, and held-out items are drawn as often as any other unseen item
  - the reported round is not chosen on test
  - the canaries {" and ".join(CANARIES)} (no server at all) stay within 3 standard errors of chance
example: python -m fedbench audit --dataset filmtrust --protocol published
"""


class Check(NamedTuple):
    name: str
    passed: bool
    figures: str


def main(argv: list[str]) -> int:
    """0 if every check passes, 1 otherwise."""
    if {"-h", "--help"} & set(argv):
        say(HELP)
        return 0
    if any(word.split("=")[0] == "--algo" for word in argv):
        raise UsageError(f"audit takes no --algo: it runs its canaries, {' and '.join(CANARIES)}")
    canaries = [command_line.resolve(["--algo", name, "--no-mlflow", *argv]) for name in CANARIES]
    setup_logging(quiet=True, debug=canaries[0].debug)
    split, data = prepare(canaries[0].dataset, canaries[0].protocol, canaries[0].data)
    rounds = canaries[1].algorithm.rounds if any(word.split("=")[0] == "--rounds" for word in argv) else ROUNDS
    about = f"audit of {data.name}, protocol {split.protocol.name} [{split.fingerprint}]: {split.clients:,} clients, {split.items:,} items"
    say(fitted(about))
    failed = False
    for check in checks(split, canaries, rounds):
        failed |= not check.passed
        say(fitted(f"  {'ok  ' if check.passed else 'LEAK'}  {check.name}: {check.figures}"))
        sys.stdout.flush()
    say("LEAK: numbers under this protocol are inflated" if failed else "clean: no leak found")
    return int(failed)


def checks(split: Split, canaries: list[config.RunConfig], rounds: int) -> Iterator[Check]:
    """Cheapest first."""
    yield held_out_apart(split)
    yield candidates_unseen(split)
    yield from negatives(split, canaries[0].seed, rounds)
    yield Check("choice of the round", split.protocol.select_on != "test", CHOSEN[split.protocol.select_on])
    for canary in canaries:
        yield at_chance(split, canary, rounds)


def _pairs(ptr: np.ndarray, item: np.ndarray, items: int) -> np.ndarray:
    """[N] sorted codes of (client, item)."""
    return np.repeat(np.arange(len(ptr) - 1), np.diff(ptr)) * items + item


def held_out_apart(split: Split) -> Check:
    """Validation and test items are not trained on, and differ."""
    train = _pairs(split.train_ptr, split.train_item, split.items)
    rows = np.arange(split.clients) * split.items
    inside = int(np.isin(rows + split.val_item, train).sum() + np.isin(rows + split.test_item, train).sum())
    inside += int((split.val_item == split.test_item).sum())
    return Check("held-out items in training", inside == 0, f"{inside} of {2 * split.clients:,}")


def candidates_unseen(split: Split) -> Check:
    """The items ranked beside a held-out one are items that the client has not met."""
    seen = _pairs(split.seen_ptr, split.seen_item, split.items)
    rows = np.arange(split.clients)[:, None] * split.items
    met = sum(int(np.isin(rows + some, seen).sum()) for some in (split.val_candidates, split.test_candidates))
    return Check("candidates that the client has met", met == 0, f"{met} of {split.val_candidates.size + split.test_candidates.size:,}")


def negatives(split: Split, seed: int, rounds: int) -> Iterator[Check]:
    """Positives are never drawn; the two held-out items of a client are drawn as often as any two items it does not train on."""
    k = 4
    train = _pairs(split.train_ptr, split.train_item, split.items)
    everyone = np.arange(split.clients)
    held = np.concatenate([everyone * split.items + split.val_item, everyone * split.items + split.test_item])
    wrong = drawn = total = 0
    for when in range(1, rounds + 1):
        samples = sample_round(split, everyone, k, seed, when)
        client = np.repeat(everyone, samples.counts)
        item = samples.row[np.repeat(samples.row_ptr[:-1], samples.counts) + samples.local]
        codes = (client * split.items + item)[samples.label == 0]
        total += len(codes)
        wrong += int(np.isin(codes, train).sum())
        drawn += int(np.isin(codes, held).sum())
    counts = split.train_counts
    expected = rounds * float((2 * k * counts / np.maximum(split.items - counts, 1)).sum())
    yield Check("positives drawn as negatives", wrong == 0, f"{wrong} of {total:,}")
    # Draws for one positive are without replacement, so the count varies less than a Poisson variable: 5 sigma is generous.
    fair = abs(drawn - expected) <= 5 * expected**0.5
    yield Check("held-out items drawn as negatives", fair, f"{drawn:,} in {rounds} rounds, {expected:,.0f} expected of unseen items")


def at_chance(split: Split, canary: config.RunConfig, rounds: int) -> Check:
    """A control's HR@10 must be within 3 standard errors of chance."""
    algorithm = replace(canary.algorithm, rounds=min(rounds, canary.algorithm.rounds))
    federation = Federation.start(algorithm, split, canary.seed)
    for _ in range(algorithm.rounds):
        federation.next_round()
    hit = ranking_metrics(federation.sampled_ranks()["test"])["hr_10"]
    chance = split.chance(10)
    error = (chance * (1 - chance) / split.clients) ** 0.5
    distance = (hit - chance) / error if error else 0.0
    return Check(
        f"canary {canary.algo}", abs(distance) <= 3, f"HR@10 {hit:.4f}, chance {chance:.4f} ± {error:.4f} ({distance:+.1f} standard errors)"
    )
