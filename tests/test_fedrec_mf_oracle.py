"""FedRec's batch form against numpy, written from the paper's formulas with loops over ratings; and what its uploads give away."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedbench.algorithms.fedrec_mf import FedRecMF
from fedbench.data.sampling import Samples
from fedbench.data.split import Split
from fedbench.errors import UsageError
from fedbench.settings.command_line import parse, resolve
from fedbench.simulation.exposure import exposure
from fedbench.simulation.federation import Federation
from tests.conftest import small_split

ROUNDS = 4


class Paper:
    """U clients with vectors p and biases b, M items with q and c, a mean; gradients of (e² + penalty·sizes)/2."""

    def __init__(self, federation: Federation) -> None:
        user, items = federation.store.tensors["user"].numpy(), federation.server["items"].numpy()
        self.p, self.b, self.q, self.c = user[:, :-1].copy(), user[:, -1].copy(), items[:, :-1].copy(), items[:, -1].copy()
        self.mean = float(federation.server["mean"])

    def predict(self, u: int, i: int) -> float:
        return float(self.mean + self.b[u] + self.c[i] + self.p[u] @ self.q[i])

    def round(self, samples: Samples, lr: float, penalty: float) -> None:
        senders = np.zeros(len(self.q))
        dq, dc, dmean, total = np.zeros_like(self.q), np.zeros_like(self.c), 0.0, 0
        for position, u in enumerate(samples.clients):
            items = samples.row[samples.row_ptr[position] : samples.row_ptr[position + 1]]
            ratings = [
                self.predict(u, i) if np.isnan(r) else float(r)
                for i, r in zip(items, samples.label[samples.ptr[position] : samples.ptr[position + 1]], strict=True)
            ]
            error = np.array([r - self.predict(u, i) for i, r in zip(items, ratings, strict=True)])
            self.p[u] += lr * (np.mean([e * self.q[i] for i, e in zip(items, error, strict=True)], axis=0) - penalty * self.p[u])
            self.b[u] += lr * (error.mean() - penalty * self.b[u])
            for i, r in zip(items, ratings, strict=True):
                e = r - self.predict(u, i)
                dq[i] += e * self.p[u] - penalty * self.q[i]
                dc[i] += e - penalty * self.c[i]
                senders[i] += 1
                dmean += e
                total += 1
        share = lr / np.maximum(senders, 1)
        self.q += share[:, None] * dq
        self.c += share * dc
        self.mean += lr * dmean / total


@pytest.mark.parametrize("fields", [{"rho": 0}, {"rho": 2, "filling": "average"}, {"rho": 2, "hybrid_from": 2}])
@pytest.mark.parametrize("kernel", [pytest.param("auto", marks=pytest.mark.long), "off"])
def test_equals_the_formulas(fields: dict[str, Any], kernel: str) -> None:
    algorithm = FedRecMF(dim=5, clients_per_round=15, penalty=0.05, init_scale=0.3, **fields)
    federation = Federation.start(algorithm, small_split(ratings=True), 0, dtype=torch.float64, kernel=kernel)
    paper = Paper(federation)
    for when in range(1, ROUNDS + 1):
        paper.round(federation.samples(when), 0.8 * algorithm.decay ** (when - 1), algorithm.penalty)
        federation.next_round()
    user, items = federation.store.tensors["user"].numpy(), federation.server["items"].numpy()
    for found, expected in ((user[:, :-1], paper.p), (user[:, -1], paper.b), (items[:, :-1], paper.q), (items[:, -1], paper.c)):
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)
    assert float(federation.server["mean"]) == pytest.approx(paper.mean, abs=1e-9)
    held = federation.split.held["test"]
    predicted = [paper.predict(u, i) for u, i in zip(held.client.tolist(), held.item.tolist(), strict=True)]
    np.testing.assert_allclose(federation.outcome()["test"], predicted, rtol=1e-9)


def given_away(parts: Split, rounds: int, **fields: Any) -> tuple[float, float]:
    """exposure/auc and exposure/auc_rows of a round's uploads."""
    federation = Federation.start(FedRecMF(dim=8, **fields), parts, 0)
    for _ in range(rounds):
        seen = federation.next_round().uploads
    found = exposure(seen, federation.algorithm.tables, parts, 0, rounds)
    return found["exposure/auc"], found["exposure/auc_rows"]


@pytest.mark.parametrize("filling", ["average", "hybrid"])
def test_an_upload_without_filling_gives_all_away_and_filling_hides(filling: str) -> None:
    parts = small_split(100, 240, 20, ratings=True)
    (bare, bare_rows), (one, one_rows), (three, three_rows) = (
        given_away(parts, 4, rho=rho, filling=filling, hybrid_from=1) for rho in (0, 1, 3)
    )
    assert bare == bare_rows == 1.0 and bare > one > three > 0.5 and bare_rows > one_rows > three_rows > 0.5
    # a prediction that nearly came true moves its row less than a rating does, so the size of a change tells more than the id
    assert three > three_rows


def test_the_default_is_all_folds_and_implicit_feedback_ranks() -> None:
    words = ["--algo", "fedrec_mf", "--dataset", "ml-100k"]
    assert [(run.protocol.split, run.protocol.fold) for run in parse(words).configs] == [("kfold", fold) for fold in range(5)]
    assert resolve([*words, "--feedback", "implicit"]).protocol.split == "auto"
    for more, says in (
        (
            "--split random",
            "--split random holds out items to rank and fedrec_mf predicts ratings; use --split kfold or --feedback implicit",
        ),
        ("--protocol ncf", "--split ncf holds out items to rank and fedrec_mf predicts ratings; use --split kfold or --feedback implicit"),
        ("--split kfold --feedback implicit", "--split kfold holds out ratings and fedrec_mf only ranks; use --feedback explicit"),
        ("--split users", "--split users tests clients that never took part, and fedrec_mf cannot reconstruct them; use --split kfold"),
        ("--feedback implicit --rho 1", "--rho hides which items were rated; with --feedback implicit use --negatives"),
        ("--rho -1", "--rho must be 0 or more, not -1"),
        ("--decay 1.5", "--decay must be at most 1, not 1.5"),
        ("--lr 0", "--lr must be over 0, not 0"),
    ):
        with pytest.raises(UsageError) as error:
            parse([*words, *more.split()])
        assert str(error.value).startswith(says), more
