"""Placement of a command: on a Ray cluster (running or new), or in this process."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

from raypipe import faults, hardware
from raypipe.commands import RUNS, stops_with_command
from raypipe.errors import ConfigError
from raypipe.hardware import Hardware
from raypipe.launch import in_cluster
from raypipe.store.cache import Cache

if TYPE_CHECKING:
    from raypipe.graph.launcher import Launcher


def attach(address: str | None, stack: ExitStack) -> Launcher | None:
    """Return the launcher of a running cluster; None on a machine without one."""
    if address is None and not in_cluster():
        return None
    from raypipe.launch.cluster import RayLauncher

    return stack.enter_context(closing(RayLauncher(address)))


def place(
    stack: ExitStack, address: str | None, *, local: bool = False
) -> tuple[Launcher | None, Sequence[Hardware]]:
    """Return the launcher of a running cluster, if there is one, and the nodes of a command.

    Raises:
        ConfigError: a variable of the environment that a run reads is wrong.

    """
    faults.from_environment()
    Cache.directory()  # a wrong name is refused before anything starts
    if local and address is not None:
        raise ConfigError("--local runs without a cluster, and --address names one; give only one")
    launcher = None if local else attach(address, stack)
    return launcher, launcher.on_every_node(hardware.detect) if launcher else [hardware.detect()]


def start(stack: ExitStack, modules: Mapping[str, str]) -> Launcher:
    """Start a Ray cluster on this machine; it stops with the command, or with the process.

    In the same process a later call uses it again, unless one of the modules of the run, given with
    the hashes of their source, has changed since.
    """
    from raypipe.launch.cluster import RayLauncher

    if not stops_with_command.get():
        return RayLauncher(modules=modules)
    return stack.enter_context(closing(RayLauncher()))


def local(stack: ExitStack) -> Launcher:
    """Return the launcher that runs everything in this process."""
    from raypipe.launch.inline import InlineLauncher

    return stack.enter_context(closing(InlineLauncher()))


def check_shared(location: str | os.PathLike[str] | None) -> None:
    """Reject a location that does not mean the same on every node. Raises ConfigError."""
    text = "" if location is None else os.fspath(location)
    if not ("://" in text or Path(text).is_absolute()):
        raise ConfigError(
            "in a Ray job the working directory is a temporary copy: give --run-dir, or set "
            f"{RUNS}, as an absolute path on shared storage or as a URI"
        )
