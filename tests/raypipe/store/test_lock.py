"""One writer of a run directory: a lock on a file system, a lease in an object store.

Of several writers the store decides which one succeeds.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from pyarrow import fs as arrow_fs

from raypipe.errors import ConfigError, LostLeaseError
from raypipe.store import lock
from raypipe.store.ledger import Ledger
from raypipe.store.lock import ConditionalObject, ConflictError, Pace, is_held, writing
from raypipe.store.run_directory import RunDirectory
from raypipe.store.run_status import RunStatus
from tests.command import is_alive, until
from tests.raypipe.examples.hills import killed
from tests.raypipe.store.conftest import FAST, served, uri_of
from tests.scenario import cases

#: the lease of another command
OTHER = json.dumps({"owner": "other", "host": "elsewhere", "pid": 7, "beat": 5}).encode()


@pytest.fixture
def store(server: str, request: pytest.FixtureRequest) -> RunDirectory:
    """A run directory in the bucket of a real server."""
    return RunDirectory.at(uri_of(server, re.sub(r"\W", "-", request.node.name)))


@pytest.fixture
def disturb(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable], None]:
    """Let leases be written through a function."""
    real = ConditionalObject.at

    def make(write_it: Callable) -> None:
        def at(run: RunDirectory, path: str) -> object:
            found = real(run, path)
            return SimpleNamespace(read=found.read, write=partial(write_it, found.write))

        monkeypatch.setattr(ConditionalObject, "at", at)

    return make


def owner(run: RunDirectory) -> str:
    return json.loads(run.read(run.lock))["owner"]


def is_free(run: RunDirectory) -> bool:
    return run.read(run.lock) == b""


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def ended() -> Iterator[list[int]]:
    """Signals that the process was sent to end by."""
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    yield seen
    signal.signal(signal.SIGTERM, before)


def test_a_lease_is_renewed_and_given_back(store, said):
    with writing(store, said.append, Pace(beat_s=0.1, expiry_s=1)) as check:
        time.sleep(1.2)  # longer than it holds without being renewed
        check()
        assert is_held(store)
    assert is_free(store)
    assert not is_held(store)
    with writing(store, said.append, FAST):
        pass
    assert said == []


def test_a_second_command_is_refused_while_the_first_lives(store, said):
    other = Pace(beat_s=0.1, expiry_s=3600)  # one renewal is enough
    message = rf"process {os.getpid()} on .* is writing it"
    with writing(store, said.append, FAST), pytest.raises(ConfigError, match=message):
        writing(store, said.append, other).__enter__()
    assert len(said) == 1
    assert is_free(store)  # the refused one left the lease alone


@pytest.mark.parametrize(
    ("left", "pace", "message"),
    [
        (OTHER, Pace(beat_s=0.1, expiry_s=1), "process 7 on elsewhere"),
        (b"{", Pace(beat_s=0.1, expiry_s=0.2), "locked by another raypipe command"),
        (OTHER, Pace(beat_s=0.1, expiry_s=60), "process 7 on elsewhere"),  # is released meanwhile
    ],
)
def test_what_another_command_left_is_taken_over_once_it_expired(store, said, left, pace, message):
    store.write(store.lock, left)
    if pace.expiry_s == 60:
        threading.Timer(0.3, store.write, (store.lock, b"")).start()
    with writing(store, said.append, pace):
        assert owner(store) != "other"
    (text,) = said
    assert message in text


@pytest.mark.parametrize("left", [None, b"", OTHER], ids=["nothing", "released", "expired"])
def test_of_commands_that_begin_at_the_same_time_one_writes(store, said, left):
    if left is not None:
        store.write(store.lock, left)
    begin, refused = threading.Barrier(3), threading.Semaphore(0)

    def command() -> str:
        begin.wait(20)
        try:
            with writing(store, said.append, FAST):
                assert all(refused.acquire(timeout=20) for _ in range(2))
                return "held"
        except ConfigError as error:
            refused.release()
            return str(error)

    with ThreadPoolExecutor(3) as threads:
        answers = [each.result() for each in [threads.submit(command) for _ in range(3)]]
    assert answers.count("held") == 1
    assert ["is writing it" in text for text in answers].count(True) == 2
    assert is_free(store)


def test_who_stood_still_too_long_writes_nothing_any_more(store, said, ended, monkeypatch):
    """As after SIGSTOP or a closed lid: the clock jumps, and another has the lease."""
    with writing(store, said.append, Pace(beat_s=60, expiry_s=120)) as check:
        ledger = Ledger(store, before_writing=check)
        ledger.put("units", {"a": {"status": "succeeded"}})
        store.write(store.lock, OTHER)
        ledger.put("units", {"b": {"status": "succeeded"}})  # nobody can have it so soon
        real = lock._now
        monkeypatch.setattr(lock, "_now", lambda: real() + 100)
        with pytest.raises(LostLeaseError, match=r"process 7 on elsewhere\) took over"):
            ledger.put("units", {"c": {"status": "succeeded"}})
    assert [key for key, _ in Ledger(store, writable=False).items("units")] == ["a", "b"]
    assert owner(store) == "other"  # it is not given back


@pytest.mark.parametrize("deleted", [False, True])
def test_a_command_whose_lease_is_lost_ends(store, said, ended, deleted):
    with writing(store, said.append, Pace(0.2, 60)) as check:
        store.delete(store.lock) if deleted else store.write(store.lock, OTHER)
        until(lambda: ended == [signal.SIGTERM], "it is ended", 20)
        with pytest.raises(LostLeaseError):  # soon after a renewal, too
            check()
    assert store.exists(store.lock) is not deleted
    assert deleted or owner(store) == "other"


class Faulty:
    """Some of the writes, by their number, go wrong; the fifth is the first after the beginning."""

    def __init__(self, **faults: str) -> None:
        self.faults, self.number = faults, 0

    def __call__(self, write, content, expected):
        self.number += 1
        version = write(content, expected)
        match self.faults.get(f"write_{self.number}"):
            case "response lost":
                return write(content, expected)  # as the client does where a connection breaks
            case "connection reset":
                raise OSError("connection reset")
            case "late":
                time.sleep(0.6)  # longer than the holder relies on a renewal
        return version


def test_after_a_renewal_that_took_too_long_the_holder_renews_again(store, said, disturb):
    """Another may have taken over between the write and its late response."""
    late_once = Faulty(write_5="late")
    disturb(late_once)
    with writing(store, said.append, Pace(beat_s=60, expiry_s=1)) as check:
        assert late_once.number == 4
        time.sleep(0.6)
        check()
        assert late_once.number >= 6


@pytest.mark.parametrize(
    "faults",
    [
        {"write_1": "response lost"},
        {"write_5": "response lost"},
        {"write_5": "connection reset", "write_6": "connection reset"},
    ],
)
def test_writes_that_go_wrong_cost_nobody_the_lease(store, said, ended, disturb, caplog, faults):
    faulty = Faulty(**faults)
    disturb(faulty)
    with writing(store, said.append, FAST) as check:
        until(lambda: faulty.number >= 8, "it is renewed after the faults", 20)
        check()
    assert is_free(store)
    assert ended == []
    warned = "was not renewed: connection reset" in caplog.text
    assert warned == ("connection reset" in faults.values()) == bool(caplog.records)


@pytest.mark.parametrize("becomes", ["unreachable", "deleted", "another's"])
def test_a_lease_that_cannot_be_taken_is_one_message(store, said, disturb, becomes):
    def lose(write, content, expected):
        if becomes == "unreachable":
            raise OSError("no route to host")
        version = write(content, expected)
        store.delete(store.lock) if becomes == "deleted" else store.write(store.lock, OTHER)
        return version

    message = "no route to host" if becomes == "unreachable" else "is writing it"
    disturb(lose)
    with pytest.raises(ConfigError, match=message), writing(store, said.append, FAST):
        pass


def test_a_store_that_ignores_conditions_is_refused(server, said):
    run = RunDirectory.at(uri_of(server, "run", bucket="unconditional"))
    for _ in range(2):
        with pytest.raises(ConfigError, match="ignores the conditions"), writing(run, said.append):
            pass
    assert said == []


def test_a_file_lock_names_the_command_that_holds_it(tmp_path):
    run = RunDirectory.at(tmp_path)
    at = "2026-01-01T00:00:00+00:00"
    known = RunStatus("toy", "toy-1", "raypipe run", "running", at, at, at, host="node7", pid=7)
    holders = [
        (known, r"\(process 7 on node7\) is writing it"),
        (replace(known, status="failed"), "another raypipe command is writing it"),
    ]
    with writing(run, print):
        for status, message in holders:
            run.write(run.status, status.to_bytes())
            with pytest.raises(ConfigError, match=message), writing(run, print):
                pass


def test_children_that_outlive_the_holder_do_not_keep_the_lock(tmp_path):
    run, pids = RunDirectory.at(tmp_path), tmp_path / "pids"

    def hold() -> None:
        with writing(run, print):
            started, ready = os.pipe()
            if (child := os.fork()) == 0:
                os.write(ready, b"x")
                time.sleep(600)
            os.read(started, 1)  # the child has closed its copy of the lock
            other = subprocess.Popen(["sleep", "600"], close_fds=False)
            pids.write_text(f"{child} {other.pid}")
            os.kill(os.getpid(), signal.SIGKILL)

    assert killed(hold)
    children, before = [int(pid) for pid in pids.read_text().split()], Path(run.lock).stat()
    try:
        with writing(run, print):  # the same file: those who wait for it wait for the same lock
            assert Path(run.lock).stat().st_ino == before.st_ino
            assert all(map(is_alive, children))
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("blocked", ["lock", "flock"])
def test_a_lock_that_cannot_be_created_is_one_message(tmp_path, monkeypatch, blocked):
    """Below a file: tests/mistakes.yaml."""

    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    run = RunDirectory.at(tmp_path / "run")
    if blocked == "lock":
        Path(run.lock).mkdir(parents=True)
    else:  # a file system without locks
        monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(ConfigError, match="run: cannot be written: "), writing(run, print):
        pass


def test_what_a_write_that_was_killed_left_is_removed(tmp_path):
    run = RunDirectory.at(tmp_path)
    (tmp_path / "models").mkdir()

    def write() -> None:
        os.fsync = lambda file: os.kill(os.getpid(), signal.SIGKILL)
        run.write(run.model("t"), b"whole")

    assert killed(write)
    (left,) = tmp_path.rglob("*.tmp")
    (tmp_path / "mine.tmp").touch()
    with writing(run, print):
        assert left.exists()  # a process that the killed command left may be writing it
    before = time.time() - 120
    for path in (left, tmp_path / "mine.tmp"):
        os.utime(path, (before, before))
    with writing(run, print):
        assert not left.exists()
    assert (tmp_path / "mine.tmp").exists()


# the writes of a lease

SECRET = "wJalrXUtn/FEMI+x"
QUOTED = "wJalrXUtn%2FFEMI%2Bx"


def opened(location: str) -> ConditionalObject:
    run = RunDirectory.at(location)
    return ConditionalObject.at(run, run.lock)


@pytest.fixture
def gcs() -> Iterator[tuple[str, dict[str, tuple[bytes, int]]]]:
    """The ``host:port`` of a server, and its objects: content and generation by path.

    It has as much of the XML interface of Google's storage as an object with a generation needs.
    """
    from werkzeug import Request, Response

    objects: dict[str, tuple[bytes, int]] = {}

    @Request.application
    def answer(request: Request) -> Response:
        content, generation = objects.get(request.path, (b"", 0))
        if request.method == "PUT":
            if request.headers.get("x-goog-if-generation-match") not in (None, str(generation)):
                return Response(status=412)
            content, generation = request.data, generation + 1
            objects[request.path] = content, generation
        response = Response(content, 200 if generation else 404)
        response.headers["x-goog-generation"] = str(generation)
        response.last_modified = datetime.now(UTC)
        response.add_etag()
        return response

    with served(answer) as address:
        yield address, objects


@pytest.mark.parametrize(("options", "endpoint"), cases(__file__, "uris")["endpoints"])
def test_options_and_credentials_of_an_s3_uri(monkeypatch, options, endpoint):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "another")
    subject = opened(f"s3://key:{QUOTED}@bucket/some/run?{options}")
    store = subject.store
    assert subject.key == "some/run/.lock"
    assert store.config["bucket"] == "bucket"
    assert store.config["region"] == "eu-west-1"
    assert store.config.get("endpoint") == endpoint
    assert list(store.credential_provider().values()) == ["key", SECRET, None, None]
    assert SECRET not in repr(subject) + repr(store.config)


def test_credentials_of_a_profile_are_found_by_boto3(monkeypatch, tmp_path):
    profile = "[some]\naws_access_key_id = key\naws_secret_access_key = secret\n"
    (tmp_path / "credentials").write_text(profile)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "some")
    found = opened("s3://bucket/run?region=eu-west-1").store.credential_provider()
    assert (found["access_key_id"], found["secret_access_key"]) == ("key", "secret")


def test_storage_without_conditional_writes_is_refused():
    run = RunDirectory(f"mock://key:{QUOTED}@store/run")
    run.__dict__["_opened"] = (arrow_fs._MockFileSystem(), "store/run")
    with pytest.raises(ConfigError, match=r"mock://\*\*\*@store/run: two commands cannot"):
        ConditionalObject.at(run, run.lock)


def test_an_object_is_replaced_only_at_the_version_seen(server, gcs):
    in_s3 = RunDirectory.at(uri_of(server, "a%20b%2523/%C3%BC+/run"))
    address, objects = gcs
    in_gcs = RunDirectory.at(f"gs://anonymous@runs/run?endpoint_override={address}&scheme=http")
    for run in (in_s3, in_gcs):
        subject = ConditionalObject.at(run, run.lock)
        assert subject.read() == (b"", None)
        first = subject.write(b"1", None)
        assert subject.read() == (b"1", first)
        second = subject.write(b"2", first)
        for outdated in (None, first):
            with pytest.raises(ConflictError):
                subject.write(b"3", outdated)
        assert subject.read() == (b"2", second)
    assert list(objects) == ["/runs/run/.lock"]
    assert in_s3.read(in_s3.lock) == b"2"  # as pyarrow sees it
    in_s3.delete(in_s3.lock)
    with pytest.raises(ConflictError):
        ConditionalObject.at(in_s3, in_s3.lock).write(b"3", second)


def test_an_error_of_the_store_is_one_line_without_credentials(server):
    subject = opened(uri_of(server, "run", f"key:{QUOTED}@", "nothing-here"))
    with pytest.raises(OSError, match=r"nothing-here/run/\.lock") as caught:
        subject.write(b"1", None)
    assert not [part for part in ("\n", "<", SECRET, QUOTED) if part in str(caught.value)]
    assert caught.value.__cause__ is None
