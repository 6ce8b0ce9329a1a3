"""Federated EASE from a sketch of the Gram matrix: 2·M·k numbers down and M·k up, where `fedease` needs M². For many items.

    all      a random matrix Ω [M, k], which a seed gives to everybody
    client   sends r_u (r_uᵀΩ), its part of Y = G·Ω, with G = Σ_u r_u r_uᵀ; the server sees the sum alone
    server   G ≈ Y (ΩᵀY)⁻¹ Yᵀ = V Λ Vᵀ (Nyström), so (G + l2·I)⁻¹ = P = I/l2 - V D Vᵀ with D = 1/l2 - 1/(Λ + l2),
             and off the diagonal EASE's weights are B = V D Vᵀ / diag(P), column by column
    score    item i: (Σ over the client's items of D·V_j) · V_i / P_ii

One visit a client, as in `fedease`. The larger k, the nearer to it; with k = M it is the same model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedbench.contract.algorithm import SHARED, Answer, Batch, Stage, Tensors, World
from fedbench.contract.randomness import Draw
from fedbench.contract.registry import register
from fedbench.contract.search import tuned
from fedbench.contract.uploads import Uploads
from fedbench.parts.item_item import AskedOnce

SMALLEST = 1e-6
"""eigenvalues below this share of the largest are noise of float32 and left out"""


@register("fedease_sketch", summary="federated EASE from a securely summed sketch of the Gram matrix: for many items")
@dataclass(frozen=True)
class FedEASESketch(AskedOnce):
    dim: int = tuned(256, choices=(128, 256, 512))
    """columns of the sketch (k); with as many as there are items fedease costs less"""
    l2: float = tuned(0.0, 10.0, 3000.0, log=True)
    """weight of the squared regression weights (λ); 0 chooses: the root of the number of interactions"""

    tables = {"omega": SHARED, "left": SHARED, "items": SHARED, "sketch": SHARED}
    summed = ("sketch", "size")
    reconstructs = True

    def check(self, world: World | None = None) -> None:
        super().check(world)
        self.must_be_positive("dim")
        self.must_not_be_negative("l2")

    def travels_whole(self, world: World) -> dict[str, int]:
        return {"sketch": world.items}

    def bits(self, world: World) -> dict[str, float]:
        return {"omega": 0}

    def init_server(self, world: World, draw: Draw) -> Tensors:
        nothing = {name: draw.zeros(world.items, self.dim) for name in ("left", "items", "sketch")}
        return {"omega": draw.normal("omega", world.items, self.dim), **nothing, "size": draw.zeros()}

    def answer(self, server: Tensors) -> Answer:
        return Answer({name: server[name] for name in ("omega", "left", "items")})

    # ---- client ------------------------------------------------------------------------------------------------------
    def receive(self, own: Tensors, sent: Tensors) -> Tensors:
        return {**sent, "user": torch.zeros_like(sent["left"][0]), "probe": torch.zeros_like(sent["left"][0])}

    def stages(self, sent: Tensors) -> tuple[Stage, ...]:
        return (Stage(),)

    def solve(self, held: Tensors, sent: Tensors, batch: Batch) -> Tensors:
        mine = batch.label * batch.weight
        return {"user": mine @ sent["left"][batch.items], "probe": mine @ sent["omega"][batch.items]}

    def upload(self, held: Tensors, sent: Tensors, samples: Tensor) -> Tensors:
        return {"sketch": held["probe"].expand_as(sent["omega"]), "size": samples}

    def score(self, own: Tensors, sent: Tensors) -> Tensor:
        return sent["items"] @ own["user"]

    # ---- server ------------------------------------------------------------------------------------------------------
    def aggregate(self, server: Tensors, uploads: Uploads, draw: Draw) -> Tensors:
        sketch, size = (server[name] + uploads.total(name) for name in ("sketch", "size"))
        exact, l2 = sketch.cpu().double(), self.l2 or size.cpu().double().clamp(min=1).sqrt()
        core, basis = eigen(server["omega"].cpu().double().T @ exact)
        factor = exact @ (basis / core.sqrt())  # [M, k], factor·factorᵀ is the sketch's G
        values, turned = eigen(factor.T @ factor)
        vectors = factor @ (turned / values.sqrt())
        left = vectors * (1 / l2 - 1 / (values + l2))
        diagonal = 1 / l2 - (left * vectors).sum(1)
        new = {"left": left, "items": vectors / diagonal[:, None]}
        return {**server, "sketch": sketch, "size": size, **{name: value.to(sketch) for name, value in new.items()}}


def eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """[k, k] -> [k], [k, k]: eigenvalues and eigenvectors of a matrix that should be symmetric and positive, those of noise 1 and 0."""
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    real = values > SMALLEST * values.max()
    return values.where(real, 1.0), vectors * real
