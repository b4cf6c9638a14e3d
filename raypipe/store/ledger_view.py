"""View of a ledger for one stage: its own variant's rows, and those of the stages it needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from raypipe.store.ledger import INTERNAL, Ledger, Row
from raypipe.store.run_directory import BASE, variant_name

_UNITS, _RUNS = "units", "runs"


class LedgerView(Ledger):
    """The rows that a stage of a variant sees; what it puts belongs to its variant.

    Variants of a run use the same keys; the underlying ledger holds them as ``key@variant``.

    Args:
        ledger: the ledger of the run.
        variant: the variant whose rows are written.
        visible: the variants whose rows are read, the stage's own among them.
        stage: the key of the stage; the tables that it writes are recorded (:func:`writes`).

    """

    def __init__(
        self, ledger: Ledger, variant: str, visible: Iterable[str] = (), stage: str = ""
    ) -> None:
        self._ledger, self._variant, self._stage = ledger, variant, stage
        self._visible = tuple(dict.fromkeys((variant, *visible)))

    def put_tables(self, tables: Mapping[str, Mapping[str, Row]]) -> None:
        """Record rows of several tables with one disk sync."""
        own = {
            table: {self._key(table, key): self._own(table, row) for key, row in rows.items()}
            for table, rows in tables.items()
        }
        written = [t for t, rows in tables.items() if self._stage and rows and t not in INTERNAL]
        if new := [table for table in written if not writes(self._ledger, self._stage, table)]:
            entries: dict[str, Row] = {_entry(self._stage, table): {} for table in new}
            own[_RUNS] = {**own.get(_RUNS, {}), **entries}
        self._ledger.put_tables(own)

    def remove(self, table: str, keys: Iterable[str]) -> None:
        """Remove rows of this variant durably; missing ones are ignored."""
        self._ledger.remove(table, [self._key(table, key) for key in keys])

    def get(self, table: str, key: str) -> Row | None:
        """Return the newest row of a key, or None; this variant's comes first."""
        for variant in self._visible if table != _UNITS else (self._variant,):
            row = self._ledger.get(table, _qualified(table, key, variant))
            if row is not None:
                return row
        return None

    def rows(self, table: str) -> list[Row]:
        """Return all visible rows of a table, in the order in which their keys first appeared."""
        return [row for row in self._ledger.rows(table) if self._sees(row)]

    def items(self, table: str) -> list[tuple[str, Row]]:
        """Return the keys of all visible rows of a table with their rows."""
        return [
            (key.removesuffix(f"@{row.get('variant', BASE)}"), row)
            for key, row in self._ledger.items(table)
            if self._sees(row)
        ]

    def count(self, table: str) -> int:
        """Return the number of visible rows of a table."""
        return len(self.rows(table))

    def tables(self) -> list[str]:
        """Return the names of the tables that have rows in any variant."""
        return self._ledger.tables()

    def _sees(self, row: Row) -> bool:
        return row.get("variant", BASE) in self._visible

    def _key(self, table: str, key: str) -> str:
        return _qualified(table, key, self._variant)

    def _own(self, table: str, row: Row) -> Row:
        if self._variant == BASE or not _has_variant(table):
            return row
        return {**row, "variant": self._variant}


def writes(ledger: Ledger, stage: str, table: str) -> bool:
    """Whether a stage, by its key, has put rows into a table."""
    return ledger.get(_RUNS, _entry(stage, table)) is not None


def _entry(stage: str, table: str) -> str:
    return f"written/{stage}/{table}"


def _has_variant(table: str) -> bool:
    return table not in INTERNAL or table == _UNITS


def _qualified(table: str, key: str, variant: str) -> str:
    return variant_name(key, variant) if _has_variant(table) else key
