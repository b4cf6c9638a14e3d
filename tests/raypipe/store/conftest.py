"""A real S3 server of this machine: moto's, with atomic conditional writes as stores have them.

It ignores conditions in the bucket ``unconditional``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BytesIO
from threading import Lock, Thread
from typing import Any

import pytest
from pyarrow import fs as arrow_fs

from raypipe.store.lock import Pace

#: as the real one, but for its speed
FAST = Pace(beat_s=0.1, expiry_s=2)

_CONDITIONS = ("HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH")


def uri_of(server: str, name: str, user: str = "key:any@", bucket: str = "runs") -> str:
    """A run directory in a bucket of the server."""
    return f"s3://{user}{bucket}/{name}?endpoint_override={server}&scheme=http&region=us-east-1"


@contextmanager
def served(application: Any) -> Iterator[str]:
    """The ``host:port`` of a WSGI application."""
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    threads = make_server("127.0.0.1", 0, application, threaded=True)
    Thread(target=threads.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{threads.server_port}"
    threads.shutdown()


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The ``host:port`` of a server with the buckets ``runs`` and ``unconditional``."""
    moto = pytest.importorskip("moto.server", reason="the package moto[server] is not installed")
    store, one = moto.DomainDispatcherApplication(moto.create_backend_app), Lock()

    def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """moto checks a condition and writes in two steps, between which another request fits."""
        if length := environ.get("CONTENT_LENGTH"):  # of a client that may stand still meanwhile
            environ["wsgi.input"] = BytesIO(environ["wsgi.input"].read(int(length)))
        if environ["PATH_INFO"].startswith("/unconditional/"):
            for name in _CONDITIONS:
                environ.pop(name, None)
        with one:
            return list(store(environ, start_response))

    options: Any = {"access_key": "key", "secret_key": "any", "region": "us-east-1"}
    options |= {"scheme": "http", "allow_bucket_creation": True}
    with served(answer) as address:
        files = arrow_fs.S3FileSystem(endpoint_override=address, **options)
        for bucket in ("runs", "unconditional"):
            files.create_dir(bucket)
        yield address
