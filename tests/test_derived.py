"""Kernels derived from a loss: equal to the generic path in float64 for every way to hold rows, every optimizer and many operations."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedbench.contract.algorithm import OWN, SHARED, Algorithm, Answer, Phase, Pull, bce
from fedbench.kernels.compiler import driver
from fedbench.kernels.compiler.keeping import kept
from fedbench.kernels.compiler.spread import BatchGraph
from fedbench.simulation import derived
from fedbench.simulation.federation import Federation
from fedbench.simulation.probe import tiny

pytestmark = pytest.mark.kernels

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


def keys(held):
    return held["layer"][:15].view(3, 5)


def tanh_gelu(x):
    return F.gelu(x, approximate="tanh")


def product(x, y):
    return torch.add(x, y, alpha=0.5) * y


def asleep(low: float) -> Loss:
    """Two layers over rows and how they changed; one unit of each sleeps for all samples; at a low bias both of the second do."""

    def loss(a, held, sent, batch):
        rows, before, w = held["items"][batch.items], sent["items"][batch.items], held["layer"]
        one = torch.relu(torch.cat([rows, before - rows], dim=1) @ w[:20].view(2, 10).T + torch.cat([-9 - w[20:21] ** 2, w[21:22]]))
        two = torch.relu(one @ w[2:6].view(2, 2).T + torch.cat([low - w[22:23] ** 2, -9 - w[23:] ** 2]))
        return bce(two @ held["user"][:2] + rows @ held["user"], batch)

    return loss


LOSSES: dict[str, Loss] = {
    "a unit asleep": asleep(1.0),
    "a layer asleep": asleep(-9.0),
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
    "attention": lambda a, h, s, b: over_samples(b, torch.softmax(h["items"][b.items] @ keys(h).T, -1) @ keys(h) @ h["user"]),
    "logsumexp": lambda a, h, s, b: over_samples(b, torch.logsumexp(h["items"][b.items] * h["user"], -1)) + h["layer"].softmax(0).amin(),
    "log_softmax": lambda a, h, s, b: over_samples(b, torch.log_softmax(h["items"][b.items] * h["user"], -1)[:, 1]),
    "layer_norm": lambda a, h, s, b: over_samples(b, F.layer_norm(h["items"][b.items], (5,), h["user"], h["layer"][:5]) @ h["layer"][5:10]),
    "variance": lambda a, h, s, b: over_samples(b, h["items"][b.items].var(-1)) + h["user"].std(),
    "cosine": lambda a, h, s, b: over_samples(b, F.cosine_similarity(h["items"][b.items], h["user"][None], dim=-1) * b.label),
    "normalize": lambda a, h, s, b: over_samples(b, F.normalize(h["items"][b.items], dim=-1) @ F.normalize(h["user"], dim=0)),
    "linear": lambda a, h, s, b: over_samples(b, F.linear(h["items"][b.items], keys(h), h["user"][:3]).tanh().sum(1)),
    "bilinear": lambda a, h, s, b: over_samples(b, torch.einsum("bk,jk,j->b", h["items"][b.items], keys(h), h["user"][:3]) ** 2),
    "smoothed": lambda a, h, s, b: over_samples(
        b, F.binary_cross_entropy_with_logits(h["items"][b.items] @ h["user"], 0.8 * b.label + 0.1, reduction="none")
    ),
    "units": lambda a, h, s, b: over_samples(
        b, sum(unit(h["items"][b.items] * h["user"]).sum(1) for unit in (F.silu, F.elu, F.leaky_relu, F.hardtanh, F.mish, tanh_gelu))
    ),
    "powers": lambda a, h, s, b: over_samples(
        b,
        (1 + (h["items"][b.items] ** 2).sum(1)) ** -1.5
        + torch.sigmoid(h["items"][b.items] @ h["user"]) ** 1.7
        + 2 ** h["items"][b.items, 0]
        + (h["items"][b.items, 1] - 0.4) ** 11,
    ),
    "parts": lambda a, h, s, b: over_samples(b, product(*h["items"][b.items][:, :4].chunk(2, -1)) @ torch.tensor([1.0, 2.0]).to(h["user"])),
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
ONE_AFTER_ANOTHER = "sgd", "clip", "momentum", "rates", "adamw", "pull", "pull by sgd"
OPTIMIZERS["all"] = tuple(phase for one in ONE_AFTER_ANOTHER for phase in OPTIMIZERS[one])
"""one kernel for many takes less time to compile than one for each"""


def ways(
    algorithm: Algorithm, monkeypatch: pytest.MonkeyPatch, gather: bool, late: bool = False, both: bool = False
) -> tuple[set[str], float]:
    """What was said of the kernel, and how far apart the two paths are after two rounds.

    late: rows catch up when they are next used; both: each client's rows are held as suits its batches.
    """
    monkeypatch.setattr(derived, "ways_to_hold", lambda *given: (gather or both, not gather or both))
    monkeypatch.setattr(driver, "CATCH_UP", (0.0, 0.0) if late else (1e9, 0.0))
    object.__setattr__(algorithm, "name", "plain")
    left, said = [], set()
    for kernel in ("auto", "off"):
        federation = Federation.start(algorithm, tiny(60, 211, False), 0, dtype=torch.float64, kernel=kernel, compile=False)
        for _ in range(2):
            federation.next_round()
        left.append({**federation.server, **{f"own {name}": value for name, value in federation.store.tensors.items()}})
        if federation.engine.derived is not None:
            said = federation.engine.derived.said
            assert said or any(federation.engine.derived.known.values())
    return said, max(float((left[0][name] - left[1][name]).abs().max()) for name in left[1])


EVERY_WAY = [pytest.param("adam", "both", marks=pytest.mark.long), ("all", "gather"), pytest.param("all", "dense", marks=pytest.mark.long)]
"""rows are held in two ways, whatever the optimizer"""
CATCHES_UP = [pytest.param(optimizer, "late", marks=pytest.mark.long) for optimizer in ("two phases", "adamw")]


@pytest.mark.parametrize(("optimizer", "how"), EVERY_WAY + CATCHES_UP)
def test_every_optimizer_equals_the_generic_path(optimizer, how, monkeypatch):
    said, apart = ways(Plain(moves=OPTIMIZERS[optimizer]), monkeypatch, how != "dense", how == "late", how == "both")
    assert not said and apart < 1e-9


TOGETHER = (
    "a unit asleep",
    "a layer asleep",
    "layer, mse, abs",
    "gate, softplus, root",
    "exp, log, where, clamp",
    "tanh, held rows, outer, mean",
    "attention, logsumexp, log_softmax, layer_norm, variance, cosine, normalize",
    "linear, bilinear, smoothed, units, powers, parts",
)
"""losses that are added up: one kernel takes as long to compile as all of them"""
SHORT = TOGETHER[:2] + TOGETHER[4:5]
"""those that are tested at every push; the others are in the long form"""


def test_every_loss_is_in_a_sum():
    assert {name for of in TOGETHER for name in of.split(", ")} | {"dot"} == LOSSES.keys()


@pytest.mark.parametrize(
    ("clients", "gather", "dense"),
    [([(8, 8)] * 4, False, True), ([(800, 400)] * 4, True, False), ([(8, 8)] * 400 + [(800, 400)] * 4, True, True)],
)
def test_rows_are_held_as_suits_the_batches_that_clients_have(clients, gather, dense, monkeypatch):
    monkeypatch.setattr(derived, "work_of", lambda graphs: (100.0, 100.0))
    samples, rows = np.array(clients).T
    found = derived.ways_to_hold([], derived.Usual(samples, rows), 8)
    assert found == (gather, dense) and all(type(one) is bool for one in found)


@pytest.mark.parametrize("of", [pytest.param(of, marks=[pytest.mark.long] * (of not in SHORT)) for of in TOGETHER])
def test_every_operation_equals_the_generic_path(of, monkeypatch):
    losses = [LOSSES[name] for name in of.split(", ")]
    monkeypatch.setitem(LOSSES, of, lambda *given: sum(loss(*given) for loss in losses))
    said, apart = ways(Plain(of=of, moves=(Phase(("user", "items", "layer"), 0.05),)), monkeypatch, gather="layer" in of)
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


def test_own_and_shared_tables_train_together_where_they_lie(monkeypatch):
    names = ("user", "items", "personal")
    algorithm = Both(moves=(Phase(names, 0.05, "adamw", 0.1), Phase(names, 0.05, "sgd")))
    said, apart = ways(algorithm, monkeypatch, gather=False)
    assert not said and apart < 1e-9


@dataclass(frozen=True)
class Categories(Plain):
    """The category of an item, a whole number that the server sends, has a trained row and a trained bias of its own."""

    tables = {"items": SHARED, "category": SHARED}

    def init_server(self, world, draw):
        kinds = torch.arange(world.items, device=draw.device) % 7
        return {"items": draw.normal("items", world.items, self.dim), "category": kinds}

    def init_client(self, world, draw):
        return {"user": draw.normal("user", self.dim), "kinds": draw.normal("kinds", 7, self.dim), "bias": draw.normal("bias", 7)}

    def loss(self, held, sent, batch):
        kind = sent["category"][batch.items]
        rows = held["items"][batch.items] + torch.tanh(held["kinds"][kind])
        return bce(rows @ held["user"] + held["bias"][kind], batch)

    def aggregate(self, server, uploads, draw):
        return {**server, **super().aggregate(server, uploads, draw)}


@pytest.mark.long
def test_whole_numbers_of_items_pick_rows_of_tensors(monkeypatch):
    algorithm = Categories(moves=(Phase(("user", "items", "kinds", "bias"), 0.05),))
    said, apart = ways(algorithm, monkeypatch, gather=True, both=True)
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
    from fedbench.kernels.compiler import expressions

    monkeypatch.setitem(expressions.SYMBOLS, "sub", "+")
    said, apart = ways(Plain(of="dot"), monkeypatch, gather=False)
    assert apart == 0 and any("differ" in one for one in said)


def test_what_numba_cannot_compile_takes_the_generic_path(monkeypatch):
    from fedbench.kernels.compiler import expressions

    monkeypatch.setitem(expressions.SYMBOLS, "sub", "+ nothing_of_that_name +")
    said, apart = ways(Plain(of="dot"), monkeypatch, gather=False)
    assert apart == 0 and any("numba cannot compile it" in one for one in said)


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
        derived.made(algorithm, algorithm.stages({"items": torch.zeros(1)})[0], shapes, derived.NOBODY)
    assert texts[0] == texts[1] and "0.37" not in texts[0]


def kept_by(phases, loss, monkeypatch):
    """What the phases of a step keep for each other, and the graphs' values by number."""
    monkeypatch.setitem(LOSSES, "kept", loss)
    algorithm, common = Plain(of="kept", moves=tuple(Phase(names, 0.05) for names in phases)), BatchGraph()
    held, sent = {"user": (5,), "layer": (24,), "items": ("n", 5)}, {"items": ("n", 5)}
    graphs = [derived.gradient_graph(algorithm, phase, held, sent, common)[1] for phase in algorithm.moves]
    found = kept(common, [(outputs, set(phase.names)) for outputs, phase in zip(graphs, algorithm.moves, strict=True)])
    values = {v.number: v for v in common.known.values()}
    return [({values[n].op for n in one.there}, {values[n].op for n in one.once}) for one in found]


def with_layer(a, h, s, b):
    """A layer of two inputs over a row and what was sent, and the row's product with the user."""
    rows, theirs = h["items"][b.items], s["items"][b.items]
    hidden = torch.relu(torch.cat([rows, theirs], 1) @ h["layer"][:20].reshape(10, 2) + h["layer"][20:22])
    return bce(hidden @ h["layer"][22:] + rows @ h["user"], b)


def test_phases_keep_what_did_not_move(monkeypatch):
    """The layer's phase makes the rows' products, which the next finds; what the sent rows add to the layer stays for the next step."""
    assert kept_by([("layer",), ("user", "items")], with_layer, monkeypatch) == [(set(), {"base"}), ({"feature_sum"}, set())]


def test_what_moves_or_differs_from_batch_to_batch_is_made_anew(monkeypatch):
    assert kept_by([("layer", "items", "user")], with_layer, monkeypatch) == [(set(), set())]
    product = lambda a, h, s, b: (b.weight * (s["items"][b.items] @ h["user"]).relu() * (h["items"][b.items] @ h["user"])).sum()  # noqa: E731
    assert kept_by([("items",)], product, monkeypatch) == [(set(), {"feature_sum"})]
