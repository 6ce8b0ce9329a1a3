"""`fedbench completion`: what bash is offered, asked of bash itself."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedbench.__main__ import COMMANDS, main
from tests.test_imports import ROOT


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    done = subprocess.run([sys.executable, "-m", "fedbench", "completion", "bash"], cwd=ROOT, capture_output=True, text=True, check=True)
    path = tmp_path_factory.mktemp("completion") / "fedbench"
    path.write_text(done.stdout)
    return path


def offered(script: Path, line: str) -> set[str]:
    """What bash offers for the last word of a line."""
    words = line.split(" ")
    ask = (
        f"source {shlex.quote(str(script))}; COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; COMP_LINE={shlex.quote(line)}; "
    )
    ask += "COMP_POINT=${#COMP_LINE}; _shtab_fedbench fedbench; printf '%s\\n' \"${COMPREPLY[@]}\""
    done = subprocess.run(["bash", "--norc", "-c", ask], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_offers_commands_flags_and_names(script: Path) -> None:
    assert offered(script, "fedbench ") == set(COMMANDS)
    assert offered(script, "fedbench ver") == {"verify"}
    assert offered(script, "fedbench train --algo fedre") == {"fedrec_mf", "fedrecon"}
    assert {"filmtrust", "ml-1m"} <= offered(script, "fedbench sweep --dataset ")
    assert offered(script, "fedbench train --protocol ") == {"clean", "ncf", "published"}
    assert "--server-decay" in offered(script, "fedbench train --algo fedmf --server")  # one method's own flag
    assert offered(script, "fedbench verify --tol") == {"--tolerance"}
    assert "ml-100k" in offered(script, "fedbench fetch ml")


def test_wrong_words_are_answered(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion"]) == 2 and "usage" in capsys.readouterr().out
    assert main(["completion", "--help"]) == 0
    assert main(["completion", "fish"]) == 2 and "one of bash, zsh" in capsys.readouterr().err
