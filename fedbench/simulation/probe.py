"""A look at an algorithm before its run: its functions are asked once, in a tiny world, before anything is written."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import torch

from fedbench.contract.algorithm import Algorithm, check_stages
from fedbench.contract.randomness import Draw
from fedbench.data.split import Split
from fedbench.errors import FedbenchError, UsageError
from fedbench.simulation.federation import world_of
from fedbench.simulation.generic import vmapped
from fedbench.simulation.sending import sent_rows, sent_to

log = logging.getLogger("fedbench")


def check_local_work(algorithm: Algorithm, split: Split, seed: int) -> None:
    """Raise UsageError for stages and phases that make no sense, before anything is written: one client of a tiny world is asked."""
    world, one = replace(world_of(split), clients=4, items=4), torch.zeros(1, dtype=torch.int64)
    try:
        answer = algorithm.answer(algorithm.init_server(world, Draw(seed, 0, None, torch.float32, "cpu")))
        own = algorithm.init_client(world, Draw(seed, 0, np.zeros(1, np.int64), torch.float32, "cpu"))
        sent = sent_rows(answer, one, torch.arange(world.items)[None], algorithm.tables) if sent_to(answer, one)[0] else {}
        stages = algorithm.stages(sent)
        check_stages(algorithm, stages, vmapped(algorithm.receive, own, sent))
        kept = [name for name in algorithm.tables if name in own]
        for name in (name for stage in stages for phase in stage.phases for name in phase.names):
            if kept and name in sent and name not in own:  # the engine merges what is sent into own tables, and trains what is kept alone
                raise UsageError(
                    f"{algorithm.name}: a client that keeps a table of its own ({kept[0]!r}) cannot train {name!r}, which is only sent; "
                    f"return {name!r} from init_client too (adding-an-algorithm.md)"
                )
    except FedbenchError:
        raise
    except Exception:  # of a method that does without one of these, or not in so small a world: the first round tells
        log.debug("local work could not be looked at before the run", exc_info=True)
