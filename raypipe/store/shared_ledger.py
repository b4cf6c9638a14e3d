"""Ledger of a run directory that several commands write at once, each of which claims its units.

The ledger stays one log. An append reads what others have appended, and follows it, all under a
file lock, so that rows have one order, and readers need to know of nothing. A claim is a row, too:
who holds it, and whether the unit has failed there. It counts as long as its holder lives, which
has a number and a lock for that: the operating system releases it, however a process ends.

All of these commands share the lock of the run directory, which keeps other commands out. The one
that finds nothing left to compute takes that lock alone, after the others have given it back, and
writes what belongs to the whole run: tables, status and report.
"""

from __future__ import annotations

import fcntl
import itertools
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from raypipe.errors import ConfigError, EndedElsewhereError, LostLeaseError
from raypipe.store.ledger import CLAIMS, RUNS, SHOWN, Entry, Ledger, Row
from raypipe.store.lock import is_locked
from raypipe.store.run_directory import UNFINISHED, RunDirectory, make_folder, sync

_NOWAIT = fcntl.LOCK_EX | fcntl.LOCK_NB


class ShareOfRun(ExitStack):
    """The lock of a run directory as one of several commands.

    Raises:
        ConfigError: the run directory cannot be written, or has no file locks.

    """

    def __init__(self, run: RunDirectory, say: Callable[[str], None]) -> None:
        super().__init__()
        self.run = run
        try:
            make_folder(run.path())
            self.whole = self.open(run.lock)
            try:
                fcntl.flock(self.whole, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"{run.shown}: another raypipe command writes it; waiting for its end")
                fcntl.flock(self.whole, fcntl.LOCK_SH)
        except OSError as error:
            self.close()
            raise ConfigError(f"--run-dir {run.shown}: cannot be locked: {error}") from error

    def ledger(self, stamp: Row) -> SharedLedger:
        """Return the ledger to write, as one of its writers."""
        return SharedLedger(self, stamp)

    def open(self, path: str) -> IO[bytes]:
        """Open a file until the end, to lock it: on NFS it has to be read and written for that."""
        return self.enter_context(Path(path).open("a+b"))


class SharedLedger(Ledger):
    """The rows of a run that other commands write, too.

    Attributes:
        is_alone: whether no other command writes any more.

    Raises:
        ConfigError: as :class:`Ledger`, or a line is damaged, which needs a single command.

    """

    def __init__(self, share: ShareOfRun, stamp: Row) -> None:
        self.is_alone = self._leaves = False
        self._share, self._has_appends = share, False
        self._appends = share.open(f"{share.run.lock}-ledger")
        #: whether the holders of claims live, since the ledger was locked
        self._alive: dict[int, bool] = {}
        fcntl.flock(self._appends, fcntl.LOCK_EX)
        try:
            folder = Path(share.run.ledger)
            make_folder(folder)
            if not any(folder.glob("*.jsonl")):  # NFS may list what was there a minute ago
                (folder / "00000000.jsonl").open("ab").close()
                sync(folder)
            super().__init__(share.run, stamp=stamp)
        finally:
            fcntl.flock(self._appends, fcntl.LOCK_UN)
        with self.exclusively():
            self._number = self._join()

    def _join(self) -> int:
        """Take the first number that no living command has, and drop its claims."""
        for number in itertools.count():
            with suppress(BlockingIOError):
                fcntl.flock(self._share.open(f"{self._run.lock}-{number}"), _NOWAIT)
                break
        self.remove(CLAIMS, [key for key, row in self.items(CLAIMS) if row["member"] == number])
        return number

    # appends

    @contextmanager
    def exclusively(self) -> Iterator[None]:
        """Keep the others from writing in the body, which sees all that they have written."""
        with self._lock:
            if self._has_appends:  # around this body
                yield
                return
            try:
                fcntl.flock(self._appends, fcntl.LOCK_EX)
                self._has_appends = True
                self._alive.clear()
                path, size = self._last()
                with path.open("rb") as file:
                    file.seek(size)
                    self._read_lines(file)
                if self._damaged:
                    self._rewrite()
                yield
            finally:
                self._has_appends = False
                fcntl.flock(self._appends, fcntl.LOCK_UN)

    def _append(self, entries: Sequence[Entry]) -> None:
        with self.exclusively():
            super()._append(entries)

    def _rewrite(self, entries: Sequence[Entry] = ()) -> None:
        """Refuse a repair, since others have the ledger open."""
        del entries
        raise ConfigError(
            f"--run-dir {self._run.shown}: its ledger is damaged, which several jobs cannot repair "
            "at once; continue the run with one command first"
        )

    # claims

    def claim_on(self, key: str) -> Row | None:
        """Return the claim of a living command on a unit, and whether it has ``failed`` there."""
        claim = self.get(CLAIMS, key)
        return claim if claim is not None and self._lives(claim["member"]) else None

    def claim(self, keys: Iterable[str], *, failed: bool = False) -> None:
        """Claim units that are free, or record that they have failed here."""
        self.put(CLAIMS, {key: {"member": self._number, "failed": failed} for key in keys})

    def members(self) -> int:
        """Return the number of living commands, with this one."""
        paths = Path(self._run.path()).glob(".lock-[0-9]*")
        with self.exclusively():
            return sum(self._lives(int(path.name.rpartition("-")[2])) for path in paths)

    def _lives(self, number: int) -> bool:
        if number not in self._alive:
            self._alive[number] = is_locked(f"{self._run.lock}-{number}")
        return self._alive[number]

    # the end

    def become_alone(self, how: int = fcntl.LOCK_EX) -> None:
        """Wait until no other command computes, and keep the others out from now on.

        Raises:
            EndedElsewhereError: another one was alone before, and has written everything.

        """
        # from here on another job may write the end: do not overwrite it with `running`
        self._leaves = True
        # on NFS and Lustre, each of two that keep their share would wait for the other's
        fcntl.flock(self._share.whole, fcntl.LOCK_UN)
        fcntl.flock(self._share.whole, how)
        with self.exclusively():
            if self.get(RUNS, SHOWN) == {"all": True}:
                raise EndedElsewhereError
        self.is_alone = True
        for path in Path(self._run.path("files")).glob("*/*.tmp"):  # of calls that were killed
            if UNFINISHED.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)

    def leave(self) -> None:
        """Become alone if no other command lives; else write nothing of the whole run any more."""
        with suppress(BlockingIOError, EndedElsewhereError):
            if not self.is_alone:
                self.become_alone(_NOWAIT)

    def check_status(self) -> None:
        """Raise LostLeaseError unless this command writes the status, as the first that lives."""
        locks = (f"{self._run.lock}-{number}" for number in range(self._number))
        if not self.is_alone and (self._leaves or any(map(is_locked, locks))):
            raise LostLeaseError(self._run.shown, "another job of this run")
