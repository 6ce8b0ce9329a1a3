"""`bench` in its smallest form: it really runs both engines on the same work."""

from __future__ import annotations

import pytest

from fedbench import config
from fedbench.__main__ import main
from fedbench.bench import adam_limit, measure

SMALL = ["--dataset", "synthetic", "--users", "60", "--items", "120", "--interactions", "15", "--local-epochs", "2"]


def test_figures_fit_together() -> None:
    run = config.resolve(["--algo", "fedmf", *SMALL, "--no-mlflow"])
    figures = measure(run)
    assert figures["ratio"] == figures["loop"] / figures["batched"] and figures["clients"] == 60
    # every client takes at least two steps over its user vector (16 numbers)
    assert figures["updates"] > 60 * 2 * 16
    assert figures["updates_per_second"] < figures["limit"]
    assert set(figures["parts"]) == {"sample", "train", "aggregate", "evaluate", "full ranking"}


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--algo", "fedem", *SMALL]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("batched engine", "loop engine", "ratio", "of the limit", "a whole round"))
    assert main(["bench", "--help"]) == 0
    assert main(["bench", "--algo", "central_mf", *SMALL[:-2]]) == 2
    assert "central_mf has none" in capsys.readouterr().err


def test_the_limit_is_a_rate() -> None:
    import numpy as np

    assert adam_limit(np.float32) > 1e6
