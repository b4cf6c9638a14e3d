"""End of process trees: what a task or a script started ends with it, also if its worker is killed.

A process that is killed cannot clean up, so a worker starts this file as a program, which watches
it (:func:`watch`). It imports nothing of raypipe, so that it starts in a few milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Container, Iterable
from contextlib import suppress
from pathlib import Path

import psutil

_POLL_S = 0.02
#: seconds between looks at the processes that a worker has started
_LOOK_S = 0.5
#: seconds after its deadline in which a worker ends by itself
_LATE_S = 2.0
#: programs that end with the processes that use them, and then remove what these left in memory
_CLEANERS = ("resource_tracker", "torch_shm_manager")
_SUBREAPER = 36


def start(script: int | None = None, grace_s: float = 0.0) -> subprocess.Popen[bytes]:
    """Start a guard of this process; see :func:`watch`, which reads its standard input."""
    words = [] if script is None else [str(script), str(grace_s)]
    nothing = subprocess.DEVNULL
    return subprocess.Popen(
        [sys.executable, "-I", __file__, str(os.getpid()), *words],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=nothing,
        stderr=nothing,
        start_new_session=True,
    )


def watch(pid: int, script: int | None = None, grace_s: float = 0.0) -> None:
    """Wait for the end of a worker, then end all processes that it started.

    With a ``script``, its processes alone: by SIGTERM to the script, and after ``grace_s`` by
    SIGKILL.

    A line of the standard input is the deadline of the worker's call on the monotonic clock
    (``inf``: none). The worker ends itself at its deadline (:mod:`raypipe.launch.task`), else by
    SIGKILL. A process that a worker forked has the worker's connections, so without a guard nobody
    notices the end of the worker.
    """
    if script is None and os.fork():  # not a process of the worker, which its end would end
        os._exit(0)
    worker, tree = psutil.Process(pid), dict[int, psutil.Process]()
    with suppress(psutil.Error):
        tree |= {} if script is None else {script: psutil.Process(script)}
    deadline, listening = float("inf"), True
    while _is_alive(worker):
        add_started([pid] if script is None else [], tree)
        left = deadline - time.monotonic()
        if left < -_LATE_S:
            _signal([worker], signal.SIGKILL)
        pause = min(_LOOK_S, max(_POLL_S, left))
        if not listening:
            time.sleep(pause)
        elif select.select([0], [], [], pause)[0]:
            lines = os.read(0, 65536).split()
            listening = bool(lines)
            deadline = float(lines[-1]) if lines else deadline
    if script in tree:
        _signal([tree[script]], signal.SIGTERM)
        await_end(tree, grace_s)
    end_all(tree)


def await_end(
    tree: dict[int, psutil.Process],
    seconds: float,
    pids: Iterable[int] = (),
    others: Container[int] = (),
) -> None:
    """Wait until the processes of a tree have ended, or some seconds; see :func:`add_started`."""
    end = time.monotonic() + seconds
    add_started(pids, tree, others)
    while tree and time.monotonic() < end:
        time.sleep(_POLL_S)
        add_started(pids, tree, others)


def add_started(
    pids: Iterable[int], tree: dict[int, psutil.Process], others: Container[int] = ()
) -> None:
    """Add what processes, and those of the tree, have started; remove from it those that ended.

    ``others`` are not part of the tree, with what they start.
    """
    for pid, process in list(tree.items()):
        if not _is_alive(process):
            del tree[pid]
    waiting = [*pids, *tree]
    while waiting:
        for child in _children(waiting.pop()):
            if child in tree or child in others or child == os.getpid():  # it may adopt its guard
                continue
            with suppress(psutil.Error):
                process = psutil.Process(child)
                if _is_alive(process):
                    tree[child] = process
                    waiting.append(child)


def end_all(
    tree: dict[int, psutil.Process], pids: Iterable[int] = (), others: Container[int] = ()
) -> None:
    """End the processes of a tree by SIGKILL; see :func:`add_started`."""
    for _ in range(int(_LATE_S / _POLL_S)):
        add_started(pids, tree, others)
        alive = [process for process in tree.values() if not _cleans_up(process)]
        if not alive:
            return
        _signal(alive, signal.SIGKILL)
        time.sleep(_POLL_S)


def adopt_orphans(adopt: bool = True) -> None:
    """Become the parent of processes whose parent ends below this one, or not (Linux only)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SUBREAPER, int(adopt), 0, 0, 0)


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


def _signal(processes: Iterable[psutil.Process], number: int) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(number)


if __name__ == "__main__":
    watch(int(sys.argv[1]), *map(int, sys.argv[2:3]), *map(float, sys.argv[3:]))
