"""Scores of held-out items and the ranks that follow from them.

Ties count against the held-out item, and so does a score that is not a number: rank = 1 + how many of the others are not below it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedbench.contract.algorithm import Algorithm, Answer, Tensors
from fedbench.contract.randomness import Draw
from fedbench.data.split import Split
from fedbench.evaluation.baselines import training_pairs
from fedbench.kernels.ranking import rank_unseen
from fedbench.simulation import forward, kernel_check
from fedbench.simulation.blocks import pad
from fedbench.simulation.client_store import ClientStore
from fedbench.simulation.generic import vmapped
from fedbench.simulation.own_tables import rows_at_once
from fedbench.simulation.sending import ALL, COMMON, NOTHING, reaching, sent_rows, sent_to, sent_whole

MANY_SCORES = 1 << 20
"""scores that kernels make at once: they need no copy of the rows, and threads that share them out have enough to do"""


def ranks_among(scores: Tensor) -> Tensor:
    """[C, 1 + K], the held-out item first -> [C]."""
    # "not below" instead of "at least": a NaN is not below anything, and so counts
    return 1 + (~(scores[:, 1:] < scores[:, :1])).sum(dim=1)


class Evaluator:
    """Ranks every client's held-out items, among the sampled candidates and among all items it has not met; or predicts its ratings."""

    def __init__(
        self,
        algorithm: Algorithm,
        split: Split,
        device: str,
        kernels: bool = True,
        own: range | None = None,
        settles_ties: int | None = None,
    ) -> None:
        """own: the clients that are evaluated, all of them if not given; what is found for others means nothing.

        settles_ties: a seed by which equal scores are put in a random order, in a control; ties count against the held-out item if None
        """
        self.algorithm, self.split, self.device, self.settles_ties = algorithm, split, device, settles_ties
        self.own = range(split.clients) if own is None else own
        self.kernels = forward.Kernels() if kernels and device == "cpu" else None
        self.many: bool | None = None
        """whether `score_clients` gives what `score` gives; None: not known yet"""
        self.how = "score"
        """the function that scores"""
        self.at_start = np.zeros((4, 0), np.int64)
        """[4, U] sampled and full ranks of clients that never took part, 0 if not known yet; empty while there are none"""

    def reading(self, name: str) -> Evaluator:
        """An evaluator of `score_<name>` in place of `score`."""
        other = copy.copy(self)
        other.at_start, other.how = np.zeros((4, 0), np.int64), f"score_{name}"
        return other

    def outcome(self, store: ClientStore, answer: Answer) -> dict[str, np.ndarray]:
        """What metrics are made of: the rank of each client's held-out item [U], or on a rating split each prediction [N]."""
        return self.predictions(store, answer) if self.split.held else self.sampled_ranks(store, answer)

    def predictions(self, store: ClientStore, answer: Answer) -> dict[str, np.ndarray]:
        """The score of every held-out (client, item), in the order of `Held`; not clamped yet."""
        found = {}
        for name, held in self.split.held.items():
            counts = np.diff(held.ptr)
            # by length: a chunk is padded to the longest list in it
            order = np.argsort(counts, kind="stable")
            some = torch.from_numpy(order[counts[order] > 0]).to(self.device)
            found[name] = np.empty(len(held.item))
            for clients, theirs, sent in self.groups(store, answer, int(counts.max()), some):
                where = clients.cpu().numpy()
                items, real = self._padded(held.item, held.ptr, where)
                scores = self.scores(store, theirs, clients, sent, items)
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
        """[C, K] each client's scores of its K items, or of all of them: by a kernel where there is one."""
        found = self.many_at_once(store, answer, clients, sent, items)
        if found is not None:
            return found
        kernel = self.kernel(store, answer, clients, sent)
        if kernel is None:
            return self.mapped_scores(store, answer, clients, sent, items)
        return self.kernel_scores(kernel, store, answer, clients, sent, items)

    def many_at_once(self, store: ClientStore, answer: Answer, clients: Tensor, sent: bool, items: Tensor | None) -> Tensor | None:
        """Scores by the method's own function for many clients, compared with `score` before its first use; None if there is none."""
        if self.kernels is None or self.how != "score" or not kernel_check.knows(type(self.algorithm), "score_clients", "score"):
            return None
        given = store, answer, clients, sent, items
        if self.many is None:
            self.many = kernel_check.many_at_once(self, *given)
        return self.scores_of_many(*given) if self.many else None

    def scores_of_many(self, store: ClientStore, answer: Answer, clients: Tensor, sent: bool, items: Tensor | None) -> Tensor:
        theirs: Tensors = {}
        if sent:
            personal = {} if answer.slot is None else {name: value[answer.slot[clients]] for name, value in answer.personal.items()}
            theirs = {**answer.shared, **personal}
        return self.algorithm.score_clients(store.lend(clients).read(clients), theirs, items)

    def kernel(self, store: ClientStore, answer: Answer, clients: Tensor, sent: bool) -> forward.Kernel | None:
        """The kernel that scores these clients, compared with the algorithm's own function before its first use; None if there is none."""
        if self.kernels is None or not len(clients):
            return None
        agrees = partial(kernel_check.scoring, self, store, answer, clients, sent)
        return self.kernels.fitting(self.algorithm, self.how, store, answer if sent else Answer(), agrees)

    def kernel_scores(
        self, kernel: forward.Kernel, store: ClientStore, answer: Answer, clients: Tensor, sent: bool, items: Tensor | None
    ) -> Tensor:
        assert self.kernels is not None
        asked = np.arange(self.split.items)[None] if items is None else np.ascontiguousarray(items.numpy())
        given = clients.numpy(), answer if sent else Answer(), store.lend(clients)
        return self.kernels.scores(kernel, *given, asked, self.split.items)

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
        return vmapped(getattr(self.algorithm, self.how), own, theirs)

    def sampled_ranks(self, store: ClientStore, answer: Answer) -> dict[str, np.ndarray]:
        """{"val": [U], "test": [U]} among the sampled candidates; of a blind split "val" alone."""
        return self._ranks(store, answer, full=False)

    def full_ranks(self, store: ClientStore, answer: Answer) -> dict[str, np.ndarray]:
        """{"val": [U], "test": [U]} among all items outside the client's training items (for test, outside its validation item too)."""
        if self.split.blind:
            raise ValueError("a blind split has no test items to rank among all")
        return self._ranks(store, answer, full=True)

    def _ranks(self, store: ClientStore, answer: Answer, full: bool) -> dict[str, np.ndarray]:
        who = self.split.evaluated
        parts = ("val",) if self.split.blind else ("val", "test")
        out = np.zeros((len(parts), len(who)), np.int64)
        width = 2 + 2 * max(self.split.val_candidates.shape[1], self.split.test_candidates.shape[1])
        for clients, theirs, sent in self.groups(store, answer, self.split.items if full else width):
            fresh, where = store.fresh(clients), clients.cpu().numpy()
            if fresh is not None and fresh.all() and not sent and not self.split.blind:
                found = self._at_start(store, clients)[2 * full : 2 * full + 2]
            else:
                found = (self._full if full else self._sampled)(store, theirs, clients, where, sent)
            out[:, np.searchsorted(who, where)] = found
        return dict(zip(parts, out, strict=True))

    def _sampled(self, store: ClientStore, answer: Answer, clients: Tensor, where: np.ndarray, sent: bool) -> np.ndarray:
        """[2, C] ranks of the validation and test items of these clients among the sampled candidates; where: `clients` on the host.

        Of a blind split [1, C]: those of the validation items.
        """
        split = self.split
        lists = [split.val_item[where, None], split.val_candidates[where]]
        if not split.blind:
            lists += [split.test_item[where, None], split.test_candidates[where]]
        items = torch.from_numpy(np.concatenate(lists, axis=1).astype(np.int64)).to(self.device)
        scores, width = self.settled(self.scores(store, answer, clients, sent, items), where), 1 + split.val_candidates.shape[1]
        parts = [scores[:, :width]] if split.blind else [scores[:, :width], scores[:, width:]]
        return torch.stack([ranks_among(part) for part in parts]).cpu().numpy()

    def _full(self, store: ClientStore, answer: Answer, clients: Tensor, where: np.ndarray, sent: bool) -> np.ndarray:
        """[2, C] ranks of the validation and test items of these clients among all items that they have not met."""
        return ranks_among_unseen(self.settled(self.scores(store, answer, clients, sent), where), self.split, where)

    def settled(self, scores: Tensor, clients: np.ndarray) -> Tensor:
        """[C, K] -> [C, K]: in a control the places of the scores, equal ones in a random order: who knows nothing is then at chance."""
        if self.settles_ties is None:
            return scores
        drawn = Draw(self.settles_ties, 0, clients, torch.float32, self.device).uniform("ties", scores.shape[1])
        # shuffled, then sorted stably: equal scores end up in random order
        mixed = drawn.argsort(dim=1)
        order = mixed.gather(1, scores.gather(1, mixed).argsort(dim=1, stable=True))
        places = order.argsort(dim=1).to(torch.float64)
        # NaN has no place, so that it still counts against whoever is compared with it
        return torch.where(scores.isnan(), torch.nan, places)

    def _at_start(self, store: ClientStore, clients: Tensor) -> np.ndarray:
        """[4, C] sampled and full ranks of clients that never took part and are sent nothing. They stay, so they are found once."""
        if not self.at_start.size:
            self.at_start = np.zeros((4, self.split.clients), np.int64)
        where = clients.numpy()
        new = clients[self.at_start[0, where] == 0]
        if len(new):
            given = store.lend(new), Answer(), new, new.numpy(), False
            self.at_start[:, new.numpy()] = np.concatenate([ranks(*given) for ranks in (self._sampled, self._full)])
        return self.at_start[:, where]

    def groups(
        self, store: ClientStore, answer: Answer, width: int, everyone: Tensor | None = None
    ) -> Iterator[tuple[Tensor, Answer, bool]]:
        """Chunks of clients that the same answer reaches, that answer, and whether it holds anything.

        The clients of a chunk are all as they started, and not stored, or none of them is.
        """
        everyone = torch.from_numpy(self.split.evaluated).to(self.device) if everyone is None else everyone
        if len(self.own) < self.split.clients:
            everyone = everyone[(everyone >= self.own.start) & (everyone < self.own.stop)]
        levels = sent_to(answer, everyone)
        at_once = rows_at_once(self.algorithm.dim, self.device)
        for level in (ALL, COMMON, NOTHING):
            at = torch.from_numpy(np.flatnonzero(levels == level)).to(self.device)  # no mask: a device would have to count it first
            clients, sent = everyone[at], level != NOTHING
            fresh = store.fresh(clients)
            light = fresh is None and self.kernel(store, reaching(answer, level), clients, sent) is not None
            # clients as they started are ranked among all items at once, so chunks of them have fewer clients
            for some, rows in [(clients, width)] if fresh is None else [(clients[~fresh], width), (clients[fresh], self.split.items)]:
                for chunk in some.split(max(1, (MANY_SCORES if light else at_once) // rows)):
                    if len(chunk):
                        yield chunk, reaching(answer, level), sent


def ranks_among_unseen(scores: Tensor, split: Split, clients: np.ndarray) -> np.ndarray:
    """[C, M] scores of all items -> [2, C] ranks of the validation and test items among what the clients do not train on."""
    if scores.device.type != "cpu":
        return _ranks_on_device(scores, split, clients)
    out = np.empty((2, len(clients)), np.int64)
    rank_unseen(scores.numpy(), clients, split.train_ptr, split.train_item, split.val_item, split.test_item, split.refit, out)
    return out


def _ranks_on_device(scores: Tensor, split: Split, clients: np.ndarray) -> np.ndarray:
    found = []
    row, item = (torch.from_numpy(part).to(scores.device) for part in training_pairs(split, clients))
    val, test = (torch.from_numpy(held[clients].astype(np.int64)).to(scores.device) for held in (split.val_item, split.test_item))
    for position, target in enumerate((val, test)):
        # as kernels/ranking.py counts: training items too, which are taken back below
        at_least = ~(scores < scores.gather(1, target[:, None]))
        count = at_least.sum(dim=1)
        count.index_add_(0, row, -at_least[row, item].to(count.dtype))
        if position == 1 and not split.refit:
            count -= at_least.gather(1, val[:, None])[:, 0].to(count.dtype)
        found.append(count)
    return torch.stack(found).cpu().numpy()
