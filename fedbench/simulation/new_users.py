"""Users who were not in training: they learn what is private to them from their own items, with the shared part frozen.

The server sends what it has, the client trains its private part as in a round, and nothing goes back: nobody else's model changes.
"""

from __future__ import annotations

import numpy as np
import torch

from fedbench.contract.algorithm import Algorithm, Answer, Tensors
from fedbench.contract.randomness import Draw
from fedbench.data.sampling import sample_round
from fedbench.data.split import Split
from fedbench.errors import UsageError
from fedbench.evaluation.metrics import ranking_metrics
from fedbench.simulation.client_store import ClientStore
from fedbench.simulation.engine import Engine
from fedbench.simulation.federation import world_of
from fedbench.simulation.scoring import Evaluator

ROUNDS = 30
"""local rounds of a new user, each with freshly drawn negatives; a closed form needs one"""


def check(algorithm: Algorithm, answer: Answer) -> None:
    """Raise UsageError if an algorithm has nothing that a user who was not in training could build upon."""
    if not algorithm.federated:
        raise UsageError(f"{algorithm.name} has no private part that a new user could learn: all data is in one place; train again with it")
    if answer.personal or not answer.shared:
        raise UsageError(
            f"{algorithm.name} cannot serve users who were not in training: it has no shared part, for its server sends nothing or a "
            "model made for each client that took part; use a method with a shared model, such as fedmf or fedrecon"
        )


def learn(engine: Engine, server: Tensors, split: Split, rounds: int = ROUNDS) -> ClientStore:
    """What each client of `split` scores with, after it learnt from its training items; `engine` is one for these clients."""
    a, seed, everyone = engine.algorithm, engine.seed, np.arange(split.clients)
    server = a.for_new_users(server)
    if a.reconstructs:
        samples = sample_round(split, everyone, a.evaluation_negatives, seed, 0, purpose="negatives/evaluation")
        return ClientStore.of(engine.reconstruct(server, samples, 0))
    store = ClientStore(a, engine.world, Draw(seed, 0, None, engine.dtype, engine.device))
    # without private tensors there is nothing to learn
    for when in range(1, rounds + 1 if store.tensors else 1):
        extra = a.extra(when)
        engine.adapt(server, store, sample_round(split, everyone, extra.each, seed, when, extra.rating), when)
    return store


def metrics(engine: Engine, server: Tensors, split: Split, rounds: int = ROUNDS, ties: int | None = None) -> dict[str, float]:
    """Test metrics of users who were not in training, as those of the others: `split` holds them, `engine` is that of the training.

    ties: what settles them in a control, see Evaluator
    """
    server = engine.algorithm.for_new_users(server)
    answer = engine.algorithm.answer(server)
    check(engine.algorithm, answer)
    store = learn(engine.of_world(world_of(split)), server, split, rounds)
    evaluator = Evaluator(engine.algorithm, split, engine.device, engine.derived is not None, settles_ties=ties)
    sampled, full = evaluator.sampled_ranks(store, answer)["test"], evaluator.full_ranks(store, answer)["test"]
    return {"clients": split.clients, **ranking_metrics(sampled), **ranking_metrics(full, "full_")}


def check_before_training(algorithm: Algorithm, split: Split, seed: int) -> None:
    """Refuse, before training, a method that cannot serve cold-start users."""
    now, draw = algorithm.at(0, world_of(split)), Draw(seed, 0, None, torch.float32, "cpu")
    check(algorithm, now.answer(now.for_new_users(now.init_server(world_of(split), draw))))
