"""The floors that every table shows: chance, popularity, and mean ratings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fedbench.evaluation.metrics import KS, ranking_metrics, rating_metrics

if TYPE_CHECKING:
    from fedbench.data.split import Split

POPULARITY_CLIENTS = 1 << 16
"""clients that popularity is evaluated for at once"""


def chance_metrics(split: Split) -> dict[str, float]:
    """What a ranking that knows nothing gets on test, exactly: the rank is uniform over the candidates."""
    width = split.test_candidates.shape[1] + 1
    sampled = ranking_metrics(np.arange(1, width + 1))
    # a test item is ranked among all items but those trained on and the validation item
    free = (split.items - split.train_counts - 1)[split.evaluated]
    top = np.arange(1, max(KS) + 1)
    gain = 1 / np.log2(top + 1)
    harmonic = np.cumsum(1 / np.arange(1, free.max() + 1))
    full = {"full_mrr": float((harmonic[free - 1] / free).mean())}
    for k in KS:
        full[f"full_hr_{k}"] = float(np.minimum(1, k / free).mean())
        full[f"full_ndcg_{k}"] = float((np.cumsum(gain)[np.minimum(k, free) - 1] / free).mean())
    return {**sampled, **full}


def popularity_ranks(split: Split) -> dict[str, np.ndarray]:
    """val, test, full_val, full_test [E] when items are ranked by how many clients train on them: the floor that every table shows."""
    count = np.bincount(split.train_item, minlength=split.items)
    # for each count, how many items have it or more
    at_least = len(count) - np.searchsorted(np.sort(count), np.arange(count.max() + 1))
    ranks = {name: np.empty(len(split.evaluated), np.int64) for name in ("val", "test", "full_val", "full_test")}
    for start in range(0, len(split.evaluated), POPULARITY_CLIENTS):
        clients, at = split.evaluated[start : start + POPULARITY_CLIENTS], slice(start, start + POPULARITY_CLIENTS)
        row, item = training_pairs(split, clients)
        for name, target, candidates in (
            ("val", split.val_item[clients], split.val_candidates[clients]),
            ("test", split.test_item[clients], split.test_candidates[clients]),
        ):
            ranks[name][at] = 1 + (count[candidates] >= count[target][:, None]).sum(axis=1)
            # items that the client has met are not ranked: those at least as popular are taken off below
            met = np.bincount(row[count[item] >= count[target][row]], minlength=len(clients))
            if name == "test":
                met = met + (count[split.val_item[clients]] >= count[target])
            ranks[f"full_{name}"][at] = at_least[count[target]] - met
    return ranks


def mean_predictions(split: Split) -> dict[str, np.ndarray]:
    """Predictions of the test ratings by the two predictors that every table shows: the mean, and the user's mean + the item's - the mean.

    Means are over training ratings; in the users split a client that never takes part has its support half for its own mean alone.
    """
    client = np.repeat(np.arange(split.clients), split.train_counts)
    known = np.isin(client, split.trainers)
    mean = float(split.train_rating[known].mean(dtype=np.float64))

    def means(index: np.ndarray, rating: np.ndarray, size: int) -> np.ndarray:
        count, total = np.bincount(index, minlength=size), np.bincount(index, weights=rating, minlength=size)
        return np.divide(total, count, out=np.full(size, mean), where=count > 0)

    user = means(client, split.train_rating, split.clients)
    item = means(split.train_item[known], split.train_rating[known], split.items)
    held = split.held["test"]
    return {"global_mean": np.full(len(held.item), mean), "user_item_mean": user[held.client] + item[held.item] - mean}


def rating_floors(split: Split) -> dict[str, dict[str, float]]:
    """Test metrics of the two mean predictors."""
    rating = split.held["test"].rating
    return {name: rating_metrics(value, rating, split.rating_min, split.rating_max) for name, value in mean_predictions(split).items()}


def training_pairs(split: Split, clients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(position in `clients`, item) of every training interaction of these clients."""
    counts = split.train_ptr[clients + 1] - split.train_ptr[clients]
    row = np.repeat(np.arange(len(clients)), counts)
    offset = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    return row, split.train_item[np.repeat(split.train_ptr[clients], counts) + offset].astype(np.int64)
