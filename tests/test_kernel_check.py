"""A kernel never overrules what an algorithm says: overrides turn it off, and a description that lies is refused by name."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedbench.algorithms.central_als import CentralALS
from fedbench.algorithms.central_mf import CentralMF
from fedbench.algorithms.central_ncf import CentralNCF
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
from fedbench.kernels import fused
from fedbench.kernels.fused import DotBCE
from fedbench.simulation import kernel_check
from fedbench.simulation.federation import Federation
from fedbench.simulation.kernel_check import KernelDiffers, note, overridden
from tests.conftest import small_split

SMALL: dict[str, Any] = {"dim": 4, "batch_size": 16}
LOCAL: dict[str, Any] = {**SMALL, "local_epochs": 2}
BUILT_IN: dict[str, Algorithm] = {
    "fedmf": FedMF(**LOCAL),
    "local": Local(**LOCAL),
    "fedem": FedEM(**LOCAL, adapter=(8, 4, 1)),
    "fedavg_ncf": FedAvgNCF(**LOCAL, layers=(8, 4)),
    "fedrec_mf": FedRecMF(**LOCAL),
    "fedrec_mf-implicit": FedRecMF(**LOCAL, feedback="implicit"),
    "fedrecon": FedRecon(**SMALL),
    "central_mf": CentralMF(**SMALL),
    "central_ncf": CentralNCF(**SMALL, layers=(8, 4)),
    "central_als": CentralALS(dim=4),
}
"""every built-in with a kernel"""
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


def derived(algorithm: Algorithm, **names: Any) -> Algorithm:
    """An instance of a subclass with these names in it and the fields of `algorithm`."""
    return type(f"My{type(algorithm).__name__}", (type(algorithm),), names)(**vars(algorithm))


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


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("name", BUILT_IN)
def test_an_override_gives_the_same_with_kernels_and_without(name: str, hook: str) -> None:
    mine = with_hook(BUILT_IN[name], hook)
    assert overridden(mine) == (hook,), "training"
    assert overridden(mine, "fused_score") in ((hook,), ()) and (name.startswith("fedrec_mf") or overridden(mine, "fused_score"))
    assert not started(mine).engine.kernels and not started(mine).evaluator.kernels
    torch.testing.assert_close(numbers(mine, "auto"), numbers(mine, "off"), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_ins_run_their_kernels(name: str) -> None:
    assert overridden(BUILT_IN[name]) == overridden(BUILT_IN[name], "fused_score") == () and note(BUILT_IN[name], name) == ""
    assert started(BUILT_IN[name]).engine.kernels and started(BUILT_IN[name]).evaluator.kernels


def anything(self: Any, *given: Any) -> Any:
    raise AssertionError


def test_what_counts_as_client_code() -> None:
    """Helpers that client code calls, properties, mixins, later assignments and attributes of one object do; the server's code does not."""
    fedem, fedmf = BUILT_IN["fedem"], BUILT_IN["fedmf"]
    assert overridden(derived(fedem, merged=anything)) == ("merged",)
    assert overridden(derived(fedem, learns_merge=anything)) == ("learns_merge",)
    assert overridden(derived(BUILT_IN["fedrec_mf"], rate=property(anything))) == ("rate",)
    assert overridden(derived(BUILT_IN["fedrec_mf"], rate=0.5)) == ("rate",), "a property replaced by a number"
    assert overridden(derived(BUILT_IN["central_mf"], logits=anything)) == ("logits",)
    assert overridden(derived(BUILT_IN["central_mf"], epoch=anything)) == ("epoch",)
    assert overridden(derived(fedmf, tables=("items", "bias"))) == ("tables",)
    assert overridden(derived(fedmf, __getattribute__=object.__getattribute__.__call__)) == ("__getattribute__",)
    later = derived(fedmf)
    type(later).loss = anything  # type: ignore[method-assign]
    assert overridden(later) == ("loss",)
    object.__setattr__(one := replace(fedmf), "upload", anything)
    assert overridden(one) == ("upload",)
    for name in ("aggregate", "answer", "init_server", "init_client", "check", "extra", "cohort", "step", "for_new_users", "summary"):
        assert overridden(derived(fedmf, **{name: anything})) == ()
    assert overridden(derived(fedmf, helper=anything, lr=0.5, loss=FedMF.loss)) == ()


def test_a_class_that_describes_a_kernel_again_runs_it() -> None:
    again = derived(BUILT_IN["fedmf"], loss=anything, fused=FedMF.fused)
    assert overridden(again) == () and overridden(again, "fused_score") == ("loss",)
    below = derived(again, upload=anything)
    assert overridden(below) == ("upload",)
    sibling = type("Sibling", (type(again), type(derived(BUILT_IN["fedmf"], receive=anything))), {})(**LOCAL)
    assert overridden(sibling) == ("receive",), "a cousin's override is none of the class that describes the kernel"


def test_a_line_of_the_log_says_why() -> None:
    assert note(derived(FedMF(), loss=anything), "my.py") == (
        "my.py overrides loss, so FedMF's kernel is not used; the generic path runs what you wrote (slower)"
    )
    assert "overrides loss, receive and score, so" in note(derived(FedMF(), loss=anything, receive=anything, score=anything), "my.py")
    assert "FedMF's scoring kernel is" in note(derived(FedMF(), score=anything, fused=FedMF.fused), "my.py")


@pytest.mark.parametrize(
    ("body", "hook"),
    [
        ("def loss(self, held, sent, batch): return super().loss(held, sent, batch) + 100 * (held['items'] ** 2).sum()", "loss"),
        ("def stages(self, sent): return tuple(stage._replace(max_steps=2) for stage in super().stages(sent))", "stages"),
    ],
)
def test_a_plug_in_below_a_built_in_runs_what_it_says(body: str, hook: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(f"{PLUG_IN}    {body}\n")
    found = {}
    for kernel in ("auto", "off"):
        words = f"--algo {tmp_path / 'mine.py'} {DATA} -e 4 --batch-size 16 --kernel {kernel} --out {tmp_path / kernel}"
        assert cli.main(words.split()) == 0
        found[kernel] = json.loads((tmp_path / kernel / "summary.json").read_text())
        said = f"mine overrides {hook}, so FedMF's kernel is not used" in (tmp_path / kernel / "log.txt").read_text()
        assert said == (kernel == "auto")
    assert [found["auto"][part] for part in ("val", "test")] == [found["off"][part] for part in ("val", "test")]
    assert cli.main(f"--algo fedmf {DATA} -e 4 --batch-size 16 --out {tmp_path / 'fedmf'}".split()) == 0
    assert found["auto"]["test"] != json.loads((tmp_path / "fedmf" / "summary.json").read_text())["test"]


# ---- by numbers ------------------------------------------------------------------------------------------------------------


class OtherRate(FedMF):
    """Its kernel takes steps a tenth longer than it says itself."""

    def fused(self, sent: bool) -> DotBCE:
        return DotBCE(1.1 * self.lr, changes=True)


class OtherLoss(FedMF):
    """Its kernel knows nothing of a small penalty."""

    fused = FedMF.fused

    def loss(self, held: Tensors, sent: Tensors, batch: Batch) -> Tensor:
        return super().loss(held, sent, batch) + 0.01 * (held["user"] ** 2).sum()


class OtherUpload(FedMF):
    """Its kernel uploads the change itself, and no one row is kept back."""

    fused = FedMF.fused

    def upload(self, held: Tensors, sent: Tensors, samples: Tensor) -> Tensors:
        return {"items": torch.cat([torch.zeros_like(held["items"][:1]), (held["items"] - sent["items"])[1:]])}


class OtherSteps(FedMF):
    """A kernel that is described again, and stages that it does not know."""

    fused = FedMF.fused

    def stages(self, sent: Tensors) -> tuple[Stage, ...]:
        return tuple(stage._replace(max_steps=1) for stage in super().stages(sent))


class OtherScore(FedMF):
    """Its scoring kernel knows nothing of a bias."""

    fused_score = FedMF.fused_score

    def score(self, own: Tensors, sent: Tensors) -> Tensor:
        return super().score(own, sent) + sent["items"][:, 0]


class OtherMerge(FedEM):
    """Merges half of what its kernel merges: the same as long as nothing is sent."""

    fused = FedEM.fused

    def receive(self, own: Tensors, sent: Tensors) -> Tensors:
        return {**own, "items": (own["items"] + super().receive(own, sent)["items"]) / 2} if sent else own


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("kind", "tensor"), [(OtherRate, "user"), (OtherLoss, "(user|loss)"), (OtherUpload, "the upload of items")])
def test_a_kernel_that_does_something_else_is_refused(kind: type[FedMF], tensor: str, dtype: torch.dtype) -> None:
    with pytest.raises(KernelDiffers, match=rf"in {tensor}, by \S+ of .*--kernel off"):
        started(kind(**LOCAL), dtype=dtype).next_round()
    started(kind(**LOCAL), "off", dtype).next_round()


def test_a_kernel_that_cannot_do_what_stages_say_does_not_run() -> None:
    mine = OtherSteps(**LOCAL)
    assert started(mine).engine.kernels
    torch.testing.assert_close(numbers(mine, "auto"), numbers(mine, "off"), rtol=1e-9, atol=1e-9)


def test_scores_that_differ_are_refused() -> None:
    federation = started(replace(OtherScore(**LOCAL)))
    federation.next_round()
    federation.evaluator.kernels = True  # its own description of scoring stands, training runs without a kernel
    with pytest.raises(KernelDiffers, match="in score, by"):
        federation.outcome()


def test_a_merge_that_differs_is_refused_when_it_is_first_made() -> None:
    federation = started(OtherMerge(**LOCAL, adapter=(8, 4, 1)))
    federation.next_round()
    federation.outcome()
    before = {name: value.clone() for name, value in federation.store.tensors.items()}
    with pytest.raises(KernelDiffers, match="in (user|items), by"):
        federation.next_round()
    assert all(torch.equal(value, before[name]) for name, value in federation.store.tensors.items()), "the clients are as they were"


@pytest.mark.parametrize(
    ("name", "method", "tensor"),
    [
        ("fedrecon", "solve", "the upload of"),
        ("central_mf", "logits", "user"),
        ("fedavg_ncf", "logits", "user"),
        ("fedrec_mf", "loss", "user"),
    ],
)
def test_code_that_is_patched_where_the_kernel_is_described_is_found(
    name: str, method: str, tensor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = BUILT_IN[name]
    right = getattr(type(algorithm), method)

    def wrong(self: Any, *given: Any) -> Any:
        found = right(self, *given)
        return {key: 1.1 * value for key, value in found.items()} if isinstance(found, dict) else 1.1 * found + 0.1

    monkeypatch.setattr(type(algorithm), method, wrong)
    with pytest.raises(KernelDiffers, match=f"in {tensor}"):
        started(algorithm).next_round()


@pytest.mark.parametrize("name", ["fedmf", "fedem", "fedavg_ncf", "fedrecon", "central_mf"])
def test_the_comparison_changes_no_bit_and_compiles_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = fused.train_rows, fused.train_elastic_rows, fused.train_neumf, fused.train_pool, fused.score_rows, fused.score_neumf

    def all_of(federation: Federation) -> tuple[dict[str, Any], list[int]]:
        for _ in range(3):
            federation.next_round()
            ranks = federation.sampled_ranks()
        return {**federation.state(), **ranks, "bytes": federation.bytes_up}, [len(kernel.signatures) for kernel in kernels]

    with monkeypatch.context() as patch:
        for check in ("training", "rebuilding", "pooled", "scoring"):
            patch.setattr(kernel_check, check, lambda *given: None)
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
        FedAvgNCF(dim=4, batch_size=8, layers=(8, 4), lr=1.8, weight_decay=0.01, init_scale=0.004),
        FedRecon(dim=128, a0=0.1, l2=1e-6, init_scale=0.0016),
        FedMF(dim=4, batch_size=8, lr=8.0, init_scale=1.0),
    ],
    ids=lambda one: one.name,
)
def test_rounding_that_is_magnified_is_no_difference(algorithm: Algorithm) -> None:
    """Rates and systems with which float32 loses its digits in the first steps, by both paths alike."""
    federation = started(algorithm, dtype=torch.float32)
    federation.next_round()
    federation.outcome()


def test_a_refused_kernel_ends_a_run_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = "def fused(self, sent): return type(super().fused(sent))(2 * self.lr, changes=True)"
    (tmp_path / "mine.py").write_text(f"{PLUG_IN}    {body}\n")
    words = f"--algo {tmp_path / 'mine.py'} {DATA} --out {tmp_path / 'r'}"
    assert cli.main(words.split()) == 1
    error = capsys.readouterr().err.strip()
    assert error.startswith("fedbench: error: mine: the kernel differs from the algorithm's own code in user, by ") and "\n" not in error
    assert cli.main([*words.split(), "--kernel", "off"]) == 0


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
