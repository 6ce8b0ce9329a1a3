"""What holds for every algorithm, as tests: a plug-in's author derives from `AlgorithmTests`, and `python -m fedbench check` runs them.

    from fedbench.testing.algorithm_tests import AlgorithmTests

    class TestMine(AlgorithmTests):
        algorithm = Mine()

pytest finds the rest. Nothing here needs pytest. A test that fails raises AssertionError with one line: what, by how much, what to do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from unittest import SkipTest

import numba
import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedbench.contract.algorithm import Algorithm, Batch, Tensors
from fedbench.contract.randomness import Draw
from fedbench.contract.uploads import Rows
from fedbench.data.split import Split
from fedbench.evaluation.metrics import metrics_of
from fedbench.evaluation.significance import from_chance
from fedbench.experiment import checkpoint, run_state
from fedbench.experiment.summary import Best
from fedbench.settings.config import RunConfig
from fedbench.simulation.client_store import ClientStore
from fedbench.simulation.engine import Engine
from fedbench.simulation.failures import Failures
from fedbench.simulation.federation import Federation
from fedbench.simulation.sending import sent_whole
from fedbench.testing.small_federation import (
    ROUNDS,
    SEED,
    Differs,
    assert_same,
    assert_same_trace,
    by_engine,
    by_loop,
    drawn,
    flat,
    samples_of,
    small_instance,
    small_world,
    split_of,
)

MANY = (400, 240, 20)
"""users, items and interactions a user, where quality and chance are measured"""
PADDING = "padding is counted: weigh samples by batch.weight and held rows by batch.rows, and divide by their sums"
APART = "a client's numbers depend on more than its own tensors: use only the arguments, self's fields and self.context"
WAITS = (
    "item",
    "tolist",
    "numpy",
    "__bool__",
    "__float__",
    "__int__",
    "__index__",
    "__array__",
    "cpu",
    "nonzero",
    "masked_select",
    "unique",
)
"""functions of a tensor that wait for the device, or whose shape depends on its values"""


class AlgorithmTests:
    """What holds for every algorithm."""

    algorithm: ClassVar[Algorithm]
    """the algorithm, at any settings; it is tested with few epochs and small batches"""
    algorithms: ClassVar[tuple[Algorithm, ...]] = ()
    """or several instances, tested as they are: take a `clients_per_round` of 17 of the 24 clients, small batches and few epochs"""
    band: ClassVar[tuple[float, float] | None] = None
    """where test HR@10 (chance .10), or RMSE, must lie on planted tastes after `quality_rounds` rounds; not looked at if None"""
    quality: ClassVar[dict[str, Any]] = {}
    """fields that the quality test sets"""
    quality_rounds: ClassVar[int] = 3
    tolerance: ClassVar[float] = 1e-9
    """how far the loop's numbers may be from the engine's in float64, as a share of a number and as a number"""
    may_leave: ClassVar[tuple[str, ...]] = ()
    """private tensors that upload may show, with the reason in the algorithm's file"""

    @classmethod
    def instances(cls) -> tuple[Algorithm, ...]:
        return cls.algorithms or (small_instance(cls.algorithm),)

    @classmethod
    def cases(cls, test: Callable[..., None]) -> list[dict[str, Any]]:
        """What a test is called with: the first instance by its kernels, for each takes seconds to compile; where arithmetic is tested, all
        instances without too."""
        instances, wanted = cls.instances(), test.__code__.co_varnames[: test.__code__.co_argcount]
        if "kernel" not in wanted:
            return [{"algorithm": one} for one in instances] if "algorithm" in wanted else [{}]
        # float32 by kernel is what a run compares with the method's own code before it trains
        # and blocks hold no clients that kernels train where their state lies
        without = ("test_float32_stays_finite", "test_failures_leave_everything_finite", "test_block_size_does_not_matter")
        pairs = [(instances[0], "off" if test.__name__ in without else "auto")]
        if test.__name__ == "test_equals_the_loop":
            pairs += [(one, "off") for one in instances]
        return [{"algorithm": one, "kernel": kernel} for one, kernel in pairs]

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """pytest's hook."""
        cases = self.cases(metafunc.function)
        names = tuple(cases[0])
        if names:
            labels = [",".join([described(case["algorithm"]), *([case["kernel"]] if "kernel" in case else [])]) for case in cases]
            metafunc.parametrize(names, [tuple(case.values()) for case in cases], ids=labels)

    # ---- arithmetic --------------------------------------------------------------------------------------------------
    def test_equals_the_loop(self, algorithm: Algorithm, kernel: str) -> None:
        """All clients at once give the numbers of one client after another, by torch.optim, in float64."""
        of_clients(algorithm)
        found, expected = by_engine(algorithm, kernel=kernel), by_loop(algorithm)
        try:
            assert_same_trace(found, expected, self.tolerance)
        except Differs as error:
            raise Differs(f"{error}; {self.cause(algorithm, kernel)}") from None

    def cause(self, algorithm: Algorithm, kernel: str) -> str:
        """Why all clients at once are not as one after another: each in a block of its own has no padding."""
        if kernel == "auto":
            return "the kernel that was derived from the loss does something else: please report it; --kernel off runs the code itself"
        try:
            assert_same_trace(by_engine(algorithm, kernel=kernel, block_rows=1), by_loop(algorithm), self.tolerance)
        except Differs:
            return APART
        return PADDING

    def test_stragglers_equal_the_loop(self, algorithm: Algorithm, kernel: str) -> None:
        """So do clients that finish less than all epochs."""
        of_clients(algorithm)
        if algorithm.local_epochs < 2:
            raise SkipTest("one local epoch cannot be cut short")
        count = len(samples_of(algorithm, 1).clients)
        epochs = 1 + np.arange(count) % algorithm.local_epochs
        found = by_engine(algorithm, kernel=kernel, epochs=epochs)
        assert_same_trace(found, by_loop(algorithm, tuple(epochs.tolist())), self.tolerance, "local work must follow self.local_epochs")

    def test_block_size_does_not_matter(self, algorithm: Algorithm, kernel: str) -> None:
        """How many clients are computed at once changes no number."""
        of_clients(algorithm)
        metrics, traces = [], []
        for block_rows in (300, 5000, 1 << 30):
            how = {"dtype": torch.float64, "kernel": kernel, "block_rows": block_rows}
            federation = Federation.start(algorithm, split_of(algorithm), SEED, **how)  # type: ignore[arg-type]
            for _ in range(ROUNDS):
                federation.next_round()
            metrics.append(torch.tensor([*on_test(federation).values()]))
            traces.append(by_engine(algorithm, kernel=kernel, block_rows=block_rows))
        for other, its_metrics in zip(traces[1:], metrics[1:], strict=True):
            assert_same_trace(other, traces[0], 1e-9, PADDING)
            assert_same({"metrics": its_metrics}, {"metrics": metrics[0]}, 1e-6, "blocks of another size", PADDING)

    def test_thread_count_does_not_matter(self, algorithm: Algorithm, kernel: str) -> None:
        """One CPU thread and two give the same numbers."""
        of_clients(algorithm)
        most = int(numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
        traces, before = [], (torch.get_num_threads(), numba.get_num_threads())
        try:
            for threads in (1, min(2, most)):
                torch.set_num_threads(threads)
                numba.set_num_threads(threads)
                traces.append(by_engine(algorithm, kernel=kernel))
        finally:
            torch.set_num_threads(before[0])
            numba.set_num_threads(before[1])
        assert_same_trace(traces[1], traces[0], 1e-9, APART)

    def test_order_of_the_cohort_does_not_matter(self, algorithm: Algorithm, kernel: str) -> None:
        """A client's numbers do not depend on who stands beside it."""
        of_clients(algorithm)
        world, split, draw = small_world(algorithm), split_of(algorithm), Draw(SEED, 0, None, torch.float64)
        engine = Engine(algorithm, world, SEED, dtype=torch.float64, kernel=kernel)
        for size in (17, world.clients):
            mixed = np.random.default_rng(0).permutation(size)
            results = []
            for clients in (np.arange(size), mixed):
                store, samples = ClientStore(algorithm, world, draw), drawn(split, clients, algorithm, 1)
                results.append((engine.run_cohort(algorithm.init_server(world, draw), store, samples, 1), store.tensors))
            (expected, kept), (found, kept_mixed) = results
            assert_same(kept_mixed, kept, 1e-12, "what clients keep", APART)
            assert_same({"loss": found.loss}, {"loss": expected.loss[mixed]}, 1e-12, "", APART)
            for name, value in expected.uploads.tensors.items():
                if isinstance(value, Rows):
                    summed = found.uploads.rows(name).combine(world.items, "sum")
                    assert_same({name: summed}, {name: value.combine(world.items, "sum")}, 1e-12, "uploads", APART)
                else:
                    there = expected.uploads.dense(name)[mixed]
                    assert_same({name: found.uploads.dense(name)}, {name: there}, 1e-12, "uploads", APART)

    def test_float32_stays_finite(self, algorithm: Algorithm, kernel: str) -> None:
        """No number of a few rounds in float32 is NaN or infinite."""
        of_clients(algorithm)
        found = by_engine(algorithm, torch.float32, kernel=kernel)
        for tensors in (found.store, found.server, *found.uploads, {"loss": torch.stack(found.losses)}):
            must_be_finite(tensors, "lower the learning rate, or clip")

    # ---- functions of one client -------------------------------------------------------------------------------------
    def test_works_row_by_row(self, algorithm: Algorithm) -> None:
        """`receive`, `upload` and `score` give for some rows of the tables, in another order, what they give for all rows."""
        of_clients(algorithm)
        own, sent = self.a_client(algorithm)
        rows = torch.randperm(small_world(algorithm).items, generator=torch.Generator().manual_seed(0))[:23]

        def picked(tensors: Tensors) -> Tensors:
            return {name: value[rows] if name in algorithm.tables else value for name, value in tensors.items()}

        hint = "a row of the result may depend on that row of the tables alone"
        assert_same(algorithm.receive(picked(own), picked(sent)), picked(algorithm.receive(own, sent)), 1e-5, "receive on some rows", hint)
        for name in ("score", *(f"score_{reading}" for reading in algorithm.scores)):
            score = getattr(algorithm, name)
            whole, some = score(own, sent), score(picked(own), picked(sent))
            if whole.shape != (small_world(algorithm).items,) or some.shape != (len(rows),):
                raise Differs(f"{name} gave {list(whole.shape)} and {list(some.shape)} for 60 and 23 item rows; give one number a row")
            assert_same({name: some}, {name: whole[rows]}, 1e-5, f"{name} of some rows", hint)

    def test_private_state_never_shows_in_upload(self, algorithm: Algorithm) -> None:
        """Other private tensors give the same upload: nothing private leaves the device, unless `may_leave` names it."""
        of_clients(algorithm)
        own, sent = self.a_client(algorithm, trained=False)
        held = algorithm.receive(own, sent)
        private = own.keys() | (held.keys() - sent.keys() if algorithm.reconstructs else set())
        samples = torch.tensor(40.0)

        def seen(held: Tensors) -> Tensors:
            """What the server sees of one client: not what it gets only as a sum."""
            return {name: value for name, value in algorithm.upload(held, sent, samples).items() if name not in algorithm.summed}

        shown = seen(held)
        # an own table that is uploaded by its name is meant to travel; it may still not show in other names
        for name in sorted(private - set(self.may_leave) - ({*algorithm.own_tables} & shown.keys())):
            cure = f"keep {name!r} out of upload, or say that it may leave: may_leave = ({name!r},), check --may-leave {name}"
            if name in shown:
                raise Differs(f"upload sends {name!r}, which is private; {cure}")
            other = {**held, name: held[name] + torch.randn(held[name].shape, generator=torch.Generator().manual_seed(0))}
            assert_same(seen(other), shown, 0, f"upload with another {name!r}, which is private", cure)

    def test_no_step_waits_for_the_device(self, algorithm: Algorithm) -> None:
        """No .item(), no `if` on a tensor's value, no shape that depends on values, in what a client runs."""
        of_clients(algorithm)
        own, sent = self.a_client(algorithm, trained=False)
        label = torch.tensor([1.0, 0.0, 1.0])
        batch = Batch(torch.tensor([4, 2, 0]), label, torch.ones(3), torch.ones(small_world(algorithm).items))
        with Watch() as watch:
            held = watch.on("receive", algorithm.receive, own, sent)
            for stage in watch.on("stages", algorithm.stages, sent):
                if not stage.phases:
                    held = {**held, **watch.on("solve", algorithm.solve, held, sent, batch)}
                elif "loss" not in watch.seen:
                    watch.on("loss", algorithm.loss, held, sent, batch)
            watch.on("upload", algorithm.upload, held, sent, torch.tensor(3.0))
            watch.on("keep", algorithm.keep, held, sent)
        own, sent = self.a_client(algorithm)
        with watch:
            watch.on("score", algorithm.score, own, sent)

    def a_client(self, algorithm: Algorithm, trained: bool = True) -> tuple[Tensors, Tensors]:
        """What a client keeps (or rebuilt) after two rounds and is sent then; one that is sent something if anybody is."""
        federation = Federation.start(algorithm, split_of(algorithm), SEED, kernel="off")
        federation.next_round()
        federation.next_round()
        answer = algorithm.at(2, small_world(algorithm)).answer(federation.server)
        client = torch.tensor([0]) if answer.slot is None else (answer.slot >= 0).nonzero()[0]
        store = federation.private() if trained else federation.store
        own = {name: value[0].clone() for name, value in store.read(client).items()}
        return own, {name: value[0] for name, value in sent_whole(answer, client).items()}

    # ---- rounds ------------------------------------------------------------------------------------------------------
    def test_resumes_bit_for_bit(self, algorithm: Algorithm, kernel: str, tmp_path: Path) -> None:
        """A third round after a checkpoint is that of a run without a stop."""
        config = RunConfig(algo=algorithm.name, algorithm=algorithm, dataset="synthetic")
        how: dict[str, Any] = {"dtype": torch.float64, "kernel": kernel}
        steady, stopped, fresh = (Federation.start(algorithm, split_of(algorithm), SEED, **how) for _ in range(3))
        for federation in (steady, stopped):
            federation.next_round()
            federation.next_round()
        run_state.save(tmp_path, stopped, Best(), config)
        state = checkpoint.newest(tmp_path)
        if state is None:
            raise Differs("the state after two rounds could not be written and read; keep only tensors")
        run_state.restore(state, fresh, Best())
        expected, found = steady.next_round(), fresh.next_round()
        hint = "all that lasts must be in the tensors of server or client"
        assert_same(fresh.store.tensors, steady.store.tensors, 0, "what clients keep after a resume", hint)
        assert_same(fresh.server, steady.server, 0, "the server after a resume", hint)
        there = {"loss": expected.loss, **flat(expected.uploads)}
        assert_same({"loss": found.loss, **flat(found.uploads)}, there, 0, "the round after a resume", hint)
        if fresh.round != 3 or (fresh.visits != steady.visits).any() or fresh.bytes_up != steady.bytes_up:
            raise Differs(f"after a resume round {fresh.round}, {fresh.bytes_up} bytes up; undisturbed 3, {steady.bytes_up}")

    def test_a_round_that_nobody_answers_changes_nothing(self, algorithm: Algorithm) -> None:
        """If all clients of a round drop out, server and clients stay as they are."""
        of_clients(algorithm)
        federation = Federation.start(algorithm, split_of(algorithm), SEED)
        federation.next_round()
        before = {name: value.clone() for name, value in tensors_of(federation).items()}
        facts = federation.bytes_up, federation.bytes_down, federation.visits.tolist()
        federation.failures = Failures(dropout=1.0)
        chosen = len(federation.chosen(2))
        result = federation.next_round()
        assert_same(tensors_of(federation), before, 0, "after a round that nobody answered", "the engine, not the algorithm, is wrong")
        if facts != (federation.bytes_up, federation.bytes_down, federation.visits.tolist()) or result.updates:
            raise Differs("a round that nobody answered cost bytes, visits or updates")
        if federation.round != 2 or federation.counts["dropped"] != chosen:
            raise Differs(f"{federation.counts['dropped']} of {chosen} clients counted as dropped in a round that nobody answered")

    def test_failures_leave_everything_finite(self, algorithm: Algorithm, kernel: str) -> None:
        """Clients that drop out, finish less or send damaged uploads spoil nothing."""
        of_clients(algorithm)
        # fewer than half of so small a cohort are huge: no median could tell them otherwise
        federation = Federation.start(algorithm, split_of(algorithm), SEED, failures=Failures(0.3, 0.4, 0.2), kernel=kernel)
        asked = 0
        for when in range(1, ROUNDS + 1):
            asked += len(federation.chosen(when))
            must_be_finite({"loss": federation.next_round().loss}, "`aggregate` must bear damaged uploads that were not rejected")
        must_be_finite(tensors_of(federation), "`aggregate` must bear fewer clients than were asked")
        dropped, rejected = federation.counts["dropped"], federation.counts["rejected"]
        if dropped + federation.visits.sum() != asked:
            raise Differs(f"{dropped} dropped and {federation.visits.sum()} visits do not make all clients that were asked")
        if not rejected and federation.bytes_up:
            raise Differs("no damaged upload was rejected")

    def test_counts_the_bytes_that_travel(self, algorithm: Algorithm) -> None:
        """The bytes up are those of what `upload` returns, as `bits` and `travels_whole` say."""
        of_clients(algorithm)
        world, draw = small_world(algorithm), Draw(SEED)
        server, store, samples = algorithm.init_server(world, draw), ClientStore(algorithm, world, draw), samples_of(algorithm, 1)
        now = algorithm.at(1, world)
        own = {name: value[0] for name, value in store.tensors.items()}
        answer = now.answer(server)
        told = answer.slot is not None and int(answer.slot[0]) >= 0 or answer.slot is None and answer.shared
        sent = {name: value[0] for name, value in sent_whole(answer, torch.tensor([0])).items()} if told else {}
        held, received = now.receive(own, sent), sent
        for stage in now.stages(received):
            if not stage.phases:
                one = Batch(torch.zeros(1, dtype=torch.long), torch.ones(1), torch.ones(1), torch.ones(world.items))
                held = {**held, **now.solve(held, received, one)}
        expected = sum(
            upload_bytes(algorithm, name, value, samples.touched) for name, value in now.upload(held, received, torch.tensor(1.0)).items()
        )
        result = Engine(algorithm, world, SEED).run_cohort(server, store, samples, 1)
        if result.uploads.bytes() != expected:
            raise Differs(f"{result.uploads.bytes()} bytes up were counted, {expected} travel; look at bits and travels_whole")

    # ---- what is learnt ----------------------------------------------------------------------------------------------
    def test_without_a_server_it_is_at_chance(self, algorithm: Algorithm) -> None:
        """With --no-server clients know nothing of held-out items: a score above chance is a leak."""
        if not algorithm.federated:
            raise SkipTest("a centralised method is nothing without its server")
        split = split_of(algorithm, *MANY)
        if split.held:
            raise SkipTest("ratings have no level of chance")
        federation = Federation.start(self.full_size(algorithm), split, SEED, failures=Failures(no_server=True), kernel="off")
        for _ in range(ROUNDS):
            federation.next_round()
        ranks = federation.sampled_ranks()
        found = from_chance(
            np.concatenate([ranks["val"], ranks["test"]]), np.concatenate([split.val_item, split.test_item]), split.chance(10)
        )
        if found.leaks:
            raise Differs(
                f"without a server it is above chance: {found}: something knows the held-out items; look at extra, init_client and score"
            )

    def test_quality(self, algorithm: Algorithm) -> None:
        """The result on planted tastes is where `band` says."""
        if self.band is None:
            raise SkipTest("no band is given: band = (low, high) of HR@10 or RMSE")
        split = split_of(algorithm, *MANY)
        settings = {"dim": 16, "batch_size": 256, "local_epochs": 3, "clients_per_round": None, **self.quality}
        federation = Federation.start(replace(algorithm, **settings), split, SEED, kernel="off")
        for _ in range(self.quality_rounds):
            federation.next_round()
        what = "rmse" if split.held else "hr_10"
        low, high = self.band
        if not low <= (found := on_test(federation)[what]) <= high:
            raise Differs(f"{what} is {found:.3f} after {self.quality_rounds} rounds on planted tastes; the band is {low:g} to {high:g}")

    def full_size(self, algorithm: Algorithm) -> Algorithm:
        """With all clients in every round."""
        return replace(algorithm, clients_per_round=None, batch_size=max(algorithm.batch_size, 256))


class Watch(TorchFunctionMode):
    """Finds functions that wait for the device, in the one that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        by_mask = name == "__getitem__" and isinstance(args[1], Tensor) and args[1].dtype == torch.bool
        if self.seen and (name in WAITS or by_mask):
            what = "picks by a mask" if by_mask else f"calls {name.strip('_')}() of a tensor"
            raise Differs(f"{self.seen[-1]} {what}, which waits for the device; use torch.where, or multiply with a mask")
        return function(*args, **(kwargs or {}))

    def on(self, name: str, function: Callable[..., Any], *given: Any) -> Any:
        self.seen.append(name)
        return function(*given)


def of_clients(algorithm: Algorithm) -> None:
    """Skip what means nothing to a method that has all data in one place."""
    if not algorithm.federated:
        raise SkipTest("a centralised method has no clients")


def described(algorithm: Algorithm) -> str:
    """What sets an instance apart from its class's defaults, small sizes aside."""
    plain = {**vars(type(algorithm)()), **vars(small_instance(type(algorithm)())), "dim": 8, "adapter": (16, 8, 1), "layers": (12, 6, 4)}
    said = [f"{name}={value}" for name, value in vars(algorithm).items() if name in plain and value != plain[name]]
    return ",".join(said) or "default"


def tensors_of(federation: Federation) -> Tensors:
    return {name: value for name, value in federation.state().items() if isinstance(value, Tensor)}


def on_test(federation: Federation) -> dict[str, float]:
    split: Split = federation.split
    return metrics_of(split, federation.outcome())["test"]


def must_be_finite(tensors: Tensors, hint: str) -> None:
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise Differs(f"{name} is not finite after a few rounds; {hint}")


def upload_bytes(algorithm: Algorithm, name: str, value: Tensor, touched: np.ndarray) -> int:
    """Of one name over the cohort, from one client's upload; `touched` [n]: rows that each client touches."""
    world, clients, rows = small_world(algorithm), len(touched), int(touched.sum())
    bits = 64 if name in algorithm.summed else algorithm.bits(world).get(name, 32)
    whole, table = algorithm.travels_whole(world), name in algorithm.tables
    row = math.ceil(math.prod(value.shape[1:]) * bits / 8)
    if name in algorithm.paired:
        masked = name in algorithm.summed
        return sum(row * len(np.triu_indices(world.items if masked else n)[0]) + (0 if masked else 4 * int(n)) for n in touched)
    if name in whole:
        return clients * whole[name] * (row if table else math.ceil(value.numel() * bits / 8))
    if table and name not in algorithm.own_tables:
        return rows * (row + 4)
    return clients * math.ceil(value.numel() * bits / 8)
