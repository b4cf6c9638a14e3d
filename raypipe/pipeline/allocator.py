"""Resource allocator: which waiting work gets which resources of the cluster next.

Work states what it needs as a **claim** and gets a **lease** once the nodes have room. Claims are
served by priority: the rank that the caller gives, up to doubled for claims of a large part of the
cluster, since large gaps are rare, and up to five times as high while such a claim fits at once:
another gap of that size costs idle time again. If the first in line does not fit, the allocator
determines when and where it will, from the expected ends of running leases, and lets others pass
only if they do not delay it: EASY backfilling (Lifka, The ANL/IBM SP scheduling system, 1995). Work
of unknown duration passes only on resources that the first in line will not need.

A CPU **pool** gets its lease at once. Its share is what other leases leave, and changes while it
runs.

This module decides; it starts nothing, waits for nothing, and knows neither threads nor Ray.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count

#: resources of a node or a process by name, as Ray counts them: CPU, GPU, custom ones
Resources = Mapping[str, float]
Free = dict[str, dict[str, float]]

#: weight of the part of the cluster that a claim needs, and of one that fits at once
_LARGE, _LARGE_NOW = 1.0, 4.0
#: Ray counts resources in steps of 0.0001
_DIGITS, _EPSILON = 4, 5e-5
_ENDLESS = 10**9


@dataclass(frozen=True)
class Claim:
    """Resources that a piece of work needs while it runs.

    Args:
        bundle: the resources of one process, all on one node.
        fewest: the number of processes that it needs to start.
        most: the number of processes that it can use. It gets as many as there is room for at its
            start.
        alone: whether nothing else may run on its nodes, because speed is measured.
        pool: whether the number of its processes changes with what others leave, down to none.

    """

    bundle: Resources
    fewest: int = 1
    most: int = 1
    alone: bool = False
    pool: bool = False


@dataclass(eq=False)
class Lease:
    """A claim, and the resources that it holds once it is granted.

    ``seconds`` is the expected duration, infinite if unknown; ``ends`` is the expected end.
    ``part`` is the part of the cluster that the claim needs. ``processes`` counts them by node
    ID. ``running`` and ``queued`` are the CPUs of a pool's tasks, which the pool keeps up to date.
    """

    claim: Claim
    priority: float
    number: int
    seconds: float
    part: float = 0.0
    ends: float = math.inf
    processes: dict[str, int] = field(default_factory=dict)
    granted: bool = False
    running: float = 0.0
    queued: float = 0.0

    @property
    def order(self) -> tuple[float, int]:
        """Sort key: the highest priority first, then the oldest."""
        return -self.priority, self.number


class Allocator:
    """Leases on the resources of nodes.

    Args:
        nodes: the resources of each node by node ID.

    """

    def __init__(self, nodes: Mapping[str, Resources]) -> None:
        self.nodes = nodes
        self._leases: list[Lease] = []  # in the order of their starts
        self._waiting: list[Lease] = []
        self._numbers = count()
        # of a claim that waits for tasks of pools only
        self._kept_from_pools: tuple[Claim, dict[str, int]] | None = None
        # granted with a lease that was handed over; None if something has changed since
        self._granted_with: list[Lease] | None = None

    @property
    def has_waiting(self) -> bool:
        """Whether a lease waits to be granted."""
        return bool(self._waiting)

    def fits(self, claim: Claim) -> bool:
        """Whether the nodes have room for the claim when nothing else runs."""
        return self._place(claim, self._free(())) is not None

    def request(self, claim: Claim, rank: float = 0.0, seconds: float = math.inf) -> Lease:
        """Queue a claim; ``admit`` grants it. ``seconds`` is its expected duration."""
        part = self._part(claim)
        priority = rank * (1.0 + _LARGE * part)
        lease = Lease(claim, priority, next(self._numbers), seconds, part)
        self._waiting.append(lease)
        self._granted_with = None
        return lease

    def release(self, lease: Lease) -> None:
        """End a lease, or withdraw its request."""
        for leases in (self._leases, self._waiting):
            if lease in leases:
                leases.remove(lease)
        self._granted_with = None

    def admit(self, now: float) -> list[Lease]:
        """Grant every waiting claim that may start at the time ``now`` (seconds)."""
        if self._granted_with is not None:
            granted, self._granted_with = self._granted_with, None
            return granted
        granted = []
        self._kept_from_pools = None
        if not self._waiting:
            return granted
        free, later, start = self._free(self._leases), None, math.inf
        too_large: list[tuple[Claim, bool]] = []
        for lease in self._in_line(free):
            claim, passes = lease.claim, now + lease.seconds <= start < math.inf
            if (claim, passes) in too_large:
                continue
            left = free if later is None or passes else _both(free, later)
            placed = {} if claim.pool else self._place(claim, left)
            if placed is not None and (claim.pool or self._pools_leave(claim, placed)):
                self._grant(lease, placed, now)
                granted.append(lease)
                self._take(free, claim, placed)
                if later is not None and not passes:
                    self._take(later, claim, placed)
                continue
            too_large.append((claim, passes))
            if later is None and self.fits(claim):
                later, start = self._reserve(claim, free, now)
        return granted

    def hand_over(self, lease: Lease, now: float) -> Lease | None:
        """Grant the processes of a lease to a waiting one with the same claim, and return that one.

        It must be one that ``admit`` would grant on the same nodes once the lease has ended. The
        others that ``admit`` would grant then are granted, too, and returned by the next ``admit``.
        Otherwise nothing changes.
        """
        after = Allocator(self.nodes)
        after._leases = [other for other in self._leases if other is not lease]
        after._waiting = [replace(other) for other in self._waiting]
        granted = after.admit(now)
        for like in granted:
            if like.claim == lease.claim and like.processes == lease.processes:
                waiting = {each.number: each for each in self._waiting}
                self.release(lease)
                for each in granted:
                    self._grant(waiting[each.number], each.processes, now)
                self._kept_from_pools = after._kept_from_pools
                self._granted_with = [waiting[e.number] for e in granted if e is not like]
                return waiting[like.number]
        return None

    def share(self, pool: Lease) -> float:
        """Return the CPUs that the tasks of a pool may use now, by the room for its largest task.

        Pools of a higher priority come first; CPUs of running tasks of others are not available.
        """
        bundle = pool.claim.bundle
        free = self._free(self._leases)
        if self._kept_from_pools is not None:
            self._take(free, *self._kept_from_pools)
        left = sum(_room(node, bundle) for node in free.values()) * bundle.get("CPU", 0.0)
        for other in self._leases:
            if other.claim.pool and other is not pool:
                first = other.order < pool.order
                left -= other.running + (other.queued if first else 0.0)
        return max(0.0, left)

    def cpus_per_process(self, lease: Lease) -> float:
        """Return the CPUs that each process may use: its own, and an equal part of idle ones.

        Processes of one lease use the same number: the smallest over its nodes. While a pool has
        tasks, no CPU is idle.
        """
        mine = lease.claim.bundle.get("CPU", 0.0)
        nodes = [node for node in lease.processes if node in self.nodes]
        if lease.claim.alone:
            whole = [self.nodes[node].get("CPU", 0.0) / lease.processes[node] for node in nodes]
            return min(whole, default=mine)
        if any(each.claim.pool and each.running + each.queued > 0 for each in self._leases):
            return mine
        free = self._free(self._leases)
        idle = [
            free[node].get("CPU", 0.0) / sum(each.processes.get(node, 0) for each in self._leases)
            for node in nodes
        ]
        return mine + min(idle, default=0.0)

    def _in_line(self, free: Free) -> list[Lease]:
        """Return the waiting leases, the first to serve first; large ones that fit now gain."""
        fitting: list[tuple[Claim, bool]] = []

        def fits(claim: Claim) -> bool:
            for known, answer in fitting:
                if known == claim:
                    return answer
            fitting.append((claim, self._place(claim, free) is not None))
            return fitting[-1][1]

        def order(lease: Lease) -> tuple[float, int]:
            gain = 1.0
            if lease.part and fits(lease.claim):
                gain = (1.0 + _LARGE_NOW * lease.part) / (1.0 + _LARGE * lease.part)
            return -gain * lease.priority, lease.number

        return sorted(self._waiting, key=order)

    def _grant(self, lease: Lease, placed: dict[str, int], now: float) -> None:
        self._waiting.remove(lease)
        self._leases.append(lease)
        lease.processes, lease.granted, lease.ends = placed, True, now + lease.seconds

    def _part(self, claim: Claim) -> float:
        """Return the part of the cluster that a claim needs, of the resource it needs most."""
        if claim.pool:
            return 0.0
        parts = [0.0]
        for name, amount in claim.bundle.items():
            total = sum(node.get(name, 0.0) for node in self.nodes.values())
            parts.append(min(1.0, claim.fewest * amount / total) if total else 0.0)
        return max(parts)

    def _free(self, leases: Iterable[Lease]) -> Free:
        """Return what leases leave of each node."""
        free = {node: dict(resources) for node, resources in self.nodes.items()}
        for lease in leases:
            self._take(free, lease.claim, lease.processes)
        return free

    def _take(self, free: Free, claim: Claim, processes: Mapping[str, int]) -> None:
        for node, number in processes.items():
            if (left := free.get(node)) is not None:
                for name in left if claim.alone else claim.bundle:
                    taken = left[name] if claim.alone else number * claim.bundle[name]
                    left[name] = round(left.get(name, 0.0) - taken, _DIGITS)

    def _reserve(self, claim: Claim, free: Free, now: float) -> tuple[Free, float]:
        """Return what a claim that waits leaves of each node from its start on, and the start.

        Leases are expected to end in the order of ``ends``; of unknown ones the oldest first.
        """
        running = sorted(self._leases, key=lambda lease: lease.ends)
        placed, start = self._place(claim, free), now
        if placed is not None:
            self._kept_from_pools = claim, placed
        while placed is None and running:
            ended = running.pop(0)
            start = max(start, ended.ends)
            free = self._free(running)
            placed = self._place(claim, free)
        later = {node: dict(left) for node, left in free.items()}
        self._take(later, claim, placed or {})
        return later, start

    def _place(self, claim: Claim, free: Mapping[str, Resources]) -> dict[str, int] | None:
        """Return the processes by node, as many as wanted or fit; None if too few fit.

        A claim that fits on one node is not spread over several. Of those nodes, it goes to the one
        with the least room, and leaves the largest gaps to large claims.
        """
        if claim.alone:
            free = {node: left for node, left in free.items() if left == self.nodes[node]}
        rooms = {node: _room(left, claim.bundle) for node, left in free.items()}
        if sum(rooms.values()) < claim.fewest:
            return None
        wanted = min(claim.most, sum(rooms.values()))
        enough = [node for node, room in rooms.items() if room >= wanted]
        if enough:
            return {min(enough, key=lambda node: (rooms[node], node)): wanted}
        placed: dict[str, int] = {}
        for node in sorted(rooms, key=lambda node: (-rooms[node], node)):
            if (processes := min(rooms[node], wanted)) > 0:
                placed[node] = processes
                wanted -= processes
        return placed

    def _pools_leave(self, claim: Claim, placed: Mapping[str, int]) -> bool:
        """Whether running tasks of pools leave the CPUs; they are counted over all nodes."""
        running = sum(lease.running for lease in self._leases if lease.claim.pool)
        if not running:
            return True
        free = self._free(self._leases)
        self._take(free, claim, placed)
        return running <= sum(node.get("CPU", 0.0) for node in free.values()) + _EPSILON


def _room(left: Resources, bundle: Resources) -> int:
    """Return how many processes fit into what is left of a node."""
    rooms = [
        int((left.get(name, 0.0) + _EPSILON) / amount) for name, amount in bundle.items() if amount
    ]
    return max(0, min(rooms, default=_ENDLESS))


def _both(first: Free, second: Free) -> Free:
    """Return the resources that are in both, by node."""
    return {
        node: {name: min(left, second[node].get(name, 0.0)) for name, left in each.items()}
        for node, each in first.items()
    }
