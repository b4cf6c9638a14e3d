"""Values of the objective, each computed once: stored, kept from another run, or a task."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any

from experiments.pabbo_lda.objectives import Objective
from experiments.pabbo_lda.optimizers import Point
from raypipe.pipeline.context import StageContext
from raypipe.pipeline.launcher import TaskPool, TaskResult
from raypipe.storage.cache import Cache
from raypipe.storage.ledger import Row

#: the columns of an evaluation that another run directory can take over
_KEPT = ("value", "duration_s", "cpu_s", "started_at", "worker")


@dataclass(frozen=True)
class Request:
    """An evaluation of an objective."""

    objective: Objective
    seed: int
    point: Point

    @cached_property
    def key(self) -> str:
        """The same for equal requests, in every study and every run directory."""
        return self.objective.key(self.point, self.seed)

    @property
    def name(self) -> str:
        """What a message calls it; one of a kind in a run."""
        return f"{self.objective.dataset}/seed {self.seed}/{self.point}"


class Evaluations:
    """The evaluations of a stage.

    Tasks wait here, the longest path first, and go to the pool as it has room: what is in flight
    is bounded by the cluster and not by the number of requests.

    Args:
        context: of the stage, whose ledger holds the values.
        pool: of the tasks.
        cache: of values from other run directories.
        objectives: those of all requests.
        cpus: the share of a CPU a task; None for one by its cost.

    """

    def __init__(
        self,
        context: StageContext,
        pool: TaskPool,
        cache: Cache,
        objectives: Iterable[Objective],
        cpus: float | None,
    ) -> None:
        self._context, self._pool, self._cache, self._cpus = context, pool, cache, cpus
        # compiled here, once; the workers import it before the clock of a task starts
        self._functions = {o.dataset: (o.function(), pool.share(o.data)) for o in objectives}
        self._waiting: list[tuple[float, int, Request]] = []
        self._order = count()
        self._open: dict[str, Request] = {}
        self._submitted: set[str] = set()
        self.computed = self.taken_over = 0

    @property
    def open(self) -> int:
        """Evaluations that were asked for and are not there yet."""
        return len(self._open)

    def known(self, requests: Sequence[Request]) -> dict[Point, float]:
        """The values that are stored; those kept from another run are stored first."""
        stored: dict[str, Row | None] = {
            request.key: self._context.ledger.get("evaluations", request.key)
            for request in requests
        }
        kept = self._cache.get(key for key, row in stored.items() if row is None)
        named = {request.key: request for request in requests}
        rows = {key: self._row(named[key], row, cached=True) for key, row in kept.items()}
        self._store(rows)
        self.taken_over += len(rows)
        stored |= rows
        return {
            request.point: float(row["value"])
            for request in requests
            if (row := stored[request.key]) is not None
        }

    def row(self, request: Request) -> Row | None:
        """What is stored of an evaluation."""
        return self._context.ledger.get("evaluations", request.key)

    def ask(self, request: Request, path_s: float) -> None:
        """Compute a value that is not known, once ``finished`` is called.

        Args:
            request: the evaluation.
            path_s: about the CPU seconds until all that waits for it can be done, one evaluation
                after the other; the longest path is served first.

        """
        self._open.setdefault(request.name, request)
        heapq.heappush(self._waiting, (-path_s, next(self._order), request))

    def finished(self) -> list[tuple[Request, TaskResult]]:
        """The evaluations that ended since the last call, stored; empty if none is under way."""
        self._submit()
        results = [
            (self._open.pop(result.key), result) for result in self._context.finished(self._pool)
        ]
        self._submitted -= {result.key for _, result in results}
        rows = {}
        for request, result in results:
            if result.error is not None:
                continue
            value = float(result.value)
            if not math.isfinite(value):
                message = f"the value is {value}"
                self._context.fail(
                    request.name, result.attempt, "invalid_value", message, "worst value"
                )
            told = {
                "value": value,
                "duration_s": result.duration_s,
                "cpu_s": result.cpu_s,
                "started_at": result.started_at,
                "worker": result.worker,
            }
            rows[request.key] = self._row(request, told, cached=False)
        self._store(rows)
        self._cache.put({key: {name: row[name] for name in _KEPT} for key, row in rows.items()})
        self.computed += len(rows)
        return results

    def _submit(self) -> None:
        # one waits in the pool where others hold all CPUs, or there would be nothing to wait for
        while self._waiting and (self._pool.has_room or not self._submitted):
            request = heapq.heappop(self._waiting)[2]
            if request.name in self._submitted or request.name not in self._open:
                continue  # asked for again with another path
            self._submitted.add(request.name)
            objective = request.objective
            function, data = self._functions[objective.dataset]
            cpus = self._cpus if self._cpus is not None else objective.cpus(request.point)
            # plain values: a worker need not load the optimisers to read a point
            arguments = (data, tuple(request.point), request.seed, *objective.arguments)
            self._pool.submit(request.name, function, *arguments, cpus=cpus)

    def _row(self, request: Request, told: Mapping[str, Any], *, cached: bool) -> Row:
        about = {"dataset": request.objective.dataset, "seed": request.seed}
        return {**about, **request.point.given, **told, "cached": cached}

    def _store(self, rows: Mapping[str, Row]) -> None:
        self._context.ledger.put("evaluations", rows)
