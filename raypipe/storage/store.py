"""Shared store of results: what a stage computed, by its fingerprint, for all run directories.

A store is a folder that several users mount, or a URI (``s3://``, ``gs://``)::

    entries/<ab>/<fingerprint>.json     a manifest: provenance, and the parts with their checksums
    blobs/<ab>/<sha256>                 the content of a part, named by its checksum
    rows/<kind>/<ab>/<key>.json         a single row, such as the value of an evaluation

Every file is written whole. Writers of the same result write the same blobs; a manifest is written
after its blobs. So concurrent writers need no lock.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from threading import Lock
from typing import Any

import pyarrow as pa
from pyarrow import fs as arrow_fs

from raypipe.errors import ConfigError
from raypipe.storage.ledger import Row
from raypipe.storage.run_directory import RunDirectory

log = logging.getLogger(__name__)

#: environment variable that names the store
VARIABLE = "RAYPIPE_STORE"
_VERSION = 1
#: blobs of a writer that has not written its manifest yet are younger
_UNREFERENCED = timedelta(hours=24)
_THREADS = 16

#: what a damaged or unreadable file raises
_ERRORS = (OSError, ValueError, KeyError, TypeError, RecursionError, pa.ArrowException)


class DamagedError(ValueError):
    """A file of the store does not have the content that it was written with."""


@dataclass(frozen=True)
class Part:
    """A part of an entry: what it is, such as a file's place in a run directory, and its blob."""

    place: tuple[str, ...]
    sha256: str
    size: int


@dataclass(frozen=True)
class Entry:
    """Results of a stage: its name and provenance, and its parts.

    ``about`` holds the experiment, the stage, and who computed it, where, when and from which code.
    """

    fingerprint: str
    about: Mapping[str, Any]
    parts: tuple[Part, ...]
    stored_at: str

    @property
    def size(self) -> int:
        """The bytes of all parts."""
        return sum(part.size for part in self.parts)


class Store:
    """A store at a path or URI.

    Args:
        location: the path or URI.

    Raises:
        ConfigError: the location cannot be opened.

    """

    def __init__(self, location: str) -> None:
        try:
            self._files = RunDirectory.at(location)
            self._files.list(self._files.path("entries"))
        except ConfigError as error:
            raise ConfigError(str(error).replace("--run-dir", "store")) from None
        except (OSError, ValueError, pa.ArrowException) as error:
            raise ConfigError(
                f"store {self._files.shown}: cannot be read: {error}; correct `store` or {VARIABLE}"
            ) from None
        self._lock = Lock()
        self._failed = False

    @property
    def shown(self) -> str:
        """The location without credentials."""
        return self._files.shown

    @property
    def exists(self) -> bool:
        """Whether anything was stored at the location."""
        files = self._files
        return any(files.exists(files.path(folder)) for folder in ("entries", "rows"))

    def put(
        self,
        fingerprint: str,
        about: Mapping[str, Any],
        parts: Iterable[tuple[tuple[str, ...], bytes]],
    ) -> None:
        """Store an entry. An error is shown once, and nothing more is stored then."""
        if self._failed:
            return
        try:
            kept = []
            for place, content in parts:
                digest = _digest(content)
                if not self._files.exists(self._blob(digest)):
                    self._files.write(self._blob(digest), content)
                kept.append({"place": place, "sha256": digest, "size": len(content)})
            manifest = {
                "version": _VERSION,
                "fingerprint": fingerprint,
                "about": dict(about),
                "parts": kept,
                "stored_at": datetime.now(UTC).isoformat(),
            }
            self._files.write(self._entry(fingerprint), _sealed(manifest))
        except _ERRORS as error:
            self._give_up(error)

    def get(self, fingerprint: str) -> Entry | None:
        """Return an entry, or None. Raises DamagedError if its manifest is damaged."""
        try:
            content = self._files.read(self._entry(fingerprint))
        except FileNotFoundError:
            return None
        except _ERRORS as error:
            self._give_up(error)
            return None
        return _entry(content, fingerprint)

    def contents(self, entry: Entry) -> Iterator[tuple[Part, bytes]]:
        """Yield the parts of an entry with their content.

        Raises:
            DamagedError: a part is missing, or has another checksum.

        """
        for part in entry.parts:
            try:
                content = self._files.read(self._blob(part.sha256))
            except _ERRORS as error:
                raise DamagedError(f"{'/'.join(part.place)}: cannot be read: {error}") from error
            if _digest(content) != part.sha256:
                raise DamagedError(f"{'/'.join(part.place)}: has another checksum")
            yield part, content

    def discard(self, fingerprint: str) -> None:
        """Remove an entry, and its parts that are damaged."""
        try:
            entry = self.get(fingerprint)
        except DamagedError:
            entry = None
        try:
            for part in entry.parts if entry is not None else ():
                if not self._is_whole(part):
                    self._files.delete(self._blob(part.sha256))
            self._files.delete(self._entry(fingerprint))
        except _ERRORS as error:
            self._give_up(error)

    def get_rows(self, kind: str, keys: Iterable[str]) -> dict[str, Row]:
        """Return the stored rows among these keys; a damaged row counts as missing."""
        if self._failed:
            return {}
        wanted = list(keys)
        if len(wanted) > 1:
            with ThreadPoolExecutor(_THREADS) as threads:
                rows = list(threads.map(lambda key: self._row(kind, key), wanted))
        else:
            rows = [self._row(kind, key) for key in wanted]
        return {key: row for key, row in zip(wanted, rows, strict=True) if row is not None}

    def put_rows(self, kind: str, rows: Mapping[str, Row]) -> None:
        """Store rows by their keys. An error is shown once, and nothing more is stored then."""
        for key, row in rows.items():
            if self._failed:
                return
            try:
                content = _sealed({"version": _VERSION, "key": key, "row": row})
                self._files.write(self._row_path(kind, key), content)
            except _ERRORS as error:
                self._give_up(error)

    def entries(self) -> Iterator[tuple[str, Entry | DamagedError]]:
        """Yield the fingerprint of every entry, with the entry or what is wrong with it."""
        for path in self._walk("entries"):
            fingerprint = path.rpartition("/")[2].removesuffix(".json")
            try:
                entry = self.get(fingerprint)
            except DamagedError as error:
                yield fingerprint, error
            else:
                if entry is not None:  # else removed since it was listed
                    yield fingerprint, entry

    def count_rows(self) -> int:
        """Return the number of single rows."""
        return sum(1 for _ in self._walk("rows"))

    def damages(self) -> Iterator[tuple[str, str]]:
        """Read everything; yield each damaged entry or row and what is wrong with it."""
        for fingerprint, entry in self.entries():
            try:
                if isinstance(entry, DamagedError):
                    raise entry
                for _ in self.contents(entry):
                    pass
            except DamagedError as error:
                yield fingerprint, str(error)
        for path in self._walk("rows"):
            try:
                _opened(self._files.read(path))
            except FileNotFoundError:
                continue
            except _ERRORS as error:
                yield "/".join(path.split("/")[-3:]), str(error)

    def prune(self, older_than: timedelta) -> tuple[int, int, int]:
        """Remove entries and rows that were stored before, and blobs that no entry refers to.

        Returns:
            the number of entries, of rows, and the bytes of blobs that were removed.

        """
        now = datetime.now(UTC)
        referenced: set[str] = set()
        entries = rows = freed = 0
        for fingerprint, entry in self.entries():
            if isinstance(entry, DamagedError) or _age(entry, now) > older_than:
                self._files.delete(self._entry(fingerprint))
                entries += 1
            else:
                referenced.update(part.sha256 for part in entry.parts)
        for path, written, _ in self._walk_infos("rows"):
            if now - written > older_than:
                self._files.delete(path)
                rows += 1
        for path, written, size in self._walk_infos("blobs"):
            name = path.rpartition("/")[2]
            if name not in referenced and now - written > min(_UNREFERENCED, older_than):
                self._files.delete(path)
                freed += size
        return entries, rows, freed

    def _row(self, kind: str, key: str) -> Row | None:
        path = self._row_path(kind, key)
        try:
            stored = _opened(self._files.read(path))
            return stored["row"] if stored["key"] == key else None
        except FileNotFoundError:
            return None
        except DamagedError as error:
            log.warning("store %s: %s: %s; computed again", self.shown, path, error)
        except _ERRORS as error:
            self._give_up(error)
        return None

    def _is_whole(self, part: Part) -> bool:
        try:
            return _digest(self._files.read(self._blob(part.sha256))) == part.sha256
        except _ERRORS:
            return False

    def _walk(self, folder: str) -> Iterator[str]:
        for path, _, _ in self._walk_infos(folder):
            yield path

    def _walk_infos(self, folder: str) -> Iterator[tuple[str, datetime, int]]:
        files = self._files
        for info in files.infos(files.path(folder), recursive=True):
            if info.type == arrow_fs.FileType.File and not info.base_name.endswith(".tmp"):
                yield info.path, info.mtime, info.size

    def _entry(self, fingerprint: str) -> str:
        return self._files.path("entries", fingerprint[:2], f"{fingerprint}.json")

    def _blob(self, digest: str) -> str:
        return self._files.path("blobs", digest[:2], digest)

    def _row_path(self, kind: str, key: str) -> str:
        name = _digest(key.encode())[:32]
        return self._files.path("rows", kind, name[:2], f"{name}.json")

    def _give_up(self, error: Exception) -> None:
        with self._lock:
            if not self._failed:
                log.warning("store %s: not used from here on: %s", self.shown, error)
            self._failed = True


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _sealed(content: Mapping[str, Any]) -> bytes:
    """Return JSON with its checksum on a second line."""
    text = json.dumps(content, sort_keys=True).encode()
    return b"%s\n%s\n" % (text, _digest(text).encode())


def _opened(content: bytes) -> dict[str, Any]:
    """Return the content of ``_sealed``. Raises DamagedError."""
    text, _, rest = content.partition(b"\n")
    if rest != _digest(text).encode() + b"\n":
        raise DamagedError("has another checksum")
    found: dict[str, Any] = json.loads(text)
    if found["version"] != _VERSION:
        raise DamagedError(f"is of version {found['version']}, not {_VERSION}")
    return found


def _entry(content: bytes, fingerprint: str) -> Entry:
    try:
        found = _opened(content)
        if found["fingerprint"] != fingerprint:
            raise DamagedError("holds another entry")
        parts = tuple(Part(tuple(p["place"]), p["sha256"], p["size"]) for p in found["parts"])
        return Entry(fingerprint, found["about"], parts, found["stored_at"])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise DamagedError(f"its manifest is damaged: {error}") from error


def _age(entry: Entry, now: datetime) -> timedelta:
    return now - datetime.fromisoformat(entry.stored_at)
