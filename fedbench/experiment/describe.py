"""What the log says before training starts."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

from fedbench.contract.dataset import Interactions
from fedbench.contract.storage import Disk
from fedbench.data.split import Split
from fedbench.settings.config import RunConfig
from fedbench.simulation.federation import Federation
from fedbench.text import human

log = logging.getLogger("fedbench")


def describe(dataset: Interactions, split: Split, config: RunConfig, device: str, out: Path) -> None:
    """Say what is about to run."""
    log.info("%s: %s users, %s items, %s interactions from %s (licence: %s)", dataset.name, f"{dataset.users:,}", f"{dataset.items:,}",
             f"{len(dataset.user):,}", dataset.source, dataset.licence)  # fmt: skip
    for note in dataset.notes:
        log.info("%s: %s", dataset.name, note)
    if dataset.merged_rows:
        log.info("%d repeated (user, item) rows merged: the latest stands", dataset.merged_rows)
    log.info("protocol %s [%s]: %s clients, %s items, split by %s", split.protocol.name, split.fingerprint, f"{split.clients:,}",
             f"{split.items:,}", split.protocol.split)  # fmt: skip
    if split.cold_start:
        log.info("%s more clients are kept out of training, to be tested as new users", f"{split.cold_start.clients:,}")
    if split.role is not None:
        log.info("%s clients take part; %s are for validation and %s for test", *(f"{n:,}" for n in np.bincount(split.role)))
    if split.protocol.eval_negatives < config.protocol.eval_negatives:
        log.info("%d items are ranked beside the held-out one, not %d", split.protocol.eval_negatives, config.protocol.eval_negatives)
    if split.protocol.leaky:
        log.warning("LEAKY protocol: numbers of this run are inflated and labelled so; use --protocol clean for true ones")
    if config.failures.no_server:
        log.warning("CONTROL: with --no-server the server never learns; on an honest protocol the result must be at chance")
    if config.compile and config.kernel == "auto" and device == "cpu":
        log.info(
            "--compile concerns the generic path; a derived kernel runs instead where there is one (--kernel off takes the generic path)"
        )
    log.info("%s, recipe %s, seed %d, on %s, into %s", config.algorithm.name, config.recipe, config.seed, device, out)


def describe_store(federation: Federation) -> None:
    """Say where clients' state lies, if not in memory."""
    store = federation.store
    if isinstance(store.room, Disk):
        most = store.client_bytes * federation.split.clients
        log.info(
            "what clients keep is in a sparse file in %s, which goes when the run ends: %s if all take part", store.room.folder, human(most)
        )
