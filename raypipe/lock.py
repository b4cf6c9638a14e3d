"""One command writes a run directory at a time.

On a file system a lock that the operating system frees when its process dies. An object store has
none: there a lease lies beside the run, renewed by its holder as long as it lives.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import platform
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Event, Thread

from raypipe.errors import ConfigError
from raypipe.paths import RunDirectory

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pace:
    """How often a lease is renewed, and how long it holds without: seconds.

    Who wrote a lease looks again ``settling_s`` later, whether another was as fast.
    """

    beat_s: float = 10.0
    expiry_s: float = 60.0
    settling_s: float = 2.0


@contextmanager
def writing(
    run: RunDirectory, say: Callable[[str], None], pace: Pace = Pace()
) -> Iterator[Callable[[], None]]:
    """Be the only command that writes a run directory.

    Yields what has to be called before a write that another's write must not cross: it raises
    LostLeaseError where the directory is another's by now.

    Raises:
        ConfigError: another command is writing it, or it cannot be written.

    """
    if run.is_local:
        with _locked(run):
            yield _nothing
        return
    lease = _Lease(run, pace)
    lease.take(say)
    try:
        yield lease.check
    finally:
        lease.release()


class LostLeaseError(RuntimeError):
    """The process stood still for so long that another command took the run directory over."""


def _nothing() -> None:
    """The operating system does not take a lock away."""


@contextmanager
def _locked(run: RunDirectory) -> Iterator[None]:
    try:
        Path(run.path()).mkdir(parents=True, exist_ok=True)
        lock = Path(run.lock).open("a+")  # noqa: SIM115 - held open as long as the lock
    except OSError as error:
        raise ConfigError(f"--run-dir {run.shown}: cannot be written: {error}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _taken(run, "another raypipe command") from error
        yield


def _taken(run: RunDirectory, holder: str) -> ConfigError:
    return ConfigError(
        f"--run-dir {run.shown}: {holder} is writing it; wait for it to end or use another "
        "directory"
    )


@dataclass(frozen=True)
class _Holder:
    """What lies in the store; ``beat`` changes as long as the holder lives."""

    owner: str
    host: str
    pid: int
    beat: int = 0

    def __str__(self) -> str:
        return f"another raypipe command (process {self.pid} on {self.host})"


class _Lease:
    """A lease on a run directory in an object store.

    No two clocks are compared: who wants a lease that another holds watches it for ``expiry_s``
    of its own time, and takes it when it did not change.
    """

    def __init__(self, run: RunDirectory, pace: Pace) -> None:
        self._run, self._pace, self._path = run, pace, run.lock
        self._mine = _Holder(secrets.token_hex(8), platform.node(), os.getpid())
        self._renewed = _now()
        self._over = Event()
        self._thread = Thread(target=self._renew, name="lease", daemon=True)

    def take(self, say: Callable[[str], None]) -> None:
        """Hold the lease from now on. Raises ConfigError: another command does."""
        found = self._read()
        if found is not None:
            say(
                f"{self._run.shown} was not given back by {found}; watching for "
                f"{self._pace.expiry_s:g} s whether it is alive"
            )
            self._watch(found)
        self._write()
        time.sleep(self._pace.settling_s)
        holder = self._read()
        if holder is None or holder.owner != self._mine.owner:
            raise _taken(self._run, str(holder or "another raypipe command"))
        self._thread.start()

    def check(self) -> None:
        """Raise LostLeaseError unless nobody can have taken the lease over."""
        if _now() - self._renewed < self._pace.expiry_s / 2:
            return
        holder = self._read()
        if holder is None or holder.owner != self._mine.owner:
            raise LostLeaseError(
                f"{self._run.shown}: this process stood still for "
                f"{_now() - self._renewed:.0f} s, and {holder or 'another command'} took over"
            )
        self._write()

    def release(self) -> None:
        """Give the lease back."""
        self._over.set()
        self._thread.join()
        try:
            self.check()
            self._run.delete(self._path)
        except (LostLeaseError, OSError) as error:
            log.warning("%s: the lease was not given back: %s", self._run.shown, error)

    def _watch(self, found: _Holder) -> None:
        start = _now()
        while _now() - start < self._pace.expiry_s:
            time.sleep(min(self._pace.beat_s, self._pace.expiry_s) / 2)
            holder = self._read()
            if holder is None:
                return
            if holder != found:
                raise _taken(self._run, str(holder))

    def _renew(self) -> None:
        while not self._over.wait(self._pace.beat_s):
            try:
                self.check()
                self._write()
            except LostLeaseError as error:
                log.critical("%s; ending", error)
                signal.raise_signal(signal.SIGTERM)
                return
            except OSError as error:
                log.warning("%s: the lease was not renewed: %s", self._run.shown, error)

    def _read(self) -> _Holder | None:
        try:
            return _Holder(**json.loads(self._run.read(self._path)))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, RecursionError):
            return _Holder("nobody", "an unknown host", 0)

    def _write(self) -> None:
        before = _now()
        self._mine = replace(self._mine, beat=self._mine.beat + 1)
        try:
            self._run.write(self._path, json.dumps(asdict(self._mine)).encode())
        except OSError as error:
            if self._mine.beat > 1:
                raise
            raise ConfigError(f"--run-dir {self._run.shown}: cannot be written: {error}") from error
        self._renewed = before


def _now() -> float:
    """Seconds since the start of the machine, those that it slept too, where the system counts."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
