"""`python -m fedbench check`: what a good file, a wrong one and none get."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fedbench.__main__ import main
from fedbench.commands import check
from fedbench.contract import registry
from fedbench.testing.algorithm_tests import AlgorithmTests

TEMPLATE = Path(__file__).parents[1] / "algorithms" / "_template.py"
SCORE = 'return sent["items"] @ own["user"]'
LOSS = 'return bce(held["items"][batch.items] @ held["user"], batch)'


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scores an item by the others beside it and uploads what is private."""
    source = TEMPLATE.read_text(encoding="utf-8").replace(SCORE, f"{SCORE} - (sent['items'] @ own['user']).sum()")
    path = tmp_path_factory.mktemp("wrong") / "wrong.py"
    path.write_text(source.replace('held["items"] - sent["items"]}', 'held["items"] - sent["items"], "user": held["user"]}'))
    return path


def test_the_template_passes_and_is_no_algorithm(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(TEMPLATE), "--dim", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "check of template" in lines[0] and lines[-1].startswith("all is well")
    tests = [name for name in vars(AlgorithmTests) if name.startswith("test_")]
    assert len(lines) == 2 + 3 + len(tests) - 1 and all(line.startswith("  ok  ") for line in lines[1:-1])  # quality needs a band
    assert "template" not in registry.algorithms()
    assert len(TEMPLATE.read_text(encoding="utf-8").splitlines()) < 70


def test_a_mistake_is_named_with_its_cure(wrong: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(wrong)]) == 1
    said = capsys.readouterr().out
    assert "FAILED   works row by row: score of some rows: score differs by " in said
    assert "FAILED   private state never shows in upload: upload sends 'user', which is private" in said
    assert "ok       resumes bit for bit" in said and "checks FAILED" in said


def test_names_that_may_leave_and_json(wrong: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--algo", str(wrong), "--json", "--may-leave", "user"]) == 1
    found = json.loads(capsys.readouterr().out)
    results = {one["name"]: one["result"] for one in found["checks"]}
    assert not found["passed"] and found["algorithm"] == "template"
    assert results["private state never shows in upload"] == "ok" and results["works row by row"] == "FAILED"


def test_padding_that_is_counted_is_named_by_the_rehearsal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = TEMPLATE.read_text(encoding="utf-8").replace(LOSS, f'{LOSS} + (held["items"] ** 2).mean()')
    (tmp_path / "odd.py").write_text(source)
    assert main(["check", str(tmp_path / "odd.py")]) == 1
    said = capsys.readouterr().out
    assert "FAILED   rehearsal" in said and "in loss: " in said
    assert "padding is counted: weigh samples by batch.weight and held rows by batch.rows" in said


def test_a_mistake_of_the_rehearsal_ends_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "odd.py").write_text(TEMPLATE.read_text(encoding="utf-8").replace('held["user"], batch', 'held["usr"], batch'))
    assert main(["check", str(tmp_path / "odd.py")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "FAILED   rehearsal" in lines[2] and "in loss: KeyError: 'usr'" in lines[2] and lines[3].startswith("1 of 2 checks FAILED")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "check needs an algorithm"),
        (["nothing.py"], "no such file"),
        (["fedmf", "--dataset", "ml-100k"], "check takes no --dataset"),
        (["fedmf", "--lr", "-1"], "--lr must be over 0"),
        (["fedmf", "--may-leave"], "--may-leave needs names"),
    ],
)
def test_what_cannot_be_checked_is_an_error(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", ["central_mf", "fedem", "fedrec_mf", "popularity"])
def test_algorithms_of_every_kind_pass(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--algo", name]) == 0, capsys.readouterr().out


def test_what_is_shipped_needs_no_pytest() -> None:
    code = "import sys; sys.modules['pytest'] = None; import fedbench.commands.check"
    assert subprocess.run([sys.executable, "-c", code], cwd=TEMPLATE.parents[1]).returncode == 0
    assert check.own_flags(["a.py", "--may-leave=b,c", "--lr", "1"]) == (["--algo", "a.py", "--lr", "1"], ("b", "c"), False)
