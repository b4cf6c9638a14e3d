"""Summary of a run directory: what became of its newest command, without its ledger."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from raypipe.commands.declarations import about
from raypipe.errors import ConfigError
from raypipe.store import run_status
from raypipe.store.lock import is_held
from raypipe.store.run_directory import RunDirectory, is_run
from raypipe.store.run_status import RunStatus

KILLED = "its process ended without a word: it or Ray's raylet was killed, or the machine is gone"


@dataclass(frozen=True)
class Summary:
    """Outcome of a run.

    Attributes:
        run: the run directory.
        experiment: its experiment; empty if unknown.
        status: running, succeeded, failed, interrupted, or unknown without details.
        message: why it ended, if that is known.
        started_at: the start of the newest command.
        duration_s: seconds of all commands.
        ended, stages: stages that have ended, and how many there are.
        result: the result that stands for the run, in words.
        details: what the newest command wrote; None if that is missing or damaged.

    """

    run: RunDirectory
    experiment: str
    status: str
    message: str
    started_at: datetime | None
    duration_s: float | None
    ended: int
    stages: int
    result: str
    details: RunStatus | None = None

    @property
    def progress(self) -> str:
        """How far the stages are that run, or ran when the command was killed: ``fit 26/45``."""
        rows = self.details.running if self.details is not None else ()
        return ", ".join(f"{r['stage']} {r['done']}/{r['total']}" for r in rows if r["total"])

    @property
    def exit_status(self) -> int:
        """The exit status of the run's command: 0, 1 or 130."""
        return {"succeeded": 0, "interrupted": 130}.get(self.status, 1)


def opened(location: str) -> RunDirectory:
    """Return the run directory at a location. Raises ConfigError if there is none."""
    run = RunDirectory.at(location)
    run.check()
    if run.is_file:
        raise ConfigError(
            f"{run.shown}: is not a run directory: it is a file; `raypipe ls` lists run directories"
        )
    if not run.exists(run.path()):
        raise ConfigError(
            f"{run.shown}: is not a run directory: it does not exist; `raypipe ls` lists them"
        )
    if not is_run(run.list(run.path())):
        raise ConfigError(
            f"{run.shown}: is not a run directory (it has no status.json and no ledger/); "
            "`raypipe ls` lists run directories"
        )
    return run


def summary(run: RunDirectory) -> Summary:
    """Return the summary of a run directory.

    Raises:
        OSError: it cannot be read.

    """
    found = run_status.read(run)
    if found is None:  # damaged, or the first command has not written it yet
        status = "running" if is_held(run) else "unknown"
        return Summary(run, "", status, "", None, None, 0, 0, "")
    status, message, duration_s = found.status, found.message, found.duration_s
    if status == "running":
        if is_held(run):
            written = datetime.fromisoformat(found.updated_at)
            duration_s += max(0.0, (datetime.now(UTC) - written).total_seconds())
        else:
            # the command may have ended since the status was read
            found = run_status.read(run) or found
            status, message = found.status, found.message
            if status == "running":
                status, message = "interrupted", KILLED
                with suppress(ConfigError):  # what it had computed is in the tables
                    found = replace(found, key_result=about(run).key_result)
    return Summary(
        run,
        found.experiment,
        status,
        message,
        datetime.fromisoformat(found.started_at),
        duration_s,
        found.ended,
        found.stages,
        found.key_result.text if found.key_result is not None else "",
        found,
    )
