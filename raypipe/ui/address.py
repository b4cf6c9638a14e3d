"""Addresses of pages: the port that a server listens on, and what names a run. Quick to import."""

from __future__ import annotations

import hashlib
import socket
from importlib.util import find_spec

from raypipe.errors import ConfigError
from raypipe.store.run_directory import RunDirectory


def check_installed(what: str) -> None:
    """Raise ConfigError if the packages of a server are missing; imports nothing."""
    if not all(map(find_spec, ("starlette", "uvicorn"))):
        raise ConfigError(
            f"{what}: needs Starlette and uvicorn, which are not installed: "
            "pip install 'raypipe-runner[ui]'"
        )


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that connections may wait at. Raises ConfigError."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"ui: cannot listen on {host}, port {port}: {error}; --port 0 takes a free port, and "
            "--host has to be an address of this machine"
        ) from error


def key(run: RunDirectory) -> str:
    """Return what names a run in addresses, and says nothing about where it is."""
    return hashlib.sha256(run.shown.encode()).hexdigest()[:16]
