"""Clients shared out over ranks: real torchrun, real gloo, real kills. Every result is that of one process.

`torchrun -m tests.test_ranks COMMAND ...` is what the ranks do: one command after another, for starting Python takes longer than they do.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedbench import cli, ranks
from fedbench.aggregate import AVERAGES, Rows, mean_of_whole_tables
from fedbench.algorithm import Tensors, World
from fedbench.engine import Round, Uploads
from fedbench.errors import FedbenchError
from fedbench.federation import Federation
from fedbench.split import Samples
from tests.test_run import lines_of, result, summary_of

ROOT = Path(__file__).parent.parent
DATA = "--dataset synthetic --users 60 --items 150 --interactions 12"
COMMON = f"{DATA} --dim 8 --threads 1 --dtype float64 --no-mlflow --quiet --device cpu"
RUNS = {
    "fedmf": "--algo fedmf --rounds 3 --keep-state best",
    "fedem": "--algo fedem --adapter 16,8,1 -e 2 -n 40 --rounds 4",
    "fedavg_ncf": "--algo fedavg_ncf --layers 16,8 -n 40 -e 1 --rounds 3",
    "users": "--algo fedavg_ncf --layers 16,8 -n 40 -e 1 --rounds 2 --share-users --average cohort --weight-decay 0.01",
    "fedrecon": "--algo fedrecon -n 30 --rounds 3 --refit",
    "sgd": "--algo fedrecon --reconstruct sgd --server adam --negatives 4 -n 3 --rounds 4 --dropout 0.3 --stragglers 0.5 --corrupt 0.2",
    "ratings": "--algo fedrec_mf --rounds 2 --split kfold --fold 0",
    "local": "--algo local -e 1 --rounds 2",
    "popularity": "--algo popularity",
}
WRONG = {
    f"--algo central_mf {COMMON}": (2, "has all data in one place"),
    f"--algo fedmf {COMMON} --seeds 0-1": (2, "torchrun shares out one run"),
    f"--algo fedmf {COMMON} --seed RANK": (2, "rank 1 has other flags than rank 0"),
    "--algo fedmf --dataset BROKEN.csv --no-mlflow --quiet": (3, "BROKEN.csv:2"),
    f"--algo fedmf {COMMON} --rounds 2 --out LAST-FAILS": (1, "no room (on rank 1)"),
}
KILLED = f"--algo fedem --adapter 16,8,1 -e 2 -n 40 --rounds 8 --checkpoint-every 2 {COMMON}"
PATIENCE = 600
"""seconds after which something hangs"""


def torchrun(size: int, *commands: str, options: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """So many ranks that carry out the commands."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), *options.split()]
    words += ["-m", "tests.test_ranks", *commands]
    return subprocess.run(words, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=PATIENCE, check=False)


def rank_main() -> None:
    """A rank's whole life. With KILL_AT the last rank is killed in that round, if it was not started again.

    In a command that ends in LAST-FAILS the last rank has an error of its own in its part of a round. After each round all servers must be
    the same to the last bit.
    """
    next_round, samples = Federation.next_round, Federation.samples
    last = ranks.number() == ranks.count() - 1

    def watched(self: Federation) -> Round:
        if self.round + 1 == int(os.environ.get("KILL_AT", "0")) and last and not ranks.restarted():
            os.kill(os.getpid(), signal.SIGKILL)
        result = next_round(self)
        ranks.agree("another server", lambda: digest(self.server))
        return result

    def failing(self: Federation, *arguments: Any) -> Samples:
        if last and command.endswith("LAST-FAILS"):
            raise FedbenchError("no room")
        return samples(self, *arguments)

    Federation.samples, Federation.next_round = failing, watched  # type: ignore[method-assign]
    code = 0
    for command in sys.argv[1:]:
        code = cli.guard(cli.train, command.replace("RANK", str(ranks.number())).split())
        print(f"rank {ranks.number()} of {ranks.count()} ended in {code}", flush=True)
    ranks.leave(code)
    sys.exit(code)


def digest(server: Tensors) -> str:
    return hashlib.sha256(b"".join(server[name].numpy().tobytes() for name in sorted(server))).hexdigest()


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


def test_ranks_find_what_one_process_finds_and_fail_in_one_line(tmp_path: Path) -> None:
    for name, words in RUNS.items():
        assert cli.main([*f"{words} {COMMON}".split(), "--out", str(tmp_path / f"{name}-1")]) == 0
    commands = [f"{words} {COMMON} --out {tmp_path / f'{name}-2'}" for name, words in RUNS.items()]
    (tmp_path / "BROKEN.csv").write_text("user,item\n1,\n")
    wrong = [re.sub("BROKEN|LAST-FAILS", rf"{tmp_path}/\g<0>", command) for command in WRONG]
    done = torchrun(2, *commands, *wrong)
    for name in RUNS:
        assert_same_run(tmp_path / f"{name}-2", tmp_path / f"{name}-1")
    said = [line for line in done.stderr.splitlines() if line.startswith("fedbench: ")]
    assert len(said) == len(WRONG), done.stderr
    for line, (_, words) in zip(said, WRONG.values(), strict=True):
        assert words in line
    codes = [0] * len(RUNS) + [code for code, _ in WRONG.values()]
    for rank in range(2):
        # not line by line: two processes that write at once may share one
        assert re.findall(rf"rank {rank} of 2 ended in (\d+)", done.stdout) == [str(code) for code in codes]


def test_a_killed_rank_and_another_number_of_them(tmp_path: Path) -> None:
    assert cli.main([*KILLED.split(), "--out", str(tmp_path / "steady")]) == 0
    done = torchrun(2, f"{KILLED} --out {tmp_path / 'again'}", options="--max-restarts 1", KILL_AT="6")
    assert done.returncode == 0, done.stderr
    assert "going on after round 4" in (tmp_path / "again" / "log.txt").read_text()
    assert_same_run(tmp_path / "again", tmp_path / "steady")

    assert torchrun(2, f"{KILLED} --out {tmp_path / 'fewer'}", KILL_AT="4").returncode == 1
    assert cli.main([*KILLED.split(), "--out", str(tmp_path / "fewer")]) == 0
    assert "going on after round 2" in (tmp_path / "fewer" / "log.txt").read_text()
    assert_same_run(tmp_path / "fewer", tmp_path / "steady")


def test_shares_are_ranges_of_equal_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranks.share(np.ones(5)) == range(5)
    monkeypatch.setattr(ranks, "count", lambda: 3)
    cost = np.random.default_rng(0).pareto(1.5, 1000)
    shares = []
    for rank in range(3):
        monkeypatch.setattr(ranks, "number", partial(int, rank))
        shares.append(ranks.share(cost))
    assert [client for share in shares for client in share] == list(range(1000))
    spent = [cost[share.start : share.stop].sum() / cost.sum() + len(share) / 1000 for share in shares]
    assert max(spent) - min(spent) < 4 * (cost.max() / cost.sum() + 1e-3)


SHARES = (range(4), range(4, 4), range(4, 7))
"""positions in a cohort that three ranks have; the one between has none"""


def each_rank(work: Callable[[Callable[[Tensor], Tensor], range], Any]) -> list[Any]:
    """What `work` makes with sums over these ranks and with one of the shares, on threads that take the places of ranks."""
    meet, parts = threading.Barrier(len(SHARES), timeout=PATIENCE), [torch.empty(0)] * len(SHARES)

    def run(rank: int) -> Any:
        def total(part: Tensor) -> Tensor:
            parts[rank] = part
            meet.wait()
            whole = torch.stack(parts).sum(0)
            meet.wait()
            return whole

        return work(total, SHARES[rank])

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


def test_rows_on_several_ranks_count_as_those_of_one() -> None:
    client = torch.tensor([0, 0, 2, 3, 4, 4, 4, 6])  # clients 1 and 5 sent nothing
    item, value = torch.tensor([4, 1, 4, 0, 1, 2, 4, 1]), torch.rand(8, 2, dtype=torch.float64)
    uploads = Uploads(World(9, 5), torch.tensor([0, 2, 3, 4, 5, 7, 8]), {"items": Rows(client, item, value, 7), "samples": torch.rand(7)})
    expected = seen_of(uploads)

    def on_rank(total: Callable[[Tensor], Tensor], share: range) -> dict[str, Any]:
        mine = (client >= share.start) & (client < share.stop)
        own = Rows(client[mine] - share.start, item[mine], value[mine], len(share)) if share else None
        rows = ranks.placed(own, value[:0], 7, share.start)
        assert rows.total is ranks.total
        return seen_of(replace(uploads, tensors={**uploads.tensors, "items": rows._replace(total=total)}))

    for found in each_rank(on_rank):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, equal_nan=True)


if __name__ == "__main__":
    rank_main()
