"""A run directory, the commands on it one after the other, and the processes they start."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from subprocess import Popen

import psutil

from tests.command import start, until

PROJECT = Path(__file__).resolve().parents[2]
#: what every process of a round has in its environment
MARK = "RAYPIPE_CHAOS"
WAIT_S = 600
# a little longer than a run takes to its last stage
LONGEST_S = 35.0


@dataclass
class Scene:
    """One run directory with a cache of its own.

    Args:
        home: where both lie; a file system of its own where the user may mount one.
        name: of the round.
        arguments: the verb, and its arguments.
        rng: of all draws.

    """

    home: Path
    name: str
    arguments: Sequence[str]
    rng: Random
    process: Popen[str] = field(init=False)
    _output: str | None = field(init=False, default=None)

    @property
    def folder(self) -> Path:
        """The run directory."""
        return self.home / "run"

    def start(self, address: str = "", *, within_s: float = LONGEST_S, **environment: str) -> None:
        """Start a command and let it go on for a while; tasks of it die and hang by themselves."""
        kill, hang = self.rng.choice([0, 0.2]), self.rng.choice([0, 0.1])
        delay, step = self.rng.choice([0.01, 0.2]), self.rng.randint(1, 80)
        if self.arguments[0] == "map":  # a few of thousands of short calls
            kill, hang, delay, within_s = kill / 100, hang / 200, 0.0, within_s / 2
        faults = f"delay_task:s={delay},kill_task:p={kill},hang_task:p={hang}"
        faults += f",kill_worker:step={step}"
        self.launch(address, RAYPIPE_FAULTS=faults, **environment)
        self.wait(self.rng.uniform(0, within_s))

    def launch(self, address: str = "", **environment: str) -> None:
        """Start a command, on a cluster or on Ray of its own."""
        self.process, self._output = self.another(address, **environment), None

    def another(self, address: str = "", **environment: str) -> Popen[str]:
        """A command beside the one of this scene."""
        own = {"RAYPIPE_CACHE": str(self.home / "cache"), MARK: self.name}
        given = (*self.arguments, "--run-dir", self.folder)
        if address:
            given = (*given, "--address", address)
        return start(PROJECT, *given, environment={**own, **environment})

    def wait(self, seconds: float) -> None:
        """Until so many seconds have passed, or the command has ended."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)

    def end(self, *further: int) -> str:
        """What the command has printed when it has come to its end, with one of its statuses."""
        if self._output is None:  # else it was looked at before
            output, _ = self.process.communicate(timeout=WAIT_S)
            assert "Traceback" not in output, output
            allowed = (0, 1, 130, -signal.SIGKILL, *further)
            assert self.process.returncode in allowed, f"{self.process.returncode}: {output}"
            self._output = output
        return self._output

    def die(self) -> None:
        """The command dies without a word."""
        self.process.kill()
        self.end()

    def kill(self, title: str) -> bool:
        """Kill one of the processes with such a title; whether there is one."""
        found = []
        for process in living(self.name):
            with suppress(psutil.Error):
                if re.search(title, " ".join(process.cmdline()).split(" --")[0]):
                    found.append(process)
        if not found:
            return False
        with suppress(psutil.NoSuchProcess):
            self.rng.choice(sorted(found, key=lambda process: process.pid)).kill()
        return True


def living(name: str, mark: str = MARK) -> list[psutil.Process]:
    """The processes that carry a mark, by default a round's, without this one."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            marked = process.environ().get(mark) == name
            if marked and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def assert_gone(name: str) -> None:
    """Wait until no process of a round lives."""
    until(lambda: not living(name), "no process lives", 90, detail=lambda: living(name))
