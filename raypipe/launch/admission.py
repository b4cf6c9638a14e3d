"""Admission: concurrent stages wait here for their share of the cluster.

Ray gives free resources to the next task even while a training group waits for more, and a group
that waits in Ray blocks what its workers hold. Nothing is therefore started in Ray before the
allocator has granted its lease.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn, Protocol

from raypipe.errors import UnitError
from raypipe.launch.capacity import living_nodes
from raypipe.pipeline.allocator import Allocator, Claim, Lease

_POLL_S = 0.5
# seconds between looks at the nodes, which come and go
_LOOK_S = 0.5


class Closable(Protocol):
    """Processes that hold the resources of a lease."""

    def close(self) -> None:
        """End them."""
        ...


class Admission:
    """Leases on the nodes of the cluster for the threads of this process.

    Args:
        nodes: the nodes at the start; lost ones may return.

    """

    def __init__(self, nodes: Iterable[Mapping[str, float]] = ()) -> None:
        self.nodes = tuple(nodes)
        self._allocator = Allocator({})
        self._changed = threading.Condition()
        self._interrupted, self._lost = threading.Event(), ""
        self._winding_down = threading.Event()
        # seconds that the work of leases needs to come to an orderly end
        self._active: dict[Lease, float] = {}
        self._looked = -_LOOK_S
        self._inherited: dict[Lease, Closable] = {}

    def request(self, claim: Claim, rank: float = 0.0, seconds: float = math.inf) -> Lease:
        """Queue a claim; ``is_granted`` says when its work may start.

        ``seconds`` is its expected duration, infinite if unknown.
        """
        with self._changed:
            return self._allocator.request(claim, rank, seconds)

    def is_granted(self, lease: Lease) -> bool:
        """Whether the work of the lease may start now."""
        with self._changed:
            if not lease.granted:
                self._admit()
            return lease.granted

    def fits(self, claim: Claim) -> bool:
        """Whether the living nodes have room for the claim when nothing else runs."""
        with self._changed:
            self._look()
            return self._allocator.fits(claim)

    def hand_over(self, lease: Lease, processes: Closable) -> bool:
        """Whether a waiting lease with the same claim takes over this one and its processes.

        It then calls ``inherited``. If none does, the caller ends the processes and the lease.
        """
        if self.is_winding_down:
            return False
        with self._changed:
            self._look()
            heir = self._allocator.hand_over(lease, time.monotonic())
            if heir is not None:
                self._inherited[heir] = processes
                self._changed.notify_all()
        return heir is not None

    def inherited(self, lease: Lease) -> Closable | None:
        """Return the processes that a lease took over, once; None if it did not."""
        with self._changed:
            return self._inherited.pop(lease, None)

    def release(self, lease: Lease) -> None:
        """End a lease, or withdraw its request."""
        if (processes := self.inherited(lease)) is not None:
            processes.close()
        with self._changed:
            self._allocator.release(lease)
            self._admit()

    @contextmanager
    def lease(
        self,
        claim: Claim,
        rank: float,
        await_room: Callable[[], None],
        seconds: float = math.inf,
    ) -> Iterator[Lease]:
        """Wait until the claim is granted, and hold it in the body.

        ``await_room`` is called if nodes were lost and it no longer fits on the others; it waits
        for nodes or raises. Raises KeyboardInterrupt.
        """
        lease = self.request(claim, rank, seconds)
        try:
            while not self.is_granted(lease):
                if not self.fits(claim):
                    await_room()
                with self._changed:
                    self._changed.wait_for(lambda: lease.granted, timeout=_POLL_S)
                self.pause()
            self.expect(lease, 0.0)
            yield lease
        finally:
            self._active.pop(lease, None)
            self.release(lease)

    def use(self, pool: Lease, running: float, queued: float) -> None:
        """Record the CPUs of a pool's running and queued tasks."""
        with self._changed:
            freed = running < pool.running
            pool.running, pool.queued = running, queued
            if freed:
                self._admit()

    def share(self, pool: Lease) -> float:
        """Return the CPUs that the tasks of a pool may use now."""
        with self._changed:
            self._look()
            return self._allocator.share(pool)

    def threads(self, lease: Lease) -> int:
        """Return the number of threads that each process of a lease should compute with."""
        with self._changed:
            self._look()
            return max(1, int(self._allocator.cpus_per_process(lease)))

    @property
    def is_winding_down(self) -> bool:
        """Whether work comes to an orderly end, and nothing new starts."""
        return self._winding_down.is_set()

    def wind_down(self) -> None:
        """Start nothing new; trainings save checkpoints and end."""
        self._winding_down.set()

    def expect(self, lease: Lease, seconds: float) -> None:
        """Record how long the work of a lease would take to end."""
        self._active[lease] = seconds

    @property
    def ending_s(self) -> float:
        """The seconds that all work would take to end."""
        return max([0.0, *self._active.copy().values()])

    @property
    def is_at_rest(self) -> bool:
        """Whether all work has ended."""
        return not self._active

    def await_interruption(self, lease: Lease) -> NoReturn:
        """Record that the work of a lease has ended early; raise KeyboardInterrupt in the end."""
        self._active.pop(lease, None)
        while True:
            self.pause(_POLL_S)

    def interrupt(self, lost: str = "") -> None:
        """Raise KeyboardInterrupt in every current and later ``pause``.

        It is a UnitError if Ray is ``lost``, with this message.
        """
        self._lost = lost
        self._interrupted.set()
        with self._changed:
            self._changed.notify_all()

    def pause(self, seconds: float = 0) -> None:
        """Sleep. Raises KeyboardInterrupt, or UnitError, after ``interrupt``."""
        if self._interrupted.wait(seconds):
            raise UnitError("ray", "node_lost", self._lost) if self._lost else KeyboardInterrupt

    def _admit(self) -> None:
        if self.is_winding_down:
            return
        if self._allocator.has_waiting:  # Ray's servers may be gone when the last work ends
            self._look()
        if self._allocator.admit(time.monotonic()):
            self._changed.notify_all()

    def _look(self) -> None:
        if time.monotonic() >= self._looked + _LOOK_S:
            self._allocator.nodes = living_nodes()
            self._looked = time.monotonic()
