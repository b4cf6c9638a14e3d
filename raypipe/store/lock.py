"""Lock of a run directory: one command at a time writes it.

On a file system this is a file lock, which the operating system releases when its process ends. In
an object store it is a lease: an object that its holder renews, and that expires without renewal.
pyarrow's file systems, which write everything else in a run directory, offer no conditional writes
(compare-and-swap). obstore does: a write succeeds only if the object is still at the version that
the writer has seen.
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
from datetime import timedelta
from importlib.util import find_spec
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from filelock import FileLock, Timeout
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import GCSStore, S3Store

from raypipe.errors import ConfigError, LostLeaseError
from raypipe.redaction import without_credentials
from raypipe.store import run_status
from raypipe.store.run_directory import RunDirectory, make_folder

if TYPE_CHECKING:
    from obstore import UpdateVersion
    from obstore.store import S3Credential

log = logging.getLogger(__name__)

#: seconds in which a reader that looks at a lock has released it
_GLANCE_S = 0.2
#: plain HTTP matters only where the endpoint is http://; a failing request is repeated for a while
_OPTIONS: Any = {
    "client_options": {"allow_http": True},
    "retry_config": {"retry_timeout": timedelta(seconds=30)},
}


@dataclass(frozen=True)
class Pace:
    """Timing of a lease.

    Attributes:
        beat_s: seconds between renewals.
        expiry_s: seconds without renewal after which another command takes the lease over.

    """

    beat_s: float = 10.0
    expiry_s: float = 60.0


@contextmanager
def writing(
    run: RunDirectory, say: Callable[[str], None], pace: Pace = Pace()
) -> Iterator[Callable[[], None]]:
    """Hold the lock of a run directory.

    Yields a check to call before each write that must not follow a write of another command. It
    raises LostLeaseError if another command may have taken the run directory over.

    Raises:
        ConfigError: another command holds the lock, the run directory cannot be written, or its
            storage offers no lock.

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


def is_held(run: RunDirectory) -> bool:
    """Whether a command writes the run directory, at a glance.

    In an object store it is whether the lease was renewed lately, by this machine's clock and that
    of the store: good enough to show, not to write.

    Raises:
        OSError: the store does not respond.

    """
    if not run.is_local:
        info = run.fs.get_file_info(run.lock)
        return bool(info.size) and time.time() - info.mtime.timestamp() < Pace.expiry_s
    # commands that share the run have a lock each
    names = [name for name in run.list(run.path()) if name.startswith(".lock")]
    return any(is_locked(run.path(name)) for name in names)


def is_locked(path: str) -> bool:
    """Whether a process has locked a file for itself, at a glance."""
    with suppress(OSError):  # there is no lock, or the file system has none
        descriptor = os.open(path, os.O_NONBLOCK)  # to read; a pipe would make it wait
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
        held = lock.acquire()
    except Timeout as error:
        holder: dict[str, Any] = {}
        # before a command writes its status, it may have that of a process that was killed
        with suppress(OSError):
            status = run_status.read(run)
            if status is not None and status.status == "running":
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

    The store decides who holds it: a write is accepted only if the lease is still at the version
    that the writer has seen. A write that arrives late is refused. No two clocks are compared: a
    command takes a lease over after it saw the same version for ``expiry_s`` on its own clock. A
    released lease stays as an empty object, because obstore cannot delete conditionally.
    """

    def __init__(self, run: RunDirectory, pace: Pace) -> None:
        self._run, self._pace = run, pace
        self._object = ConditionalObject.at(run, run.lock)
        self._version: UpdateVersion | None = None  # the last one seen; None: no object
        # each renewal has another ``beat``, and so another version
        self._mine = {"owner": secrets.token_hex(), "pid": os.getpid(), "host": platform.node()}
        self._beats = itertools.count()
        self._renewed = float("-inf")
        self._renewing = Lock()
        self._over = Event()
        self._thread = Thread(target=self._beat, name="lease", daemon=True)

    def take(self, say: Callable[[str], None]) -> None:
        """Hold the lease from now on. Raises ConfigError: another command does; OSError."""
        self._version = self._wait_until_free(say)
        try:
            self._renew()
            self._require_conditions()
        except LostLeaseError as error:
            raise _taken(self._run, error.holder) from error
        self._thread.start()

    def check(self) -> None:
        """Raise LostLeaseError unless no other command can have taken the lease over."""
        trust_s = self._pace.expiry_s / 2  # well before another command takes it over
        while _now() - self._renewed >= trust_s:  # again where a renewal took too long
            self._renew()

    def release(self) -> None:
        """Leave the lease to the next command."""
        self._over.set()
        self._thread.join()
        try:
            self._write(b"")
        except (LostLeaseError, OSError) as error:
            log.warning("%s: the lease was not released: %s", self._run.shown, error)

    def _wait_until_free(self, say: Callable[[str], None]) -> UpdateVersion | None:
        """Return the version to replace: of a free lease, or of one that has expired."""
        content, version = self._object.read()
        if not content:
            return version
        expiry_s = self._pace.expiry_s
        say(
            f"{self._run.shown} is locked by {_command(parsed(content))}; "
            f"watching for {expiry_s:g} s whether it is alive"
        )
        start = _now()
        while _now() - start < expiry_s:
            time.sleep(self._pace.beat_s)
            content, current = self._object.read()
            if not content:
                return current
            if current != version:
                raise _taken(self._run, _command(parsed(content)))
        return version

    def _require_conditions(self) -> None:
        """Raise ConfigError if the store accepts writes whose condition is not met."""
        outdated = self._version
        self._renew()
        for version in (None, outdated):
            with suppress(ConflictError):
                self._object.write(b"", version)
                raise ConfigError(
                    f"--run-dir {self._run.shown}: its store ignores the conditions of writes "
                    "(If-None-Match, If-Match), so that two commands could write at once; use "
                    "another store, or a path on storage that all nodes mount"
                )

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
            self._write(json.dumps({**self._mine, "beat": next(self._beats)}).encode())
            self._renewed = start

    def _write(self, content: bytes) -> None:
        """Replace the version seen last. Raises LostLeaseError: another command has; OSError."""
        try:
            self._version = self._object.write(content, self._version)
        except ConflictError:
            # the lease is still ours if only the response to an earlier attempt was lost
            found, version = self._object.read()
            holder = parsed(found)
            if holder != self._mine and version != self._version:
                self._renewed = float("-inf")  # no further write
                raise LostLeaseError(self._run.shown, _command(holder)) from None
            self._version = self._object.write(content, version)


def _now() -> float:
    """Seconds since the machine started, including those asleep."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class ConflictError(OSError):
    """The object is not at the version that a write expects."""


@dataclass(frozen=True)
class ConditionalObject:
    """An object that several commands write, each replacing only the version that it has seen."""

    store: S3Store | GCSStore
    key: str

    @classmethod
    def at(cls, run: RunDirectory, path: str) -> ConditionalObject:
        """Return the object at a path in a run directory; it need not exist.

        Raises:
            ConfigError: the storage of the run directory offers no conditional writes.
            OSError: the store cannot be opened.

        """
        bucket, _, key = path.partition("/")
        uri = urlsplit(run.location)
        given = dict(parse_qsl(uri.query))
        endpoint = given.get("endpoint_override", "")
        if endpoint and "://" not in endpoint:
            endpoint = f"{given.get('scheme', 'https')}://{endpoint}"
        with _as_os_error():
            if run.fs.type_name == "s3":
                config: Any = {"region": run.fs.region}  # as pyarrow has resolved it
                config |= {"endpoint": endpoint} if endpoint else {}
                credentials = _s3_credentials(uri)
                s3 = S3Store(bucket, config=config, credential_provider=credentials, **_OPTIONS)
                return cls(s3, key)
            if run.fs.type_name == "gcs":
                # an emulator; obstore writes only with a token
                token = {"token": "", "expires_at": None}
                nobody: Any = (lambda: token) if uri.username == "anonymous" else None
                config = {"base_url": endpoint} if endpoint else {}
                gcs = GCSStore(bucket, config=config, credential_provider=nobody, **_OPTIONS)
                return cls(gcs, key)
        raise ConfigError(
            f"--run-dir {run.shown}: two commands cannot be kept apart on this kind of storage; "
            "use s3://, gs:// or a path on storage that all nodes mount"
        )

    def read(self) -> tuple[bytes, UpdateVersion | None]:
        """Return content and version; empty and None if the object does not exist.

        Raises:
            OSError: the store does not respond, or denies access.

        """
        with _as_os_error():
            try:
                result = self.store.get(self.key)
            except FileNotFoundError:
                return b"", None
            return bytes(result.bytes()), _version(result.meta)

    def write(self, content: bytes, expected: UpdateVersion | None) -> UpdateVersion:
        """Replace the version ``expected`` (None: create the object); return the new version.

        Raises:
            ConflictError: the object is at another version. It may have been written by an earlier
                attempt of this request, whose response was lost.
            OSError: the store does not respond, or denies access.

        """
        with _as_os_error():
            return _version(self.store.put(self.key, content, mode=expected or "create"))


def _version(stored: Mapping[str, object]) -> UpdateVersion:
    """Version as ``put`` accepts it: an ETag, in GCS also a generation number."""
    named = {name: stored[name] for name in ("e_tag", "version") if stored[name] is not None}
    return cast("UpdateVersion", named)


def _s3_credentials(uri: SplitResult) -> Callable[[], S3Credential] | None:
    """Return the source of credentials: the URI, else boto3, else None: obstore itself.

    obstore reads the environment and the roles of machines and containers. Profiles and single
    sign-on (``~/.aws``), which pyarrow reads as well, need boto3.
    """
    if uri.username:
        key, secret = unquote(uri.username), unquote(uri.password or "")
        given = {"access_key_id": key, "secret_access_key": secret}
        return lambda: cast("S3Credential", {**given, "token": None, "expires_at": None})
    if find_spec("boto3") is None:
        return None
    from obstore.auth.boto3 import Boto3CredentialProvider

    return lambda: Boto3CredentialProvider()()  # opened where obstore handles errors


@contextmanager
def _as_os_error() -> Iterator[None]:
    """Turn the client's errors into OSError without the response, which may repeat credentials."""
    try:
        yield
    except (AlreadyExistsError, PreconditionError):
        raise ConflictError("the object was written by another command at the same time") from None
    except (BaseError, OSError, ValueError) as error:
        reason = str(error).partition("\n")[0].partition("<")[0].rstrip(": ")
        raise OSError(without_credentials(reason)) from None
