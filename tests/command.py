"""Commands of raypipe, in a process of their own or in this one."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import psutil
import pytest
import typer

from raypipe import cli
from raypipe.commands import cluster
from raypipe.launch.inline import InlineLauncher
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import read_table

if TYPE_CHECKING:
    from raypipe.graph.launcher import Launcher

EXAMPLES = Path(__file__).parent / "raypipe" / "examples"
#: modules of no test: to ask thousands of modules for their files takes milliseconds
_STAY: dict[str, Any] = {}


@dataclass(frozen=True)
class Ended:
    """How a command ended; its output includes the errors, where those are known."""

    status: int
    output: str
    errors: str = ""


def table(folder: str | Path, name: str) -> pd.DataFrame:
    """A table of a run directory."""
    return read_table(RunDirectory.at(folder), name)


def spawn(
    folder: Path, *words: str | Path, environment: Mapping[str, str], **options: bool
) -> subprocess.Popen[str]:
    """A program in a folder, with its errors among its output."""
    return subprocess.Popen(
        list(map(str, words)),
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )


def start(folder: Path, *arguments: str | Path, **options: Any) -> subprocess.Popen[str]:
    """A command as a user starts it in a folder; without an address it starts Ray."""
    return spawn(folder, sys.executable, "-m", "raypipe", *arguments, **options)


def finish(process: subprocess.Popen[str], status: int = 0, within_s: float = 300) -> str:
    """Wait for the end of a command with this exit status; return what it printed."""
    output, _ = process.communicate(timeout=within_s)
    assert process.returncode == status, f"{process.args}: {output}"
    return output


@cache
def command_line() -> Any:
    """All commands, which Typer makes anew at each call of an app."""
    return typer.main.get_command(cli.app)


def in_process(
    launcher: Launcher | None, *arguments: str | Path, environment: Mapping[str, str]
) -> Ended:
    """The same command in this process, on the cluster of the tests: seconds less each time.

    With an inline launcher it runs without Ray; with none, as the test has patched it.
    """
    output, handler = io.StringIO(), signal.getsignal(signal.SIGTERM)
    errors = _Errors(output)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(output), redirect_stderr(errors):
        patch.setattr(cli, "app", command_line())
        if launcher is not None:
            patch.setattr(cluster, "start", lambda *_: launcher)
        patch.setattr(sys, "argv", ["raypipe", *map(str, arguments)])
        # `submit` would change it for servers that are started later, but not for Ray's client here
        patch.setenv("RAY_AUTH_MODE", "disabled")
        for name, value in environment.items():
            patch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            cli.main()
    signal.signal(signal.SIGTERM, handler)
    return Ended(int(ended.value.code or 0), output.getvalue(), errors.getvalue())


class _Errors(io.StringIO):
    """The standard error, on a terminal that shows the output, too."""

    def __init__(self, output: io.StringIO) -> None:
        super().__init__()
        self._output = output

    def write(self, text: str) -> int:
        self._output.write(text)
        return super().write(text)


def in_child(function: Callable[..., None], *arguments: object) -> int | None:
    """Call a function in a process of its own, as the streams of this one are pytest's."""
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    process.join()
    return process.exitcode


def raypipe(*arguments: str | Path, expected: int = 0) -> str:
    """Run a command in this process without Ray; return its output, of a refusal the errors."""
    ended = in_process(InlineLauncher(), *arguments, environment={})
    assert ended.status == expected, ended.output
    return ended.errors if expected == 2 else ended.output


def forget(folder: Path) -> None:
    """Import the modules below a folder anew, as another process would."""
    below = f"{folder}{os.sep}"
    for name, module in list(sys.modules.items()):
        if _STAY.get(name) is module:
            continue
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.startswith(below):
            del sys.modules[name]
        elif file is None or file.startswith((sys.prefix, sys.base_prefix)):
            _STAY[name] = module


def until(
    condition: Callable[[], object],
    what: str,
    within_s: float = 60.0,
    process: subprocess.Popen[str] | None = None,
    detail: Callable[[], object] = str,
) -> None:
    """Wait until something holds; a process that is given has to run as long."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert process is None or process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"not in {within_s:g} s: {what}\n{detail()}"
        time.sleep(0.1)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def listens(address: str, port: int) -> bool:
    """Whether a process takes connections there."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((address, port)) == 0
