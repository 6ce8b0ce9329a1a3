"""Ranks and metrics against other people's implementations, plain loops and figures worked by hand."""

from __future__ import annotations

from functools import cache

import ir_measures
import numpy as np
import pytest
import torch
from ir_measures import RR, R, Success, nDCG
from sklearn.metrics import mean_absolute_error, mean_squared_error, ndcg_score

from fedbench.algorithms.central_als import CentralALS
from fedbench.algorithms.central_mf import CentralMF
from fedbench.algorithms.central_ncf import CentralNCF
from fedbench.algorithms.fedavg_ncf import FedAvgNCF
from fedbench.algorithms.fedem import FedEM
from fedbench.algorithms.fedmf import FedMF
from fedbench.algorithms.popularity import Popularity
from fedbench.contract.algorithm import Algorithm, Answer
from fedbench.contract.dataset import DatasetOptions
from fedbench.data.protocol import PRESETS, Protocol
from fedbench.data.split import Split, split
from fedbench.datasets.synthetic import load
from fedbench.evaluation.baselines import chance_metrics, popularity_ranks
from fedbench.evaluation.metrics import KS, metrics_of, ranking_metrics, rating_metrics, spread
from fedbench.simulation import own_tables, scoring
from fedbench.simulation.federation import Federation
from fedbench.simulation.scoring import ranks_among
from fedbench.testing.loop_engine import sent_to

NAN, INF = float("nan"), float("inf")


@cache
def parts(preset: str = "clean") -> Split:
    return split(load(DatasetOptions(users=30, items=50, interactions=12)), PRESETS[preset])


def rank_of(scores: list[float], target: int, others: list[int]) -> int:
    """1 + how many of the others are not below the target."""
    return 1 + sum(not scores[j] < scores[target] for j in others)


# ---- ranks and metrics -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("held", "others", "rank"), [
    (3.0, [1.0, 2.0, 0.0], 1),    # above all
    (1.0, [1.0, 2.0, 0.0], 3),    # 2.0 is above, 1.0 ties: both count
    (0.0, [0.0, 0.0, 0.0], 4),    # a constant score earns nothing
    (-1.0, [1.0, 2.0, 0.0], 4),   # below all
    (NAN, [1.0, 2.0, 0.0], 4),    # not a number is last
    (5.0, [1.0, NAN, 0.0], 2),    # and counts against the held-out item in another's place
    (INF, [INF, 1.0, -INF], 2),
    (-INF, [-INF, 1.0, 0.0], 4),
])  # fmt: skip
def test_ranks_among(held: float, others: list[float], rank: int) -> None:
    assert ranks_among(torch.tensor([[held, *others]])).tolist() == [rank]
    assert rank_of([held, *others], 0, [1, 2, 3]) == rank


def test_ranking_metrics_by_hand() -> None:
    # ranks 1, 3, 6, 21: gains 1, 1/log2(4) = 1/2, 1/log2(7), none within 20
    got = ranking_metrics(np.array([1, 3, 6, 21]), "x_")
    assert got == pytest.approx({
        "x_mrr": (1 + 1 / 3 + 1 / 6 + 1 / 21) / 4,
        "x_hr_5": 2 / 4, "x_hr_10": 3 / 4, "x_hr_20": 3 / 4,
        "x_ndcg_5": 1.5 / 4, "x_ndcg_10": (1.5 + 0.35620718710802217) / 4, "x_ndcg_20": (1.5 + 0.35620718710802217) / 4,
    }, abs=1e-15)  # fmt: skip


def test_ranking_metrics_against_ir_measures_and_sklearn() -> None:
    width = 40
    rank = np.random.default_rng(0).integers(1, width + 1, 200)
    score = -np.arange(1.0, width + 1)  # the d-th of a ranking, from 1, scores -d
    runs = {str(c): {str(d): score[d] for d in range(width)} for c in range(len(rank))}
    relevant = {str(c): {str(r - 1): 1} for c, r in enumerate(rank)}
    asked = [RR, *(measure @ k for measure in (nDCG, Success, R) for k in KS)]
    theirs = ir_measures.calc_aggregate(asked, relevant, runs)
    mine = ranking_metrics(rank)
    assert mine["mrr"] == pytest.approx(theirs[RR], abs=1e-12)
    truth = np.arange(1, width + 1) == rank[:, None]
    for k in KS:
        assert mine[f"hr_{k}"] == pytest.approx(theirs[Success @ k], abs=1e-12)
        assert mine[f"hr_{k}"] == pytest.approx(theirs[R @ k], abs=1e-12)
        assert mine[f"ndcg_{k}"] == pytest.approx(theirs[nDCG @ k], abs=1e-9)
        assert mine[f"ndcg_{k}"] == pytest.approx(ndcg_score(truth, np.tile(score, (len(rank), 1)), k=k), abs=1e-12)
    assert len(mine) == 1 + 2 * len(KS)


def test_spread_by_hand() -> None:
    # ranks 1 .. 20: the worst tenth are 19 and 20; the 10th percentile lies .9 of the way from the 2nd to the 3rd worst
    got = spread(np.arange(1, 21))
    assert got == pytest.approx({"mrr_worst_decile": (1 / 19 + 1 / 20) / 2, "mrr_p10": 1 / 19 + 0.9 * (1 / 18 - 1 / 19)})
    assert spread(np.array([4]))["mrr_worst_decile"] == 0.25


def test_rating_metrics_against_sklearn() -> None:
    rng = np.random.default_rng(0)
    rating = rng.integers(1, 6, 300).astype(np.float32)
    predicted = rating + rng.normal(0, 1.5, 300).astype(np.float32)
    inside = np.clip(predicted.astype(np.float64), 1, 5)
    assert (predicted > 5).any() and (predicted < 1).any()
    got = rating_metrics(predicted, rating, 1, 5)
    assert got["rmse"] == pytest.approx(np.sqrt(mean_squared_error(rating, inside)), abs=1e-12)
    assert got["mae"] == pytest.approx(mean_absolute_error(rating, inside), abs=1e-12)
    assert got["accuracy"] == np.mean([abs(p - r) <= 0.5 for p, r in zip(inside, rating, strict=True)])
    # 9 is taken as 5: errors 0, .5, 1
    assert rating_metrics(np.array([9, 2.5, 2]), np.array([5, 2, 3]), 1, 5) == pytest.approx(
        {"rmse": np.sqrt(1.25 / 3), "mae": 0.5, "accuracy": 2 / 3}
    )


def test_chance_is_the_mean_over_all_ranks_and_clients() -> None:
    at = parts()
    assert len(set(at.train_counts.tolist())) > 3 and len(set(at.train_counts.tolist())) < at.clients
    got = chance_metrics(at)
    sampled = ranking_metrics(np.arange(1, at.test_candidates.shape[1] + 2))
    # for test a client ranks all items but its training items and its validation item; every place is as likely
    full = [ranking_metrics(np.arange(1, at.items - count), "full_") for count in at.train_counts]
    assert got == pytest.approx({**sampled, **{key: np.mean([one[key] for one in full]) for key in full[0]}}, abs=1e-12)
    assert got["hr_10"] == pytest.approx(at.chance(10))


def test_chance_with_fewer_items_than_k() -> None:
    # 12 items less 4 to train on and 1 to validate: 7 are ranked, so 10 and 20 places hold them all
    few = split(load(DatasetOptions(users=30, items=12, interactions=6)), Protocol())
    assert few.items == 12 and set(few.train_counts.tolist()) == {4}
    got = chance_metrics(few)
    assert got["hr_20"] == got["full_hr_20"] == 1.0
    full = [ranking_metrics(np.arange(1, few.items - count)) for count in few.train_counts]
    assert got["full_ndcg_20"] == pytest.approx(np.mean([one["ndcg_20"] for one in full]), abs=1e-12)


# ---- ranks of a federation -------------------------------------------------------------------------------------------------


def ranks_by_loop(at: Split, scores_of: list[list[float]]) -> dict[str, list[int]]:
    """val, test, full_val, full_test from every client's scores of all items."""
    ranks: dict[str, list[int]] = {"val": [], "test": [], "full_val": [], "full_test": []}
    for c, scores in enumerate(scores_of):
        val, test = int(at.val_item[c]), int(at.test_item[c])
        train = set(at.train_item[at.train_ptr[c] : at.train_ptr[c + 1]].tolist())
        ranks["val"].append(rank_of(scores, val, at.val_candidates[c].tolist()))
        ranks["test"].append(rank_of(scores, test, at.test_candidates[c].tolist()))
        ranks["full_val"].append(rank_of(scores, val, [i for i in range(at.items) if i not in train | {val}]))
        ranks["full_test"].append(rank_of(scores, test, [i for i in range(at.items) if i not in train | {val, test}]))
    return ranks


@pytest.mark.parametrize("preset", ["clean", "published"])
def test_popularity_ranks_against_a_loop(preset: str) -> None:
    at = parts(preset)
    count = [float((at.train_item == i).sum()) for i in range(at.items)]
    expected = ranks_by_loop(at, [count] * at.clients)
    assert {name: rank.tolist() for name, rank in popularity_ranks(at).items()} == expected


SMALL_FEDEM = FedEM(dim=4, adapter=(8, 4, 1), local_epochs=2, agg_ratio=0.5)
ALGORITHMS = {
    "popularity": Popularity(),
    "fedmf": FedMF(dim=4, clients_per_round=12),
    "fedem, half are sent a table": SMALL_FEDEM,
    "fedem, static merge": FedEM(dim=4, local_epochs=2, merge="static", clients_per_round=20),
    "central_mf": CentralMF(dim=4),
    "central_als": CentralALS(dim=4),
}


def scores_by_client(federation: Federation) -> tuple[list[list[float]], Answer]:
    """Each client's scores of all items, one client after another."""
    answer = federation.algorithm.answer(federation.server)
    scores = []
    for c in range(federation.split.clients):
        own = {name: tensor[c] for name, tensor in federation.store.tensors.items()}
        scores.append(federation.algorithm.score(own, sent_to(answer, c)).tolist())
    return scores, answer


@pytest.mark.parametrize("chunk", [1 << 17, 150])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_ranks_of_a_federation_against_a_loop(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for where, most in ((own_tables, "FULL_ROWS"), (scoring, "MANY_SCORES")):
        monkeypatch.setattr(where, most, chunk)  # 150: three clients of 50 items at once
    federation = Federation.start(ALGORITHMS[name], parts(), seed=0, dtype=torch.float64)
    for round_ in range(3):
        scores, answer = scores_by_client(federation)
        if name.startswith("fedem"):
            sent = 0 if answer.slot is None else int((answer.slot >= 0).sum())
            waiting = int((federation.visits > 0).sum())  # all are aggregated, and a table waits until its client comes for it
            least = 0 if round_ == 0 else 15 if "half" in name else waiting  # with and without a mixture in one evaluation
            assert least <= sent <= (15 if round_ == 1 and "half" in name else waiting)
        full = {f"full_{key}": rank for key, rank in federation.full_ranks().items()}
        got = {key: rank.tolist() for key, rank in (federation.sampled_ranks() | full).items()}
        assert got == ranks_by_loop(federation.split, scores)
        federation.next_round()


def test_popularity_federation_equals_popularity_ranks() -> None:
    federation = Federation.start(Popularity(), parts(), seed=0)
    federation.next_round()
    ranks = federation.sampled_ranks() | {f"full_{key}": rank for key, rank in federation.full_ranks().items()}
    floor = popularity_ranks(parts())
    assert all(np.array_equal(ranks[name], floor[name]) for name in floor)


class ByNumber(Algorithm):
    """The lower an item's number the better."""

    def answer(self, server: dict[str, torch.Tensor]) -> Answer:
        return Answer(shared={"items": -torch.arange(50.0)})

    def score(self, own: dict[str, torch.Tensor], sent: dict[str, torch.Tensor]) -> torch.Tensor:
        return sent["items"]


def test_full_ranking_leaves_out_training_items_and_for_test_the_validation_item() -> None:
    at = parts()
    full = Federation.start(ByNumber(), at, seed=0).full_ranks()
    # item i is the (i+1)-th of all; each of the client's own lower-numbered items that is left out moves it up by one
    for c in range(at.clients):
        train = at.train_item[at.train_ptr[c] : at.train_ptr[c + 1]]
        val, test = at.val_item[c], at.test_item[c]
        assert full["val"][c] == val + 1 - (train < val).sum()
        assert full["test"][c] == test + 1 - (train < test).sum() - (val < test)


def test_scores_that_are_not_numbers_are_ranked_last() -> None:
    federation = Federation.start(FedMF(dim=4), parts(), seed=0)
    federation.server["items"].fill_(NAN)
    assert (federation.sampled_ranks()["test"] == parts().test_candidates.shape[1] + 1).all()
    assert (federation.full_ranks()["test"] == parts().items - parts().train_counts - 1).all()
    assert (federation.full_ranks()["val"] == parts().items - parts().train_counts).all()


@pytest.mark.kernels
@pytest.mark.parametrize("sizes", [(12, 6, 4), pytest.param((8, 5), marks=pytest.mark.long)])
@pytest.mark.parametrize("method", ["private", "shared", "central"])
def test_the_kernel_scores_as_the_algorithm_does(method: str, sizes: tuple[int, ...]) -> None:
    """Several tiles, the last one not full; all items and a list a client."""
    ncf = CentralNCF(dim=6, layers=sizes, init_scale=0.5)
    federated = FedAvgNCF(dim=6, layers=sizes, init_scale=0.5, local_epochs=1, clients_per_round=None, share_users=method == "shared")
    wide = split(load(DatasetOptions(users=40, items=600, interactions=12)), PRESETS["clean"])
    kernel, plain = (
        Federation.start(ncf if method == "central" else federated, wide, seed=0, dtype=torch.float64, kernel=how)
        for how in ("auto", "off")
    )
    plain.next_round()
    kernel.server, kernel.store = plain.server, plain.store
    clients = torch.arange(3, 20)
    lists = torch.from_numpy(np.random.default_rng(0).integers(0, wide.items, (17, 300)))
    answer = kernel.algorithm.answer(kernel.server)
    for items in (None, lists):
        found, expected = (one.evaluator.scores(one.store, answer, clients, True, items) for one in (kernel, plain))
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    for which in ("sampled_ranks", "full_ranks"):
        for name, ranks in getattr(plain, which)().items():
            assert (getattr(kernel, which)()[name] == ranks).all()


@pytest.mark.parametrize("refit", [False, True])
def test_ranks_on_a_device_are_those_of_the_kernel(refit: bool) -> None:
    at = parts().with_validation_in_training() if refit else parts()
    clients = np.array([3, 0, 17])
    scores = torch.from_numpy(np.random.default_rng(0).integers(0, 9, (3, at.items)).astype(np.float32))  # many ties
    scores[1, at.test_item[0]] = NAN
    assert np.array_equal(scoring._ranks_on_device(scores, at, clients), scoring.ranks_among_unseen(scores, at, clients))


# ---- a split without its test items ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [FedMF, FedEM, CentralMF, Popularity])
def test_a_blind_split_is_evaluated_on_validation_alone(cls: type[Algorithm]) -> None:
    """And to the same ranks; an evaluation that would score a test item fails, for no item has its number."""
    whole = parts()
    told = {}
    for name, one in {"whole": whole, "blind": whole.without_test()}.items():
        federation = Federation.start(cls(rounds=2), one, seed=3, kernel="off")
        outcomes = [federation.outcome()]
        for _ in range(2):
            federation.next_round()
            outcomes.append(federation.outcome())
        told[name] = outcomes
        if name == "blind":
            with pytest.raises(ValueError, match="no test items"):
                federation.full_ranks()
    assert all(set(outcome) == {"val"} for outcome in told["blind"])
    assert all((blind["val"] == seen["val"]).all() for blind, seen in zip(told["blind"], told["whole"], strict=True))
    assert set(metrics_of(whole.without_test(), told["blind"][0])) == {"val"}
    assert (whole.without_test().test_item == -1).all() and whole.without_test().test_candidates.size == 0
