"""Datasets: every source gives the same rows, nothing bad is kept, and bad input ends in one line."""

from __future__ import annotations

import csv
import dataclasses
import io
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedbench.contract.dataset import DatasetOptions, Interactions
from fedbench.datasets import filmtrust, lastfm_2k, ml_1m, ml_100k, ncf, pinterest, synthetic
from fedbench.datasets.csv_file import load_csv
from fedbench.datasets.rows import assemble, latest_rows
from fedbench.errors import DataError, UsageError
from tests.real_data import REAL, needs, real
from tests.test_sources import OPTIONS
from tests.test_sources import offline as offline
from tests.test_sources import own_settings as own_settings
from tests.test_sources import server as server

# ---- real files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("load", "users", "items", "rows", "merged", "scale", "timed", "checksum"),
    [
        real("filmtrust/ratings.txt", filmtrust.load, 1508, 2071, 35_494, 3, (0.5, 4.0), False, "d0d5fef0e9ae75f7"),
        real("ml-100k/u.data", ml_100k.load, 943, 1682, 100_000, 0, (1.0, 5.0), True, "172a847e2a279fe9"),
        real("ml-1m/ml-1m.train.rating", ml_1m.load, 6040, 3706, 1_000_209, 0, (1.0, 5.0), True, "b191bbe45c07c09d"),
        real("lastfm-2k/ratings.dat", lastfm_2k.load, 1600, 12_454, 70_508, 115_142, (1.0, 1.0), True, "92104b864d3673fe"),
        real("pinterest/first37501.train.rating", pinterest.load, 37_501, 9836, 1_000_154, 0, (1.0, 1.0), False, "2a714ab03c08f678"),
    ],
)
def test_real_files(
    load: Callable[[DatasetOptions], Interactions],
    users: int,
    items: int,
    rows: int,
    merged: int,
    scale: tuple[float, float],
    timed: bool,
    checksum: str,
    offline: list[str],
) -> None:
    data = load(DatasetOptions(data_dir=REAL))
    assert (data.users, data.items, len(data.user), data.merged_rows) == (users, items, rows, merged)
    assert (data.rating_min, data.rating_max) == scale == (data.rating.min(), data.rating.max())
    assert data.explicit == (scale != (1.0, 1.0))
    assert data.has_time == timed == bool(data.time.any())
    assert [column.dtype for column in (data.user, data.item, data.rating, data.time)] == [
        np.int32,
        np.int32,
        np.float32,
        np.int64,
    ]
    assert np.array_equal(np.unique(data.user), np.arange(users))
    assert np.array_equal(np.unique(data.item), np.arange(items))
    assert data.checksum().startswith(checksum)
    assert str(REAL) in data.source
    assert not offline


@needs("ml-1m/ratings.dat")
def test_ml_1m_rows_are_those_of_the_plain_reading() -> None:
    """The slow and obvious reading of the first 5,000 lines."""
    data = ml_1m.load(DatasetOptions(data_dir=REAL))
    with (REAL / "ml-1m" / "ratings.dat").open() as lines:
        expected = [tuple(map(int, next(lines).split("::"))) for _ in range(5000)]
    got = zip(data.user_ids[data.user[:5000]], data.item_ids[data.item[:5000]], data.rating[:5000], data.time[:5000], strict=True)
    assert [tuple(map(int, row)) for row in got] == expected
    seen = dict.fromkeys(row[1] for row in expected)
    assert list(data.item_ids[: len(seen)]) == list(seen)


@needs("ml-1m/ratings.dat")
@needs("ml-1m/ml-1m.train.rating")
def test_ml_1m_from_the_ncf_files_is_the_same_data(tmp_path: Path, offline: list[str]) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for file in (ml_1m.TRAIN, ml_1m.TEST):
        (folder / file.name).symlink_to(REAL / "ml-1m" / file.name)
    whole, from_ncf = ml_1m.load(DatasetOptions(data_dir=REAL)), ml_1m.load(DatasetOptions(data_dir=folder))
    assert from_ncf.checksum() == whole.checksum()
    assert from_ncf.held_out is None
    assert whole.user_ids[0] == 1 and from_ncf.user_ids[0] == 0
    assert any("ids are those of the NCF" in note for note in from_ncf.notes) and not whole.notes


@needs("ml-1m/ml-1m.test.negative")
def test_ml_1m_ncf_split_and_candidates(offline: list[str]) -> None:
    data = ml_1m.load(DatasetOptions(data_dir=REAL, ncf=True))
    assert data.held_out is not None and data.candidates is not None
    with (REAL / "ml-1m" / "ml-1m.test.negative").open() as lines:
        first = next(lines).split()
    assert f"(0,{data.held_out[0]})" == first[0]
    assert data.candidates[0].tolist() == [int(cell) for cell in first[1:]]
    assert data.candidates.shape == (6040, 99)
    pairs = set(zip(data.user.tolist(), data.item.tolist(), strict=True))
    assert all(pair in pairs for pair in enumerate(data.held_out.tolist()))


@needs("ml-1m/ml-1m.train.rating")
def test_ml_1m_ncf_split_without_the_papers_candidates(tmp_path: Path, offline: list[str]) -> None:
    for file in (ml_1m.TRAIN, ml_1m.TEST):
        (tmp_path / file.name).symlink_to(REAL / "ml-1m" / file.name)
    data = ml_1m.load(DatasetOptions(data_dir=tmp_path, ncf=True))
    assert data.candidates is None and ncf.NO_NEGATIVES in data.notes
    with (REAL / "ml-1m" / ml_1m.TEST.name).open() as lines:
        held_out = [int(line.split()[1]) for line in lines]
    assert data.held_out is not None and data.held_out.tolist() == held_out
    assert offline == [f"{ncf.REPOSITORY}/ml-1m.test.negative"]


@needs("pinterest/first37501.train.rating")
def test_pinterest_says_that_it_is_a_subset(offline: list[str]) -> None:
    data = pinterest.load(DatasetOptions(data_dir=REAL))
    assert any("SUBSET of 37,501 users" in note for note in data.notes)
    assert data.held_out is not None and data.held_out.shape == (37_501,)
    assert data.candidates is None


@needs("filmtrust/ratings.txt")
@needs("lastfm-2k/ratings.dat")
def test_other_shapes_of_the_files_convert_to_the_same_bytes() -> None:
    text = (REAL / "filmtrust" / "ratings.txt").read_bytes()
    assert filmtrust.single_spaced(text.replace(b" ", b"  ").replace(b"\n", b"\r\n")) == text
    assert filmtrust.without_tab_header(b"user\tmovie\nc\tc\nrow=1\tcol=1\n" + text.replace(b" ", b"\t")) == text
    rows = (REAL / "lastfm-2k" / "ratings.dat").read_bytes()
    rare = b"99999\t1\t1\t1238536800000\r\n" * (lastfm_2k.MIN_ASSIGNMENTS - 1)
    assert lastfm_2k.from_official(b"userID\tartistID\ttagID\ttimestamp\r\n" + rows.replace(b",", b"\t") + rare) == rows


@needs("lastfm-2k/ratings.dat")
def test_lastfm_time_is_the_latest_tag_in_seconds() -> None:
    data = lastfm_2k.load(DatasetOptions(data_dir=REAL))
    latest: dict[tuple[int, int], int] = {}
    for line in (REAL / "lastfm-2k" / "ratings.dat").read_text().splitlines()[:3000]:
        user, artist, _, milliseconds = map(int, line.split(","))
        latest[user, artist] = max(latest.get((user, artist), -(2**62)), milliseconds // 1000)
    names = zip(data.user_ids[data.user].tolist(), data.item_ids[data.item].tolist(), strict=True)
    times = dict(zip(names, data.time.tolist(), strict=True))
    complete = {pair: time for pair, time in latest.items() if pair[0] != user}
    assert complete and all(times[pair] == time for pair, time in complete.items())


@needs("filmtrust/ratings.txt")
def test_a_changed_file_in_the_folder_is_refused(tmp_path: Path, offline: list[str]) -> None:
    text = (REAL / "filmtrust" / "ratings.txt").read_text()
    target = tmp_path / "filmtrust" / "ratings.txt"
    target.parent.mkdir()
    target.write_text(text.replace("1 1 2\n", "1 1 3\n", 1))
    with pytest.raises(DataError, match=r"expected sha256:2411.*got sha256:.*--dataset path/to/file.csv"):
        filmtrust.load(DatasetOptions(data_dir=tmp_path))
    target.write_text(text.replace("1 3 3.5\n", "1 3 good\n", 1))
    with pytest.raises(DataError, match=r"filmtrust/ratings.txt:3: rating 'good' is not a number"):
        filmtrust.load(DatasetOptions(data_dir=tmp_path))
    target.write_text(text.replace("1 2 4\n", "1 2\n", 1))
    with pytest.raises(DataError, match=r"ratings.txt:2: 2 columns where 3 belong"):
        filmtrust.load(DatasetOptions(data_dir=tmp_path))
    assert not offline and target.is_file()


# ---- rows --------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(-2, 2)), min_size=1, max_size=30), st.booleans())
def test_the_latest_of_repeated_rows_stays(rows: list[tuple[int, int, int]], timed: bool) -> None:
    best: dict[tuple[int, int], int] = {}
    for number, (user, item, time) in enumerate(rows):
        if (user, item) not in best or not timed or time >= rows[best[user, item]][2]:
            best[user, item] = number
    user, item, time = np.array(rows).T
    assert latest_rows(user, item, time if timed else None).tolist() == sorted(best.values())


def test_codes_count_first_appearances() -> None:
    user, item = np.array([7, 3, 7, 3]), np.array([50, 40, 40, 60])
    data = assemble("d", user, item, np.array([1.0, 2, 3, 4]), None, licence="", source="")
    assert data.user.tolist() == [0, 1, 0, 1] and data.item.tolist() == [0, 1, 1, 2]
    assert data.user_ids.tolist() == [7, 3] and data.item_ids.tolist() == [50, 40, 60]


def test_malformed_negatives_are_told_with_their_line() -> None:
    good = b"(0,25)" + b"\t7" * 99 + b"\n"
    ncf.check_negatives(good, "f")
    with pytest.raises(DataError, match=r"^f:2: not"):
        ncf.check_negatives(good + b"(1,2)\t3\n", "f")


# ---- synthetic ---------------------------------------------------------------------------------------------------------


def test_synthetic_has_the_sizes_asked_for() -> None:
    data = synthetic.load(DatasetOptions(users=400, items=300, interactions=30))
    counts = np.bincount(data.user)
    assert data.users == 400 and data.items <= 300 and counts.min() >= 6
    assert abs(counts.mean() - 30) < 3
    assert len(np.unique(data.user.astype(np.int64) * 300 + data.item)) == len(data.user) and data.merged_rows == 0
    assert set(np.unique(data.rating)) == {1, 2, 3, 4, 5} and data.explicit and data.has_time


def test_synthetic_is_its_seed() -> None:
    small = DatasetOptions(users=50, items=60, interactions=10)
    assert synthetic.load(small).checksum() == synthetic.load(small).checksum()
    assert synthetic.load(small).checksum() != synthetic.load(dataclasses.replace(small, data_seed=1)).checksum()


def test_synthetic_does_not_depend_on_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    small = DatasetOptions(users=50, items=60, interactions=10)
    whole = synthetic.load(small)
    monkeypatch.setattr(synthetic, "BLOCK_CELLS", 60 * 7)
    assert np.array_equal(synthetic.load(small).item, whole.item)


def test_synthetic_tastes_can_be_found_again() -> None:
    """A truncated SVD of the other rows ranks a user's last item better than popularity does, and that better than chance."""
    data = synthetic.load(DatasetOptions(users=600, items=200, interactions=30))
    last = np.append(data.user[1:] != data.user[:-1], True)
    seen = np.zeros((data.users, data.items))
    seen[data.user[~last], data.item[~last]] = 1.0
    popularity = seen.mean(axis=0)
    left, size, right = np.linalg.svd(seen - popularity, full_matrices=False)
    tastes = popularity + (left[:, :6] * size[:6]) @ right[:6]

    def rank(scores: np.ndarray) -> float:
        held = scores[np.arange(data.users), data.item[last]][:, None]
        return float((((scores > held) & (seen == 0)).sum(axis=1) / (seen == 0).sum(axis=1)).mean())

    by_popularity = rank(np.broadcast_to(popularity, seen.shape))
    assert rank(tastes) < by_popularity - 0.03 < 0.45


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (DatasetOptions(items=79), "79 items are too few for 40 interactions a user; give at least 80"),
        (DatasetOptions(users=0), "at least 1"),
        (DatasetOptions(interactions=5), "at least 6"),
        (DatasetOptions(data_seed=-1), "0 or more"),
    ],
)
def test_synthetic_refuses_impossible_sizes(options: DatasetOptions, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        synthetic.load(options)


# ---- a CSV file --------------------------------------------------------------------------------------------------------


def csv_of(tmp_path: Path, content: str | bytes) -> Interactions:
    path = tmp_path / "ratings.csv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return load_csv(path, OPTIONS)


def test_csv_columns(tmp_path: Path) -> None:
    data = csv_of(tmp_path, "Time, ITEM ,user,rating\n30,x,ann,4.5\n\n20,y,ann,1\r\n10,x,bob,2\n")
    assert data.user_ids.tolist() == ["ann", "bob"] and data.item_ids.tolist() == ["x", "y"]
    assert data.rating.tolist() == [4.5, 1, 2] and data.time.tolist() == [30, 20, 10]
    assert data.explicit and data.has_time and (data.rating_min, data.rating_max) == (1.0, 4.5)
    assert data.name == "ratings" and data.source.endswith("ratings.csv")
    positional = csv_of(tmp_path, "ann,x,4.5,30\nann,y,1,20\nbob,x,2,10")
    assert positional.checksum() == data.checksum()


@pytest.mark.parametrize("separator", [",", ";", "\t", "::"])
@pytest.mark.parametrize(
    "header",
    ["userId,movieId,rating,timestamp", "User_ID,Item ID,Stars,ts", "\ufeffuid,iid,score,time", "user-id,asin,overall,unixReviewTime", ""],
)
def test_csv_as_others_write_it(header: str, separator: str, tmp_path: Path) -> None:
    plain = csv_of(tmp_path, "user,item,rating,time\nann,x,4.5,30\nann,y,1,20\nbob,x,2,10\n")
    rows = [row for row in (header, "ann,x,4.5,30", "ann,y,1,20", "bob,x,2,10") if row]
    data = csv_of(tmp_path, "\n".join(rows).replace(",", separator))
    assert data.checksum() == plain.checksum() and data.user_ids.tolist() == ["ann", "bob"] and plain.notes == ()
    said = "".join(data.notes)
    assert ("(user)" in said) == bool(header) and ("separated by" in said) == (bool(header) or separator != ",")


def test_csv_ids_with_other_separators_in_them(tmp_path: Path) -> None:
    data = csv_of(tmp_path, 'a;b,x\n"c\td",y::z\n')
    assert data.user_ids.tolist() == ["a;b", "c\td"] and data.item_ids.tolist() == ["x", "y::z"]
    quoted = csv_of(tmp_path, '"Doe; J","a;b"\n"Roe; R","c;d"\n')
    assert quoted.user_ids.tolist() == ["Doe; J", "Roe; R"]
    semicolons = csv_of(tmp_path, 'userId;movieId;rating\n"Doe, J";"x;y";4\nRoe;z;5\n')
    assert semicolons.user_ids.tolist() == ["Doe, J", "Roe"] and semicolons.item_ids.tolist() == ["x;y", "z"]


def test_csv_implicit(tmp_path: Path) -> None:
    for content in ("a,x\na,y\nb,x\n", "a,x,5\na,y,5\nb,x,5\n", "user,item\na,x\na,y\nb,x\n", "\ufeffuser,item\na,x\na,y\nb,x\n"):
        data = csv_of(tmp_path, content)
        assert not data.explicit and not data.has_time and data.rating.tolist() == [1, 1, 1] and not data.time.any()
        assert data.user_ids.tolist() == ["a", "b"]


def test_csv_repeats_keep_the_latest(tmp_path: Path) -> None:
    data = csv_of(tmp_path, "a,x,1,5\na,x,2,9\na,x,3,9\na,x,4,1\nb,x,5,1\n")
    assert data.rating.tolist() == [3, 5] and data.merged_rows == 3


def test_csv_quoted_ids_and_fractions_of_seconds(tmp_path: Path) -> None:
    data = csv_of(tmp_path, 'user,item,time\n"Doe, J","a ""b""\nc",10.9\nNA,nan,-3\n')
    assert data.user_ids.tolist() == ["Doe, J", "NA"] and data.item_ids.tolist() == ['a "b"\nc', "nan"]
    assert data.time.tolist() == [10, -3]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("user,item,rating\n\na,x,1\n\na,y,2\nb,x,3\nb,y,abc\n", "ratings.csv:7: rating 'abc' is not a number; ratings are"),
        ("a,x,1\na,y,\n", "ratings.csv:2: rating '' is not a number"),
        ('user,item,rating\n"a\nb",x,1\nc,x,bad\n', "ratings.csv:4: rating 'bad'"),
        ("a,x,1\na,y,nan\n", "ratings.csv:2: rating 'nan' is not a finite number"),
        ("a,x,1\na,y,-inf\n", "ratings.csv:2: rating '-inf' is not a finite number"),
        ("a,x,1\na,y,1e39\n", "ratings.csv:2: rating '1e39' is not a finite number"),
        ("a,x,1,1\na,y,1,noon\n", "ratings.csv:2: time 'noon' is not a number; times are whole seconds"),
        ("a,x,1,1\na,y,1,0x10\n", "ratings.csv:2: time '0x10' is not a number"),
        ("a,x,1,1\na,y,1,inf\n", "ratings.csv:2: time 'inf' is not a"),
        ("a,x,1,1\na,y,1,99999999999999999999\n", "ratings.csv:2: time '99999999999999999999' is out of range"),
        ("a,x,1\r\na,y\r\n", "ratings.csv:2: 2 columns where 3 belong (user,item,rating)"),
        ("a,x\n\na,y,3\n", "ratings.csv:3: 3 columns where 2 belong (user,item)"),
        ("a\nb\n", "ratings.csv:1: 1 columns; rows are user,item"),
        ("a,b,c,d,e\n", "ratings.csv:1: 5 columns; rows are user,item"),
        ("who,what,rating\n1,2,3\n", "ratings.csv:1: rating 'rating' is not a number; ratings are numbers such as 4.5 (a header"),
        ("userId,thing,rating\n1,2,3\n", "ratings.csv:1: the header names user and rating and no item; call its column item"),
        ("user,item,genre\na,x,1\n", "ratings.csv:1: column 'genre' is not known"),
        ("item,movieId,user\na,x,1\n", "ratings.csv:1: column 'item' stands there twice"),
        ("user;item;rating\na;x;3,5\n", "ratings.csv:2: rating '3,5' is not a number; ratings are numbers such as 4.5"),
        ("1;2;3,5\n1;3;4,0\n", "ratings.csv:1: 2 columns by the comma, 3 by the ;; name them in a first line"),
        ("1\t2\t3\n1\t2\n", "ratings.csv:2: 2 columns where 3 belong (user,item,rating)"),
        ("1::2::3\n1\t2::3\n", "ratings.csv:2: a tab in a file whose cells are separated by ::"),
        ("user,item,user\na,x,1\n", "ratings.csv:1: column 'user' stands there twice"),
        ("user,item\n", "ratings.csv has a header and no rows"),
        ("user,item", "ratings.csv has a header and no rows"),
        ("a,x\n,y\n", "ratings.csv:2: user is empty"),
        ("a,x\nb," + "y" * 2000, "ratings.csv:2: item has 2000 characters"),
        ("a,x\nb," + "y" * 200_000, "ratings.csv:2: "),
        ('a,x\n"b,y\n', "ratings.csv:2: "),
        ("", "ratings.csv is empty"),
        ("\n \n", "ratings.csv is empty"),
        (b"a,x\nb,\xff\n", "ratings.csv:2: byte 0xff is not UTF-8"),
    ],
)
def test_csv_errors_say_where(content: str | bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        csv_of(tmp_path, content)
    assert "\n" not in str(caught.value)


def test_csv_paths_that_are_no_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is a folder"):
        load_csv(tmp_path, OPTIONS)
    with pytest.raises(DataError, match="no such file"):
        load_csv(tmp_path / "none.csv", OPTIONS)
    with pytest.raises(DataError, match="is a device"):
        load_csv(Path("/dev/null"), OPTIONS)
    with pytest.raises(DataError, match="cannot be read"):
        load_csv(tmp_path / ("x" * 5000), OPTIONS)
    with pytest.raises(DataError):
        load_csv(Path("a\0b.csv"), OPTIONS)


IDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
ROW = st.tuples(IDS, IDS, st.floats(-1e6, 1e6, width=32), st.integers(-(2**63), 2**63 - 1))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ROW, min_size=1, max_size=20, unique_by=lambda row: row[:2]), st.sampled_from(["\n", "\r\n", "\r"]))
def test_csv_round_trip(tmp_path: Path, rows: list[tuple[str, str, float, int]], line_end: str) -> None:
    buffer = io.StringIO()
    # the writer leaves a bare \r or \n unquoted that is not its own line end
    breaks = any(mark in name for row in rows for name in row[:2] for mark in "\r\n")
    writer = csv.writer(buffer, lineterminator=line_end, quoting=csv.QUOTE_ALL if breaks else csv.QUOTE_MINIMAL)
    writer.writerow(("user", "item", "rating", "time"))
    writer.writerows(rows)
    data = csv_of(tmp_path, buffer.getvalue())
    users, items = data.user_ids[data.user], data.item_ids[data.item]
    assert list(zip(users, items, data.time.tolist(), strict=True)) == [(user, item, time) for user, item, _, time in rows]
    ratings = np.array([row[2] for row in rows], np.float32)
    assert data.rating.tolist() == (ratings if data.explicit else np.ones_like(ratings)).tolist()
    assert data.explicit == (len(set(ratings.tolist())) > 1)


CELLS = st.text(st.sampled_from('ab1.,"\n\r \0é_-eninf'), max_size=40)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(st.one_of(st.binary(max_size=60), CELLS.map(str.encode), CELLS.map(lambda text: b"user,item,rating\n" + text.encode())))
def test_csv_of_any_bytes(tmp_path: Path, content: bytes) -> None:
    try:
        data = csv_of(tmp_path, content)
    except DataError as error:
        assert "ratings.csv" in str(error) and len(str(error).splitlines()) == 1
    else:
        assert len(data.user) > 0 and np.isfinite(data.rating).all()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100)
@given(st.lists(st.text(st.sampled_from("ab01.,e-+ x"), max_size=8), max_size=6).map("\n".join))
def test_csv_fast_and_exact_readings_agree(tmp_path: Path, text: str) -> None:
    """A quoted row at the end forces the exact reader; the rest must read the same."""
    content = "a,b,1\n" + text + "\n"

    def reading(content: str) -> list[tuple] | str:
        try:
            data = csv_of(tmp_path, content)
        except DataError as error:
            return str(error)
        return list(zip(data.user_ids[data.user], data.item_ids[data.item], data.rating.tolist(), strict=True))

    fast, exact = reading(content + "z,z,2\n"), reading(content + '"z",z,2\n')
    assert fast == exact
