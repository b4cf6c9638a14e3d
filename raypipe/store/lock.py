"""Lock of a run directory: one command at a time writes it.

On a file system this is a file lock, which the operating system releases when its process ends. In
an object store it is a lease: an object that its holder renews, and that expires without renewal.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import logging
import os
import platform
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Event, Lock, Thread
from typing import Any

from filelock import FileLock, Timeout
from pyarrow import fs as arrow_fs

from raypipe.errors import ConfigError, LostLeaseError
from raypipe.store import run_status
from raypipe.store.run_directory import RunDirectory, make_folder

log = logging.getLogger(__name__)

#: seconds in which a reader that looks at a lock has released it
_GLANCE_S = 0.2


@dataclass(frozen=True)
class Pace:
    """Timing of a lease.

    Attributes:
        beat_s: seconds between renewals.
        expiry_s: seconds without renewal after which another command takes the lease over.
        settle_s: seconds after which a command that took the lease reads whether it still has it.

    """

    beat_s: float = 10.0
    expiry_s: float = 60.0
    settle_s: float = 1.0

    @property
    def trust_s(self) -> float:
        """Seconds after a renewal for which its holder may write: well before the expiry."""
        return self.expiry_s / 2


@contextmanager
def writing(
    run: RunDirectory, say: Callable[[str], None], pace: Pace = Pace()
) -> Iterator[Callable[[], None]]:
    """Hold the lock of a run directory.

    Yields a check to call before each write that must not follow a write of another command. It
    raises LostLeaseError if another command may have taken the run directory over.

    Raises:
        ConfigError: another command holds the lock, or the run directory cannot be written.

    """
    if run.is_local:
        with _file_lock(run):
            run.remove_unfinished()
            yield lambda: None  # the operating system does not take a lock away
        return
    try:
        lease = _Lease(run, pace)
        lease.take(say)
    except OSError as error:
        raise _not_writable(run, error) from error
    try:
        yield lease.check
    finally:
        lease.release()


def is_held(run: RunDirectory, pace: Pace = Pace()) -> bool:
    """Whether a command writes the run directory, at a glance.

    In an object store it is whether the lease was renewed lately, by this machine's clock and that
    of the store: good enough to show, not to write.

    Raises:
        OSError: the store does not respond.

    """
    if not run.is_local:
        info = run.fs.get_file_info(run.lock)
        if info.type != arrow_fs.FileType.File or not info.size:
            return False
        return bool(time.time() - info.mtime_ns / 1e9 < pace.expiry_s)
    with suppress(OSError):  # there is no lock, or the file system has none
        descriptor = os.open(run.lock, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
    return False


@contextmanager
def _file_lock(run: RunDirectory) -> Iterator[None]:
    # no soft lock where flock is missing: it would outlive a process that was killed
    # it waits for an instant, since a glance of `is_held` may hold it
    lock = FileLock(run.lock, timeout=_GLANCE_S, fallback_to_soft=False)
    try:
        make_folder(run.path())
        held = lock.acquire(poll_interval=_GLANCE_S / 10)
    except Timeout as error:
        holder: dict[str, Any] = {}
        # before a command writes its status, it may have that of a process that was killed
        with suppress(OSError):
            status = run_status.read(run)
            if status is not None and status.status == "running" and status.pid:
                holder = {"pid": status.pid, "host": status.host}
        raise _taken(run, _command(holder)) from error
    except OSError as error:
        raise _not_writable(run, error) from error
    with held:
        yield


def _command(holder: Mapping[str, Any]) -> str:
    """Return the command that holds a lock, in words, as far as it is known."""
    if not holder:
        return "another raypipe command"
    return f"another raypipe command (process {holder['pid']} on {holder['host']})"


def _taken(run: RunDirectory, holder: str) -> ConfigError:
    return ConfigError(
        f"--run-dir {run.shown}: {holder} is writing it; wait until it ends or use another "
        "directory"
    )


def _not_writable(run: RunDirectory, error: OSError) -> ConfigError:
    return ConfigError(f"--run-dir {run.shown}: cannot be written: {error}")


def parsed(content: bytes) -> dict[str, Any]:
    """Return the ``owner``, ``pid`` and ``host`` of a lease; empty if it is damaged."""
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        holder = json.loads(content)
        return {name: holder[name] for name in ("owner", "pid", "host")}
    return {}


class _Lease:
    """A lease on a run directory in an object store.

    pyarrow's file systems have no conditional writes. So a command that took the lease waits and
    reads it, and its holder reads it before each renewal: of several that begin at once, the last
    one to write holds it, and the others end. No two clocks are compared: a command takes a lease
    over after it saw the same content for ``expiry_s`` on its own clock. A released lease is empty.
    """

    def __init__(self, run: RunDirectory, pace: Pace) -> None:
        self._run, self._pace = run, pace
        # each renewal has another ``beat``
        self._mine = {"owner": secrets.token_hex(8), "pid": os.getpid(), "host": platform.node()}
        self._beats = itertools.count()
        self._renewed = float("-inf")
        self._renewing = Lock()
        self._over = Event()
        self._thread = Thread(target=self._beat, name="lease", daemon=True)

    def take(self, say: Callable[[str], None]) -> None:
        """Hold the lease from now on. Raises ConfigError: another command does; OSError."""
        self._wait_until_free(say)
        self._write()
        time.sleep(self._pace.settle_s)
        try:
            self._renew()
        except LostLeaseError as error:
            raise _taken(self._run, error.holder) from error
        self._thread.start()

    def check(self) -> None:
        """Raise LostLeaseError unless no other command can have taken the lease over."""
        while _now() - self._renewed >= self._pace.trust_s:  # again where a renewal took too long
            self._renew()

    def release(self) -> None:
        """Leave the lease to the next command."""
        self._over.set()
        self._thread.join()
        try:
            self._require()
            self._run.write(self._run.lock, b"")
        except (LostLeaseError, OSError) as error:
            log.warning("%s: the lease was not released: %s", self._run.shown, error)

    def _wait_until_free(self, say: Callable[[str], None]) -> None:
        """Return once the lease is free or has expired. Raises ConfigError: its holder lives."""
        content, expiry_s = self._read(), self._pace.expiry_s
        if not content:
            return
        say(
            f"{self._run.shown} is locked by {_command(parsed(content))}; "
            f"watching for {expiry_s:g} s whether it is alive"
        )
        start = _now()
        while _now() - start < expiry_s:
            time.sleep(min(self._pace.beat_s, expiry_s) / 2)
            current = self._read()
            if not current:
                return
            if current != content:
                raise _taken(self._run, _command(parsed(current)))

    def _beat(self) -> None:
        while not self._over.wait(self._pace.beat_s):
            try:
                self._renew()
            except LostLeaseError as error:
                log.critical("%s; ending", error)
                signal.raise_signal(signal.SIGTERM)
                return
            except OSError as error:
                log.warning("%s: the lease was not renewed: %s", self._run.shown, error)

    def _renew(self) -> None:
        """Renew the lease. Raises LostLeaseError: another command has it; OSError."""
        with self._renewing:
            start = _now()
            self._require()
            self._write()
            self._renewed = start

    def _require(self) -> None:
        """Raise LostLeaseError if another command has the lease, or nobody; OSError."""
        holder = parsed(self._read())
        if holder != self._mine:
            self._renewed = float("-inf")  # no further write
            raise LostLeaseError(self._run.shown, _command(holder))

    def _read(self) -> bytes:
        with suppress(FileNotFoundError):
            return self._run.read(self._run.lock)
        return b""

    def _write(self) -> None:
        content = json.dumps({**self._mine, "beat": next(self._beats)})
        self._run.write(self._run.lock, content.encode())


def _now() -> float:
    """Seconds since the machine started, including those asleep."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
