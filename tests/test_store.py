"""Clients' state in files: the same numbers as in memory, only those that took part stored, and a checkpoint that fits both."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fedbench.algorithms.fedavg_ncf import FedAvgNCF
from fedbench.algorithms.fedem import FedEM
from fedbench.algorithms.fedmf import FedMF
from fedbench.algorithms.local import Local
from fedbench.commands import cli
from fedbench.contract.algorithm import Algorithm, World
from fedbench.contract.randomness import Draw
from fedbench.contract.storage import Disk, Memory, RowView
from fedbench.errors import FedbenchError
from fedbench.experiment import checkpoint, kept_model, run_state, saved_model
from fedbench.experiment.summary import Best
from fedbench.settings.config import RunConfig
from fedbench.simulation import client_store as store_file
from fedbench.simulation import workers
from fedbench.simulation.client_store import ClientStore
from fedbench.simulation.federation import Federation, world_of
from tests.test_engine import SMALL, small_split
from tests.test_run import lines_of, result, summary_of

FEDEM = FedEM(**{**SMALL, "clients_per_round": 7}, adapter=(16, 8, 1))
ALGORITHMS = {
    "fedem": FEDEM,
    "fedem, half aggregated": replace(FEDEM, agg_ratio=0.5),
    "fedem, static": replace(FEDEM, merge="static"),
    "local": Local(**{**SMALL, "clients_per_round": 7}),
    "fedmf": FedMF(**{**SMALL, "clients_per_round": 7}),
    "fedavg_ncf": FedAvgNCF(**{**SMALL, "clients_per_round": 7}, layers=(16, 8), sampling="uniform"),
}
each = pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS.keys())


def started(algorithm: Algorithm, folder: Path | None = None, kernel: str = "auto") -> Federation:
    where = {} if folder is None else {"client_store": "mmap", "folder": folder}
    return Federation.start(algorithm, small_split(), 0, kernel=kernel, **where)  # type: ignore[arg-type]


def held(federation: Federation) -> dict[str, Tensor]:
    """What every client keeps, and what the server keeps for each that it has something for."""
    everyone = torch.arange(federation.split.clients)
    found: dict[str, Tensor] = {}
    for name, tensor in federation.store.tensors.items():
        mapped = federation.store.kept is not None
        found[name] = torch.cat([federation.store.lend(u).read(u)[name] for u in everyone.split(1)]) if mapped else tensor
    server = dict(federation.server)
    if "slot" in server:
        slot = server.pop("slot")
        server |= {"has": slot >= 0, "tables": server["tables"][slot[slot >= 0]]}
    return found | {f"server/{name}": value for name, value in server.items()}


def assert_equal(found: Mapping[str, object], expected: Mapping[str, object]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert np.array_equal(np.asarray(found[name]), np.asarray(value)), name


BY_KERNEL = ("fedem", "fedmf")
"""a kernel takes seconds to compile; where rows lie is the same to all"""


@pytest.mark.parametrize(
    ("algorithm", "kernel"),
    [*((one, "off") for one in ALGORITHMS.values()), *((ALGORITHMS[name], "auto") for name in BY_KERNEL)],
    ids=[*(f"{name}-off" for name in ALGORITHMS), *(f"{name}-auto" for name in BY_KERNEL)],
)
def test_on_disk_as_in_memory(algorithm: Algorithm, kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, disk = started(algorithm, kernel=kernel), started(algorithm, tmp_path, kernel)
    monkeypatch.setattr(store_file, "CHUNK", 58 * 8 * 2)  # what is chunked and released often is the same
    for _ in range(4):
        expected, found = memory.next_round(), disk.next_round()
        assert torch.equal(found.loss, expected.loss)
        assert_equal(disk.sampled_ranks(), memory.sampled_ranks())
    assert_equal(disk.full_ranks(), memory.full_ranks())
    assert_equal(held(disk), held(memory))
    assert disk.store.kept is not None and (disk.store.kept == (memory.visits > 0)).all() and not disk.store.kept.all()


@each
def test_a_frozen_copy_stays_as_it_is(algorithm: Algorithm, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = started(algorithm)
    federation.next_round()
    frozen, expected, state = federation.frozen(), federation.full_ranks(), kept_model.copied(held(federation))
    assert frozen is not None
    federation.next_round()
    assert_equal(held(frozen), state)
    assert_equal(frozen.full_ranks(), expected)
    monkeypatch.setattr("fedbench.simulation.federation.FROZEN_BYTES", 1)
    assert federation.frozen() is None


def test_a_full_ranking_that_waits_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "--algo fedmf --dataset synthetic --users 60 --items 150 --interactions 12 --dim 4 --rounds 4 --no-mlflow --quiet --seed 3"
    assert cli.main([*words.split(), "--out", str(tmp_path / "waits")]) == 0
    monkeypatch.setattr("fedbench.simulation.federation.FROZEN_BYTES", 1)
    assert cli.main([*words.split(), "--out", str(tmp_path / "at-once")]) == 0
    assert result(summary_of(tmp_path / "waits")) == result(summary_of(tmp_path / "at-once"))
    assert (tmp_path / "waits/per_client.parquet").read_bytes() == (tmp_path / "at-once/per_client.parquet").read_bytes()


def test_only_those_that_took_part_are_stored(tmp_path: Path) -> None:
    """A table of 20,000 x 64 numbers for each of 50,000 clients would be 256 GB."""
    store = ClientStore(Local(dim=64), World(50_000, 20_000), Draw(0), Disk(tmp_path))
    assert store.tensors["items"].shape == (50_000, 20_000, 64)
    first = store.initial(np.array([49_999]))
    store.take_part(np.array([3, 49_999]))
    assert torch.equal(store.tensors["items"][49_999], first["items"][0])
    used = sum(os.fstat(file.fileno()).st_blocks * 512 for file, _ in store.room.files.values())  # type: ignore[attr-defined]
    assert 2 * store.client_bytes <= used < 3 * store.client_bytes
    assert list(tmp_path.iterdir()) == [], "nothing to be left behind"


def test_what_is_released_stays(tmp_path: Path) -> None:
    room = Disk(tmp_path)
    tensor = room.allocate((5, 3000), torch.float64, "cpu")
    tensor[2] = 7
    room.release()
    assert torch.equal(tensor[2], torch.full((3000,), 7.0, dtype=torch.float64)) and not tensor[[0, 1, 3, 4]].any()


@each
@pytest.mark.parametrize("there", ["memory", "disk"])
@pytest.mark.parametrize("here", ["memory", "disk"])
def test_a_checkpoint_of_one_fits_the_other(
    algorithm: Algorithm, there: str, here: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_file, "CHUNK", 58 * 8 * 2)
    config = RunConfig(algo=algorithm.name, algorithm=algorithm, dataset="synthetic")
    steady, stopped, fresh = (started(algorithm, tmp_path if kind == "disk" else None) for kind in ("memory", there, here))
    for _ in range(3):
        steady.next_round()
        stopped.next_round()
    run_state.save(tmp_path, stopped, Best(), config)
    stopped.next_round()  # the files go on, the checkpoint does not
    state = checkpoint.newest(tmp_path)
    assert state is not None
    run_state.restore(state, fresh, Best())
    for federation in (steady, fresh):
        federation.next_round()
    assert_equal(held(fresh), held(steady))
    assert_equal(fresh.full_ranks(), steady.full_ranks())


def test_a_checkpoint_has_only_those_that_took_part(tmp_path: Path) -> None:
    federation = started(FEDEM, tmp_path)
    federation.next_round()
    picked = federation.state()["client/items"]
    assert isinstance(picked, RowView) and picked.shape == (7, federation.split.items, 8)
    run_state.save(tmp_path, federation, Best(), RunConfig(algo="fedem", algorithm=FEDEM, dataset="synthetic"))
    saved = checkpoint.read(tmp_path, "round-1").tensors("cpu")
    assert torch.equal(saved["clients"], torch.from_numpy(np.flatnonzero(federation.visits)))
    assert torch.equal(saved["client/items"], federation.store.tensors["items"][saved["clients"]])


def test_auto_asks_how_much_memory_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = small_split()
    world, draw = world_of(parts), Draw(0)
    everybody = parts.clients * sum(
        value.numel() for value in Local(dim=8).init_client(world, replace(draw, clients=np.arange(1))).values()
    )
    for free, ranks_here, kind in ((4 * everybody, 1, Memory), (4 * everybody - 1, 1, Disk), (4 * everybody, 2, Disk)):
        monkeypatch.setattr(store_file, "free_memory", lambda free=free: free)
        monkeypatch.setattr(workers, "on_this_machine", lambda ranks_here=ranks_here: ranks_here)
        assert type(Federation.start(Local(dim=8), parts, 0, client_store="auto", folder=tmp_path).store.room) is kind
    monkeypatch.setattr(store_file, "free_memory", lambda: 4 * everybody - 1)
    with pytest.raises(FedbenchError, match="use --client-store mmap"):
        ClientStore(Local(dim=8), world, draw)


def test_a_full_disk_is_an_error_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = started(FEDEM, tmp_path)

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(FedbenchError, match="has no room for what clients keep .No space left on device.; make room"):
        federation.next_round()


WORDS = "--algo fedem --adapter 16,8,1 --dim 8 -e 2 -n 10 --rounds 3 --dataset synthetic --users 40 --items 80 --interactions 10"


def carry_out(words: str, out: Path) -> int:
    return cli.main([*f"{WORDS} --no-mlflow --quiet {words}".split(), "--out", str(out)])


def test_a_run_with_a_mapped_store(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    stores = {"ram": "ram", "mmap": "mmap", "folder": str(tmp_path / "elsewhere")}
    for name, where in stores.items():
        assert carry_out(f"--client-store {where} --keep-state last", tmp_path / name) == 0
    for name in ("mmap", "folder"):
        assert result(summary_of(tmp_path / name)) == result(summary_of(tmp_path / "ram"))
        assert [{**line, "seconds": 0} for line in lines_of(tmp_path / name)] == [
            {**line, "seconds": 0} for line in lines_of(tmp_path / "ram")
        ]
        assert (tmp_path / name / "per_client.parquet").read_bytes() == (tmp_path / "ram" / "per_client.parquet").read_bytes()
    recommended = [saved_model.load(tmp_path / name).recommend(np.arange(40), 5) for name in ("ram", "mmap")]
    assert recommended[0].equals(recommended[1]) and recommended[0]["user"].nunique() == 40
    assert {path.name for path in (tmp_path / "mmap").iterdir()} == {path.name for path in (tmp_path / "ram").iterdir()}
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_store_that_is_no_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert carry_out("--client-store disk", tmp_path / "r") == 2
    assert "--client-store must be auto, ram, mmap or a folder; there is no folder 'disk'" in capsys.readouterr().err
    assert not (tmp_path / "r").exists()
