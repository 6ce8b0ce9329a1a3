"""Ranks, predictions and metrics. Every ranking metric is a function of one number a client: the rank of its held-out item.

Ties count against the held-out item, and so does a score that is not a number: rank = 1 + how many of the others are not below it.
On a rating split every held-out rating is predicted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from fedbench.contract.algorithm import Algorithm, Answer, Tensors
from fedbench.data.split import Held, Split
from fedbench.kernels import fused
from fedbench.simulation import kernel_check
from fedbench.simulation.client_store import ClientStore
from fedbench.simulation.engine import FULL_ROWS, in_place, pad, sent_rows, sent_whole, vmapped

KS = (5, 10, 20)
POPULARITY_CLIENTS = 1 << 16
"""clients that popularity is evaluated for at once"""
MANY_SCORES = 1 << 20
"""scores that kernels make at once: they need no copy of the rows, and threads that share them out have enough to do"""


def ranks_among(scores: Tensor) -> Tensor:
    """[C, 1 + K], the held-out item first -> [C]."""
    return 1 + (~(scores[:, 1:] < scores[:, :1])).sum(dim=1)


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


def chance_metrics(split: Split) -> dict[str, float]:
    """What a ranking that knows nothing gets on test, exactly: the rank is uniform over the candidates."""
    width = split.test_candidates.shape[1] + 1
    sampled = ranking_metrics(np.arange(1, width + 1))
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
    at_least = len(count) - np.searchsorted(np.sort(count), np.arange(count.max() + 1))
    ranks = {name: np.empty(len(split.evaluated), np.int64) for name in ("val", "test", "full_val", "full_test")}
    for start in range(0, len(split.evaluated), POPULARITY_CLIENTS):
        clients, at = split.evaluated[start : start + POPULARITY_CLIENTS], slice(start, start + POPULARITY_CLIENTS)
        row, item = _training_pairs(split, clients)
        for name, target, candidates in (
            ("val", split.val_item[clients], split.val_candidates[clients]),
            ("test", split.test_item[clients], split.test_candidates[clients]),
        ):
            ranks[name][at] = 1 + (count[candidates] >= count[target][:, None]).sum(axis=1)
            met = np.bincount(row[count[item] >= count[target][row]], minlength=len(clients))
            if name == "test":
                met = met + (count[split.val_item[clients]] >= count[target])
            ranks[f"full_{name}"][at] = at_least[count[target]] - met
    return ranks


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
    rmse = np.sort(np.sqrt(mse[np.isfinite(mse)]))
    worst = rmse[-max(1, len(rmse) // 10) :]
    return {"rmse_p90": float(np.percentile(rmse, 90)), "rmse_worst_decile": float(worst.mean())}


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
    """Their metrics on test."""
    rating = split.held["test"].rating
    return {name: rating_metrics(value, rating, split.rating_min, split.rating_max) for name, value in mean_predictions(split).items()}


def metrics_of(split: Split, outcome: Mapping[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """Metrics of each part (val, test) of an `Evaluator.outcome`."""
    if split.held:
        return {name: rating_metrics(outcome[name], held.rating, split.rating_min, split.rating_max) for name, held in split.held.items()}
    return {name: ranking_metrics(outcome[name]) for name in ("val", "test")}


class Evaluator:
    """Ranks every client's held-out items, among the sampled candidates and among all items it has not met; or predicts its ratings."""

    def __init__(self, algorithm: Algorithm, split: Split, device: str, kernels: bool = True, own: range | None = None) -> None:
        """own: the clients that are evaluated, all of them if not given; what is found for others means nothing."""
        self.algorithm, self.split, self.device = algorithm, split, device
        self.own = range(split.clients) if own is None else own
        self.kernels = kernels and device == "cpu" and not kernel_check.overridden(algorithm, "fused_score")
        self.checked: set[bool] = set()
        """whether clients that were sent nothing, or something, have been scored by both paths, see kernel_check"""
        self.ready: tuple[Answer, fused.Layers] | None = None
        self.at_start = np.zeros((4, 0), np.int64)
        """[4, U] sampled and full ranks of clients that never took part, 0 if not known yet; empty while there are none"""

    def outcome(self, store: ClientStore, answer: Answer) -> dict[str, np.ndarray]:
        """What metrics are made of: the rank of each client's held-out item [U], or on a rating split each prediction [N]."""
        return self.predictions(store, answer) if self.split.held else self.sampled_ranks(store, answer)

    def predictions(self, store: ClientStore, answer: Answer) -> dict[str, np.ndarray]:
        """The score of every held-out (client, item), in the order of `Held`; not clamped yet."""
        found = {}
        for name, held in self.split.held.items():
            counts = np.diff(held.ptr)
            order = np.argsort(counts, kind="stable")
            some = torch.from_numpy(order[counts[order] > 0]).to(self.device)
            found[name] = np.empty(len(held.item))
            for clients, sent in self.groups(store, answer, int(counts.max()), some):
                where = clients.cpu().numpy()
                items, real = self._padded(held.item, held.ptr, where)
                scores = self.scores(store, answer, clients, sent, items)
                at = held.ptr[where][:, None] + np.arange(real.shape[1])
                found[name][at[real]] = scores.cpu().numpy()[real]
        return found

    def _padded(self, values: np.ndarray, ptr: np.ndarray, clients: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """[C, W] these clients' lists with zeros behind, and which entries are real."""
        counts = np.diff(ptr)[clients]
        out = np.zeros((len(clients), max(1, int(counts.max()))), np.int64)
        pad(values, ptr, clients, out)
        return torch.from_numpy(out).to(self.device), np.arange(out.shape[1]) < counts[:, None]

    def scores(self, store: ClientStore, answer: Answer, clients: Tensor, sent: bool, items: Tensor | None = None) -> Tensor:
        """[C, K] each client's scores of its K items, or of all of them: by a fused kernel where one fits."""
        kernel_check.scoring(self, store, answer, clients, sent, items)
        found = self.fused_scores(store, answer, clients, sent, items)
        return self.mapped_scores(store, answer, clients, sent, items) if found is None else found

    def fused_scores(self, store: ClientStore, answer: Answer, clients: Tensor, sent: bool, items: Tensor | None) -> Tensor | None:
        """Scores by a fused kernel, None where none fits."""
        plan = self.algorithm.fused_score(sent) if self.kernels else None
        if plan is None:
            return None
        store = store.lend(clients)
        place = in_place(plan, clients.numpy(), answer, store, sent_users=sent)
        ranked = np.arange(self.split.items)[None] if items is None else items.cpu().numpy()
        if place:
            return torch.from_numpy(fused.score(plan, place, ranked))
        if isinstance(plan, fused.NeuMFBCE):
            users = answer.personal[plan.user][answer.slot[clients]] if answer.slot is not None else store.read(clients)[plan.user]
            return torch.from_numpy(self.layers(plan, answer).score(users.numpy(), ranked))
        return None

    def mapped_scores(
        self, store: ClientStore, answer: Answer, clients: Tensor, sent: bool, items: Tensor | None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Scores by the algorithm's own function, in numbers of another type if one is given."""
        store, tables = store.lend(clients), self.algorithm.tables
        own = store.read(clients) if items is None else store.rows(clients, items, tables)
        theirs: Tensors = {}
        if sent:
            theirs = sent_whole(answer, clients) if items is None else sent_rows(answer, clients, items, tables)
        if dtype:
            own, theirs = kernel_check.in_type(own, dtype), kernel_check.in_type(theirs, dtype)
        return vmapped(self.algorithm.score, own, theirs)

    def layers(self, plan: fused.NeuMFBCE, answer: Answer) -> fused.Layers:
        """What all clients are sent, made ready to score with, once for all chunks of an evaluation."""
        if self.ready is None or self.ready[0] is not answer:
            self.ready = answer, fused.Layers.of(plan, {name: value.numpy() for name, value in answer.shared.items()})
        return self.ready[1]

    def sampled_ranks(self, store: ClientStore, answer: Answer) -> dict[str, np.ndarray]:
        """{"val": [U], "test": [U]} among the sampled candidates."""
        return self._ranks(store, answer, full=False)

    def full_ranks(self, store: ClientStore, answer: Answer) -> dict[str, np.ndarray]:
        """The same among all items outside the client's training items (for test, outside its validation item too)."""
        return self._ranks(store, answer, full=True)

    def _ranks(self, store: ClientStore, answer: Answer, full: bool) -> dict[str, np.ndarray]:
        who = self.split.evaluated
        out = np.zeros((2, len(who)), np.int64)
        for clients, sent in self.groups(store, answer, self.split.items if full else 2 + 2 * self.split.test_candidates.shape[1]):
            fresh = store.fresh(clients)
            if fresh is not None and fresh.all() and not sent:
                found = self._at_start(store, clients)[2 * full : 2 * full + 2]
            else:
                found = (self._full if full else self._sampled)(store, answer, clients, sent)
            out[:, np.searchsorted(who, clients.cpu().numpy())] = found
        return {"val": out[0], "test": out[1]}

    def _sampled(self, store: ClientStore, answer: Answer, clients: Tensor, sent: bool) -> np.ndarray:
        """[2, C] ranks of the validation and test items of these clients among the sampled candidates."""
        split, where = self.split, clients.cpu().numpy()
        lists = (split.val_item[where, None], split.val_candidates[where], split.test_item[where, None], split.test_candidates[where])
        items = torch.from_numpy(np.concatenate(lists, axis=1).astype(np.int64)).to(self.device)
        scores, width = self.scores(store, answer, clients, sent, items), 1 + split.val_candidates.shape[1]
        return torch.stack([ranks_among(scores[:, :width]), ranks_among(scores[:, width:])]).cpu().numpy()

    def _full(self, store: ClientStore, answer: Answer, clients: Tensor, sent: bool) -> np.ndarray:
        """The same among all items."""
        return ranks_among_unseen(self.scores(store, answer, clients, sent), self.split, clients.cpu().numpy())

    def _at_start(self, store: ClientStore, clients: Tensor) -> np.ndarray:
        """[4, C] sampled and full ranks of clients that never took part and are sent nothing. They stay, so they are found once."""
        if not self.at_start.size:
            self.at_start = np.zeros((4, self.split.clients), np.int64)
        where = clients.numpy()
        new = clients[self.at_start[0, where] == 0]
        if len(new):
            lent = store.lend(new)
            self.at_start[:, new.numpy()] = np.concatenate([ranks(lent, Answer(), new, False) for ranks in (self._sampled, self._full)])
        return self.at_start[:, where]

    def groups(self, store: ClientStore, answer: Answer, width: int, everyone: Tensor | None = None) -> Iterator[tuple[Tensor, bool]]:
        """Chunks of clients that were all sent something or all nothing, and that are all as they started, not stored, or none."""
        everyone = torch.from_numpy(self.split.evaluated).to(self.device) if everyone is None else everyone
        if len(self.own) < self.split.clients:
            everyone = everyone[(everyone >= self.own.start) & (everyone < self.own.stop)]
        if answer.slot is None:
            groups = [(everyone, bool(answer.shared))]
        else:
            has = answer.slot[everyone] >= 0
            groups = [(everyone[has], True), (everyone[~has], False)]
        for clients, sent in groups:
            fresh = store.fresh(clients)
            light = fresh is None and self.kernels and self.algorithm.fused_score(sent) is not None
            for some, rows in [(clients, width)] if fresh is None else [(clients[~fresh], width), (clients[fresh], self.split.items)]:
                for chunk in some.split(max(1, (MANY_SCORES if light else FULL_ROWS) // rows)):
                    if len(chunk):
                        yield chunk, sent


def ranks_among_unseen(scores: Tensor, split: Split, clients: np.ndarray) -> np.ndarray:
    """[C, M] scores of all items -> [2, C] ranks of the validation and test items among what the clients do not train on."""
    if scores.device.type != "cpu":
        return _ranks_on_device(scores, split, clients)
    out = np.empty((2, len(clients)), np.int64)
    _rank_unseen(scores.numpy(), clients, split.train_ptr, split.train_item, split.val_item, split.test_item, split.refit, out)
    return out


def _ranks_on_device(scores: Tensor, split: Split, clients: np.ndarray) -> np.ndarray:
    out = np.empty((2, len(clients)), np.int64)
    row, item = (torch.from_numpy(part).to(scores.device) for part in _training_pairs(split, clients))
    val, test = (torch.from_numpy(held[clients].astype(np.int64)).to(scores.device) for held in (split.val_item, split.test_item))
    for position, target in enumerate((val, test)):
        at_least = ~(scores < scores.gather(1, target[:, None]))
        count = at_least.sum(dim=1)
        count.index_add_(0, row, -at_least[row, item].to(count.dtype))
        if position == 1 and not split.refit:
            count -= at_least.gather(1, val[:, None])[:, 0].to(count.dtype)
        out[position] = count.cpu().numpy()
    return out


@njit(parallel=True, nogil=True, cache=True)
def _rank_unseen(
    scores: np.ndarray,
    clients: np.ndarray,
    train_ptr: np.ndarray,
    train_item: np.ndarray,
    val_item: np.ndarray,
    test_item: np.ndarray,
    refit: bool,
    out: np.ndarray,
) -> None:
    """How many scores are not below the held-out item's, less those of the client's other items."""
    for c in prange(clients.size):
        u, mine = clients[c], scores[c]
        for position in range(2):
            score = mine[val_item[u] if position == 0 else test_item[u]]
            count = 0
            for i in range(mine.size):
                count += 0 if mine[i] < score else 1
            for i in train_item[train_ptr[u] : train_ptr[u + 1]]:
                count -= 0 if mine[i] < score else 1
            if position == 1 and not refit:
                count -= 0 if mine[val_item[u]] < score else 1
            out[position, c] = count


def _training_pairs(split: Split, clients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(position in `clients`, item) of every training interaction of these clients."""
    counts = split.train_ptr[clients + 1] - split.train_ptr[clients]
    row = np.repeat(np.arange(len(clients)), counts)
    offset = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    return row, split.train_item[np.repeat(split.train_ptr[clients], counts) + offset].astype(np.int64)
