"""A run's state on disk: what is read is what was written, whole or not at all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from fedbench import checkpoint
from fedbench.errors import FedbenchError

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
    state = checkpoint.load(folder, "cpu")
    assert state is not None
    assert state[0] == facts and set(state[1]) == set(expected)
    for name, value in state[1].items():
        assert value.dtype == expected[name].dtype and torch.equal(value, expected[name]), name


def test_round_trip(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, FACTS, tensors())
    assert_holds(tmp_path, FACTS, tensors())


def test_no_state_is_none(tmp_path: Path) -> None:
    assert checkpoint.load(tmp_path, "cpu") is None


def test_names_that_share_memory_are_saved_each(tmp_path: Path) -> None:
    table = torch.arange(6.0)
    shared = {"server/items": table, "server/before": table, "client/head": table[:4], "client/tail": table[3:]}
    checkpoint.save(tmp_path, FACTS, shared)
    assert_holds(tmp_path, FACTS, shared)


def test_a_later_state_replaces_the_earlier_one(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, FACTS, tensors())
    later = {"only": torch.zeros(2)}
    checkpoint.save(tmp_path, {"round": 4}, later)
    assert_holds(tmp_path, {"round": 4}, later)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_no_pickle_in_the_folder(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, FACTS, tensors())
    files = {path.name: path.read_bytes() for path in (tmp_path / "checkpoint").iterdir()}
    assert set(files) == {"state.json", "state.safetensors"}
    assert json.loads(files["state.json"]) == FACTS
    # a safetensors file: the length of its header, the header in JSON, then numbers alone
    size = int.from_bytes(files["state.safetensors"][:8], "little")
    assert set(json.loads(files["state.safetensors"][8 : 8 + size])) - {"__metadata__"} == set(tensors())


@pytest.mark.parametrize("written", ["nothing", "half of the tensors", "all but the rename"])
def test_an_interrupted_write_leaves_the_old_state(tmp_path: Path, written: str) -> None:
    checkpoint.save(tmp_path, FACTS, tensors())
    fresh = tmp_path / "checkpoint.new"
    fresh.mkdir()
    whole = (tmp_path / "checkpoint" / "state.safetensors").read_bytes()
    if written != "nothing":
        (fresh / "state.safetensors").write_bytes(whole[: len(whole) // 2])
    if written == "all but the rename":
        (fresh / "state.json").write_text('{"round": 4}')
    assert_holds(tmp_path, FACTS, tensors())
    checkpoint.save(tmp_path, {"round": 5}, tensors())
    assert_holds(tmp_path, {"round": 5}, tensors())
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_interrupted_between_the_renames(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, FACTS, tensors())
    (tmp_path / "checkpoint").rename(tmp_path / "checkpoint.old")
    shutil.copytree(tmp_path / "checkpoint.old", tmp_path / "checkpoint.new")
    assert_holds(tmp_path, FACTS, tensors())
    checkpoint.save(tmp_path, {"round": 5}, tensors())
    assert_holds(tmp_path, {"round": 5}, tensors())
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("survived", [0, 1])
def test_a_state_can_be_read_whichever_rename_is_interrupted(tmp_path: Path, survived: int, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, FACTS, tensors())
    rename = Path.rename
    done: list[Path] = []

    def interrupted(self: Path, target: Path) -> Path:
        if len(done) == survived:
            raise KeyboardInterrupt
        done.append(target)
        return rename(self, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", interrupted)
        checkpoint.save(tmp_path, {"round": 4}, {"only": torch.zeros(2)})
    assert_holds(tmp_path, FACTS, tensors())


def test_interrupted_before_the_old_one_is_removed(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, FACTS, tensors())
    shutil.copytree(tmp_path / "checkpoint", tmp_path / "earlier")
    checkpoint.save(tmp_path, {"round": 4}, {"only": torch.zeros(2)})
    (tmp_path / "earlier").rename(tmp_path / "checkpoint.old")
    assert_holds(tmp_path, {"round": 4}, {"only": torch.zeros(2)})
    checkpoint.save(tmp_path, {"round": 5}, tensors())
    assert_holds(tmp_path, {"round": 5}, tensors())


def test_a_write_that_fails_leaves_the_old_state(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, FACTS, tensors())
    with pytest.raises(TypeError):
        checkpoint.save(tmp_path, {"round": object()}, {"only": torch.zeros(2)})
    assert_holds(tmp_path, FACTS, tensors())


@pytest.mark.parametrize("keep", [0, 4, 60, -1])
@pytest.mark.parametrize("name", ["state.safetensors", "state.json"])
def test_a_truncated_file_is_one_line(tmp_path: Path, name: str, keep: int) -> None:
    checkpoint.save(tmp_path, FACTS, tensors())
    file = tmp_path / "checkpoint" / name
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(FedbenchError) as error:
        checkpoint.load(tmp_path, "cpu")
    said = str(error.value)
    assert said.startswith(f"{tmp_path / 'checkpoint'} cannot be read (") and said.endswith("; start again with another --out")
    assert "\n" not in said


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, FACTS, tensors())
    (tmp_path / "checkpoint" / "state.safetensors").unlink()
    with pytest.raises(FedbenchError, match="cannot be read .*; start again with another --out$"):
        checkpoint.load(tmp_path, "cpu")
