"""The engine: how a cohort is cut and packed, and that nothing inside a step waits for the device or leaves it."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedbench.algorithms.fedavg_ncf import FedAvgNCF
from fedbench.algorithms.fedem import FedEM
from fedbench.algorithms.fedmf import FedMF
from fedbench.algorithms.local import Local
from fedbench.contract.algorithm import Algorithm, Answer, Batch, Phase, Tensors, World
from fedbench.contract.randomness import Draw, keys
from fedbench.data.sampling import Samples, sample_round
from fedbench.kernels.shuffling import orders
from fedbench.kernels.threads import share_out
from fedbench.simulation import client_store as store_file
from fedbench.simulation.blocks import ArrayPool, Block, blocks, pack
from fedbench.simulation.client_store import ClientStore
from fedbench.simulation.engine import Engine
from fedbench.simulation.federation import Federation
from fedbench.simulation.generic import vmapped
from fedbench.simulation.sending import bytes_down, sent_rows
from fedbench.testing import loop_engine
from tests.conftest import small_split, without_samples

SMALL: dict[str, Any] = {"dim": 8, "batch_size": 32, "local_epochs": 3}
FEDEM = FedEM(**SMALL, adapter=(16, 8, 1))
SYNCS = {
    "_local_scalar_dense",
    "item",
    "nonzero",
    "nonzero_numpy",
    "equal",
    "is_nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
}
"""operations whose result the host has to wait for"""


class Watch(TorchDispatchMode):
    """Counts host syncs, and the tensors that an operation makes on another device than `device`."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.syncs: list[str] = []
        self.strays: list[str] = []
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operations += 1
        name = func.overloadpacket.__name__
        made = {leaf.device.type for leaf in tree_leaves(out) if isinstance(leaf, Tensor)}
        given = {leaf.device.type for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        masks = "index" in name and any(leaf.dtype == torch.bool for leaf in tree_leaves(args[1:2]) if isinstance(leaf, Tensor))
        leaves = name in ("_to_copy", "copy_") and self.device in given and made == {"cpu"} != {self.device}
        if name in SYNCS or masks or leaves:
            self.syncs.append(name)
        if made - {self.device}:
            self.strays.append(name)
        return out


def one_block(algorithm: Algorithm, device: str = "cpu") -> tuple[Engine, Block, Tensors, Tensors]:
    """A block whose clients were sent something, and what they hold, on `device`."""
    parts = small_split()
    world = World(parts.clients, parts.items)
    samples = without_samples(sample_round(parts, np.arange(parts.clients), algorithm.negatives, 0, 1), 4)
    stream, halves = keys(0, 1, "shuffle", samples.clients), keys(0, 1, "halves", samples.clients)
    block = pack(samples, np.arange(12), stream, halves, True, torch.float32, device, algorithm.local_epochs)
    draw = Draw(0, device=device)
    own = {
        name: value[block.clients[:, None], block.rows] if name in algorithm.tables else value[block.clients]
        for name, value in ClientStore(algorithm, world, draw).tensors.items()
    }
    table = torch.randn(world.items, algorithm.dim, device=device)
    sent = sent_rows(Answer(shared={"items": table}), block.clients, block.rows, algorithm.tables)
    engine = Engine(algorithm, world, 0, device, kernel="off")
    return engine, block, vmapped(algorithm.receive, own, sent), sent


def watched(algorithm: Algorithm, device: str) -> Watch:
    """What one block's generic training does."""
    engine, block, held, sent = one_block(algorithm, device)
    # a shuffle is made on the host and moved: the one transfer that an epoch is allowed
    shuffles = [block.order(epoch, algorithm.batch_size) for epoch in range(algorithm.local_epochs)]
    moved = _Shuffled(**{**vars(block), "shuffles": shuffles})
    with Watch(device) as watch:
        engine.train_generic(moved, held, sent, algorithm.stages(sent)[0])
    assert watch.operations > 100
    return watch


class _Shuffled(Block):
    """A block whose shuffles are on the device already."""

    def __init__(self, shuffles: list[Tensor], **fields: Any) -> None:
        super().__init__(**fields)
        object.__setattr__(self, "shuffles", shuffles)

    def order(self, epoch: int, batch: int) -> Tensor:
        return self.shuffles[epoch]  # type: ignore[attr-defined]


class ClippedFedMF(FedMF):
    """With a norm and decay in every step."""

    def phases(self, sent: Tensors) -> tuple[Phase, ...]:
        return (Phase(("user", "items"), 0.05, "adamw", weight_decay=0.7, clip=0.03),)


LEARNERS = [FedMF(**SMALL), Local(**SMALL, stop_below=0.05), FEDEM, FedEM(**SMALL, merge="static"), ClippedFedMF(**SMALL)]


@pytest.mark.parametrize("algorithm", LEARNERS, ids=lambda one: one.name)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_step_never_waits_for_the_device_nor_leaves_it(algorithm: Algorithm, device: str) -> None:
    watch = watched(algorithm, device)
    assert watch.syncs == [] and watch.strays == []


class Waiting(FedMF):
    """Looks at a number in the middle of a step."""

    def loss(self, held: Tensors, sent: Tensors, batch: Batch) -> Tensor:
        return super().loss(held, sent, batch) * torch.ones(()).item()


class Straying(FedMF):
    """Makes a tensor without saying where."""

    def loss(self, held: Tensors, sent: Tensors, batch: Batch) -> Tensor:
        return super().loss(held, sent, batch) * torch.ones(())


class Masking(FedMF):
    """Picks by a mask, whose size only the device knows."""

    def loss(self, held: Tensors, sent: Tensors, batch: Batch) -> Tensor:
        return super().loss(held, sent, batch) * torch.ones(2)[torch.tensor([True, False])].sum()


def test_the_watch_sees_what_it_is_for() -> None:
    assert "_local_scalar_dense" in watched(Waiting(**SMALL), "cpu").syncs
    assert {"index", "nonzero"} & set(watched(Masking(**SMALL), "cpu").syncs)
    assert "ones" in watched(Straying(**SMALL), "meta").strays


def test_a_shuffle_is_moved_once() -> None:
    _, block, _, _ = one_block(FedMF(**SMALL), "meta")
    with Watch("meta") as watch:
        assert block.order(0, 32).device.type == "meta"
    assert watch.syncs == [] and watch.operations <= 2


def made_up(touched: list[int], counts: list[int]) -> Samples:
    """Samples of which only the sizes matter."""
    ptr, row_ptr = np.concatenate([[0], np.cumsum(counts)]), np.concatenate([[0], np.cumsum(touched)])
    none = np.zeros(0, np.int32)
    return Samples(np.arange(len(counts)), ptr, none, none.astype(np.float32), row_ptr, none)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 90), st.booleans()), min_size=1, max_size=40), st.integers(1, 300))
def test_blocks_hold_every_client_once_and_keep_their_size(clients: list[tuple[int, int, bool]], block_rows: int) -> None:
    touched, counts, sent = (list(column) for column in zip(*clients, strict=True))
    cut = list(blocks(made_up(touched, counts), np.array(sent), 32, block_rows))
    assert sorted(np.concatenate(cut).tolist()) == list(range(len(clients)))
    for block in cut:
        rows = len(block) * max(1, max(touched[c] for c in block))
        assert rows <= block_rows or len(block) == 1
        assert len({sent[c] for c in block}) == 1


def test_pack_keeps_every_sample_and_marks_the_padding() -> None:
    parts = small_split()
    samples = without_samples(sample_round(parts, np.arange(6), 4, 0, 1), 2)
    stream, halves = keys(0, 1, "shuffle", samples.clients), keys(0, 1, "halves", samples.clients)
    block = pack(samples, np.arange(6), stream, halves, False, torch.float64, "cpu", 1)
    flat = block.rows.reshape(-1)[block.valid].numpy()
    assert (flat == samples.row).all()
    for c in range(6):
        n = samples.counts[c]
        mine = slice(samples.ptr[c], samples.ptr[c + 1])
        assert (block.local[c, :n].numpy() == samples.local[mine]).all() and (block.label[c, :n].numpy() == samples.label[mine]).all()
        order = block.order(1, 32)[c].numpy()
        expected = np.empty(n, np.int64)
        orders(block.stream[c : c + 1], np.array([0, n]), 1, 32, expected)
        assert (order[:n] == expected).all() and (order[n:] == np.arange(n, block.local.shape[1])).all()


@pytest.mark.parametrize("kernel", ["auto", "off"])
def test_rows_that_no_sample_touches_never_move(kernel: str) -> None:
    parts = small_split()
    algorithm = Local(**SMALL)
    federation = Federation.start(algorithm, parts, 0, kernel=kernel)
    before = federation.store.tensors["items"].clone()
    samples = without_samples(sample_round(parts, np.arange(20), algorithm.negatives, 0, 1), 4)
    federation.engine.run_cohort({}, federation.store, samples, 1)
    touched = np.zeros((parts.clients, parts.items), bool)
    touched[np.repeat(samples.clients, samples.touched), samples.row] = True
    moved = (federation.store.tensors["items"] != before).any(dim=2).numpy()
    assert not moved[~touched].any() and moved[touched].all()
    assert not touched[4].any() and not touched[20:].any() and (~touched[0]).any()


@pytest.mark.parametrize("kernel", ["auto", "off"])
def test_clients_stop_at_the_epoch_where_the_loop_stops(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Epochs are read off the loop's shuffles; the running mean loss and the tables would differ after one epoch more or less."""
    parts = small_split()
    algorithm = Local(dim=8, batch_size=32, local_epochs=12, lr=0.05, stop_below=0.1)
    world, draw = World(parts.clients, parts.items), Draw(0, 0, None, torch.float64)
    samples = sample_round(parts, np.arange(parts.clients), algorithm.negatives, 0, 1)
    epochs: dict[int, int] = {}

    def counting(stream: np.ndarray, ptr: np.ndarray, epoch: int, batch: int, out: np.ndarray) -> None:
        epochs[int(stream[0])] = epoch + 1
        orders(stream, ptr, epoch, batch, out)

    monkeypatch.setattr(loop_engine, "orders", counting)
    kept = ClientStore(algorithm, world, draw).tensors
    _, losses = loop_engine.run_cohort(algorithm, world, {}, kept, samples, 0, 1)
    assert len(set(epochs.values())) > 2 and min(epochs.values()) < 12, "the clients must stop at different epochs"
    store = ClientStore(algorithm, world, draw)
    result = Engine(algorithm, world, 0, dtype=torch.float64, kernel=kernel).run_cohort({}, store, samples, 1)
    torch.testing.assert_close(result.loss, torch.tensor(losses, dtype=torch.float64), rtol=1e-9, atol=1e-9)
    for name, value in kept.items():
        torch.testing.assert_close(store.tensors[name], value, rtol=1e-9, atol=1e-9)


class Twice(FedMF):
    """Two phases, one of them plain gradient descent."""

    def phases(self, sent: Tensors) -> tuple[Phase, ...]:
        return Phase(("user",), 0.05, "sgd"), Phase(("items",), 0.05)


class Clipped(FedMF):
    """A norm over two names. The penalty gives every row that is held a gradient, padding too."""

    def phases(self, sent: Tensors) -> tuple[Phase, ...]:
        return (Phase(("user", "items"), 0.05, "adamw", weight_decay=0.7, clip=0.03),)

    def loss(self, held: Tensors, sent: Tensors, batch: Batch) -> Tensor:
        return super().loss(held, sent, batch) + 0.1 * (held["items"] ** 2).sum()


class ClippedSGD(Clipped):
    """Without Adam, whose steps hardly depend on a gradient's scale."""

    def phases(self, sent: Tensors) -> tuple[Phase, ...]:
        return Phase(("user",), 0.5, "sgd", clip=0.02), Phase(("items",), 0.5, "sgd", clip=0.03)


@pytest.mark.kernels
@pytest.mark.parametrize("kind", [pytest.param(Twice, marks=pytest.mark.long), Clipped, ClippedSGD])
def test_phases_with_their_own_optimizers_equal_the_loop(kind: type[FedMF]) -> None:
    parts = small_split()
    algorithm = kind(**SMALL, init_scale=0.5)
    world, draw = World(parts.clients, parts.items), Draw(0, 0, None, torch.float64)
    samples = sample_round(parts, np.arange(10), algorithm.negatives, 0, 1)
    server, store, kept = (
        algorithm.init_server(world, draw),
        ClientStore(algorithm, world, draw),
        ClientStore(algorithm, world, draw),
    )
    uploads, _ = loop_engine.run_cohort(algorithm, world, server, kept.tensors, samples, 0, 1)
    result = Engine(algorithm, world, 0, dtype=torch.float64).run_cohort(server, store, samples, 1)
    torch.testing.assert_close(store.tensors, kept.tensors, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(result.uploads.rows("items").value, uploads.rows("items").value, rtol=1e-9, atol=1e-9)


class Decaying(Local):
    """Its own table, with weight decay."""

    def phases(self, sent: Tensors) -> tuple[Phase, ...]:
        return (Phase(("user", "items"), 0.05, "adamw", weight_decay=0.7),)


@pytest.mark.kernels
def test_weight_decay_meets_the_rows_that_no_sample_touches() -> None:
    """Against torch.optim.AdamW on each client's whole table, one client after another."""
    parts = small_split()
    algorithm = Decaying(**SMALL)
    federation = Federation.start(algorithm, parts, 0, dtype=torch.float64)
    user, items = (federation.store.tensors[name].clone() for name in ("user", "items"))
    samples = without_samples(sample_round(parts, np.arange(parts.clients), algorithm.negatives, 0, 1), 4)
    federation.engine.run_cohort({}, federation.store, samples, 1)
    stream = keys(0, 1, "shuffle", samples.clients)
    for c in range(parts.clients):
        table, vector = items[c].clone().requires_grad_(), user[c].clone().requires_grad_()
        row = samples.row[samples.row_ptr[c] : samples.row_ptr[c + 1]]
        item = torch.from_numpy(row[samples.local[samples.ptr[c] : samples.ptr[c + 1]]].astype(np.int64))
        label = torch.from_numpy(samples.label[samples.ptr[c] : samples.ptr[c + 1]]).double()
        optimizer = torch.optim.AdamW([table, vector], lr=0.05, weight_decay=0.7)
        for epoch in range(algorithm.local_epochs if len(item) else 0):
            order = np.empty(len(item), np.int64)
            orders(stream[c : c + 1], np.array([0, len(item)]), epoch, algorithm.batch_size, order)
            for batch in torch.from_numpy(order).split(algorithm.batch_size):
                optimizer.zero_grad()
                torch.nn.functional.binary_cross_entropy_with_logits(table[item[batch]] @ vector, label[batch]).backward()
                optimizer.step()
        torch.testing.assert_close(federation.store.tensors["items"][c], table.detach(), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(federation.store.tensors["user"][c], vector.detach(), rtol=1e-9, atol=1e-9)
    kept = ClientStore(algorithm, federation.engine.world, Draw(0, 0, None, torch.float64)).tensors
    loop_engine.run_cohort(algorithm, federation.engine.world, {}, kept, samples, 0, 1)
    torch.testing.assert_close(federation.store.tensors, kept, rtol=1e-9, atol=1e-9)


@pytest.mark.kernels
@pytest.mark.parametrize(("kind", "dim"), [(FedMF, 35), pytest.param(FedEM, 5, marks=pytest.mark.long)])
def test_kernels_of_any_dimension_equal_the_generic_path(kind: type[Algorithm], dim: int) -> None:
    """Kernels take numbers by fours and rows by sixteens: whatever is left over counts as well."""
    given: dict[str, Any] = {"dim": dim, "batch_size": 24, "local_epochs": 2}
    if kind is FedEM:
        given["adapter"] = (2 * dim, 11, 1)
    found = []
    for kernel in ("auto", "off"):
        federation = Federation.start(kind(**given), small_split(), 0, dtype=torch.float64, kernel=kernel)
        for _ in range(3):
            federation.next_round()
        found.append(federation.state())
    torch.testing.assert_close(found[0], found[1], rtol=1e-7, atol=1e-9)


def test_room_is_used_again_once_nobody_holds_it() -> None:
    pool = ArrayPool()
    first = pool.empty("change", 320, np.float32)
    held = torch.from_numpy(pool.empty("change", 320, np.float32))
    assert first.shape == (320,) and not np.shares_memory(first, held.numpy())
    assert not np.shares_memory(first, pool.empty("row", 320, np.float32)), "another purpose has arrays of its own"
    place = first.ctypes.data
    del first
    again = pool.empty("change", 340, np.float32)
    assert again.ctypes.data == place and again.shape == (340,)
    assert not np.shares_memory(pool.empty("change", 40, np.float32), again), "two are held: a third is made"
    assert pool.empty("change", 40, np.float64).dtype == np.float64 and len(pool.kept["change"]) <= 2
    held[:] = 1
    assert not np.shares_memory(pool.empty("change", 320, np.float32), held.numpy())


def test_samples_that_are_held_stay_as_they_are() -> None:
    """Rounds draw into arrays of rounds before them, but not into those that somebody still has."""
    federation = Federation.start(FedMF(**SMALL), small_split(), 0)
    kept = federation.samples(1)
    before = [getattr(kept, name).copy() for name in ("local", "label", "row")]
    uploads = [federation.next_round().uploads.rows("items") for _ in range(3)]
    items = [rows.item.clone() for rows in uploads]
    federation.next_round()
    for name, value in zip(("local", "label", "row"), before, strict=True):
        assert np.array_equal(getattr(kept, name), value)
    for rows, item in zip(uploads, items, strict=True):
        assert torch.equal(rows.item, item)


@pytest.mark.kernels
@pytest.mark.parametrize(
    "algorithm",
    [pytest.param(FedAvgNCF(dim=32, local_epochs=2, lr=0.02, weight_decay=0.0, clip=0.0), marks=pytest.mark.long), FedMF(dim=8)],
    ids=lambda a: a.name,
)
def test_where_arrays_happen_to_lie_changes_nothing(algorithm: Algorithm) -> None:
    """The kernels' loops may run by vector or by scalar instructions, as the distance of two arrays tells them: with one result."""
    parts, between, first = small_split(users=120, items=200, interactions=15), [], None
    for repeat in range(4):
        federation = Federation.start(algorithm, parts, 0)
        result = federation.next_round()
        found = [result.loss, *federation.state().values()]
        first = first or found
        assert all(torch.equal(one, other) for one, other in zip(first, found, strict=True)), repeat
        between.append([np.empty(size, np.uint8) for size in range(40 + repeat, 4000, 97)])


@pytest.mark.long
@pytest.mark.skipif(shutil.which("gcc") is None, reason="torch.compile needs a C compiler")
def test_compiled_equals_eager() -> None:
    stores = []
    for compile_ in (False, True):
        federation = Federation.start(FedMF(**SMALL), small_split(), 0, dtype=torch.float64, kernel="off", compile=compile_)
        federation.next_round()
        federation.next_round()
        stores.append({**federation.store.tensors, "table": federation.server["items"]})
    torch.testing.assert_close(stores[1], stores[0], rtol=1e-9, atol=1e-9)


def test_bytes_down_counts_those_who_were_sent_something() -> None:
    assert bytes_down(Answer(), np.zeros(0)) == 0
    assert bytes_down(Answer(shared={"items": torch.zeros(7, 4), "bias": torch.zeros(3)}), np.ones(5)) == 5 * (7 * 4 + 3) * 4
    personal = Answer(personal={"items": torch.zeros(2, 7, 4, dtype=torch.float64)}, slot=torch.tensor([-1, 0, -1, 1, -1]))
    assert bytes_down(personal, np.ones(2)) == 2 * 7 * 4 * 8


@pytest.mark.parametrize("kernel", ["auto", "off"])
def test_counts_the_numbers_that_optimizers_moved(kernel: str) -> None:
    parts = small_split()
    samples = without_samples(sample_round(parts, np.arange(parts.clients), 4, 0, 1), 4)
    store = ClientStore(Local(**SMALL), World(parts.clients, parts.items), Draw(0))
    result = Engine(Local(**SMALL), World(parts.clients, parts.items), 0, kernel=kernel).run_cohort({}, store, samples, 1)
    steps = 3 * -(-samples.counts // 32)
    assert result.updates == (steps * (8 + 8 * samples.touched)).sum()


def test_bytes_down_of_rounds() -> None:
    parts = small_split()
    shared = Federation.start(FedMF(**SMALL, clients_per_round=10), parts, 0)
    assert shared.next_round().bytes_down == 10 * parts.items * 8 * 4
    a_table = parts.items * 8 * 4
    half = parts.clients // 2
    for floor, expected in ((0.0, half * a_table), (0.05, half * a_table + (parts.clients - half) * (a_table + 4))):
        personal = Federation.start(FedEM(**SMALL, adapter=(16, 8, 1), agg_ratio=0.5, floor=floor), parts, 0)
        assert personal.next_round().bytes_down == 0
        assert personal.next_round().bytes_down == expected


@pytest.mark.parametrize("make", [lambda: FEDEM, lambda: Local(**SMALL), lambda: FedEM(**SMALL, adapter=(16, 8, 1), same_start=False)])
def test_clients_start_alike_however_many_are_initialised_at_once(make: Callable[[], Algorithm], monkeypatch: pytest.MonkeyPatch) -> None:
    world, draw = World(24, 58), Draw(0)
    whole = ClientStore(make(), world, draw)
    monkeypatch.setattr(store_file, "CHUNK", 58 * 8 * 5)
    chunked = ClientStore(make(), world, draw)
    assert whole.tensors.keys() == chunked.tensors.keys()
    for name, value in whole.tensors.items():
        assert torch.equal(chunked.tensors[name], value)


def test_a_store_reads_and_writes_the_clients_asked_for() -> None:
    store = ClientStore(Local(**SMALL), World(6, 10), Draw(0))
    before = {name: value.clone() for name, value in store.tensors.items()}
    clients = torch.tensor([4, 1])
    assert torch.equal(store.read(clients)["user"], before["user"][[4, 1]])
    assert store.read(clients, whole=True)["items"] is store.tensors["items"]
    store.write(clients, "user", torch.zeros(2, 8))
    assert not store.tensors["user"][[1, 4]].any()
    assert torch.equal(store.tensors["user"][[0, 2, 3, 5]], before["user"][[0, 2, 3, 5]])


@pytest.mark.parametrize("kernel", ["auto", "off"])
@pytest.mark.parametrize("algorithm", [pytest.param(FEDEM, marks=pytest.mark.long), FedMF(**SMALL), Local(**SMALL)])
def test_a_store_of_some_clients_trains_them_as_a_store_of_all_does(algorithm: Algorithm, kernel: str) -> None:
    parts = small_split()
    world, draw = World(parts.clients, parts.items), Draw(0, dtype=torch.float64)
    some = range(7, 19)
    stores = [ClientStore(algorithm, world, draw), ClientStore(algorithm, world, draw, clients=some)]
    answered = {"tables": torch.rand(parts.clients, parts.items, 8, dtype=torch.float64), "slot": torch.arange(parts.clients)}
    server = answered if algorithm is FEDEM else algorithm.init_server(world, draw)
    samples = sample_round(parts, np.array(some), algorithm.negatives, 0, 1)
    engine = Engine(algorithm, world, 0, dtype=torch.float64, kernel=kernel)
    whole, part = (engine.run_cohort(server, store, samples, 1) for store in stores)
    torch.testing.assert_close(part.loss, whole.loss, rtol=1e-9, atol=1e-9)
    for name, value in stores[1].tensors.items():
        torch.testing.assert_close(value, stores[0].tensors[name][7:19], rtol=1e-9, atol=1e-9)
        assert len(value) == 12


@pytest.mark.parametrize("clients", [0, 1, 2, 7, 100])
@pytest.mark.parametrize("threads", [1, min(2, numba.config.NUMBA_NUM_THREADS)])
def test_clients_are_shared_out_over_threads(threads: int, clients: int) -> None:
    numba.set_num_threads(threads)
    visits = np.zeros(clients, np.int64)
    seen: set[int] = set()

    def kernel(low: int, high: int, by: int) -> None:
        assert low < high
        visits[low:high] += by
        seen.add(threading.get_ident())

    share_out(kernel, clients, 3)
    assert (visits == 3).all()
    assert (threading.get_ident() in seen) == (clients > 0 and min(threads, clients) == 1)


def test_what_fails_in_a_thread_is_raised() -> None:
    numba.set_num_threads(min(2, numba.config.NUMBA_NUM_THREADS))

    def kernel(low: int, high: int) -> None:
        if high == 9:
            raise ValueError("the last part")

    with pytest.raises(ValueError, match="the last part"):
        share_out(kernel, 9)
