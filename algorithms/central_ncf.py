"""NCF (NeuMF) with all data in one place (He et al., Neural Collaborative Filtering, 2017): the ceiling of federated NCF.

The model of algorithms/fedavg_ncf.py: the product of two embeddings, an MLP over two others, one linear layer over both. It is
trained from a random start, without the paper's separately pre-trained halves, by Adam on large minibatches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedbench.contract.algorithm import Tensors, World
from fedbench.contract.randomness import Draw
from fedbench.contract.registry import register
from fedbench.errors import UsageError
from fedbench.parts.central import Descent
from fedbench.parts.merging import init_mlp, mlp


@register("central_ncf", summary="ceiling: NCF (NeuMF) by Adam with all data in one place")
@dataclass(frozen=True)
class CentralNCF(Descent):
    rounds: int = 20
    """passes over all data; the best one is chosen on validation"""
    batch_size: int = 4096
    dim: int = 32
    lr: float = 0.002
    """learning rate of Adam"""
    layers: tuple[int, ...] = (64, 32, 16, 8)
    """layer sizes of the MLP; the first is the joined user and item embedding, half of it each"""

    def check(self, world: World | None = None) -> None:
        super().check(world)
        if len(self.layers) < 2 or min(self.layers) < 1 or self.layers[0] % 2:
            raise UsageError(f"--layers {','.join(map(str, self.layers))}: give two sizes or more, the first of them even")

    @property
    def head(self) -> tuple[int, int]:
        """Sizes of the last linear layer."""
        return self.dim + self.layers[-1], 1

    def init_model(self, world: World, draw: Draw) -> Tensors:
        width = self.dim + self.layers[0] // 2
        return {
            "user": draw.normal("user", world.clients, width) * self.init_scale,
            "items": draw.normal("items", world.items, width) * self.init_scale,
            "mlp": init_mlp(draw, "mlp", self.layers),
            "head": init_mlp(draw, "head", self.head),
        }

    def logits(self, model: Tensors, user: Tensor, items: Tensor) -> Tensor:
        d = self.dim
        deep = torch.relu(mlp(model["mlp"], self.layers, torch.cat([user[:, d:], items[:, d:]], dim=1)))
        return mlp(model["head"], self.head, torch.cat([user[:, :d] * items[:, :d], deep], dim=1))[:, 0]

    def score(self, own: Tensors, sent: Tensors) -> Tensor:
        return self.logits(sent, sent["user"].expand(len(sent["items"]), -1), sent["items"])
