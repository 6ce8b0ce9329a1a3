"""`python -m fedbench warm`: compile kernels ahead, so that the next run waits for none."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

from numba.core.event import install_listener

from fedbench.contract import registry
from fedbench.errors import UsageError
from fedbench.experiment import machine
from fedbench.experiment.observers import CompileClock, Evaluation, Exposure, Loss
from fedbench.experiment.prepare import dtype_of, prepare_checked
from fedbench.experiment.training import train_rounds
from fedbench.settings import command_line
from fedbench.simulation.federation import Federation
from fedbench.text import say
from fedbench.tracking.run_log import setup_logging

ROUNDS = 2
"""what is sent to clients from the second round on may have kernels of its own"""
CLIENTS = 200
"""a round, where the flags do not say otherwise"""
HELP = f"""usage: python -m fedbench warm [--algo NAME ...] [--dataset NAME] [flags of train.py]

Compiles the kernels of all built-in methods, or of those named, so that the next run waits for none: {ROUNDS} small rounds of
each, with evaluation, that leave nothing behind. Kernels depend on some flags, such as --dim: give those of your runs.

  --algo NAME ...   methods, or paths to .py files; all built-in ones if left out
  --dataset NAME    the data to do it on (synthetic if left out)

examples:
  python -m fedbench warm
  python -m fedbench warm --algo fedem fedmf --dataset filmtrust --dim 32
"""


def main(argv: list[str]) -> int:
    if {"-h", "--help"} & set(argv):
        say(HELP.rstrip("\n"))
        return 0
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--algo", nargs="+", action="extend")
    parser.add_argument("--dataset", default="synthetic")
    try:
        mine, rest = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UsageError(f"warm: {error}; see --help") from None
    setup_logging(quiet=True, debug="--debug" in rest)
    for name in mine.algo or registry.algorithms():
        clock = warm(["--algo", name, "--dataset", mine.dataset, *rest])
        said = f"{clock.kernels} compiled in {clock.seconds:.1f} s" if clock.kernels else "nothing to compile"
        say(f"{name}: {said}")
    return 0


def warm(flags: Sequence[str]) -> CompileClock:
    """Run what a run with these flags runs, on a few clients; returns what was compiled."""
    given = command_line.parse([*flags, "--no-mlflow"]).configs
    if not given:
        raise UsageError("warm: the flags name no run")
    config, clock = given[0], CompileClock()
    with install_listener("numba:compile", clock):
        device = machine.choose_device(config.device)
        split, _ = prepare_checked(config, device)
        algorithm = config.algorithm
        if algorithm.federated and algorithm.clients_per_round is None:
            algorithm = dataclasses.replace(algorithm, clients_per_round=min(CLIENTS, len(split.trainers)))
        how: dict[str, Any] = {"kernel": config.kernel, "block_rows": config.block_rows, "compile": config.compile}
        federation = Federation.start(algorithm, split, config.seed, device, dtype_of(config), config.failures, **how)
        train_rounds(federation, ROUNDS, "rounds", [Loss(), Evaluation(1), Exposure(config.seed)])
        if not algorithm.predicts_ratings:
            federation.full_ranks()
        federation.close()
    return clock
