"""The protocol of a run: who takes part, what is held out, what may be drawn as a negative, what is ranked, and on what a round is chosen.

A `Protocol` is one frozen object with one fingerprint; runs whose fingerprints differ are never compared.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace

from fedbench.data import Interactions
from fedbench.errors import UsageError

SPLITS = ("auto", "time", "random", "item-order", "ncf")


@dataclass(frozen=True)
class Protocol:
    """Fields are flags: the sentence under a field is its --help text."""

    name: str = "clean"
    """the preset this protocol started from"""
    split: str = "auto"
    """what is held out, the last interaction for test and the one before for validation: by time, random, item-order (of first appearance),
    ncf (the NCF paper's files), auto (time if the data has it, else random, or item-order in the published preset)"""
    ties: str = "hash"
    """which of several latest interactions is the last: hash (seeded) or first (the item that appears first, as in the published code)"""
    train_negatives: str = "clean"
    """clean: anything outside the client's training items can be drawn; leaky: never a held-out item, as in the published code"""
    select_on: str = "val"
    """where the reported round is chosen: val (validation NDCG@10) or test (test HR@10, as in the published code)"""
    min_interactions: int = 5
    """users with fewer interactions are left out"""
    eval_negatives: int = 99
    """items sampled beside the held-out one in sampled ranking"""
    candidates: str = "apart"
    """apart: validation and test draw their own items; same: one draw serves both; ncf: the NCF paper's own items for test"""
    split_seed: int = 0
    """seed of the split and of the candidates; apart from --seed, so that seeds are compared on one split"""

    @property
    def leaky(self) -> bool:
        """True if a number obtained under this protocol is inflated by the held-out item."""
        return self.train_negatives == "leaky" or self.select_on == "test"

    def resolve(self, data: Interactions) -> Protocol:
        """Replace `auto` by what it means for this data, and refuse what the data cannot give."""
        split = self.split
        if split == "auto":
            split = "time" if data.has_time else ("item-order" if self.name == "published" else "random")
        if split == "time" and not data.has_time:
            raise UsageError(f"--split time: {data.name} has no time column; use --split random")
        if split == "ncf" and data.held_out is None:
            raise UsageError(f"--split ncf: there are no NCF paper files for {data.name}; use ml-1m or pinterest, or --protocol clean")
        candidates = self.candidates
        if candidates == "ncf" and data.candidates is None:
            candidates = "apart"
        return replace(self, split=split, candidates=candidates)

    def fingerprint(self, data_checksum: str) -> str:
        """16 hex digits of the canonical JSON of the resolved protocol and the data's checksum."""
        text = json.dumps({**asdict(self), "data": data_checksum}, sort_keys=True, separators=(",", ":"))
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
    "select_on": ("val", "test"),
    "candidates": ("apart", "same", "ncf"),
}
"""allowed words of the fields that take one"""
