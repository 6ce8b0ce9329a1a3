"""`--merge` for any method: off it is the method itself; on it is what a client computes by hand; and what a plug-in writes for it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

from fedbench.algorithms.colr import CoLR
from fedbench.algorithms.fedmf import FedMF
from fedbench.algorithms.fedrap import FedRAP
from fedbench.algorithms.gpfedrec import GPFedRec
from fedbench.algorithms.pfedrec import PFedRec
from fedbench.contract.algorithm import Algorithm
from fedbench.errors import UsageError
from fedbench.parts.merging import Mergeable
from fedbench.settings.command_line import resolve
from fedbench.simulation.federation import Federation
from fedbench.testing.algorithm_tests import AlgorithmTests
from fedbench.testing.small_federation import SEED, SMALL, assert_same, assert_same_trace, by_engine, small_split
from tests.test_algorithms import fedavg_ncf, fedem

HOSTS: dict[str, Mergeable] = {
    "fedmf": FedMF(**SMALL),
    "fedavg_ncf": fedavg_ncf(),
    "pfedrec": PFedRec(**SMALL),
    "gpfedrec": GPFedRec(**SMALL, layers=(16, 8, 1)),
    "fedrap": FedRAP(**SMALL, apart=0.01, sparse=0.01),
    "colr": CoLR(**SMALL, rank=4, lr=0.1),
}


@pytest.mark.parametrize("host", HOSTS.values(), ids=HOSTS)
def test_elastic_equals_the_loop(host: Mergeable) -> None:
    AlgorithmTests().test_equals_the_loop(replace(host, merge="elastic", merge_loss="inside"), "off")
    AlgorithmTests().test_equals_the_loop(replace(host, merge="elastic", merge_loss="beside"), "off")


def test_a_kernel_of_the_merge_equals_the_loop() -> None:
    AlgorithmTests().test_equals_the_loop(replace(HOSTS["fedmf"], merge="elastic"), "auto")


@pytest.mark.parametrize("name", HOSTS)
def test_replace_is_the_method_itself(name: str) -> None:
    host = HOSTS[name]
    assert type(replace(host, merge="replace")) is type(host) and type(replace(host, merge="static")) is not type(host)
    flags = ["--algo", name, "--dataset", "synthetic"]
    said = resolve(flags).identity()
    assert not {"merge", "rho", "adapter", "lr_adapter", "merge_loss"} & said.keys()
    assert resolve([*flags, "--merge", "replace"]).digest() == resolve(flags).digest() != resolve([*flags, "--merge", "static"]).digest()


@pytest.mark.parametrize("name", [name for name in HOSTS if name != "gpfedrec"])
def test_all_the_way_to_what_was_sent_is_the_method_itself(name: str) -> None:
    """rho 1 leaves nothing of a client's rows, so all goes as if they were never kept; gpfedrec starts from its neighbours' mean then."""
    host = HOSTS[name]
    kept, plain = by_engine(replace(host, merge="static", rho=1.0), kernel="off"), by_engine(host, kernel="off")
    store = {key: value for key, value in kept.store.items() if key in plain.store}
    assert kept.store.keys() - store.keys() <= {"mine"}
    assert_same_trace(kept._replace(store=store), plain, 1e-9)


class Gate(torch.nn.Module):
    """The adapter, from a client's vector of weights."""

    def __init__(self, weights: Tensor, sizes: tuple[int, ...]) -> None:
        super().__init__()
        layers, left = [], weights.clone()
        for fan_in, fan_out in zip(sizes[:-1], sizes[1:], strict=True):
            layer = torch.nn.Linear(fan_in, fan_out, dtype=torch.float64)
            matrix, bias, left = left.split([fan_in * fan_out, fan_out, len(left) - (fan_in + 1) * fan_out])
            with torch.no_grad():
                layer.weight.copy_(matrix.view(fan_out, fan_in)), layer.bias.copy_(bias)
            layers += [layer, torch.nn.ReLU()]
        self.net = torch.nn.Sequential(*layers[:-1])

    def forward(self, mine: Tensor, theirs: Tensor) -> Tensor:
        return mine + torch.sigmoid(self.net(torch.cat([mine, theirs - mine], 1))) * (theirs - mine)

    def vector(self) -> Tensor:
        return torch.cat([part.detach().reshape(-1) for part in self.parameters()])


@pytest.mark.parametrize("loss", ["inside", "beside"])
def test_elastic_fedmf_by_hand(loss: str) -> None:
    """Two rounds of every client in plain torch, all samples in one step."""
    method = FedMF(dim=8, local_epochs=2, batch_size=1 << 20, lr=0.05, merge="elastic", lr_adapter=0.02, merge_loss=loss, init_scale=0.3)
    federation = Federation.start(method, small_split(), SEED, dtype=torch.float64, kernel="off")
    state = {name: value.clone() for name, value in federation.store.tensors.items()}
    items = federation.server["items"].clone()
    for when in (1, 2):
        samples = federation.samples(when)
        change, senders = torch.zeros_like(items), torch.zeros(len(items), 1, dtype=torch.float64)
        for place, client in enumerate(samples.clients):
            rows = torch.from_numpy(samples.row[samples.row_ptr[place] : samples.row_ptr[place + 1]].astype(np.int64))
            at = torch.from_numpy(samples.local[samples.ptr[place] : samples.ptr[place + 1]].astype(np.int64))
            label = torch.from_numpy(samples.label[samples.ptr[place] : samples.ptr[place + 1]]).double()
            gate = Gate(state["adapter"][client], (16, 16, 8, 1))
            with torch.no_grad():
                state["mine"][client] = gate(state["mine"][client], items)
            user = state["user"][client].clone().requires_grad_()
            own = state["mine"][client][rows].clone().requires_grad_()
            first, second = torch.optim.Adam(gate.parameters(), 0.02), torch.optim.Adam([user, own], 0.05)
            for _ in range(2):
                for optimizer in (first, second):
                    merged = optimizer is first or loss == "inside"
                    optimizer.zero_grad()
                    cross_entropy((gate(own, items[rows]) if merged else own)[at] @ user, label).backward()
                    optimizer.step()
            state["user"][client], state["adapter"][client] = user.detach(), gate.vector()
            state["mine"][client, rows] = own.detach()
            change[rows] += own.detach() - items[rows]
            senders[rows] += 1
        items = items + change / senders.clamp(min=1)
        federation.next_round()
    assert_same(dict(federation.store.tensors), state, 1e-9, "clients")
    assert_same({"items": federation.server["items"]}, {"items": items}, 1e-9, "the server")


def test_three_readings_of_one_model() -> None:
    federation = Federation.start(replace(HOSTS["fedmf"], merge="static", rho=0.25), small_split(), SEED, dtype=torch.float64, kernel="off")
    federation.next_round()
    a, own, sent = federation.algorithm, {name: value[0] for name, value in federation.store.tensors.items()}, dict(federation.server)
    found = [getattr(a, name)(own, sent) for name in ("score_own", "score", "score_sent")]
    assert a.scores == ("own", "sent") and {*federation.readings()} == {"own", "sent"}
    torch.testing.assert_close(found[0], own["mine"] @ own["user"])
    torch.testing.assert_close(found[2], sent["items"] @ own["user"])
    torch.testing.assert_close(found[1], 0.75 * found[0] + 0.25 * found[2])


def test_readings_of_fedem() -> None:
    method = fedem(merge="static", rho=0.25)
    own = {"items": torch.randn(5, 8), "user": torch.randn(8), "adapter": torch.zeros(1)}
    sent = {"items": torch.randn(5, 8)}
    torch.testing.assert_close(method.score(own, sent), 0.75 * method.score_own(own, sent) + 0.25 * method.score_sent(own, sent))
    torch.testing.assert_close(method.score_sent(own, {}), method.score_own(own, {}))


def test_fedem_beside_equals_the_loop() -> None:
    AlgorithmTests().test_equals_the_loop(fedem(merge_loss="beside"), "off")


@dataclass(frozen=True)
class Plain(Algorithm):
    """A method that knows nothing of merging."""

    lr: float = 0.1

    init_server, init_client, answer = FedMF.init_server, FedMF.init_client, FedMF.answer
    loss, upload, score, init_scale = FedMF.loss, FedMF.upload, FedMF.score, 0.1  # type: ignore[assignment]

    def phases(self, sent: dict[str, Tensor]) -> Any:
        return FedMF(lr=self.lr).phases(sent)


@dataclass(frozen=True)
class Merged(Mergeable, Plain):
    """It with one word more."""


def test_a_method_takes_it_by_one_word() -> None:
    assert {field.name for field in fields(Merged)} - {field.name for field in fields(Plain)} == {*Merged.later}
    AlgorithmTests().test_equals_the_loop(Merged(**SMALL, merge="elastic"), "off")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--merge elastic --adapter 16,1", "--adapter 16,1 does not fit --dim 16: it must start with 32 and end with 1"),
        ("--merge static --rho 2", "--rho must be from 0 to 1"),
        ("--merge elastic --lr-adapter 0", "--lr-adapter must be over 0"),
        ("--merge elastic --merge-loss both", "--merge-loss must be one of inside, beside"),
    ],
)
def test_what_makes_no_sense_is_refused(flags: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        resolve(["--algo", "fedmf", "--dataset", "synthetic", *flags.split()])
