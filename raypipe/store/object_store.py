"""Conditional writes of an object in an S3 or GCS bucket (compare-and-swap).

pyarrow's file systems, which write everything else in a run directory, do not offer them. obstore
does: a write succeeds only if the object is still at the version that the writer has seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import GCSStore, S3Store

from raypipe.errors import ConfigError
from raypipe.redaction import without_credentials
from raypipe.store.run_directory import RunDirectory

if TYPE_CHECKING:
    from obstore import UpdateVersion
    from obstore.store import S3Credential

#: plain HTTP matters only where the endpoint is http://; a failing request is repeated for a while
_OPTIONS: Any = {
    "client_options": {"allow_http": True},
    "retry_config": {"retry_timeout": timedelta(seconds=30)},
}


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
