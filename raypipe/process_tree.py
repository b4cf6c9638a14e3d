"""End of process trees: what a task or a script started ends with it, also if its worker is killed.

A process that is killed cannot clean up, so a worker starts this file as a program: one that
watches the worker (:func:`watch`), or one that runs a script (:func:`supervise`). It imports
nothing of raypipe, so that it starts in a few milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

_POLL_S = 0.02
#: seconds between looks at the processes that a worker has started
_LOOK_S = 0.5
#: seconds in which a tree of processes is ended
_LATE_S = 2.0
#: seconds in which processes that a script left may end by themselves
_LEFT_S = 1.0
#: programs that end with the processes that use them, and then remove what these left in memory
_CLEANERS = ("resource_tracker", "torch_shm_manager")
#: options of Linux's prctl: the signal at the end of the parent, and the adoption of orphans
_END_WITH_PARENT, _SUBREAPER = 1, 36


def start(
    *words: object,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    output: int = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:
    """Start this file as a program, which has a standard input.

    Without words it is a guard of this process, see :func:`watch`. Else it supervises a program:
    the seconds between SIGTERM and SIGKILL, and the program's arguments.
    """
    return subprocess.Popen(
        [sys.executable, "-I", __file__, *map(str, words or [os.getpid()])],
        bufsize=0,
        cwd=cwd,
        env=env,
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )


def watch(pid: int) -> None:
    """Wait for the end of a worker, then end all processes that it started.

    A process that a worker forked has the worker's connections, so without a guard nobody notices
    the end of the worker.
    """
    if os.fork():  # not a process of the worker, which its end would end
        os._exit(0)
    worker, tree = psutil.Process(pid), dict[int, psutil.Process]()
    while _is_alive(worker):
        add_started([pid], tree)
        time.sleep(_LOOK_S)
    end_all(tree)


def supervise(grace_s: float, argv: Sequence[str]) -> None:
    """Run a program, and end as it does once none of the processes that it started is left.

    The end of the standard input, or of the parent, ends the program: by SIGTERM, and after
    ``grace_s`` by SIGKILL.
    """
    parent, end_at = os.getppid(), float("inf")
    adopt_orphans()
    try:
        program = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
    except OSError as error:
        sys.exit(f"{argv[0]}: cannot be started: {error.strerror}")
    while program.poll() is None:
        if end_at < float("inf"):
            time.sleep(_POLL_S)
        elif select.select([0], [], [], _POLL_S)[0] or os.getppid() != parent:
            program.terminate()
            end_at = time.monotonic() + grace_s
        if time.monotonic() > end_at:
            program.kill()
    tree = dict[int, psutil.Process]()
    if end_at == float("inf"):
        end_at = time.monotonic() + _LEFT_S
    add_started([os.getpid()], tree)
    while tree and time.monotonic() < end_at:
        time.sleep(_POLL_S)
        add_started([os.getpid()], tree)
    end_all(tree, [os.getpid()])
    if program.returncode < 0:
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-program.returncode, signal.SIG_DFL)
        os.kill(os.getpid(), -program.returncode)
    sys.exit(program.returncode)


def add_started(pids: Iterable[int], tree: dict[int, psutil.Process]) -> None:
    """Add what processes, and those of the tree, have started; remove from it those that ended."""
    for pid, process in list(tree.items()):
        if not _is_alive(process):
            del tree[pid]
    waiting = [*pids, *tree]
    while waiting:
        for child in _children(waiting.pop()):
            if child in tree or child == os.getpid():  # it may adopt its guard
                continue
            with suppress(psutil.Error):
                process = psutil.Process(child)
                if _is_alive(process):
                    tree[child] = process
                    waiting.append(child)


def end_all(tree: dict[int, psutil.Process], pids: Iterable[int] = ()) -> None:
    """End the processes of a tree by SIGKILL; see :func:`add_started`."""
    for _ in range(int(_LATE_S / _POLL_S)):
        add_started(pids, tree)
        alive = [process for process in tree.values() if not _cleans_up(process)]
        if not alive:
            return
        for process in alive:
            with suppress(psutil.Error):
                process.kill()
        time.sleep(_POLL_S)


def adopt_orphans() -> None:
    """Become the parent of processes whose parent ends below this one (Linux only)."""
    _prctl(_SUBREAPER, 1)


def end_with_parent() -> None:
    """Let this process end by SIGKILL when its parent has ended (Linux only)."""
    _prctl(_END_WITH_PARENT, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    with suppress(AttributeError):  # only Linux has it
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _children(pid: int) -> list[int]:
    """Return the children of a process, without a look at all processes of the machine."""
    found: list[int] = []
    with suppress(OSError):  # it has ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                found += map(int, (thread / "children").read_text().split())
    return found


def _cleans_up(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return any(name in word for word in process.cmdline() for name in _CLEANERS)
    return False


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


if __name__ == "__main__":
    first, *program = sys.argv[1:]
    if program:
        supervise(float(first), program)
    else:
        watch(int(first))
