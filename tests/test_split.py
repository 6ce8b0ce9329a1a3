"""The split, the candidates, a round's samples and its cohort: what is held out stays out, and nothing depends on an order."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedbench.contract.dataset import Interactions
from fedbench.data.protocol import PRESETS, Protocol
from fedbench.data.sampling import Samples, cohort_of, sample_round
from fedbench.data.split import Split, smallest, split
from fedbench.errors import DataError
from fedbench.kernels.sampling import outside, unseen

SPLITS = ("time", "random", "item-order")
small = settings(max_examples=25, deadline=None)


def interactions(met: Sequence[Sequence[int]], time: Sequence[int] | None = None, **facts: Any) -> Interactions:
    """`met[u]` are user u's items, in the order of the rows; `time` has one number a row."""
    user = np.repeat(np.arange(len(met), dtype=np.int32), [len(items) for items in met])
    item = np.concatenate([np.asarray(items, np.int32) for items in met])
    number = np.zeros(len(user), np.int64) if time is None else np.asarray(time, np.int64)
    rating = (1 + item % 5).astype(np.float32)
    ids = (np.arange(len(met)) + 100, np.arange(item.max() + 1) + 1000)
    return replace(Interactions("tiny", user, item, rating, number, *ids, time is not None, True, 1, 5, "free", "here"), **facts)


@st.composite
def datasets(draw: st.DrawFn) -> Interactions:
    """Users 0 and 1 have all items between them, so nobody has met all; the others have 1 to M-1. Few times, so many ties."""
    items = draw(st.integers(10, 16))
    some = st.lists(st.integers(0, items - 1), min_size=1, max_size=items - 1, unique=True)
    met = [list(range(items // 2)), list(range(items // 2, items)), *draw(st.lists(some, max_size=5))]
    rows = sum(map(len, met))
    return interactions(met, draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows)))


def lists(ptr: np.ndarray, values: np.ndarray) -> list[list[int]]:
    return [values[a:b].tolist() for a, b in zip(ptr[:-1], ptr[1:], strict=True)]


def source_items(parts: Split, items: np.ndarray | list[int] | int) -> np.ndarray:
    """Item codes of the source, from the split's own numbers."""
    return parts.item_ids[items] - 1000


def assert_same(a: Split, b: Split) -> None:
    for f in fields(Split):
        np.testing.assert_equal(getattr(a, f.name), getattr(b, f.name), err_msg=f.name)


@cache
def crowd(users: int = 300, items: int = 40, each: int = 6) -> Interactions:
    """Everybody has `each` items, all at one time: only the hash can order them."""
    rng = np.random.default_rng(0)
    return interactions([rng.permutation(items)[:each].tolist() for _ in range(users)], [7] * (users * each))


# ---- what is held out ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", SPLITS)
@given(data=datasets(), least=st.integers(0, 7))
@small
def test_each_kept_user_has_one_validation_one_test_and_the_rest_to_train(how: str, data: Interactions, least: int) -> None:
    least = min(least, data.items // 2)  # users 0 and 1 stay
    parts = split(data, Protocol(split=how, min_interactions=least))
    met = {u: set(data.item[data.user == u].tolist()) for u in range(data.users)}
    kept = [u for u in met if len(met[u]) >= max(least, 3)]
    assert (parts.user_ids - 100).tolist() == kept
    assert parts.item_ids.tolist() == sorted({item + 1000 for u in kept for item in met[u]})
    assert parts.items == len(parts.item_ids)
    for c, train in enumerate(lists(parts.train_ptr, parts.train_item)):
        val, test = int(parts.val_item[c]), int(parts.test_item[c])
        assert val != test and not {val, test} & set(train)
        assert train == sorted(set(train))
        assert lists(parts.seen_ptr, parts.seen_item)[c] == sorted([*train, val, test])
        assert set(source_items(parts, [*train, val, test]).tolist()) == met[kept[c]]
    assert np.array_equal(parts.train_rating, 1 + source_items(parts, parts.train_item) % 5)


@pytest.mark.parametrize("how", SPLITS)
@given(data=datasets(), seed=st.integers(0, 9))
@small
def test_the_order_of_rows_does_not_matter(how: str, data: Interactions, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(len(data.user))
    columns = {name: getattr(data, name)[order] for name in ("user", "item", "rating", "time")}
    assert_same(split(data, Protocol(split=how)), split(replace(data, **columns), Protocol(split=how)))


@pytest.mark.parametrize("preset", ["clean", "published"])
@given(data=datasets())
@small
def test_by_time_the_last_is_test_and_the_one_before_is_validation(preset: str, data: Interactions) -> None:
    parts = split(data, replace(PRESETS[preset], min_interactions=3))
    for c, user in enumerate(parts.user_ids - 100):
        when = {int(item): int(t) for item, t in zip(data.item[data.user == user], data.time[data.user == user], strict=True)}
        # the published code takes the first of several latest rows: the item that appeared earliest, so the smallest code
        for held in (parts.test_item[c], parts.val_item[c]):
            item, latest = int(source_items(parts, held)), max(when.values())
            assert when[item] == latest
            if preset == "published":
                assert item == min(i for i, t in when.items() if t == latest)
            del when[item]


@small
@given(datasets())
def test_a_refit_moves_validation_to_training_and_nothing_else(data: Interactions) -> None:
    parts = split(data, replace(PRESETS["clean"], min_interactions=3))
    moved = parts.with_validation_in_training()
    train, wider = lists(parts.train_ptr, parts.train_item), lists(moved.train_ptr, moved.train_item)
    assert wider == [sorted([*items, val]) for items, val in zip(train, parts.val_item.tolist(), strict=True)]
    assert moved.train_rating.tolist() == (1 + source_items(parts, moved.train_item) % 5).tolist()
    assert moved.refit and not parts.refit
    changed = {"train_ptr", "train_item", "train_rating", "train_time", "refit"}
    for f in fields(Split):
        if f.name not in changed:
            assert getattr(moved, f.name) is getattr(parts, f.name), f.name


def test_item_order_takes_the_highest_codes() -> None:
    parts = split(interactions([[5, 0, 3, 1, 4], [2, 6, 1, 0, 4]]), Protocol(split="item-order"))
    assert parts.test_item.tolist() == [5, 6] and parts.val_item.tolist() == [4, 4]
    assert lists(parts.train_ptr, parts.train_item) == [[0, 1, 3], [0, 1, 2]]


@pytest.mark.parametrize("how", ["time", "random"])
def test_ties_are_drawn_anew_by_split_seed_and_evenly(how: str) -> None:
    data = crowd()
    one, two = (split(data, Protocol(split=how, split_seed=seed)) for seed in (0, 1))
    # 300 users, 6 tied items each: two seeds agree on the test item by chance in 1/6 of them
    assert abs((one.test_item == two.test_item).sum() - 50) < 5 * np.sqrt(300 * (1 / 6) * (5 / 6))
    for held in (one.test_item, one.val_item):
        place = [seen.index(item) for seen, item in zip(lists(one.seen_ptr, one.seen_item), held.tolist(), strict=True)]
        assert stats.chisquare(np.bincount(place, minlength=6)).pvalue > 1e-4
    assert one.fingerprint != two.fingerprint


def test_min_interactions_counts_all_of_a_users_rows() -> None:
    data = interactions([[0, 1], [0, 1, 2], [3, 4, 5, 6], [0, 2, 4, 6, 8], [1, 3, 5, 7, 9, 10]])
    for least, kept in ((0, [1, 2, 3, 4]), (3, [1, 2, 3, 4]), (4, [2, 3, 4]), (5, [3, 4])):
        assert (split(data, Protocol(min_interactions=least)).user_ids - 100).tolist() == kept
    # items 1, 3, 5, 7, 9, 10 alone are left and their only user has met them all
    with pytest.raises(DataError, match="^tiny: a user has met all 6 items, so nothing is left to rank beside the held-out one$"):
        split(data, Protocol(min_interactions=6))
    with pytest.raises(DataError, match="^tiny: no user has 7 or more interactions; lower --min-interactions .* use more data$"):
        split(data, Protocol(min_interactions=7))


# ---- the NCF paper's files -------------------------------------------------------------------------------------------------


@given(data=datasets(), pick=st.integers(0, 100))
@small
def test_ncf_holds_out_what_the_files_say_and_validates_on_the_latest_left(data: Interactions, pick: int) -> None:
    met = [data.item[data.user == u] for u in range(data.users)]
    held = np.array([items[pick % len(items)] for items in met], np.int32)
    parts = split(replace(data, held_out=held), PRESETS["ncf"])
    for c, user in enumerate(parts.user_ids - 100):
        assert source_items(parts, int(parts.test_item[c])) == held[user]
        rest = {int(i): int(t) for i, t in zip(met[user], data.time[data.user == user], strict=True) if i != held[user]}
        assert rest[int(source_items(parts, int(parts.val_item[c])))] == max(rest.values())


def test_ncf_candidates_are_the_files_own_duplicates_included() -> None:
    met = [[0, 1, 2], [3, 4, 5], [0, 6]]
    given_ = np.array([[3, 3, 5], [0, 2, 0], [1, 2, 3]], np.int32)
    data = interactions(met, held_out=np.array([1, 3, 6], np.int32), candidates=given_)
    with pytest.raises(DataError, match="^tiny: --min-interactions removed items that the NCF candidates name; use --min-interactions 0"):
        split(replace(data, candidates=given_ + 1), PRESETS["ncf"])  # user 2 has too few rows, and item 6 goes with it
    parts = split(data, PRESETS["ncf"])
    assert parts.test_item.tolist() == [1, 3]
    assert source_items(parts, parts.test_candidates).tolist() == given_[:2].tolist()
    assert parts.protocol.candidates == "ncf"


# ---- candidates ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["apart", "same"])
@given(data=datasets(), wanted=st.integers(1, 16), seed=st.integers(0, 3))
@small
def test_candidates_are_distinct_and_never_met(how: str, data: Interactions, wanted: int, seed: int) -> None:
    parts = split(data, Protocol(candidates=how, eval_negatives=wanted, split_seed=seed, min_interactions=3))
    free = parts.items - int(np.diff(parts.seen_ptr).max())
    assert parts.protocol.eval_negatives == min(wanted, free)
    for candidates in (parts.val_candidates, parts.test_candidates):
        assert candidates.shape == (parts.clients, min(wanted, free))
        for mine, seen in zip(candidates.tolist(), lists(parts.seen_ptr, parts.seen_item), strict=True):
            assert len(set(mine)) == len(mine) and not set(mine) & set(seen) and set(mine) <= set(range(parts.items))
    if how == "same":
        assert np.array_equal(parts.val_candidates, parts.test_candidates)


def test_candidates_apart_are_drawn_apart_and_evenly() -> None:
    parts = split(crowd(), Protocol(eval_negatives=10))
    val, test = parts.val_candidates.tolist(), parts.test_candidates.tolist()
    # 10 of 34 unseen twice: 100/34 in common on average, hypergeometric variance
    common = sum(len(set(a) & set(b)) for a, b in zip(val, test, strict=True))
    variance = 10 * (10 / 34) * (24 / 34) * (24 / 33)
    assert abs(common - 300 * 100 / 34) < 5 * np.sqrt(300 * variance)
    for drawn in (val, test):
        place = [sorted(set(range(40)) - set(seen)).index(i)
                 for mine, seen in zip(drawn, lists(parts.seen_ptr, parts.seen_item), strict=True) for i in mine]  # fmt: skip
        assert stats.chisquare(np.bincount(place, minlength=34)).pvalue > 1e-4


def test_too_few_items_lower_the_candidates_aloud(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fedbench"):
        parts = split(crowd(), Protocol())
    assert [r.getMessage() for r in caplog.records] == [
        "34 items are ranked beside the held-out one, not 99: some user has met all but 34 of the 40 items; chance is higher"
    ]
    assert parts.protocol.eval_negatives == 34 and parts.chance(10) == 10 / 35
    resolved = Protocol().resolve(crowd())
    assert parts.fingerprint == replace(resolved, eval_negatives=34).fingerprint(parts.checksum)
    assert parts.fingerprint != resolved.fingerprint(parts.checksum)


def test_enough_items_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    parts = split(crowd(), Protocol(eval_negatives=34))
    assert not caplog.records and parts.fingerprint == Protocol(split="time", eval_negatives=34).fingerprint(crowd().checksum())


# ---- a round's samples -----------------------------------------------------------------------------------------------------


def samples_of(samples: Samples, c: int, k: int) -> list[tuple[int, list[int]]]:
    """(positive, its negatives) of the c-th client of the cohort, in order."""
    rows = samples.row[samples.row_ptr[c] : samples.row_ptr[c + 1]]
    items = rows[samples.local[samples.ptr[c] : samples.ptr[c + 1]]].reshape(-1, k + 1).tolist()
    label = samples.label[samples.ptr[c] : samples.ptr[c + 1]].reshape(-1, k + 1)
    assert (label == np.eye(1, k + 1)).all()
    assert len(set(rows.tolist())) == len(rows) and set(rows.tolist()) == {i for sample in items for i in sample}
    return [(sample[0], sample[1:]) for sample in items]


@pytest.mark.parametrize("negatives", ["clean", "leaky"])
@given(data=datasets(), k=st.integers(0, 6), seed=st.integers(0, 5), when=st.integers(1, 5))
@small
def test_samples_of_a_round(negatives: str, data: Interactions, k: int, seed: int, when: int) -> None:
    parts = split(data, Protocol(train_negatives=negatives, min_interactions=3))
    samples = sample_round(parts, np.arange(parts.clients), k, seed, when)
    assert samples.row_ptr[-1] == len(samples.row) and samples.ptr[-1] == len(samples.local) == len(samples.label)
    assert np.array_equal(samples.counts, parts.train_counts * (k + 1))
    for c, train in enumerate(lists(parts.train_ptr, parts.train_item)):
        drawn = samples_of(samples, c, k)
        assert [positive for positive, _ in drawn] == train
        free = set(range(parts.items)) - set(train)
        if negatives == "leaky":
            free -= {int(parts.val_item[c]), int(parts.test_item[c])}
        for _, mine in drawn:
            assert set(mine) <= free
            assert len(set(mine)) == k or len(free) < k


@given(data=datasets(), k=st.integers(0, 4), picked=st.sets(st.integers(0, 6), min_size=1))
@small
def test_a_client_has_the_same_samples_whatever_the_cohort(data: Interactions, k: int, picked: set[int]) -> None:
    parts = split(data, Protocol(min_interactions=3))
    cohort = np.array(sorted({u % parts.clients for u in picked}))
    everyone, some = (sample_round(parts, who, k, 0, 1) for who in (np.arange(parts.clients), cohort))
    for c, client in enumerate(cohort):
        assert samples_of(some, c, k) == samples_of(everyone, int(client), k)


@pytest.mark.parametrize("negatives", ["clean", "leaky"])
def test_held_out_items_are_drawn_like_any_other_unless_leaky(negatives: str) -> None:
    parts = split(crowd(), Protocol(train_negatives=negatives))
    rounds, k, cohort = 20, 4, np.arange(parts.clients)
    times = np.zeros((parts.clients, parts.items), np.int64)
    for when in range(1, rounds + 1):
        samples = sample_round(parts, cohort, k, 0, when)
        client = np.repeat(cohort, samples.counts)
        item = samples.row[np.repeat(samples.row_ptr[:-1], samples.counts) + samples.local]
        np.add.at(times, (client[samples.label == 0], item[samples.label == 0]), 1)
    # 300 clients · 20 rounds · 4 positives = 24,000 draws of 4 different ones of the 36 items outside training
    draws, rate = 300 * rounds * 4, k / 36
    for held in (parts.val_item, parts.test_item):
        hits = times[cohort, held].sum()
        assert hits == 0 if negatives == "leaky" else abs(hits - draws * rate) < 5 * np.sqrt(draws * rate * (1 - rate))
    if negatives == "clean":
        outside = np.ones_like(times, bool)
        outside[np.repeat(cohort, parts.train_counts), parts.train_item] = False
        place = times[outside].reshape(parts.clients, 36).sum(axis=0)
        assert (np.abs(place - draws * rate) < 5 * np.sqrt(draws * rate * (1 - rate))).all()


def test_rounds_and_seeds_draw_anew() -> None:
    parts = split(crowd(), Protocol())
    base, *others = (sample_round(parts, np.arange(5), 4, seed, when).row.tolist() for seed, when in ((0, 1), (0, 2), (1, 1)))
    assert base not in others and others[0] != others[1]


def test_a_client_that_has_met_everything_trains_on_positives_alone() -> None:
    parts = split(interactions([[0, 1, 2, 3, 4], [2, 3, 4, 5, 6]]), Protocol(train_negatives="leaky"))
    # client 0 has seen all 7 items; client 1 all but two, fewer than the three negatives asked for
    parts = replace(parts, seen_ptr=np.array([0, 7, 12]), seen_item=np.array([*range(7), 2, 3, 4, 5, 6], np.int32))
    samples = sample_round(parts, np.arange(2), 3, 0, 1)
    assert samples.counts.tolist() == [3, 12]
    assert samples.label[:3].tolist() == [1, 1, 1]
    assert samples.row[samples.local[:3]].tolist() == parts.train_item[:3].tolist()
    assert all(set(mine) <= {0, 1} and len(mine) == 3 for _, mine in samples_of(samples, 1, 3))


# ---- a round's cohort ------------------------------------------------------------------------------------------------------


@given(clients=st.integers(1, 40), n=st.integers(1, 45), seed=st.integers(0, 9))
@small
def test_queue_visits_everyone_before_anyone_again(clients: int, n: int, seed: int) -> None:
    visits = np.zeros(clients, np.int64)
    for round_ in range(1, 2 * clients // min(n, clients) + 2):
        cohort = cohort_of(round_, clients, n, "queue", seed)
        assert len(set(cohort.tolist())) == len(cohort) == min(n, clients)
        visits[cohort] += 1
        assert visits.max() - visits.min() <= 1


@given(clients=st.integers(1, 40), n=st.integers(1, 45), seed=st.integers(0, 9), round_=st.integers(1, 9))
@small
def test_uniform_draws_n_different_clients(clients: int, n: int, seed: int, round_: int) -> None:
    cohort = cohort_of(round_, clients, n, "uniform", seed)
    assert cohort.tolist() == sorted(set(cohort.tolist())) and len(cohort) == min(n, clients)
    assert set(cohort.tolist()) <= set(range(clients))
    assert np.array_equal(cohort, cohort_of(round_, clients, n, "uniform", seed))


def test_uniform_takes_everybody_equally_often_and_seeds_differ() -> None:
    visits = sum(np.bincount(cohort_of(r, 30, 6, "uniform", 0), minlength=30) for r in range(1, 1001))
    assert np.abs(visits - 200).max() < 5 * np.sqrt(1000 * 0.2 * 0.8)
    for sampling in ("uniform", "queue"):
        assert not np.array_equal(cohort_of(1, 1000, 50, sampling, 0), cohort_of(1, 1000, 50, sampling, 1))


@given(size=st.integers(1, 3000), share=st.floats(0.001, 1), seed=st.integers(0, 99))
@small
def test_the_smallest_keys_are_those_that_a_whole_sort_finds(size: int, share: float, seed: int) -> None:
    key = np.random.default_rng(seed).integers(0, 2**64, size, np.uint64)
    n = max(1, int(size * share))
    assert np.array_equal(smallest(key, n), np.argsort(key, kind="stable")[:n])
    assert np.array_equal(smallest(key | np.uint64(2**63), n), np.argsort(key | np.uint64(2**63), kind="stable")[:n])


@given(items=st.integers(1, 60), seed=st.integers(0, 99))
@small
def test_the_list_of_unseen_items_is_what_the_search_finds(items: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    seen = np.sort(rng.choice(items, rng.integers(0, items + 1), replace=False)).astype(np.int32)
    listed = outside(seen, items)
    assert listed.tolist() == sorted(set(range(items)) - set(seen.tolist()))
    assert listed.tolist() == [unseen(seen, rank) for rank in range(items - len(seen))]
