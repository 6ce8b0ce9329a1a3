"""Federated Reconstruction (Singhal et al. 2021): items shared, user vectors rebuilt in every round and kept by nobody.

    client   starts its user vector w anew and fits it to its support samples, the sent item rows frozen: by SGD, or exactly by ridge
             regression; then trains the item rows on its query samples, w frozen; forgets w
    upload   how the item rows changed
    server   steps along the mean change

Evaluation does the same: a client, seen before or not, rebuilds w from its training items and scores with it.

With `--reconstruct ridge` a client takes one full gradient step on the item rows, and the method is federated implicit ALS on

    Σ positives (1 - w·v)² + a0 Σ all items (w·v)² + l2·(|I_u| + a0·M)|w|² + l2·(c_i + a0·U)|v_i|²      c_i: clients that have item i

On ratings r it is Σ (r - w·v)² with a0 = 0. A client knows the gradient of the first sum. That of the second it takes over sampled
negatives with weights; or, with `--server newton`, it uploads w wᵀ under secure aggregation. The sum G of all w wᵀ, a d x d matrix,
gives the server the exact gradient, a0·V·G, and the curvature of its step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedbench.contract.algorithm import Answer, Batch, Phase, Stage, Tensors, World
from fedbench.contract.randomness import Draw
from fedbench.contract.registry import register
from fedbench.contract.search import tuned, untuned
from fedbench.contract.uploads import Uploads
from fedbench.errors import UsageError
from fedbench.parts.newton import newton_step, packed
from fedbench.parts.ridge import Ridge
from fedbench.parts.server_optimizer import OPTIMIZERS, SharedModel


@register("fedrecon", summary="federated reconstruction: clients keep nothing, user vectors are rebuilt each round (closed form or sgd)")
@dataclass(frozen=True)
class FedRecon(SharedModel):
    rounds: int = 120
    clients_per_round: int | None = None
    """clients a round (n); 500, or all if they are fewer, if not given"""
    local_epochs: int = untuned(1)
    """--reconstruct sgd: passes over the query samples that train the item rows (e)"""
    batch_size: int = 5
    """--reconstruct sgd: samples a local step"""
    negatives: int = untuned(0)
    """negative items drawn anew for each training interaction in each round; --server newton needs none, the others 4"""
    dim: int = tuned(128, choices=(32, 64, 128))
    feedback: str = "implicit"
    """implicit (rank items) or explicit (predict ratings); a --split that holds out ratings means explicit"""
    reconstruct: str = "ridge"
    """how a client fits its user vector: ridge (closed form, all items weighed by --a0) or sgd"""
    average: str = untuned("cohort")
    server: str = untuned("newton")
    """the server's optimizer: newton (with the securely summed statistic), or sgd, momentum, adagrad, adam, yogi on the mean change"""
    server_lr: float = tuned(0.0, 0.1, 1.0, log=True)
    """learning rate of the server; 0 chooses: newton min(1, 1.2·√(n/U)), sgd 20 after --reconstruct ridge, else 1"""
    server_decay: str = "linear"
    a0: float = tuned(0.3, 0.03, 3.0, log=True)
    """ridge, implicit: weight of the items that a client has not met, beside 1 for those it has"""
    l2: float = tuned(0.0, 6e-4, 0.06, log=True)
    """ridge: weight of the squared vectors, times the weight of the samples that they serve; 0 chooses: implicit 0.006, explicit 0.05"""
    halves: bool = False
    """rebuild the user vector on one half of a client's samples (support) and train the items on the other (query); else on all"""
    max_samples: int | None = None
    """samples that a client takes at most in a round; all if not given"""
    lr_user: float = 0.1
    """--reconstruct sgd: learning rate of the user vector"""
    lr: float = 0.5
    """--reconstruct sgd: learning rate of the item rows"""
    recon_epochs: int = 5
    """--reconstruct sgd: passes over the support samples"""
    recon_steps: int = 50
    """--reconstruct sgd: steps at most on the support samples"""
    init_scale: float = 0.1
    """norm of an initial item row"""

    usual_cohort = 500
    reconstructs = True
    rating_split = "users"
    summed = ("statistic",)
    choices = {
        **SharedModel.choices,
        "feedback": ("implicit", "explicit"),
        "reconstruct": ("ridge", "sgd"),
        "server": ("newton", *OPTIMIZERS),
    }
    published = {
        **{"reconstruct": "sgd", "server": "sgd", "server_lr": 1.0, "server_decay": "none", "halves": True, "max_samples": 300},
        **{"dim": 50, "clients_per_round": 100, "rounds": 500, "negatives": 4},
    }

    def check(self, world: World | None = None) -> None:
        self.must_be_positive("lr", "lr_user", "init_scale", "recon_epochs", "recon_steps")
        self.must_not_be_negative("server_lr", "a0", "l2")
        if self.newton and (self.reconstruct == "sgd" or self.halves or self.max_samples or self.negatives):
            raise UsageError(
                "--server newton goes with --reconstruct ridge, without --halves, --max-samples and --negatives; or use --server sgd"
            )
        if not self.newton and self.negatives == 0 and not self.predicts_ratings:
            raise UsageError(f"--server {self.server} needs --negatives to rank: use --negatives 4")
        if world and self.newton and self.cohort(world.clients) < 2:
            raise UsageError("--server newton needs two clients a round: the sum of one client's statistic is that client's own")

    @property
    def predicts_ratings(self) -> bool:
        return self.feedback == "explicit"

    @property
    def newton(self) -> bool:
        return self.server == "newton"

    @property
    def ridge(self) -> Ridge:
        """A client's sum of squares."""
        return Ridge(0.0, self.l2 or 0.05, False) if self.predicts_ratings else Ridge(self.a0, self.l2 or 0.006, True)

    @property
    def evaluation_negatives(self) -> int:
        return super().evaluation_negatives if self.reconstruct == "sgd" else 0

    # ---- client ------------------------------------------------------------------------------------------------------
    def receive(self, own: Tensors, sent: Tensors) -> Tensors:
        return {**sent, "user": torch.zeros_like(sent["items"][0])}

    def stages(self, sent: Tensors) -> tuple[Stage, Stage]:
        support, query = ("support", "query") if self.halves else ("all", "all")
        most = self.max_samples and -(-self.max_samples // (2 if self.halves else 1))
        if self.reconstruct == "ridge":
            rebuild, train = Stage(ridge=self.ridge), Stage((Phase(("items",), 1.0, "sgd"),))
        else:
            rebuild = Stage((Phase(("user",), self.lr_user, "sgd"),), self.recon_epochs, self.batch_size, self.recon_steps)
            train = Stage((Phase(("items",), self.lr, "sgd"),), self.local_epochs, self.batch_size)
        return rebuild._replace(part=support, max_samples=most), train._replace(part=query, max_samples=most)

    def solve(self, held: Tensors, sent: Tensors, batch: Batch) -> Tensors:
        return {"user": self.ridge.solution(held["items"][batch.items], batch, sent["gram"], sent["size"])}

    def loss(self, held: Tensors, sent: Tensors, batch: Batch) -> Tensor:
        rows = held["items"][batch.items]
        score = rows @ held["user"]
        if self.reconstruct == "sgd":
            return (batch.weight * (score - batch.label) ** 2).sum() / batch.weight.sum().clamp(min=1)
        if self.newton:
            return (batch.weight * (score - batch.label) ** 2).sum() / 2
        return self.ridge.loss(rows, score, batch, sent["size"])

    def upload(self, held: Tensors, sent: Tensors, samples: Tensor) -> Tensors:
        change = {"items": held["items"] - sent["items"]}
        if self.newton:
            return change | {"statistic": packed(torch.outer(held["user"], held["user"]))}
        return change | {"samples": samples.clamp(max=self.max_samples or torch.inf)} if self.reconstruct == "sgd" else change

    def score(self, own: Tensors, sent: Tensors) -> Tensor:
        return sent["items"] @ own["user"]

    # ---- server ------------------------------------------------------------------------------------------------------
    def init_server(self, world: World, draw: Draw) -> Tensors:
        items = draw.normal("items", world.items, self.dim) * self.init_scale / self.dim**0.5
        return {"items": items, **({"count": torch.zeros_like(items[:, 0]), "visits": items.new_zeros(())} if self.newton else {})}

    def answer(self, server: Tensors) -> Answer:
        items = server["items"]
        if self.reconstruct == "sgd":
            return Answer({"items": items})
        return Answer({"items": items, "gram": items.T @ items, "size": items.new_full((), len(items))})

    def aggregate(self, server: Tensors, uploads: Uploads, draw: Draw) -> Tensors:
        rows, part = uploads.rows("items"), len(uploads.clients) / uploads.world.clients
        chosen = min(1.0, 1.2 * part**0.5) if self.newton else 20.0 if self.reconstruct == "ridge" else 1.0
        stepping = replace(self, server_lr=self.server_lr or chosen)
        if self.newton:
            rate = stepping.server_rate(draw.when)
            return newton_step(server, rows, uploads.total("statistic"), self.ridge.everywhere, self.ridge.l2, rate)
        samples = uploads.dense("samples") if self.reconstruct == "sgd" else None
        weight = None if samples is None else samples * len(samples) / samples.sum().clamp(min=1)
        return stepping.step(server, {"items": rows}, draw.when, weight=weight)
