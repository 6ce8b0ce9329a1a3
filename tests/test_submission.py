"""A run as one file: an honest one is verified, whole or in part; what was tampered with is refused with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedbench import trust
from fedbench.__main__ import main
from fedbench.commands import cli
from fedbench.experiment import submission
from sweeps import submitted
from tests.test_docs import examples

SIZE = "--users 40 --items 160 --interactions 10 --rounds 4 --no-mlflow --quiet --threads 1 --kernel off"


def train(folder: Path, algo: str, *flags: str) -> Path:
    assert cli.main(["--algo", algo, "--dataset", "synthetic", *SIZE.split(), *flags, "--out", str(folder / "run")]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("submission")
    run = train(folder, "fedmf", "--data-dir", str(folder))
    assert main(["submit", str(run), "--by", "A. Author", "--out", str(folder / "mine.json")]) == 0
    return folder / "mine.json"


def changed(written: Path, place: Path, change: Callable[[dict[str, Any]], object], sealed: bool = False) -> Path:
    content = json.loads(written.read_text())
    change(content)
    if sealed:
        content["digest"] = submission.digest_of(content)
    path = place / "changed.json"
    path.write_text(submission.text_of(content))
    return path


def test_the_file_says_all_of_the_run_and_nothing_of_the_machines_folders(written: Path) -> None:
    content = submission.read(written)
    config = json.loads((written.parent / "run" / "config.json").read_text())
    assert content["config"] == {key: value for key, value in config.items() if key not in ("data_dir", "cache_dir")}
    assert content["result"]["test"] == json.loads((written.parent / "run" / "summary.json").read_text())["test"]
    assert len(content["rounds"]) == 4 and content["by"] == "A. Author" and content["versions"]["packages"]["torch"]
    assert str(written.parent) not in written.read_text() and submission.refusals(content) == []
    assert content == json.loads(submission.text_of(content))


@pytest.mark.parametrize(
    "part, said", [([], "all 4 rounds"), (["--rounds", "2"], "first 2 of 4 rounds"), (["--rounds", "0"], "nothing was trained")]
)
def test_an_honest_file_is_verified_on_another_thread_count(
    written: Path, part: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(written), "--threads", "2", *part]) == 0
    out = capsys.readouterr().out
    assert said in out and ("numbers compared" in out) == ("0" not in part)


def test_a_method_with_a_schedule_can_be_verified_in_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The number of rounds stays that of the whole run: its server's steps depend on it."""
    run = train(tmp_path, "fedmf", "--server-decay", "linear", "--eval-every", "2")
    assert main(["submit", str(run), "--out", str(tmp_path / "mine.json")]) == 0
    assert main(["verify", str(tmp_path / "mine.json"), "--rounds", "3"]) == 0


def worse(content: dict[str, Any], everywhere: bool) -> None:
    content["result"]["test"]["ndcg_10"] += 0.02
    if everywhere:
        content["rounds"][content["result"]["best_round"] - 1]["test/ndcg_10"] += 0.02


def hidden(content: dict[str, Any]) -> None:
    """The metrics of all rounds but one are gone, and that one is reported as excellent."""
    best = 1 if content["result"]["best_round"] != 1 else 2
    for line in content["rounds"]:
        for key in [key for key in line if key.startswith(("val/", "test/")) and line["round"] != best]:
            del line[key]
    content["result"]["best_round"] = best


def unfounded(content: dict[str, Any]) -> None:
    """No round says any metric, and the result is excellent."""
    for line in content["rounds"]:
        for key in [key for key in line if key.startswith(("val/", "test/"))]:
            del line[key]
    content["result"]["test"] = dict.fromkeys(content["result"]["test"], 0.99)


def moved(content: dict[str, Any]) -> None:
    """Another round is reported, with its own metrics."""
    best = content["result"]["best_round"] = content["result"]["best_round"] % 4 + 1
    for key, value in content["rounds"][best - 1].items():
        part, _, name = key.partition("/")
        if part in ("val", "test"):
            content["result"][part][name] = value


TAMPERED: list[tuple[Callable[[dict[str, Any]], object], bool, str]] = [
    (lambda c: worse(c, False), False, "the file was changed after it was written"),
    (lambda c: worse(c, False), True, "in its result and"),
    (lambda c: worse(c, True), True, "test/ndcg_10 is"),
    (lambda c: c["result"]["test"].update(full_hr_10=0.9), True, "test/full_hr_10 is 0.9 in the file"),
    (lambda c: c["rounds"][1].update(loss=0.1), True, "round 2 loss is 0.1 in the file"),
    (lambda c: c.update(protocol_fingerprint="0" * 16), False, "have the fingerprint"),
    (lambda c: c.update(protocol_fingerprint="0" * 16), True, "it says 0000000000000000"),
    (lambda c: c.update(data_checksum="0" * 64), True, "have the fingerprint"),
    (lambda c: c.update(config_hash="0" * 64), True, "it says 0000000000000000"),
    (lambda c: c["config"].update(lr=0.5), False, "the file was changed after it was written"),
    (lambda c: c["config"].update(lr=0.5), True, "its config has the hash"),
    (lambda c: c["config"].update(data_seed=5), True, "its config has the hash"),
    (lambda c: c["protocol_fields"].update(train_negatives="leaky"), True, "its protocol is leaky, it says otherwise"),
    (lambda c: c["result"].update(best_round=1), True, "validation chooses round"),
    (lambda c: c["result"].update(bytes_up=5), True, "bytes_up is 5 in its result"),
    (lambda c: c["result"].update(seed=3), True, "its config has seed 0, it says 3"),
    (lambda c: c.update(algo="fedem"), True, "its config has algo fedmf, it says fedem"),
    (hidden, True, "in its result and"),
    (unfounded, True, "is in its result and not in round"),
    (lambda c: (hidden(c), c["result"].update({part: {} for part in ("val", "test")})), True, "and not in its result"),
    (moved, True, "validation chooses round"),
    (lambda c: c["rounds"][c["result"]["best_round"] % 4].pop("test/hr_10"), True, "test/hr_10 is None in the file"),
    (lambda c: c["result"]["test"].update(new=0.99), True, "test/new is in its result and not in round"),
    (lambda c: c["result"].pop("popularity"), True, "popularity/mrr is None in the file"),
    (lambda c: c["result"].update(beats_popularity=not c["result"]["beats_popularity"]), True, "beats_popularity is"),
    (lambda c: c.update(commit="0" * 40), False, "the file was changed after it was written"),
]


@pytest.mark.parametrize("change, sealed, reason", TAMPERED)
def test_a_tampered_file_is_refused_with_the_reason(
    change: Callable[[dict[str, Any]], object], sealed: bool, reason: str, written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(changed(written, tmp_path, change, sealed)), "--threads", "1"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("fedbench: error: refused: ") and reason in said and said.count("\n") == 1


MALFORMED: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda c: c.pop("config"), "has no 'config'"),
    (lambda c: c.update(more=1), "unknown key 'more'"),
    (lambda c: c.update(schema=2), "schema must be 1"),
    (lambda c: c["rounds"].pop(), "rounds must have every round"),
    (lambda c: c["rounds"][0].update(loss="low"), "rounds must be"),
    (lambda c: c["config"].update(dataset="../../etc/passwd"), "files without their folders"),
    (lambda c: c["config"].update(algo="mine.py"), "config names a plug-in's file and plugin has none"),
    (lambda c: c["protocol_fields"].update(more=1), "protocol_fields must be"),
    (lambda c: c.update(by="<script>"), "by must be"),
    (lambda c: c["config"].update(lr="fast"), "its config cannot be used here: config: lr"),
]


@pytest.mark.parametrize("change, reason", MALFORMED)
def test_a_malformed_file_is_named(
    change: Callable[[dict[str, Any]], object], reason: str, written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(changed(written, tmp_path, change, sealed=True))]) == 3
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "{", "[]", "NaN", "[" * 100_000, '{"kind": 1, "kind": 2}', "\udcff"])
def test_what_is_no_submission_is_named(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert main(["verify", str(tmp_path / "x.json")]) == 3
    assert "is no submission" in capsys.readouterr().err


def test_wrong_flags(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["submit"], "RUN is missing"),
        (["submit", str(written.parent)], "there is no run (no config.json); give "),
        (["submit", str(written.parent / "run"), "--by", "<b>"], "--by <b>: a name"),
        (["submit", str(written.parent / "run"), "--out", str(written)], "is there already"),
        (["verify"], "FILE is missing"),
        (["verify", str(written), "--rounds", "5"], "must be from 0 to 4"),
        (["verify", str(written), "--rounds", "0", "--record"], "nothing is run again"),
        (["verify", str(written), "--dataset", "x.csv"], "leave the flag out"),
        (["verify", "nowhere.json"], "no such file"),
    ):
        assert main(words) == 2
        assert said in capsys.readouterr().err


def test_the_plug_in_of_a_file_runs_only_if_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its data is a file of rows here, which a submission does not hold either."""
    (tmp_path / "item_bias.py").write_text(examples()["item_bias.py"])
    rows = [f"{user},{(user * 7 + step * 3) % 60}\n" for user in range(30) for step in range(8)]
    (tmp_path / "rows.csv").write_text("user,item\n" + "".join(rows))
    flags = ["--rounds", "2", "--eval-negatives", "20", "--no-mlflow", "--quiet", "--out", str(tmp_path / "run")]
    assert cli.main(["--algo", str(tmp_path / "item_bias.py"), "--dataset", str(tmp_path / "rows.csv"), *flags]) == 0
    file = tmp_path / "mine.json"
    assert main(["submit", str(tmp_path / "run"), "--out", str(file)]) == 0
    content = submission.read(file)
    assert "\n".join(content["plugin"]["source"]) == examples()["item_bias.py"] and content["config"]["dataset"] == "rows.csv"

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))  # as if nothing had ever run here
    monkeypatch.setattr(trust, "_here", set())
    rows_given = ["--dataset", str(tmp_path / "rows.csv")]
    capsys.readouterr()
    assert main(["verify", str(file)]) == 2 and "give it with --dataset" in capsys.readouterr().err
    assert main(["verify", str(file), *rows_given]) == 2 and "was never run here" in capsys.readouterr().err
    assert main(["verify", str(file), *rows_given, "--trust-plugin"]) == 0
    (tmp_path / "rows.csv").write_text("user,item\n" + "".join(rows[8:]))
    assert main(["verify", str(file), *rows_given]) == 1 and "its config has the hash" in capsys.readouterr().err

    def meddle(content: dict[str, Any]) -> None:
        content["plugin"]["source"].append("import os")

    assert main(["verify", str(changed(file, tmp_path, meddle, sealed=True)), *rows_given, "--trust-plugin"]) == 1
    assert "its plug-in's source has the hash" in capsys.readouterr().err


def test_the_page_is_made_from_the_files_and_says_which_were_verified(written: Path, tmp_path: Path) -> None:
    assert submitted.PAGE.read_text(encoding="utf-8") == submitted.page(submitted.entries()), "run python sweeps/submitted.py"
    assert len(submitted.entries()) >= 5 and all(record for *_, record in submitted.entries())
    (tmp_path / "mine.json").write_text(written.read_text())
    assert submitted.page(submitted.entries(tmp_path)).rstrip().endswith("| no |")
    assert main(["verify", str(tmp_path / "mine.json"), "--rounds", "1", "--record"]) == 0
    assert submitted.page(submitted.entries(tmp_path)).rpartition("| rounds 1 to 1 of 4, ")[1]
    changed(written, tmp_path, lambda content: content.update(by="another"), sealed=True).replace(tmp_path / "mine.json")
    assert submitted.page(submitted.entries(tmp_path)).rstrip().endswith("| no |")  # the record is of another file
