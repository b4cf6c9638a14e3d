from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from raypipe.store.cache import Cache


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


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


def test_one_that_is_not_used_touches_nothing(folder):
    with Cache("values", enabled=False) as cache:
        cache.put({"a": {"value": 1.0}})
        assert cache.get(["a"]) == {}
    assert not folder.exists()


@pytest.mark.parametrize("content", [None, b"other" * 99, b"SQLite format 3\0" + b"x" * 4096])
def test_a_file_that_cannot_be_used_is_reported_once_and_left_alone(folder, content, caplog):
    """None: not even the folder can be created."""
    file = folder / "values.sqlite"
    if content is None:
        file = folder
    else:
        folder.mkdir()
    file.write_bytes(content or b"")
    with Cache("values") as cache:
        cache.put({"a": {"value": 1.0}})
        assert cache.get(["a"]) == {}
    assert file.read_bytes() == (content or b"")
    assert len(caplog.records) == 1
    assert "values.sqlite" in caplog.text


def test_several_processes_write_at_once(folder):
    script = (
        "from raypipe.store.cache import Cache\n"
        "with Cache('values') as cache:\n"
        "    for i in range(100):\n"
        "        cache.put({f'{NAME}/{i}': {'value': i}})\n"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", f"NAME = {name!r}\n{script}"]) for name in "ab"
    ]
    assert [process.wait() for process in running] == [0, 0]
    keys = [f"{name}/{i}" for name in "ab" for i in range(100)]
    with Cache("values") as cache:
        assert list(cache.get(keys)) == keys
