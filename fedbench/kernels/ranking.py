"""Ranks of held-out items among all items that a client has not met."""

from __future__ import annotations

import numpy as np

from fedbench.kernels.threads import shared


@shared()
def rank_unseen(
    low: int,
    high: int,
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
    for c in range(low, high):
        u, mine = clients[c], scores[c]
        for position in range(2):
            score = mine[val_item[u] if position == 0 else test_item[u]]
            count = 0
            # "not below": ties and NaN count against the held-out item, so constant scores gain nothing
            for i in range(mine.size):
                count += 0 if mine[i] < score else 1
            # counted above and taken back here: cheaper than asking for each item whether it was met
            for i in train_item[train_ptr[u] : train_ptr[u + 1]]:
                count -= 0 if mine[i] < score else 1
            # after a refit the validation item is among the training items already
            if position == 1 and not refit:
                count -= 0 if mine[val_item[u]] < score else 1
            out[position, c] = count
