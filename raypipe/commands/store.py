"""``raypipe store``: list, verify and prune the results that run directories share."""

from __future__ import annotations

import os
import re
from datetime import timedelta
from typing import TYPE_CHECKING

from raypipe.errors import ConfigError
from raypipe.hardware import bytes_text
from raypipe.pipeline.configuration import Configuration
from raypipe.storage.store import VARIABLE, DamagedError, Store

if TYPE_CHECKING:
    import pandas as pd

_UNITS = {"h": "hours", "d": "days", "w": "weeks"}


def store_of(configuration: Configuration) -> Store | None:
    """Return the store of a configuration or of ``RAYPIPE_STORE``; None without one.

    Raises:
        ConfigError: it cannot be read.

    """
    location = configuration.settings.store or os.environ.get(VARIABLE)
    return Store(location) if location else None


def entries(location: str | None) -> pd.DataFrame:
    """Return a row per entry: the stage, who computed it, when and where, and its size."""
    import pandas as pd

    names = ("stage", "variant", "user", "host", "computed_at", "git_commit")
    rows: list[dict[str, str | None]] = []
    for fingerprint, entry in _existing(location).entries():
        if isinstance(entry, DamagedError):
            rows.append({"entry": fingerprint, "stage": "(damaged)"})
            continue
        about: dict[str, str | None] = {name: entry.about.get(name) for name in names}
        rows.append({"entry": fingerprint, **about, "size": bytes_text(entry.size)})
    return pd.DataFrame(rows, columns=["entry", *names, "size"])


def verify(location: str | None) -> tuple[str, bool]:
    """Read everything; return what was found, and whether nothing is damaged."""
    store = _existing(location)
    damages = [f"{name}: {reason}" for name, reason in store.damages()]
    count = sum(1 for _ in store.entries())
    counted = f"{count} entries and {store.count_rows()} rows in {store.shown}"
    if not damages:
        return f"{counted}: all checksums are right", True
    advice = "damaged ones are computed again when they are needed"
    return "\n".join([*damages, f"{counted}: {len(damages)} damaged; {advice}"]), False


def prune(location: str | None, older_than: str) -> str:
    """Remove what was stored longer ago than ``older_than`` (``12h``, ``30d``, ``8w``)."""
    found = re.fullmatch(r"(\d{1,6})([hdw])", older_than)
    if found is None:
        raise ConfigError(f"--older-than {older_than}: must be such as 12h, 30d or 8w")
    age = timedelta(**{_UNITS[found[2]]: int(found[1])})
    store = _existing(location)
    removed, rows, freed = store.prune(age)
    return f"{store.shown}: removed {removed} entries, {rows} rows and {bytes_text(freed)} of files"


def _existing(location: str | None) -> Store:
    location = location or os.environ.get(VARIABLE)
    if not location:
        raise ConfigError(f"no store: give its location, or set {VARIABLE}")
    store = Store(location)
    if not store.exists:
        raise ConfigError(f"store {store.shown}: nothing is stored there; check the location")
    return store
