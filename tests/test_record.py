"""What the recorder of torch's operations writes down is what a function does, and nothing is loaded for it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fedbench.kernels.compiler.operations import taken_apart
from fedbench.kernels.compiler.record import record, slopes

X, Y = torch.arange(12.0, dtype=torch.float64).reshape(4, 3) / 7, torch.ones(3, 2, dtype=torch.float64) / 3


def in_place(x: Tensor, y: Tensor) -> list[Tensor]:
    made = torch.zeros_like(x)
    made += x
    made[:, 0] = 2 * y[0, 0]
    number = torch.tensor(2.0, dtype=torch.float64)
    number += x.sum()
    return [made @ y, x @ y[:, 0] * number]


def with_constants(x: Tensor, y: Tensor) -> list[Tensor]:
    table = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    return [(x * table).sum(0) * torch.tensor(3.0).item(), torch.cat([x, x + 1.5], 1), torch.arange(3) * y[:, 1]]


def several(x: Tensor, y: Tensor) -> list[Tensor]:
    first, second = x.split([1, 2], 1)
    return [torch.softmax(first * second, 1), torch.nn.functional.layer_norm(x @ y, (2,)), x.var(0), torch.stack([x, x])[1]]


def with_gradient(x: Tensor, y: Tensor) -> list[Tensor]:
    def of(part: dict[str, Tensor]) -> Tensor:
        logits = torch.relu(part["x"] @ part["y"]).sum(1)
        return torch.nn.functional.softplus(logits).sum() + torch.sigmoid(part["x"]).square().mean() + part["x"].detach().sum()

    found, value = slopes(of, {"x": x, "y": y, "unused": y})
    return [*found.values(), value]


@pytest.mark.parametrize("function", [in_place, with_constants, several, with_gradient])
@pytest.mark.parametrize("apart", [False, True])
def test_a_record_finds_what_the_function_and_torch_s_own_record_find(function: Callable[..., list[Tensor]], apart: bool) -> None:
    table = taken_apart() if apart else {}
    ours, theirs = record(function, [X, Y], table), make_fx(function, decomposition_table=table)(X, Y)
    other = X * 2 - 1, Y + 1
    for found, expected, known in zip(ours(*other), function(*other), theirs(*other), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
        torch.testing.assert_close(found, known, rtol=1e-12, atol=0)


def test_a_function_that_looks_at_numbers_is_not_recorded() -> None:
    def looks(x: Tensor) -> list[Tensor]:
        return [x if x.sum() > 0 else -x]

    with pytest.raises(RuntimeError, match="asks for the numbers of a tensor"):
        record(looks, [X], {})


def test_recording_a_gradient_loads_no_compiler_of_torch() -> None:
    code = """
import sys
import torch
from fedbench.contract.algorithm import Batch, bce
from fedbench.kernels.compiler import record, trace
leaves = {("held", "x"): trace.example((4,)), ("sent", "x"): trace.example((4,))}
def loss(x, y):
    return record.slopes(lambda part: torch.nn.functional.logsigmoid(part["x"] * y).sum(), {"x": x})[0].values()
trace.trace(lambda x, y: [*loss(x, y)], leaves, ["x"])
print([name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr
