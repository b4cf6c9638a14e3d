"""Guard of a script's processes: ends all of them when asked, or when its starter is gone.

It is a separate program, since a worker that is killed cannot clean up. The standard input
has a line of JSON (``argv``, ``cwd``, ``env``, ``stdout``, ``stderr``, ``grace_s``). Any further
line, or its end, asks for the end of the script: SIGTERM to the script, and after ``grace_s``
SIGKILL to all its processes. The standard output has a line with the script's ``pid``, and a line
with its ``exit`` (negative: the signal) once no process is left, or a line with an ``error``.
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
from contextlib import suppress
from typing import Any

import psutil

_POLL_S = 0.02
#: processes that the script left may end by themselves for this long before SIGTERM
_LEFT_S = 1.0
_SUBREAPER, _DEATH_SIGNAL = 36, 1


def main() -> None:
    """Run a script and end its processes."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # a handler, unlike SIG_IGN, is not inherited
    with suppress(OSError, AttributeError):  # Linux only: orphans become children of this process
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
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
    for descriptor in {wanted["stdout"], wanted["stderr"]}:
        os.close(descriptor)
    _tell({"pid": script.pid})
    _tell({"exit": _watch(script.pid, wanted["grace_s"]), "peak_bytes": _peak_bytes()})


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
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _signal(processes: list[psutil.Process], number: int) -> None:
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
    main()
