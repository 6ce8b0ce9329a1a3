"""One row of a committed table, run again: it is the same, or the command says by how much it is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedbench.commands import reproduce
from fedbench.errors import UsageError
from tests.real_data import needs

ROW = ["--row", "popularity", "--dataset", "filmtrust"]
KEY = "filmtrust popularity clean 0"
TABLE = Path(__file__).parents[1] / "docs" / "results" / "published_and_clean.json"


def changed(folder: Path, **by: Any) -> str:
    """The table with another row."""
    content = json.loads(TABLE.read_text())
    row = content[KEY]
    content[KEY] = {name: row[name] + by[name] if isinstance(by.get(name), float) else by.get(name, value) for name, value in row.items()}
    (folder / "t.json").write_text(json.dumps(content))
    return str(folder / "t.json")


@needs("filmtrust/ratings.txt")
def test_a_row_of_the_committed_table_is_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce.main(["published_and_clean", *ROW]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == "the same" and said.count("the same") == 5 and f"row     {KEY}" in said and "note" not in said


@needs("filmtrust/ratings.txt")
@pytest.mark.parametrize(("by", "code", "says"), [
    ({"ndcg_10": 0.004}, 0, "not the same: NDCG@10 is 0."),
    ({"hr_10": -0.1, "config": "0" * 64}, 1, "standard errors off, too far"),
])  # fmt: skip
def test_how_far_it_is_off_is_said_in_standard_errors(
    by: dict[str, Any], code: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reproduce.main([changed(tmp_path, **by), *ROW]) == code
    said = capsys.readouterr().out
    assert says in said.splitlines()[-1] and ("a default has changed since" in said) == ("config" in by)


@pytest.mark.parametrize(("words", "says"), [
    ("", "TABLE is missing"),
    ("published_and_clean --row fedmf", "--dataset is missing"),
    ("nothing --row fedmf --dataset filmtrust", "TABLE nothing: no such file"),
    ("published_and_clean --row fedmf --dataset filmtrust --seed 99", "it has filmtrust fedmf clean 0, "),
    ("published_and_clean --row fedmff --dataset filmtrust", "no such algorithm; did you mean fedmf"),
    ("published_and_clean --row random --dataset filmtrust", "did you mean"),
    ("published_and_clean --row fedmf --dataset filmtrust --reading honest", "invalid choice"),
])  # fmt: skip
def test_a_bad_line_is_one_error(words: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        reproduce.main(words.split())
