"""Puts the modules of ``examples/`` on the path, as a user's own experiment would be."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyarrow import fs as arrow_fs

from raypipe.commands import cluster
from raypipe.commands import run as commands
from raypipe.launch.inline import InlineLauncher
from raypipe.store.run_directory import RunDirectory
from tests.raypipe.toy import TOY

sys.path.insert(0, str(Path(__file__).parent / "examples"))


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run directory that does not exist yet."""
    return RunDirectory.at(tmp_path / "run")


@pytest.fixture
def remote(tmp_path: Path) -> RunDirectory:
    """A run directory on a file system that is not local, as object storage is."""
    run = RunDirectory("bucket://run")
    filesystem = arrow_fs.SubTreeFileSystem(str(tmp_path), arrow_fs.LocalFileSystem())
    run.__dict__["_opened"] = (filesystem, "remote")
    return run


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with an experiment and its configuration; runs are in this process."""
    (tmp_path / "toy.py").write_text(TOY)
    (tmp_path / "toy.yaml").write_text("experiment: toy\nsquares: {numbers: [1, 2, 3]}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(cluster, "start", lambda *_: InlineLauncher())
    monkeypatch.delenv(commands.RUNS, raising=False)
    yield tmp_path
    for name in ("toy", "toy2"):  # those of other tests lie in other folders
        sys.modules.pop(name, None)
