"""A stage's context without Ray, and run directories on both kinds of file systems."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyarrow import fs as arrow_fs

from raypipe.experiment import Stage, Unit
from raypipe.launch.inline import InlineLauncher
from raypipe.ledger import Ledger
from raypipe.paths import RunDirectory
from raypipe.progress import Display
from raypipe.runner import Session, StageContext
from raypipe.tracking import Target, Trackers


@pytest.fixture(params=["local", "remote"])
def anywhere(request: pytest.FixtureRequest, tmp_path: Path) -> RunDirectory:
    """A run directory, also on a file system that is not local, as object storage is."""
    if request.param == "local":
        return RunDirectory.at(tmp_path / "run")
    run = RunDirectory("bucket://run")
    filesystem = arrow_fs.SubTreeFileSystem(str(tmp_path), arrow_fs.LocalFileSystem())
    run.__dict__["_opened"] = (filesystem, "remote")
    return run


@pytest.fixture
def context(tmp_path: Path) -> StageContext:
    """The context of a stage in this process."""
    run = RunDirectory.at(tmp_path / "run")
    trackers = Trackers((), Target(run, "r", "teleclass", {}))
    session = Session(run, "r", Ledger(run), InlineLauncher(), Display(), [], trackers)
    return StageContext(Stage("stage", lambda context: None, [Unit("stage", {})]), session)
