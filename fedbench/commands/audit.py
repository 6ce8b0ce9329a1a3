"""`python -m fedbench audit`: check that a protocol reveals no held-out item to a client; prints LEAK with the figures if it does."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from fedbench.console import fitted
from fedbench.contract import registry
from fedbench.contract.randomness import Draw
from fedbench.data.sampling import sample_round
from fedbench.data.split import Split
from fedbench.errors import UsageError
from fedbench.evaluation.significance import CHANCE_ERRORS, FromChance, from_chance
from fedbench.experiment.prepare import prepare
from fedbench.settings import command_line, config
from fedbench.settings.naming import CANARIES
from fedbench.settings.parser import Parser
from fedbench.simulation.client_store import fits
from fedbench.simulation.federation import Federation, world_of
from fedbench.text import say
from fedbench.tracking.run_log import setup_logging

ROUNDS = 10
"""rounds of negatives that are drawn and counted, and that canaries and methods train; `--rounds` overrides"""
CHOSEN = {"val": "on validation", "test": "on TEST", "last": "none: the last round is reported, whatever it scores"}
"""what the audit prints, by --select-on"""
HELP = f"""usage: python -m fedbench audit --dataset D [--algo NAME,NAME] [--protocol P] [protocol flags] [--rounds {ROUNDS}] [--seed 0]

Proves a protocol on a dataset, or exits 1 and says LEAK:
  - no held-out item among a client's training items, no item it has met among the candidates
  - training negatives are never positives, and held-out items are drawn as often as any other unseen item
  - the reported round is not chosen on test
  - the canaries {" and ".join(CANARIES)} (no server at all) stay within 3 standard errors of chance
  - every federated method is at chance with --no-server: {ROUNDS} rounds each, fewer if it has fewer

  --algo NAMES   run these methods without a server, names or .py files; all that --list shows if not given, none: only the canaries
example: python -m fedbench audit --dataset filmtrust --protocol published
"""


class Check(NamedTuple):
    name: str
    passed: bool
    figures: str
    skipped: bool = False

    @property
    def word(self) -> str:
        return "skip" if self.skipped else "ok  " if self.passed else "LEAK"


def named(argv: list[str]) -> tuple[list[str], list[str]]:
    """What --algo names, nothing if it is not given, and the other words of the command line."""
    given = Parser(add_help=False, allow_abbrev=False)
    given.add_argument("--algo")
    known, rest = given.parse_known_args(argv)
    return [name for name in (known.algo or "").split(",") if name], rest


def every_method() -> list[str]:
    return [name for name, cls in registry.algorithms().items() if cls.federated and name not in CANARIES]


def main(argv: list[str]) -> int:
    """0 if every check passes, 1 otherwise."""
    if {"-h", "--help"} & set(argv):
        say(HELP)
        return 0
    names, argv = named(argv)
    for name in names if names != ["none"] else []:
        ranking([*argv, "--algo", name, "--no-mlflow", "--no-server"])  # what is wrong with a name that was given is no reason to skip it
    canaries = [command_line.resolve(["--algo", name, "--no-mlflow", *argv]) for name in CANARIES]
    setup_logging(quiet=True, debug=canaries[0].debug)
    split, data = prepare(canaries[0].dataset, canaries[0].protocol, canaries[0].data)
    rounds = canaries[1].algorithm.rounds if any(word.split("=")[0] == "--rounds" for word in argv) else ROUNDS
    about = f"audit of {data.name}, protocol {split.protocol.name} [{split.fingerprint}]: {split.clients:,} clients, {split.items:,} items"
    say(fitted(about))
    failed = False
    methods = (without_server(split, name, argv, rounds) for name in names or every_method())
    for check in chain(checks(split, canaries, rounds), () if names == ["none"] else methods):
        failed |= not check.passed
        say(fitted(f"  {check.word}  {check.name}: {check.figures}"))
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


def after(split: Split, canary: config.RunConfig, rounds: int) -> FromChance:
    """How far a control's HR@10 on test is from chance after so many rounds, or as many as it has."""
    federation = Federation.start(canary.algorithm, split, canary.seed, failures=canary.failures, kernel=canary.kernel)
    for _ in range(min(rounds, canary.algorithm.rounds)):
        federation.next_round()
    return from_chance(federation.sampled_ranks()["test"], split.test_item[split.evaluated], split.chance(10))


def at_chance(split: Split, canary: config.RunConfig, rounds: int) -> Check:
    """A canary's HR@10 must be within 3 standard errors of chance."""
    found = after(split, canary, rounds)
    return Check(f"canary {canary.algo}", abs(found.errors) <= CHANCE_ERRORS, str(found))


def without_server(split: Split, name: str, argv: list[str], rounds: int) -> Check:
    """A method whose server never learns must not be above chance; one that cannot run on this data is skipped."""
    said = f"{name} --no-server"
    try:
        control = ranking([*argv, "--algo", name, "--no-mlflow", "--no-server"])
        control.algorithm.check(world_of(split))
        if not fits(control.algorithm, world_of(split), Draw(control.seed, 0, None, torch.float32), split.clients):
            return Check(said, True, "what its clients keep does not fit in memory", skipped=True)
        found = after(split, control, rounds)
    except UsageError as error:
        return Check(said, True, str(error), skipped=True)
    return Check(said, not found.leaks, str(found))


def ranking(argv: list[str]) -> config.RunConfig:
    """The run that these words describe; of a method that predicts ratings, the form of it that ranks."""
    made = command_line.parse(argv).configs[0]
    if made.protocol.ratings and "implicit" in type(made.algorithm).choices.get("feedback", ()):
        return command_line.resolve([*argv, "--feedback", "implicit"])
    if made.protocol.ratings:
        raise UsageError("it predicts ratings, which have no level of chance")
    return made
