"""Arguments of a command, and the command line that resumes its run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from raypipe.config.overrides import hidden_override
from raypipe.errors import ConfigError
from raypipe.redaction import without_credentials
from raypipe.storage.run_directory import RunDirectory

RUNS = "RAYPIPE_RUNS"


@dataclass(frozen=True)
class Request:
    """The arguments of a command."""

    command: str
    path: str
    overrides: Sequence[str] = ()
    run_dir: str | None = None
    profile: str = "auto"
    only: Sequence[str] = ()
    address: str | None = None
    write: str | None = None
    strict_code: bool = False
    yes: bool = False
    time_budget: str | None = None

    def again(self, run_dir: RunDirectory) -> str:
        """Return the command that continues in a run directory, without secrets."""
        shown = replace(self, overrides=[hidden_override(text) for text in self.overrides])
        return without_credentials(shlex.join(shown.words(run_dir)))

    def words(self, run_dir: RunDirectory) -> list[str]:
        """Return the command, word by word."""
        parts = ["raypipe", self.command, self.path, *self.overrides]
        parts += ["--run-dir", run_dir.location]
        if self.profile != "auto":
            parts += ["--profile", self.profile]
        for name in self.only if self.command == "run" else ():
            parts += ["--only", name]
        if self.address is not None:
            parts += ["--address", self.address]
        if self.strict_code:
            parts.append("--strict-code")
        if self.yes:
            parts.append("--yes")
        if self.time_budget is not None:
            parts += ["--time-budget", self.time_budget]
        return parts


def shared_location(location: str | None) -> str:
    """Return a location that means the same on every node. Raises ConfigError."""
    if location is None or not ("://" in location or Path(location).is_absolute()):
        raise ConfigError(
            "in a Ray job the working directory is a temporary copy: give --run-dir, or set "
            f"{RUNS}, as an absolute path on shared storage or as a URI"
        )
    return location
