"""Random small losses: the graph that the compiler makes of one, computed value by value in numpy, has the gradient that torch finds.

The graph holds all of the compiler's algebra; kernels of a few such losses are compiled and compared with the generic path as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedbench.contract.algorithm import Batch, Phase, bce
from fedbench.kernels.compiler.graph import Value
from fedbench.simulation.derived import gradient_graph
from tests.test_derived import LOSSES, Plain, over_samples, ways

pytestmark = pytest.mark.kernels

DIM, HIDDEN, ROWS = 4, 3, 6
SHAPES = {"user": (DIM,), "items": ("n", DIM), "layer": (4 * DIM + 4,)}
NAMES = ("user", "items", "layer")
UNARY: dict[str, Callable[..., Tensor]] = {
    "tanh": torch.tanh, "sigmoid": torch.sigmoid, "relu": torch.relu, "square": lambda x: x**2, "neg": lambda x: -x,
    "softplus": torch.nn.functional.softplus, "root": lambda x: (x**2 + 0.3).sqrt(), "clamp": lambda x: x.clamp(-0.4, 0.6),
    "abs": torch.abs, "none": lambda x: x,
}  # fmt: skip
BINARY: dict[str, Callable[..., Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "max": torch.maximum, "gate": lambda x, y: torch.sigmoid(x) * y,
}  # fmt: skip
VECTORS = ("mine", "theirs", "user", "layer", "joined", "shifted")
SCALARS = ("dot", "sum", "first", "last", "layer")


@dataclass(frozen=True)
class Recipe:
    """What a random loss is made of."""

    left: tuple[str, str]
    right: tuple[str, str]
    joined: str
    scalars: tuple[tuple[str, str], tuple[str, str]]
    both: str
    ends: str
    penalty: str


def vector(kind: str, held: Mapping[str, Tensor], sent: Mapping[str, Tensor], batch: Batch) -> Tensor:
    """[B, d]"""
    mine, theirs, w = held["items"][batch.items], sent["items"][batch.items], held["layer"]
    if kind == "mine":
        return mine
    if kind == "theirs":
        return theirs - mine
    if kind == "user":
        return mine * held["user"]
    if kind == "layer":
        return torch.relu(mine @ w[: DIM * DIM].view(DIM, DIM) + w[-DIM:])
    if kind == "joined":
        return torch.cat([theirs[:, 1:], held["user"][:1].expand(len(mine), 1)], dim=1)
    return torch.cat([mine[:, -1:], mine[:, :-1]], dim=1)


def scalar(kind: str, x: Tensor, held: Mapping[str, Tensor]) -> Tensor:
    """[B, d] -> [B]"""
    if kind == "dot":
        return x @ held["user"]
    if kind == "layer":
        return torch.tanh(x @ held["layer"][: DIM * HIDDEN].view(HIDDEN, DIM).T) @ held["layer"][-HIDDEN:]
    return {"sum": x.sum(1), "first": x[:, 0], "last": x[:, -1]}[kind]


def loss_of(recipe: Recipe) -> Callable[..., Tensor]:
    def loss(held: Mapping[str, Tensor], sent: Mapping[str, Tensor], batch: Batch) -> Tensor:
        left, right = (UNARY[how](vector(kind, held, sent, batch)) for kind, how in (recipe.left, recipe.right))
        x = BINARY[recipe.joined](left, right)
        a, b = (UNARY[how](scalar(kind, x, held)) for kind, how in recipe.scalars)
        score = BINARY[recipe.both](a, b)
        if recipe.ends == "centred":
            score = score - over_samples(batch, score)
        value = over_samples(batch, (score - batch.label) ** 2) if recipe.ends == "mse" else bce(score, batch)
        if recipe.penalty == "user":
            return value + 0.1 * (held["user"] ** 2).sum() * held["layer"].abs().sum()
        return value + (0.1 * (batch.rows[:, None] * held["items"] ** 2).sum() if recipe.penalty == "rows" else 0.0)

    return loss


recipes = st.builds(
    Recipe,
    left=st.tuples(st.sampled_from(VECTORS), st.sampled_from([*UNARY])),
    right=st.tuples(st.sampled_from(VECTORS), st.sampled_from([*UNARY])),
    joined=st.sampled_from([*BINARY]),
    scalars=st.tuples(*[st.tuples(st.sampled_from(SCALARS), st.sampled_from([*UNARY]))] * 2),
    both=st.sampled_from([*BINARY]),
    ends=st.sampled_from(["bce", "mse", "centred"]),
    penalty=st.sampled_from(["none", "user", "rows"]),
)


# ---- the graph, computed in numpy -----------------------------------------------------------------------------------------------

ELEMENTWISE: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "neg": np.negative, "abs": np.abs, "exp": np.exp,
    "log": np.log, "log1p": np.log1p, "relu": lambda x: np.maximum(x, 0), "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "tanh": np.tanh,
    "sqrt": np.sqrt, "min": np.minimum, "max": np.maximum, "sign": np.sign, "copy": lambda x: x,
    "pick": lambda x, y, a, b: np.where(x > y, a, b),
}  # fmt: skip


def computed(v: Value, leaves: Mapping[tuple[str, str], np.ndarray], known: dict[int, np.ndarray]) -> np.ndarray:
    """A value of the graph, ROWS samples in place of the axis of samples."""
    if v.number not in known:
        known[v.number] = _computed(v, leaves, known)
    return known[v.number]


def _computed(v: Value, leaves: Mapping[tuple[str, str], np.ndarray], known: dict[int, np.ndarray]) -> np.ndarray:
    shape = tuple(n if isinstance(n, int) else ROWS for n in v.shape)
    if v.op == "const":
        return np.full(shape, v.args[0])
    if v.op in ("table", "param"):
        return leaves[v.how["key"]].reshape(shape)
    if v.op == "sample":
        return leaves["sample", v.how["key"]]
    args = [computed(one, leaves, known) for one in v.inputs]
    if v.op in ("view", "flat"):
        return looked_at(v, args[0], shape)
    if v.op == "ew":
        return np.broadcast_to(ELEMENTWISE[v.f](*args), shape)
    if v.op == "cat":
        return np.concatenate([np.broadcast_to(one, [*shape[: v.how["axis"]], one.shape[v.how["axis"]], *shape[v.how["axis"] + 1 :]])
                               for one in args], axis=v.how["axis"])  # fmt: skip
    if v.op in ("mix", "prod", "uniform_mm"):
        return args[0] @ args[1]
    axis = v.how["axis"] if v.op == "feature_sum" else 0
    assert v.op in ("feature_sum", "lane_sum", "column_sums"), v
    return args[0].sum(axis=axis)


def looked_at(v: Value, of: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A view, element by element: index functions say None for the axis of samples."""
    out, lanes = np.empty(shape), [axis for axis, n in enumerate(v.shape) if not isinstance(n, int)]
    sample = [axis for axis, n in enumerate(v.args[0].shape) if not isinstance(n, int)]
    for index in itertools.product(*(range(n) for n in shape)):
        at = list(v.how["fn"](tuple(None if axis in lanes else i for axis, i in enumerate(index))))
        place = [one for one in at if one is not None]
        if sample:
            place.insert(sample[0], index[lanes[0]] if lanes else 0)  # of what is the same for all samples, any will do
        out[index] = of[tuple(place)]
    return out


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(recipe=recipes)
def test_a_random_graph_has_the_gradient_that_torch_finds(recipe: Recipe) -> None:
    loss = loss_of(recipe)
    algorithm = type("Random", (Plain,), {"loss": lambda self, held, sent, batch: loss(held, sent, batch)})()
    _, outputs = gradient_graph(algorithm, Phase(NAMES, 0.1), SHAPES, {"items": ("n", DIM)})
    draw = torch.Generator().manual_seed(0)
    held = {name: torch.randn(*(ROWS if n == "n" else n for n in shape), generator=draw).double() for name, shape in SHAPES.items()}
    sent = {"items": torch.randn(ROWS, DIM, generator=draw).double()}
    items = torch.tensor([0, 1, 1, 2, 3, 3, 3, 4, 5])
    label = torch.tensor([1.0, 0, 1, 0, 1, 0]).double()
    weight = torch.bincount(items).double()
    leaves = {("held", name): value.numpy() for name, value in held.items()} | {("sent", "items"): sent["items"].numpy()}
    leaves |= {("sample", "label"): label.numpy(), ("sample", "weight"): weight.numpy(), ("sample", "rows"): np.ones(ROWS)}
    leaves |= {("batch", "size"): np.array(float(len(items))), ("batch", "touched"): np.array(float(ROWS))}
    known: dict[int, np.ndarray] = {}
    found = {name: computed(v, leaves, known) for name, v in outputs.items()}

    part = {name: value.clone().requires_grad_() for name, value in held.items()}
    value = loss(part, sent, Batch(items, label[items], torch.ones(len(items)).double(), torch.ones(ROWS).double()))
    slopes = torch.autograd.grad(value, list(part.values()), allow_unused=True, materialize_grads=True)
    assert found["loss"] == pytest.approx(value.item(), rel=1e-12, abs=1e-12)
    for name, slope in zip(part, slopes, strict=True):
        assert np.allclose(found[name], slope.numpy(), rtol=1e-10, atol=1e-12), name


FEW = (
    Recipe(("joined", "tanh"), ("layer", "none"), "gate", (("layer", "softplus"), ("last", "square")), "add", "centred", "user"),
    Recipe(("shifted", "relu"), ("theirs", "clamp"), "max", (("dot", "sigmoid"), ("sum", "root")), "mul", "mse", "rows"),
)


@pytest.mark.parametrize("recipe", [pytest.param(FEW[0], marks=pytest.mark.long), FEW[1]], ids=["networks", "rows"])
def test_its_kernel_equals_the_generic_path(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = loss_of(recipe)
    monkeypatch.setitem(LOSSES, "random", lambda a, held, sent, batch: loss(held, sent, batch))
    said, apart = ways(Plain(dim=DIM, of="random", moves=(Phase(NAMES, 0.05),)), monkeypatch, gather=False)
    assert not said and apart < 1e-9
