"""`python -m fedbench bench`: the batched engine against the loop engine on the same work, in one run."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from numba import njit

from fedbench import config, fused
from fedbench.central import Central
from fedbench.draw import Draw
from fedbench.errors import FedbenchError, UsageError
from fedbench.federation import Federation
from fedbench.run import check_cohort, choose_device, prepare, set_threads
from fedbench.tracking import setup_logging

WARM_ROUNDS = 2
"""rounds before the measured one: kernels compile, and clients have been sent something"""
REPEATS = 3
"""each engine does the measured round this often, in turns; the best counts"""
HELP = """usage: python -m fedbench bench --algo A --dataset D [any flag of train.py]

Times one round's local training in the batched engine and in the loop engine (one client after another, autograd and torch.optim on
touched rows), in turns, on the same state and samples, one thread unless --threads says otherwise. Also the parts of a full round,
and how far training is from the machine's limit: Adam updates a second against a fused loop over rows that stay in the cache.
example: python -m fedbench bench --algo fedem --dataset filmtrust
"""


def main(argv: list[str]) -> int:
    if {"-h", "--help"} & set(argv):
        print(HELP)
        return 0
    run = config.resolve([*argv, "--no-mlflow"])
    setup_logging(quiet=True, debug=run.debug)
    print(render(measure(run)))
    return 0


def measure(run: config.RunConfig) -> dict[str, Any]:
    """All figures of one algorithm on one dataset."""
    try:
        from tests import loop_engine
    except ImportError:
        raise FedbenchError("bench needs tests/loop_engine.py: run it from a checkout") from None
    if isinstance(run.algorithm, Central):
        raise UsageError(f"bench compares two ways to run clients; {run.algo} has none")
    threads = run.threads or 1
    set_threads(threads)
    split, data = prepare(run.dataset, run.protocol, run.data)
    algorithm = run.algorithm
    check_cohort(algorithm, split)
    dtype = torch.float64 if run.dtype == "float64" else torch.float32
    engine: dict[str, Any] = {"kernel": run.kernel, "block_rows": run.block_rows, "compile": run.compile}
    federation = Federation.start(algorithm, split, run.seed, choose_device(run.device), dtype, **engine)
    for _ in range(WARM_ROUNDS):
        federation.next_round()
        federation.outcome()
    when = federation.round + 1
    samples = federation.samples(when)
    start = {name: tensor.clone() for name, tensor in federation.store.tensors.items()}
    batched, loop, updates = [], [], 0
    world = federation.engine.world
    for _ in range(REPEATS):
        for name, tensor in start.items():
            federation.store.tensors[name].copy_(tensor)
        began = time.perf_counter()
        result = federation.engine.run_cohort(federation.server, federation.store, samples, when)
        batched.append(time.perf_counter() - began)
        updates = result.updates
        kept = {name: tensor.cpu().clone() for name, tensor in start.items()}
        server = {name: tensor.cpu() for name, tensor in federation.server.items()}
        began = time.perf_counter()
        loop_engine.run_cohort(algorithm, world, server, kept, samples, run.seed, when)
        loop.append(time.perf_counter() - began)
    parts = full_round(federation, dtype)
    limit = adam_limit(np.float64 if dtype == torch.float64 else np.float32)
    return {
        "algo": run.algo,
        "dataset": data.name,
        "protocol": split.protocol.name,
        "clients": len(samples.clients),
        "samples": len(samples.label) * algorithm.local_epochs,
        "threads": threads,
        "batched": min(batched),
        "loop": min(loop),
        "ratio": min(loop) / min(batched),
        "updates": updates,
        "updates_per_second": updates / min(batched),
        "limit": limit * threads,
        "parts": parts,
    }


def full_round(federation: Federation, dtype: torch.dtype) -> dict[str, float]:
    """Seconds of each part of a whole round, the best of several."""
    a, engine = federation.algorithm, federation.engine
    rounds = []
    for _ in range(REPEATS):
        federation.round += 1
        when = federation.round
        clock = [time.perf_counter()]
        samples = federation.samples(when)
        clock.append(time.perf_counter())
        result = engine.run_cohort(federation.server, federation.store, samples, when)
        clock.append(time.perf_counter())
        uploads = result.uploads.sealed(federation.seed, when)
        federation.server = a.aggregate(federation.server, uploads, Draw(federation.seed, when, None, dtype, engine.device))
        clock.append(time.perf_counter())
        federation.outcome()
        clock.append(time.perf_counter())
        if not federation.split.held:
            federation.full_ranks()
        clock.append(time.perf_counter())
        rounds.append(np.diff(clock))
    best = min(rounds, key=lambda seconds: float(seconds[:4].sum()))
    return dict(zip(("sample", "train", "aggregate", "evaluate", "full ranking"), map(float, best), strict=True))


@njit(fastmath=fused.FAST, error_model=fused.DIVIDE, cache=True)
def _adam_loop(param: np.ndarray, grad: np.ndarray, first: np.ndarray, second: np.ndarray, steps: int, tiny: float) -> None:
    for step in range(steps):
        fused._adam(param, grad, first, second, fused._rates(step + 1, 0.1), tiny)


def adam_limit(kind: type) -> float:
    """Element updates a second of the tight fused Adam loop over 256 rows of 16, which stay in the cache; one thread, best of several."""
    size, steps = 256 * 16, 2000
    arrays: list[Any] = [np.full(size, 0.1, kind) for _ in range(4)]
    run: Any = _adam_loop
    run(*arrays, 1, kind(0))
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        run(*arrays, steps, kind(0))
        best = min(best, time.perf_counter() - began)
    return size * steps / best


def render(figures: dict[str, Any]) -> str:
    parts = figures["parts"]
    whole = sum(parts[name] for name in ("sample", "train", "aggregate", "evaluate"))
    return "\n".join(
        [
            f"{figures['algo']} on {figures['dataset']} ({figures['protocol']}): {figures['clients']:,} clients, "
            f"{figures['samples']:,} samples a round over all epochs, {figures['threads']} thread(s), best of {REPEATS}",
            f"  batched engine   {figures['batched']:.4f} s a round   {figures['samples'] / figures['batched']:,.0f} samples/s",
            f"  loop engine      {figures['loop']:.4f} s a round   {figures['samples'] / figures['loop']:,.0f} samples/s",
            f"  ratio            {figures['ratio']:.1f}",
            f"  Adam updates     {figures['updates']:,} a round, {figures['updates_per_second']:.3g}/s: "
            f"{figures['updates_per_second'] / figures['limit']:.0%} of the limit ({figures['limit']:.3g}/s measured)",
            f"  a whole round    {whole:.4f} s: " + ", ".join(f"{name} {seconds:.4f}" for name, seconds in parts.items()),
        ]
    )
