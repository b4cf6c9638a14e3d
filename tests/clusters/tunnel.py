"""A way to a port of a host that can break, as that of ``ssh -L``."""

from __future__ import annotations

import socket
from contextlib import suppress
from threading import Thread


class Tunnel:
    """Passes on what comes to a port of this machine, while it is open.

    Args:
        host: where to.
        port: of the host.

    """

    def __init__(self, host: str, port: int) -> None:
        self._target = host, port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._own = self._listener.getsockname()
        self._ends: list[socket.socket] = []
        Thread(target=self._accept, args=[self._listener], daemon=True).start()

    @property
    def address(self) -> str:
        """What a client takes for the host."""
        return f"http://127.0.0.1:{self._own[1]}"

    def open(self) -> None:
        """Listen again."""
        self._listener = socket.create_server(self._own)
        Thread(target=self._accept, args=[self._listener], daemon=True).start()

    def close(self) -> None:
        """Break all connections and take no new ones."""
        for one in (self._listener, *self._ends):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._ends.clear()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):  # it was closed
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(self._target)
                self._ends += [near, far]
                for source, sink in ((near, far), (far, near)):
                    Thread(target=_pass_on, args=[source, sink], daemon=True).start()


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while content := source.recv(1 << 16):
            sink.sendall(content)
        sink.shutdown(socket.SHUT_WR)
