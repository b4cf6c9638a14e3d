"""The page of a run that begins, in a process that ends after the run: ``raypipe run --ui``.

A separate process neither slows the run nor can end it. It inherits the socket, so that the link
works from the moment when it is printed, and the end of its standard input tells it that the run
has ended, however that came.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from raypipe.store.run_directory import RunDirectory
from raypipe.ui.address import key, listen

_HOST = "127.0.0.1"
#: seconds after the run in which an open page asks once more, and so shows the end
_AFTERWARDS_S = 12


@contextmanager
def served(run: RunDirectory) -> Iterator[None]:
    """Print the link of a run's page, for this machine, and serve it while the body runs.

    Its process has another session, so Ctrl-C ends the run and not the page.
    """
    with listen(_HOST, 0) as listener:
        number = listener.fileno()
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, run.location, str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[number],
            start_new_session=True,
        )
        link = f"http://{_HOST}:{listener.getsockname()[1]}/run/{key(run)}"
        print(f"page: {link} (while this runs)", flush=True)
    try:
        yield
    finally:
        assert process.stdin is not None
        process.stdin.close()


def _end_with_input() -> None:
    sys.stdin.read()
    time.sleep(_AFTERWARDS_S)
    os._exit(0)


def main(location: str, number: int) -> None:
    """Answer requests at an inherited socket until the standard input has ended."""
    threading.Thread(target=_end_with_input, daemon=True).start()
    os.nice(5)  # the run goes first
    from raypipe.ui.pages import Pages  # takes a second
    from raypipe.ui.server import answer

    answer(Pages([location]), socket.socket(fileno=number))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
