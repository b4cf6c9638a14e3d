from __future__ import annotations

import errno
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from raypipe.errors import ConfigError
from raypipe.store.run_directory import RunDirectory, sync


def test_a_folder_is_listed_while_another_process_creates_and_deletes_it(anywhere, tmp_path):
    folder = Path(tmp_path, anywhere.path("a"))  # the first is ignored if the second is absolute
    folder.parent.mkdir(parents=True)
    done = threading.Event()

    def create_and_delete() -> None:
        while not done.is_set():
            folder.mkdir()
            folder.rmdir()

    with ThreadPoolExecutor(1) as threads:
        ended = threads.submit(create_and_delete)
        try:
            for _ in range(5_000):  # Arrow alone raises an error in about 8 of them
                assert anywhere.list(anywhere.path("a")) == []
        finally:
            done.set()
        ended.result()


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failing_write_leaves_the_old_content_and_nothing_else(run, monkeypatch, failing):
    path = run.path("results", "t.parquet")
    run.write(path, b"old")

    def fail(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(*((os, "fsync", fail) if failing == "fsync" else (Path, "replace", fail)))
    with pytest.raises(KeyboardInterrupt):
        run.write(path, b"new")
    assert run.read(path) == b"old"
    assert run.list(run.path("results")) == ["t.parquet"]


@pytest.mark.parametrize("code", [errno.EIO, errno.EINVAL, errno.ENOSPC])
def test_only_a_file_system_that_syncs_no_folders_may_leave_one_so(tmp_path, monkeypatch, code):
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(code, "not synced")))
    with nullcontext() if code == errno.EINVAL else pytest.raises(OSError, match="not synced"):
        sync(tmp_path)


def test_a_file_is_whole_and_outlasts_a_loss_of_power(run, monkeypatch):
    path = run.path("a", "b", "file")
    synced: list[tuple[int, bytes]] = []

    def fsync(file: int) -> None:
        synced.append((os.fstat(file).st_ino, run.read(path) if run.exists(path) else b""))

    monkeypatch.setattr(os, "fsync", fsync)
    run.write(path, b"old")
    run.write(path, b"new content")
    root = Path(run.path())
    folders = [each.stat().st_ino for each in (root.parent, root, root / "a", root / "a" / "b")]
    assert [inode for inode, _ in synced if inode in folders] == [*folders, folders[-1]]
    # still whole when the new one is on disk; that it has the name now is on disk after that
    contents = [content for _, content in synced]
    assert contents == [b"", b"", b"", b"", b"old", b"old", b"new content"]


def test_a_name_is_one_file_and_whole_up_to_200_bytes():
    run = RunDirectory("/runs/x")
    assert len({run.partition(name) for name in ("a", ".a", "a/b", "a-b", "a\0b")}) == 5
    files = [Path(RunDirectory("/runs/x", v).partition("t")).name for v in ("a=1", "base", "c=1")]
    assert files == ["a=1.parquet", "data.parquet", "c=1.parquet"]
    assert run.partition("steps", "sweep/0/a") == "/runs/x/results/steps/sweep-0-a.parquet"
    assert run.checkpoints("sweep/0") == "/runs/x/checkpoints/sweep-0"
    assert run.model("sweep/0") == "/runs/x/models/sweep-0.safetensors"
    assert run.log("ß" * 100) == f"/runs/x/logs/{'ß' * 100}.log"
    assert run.log("a" * 201) == f"/runs/x/logs/{'a' * 25}-a92efd821093.log"


def test_locations(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert RunDirectory.at("runs/../mine").location == str(tmp_path / "mine")
    assert RunDirectory.at("~/mine").location == str(tmp_path / "home" / "mine")
    assert RunDirectory.at("s3://bucket/a/").location == "s3://bucket/a"
    as_uri = RunDirectory.at(f"file://{tmp_path}/mine")
    assert as_uri.is_local
    as_uri.write(as_uri.path("x"), b"1")
    assert (tmp_path / "mine" / "x").read_bytes() == b"1"
    new = RunDirectory.new("runs/", "main")
    assert re.fullmatch(rf"{tmp_path}/runs/main/\d{{8}}-\d{{6}}-[0-9a-f]{{4}}", new.location)
    assert new != RunDirectory.new("runs", "main")


def test_a_place_that_no_path_leads_to_is_a_mistake(tmp_path, monkeypatch):
    (tmp_path / "circle").symlink_to("circle")
    wrong = "is not a valid path|cannot be read|cannot be opened"
    paths = ("~nobodyx/x", tmp_path / "circle" / "x", "a\0b")
    for place in (*paths, "nonsense://x/y", "s3:// /"):
        with pytest.raises(ConfigError, match=f"^--run-dir .*({wrong})"):
            RunDirectory.at(place).check()
    for place in ("x\udcff", "s3://key:S3cr3t@bucket/\udcff"):
        with pytest.raises(ConfigError, match=r"^--run-dir .*udcff': must be UTF-8") as caught:
            RunDirectory.at(place)
        assert "S3cr3t" not in str(caught.value)
    folder = os.fsencode(tmp_path) + b"/\xff"
    os.mkdir(folder)  # noqa: PTH102 - no text
    monkeypatch.chdir(folder)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="must be UTF-8"):
        RunDirectory.at("runs")
