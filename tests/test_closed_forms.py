"""Closed forms: sums over samples by a kernel, the rest by torch, equal to `solve` mapped over padded blocks; or refused, with a reason."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import pytest
import torch

from fedbench.contract.algorithm import Algorithm, Answer, Stage
from fedbench.simulation import in_place
from fedbench.simulation.federation import Federation
from fedbench.simulation.probe import tiny

pytestmark = pytest.mark.kernels


@dataclass(frozen=True)
class Solved(Algorithm):
    """Clients that solve for the vector that they keep, and for another that they send; tests say how."""

    dim: int = 5
    how: str = "ridge"

    def init_server(self, world, draw):
        return {"items": draw.normal("items", world.items, self.dim), "seen": draw.zeros(self.dim)}

    def init_client(self, world, draw):
        return {"user": draw.normal("user", self.dim)}

    def answer(self, server):
        return Answer({"items": server["items"]})

    def receive(self, own, sent):
        return {**own, **sent, "user": own["user"] / 2, "spread": own["user"]}

    def stages(self, sent):
        return (Stage(),)

    def solve(self, held, sent, batch):
        return getattr(self, self.how)(held, batch)

    def ridge(self, held, batch):
        rows, weight = held["items"][batch.items], batch.weight[:, None]
        centred = rows - (weight * rows).sum(0) / weight.sum().clamp(min=1)
        gram = centred.double().T @ (weight * centred).double()
        pull = rows.T @ (batch.weight * batch.label) + held["user"]
        for k in range(3):  # one number after another
            pull = torch.where(pull[k] > 0, pull - pull[k] * gram[k].to(pull), pull)
        spread = torch.linalg.eigvalsh(gram + gram.T).to(rows.dtype)
        return {"user": pull / (1 + weight.sum()), "spread": spread}

    def system(self, held, batch):
        """Least squares; torch looks for itself whether they could be solved."""
        rows = held["items"][batch.items]
        gram = rows.T @ (batch.weight[:, None] * rows) + torch.eye(self.dim, dtype=rows.dtype)
        return {"user": torch.linalg.solve(gram, rows.T @ (batch.weight * batch.label))}

    def squared(self, held, batch):
        return {"user": (batch.weight**2) @ held["items"][batch.items]}

    def counted(self, held, batch):
        return {"user": batch.weight @ held["items"][batch.items] / len(batch.items)}

    def ordered(self, held, batch):
        return {"user": held["items"][batch.items].sort(0).values.mul(batch.weight[:, None]).sum(0)}

    def table(self, held, batch):
        return {"items": held["items"] + (batch.weight * batch.label).sum()}

    def upload(self, held, sent, samples):
        return {"spread": held["spread"] + held["user"]}

    def aggregate(self, server, uploads, draw):
        return {**server, "seen": uploads.dense("spread").sum(0), "items": server["items"] * 1.1}

    def score(self, own, sent):
        return sent["items"] @ own["user"]


def left(how, kernel, dtype=torch.float64):
    """What two rounds leave."""
    federation = Federation.start(Solved(how=how, clients_per_round=9), tiny(12, 40, False), 0, dtype=dtype, kernel=kernel)
    for _ in range(2):
        federation.next_round()
    return {"seen": federation.server["seen"], **federation.store.tensors}


@pytest.fixture
def cohorts(monkeypatch):
    """How often a cohort was trained in place."""
    calls, train = [], in_place.train_cohort
    monkeypatch.setattr(in_place, "train_cohort", lambda *given: calls.append(1) or train(*given))
    return calls


@pytest.mark.parametrize("how, dtype", [("ridge", torch.float64), ("ridge", torch.float32), ("system", torch.float64)])
def test_a_closed_form_equals_the_generic_path(how, dtype, cohorts):
    found, expected = (left(how, kernel, dtype) for kernel in ("auto", "off"))
    assert len(cohorts) == 3, "two rounds, and one more that was compared"
    for name, value in expected.items():
        assert value.dtype == dtype
        torch.testing.assert_close(
            found[name], value, **({"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 1e-3, "atol": 1e-4})
        )


@pytest.mark.parametrize(
    "how, reason",
    [
        ("squared", "batch.weight more than once"),
        ("counted", "the number of samples or rows as a number"),
        ("ordered", "aten.sort"),
        ("table", "a closed form that makes rows of a table"),
    ],
)
def test_what_cannot_be_cut_takes_the_generic_path(how, reason, cohorts, caplog):
    with caplog.at_level(logging.INFO, logger="fedbench"):
        found, expected = (left(how, kernel) for kernel in ("auto", "off"))
    assert not cohorts and reason in caplog.text
    assert all(torch.equal(found[name], value) for name, value in expected.items())
