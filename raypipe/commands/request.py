"""Arguments of a command, and the command line that resumes its run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from raypipe.config.document import Document
from raypipe.config.overrides import hidden_override
from raypipe.errors import ConfigError
from raypipe.redaction import without_credentials
from raypipe.store.run_directory import RunDirectory

RUNS = "RAYPIPE_RUNS"


@dataclass(frozen=True)
class Request:
    """The arguments of a command.

    Args:
        command: its name.
        path: the configuration file, or the function of ``raypipe map``.
        overrides: ``dotted.key=value``.
        run_dir: the location of the run directory.
        profile: the name of a profile, or ``auto``.
        only: the stages to run.
        address: a Ray cluster.
        write: the file for a recommended configuration.
        strict_code: whether changed source code is refused.
        yes: whether many points are confirmed.
        time_budget: the time that the command may take.
        document: the configuration, if it is not a file.
        options: further words of the command line.
        keep_cluster: whether Ray goes on after the command, for the next one of this process.

    """

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
    document: Document | None = None
    options: Sequence[str] = ()
    keep_cluster: bool = False
    local: bool = False

    def again(self, run_dir: RunDirectory) -> str:
        """Return the command that continues in a run directory, without secrets.

        Of a function that only this process has, it is the call.
        """
        if self.document is not None and self.document.loaded is not None:
            name = self.document.function.rpartition(":")[2]
            return f"rp.map({name}, ..., run_dir={run_dir.shown!r})"
        shown = replace(self, overrides=[hidden_override(text) for text in self.overrides])
        return without_credentials(shlex.join(shown.words(run_dir)))

    def words(self, run_dir: RunDirectory) -> list[str]:
        """Return the command, word by word."""
        path = self.path or run_dir.config
        parts = ["raypipe", self.command, path, *self.overrides, *self.options]
        parts += ["--run-dir", run_dir.location]
        if self.profile != "auto":
            parts += ["--profile", self.profile]
        for name in self.only if self.command == "run" else ():
            parts += ["--only", name]
        if self.address is not None:
            parts += ["--address", self.address]
        if self.local:
            parts.append("--local")
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
