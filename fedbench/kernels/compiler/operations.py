"""Torch's operations, as kernels know them: those that stay as they are, and how others are written as these."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions, get_decompositions

aten = torch.ops.aten
ELEMENTWISE: dict[Any, str] = {
    aten.mul.Tensor: "mul", aten.add.Tensor: "add", aten.sub.Tensor: "sub", aten.div.Tensor: "div", aten.neg.default: "neg",
    aten.abs.default: "abs", aten.exp.default: "exp", aten.log.default: "log", aten.log1p.default: "log1p", aten.relu.default: "relu",
    aten.sigmoid.default: "sigmoid", aten.tanh.default: "tanh", aten.sqrt.default: "sqrt", aten.minimum.default: "min",
    aten.maximum.default: "max", aten.clamp_min.Tensor: "max", aten.clamp_max.Tensor: "min",
    aten.sign.default: "sign", aten.sgn.default: "sign", aten.mul.Scalar: "mul", aten.div.Scalar: "div",
    aten.add.Scalar: "add", aten.sub.Scalar: "sub", aten.sin.default: "sin", aten.cos.default: "cos",
}  # fmt: skip
COMPARE = {
    aten.gt.Scalar: "gt", aten.gt.Tensor: "gt", aten.lt.Scalar: "lt", aten.lt.Tensor: "lt", aten.ge.Scalar: "ge", aten.ge.Tensor: "ge",
    aten.le.Scalar: "le", aten.le.Tensor: "le",
}  # fmt: skip
SAME_NUMBERS = (aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh.default)
SHAPE_ALONE = (aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.new_zeros.default, aten.new_ones.default,
               aten.new_full.default)  # fmt: skip
"""operations that ask a tensor for nothing but its shape and type"""
RESHAPES = (aten.view.default, aten.unsqueeze.default, aten.squeeze.dims, aten.squeeze.dim, aten.squeeze.default, aten._unsafe_view.default,
            aten.reshape.default, aten.squeeze_.dim, aten.squeeze_.dims)  # fmt: skip
AS_THEY_ARE = (aten.mm.default, aten.mv.default, aten.bmm.default, aten.dot.default, aten.select_backward.default,
               aten.slice_backward.default, aten.sigmoid_backward.default, aten.tanh_backward.default, aten.embedding.default,
               aten.index_select.default)  # fmt: skip
"""operations that are not taken apart: as they are, they say more"""
EMPTY = (aten.empty_permuted.default, aten.empty.memory_format, aten.empty_like.default)
"""room that something is written into before it is read"""
VIEWS = (*RESHAPES, aten.alias.default, aten.detach.default, aten.lift_fresh.default, aten.permute.default, aten.t.default,
         aten.transpose.int, aten.expand.default, aten.slice.Tensor, aten.select.int)  # fmt: skip
"""operations whose result lies where their argument does"""
AS_TORCH_WRITES_THEM = (aten._softmax, aten._log_softmax, aten.native_layer_norm, aten.leaky_relu, aten.elu, aten.hardtanh, aten.addmm,
                        aten.addmv, aten.baddbmm, aten.repeat)  # fmt: skip
"""operations that torch counts as simple, and can write as others"""


def variance(x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    return variance_and_mean(x, dim, correction=correction, keepdim=keepdim)[0]


def variance_and_mean(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    axes = list(range(x.dim()) if dim is None else dim)
    mean = x.mean(axes, keepdim=True)
    left = math.prod(x.shape[axis] for axis in axes) - (1 if correction is None else correction)
    found = ((x - mean) ** 2).sum(axes, keepdim=keepdim) / left
    return found, mean if keepdim else mean.squeeze(axes)


def parts(x: Tensor, sizes: Sequence[int], dim: int = 0) -> list[Tensor]:
    ends = [sum(sizes[: at + 1]) for at in range(len(sizes))]
    return [x.narrow(dim, end - size, size) for end, size in zip(ends, sizes, strict=True)]


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    if approximate != "tanh":
        return NotImplemented  # there is no error function
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def not_in_place(target: Any) -> Any:
    """What an operation that writes over its first argument finds, as an operation that does not; None for any other."""
    name, overload = str(target).split(".")[1:3] if str(target).startswith("aten.") else ("", "")
    return getattr(getattr(aten, name[:-1], None), overload, None) if name.endswith("_") else None


WRITTEN_HERE: dict[Any, Callable[..., Any]] = {
    aten.amin.default: lambda x, dim=(), keepdim=False: -(-x).amax(dim, keepdim),
    aten.expm1.default: lambda x: torch.tanh(x / 2) * (torch.exp(x) + 1),
    aten.log2.default: lambda x: torch.log(x) / math.log(2),
    aten.log10.default: lambda x: torch.log(x) / math.log(10),
    aten.pow.Scalar: lambda base, x: torch.exp(x * math.log(base)) if base > 0 else NotImplemented,
    aten.gelu.default: gelu,
    aten.split_with_sizes.default: parts,
    aten.var.correction: variance,
    aten.var_mean.correction: variance_and_mean,
}
"""other operations in terms of those above"""


@cache
def taken_apart() -> dict[Any, Callable[..., Any]]:
    """How torch writes its operations as few simple ones. To ask for it takes longer than to record a loss."""
    known = {**core_aten_decompositions(), **get_decompositions(AS_TORCH_WRITES_THEM), **WRITTEN_HERE}
    return {op: plainly(how) for op, how in known.items() if op not in AS_THEY_ARE}


def plainly(how: Callable[..., Any]) -> Callable[..., Any]:
    """Without the casts of torch's wrappers, which whole and half numbers need: graphs have neither, and the casts load sympy."""
    return inspect.unwrap(how) if getattr(how, "__module__", "") == "torch._decomp.decompositions" else how
