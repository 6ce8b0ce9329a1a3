"""What the commands print fits a terminal of 80 columns, and is left alone elsewhere."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

from fedbench.__main__ import USAGE
from fedbench.commands.cli import HELP
from fedbench.console import UNBROKEN, fitted
from fedbench.experiment.summary import metric_rows
from fedbench.sweeping import result_tables

ROOT = Path(__file__).parents[1]
SMALL = ["--dataset", "synthetic", "--users", "60", "--items", "120", "--interactions", "10"]
RANKING = ("hr_10", "ndcg_10", "mrr", "full_hr_10", "full_ndcg_10")


def on_a_terminal(*words: str, cwd: Path, columns: int = 80) -> list[str]:
    """The lines that a command prints to a terminal, which is its stdout alone."""
    inside, outside = pty.openpty()
    fcntl.ioctl(outside, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    environment |= {"PYTHONPATH": str(ROOT), "TERM": "xterm"}
    # the size is asked for on the terminal that Python started with: its own stdout
    process = subprocess.Popen([sys.executable, *words], cwd=cwd, env=environment, stdout=outside, stderr=subprocess.PIPE, text=True)
    os.close(outside)
    shown = b""
    try:
        while part := os.read(inside, 4096):
            shown += part
    except OSError:  # the terminal is closed
        pass
    assert process.wait() == 0 and process.stderr is not None, process.stderr.read()
    process.stderr.close()
    os.close(inside)
    return shown.decode().splitlines()


def test_a_run_several_seeds_and_an_audit_fit(tmp_path: Path) -> None:
    line = ["--algo", "popularity", *SMALL, "--rounds", "1", "--no-mlflow", "--seeds", "0-1"]
    run = on_a_terminal(str(ROOT / "train.py"), *line, cwd=tmp_path)
    audit = on_a_terminal("-m", "fedbench", "audit", *SMALL, "--rounds", "1", "--kernel", "off", cwd=tmp_path)
    assert any("FULL NDCG@10" in line for line in run) and any("±" in line for line in run) and "clean: no leak found" in audit
    wide = [line for line in [*run, *audit] if len(line) > 80 and not line.startswith(UNBROKEN)]
    assert wide == []


def test_lists_and_help_fit(tmp_path: Path) -> None:
    lines = on_a_terminal("-m", "fedbench", "list", cwd=tmp_path)
    assert len(lines) > 15 and max(map(len, [*lines, *USAGE.splitlines(), *HELP.splitlines()])) <= 80


def test_a_long_name_is_shortened() -> None:
    lines = metric_rows([("fedavg_ncf_with_a_name_of_its_own, 1,234 new users", dict.fromkeys(RANKING, 0.5))], RANKING)
    assert max(map(len, lines)) <= 80 and "…" in lines[1] and lines[1].split()[-5:] == ["0.5000"] * 5


def test_a_markdown_table_loses_its_costs_first() -> None:
    metrics = ["hr_10", "ndcg_10", "full_hr_10", "full_ndcg_10"]
    costs = {name: 12_345_678.0 for name in result_tables.COSTS}
    figures = {f"{name}{half}": 0.1234 for name in metrics for half in ("", "_pm")}
    rows = [{"clients_per_round": n, "runs": 3, "leaky": n == 10, **figures, **costs} for n in (10, 20)]
    text = f"# name\n\n{result_tables.markdown(result_tables.pd.DataFrame(rows), metrics)}\n\nbest on validation"
    assert fitted(text) == text
    narrow = fitted(text, 80).splitlines()
    assert max(map(len, narrow)) <= 80 and narrow[2].split()[:3] == ["n", "runs", "HR@10"] and narrow[3].endswith("  LEAKY")
    assert narrow[5].startswith("(") and narrow[5].endswith("rounds, visits, up, down: see table.md)")
    whole = fitted(text, 200).splitlines()
    assert whole[2].split()[-1] == "down" and "see table.md" not in "\n".join(whole)


def test_words_are_wrapped_and_links_are_not() -> None:
    text = f"  fedem   {'word ' * 30}\ncharts  http://127.0.0.1:5000/{'x' * 90}\n"
    lines = fitted(text, 60).splitlines()
    assert all(len(line) <= 60 for line in lines[:-1]) and lines[1].startswith(" " * 10 + "word") and len(lines[-1]) > 80
