"""All studies side by side: optimisers in the driver, every evaluation a CPU task.

A study asks for values; equal requests, of other optimisers too, are computed once and stored
as they arrive. What is stored already is served without a task, so a study that was interrupted
replays to where it was.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.pabbo_lda.evaluations import Evaluations, Request
from experiments.pabbo_lda.objectives import Objective
from experiments.pabbo_lda.optimizers import OptimizerName, Point, Scorer, make_optimizer
from experiments.pabbo_lda.settings import LdaSettings
from experiments.pabbo_lda.study import Study
from raypipe.errors import UnitError
from raypipe.pipeline.context import StageContext
from raypipe.pipeline.experiment import Unit
from raypipe.pipeline.launcher import PoolOptions, TaskResult
from raypipe.storage.cache import Cache

#: studies are opened until so many evaluations wait, for each CPU and at least
_OPEN_PER_CPU, _OPEN_AT_LEAST = 16, 64


@dataclass(frozen=True)
class StudySpec:
    """One optimiser run on one objective; ``seed`` is the optimiser's and the objective's."""

    unit: Unit
    objective: Objective
    optimizer: OptimizerName
    run: int
    seed: int


def run_studies(
    context: StageContext,
    settings: LdaSettings,
    specs: Sequence[StudySpec],
    scorers: Mapping[str, Scorer],
) -> None:
    """Run the studies that are not finished; each is recorded when it is.

    Only as many are open at once as keep the CPUs busy.

    Raises:
        UnitError: an evaluation failed for good; the studies that do not need it are finished.

    """
    left = {unit.key for unit in context.todo()}
    todo = [spec for spec in specs if spec.unit.key in left]
    whole = sum(spec.unit.extent for spec in specs)
    stored = whole - sum(spec.unit.extent for spec in todo)
    options = PoolOptions(
        settings.cpus or 1.0, time_limit_s=settings.time_limit_s, attempts=settings.attempts
    )
    with Cache("evaluations", enabled=settings.cache) as cache, context.pool(options) as pool:
        objectives = {spec.objective.dataset: spec.objective for spec in todo}.values()
        evaluations = Evaluations(context, pool, cache, objectives, settings.cpus)
        board = _Board(context, settings, evaluations, scorers)
        context.begin(whole, stored)
        window = max(_OPEN_AT_LEAST, int(_OPEN_PER_CPU * pool.capacity))
        waiting = iter(todo)
        while True:
            while evaluations.open < window and (spec := next(waiting, None)) is not None:
                board.add(spec)
            ended = evaluations.finished()
            if not ended:
                break
            for request, result in ended:
                board.take(request, result)
            note = f"{evaluations.computed} evaluations"
            if evaluations.taken_over:
                note += f", {evaluations.taken_over} known from other runs"
            context.advance(stored + board.progress(), note)
    if board.broken:
        unit, result = next(iter(board.broken.items()))
        raise UnitError(unit, result.kind or "error", result.error or "")


class _Board:
    """Which study waits for which evaluation."""

    def __init__(
        self,
        context: StageContext,
        settings: LdaSettings,
        evaluations: Evaluations,
        scorers: Mapping[str, Scorer],
    ) -> None:
        self._context, self._settings, self._scorers = context, settings, scorers
        self._evaluations = evaluations
        self._open: dict[str, tuple[StudySpec, Study]] = {}
        self._waiting: dict[str, dict[str, None]] = defaultdict(dict)
        self._finished = 0
        self.broken: dict[str, TaskResult] = {}

    def add(self, spec: StudySpec) -> None:
        """Start a study: it asks for what is not stored."""
        self._open[spec.unit.key] = (spec, self._study(spec))
        self._move_on(spec.unit.key)

    def take(self, request: Request, result: TaskResult) -> None:
        """Give an evaluation to every study that waits for it."""
        for key in self._waiting.pop(request.key):
            if result.error is not None:
                self._open.pop(key, None)
                self.broken[key] = result
            elif key in self._open:
                self._open[key][1].supply(request.point, float(result.value))
                self._move_on(key)

    def progress(self) -> int:
        """Evaluations of the studies so far."""
        return self._finished + sum(len(study.history) for _, study in self._open.values())

    def _study(self, spec: StudySpec) -> Study:
        settings = self._settings
        optimizer = make_optimizer(
            spec.optimizer,
            space=settings.space,
            seed=spec.seed,
            scorer=self._scorers.get(spec.optimizer),
            pabbo=settings.policy,
        )
        start = settings.space.start_points(settings.start)
        return Study(optimizer, start, settings.evaluations, settings.iterations)

    def _move_on(self, key: str) -> None:
        """Serve what is known, ask for what is new, record the study once it is done."""
        spec, study = self._open[key]
        while known := self._evaluations.known(new := self._new(key)):
            for point, value in known.items():  # a batch that is known whole opens the next one
                study.supply(point, value)
        if study.done:
            del self._open[key]
            self._finished += spec.unit.extent
            self._record(spec, study)
            return
        if not new:
            return
        costs = [spec.objective.cost_s(request.point) for request in new]
        # the batches that are to follow, one after the other, are taken to be like this one
        batches = math.ceil((self._settings.evaluations - len(study.history)) / len(new)) - 1
        rest = batches * sum(costs) / len(costs)
        for request, cost in zip(new, costs, strict=True):
            self._waiting[request.key][key] = None
            self._evaluations.ask(request, cost + rest)

    def _new(self, key: str) -> list[Request]:
        """What a study asks for and has not yet been told to wait for."""
        spec, study = self._open[key]
        requests = [Request(spec.objective, spec.seed, point) for point in study.request()]
        return [r for r in requests if key not in self._waiting.get(r.key, ())]

    def _record(self, spec: StudySpec, study: Study) -> None:
        about = {
            "dataset": spec.objective.dataset,
            "optimizer": spec.optimizer,
            "run": spec.run,
            "seed": spec.seed,
        }
        elapsed, cpu = 0.0, 0.0
        history = {}
        for step in study.history:
            row = self._evaluations.row(Request(spec.objective, spec.seed, step.point)) or {}
            elapsed += row.get("duration_s", 0.0)
            cpu += row.get("cpu_s", 0.0)
            history[f"{spec.unit.key}/{step.evaluation}"] = {
                **about,
                "evaluation": step.evaluation,
                "batch": step.batch,
                **_columns(step.point),
                "value": step.value,
                **_columns(step.best_point, "best_"),
                "best_value": step.best_value,
                "elapsed_s": elapsed,
                "cpu_s": cpu,
            }
        best_point, best_value = study.best or (None, math.inf)
        row = {
            **about,
            **_columns(best_point, "best_"),
            "best_perplexity": best_value,
            "evaluations": study.asked,
            "unique_evaluations": len(study.history),
            "batches": study.history[-1].batch,
            "duration_s": elapsed,
            "cpu_s": cpu,
        }
        self._context.finish(spec.unit, {"study_history": history, "studies": {spec.unit.key: row}})


def _columns(point: Point | None, prefix: str = "") -> dict[str, Any]:
    """T, and the priors that are searched."""
    if point is None:
        return {f"{prefix}T": None}
    return {f"{prefix}{name}": value for name, value in point.given.items()}
