"""What algorithms say that a search may try for their fields."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from fedbench.contract import registry
from fedbench.contract.algorithm import Algorithm
from fedbench.contract.search import Span, search_space, tuned, untuned


@dataclass(frozen=True)
class Mine(Algorithm):
    """A plug-in that says nothing of searches, but of one field."""

    dim: int = 24
    local_epochs: int = 20
    negatives: int = untuned(4)
    lr: float = tuned(0.02, 0.001, 0.3, log=True)
    server: str = tuned("sgd", choices=("sgd", "adam"))
    beta: float = tuned(0.9, 0.5, 0.99, when={"server": ("adam",)})


def test_a_space_is_inherited_reaches_defaults_and_can_be_taken_back() -> None:
    space = search_space(Mine)
    assert list(space) == ["local_epochs", "dim", "lr", "server", "beta"]
    assert space["dim"].choices == (8, 16, 32, 64, 24) and space["dim"].holds(24)
    assert (space["local_epochs"].high, space["local_epochs"].whole, space["lr"].whole) == (20, True, False)
    assert str(space["beta"]) == "0.5 to 0.99, where server is adam" and str(space["lr"]) == "0.001 to 0.3 by logarithm"
    assert Mine().lr == 0.02 and Mine.lr == 0.02


@pytest.mark.parametrize(("span", "says"), [
    ({"choices": (8,)}, "two or more different"),
    ({"choices": (8, 8)}, "two or more different"),
    ({"low": 2.0, "high": 1.0}, "to a larger one"),
    ({"low": 0.0, "high": 1.0, "log": True}, "must begin over 0"),
])  # fmt: skip
def test_a_span_that_makes_no_sense(span: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Span(**span)  # type: ignore[arg-type]


def test_a_field_needs_a_range_or_choices() -> None:
    with pytest.raises(ValueError, match="needs a range"):
        tuned(0.1)


def test_every_algorithm_that_learns_declares_a_space_that_its_own_fields_can_take() -> None:
    for name, cls in registry.algorithms().items():
        space = search_space(cls)
        assert bool(space) != (name in ("popularity", "random")), name
        for field, span in space.items():
            assert all(set(values) <= set(space[other].choices if other in space else cls.choices[other]) for other, values in span.when), (
                name
            )
            default = getattr(cls, field)
            # 0 and None let the method choose
            assert span.holds(default) or default in (None, 0), (name, field)
    assert {"server", "server_lr", "average"} <= set(search_space(registry.algorithm("fedmf")))
