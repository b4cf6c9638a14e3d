"""One writer of a run directory: a lock on a file system, a lease in an object store."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyarrow import fs as arrow_fs

from raypipe.errors import ConfigError
from raypipe.storage import lock
from raypipe.storage.ledger import Ledger
from raypipe.storage.lock import LostLeaseError, Pace, writing
from raypipe.storage.run_directory import RunDirectory

#: as the real one, but for its speed
FAST = Pace(beat_s=0.05, expiry_s=0.5, settling_s=0.1)


#: renewed once the test is over
SLOW = Pace(beat_s=60, expiry_s=120, settling_s=0.3)


@pytest.fixture
def store() -> RunDirectory:
    """A run directory that is no local path; all who use it share its one file system."""
    run = RunDirectory("mock://run")
    run.__dict__["_opened"] = (arrow_fs._MockFileSystem(), "run")
    run.fs.create_dir("run")
    return run


class Stalling(RunDirectory):
    """The same run directory; while ``flowing`` is not set, what is written arrives late."""

    def __init__(self, store: RunDirectory) -> None:
        super().__init__(store.location)
        self.__dict__ |= {"_opened": store._opened, "flowing": threading.Event()}
        self.__dict__["stalled"] = threading.Event()

    def write(self, path: str, content: bytes) -> None:
        if not self.flowing.is_set():
            self.stalled.set()
            assert self.flowing.wait(20)
        super().write(path, content)


def leave(run: RunDirectory, beat: int) -> None:
    holder = {"owner": "other", "host": "elsewhere", "pid": 7, "beat": beat}
    run.write(run.lock, json.dumps(holder).encode())


@pytest.fixture
def said() -> list[str]:
    return []


def test_a_lease_is_given_back(store, said):
    with writing(store, said.append, FAST) as check:
        assert store.exists(store.lock)
        time.sleep(0.6)  # longer than it holds without being renewed
        check()
    assert not store.exists(store.lock)
    assert said == []


def test_a_second_command_is_refused_while_the_first_lives(store, said):
    with (
        writing(store, said.append, FAST),
        pytest.raises(ConfigError, match=rf"process {os.getpid()} on .* is writing it"),
        writing(store, said.append, FAST),
    ):
        pass
    assert len(said) == 1
    with writing(store, said.append, FAST):  # the refused one left the lease alone
        pass


def test_what_a_dead_command_left_is_taken_over_once_it_expired(store, said):
    leave(store, 5)
    with writing(store, said.append, FAST):
        assert json.loads(store.read(store.lock))["owner"] != "other"
    assert "process 7 on elsewhere" in said[0]


def test_a_damaged_lease_expires_too(store, said):
    store.write(store.lock, b"{")
    with writing(store, said.append, FAST):
        pass


def test_of_two_that_begin_at_the_same_time_one_writes(store):
    begun, wrote = threading.Barrier(4), []

    def begin() -> None:
        begun.wait()
        try:
            with writing(store, lambda text: None, FAST):
                wrote.append(True)
                time.sleep(1.5)
        except ConfigError:
            wrote.append(False)

    threads = [threading.Thread(target=begin) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(wrote) == [False, False, False, True]


@pytest.fixture
def ended() -> Iterator[list[int]]:
    """Signals that the process was sent to end by."""
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    yield seen
    signal.signal(signal.SIGTERM, before)


def test_who_stood_still_too_long_writes_nothing_any_more(store, said, ended, monkeypatch):
    """As after a closed lid: the clock jumps, and another has the lease."""
    with writing(store, said.append, SLOW) as check:
        ledger = Ledger(store, before_writing=check)
        ledger.put("units", {"a": {"status": "succeeded"}})
        leave(store, 1)
        ledger.put("units", {"b": {"status": "succeeded"}})  # nobody can have it so soon
        real = lock._now
        monkeypatch.setattr(lock, "_now", lambda: real() + 100)
        with pytest.raises(LostLeaseError, match=r"process 7 on elsewhere\) took over"):
            ledger.put("units", {"c": {"status": "succeeded"}})
    assert [key for key, _ in Ledger(store, writable=False).items("units")] == ["a", "b"]
    assert json.loads(store.read(store.lock))["owner"] == "other"


def wait_for(ended: list[int]) -> None:
    deadline = time.monotonic() + 20
    while not ended and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ended == [signal.SIGTERM]


def test_a_command_whose_lease_is_lost_ends(store, said, ended):
    with writing(store, said.append, Pace(0.2, 60, 0.1)) as check:
        leave(store, 1)
        wait_for(ended)
        with pytest.raises(LostLeaseError):  # soon after a renewal, too
            check()
    assert json.loads(store.read(store.lock))["owner"] == "other"


def test_a_lease_that_is_another_s_is_not_given_back(store, said):
    with writing(store, said.append, SLOW):
        leave(store, 1)
    assert json.loads(store.read(store.lock))["owner"] == "other"


def test_a_first_write_that_arrives_once_another_has_settled_leaves_one_writer(store, said, ended):
    late, held, over = Stalling(store), threading.Event(), threading.Event()

    def begin() -> None:
        with writing(late, said.append, FAST) as check:
            check()
            held.set()
            assert over.wait(20)
            check()

    other = threading.Thread(target=begin)
    other.start()
    assert late.stalled.wait(20)
    with writing(store, said.append, Pace(0.3, 60, 0.1)) as check:
        check()
        late.flowing.set()
        wait_for(ended)
        with pytest.raises(LostLeaseError, match="took over"):
            check()
    assert held.wait(20)
    over.set()
    other.join()
    assert not store.exists(store.lock)
    assert ended == [signal.SIGTERM]


def test_who_froze_in_a_renewal_does_not_get_the_lease_back(store, said, ended):
    """It is on its way when another takes over, and arrives after that."""
    frozen = Stalling(store)
    frozen.flowing.set()
    with writing(frozen, said.append, FAST) as check:
        frozen.stalled.clear()
        frozen.flowing.clear()
        assert frozen.stalled.wait(20)
        with writing(store, said.append, FAST) as check_of_next:
            frozen.flowing.set()
            wait_for(ended)
            with pytest.raises(LostLeaseError, match="took over"):
                check()
            time.sleep(0.3)  # as long as its holder relies on a renewal
            check_of_next()
    assert not store.exists(store.lock)
    assert ended == [signal.SIGTERM]


def test_a_store_that_stood_still_costs_nobody_the_lease(store, said, ended):
    slow = Stalling(store)
    slow.flowing.set()
    with writing(slow, said.append, FAST) as check:
        slow.flowing.clear()
        assert slow.stalled.wait(20)
        time.sleep(0.6)  # longer than a lease holds without being renewed
        slow.flowing.set()
        check()
    assert not store.exists(store.lock)
    assert ended == []


def test_a_store_that_fails_while_the_lease_is_taken_is_one_message(store, said, monkeypatch):
    def fail(*arguments: object) -> bytes:
        raise OSError("no route to host")

    monkeypatch.setattr(RunDirectory, "read", fail)
    with pytest.raises(ConfigError, match="no route to host"), writing(store, said.append, FAST):
        pass


def test_the_system_frees_the_lock_of_a_process_that_was_killed(tmp_path: Path) -> None:
    script = (
        "import time\nfrom raypipe.storage.lock import writing\n"
        "from raypipe.storage.run_directory import RunDirectory\n"
        f"with writing(RunDirectory.at({str(tmp_path)!r}), print):\n"
        "    print('held', flush=True)\n    time.sleep(600)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        run = RunDirectory.at(tmp_path)
        with pytest.raises(ConfigError, match="another raypipe command"), writing(run, print):
            pass
    finally:
        holder.kill()
        holder.wait()
    with writing(run, print):
        pass


def test_what_a_write_that_was_killed_left_is_removed(tmp_path: Path) -> None:
    script = (
        "import os, signal\nfrom raypipe.storage.run_directory import RunDirectory\n"
        f"run = RunDirectory.at({str(tmp_path)!r})\n"
        "os.fsync = lambda file: os.kill(os.getpid(), signal.SIGKILL)\n"
        "run.write(run.model('t'), b'whole')\n"
    )
    (tmp_path / "models").mkdir()
    assert subprocess.run([sys.executable, "-c", script]).returncode == -signal.SIGKILL
    (left,) = tmp_path.rglob("*.tmp")
    (tmp_path / "mine.tmp").touch()
    run = RunDirectory.at(tmp_path)
    with writing(run, print):
        assert left.exists()  # a process that the killed command left may be writing it
    before = time.time() - 120
    for path in (left, tmp_path / "mine.tmp"):
        os.utime(path, (before, before))
    with writing(run, print):
        assert not left.exists()
    assert (tmp_path / "mine.tmp").exists()
