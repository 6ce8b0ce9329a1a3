"""A rehearsal before a run: two rounds of an algorithm in a tiny federation, each function's answer looked at.

It draws from no random stream of the run, writes nothing and takes a fraction of a second. A method may need more clients or items than
the tiny federation has: what fails there is tried again in a larger one, and only what fails in both is a mistake.
"""

from __future__ import annotations

import copy
import logging
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from fedbench.contract.algorithm import Algorithm
from fedbench.contract.dataset import Interactions
from fedbench.contract.plugin_errors import LONGEST, Misuse, PluginError, blame, fault
from fedbench.data.protocol import PRESETS
from fedbench.data.split import Split, split
from fedbench.errors import FedbenchError
from fedbench.simulation import workers
from fedbench.simulation.answers_checked import checked, is_sound, look_back
from fedbench.simulation.asked_again import ask
from fedbench.simulation.federation import Federation
from fedbench.simulation.plain_answers import is_whole

log = logging.getLogger("fedbench")

WORLDS = ((6, 37), (60, 211))
"""clients and items; primes, so that no other size is taken for the number of items"""
EACH = 9
"""interactions of a client"""


def check_local_work(algorithm: Algorithm, dtype: torch.dtype = torch.float32) -> None:
    """Raise PluginError, with file, line and function, for what an algorithm's code does wrong, before anything is written."""
    if not algorithm.federated and type(algorithm).__module__.startswith("fedbench."):
        return  # with its kernel it never needs torch.optim, which takes seconds to load
    workers.run_on_all(lambda: _rehearsed(algorithm, dtype))


@cache
def _rehearsed(algorithm: Algorithm, dtype: torch.dtype) -> None:
    wrong: PluginError | None = None
    for clients, items in WORLDS:
        try:
            with workers.alone(), untouched_streams(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                rehearse(algorithm, dtype, clients, items)
            return
        except PluginError as error:
            wrong = error
        except Misuse as error:
            wrong = blame(error) or PluginError(str(error))
        except FedbenchError:  # its own words, which the run says if they hold there too
            log.debug("the rehearsal ended early", exc_info=True)
            return
        except (Exception, SystemExit) as error:
            wrong = blame(error)
            if wrong is None:
                log.debug("the rehearsal could not be held", exc_info=True)
                return
            wrong.__cause__ = error
    if wrong:
        raise wrong


def rehearse(algorithm: Algorithm, dtype: torch.dtype, clients: int, items: int) -> None:
    """Two rounds and their evaluation: in the second one every client may have been sent something."""
    sizes = {value for field in fields(algorithm) for value in _numbers(getattr(algorithm, field.name))}
    while items in sizes:
        items += 2
    few: dict[str, Any] = {"local_epochs": min(algorithm.local_epochs, 2)}
    few |= {} if algorithm.clients_per_round is None else {"clients_per_round": min(algorithm.clients_per_round, clients)}
    if not isinstance(algorithm.predicts_ratings, bool):
        raise fault(type(algorithm), "predicts_ratings", f"predicts_ratings must be True or False, not {algorithm.predicts_ratings!r}")
    if not is_whole(algorithm.samples_a_step, 1):
        said = f"samples_a_step must be a whole number over 0, not {algorithm.samples_a_step!r}"
        raise fault(type(algorithm), "samples_a_step", said)
    shown, seen = checked(algorithm if not algorithm.federated else replace(algorithm, **few))
    federation = Federation.start(shown, tiny(clients, items, shown.predicts_ratings), 0, dtype=dtype, kernel="off", compile=False)
    federation.engine = federation.engine.twin(kernels=False)
    federation.evaluator = copy.copy(federation.evaluator)
    try:
        for _ in range(2):
            federation.next_round()
            federation.outcome()
            federation.readings()
    except (FedbenchError, MemoryError):
        raise
    except Exception as error:
        if blame(error) is not None or is_sound(type(algorithm)) or not seen.last:
            raise
        said = " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST]
        raise fault(type(algorithm), seen.last, f"the engine cannot use what {seen.last} returned: {said}") from error
    look_back(algorithm, seen)
    if not is_sound(type(algorithm)):
        ask(algorithm, federation)


def _numbers(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else (value,)


@cache
def tiny(clients: int, items: int, ratings: bool) -> Split:
    """A split of so many clients, each with a few items."""
    user, nth = np.repeat(np.arange(clients), EACH), np.tile(np.arange(EACH), clients)
    data = Interactions(
        name="rehearsal",
        user=user.astype(np.int32),
        item=((user * 5 + nth * 4) % items).astype(np.int32),
        rating=(1 + (user + nth) % 5).astype(np.float32),
        time=nth.astype(np.int64),
        user_ids=np.arange(clients).astype(str),
        item_ids=np.arange(items).astype(str),
        has_time=True,
        explicit=True,
        rating_min=1.0,
        rating_max=5.0,
        licence="",
        source="",
    )
    clean = replace(PRESETS["clean"], eval_negatives=20)
    return split(data, replace(clean, split="kfold", fold=0) if ratings else clean)


@contextmanager
def untouched_streams() -> Iterator[None]:
    """Random numbers that an algorithm takes from torch, numpy or Python, against the rules, are the same as without the rehearsal."""
    python, arrays = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)
