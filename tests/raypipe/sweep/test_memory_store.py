from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from raypipe.sweep import memory_store
from raypipe.sweep.memory_model import Measurements, MemoryModel

H100 = "NVIDIA H100 80GB HBM3"
ABOUT = {"model": "medium", "precision": "bf16", "gradient_checkpointing": False}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "memory"


def the_file(folder: Path) -> Path:
    (path,) = folder.glob("*.json")
    return path


def test_what_was_saved_is_a_preset() -> None:
    model = MemoryModel(80 * 2**30)
    model.observe(2, 4 * 2**30)
    model.observe(4, 6 * 2**30)
    model.ran_out(128)
    memory_store.save(H100, "ab12", model.measured, ABOUT)
    again = MemoryModel(80 * 2**30, preset=memory_store.load(H100, "ab12"))
    assert again.fit() == model.fit()
    assert again.failed_micro_batch == 128
    assert again.measured == Measurements()


def test_devices_and_groups_are_kept_apart() -> None:
    memory_store.save("A B", "1", Measurements({1: 10}), {})
    memory_store.save("A/B", "1", Measurements({1: 20}), {})
    memory_store.save("A B", "2", Measurements({1: 30}), {})
    found = [memory_store.load(*of).peaks[1] for of in (("A B", "1"), ("A/B", "1"), ("A B", "2"))]
    assert found == [10, 20, 30]
    assert memory_store.load("cpu", "1") == Measurements()


def test_saving_merges_and_the_newest_counts() -> None:
    memory_store.save("cpu", "1", Measurements({1: 10, 2: 20, 8: 80}, frozenset({16})), ABOUT)
    memory_store.save("cpu", "1", Measurements({2: 21, 32: 320}), ABOUT)
    assert memory_store.load("cpu", "1") == Measurements({1: 10, 2: 21, 8: 80, 32: 320})
    memory_store.save("cpu", "1", Measurements({}, frozenset({8})), ABOUT)
    assert memory_store.load("cpu", "1") == Measurements({1: 10, 2: 21}, frozenset({8}))


def test_runs_that_save_at_once_lose_nothing() -> None:
    with ThreadPoolExecutor(8) as pool:
        list(
            pool.map(
                lambda size: memory_store.save("cpu", "1", Measurements({size: 10 * size}), {}),
                range(1, 33),
            )
        )
    assert memory_store.load("cpu", "1").peaks == {size: 10 * size for size in range(1, 33)}


def test_a_file_says_what_it_is_of(folder: Path) -> None:
    memory_store.save(H100, "ab12", Measurements({4: 6}, frozenset({8})), ABOUT)
    path = the_file(folder)
    assert path.name.startswith("NVIDIA-H100-80GB-HBM3-")
    content = json.loads(path.read_text())
    assert content["device"] == H100
    assert content["description"] == ABOUT
    assert content["torch"].startswith("2.")
    assert (content["peak_bytes"], content["ran_out"]) == ({"4": 6}, [8])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"device": "cpu"',
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"device": "cpu", "group": "1", "torch": "2", "description": {}, '
        b'"peak_bytes": {"0": -1}, "ran_out": []}',
    ],
)
def test_a_damaged_file_is_reported_ignored_and_replaced(
    folder: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    memory_store.save("cpu", "1", Measurements({1: 10}), {})
    path = the_file(folder)
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert memory_store.load("cpu", "1") == Measurements()
    assert str(path) in caplog.text
    memory_store.save("cpu", "1", Measurements({2: 20}), {})
    assert memory_store.load("cpu", "1") == Measurements({2: 20})


def test_an_interrupted_save_leaves_the_old_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory_store.save("cpu", "1", Measurements({1: 10}), {})
    before = the_file(folder).read_bytes()

    def full(descriptor: int) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        memory_store.save("cpu", "1", Measurements({2: 20}), {})
    assert the_file(folder).read_bytes() == before
    assert not list(folder.glob("*.tmp"))


def test_a_folder_that_cannot_be_written_costs_only_the_presets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        memory_store.save("cpu", "1", Measurements({1: 10}), {})
        assert memory_store.load("cpu", "1") == Measurements()
    assert "cannot be kept" in caplog.text


def test_the_users_cache_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAYPIPE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    memory_store.save("cpu", "1", Measurements({1: 10}), {})
    assert the_file(tmp_path / "xdg" / "raypipe" / "memory").is_file()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    memory_store.save("cpu", "1", Measurements({1: 10}), {})
    assert the_file(tmp_path / "home" / ".cache" / "raypipe" / "memory").is_file()
