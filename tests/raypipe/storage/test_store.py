from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raypipe.commands import store as command
from raypipe.errors import ConfigError
from raypipe.storage.cache import Cache
from raypipe.storage.store import DamagedError, Store

ABOUT = {"stage": "train", "user": "ada", "host": "node1"}
PARTS = [(("rows",), b"{}"), (("model", "train"), b"weights" * 100)]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"))


def files(store: Store, folder: str) -> list[Path]:
    return [path for path in Path(store.shown, folder).rglob("*") if path.is_file()]


def read_all(store: Store, fingerprint: str) -> None:
    entry = store.get(fingerprint)
    assert entry is not None
    for _ in store.contents(entry):
        pass


def test_an_entry_is_read_as_it_was_stored(store: Store):
    assert store.get("f" * 32) is None
    store.put("f" * 32, ABOUT, PARTS)
    entry = store.get("f" * 32)
    assert entry is not None
    assert entry.about == ABOUT
    assert [(part.place, content) for part, content in store.contents(entry)] == PARTS
    assert entry.size == sum(len(content) for _, content in PARTS)


def test_equal_parts_are_stored_once(store: Store):
    store.put("a" * 32, ABOUT, PARTS)
    store.put("b" * 32, ABOUT, PARTS)
    assert len(files(store, "blobs")) == len(PARTS)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_any_damage_is_found(store: Store, data: st.DataObject):
    store.put("c" * 32, ABOUT, PARTS)
    path = data.draw(st.sampled_from(sorted(files(store, "blobs") + files(store, "entries"))))
    content = path.read_bytes()
    kind = data.draw(st.sampled_from(["flip", "cut", "empty"]))
    place = data.draw(st.integers(0, len(content) - 1))
    flipped = bytearray(content)
    flipped[place] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes({"flip": bytes(flipped), "cut": content[:place], "empty": b""}[kind])
    with pytest.raises(DamagedError):
        read_all(store, "c" * 32)
    assert len(list(store.damages())) == 1
    store.discard("c" * 32)
    assert store.get("c" * 32) is None
    store.put("c" * 32, ABOUT, PARTS)
    assert not list(store.damages())


def test_rows_are_shared_and_a_damaged_one_is_missing(store: Store, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "first"))
    rows = {f"k{number}": {"value": number / 7} for number in range(30)}
    with Cache("values", store=store, code="1") as cache:
        cache.put(rows)
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "second"))
    with Cache("values", store=store, code="1") as cache:
        assert cache.get([*rows, "other"]) == rows
    with Cache("values", store=None) as cache:  # they are in the user's cache now
        assert cache.get(rows) == rows
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "third"))
    with Cache("values", store=store, code="2") as cache:
        assert cache.get(rows) == {}
    with Cache("values", enabled=False, store=store, code="1") as cache:
        assert cache.get(rows) == {}
    damaged = files(store, "rows")[0]
    damaged.write_bytes(damaged.read_bytes().replace(b'"value"', b'"vaIue"'))
    assert len(store.get_rows("values-1", rows)) == 29


def test_prune_keeps_what_is_young_or_referred_to(store: Store):
    store.put("a" * 32, ABOUT, PARTS)
    store.put_rows("values", {"k": {"value": 1.0}})
    assert store.prune(timedelta(days=1)) == (0, 0, 0)
    entry = store.get("a" * 32)
    assert entry is not None
    assert len(list(store.contents(entry))) == 2
    old = time.time() - 3 * 86400
    for path in files(store, "rows") + files(store, "blobs"):
        os.utime(path, (old, old))
    assert store.prune(timedelta(days=2)) == (0, 1, 0)  # the entry itself is young
    assert store.prune(timedelta(0)) == (1, 0, entry.size)
    assert not files(store, "blobs")


def test_commands_list_and_verify(store: Store, monkeypatch):
    store.put("a" * 32, ABOUT, PARTS)
    monkeypatch.setenv("RAYPIPE_STORE", store.shown)
    (row,) = command.entries(None).to_dict("records")
    assert (row["stage"], row["user"]) == ("train", "ada")
    assert command.verify(None)[1]
    files(store, "blobs")[0].write_bytes(b"other")
    text, whole = command.verify(store.shown)
    assert not whole
    assert "1 damaged" in text
    assert "removed 0 entries" in command.prune(None, "30d")


def test_wrong_locations_and_ages_are_refused(store: Store, tmp_path: Path, monkeypatch):
    monkeypatch.delenv("RAYPIPE_STORE", raising=False)
    with pytest.raises(ConfigError, match="no store: give its location"):
        command.entries(None)
    with pytest.raises(ConfigError, match="nothing is stored there"):
        command.entries(str(tmp_path / "empty"))
    assert not (tmp_path / "empty").exists()
    with pytest.raises(ConfigError, match="store ftp://x"):
        Store("ftp://x/y")
    store.put("a" * 32, ABOUT, PARTS)
    with pytest.raises(ConfigError, match="--older-than soon"):
        command.prune(store.shown, "soon")
