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

from raypipe import lock
from raypipe.errors import ConfigError
from raypipe.ledger import Ledger
from raypipe.lock import LostLeaseError, Pace, writing
from raypipe.paths import RunDirectory

#: as the real one, but for its speed
FAST = Pace(beat_s=0.05, expiry_s=0.5, settling_s=0.1)


@pytest.fixture
def store() -> RunDirectory:
    """A run directory that is no local path; all who use it share its one file system."""
    run = RunDirectory("mock://run")
    run.__dict__["_opened"] = (arrow_fs._MockFileSystem(), "run")
    run.fs.create_dir("run")
    return run


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
    with writing(store, said.append, Pace(60, 120, 0)) as check:
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


def test_a_command_whose_lease_is_lost_ends(store, said, ended):
    with writing(store, said.append, Pace(0.05, 0.08, 0)):
        leave(store, 1)
        deadline = time.monotonic() + 20
        while not ended and time.monotonic() < deadline:
            time.sleep(0.01)
    assert ended == [signal.SIGTERM]


def test_the_system_frees_the_lock_of_a_process_that_was_killed(tmp_path: Path) -> None:
    script = (
        "import time\nfrom raypipe.lock import writing\nfrom raypipe.paths import RunDirectory\n"
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
