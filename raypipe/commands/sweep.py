"""``raypipe sweep``: run the sweep of a configuration alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from raypipe.commands.request import Request
from raypipe.commands.run import run
from raypipe.errors import ConfigError
from raypipe.sweep.stage import NAME as SWEEP


def sweep(request: Request) -> int:
    """Run the sweep, print what it recommends, and write it if ``--write`` asks for it.

    Raises:
        ConfigError: ``--write`` names a file that exists.

    """
    if request.write is not None and Path(request.write).exists():
        raise ConfigError(f"--write {request.write}: exists already; choose another name")
    return run(replace(request, only=[SWEEP]))
