"""A kernel never overrules what an algorithm says: what a subclass overrides is what runs, and a kernel that differs is not used."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedbench.algorithms.central_als import CentralALS
from fedbench.algorithms.central_mf import CentralMF
from fedbench.algorithms.fedavg_ncf import FedAvgNCF
from fedbench.algorithms.fedem import FedEM
from fedbench.algorithms.fedmf import FedMF
from fedbench.algorithms.fedrec_mf import FedRecMF
from fedbench.algorithms.fedrecon import FedRecon
from fedbench.algorithms.local import Local
from fedbench.commands import cli
from fedbench.contract.algorithm import Algorithm, Answer, Batch, Phase, Stage, Tensors, World, check_stages
from fedbench.contract.randomness import Draw
from fedbench.contract.uploads import Uploads
from fedbench.errors import UsageError
from fedbench.kernels.compiler import driver
from fedbench.simulation import in_place, kernel_check
from fedbench.simulation.federation import Federation
from tests.conftest import small_split

pytestmark = pytest.mark.kernels

SMALL: dict[str, Any] = {"dim": 8, "batch_size": 32}
LOCAL: dict[str, Any] = {**SMALL, "local_epochs": 2}
"""sizes as in tests/test_algorithms.py, whose kernels are then compiled already"""
BUILT_IN: dict[str, Algorithm] = {
    "fedmf": FedMF(**LOCAL),
    "local": Local(**LOCAL),
    "fedem": FedEM(**{**LOCAL, "batch_size": 1 << 20}, adapter=(16, 8, 1)),
    "fedavg_ncf": FedAvgNCF(**LOCAL, layers=(12, 6, 4)),
    "fedrec_mf": FedRecMF(**LOCAL),
    "fedrec_mf-implicit": FedRecMF(**LOCAL, feedback="implicit"),
    "fedrecon": FedRecon(**SMALL),
    "central_mf": CentralMF(**SMALL),
    "central_als": CentralALS(dim=4),
}
"""built-ins, small"""
PLUG_IN = """
from dataclasses import dataclass
from fedbench.algorithms.fedmf import FedMF
from fedbench.contract.algorithm import Phase

@dataclass(frozen=True)
class Mine(FedMF):
"""
DATA = "--dataset synthetic --users 60 --items 150 --interactions 12 --rounds 2 --dim 8 --no-mlflow --quiet"


class Hooks:
    """One override of each hook that changes what a client does. Mixed in before a built-in."""

    def loss(self, held: Tensors, sent: Tensors, batch: Batch) -> Tensor:
        return super().loss(held, sent, batch) + 100 * (held["items"][batch.items] ** 2).sum()  # type: ignore[misc]

    def receive(self, own: Tensors, sent: Tensors) -> Tensors:
        return {name: value * 0.5 for name, value in super().receive(own, sent).items()}  # type: ignore[misc]

    def phases(self, sent: Tensors) -> tuple[Phase, ...]:
        return tuple(phase._replace(lr=3 * phase.lr) for phase in super().phases(sent))  # type: ignore[misc]

    def stages(self, sent: Tensors) -> tuple[Stage, ...]:
        return tuple(stage._replace(max_steps=1, max_samples=5) for stage in super().stages(sent))  # type: ignore[misc]

    def solve(self, held: Tensors, sent: Tensors, batch: Batch) -> Tensors:
        return {name: 2 * value for name, value in super().solve(held, sent, batch).items()}  # type: ignore[misc]

    def upload(self, held: Tensors, sent: Tensors, samples: Tensor) -> Tensors:
        return {name: value * 0.5 for name, value in super().upload(held, sent, samples).items()}  # type: ignore[misc]

    def score(self, own: Tensors, sent: Tensors) -> Tensor:
        return -super().score(own, sent)  # type: ignore[misc]


HOOKS = ("loss", "receive", "phases", "stages", "solve", "upload", "score")


def with_hook(algorithm: Algorithm, hook: str) -> Algorithm:
    """An algorithm whose class has one override; `super()` in it must find the built-in, so it stands in a mixin of its own."""
    mixin = type("Mixin", (), {})
    code = getattr(Hooks, hook)
    function = type(code)(code.__code__, code.__globals__, hook, None, (type(code.__closure__[0])(mixin),))
    setattr(mixin, hook, function)
    return type(f"My{type(algorithm).__name__}", (mixin, type(algorithm)), {})(**vars(algorithm))


def started(algorithm: Algorithm, kernel: str = "auto", dtype: torch.dtype = torch.float64) -> Federation:
    return Federation.start(algorithm, small_split(ratings=algorithm.predicts_ratings), 0, dtype=dtype, kernel=kernel)


def numbers(algorithm: Algorithm, kernel: str) -> dict[str, Tensor]:
    """All that two rounds leave."""
    federation = started(algorithm, kernel)
    losses = [federation.next_round().loss.double() for _ in range(2)]
    found = {f"outcome/{name}": torch.from_numpy(value).double() for name, value in federation.outcome().items()}
    if not algorithm.predicts_ratings:
        found |= {f"full/{name}": torch.from_numpy(value).double() for name, value in federation.full_ranks().items()}
    return {
        **{name: value for name, value in federation.state().items() if isinstance(value, Tensor)},
        **found,
        "losses": torch.cat(losses),
    }


SHORT = ("fedmf", "fedrecon", "central_mf")
"""built-ins of three kinds; the others are in the long form, and test_algorithms.py compares most with the loop"""
MATRIX = [("fedmf", hook) for hook in HOOKS] + [("fedrecon", "solve")]
LONG = [("fedrecon", "stages"), ("fedrecon", "score"), ("fedrecon", "receive"), ("fedem", "loss"), ("local", "receive")]


@pytest.mark.parametrize(("name", "hook"), [*MATRIX, *(pytest.param(*one, marks=pytest.mark.long) for one in LONG)])
def test_an_override_is_what_runs_with_kernels_and_without(name: str, hook: str) -> None:
    mine = with_hook(BUILT_IN[name], hook)
    torch.testing.assert_close(numbers(mine, "auto"), numbers(mine, "off"), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name not in SHORT)) for name in BUILT_IN])
def test_built_ins_have_kernels_and_equal_their_own_code(name: str) -> None:
    federation = started(BUILT_IN[name])
    for _ in range(2):
        federation.next_round()
        federation.outcome()
    engine = federation.engine
    assert engine.derived is not None and engine.forward is not None and federation.evaluator.kernels is not None
    assert not engine.derived.said | engine.forward.said | federation.evaluator.kernels.said and not engine.derived.off
    torch.testing.assert_close(numbers(BUILT_IN[name], "auto"), numbers(BUILT_IN[name], "off"), rtol=1e-9, atol=1e-9)


@pytest.mark.long
@pytest.mark.parametrize(
    "body",
    [
        "def loss(self, held, sent, batch): return super().loss(held, sent, batch) "
        "+ 100 * (batch.weight[:, None] * held['items'][batch.items] ** 2).sum()",
        pytest.param(
            "def stages(self, sent): return tuple(stage._replace(max_steps=2) for stage in super().stages(sent))", marks=pytest.mark.long
        ),
    ],
)
def test_a_plug_in_below_a_built_in_runs_what_it_says(body: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(f"{PLUG_IN}    {body}\n")
    found = {}
    for kernel in ("auto", "off"):
        words = f"--algo {tmp_path / 'mine.py'} {DATA} -e 4 --batch-size 16 --kernel {kernel} --dtype float64 --out {tmp_path / kernel}"
        assert cli.main(words.split()) == 0
        found[kernel] = json.loads((tmp_path / kernel / "summary.json").read_text())
    for part in ("val", "test"):
        assert found["auto"][part] == pytest.approx(found["off"][part], abs=1e-9)
    assert cli.main(f"--algo fedmf {DATA} -e 4 --batch-size 16 --dtype float64 --out {tmp_path / 'fedmf'}".split()) == 0
    assert found["auto"]["test"] != json.loads((tmp_path / "fedmf" / "summary.json").read_text())["test"]


# ---- by numbers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("name", "wrong"),
    [("fedmf", "rate"), ("fedmf", "upload"), ("fedrecon", "ridge")],
)
def test_a_kernel_that_does_something_else_is_not_used(
    name: str, wrong: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Kernels that take longer steps, upload something else or solve something else, as a mistake of ours would make them."""
    if wrong == "rate":
        right = driver.how_rows
        monkeypatch.setattr(driver, "how_rows", lambda *given: ([[1.1 * row[0], *row[1:]] for row in right(*given)[0]], right(*given)[1]))
    elif wrong == "upload":
        right_rows = in_place.rows_of
        monkeypatch.setattr(in_place, "rows_of", lambda *given: (right_rows(*given)[0], in_place.VALUE, False))
    else:
        right_ridge = in_place.solve_lists
        monkeypatch.setattr(in_place, "solve_lists", lambda *given: 1.1 * right_ridge(*given))
    federation, expected = started(BUILT_IN[name], dtype=dtype), started(BUILT_IN[name], "off", dtype)
    with caplog.at_level(logging.INFO, "fedbench"):
        federation.next_round()
    expected.next_round()
    assert any("no kernel, for its numbers differ from the algorithm's own in" in record.message for record in caplog.records)
    for key, value in expected.state().items():
        torch.testing.assert_close(torch.as_tensor(federation.state()[key]), torch.as_tensor(value))


@pytest.mark.parametrize("method", ["solve", "stages"])
def test_a_closed_form_below_the_one_that_a_stage_knows_is_trusted_only_with_its_stages(method: str) -> None:
    assert kernel_check.knows(FedRecon, "stages", "solve")
    assert kernel_check.knows(type(with_hook(BUILT_IN["fedrecon"], method)), "stages", "solve") == (method == "stages")


@pytest.mark.parametrize("name", ["fedmf", "local", "fedrecon", "central_mf"])
def test_the_comparison_changes_no_bit_and_compiles_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def all_of(federation: Federation) -> tuple[dict[str, Any], int]:
        for _ in range(3):
            federation.next_round()
            ranks = federation.sampled_ranks()
        known = federation.engine.derived.known.values() if federation.engine.derived else ()
        return {**federation.state(), **ranks, "bytes": federation.bytes_up}, sum(len(one.module.train.signatures) for one in known if one)

    with monkeypatch.context() as patch:
        for check in ("training", "rebuilding", "pooled", "scoring", "merging"):
            patch.setattr(kernel_check, check, lambda *given: True)
        plain, compiled = all_of(started(BUILT_IN[name], dtype=torch.float32))
    called = []
    compare, distance = kernel_check.compare, kernel_check.distance
    monkeypatch.setattr(kernel_check, "compare", lambda *given: called.append("training") or compare(*given))
    monkeypatch.setattr(kernel_check, "distance", lambda *given: called.append("distance") or distance(*given))
    checked, compiled_now = all_of(started(BUILT_IN[name], dtype=torch.float32))
    assert {"training", "distance"} <= set(called) and compiled == compiled_now
    for key, value in plain.items():
        assert torch.equal(torch.as_tensor(checked[key]), torch.as_tensor(value)), key


def test_rounding_is_no_difference() -> None:
    """One number in a thousand that went the other way, of how far the largest moved; not a whole row; nothing in float64."""
    before, after = torch.zeros(100, 16), torch.full((100, 16), 0.1)
    turned = after.clone()
    turned[::10, 0] = -0.1
    short, long = torch.float32, torch.float64
    assert kernel_check.distance(turned, after, before, short, kernel_check.FAR) == 0
    assert kernel_check.distance(turned, after, before, long, kernel_check.FAR) == pytest.approx(2)
    turned[1:3] = -0.1
    assert kernel_check.distance(turned, after, before, short, kernel_check.FAR) == pytest.approx(2)
    assert kernel_check.distance(after + 1e-5, after, before, short, kernel_check.FAR) == 0
    assert kernel_check.distance(after.log() * torch.nan, after * torch.inf, before, short, kernel_check.FAR) == 0, "both diverge"
    assert kernel_check.distance(after * torch.nan, after, before, short, kernel_check.FAR) == torch.inf
    assert kernel_check.distance(after[:5], after, None, short, kernel_check.FAR) == torch.inf


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(
            FedAvgNCF(dim=8, batch_size=8, layers=(12, 6, 4), lr=1.8, weight_decay=0.01, init_scale=0.004), marks=pytest.mark.long
        ),
        FedRecon(dim=128, a0=0.1, l2=1e-6, init_scale=0.0016),
        pytest.param(FedMF(dim=4, batch_size=8, lr=8.0, init_scale=1.0), marks=pytest.mark.long),
    ],
    ids=lambda one: one.name,
)
def test_rounding_that_is_magnified_is_no_difference(algorithm: Algorithm) -> None:
    """Rates and systems with which float32 loses its digits in the first steps, by both paths alike."""
    federation = started(algorithm, dtype=torch.float32)
    federation.next_round()
    federation.outcome()
    assert not federation.without_kernel(), "no kernel was refused"


# ---- words that nobody knows -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "problem"),
    [
        (Stage((Phase(("items",), 0.1, "SGD"),)), "phase 1: there is no optimizer 'SGD' (did you mean sgd? known: adam, adamw, sgd)"),
        (
            Stage((Phase(("items",), 0.1), Phase(("itms",), 0.1))),
            "phase 2: it moves 'itms', which the client does not hold (did you mean items?",
        ),
        (Stage((Phase((), 0.1),)), "names must be a tuple"),
        (Stage((Phase("items", 0.1),)), "names must be a tuple"),  # type: ignore[arg-type]
        (Stage((Phase(("items",), -0.1),)), "lr must be a number, 0 or more, not -0.1"),
        (Stage((Phase(("items",), float("nan")),)), "lr must be a number, 0 or more, not nan"),
        (Stage((Phase(("items",), 0.1, "adamw", -1.0),)), "weight_decay must be a number, 0 or more"),
        (Stage((Phase(("items",), 0.1, "adam", 0.1),)), "weight_decay belongs to adamw and sgd; adam would ignore it"),
        (Stage((Phase(("items",), 0.1, clip=-1.0),)), "clip must be a number, 0 or more"),
        (Stage((Phase(("items",), 0.1),), part="querry"), "there is no part 'querry' of the samples (did you mean query?"),
        (Stage((Phase(("items",), 0.1),), batch_size=0), "batch_size must be 1 or more, not 0"),
        (Stage((Phase(("items",), 0.1),), max_samples=-3), "max_samples must be 1 or more, not -3"),
        (Stage(Phase(("items",), 0.1)), "phases must be a tuple of Phase"),  # type: ignore[arg-type]
    ],
)
def test_local_work_that_makes_no_sense_is_refused(stage: Stage, problem: str) -> None:
    with pytest.raises(UsageError) as error:
        check_stages(FedMF(), (stage,), ("user", "items"))
    assert str(error.value).startswith("fedmf: ") and problem in str(error.value)
    with pytest.raises(UsageError, match="stage 2: "):
        check_stages(FedMF(), (Stage(), stage), ("user", "items"))


def test_a_stage_that_is_not_in_a_tuple_is_refused() -> None:
    with pytest.raises(UsageError, match="stages must return a tuple of Stage"):
        check_stages(FedMF(), Stage(), ("user",))  # type: ignore[arg-type]


@pytest.mark.parametrize("word", ["SGD", "rmsprop"])
def test_an_unknown_optimizer_ends_a_run_before_it_begins(word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = f'def phases(self, sent): return (Phase(("user", "items"), 0.1, "{word}"),)'
    (tmp_path / "mine.py").write_text(f"{PLUG_IN}    {body}\n")
    assert cli.main(f"--algo {tmp_path / 'mine.py'} {DATA} --out {tmp_path / 'r'}".split()) == 2
    error = capsys.readouterr().err.strip()
    assert f"mine.py, line 8, in phases: phase 1: there is no optimizer '{word}'" in error and "\n" not in error
    assert ("did you mean sgd?" in error) == (word == "SGD") and not (tmp_path / "r").exists()


@dataclass(frozen=True)
class SomeAreSent(Algorithm):
    """Names a tensor that only a client holds that was sent something: nobody is in the first round."""

    def init_client(self, world: World, draw: Draw) -> Tensors:
        return {"user": draw.normal("user", 3)}

    def answer(self, server: Tensors) -> Answer:
        return Answer(shared=server)

    def phases(self, sent: Tensors) -> tuple[Phase, ...]:
        return (Phase(("usr",), 0.1),) if sent else ()

    def aggregate(self, server: Tensors, uploads: Uploads, draw: Draw) -> Tensors:
        return {"mean": torch.zeros(2)}

    def score(self, own: Tensors, sent: Tensors) -> Tensor:
        return own["user"].sum()


def test_work_that_comes_later_is_looked_at_then() -> None:
    federation = Federation.start(SomeAreSent(), small_split(), 0)
    federation.next_round()
    with pytest.raises(UsageError, match="moves 'usr', which the client does not hold"):
        federation.next_round()
