"""Guard of processes: ends those of a script, or those that the calls of a worker started.

It is a separate program, since a worker that is killed cannot clean up. With the ID of a worker's
process as its argument it watches that one (:func:`watch`). Otherwise it starts a script, and ends
its processes when asked, or when its starter is gone. The standard input then has a line of JSON
(``argv``, ``cwd``, ``env``, ``stdout``, ``stderr``, ``grace_s``). Any further line, or its end,
asks for the end of the script: SIGTERM to the script, and after ``grace_s`` SIGKILL to all its
processes. The standard output has a line with the script's ``pid``, and a line with its ``exit``
(negative: the signal) once no process is left, or a line with an ``error``.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

_POLL_S = 0.02
#: seconds between looks at the processes that a worker has started
_LOOK_S = 0.5
#: seconds after its deadline in which a worker ends by itself
_LATE_S = 2.0
#: programs that end with the processes that use them, and then remove what these left in memory
_CLEANERS = ("resource_tracker", "torch_shm_manager")
#: processes that the script left may end by themselves for this long before SIGTERM
_LEFT_S = 1.0
_SUBREAPER, _DEATH_SIGNAL = 36, 1


def main() -> None:
    """Run a script and end its processes."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # a handler, unlike SIG_IGN, is not inherited
    adopt_orphans()
    wanted = json.loads(sys.stdin.readline())
    try:
        script = subprocess.Popen(
            wanted["argv"],
            cwd=wanted["cwd"],
            env=wanted["env"],
            stdin=subprocess.DEVNULL,
            stdout=wanted["stdout"],
            stderr=wanted["stderr"],
            start_new_session=True,
            preexec_fn=_die_with_the_guard,
        )
    except OSError as error:
        _tell({"error": f"{error.strerror}: {error.filename}"})
        return
    except ValueError as error:  # NUL in the command, a name of a variable with "="
        _tell({"error": str(error)})
        return
    for descriptor in {wanted["stdout"], wanted["stderr"]}:
        os.close(descriptor)
    _tell({"pid": script.pid})
    _tell({"exit": _watch(script.pid, wanted["grace_s"]), "peak_bytes": _peak_bytes()})


def watch(pid: int) -> None:
    """Wait for the end of a worker, then end all processes that it started.

    A line of the standard input is the deadline of the worker's call on the monotonic clock
    (``inf``: none). At the deadline its processes stop, so that it cannot return from waiting for
    them, and it ends by itself (:mod:`raypipe.launch.task`) or by SIGKILL. A process that a worker
    forked has the worker's connections, so without a guard nobody notices the end of the worker.
    """
    if os.fork():  # not a process of the worker
        os._exit(0)
    worker, tree = psutil.Process(pid), dict[int, psutil.Process]()
    deadline, listening = float("inf"), True
    while _is_alive(worker):
        add_started([pid], tree)
        late = time.monotonic() - deadline
        if late >= 0:
            _signal(tree.values(), signal.SIGSTOP)
        if late > _LATE_S:
            _signal([worker], signal.SIGKILL)
        pause = _POLL_S if late >= 0 else min(_LOOK_S, -late)
        if not listening:
            time.sleep(pause)
        elif select.select([sys.stdin], [], [], pause)[0]:
            lines = os.read(sys.stdin.fileno(), 65536).split()
            listening = bool(lines)
            if late >= 0 and lines:  # the call has ended just in time
                _signal(tree.values(), signal.SIGCONT)
            deadline = float(lines[-1]) if lines else deadline
    end_all(tree)


def add_started(pids: list[int], tree: dict[int, psutil.Process]) -> None:
    """Add what processes, and those of the tree, have started; remove from it those that ended."""
    for known, process in list(tree.items()):
        if not _is_alive(process):
            del tree[known]
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
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SUBREAPER, int(adopt), 0, 0, 0)


def _children(pid: int) -> list[int]:
    """Return the children of a process; on Linux without a look at all processes."""
    found: list[int] = []
    if not sys.platform.startswith("linux"):
        with suppress(psutil.Error):
            found = [child.pid for child in psutil.Process(pid).children()]
        return found
    with suppress(OSError):  # it has ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                found += map(int, (thread / "children").read_text().split())
    return found


def _cleans_up(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return any(name in word for word in process.cmdline() for name in _CLEANERS)
    return False


def _watch(pid: int, grace_s: float) -> int:
    """Return the exit status of the script when no process of it is left."""
    status: int | None = None
    asked: float | None = None
    left: float | None = None
    listening = True
    while True:
        status = _reaped(pid, status)
        now = time.monotonic()
        if status is not None:
            processes = _descendants()
            if not processes:
                return status
            left = left or now
            if asked is None and now > left + _LEFT_S:
                asked = now
                _signal(processes, signal.SIGTERM)
        if asked is not None and now > asked + grace_s:
            _signal(_descendants(), signal.SIGKILL)
        if not listening:
            time.sleep(_POLL_S)
        elif select.select([sys.stdin], [], [], _POLL_S)[0]:
            listening = bool(os.read(sys.stdin.fileno(), 4096))
            if asked is None:
                asked = time.monotonic()
                own = [psutil.Process(pid)] if status is None and psutil.pid_exists(pid) else []
                _signal(own or _descendants(), signal.SIGTERM)


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
    with suppress(psutil.Error):
        found = psutil.Process().children(recursive=True)
        return [each for each in found if _is_alive(each)]
    return []


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _signal(processes: Iterable[psutil.Process], number: int) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(number)


def _peak_bytes() -> int:
    """Return the peak resident memory of the largest process."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024)


def _die_with_the_guard() -> None:
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def _tell(message: dict[str, Any]) -> None:
    with suppress(OSError):  # the starter is gone
        sys.stdout.write(f"{json.dumps(message)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        watch(int(sys.argv[1]))
    else:
        main()
