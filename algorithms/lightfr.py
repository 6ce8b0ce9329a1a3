"""LightFR: binary codes.

Zhang et al., "LightFR: Lightweight Federated Recommendation with Privacy-preserving Matrix Factorization", TOIS 2022, arXiv 2206.11743;
the authors' code: https://github.com/hongleizhang/LightFR

A user and an item are f bits each, b and d_i in {-1, 1}^f, and the score is b·d_i, from -f to f. An interaction is to score f, a negative
-f; squared errors are made small bit by bit (discrete coordinate descent).

    client   b_k <- sign(Σ_i (t_i - d_i·b) d_ik + n_u b_k), for all k in turn, a few sweeps;   n_u: its samples
    upload   for each touched item (t_i - d_i·b) b: f bits and one number. Whoever knows that knows b up to its sign
    server   d_ik <- sign(Σ_u (t_ui - b_u·d_i) b_uk + c_i d_ik), for some bits k of all items a round;   c_i: clients that sent item i

The sums with n_u and c_i are exact: a flipped bit never makes the error larger. The published code has other weights there
(`--inertia published`). The first `--warm` rounds train real vectors as fedmf does; their signs are the first codes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedbench.contract.algorithm import SHARED, Answer, Batch, Phase, Stage, Tensors, World, bce
from fedbench.contract.randomness import Draw
from fedbench.contract.registry import register
from fedbench.contract.search import tuned
from fedbench.contract.uploads import Uploads
from fedbench.errors import UsageError
from fedbench.parts.server_optimizer import SharedModel


@register("lightfr", summary="users and items as binary codes, found bit by bit")
@dataclass(frozen=True)
class LightFR(SharedModel):
    rounds: int = 60
    local_epochs: int = 2
    """passes over a client's samples in the warm rounds (e)"""
    negatives: int = 1
    dim: int = 64
    """bits of a code (f)"""
    warm: int = 40
    """rounds of real vectors, whose signs the codes start from; 0, as published: random codes"""
    lr: float = tuned(0.02, 3e-3, 0.2, log=True)
    """local learning rate of Adam in the warm rounds"""
    sweeps: int = tuned(2, 1, 4)
    """times that a client goes through its bits in a round"""
    bits_a_round: float = tuned(0.25, 0.05, 1.0, log=True)
    """share of the bits that the server may flip in a round; the published code goes through all"""
    inertia: str = "exact"
    """what keeps a bit as it is: exact (a client's samples, an item's senders) or published (1.2 times a client's samples, the cohort)"""
    init_scale: float = 0.01
    """standard deviation of the first real vectors"""

    tables = {"items": SHARED, "change": SHARED}
    choices = {**SharedModel.choices, "inertia": ("exact", "published")}
    published = {"rounds": 10, "warm": 0, "negatives": 0, "bits_a_round": 1.0, "inertia": "published"}

    def check(self, world: World | None = None) -> None:
        super().check(world)
        self.must_be_positive("lr", "init_scale", "sweeps")
        self.must_not_be_negative("warm")
        if not 0 < self.bits_a_round <= 1:
            raise UsageError(f"--bits-a-round must be over 0 and at most 1, not {self.bits_a_round:g}")

    @property
    def coded(self) -> bool:
        """Whether this round works on codes."""
        return self.context.round > self.warm

    def bits(self, world: World) -> dict[str, float]:
        return {"items": 1, "change": (self.dim + 8) / self.dim, "coded": 0} if self.coded else {}

    # ---- client ------------------------------------------------------------------------------------------------------
    def init_client(self, world: World, draw: Draw) -> Tensors:
        return {"user": draw.normal("user", self.dim) * self.init_scale}

    def receive(self, own: Tensors, sent: Tensors) -> Tensors:
        return {**sent, "user": sign(own["user"]) if "coded" in sent else own["user"]}

    def stages(self, sent: Tensors) -> tuple[Stage, ...]:
        if "coded" in sent:  # one whole gradient step adds to each row what is uploaded
            return Stage(), Stage((Phase(("items",), 1.0, "sgd"),))
        return (Stage((Phase(("user", "items"), self.lr),), self.local_epochs, self.batch_size),)

    def solve(self, held: Tensors, sent: Tensors, batch: Batch) -> Tensors:
        rows, weight, bits = held["items"][batch.items], batch.weight, list(held["user"])
        gram = rows.T @ (weight[:, None] * rows)  # [f, f], n_u on its diagonal
        missing = rows.T @ (weight * self.targets(batch)) - gram @ held["user"]  # [f] Σ_i (t_i - d_i·b) d_i for the code as it is
        inertia = weight.sum() * (1.2 if self.inertia == "published" else 1.0)
        for k in list(range(self.dim)) * self.sweeps:
            wanted = missing[k] + inertia * bits[k]
            bit = torch.where(wanted != 0, sign(wanted), bits[k])
            missing, bits[k] = missing - (bit - bits[k]) * gram[k], bit
        return {"user": torch.stack(bits)}

    def targets(self, batch: Batch) -> Tensor:
        """[B]: what the samples are to score."""
        return (2 * batch.label - 1) * self.dim

    def loss(self, held: Tensors, sent: Tensors, batch: Batch) -> Tensor:
        score = held["items"][batch.items] @ held["user"]
        if "coded" not in sent:
            return bce(score, batch)
        error = (batch.weight * (self.targets(batch) - score) ** 2).sum()
        mean = error / batch.weight.sum().clamp(min=1)
        return mean.detach() + (error - error.detach()) / 2  # the mean is reported; a row moves by the sum over its samples

    def upload(self, held: Tensors, sent: Tensors, samples: Tensor) -> Tensors:
        return {"change": held["items"] - sent["items"]}

    def score(self, own: Tensors, sent: Tensors) -> Tensor:
        return sign(sent["items"]) @ sign(own["user"])  # in the warm rounds too: what their codes would be

    # ---- server ------------------------------------------------------------------------------------------------------
    def init_server(self, world: World, draw: Draw) -> Tensors:
        items = draw.normal("items", world.items, self.dim) * self.init_scale
        return {"items": items if self.warm else sign(items)}

    def answer(self, server: Tensors) -> Answer:
        told = {"coded": server["items"].new_ones(())} if self.coded else {}  # that it is there is what counts
        return Answer(shared={"items": server["items"], **told})

    def aggregate(self, server: Tensors, uploads: Uploads, draw: Draw) -> Tensors:
        rows, items = uploads.rows("change"), server["items"]
        if draw.when <= self.warm:
            moved = self.step(server, {"items": rows}, draw.when)
            return {"items": sign(moved["items"])} if draw.when == self.warm else moved
        total, senders = rows.combined(len(items), "sum")
        inertia = senders[:, None] if self.inertia == "exact" else float(rows.clients)
        wanted = total + inertia * items
        flipped = draw.subset("bits", self.dim, max(1, int(self.dim * self.bits_a_round))).to(items.device)
        new = items.clone()
        new[:, flipped] = torch.where(wanted != 0, sign(wanted), items)[:, flipped]
        return {**server, "items": new}


def sign(value: Tensor) -> Tensor:
    """1 or -1 of every number; 1 of 0."""
    return torch.where(value < 0, -torch.ones_like(value), torch.ones_like(value))
