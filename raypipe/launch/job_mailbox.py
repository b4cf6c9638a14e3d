"""Mailbox actor between the driver and a worker group.

Its process imports nothing of this project but what stands here: a job it hands on as it is.
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from raypipe.errors import UnitError

_POLL_S = 0.02


class Told(NamedTuple):
    """Progress of a named job since the last request."""

    job: str | None
    rows: list[dict[str, Any] | str]
    outcome: dict[str, Any] | None
    failure: UnitError | None


class Relay:
    """An actor: all methods run in one thread, in turns."""

    def __init__(self) -> None:
        self._name: str | None = None
        self._job = b""
        self._rows: list[dict[str, Any] | str] = []
        self._outcome: dict[str, Any] | None = None
        self._failure: UnitError | None = None
        self._group: Any = None
        self._closed = False

    async def join(self, group: Any) -> None:
        """A worker says where it is."""
        self._group = group

    async def submit(self, name: str, job: bytes) -> None:
        """A pickled job for the workers, once the one before has ended."""
        self._name, self._job, self._rows, self._outcome = name, job, [], None

    async def next(self, done: str | None) -> bytes | None:
        """The job that is to be done; a worker waits for it, after the one it has done."""
        while not self._closed:
            if self._outcome is None and self._name not in (None, done):
                return self._job
            await asyncio.sleep(_POLL_S)
        return None

    async def post(self, told: dict[str, Any] | str) -> None:
        """A row or a remark of a job."""
        self._rows.append(told)

    async def finish(self, outcome: dict[str, Any]) -> None:
        """Rank 0 has ended the job."""
        self._outcome = outcome

    async def settle(self, failure: UnitError) -> None:
        """The group is over; whoever still waits for a job hears why."""
        self._failure = failure

    async def drain(self, seconds: float) -> Told:
        """Return the progress since the last request, after waiting some time for it."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while not (self._rows or self._outcome or self._failure) and loop.time() < until:
            await asyncio.sleep(_POLL_S)
        rows, self._rows = self._rows, []
        return Told(self._name, rows, self._outcome, self._failure)

    async def close(self) -> Any:
        """Let the workers go; where they are, if a job is still under way."""
        self._closed = True
        return self._group if self._name is not None and self._outcome is None else None
