"""NCF by federated averaging (federated NeuMF, He et al. 2017, trained as McMahan et al. 2017).

    model    gmf = user ∘ item;   deep = MLP([user', item']);   logit = linear([gmf, deep]);   BCE
    client   is sent the item table and the layers; e epochs of AdamW with a clipped gradient on its user row, item rows and layers
    upload   how the touched item rows and the layers changed; never its user row
    server   averages: item rows over the clients that touched them, layers over the cohort, and steps along the mean

A user's or an item's row holds both of its embeddings side by side: `dim` numbers for the product, half of the MLP's input for the MLP.

As published (`--share-users --average cohort`) every weight is averaged over the cohort, all user rows included, so that a row's
change is divided by n. Each client would train the whole user table; it changes its own row, and weight decay shrinks all others by
(1 - lr·decay)^steps. So a client is sent and returns its own row and that one factor (`kept`), from which the server forms exactly
the mean of the whole tables; bytes are counted as if the tables travelled whole, for that is what the published form sends.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedbench.contract.algorithm import Answer, Batch, Phase, Tensors, World, bce
from fedbench.contract.randomness import Draw
from fedbench.contract.registry import register
from fedbench.contract.search import tuned
from fedbench.contract.uploads import Rows, Uploads
from fedbench.errors import UsageError
from fedbench.parts.merging import Mergeable, init_mlp, mlp
from fedbench.parts.server_optimizer import SharedModel


@register("fedavg_ncf", summary="NCF (NeuMF) by federated averaging: item rows and layers shared, user embeddings private")
@dataclass(frozen=True)
class FedAvgNCF(Mergeable, SharedModel):
    rounds: int = 400
    clients_per_round: int | None = None
    """clients a round (n); 500, or all if they are fewer, if not given"""
    local_epochs: int = 2
    batch_size: int = 64
    dim: int = 64
    """size of the embeddings that are multiplied (GMF); the published recipe takes 16"""
    sampling: str = "queue"
    layers: tuple[int, ...] = (64, 32, 16, 8)
    """layer sizes of the MLP; the first is the joined user and item embedding, half of it each"""
    server_lr: float = 1.5
    lr: float = tuned(0.02, 1e-3, 0.1, log=True)
    """local learning rate of AdamW; the published recipe takes 0.001"""
    weight_decay: float = tuned(0.0, 0.0, 0.1)
    """decoupled weight decay of AdamW; the published recipe takes 0.01"""
    clip: float = 0.0
    """largest norm of a client's gradient, 0: not clipped; the published recipe takes 0.5"""
    init_scale: float = tuned(0.01, 0.003, 0.3, log=True)
    """standard deviation of the initial embeddings"""
    gmf: bool = True
    """the product of the embeddings beside the MLP; without it the MLP alone scores, and --dim is not used"""
    weigh: str = "clients"
    """how clients count in the server's means: all the same (clients), or by their samples, whose number they then upload (samples)"""
    share_users: bool = False
    """the server keeps the user embeddings too and averages them like all other weights"""

    usual_cohort = 500
    choices = {**SharedModel.choices, "weigh": ("clients", "samples")}
    published = {
        **{"dim": 16, "share_users": True, "average": "cohort", "server_lr": 1.0},
        **{"clients_per_round": 50, "local_epochs": 3, "lr": 0.001, "weight_decay": 0.01, "clip": 0.5},
    }

    def check(self, world: World | None = None) -> None:
        super().check(world)
        self.must_be_positive("lr", "init_scale")
        self.must_not_be_negative("weight_decay", "clip")
        if len(self.layers) < 2 or min(self.layers) < 1 or self.layers[0] % 2:
            raise UsageError(f"--layers {','.join(map(str, self.layers))}: give two sizes or more, the first of them even")
        if self.weigh == "samples" and self.averages_whole:
            raise UsageError("--weigh samples does not go with --average cohort and --weight-decay, a plain mean of whole tables")

    @property
    def product(self) -> int:
        """Numbers of one user or item that are multiplied."""
        return self.dim if self.gmf else 0

    @property
    def width(self) -> int:
        """Numbers of one user or item: both embeddings."""
        return self.product + self.layers[0] // 2

    @property
    def head(self) -> tuple[int, int]:
        """Sizes of the last linear layer."""
        return self.product + self.layers[-1], 1

    @property
    def averages_whole(self) -> bool:
        """Untouched rows enter the mean, shrunk by weight decay."""
        return self.average == "cohort" and self.weight_decay > 0

    # ---- client ------------------------------------------------------------------------------------------------------
    def init_client(self, world: World, draw: Draw) -> Tensors:
        return {} if self.share_users else {"user": draw.normal("user", self.width) * self.init_scale}

    def receive(self, own: Tensors, sent: Tensors) -> Tensors:
        held = {**own, **sent}
        if self.averages_whole:
            held["kept"] = sent["head"].new_ones(())  # no sample touches it: AdamW leaves of it what it leaves of an untouched row
        return held

    def phases(self, sent: Tensors) -> tuple[Phase, ...]:
        names = ("user", "items", "mlp", "head", *(["kept"] if self.averages_whole else []))
        return (Phase(names, self.lr, "adamw", self.weight_decay, self.clip),)

    def logits(self, model: Tensors, items: Tensor) -> Tensor:
        """[B, width] -> [B]"""
        user, d = model["user"], self.product
        joined = torch.cat([user[d:].expand(len(items), -1), items[:, d:]], dim=1)
        deep = torch.relu(mlp(model["mlp"], self.layers, joined))
        seen = torch.cat([user[:d] * items[:, :d], deep], dim=1) if self.gmf else deep
        return mlp(model["head"], self.head, seen)[:, 0]

    def loss(self, held: Tensors, sent: Tensors, batch: Batch) -> Tensor:
        return bce(self.logits(held, held["items"][batch.items]), batch)

    def upload(self, held: Tensors, sent: Tensors, samples: Tensor) -> Tensors:
        names = ("items", "mlp", "head", *(["user"] if self.share_users else []))
        more = {"kept": held["kept"]} if self.averages_whole else {"samples": samples} if self.weigh == "samples" else {}
        return {name: held[name] - sent[name] for name in names} | more

    def score(self, own: Tensors, sent: Tensors) -> Tensor:
        return self.logits({**own, **sent}, sent["items"])

    # ---- server ------------------------------------------------------------------------------------------------------
    def init_server(self, world: World, draw: Draw) -> Tensors:
        users = {"user": draw.normal("user", world.clients, self.width) * self.init_scale} if self.share_users else {}
        return {
            "items": draw.normal("items", world.items, self.width) * self.init_scale,
            "mlp": init_mlp(draw, "mlp", self.layers),
            "head": init_mlp(draw, "head", self.head),
            **users,
        }

    def answer(self, server: Tensors) -> Answer:
        shared = {name: server[name] for name in ("items", "mlp", "head")}
        if not self.share_users:
            return Answer(shared)
        users = server["user"]
        return Answer(shared, {"user": users}, torch.arange(len(users), device=users.device))

    def travels_whole(self, world: World) -> dict[str, int]:
        return {"user": world.clients, "items": world.items} if self.share_users and self.average == "cohort" else {}

    def aggregate(self, server: Tensors, uploads: Uploads, draw: Draw) -> Tensors:
        changes: dict[str, Rows | Tensor] = {"items": uploads.rows("items"), "mlp": uploads.dense("mlp"), "head": uploads.dense("head")}
        if self.share_users:
            changes["user"] = Rows(torch.ones_like(uploads.clients), uploads.clients, uploads.dense("user"))
        kept = uploads.dense("kept") if self.averages_whole else None
        return self.step(server, changes, draw.when, kept, self.shares(uploads))

    def shares(self, uploads: Uploads) -> Tensor | None:
        """[n] how much each client counts, 1 in the mean; None: all the same."""
        if self.weigh == "clients":
            return None
        samples = uploads.dense("samples")
        return samples * len(samples) / samples.sum().clamp(min=1)
