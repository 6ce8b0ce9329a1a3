"""Two guards that keep a fused kernel from overruling what an algorithm says.

By the class: a kernel stands for the code of the class that describes it (`fused`, `fused_score`). An algorithm whose client code differs
from that class's, by an override, a mixin or an attribute of its own, never runs that kernel.

By numbers: before a kernel is first used in a run, it and the generic path make the first steps of a few clients, on copies. A
difference beyond rounding ends the run and names the tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from fedbench.contract.algorithm import Algorithm, Answer, Tensors
from fedbench.contract.uploads import Rows
from fedbench.data.sampling import Samples
from fedbench.errors import FedbenchError
from fedbench.kernels.compiler.trace import Unsupported
from fedbench.simulation.client_store import ClientStore, SomeClients
from fedbench.simulation.sending import LEVELS

if TYPE_CHECKING:
    from fedbench.contract.central import Central, Pool
    from fedbench.contract.randomness import Draw
    from fedbench.simulation.engine import Engine
    from fedbench.simulation.scoring import Evaluator

DESCRIPTIONS = ("fused", "fused_score")
NOT_THE_CLIENTS = frozenset(
    {
        *("init_server", "init_client", "answer", "aggregate", "for_new_users", "step", "server_rate"),
        *("check", "must_be_positive", "must_not_be_negative", "cohort", "extra", "evaluation_negatives", "samples_a_step"),
        *("travels_whole", *DESCRIPTIONS),
    }
)
"""what the server runs, and what the engine asks on both paths alike: an override of these leaves the kernels on"""
CLIENTS = 4
EPOCHS = 2
SAMPLES = 64
"""samples of a client that are enough for a comparison; two batches if those are more"""
FAR = {torch.float32: 1e-3, torch.float64: 1e-7}
"""how far the paths may be apart, as a share of how far the largest number of a tensor moved; measured: up to 1e-4 and 1e-12. Adam's first
steps have the size of the learning rate however small a gradient is, and so magnify its rounding"""
NEAR = {torch.float32: 1e-4, torch.float64: 1e-8}
"""the share of the largest number for losses and scores, which no optimizer comes after; measured: up to 3e-6"""
ROUNDINGS = 64
"""last digits of a tensor's largest number that do not count as a difference"""
ISOLATED = 16
"""numbers of a large tensor that may be apart: Adam turns about where rounding decides the sign of a gradient"""
FARTHER = 4
"""times the generic path's own rounding that a kernel's may be; measured: up to 1.6 where rounding shows at all, 1e4 for a wrong formula"""


# ---- by the class ----------------------------------------------------------------------------------------------------------


def described_by(cls: type[Algorithm], kernel: str = "fused") -> type | None:
    """The class whose code a kernel stands for: the one that describes it, in `fused` or in the stages; None if there is no kernel."""
    own = [one for one in cls.__mro__ if one not in (Algorithm, object)]
    said = [one for one in own if kernel in vars(one)]
    if said or kernel == "fused_score":
        return said[0] if said else None
    # Stages may name a kernel too, and so may a centralised method's own pass over the data. Who overrides those may hand the kernel on
    # without knowing, so it belongs to the most basic class that wrote any.
    staged = [one for one in own if "stages" in vars(one) or one is described_by(cls, "fused_score")]
    return staged[-1] if staged else None


def overridden(algorithm: Algorithm, kernel: str = "fused") -> tuple[str, ...]:
    """Names of client code that differ from those of the class that describes a kernel; () if it stands for this algorithm."""
    describes = described_by(type(algorithm), kernel)
    if describes is None:
        return ()

    def replaced(name: str) -> bool:
        theirs, mine = inspect.getattr_static(describes, name), inspect.getattr_static(algorithm, name)
        return mine is not theirs and (name == "tables" or callable(theirs) or hasattr(theirs, "__get__"))

    dunder = {name for name in dir(describes) if name.startswith("__")} - {"__getattribute__"}
    return tuple(name for name in dir(describes) if name not in NOT_THE_CLIENTS | dunder and replaced(name))


def note(algorithm: Algorithm, who: str) -> str:
    """One line for the log if an algorithm inherits a kernel that it does not run; "" otherwise."""
    for kernel, what in (("fused", "kernel"), ("fused_score", "scoring kernel")):
        names, describes = overridden(algorithm, kernel), described_by(type(algorithm), kernel)
        if names and describes is not None:
            return (
                f"{who} overrides {' and '.join([', '.join(names[:-1]), names[-1]] if names[1:] else names)}, "
                f"so {describes.__name__}'s {what} is not used; the generic path runs what you wrote (slower)"
            )
    return ""


# ---- by numbers ------------------------------------------------------------------------------------------------------------


class KernelDiffers(FedbenchError):
    """A kernel does not do what the algorithm's own code does."""

    def __init__(self, algorithm: Algorithm, tensor: str, apart: float, where: str) -> None:
        super().__init__(
            f"{algorithm.name}: the kernel differs from the algorithm's own code in {tensor}, by {apart:.2g} {where}; "
            "use --kernel off, or make `fused` and `fused_score` say what the code does"
        )


def training(engine: Engine, server: Tensors, store: ClientStore, samples: Samples, sent: np.ndarray, when: int) -> None:
    """Compare a round of a few clients of the cohort: what they keep and upload. sent [n]: what reaches each, see sending.sent_to."""
    for some in range(LEVELS):
        who = np.flatnonzero((sent == some) & (samples.counts > 0))
        if not len(who) or not first_use(engine, f"training, sent {some}"):
            continue
        few = first_samples(samples, who, engine.algorithm.samples_a_step)
        kept = store.read(torch.from_numpy(few.clients).to(engine.device))

        def outcome(one: Engine, few: Samples = few, kept: Tensors = kept) -> Tensors:
            copies = {name: value.to(one.dtype, copy=True) for name, value in kept.items()}
            alone = SomeClients(store.algorithm, store.world, store.draw, copies, few.clients)
            result = one.run_cohort(in_type(server, one.dtype), alone, few, when, np.full(len(few.clients), EPOCHS))
            uploads = {name: value if isinstance(value, Tensor) else value.value for name, value in result.uploads.tensors.items()}
            assert all(isinstance(value, Tensor | Rows) for value in result.uploads.tensors.values())
            return {**copies, **{f"the upload of {name}": value for name, value in uploads.items()}, "loss": result.loss}

        compare(engine, outcome, kept)


def rebuilding(engine: Engine, server: Tensors, samples: Samples, when: int) -> None:
    """Compare what a few clients that keep nothing rebuild."""
    who = np.flatnonzero(samples.counts > 0)
    if len(who) and first_use(engine, "rebuilding"):
        few = first_samples(samples, who, engine.algorithm.samples_a_step)
        few, world = replace(few, clients=np.arange(len(few.clients))), replace(engine.world, clients=len(few.clients))
        compare(engine, lambda one: one.of_world(world).reconstruct(in_type(server, one.dtype), few, when), {})


def pooled(engine: Engine, algorithm: Central, server: Tensors, pool: Pool, draw: Draw) -> None:
    """Compare the first two steps of a centralised method, on the rows of the users and items in them.

    Its optimizer starts anew: each path may keep moments in a scale of its own.
    """
    if not len(pool.label) or not first_use(engine, "pool"):
        return
    few = type(pool)(*(column[: algorithm.batch_size + SAMPLES] for column in pool))
    (users, user), (items, item) = (torch.unique(column, return_inverse=True) for column in (few.user, few.item))
    rows = {"user": users, "items": items}
    model = {name: value[rows[name.split("/")[0]]] if name.split("/")[0] in rows else value for name, value in server.items()}
    model = {name: torch.zeros_like(value) if "/" in name else value for name, value in model.items()}
    few = few._replace(user=user, item=item)

    def outcome(one: Engine) -> Tensors:
        found, loss = algorithm.epoch(in_type(model, one.dtype), few._replace(label=few.label.to(one.dtype)), draw, one.kernels)
        return {**{name: value for name, value in found.items() if "/" not in name}, "loss": loss}

    compare(engine, outcome, model)


def scoring(evaluator: Evaluator, store: ClientStore, answer: Answer, clients: Tensor, sent: bool, items: Tensor | None) -> None:
    """Compare the scores of a few clients."""
    if not evaluator.kernels or sent in evaluator.checked or evaluator.algorithm.fused_score(sent) is None:
        return
    evaluator.checked.add(sent)
    wide = evaluator.split.items if items is None else items.shape[1]
    some = torch.arange(0, len(clients), -(-len(clients) // max(1, min(CLIENTS, (1 << 17) // wide))))
    given = store, answer, clients[some], sent, None if items is None else items[some]
    expected = evaluator.mapped_scores(*given)  # first: what does not fit raises there, where a kernel would read beyond its arrays
    found = evaluator.fused_scores(*given)
    if found is None or not (apart := distance(found, expected, None, expected.dtype, NEAR)):
        return
    exact = evaluator.mapped_scores(*given, dtype=torch.float64)
    if expected.dtype == torch.float64 or not explained({"score": found}, {"score": expected}, {"score": exact}, {}):
        raise KernelDiffers(evaluator.algorithm, "score", apart, "of the largest score")


def first_use(engine: Engine, what: str) -> bool:
    """Whether kernels may run that nobody has compared yet; from now on somebody has."""
    a, known = engine.algorithm, engine.compared
    written = (engine.kernels or engine.gpu_kernels) and described_by(type(a)) is not None
    if known is None or what in known or not (written or engine.derived):
        return False
    known.add(what)
    return True


def compare(engine: Engine, outcome: Callable[[Engine], Mapping[str, Tensor]], before: Mapping[str, Tensor]) -> None:
    """Raise KernelDiffers if what an engine with kernels leaves is further from what one without leaves than rounding explains."""
    expected = outcome(engine.twin(kernels=False))  # first: what does not fit raises there, where a kernel would read beyond its arrays
    try:
        found = outcome(engine.twin(kernels=True))
    except Unsupported as error:
        assert engine.derived is not None
        engine.derived.off = True
        engine.derived.refuse(engine.algorithm, str(error))
        return
    for name in sorted(expected.keys() ^ found.keys()):
        raise KernelDiffers(engine.algorithm, name, 1.0, "of it: only one of the two has it")
    apart = {
        name: distance(found[name], value, before.get(name), engine.dtype, NEAR if name == "loss" else FAR)
        for name, value in expected.items()
    }
    first = next((name for name in apart if apart[name]), None)
    if first is None:
        return
    if engine.dtype == torch.float64 or not explained(found, expected, outcome(engine.twin(kernels=False, dtype=torch.float64)), before):
        if engine.derived is not None and not engine.algorithm_speaks:
            engine.derived.off = True
            engine.derived.refuse(engine.algorithm, f"its numbers differ from the algorithm's own in {first}")
            return
        raise KernelDiffers(engine.algorithm, first, apart[first], "of how far it moved" if first in before else "of the largest number")


def apart(
    engine: Engine, found: Mapping[str, Tensor], outcome: Callable[[Engine], Mapping[str, Tensor]], before: Mapping[str, Tensor]
) -> str:
    """The first tensor in which what a derived kernel left is further from the generic path than rounding explains; "" if none is."""
    expected = outcome(engine.twin(kernels=False))
    near = {name: NEAR if name == "loss" else FAR for name in expected}
    differ = [name for name, value in expected.items() if distance(found[name], value, before.get(name), engine.dtype, near[name])]
    if not differ:
        return ""
    if engine.dtype != torch.float64 and explained(found, expected, outcome(engine.twin(kernels=False, dtype=torch.float64)), before):
        return ""
    return differ[0]


def explained(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], exact: Mapping[str, Tensor], before: Mapping[str, Tensor]
) -> bool:
    """Whether rounding explains a difference: a kernel's numbers are about as near to those of longer arithmetic as the generic path's.

    With a large learning rate or an ill-conditioned system the last digit of a float32 soon shows in the first.
    """
    noise, error = 0.0, 0.0
    for name, value in exact.items():
        if found[name].shape != value.shape:
            return False
        moved = value - before[name].double() if name in before else value
        size = moved.nan_to_num(0.0, 0.0, 0.0).abs().max().item() or 1.0
        noise = max(noise, (expected[name] - value).abs().nan_to_num(0.0, 0.0, 0.0).mean().item() / size)
        error = max(error, (found[name] - value).abs().nan_to_num(0.0, 0.0, 0.0).mean().item() / size)
    return error <= FARTHER * noise


def distance(found: Tensor, expected: Tensor, before: Tensor | None, kind: torch.dtype, far: Mapping[torch.dtype, float]) -> float:
    """0 if two tensors are the same up to rounding of `kind`; else the largest difference, in units of how far the largest number moved."""
    if found.shape != expected.shape:
        return float("inf")
    found, expected = found.double(), expected.double()
    gap = torch.where(found.isfinite() | expected.isfinite(), (found - expected).abs(), 0.0).nan_to_num(torch.inf)
    size = expected.nan_to_num(0.0, 0.0, 0.0).abs().max().item() if expected.numel() else 0.0
    moved = size if before is None else (expected - before.double()).nan_to_num(0.0, 0.0, 0.0).abs().max().item()
    limit = far[kind] * moved + ROUNDINGS * torch.finfo(kind).eps * size
    isolated = min(ISOLATED, gap.numel() // 64) if kind == torch.float32 else 0
    return gap.max().item() / (moved or size or 1.0) if int((gap > limit).sum()) > isolated else 0.0


def first_samples(samples: Samples, who: np.ndarray, batch: int) -> Samples:
    """The first samples of a few of the clients at the positions `who`: the smallest and, if there is one, one with two batches."""
    by_size = who[np.argsort(samples.counts[who], kind="stable")]
    longer = by_size[samples.counts[by_size] > batch][:1]
    middle = by_size[[0, len(by_size) // 4, len(by_size) // 2]]
    few = np.unique(np.concatenate([middle, longer]))[:CLIENTS]
    most = max(2 * batch, SAMPLES)
    local, label, row = [], [], []
    for c in few:
        mine = slice(samples.ptr[c], min(samples.ptr[c] + most, samples.ptr[c + 1]))
        used, at = np.unique(samples.local[mine], return_inverse=True)
        local.append(at.astype(samples.local.dtype))
        label.append(samples.label[mine])
        row.append(samples.row[samples.row_ptr[c] + used])
    ends = [np.concatenate([[0], np.cumsum([len(part) for part in parts])]) for parts in (label, row)]
    return Samples(samples.clients[few], ends[0], np.concatenate(local), np.concatenate(label), ends[1], np.concatenate(row))


def gradients(loss: Callable[..., Tensor], part: Tensors, *given: Any) -> tuple[Tensors, Tensor]:
    """Each client's gradient of its loss by `part`, and the losses [C]; of their sum, for clients have nothing in common.

    torch.func's gradient would do the same, but takes a second to load, in a run that needs it for nothing else.
    """
    leaves = {name: value.detach().requires_grad_() for name, value in part.items()}
    losses = vmap(loss)(leaves, *given)
    if not losses.requires_grad:
        return {name: torch.zeros_like(value) for name, value in part.items()}, losses
    found = torch.autograd.grad(losses.sum(), list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, found, strict=True)), losses.detach()


def in_type(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in tensors.items()}
