"""What can go wrong with a run, done to a real one. All draws come from the round's generator."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

import psutil

_WAIT_S = 300


@dataclass
class Scene:
    """A command that runs, and what it works on."""

    process: subprocess.Popen[str]
    again: Callable[[], subprocess.Popen[str]]
    folder: Path
    cache: Path
    rng: Random

    def processes(self, *names: str) -> list[psutil.Process]:
        """The processes below the command's whose title begins with one of these."""
        found = []
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    title = " ".join(child.cmdline())
                    if any(name in title.split(" --")[0] for name in names):
                        found.append(child)
        return found

    def kill(self, *names: str) -> bool:
        """Kill one of the processes with such a title; whether there is one."""
        found = sorted(self.processes(*names), key=lambda process: process.pid)
        if not found:
            return False
        with suppress(psutil.NoSuchProcess):
            self.rng.choice(found).kill()
        return True

    def die(self) -> None:
        """The command dies without a word."""
        self.process.kill()
        self.process.communicate(timeout=_WAIT_S)


Disturbance = Callable[[Scene], bool]
"""Done to a scene; whether there was anything to disturb."""


def driver_killed(scene: Scene) -> bool:
    """SIGKILL to the command."""
    scene.die()
    return True


def driver_terminated(scene: Scene) -> bool:
    """SIGTERM to the command: a batch system's time limit."""
    scene.process.terminate()
    return True


def interrupted_twice(scene: Scene) -> bool:
    """Ctrl-C, and once more."""
    scene.process.send_signal(signal.SIGINT)
    time.sleep(scene.rng.uniform(0, 1))
    scene.process.send_signal(signal.SIGINT)
    return True


def worker_killed(scene: Scene) -> bool:
    """SIGKILL to a process that trains or evaluates."""
    return scene.kill("ray::")


def raylet_killed(scene: Scene) -> bool:
    """SIGKILL to the node's raylet."""
    return scene.kill("raylet/raylet")


def head_killed(scene: Scene) -> bool:
    """SIGKILL to the cluster's control store."""
    return scene.kill("gcs_server")


def driver_frozen(scene: Scene) -> bool:
    """The command stands still for some seconds."""
    scene.process.send_signal(signal.SIGSTOP)
    time.sleep(scene.rng.uniform(1, 5))
    scene.process.send_signal(signal.SIGCONT)
    return True


def second_command(scene: Scene) -> bool:
    """Another command on the same run directory: it is refused."""
    second = scene.again()
    output, _ = second.communicate(timeout=_WAIT_S)
    if scene.process.poll() is None:
        assert second.returncode == 2, output
        assert "is writing it" in output, output
    return True


def checkpoint_cut(scene: Scene) -> bool:
    """A file of the newest checkpoint of a dead command is cut."""
    scene.die()
    steps = sorted(scene.folder.glob("checkpoints/*/step_*"), key=lambda path: path.name)
    return bool(steps) and _cut(scene.rng, steps[-1].iterdir())


def table_cut(scene: Scene) -> bool:
    """A results table of a dead command is cut: it is derived from the ledger."""
    scene.die()
    return _cut(scene.rng, scene.folder.glob("results/*/data.parquet"))


def ledger_torn(scene: Scene) -> bool:
    """The last line of the ledger of a dead command is half written."""
    scene.die()
    segments = sorted(scene.folder.glob("ledger/*.jsonl"))
    if not segments or not (content := segments[-1].read_bytes()):
        return False
    last = content.rstrip(b"\n").rpartition(b"\n")[2]
    segments[-1].write_bytes(content[: -scene.rng.randint(1, len(last))])
    return True


def cache_cut(scene: Scene) -> bool:
    """An entry of the cache is cut while the command runs."""
    return _cut(scene.rng, (path for path in scene.cache.rglob("*") if path.is_file()))


def _cut(rng: Random, files: object) -> bool:
    found = sorted(files)  # type: ignore[call-overload]
    if not found:
        return False
    chosen = rng.choice(found)
    with suppress(FileNotFoundError):
        content = chosen.read_bytes()
        chosen.write_bytes(content[: rng.randrange(len(content))] if content else b"")
    return True


ALL: tuple[Disturbance, ...] = (
    driver_killed,
    driver_terminated,
    interrupted_twice,
    worker_killed,
    raylet_killed,
    head_killed,
    driver_frozen,
    second_command,
    checkpoint_cut,
    table_cut,
    ledger_torn,
    cache_cut,
)

if sys.platform != "linux":
    raise RuntimeError("the disturbances need Linux's processes and signals")
