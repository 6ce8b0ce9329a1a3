"""`bench` in its smallest form: it really runs both engines on the same work."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from fedbench.__main__ import main
from fedbench.commands.bench import (
    both_engines,
    compared,
    first_run,
    line,
    measure,
    render,
    spread_over,
)
from fedbench.commands.bench_page import BEGIN, END, markdown
from fedbench.commands.growth import drawn, exponent, fixed, growth, quantities
from fedbench.contract import registry
from fedbench.data.sampling import sample_round
from fedbench.experiment.round_timing import PARTS, WHOLE, first_clients
from fedbench.kernels.machine_limit import adam_limit
from fedbench.parts.item_item import AskedOnce
from fedbench.simulation.federation import Federation
from tests.conftest import small_split

TINY = ["--users", "60", "--items", "120", "--interactions", "15"]
SMALL = ["--dataset", "synthetic", *TINY, "--local-epochs", "2"]


def test_figures_fit_together() -> None:
    figures = measure(first_run(["--algo", "fedmf", *SMALL]))
    assert figures["ratio"] == figures["loop"] / figures["batched"] and figures["clients"] == 60 == figures["loop_clients"]
    # every client takes at least two steps over its user vector (16 numbers)
    assert figures["updates"] > 60 * 2 * 16
    assert figures["updates_per_second"] == figures["updates"] / figures["batched"]
    assert tuple(figures["parts"]) == PARTS and figures["round"] == sum(figures["parts"][name] for name in WHOLE)
    assert min(figures["parts"].values()) > 0
    assert all(0 < figures["least"][name] <= figures["parts"][name] for name in PARTS)
    assert figures["peak_mb"] >= figures["base_mb"] > 1 and figures["state_mb"] == pytest.approx(60 * 16 * 4 / 1e6)


KINDS = ["central_als", "fedcooc", "fedmf", "popularity"]
KINDS += [pytest.param(algo, marks=pytest.mark.long) for algo in ("fedrec_mf", "fedrecon", "colr")]


@pytest.mark.parametrize("algo", KINDS)
def test_algorithms_of_every_kind_can_be_measured(algo: str) -> None:
    figures = measure(first_run(["--algo", algo, "--dataset", "synthetic", *TINY]), loop_clients=2)
    assert figures["round"] > 0 and figures["algo"] in line(figures)
    again = registry.algorithm(algo).federated and not issubclass(registry.algorithm(algo), AskedOnce)
    assert ("ratio" in figures) == again and ("n/a" in line(figures)) == (not figures.get("updates"))
    assert "a whole round" in render(figures)


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--algo", "fedem", *SMALL, "--loop-clients", "5", "--state-mb", "0.2"]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("batched engine", "loop engine", "(5 clients, scaled)", "ratio", "of the limit", "a whole round"))
    # 117 items are left of 120
    each = 4 * (117 * 16 + 16 + (32 * 16 + 16) + (16 * 8 + 8) + (8 * 1 + 1))
    assert f"(first {int(0.2e6 / each)} of 60 clients)" in out
    assert main(["bench", "--help"]) == 0


@pytest.mark.long
def test_all_in_processes_and_a_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, page = tmp_path / "bench.json", tmp_path / "page.md"
    page.write_text(f"# Speed\n{BEGIN}\nold\n{END}\nmore\n")
    flags = ["--all", "--datasets", "synthetic", "--algos", "fedmf,central_mf", *TINY, "-n", "20", "--json", str(file), "--page", str(page)]
    assert main(["bench", *flags, "--loop-clients", "3"]) == 0
    assert "central_mf    synthetic  does not fit: --clients-per-round means nothing" in capsys.readouterr().out
    kept = json.loads(file.read_text())
    assert [(one["algo"], one["clients"], one["loop_clients"]) for one in kept["figures"]] == [("fedmf", 20, 3)]
    assert kept["schema"] == 1 and kept["environment"]["cpu_count"] > 0
    assert page.read_text() == f"# Speed\n{BEGIN}\n{markdown(kept)}\n{END}\nmore\n"
    assert f"| fedmf | synthetic | 20 | {kept['figures'][0]['round']:.4f} |" in page.read_text()
    assert main(["bench", "--algo", "fedmf", "--dataset", "synthetic", *TINY, "-n", "20", "--compare", str(file)]) == 0
    assert "times faster than before\n" in capsys.readouterr().out


def test_compared_divides_what_was_by_what_is() -> None:
    then = {"algo": "a", "dataset": "d", "protocol": "p", "threads": 1, "clients": 9, "round": 1.0, "parts": dict.fromkeys(PARTS, 0.5)}
    now = {**then, "round": 0.25, "parts": {**dict.fromkeys(PARTS, 0.5), "sample": 0.0}}
    assert compared([now], [then]).splitlines()[-1].split() == ["a", "d", "4.00", "n/a", "1.00", "1.00", "1.00", "1.00"]
    assert "nothing to compare" in compared([{**now, "threads": 2}], [then])


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.json").write_text('{"figures": [1]}')
    for flags, word in (
        (["--loop-clients", "-1"], "--loop-clients"),
        (["--loop-clients", "x"], "loop-clients"),
        (["--state-mb", "0"], "--state-mb"),
        (["--compare", str(tmp_path / "none.json")], "bench --json wrote"),
        (["--compare", str(tmp_path / "other.json")], "bench --json wrote"),
        (["--plot", "x.png"], "--growth"),
        (["--algos", "fedmf"], "--all"),
        (["--all", "--algos", "fedfm"], "did you mean"),
        (["--json", str(tmp_path / "no" / "folder.json")], "cannot be written"),
        (["--page", "x.md"], "--page goes with"),
        (["--all", "--json", str(tmp_path / "x.json"), "--page", str(tmp_path / "other.json")], "no place for the table"),
    ):
        assert main(["bench", "--algo", "fedmf", *SMALL, *flags]) == 2
        assert word in capsys.readouterr().err


def test_the_engines_leave_the_clients_as_they_were() -> None:
    federation = Federation.start(first_run(["--algo", "fedem", *SMALL]).algorithm, small_split(), seed=0)
    federation.next_round()
    before = {name: tensor.clone() for name, tensor in federation.store.tensors.items()}
    both_engines(federation, federation.samples(2), time.process_time, 3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in federation.store.tensors.items())


def test_some_clients_keep_their_samples() -> None:
    samples = sample_round(small_split(), np.arange(20), 4, 0, 1)
    few = spread_over(samples, 5)
    assert len(few.clients) == 5 and {samples.counts.min(), samples.counts.max()} <= set(few.counts)
    for c, client in enumerate(few.clients):
        mine, theirs = slice(few.ptr[c], few.ptr[c + 1]), slice(samples.ptr[client], samples.ptr[client + 1])
        rows, all_rows = few.row[few.row_ptr[c] : few.row_ptr[c + 1]], samples.row[samples.row_ptr[client] : samples.row_ptr[client + 1]]
        assert (few.label[mine] == samples.label[theirs]).all() and (rows[few.local[mine]] == all_rows[samples.local[theirs]]).all()
    assert spread_over(samples, 20) is samples


@pytest.mark.parametrize("ratings", [False, True])
def test_the_first_clients_sample_as_they_did(ratings: bool) -> None:
    whole = small_split(ratings=ratings)
    few = first_clients(whole, 7)
    assert few.clients == 7 == len(few.user_ids) and few.items == whole.items
    mine, theirs = (sample_round(at, np.arange(7), 2, 0, 1) for at in (few, whole))
    assert all(np.array_equal(getattr(mine, name), getattr(theirs, name)) for name in ("ptr", "local", "label", "row_ptr", "row"))
    for name, held in few.held.items():
        assert np.array_equal(held.item, whole.held[name].item[: held.ptr[-1]]) and len(held.ptr) == 8


@pytest.mark.long
def test_growth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = {"users": 60, "clients-per-round": 20, "items": 100, "dim": 16}
    file, plot = tmp_path / "growth.json", tmp_path / "growth.png"
    assert growth(["--algo", "fedem", "--kernel", "off"], file, plot, base, {"users": (60, 120), "dim": (8,)}) == 0
    out = capsys.readouterr().out
    assert plot.stat().st_size > 1000 and "to the power of" in out and "does not fit" in out
    figures = json.loads(file.read_text())["figures"]
    assert [(one["axis"], one["size"]) for one in figures] == [("users", 60), ("users", 120)]
    assert exponent(figures, "users", "state") == pytest.approx(1)
    assert np.isnan(exponent(figures, "dim"))


def test_exponent_of_a_power() -> None:
    figures = [{"algo": "a", "axis": "dim", "size": size, "round_cost": 3 * size**1.5} for size in (2, 4, 16)]
    assert exponent(figures, "dim") == pytest.approx(1.5)
    line = [{"axis": "dim", "size": size, "round_cost": 5 + 3 * size} for size in (2, 4, 16)]
    assert fixed(line, "dim") == pytest.approx(5) and np.isnan(fixed(line[:1], "dim"))
    parts = dict(zip(PARTS, (1.0, 2.0, 3.0, 4.0, 5.0), strict=True))
    costs = quantities({"least": parts, "peak_mb": 90.0, "base_mb": 60.0, "state_mb": 7.0})
    assert costs == {"round_cost": 6.0, "train_cost": 2.0, "aggregate_cost": 3.0, "memory_cost": 30.0, "state_cost": 7.0}
    assert drawn([{**costs, **one} for one in figures]).axes[0].get_title() == "round: exponent 1.50"


def test_the_limit_is_a_rate() -> None:
    assert adam_limit(np.float32) > 1e6
