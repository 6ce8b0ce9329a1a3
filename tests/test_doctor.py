"""`fedbench doctor` says what is fine and what is not, and logs come without coloredlogs too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from fedbench import __version__
from tests.test_imports import ROOT, run


def doctor(cwd: Path, *path: Path, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [ROOT, *path])), **more}
    return subprocess.run(
        [sys.executable, "-m", "fedbench", "doctor"], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def test_a_machine_that_is_ready(tmp_path: Path) -> None:
    done = doctor(tmp_path)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "ready" and len(lines) < 20 and all(line.startswith("ok ") for line in lines[:-1])
    assert f"fedbench    {__version__}, checkout {ROOT}" in done.stdout and not list(tmp_path.iterdir())


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fedbench.datasets]\ngone = no_such_module:load\n")
    wrong = {"FEDBENCH_DATA": str(tmp_path / "nowhere"), "MLFLOW_TRACKING_URI": "http://me:secret@127.0.0.1:9"}
    done = doctor(tmp_path, tmp_path, **wrong)
    bad = [line for line in done.stdout.splitlines() if line.startswith("BAD")]
    assert done.returncode == 1 and done.stdout.endswith("3 to mend\n"), done.stdout + done.stderr
    for word in ("FEDBENCH_DATA names", "127.0.0.1:9 does not answer", "the plug-in gone"):
        assert sum(word in line for line in bad) == 1, done.stdout
    assert "secret" not in done.stdout + done.stderr


def test_logs_without_coloredlogs() -> None:
    code = """
import sys
sys.modules["coloredlogs"] = None  # importing it fails
from fedbench.tracking.run_log import setup_logging
import logging
for quiet in (False, True):
    setup_logging(quiet, debug=False)
    logging.getLogger("fedbench").info("told once")
"""
    done = run(code, ROOT)
    assert done.returncode == 0 and done.stderr.count("told once") == 1, done.stderr
