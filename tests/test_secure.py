"""Secure sums: masks cancel exactly, a masked upload is noise, and no single client's part reaches the server."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedbench.algorithms.fedrecon import FedRecon
from fedbench.contract.randomness import Draw
from fedbench.contract.uploads import Uploads
from fedbench.errors import FedbenchError, UsageError
from fedbench.parts import secure_sum
from fedbench.parts.secure_sum import masked, masked_sum, to_fixed
from fedbench.simulation.federation import Federation
from tests.conftest import small_split

NEWTON = FedRecon(dim=8, clients_per_round=17)


@given(st.integers(1, 9), st.integers(1, 5), st.integers(0, 2**31))
def test_masks_cancel_exactly(n: int, width: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = rng.integers(-(2**40), 2**40, (n, width))
    clients = rng.permutation(1000)[:n]
    sent = masked(values, clients, seed, 3)
    assert (sent.sum(axis=0) == values.sum(axis=0)).all()
    assert n == 1 or (sent != values).all()


def test_the_sum_is_the_plain_sum_to_the_resolution() -> None:
    values = torch.randn(50, 3, 4, dtype=torch.float64)
    found = masked_sum(values, np.arange(50), 0, 1)
    assert found.shape == (3, 4)
    assert (found - values.sum(0)).abs().max() <= 50 * 2.0 ** -(secure_sum.FRACTION + 1)


def test_a_masked_upload_is_noise() -> None:
    """Two uploads as far apart as can be look alike: spread over all of int64, with every bit set half of the time."""
    for value in (0.0, 1e3):
        sent = masked(to_fixed(np.full((40, 500), value)), np.arange(40), 0, 1)
        scaled = sent.astype(np.float64) / 2**63
        assert abs(scaled.mean()) < 0.03 and abs(scaled.std() - 3**-0.5) < 0.02
        bits = (sent.view(np.uint64)[..., None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
        assert np.abs(bits.mean(axis=(0, 1)) - 0.5).max() < 0.03


def test_a_mask_serves_one_round_and_one_pair() -> None:
    nothing = np.zeros((5, 100), np.int64)
    first, second = masked(nothing, np.arange(5), 0, 1), masked(nothing, np.arange(5), 0, 2)
    assert (first != second).all()
    assert all((first[i] != first[j]).all() for i in range(5) for j in range(i))


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e9])
def test_what_does_not_fit_is_refused(bad: float) -> None:
    with pytest.raises(FedbenchError, match="securely summed"):
        masked_sum(torch.tensor([[1.0], [bad]]), np.arange(2), 0, 1)


def test_no_single_statistic_reaches_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """`aggregate` is given one d(d+1)/2 vector for the whole cohort, equal to the sum of what the clients computed."""
    single: list[torch.Tensor] = []

    def watched(values: torch.Tensor, clients: np.ndarray, seed: int, when: int) -> torch.Tensor:
        single.append(values.clone())
        return masked_sum(values, clients, seed, when)

    seen: list[Uploads] = []

    class Watched(FedRecon):
        def aggregate(self, server: dict[str, torch.Tensor], uploads: Uploads, draw: Draw) -> dict[str, torch.Tensor]:
            seen.append(uploads)
            return super().aggregate(server, uploads, draw)

    monkeypatch.setattr("fedbench.simulation.channel.masked_sum", watched)
    Federation.start(Watched(**vars(NEWTON)), small_split(), 0, dtype=torch.float64).next_round()
    (uploads,), (parts,) = seen, single
    assert parts.shape == (17, 36)
    assert torch.allclose(uploads.total("statistic"), parts.sum(0), atol=1e-9, rtol=0)
    with pytest.raises(UsageError, match="uploads.total"):
        uploads.dense("statistic")
    for value in uploads.tensors.values():
        tensors = [value] if isinstance(value, torch.Tensor) else [part for part in value if isinstance(part, torch.Tensor)]
        assert all(tensor.shape != parts.shape for tensor in tensors)
