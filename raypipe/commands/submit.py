"""``raypipe submit``: run an experiment as a job of a Ray cluster."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from raypipe import faults, hardware
from raypipe.commands.configuration import read, resolve
from raypipe.commands.request import Request, shared_location
from raypipe.commands.time_budget import TimeBudget
from raypipe.config.shipped import file_of
from raypipe.errors import ConfigError
from raypipe.store.run_directory import RunDirectory


def submit(request: Request, address: str, *, follow: bool) -> int:
    """Submit a run as a job; return its exit status, or 0 if it is not followed."""
    document = read(request.path)
    TimeBudget(request.time_budget)  # its form
    # mistakes show before anything is sent; the hardware there may select another profile
    resolve(document, request.overrides, request.profile, [hardware.detect()])
    path, file = Path(request.path), file_of(request.path)
    shipped = file != path and file.is_absolute()  # the nodes have it, too
    if not shipped and (path.is_absolute() or not path.resolve().is_relative_to(Path.cwd())):
        raise ConfigError(
            f"{request.path}: lies outside of this directory, of which the job gets a copy; "
            "name a file in it by its relative path"
        )
    run_dir = RunDirectory(shared_location(request.run_dir))
    words = request.words(run_dir)
    if shlex.join(words) != request.again(run_dir):
        raise ConfigError(
            f"--run-dir {run_dir.shown}: the command of a job is shown on the dashboard: leave the "
            "credentials out, and give them to the cluster's nodes (AWS_ACCESS_KEY_ID, ...)"
        )
    from raypipe.launch.submit import submit as submit_job

    passed = {name: value for name in (faults.VARIABLE,) if (value := os.environ.get(name))}

    def say(text: str) -> None:
        print(text, flush=True)

    return submit_job(address, words, passed, say, follow=follow)
