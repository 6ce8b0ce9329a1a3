"""Presets, what `auto` means for a dataset, and the fingerprint that decides which runs may be compared."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from fedbench.contract.dataset import DatasetOptions, Interactions
from fedbench.data.protocol import CHOICES, PRESETS, Protocol
from fedbench.datasets.synthetic import load
from fedbench.errors import UsageError

CLEAN: dict[str, Any] = {"name": "clean", "split": "auto", "ties": "hash", "train_negatives": "clean", "select_on": "val",
         "min_interactions": 5, "eval_negatives": 99, "candidates": "apart", "split_seed": 0, "new_users": 0.0}  # fmt: skip
UNSET: dict[str, Any] = {"folds": 5, "fold": None, "eval_clients": None}


@cache
def timed() -> Interactions:
    return load(DatasetOptions(users=8, items=20, interactions=6))


def timeless() -> Interactions:
    return replace(timed(), has_time=False, time=np.zeros_like(timed().time))


def test_presets_are_what_the_design_says() -> None:
    assert asdict(PRESETS["clean"]) == CLEAN | UNSET
    assert asdict(PRESETS["ncf"]) == CLEAN | UNSET | {"name": "ncf", "split": "ncf", "min_interactions": 0, "candidates": "ncf"}
    assert asdict(PRESETS["published"]) == CLEAN | UNSET | {
        "name": "published", "ties": "first", "train_negatives": "leaky", "select_on": "test", "min_interactions": 10, "candidates": "same"
    }  # fmt: skip
    assert all(getattr(preset, field) in words for preset in PRESETS.values() for field, words in CHOICES.items())


@pytest.mark.parametrize(
    ("negatives", "select_on", "leaky"),
    [("clean", "val", False), ("leaky", "val", True), ("clean", "test", True), ("leaky", "test", True), ("clean", "last", False)],
)
def test_either_leak_makes_a_protocol_leaky(negatives: str, select_on: str, leaky: bool) -> None:
    assert Protocol(train_negatives=negatives, select_on=select_on).leaky is leaky


def test_leaky_presets() -> None:
    assert {name for name, preset in PRESETS.items() if preset.leaky} == {"published"}


def test_every_field_and_the_data_change_the_fingerprint() -> None:
    other: dict[str, Any] = {name: value + type(value)(1) for name, value in CLEAN.items()}
    assert {*other, *UNSET} == {f.name for f in fields(Protocol)}
    other["eval_clients"] = 3
    changed = [replace(Protocol(), **{name: value}) for name, value in other.items()]
    prints = [Protocol().fingerprint("a"), Protocol().fingerprint("b"), *(protocol.fingerprint("a") for protocol in changed)]
    assert len(set(prints)) == len(prints) == 2 + len(other)
    assert all(len(p) == 16 and int(p, 16) >= 0 for p in prints)


def test_only_the_fields_that_a_split_looks_at_change_its_fingerprint() -> None:
    folds, ranking = {"folds": 7, "fold": 2}, {"ties": "first", "eval_negatives": 9, "candidates": "same"}
    for split, ignored in (("time", folds), ("users", folds | ranking), ("kfold", ranking)):
        plain = Protocol(split=split)
        for name, value in (folds | ranking).items():
            assert (replace(plain, **{name: value}).fingerprint("a") == plain.fingerprint("a")) == (name in ignored), (split, name)


def test_folds_have_no_validation_data_so_the_last_round_is_reported() -> None:
    assert Protocol(split="kfold").resolve(timed()).select_on == "last"
    assert Protocol(split="users").resolve(timed()).select_on == "val"
    assert Protocol(split="kfold", select_on="test").resolve(timed()).leaky


@pytest.mark.parametrize("split", ["kfold", "users"])
def test_rating_splits_need_ratings(split: str) -> None:
    with pytest.raises(UsageError, match=f"^--split {split} needs ratings, and synthetic has none"):
        Protocol(split=split).resolve(replace(timed(), explicit=False))


def test_equal_protocols_have_one_fingerprint() -> None:
    assert replace(PRESETS["published"], **CLEAN).fingerprint("a") == Protocol().fingerprint("a")


def test_fingerprint_is_sha256_of_canonical_json() -> None:
    # printf '%s' '{"candidates":"apart","data":"a","eval_negatives":99,"min_interactions":5,"name":"clean","select_on":"val",
    # "split":"auto","split_seed":0,"ties":"hash","train_negatives":"clean"}' (one line, no break) | sha256sum | cut -c1-16
    assert Protocol().fingerprint("a") == "1b4271f1de0cf19e"


@pytest.mark.parametrize(("preset", "with_time", "without"), [("clean", "time", "random"), ("published", "time", "item-order")])
def test_auto_split(preset: str, with_time: str, without: str) -> None:
    assert PRESETS[preset].resolve(timed()).split == with_time
    assert PRESETS[preset].resolve(timeless()).split == without


def test_resolving_twice_changes_nothing() -> None:
    once = Protocol().resolve(timed())
    assert once.resolve(timed()) == once


def test_time_split_needs_time() -> None:
    with pytest.raises(UsageError, match="^--split time: synthetic has no time column; use --split random$"):
        Protocol(split="time").resolve(timeless())


def test_ncf_split_needs_the_ncf_files() -> None:
    with pytest.raises(UsageError, match="^--split ncf: there are no NCF paper files for synthetic; use .* --protocol clean$"):
        PRESETS["ncf"].resolve(timed())


def test_ncf_candidates_that_cannot_be_had_show_in_the_fingerprint() -> None:
    held_out = np.zeros(timed().users, np.int32)
    without = replace(timed(), held_out=held_out)
    with_them = replace(without, candidates=np.zeros((timed().users, 99), np.int32))
    assert PRESETS["ncf"].resolve(without).candidates == "apart"
    assert PRESETS["ncf"].resolve(with_them).candidates == "ncf"
    assert PRESETS["ncf"].resolve(without).fingerprint("a") != PRESETS["ncf"].resolve(with_them).fingerprint("a")
