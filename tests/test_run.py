"""Whole runs: what they leave behind, that they can be repeated and gone on with, and how they end when they cannot go on."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, cast

import pandas as pd
import pytest
from numba.core.event import trigger_event

from fedbench.commands import cli
from fedbench.experiment import checkpoint, observers, prepare, run
from fedbench.kernels import layers, shuffling
from fedbench.settings.command_line import resolve
from fedbench.simulation.engine import Engine
from fedbench.tracking import run_log

ROOT = Path(__file__).parents[1]
DATA = "--dataset synthetic --users 60 --items 150 --interactions 12"
FEDMF = f"--algo fedmf {DATA} --rounds 3 --dim 8 --no-mlflow --quiet"
FEDEM = f"--algo fedem {DATA} --rounds 4 --dim 8 --adapter 16,8,1 -e 3 -n 40 --no-mlflow --quiet"
MEASURED = ("seconds_per_round", "peak_rss_mb")
"""what differs between two runs of one command"""


def carry_out(words: str, out: Path) -> dict[str, Any]:
    return run.run(resolve([*words.split(), "--out", str(out)]))


def result(summary: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in summary.items() if key not in MEASURED}


def summary_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "summary.json").read_text())


def lines_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def assert_same_metrics(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for which in ("val", "test"):
        assert found[which] == pytest.approx(expected[which], abs=1e-6)


def test_the_folder_alone_suffices(tmp_path: Path) -> None:
    returned = carry_out(FEDMF, tmp_path / "r")
    files = {str(path.relative_to(tmp_path / "r")) for path in (tmp_path / "r").rglob("*") if path.is_file()}
    assert files == {
        *("config.json", "env.json", "metrics.jsonl", "per_client.parquet", "log.txt", "summary.json"),
        *("checkpoint/model.json", "checkpoint/model.safetensors", "figures/convergence.png", "figures/distribution.png"),
    }
    summary = summary_of(tmp_path / "r")
    assert summary == run_log.plain(returned)
    named = "algo dataset protocol protocol_fingerprint leaky seed rounds best_round val test bytes_up bytes_down client_visits"
    assert {*named.split(), "clients_never_seen", "seconds_per_round", "peak_rss_mb", "device"} <= summary.keys()
    assert summary["schema"] == 1
    for which in ("val", "test"):
        assert {"hr_10", "ndcg_10", "full_hr_10", "full_ndcg_10", "mrr", "mrr_p10", "mrr_worst_decile"} <= summary[which].keys()
    assert (summary["algo"], summary["dataset"], summary["rounds"], summary["leaky"]) == ("fedmf", "synthetic", 3, False)
    assert summary["client_visits"] == 3 * summary["clients"] and summary["clients_never_seen"] == 0
    assert summary["peak_rss_mb"] > 0 and summary["seconds_per_round"] > 0
    lines = lines_of(tmp_path / "r")
    assert [line["round"] for line in lines] == [1, 2, 3]
    best = lines[summary["best_round"] - 1]
    assert best["test/hr_10"] == summary["test"]["hr_10"] and best["val/ndcg_10"] == max(line["val/ndcg_10"] for line in lines)
    ranks = pd.read_parquet(tmp_path / "r" / "per_client.parquet")
    assert len(ranks) == summary["clients"] and (ranks["rank_test"] <= 10).mean() == pytest.approx(summary["test"]["hr_10"])
    assert (ranks["rank_popularity"] <= 10).mean() == pytest.approx(summary["popularity"]["hr_10"])
    assert (ranks["full_rank_popularity"] <= 10).mean() == pytest.approx(summary["popularity"]["full_hr_10"])
    config = json.loads((tmp_path / "r" / "config.json").read_text())
    assert (config["algo"], config["dim"], config["users"], config["split"]) == ("fedmf", 8, 60, "auto")
    assert summary["protocol_fields"]["split"] == "time" and not {"out", "resume"} & config.keys()


def test_the_folders_config_repeats_the_run(tmp_path: Path) -> None:
    first = carry_out(FEDEM, tmp_path / "a")
    again = run.run(resolve(["--config", str(tmp_path / "a" / "config.json"), "--out", str(tmp_path / "b")]))
    assert result(again) == result(first)


def test_an_interrupted_run_goes_on_from_its_own_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = carry_out(FEDMF, tmp_path / "a")
    with monkeypatch.context() as patch:
        interrupting(patch, when=2)
        assert cli.main([*FEDMF.split(), "--out", str(tmp_path / "r")]) == 130
    again = run.run(resolve(["--config", str(tmp_path / "r" / "config.json"), "--resume", str(tmp_path / "r")]))
    assert result(again) == result(expected)


@pytest.mark.parametrize("words", [FEDMF, FEDEM])
def test_the_same_command_gives_the_same_summary(words: str, tmp_path: Path) -> None:
    first, second = carry_out(words, tmp_path / "a"), carry_out(words, tmp_path / "b")
    assert result(first) == result(second)
    assert result(carry_out(f"{words} --seed 1", tmp_path / "c")) != result(first)


@pytest.mark.long
@pytest.mark.kernels
def test_threads_and_blocks_do_not_matter(tmp_path: Path) -> None:
    expected = carry_out(f"{FEDEM} --threads 1", tmp_path / "1")
    assert_same_metrics(carry_out(f"{FEDEM} --threads 2", tmp_path / "2"), expected)
    assert_same_metrics(carry_out(f"{FEDEM} --block-rows 300", tmp_path / "300"), expected)


@pytest.mark.long
@pytest.mark.kernels
def test_kernels_do_not_matter(tmp_path: Path) -> None:
    """In float64: without kernels sums run in another order, and Adam magnifies the last digit of a float32."""
    expected = carry_out(f"{FEDEM} --dtype float64", tmp_path / "auto")
    assert_same_metrics(carry_out(f"{FEDEM} --dtype float64 --kernel off --block-rows 100000", tmp_path / "off"), expected)


@pytest.mark.kernels
def test_a_run_says_that_it_compiles_kernels_and_when_that_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(run.log, "info", said.append)
    compiling, begins = observers.Compiling("fedem"), partial(trigger_event, "numba:compile")
    end, federation = cast(Any, None), cast(Any, None)
    compiling.start(federation)
    try:
        with begins(data={"dispatcher": layers.take_rows}):  # as numba does when it finds no compiled one
            assert said == [f"compiling kernels for fedem (about {observers.ALL} s, once) …"]
            with begins(data={"dispatcher": shuffling.permute}):
                pass
        with begins(data={"dispatcher": shuffling.permute}):
            assert len(said) == 1 and compiling.seconds > 0
        compiling.after_round(end)
        compiling.after_round(end)
        assert len(said) == 2 and re.fullmatch(r"compiled 2 kernels for fedem in \S+ s; they are kept for the next run", said[1])
    finally:
        compiling.close()
    with begins(data={"dispatcher": shuffling.permute}):
        assert len(said) == 2, "over"


def test_evaluates_every_so_often_and_in_the_last_round(tmp_path: Path) -> None:
    summary = carry_out(f"{FEDMF} --rounds 5 --eval-every 2", tmp_path / "r")
    evaluated = [line["round"] for line in lines_of(tmp_path / "r") if "test/hr_10" in line]
    assert evaluated == [2, 4, 5] and summary["best_round"] in evaluated


def test_a_budget_ends_the_run_with_the_round_that_reaches_it(tmp_path: Path) -> None:
    words = FEDMF.replace(" --rounds 3", " -n 20 --eval-every 100")
    visits = carry_out(f"{words} --budget visits --budget-value 90", tmp_path / "v")
    assert (visits["rounds"], visits["client_visits"], visits["best_round"]) == (5, 100, 5)
    used = [line["bytes_up"] + line["bytes_down"] for line in lines_of(tmp_path / "v")]
    enough = carry_out(f"{words} --budget bytes --budget-value {used[2]}", tmp_path / "b")
    assert enough["rounds"] == 3 and lines_of(tmp_path / "b")[-1]["bytes_up"] + enough["bytes_down"] == used[2]
    assert carry_out(f"{words} --budget bytes --budget-value {used[2] + 1}", tmp_path / "c")["rounds"] == 4
    again = run.run(resolve(["--config", str(tmp_path / "v" / "config.json"), "--out", str(tmp_path / "d")]))
    assert result(again) == result(visits)


def test_a_published_run_says_that_it_leaks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"--algo fedem {DATA} --protocol published --rounds 2 -e 1 --dim 8 --adapter 16,8,1 --no-mlflow --quiet"
    summary = carry_out(words, tmp_path / "r")
    assert "LEAKY" in capsys.readouterr().out
    assert summary["leaky"] is True and summary["recipe"] == "published"
    assert "LEAKY" in (tmp_path / "r" / "log.txt").read_text() and "LEAKY" in (tmp_path / "r" / "summary.json").read_text()
    config = json.loads((tmp_path / "r" / "config.json").read_text())
    assert (config["agg_ratio"], config["train_negatives"], config["select_on"]) == (0.1, "leaky", "test")


def test_a_clean_run_does_not(tmp_path: Path) -> None:
    carry_out(FEDMF, tmp_path / "r")
    assert not any("LEAKY" in (tmp_path / "r" / name).read_text() for name in ("log.txt", "summary.json", "config.json"))


def test_mlflow_mirrors_the_run_and_the_leak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.chdir(tmp_path)
    words = f"--algo local {DATA} --protocol published --rounds 2 -e 1 --dim 4 --quiet"
    summary = carry_out(words, tmp_path / "r")
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("fedbench")
    (mirrored,) = client.search_runs([experiment.experiment_id])
    assert mirrored.info.status == "FINISHED" and mirrored.data.tags["leaky"] == "LEAKY"
    assert mirrored.data.tags["protocol_fingerprint"] == summary["protocol_fingerprint"]
    assert mirrored.data.params["algo"] == "local" and mirrored.data.params["local_epochs"] == "1"
    assert mirrored.data.metrics["test/hr_10"] == pytest.approx(summary["test"]["hr_10"])


def test_the_table_says_in_words_when_popularity_is_not_beaten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = carry_out(f"--algo random {DATA} --no-mlflow --quiet", tmp_path / "r")
    out = capsys.readouterr().out
    assert not summary["beats_popularity"] and "! random does NOT beat popularity: HR@10" in out
    assert "popularity" in out and "random (exact)" in out and str(tmp_path / "r") in out
    assert any("does NOT beat popularity" in note for note in summary["notes"])


def test_popularity_is_the_floor_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = carry_out(f"--algo popularity {DATA} --no-mlflow --quiet", tmp_path / "r")
    assert {key: summary["test"][key] for key in summary["popularity"]} == summary["popularity"]
    assert summary["notes"] == [] and "NOT beat" not in capsys.readouterr().out


@pytest.mark.parametrize("algo", [FEDMF, FEDEM])
def test_refit_trains_again_with_validation_in_training(algo: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"{algo} --eval-every 2"
    strict = result(carry_out(words, tmp_path / "strict"))
    found = carry_out(f"{words} --refit", tmp_path / "r")
    name = found["algo"]
    assert f"{name} refit" in capsys.readouterr().out
    refit = found.pop("refit")
    assert found.pop("config_hash") != strict.pop("config_hash")  # --refit is a flag like others
    assert result(found) == strict and lines_of(tmp_path / "r")[-1]["round"] == strict["rounds"]
    assert refit["rounds"] == strict["best_round"] and refit["test"].keys() == strict["test"].keys()
    lines = [json.loads(line) for line in (tmp_path / "r" / "refit.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == list(range(1, refit["rounds"] + 1))

    config = resolve(words.split())
    parts, _ = prepare.prepare(config.dataset, config.protocol, config.data)
    federation = run.Federation.start(config.algorithm, parts.with_validation_in_training(), config.seed)
    for _ in range(refit["rounds"]):
        federation.next_round()
    ranks = pd.read_parquet(tmp_path / "r" / "per_client.parquet")
    assert (ranks["refit_rank_test"] == federation.sampled_ranks()["test"]).all()
    assert (ranks["refit_full_rank_test"] == federation.full_ranks()["test"]).all()
    assert refit["test"]["hr_10"] == pytest.approx((ranks["refit_rank_test"] <= 10).mean())


def test_an_interrupted_refit_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = f"{FEDMF} --refit"
    expected = carry_out(words, tmp_path / "steady")
    assert expected["refit"]["rounds"] > 1
    with monkeypatch.context() as patch:
        interrupting(patch, when=expected["rounds"] + 1)
        assert cli.main([*words.split(), "--out", str(tmp_path / "r")]) == 130
    assert not (tmp_path / "r" / "summary.json").exists() and len(lines_of(tmp_path / "r")) == expected["rounds"]
    found = carry_out(words, tmp_path / "r")
    assert result(found) == result(expected) and found["seconds_per_round"] > 0
    assert len((tmp_path / "r" / "refit.jsonl").read_text().splitlines()) == expected["refit"]["rounds"]


def test_mlflow_names_the_refit_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.chdir(tmp_path)
    summary = carry_out(f"--algo fedmf {DATA} --rounds 2 --dim 4 --refit --quiet", tmp_path / "r")
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    (mirrored,) = client.search_runs([client.get_experiment_by_name("fedbench").experiment_id])
    metrics = mirrored.data.metrics
    assert metrics["refit/test/hr_10"] == pytest.approx(summary["refit"]["test"]["hr_10"])
    assert metrics["best/test/hr_10"] == pytest.approx(summary["test"]["hr_10"]) and "refit/loss" in metrics


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("--refit --select-on test", 2, "--refit trains for the rounds that validation chose"),
        ("-n 61", 2, "-n/--clients-per-round 61 is more than the 60 clients"),
        ("--device cuda", 2, "--device cuda: this machine has no CUDA device"),
        ("--device cuda:7", 2, "--device cuda:7: this machine has"),
        ("--out /proc/nowhere/run", 2, "--out /proc/nowhere/run cannot be written"),
        ("--min-interactions 500", 3, "no user has 500 or more interactions"),
        ("--lr 1e30 --init-scale 1e30", 1, "training diverged; lower the learning rate"),
    ],
)
def test_what_cannot_run_ends_in_one_line(
    words: str, code: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "cuda" in words:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    where = [] if "--out" in words else ["--out", str(tmp_path / "r")]
    assert cli.main([*FEDMF.split(), *words.split(), *where]) == code
    out, err = capsys.readouterr()
    assert out == "" and says in err and "Traceback" not in err
    assert sum(line.startswith("fedbench: error: ") for line in err.splitlines()) == 1


def test_a_budget_that_is_never_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"--algo random {DATA} --no-mlflow --quiet --budget bytes --budget-value 1"
    assert cli.main([*words.split(), "--out", str(tmp_path / "r")]) == 2
    assert "--budget bytes: random uses none" in capsys.readouterr().err


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = carry_out(FEDMF, tmp_path / "r")
    assert cli.main([*FEDMF.split(), "--seed", "1", "--out", str(tmp_path / "r")]) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert result(summary_of(tmp_path / "r")) == result(run_log.plain(expected))


def interrupting(monkeypatch: pytest.MonkeyPatch, when: int, signals: int = 1) -> None:
    """Ctrl-C in the middle of a round: the clients have trained, the server has not moved."""
    run_cohort, train_round = Engine.run_cohort, run.Federation.next_round
    now = [0]

    def counted(self: run.Federation) -> Any:
        now[0] += 1
        return train_round(self)

    def pressed(self: Engine, *arguments: Any) -> Any:
        done = run_cohort(self, *arguments)
        if now[0] == when:
            now[0] = -100
            for _ in range(signals):
                signal.raise_signal(signal.SIGINT)
        return done

    monkeypatch.setattr(run.Federation, "next_round", counted)
    monkeypatch.setattr(Engine, "run_cohort", pressed)


@pytest.mark.parametrize("algo", [FEDMF, FEDEM])
@pytest.mark.parametrize("when", [1, 2, 3])
def test_an_interrupt_within_a_round_spoils_nothing(algo: str, when: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = f"{algo} --block-rows 400 --eval-every 2"
    expected = carry_out(words, tmp_path / "steady")
    with monkeypatch.context() as patch:
        interrupting(patch, when)
        assert cli.main([*words.split(), "--out", str(tmp_path / "r")]) == 130
    assert not (tmp_path / "r" / "summary.json").exists() and len(lines_of(tmp_path / "r")) == when
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    found = carry_out(words, tmp_path / "r")
    assert result(found) == result(expected)
    assert [line["round"] for line in lines_of(tmp_path / "r")] == list(range(1, expected["rounds"] + 1))


def test_a_second_interrupt_does_not_wait_and_saves_no_half_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupting(monkeypatch, when=2, signals=2)
    assert cli.main([*FEDEM.split(), "--out", str(tmp_path / "r")]) == 130
    assert len(lines_of(tmp_path / "r")) == 1 and not (tmp_path / "r" / "checkpoint").exists()


@pytest.mark.kernels
def test_a_centralised_method_goes_on_with_another_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*FEDMF.replace("fedmf", "central_mf").split(), "--out", str(tmp_path / "r")]
    train_round = run.Federation.next_round

    def pressed(self: run.Federation) -> Any:
        if self.round == 1:
            signal.raise_signal(signal.SIGINT)
        return train_round(self)

    with monkeypatch.context() as patch:
        patch.setattr(run.Federation, "next_round", pressed)
        assert cli.main([*words, "--kernel", "off"]) == 130
    assert cli.main(words) == 0
    assert cli.main([*words[:-1], str(tmp_path / "whole")]) == 0
    pieces, whole = (lines_of(tmp_path / name)[-1]["loss"] for name in ("r", "whole"))
    assert pieces == pytest.approx(whole, rel=1e-4)


def test_resume_refuses_another_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with monkeypatch.context() as patch:
        interrupting(patch, when=2)
        assert cli.main([*FEDMF.split(), "--out", str(tmp_path / "r")]) == 130
    before = {name: (tmp_path / "r" / name).read_text() for name in ("config.json", "env.json", "metrics.jsonl", "log.txt")}
    for words, says in (
        ("--seed 1", "that run has --seed 0, here it is 1"),
        ("--interactions 13", "that run has --interactions 12, here it is 13"),
        ("--min-interactions 6", "that run has --min-interactions 5, here it is 6"),
    ):
        assert cli.main([*FEDMF.split(), *words.split(), "--resume", str(tmp_path / "r")]) == 2
        assert says in capsys.readouterr().err
    assert {name: (tmp_path / "r" / name).read_text() for name in before} == before
    (tmp_path / "empty").mkdir()
    assert cli.main([*FEDMF.split(), "--resume", str(tmp_path / "empty")]) == 2
    assert "no run and no checkpoint there" in capsys.readouterr().err


@pytest.mark.kernels
def test_ctrl_c_in_a_real_process(tmp_path: Path) -> None:
    words = f"{FEDEM} --kernel off --rounds 250 -e 1 --eval-every 100"
    command = [sys.executable, str(ROOT / "train.py"), *words.split(), "--out", str(tmp_path / "r")]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})
    metrics = tmp_path / "r" / "metrics.jsonl"
    try:
        deadline = time.monotonic() + 600
        while (
            time.monotonic() < deadline and process.poll() is None and (not metrics.exists() or len(metrics.read_bytes().splitlines()) < 5)
        ):
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == 130, err.decode()
    saved, *_ = checkpoint.rounds(tmp_path / "r")  # on a busy machine a minute may have passed, and saved one before
    assert (
        err.decode().splitlines()[-1] == f"fedbench: interrupted after round {saved}; the same command resumes it"
        and b"Traceback" not in err
    )
    assert 5 <= saved < 250 and saved == len(lines_of(tmp_path / "r"))
    found = carry_out(f"{words} --resume {tmp_path / 'r'}", tmp_path / "r")
    assert result(found) == result(carry_out(words, tmp_path / "steady"))


def test_a_config_is_a_value() -> None:
    config = resolve(FEDMF.split())
    assert dataclasses.replace(config, threads=2, block_rows=10).hash8() == config.hash8()
    assert dataclasses.replace(config, seed=5).hash8() != config.hash8()
