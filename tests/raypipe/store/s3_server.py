"""An S3 server of this machine: moto's. ``python s3_server.py`` prints its port."""

from __future__ import annotations

from collections.abc import Iterable
from io import BytesIO
from threading import Lock
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server


class OneAtATime:
    """moto is not made for several requests at once."""

    def __init__(self) -> None:
        self._moto, self._lock = DomainDispatcherApplication(create_backend_app), Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if length := environ.get("CONTENT_LENGTH"):  # of a client that may stand still meanwhile
            environ["wsgi.input"] = BytesIO(environ["wsgi.input"].read(int(length)))
        with self._lock:
            return list(self._moto(environ, start_response))


if __name__ == "__main__":
    server = make_server("127.0.0.1", 0, OneAtATime(), threaded=True)
    print(server.server_port, flush=True)
    server.serve_forever()
