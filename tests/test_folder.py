"""A run's folder that was tampered with: one line that names the file, whatever is asked of it; and no round is lost unsaid."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedbench.errors import DataError, FedbenchError
from fedbench.experiment import checkpoint, folder
from tests.test_files import DATA, ask
from tests.test_fuzz import CASES, nested

RUN = f"train --algo fedmf --dim 4 --kernel off {DATA} --rounds 3"
SWEEP = f"sweep --algo popularity {DATA} --rounds 1"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """r: a finished run; h: one that stopped after its second round; s: a finished sweep of one point, p. Not to be changed."""
    place = tmp_path_factory.mktemp("runs")
    assert ask(RUN, "--out", place / "r")[0] == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedbench.experiment.run.keep_model", lambda *_: (_ for _ in ()).throw(FedbenchError("stopped")))
        assert ask(RUN, "--out", place / "h", "--checkpoint-every", "1")[0] == 1
    assert checkpoint.rounds(place / "h") == [2, 1]
    assert ask(SWEEP, "--out", place / "s")[0] == 0
    return place


def copied(runs: Path, name: str, to: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(runs / name, to)
    return to


# ---- rounds ------------------------------------------------------------------------------------------------------------------


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines(keepends=True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda lines: lines[1:], "round 1 is missing"),
        (lambda lines: lines[:1], "round 2 is missing"),
        (lambda lines: [], "round 1 is missing"),
        (lambda lines: [lines[0], lines[0], *lines[1:]], "round 1 stands where round 2 belongs"),
        (lambda lines: [lines[1], lines[0]], "round 2 stands where round 1 belongs"),
        (lambda lines: ['{"round": 1}\n', *lines[1:]], "round 1 has no seconds"),
        (lambda lines: ["not json\n", *lines[1:]], "metrics.jsonl, line 1: not the line of a round"),
        (lambda lines: [lines[0], '["round"]\n'], "metrics.jsonl, line 2: not the line of a round"),
        (lambda lines: [lines[0], '{"round": 2, "loss": "low"}\n'], "metrics.jsonl, line 2"),
        (lambda lines: [lines[0], '{"round": true}\n'], "metrics.jsonl, line 2"),
    ],
)
def test_a_run_whose_rounds_are_not_all_there_does_not_go_on(runs: Path, tmp_path: Path, change: Any, said: str) -> None:
    out = copied(runs, "h", tmp_path / "h")
    path = out / "metrics.jsonl"
    before = "".join(change(lines_of(path)[:2]))
    path.write_text(before)
    code, error = ask(RUN, "--out", out)
    assert code in (2, 3) and said in error and "metrics.jsonl" in error
    assert path.read_text() == before and not (out / "summary.json").exists()


def test_rounds_after_the_checkpoint_are_made_again(runs: Path, tmp_path: Path) -> None:
    out = copied(runs, "h", tmp_path / "h")
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"round": 99, "seconds": 1000000}\n{"round": 4, "sec')
    assert ask(RUN, "--out", out)[0] == 0
    assert [json.loads(line)["round"] for line in lines_of(out / "metrics.jsonl")] == [1, 2, 3]
    mine, undisturbed = (json.loads((place / "summary.json").read_text()) for place in (out, runs / "r"))
    assert mine["test"] == undisturbed["test"] and mine["seconds_per_round"] < 1000


# ---- files of other content ------------------------------------------------------------------------------------------------------

GARBAGE = {
    "nothing": b"",
    "binary": bytes(range(256)),
    "no JSON": b'{"algo": ',
    "a list": b"[1, 2]",
    "a number": b"1e999",
    "deep": b"[" * 100_000,
    "nested": b'{"test": ' * 900 + b"1" + b"}" * 900,
}
ASKED = {
    "report {} --out {}-report": ("summary.json", "config.json", "metrics.jsonl", "per_client.parquet"),
    "recommend --run {} --user 1": ("config.json", "checkpoint/model.json", "checkpoint/model.safetensors"),
    "evaluate --run {}": ("config.json", "checkpoint/model.json"),
    "log-model --run {}": ("config.json", "checkpoint/model.json"),
    RUN + " --out {}": ("summary.json", "config.json"),
}


@pytest.mark.parametrize("words", ASKED)
def test_garbage_in_a_finished_runs_folder(runs: Path, tmp_path: Path, words: str) -> None:
    for name in ASKED[words]:
        for content in (*GARBAGE.values(), None):
            out = copied(runs, "r", tmp_path / "r")
            (out / name).unlink()
            if content is None:
                (out / name).mkdir()  # a folder in its place
            else:
                (out / name).write_bytes(content + b"\n" * (name == "metrics.jsonl"))  # else a line that is not whole yet
            code, said = ask(words.format(out, out))
            assert code in (1, 2, 3) and str(out) in said, (name, content, said)
            assert Path(name).name in said or content is None, (name, content, said)


ODD_SUMMARIES = [
    {"algo": 5}, {"leaky": "no"}, {"seed": "0"}, {"seed": 1.5}, {"seed": None}, {"seed": 10**400}, {"test": []},
    {"test": {"ndcg_10": "high"}}, {"test": {"ndcg_10": 10**400}}, {"test": {"ndcg_10": float("nan")}}, {"popularity": 3}, {"chance": []},
    {"val": {"a": {"b": 1}}}, {"rounds": "3"}, {"bytes_up": [1]}, {"best_round": {}}, {"items": "many"}, {"protocol_fields": 7},
    {"protocol_fields": {"eval_negatives": 10**15}}, {"protocol_fields": {"eval_negatives": "x"}}, {"protocol_fields": {"fold": "a"}},
    {"protocol_fields": {"fold": 0, "unheard_of": 1}}, {"new_user": 1}, {"seconds_per_round": "fast"}, {"protocol_fingerprint": None},
]  # fmt: skip


@pytest.mark.parametrize("odd", ODD_SUMMARIES)
def test_a_summary_of_wrong_types_is_named(runs: Path, tmp_path: Path, odd: dict[str, Any]) -> None:
    out = copied(runs, "r", tmp_path / "r")
    summary = json.loads((out / "summary.json").read_text())
    (out / "summary.json").write_text(json.dumps(summary | odd))
    code, said = ask("report", out, "--out", tmp_path / "report")
    assert code == 3 and str(out / "summary.json") in said
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize(
    ("keep", "said"), [(slice(1, None), "round 2 stands where round 1 belongs"), (slice(None, -1), "has 2 rounds of 3")]
)
def test_a_finished_run_with_a_round_missing_is_found(runs: Path, tmp_path: Path, keep: slice, said: str) -> None:
    out = copied(runs, "r", tmp_path / "r")
    path = out / "metrics.jsonl"
    path.write_text("".join(lines_of(path)[keep]))
    for words in (("report", out, "--out", tmp_path / "report"), (RUN, "--out", out)):
        code, text = ask(*words)
        assert code == 3 and f"{path}: {said}" in text


def test_clients_of_wrong_columns_are_named(runs: Path, tmp_path: Path) -> None:
    whole = pd.read_parquet(runs / "r" / "per_client.parquet")
    many = len(whole)
    for name in ("user", "train_items", "rank_test", "full_rank_test"):
        frames = [whole.drop(columns=name)]
        if name != "user":
            frames += [whole.assign(**{name: value}) for value in ("x", None, float("nan"), float("inf"), -1)]
        for frame in frames:
            out = copied(runs, "r", tmp_path / "r")
            frame.to_parquet(out / "per_client.parquet", index=False)
            with pytest.raises(DataError, match=r"per_client\.parquet"):
                folder.read_clients(out)
    twice = pa.table([pa.array([1] * many)] * 2 + [pa.array(["u"] * many)], names=["rank_test", "rank_test", "user"])
    for table in (twice, pa.table({"a": []}), pa.Table.from_pandas(whole[:0])):
        pq.write_table(table, tmp_path / "r" / "per_client.parquet")
        with pytest.raises(DataError, match=r"per_client\.parquet"):
            folder.read_clients(tmp_path / "r")


def test_a_model_with_right_checksums_that_is_another_is_named(runs: Path, tmp_path: Path) -> None:
    out = copied(runs, "r", tmp_path / "r")
    state = checkpoint.read(out, checkpoint.MODEL)
    whole = {name: value.clone() for name, value in state.tensors("cpu").items()}
    odd: list[tuple[dict[str, Any], dict[str, torch.Tensor | None]]] = [
        ({"round": "three"}, {}),
        ({"round": None}, {}),
        ({}, {"server/items": None}),
        ({}, {"client/user": None}),
        ({}, {"client/user": torch.zeros(3, 4)}),
        ({}, {"server/items": torch.zeros(2, 4)}),
        ({}, {"server/items": whole["server/items"].double()}),
        ({}, {"clients": torch.tensor([0, 10**12])}),
        ({}, {"clients": torch.tensor([-1, 0])}),
        ({}, {"clients": torch.tensor([0.5])}),
    ]
    for facts, tensors in odd:
        kept = {name: value for name, value in {**whole, **tensors}.items() if value is not None}
        checkpoint.save(out, checkpoint.MODEL, state.facts | facts, kept)
        for words in (f"recommend --run {out} --user 1", f"evaluate --run {out}"):
            code, said = ask(words)
            assert code == 3 and str(out / "checkpoint" / "model.safetensors") in said, (facts, said)


@pytest.mark.parametrize("odd", [b"[]", b"{", b'{"points": 3}', b'{"points": [1]}', b'{"points": [{"key": 1}]}'])
def test_a_sweeps_own_file(runs: Path, tmp_path: Path, odd: bytes) -> None:
    out = copied(runs, "s", tmp_path / "s")
    (out / "sweep.json").write_bytes(odd)
    code, said = ask(SWEEP, "--out", out)
    assert code == 3 and str(out / "sweep.json") in said


def test_a_sweeps_points(runs: Path, tmp_path: Path) -> None:
    for name in ("summary.json", "config.json"):
        for content in (b"[]", b"{", b"\xff", b'{"algo": [[1]]}'):
            out = copied(runs, "s", tmp_path / "s")
            (point,) = (path.parent for path in out.glob("*/summary.json"))
            (point / name).write_bytes(content)
            code, said = ask(SWEEP, "--out", out)
            assert code == 3 and str(point / name) in said
    out = copied(runs, "s", tmp_path / "s")
    (out / "table.csv").write_bytes(b"\xff")
    (out / "table.md").unlink()
    assert ask(SWEEP, "--out", out)[0] == 0 and "popularity" in (out / "table.csv").read_text()


def test_env_json_of_another_kind(runs: Path, tmp_path: Path) -> None:
    for content in (b"[]", b"{", b"\xff"):
        out = copied(runs, "h", tmp_path / "h")
        (out / "env.json").write_bytes(content)
        code, said = ask(RUN, "--out", out)
        assert code == 3 and str(out / "env.json") in said
    (out / "env.json").write_text('{"mlflow_run_id": ["../.."]}')
    assert ask(RUN, "--out", out)[0] == 0


# ---- at random ---------------------------------------------------------------------------------------------------------------

FILES = ("summary.json", "config.json", "metrics.jsonl", "per_client.parquet", "env.json", "checkpoint/model.json")


@settings(max_examples=max(2, CASES // 2), deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(
    st.sampled_from(FILES),
    st.binary(max_size=80) | st.dictionaries(st.text(max_size=8), nested, max_size=3),
    st.sampled_from([*ASKED][:3] + [RUN + " --out {}"]),
)
def test_whatever_a_file_holds(runs: Path, tmp_path_factory: pytest.TempPathFactory, name: str, held: Any, words: str) -> None:
    """Bytes of any kind, or an object with some of its values exchanged: a result, or one line."""
    out = copied(runs, "r", tmp_path_factory.getbasetemp() / "fuzzed")
    path = out / name
    if isinstance(held, bytes):
        path.write_bytes(held)
    elif name.endswith(".json"):
        before = json.loads(path.read_text())
        keys = dict(zip(sorted(before), held.values(), strict=False))
        path.write_text(json.dumps(before | held | keys))
    elif name.endswith(".jsonl"):
        path.write_text(path.read_text() + json.dumps({"round": 1} | held) + "\n")
    else:
        frame = pd.read_parquet(path)
        column = frame.columns[len(held) % len(frame.columns)]
        buffer = io.BytesIO()
        frame.assign(**{column: str(held)}).to_parquet(buffer, index=False)
        path.write_bytes(buffer.getvalue())
    code, said = ask(words.format(out, out))
    assert code in (0, 1, 2, 3) and (code == 0 or str(out) in said), said
