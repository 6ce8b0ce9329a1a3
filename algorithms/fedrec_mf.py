"""FedRec (Lin, Liang, Pan and Ming, IEEE Intelligent Systems 2021): biased matrix factorisation that hides which items were rated.

    model    rating = mean + user bias + item bias + user · item; squared error with a penalty on all of them
    client   adds min(rho·|rated|, unrated) unrated items to its ratings, drawn anew each round, each with a virtual rating: its own mean
             (average filling), or from round --hybrid-from on what its own model predicts as the round begins (hybrid)
    upload   how the rows of all those items and the mean changed, and the number of samples; never its user vector and bias
    server   averages, weighted by the number of samples, and steps

The batch form takes one gradient step a round: first the client's own vector, then the gradients of the item rows at the new one, which
the server averages over the clients that sent a row. The stochastic form trains e epochs of small batches before it uploads.
With implicit feedback the same model ranks: BCE on sampled negatives.

A row of the item table is the item's vector and its bias; so is a user's vector.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedbench.contract.algorithm import Answer, Batch, Extra, Phase, Tensors, World, bce
from fedbench.contract.randomness import Draw
from fedbench.contract.registry import register
from fedbench.contract.search import tuned
from fedbench.contract.uploads import Uploads
from fedbench.errors import UsageError
from fedbench.parts.server_optimizer import SharedModel

LEARNING_RATES = {"batch": 0.8, "stochastic": 0.02, "implicit": 0.02}


@register("fedrec_mf", summary="FedRec: biased matrix factorisation of ratings; virtual ratings hide which items were rated")
@dataclass(frozen=True)
class FedRecMF(SharedModel):
    local_epochs: int = 1
    batch_size: int = 32
    """samples a local step; the batch form takes all of a client's ratings in one step"""
    dim: int = 20
    feedback: str = "explicit"
    """explicit (predict ratings) or implicit (rank items; BCE on --negatives)"""
    form: str = "batch"
    """explicit: batch (one gradient step a round) or stochastic (--local-epochs of small batches a round)"""
    rho: int = 0
    """explicit: unrated items that a client adds for each rated one, so that its upload does not tell them apart"""
    filling: str = "hybrid"
    """the rating of such an item: average (the client's mean) or hybrid (its mean at first, then what its own model predicts)"""
    hybrid_from: int = 10
    """hybrid filling: rounds with the client's mean before its model's predictions are used"""
    lr: float | None = tuned(None, 3e-3, 2.0, log=True)
    """learning rate: of gradient steps 0.8 (batch form) or 0.02 a rating (stochastic), of Adam 0.02 (implicit), if not given"""
    decay: float = tuned(0.97, 0.9, 1.0)
    """what the learning rate is multiplied by each round; the published code takes 0.9"""
    penalty: float = tuned(0.001, 1e-5, 0.1, log=True)
    """weight of the squared sizes of vectors and biases beside the squared error"""
    init_scale: float = 0.01
    """standard deviation of the initial vectors; biases begin at 0"""

    published = {"decay": 0.9}
    choices = {
        **SharedModel.choices,
        "feedback": ("explicit", "implicit"),
        "form": ("batch", "stochastic"),
        "filling": ("average", "hybrid"),
    }

    def check(self, world: World | None = None) -> None:
        super().check(world)
        self.must_be_positive("init_scale", "decay", *(["lr"] if self.lr is not None else []))
        if self.decay > 1:
            raise UsageError(f"--decay must be at most 1, not {self.decay:g}")
        self.must_not_be_negative("rho", "penalty", "hybrid_from")
        if self.feedback == "implicit" and self.rho:
            raise UsageError("--rho hides which items were rated; with --feedback implicit use --negatives")

    @property
    def predicts_ratings(self) -> bool:
        return self.feedback == "explicit"

    @property
    def samples_a_step(self) -> int:
        return 1 << 30 if self.predicts_ratings and self.form == "batch" else self.batch_size

    @property
    def rate(self) -> float:
        """The learning rate of the first round."""
        return self.lr if self.lr is not None else LEARNING_RATES[self.form if self.predicts_ratings else "implicit"]

    # ---- client ------------------------------------------------------------------------------------------------------
    def init_client(self, world: World, draw: Draw) -> Tensors:
        return {"user": with_bias(draw.normal("user", self.dim) * self.init_scale)}

    def extra(self, when: int) -> Extra:
        if not self.predicts_ratings:
            return super().extra(when)
        return Extra(self.rho, "unknown" if self.filling == "hybrid" and when > self.hybrid_from else "mean")

    def receive(self, own: Tensors, sent: Tensors) -> Tensors:
        return {**own, **sent, "before": own["user"]}  # not trained: virtual ratings come from the model as the round begins

    def phases(self, sent: Tensors) -> tuple[Phase, ...]:
        if not self.predicts_ratings:
            return (Phase(("user", "items"), self.rate),)
        return (Phase(("user",), self.rate, "sgd"), Phase(("items", "mean"), self.rate, "sgd"))

    def loss(self, held: Tensors, sent: Tensors, batch: Batch) -> Tensor:
        user, items = held["user"], held["items"][batch.items]
        predicted = predict(user, items, held["mean"])
        if not self.predicts_ratings:
            return bce(predicted, batch)
        virtual = predict(held["before"], sent["items"][batch.items], sent["mean"])
        error = torch.where(batch.label.isnan(), virtual, batch.label) - predicted
        losses = (error**2 + self.penalty * ((items**2).sum(1) + (user**2).sum())) / 2
        size = batch.weight.sum().clamp(min=1)
        loss = (batch.weight * losses).sum() / size
        # the value is the mean loss; the gradient is the round's share of it, in the stochastic form for each rating and not their mean
        scale = sent["rate"] if self.form == "batch" else sent["rate"] * size
        return loss.detach() + scale * (loss - loss.detach())

    def upload(self, held: Tensors, sent: Tensors, samples: Tensor) -> Tensors:
        change = {name: held[name] - sent[name] for name in ("items", "mean")}
        if self.predicts_ratings and self.form == "batch":
            change["items"] = change["items"] * samples  # of the mean loss: a row's own gradient is `samples` times that
        return {**change, "samples": samples}

    def score(self, own: Tensors, sent: Tensors) -> Tensor:
        return predict(own["user"], sent["items"], sent["mean"])

    # ---- server ------------------------------------------------------------------------------------------------------
    def init_server(self, world: World, draw: Draw) -> Tensors:
        items = with_bias(draw.normal("items", world.items, self.dim) * self.init_scale)
        middle = (world.rating_min + world.rating_max) / 2 if self.predicts_ratings else 0.0
        return {"items": items, "mean": items.new_tensor(middle), "rate": items.new_tensor(1.0)}

    def answer(self, server: Tensors) -> Answer:
        return Answer({name: server[name] for name in ("items", "mean", "rate")})

    def for_new_users(self, server: Tensors) -> Tensors:
        return {**server, "rate": torch.ones_like(server["rate"])}

    def aggregate(self, server: Tensors, uploads: Uploads, draw: Draw) -> Tensors:
        samples = uploads.dense("samples")
        gradients = self.predicts_ratings and self.form == "batch"
        server = self.step(server, {"items": uploads.rows("items")}, draw.when, weight=None if gradients else samples)
        server = self.step(server, {"mean": uploads.dense("mean")}, draw.when, weight=samples)
        return {**server, "rate": server["rate"] * self.decay}


def with_bias(vectors: Tensor) -> Tensor:
    """[..., d] -> [..., d + 1], the bias 0."""
    return torch.nn.functional.pad(vectors, (0, 1))


def predict(user: Tensor, items: Tensor, mean: Tensor) -> Tensor:
    """[d + 1], [B, d + 1] -> [B]"""
    return mean + user[-1] + items[:, -1] + items[:, :-1] @ user[:-1]
