"""A finished run as a model: what its server and clients hold, ready to score items for its users.

An item is recommended to a user who has not met it in the dataset (in training, validation or test), and only if somebody trained on
it: of other items nothing is known.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from numba import njit, prange
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fedbench import trust
from fedbench.contract.algorithm import Algorithm, Tensors
from fedbench.contract.randomness import Draw
from fedbench.data.protocol import Protocol
from fedbench.data.sampling import sample_round
from fedbench.data.split import NO_ITEMS, Split
from fedbench.errors import DataError, UsageError
from fedbench.evaluation.metrics import trained_items
from fedbench.experiment import checkpoint
from fedbench.experiment.prepare import prepare
from fedbench.experiment.run_state import with_prefix
from fedbench.files import read_json, write_json
from fedbench.settings import command_line
from fedbench.settings.config import RunConfig
from fedbench.simulation import new_users
from fedbench.simulation.client_store import ClientStore, SomeClients, draw_for
from fedbench.simulation.engine import Engine
from fedbench.simulation.federation import check_form, world_of
from fedbench.simulation.scoring import Evaluator
from fedbench.text import nearest

TENSORS = "model.safetensors"
NEW_USER = "new"
"""what a user is called who was not in training"""


@dataclass(frozen=True)
class Model:
    """What scores items for the clients of a split."""

    config: RunConfig
    split: Split
    known: np.ndarray
    """[M] whether somebody trained on an item"""
    item_names: np.ndarray | None
    """[M] titles, where the dataset has them"""
    server: Tensors
    store: ClientStore
    """what clients keep; empty for clients that keep nothing and rebuild it when they are asked for"""
    round: int
    """the round whose state this is"""

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm in the round of the state."""
        return self.config.algorithm.at(self.round, world_of(self.split))

    @cached_property
    def engine(self) -> Engine:
        c = self.config
        dtype = torch.float64 if c.dtype == "float64" else torch.float32
        return Engine(c.algorithm, world_of(self.split), c.seed, "cpu", dtype, c.kernel, c.block_rows)

    @cached_property
    def evaluator(self) -> Evaluator:
        ties = self.config.seed if self.config.failures.no_server else None
        return Evaluator(self.algorithm, self.split, "cpu", self.engine.derived is not None, settles_ties=ties)

    @cached_property
    def number(self) -> dict[str, int]:
        """The client that a user's id stands for."""
        return {str(user): client for client, user in enumerate(self.split.user_ids)}

    def client(self, user: str) -> int:
        """The client that a user is, or what is wrong with the id."""
        if user in self.number:
            return self.number[user]
        near = nearest(user, self.number)
        hint = f"did you mean {near[0]}?" if near else f"ids look like {', '.join(list(self.number)[:3])}"
        least = self.split.protocol.min_interactions
        raise UsageError(
            f"--user {user}: not among the {self.split.clients:,} users of {self.config.dataset} that took part "
            f"(those with {least} interactions or more); {hint}"
        )

    def private(self, clients: np.ndarray) -> ClientStore:
        """What these clients score with: what they keep, or what they rebuild from their training items."""
        a = self.config.algorithm
        # what clients rebuild depends on their samples alone, so it is made for those that are asked for
        if self.store.tensors or not a.reconstructs:
            return self.store
        seed, when = self.config.seed, self.round
        samples = sample_round(self.split, clients, a.evaluation_negatives, seed, when, purpose="negatives/evaluation")
        return ClientStore.of(self.engine.reconstruct(self.server, samples, when))

    def with_history(self, item: np.ndarray, rating: np.ndarray, rounds: int = new_users.ROUNDS) -> Model:
        """The model of one user who was not in training and has these items, by number: what is private is learnt, the rest frozen."""
        server = self.algorithm.for_new_users(self.server)
        new_users.check(self.algorithm, self.algorithm.answer(server))
        # lists are sorted by item, which `_top` relies on
        order, split = np.argsort(item, kind="stable"), self.split
        ptr, user = np.array([0, len(item)]), np.array([NEW_USER])
        alone = scoring_split(split.protocol, ptr, item[order], rating[order], user, split.item_ids, split.rating_min, split.rating_max)
        one = replace(self, split=alone, server=server)
        return replace(one, store=new_users.learn(one.engine, server, alone, rounds))

    def best(self, clients: np.ndarray, k: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Blocks of clients [C] with the numbers [C, k] of their best items and the scores of those; -1 where there are no more."""
        if not 1 <= k <= self.split.items:
            raise UsageError(f"-k {k}: must be from 1 to {self.split.items}, the number of items")
        private, answer = self.private(clients), self.algorithm.answer(self.server)
        for chunk, theirs, sent in self.evaluator.groups(private, answer, self.split.items, torch.from_numpy(clients)):
            scores = self.evaluator.scores(private, theirs, chunk, sent).contiguous().numpy()
            where = chunk.numpy()
            item, score = np.empty((len(where), k), np.int64), np.empty((len(where), k), scores.dtype)
            _top(scores, where, self.split.seen_ptr, self.split.seen_item, self.known, item, score)
            yield where, item, score

    def tables(self, clients: np.ndarray, k: int) -> Iterator[pd.DataFrame]:
        """Recommendations as tables of user, rank, item, score and, where the dataset has it, title: one row each."""
        for where, item, score in self.best(clients, k):
            row, place = np.nonzero(item >= 0)
            found = item[row, place]
            columns = {
                "user": self.split.user_ids[where[row]].astype(str),
                "rank": (place + 1).astype(np.int32),
                "item": self.split.item_ids[found].astype(str),
                "score": score[row, place].astype(np.float64),
            }
            yield pd.DataFrame(columns | ({} if self.item_names is None else {"title": self.item_names[found]}))

    def recommend(self, clients: np.ndarray, k: int) -> pd.DataFrame:
        """The recommendations for these clients in one table, client after client."""
        found = pd.concat(list(self.tables(np.unique(clients), k)))
        place = {user: position for position, user in enumerate(dict.fromkeys(self.split.user_ids[clients].astype(str)))}
        return found.sort_values("user", key=lambda users: users.map(place), kind="stable", ignore_index=True)


@njit(parallel=True, nogil=True, cache=True)
def _top(
    scores: np.ndarray,
    clients: np.ndarray,
    seen_ptr: np.ndarray,
    seen_item: np.ndarray,
    known: np.ndarray,
    item: np.ndarray,
    score: np.ndarray,
) -> None:
    """item, score [C, k]: each client's best known items outside its sorted list of seen ones, best first, ties by number; then -1."""
    k = item.shape[1]
    for c in prange(clients.size):
        at, stop = seen_ptr[clients[c]], seen_ptr[clients[c] + 1]
        filled = 0
        for i in range(scores.shape[1]):
            # items and seen items both ascend: one pass over both
            if at < stop and seen_item[at] == i:
                at += 1
                continue
            value = scores[c, i]
            # not better than the worst that is kept: of equal scores the smaller item number stays
            if not known[i] or np.isnan(value) or (filled == k and value <= score[c, k - 1]):
                continue
            place = min(filled, k - 1)
            while place > 0 and score[c, place - 1] < value:
                score[c, place], item[c, place] = score[c, place - 1], item[c, place - 1]
                place -= 1
            score[c, place], item[c, place] = value, i
            filled = min(filled + 1, k)
        item[c, filled:] = -1


def load(folder: Path, data_dir: Path | None = None, trust_plugin: bool = False) -> Model:
    """The model that a finished run kept, with the dataset that it was trained on."""
    made, state = config_of(folder, trust_plugin), saved_state(folder)
    data_options = made.data if data_dir is None else replace(made.data, data_dir=data_dir)
    split, data = prepare(made.dataset, made.protocol, data_options)
    split = split.with_validation_in_training() if made.refit else split
    for key, here in (("data_checksum", split.checksum), ("protocol_fingerprint", split.fingerprint)):
        if state.facts.get(key) != here:
            words = key.replace("_", " ")
            raise DataError(f"--run {folder}: its {words} is {state.facts.get(key)}, of {made.dataset} here {here}; use the same data")
    if state.facts.get("algo") != made.identity()["algo"]:
        raise UsageError(f"--run {folder}: the content of {made.algo} has changed since that run; train again")
    tensors, round_ = checked(folder, made, split, state)
    position = {item: number for number, item in enumerate(data.item_ids)}
    names = None if data.item_names is None else data.item_names[[position[item] for item in split.item_ids]]
    server, store = with_prefix(tensors, "server/"), stored(made, split, tensors)
    found = Model(made, split, trained_items(split), names, server, store, round_)
    # one recommendation now: what does not fit shows here, not in the middle of an answer
    with _named(folder, state):
        next(found.best(np.arange(1), 1))
    return found


def checked(folder: Path, made: RunConfig, split: Split, state: checkpoint.State) -> tuple[Mapping[str, Tensor], int]:
    """The tensors of a saved state and its round, if their shapes are those of this run: a right checksum does not prove that."""
    algorithm, world = made.algorithm, world_of(split)
    draw = Draw(made.seed, 0, None, torch.float64 if made.dtype == "float64" else torch.float32)
    with _named(folder, state):
        tensors, own = state.tensors("cpu"), algorithm.init_client(world, draw_for(draw, np.arange(1)))
        clients = tensors["clients"] if "clients" in tensors else torch.arange(split.clients)
        inside = (clients >= 0) & (clients < split.clients)
        # ascending and each once: rows of the tensors belong to clients by this order
        if clients.dtype != torch.int64 or not torch.equal(clients[inside].unique(), clients):
            raise ValueError("clients are not those of the data")
        for name, value in own.items():
            check_form(tensors[f"client/{name}"], (len(clients), *value.shape[1:]), value.dtype)
        for name, value in algorithm.init_server(world, draw).items():
            check_form(tensors[f"server/{name}"], tuple(value.shape), value.dtype)
        # a slot out of range would read beyond the rows, or another client's
        for name in algorithm.per_client_server_state:
            slot, mail = tensors.get("server/slot"), tensors.get(f"server/{name}")
            if slot is not None and mail is not None and (slot.shape != (split.clients,) or not -1 <= slot.min() <= slot.max() < len(mail)):
                raise ValueError(f"slot leads outside of {name}")
        if type(state.facts.get("round")) is not int:
            raise ValueError("its round is no number")
        return tensors, state.facts["round"]


@contextmanager
def _named(folder: Path, state: checkpoint.State) -> Iterator[None]:
    """Errors that come of a state that does not fit name its file."""
    try:
        yield
    except (SafetensorError, KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        said = " ".join(str(error).split())
        raise DataError(f"--run {folder}: {state.path} does not fit this run ({said[:200]}); train again") from None


def stored(made: RunConfig, split: Split, tensors: Mapping[str, Tensor]) -> ClientStore:
    """What clients keep, all of them or those named in `clients`; the others are as they start."""
    found = with_prefix(tensors, "client/")
    if "clients" not in tensors:
        return ClientStore.of(found)
    draw = Draw(made.seed, 0, None, torch.float64 if made.dtype == "float64" else torch.float32)
    return SomeClients(made.algorithm, world_of(split), draw, found, tensors["clients"].numpy())


def config_of(folder: Path, trust_plugin: bool = False) -> RunConfig:
    """The config of a run; a Python file that it names is loaded only if `trust` admits it."""
    if not os.path.isfile(folder / "config.json"):
        inside = sorted(path.parent.name for path in folder.glob("*/config.json")) if os.path.isdir(folder) else []
        hint = f"give one of the runs in it, such as {folder / inside[0]}" if inside else "give the folder of a finished run"
        raise UsageError(f"--run {folder}: there is no run (no config.json); {hint}")
    return command_line.resolve(["--config", str(folder / "config.json"), *([trust.FLAG] if trust_plugin else [])])


def saved_state(folder: Path) -> checkpoint.State:
    """What a finished run kept."""
    if not (folder / checkpoint.FOLDER / f"{checkpoint.MODEL}.json").is_file():
        finished = (folder / "summary.json").is_file()
        hint = "it ran with --keep-state none; train again without that" if finished else "the run is not finished; resume it"
        raise UsageError(f"--run {folder}: there is no saved state: {hint}")
    return checkpoint.read(folder, checkpoint.MODEL)


def scoring_split(
    protocol: Protocol,
    ptr: np.ndarray,
    item: np.ndarray,
    rating: np.ndarray,
    user_ids: np.ndarray,
    item_ids: np.ndarray,
    rating_min: float,
    rating_max: float,
) -> Split:
    """Clients with their items, CSR, and nothing held out."""
    item = item.astype(np.int32)
    return Split(
        protocol=protocol,
        fingerprint="",
        checksum="",
        items=len(item_ids),
        train_ptr=ptr,
        train_item=item,
        train_rating=rating.astype(np.float32),
        seen_ptr=ptr,
        seen_item=item,
        **NO_ITEMS,
        user_ids=user_ids,
        item_ids=item_ids,
        rating_min=rating_min,
        rating_max=rating_max,
    )


# ---- apart from its run and its dataset -----------------------------------------------------------------------------------------


def save(loaded: Model, folder: Path, algo: str) -> None:
    """Write all that scoring needs: config.json, ids.json and model.safetensors. `algo`: where the algorithm will be found."""
    split = loaded.split
    private = loaded.private(np.arange(split.clients))
    arrays = {"seen_ptr": split.seen_ptr, "seen_item": split.seen_item, "known": loaded.known}
    tensors = {f"server/{name}": value for name, value in loaded.server.items()}
    tensors |= {f"client/{name}": value for name, value in private.tensors.items()}
    arrays |= {} if private.kept is None else {"clients": np.flatnonzero(private.kept)}
    checkpoint.save_file(tensors | {name: torch.from_numpy(value) for name, value in arrays.items()}, folder / TENSORS)
    # folders of this machine mean nothing where the model will be read
    values = {key: value for key, value in loaded.config.to_dict().items() if key not in ("out", "resume", "data_dir", "cache_dir")}
    write_json(folder / "config.json", values | {"algo": algo, "device": "cpu"})
    names = None if loaded.item_names is None else loaded.item_names.tolist()
    ids = {"user": split.user_ids.astype(str).tolist(), "item": split.item_ids.astype(str).tolist(), "item_names": names}
    write_json(folder / "ids.json", ids | {"rating_min": split.rating_min, "rating_max": split.rating_max, "round": loaded.round})


def read(folder: Path, beside: Path) -> Model:
    """What `save` wrote; an algorithm that is a file is looked for in the folder `beside`."""
    values, ids = read_json(folder / "config.json"), read_json(folder / "ids.json")
    algo = str(beside / values["algo"]) if values["algo"].endswith(".py") else values["algo"]
    made = command_line.resolve(["--config", str(folder / "config.json"), "--algo", algo])
    tensors = load_file(folder / TENSORS)
    ptr, item = tensors["seen_ptr"].numpy(), tensors["seen_item"].numpy()
    user_ids, item_ids = (np.array(ids[name], dtype=object) for name in ("user", "item"))
    # ratings are not saved, for scoring does not read them
    split = scoring_split(made.protocol, ptr, item, np.ones(len(item)), user_ids, item_ids, ids["rating_min"], ids["rating_max"])
    names = None if ids["item_names"] is None else np.array(ids["item_names"], dtype=object)
    return Model(made, split, tensors["known"].numpy(), names, with_prefix(tensors, "server/"), stored(made, split, tensors), ids["round"])
