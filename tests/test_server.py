"""The server's optimizers: against torch.optim where it has the same, against a few numpy lines else; row-wise state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedbench.algorithms.fedmf import FedMF
from fedbench.contract.algorithm import Tensors
from fedbench.contract.uploads import Rows
from fedbench.errors import UsageError
from fedbench.parts.mixing import mean_of_whole_tables
from fedbench.parts.server_optimizer import BETA1, BETA2, EPSILON, OPTIMIZERS, SharedModel

TORCH: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.3),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.3, momentum=BETA1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.3, eps=EPSILON),
    "adam": lambda p: torch.optim.Adam(p, lr=0.3, betas=(BETA1, BETA2), eps=EPSILON),
}


def numpy_yogi(value: np.ndarray, changes: list[np.ndarray]) -> np.ndarray:
    first, second = np.zeros_like(value), np.zeros_like(value)
    for t, change in enumerate(changes, 1):
        first = BETA1 * first + (1 - BETA1) * change
        second = second - (1 - BETA2) * np.sign(second - change**2) * change**2
        value = value + 0.3 * (first / (1 - BETA1**t)) / (np.sqrt(second / (1 - BETA2**t)) + EPSILON)
    return value


def rounds(kind: str, value: Tensor, sent: list[dict[int, Tensor]]) -> Tensors:
    """The server after rounds in which one client sent some rows' changes each."""
    server: Tensors = {"items": value}
    for rows in sent:
        change = torch.stack([*rows.values()]) if rows else value.new_zeros(0, value.shape[1])
        uploaded = Rows(torch.tensor([len(rows)]), torch.tensor([*rows], dtype=torch.int64), change)
        server = SharedModel(server=kind, server_lr=0.3).step(server, {"items": uploaded}, when=1)
    return server


def changes_of(rounds_: int = 5) -> list[Tensor]:
    return [torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) for seed in range(rounds_)]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_equals_a_plain_optimizer_on_the_negative_change(kind: str) -> None:
    start, changes = torch.ones(4, 3, dtype=torch.float64), changes_of()
    found = rounds(kind, start, [dict(enumerate(change)) for change in changes])["items"]
    if kind == "yogi":
        expected = torch.from_numpy(numpy_yogi(start.numpy(), [change.numpy() for change in changes]))
    else:
        expected = start.clone().requires_grad_()
        optimizer = TORCH[kind]([expected])
        for change in changes:
            expected.grad = -change
            optimizer.step()
        expected = expected.detach()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_row_that_nobody_sent_stands_still_and_so_does_its_state(kind: str) -> None:
    """A row that is sent in rounds 1, 3 and 4 ends as if those had been all the rounds there were."""
    start, changes = torch.ones(4, 3, dtype=torch.float64), changes_of(4)
    sent = [{0: changes[0][0], 2: changes[0][2]}, {2: changes[1][2]}, {0: changes[2][0]}, {0: changes[3][0], 1: changes[3][1]}]
    server = rounds(kind, start, sent)
    alone = rounds(kind, start, [sent[0], sent[2], sent[3]])
    for name, value in server.items():
        assert torch.equal(value[0], alone[name][0]), name
        untouched = start[3] if name == "items" else torch.zeros_like(value[3])
        assert torch.equal(value[3], untouched), name


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_tensor_that_is_no_table_moves_as_one(kind: str) -> None:
    start, changes = torch.ones(4, 3, dtype=torch.float64), changes_of()
    server: Tensors = {"layers": start}
    for change in changes:
        server = SharedModel(server=kind, server_lr=0.3).step(server, {"layers": torch.stack([change * 0.5, change * 1.5])}, when=1)
    expected = rounds(kind, start, [dict(enumerate(change)) for change in changes])["items"]
    torch.testing.assert_close(server["layers"], expected, rtol=1e-12, atol=1e-12)


def test_mean_of_whole_tables_by_hand() -> None:
    table = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], dtype=torch.float64)
    kept = torch.tensor([0.9, 0.5], dtype=torch.float64)
    # client 0 trained row 0, client 1 rows 0 and 2; what they did not train they decayed
    trained = {(0, 0): [7.0, 7.0], (1, 0): [8.0, 9.0], (1, 2): [0.0, 1.0]}
    whole = torch.stack([table * 0.9, table * 0.5])
    for (client, item), row in trained.items():
        whole[client, item] = torch.tensor(row, dtype=torch.float64)
    client, item = (torch.tensor(column) for column in zip(*trained, strict=True))
    value = torch.tensor([*trained.values()], dtype=torch.float64) - table[item]
    found = table + mean_of_whole_tables(Rows(torch.bincount(client), item, value), table, kept)
    torch.testing.assert_close(found, whole.mean(0), rtol=1e-12, atol=1e-12)


def test_refuses_what_makes_no_sense() -> None:
    with pytest.raises(UsageError, match="--server-lr must be over 0"):
        FedMF(server_lr=0.0).check()


def test_a_falling_rate_ends_near_nothing_and_none_stays() -> None:
    falling = SharedModel(rounds=4, server_lr=2.0, server_decay="linear")
    assert [falling.server_rate(when) for when in (1, 2, 3, 4, 5)] == [2.0, 1.5, 1.0, 0.5, 0.5]
    assert SharedModel(rounds=4, server_lr=2.0).server_rate(4) == 2.0
    change = torch.ones(1, 3, dtype=torch.float64)
    layers = {"layers": torch.zeros(3, dtype=torch.float64)}
    assert falling.step(layers, {"layers": change}, when=3)["layers"].tolist() == [1.0, 1.0, 1.0]
