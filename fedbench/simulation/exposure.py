"""What an upload gives away: how well the server, seeing one client's upload, tells the items it trains on from all others.

The server guesses by one number an item: how far the row moved that the client sent; a row that it did not send comes last. Where a
client sends a whole table of its own, it is the distance of its row from the mean row of the clients looked at. The area under the ROC
curve of that guess is 1 if the upload gives all away, .5 if it gives nothing away. Beside it stands the same for a server that looks at
the rows' ids alone and not at their values.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from fedbench.contract.algorithm import Tensors
from fedbench.contract.randomness import keys
from fedbench.contract.uploads import Rows, Tables, Uploads, flat
from fedbench.data.split import Split
from fedbench.kernels.threads import shared
from fedbench.simulation import workers

MOST_CLIENTS = 100
"""clients of a cohort that are looked at"""
ITEMS = 64
"""items whose rows are compared at once"""


def exposure(uploads: Uploads, tables: Collection[str], split: Split, seed: int, when: int, own: range | None = None) -> dict[str, float]:
    """exposure/auc, and exposure/auc_rows by ids alone: means over a seeded sample of the cohort; {} if no table is uploaded.

    own: this worker's clients, if several share the run; each looks at its own.
    """
    clients = uploads.clients.cpu().numpy()
    picked = np.sort(np.argsort(keys(seed, when, "exposure", clients), kind="stable")[:MOST_CLIENTS])
    rows = [value for name, value in uploads.tensors.items() if name in tables and isinstance(value, Rows)]
    whole = [value for name, value in uploads.tensors.items() if name in tables and isinstance(value, Tensor)]
    at = picked
    if elsewhere := [name for name, value in uploads.tensors.items() if name in tables and isinstance(value, Tables)]:
        whole = [uploads.dense(name, torch.from_numpy(picked).to(uploads.clients.device)) for name in elsewhere]
        at = np.arange(len(picked))
    if not rows and not whole:
        return {}

    def part() -> Tensors:
        mine = slice(None) if own is None else slice(*np.searchsorted(clients[picked], [own.start, own.stop]))
        ptr, item, moved = _sent(rows, picked[mine]) if rows else _apart(whole, at, mine)
        auc = np.empty((len(picked[mine]), 2))
        # a row that is not finite has moved as far as can be
        _auc(clients[picked[mine]], split.train_ptr, split.train_item, split.items, (ptr, item, np.nan_to_num(moved, nan=np.inf)), auc)
        return {"auc": torch.from_numpy(auc)}

    auc = workers.gather_tensors(part, "cpu")["auc"].numpy()
    told = auc[np.isfinite(auc[:, 0])]
    return {"exposure/auc": float(told[:, 0].mean()), "exposure/auc_rows": float(told[:, 1].mean())} if len(told) else {}


def _sent(tables: list[Rows], picked: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """CSR by picked client: the items whose rows it sent and the size of each row's change, over all tables."""
    each = tables[0].counts.cpu().numpy()
    first, counts = (np.cumsum(each) - each)[picked], each[picked]
    ptr = np.concatenate([[0], np.cumsum(counts)])
    at = torch.from_numpy(np.repeat(first - ptr[:-1], counts) + np.arange(ptr[-1])).to(tables[0].item.device)
    square = torch.stack([flat(rows.value[at]).square().sum(1) for rows in tables]).sum(0)
    return ptr, tables[0].item[at].cpu().numpy(), square.cpu().double().numpy()


def _apart(tables: list[Tensor], picked: np.ndarray, mine: slice) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """CSR by picked client, for whole tables [n, M, ...] and `mine` of them: every item, and its row's distance from the mean row."""
    items = tables[0].shape[1]
    square = np.zeros((len(picked), items))
    for table in tables:
        whole = table.reshape(*table.shape[:2], -1)
        if table.device.type == "cpu":
            _add_distances(whole.numpy(), picked, square)
        else:
            some = whole[torch.from_numpy(picked).to(table.device)]
            square += (some - some.mean(0)).square().sum(2).cpu().double().numpy()
    n = len(square[mine])
    return np.arange(n + 1) * items, np.tile(np.arange(items), n), square[mine].ravel()


@shared(rows=lambda tables, *_: -(-tables.shape[1] // ITEMS), fastmath={"reassoc", "contract", "nsz"})
def _add_distances(low: int, high: int, tables: np.ndarray, picked: np.ndarray, square: np.ndarray) -> None:
    """square [n, M] += how far, squared, the rows of the picked tables [., M, d] are from their mean; few items at once, in the cache."""
    _, items, d = tables.shape
    for block in range(low, high):
        first, last = block * ITEMS, min((block + 1) * ITEMS, items)
        mean = np.zeros((last - first, d), tables.dtype)
        for c in picked:
            mean += tables[c, first:last]
        mean /= tables.dtype.type(picked.size)
        for k in range(picked.size):
            for i in range(first, last):
                row, middle, total = tables[picked[k], i], mean[i - first], tables.dtype.type(0)
                for j in range(d):
                    total += (row[j] - middle[j]) * (row[j] - middle[j])
                square[k, i] += total


@shared()
def _auc(
    low: int,
    high: int,
    clients: np.ndarray,
    train_ptr: np.ndarray,
    train_item: np.ndarray,
    items: int,
    uploaded: tuple[np.ndarray, np.ndarray, np.ndarray],
    out: np.ndarray,
) -> None:
    """out [n, 2]: P(a training item is guessed above another one), ties by half, by the change and by the rows that were sent alone.

    uploaded: CSR of the items whose rows were sent, and how far each moved. NaN for a client with nothing to tell apart.
    """
    ptr, item, moved = uploaded
    for c in range(low, high):
        mine = train_item[train_ptr[clients[c]] : train_ptr[clients[c] + 1]]
        positives, negatives = mine.size, items - mine.size
        if positives == 0 or negatives == 0:
            out[c, :] = np.nan
            continue
        trained = np.zeros(items, np.bool_)
        trained[mine] = True
        sent, size = item[ptr[c] : ptr[c + 1]], moved[ptr[c] : ptr[c + 1]]
        good, bad = size[trained[sent]], size[~trained[sent]]
        below = negatives - bad.size  # negatives that were not sent are below every row that was
        won = 0.5 * (positives - good.size) * below
        out[c, 1] = (won + good.size * (below + 0.5 * bad.size)) / (positives * negatives)
        for one in good:  # every pair: comparisons vectorise, so that this is faster than to sort
            less = ties = 0
            for other in bad:
                less += other < one
                ties += other == one
            won += below + less + 0.5 * ties
        out[c, 0] = won / (positives * negatives)
