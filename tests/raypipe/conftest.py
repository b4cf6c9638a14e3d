"""Puts the modules of ``examples/`` on the path, as a user's own experiment would be."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pyarrow import fs as arrow_fs

from raypipe.paths import RunDirectory

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
