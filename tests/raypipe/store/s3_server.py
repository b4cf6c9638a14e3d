"""An S3 server of this machine: moto's, with atomic conditional writes as real stores have them.

``python s3_server.py`` prints its port. Conditions are ignored in the bucket ``unconditional``.
"""

from __future__ import annotations

from collections.abc import Iterable
from io import BytesIO
from threading import Lock
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

_CONDITIONS = ("HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH")


class OneAtATime:
    """moto checks a condition and writes in two steps, between which another request fits."""

    def __init__(self) -> None:
        self._moto, self._lock = DomainDispatcherApplication(create_backend_app), Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if length := environ.get("CONTENT_LENGTH"):  # of a client that may stand still meanwhile
            environ["wsgi.input"] = BytesIO(environ["wsgi.input"].read(int(length)))
        if environ["PATH_INFO"].startswith("/unconditional/"):
            for name in _CONDITIONS:
                environ.pop(name, None)
        with self._lock:
            return list(self._moto(environ, start_response))


if __name__ == "__main__":
    server = make_server("127.0.0.1", 0, OneAtATime(), threaded=True)
    print(server.server_port, flush=True)
    server.serve_forever()
