"""The protocol of a run: who takes part, what is held out, what may be drawn as a negative, what is ranked, and on what a round is chosen.

A `Protocol` is one frozen object with one fingerprint; runs whose fingerprints differ are never compared.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace

from fedbench.contract.dataset import Interactions
from fedbench.errors import UsageError

RATING_SPLITS = ("kfold", "users")
"""what these hold out are ratings to predict, not one item to rank"""
SPLITS = ("auto", "time", "random", "item-order", "ncf", *RATING_SPLITS)
FOLD_FIELDS = ("folds", "fold")
"""fields that only the kfold split looks at"""
RANKING_FIELDS = ("ties", "eval_negatives", "candidates")
"""fields that a rating split does not look at"""


@dataclass(frozen=True)
class Protocol:
    """Fields are flags: the sentence under a field is its --help text."""

    name: str = "clean"
    """the preset this protocol started from"""
    split: str = "auto"
    """what is held out, the last interaction for test and the one before for validation: by time, random, item-order (of first appearance),
    ncf (the NCF paper's files), auto (time if the data has it, else random, or item-order in the published preset); or ratings to predict:
    kfold (every rating is in one of --folds) or users (a tenth of the clients each for validation and test, never seen in training).
    An algorithm that predicts ratings takes kfold, or what it says itself, for auto"""
    ties: str = "hash"
    """which of several latest interactions is the last: hash (seeded) or first (the item that appears first, as in the published code)"""
    train_negatives: str = "clean"
    """clean: anything outside the client's training items can be drawn; leaky: never a held-out item, as in the published code"""
    select_on: str = "val"
    """where the reported round is chosen: val (validation NDCG@10, or RMSE; the last round if there is no validation data, as in kfold),
    last (the last round) or test (test HR@10, as in the published code, or RMSE)"""
    min_interactions: int = 5
    """users with fewer interactions are left out"""
    eval_negatives: int = 99
    """items sampled beside the held-out one in sampled ranking"""
    candidates: str = "apart"
    """apart: validation and test draw their own items; same: one draw serves both; ncf: the NCF paper's own items for test"""
    split_seed: int = 0
    """seed of the split and of the candidates; apart from --seed, so that seeds are compared on one split"""
    folds: int = 5
    """kfold: how many folds"""
    fold: int | None = None
    """kfold: the fold that is tested, from 0; all of them, one run each, if not given"""
    new_users: float = 0.0
    """this share of the clients never takes part; after training they learn what is private from their own items and are tested too"""
    eval_clients: int | None = None
    """rank for a seeded sample of so many clients only; for all of them if not given"""

    @property
    def leaky(self) -> bool:
        """True if a number obtained under this protocol is inflated by the held-out item."""
        return self.train_negatives == "leaky" or self.select_on == "test"

    @property
    def ratings(self) -> bool:
        """What is held out are ratings."""
        return self.split in RATING_SPLITS

    def resolve(self, data: Interactions) -> Protocol:
        """Replace `auto` by what it means for this data, and refuse what the data cannot give."""
        split = self.split
        if split == "auto":
            split = "time" if data.has_time else ("item-order" if self.name == "published" else "random")
        if split == "time" and not data.has_time:
            raise UsageError(f"--split time: {data.name} has no time column; use --split random")
        if split == "ncf" and data.held_out is None:
            raise UsageError(f"--split ncf: there are no NCF paper files for {data.name}; use ml-1m or pinterest, or --protocol clean")
        if split in RATING_SPLITS and not data.explicit:
            raise UsageError(f"--split {split} needs ratings, and {data.name} has none; use another dataset, or rank with --split auto")
        # a fold is held out for test alone: there is no validation to choose a round on
        select_on = "last" if split == "kfold" and self.select_on == "val" else self.select_on
        candidates = self.candidates
        if candidates == "ncf" and data.candidates is None:
            candidates = "apart"
        return replace(self, split=split, candidates=candidates, select_on=select_on)

    def fingerprint(self, data_checksum: str) -> str:
        """16 hex digits of the canonical JSON of the resolved protocol's fields that matter and the data's checksum."""
        # fields that change nothing under this split, or at this value, are left out: equal protocols have equal fingerprints
        ignored = {*(() if self.split == "kfold" else FOLD_FIELDS), *(RANKING_FIELDS if self.ratings else ())}
        ignored |= set() if self.new_users else {"new_users"}
        ignored |= {"eval_clients"} if self.eval_clients is None else set()
        matters = {key: value for key, value in asdict(self).items() if key not in ignored}
        # sorted and without blanks: one text for one protocol
        text = json.dumps({**matters, "data": data_checksum}, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


PRESETS = {
    "clean": Protocol(),
    "ncf": Protocol(name="ncf", split="ncf", min_interactions=0, candidates="ncf"),
    "published": Protocol(
        name="published", ties="first", train_negatives="leaky", select_on="test", min_interactions=10, candidates="same"
    ),
}
CHOICES = {
    "split": SPLITS,
    "ties": ("hash", "first"),
    "train_negatives": ("clean", "leaky"),
    "select_on": ("val", "last", "test"),
    "candidates": ("apart", "same", "ncf"),
}
"""allowed words of the fields that take one"""
