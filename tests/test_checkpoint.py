"""A run's state on disk: what is read is what was written, whole or not at all, and a damaged one is done without."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from fedbench.errors import FedbenchError, UsageError
from fedbench.experiment import checkpoint
from fedbench.settings.cadence import Cadence

FACTS = {"round": 3, "config": "0a1b2c3d", "best_score": 0.1 + 0.2, "note": "µ"}


def tensors() -> dict[str, torch.Tensor]:
    numbers = torch.arange(24, dtype=torch.float64).view(2, 3, 4) / 7
    return {
        "client/items": numbers,
        "client/turned": numbers.transpose(0, 2),
        "client/same start": numbers[:1].expand(5, 3, 4),
        "server/slot": torch.tensor([-1, 0, 2]),
        "server/nothing": torch.empty(0, 3),
        "server/scalar": torch.tensor(0.1),
        "visits": torch.ones(3, dtype=torch.int64),
    }


def assert_holds(folder: Path, facts: dict[str, object], expected: dict[str, torch.Tensor]) -> None:
    state = checkpoint.newest(folder)
    assert state is not None
    found = state.tensors("cpu")
    assert state.facts == facts and set(found) == set(expected)
    for name, value in found.items():
        assert value.dtype == expected[name].dtype and torch.equal(value, expected[name]), name


def files(folder: Path) -> set[str]:
    return {path.name for path in (folder / "checkpoint").iterdir()}


def of_rounds(*rounds: int) -> set[str]:
    return {f"round-{number}.{kind}" for number in rounds for kind in ("json", "safetensors")}


def test_round_trip(tmp_path: Path) -> None:
    checkpoint.save_round(tmp_path, 3, FACTS, tensors())
    assert_holds(tmp_path, FACTS, tensors())


def test_no_state_is_none(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path) is None and checkpoint.rounds(tmp_path) == []


def test_names_that_share_memory_are_saved_each(tmp_path: Path) -> None:
    table = torch.arange(6.0)
    shared = {"server/items": table, "server/before": table, "client/head": table[:4], "client/tail": table[3:]}
    checkpoint.save_round(tmp_path, 3, FACTS, shared)
    assert_holds(tmp_path, FACTS, shared)


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    for number in (2, 9, 10, 11):
        checkpoint.save_round(tmp_path, number, {"round": number}, {"only": torch.full((2,), float(number))})
    assert checkpoint.rounds(tmp_path) == [11, 10] and files(tmp_path) == of_rounds(10, 11)
    assert_holds(tmp_path, {"round": 11}, {"only": torch.tensor([11.0, 11.0])})


def test_a_finished_run_keeps_its_model_alone_or_nothing(tmp_path: Path) -> None:
    checkpoint.save_round(tmp_path, 3, FACTS, tensors())
    checkpoint.save(tmp_path, checkpoint.MODEL, FACTS, tensors())
    checkpoint.prune(tmp_path, keep=0)
    assert files(tmp_path) == {"model.json", "model.safetensors"} and checkpoint.newest(tmp_path) is None
    assert checkpoint.read(tmp_path, checkpoint.MODEL).facts == FACTS
    (tmp_path / "other").mkdir()
    checkpoint.save_round(tmp_path / "other", 3, FACTS, tensors())
    checkpoint.prune(tmp_path / "other", keep=0)
    assert not (tmp_path / "other" / "checkpoint").exists()


def test_no_pickle_in_the_folder(tmp_path: Path) -> None:
    checkpoint.save_round(tmp_path, 3, FACTS, tensors())
    assert json.loads((tmp_path / "checkpoint" / "round-3.json").read_text())["facts"] == FACTS
    # a safetensors file: the length of its header, the header in JSON, then numbers alone
    content = (tmp_path / "checkpoint" / "round-3.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    assert set(json.loads(content[8 : 8 + size])) - {"__metadata__"} == set(tensors())


@pytest.mark.parametrize("step", range(8))
def test_a_write_that_is_cut_short_anywhere_leaves_the_state_before(tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends at one of the calls that change the folder: nothing after it happens."""
    checkpoint.save_round(tmp_path, 3, FACTS, tensors())
    calls = 0

    class Killed(BaseException):
        pass

    def counted(work: Any) -> Any:
        def call(*arguments: Any, **more: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > step:
                raise Killed
            return work(*arguments, **more)

        return call

    with monkeypatch.context() as patch:
        for place, name in ((Path, "replace"), (Path, "unlink"), (Path, "write_text"), (checkpoint, "save_file"), (os, "fsync")):
            patch.setattr(place, name, counted(getattr(place, name)))
        with pytest.raises(Killed):
            checkpoint.save_round(tmp_path, 4, {"round": 4}, {"only": torch.zeros(2)})
            checkpoint.save_round(tmp_path, 5, {"round": 5}, {"only": torch.zeros(2)})
    state = checkpoint.newest(tmp_path)
    assert state is not None and state.facts["round"] in (3, 4)
    assert_holds(tmp_path, *((FACTS, tensors()) if state.facts["round"] == 3 else ({"round": 4}, {"only": torch.zeros(2)})))
    checkpoint.save_round(tmp_path, 5, {"round": 5}, tensors())
    assert_holds(tmp_path, {"round": 5}, tensors())
    assert files(tmp_path) == of_rounds(state.facts["round"], 5)


def test_a_state_written_again_replaces_a_damaged_one(tmp_path: Path) -> None:
    checkpoint.save_round(tmp_path, 3, FACTS, tensors())
    (tmp_path / "checkpoint" / "round-3.safetensors").write_bytes(b"")
    checkpoint.save_round(tmp_path, 3, FACTS, tensors())
    assert_holds(tmp_path, FACTS, tensors())


def damage(file: Path, how: str) -> None:
    content = file.read_bytes()
    if how == "gone":
        file.unlink()
    elif how == "flipped":
        middle = len(content) // 2
        file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    else:
        file.write_bytes(content[: int(how)])


@pytest.mark.parametrize("how", ["0", "4", "60", "-1", "flipped", "gone"])
@pytest.mark.parametrize("kind", ["safetensors", "json"])
def test_a_damaged_state_is_done_without(tmp_path: Path, kind: str, how: str, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint.save_round(tmp_path, 3, FACTS, tensors())
    checkpoint.save_round(tmp_path, 4, {"round": 4}, tensors())
    damage(tmp_path / "checkpoint" / f"round-4.{kind}", how)
    assert_holds(tmp_path, FACTS, tensors())
    if (kind, how) != ("json", "gone"):
        (said,) = (record.getMessage() for record in caplog.records)
        assert "round-4.json cannot be read (" in said and said.endswith("the checkpoint before it is used") and "\n" not in said
    damage(tmp_path / "checkpoint" / f"round-3.{kind}", how)
    assert checkpoint.newest(tmp_path) is None


def test_a_changed_fact_is_found(tmp_path: Path) -> None:
    checkpoint.save_round(tmp_path, 3, FACTS, tensors())
    file = tmp_path / "checkpoint" / "round-3.json"
    file.write_text(file.read_text().replace('"round": 3', '"round": 2'))
    with pytest.raises(FedbenchError, match="checksum is wrong"):
        checkpoint.read(tmp_path, "round-3")


@pytest.mark.parametrize(
    ("text", "due"),
    [("1", [1, 2, 3, 4, 5, 6]), ("3", [3, 6]), ("never", []), ("2h", []), ("auto", [])],
)
def test_rounds_between_checkpoints(text: str, due: list[int]) -> None:
    cadence = Cadence.of(text)
    assert [number for number in range(1, 7) if cadence.due(number)] == due


def test_time_between_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("fedbench.settings.cadence.time.monotonic", lambda: now)
    every, auto = Cadence.of("5m"), Cadence.of("auto")
    now = 160.0
    assert auto.due(1) and not every.due(1)
    auto.saved(took=0.5)  # under 2 % of a minute
    now = 219.0
    assert not auto.due(2)
    now = 220.0
    assert auto.due(2)
    auto.saved(took=20.0)  # 2 % of 1,000 seconds
    now = 1219.0
    assert not auto.due(3)
    now = 1220.0
    assert auto.due(3) and every.due(3)


@pytest.mark.parametrize("text", ["0", "0s", "-1", "1.5", "10 rounds", "s", "1e3", "²"])
def test_a_cadence_that_makes_no_sense(text: str) -> None:
    with pytest.raises(UsageError, match="--checkpoint-every must be"):
        Cadence.of(text)
