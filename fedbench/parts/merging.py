"""Merging the server's rows into a client's own, row by row: a part that any algorithm with its own item table can take."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedbench.contract.randomness import Draw

MERGES = ("replace", "static", "elastic")


def static(own: Tensor, sent: Tensor, rho: float) -> Tensor:
    """[T, d], [T, d] -> [T, d]: a fixed share of the way from the client's rows to the server's; rho 1 replaces them."""
    return own + rho * (sent - own)


def elastic(own: Tensor, sent: Tensor, adapter: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """[T, d], [T, d], [A] -> [T, d]: as far towards the server's row as the client's adapter says, item by item."""
    change = sent - own
    rho = torch.sigmoid(mlp(adapter, sizes, torch.cat([own, change], dim=-1)))
    return own + rho * change


def mlp(weights: Tensor, sizes: tuple[int, ...], x: Tensor) -> Tensor:
    """[A], [T, sizes[0]] -> [T, sizes[-1]]: linear layers with ReLU between, their weights and biases laid end to end in one vector."""
    at = 0
    for layer, (fan_in, fan_out) in enumerate(zip(sizes[:-1], sizes[1:], strict=True)):
        if layer:
            x = torch.relu(x)
        weight = weights[at : at + fan_in * fan_out].view(fan_out, fan_in)
        bias = weights[at + fan_in * fan_out : at + (fan_in + 1) * fan_out]
        x = x @ weight.T + bias
        at += (fan_in + 1) * fan_out
    return x


def init_mlp(draw: Draw, purpose: str, sizes: tuple[int, ...]) -> Tensor:
    """[..., A] every weight and bias uniform within 1/sqrt(fan in) of zero."""
    layers = [
        (draw.uniform(f"{purpose}/{layer}", (fan_in + 1) * fan_out) * 2 - 1) / math.sqrt(fan_in)
        for layer, (fan_in, fan_out) in enumerate(zip(sizes[:-1], sizes[1:], strict=True))
    ]
    return torch.cat(layers, dim=-1)
