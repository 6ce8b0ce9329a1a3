"""docs/tutorial.md works as it is written: its commands, in their order, in an empty folder."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from fedbench.__main__ import main
from fedbench.commands import cli
from tests.test_docs import ROOT, blocks

PAGE = ROOT / "docs" / "tutorial.md"


def test_the_tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    for text in blocks(PAGE, "python"):
        Path(text.splitlines()[0].removeprefix("# ")).write_text(text, encoding="utf-8")
    lines = [line for block in blocks(PAGE, "bash") for line in block.splitlines()]
    assert len(lines) >= 8
    said = {}
    for line in lines:
        python, *words = shlex.split(line)
        assert python == "python"
        # in this process, for each start of Python and torch takes seconds; MLflow has tests of its own
        code = cli.main([*words[1:], "--no-mlflow", "--quiet"]) if words[0] == "train.py" else main(words[2:])
        said[line] = capsys.readouterr()
        assert code == 0, f"{line}\n{said[line].err}"
    assert (tmp_path / "runs" / "report" / "report.html").is_file()
    told = "\n".join(found.out for found in said.values())
    assert "popularity" in told and "random (exact)" in told and "verified  item_bias.json: the first 2 of 5 rounds" in told
    better = next(found.out for line, found in said.items() if "--algo fedmf" in line)
    assert "does NOT beat popularity" not in better
