"""Cache of results across run directories, keyed by the fingerprint of what decides them.

There is one SQLite file per kind of result, in the cache directory. A run's ledger is the record;
the cache only saves computation, so damage to it costs time and nothing else.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Self

from raypipe.store.ledger import Row
from raypipe.store.run_directory import cache_directory

log = logging.getLogger(__name__)

_WAIT_S = 30.0


class Cache:
    """Cached rows of one kind, for one thread; several processes may use the file at once.

    If the file cannot be opened, read or written, a warning is shown once and the cache is
    disabled.

    Args:
        name: the kind of result, part of the file's name.
        enabled: whether to use the cache.

    """

    def __init__(self, name: str, *, enabled: bool = True) -> None:
        self._path = cache_directory() / f"{name}.sqlite"
        self._database: sqlite3.Connection | None = None
        if not enabled:
            return
        with self._giving_up():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(self._path, timeout=_WAIT_S)
            self._database.execute("PRAGMA synchronous = NORMAL")
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS rows (key TEXT PRIMARY KEY, row TEXT)"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._database is not None:
            self._database.close()

    def get(self, keys: Iterable[str]) -> dict[str, Row]:
        """Return the cached rows among these keys."""
        rows: dict[str, Row] = {}
        if self._database is not None:
            with self._giving_up():
                for key in keys:
                    select = "SELECT row FROM rows WHERE key = ?"
                    for (text,) in self._database.execute(select, (key,)):
                        rows[key] = json.loads(text)
        return rows

    def put(self, rows: Mapping[str, Row]) -> None:
        """Store rows by their keys."""
        if self._database is not None:
            entries = [(key, json.dumps(row)) for key, row in rows.items()]
            with self._giving_up(), self._database:
                self._database.executemany("INSERT OR REPLACE INTO rows VALUES (?, ?)", entries)

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Disable the cache after an error."""
        try:
            yield
        except (OSError, ValueError, sqlite3.Error) as error:
            log.warning("%s: not used, delete it if it is damaged: %s", self._path, error)
            if self._database is not None:
                self._database.close()
            self._database = None
