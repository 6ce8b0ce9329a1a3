"""Kernels derived from a loss: equal to the generic path in float64 for every way to hold rows, every optimizer and many operations."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from fedbench.contract.algorithm import OWN, SHARED, Algorithm, Answer, Phase, Pull, bce
from fedbench.simulation import derived
from fedbench.simulation.federation import Federation
from fedbench.simulation.probe import tiny

Loss = Callable[..., Tensor]


@dataclass(frozen=True)
class Plain(Algorithm):
    """A shared table, a private vector and a private layer; tests say what is trained, and by what loss."""

    local_epochs: int = 3
    batch_size: int = 8
    dim: int = 5
    tables = {"items": SHARED}
    moves: tuple[Phase, ...] = (Phase(("user", "items"), 0.05),)
    of: str = "dot"

    def init_server(self, world, draw):
        return {"items": draw.normal("items", world.items, self.dim) * 0.3}

    def init_client(self, world, draw):
        return {"user": draw.normal("user", self.dim) * 0.3, "layer": draw.normal("layer", 4 * self.dim + 4) * 0.3}

    def answer(self, server):
        return Answer(shared=server)

    def phases(self, sent):
        return self.moves

    def loss(self, held, sent, batch):
        return LOSSES[self.of](self, held, sent, batch)

    def upload(self, held, sent, samples):
        return {"items": held["items"] - sent["items"], "samples": samples}

    def aggregate(self, server, uploads, draw):
        return {"items": server["items"] + uploads.rows("items").combine(uploads.world.items, "touching")}

    def score(self, own, sent):
        return sent["items"] @ own["user"]


def over_samples(batch, values):
    return (batch.weight * values).sum() / batch.weight.sum().clamp(min=1)


def layered(a, held, sent, batch):
    rows, w, d = held["items"][batch.items], held["layer"], a.dim
    hidden = torch.relu(rows @ w[: 3 * d].view(3, d).T + w[3 * d : 3 * d + 3])
    return bce(torch.cat([hidden, rows * held["user"]], dim=1).sum(1) * w[-1] + hidden @ w[4 * d : 4 * d + 3], batch)


LOSSES: dict[str, Loss] = {
    "dot": lambda a, h, s, b: bce(h["items"][b.items] @ h["user"], b),
    "layer": layered,
    "gate": lambda a, h, s, b: bce((h["items"][b.items] * torch.sigmoid(h["user"])).sum(1), b) + 0.01 * (h["user"] ** 2).sum(),
    "mse": lambda a, h, s, b: over_samples(b, (b.label - h["items"][b.items] @ h["user"] - h["layer"][0]) ** 2),
    "softplus": lambda a, h, s, b: over_samples(b, torch.nn.functional.softplus((h["items"][b.items] * h["user"]).sum(1) - 3 * b.label)),
    "abs": lambda a, h, s, b: over_samples(b, (h["items"][b.items] - s["items"][b.items]).abs().sum(1) + h["items"][b.items].abs().sum(1)),
    "tanh": lambda a, h, s, b: over_samples(b, (torch.tanh(h["items"][b.items] @ h["user"]) - b.label) ** 2),
    "root": lambda a, h, s, b: over_samples(b, ((h["items"][b.items] ** 2).sum(1) + 0.1).sqrt() * (1 + b.label)),
    "exp": lambda a, h, s, b: over_samples(b, torch.exp(h["items"][b.items] @ h["user"]) * b.label + (h["items"][b.items] ** 2).sum(1)),
    "log": lambda a, h, s, b: over_samples(b, torch.log(1.5 + (h["items"][b.items] ** 2).sum(1))) + torch.log(1 + h["user"] ** 2).sum(),
    "where": lambda a, h, s, b: over_samples(b, torch.where(b.label > 0, h["items"][b.items, 0] ** 2, h["items"][b.items] @ h["user"])),
    "clamp": lambda a, h, s, b: over_samples(b, (h["items"][b.items] @ h["user"]).clamp(-0.2, 0.3) ** 2 + h["items"][b.items, -1] ** 2),
    "held rows": lambda a, h, s, b: bce(h["items"][b.items] @ h["user"], b) + 0.1 * (b.rows[:, None] * h["items"] ** 2).sum(),
    "outer": lambda a, h, s, b: bce(torch.einsum("bd,d->b", h["items"][b.items], h["user"]), b),
    "mean": lambda a, h, s, b: bce(h["items"][b.items] @ h["user"] - over_samples(b, h["items"][b.items] @ h["user"]), b),
}
OPTIMIZERS = {
    "adam": (Phase(("user", "items", "layer"), 0.05),),
    "two phases": (Phase(("user",), 0.05), Phase(("items",), 0.02)),
    "adamw": (Phase(("items", "user"), 0.05, "adamw", 0.1),),
    "clip": (Phase(("items", "user"), 0.05, clip=0.05),),
    "sgd": (Phase(("items", "user"), 0.3, "sgd"),),
    "momentum": (Phase(("items", "user"), 0.1, "sgd", 0.05, momentum=0.8),),
    "rates": (Phase(("items", "user"), {"items": 0.02, "user": 0.2}, lr_decay=0.9),),
    "pull": (Phase(("items", "user"), 0.05, pull={"items": Pull("items", 0.5)}),),
    "pull by sgd": (Phase(("items", "user"), 0.1, "sgd", pull={"items": Pull("items", 0.5)}),),
}


def ways(algorithm: Algorithm, monkeypatch: pytest.MonkeyPatch, gather: bool, dtype: torch.dtype = torch.float64) -> tuple[set[str], float]:
    """What was said of the kernel, and how far apart the two paths are after two rounds."""
    monkeypatch.setattr(derived, "costs_less_to_gather", lambda *given: gather)
    object.__setattr__(algorithm, "name", "plain")
    left, said = [], set()
    for kernel in ("auto", "off"):
        federation = Federation.start(algorithm, tiny(60, 211, False), 0, dtype=dtype, kernel=kernel, compile=False)
        for _ in range(2):
            federation.next_round()
        left.append({**federation.server, **{f"own {name}": value for name, value in federation.store.tensors.items()}})
        if federation.engine.derived is not None:
            said = federation.engine.derived.said
            assert said or any(federation.engine.derived.known.values())
    return said, max(float((left[0][name] - left[1][name]).abs().max()) for name in left[1])


@pytest.mark.parametrize("gather", [False, True], ids=["dense", "gather"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_equals_the_generic_path(optimizer, gather, monkeypatch):
    said, apart = ways(Plain(moves=OPTIMIZERS[optimizer]), monkeypatch, gather)
    assert not said and apart < 1e-9


@pytest.mark.parametrize("of", LOSSES)
def test_every_operation_equals_the_generic_path(of, monkeypatch):
    said, apart = ways(Plain(of=of, moves=(Phase(("user", "items", "layer"), 0.05),)), monkeypatch, gather=of in ("layer", "mse", "abs"))
    assert not said and apart < 1e-9


@dataclass(frozen=True)
class Both(Plain):
    """A table of the client's own beside the shared one."""

    tables = {"items": SHARED, "personal": OWN}

    def init_client(self, world, draw):
        return {"user": draw.normal("user", self.dim), "personal": draw.normal("personal", world.items, self.dim) * 0.1}

    def loss(self, held, sent, batch):
        return bce((held["items"] + held["personal"])[batch.items] @ held["user"], batch)

    def score(self, own, sent):
        return (sent["items"] + own["personal"]) @ own["user"]


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
def test_own_and_shared_tables_train_together_where_they_lie(optimizer, monkeypatch):
    decay = 0.1 if optimizer == "adamw" else 0.0
    algorithm = Both(moves=(Phase(("user", "items", "personal"), 0.05, optimizer, decay),))
    said, apart = ways(algorithm, monkeypatch, gather=False)
    assert not said and apart < 1e-9


def test_what_kernels_are_not_made_of_takes_the_generic_path_and_is_said_with_its_line(monkeypatch, caplog):
    monkeypatch.setitem(LOSSES, "sorted", lambda a, h, s, b: over_samples(b, torch.sort(h["items"][b.items], dim=1).values[:, 0]))
    with caplog.at_level(logging.INFO, "fedbench"):
        said, apart = ways(Plain(of="sorted", moves=(Phase(("items",), 0.05),)), monkeypatch, gather=False)
    assert apart == 0 and len(said) == 1 and "sort" in next(iter(said))
    assert any("no kernel" in record.message and "test_derived.py, line" in record.message for record in caplog.records)


@pytest.mark.parametrize("of", ["unweighed", "squared weights", "number of samples"])
def test_a_loss_that_is_not_linear_in_the_weights_gets_no_kernel(of, monkeypatch):
    odd: dict[str, Loss] = {
        "unweighed": lambda a, h, s, b: (h["items"][b.items] ** 2 * b.weight[:, None]).sum() + (h["items"] ** 2).sum(),
        "squared weights": lambda a, h, s, b: (b.weight**2 * (h["items"][b.items] @ h["user"]) ** 2).sum(),
        "number of samples": lambda a, h, s, b: (b.weight * (h["items"][b.items] @ h["user"]) ** 2).sum() / len(b.items),
    }
    monkeypatch.setitem(LOSSES, of, odd[of])
    said, apart = ways(Plain(of=of), monkeypatch, gather=False)
    assert said and apart == 0


def test_a_kernel_that_differs_is_refused(monkeypatch):
    """A step that is wrong by a sign, as a mistake of the compiler would be."""
    from fedbench.kernels.compiler import step

    monkeypatch.setitem(step.SYMBOLS, "sub", "+")
    said, apart = ways(Plain(of="dot"), monkeypatch, gather=False)
    assert apart == 0 and any("differ" in one for one in said)


def test_a_loss_that_asks_for_the_round_follows_it(monkeypatch):
    monkeypatch.setitem(LOSSES, "round", lambda a, h, s, b: bce(h["items"][b.items] @ h["user"], b) * 0.37**a.context.round)
    said, apart = ways(Plain(of="round", moves=(Phase(("items", "user"), 0.3, "sgd"),)), monkeypatch, gather=False)
    assert not said and apart < 1e-9


def test_another_penalty_is_no_other_kernel(monkeypatch):
    texts = []
    monkeypatch.setattr(derived.build, "load", lambda text: texts.append(text))
    for penalty in (0.37, 0.041):
        monkeypatch.setitem(
            LOSSES, "penalty", lambda a, h, s, b, p=penalty: bce(h["items"][b.items] @ h["user"], b) + p * (h["user"] ** 2).sum()
        )
        algorithm = Plain(of="penalty")
        shapes = {"user": (5,), "layer": (24,), "items": ("n", 5)}, {"items": ("n", 5)}
        derived.made(algorithm, algorithm.stages({"items": torch.zeros(1)})[0], shapes, 20, 40)
    assert texts[0] == texts[1] and "0.37" not in texts[0]
