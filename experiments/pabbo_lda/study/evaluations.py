"""Evaluations of the objective, each computed once: stored, from another run's cache, or a task.

An evaluation is one fit: one point with one seed. The value of a point in a study is the mean over
the fits of its seeds.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any

import numpy as np

from experiments.pabbo_lda.objective.objectives import CorpusObjective
from experiments.pabbo_lda.space import Point
from raypipe import Cache, Failure, StageContext, TaskPool, TaskResult

#: columns of an evaluation that the cache shares with other run directories
_SHARED = ("value", "duration_s", "cpu_s", "started_at", "worker")


def lda_seeds(seed: int, count: int) -> tuple[int, ...]:
    """Return the seeds of LDA in a study: its own seed, then seeds that other studies do not use.

    More seeds begin with those of fewer, so that their fits are computed once.
    """
    drawn = (np.random.SeedSequence((seed, n)).generate_state(1)[0] for n in range(1, count))
    return (seed, *map(int, drawn))


def mean_value(values: Sequence[float]) -> float:
    """Return the mean of the values of one point, or the first one that is not finite."""
    invalid = [value for value in values if not math.isfinite(value)]
    with np.errstate(over="ignore"):
        return invalid[0] if invalid else float(np.mean(values))


@dataclass(frozen=True)
class EvaluationRequest:
    """An evaluation that a study needs; ``seed`` is that of LDA."""

    objective: CorpusObjective
    seed: int
    point: Point

    @cached_property
    def key(self) -> str:
        """The key of the evaluation, the same in every study and every run directory."""
        return self.objective.key(self.point, self.seed)

    @property
    def name(self) -> str:
        """The name in messages, unique within a run."""
        return f"{self.objective.dataset}/seed {self.seed}/{self.point}"


Fits = Mapping[Point, Sequence[EvaluationRequest]]
"""The evaluations whose mean is the value of each point."""


class Evaluations:
    """The evaluations of a stage.

    Requests wait here, the longest path first, and go to the pool as it has room: the number of
    tasks in flight is bounded by the cluster and not by the number of requests.

    Args:
        context: the stage, whose ledger stores the values.
        pool: the task pool.
        cache: values from other run directories.
        objectives: the objectives of all requests.
        cpus: the CPUs per task; by the cost of the evaluation if None.

    """

    def __init__(
        self,
        context: StageContext,
        pool: TaskPool,
        cache: Cache,
        objectives: Iterable[CorpusObjective],
        cpus: float | None,
    ) -> None:
        self._context, self._pool, self._cache, self._cpus = context, pool, cache, cpus
        # compiled here, once; the workers import it before the clock of a task starts
        self._functions = {o.dataset: (o.function(), pool.share(o.data)) for o in objectives}
        self._waiting: list[tuple[float, int, EvaluationRequest]] = []
        self._order = count()
        self._submitted: set[str] = set()
        #: requested and not finished, by name
        self.open: dict[str, EvaluationRequest] = {}
        self.computed = self.from_cache = 0

    def known(self, fits: Fits) -> dict[Point, float]:
        """Return the value of each point whose fits are all stored.

        Those in the cache are stored first.
        """
        every = [each for fit in fits.values() for each in fit]
        # those that are requested were not in the cache
        missing = {e.key: e for e in every if e.name not in self.open and self.row(e) is None}
        cached = self._cache.get(missing)
        self._store({key: self._row(missing[key], row, cached=True) for key, row in cached.items()})
        self.from_cache += len(cached)
        rows = {point: [self.row(each) for each in fit] for point, fit in fits.items()}
        return {
            point: mean_value([float(row["value"]) for row in found if row is not None])
            for point, found in rows.items()
            if None not in found
        }

    def row(self, request: EvaluationRequest) -> dict[str, Any] | None:
        """Return the stored row of an evaluation."""
        return self._context.ledger.get("evaluations", request.key)

    def ask(self, request: EvaluationRequest, path_s: float) -> None:
        """Compute a value that is not known, during the next calls of ``finished``.

        Args:
            request: the evaluation.
            path_s: about the CPU seconds of the evaluation and of all that have to follow it one
                after the other; the longest path is served first.

        """
        self.open.setdefault(request.name, request)
        heapq.heappush(self._waiting, (-path_s, next(self._order), request))

    def finished(self) -> list[tuple[EvaluationRequest, TaskResult]]:
        """Wait for evaluations, store them and return them; empty if none is open."""
        self.submit()
        results = [
            (self.open.pop(result.key), result) for result in self._context.finished(self._pool)
        ]
        self._submitted -= {result.key for _, result in results}
        rows = {}
        for request, result in results:
            if result.error is not None:
                continue
            value = float(result.value)
            if not math.isfinite(value):
                about = "invalid_value", f"the value is {value}", "worst value"
                self._context.fail(Failure(request.name, result.attempt, *about))
            measured = {name: getattr(result, name) for name in _SHARED} | {"value": value}
            rows[request.key] = self._row(request, measured, cached=False)
        self._store(rows)
        self._cache.put({key: {name: row[name] for name in _SHARED} for key, row in rows.items()})
        self.computed += len(rows)
        return results

    def submit(self) -> None:
        """Give the pool the requests of the longest paths, as many as it has room for."""
        # always keep one task queued; otherwise `finished()` would return immediately
        while self._waiting and (self._pool.has_room or not self._submitted):
            request = heapq.heappop(self._waiting)[2]
            if request.name in self._submitted or request.name not in self.open:
                continue  # requested again with another path
            self._submitted.add(request.name)
            objective = request.objective
            function, data = self._functions[objective.dataset]
            cpus = self._cpus if self._cpus is not None else objective.cpus(request.point)
            arguments = (data, request.point, request.seed, *objective.arguments)
            self._pool.submit(request.name, function, *arguments, cpus=cpus)

    def __str__(self) -> str:
        """Progress while the first and longest evaluations of all studies run."""
        cached = f", {self.from_cache} cached" * bool(self.from_cache)
        return f"{self.computed} computed, {len(self._submitted)} running{cached}"

    def _row(
        self, request: EvaluationRequest, measured: Mapping[str, Any], *, cached: bool
    ) -> dict[str, Any]:
        about = {"dataset": request.objective.dataset, "seed": request.seed}
        return {**about, **request.point.given, **measured, "cached": cached}

    def _store(self, rows: Mapping[str, dict[str, Any]]) -> None:
        self._context.ledger.put("evaluations", rows)
