"""Ranks, predictions and metrics. Every ranking metric is a function of one number a client: the rank of its held-out item.

Ties count against the held-out item, and so does a score that is not a number: rank = 1 + how many of the others are not below it.
On a rating split every held-out rating is predicted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from fedbench.data.split import Held, Split

KS = (5, 10, 20)


def client_metrics(rank: np.ndarray) -> dict[str, np.ndarray]:
    """[U] ranks from 1 -> MRR, and HR@k and NDCG@k for k = 5, 10, 20, of each client; one relevant item a client."""
    rank = np.asarray(rank, np.float64)
    gain = 1 / np.log2(rank + 1)
    metrics = {"mrr": 1 / rank}
    for k in KS:
        metrics[f"hr_{k}"] = (rank <= k).astype(np.float64)
        metrics[f"ndcg_{k}"] = np.where(rank <= k, gain, 0)
    return metrics


def ranking_metrics(rank: np.ndarray, prefix: str = "") -> dict[str, float]:
    """[U] ranks -> the mean over clients of each metric."""
    return {f"{prefix}{name}": float(values.mean()) for name, values in client_metrics(rank).items()}


def spread(rank: np.ndarray) -> dict[str, float]:
    """How unequal clients fare, on the reciprocal rank: the 10th percentile and the mean of the worst tenth."""
    reciprocal = np.sort(1 / np.asarray(rank, np.float64))
    worst = reciprocal[: max(1, len(reciprocal) // 10)]
    return {"mrr_p10": float(np.percentile(reciprocal, 10)), "mrr_worst_decile": float(worst.mean())}


def trained_items(split: Split) -> np.ndarray:
    """[M] whether somebody who takes part trains on an item."""
    mine = slice(None) if split.role is None else np.isin(np.repeat(np.arange(split.clients), split.train_counts), split.trainers)
    return np.bincount(split.train_item[mine], minlength=split.items) > 0


def new_item_metrics(split: Split, ranks: Mapping[str, np.ndarray]) -> dict[str, float]:
    """How many items nobody trains on, how many clients have one of them held out for test, and how the method ranks those."""
    new = ~trained_items(split)
    met = new[split.test_item[split.evaluated]]
    counts = {"items": int(new.sum()), "clients": int(met.sum())}
    hits = {f"{prefix}hr_10": float((ranks[f"{prefix}test"][met] <= 10).mean()) for prefix in ("", "full_")} if met.any() else {}
    return {**counts, **hits}


def rating_metrics(predicted: np.ndarray, rating: np.ndarray, low: float, high: float) -> dict[str, float]:
    """RMSE, MAE and accuracy (within half a point) of predictions clamped to the rating scale."""
    # a prediction beyond the scale is taken as its end
    error = np.clip(np.asarray(predicted, np.float64), low, high) - np.asarray(rating, np.float64)
    return {
        "rmse": float(np.sqrt((error**2).mean())),
        "mae": float(np.abs(error).mean()),
        "accuracy": float((np.abs(error) <= 0.5).mean()),
    }


def client_errors(predicted: np.ndarray, held: Held, low: float, high: float) -> dict[str, np.ndarray]:
    """[U] each: how many ratings of a client are held out, and their mean squared and absolute error and accuracy (NaN if none are)."""
    error = np.clip(np.asarray(predicted, np.float64), low, high) - held.rating
    counts = np.diff(held.ptr)

    def mean(values: np.ndarray) -> np.ndarray:
        total = np.bincount(held.client, weights=values, minlength=len(counts))
        return np.divide(total, counts, out=np.full(len(counts), np.nan), where=counts > 0)

    return {"ratings": counts, "mse": mean(error**2), "mae": mean(np.abs(error)), "accuracy": mean(np.abs(error) <= 0.5)}


def rating_spread(mse: np.ndarray) -> dict[str, float]:
    """How unequal clients fare: the 90th percentile of their RMSE and the mean of the worst tenth."""
    # clients without held-out ratings have no error
    rmse = np.sort(np.sqrt(mse[np.isfinite(mse)]))
    worst = rmse[-max(1, len(rmse) // 10) :]
    return {"rmse_p90": float(np.percentile(rmse, 90)), "rmse_worst_decile": float(worst.mean())}


def metrics_of(split: Split, outcome: Mapping[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """Metrics of each part (val, test) of an `Evaluator.outcome`."""
    if split.held:
        return {name: rating_metrics(outcome[name], held.rating, split.rating_min, split.rating_max) for name, held in split.held.items()}
    return {name: ranking_metrics(outcome[name]) for name in ("val", "test") if name in outcome}
