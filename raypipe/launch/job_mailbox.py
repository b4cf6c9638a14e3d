"""Mailbox actor between the driver and a worker group.

Its process imports nothing else of raypipe: it passes jobs on without unpickling them.
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from raypipe.errors import UnitError

_POLL_S = 0.02
# the end of a training may wait this long
_WATCH_S = 0.1


class Progress(NamedTuple):
    """Progress of a job since the last request.

    ``nodes`` are the IDs of the workers' nodes; ``ending_s`` is how long an early end would take.
    """

    job: str | None
    rows: list[dict[str, Any] | str]
    outcome: dict[str, Any] | None
    failure: UnitError | None
    nodes: frozenset[str] = frozenset()
    ending_s: float = 0.0


class JobMailbox:
    """Asynchronous actor: its methods interleave in one thread."""

    def __init__(self) -> None:
        self._name: str | None = None
        self._job = b""
        self._rows: list[dict[str, Any] | str] = []
        self._outcome: dict[str, Any] | None = None
        self._failure: UnitError | None = None
        self._threads = 1
        self._group: Any = None
        self._nodes: frozenset[str] = frozenset()
        self._end, self._ending_s = False, 0.0
        self._closed = False

    async def join(self, group: Any, node: str) -> None:
        """Record the placement group of the workers, and the node of one of them."""
        if group != self._group:
            self._group, self._nodes = group, frozenset()
        self._nodes |= {node}

    async def submit(self, name: str, job: bytes, threads: int) -> None:
        """Submit a pickled job to the workers; the previous job must have ended."""
        self._name, self._job, self._rows, self._outcome = name, job, [], None
        self._threads, self._end, self._ending_s = threads, False, 0.0

    async def next(self, done: str | None) -> tuple[str, bytes] | None:
        """Wait for the job after ``done``, return its name and it; None once closed."""
        while not self._closed:
            if self._outcome is None and self._name is not None and self._name != done:
                return self._name, self._job
            await asyncio.sleep(_POLL_S)
        return None

    async def threads(self) -> int:
        """Return the number of threads that each worker should compute with."""
        return self._threads

    async def post(self, row: dict[str, Any] | str) -> int:
        """Record a row or a message of a job; return the number of threads as ``threads``."""
        self._rows.append(row)
        return self._threads

    async def await_end(self, job: str, ending_s: float, seconds: float) -> bool:
        """Wait up to ``seconds``; return whether the job should save a checkpoint and end.

        ``ending_s`` is how long that would take.
        """
        if job == self._name:
            self._ending_s = ending_s
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while job == self._name and not self._end and loop.time() < until:
            await asyncio.sleep(_WATCH_S)
        return job == self._name and self._end

    async def finish(self, outcome: dict[str, Any]) -> None:
        """Record that rank 0 has ended the job."""
        self._outcome = outcome

    async def settle(self, failure: UnitError) -> None:
        """Record why the group ended; ``drain`` returns it to callers that wait for a job."""
        self._failure = failure

    async def drain(self, seconds: float, threads: int, end: bool) -> Progress:
        """Return the progress since the last request; wait up to ``seconds`` for some.

        Set the number of ``threads`` of the workers, and whether they should ``end`` early.
        """
        self._threads, self._end = threads, end
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while not (self._rows or self._outcome or self._failure) and loop.time() < until:
            await asyncio.sleep(_POLL_S)
        rows, self._rows = self._rows, []
        return Progress(self._name, rows, self._outcome, self._failure, self._nodes, self._ending_s)

    async def close(self) -> Any:
        """Release the workers; return their placement group if a job is still running."""
        self._closed = True
        return self._group if self._name is not None and self._outcome is None else None
