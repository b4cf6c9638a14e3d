"""Cache of results across run directories, keyed by the fingerprint of what decides them.

There is one SQLite file per kind of result, in the cache directory. A run's ledger is the record;
the cache only saves computation, so damage to it costs time and nothing else.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from raypipe.errors import ConfigError
from raypipe.store.ledger import Row, decode, encode

log = logging.getLogger(__name__)

_WAIT_S = 30.0
_SCHEMA = "CREATE TABLE IF NOT EXISTS lines (key TEXT PRIMARY KEY, line BLOB)"


class Cache:
    """Cached rows of one kind, for one thread; several processes may use the file at once.

    If the file cannot be opened, read or written, a warning is shown once and the cache is
    disabled. A damaged row counts as missing.

    Args:
        name: the kind of result, part of the file's name.
        enabled: whether to use the cache.

    """

    def __init__(self, name: str, *, enabled: bool = True) -> None:
        self._path = self.directory() / f"{name}.sqlite"
        self._database: sqlite3.Connection | None = None
        if not enabled:
            return
        with self._giving_up():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(self._path, timeout=_WAIT_S, isolation_level=None)
            self._database.execute("PRAGMA synchronous = OFF")  # a loss costs time only
            self._database.execute(_SCHEMA)

    @staticmethod
    def directory() -> Path:
        """Return ``$RAYPIPE_CACHE``, else ``raypipe`` in the user's cache. It can be rebuilt.

        Raises:
            ConfigError: there is no such user.

        """
        chosen = os.environ.get("RAYPIPE_CACHE")
        caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        place = Path(chosen or f"{caches}/raypipe")
        try:
            return place.expanduser()
        except RuntimeError as error:
            raise ConfigError(
                f"{place}: cannot be the cache; set RAYPIPE_CACHE to a folder: {error}"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._database is not None:
            self._database.close()

    def get(self, keys: Iterable[str]) -> dict[str, Row]:
        """Return the cached rows among these keys."""
        found: dict[str, Row] = {}
        if self._database is None:
            return found
        select = "SELECT line FROM lines WHERE key = ?"
        with self._giving_up():
            for key in keys:
                for (line,) in self._database.execute(select, (key,)):
                    if (entry := decode(line)) is not None and entry[1] == [key]:
                        (found[key],) = json.loads(entry[2])
        return found

    def put(self, rows: Mapping[str, Row]) -> None:
        """Store rows by their keys."""
        if self._database is None or not rows:
            return
        texts = {key: json.dumps([row]).encode() for key, row in rows.items()}
        lines = [(key, *encode([("", [key], text)])) for key, text in texts.items()]
        with self._giving_up():
            self._database.execute("BEGIN IMMEDIATE")
            with self._database:
                self._database.executemany("INSERT OR REPLACE INTO lines VALUES (?, ?)", lines)

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Disable the cache after an error."""
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            log.warning("%s: not used, delete it if it is damaged: %s", self._path, error)
            if self._database is not None:
                self._database.close()
            self._database = None
