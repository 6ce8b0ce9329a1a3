"""Text: numbers as people write them, nothing that steers a terminal, and any standard output will do."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from fedbench import text
from fedbench.__main__ import main
from fedbench.commands import cli
from fedbench.contract.dataset import DatasetOptions
from fedbench.datasets.csv_file import load_csv, load_history
from fedbench.datasets.rows import RowFormat
from fedbench.errors import DataError, UsageError
from fedbench.reporting.page import Cell, Page, Section, Table
from fedbench.settings.flags import read_seeds
from fedbench.tracking import run_log

ROOT = Path(__file__).parents[1]
RUN = ["--algo", "fedmf", "--dataset", "synthetic", "--print-config"]
ODD = ["1_0", "١٢", "１２", "0x10", "1 2", "--1", "²", "", "_1", "1_"]
NASTY = "a\x1b[31mb\x9b2Jc\u202ed\u2066e\x07f\rg\u200bh\x00\x7f"
"""an escape, a C1 control, two marks that turn the direction of writing, a bell, a return, a blank of no width"""


# ---- numbers ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ODD)
def test_what_is_no_number(word: str) -> None:
    for read in (text.whole, text.number):
        with pytest.raises(ValueError, match="is not a"):
            read(word)


def test_what_is_a_number() -> None:
    assert [text.whole(word) for word in ("0", "-3", "+7", " 12 ", "007")] == [0, -3, 7, 12, 7]
    assert [text.number(word) for word in ("0.5", "-1e-3", ".5", "5.", "+2E2", " 1 ")] == [0.5, -0.001, 0.5, 5.0, 200.0, 1.0]
    assert text.number("-inf") == float("-inf") and text.number("NaN") != text.number("NaN")


@pytest.mark.parametrize("flag", ["--dim", "--lr", "--seed", "--seeds", "--jobs", "--rounds", "-n", "--users", "--dropout", "--fold"])
@pytest.mark.parametrize("word", ["1_0", "١٢", "１２"])
def test_flags_take_no_such_numbers(flag: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*RUN, flag, word]) == 2
    assert flag.lstrip("-") in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["sweep", "--jobs", "١", "--dry-run"],
        ["sweep", "--gpus-per-point", "١"],
        ["recommend", "--run", "x", "--user", "1", "-k", "1_0"],
        ["recommend", "--run", "x", "--user", "1", "--rounds", "１"],
        ["evaluate", "--run", "x", "--rounds", "1_0"],
        ["bench", "--loop-clients", "1_0"],
        ["bench", "--state-mb", "1_0"],
        ["train", *RUN, "--checkpoint-every", "١"],
        ["train", *RUN, "--max-upload-norm", "١x"],
        ["train", *RUN, "--device", "cuda:١"],
    ],
)
def test_no_command_takes_them(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "must be" in said


def test_files_hold_no_such_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.json").write_text(json.dumps({"algo": "fedmf", "dataset": "synthetic", "dim": "1_0"}))
    assert cli.main(["--config", str(tmp_path / "c.json"), "--print-config"]) == 2
    assert "c.json: dim must be a whole number" in capsys.readouterr().err
    (tmp_path / "s.toml").write_text('fixed = {algo = "fedmf", dataset = "synthetic"}\naxes = {dim = ["1_0", "8"]}\n')
    assert main(["sweep", "--study", str(tmp_path / "s.toml"), "--dry-run"]) == 2
    for number, row in enumerate(("1,2,4_0,9", "1,2,4,9_0", "1,2,٤,9", "1,2,4,９"), 1):
        path = tmp_path / f"{number}.csv"
        path.write_text(f"user,item,rating,time\n1,1,3,8\n{row}\n", encoding="utf-8")
        with pytest.raises(DataError, match=f"{number}.csv:3: (rating|time)"):
            load_csv(path, DatasetOptions())
    (tmp_path / "h.csv").write_text("item,rating\n1,4_0\n")
    with pytest.raises(DataError, match=r"h.csv:2: rating '4_0'"):
        load_history(tmp_path / "h.csv")
    with pytest.raises(DataError, match="rating '4_0' is not a number"):
        RowFormat(None, (("user", int), ("rating", float))).check(b"1 4_0\n", "ratings.txt")
    with pytest.raises(UsageError, match="seeds"):
        read_seeds("٠-٢", "seeds")


# ---- what reaches the terminal ------------------------------------------------------------------------------------------------


def harmless(printed: str) -> bool:
    return all(c.isprintable() or c in "\n\t" for c in printed)


def test_shown_spells_out_what_steers() -> None:
    assert text.shown(NASTY) == r"a\x1b[31mb\x9b2Jc\u202ed\u2066e\x07f\rg\u200bh\x00\x7f"
    assert text.shown("é 日本 ±\n", keep="\n") == "é 日本 ±\n" and text.shown("\n") == r"\n" and text.shown("\udc80") == r"\udc80"


def test_nothing_steers_the_terminal_from_a_log_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_log.setup_logging(quiet=False, debug=False)
    handler = run_log.attach_log_file(tmp_path)
    try:
        logging.getLogger("fedbench").warning("%s and\nanother", NASTY)
        logging.getLogger("fedbench.contract.registry").warning("child %s", NASTY)
    finally:
        logging.getLogger("fedbench").removeHandler(handler)
        handler.close()
    printed, written = capsys.readouterr().err, (tmp_path / "log.txt").read_text()
    assert harmless(printed) and harmless(written) and written.count("\n") == 2 and r"\x1b[31m" in written


def test_nothing_steers_the_terminal_before_logging_is_set_up() -> None:
    said = (
        "import logging; from fedbench.commands import cli; cli.guard(lambda _: logging.getLogger('x').warning('%s', '\\x1b[31m') or 0, [])"
    )
    done = subprocess.run([sys.executable, "-c", said], cwd=ROOT, capture_output=True, text=True, check=True)
    assert r"\x1b[31m" in done.stderr and harmless(done.stderr)


def test_errors_tables_and_tracebacks_are_spelt_out(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(argv: list[str]) -> int:
        raise UsageError(NASTY)

    assert cli.guard(fail, []) == 2 and cli.guard(fail, ["--debug"]) == 2
    table = Table("t", [NASTY, "x"], [[Cell(NASTY), Cell("1")]])
    page = Page(NASTY, NASTY, [Section(NASTY, tables=[table], warnings=[NASTY], remarks=[NASTY])], (), ())
    text.say(page.to_text())
    out, err = capsys.readouterr()
    assert harmless(out) and harmless(err) and harmless(page.to_markdown()) and r"\x1b" in out and "Traceback" in err


def test_ids_of_a_dataset_are_spelt_out(tmp_path: Path) -> None:
    rows = "".join(f"u{u},{NASTY.replace(chr(13), '').replace(chr(0), '')}{i}\n" for u in range(12) for i in range(u, u + 8))
    (tmp_path / "d.csv").write_text(f"user,item\n{rows}", encoding="utf-8", newline="")
    out, err = io.StringIO(), io.StringIO()
    flags = ["--no-mlflow", "--threads", "1", "--rounds", "1", "--out", str(tmp_path / "r")]
    with redirect_stdout(out), redirect_stderr(err):
        assert main(["train", "--algo", "popularity", "--dataset", str(tmp_path / "d.csv"), "--quiet", *flags]) == 0
        assert main(["recommend", "--run", str(tmp_path / "r"), "--user", "u1"]) == 0
        assert main(["recommend", "--run", str(tmp_path / "r"), "--user", NASTY]) == 2
    assert harmless(out.getvalue()) and harmless(err.getvalue()) and r"\x1b[31m" in out.getvalue()
    lines = out.getvalue().splitlines()
    table = lines[lines.index(next(line for line in lines if line.startswith("rank"))) :]
    assert len(table) > 2 and all(r"\x1b" in line for line in table[1:])


# ---- standard output --------------------------------------------------------------------------------------------------------


def python(words: list[str], **how: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    return subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, text=True, check=False, **how)  # type: ignore[call-overload, no-any-return]


@pytest.mark.long
def test_a_closed_standard_output_and_one_that_knows_ascii_alone(tmp_path: Path) -> None:
    data = "--dataset synthetic --users 30 --items 150 --interactions 12 --eval-negatives 50 --rounds 1 --no-mlflow --quiet --threads 1"
    words = ["train.py", "--algo", "popularity", "--kernel", "off", *data.split(), "--seeds", "0-1", "--out", str(tmp_path / "r")]
    closed = python(words, stderr=subprocess.PIPE, preexec_fn=lambda: os.close(1))
    assert (closed.returncode, closed.stderr) == (0, "")
    files = [path for path in (tmp_path / "r").rglob("*") if path.is_file() and path.suffix in (".json", ".jsonl", ".txt")]
    assert len(files) > 8 and not any("charts  " in path.read_text() or "folder  " in path.read_text() for path in files)
    read, write = os.pipe()
    os.close(read)
    unread = python(words, stdout=write, stderr=subprocess.PIPE)  # finished already: it only prints
    os.close(write)
    assert (unread.returncode, unread.stderr) == (0, "")
    ascii_only = python(words, capture_output=True)
    assert (ascii_only.returncode, ascii_only.stderr) == (0, "") and " +- " in ascii_only.stdout


def test_errors_without_standard_streams_keep_their_exit_codes() -> None:
    def close() -> None:
        for number in range(3):
            os.close(number)

    assert python(["train.py", "--algo", "±", "--dataset", "synthetic"], preexec_fn=close).returncode == 2
    assert python(["train.py", "--version"], preexec_fn=close).returncode == 0
