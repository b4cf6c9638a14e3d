"""Control of a command's work: its end, tasks that make room for trainings, and their mailbox.

Ray gives free CPUs to the next small task even while something larger waits for more of them.
The actor of the mailbox imports this module, so it imports no torch, which takes seconds.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from raypipe.errors import UnitError

#: seconds that Ray may take to start one worker, or a group of them, on free resources
_ONE_S, _GROUP_S = 3.0, 60.0


class Control:
    """Control of the running work of a command: its end, and the order of trainings and tasks.

    ``nodes`` are the resources of the nodes at its start.
    """

    def __init__(self) -> None:
        self.nodes: Sequence[Mapping[str, float]] = ()
        self._interrupted, self._lost = threading.Event(), ""
        self._winding_down = threading.Event()
        self._active: set[object] = set()
        # trainings that wait for resources, and those of them that tasks do not hold up
        self._waiting: dict[object, float] = {}
        self._passed: set[object] = set()
        # running tasks of each pool, and since when there are none
        self._running: dict[object, int] = {}
        self._idle_since: float | None = None
        self._lock = threading.Lock()

    @contextmanager
    def working(self) -> Iterator[object]:
        """Count the body as running work; yield its name for ``await_end``."""
        work = object()
        self._active.add(work)
        try:
            yield work
        finally:
            self._active.discard(work)

    def place(self, training: object, workers: int) -> None:
        """Let tasks make room for a training, until it is ``placed``."""
        with self._lock:
            self._waiting[training] = _ONE_S if workers == 1 else _GROUP_S
            self._idle_since = None

    def placed(self, training: object) -> None:
        """Record that a training has its resources, or needs none any more."""
        with self._lock:
            self._waiting.pop(training, None)

    def ended(self, training: object) -> None:
        """Record that a training has ended: those that wait may have room now."""
        self.placed(training)
        self._passed.clear()

    def holds_back(self, pool: object, running: int) -> bool:
        """Whether a pool with this number of running tasks should start no further one now.

        Once all pools are idle, and a training still has no room, something else holds it up.
        """
        with self._lock:
            self._running[pool] = running
            waiting, now = self._waiting.keys() - self._passed, time.monotonic()
            if any(self._running.values()) or not waiting:
                self._idle_since = None
            elif self._idle_since is None:
                self._idle_since = now
            else:
                idle_s = now - self._idle_since
                self._passed |= {each for each in waiting if idle_s > self._waiting[each]}
            return self.is_winding_down or bool(waiting - self._passed)

    def forget(self, pool: object) -> None:
        """Forget a pool."""
        with self._lock:
            self._running.pop(pool, None)

    @property
    def is_winding_down(self) -> bool:
        """Whether work comes to an orderly end, and nothing new starts."""
        return self._winding_down.is_set()

    def wind_down(self) -> None:
        """Start nothing new; trainings save checkpoints and end."""
        self._winding_down.set()

    @property
    def is_at_rest(self) -> bool:
        """Whether all work has ended."""
        return not self._active

    def await_end(self, work: object) -> NoReturn:
        """Record that a piece of work has ended early; raise KeyboardInterrupt in the end."""
        self._active.discard(work)
        while True:
            self.pause(0.5)

    def interrupt(self, lost: str = "") -> None:
        """Raise KeyboardInterrupt in every current and later ``pause``.

        It is a UnitError if Ray is ``lost``, with this message.
        """
        self._lost = lost
        self._interrupted.set()

    def pause(self, seconds: float = 0) -> None:
        """Sleep. Raises KeyboardInterrupt, or UnitError, after ``interrupt``."""
        if self._interrupted.wait(seconds):
            raise UnitError("ray", "node_lost", self._lost) if self._lost else KeyboardInterrupt


class Mailbox:
    """Actor between the trainings of a command and their workers: rows, and the wish to end.

    Rows go this way since Ray Train forwards none from a training in the process of its caller, and
    loses the last ones of a worker that dies.
    """

    def __init__(self) -> None:
        self._rows: defaultdict[str, list[dict[str, Any] | str]] = defaultdict(list)
        self._ends: set[str] = set()

    def post(self, training: str, row: dict[str, Any] | str) -> None:
        """Leave a row or a message for the command."""
        self._rows[training].append(row)

    def must_end(self, training: str) -> bool:
        """Whether a training should save a checkpoint and end."""
        return training in self._ends

    def collect(self, training: str, ends: bool) -> list[dict[str, Any] | str]:
        """Return what a training has left."""
        if ends:
            self._ends.add(training)
        return self._rows.pop(training, [])
