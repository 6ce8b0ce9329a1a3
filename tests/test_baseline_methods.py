"""FedNCF, FedCA, FedCIA, FedFast and LightFR under the common tests, and what is said of each on its page."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedbench.algorithms.fedavg_ncf import FedAvgNCF
from fedbench.algorithms.fedca import FedCA, greedy, overlap
from fedbench.algorithms.fedcia import FedCIA, descended, nearest_rotation
from fedbench.algorithms.fedem import FedEM
from fedbench.algorithms.fedfast import FedFast
from fedbench.algorithms.fedncf import FedNCF
from fedbench.algorithms.lightfr import LightFR
from fedbench.contract.algorithm import Algorithm, Batch, World
from fedbench.contract.randomness import Draw
from fedbench.contract.uploads import Tables, Uploads
from fedbench.errors import UsageError
from fedbench.simulation.federation import Federation
from fedbench.testing.algorithm_tests import AlgorithmTests
from fedbench.testing.small_federation import SEED, SMALL, small_split


def of(cls: type[Algorithm], **fields: Any) -> Any:
    return cls(**{**SMALL, **fields})


class TestFedNCF(AlgorithmTests):
    algorithms = (of(FedNCF, layers=(16, 6, 4), weigh="samples", l2=1e-3),)
    band = (0.2, 0.7)
    quality = {"layers": (32, 16, 8), "lr": 0.02, "server_lr": 1.5, "init_scale": 0.1, "l2": 0.0, "weigh": "clients"}
    quality_rounds = 12


class TestFedCA(AlgorithmTests):
    algorithms = (of(FedCA, adapter=(16, 8, 1), init_items=0.1),)
    may_leave = ("basis",)  # the paper's upload: main directions of the trained rows, which travel whole anyway
    band = (0.25, 0.75)
    quality = {"init_items": FedCA.init_items, "batch_size": 1 << 20}
    quality_rounds = 2


class TestFedCIA(AlgorithmTests):
    algorithms = (of(FedCIA, tau=0.8),)
    band = (0.2, 0.7)
    quality_rounds = 6


class TestFedFast(AlgorithmTests):
    algorithms = (of(FedFast, groups=4),)
    band = (0.2, 0.7)
    quality = {"clients_per_round": 200, "lr": 0.05}
    quality_rounds = 12


class TestLightFR(AlgorithmTests):
    """Two rounds of codes after one of real vectors."""

    algorithms = (of(LightFR, warm=1),)
    band = (0.15, 0.7)
    quality = {"warm": 6, "dim": 32}
    quality_rounds = 8


def trained(algorithm: Algorithm, rounds: int = 2) -> Federation:
    federation = Federation.start(algorithm, small_split(), SEED, dtype=torch.float64, kernel="off")
    for _ in range(rounds):
        federation.next_round()
    return federation


# ---- bytes ---------------------------------------------------------------------------------------------------------------


def test_bytes_up() -> None:
    items, n = small_split().items, 17
    layers = 16 * 6 + 6 + 6 * 4 + 4 + 4 + 1
    for weigh, more in (("clients", 0), ("samples", 1)):
        federation = Federation.start(of(FedNCF, layers=(16, 6, 4), weigh=weigh), small_split(), SEED, kernel="off")
        result = federation.next_round()
        assert federation.bytes_up == 4 * (result.uploads.rows("items").sent() * (8 + 1) + n * (layers + more))
    federation = Federation.start(of(FedCA), small_split(), SEED, kernel="off")
    federation.next_round()
    assert federation.bytes_up == 4 * n * (items * 8 + 4 * 8 + 1)


def test_bytes_of_fedcia_fedfast_and_lightfr() -> None:
    items, n = small_split().items, 17
    federation = Federation.start(of(FedCIA), small_split(), SEED, kernel="off")
    federation.next_round()
    federation.next_round()
    assert federation.bytes_up == federation.bytes_down == 2 * 4 * n * items * 8, "clients make their maps themselves"
    federation = Federation.start(of(FedFast), small_split(), SEED, kernel="off")
    result = federation.next_round()
    assert federation.bytes_up == 4 * (result.uploads.rows("items").sent() * (8 + 1) + n * (8 + 9 + 1))
    assert federation.bytes_down == 4 * n * (items * 8 + 8 + 9)
    federation = Federation.start(of(LightFR, warm=0), small_split(), SEED, kernel="off")
    result = federation.next_round()
    assert federation.bytes_up == result.uploads.rows("change").sent() * (2 + 4), "a byte of bits, a byte for the number, an id"
    assert federation.bytes_down == n * items


# ---- what each is ---------------------------------------------------------------------------------------------------------


def test_fedncf_is_fedavg_ncf_without_the_product() -> None:
    alike = {**SMALL, "layers": (16, 6, 4), "gmf": False, "lr": 0.01}
    ours, other = trained(FedNCF(**alike)), trained(FedAvgNCF(**alike))
    assert all(torch.equal(ours.server[name], other.server[name]) for name in other.server)


def test_fedca_without_its_term_is_fedem_with_a_fixed_share() -> None:
    ours, other = trained(of(FedCA, beta=0.0)), trained(of(FedEM, merge="static", rho=FedCA().rho))
    assert torch.equal(ours.server["tables"], other.server["tables"]) and torch.equal(
        ours.store.tensors["items"], other.store.tensors["items"]
    )
    assert not torch.equal(ours.server["tables"], trained(of(FedCA)).server["tables"])


def test_subspaces_are_compared_whatever_the_signs_and_order_of_their_axes() -> None:
    drawn = np.random.default_rng(0)
    bases = torch.from_numpy(np.stack([np.linalg.qr(drawn.normal(size=(8, 3)))[0].T for _ in range(5)]))
    turned = bases.clone()
    turned[2] = -turned[2][[1, 2, 0]]
    torch.testing.assert_close(overlap(turned, slice(None)), overlap(bases, slice(None)))
    torch.testing.assert_close(overlap(bases, slice(1, 3)), overlap(bases, slice(None))[1:3])
    assert not torch.allclose(greedy(turned, slice(None)), greedy(bases, slice(None))), "as published signs matter"
    torch.testing.assert_close(greedy(bases, slice(None)).diagonal(), torch.ones(5, dtype=torch.float64))


def test_fedcia_does_not_care_in_which_basis_a_client_trains() -> None:
    """Tables that are turned, each by a rotation of its own, stay turned and are otherwise as they were: this is the method's point."""
    drawn = np.random.default_rng(0)
    turns = torch.from_numpy(np.stack([np.linalg.qr(drawn.normal(size=(8, 8)))[0] for _ in range(small_split().clients)]))
    for align in ("procrustes", "steps"):
        federation = trained(of(FedCIA, align=align, passes=0, align_steps=10), 1)
        tables, found = federation.store.tensors["items"], []
        for stacked in (tables, tables @ turns):
            uploads = Uploads(World(*tables.shape[:2]), torch.arange(len(tables)), {"items": Tables(stacked, 0, len(stacked))})
            server = federation.algorithm.aggregate({"factor": federation.server["factor"]}, uploads, Draw(SEED, 1, dtype=torch.float64))
            found.append(stacked @ server["maps"][:, 0] + server["factor"] @ server["maps"][:, 1])
        torch.testing.assert_close(found[1], found[0] @ turns, rtol=1e-9, atol=1e-9)


def test_fedcias_factor_by_passes_is_near_the_exact_one_and_its_steps_near_the_closed_form() -> None:
    drawn = torch.from_numpy(np.random.default_rng(0).normal(size=(9, 60, 4)))
    drawn = 0.1 * drawn + torch.from_numpy(np.random.default_rng(1).normal(size=(60, 4)))
    some = of(FedCIA, dim=4)
    exact, near = (
        FedCIA(dim=4, passes=passes).factor(Tables(drawn, 0, 9), Draw(SEED, 1, dtype=torch.float64)) for passes in (0, some.passes)
    )
    torch.testing.assert_close(near @ near.T, exact @ exact.T, rtol=1e-6, atol=1e-6)
    products = drawn.mT @ exact
    maps = descended(drawn.mT @ drawn, products.mT, exact.T @ exact, 2000, 0.01, 0.0)
    goal = exact @ nearest_rotation(products.mT)
    torch.testing.assert_close(drawn @ maps[:, 0] + exact @ maps[:, 1], goal, rtol=0, atol=0.05)  # steps of one length do not end


def test_fedfast_draws_evenly_from_its_groups() -> None:
    group = torch.tensor([0] * 14 + [1] * 4 + [2] * 2 + [3] * 4)
    picked = FedFast(groups=5).choose({"group": group}, World(24, 60), 11, Draw(SEED, 3))
    assert picked is not None and len(picked.unique()) == 11
    assert torch.bincount(group[picked], minlength=4).tolist() == [3, 3, 2, 3]
    other = FedFast(groups=5).choose({"group": group}, World(24, 60), 11, Draw(SEED, 4))
    assert other is not None and set(other.tolist()) != set(picked.tolist())


def test_fedfast_nudges_those_who_were_not_asked() -> None:
    federation = trained(of(FedFast, groups=3), 1)
    asked, group = federation.chosen(1), federation.server["group"]
    start = Federation.start(of(FedFast, groups=3), small_split(), SEED, dtype=torch.float64, kernel="off").server["users"]
    change = federation.server["users"] - start
    for absent in sorted(set(range(24)) - set(asked.tolist())):
        alike = [change[u] for u in asked.tolist() if group[u] == group[absent]]
        expected = 0.9 * torch.stack(alike).mean(0) if alike else torch.zeros_like(change[0])
        torch.testing.assert_close(change[absent], expected)


def test_a_sweep_of_lightfr_never_makes_a_clients_error_larger() -> None:
    """True for the exact inertia."""
    drawn = np.random.default_rng(0)
    for _ in range(20):
        rows = torch.from_numpy(drawn.choice([-1.0, 1.0], size=(30, 8)))
        batch = Batch(torch.arange(30), torch.from_numpy((drawn.uniform(size=30) < 0.3).astype(float)), torch.ones(30).double())
        code, errors = torch.from_numpy(drawn.choice([-1.0, 1.0], size=8)), []
        one = of(LightFR, warm=0, sweeps=1)
        for _ in range(4):
            errors.append(float(((one.targets(batch) - rows @ code) ** 2).sum()))
            code = one.solve({"items": rows, "user": code}, {}, batch)["user"]
        assert errors == sorted(errors, reverse=True) and set(code.tolist()) <= {-1.0, 1.0}


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        (FedCIA(tau=2.0), "--tau must be from 0 to 1"),
        (FedFast(gamma=2.0), "--gamma must be from 0 to 1"),
        (LightFR(bits_a_round=0.0), "--bits-a-round must be over 0 and at most 1"),
        (FedNCF(dim=8), "--layers 32,16,8 does not fit --dim 8"),
        (FedAvgNCF(weigh="samples", average="cohort", weight_decay=0.1), "--weigh samples does not go with"),
        (FedCA(alpha=0.0), "--alpha must be over 0 where --beta is"),
        (FedCA(components=17), "--components must be from 1 to --dim"),
    ],
)
def test_what_makes_no_sense_is_refused(algorithm: Algorithm, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        algorithm.check()
