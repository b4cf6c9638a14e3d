"""``raypipe submit``: run an experiment as a job of a Ray cluster."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from raypipe import faults, hardware
from raypipe.commands.cluster import shared_location
from raypipe.commands.configuration import read, resolve
from raypipe.commands.time_budget import TimeBudget
from raypipe.config.shipped import file_of
from raypipe.errors import ConfigError
from raypipe.store.run_directory import RunDirectory


def submit(
    config: str,
    overrides: Sequence[str],
    address: str,
    run_dir: str,
    words: Sequence[str],
    shown: str,
    *,
    profile: str,
    time_budget: str | None,
    follow: bool,
) -> int:
    """Submit a command, by its words, as a job; return its exit status, 0 if it is not followed.

    ``shown`` is the command without secrets.

    Raises:
        ConfigError: a mistake; nothing was sent.

    """
    document = read(config)
    TimeBudget(time_budget)  # its form
    # mistakes show before anything is sent; the hardware there may select another profile
    resolve(document, overrides, profile, [hardware.detect()])
    path, file = Path(config), file_of(config)
    shipped = file != path and file.is_absolute()  # the nodes have it, too
    if not shipped and (path.is_absolute() or not path.resolve().is_relative_to(Path.cwd())):
        raise ConfigError(
            f"{config}: lies outside of this directory, of which the job gets a copy; "
            "name a file in it by its relative path"
        )
    shared_location(run_dir)
    if shlex.join(words) != shown:
        raise ConfigError(
            f"--run-dir {RunDirectory(run_dir).shown}: the command of a job is shown on the "
            "dashboard: leave the credentials out, and give them to the cluster's nodes "
            "(AWS_ACCESS_KEY_ID, ...)"
        )
    from raypipe.launch.submit import submit as submit_job

    passed = {name: value for name in (faults.VARIABLE,) if (value := os.environ.get(name))}

    def say(text: str) -> None:
        print(text, flush=True)

    return submit_job(address, words, passed, say, follow=follow)
