"""Failures inside a federation, for every algorithm alike: clients that never answer, that finish less, uploads that arrive damaged, and a
server that never learns.

Who fails is drawn from (seed, round, client). What arrives is screened before the server aggregates it: an upload that is not finite,
cannot be read or is far too large is rejected and counted, and the round goes on without it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedbench.contract.randomness import Draw
from fedbench.errors import UsageError

if TYPE_CHECKING:
    from fedbench.contract.uploads import Uploads

HUGE = 1e6
"""what a damaged upload that is too large is multiplied by"""
AUTO_NORM = "10x"
"""--max-upload-norm auto with --corrupt; heavy users' uploads are 3 or 4 times the median"""


@dataclass(frozen=True)
class Failures:
    """Fields are flags: the sentence under a field is its --help text."""

    dropout: float = 0.0
    """share of a round's clients that never answer: they receive, train and send nothing"""
    stragglers: float = 0.0
    """share of a round's clients that finish fewer local epochs than the rest, at least one"""
    corrupt: float = 0.0
    """share of uploads that arrive damaged: NaN, infinite, a million times too large or of a wrong shape"""
    max_upload_norm: str = "auto"
    """uploads with a larger norm are rejected: a number, 10x (times the round's median), none, or auto (10x with --corrupt, else none)"""
    no_server: bool = False
    """a control: the server never learns, so all it sends is what it starts with. On an honest protocol every method is then at chance"""

    def check(self) -> None:
        for name in ("dropout", "stragglers", "corrupt"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"--{name} must be 0 or more and under 1, not {getattr(self, name):g}")
        self.limit()

    def limit(self) -> tuple[float, bool] | None:
        """The largest norm, and whether it is a multiple of the round's median; None: any norm is taken."""
        text = self.max_upload_norm
        if text == "auto":
            text = AUTO_NORM if self.corrupt else "none"
        if text == "none":
            return None
        match = re.fullmatch(r"(\d{1,30}(?:\.\d{1,30})?(?:e[+-]?\d{1,2})?)(x?)", text, re.ASCII)
        if match is None or float(match[1]) <= 0:
            raise UsageError(f"--max-upload-norm must be a number over 0, a multiple such as 10x, none or auto, not {text!r}")
        return float(match[1]), bool(match[2])

    def happen(self) -> bool:
        return bool(self.dropout or self.stragglers or self.corrupt)

    def answering(self, cohort: np.ndarray, seed: int, when: int) -> np.ndarray:
        """The cohort without those that drop out."""
        return cohort[drawn(cohort, seed, when, "dropout")[:, 0] >= self.dropout] if self.dropout else cohort

    def epochs(self, cohort: np.ndarray, seed: int, when: int, most: int) -> np.ndarray:
        """[n] local epochs that each client finishes: all of them, or from 1 to one less."""
        epochs = np.full(len(cohort), most)
        if self.stragglers and most > 1:
            # two numbers of a stream: who fails says nothing about how far it gets
            which, how_far = drawn(cohort, seed, when, "stragglers").T
            epochs = np.where(which < self.stragglers, 1 + (how_far * (most - 1)).astype(np.int64), epochs)
        return epochs

    def damaged(self, uploads: Uploads, seed: int, when: int) -> Uploads:
        """The uploads as they arrive. What the clients hold is not changed."""
        if not self.corrupt or not uploads.tensors:
            return uploads
        which, kind = drawn(uploads.clients.cpu().numpy(), seed, when, "corrupt").T
        # 0 to 3: NaN, infinite, too large, unreadable; 4: sound
        kind = np.where(which < self.corrupt, (kind * 4).astype(np.int64), 4)
        factor = torch.from_numpy(np.array([np.nan, np.inf, HUGE, 1.0, 1.0], np.float32)[kind]).to(uploads.clients.device)
        return replace(uploads.scaled(factor), unreadable=torch.from_numpy(kind == 3).to(uploads.clients.device))

    def screened(self, uploads: Uploads) -> Uploads:
        """The uploads that the server takes, if it has reason to look at them."""
        limit = self.limit()
        if not uploads.tensors or not (self.corrupt or limit):
            return uploads
        keep = uploads.finite()
        if uploads.unreadable is not None:
            keep = keep & ~uploads.unreadable
        if limit is not None:
            keep = keep & within(uploads.norms(), keep, *limit)
        return uploads if bool(keep.all()) else uploads.only(keep)


def drawn(clients: np.ndarray, seed: int, when: int, purpose: str) -> np.ndarray:
    """[n, 2] uniform numbers, a client's own."""
    return Draw(seed, when, clients, torch.float64).uniform(purpose, 2).numpy()


def within(norms: dict[str, Tensor], sound: Tensor, most: float, relative: bool) -> Tensor:
    """[n] whether an upload's norms, [n] by name, are small enough.

    A multiple is of the median over the sound uploads, name by name; a number is for all names together.
    """
    if not relative:
        return torch.stack([norm**2 for norm in norms.values()]).sum(0).sqrt() <= most
    fine = sound
    # of sound uploads alone: others would move the median that they are judged by
    for norm in norms.values():
        median = norm[sound].median() if bool(sound.any()) else norm.new_zeros(())
        # where the median is 0 there is nothing to compare with
        fine = fine & ((norm <= most * median) | (median == 0))
    return fine
