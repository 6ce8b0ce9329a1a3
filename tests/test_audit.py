"""The audit passes an honest protocol, and each kind of leak makes it fail."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedbench.__main__ import main
from fedbench.commands.audit import candidates_unseen, held_out_apart, negatives
from fedbench.contract.registry import algorithms
from fedbench.settings.naming import CANARIES
from tests.conftest import small_split

SYNTHETIC = ["--dataset", "synthetic", "--users", "400", "--items", "300", "--interactions", "40"]


@pytest.mark.parametrize(
    ("flags", "code", "leaks"),
    [
        ([], 0, []),
        (["--protocol", "published", "--rounds", "15"], 1, ["held-out items drawn", "choice of the round", "canary local"]),
        pytest.param(["--train-negatives", "leaky"], 1, ["held-out items drawn", "canary local"], marks=pytest.mark.long),
        (["--select-on", "test"], 1, ["choice of the round"]),
        pytest.param(["--select-on", "last"], 0, [], marks=pytest.mark.long),
    ],
)
def test_what_the_audit_says(flags: list[str], code: int, leaks: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", *SYNTHETIC, "--algo", "none", *flags]) == code
    lines = capsys.readouterr().out.splitlines()
    found = [line.split("LEAK  ")[1] for line in lines if line.startswith("  LEAK")]
    assert len(found) == len(leaks) and all(one.startswith(leak) for one, leak in zip(found, leaks, strict=True))
    assert lines[-1].startswith("LEAK" if leaks else "clean")
    said = (
        "none: the last round is reported, whatever it scores"
        if "last" in flags
        else "on TEST"
        if code and "--train-negatives" not in flags
        else "on validation"
    )
    assert any(line.endswith(f"choice of the round: {said}") for line in lines)


def test_every_method_is_run_without_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", *SYNTHETIC, "--rounds", "2", "--kernel", "off"]) == 0
    told = capsys.readouterr().out
    names = [name for name, cls in algorithms().items() if cls.federated and name not in CANARIES]
    assert len(names) > 10 and all(f"ok    {name} --no-server: HR@10" in told for name in names)


def test_a_method_that_leaks_without_a_server_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    """The protocol's negatives leak; a shared table that never learns cannot show it, a client's own rows do."""
    flags = ["--train-negatives", "leaky", "--algo", "fedem,fedease", "--recipe", "published", "--rounds", "4", "--kernel", "off"]
    assert main(["audit", *SYNTHETIC, *flags]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines if "--no-server" in line] == [["LEAK", "fedem"], ["ok", "fedease"]]


@pytest.mark.parametrize(("name", "said"), [("nobody", "nobody"), ("central_mf", "--no-server is for federated methods")])
def test_a_method_that_cannot_be_audited_is_said(name: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", *SYNTHETIC, "--algo", name]) == 2
    assert said in capsys.readouterr().err


def test_a_held_out_item_in_training_is_found() -> None:
    split = small_split()
    assert held_out_apart(split).passed
    items = split.train_item.copy()
    items[0] = split.test_item[0]
    found = held_out_apart(replace(split, train_item=items))
    assert not found.passed and found.figures.startswith("1 of")


def test_a_candidate_that_the_client_has_met_is_found() -> None:
    split = small_split()
    assert candidates_unseen(split).passed
    candidates = split.test_candidates.copy()
    candidates[3, 0] = split.train_item[split.train_ptr[3]]
    assert not candidates_unseen(replace(split, test_candidates=candidates)).passed


def test_negatives_that_avoid_held_out_items_are_found() -> None:
    """Drawing around all of a client's items instead of its training items: the held-out ones are never drawn."""
    split = small_split(users=200, items=60)
    assert all(check.passed for check in negatives(split, seed=0, rounds=20))
    leaky = replace(split, protocol=replace(split.protocol, train_negatives="leaky"))
    assert [check.passed for check in negatives(leaky, seed=0, rounds=20)] == [True, False]


def test_help_and_a_wrong_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--help"]) == 0
    assert "LEAK" in capsys.readouterr().out
    assert main(["audit", "--dataset", "synthetic", "--protocoll", "clean"]) == 2
    assert "did you mean --protocol?" in capsys.readouterr().err
