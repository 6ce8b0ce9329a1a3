"""Which device a run computes on. There is no GPU here: torch is told that there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedbench.commands import cli
from fedbench.errors import UsageError
from fedbench.experiment import machine
from fedbench.settings.command_line import resolve
from fedbench.settings.config import RunConfig
from fedbench.simulation import workers

TINY = "--dataset synthetic --users 20 --items 60 --interactions 8 --rounds 1 --no-mlflow --quiet"


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The devices that were made torch's current one, on a machine with two CUDA GPUs and an Apple one."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    return chosen


def test_auto_is_cuda_or_cpu_and_never_mps(current: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.choose_device("auto") == "cuda"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert machine.choose_device("auto") == "cpu"
    assert machine.choose_device("mps") == "mps"
    assert current == []


def test_a_device_that_is_named_by_its_number_becomes_the_current_one(current: list[int]) -> None:
    assert machine.choose_device("cuda:1") == "cuda:1"
    assert current == [1]
    with pytest.raises(UsageError, match="has 2 CUDA devices"):
        machine.choose_device("cuda:2")
    assert current == [1]


def test_each_worker_of_a_machine_makes_its_own_gpu_the_current_one(current: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "count", lambda: 2)
    monkeypatch.setattr(workers, "on_this_machine", lambda: 2)
    monkeypatch.setattr(workers, "is_first", lambda: True)
    joined: list[tuple[str, list[int]]] = []
    monkeypatch.setattr(workers, "join", lambda device: joined.append((device, list(current))))
    monkeypatch.setattr(machine, "set_threads", lambda count: None)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert machine.set_up(config("--algo fedmf --device cuda")) == "cuda:1"
    assert joined == [("cuda:1", [1])]  # before the workers connect, which allocates on the GPU


@pytest.mark.parametrize(
    ("words", "said"),
    [("--algo fedmf --dtype float64", "Apple GPUs have no float64"), ("--algo fedem", "fedem compares clients in float64")],
)
def test_what_an_apple_gpu_cannot_do_is_refused_before_training(
    words: str, said: str, current: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [*words.split(), *TINY.split(), "--device", "mps", "--out", str(tmp_path / "r")]
    assert cli.main(line) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "r").exists()


def test_mps_says_what_does_not_work_there(current: list[int], caplog: pytest.LogCaptureFixture) -> None:
    assert machine.set_up(config("--algo fedmf --device mps")) == "mps"
    assert "no compiled kernels and no float64" in caplog.text


def config(words: str) -> RunConfig:
    return resolve([*words.split(), *TINY.split()])
