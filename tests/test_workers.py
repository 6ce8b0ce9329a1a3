"""Clients shared out over workers: real torchrun, real gloo, real kills. Every result is that of one process.

`torchrun -m tests.test_workers COMMAND ...` is what the workers do: one command after another, for starting Python takes longer than that.
For the same reason torchrun itself starts them only where it is torchrun that is tested; elsewhere they are forked.
"""

from __future__ import annotations

import errno
import hashlib
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fedbench.commands import cli
from fedbench.contract import storage
from fedbench.contract.algorithm import Tensors, World
from fedbench.contract.storage import Disk
from fedbench.contract.uploads import AVERAGES, Rows, Tables, Uploads
from fedbench.data.sampling import Samples
from fedbench.errors import FedbenchError, NotFinite
from fedbench.experiment import checkpoint
from fedbench.parts.mixing import mean_of_whole_tables
from fedbench.simulation import client_store, federation, workers
from fedbench.simulation.channel import CountBytes, Trip
from fedbench.simulation.engine import Round
from fedbench.simulation.federation import Federation
from tests.test_run import lines_of, result, summary_of

pytestmark = pytest.mark.kernels

ROOT = Path(__file__).parent.parent
DATA = "--dataset synthetic --users 60 --items 150 --interactions 12"
COMMON = f"{DATA} --dim 8 --threads 1 --dtype float64 --no-mlflow --quiet --device cpu"
OFF = "--kernel off"
"""in most runs: how clients are shared out does not depend on what trains them, and each kernel takes seconds to compile"""
FEDEM = "--algo fedem --adapter 16,8,1 -e 2"
RUNS = {
    "fedmf": "--algo fedmf --rounds 3 --keep-state best",
    "fedem": f"{FEDEM} -n 40 --rounds 4 {OFF}",
    "everybody": f"{FEDEM} --rounds 3 --similarity cos --no-exclude-self {OFF}",
    "picked": f"{FEDEM} -n 40 --agg-ratio 0.3 --rounds 5 --keep-state best {OFF}",
    "few": f"{FEDEM} -n 3 --agg-ratio 0.7 --rounds 6 --keep-state last {OFF}",
    "alike": f"{FEDEM} -n 40 --alpha 0 --rounds 4 {OFF}",
    "capped": f"{FEDEM} -n 12 --agg-ratio 0.3 --max-weight 0.7 --rounds 3 --aggregation sim {OFF}",
    "damaged": f"{FEDEM} -n 20 --agg-ratio 0.5 --rounds 4 --corrupt 0.3 --dropout 0.3 {OFF}",
    "mapped": f"{FEDEM} -n 12 --agg-ratio 0.7 --rounds 5 --client-store mmap {OFF}",
    "spoilt": f"{FEDEM} -n 40 --rounds 3 {OFF}",
    "spoilt-alike": f"{FEDEM} -n 40 --rounds 3 --alpha 0 --refit {OFF}",
    "fedavg_ncf": f"--algo fedavg_ncf --layers 16,8 -n 40 -e 1 --rounds 3 {OFF}",
    "users": f"--algo fedavg_ncf --layers 16,8 -n 40 -e 1 --rounds 2 --share-users --average cohort --weight-decay 0.01 {OFF}",
    "fedrecon": "--algo fedrecon -n 30 --rounds 3 --refit",
    "sgd": f"--algo fedrecon --reconstruct sgd --server adam --negatives 4 -n 3 --rounds 4 --dropout 0.3 --stragglers 0.5 "
    f"--corrupt 0.2 {OFF}",
    "fedease": f"--algo fedease -n 40 --rounds 2 {OFF}",
    "clear": f"--algo fedcooc --no-secure {OFF}",
    "sketch": f"--algo fedease_sketch --dim 20 {OFF}",
    "ratings": f"--algo fedrec_mf --rounds 2 --split kfold --fold 0 {OFF}",
    "local": f"--algo local -e 1 --rounds 2 {OFF}",
    "popularity": f"--algo popularity {OFF}",
}
WRONG = {
    f"--algo central_mf {COMMON}": (2, "has all data in one place"),
    f"--algo fedmf {COMMON} --seeds 0-1": (2, "torchrun shares out one run"),
    f"--algo fedmf {COMMON} --seed NUMBER": (2, "worker 1 has other flags than worker 0"),
    "--algo fedmf --dataset BROKEN.csv --no-mlflow --quiet": (3, "BROKEN.csv:2"),
    f"--algo fedmf {COMMON} --rounds 2 --out LAST-FAILS": (1, "no room (on worker 1)"),
    f"{FEDEM} {OFF} {COMMON} --rounds 2 --out LAST-NOT-FINITE": (1, "the last worker's mail is not finite in round 1"),
    f"{FEDEM} {OFF} {COMMON} --rounds 2 --client-store mmap --checkpoint-every 1 --keep-state last --out FULL": (
        1,
        "round-1 cannot be written (No space left",
    ),
}
KILLED = f"--algo fedem --adapter 16,8,1 -e 2 -n 40 --rounds 8 --checkpoint-every 2 {COMMON} {OFF}"
PATIENCE = 600
"""seconds after which something hangs"""


def torchrun(size: int, *commands: str, options: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """So many workers that carry out the commands."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), *options.split()]
    words += ["-m", "tests.test_workers", *commands]
    return subprocess.run(
        words,
        cwd=ROOT,
        env={**os.environ, "PYTHONFAULTHANDLER": "1", **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def forked(size: int, *commands: str, **environment: str) -> list[int | None]:
    """So many workers that carry out the commands, with the variables and the store that torchrun gives them: the exit code of each.

    They are forked from a process that has imported everything and done nothing. As torchrun does, it ends the others when one is lost.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.test_workers"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    shared |= {"TORCHELASTIC_RUN_ID": "forked", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_USE_AGENT_STORE": "True", **environment}
    started = []
    for rank in range(size):
        own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
        started.append(context.Process(target=forked_main, args=(commands, own)))
        started[-1].start()
    deadline = time.monotonic() + PATIENCE
    while any(process.exitcode is None for process in started) and not any(process.exitcode for process in started):
        assert time.monotonic() < deadline, "something hangs"
        time.sleep(0.02)
    for process in started:
        process.terminate()
        process.join(PATIENCE)
    return [process.exitcode for process in started]


def forked_main(commands: Sequence[str], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    sys.argv[1:] = commands
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    worker_main()


def worker_main() -> None:
    """A worker's whole life. With KILL_AT the last worker is killed in that round, if it was not started again.

    In a command that ends in LAST-FAILS the last worker has an error of its own in its part of a round, in one that ends in LAST-NOT-FINITE
    it alone finds something not finite in the server's step; in one that ends in FULL the disk is, while workers lend rows to the first.
    After each round all servers must be the same to the last bit.
    """
    next_round, samples, finite = Federation.next_round, Federation.samples, federation.finite
    last = workers.number() == workers.count() - 1

    def watched(self: Federation) -> Round:
        if self.round + 1 == int(os.environ.get("KILL_AT", "0")) and last and not workers.restarted():
            os.kill(os.getpid(), signal.SIGKILL)
        result = next_round(self)
        workers.agree("another server", lambda: digest(self))
        return result

    def failing(self: Federation, *arguments: Any) -> Samples:
        if last and command.endswith("LAST-FAILS"):
            raise FedbenchError("no room")
        return samples(self, *arguments)

    def looking(server: Tensors) -> Tensors:
        if last and command.endswith("LAST-NOT-FINITE"):
            raise NotFinite("the last worker's mail")
        return finite(server)

    def until_full(self: workers.StreamedRows) -> Iterator[Tensor]:
        for number, chunk in enumerate(chunks(self)):
            if number and command.endswith("FULL"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            yield chunk

    Federation.samples, Federation.next_round, federation.finite = failing, watched, looking  # type: ignore[method-assign]
    chunks, workers.StreamedRows.chunks = workers.StreamedRows.chunks, until_full  # type: ignore[method-assign]
    workers.BLOCK, client_store.CHUNK, storage.CHUNK = 5000, 2500, 2500  # a few tables at once
    code = 0
    for command in sys.argv[1:]:
        CountBytes.__call__ = spoilt if "spoilt" in command else arrive  # type: ignore[method-assign]
        code = cli.guard(cli.train, command.replace("NUMBER", str(workers.number())).split())
        print(f"worker {workers.number()} of {workers.count()} ended in {code}", flush=True)
    workers.leave(code)
    sys.exit(code)


def digest(federation: Federation) -> str:
    """Of what is the same for all clients; each worker has the per-client rows of its own."""
    kept, server = federation.algorithm.per_client_server_state, federation.server
    for name in kept if server else ():
        others = np.setdiff1d(np.arange(federation.split.clients), np.array(federation.store.clients))
        mapped = isinstance(federation.store.room, Disk)  # a sparse file, which is longer than what it holds
        assert (server["slot"][others] == -1).all() and (mapped or len(server[name]) <= max(1, len(federation.store.clients)))
    names = sorted(server.keys() - {*kept, "slot"} if kept else server)
    return hashlib.sha256(b"".join(server[name].numpy().tobytes() for name in names)).hexdigest()


arrive = CountBytes.__call__


def spoilt(self: CountBytes, uploads: Uploads, trip: Trip) -> Uploads:
    """In the second round the last two tables arrive not finite, and nobody has reason to look at them before."""
    uploads = arrive(self, uploads, trip)
    factor = torch.ones(len(uploads.clients))
    factor[-2:] = torch.tensor([torch.nan, torch.inf])
    items = uploads.scaled(factor).tensors["items"]
    return replace(uploads, tensors={**uploads.tensors, "items": items}) if trip.when == 2 else uploads


def assert_same(found: Any, expected: Any) -> None:
    """Equal in all that they say, numbers to 1e-6."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, float):
        assert math.isclose(found, expected, rel_tol=1e-6, abs_tol=1e-6)
    else:
        assert found == expected


def assert_same_run(found: Path, expected: Path) -> None:
    assert_same(result(summary_of(found)), result(summary_of(expected)))
    rounds = [[{key: value for key, value in line.items() if key != "seconds"} for line in lines_of(out)] for out in (found, expected)]
    assert_same(*rounds)
    names = [sorted(str(path.relative_to(out)) for path in out.rglob("*")) for out in (found, expected)]
    assert names[0] == names[1]
    torch.testing.assert_close(*(model_of(out) for out in (found, expected)), rtol=1e-6, atol=1e-6)


def model_of(out: Path) -> Tensors:
    """What is kept of a run; of per-client server state the row of each client that has one, in their order."""
    state = dict(checkpoint.read(out, checkpoint.MODEL).tensors("cpu"))
    if "server/tables" in state:
        state["server/tables"] = state["server/tables"][state["server/slot"][state["server/slot"] >= 0]]
        state["server/slot"] = state["server/slot"] >= 0
    return state


def test_workers_find_what_one_process_finds_and_fail_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, words in RUNS.items():
        with monkeypatch.context() as patch:
            if "spoilt" in name:
                patch.setattr(CountBytes, "__call__", spoilt)
            assert cli.main([*f"{words} {COMMON}".split(), "--out", str(tmp_path / f"{name}-1")]) == 0
    for name in ("spoilt", "spoilt-alike"):
        assert summary_of(tmp_path / f"{name}-1")["rejected"] == 2
    commands = [f"{words} {COMMON} --out {tmp_path / f'{name}-2'}" for name, words in RUNS.items()]
    (tmp_path / "BROKEN.csv").write_text("user,item\n1,\n")
    wrong = [re.sub("BROKEN|LAST-FAILS|LAST-NOT-FINITE|FULL", rf"{tmp_path}/\g<0>", command) for command in WRONG]
    done = torchrun(2, *commands, *wrong)
    for name in RUNS:
        assert_same_run(tmp_path / f"{name}-2", tmp_path / f"{name}-1")
    said = [line for line in done.stderr.splitlines() if line.startswith("fedbench: ")]
    assert len(said) == len(WRONG), done.stderr
    for line, (_, words) in zip(said, WRONG.values(), strict=True):
        assert words in line
    codes = [0] * len(RUNS) + [code for code, _ in WRONG.values()]
    for worker in range(2):
        # not line by line: two processes that write at once may share one
        assert re.findall(rf"worker {worker} of 2 ended in (\d+)", done.stdout) == [str(code) for code in codes]


def test_a_killed_worker_and_another_number_of_them(tmp_path: Path) -> None:
    assert cli.main([*KILLED.split(), "--out", str(tmp_path / "steady")]) == 0
    done = torchrun(2, f"{KILLED} --out {tmp_path / 'again'}", options="--max-restarts 1", KILL_AT="6")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resuming after round 4" in (tmp_path / "again" / "log.txt").read_text()
    assert_same_run(tmp_path / "again", tmp_path / "steady")

    assert forked(2, f"{KILLED} --out {tmp_path / 'fewer'}", KILL_AT="4")[-1] == -signal.SIGKILL
    assert cli.main([*KILLED.split(), "--out", str(tmp_path / "fewer")]) == 0
    assert "resuming after round 2" in (tmp_path / "fewer" / "log.txt").read_text()
    assert_same_run(tmp_path / "fewer", tmp_path / "steady")


@pytest.mark.long
def test_three_workers_and_mail_that_waits_for_another_number_of_them(tmp_path: Path) -> None:
    """40 of 60 clients take part in a round, and half of those are mixed for: many mixtures lie in each checkpoint."""
    words = f"{KILLED} --agg-ratio 0.5 --keep-state best"
    for name in ("few", "everybody", "alike"):
        assert cli.main([*f"{RUNS[name]} {COMMON}".split(), "--out", str(tmp_path / f"{name}-1")]) == 0
    assert forked(3, *(f"{RUNS[name]} {COMMON} --out {tmp_path / f'{name}-3'}" for name in ("few", "everybody", "alike"))) == [0] * 3
    for name in ("few", "everybody", "alike"):
        assert_same_run(tmp_path / f"{name}-3", tmp_path / f"{name}-1")

    assert cli.main([*words.split(), "--out", str(tmp_path / "steady")]) == 0
    for size, killed_at in ((1, 4), (2, 6)):
        assert forked(size, f"{words} --out {tmp_path / 'again'}", KILL_AT=str(killed_at))[-1] == -signal.SIGKILL
    assert forked(3, f"{words} --out {tmp_path / 'again'}") == [0] * 3
    said = (tmp_path / "again" / "log.txt").read_text()
    assert "resuming after round 2" in said and "resuming after round 4" in said
    assert_same_run(tmp_path / "again", tmp_path / "steady")


@pytest.mark.long
def test_clients_in_files_of_any_number_of_workers(tmp_path: Path) -> None:
    """Each worker's clients and per-client server state lie in a file; checkpoints go from two workers to three, and to memory and back."""
    words, out = f"{KILLED} --agg-ratio 0.5", tmp_path / "again"
    assert cli.main([*f"{words} --client-store mmap".split(), "--out", str(tmp_path / "steady")]) == 0
    for size, where, killed_at in ((2, "mmap", 4), (3, "mmap", 6), (2, "ram", 8)):
        assert forked(size, f"{words} --client-store {where} --out {out}", KILL_AT=str(killed_at))[-1] == -signal.SIGKILL
    assert forked(2, f"{words} --client-store mmap --out {out}") == [0] * 2
    said = (out / "log.txt").read_text()
    assert [f"resuming after round {round_}" in said for round_ in (2, 4, 6)] == [True] * 3
    assert_same_run(out, tmp_path / "steady")


def test_shares_are_ranges_of_equal_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    assert workers.share(np.ones(5)) == range(5)
    monkeypatch.setattr(workers, "count", lambda: 3)
    cost = np.random.default_rng(0).pareto(1.5, 1000)
    shares = []
    for worker in range(3):
        monkeypatch.setattr(workers, "number", partial(int, worker))
        shares.append(workers.share(cost))
    assert [client for share in shares for client in share] == list(range(1000))
    spent = [cost[share.start : share.stop].sum() / cost.sum() + len(share) / 1000 for share in shares]
    assert max(spent) - min(spent) < 4 * (cost.max() / cost.sum() + 1e-3)


SHARES = (range(4), range(4, 4), range(4, 7))
"""positions in a cohort that three workers have; the one between has none"""


def each_worker(work: Callable[[Callable[[Tensor], list[Tensor]], range], Any]) -> list[Any]:
    """What `work` makes with what all these workers say and with one of the shares, on threads that take the places of workers."""
    meet, parts = threading.Barrier(len(SHARES), timeout=PATIENCE), [torch.empty(0)] * len(SHARES)

    def run(worker: int) -> Any:
        def everybody(part: Tensor) -> list[Tensor]:
            parts[worker] = part
            meet.wait()
            said = list(parts)
            meet.wait()
            return said

        return work(everybody, SHARES[worker])

    with ThreadPoolExecutor(len(SHARES)) as threads:
        return list(threads.map(run, range(len(SHARES))))


def seen_of(uploads: Uploads) -> dict[str, Any]:
    """All that is made of rows for all clients."""
    rows, weight, table = uploads.rows("items"), torch.arange(len(uploads.clients)).double(), torch.ones(5, 2, dtype=torch.float64)
    kept = uploads.only(weight % 2 == 0).scaled(torch.tensor([1.0, -2.0, torch.inf, 1.0]))
    return {
        **{f"{how}/{w is None}": rows.combine(5, how, w) for how in AVERAGES for w in (None, weight)},
        **{"whole": mean_of_whole_tables(rows, table, weight / 9), "senders": rows.senders(5), "sent": rows.sent()},
        **{"norms": uploads.norms(), "finite": uploads.finite(), "bytes": uploads.bytes(), "clients": kept.clients},
        **{"kept": kept.rows("items").combine(5, "touching"), "sound": kept.finite(), "fewer": kept.bytes()},
    }


def test_rows_on_several_workers_count_as_those_of_one() -> None:
    client = torch.tensor([0, 0, 2, 3, 4, 4, 4, 6])  # clients 1 and 5 sent nothing
    item, value = torch.tensor([4, 1, 4, 0, 1, 2, 4, 1]), torch.rand(8, 2, dtype=torch.float64)
    counts = torch.bincount(client)
    uploads = Uploads(World(9, 5), torch.tensor([0, 2, 3, 4, 5, 7, 8]), {"items": Rows(counts, item, value), "samples": torch.rand(7)})
    expected = seen_of(uploads)

    def on_worker(everybody: Callable[[Tensor], list[Tensor]], share: range) -> dict[str, Any]:
        mine = (client >= share.start) & (client < share.stop)
        own = Rows(counts[share.start : share.stop], item[mine], value[mine]) if share else None
        rows = workers.place_rows(own, value[:0], 7, share.start)
        assert rows.total is workers.total
        rows = rows._replace(total=lambda part: torch.stack(everybody(part)).sum(0))
        return seen_of(replace(uploads, tensors={**uploads.tensors, "items": rows}))

    for found in each_worker(on_worker):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, equal_nan=True)


def made_of(uploads: Uploads) -> dict[str, Any]:
    """All that is made of whole tables: for all clients but for `mixed`, which each worker has of its own."""
    kept = uploads.only(torch.arange(7) % 2 == 0).scaled(torch.tensor([1.0, -2.0, torch.inf, 1.0]))
    weights, picked = torch.rand(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), torch.tensor([1, 2, 3, 6])
    tables = uploads.tables("items", picked)
    return {
        **{"norms": uploads.norms(), "finite": uploads.finite(), "bytes": uploads.bytes(), "all": uploads.dense("items")},
        **{"clients": kept.clients, "sound": kept.finite(), "fewer": kept.bytes(), "scaled": kept.dense("items")},
        **{"some": uploads.dense("items", picked), "each": tables.each(lambda each: each.sum(1)), "alike": tables.mixed(weights[0])},
        **{"mixed": tables.mixed(weights[tables.own]), "nobody": uploads.only(torch.zeros(7, dtype=torch.bool)).dense("items")},
    }


def test_tables_on_several_workers_count_as_those_of_one() -> None:
    value = torch.rand(7, 5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    uploads = Uploads(World(9, 5), torch.tensor([0, 2, 3, 4, 5, 7, 8]), {"items": value, "samples": torch.rand(7)})
    expected = made_of(uploads)

    def on_worker(everybody: Callable[[Tensor], list[Tensor]], share: range) -> dict[str, Any]:
        def passed(work: Callable[[], Tensor]) -> Iterator[Tensor]:
            yield from everybody(work())

        tables = Tables(value[share.start : share.stop], share.start, 7, passed)
        return made_of(replace(uploads, tensors={**uploads.tensors, "items": tables}))

    found = each_worker(on_worker)
    mixed = torch.cat([each.pop("mixed") for each in found])
    for each in found:
        torch.testing.assert_close({**each, "mixed": mixed}, expected, rtol=1e-12, atol=1e-12, equal_nan=True)


if __name__ == "__main__":
    worker_main()
