"""Stages of tests that belong to no experiment, sessions that run them, and what a run leaves."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from raypipe.config.settings import Settings
from raypipe.graph.configuration import compose
from raypipe.graph.context import Session
from raypipe.graph.experiment import Experiment, Stage
from raypipe.graph.launcher import Launcher
from raypipe.graph.progress import Display
from raypipe.graph.runner import GraphRunner
from raypipe.graph.tracking import Trackers
from raypipe.hardware import Hardware
from raypipe.launch.inline import InlineLauncher
from raypipe.store.ledger import Ledger
from raypipe.store.run_directory import RunDirectory
from raypipe.store.run_status import RunStatus

HERE = Hardware("here", 2, 2**30)
NOTHING = Experiment("nothing", 1, Settings, lambda settings: [])


def composed(stages: Sequence[Stage]) -> list[Stage]:
    return compose(NOTHING, Settings(), stages)


def run_stages(stages: Sequence[Stage], session: Session) -> str | None:
    return GraphRunner(session).run(composed(stages))


def session_in(
    folder: Path, launcher: Launcher | None = None, node: Hardware = HERE, **more: Any
) -> Session:
    """Return a session on a run directory, by default in this process."""
    run, launcher = RunDirectory.at(folder), launcher or InlineLauncher()
    none = Trackers((), run, "r", "example", {})
    return Session(run, "r", Ledger(run), launcher, Display(), [node], none, **more)


def status_of(word: str, hours: float = 0, **more: Any) -> RunStatus:
    """The status of a run of the toy experiment, written so many hours ago."""
    at = (datetime.now(UTC) - timedelta(hours=hours)).isoformat()
    known = {"experiment": "toy", "run_id": "toy-1", "command": "raypipe run toy.yaml", **more}
    return RunStatus(status=word, first_started_at=at, started_at=at, updated_at=at, **known)


def write_status(run: RunDirectory, word: str = "succeeded", **more: Any) -> None:
    """Write the status of a run."""
    run.write(run.status, status_of(word, **more).to_bytes())
