"""A method to copy: matrix factorisation, item rows shared, a user vector private. Say here what yours does, and whose paper it is.

Copy this file, change it, then: python -m fedbench check mine.py, and python train.py --algo mine.py --dataset ml-100k
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedbench.contract import SHARED, Algorithm, Answer, Batch, Draw, Phase, Tensors, Uploads, World, bce, register, tuned


# the name of --algo, and one line for --list
@register("template", summary="a method to copy: item rows shared, a user vector private")
@dataclass(frozen=True)
class Template(Algorithm):
    # fields are flags: a type, a default, and the sentence for --help; those of every algorithm can be declared again
    local_epochs: int = 2
    lr: float = tuned(0.02, 1e-3, 0.2, log=True)
    """local learning rate of Adam; 0.02 is a good start"""

    # names with one row an item, and who keeps each: SHARED (the server) or OWN (each client)
    tables = {"items": SHARED}
    # what `--recipe published` sets: the values of the paper's own code
    published = {"lr": 0.1}

    # refuse values that make no sense
    def check(self, world: World | None = None) -> None:
        self.must_be_positive("lr")

    # what the server starts with; [M, d]
    def init_server(self, world: World, draw: Draw) -> Tensors:
        return {"items": draw.normal("items", world.items, self.dim) * 0.01}

    # what a client keeps from round to round, private; [d], for one client
    def init_client(self, world: World, draw: Draw) -> Tensors:
        return {"user": draw.normal("user", self.dim) * 0.01}

    # what the server sends, in training and in evaluation
    def answer(self, server: Tensors) -> Answer:
        return Answer(shared={"items": server["items"]})

    # what a batch moves: the names, the learning rate, and "adam", "adamw" or "sgd"
    def phases(self, sent: Tensors) -> tuple[Phase, ...]:
        return (Phase(("user", "items"), self.lr, "adam"),)

    # one client's mean loss over a batch; held has T rows of each table, and batch.items [B] says which
    def loss(self, held: Tensors, sent: Tensors, batch: Batch) -> Tensor:
        return bce(held["items"][batch.items] @ held["user"], batch)

    # everything that leaves the device: of shared tables the touched rows
    def upload(self, held: Tensors, sent: Tensors, samples: Tensor) -> Tensors:
        return {"items": held["items"] - sent["items"]}

    # the server's step; it sees the uploads and nothing else
    def aggregate(self, server: Tensors, uploads: Uploads, draw: Draw) -> Tensors:
        change = uploads.rows("items").combine(uploads.world.items, "touching")
        return {"items": server["items"] + change}

    # [K] the client's score of each of the item rows that it is given: higher is better
    def score(self, own: Tensors, sent: Tensors) -> Tensor:
        return sent["items"] @ own["user"]
