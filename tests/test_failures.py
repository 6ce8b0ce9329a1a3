"""Failures inside the federation: who fails, what it does to the rest, and that all of it is counted."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedbench.algorithms.fedease import FedEASE
from fedbench.algorithms.fedmf import FedMF
from fedbench.algorithms.local import Local
from fedbench.commands import cli
from fedbench.contract.algorithm import Algorithm, Tensors, World
from fedbench.contract.randomness import Draw
from fedbench.contract.uploads import Uploads
from fedbench.data.sampling import cohort_of, sample_round
from fedbench.errors import UsageError
from fedbench.evaluation.significance import from_chance
from fedbench.experiment import checkpoint, prepare
from fedbench.settings.command_line import resolve
from fedbench.simulation.channel import SERVER, Hop, Trip
from fedbench.simulation.client_store import ClientStore
from fedbench.simulation.engine import Engine
from fedbench.simulation.failures import Failures, drawn
from fedbench.simulation.federation import Diverged, Federation
from fedbench.simulation.scoring import Evaluator
from fedbench.testing import loop_engine
from fedbench.testing.small_federation import SMALL, assert_same, flat
from tests.conftest import small_split
from tests.test_algorithms import fedavg_ncf, fedem
from tests.test_run import DATA, FEDMF, carry_out, lines_of, result, summary_of

SEED = 0


@dataclass(frozen=True)
class Watch(Hop):
    """Shows the uploads to somebody and hands them on."""

    show: Callable[[Uploads], object]
    side = SERVER

    def __call__(self, uploads: Uploads, trip: Trip) -> Uploads:
        self.show(uploads)
        return uploads


def federation_of(algorithm: Algorithm, failures: Failures = Failures(), **how: Any) -> Federation:  # noqa: B008
    return Federation.start(algorithm, small_split(), SEED, failures=failures, **how)


def copied(tensors: Tensors) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}


# ---- who fails -------------------------------------------------------------------------------------------------------------


def test_who_fails_hangs_on_seed_round_and_client_alone() -> None:
    failures, everybody = Failures(dropout=0.4, stragglers=0.4), np.arange(300)
    answering = failures.answering(everybody, 1, 5)
    some = np.array([250, 7, 3, 8, 99])
    assert failures.answering(some, 1, 5).tolist() == [client for client in some if client in answering]
    epochs = failures.epochs(everybody, 1, 5, 10)
    assert failures.epochs(some, 1, 5, 10).tolist() == epochs[some].tolist()
    assert failures.answering(everybody, 1, 6).tolist() != answering.tolist() != failures.answering(everybody, 2, 5).tolist()


def test_how_many_fail() -> None:
    everybody = np.arange(20_000)
    failures = Failures(dropout=0.3, stragglers=0.1)
    sigma = math.sqrt(len(everybody) * 0.25)
    assert abs(len(failures.answering(everybody, 0, 1)) - 14_000) < 5 * sigma
    epochs = failures.epochs(everybody, 0, 1, 5)
    assert abs((epochs < 5).sum() - 2_000) < 5 * sigma
    assert set(epochs.tolist()) == {1, 2, 3, 4, 5}
    assert (failures.epochs(everybody, 0, 1, 1) == 1).all()
    assert Failures().answering(everybody, 0, 1) is everybody and (Failures().epochs(everybody, 0, 1, 5) == 5).all()


def test_failures_are_independent_of_each_other() -> None:
    draws = [drawn(np.arange(20_000), 0, 1, purpose)[:, 0] for purpose in ("dropout", "stragglers", "corrupt")]
    assert abs(np.corrcoef(draws) - np.eye(3)).max() < 0.03


# ---- clients that never answer ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [FedMF(**SMALL), fedem(), fedavg_ncf(), Local(**SMALL)], ids=lambda a: a.name)
def test_a_client_that_drops_out_is_as_if_it_had_not_been_chosen(algorithm: Algorithm) -> None:
    failures = Failures(dropout=0.5)
    federation = federation_of(algorithm, failures)
    start = copied(federation.store.tensors)
    federation.next_round()
    chosen = cohort_of(1, 24, 17, algorithm.sampling, SEED)
    cohort = failures.answering(chosen, SEED, 1)
    assert 0 < len(cohort) < 17 and federation.counts == {"dropped": 17 - len(cohort), "stragglers": 0, "rejected": 0}
    assert federation.visits.nonzero()[0].tolist() == cohort.tolist()
    world, draw = World(24, small_split().items), Draw(SEED)
    server, store = algorithm.init_server(world, draw), ClientStore(algorithm, world, draw)
    expected = Engine(algorithm, world, SEED).run_cohort(server, store, sample_round(small_split(), cohort, 4, SEED, 1), 1)
    assert_same(federation.store.tensors, store.tensors, 0)
    assert_same(federation.server, algorithm.aggregate(server, expected.uploads, Draw(SEED, 1)), 0)
    absent = np.setdiff1d(np.arange(24), cohort)
    for name, value in federation.store.tensors.items():
        assert torch.equal(value[absent], start[name][absent]), name


def test_a_cap_on_weights_gives_way_when_few_answer() -> None:
    federation = federation_of(fedem(max_weight=0.1), Failures(dropout=0.85))
    for _ in range(4):
        federation.next_round()
    assert 0 < federation.visits.sum() < 4 * 10 and federation.server["tables"].isfinite().all()


# ---- clients that finish less ----------------------------------------------------------------------------------------------


STRAGGLERS = [FedMF(**SMALL), fedem(stop_below=0.05), fedavg_ncf(average="cohort", weight_decay=0.3)]


@pytest.mark.parametrize(
    ("algorithm", "kernel"),
    [*((one, "off") for one in STRAGGLERS), (STRAGGLERS[0], "auto")],  # other kernels: the common tests
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_stragglers_equal_the_loop(algorithm: Algorithm, kernel: str) -> None:
    world, draw = World(24, small_split().items), Draw(SEED, 0, None, torch.float64)
    engine = Engine(algorithm, world, SEED, dtype=torch.float64, kernel=kernel)
    server, kept = algorithm.init_server(world, draw), ClientStore(algorithm, world, draw)
    slow_server, slow_kept = copied(server), copied(kept.tensors)
    seen = set()
    for when in (1, 2, 3):
        samples = sample_round(small_split(), cohort_of(when, 24, 17, "uniform", SEED), 4, SEED, when)
        epochs = Failures(stragglers=0.6).epochs(samples.clients, SEED, when, 3)
        seen |= set(epochs.tolist())
        found = engine.run_cohort(server, kept, samples, when, epochs)
        expected, losses = loop_engine.run_cohort(algorithm, world, slow_server, slow_kept, samples, SEED, when, epochs)
        assert found.loss.tolist() == pytest.approx(losses, abs=1e-9)
        assert_same(flat(found.uploads), flat(expected), 1e-9)
        server = algorithm.aggregate(server, found.uploads, Draw(SEED, when, None, torch.float64))
        slow_server = algorithm.aggregate(slow_server, expected, Draw(SEED, when, None, torch.float64))
    assert seen == {1, 2, 3}
    assert_same(kept.tensors, slow_kept, 1e-9)


# ---- uploads that arrive damaged -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [FedMF(**SMALL), fedem(), fedavg_ncf(), fedem(clients_per_round=None)], ids=lambda a: a.name)
def test_damaged_uploads_are_rejected_and_the_rest_aggregated(algorithm: Algorithm) -> None:
    failures = Failures(corrupt=0.3)
    clean, federation = federation_of(algorithm), federation_of(algorithm, failures)
    uploads, aggregated = [], []
    clean.hops = (*clean.hops, Watch(uploads.append))
    clean.next_round()
    sent = Uploads(uploads[0].world, uploads[0].clients, {name: value for name, value in uploads[0].tensors.items()})
    hit = drawn(sent.clients.numpy(), SEED, 1, "corrupt")
    bad = hit[:, 0] < 0.3
    assert 0 < bad.sum() < len(bad)
    aggregate = type(algorithm).aggregate

    class Watched(type(algorithm)):  # type: ignore[misc]
        def aggregate(self, server: Tensors, uploads: Uploads, draw: Draw) -> Tensors:
            aggregated.append(uploads)
            return aggregate(self, server, uploads, draw)

    federation.algorithm = Watched(**{field.name: getattr(algorithm, field.name) for field in dataclasses.fields(algorithm)})
    federation.next_round()
    assert federation.counts["rejected"] == bad.sum() and federation.bytes_up == clean.bytes_up
    assert aggregated[0].clients.tolist() == sent.clients[~bad].tolist()
    assert_same(flat(aggregated[0]), flat(sent.only(torch.from_numpy(~bad))), 0)
    assert_same(federation.store.tensors, clean.store.tensors, 0)  # they trained, and keep what they learnt


def test_kinds_of_damage() -> None:
    uploads = made_up([1.0] * 400)
    arrived = Failures(corrupt=0.5).damaged(uploads, SEED, 1)
    assert arrived.unreadable is not None
    change = arrived.dense("change")[:, 0]
    kinds = [change.isnan(), change.isinf(), change.isfinite() & (change > 1e5), arrived.unreadable]
    assert all(25 <= kind.sum() <= 80 for kind in kinds)
    hit = torch.stack(kinds).sum(0)
    assert hit.max() == 1 and (change[hit == 0] == uploads.dense("change")[0, 0]).all()
    assert (uploads.dense("change") == uploads.dense("change")[0]).all(), "the originals stay"


def test_damage_does_not_reach_what_clients_keep() -> None:
    """Whole tables are uploaded as views of the store when everybody takes part."""
    federation = federation_of(fedem(clients_per_round=None), Failures(corrupt=0.9))
    federation.next_round()
    assert all(value.isfinite().all() and value.abs().max() < 1e3 for value in federation.store.tensors.values())


def test_if_all_uploads_are_rejected_the_server_stays() -> None:
    federation = federation_of(FedMF(**SMALL), Failures(max_upload_norm="0.000001"))
    server, store = copied(federation.server), copied(federation.store.tensors)
    federation.next_round()
    assert federation.counts["rejected"] == 17 and federation.visits.sum() == 17
    assert_same(federation.server, server, 0)
    assert not torch.equal(federation.store.tensors["user"], store["user"])


def made_up(norms: list[float]) -> Uploads:
    """A vector of two equal numbers a client, and a count."""
    values = torch.tensor(norms)[:, None].expand(-1, 2) / math.sqrt(2)
    return Uploads(World(9, 9), torch.arange(len(norms)), {"change": values, "samples": torch.full((len(norms),), 2.0)})


@pytest.mark.parametrize(
    ("limit", "kept"),
    [("none", 5), ("auto", 5), ("10x", 4), ("2x", 3), ("2.9", 2), ("1e6", 5)],
)
def test_norms(limit: str, kept: int) -> None:
    uploads = made_up([1.0, 1.0, 2.2, 5.0, 100.0])
    failures = Failures(max_upload_norm=limit)
    assert failures.screened(uploads).clients.tolist() == list(range(kept))


def test_the_median_is_of_the_sound_ones() -> None:
    uploads = made_up([1.0, math.nan, math.inf, math.inf, 1.0, 11.0])
    assert Failures(max_upload_norm="10x").screened(uploads).clients.tolist() == [0, 4]


def test_one_huge_number_among_sound_tables_is_found() -> None:
    uploads = made_up([1.0, 1.0, 1.0])
    samples = torch.tensor([2.0, 2.0, 2e6])
    uploads = dataclasses.replace(uploads, tensors={**uploads.tensors, "samples": samples})
    assert Failures(max_upload_norm="10x").screened(uploads).clients.tolist() == [0, 1]


@pytest.mark.parametrize("text", ["0", "-1", "x", "10y", "nan", "inf", "1e999x", ""])
def test_a_limit_that_makes_no_sense(text: str) -> None:
    with pytest.raises(UsageError, match="--max-upload-norm must be"):
        Failures(max_upload_norm=text).check()


@pytest.mark.parametrize("name", ["dropout", "stragglers", "corrupt"])
def test_shares_that_make_no_sense(name: str) -> None:
    for value in (-0.1, 1.0):
        with pytest.raises(UsageError, match=f"--{name} must be 0 or more and under 1"):
            resolve([*FEDMF.split(), f"--{name}", str(value)])


class Overflowing(FedMF):
    """One client's upload is not finite though its loss is; no other sign of it."""

    def upload(self, held: Tensors, sent: Tensors, samples: torch.Tensor) -> Tensors:
        change = held["items"] - sent["items"]
        return {"items": torch.where(samples == samples.new_tensor(BUSIEST), change * math.inf, change)}


COUNTS = small_split().train_counts * 5
BUSIEST = float(COUNTS.max())


def test_an_upload_that_is_not_finite_is_rejected_without_being_asked_to() -> None:
    federation = federation_of(Overflowing(**{**SMALL, "clients_per_round": None}))
    federation.next_round()
    assert federation.counts["rejected"] == (COUNTS == BUSIEST).sum() >= 1
    assert federation.server["items"].isfinite().all()


# ---- runs ------------------------------------------------------------------------------------------------------------------

FAILING = "--dropout 0.3 --stragglers 0.1 --corrupt 0.05"


def test_counts_are_in_metrics_and_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"{FEDMF} -e 3 --rounds 6 {FAILING}"
    summary = carry_out(words, tmp_path / "r")
    lines = lines_of(tmp_path / "r")
    config = resolve(words.split())
    for line in lines:
        when, everybody = line["round"], np.arange(summary["clients"])
        cohort = config.failures.answering(everybody, 0, when)
        assert line["dropped"] == len(everybody) - len(cohort)
        assert line["stragglers"] == (config.failures.epochs(cohort, 0, when, 3) < 3).sum()
        assert line["rejected"] == (drawn(cohort, 0, when, "corrupt")[:, 0] < 0.05).sum()
    for name in ("dropped", "stragglers", "rejected"):
        assert summary[name] == sum(line[name] for line in lines) > 0
    assert summary["client_visits"] == 6 * summary["clients"] - summary["dropped"]
    assert f"{summary['dropped']:,} dropped" in capsys.readouterr().out
    assert "NaN" not in (tmp_path / "r" / "metrics.jsonl").read_text() and "null" not in (tmp_path / "r" / "metrics.jsonl").read_text()
    assert json.loads((tmp_path / "r" / "config.json").read_text())["dropout"] == 0.3


def test_without_failures_nothing_is_said_of_them(tmp_path: Path) -> None:
    summary = carry_out(FEDMF, tmp_path / "r")
    assert not {"dropped", "stragglers", "rejected"} & lines_of(tmp_path / "r")[0].keys()
    assert (summary["dropped"], summary["stragglers"], summary["rejected"]) == (0, 0, 0)
    assert resolve(FEDMF.split()).hash8() == resolve([*FEDMF.split(), "--dropout", "0"]).hash8()
    assert resolve(FEDMF.split()).hash8() != resolve([*FEDMF.split(), "--dropout", "0.1"]).hash8()


GROWING = """
from dataclasses import dataclass
from fedbench.algorithms.fedmf import FedMF

@dataclass(frozen=True)
class Growing(FedMF):
    def aggregate(self, server, uploads, draw):
        return {name: 1e15 * value for name, value in super().aggregate(server, uploads, draw).items()}
"""


@pytest.mark.parametrize("every", ["auto", "1", "never"])
def test_a_diverging_run_names_round_and_quantity_and_keeps_the_state_before(
    every: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """0.01 · 1e15³ is more than a float32 holds."""
    (tmp_path / "growing.py").write_text(GROWING)
    words = f"--algo {tmp_path / 'growing.py'} {DATA} --rounds 5 --dim 4 --no-mlflow --quiet --checkpoint-every {every}"
    assert cli.main([*words.split(), "--out", str(tmp_path / "r")]) == 1
    assert "fedbench: error: the server's items is not finite in round 3: training diverged" in capsys.readouterr().err
    assert len(lines_of(tmp_path / "r")) == 2 and not (tmp_path / "r" / "summary.json").exists()
    state = checkpoint.newest(tmp_path / "r")
    if every == "never":
        assert state is None
        return
    config = resolve(words.split())
    federation = Federation.start(config.algorithm, prepare.prepare(config.dataset, config.protocol, config.data)[0], 0)
    federation.next_round()
    federation.next_round()
    assert state is not None and state.facts["round"] == 2
    kept = {name: value for name, value in state.tensors("cpu").items() if name.startswith(("server/", "client/"))}
    assert_same(kept, federation.state(), 0)


def test_a_loss_that_is_not_finite_names_the_user() -> None:
    federation = federation_of(FedMF(**{**SMALL, "clients_per_round": None}))
    federation.store.tensors["user"][5] = math.nan
    with pytest.raises(Diverged, match=r"the training loss of 1 of 24 clients \(the first is user 5\) is not finite in round 1"):
        federation.next_round()


def test_a_run_with_failures_goes_on_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = f"{FEDMF} -e 3 --rounds 5 {FAILING} --checkpoint-every 2"
    expected = carry_out(words, tmp_path / "steady")
    with monkeypatch.context() as patch:
        patch.setattr(Federation, "next_round", failing_after(3, Federation.next_round))
        assert cli.main([*words.split(), "--out", str(tmp_path / "r")]) == 1
    assert checkpoint.rounds(tmp_path / "r") == [2]
    assert result(carry_out(words, tmp_path / "r")) == result(expected) == result(summary_of(tmp_path / "r"))


def failing_after(round_: int, work: Any) -> Any:
    def call(self: Federation) -> Any:
        if self.round == round_:
            raise OSError("the machine is unwell")
        return work(self)

    return call


def test_without_a_server_clients_are_sent_what_it_starts_with() -> None:
    """Round for round the samples of a run with a server, trained from the first table; bytes are counted as ever."""
    heard, deaf = (Federation.start(FedMF(**SMALL), small_split(), SEED, failures=how) for how in (Failures(), Failures(no_server=True)))
    first = {name: value.clone() for name, value in deaf.server.items()}
    for _ in range(3):
        heard.next_round(), deaf.next_round()
    assert all(torch.equal(deaf.server[name], value) for name, value in first.items())
    assert not torch.equal(heard.server["items"], first["items"])
    assert (deaf.bytes_up, deaf.bytes_down) == (heard.bytes_up, heard.bytes_down) and deaf.bytes_up > 0
    alone = FedMF(**SMALL)
    store = ClientStore(alone, deaf.engine.world, Draw(SEED, 0, None))
    for when in (1, 2, 3):
        Engine(alone, deaf.engine.world, SEED).run_cohort(first, store, deaf.samples(when), when)
    assert_same(dict(deaf.store.tensors), dict(store.tensors), 1e-6, "clients")


def test_ties_are_at_chance_without_a_server() -> None:
    """FedEASE scores all items alike then: with ties against the held-out item nobody would hit."""
    split = small_split(400, 240, 20)
    federation = Federation.start(FedEASE(), split, SEED, failures=Failures(no_server=True), kernel="off")
    federation.next_round()
    for ranks in (*federation.sampled_ranks().values(), *federation.full_ranks().values()):
        assert len(np.unique(ranks)) > 50
    assert abs(from_chance(federation.sampled_ranks()["test"], split.test_item, split.chance(10)).errors) < 3
    federation.evaluator.settles_ties = None
    assert (federation.sampled_ranks()["test"] == 100).all()


def test_settled_ties_keep_the_order_of_scores() -> None:
    evaluator = Evaluator(FedMF(), small_split(), "cpu", settles_ties=1)
    scores = torch.tensor([[0.5, 0.5, -1.0, 2.0, 0.5, math.nan]]).repeat(3, 1)
    places = evaluator.settled(scores, np.arange(3))
    assert (places[:, 2] == 0).all() and (places[:, 3] == 4).all() and places[:, 5].isnan().all()
    assert all(sorted(row[[0, 1, 4]].tolist()) == [1, 2, 3] for row in places) and len({tuple(row.tolist()[:5]) for row in places}) > 1
    assert torch.equal(evaluator.settled(scores[1:2], np.array([1])).nan_to_num(), places[1:2].nan_to_num())


def test_the_error_of_a_control_knows_clients_with_one_item() -> None:
    """1,000 clients with 10 items between them that hit or miss together are 10 tosses of a coin, not 1,000."""
    items = np.repeat(np.arange(10), 100)
    ranks = np.where(items < 2, 1, 50)
    found = from_chance(ranks, items, 0.1)
    assert found.hit == 0.2 and math.isclose(found.error, math.sqrt(2 * 0.09**2 + 8 * 0.01**2))
    assert found.errors < 1 and not found.leaks
    apart = from_chance(ranks, np.arange(1000), 0.1)
    assert apart.leaks and math.isclose(apart.error, math.sqrt(200 * 0.9**2 + 800 * 0.1**2) / 1000)


def test_a_run_without_a_server_is_marked_and_has_a_hash_of_its_own(tmp_path: Path) -> None:
    flags = ["--algo", "fedmf", "--dataset", "synthetic"]
    usual, control = resolve(flags), resolve([*flags, "--no-server"])
    assert "no_server" not in usual.identity() and control.identity()["no_server"] is True
    assert usual.digest() != control.digest()
    assert cli.main([*FEDMF.split(), "--no-server", "--out", str(tmp_path / "run")]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["control"]["what"] == "no server" and summary["notes"][0].startswith("CONTROL: the server never learnt")
    assert not any("popularity" in note for note in summary["notes"])


def test_a_centralised_method_has_no_server_to_leave_out() -> None:
    with pytest.raises(UsageError, match="--no-server is for federated methods; central_mf has all data in one place"):
        resolve(["--algo", "central_mf", "--dataset", "synthetic", "--no-server"])
