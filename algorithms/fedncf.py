"""FedNCF: federated neural collaborative filtering, an MLP alone.

Perifanis and Efraimidis, "Federated Neural Collaborative Filtering", Knowledge-Based Systems 242, 2022, arXiv 2106.04405.

    model    logit = MLP([user, item]), ReLU between the layers;   BCE
    client   is sent the item table and the layers; trains them and its user vector
    upload   how the touched item rows and the layers changed; never its user vector. With --weigh samples, their number too
    server   item rows: mean over the clients that changed them, for an item that a client did not meet has not changed there and
             would only hold the mean back; layers: mean over the cohort (the paper's MF-FedAvg)

That is `fedavg_ncf` without the product of embeddings: this file is its recipe. As published clients are weighed by their samples; the
sizes, rates and L2 of that recipe are those by which later papers run FedNCF as a baseline, for the authors' own are not public.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedbench.algorithms.fedavg_ncf import FedAvgNCF
from fedbench.contract.algorithm import Batch, Tensors, World
from fedbench.contract.registry import register
from fedbench.contract.search import tuned, untuned
from fedbench.errors import UsageError


@register("fedncf", summary="an MLP over private user and shared item embeddings, item rows averaged over those who changed them")
@dataclass(frozen=True)
class FedNCF(FedAvgNCF):
    dim: int = untuned(16)
    """size of the embeddings that the MLP joins"""
    layers: tuple[int, ...] = (32, 16, 8)
    """layer sizes of the MLP, before the last one to a logit; the first must be twice --dim"""
    gmf: bool = False
    weigh: str = "clients"
    lr: float = 0.005
    """local learning rate of AdamW; the published recipe takes 0.01"""
    l2: float = tuned(0.0, 0.0, 0.01)
    """weight of the squared layers in the loss, halved: what torch's Adam calls weight_decay; the published recipe takes 0.001"""

    published = {
        **{"weigh": "samples", "rounds": 100, "local_epochs": 10, "batch_size": 256, "stop_below": 1e-4, "server_lr": 1.0},
        **{"lr": 0.01, "l2": 1e-3, "init_scale": 1.0, "sampling": "uniform"},
    }

    def check(self, world: World | None = None) -> None:
        super().check(world)
        self.must_not_be_negative("l2")
        if not self.gmf and self.layers[0] != 2 * self.dim:
            given = ",".join(map(str, self.layers))
            raise UsageError(f"--layers {given} does not fit --dim {self.dim}: it must start with {2 * self.dim}")

    def loss(self, held: Tensors, sent: Tensors, batch: Batch) -> Tensor:
        fit = super().loss(held, sent, batch)
        if not self.l2:
            return fit
        size = self.l2 / 2 * ((held["mlp"] ** 2).sum() + (held["head"] ** 2).sum())
        return fit + size - size.detach()  # it moves the layers and is no part of the loss that is reported
