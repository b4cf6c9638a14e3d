from __future__ import annotations

from multiprocessing import get_context
from pathlib import Path

import pytest

from raypipe.store.cache import Cache


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "new" / "cache"))
    return tmp_path / "new" / "cache"


def test_rows_are_found_again_and_the_newest_counts(folder):
    with Cache("values") as cache:
        assert cache.get(["a"]) == {}
        cache.put({"a": {"value": 0.1 + 0.2}, "b": {"value": 1e44}})
        cache.put({"b": {"value": -1e44}})
    with Cache("values") as cache:
        assert cache.get(["b", "a", "c"]) == {"b": {"value": -1e44}, "a": {"value": 0.1 + 0.2}}
    with Cache("others") as cache:
        assert cache.get(["a"]) == {}
    assert sorted(path.name for path in folder.iterdir()) == ["others.sqlite", "values.sqlite"]


def test_it_lies_in_the_users_cache_unless_told(tmp_path, monkeypatch):
    monkeypatch.delenv("RAYPIPE_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    for caches, place in (("", ".cache/raypipe"), (str(tmp_path / "own"), "own/raypipe")):
        monkeypatch.setenv("XDG_CACHE_HOME", caches)
        assert Cache.directory() == tmp_path / place


def test_one_that_is_not_used_touches_nothing(folder):
    with Cache("values", enabled=False) as cache:
        cache.put({"a": {"value": 1.0}})
        assert cache.get(["a"]) == {}
    assert not folder.exists()


@pytest.mark.parametrize("content", [None, b"other" * 99, b"SQLite format 3\0" + b"x" * 4096])
def test_a_file_that_cannot_be_used_is_reported_once_and_left_alone(folder, content, caplog):
    """None: not even the folder can be created."""
    file = folder if content is None else folder / "values.sqlite"
    file.parent.mkdir(parents=True)
    file.write_bytes(content or b"")
    with Cache("values") as cache:
        cache.put({"a": {"value": 1.0}})
        assert cache.get(["a"]) == {}
    assert file.read_bytes() == (content or b"")
    assert len(caplog.records) == 1
    assert "values.sqlite" in caplog.text


def _fill(name: str) -> None:
    with Cache("values") as cache:
        for i in range(30):
            cache.put({f"{name}/{i}": {"value": i}})


def test_several_processes_write_at_once(folder):
    with get_context("fork").Pool(2) as pool:
        pool.map(_fill, "ab", chunksize=1)
    keys = [f"{name}/{i}" for name in "ab" for i in range(30)]
    with Cache("values") as cache:
        assert list(cache.get(keys)) == keys
