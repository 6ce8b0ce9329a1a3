"""The loop over rounds and its observers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fedbench.contract import registry
from fedbench.contract.dataset import DatasetOptions
from fedbench.data.protocol import PRESETS
from fedbench.experiment.observers import Evaluation, Loss, Observer, RoundEnd, Traffic
from fedbench.experiment.prepare import prepare
from fedbench.experiment.training import train_rounds
from fedbench.simulation.federation import Federation


@pytest.fixture
def federation() -> Federation:
    split, _ = prepare("synthetic", PRESETS["clean"], DatasetOptions(users=20, items=60, interactions=8))
    return Federation.start(registry.algorithm("popularity")(), split, seed=0)


class Recorder(Observer):
    """Records its calls."""

    def __init__(self, name: str, calls: list[str], does: Callable[[RoundEnd], None] = lambda end: None) -> None:
        self.name, self.calls, self.does = name, calls, does

    def start(self, federation: Federation) -> None:
        self.calls.append(f"{self.name} starts")

    def after_round(self, end: RoundEnd) -> None:
        self.calls.append(f"{self.name} {end.federation.round}{' last' if end.last else ''}")
        self.does(end)

    def close(self) -> None:
        self.calls.append(f"{self.name} closes")


def test_observers_see_each_round_in_their_order_and_are_closed(federation: Federation) -> None:
    calls: list[str] = []
    train_rounds(federation, 2, "rounds", [Recorder("a", calls), Recorder("b", calls)])
    assert calls == ["a starts", "b starts", "a 1", "b 1", "a 2 last", "b 2 last", "b closes", "a closes"]


def test_a_budget_that_is_spent_already_has_no_round(federation: Federation) -> None:
    federation.round = 2
    calls: list[str] = []
    train_rounds(federation, 2, "rounds", [Recorder("a", calls)])
    assert calls == ["a starts", "a closes"] and federation.round == 2


def test_an_observer_can_end_the_run_and_those_after_it_know(federation: Federation) -> None:
    calls: list[str] = []

    def stop(end: RoundEnd) -> None:
        end.last = end.last or end.federation.round == 3

    train_rounds(federation, 9, "rounds", [Recorder("early", calls, stop), Recorder("b", calls)])
    assert calls[-4:] == ["early 3", "b 3 last", "b closes", "early closes"] and federation.round == 3


def test_observers_are_closed_after_an_error(federation: Federation) -> None:
    calls: list[str] = []

    def fail(end: RoundEnd) -> None:
        raise ValueError("here")

    with pytest.raises(ValueError, match="here"):
        train_rounds(federation, 9, "rounds", [Recorder("a", calls), Recorder("b", calls, fail)])
    assert calls[-2:] == ["b closes", "a closes"]


def test_the_line_of_a_round_has_its_numbers_in_the_order_of_the_observers(federation: Federation) -> None:
    lines: list[dict[str, float]] = []
    last = Recorder("log", [], lambda end: lines.append(dict(end.line)))
    train_rounds(federation, 3, "rounds", [Loss(), Evaluation(2), Traffic(), last])
    evaluated = ["val/hr_10" in line for line in lines]
    assert evaluated == [False, True, True]  # every second round, and the last
    assert [*lines[0]] == ["round", "bytes_up", "bytes_down", "client_visits"]
    assert [*lines[1]][0] == "round" and [*lines[1]][-1] == "client_visits"
