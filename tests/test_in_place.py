"""Training where the state lies: bit for bit what training in blocks gives, and what is read of functions to know that it may."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from fedbench.algorithms.fedmf import FedMF
from fedbench.algorithms.fedrecon import FedRecon
from fedbench.contract.algorithm import OWN, SHARED, Algorithm, Tensors, World
from fedbench.contract.randomness import Draw
from fedbench.kernels.compiler import trace
from fedbench.simulation import in_place
from fedbench.simulation.federation import Federation
from tests.conftest import small_split
from tests.test_engine import SMALL


class KeepsRows(FedMF):
    """The rows that a client trained stay with it, and half of its vector."""

    tables: ClassVar[Mapping[str, str]] = {"items": SHARED, "tuned": OWN}

    def init_client(self, world: World, draw: Draw) -> Tensors:
        return {**super().init_client(world, draw), "tuned": draw.normal("tuned", world.items, self.dim), "calls": draw.zeros()}

    def receive(self, own: Tensors, sent: Tensors) -> Tensors:
        return {**own, **sent, "tuned": sent["items"]}

    def keep(self, held: Tensors, sent: Tensors) -> Tensors:
        return {"user": held["user"] / 2, "tuned": held["items"], "calls": held["calls"] + 1}


HALVES = FedRecon(
    **{"dim": 8, "batch_size": 5, "local_epochs": 2, "clients_per_round": 17, "negatives": 1, "max_samples": 21, "halves": True},
    **{"reconstruct": "sgd", "server": "sgd"},
)


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("algorithm", "dtype"),
    [
        (FedMF(**SMALL, clients_per_round=17), torch.float64),
        pytest.param(KeepsRows(**SMALL, clients_per_round=17), torch.float32, marks=pytest.mark.long),
        (HALVES, torch.float64),
    ],
)
def test_training_in_place_equals_training_in_blocks_bit_for_bit(
    algorithm: Algorithm, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, calls, train, plans = small_split(), [], in_place.train_cohort, in_place.plans
    monkeypatch.setattr(in_place, "train_cohort", lambda *given: calls.append(1) or train(*given))
    federations = [Federation.start(algorithm, parts, 0, dtype=dtype) for _ in range(2)]
    for _ in range(3):
        placed = federations[0].next_round()
        assert calls, "it is trained in place"
        calls.clear()
        monkeypatch.setattr(in_place, "plans", lambda *given: None)
        cut = federations[1].next_round()
        monkeypatch.setattr(in_place, "plans", plans)
        assert not calls
        assert torch.equal(placed.loss, cut.loss) and placed.updates == cut.updates
        one, other = placed.uploads.rows("items"), cut.uploads.rows("items")
        assert one.clients == other.clients
        assert all(torch.equal(getattr(one, part), getattr(other, part)) for part in ("client", "item", "value"))
    found, expected = (federation.state() for federation in federations)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_what_is_read_of_tensors_is_known() -> None:
    """A function's outputs are traced to its inputs; what a record of operations cannot say is refused."""
    leaves = {("held", "user"): trace.example((4,)), ("held", "items"): trace.example(("n", 4)), ("sent", "items"): trace.example(("n", 4))}

    def made(user: Tensor, items: Tensor, sent: Tensor) -> list[Tensor]:
        return [user, user / 2 + torch.zeros_like(items[0]), items.sum(0), user * sent[0], items - sent, torch.ones(3)]

    user, items, sent = ({key} for key in leaves)
    assert trace.read(made, leaves) == [user, user, items, user | sent, items | sent, set()]
    for wrong in (
        lambda user, items, sent: [user.mul_(2)],
        lambda user, items, sent: [user if user.sum() > 0 else -user],
        lambda user, items, sent: [user / len(items) ** 0.5],
    ):
        with pytest.raises(trace.Unsupported):
            trace.read(wrong, leaves)
