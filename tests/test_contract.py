"""Everything that an algorithm may say in one client, by the engine and by the slow loop: the same numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from fedbench.commands import cli
from fedbench.contract.algorithm import OWN, SHARED, Algorithm, Answer, Batch, Phase, Pull, Stage, Tensors, World, bce
from fedbench.contract.randomness import Draw
from fedbench.contract.uploads import Rows, Uploads
from fedbench.data.sampling import sample_round
from fedbench.errors import UsageError
from fedbench.reporting import report
from fedbench.simulation.channel import CLIENT, Hop, Screen, SecureSum, Trip, channel, ordered
from fedbench.simulation.client_store import ClientStore
from fedbench.simulation.engine import Engine
from fedbench.simulation.failures import Failures
from fedbench.simulation.federation import Federation, world_of
from fedbench.simulation.own_tables import Read
from fedbench.simulation.sending import bytes_down
from fedbench.testing import loop_engine
from tests.conftest import small_split

SEED, ROUNDS = 3, 3


@dataclass(frozen=True)
class Additive(Algorithm):
    """As FedRAP: a shared table and a personal one, added up, and a private head; one backward pass, a rate for each name."""

    local_epochs: int = 2
    batch_size: int = 16
    dim: int = 4

    tables: ClassVar[Mapping[str, str]] = {"items": SHARED, "personal": OWN}

    def init_server(self, world: World, draw: Draw) -> Tensors:
        return {"items": draw.normal("items", world.items, self.dim)}

    def init_client(self, world: World, draw: Draw) -> Tensors:
        return {"personal": draw.normal("personal", world.items, self.dim), "head": draw.normal("head", self.dim)}

    def answer(self, server: Tensors) -> Answer:
        return Answer(shared={"items": server["items"]})

    def phases(self, sent: Tensors) -> tuple[Phase, ...]:
        return (Phase(("head", "personal", "items"), {"head": 0.05, "personal": 0.4, "items": 0.2}, "sgd"),)

    def loss(self, held: Tensors, sent: Tensors, batch: Batch) -> Tensor:
        rows = held["items"] + held["personal"]
        apart = (batch.rows[:, None] * (held["items"] - held["personal"]) ** 2).sum() / batch.rows.sum()
        small = (batch.weight[:, None] * held["items"][batch.items].abs()).sum() / batch.weight.sum().clamp(min=1)
        return bce(rows[batch.items] @ held["head"], batch) + 0.1 * apart + 0.1 * small

    def upload(self, held: Tensors, sent: Tensors, samples: Tensor) -> Tensors:
        return {"items": held["items"] - sent["items"]}

    def aggregate(self, server: Tensors, uploads: Uploads, draw: Draw) -> Tensors:
        rows = uploads.rows("items")
        return {"items": server["items"] + rows.combine(len(server["items"]), "touching")}

    def score(self, own: Tensors, sent: Tensors) -> Tensor:
        return (sent["items"] + own["personal"]) @ own["head"]


class Decayed(Additive):
    """sgd with momentum, weight decay on every row, a rate that falls from step to step and from round to round."""

    def phases(self, sent: Tensors) -> tuple[Phase, ...]:
        rate = 0.3 * 0.9 ** (self.context.round - 1) * self.context.world.items / 50
        more = {"weight_decay": 0.05, "momentum": 0.8, "lr_decay": 0.95, "clip": 0.5}
        return (Phase(("head", "personal", "items"), {"head": 0.01, "personal": rate, "items": rate}, "sgd", **more),)

    def loss(self, held: Tensors, sent: Tensors, batch: Batch) -> Tensor:
        return super().loss(held, sent, batch) * np.tanh(self.context.round / 2)


class OneANumber(Additive):
    """Tables of one number a row, shared and personal, whose gradients are clipped together."""

    tables: ClassVar[Mapping[str, str]] = {"items": SHARED, "personal": OWN, "bias": SHARED, "mine": OWN}

    def init_server(self, world: World, draw: Draw) -> Tensors:
        return {**super().init_server(world, draw), "bias": draw.normal("bias", world.items)}

    def init_client(self, world: World, draw: Draw) -> Tensors:
        return {**super().init_client(world, draw), "mine": draw.normal("mine", world.items)}

    def answer(self, server: Tensors) -> Answer:
        return Answer(shared=server)

    def phases(self, sent: Tensors) -> tuple[Phase, ...]:
        return (Phase(("head", "personal", "items", "bias", "mine"), 0.2, "sgd", clip=0.3),)

    def loss(self, held: Tensors, sent: Tensors, batch: Batch) -> Tensor:
        rows = held["items"] + held["personal"]
        return bce(rows[batch.items] @ held["head"] + (held["bias"] * held["mine"])[batch.items], batch)

    def upload(self, held: Tensors, sent: Tensors, samples: Tensor) -> Tensors:
        return {name: held[name] - sent[name] for name in ("items", "bias")}

    def aggregate(self, server: Tensors, uploads: Uploads, draw: Draw) -> Tensors:
        return {name: value + uploads.rows(name).combine(len(value), "touching") for name, value in server.items()}

    def score(self, own: Tensors, sent: Tensors) -> Tensor:
        return super().score(own, sent) + sent["bias"] * own["mine"]


class Pulled(Additive):
    """Every row of the personal table is pulled to the server's, touched or not; two optimizers in turn move it."""

    def phases(self, sent: Tensors) -> tuple[Phase, ...]:
        pull = {"personal": Pull("items", 0.3)}
        return (
            Phase(("personal", "head"), 0.2, "sgd", momentum=0.5, weight_decay=0.1, pull=pull),
            Phase(("items", "personal"), {"items": 0.01, "personal": 0.02}, "adam", lr_decay=0.9, pull={"personal": Pull("items", 0.7)}),
        )


class PulledToSent(Pulled):
    """To a tensor that is only sent, in one of two stages; the other one decays."""

    tables: ClassVar[Mapping[str, str]] = {"items": SHARED, "anchor": SHARED, "personal": OWN}

    def answer(self, server: Tensors) -> Answer:
        return Answer(shared={"items": server["items"], "anchor": 2 * server["items"]})

    def stages(self, sent: Tensors) -> tuple[Stage, ...]:
        pull = {"personal": Pull("anchor", 0.3)}
        first = Phase(("personal", "head"), 0.1, "adamw", weight_decay=0.2, pull=pull)
        return Stage((first,), 1, 16, part="support"), Stage((Phase(("items", "personal"), 0.1, "sgd", 0.3),), 2, 16, part="query")


class Merging(Additive):
    """`receive` mixes the server's rows into the personal ones and makes a table that nobody keeps or sends."""

    tables: ClassVar[Mapping[str, str]] = {**Additive.tables, "was": SHARED}

    def receive(self, own: Tensors, sent: Tensors) -> Tensors:
        return {**own, **sent, "personal": 0.7 * own["personal"] + 0.3 * sent["items"], "was": own["personal"]}

    def loss(self, held: Tensors, sent: Tensors, batch: Batch) -> Tensor:
        apart = ((held["was"] - held["personal"])[batch.items] ** 2).sum(1)
        return super().loss(held, sent, batch) + (batch.weight * apart).sum()


class Forgetful(Additive):
    """Keeps what it was sent in place of its personal rows, and only half of its head."""

    def keep(self, held: Tensors, sent: Tensors) -> Tensors:
        return {"personal": sent["items"], "head": held["head"] / 2}


class KeepsHead(Additive):
    def keep(self, held: Tensors, sent: Tensors) -> Tensors:
        return {"personal": held["personal"]}


class SendsBoth(Additive):
    """The personal table travels whole, and how far it is from what was sent; the shared one as rows."""

    tables: ClassVar[Mapping[str, str]] = {"items": SHARED, "personal": OWN, "gap": OWN}

    def init_client(self, world: World, draw: Draw) -> Tensors:
        return {**super().init_client(world, draw), "gap": draw.normal("gap", world.items, self.dim)}

    def upload(self, held: Tensors, sent: Tensors, samples: Tensor) -> Tensors:
        gap = held["personal"] - sent["items"]
        return {"items": held["items"] - sent["items"], "personal": held["personal"], "gap": gap, "samples": samples}


class SendsKept(Additive):
    """The personal table as it lies in the store."""

    def upload(self, held: Tensors, sent: Tensors, samples: Tensor) -> Tensors:
        return {"items": held["items"], "personal": held["personal"]}

    def aggregate(self, server: Tensors, uploads: Uploads, draw: Draw) -> Tensors:
        return {"items": uploads.dense("personal").mean(0)}


class ForgetsAndSends(SendsKept, Forgetful):
    """What is uploaded is what was trained, though something else is kept."""


class Personal(Additive):
    """Half of the clients are answered, each with a table of its own."""

    def answer(self, server: Tensors) -> Answer:
        slot = torch.full((self.context.world.clients or 58,), -1)
        slot[::2] = torch.arange(len(slot[::2]))
        tables = server["items"] * (1 + torch.arange(len(slot[::2])))[:, None, None] / 10
        return Answer(personal={"items": tables}, slot=slot)

    def receive(self, own: Tensors, sent: Tensors) -> Tensors:
        return {**own, "items": sent["items"] if sent else torch.zeros_like(own["personal"])}

    def upload(self, held: Tensors, sent: Tensors, samples: Tensor) -> Tensors:
        return {"items": held["items"]}


class CommonAndPersonal(Personal):
    """Everybody is sent the common table, half of them an anchor of their own too, to which their personal rows are pulled."""

    tables: ClassVar[Mapping[str, str]] = {**Additive.tables, "anchor": SHARED}

    def answer(self, server: Tensors) -> Answer:
        mine = super().answer(server)
        return Answer(server, {"anchor": mine.personal["items"]}, mine.slot)

    def phases(self, sent: Tensors) -> tuple[Phase, ...]:
        pull = {"personal": Pull("anchor", 0.2)} if "anchor" in sent else {}
        return (Phase(("head", "personal", "items"), 0.1, "sgd", pull=pull),)

    def score(self, own: Tensors, sent: Tensors) -> Tensor:
        return (sent["items"] + own["personal"] + sent.get("anchor", 0)) @ own["head"]


EVERY = [
    *(Additive, Decayed, OneANumber, Pulled, PulledToSent, Merging, Forgetful, KeepsHead, SendsBoth, SendsKept, ForgetsAndSends, Personal),
    CommonAndPersonal,
]


def rounds(algorithm: Algorithm, **engine: object) -> Iterator[tuple[Tensors, Tensors, Tensors, Tensor]]:
    """Round by round: the server, what clients keep, all that was uploaded, losses; by the loop without engine options."""
    split = small_split()
    world, draw = world_of(split), Draw(SEED, 0, None, torch.float64)
    server, store = algorithm.init_server(world, draw), ClientStore(algorithm, world, draw)
    batched = Engine(algorithm, world, SEED, dtype=torch.float64, **engine) if engine else None  # type: ignore[arg-type]
    for when in range(1, ROUNDS + 1):
        samples = sample_round(split, np.arange(when, split.clients, 2), 2, SEED, when)
        if batched:
            result = batched.run_cohort(server, store, samples, when)
            uploads, loss = result.uploads, result.loss
        else:
            uploads, losses = loop_engine.run_cohort(algorithm, world, server, store.tensors, samples, SEED, when)
            loss = torch.tensor(losses, dtype=torch.float64)
        flat = {name: value.value if isinstance(value, Rows) else value for name, value in uploads.tensors.items()}
        server = algorithm.at(when, world).aggregate(server, uploads, Draw(SEED, when, None, torch.float64))
        yield dict(server), {n: t.clone() for n, t in store.tensors.items()}, {n: t.clone() for n, t in flat.items()}, loss  # type: ignore[union-attr]


WITH_KERNELS = [Decayed, PulledToSent, Merging, KeepsHead, CommonAndPersonal]
"""a kernel takes seconds to compile, and the others train as one of these does"""
FURTHER = (KeepsHead, PulledToSent, Merging)


@pytest.mark.parametrize(
    ("cls", "kernel"),
    [*((cls, "off") for cls in EVERY), *(pytest.param(cls, "auto", marks=[pytest.mark.long] * (cls in FURTHER)) for cls in WITH_KERNELS)],
    ids=lambda of: getattr(of, "__name__", of),
)
def test_the_engine_does_what_the_loop_does(cls: type[Algorithm], kernel: str) -> None:
    for found, expected in zip(rounds(cls(), kernel=kernel, block_rows=40), rounds(cls()), strict=True):
        for here, there in zip(found, expected, strict=True):
            torch.testing.assert_close(here, there, rtol=1e-9, atol=1e-9)


def test_the_cases_differ_from_each_other() -> None:
    """What a case adds is not ignored by both engines."""
    last = {cls.__name__: list(rounds(cls()))[-1] for cls in EVERY}
    kept = [one[1]["personal"] for one in last.values()]
    assert len({round(float(table.norm()), 9) for table in kept}) >= len(EVERY) - 2  # SendsBoth and KeepsHead train as others do


@pytest.mark.long
@pytest.mark.kernels
def test_rates_for_each_name_come_from_one_gradient() -> None:
    """Two phases would take the second gradient after the first step."""

    class InTurn(Additive):
        def phases(self, sent: Tensors) -> tuple[Phase, ...]:
            (both,) = super().phases(sent)
            return tuple(Phase((name,), both.rate(name), "sgd") for name in both.names)

    one, two = (list(rounds(cls(), block_rows=5000))[0][1]["head"] for cls in (Additive, InTurn))
    assert not torch.allclose(one, two)


def test_what_is_read_of_a_dict_is_remembered() -> None:
    made = Read({"a": torch.ones(1), "b": torch.zeros(1)})
    assert not made.asked and made["a"] == 1 and made.names == {"a"} and made.asked
    for ask in (lambda d: {**d}, lambda d: bool(d), lambda d: "a" in d, lambda d: list(d.items()), lambda d: d.get("b"), lambda d: len(d)):
        other = Read({"a": torch.ones(1)})
        ask(other)
        assert other.asked


@pytest.mark.parametrize(
    ("phase", "said"),
    [
        (Phase(("head",), {"heat": 0.1}), "lr must have a rate for each of head"),
        (Phase(("head",), {"head": -1.0}), "lr of head must be a number, 0 or more"),
        (Phase(("head",), 0.1, momentum=0.5), "momentum belongs to sgd"),
        (Phase(("head",), 0.1, weight_decay=0.5), "weight_decay belongs to adamw and sgd"),
        (Phase(("head",), 0.1, lr_decay=0.0), "lr_decay must be over 0"),
        (Phase(("head",), 0.1, pull={"items": Pull("items", 1.0)}), "it pulls 'items', which it does not move"),
        (Phase(("personal",), 0.1, pull={"personal": Pull("itens", 1.0)}), "neither holds nor was sent (did you mean items?"),
        (Phase(("personal",), "fast"), "lr must be a number"),  # type: ignore[arg-type]
    ],
)
def test_wrong_phases_are_refused(phase: Phase, said: str) -> None:
    assert said in phase.problem(("head", "personal", "items"), ("items",))


@pytest.mark.parametrize(
    ("kept", "said"), [({}, "keep must return the own table 'personal'"), ({"hat": 1}, "which init_client does not make")]
)
def test_wrong_keepers_are_refused(kept: dict[str, int], said: str) -> None:
    class Wrong(Additive):
        def keep(self, held: Tensors, sent: Tensors) -> Tensors:
            return {name: held["head"] for name in kept}

    with pytest.raises(UsageError, match=said):
        next(rounds(Wrong(), block_rows=5000))


def test_bits_are_counted_as_the_method_says() -> None:
    class Coded(Additive):
        def bits(self, world: World) -> Mapping[str, float]:
            return {"items": 1}

    split = small_split()
    plain, coded = (Federation.start(cls(), split, seed=0) for cls in (Additive, Coded))
    for federation in (plain, coded):
        federation.next_round()
    assert coded.bytes_down * 32 == plain.bytes_down
    rows = plain.bytes_up // (4 * 4 + 4)
    assert coded.bytes_up == rows * (1 + 4)  # four bits are a byte, and the id of a row
    assert bytes_down(Answer(shared={"seed": torch.ones(10)}), np.ones(7), bits={"seed": 0}) == 0


class Reads(Additive):
    """Two further readings of the model."""

    scores: ClassVar[tuple[str, ...]] = ("own", "sent")

    def score_own(self, own: Tensors, sent: Tensors) -> Tensor:
        return own["personal"] @ own["head"]

    def score_sent(self, own: Tensors, sent: Tensors) -> Tensor:
        return sent["items"] @ own["head"]


def test_further_readings_are_evaluated_beside_the_first() -> None:
    class Own(Additive):
        def score(self, own: Tensors, sent: Tensors) -> Tensor:
            return own["personal"] @ own["head"]

    several, alone = (Federation.start(cls(), small_split(), seed=0) for cls in (Reads, Own))
    for federation in (several, alone):
        federation.next_round()
    found = several.readings()
    assert found.keys() == {"own", "sent"}
    assert np.array_equal(found["own"]["test"], alone.outcome()["test"])
    assert not np.array_equal(found["sent"]["test"], found["own"]["test"])


class Chooses(Additive):
    """The server asks the last clients, and all of them once."""

    clients_per_round: int | None = 5

    def choose(self, server: Tensors, world: World, n: int, draw: Draw) -> Tensor | None:
        return world.clients - 1 - torch.arange(n) if self.context.round < 3 else None


def test_a_server_chooses_its_cohort() -> None:
    federation = Federation.start(Chooses(clients_per_round=5), small_split(), seed=0)
    last = federation.split.clients - 1
    assert federation.chosen(1).tolist() == list(range(last - 4, last + 1))
    federation.next_round()
    assert federation.visits.nonzero()[0].tolist() == federation.chosen(2).tolist()
    assert federation.chosen(3).tolist() != federation.chosen(2).tolist() and len(federation.chosen(3)) == 5


@pytest.mark.parametrize("chosen", [torch.tensor([1, 1]), torch.tensor([-1]), torch.tensor([99]), torch.arange(6), torch.tensor([0.5])])
def test_a_wrong_choice_is_refused(chosen: Tensor) -> None:
    class Wrong(Additive):
        def choose(self, server: Tensors, world: World, n: int, draw: Draw) -> Tensor | None:
            return chosen

    with pytest.raises(UsageError, match="choose must return up to 5 different client numbers from 0 to 23"):
        Federation.start(Wrong(clients_per_round=5), small_split(), seed=0).next_round()


def test_hops_stand_in_the_order_of_the_way() -> None:
    failures = Failures(corrupt=0.1)
    hops = channel(failures, ("gram",))
    assert [type(hop).__name__ for hop in hops] == ["CountBytes", "Damage", "Screen", "SecureSum"]
    assert [type(hop).__name__ for hop in channel(Failures(), ())] == ["CountBytes"]
    assert ordered(hops) == (hops[:3], hops[3:])
    for wrong in (hops[::-1], (SecureSum(), Screen(failures))):
        with pytest.raises(ValueError, match="sums last"):
            ordered(wrong)


def test_a_hop_sees_all_uploads_and_changes_what_the_server_sees() -> None:
    @dataclass(frozen=True)
    class Clip(Hop):
        side = CLIENT

        def __call__(self, uploads: Uploads, trip: Trip) -> Uploads:
            seen.append((trip.seed, trip.when, len(uploads.clients)))
            return uploads.scaled(torch.zeros(len(uploads.clients)))

    seen: list[tuple[int, int, int]] = []
    federation = Federation.start(Additive(), small_split(), seed=5)
    federation.hops = (Clip(), *federation.hops)
    before = federation.server["items"].clone()
    result = federation.next_round()
    assert seen == [(5, 1, 24)] and torch.equal(federation.server["items"], before)
    assert not result.uploads.rows("items").value.any() and federation.bytes_up > 0


def test_what_reaches_a_client_without_a_row_of_its_own_is_common_to_all() -> None:
    split = small_split()
    federation = Federation.start(CommonAndPersonal(), split, seed=0, dtype=torch.float64)
    federation.next_round()
    ranks = federation.sampled_ranks()["test"]
    algorithm = federation.algorithm.at(1, federation.engine.world)
    answer, own = algorithm.answer(federation.server), federation.store.tensors
    for c in range(split.clients):
        items = torch.from_numpy(np.r_[split.test_item[c], split.test_candidates[c]].astype(np.int64))
        sent = {name: value[items] for name, value in loop_engine.sent_to(answer, c).items()}
        assert sent.keys() == ({"items", "anchor"} if c % 2 == 0 else {"items"})
        scores = algorithm.score({"personal": own["personal"][c][items], "head": own["head"][c]}, sent)
        assert ranks[c] == 1 + int((scores[1:] >= scores[0]).sum())


def test_readings_are_in_metrics_summary_and_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = """
from dataclasses import dataclass
from fedbench.contract import register
from fedbench.algorithms.local import Local

@register("reads", summary="scored in two ways")
@dataclass(frozen=True)
class Reads(Local):
    scores = ("user",)

    def score_user(self, own, sent):
        return own["items"] @ own["user"].abs()
"""
    (tmp_path / "reads.py").write_text(source)
    small = "--dataset synthetic --users 30 --items 60 --interactions 10 --rounds 2 --no-mlflow --quiet"
    assert cli.main(["--algo", str(tmp_path / "reads.py"), "--out", str(tmp_path / "run"), *small.split()]) == 0
    assert "reads, score user" in capsys.readouterr().out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[summary["best_round"] - 1])
    assert summary["scores"]["user"]["test"]["hr_10"] == line["user/test/hr_10"] and line["user/val/mrr"] != line["val/mrr"]
    assert report.main([str(tmp_path / "run"), "--out", str(tmp_path / "report")]) == 0
    assert "Readings of one model" in (tmp_path / "report" / "report.html").read_text()
