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
from tests.command import forget
from tests.raypipe.examples.hills import HILL
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


@pytest.fixture(params=["run", "remote"])
def anywhere(request: pytest.FixtureRequest) -> RunDirectory:
    """A run directory on a local file system, and one on another."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory, with a cache of its own beside it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # an edit within a second is seen
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path.with_name(f"{tmp_path.name}-cache")))
    monkeypatch.delenv(commands.RUNS, raising=False)
    yield tmp_path
    forget(tmp_path)


@pytest.fixture
def work(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an experiment and its configuration; runs are in this process."""
    (folder / "toy.py").write_text(TOY)
    (folder / "toy.yaml").write_text("experiment: toy\nsquares: {numbers: [1, 2, 3]}\n")
    monkeypatch.setattr(cluster, "start", lambda *_: InlineLauncher())
    return folder


@pytest.fixture
def hill(work: Path) -> Path:
    """The hill, for matrices, searches and races, in such a folder."""
    (work / "hill.py").write_text(HILL)
    return work
