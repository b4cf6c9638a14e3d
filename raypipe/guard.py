"""Guard of processes: ends what a worker or a script has started, also if that was killed.

It is a separate program, since a process that is killed cannot clean up:

- ``guard.py --watch PID`` watches a worker (:func:`watch`).
- ``guard.py GRACE_S COMMAND ...`` runs a script, and ends with its exit status, 128 and its number
  for a signal, once no process of it is left (:func:`run`).

It imports nothing of raypipe, so that it starts in a few milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
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
#: seconds in which processes that the script left may end by themselves
_LEFT_S = 1.0
#: exit status of a command that cannot be started, as of a shell
_NOT_STARTED = 127
_SUBREAPER, _DEATH_SIGNAL = 36, 1


def run(grace_s: float, command: list[str]) -> int:
    """Run a script and return its exit status.

    When the standard input has a byte or ends, as it does with the starter, the script is ended:
    SIGTERM to the script, and after ``grace_s`` SIGKILL to all its processes. What the script
    leaves running ends, too.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # a handler, unlike SIG_IGN, is not inherited
    adopt_orphans()
    try:
        script = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: _prctl(_DEATH_SIGNAL, signal.SIGKILL),  # if the guard is killed
        )
    except OSError as error:
        print(f"{command[0]}: cannot be started: {error.strerror}", file=sys.stderr)
        return _NOT_STARTED
    for descriptor in (1, 2):  # they end with the script's processes
        os.close(descriptor)
    status: int | None = None
    ended_at = asked_at = float("inf")
    listening = True
    while True:
        status = _reaped(script.pid, status)
        now = time.monotonic()
        left = _descendants() if status is not None or asked_at <= now else []
        if status is not None:
            ended_at = min(ended_at, now)
            if not left:
                return status if status >= 0 else 128 - status
        if asked_at > now and (not listening or now > ended_at + _LEFT_S):
            asked_at = now
            running = psutil.pid_exists(script.pid) and status is None
            _signal([psutil.Process(script.pid)] if running else left, signal.SIGTERM)
        elif now > asked_at + grace_s:
            _signal(left, signal.SIGKILL)
        if listening:
            listening = not select.select([0], [], [], _POLL_S)[0]
        else:
            time.sleep(_POLL_S)


def watch(pid: int) -> None:
    """Wait for the end of a worker, then end all processes that it started.

    A line of the standard input is the deadline of the worker's call on the monotonic clock
    (``inf``: none). The worker ends itself at its deadline (:mod:`raypipe.launch.task`), else by
    SIGKILL. A process that a worker forked has the worker's connections, so without a guard nobody
    notices the end of the worker.
    """
    if os.fork():  # not a process of the worker
        os._exit(0)
    worker, tree = psutil.Process(pid), dict[int, psutil.Process]()
    deadline, listening = float("inf"), True
    while _is_alive(worker):
        add_started([pid], tree)
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
    end_all(tree)


def add_started(pids: list[int], tree: dict[int, psutil.Process]) -> None:
    """Add what processes, and those of the tree, have started; remove from it those that ended."""
    for pid, process in list(tree.items()):
        if not _is_alive(process):
            del tree[pid]
    waiting = [*pids, *tree]
    while waiting:
        for child in _children(waiting.pop()):
            if child not in tree and child != os.getpid():  # a worker may adopt its guard
                with suppress(psutil.Error):
                    tree[child] = psutil.Process(child)
                    waiting.append(child)


def end_all(tree: dict[int, psutil.Process]) -> None:
    """End processes, and what they start meanwhile, by SIGKILL."""
    for _ in range(int(_LATE_S / _POLL_S)):
        add_started([], tree)
        alive = [process for process in tree.values() if not _cleans_up(process)]
        if not alive:
            return
        _signal(alive, signal.SIGKILL)
        time.sleep(_POLL_S)


def adopt_orphans(adopt: bool = True) -> None:
    """Become the parent of processes whose parent ends below this one, or not (Linux only)."""
    _prctl(_SUBREAPER, int(adopt))


def _prctl(option: int, value: int) -> None:
    with suppress(OSError, AttributeError):
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


def _reaped(pid: int, status: int | None) -> int | None:
    """Collect ended children; return the script's exit status once it is known."""
    while True:
        try:
            ended, code = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if ended == 0:
            return status
        if ended == pid:
            status = os.waitstatus_to_exitcode(code)


def _descendants() -> list[psutil.Process]:
    tree = dict[int, psutil.Process]()
    add_started([os.getpid()], tree)
    return [process for process in tree.values() if _is_alive(process)]


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
    if sys.argv[1] == "--watch":
        watch(int(sys.argv[2]))
    else:
        os._exit(run(float(sys.argv[1]), sys.argv[2:]))  # without its closed streams
