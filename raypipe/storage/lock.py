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
from threading import Event, Lock, Thread

from raypipe.errors import ConfigError
from raypipe.storage.run_directory import RunDirectory, make_folder

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pace:
    """How often a lease is renewed, and how long it holds without: seconds.

    Who wrote a lease looks again ``settling_s`` later, whether another was as fast.
    """

    beat_s: float = 10.0
    expiry_s: float = 60.0
    settling_s: float = 2.0

    @property
    def trust_s(self) -> float:
        """How long the holder relies on its last renewal: less than others wait for the next."""
        return self.expiry_s / 2


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
    try:
        lease.take(say)
    except OSError as error:
        raise ConfigError(f"--run-dir {run.shown}: cannot be written: {error}") from error
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
        make_folder(run.path())
        lock = Path(run.lock).open("a+")  # noqa: SIM115 - held open as long as the lock
    except OSError as error:
        raise ConfigError(f"--run-dir {run.shown}: cannot be written: {error}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _taken(run, "another raypipe command") from error
        run.remove_unfinished()
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
    of its own time, and takes it when it did not change. A write that comes late replaces another's
    lease, so that its holder reads it before each renewal, and again after one that took long.
    """

    def __init__(self, run: RunDirectory, pace: Pace) -> None:
        self._run, self._pace, self._path = run, pace, run.lock
        self._mine = _Holder(secrets.token_hex(8), platform.node(), os.getpid())
        self._expired: str | None = None  # the owner it was taken from
        self._renewed = _now()
        self._lost_to: str | None = None
        self._renewing = Lock()
        self._over = Event()
        self._thread = Thread(target=self._beat, name="lease", daemon=True)

    def take(self, say: Callable[[str], None]) -> None:
        """Hold the lease from now on. Raises ConfigError: another command does."""
        found = self._read()
        if found is not None:
            say(
                f"{self._run.shown} was not given back by {found}; watching for "
                f"{self._pace.expiry_s:g} s whether it is alive"
            )
            self._watch(found)
        self._renewed = _now()
        self._write()
        self._settle(self._renewed)
        if other := self._other():
            raise _taken(self._run, other)
        self._expired = found.owner if found else None
        self._thread.start()

    def check(self) -> None:
        """Raise LostLeaseError unless nobody can have taken the lease over."""
        if self._lost_to or _now() - self._renewed >= self._pace.trust_s:
            self._renew()

    def release(self) -> None:
        """Give the lease back."""
        self._over.set()
        self._thread.join()
        try:
            self._verify()
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
        """Renew the lease. Raises LostLeaseError: another command has it."""
        with self._renewing:
            start = _now()
            self._verify()
            self._write()
            if _now() - self._renewed >= self._pace.trust_s:  # another may have taken it meanwhile
                self._settle(start)
                self._verify()
            self._renewed = start

    def _settle(self, start: float) -> None:
        """Wait for who wrote the lease since ``start``, too: one of the two sees it is lost."""
        settling_s = self._pace.settling_s
        if _now() - start > settling_s:  # that other one may have settled: it looks when it renews
            settling_s = self._pace.trust_s
            log.warning("%s answers slowly: waiting for %g s", self._run.shown, settling_s)
        time.sleep(settling_s)

    def _verify(self) -> None:
        self._lost_to = self._lost_to or self._other()
        if self._lost_to:
            raise LostLeaseError(
                f"{self._run.shown}: {self._lost_to} took over, as this process stood still, or "
                "the store did"
            )

    def _other(self) -> str | None:
        """Who holds the lease instead; a late write of who had lost it does not count."""
        holder = self._read()
        if holder is not None and holder.owner in (self._mine.owner, self._expired):
            return None
        return str(holder or "another raypipe command")

    def _read(self) -> _Holder | None:
        try:
            return _Holder(**json.loads(self._run.read(self._path)))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, RecursionError):
            return _Holder("nobody", "an unknown host", 0)

    def _write(self) -> None:
        self._mine = replace(self._mine, beat=self._mine.beat + 1)
        self._run.write(self._path, json.dumps(asdict(self._mine)).encode())


def _now() -> float:
    """Seconds since the start of the machine, those that it slept too, where the system counts."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
