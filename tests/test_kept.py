"""The model that is kept is the reported round's, wherever its state was set aside; `evaluate` gives the reported numbers again."""

from __future__ import annotations

import hashlib
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fedbench.__main__ import main
from fedbench.commands import cli
from fedbench.experiment import checkpoint, kept_model
from tests.test_run import interrupting, summary_of

WORDS = (
    "--algo fedem --dataset synthetic --users 40 --items 80 --interactions 10 --dim 4 --adapter 8,1 -n 25 -e 3 --rounds 5 --kernel off "
    "--row-negatives --train-user always --no-mlflow --quiet"
)
"""own rows forget what is drawn, so that the last round is not the best"""
NEVER_IN_MEMORY = {"SMALL_BYTES": -1, "FREE_SHARE": 0.0}


def patched(monkeypatch: pytest.MonkeyPatch, **values: float) -> None:
    for name, value in values.items():
        monkeypatch.setattr(kept_model, name, value)


def trained(out: Path, words: str = "") -> dict[str, Any]:
    assert cli.main([*f"{WORDS} {words}".split(), "--out", str(out)]) == 0
    return summary_of(out)


def digest(out: Path) -> str:
    return hashlib.sha256((out / "checkpoint" / "model.safetensors").read_bytes()).hexdigest()


def assert_kept(out: Path, summary: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """The reported round's state alone is left, and measuring it gives the summary's figures."""
    assert summary["best_round"] < summary["rounds"]
    assert {file.name for file in (out / "checkpoint").iterdir()} == {"model.json", "model.safetensors"}
    assert checkpoint.read(out, checkpoint.MODEL).facts["round"] == summary["best_round"]
    capsys.readouterr()
    assert main(["evaluate", "--run", str(out)]) == 0
    said = capsys.readouterr().out
    assert f"test at round {summary['best_round']}" in said
    for name in ("hr_10", "ndcg_10", "mrr", "full_hr_10", "full_ndcg_10"):
        assert f"{summary['test'][name]:.4f}" in said


def test_in_memory_and_in_a_file_the_same_state_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = trained(tmp_path / "memory")
    assert_kept(tmp_path / "memory", summary, capsys)
    patched(monkeypatch, SMALL_BYTES=-1)
    trained(tmp_path / "large")
    patched(monkeypatch, **NEVER_IN_MEMORY)
    assert_kept(tmp_path / "file", trained(tmp_path / "file"), capsys)
    assert digest(tmp_path / "large") == digest(tmp_path / "file") == digest(tmp_path / "memory")


def test_clients_in_a_mapped_file_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = trained(tmp_path / "r", "--client-store mmap")
    assert_kept(tmp_path / "r", summary, capsys)
    assert summary["test"] == trained(tmp_path / "ram")["test"]


def test_a_run_that_was_interrupted_keeps_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patched(monkeypatch, **NEVER_IN_MEMORY)
    best = trained(tmp_path / "whole")["best_round"]
    for when in (best, best + 1):
        out = tmp_path / f"r{when}"
        with monkeypatch.context() as patch:
            interrupting(patch, when=when)
            assert cli.main([*WORDS.split(), "--out", str(out)]) == 130
        assert (out / "checkpoint" / "best.json").exists()
        if when == best:  # it has not been set aside yet, as after a kill: the checkpoint has it
            for name in ("best.json", "best.safetensors"):
                (out / "checkpoint" / name).unlink()
        trained(out)
        assert digest(out) == digest(tmp_path / "whole")


def test_without_room_the_last_state_is_kept_and_the_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    patched(monkeypatch, **NEVER_IN_MEMORY)
    free = shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    monkeypatch.setattr(logging.getLogger("fedbench"), "propagate", True)
    summary = trained(tmp_path / "r")
    assert "there is no room to set aside the reported round's state" in caplog.text
    assert checkpoint.read(tmp_path / "r", checkpoint.MODEL).facts["round"] == summary["rounds"] == 5


def test_a_copy_takes_the_memory_of_the_one_before() -> None:
    first = kept_model.copied({"a": torch.ones(3), "b": torch.ones(2)})
    again = kept_model.copied({"a": torch.zeros(3), "b": torch.zeros(4)}, first)
    assert again["a"] is first["a"] and again["a"].sum() == 0
    assert again["b"] is not first["b"] and len(again["b"]) == 4


def test_a_state_gets_another_name_where_links_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, checkpoint.BEST, {"round": 2}, {"a": torch.arange(3)})

    def refuse(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(checkpoint.os, "link", refuse)
    for _ in range(2):  # a run that was killed in between does it again
        checkpoint.rename(tmp_path, checkpoint.BEST, checkpoint.MODEL)
    checkpoint.prune(tmp_path, keep=0)
    assert {file.name for file in (tmp_path / "checkpoint").iterdir()} == {"model.json", "model.safetensors"}
    assert checkpoint.read(tmp_path, checkpoint.MODEL).tensors("cpu")["a"].tolist() == [0, 1, 2]
