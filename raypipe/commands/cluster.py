"""The Ray cluster of a command: one that is running, or one that the command starts."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

from raypipe import hardware
from raypipe.commands import RUNS, stops_with_command
from raypipe.errors import ConfigError
from raypipe.hardware import Hardware
from raypipe.launch import in_cluster

if TYPE_CHECKING:
    from raypipe.graph.launcher import Launcher

#: what every process of Ray maps: a share of the memory for its object store, and its own bytes
_STORE, _LARGEST_STORE, _PROCESS = 0.3, 200 * 10**9, 3 * 2**30


def attach(address: str | None, stack: ExitStack) -> Launcher | None:
    """Return the launcher of a running cluster; None on a machine without one."""
    if address is None and not in_cluster():
        return None
    from raypipe.launch.cluster import RayLauncher

    return stack.enter_context(closing(RayLauncher(address)))


def start(stack: ExitStack, modules: Mapping[str, str]) -> Launcher:
    """Start a Ray cluster on this machine; it stops with the command, or with the process.

    In the same process a later call uses it again, unless one of the modules of the run, given with
    the hashes of their source, has changed since.
    """
    from raypipe.launch.cluster import RayLauncher

    if not stops_with_command.get():
        return RayLauncher(modules=modules)
    return stack.enter_context(closing(RayLauncher()))


def check_address_space(node: Hardware) -> None:
    """Refuse to start Ray under a limit of the address space in which its processes die.

    Raises:
        ConfigError: ``ulimit -v`` allows less than Ray maps.

    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    need = int(min(_STORE * node.memory_bytes, _LARGEST_STORE)) + _PROCESS
    if resource.RLIM_INFINITY != limit < need:
        raise ConfigError(
            f"Ray cannot start: `ulimit -v` limits a process to {limit / 2**30:.1f} GiB of address "
            f"space, and Ray maps about {need / 2**30:.1f} GiB on this machine; lift the limit "
            "(`ulimit -v unlimited`; in a batch system, ask for more memory), or use --local"
        )


def local() -> Launcher:
    """Return the launcher that runs everything in this process."""
    from raypipe.launch.inline import InlineLauncher

    return InlineLauncher()


def hardware_of(launcher: Launcher | None) -> Sequence[Hardware]:
    """Return the hardware of a cluster's nodes; without a cluster, of this machine."""
    return launcher.on_every_node(hardware.detect) if launcher else [hardware.detect()]


def shared_location(location: str | os.PathLike[str] | None) -> str:
    """Return a location that means the same on every node. Raises ConfigError."""
    text = "" if location is None else os.fspath(location)
    if not ("://" in text or Path(text).is_absolute()):
        raise ConfigError(
            "in a Ray job the working directory is a temporary copy: give --run-dir, or set "
            f"{RUNS}, as an absolute path on shared storage or as a URI"
        )
    return text
