"""What a run computes on: device, threads, and the cache of compiled kernels."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numba
import torch

from fedbench.errors import UsageError
from fedbench.experiment import processes
from fedbench.experiment.prepare import check_shared
from fedbench.settings.config import RunConfig
from fedbench.simulation import workers

log = logging.getLogger("fedbench")


def set_up(config: RunConfig) -> str:
    """The device that this process computes on, once threads are set, workers connected and the log of all but the first silenced."""
    log.disabled = not workers.is_first()
    describe_cache()
    device = choose_device(config.device)
    if config.threads or workers.count() > 1:
        set_threads(processes.threads_each(config.threads, workers.on_this_machine()))
    if workers.count() > 1:
        check_shared(config.algorithm)
        device = workers.own_device(device)
        make_current(device)
    if device == "mps":
        check_mps(config)
    workers.join(device)
    return device


def choose_device(name: str) -> str:
    """The device of a --device flag, made torch's current one. auto: a CUDA GPU if there is one, else the CPU; mps must be asked for."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(index or 0) >= count:
            raise UsageError(
                f"--device {name}: this machine has {count or 'no'} CUDA device{'s' if count > 1 else ''}; use --device cpu or auto"
            )
    if kind == "mps" and not torch.backends.mps.is_available():
        raise UsageError("--device mps: this machine has no Apple GPU that torch can use; use --device cpu or auto")
    make_current(name)
    return name


def make_current(device: str) -> None:
    """Before anything is allocated: kernels and streams that name no device would go to the first GPU, and take memory there."""
    if device.startswith("cuda:"):
        torch.cuda.set_device(int(device.removeprefix("cuda:")))


def check_mps(config: RunConfig) -> None:
    """Refuse what an Apple GPU cannot do, for it has no float64, and say what it lacks."""
    if config.dtype == "float64":
        raise UsageError("--device mps: Apple GPUs have no float64; use --dtype float32 or --device cpu")
    if config.algorithm.per_client_server_state:
        raise UsageError(f"--device mps: {config.algo} compares clients in float64, which Apple GPUs do not have; use --device cpu")
    log.warning("--device mps is not tested, has no compiled kernels and no float64; --device cpu is faster for most methods here")


def set_threads(count: int) -> None:
    """Let torch and numba use so many threads."""
    most = os.cpu_count() or 1
    if count > most:
        raise UsageError(f"--threads {count}: this machine has {most} CPU threads; use at most that many")
    allowed = int(os.environ.get("NUMBA_NUM_THREADS") or most)  # set in the environment before this process began, for good
    if count > allowed:
        raise UsageError(f"--threads {count}: NUMBA_NUM_THREADS={allowed} allows no more; unset it or set it to {count}")
    torch.set_num_threads(count)
    numba.set_num_threads(count)


def describe_cache() -> None:
    """Say where compiled kernels are kept, if not beside their sources."""
    beside, kernels = Path(__file__).parents[1] / "__pycache__", Path(os.environ["NUMBA_CACHE_DIR"])
    if kernels.name.startswith("kernels-") and kernels.parent != beside:
        log.info("compiled kernels are kept in %s, for %s cannot be written; NUMBA_CACHE_DIR names another folder", kernels, beside)
