"""Run all studies concurrently: optimizers in the driver, every evaluation a CPU task.

Equal requests, also of other optimizers, are computed once and stored as they arrive. Stored values
are served without a task, so an interrupted study replays to where it was.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from statistics import fmean
from typing import Any

from experiments.pabbo_lda.objective.objectives import CorpusObjective
from experiments.pabbo_lda.optimizers import OptimizerName, deciding_libraries, make_optimizer
from experiments.pabbo_lda.optimizers.pabbo import PairScorer
from experiments.pabbo_lda.settings import LdaSettings
from experiments.pabbo_lda.space import Point
from experiments.pabbo_lda.study.evaluations import EvaluationRequest, Evaluations, Fits, lda_seeds
from experiments.pabbo_lda.study.study import HistoryMismatchError, Study
from raypipe import Cache, Failure, PoolOptions, StageContext, TaskResult, Unit, UnitError

#: open studies are added until this many evaluations wait, per CPU and at least
_OPEN_PER_CPU, _OPEN_AT_LEAST = 16, 64

Scorers = Callable[[OptimizerName], PairScorer | None]


@dataclass(frozen=True)
class StudySpec:
    """One run of an optimizer on an objective; ``seed`` is the optimizer's, and LDA's first one."""

    objective: CorpusObjective
    optimizer: OptimizerName
    run: int
    seed: int

    @property
    def key(self) -> str:
        """The key of the unit."""
        return f"lda/{self.objective.dataset}/{self.optimizer}/{self.run}"

    def fits(self, point: Point, seeds: range) -> list[EvaluationRequest]:
        """Return the evaluations of a point with the LDA seeds of these numbers."""
        numbered = lda_seeds(self.seed, seeds.stop)
        return [EvaluationRequest(self.objective, numbered[number], point) for number in seeds]

    def unit(self, settings: LdaSettings, train: str | None) -> Unit:
        """Return the study as a unit; it needs the stage ``train``, if its optimizer is a model."""
        decisive = {
            "policy": settings.policy.identity()
            if self.optimizer in ("pabbo_small", "pabbo_large")
            else None,
            "seeds": settings.seeds if settings.seeds > 1 else None,
            "final_seeds": settings.unseen_seeds,
        }
        given = {name: value for name, value in decisive.items() if value}
        literals = {
            "dataset": self.objective.dataset,
            "data": dict(self.objective.data_fingerprints),
            "optimizer": self.optimizer,
            "seed": self.seed,
            "libraries": deciding_libraries(self.optimizer),
            **({"lda": given} if given else {}),
        }
        needs = () if train is None else (train,)
        return Unit(self.key, literals, needs, settings.evaluations, "lda.evaluations")


def study_specs(settings: LdaSettings, objectives: Sequence[CorpusObjective]) -> list[StudySpec]:
    """Return every optimizer on every objective, run by run."""
    return [
        StudySpec(objective, optimizer, run, settings.seed + run)
        for objective in objectives
        for run in range(settings.runs)
        for optimizer in settings.optimizers
    ]


def run_studies(
    context: StageContext,
    settings: LdaSettings,
    specs: Sequence[StudySpec],
    scorers: Scorers,
    cache: Cache,
) -> None:
    """Run the studies that are not finished, and record each when it is.

    Only as many studies are open at once as keep the CPUs busy. Those of a model follow when its
    training has ended, in another call if no others are left until then.

    Args:
        context: the stage ``lda``.
        settings: its settings.
        specs: all studies of the stage.
        scorers: returns the trained model of an optimizer, None if it has none.
        cache: values of evaluations from other run directories.

    Raises:
        UnitError: an evaluation failed for good, or a stored history cannot be continued; the
            other studies are finished.

    """
    unfinished = {unit.key for unit in context.unfinished()}
    todo = {spec.key: spec for spec in specs if spec.key in unfinished}
    whole = settings.evaluations * len(specs)
    stored = whole - settings.evaluations * len(todo)
    options = PoolOptions(
        settings.cpus or 1.0, time_limit_s=settings.time_limit_s, attempts=settings.attempts
    )
    with context.pool(options) as pool:
        objectives = {spec.objective.dataset: spec.objective for spec in todo.values()}.values()
        evaluations = Evaluations(context, pool, cache, objectives, settings.cpus)
        studies = _OpenStudies(context, settings, evaluations, scorers)
        context.begin(whole, stored)
        window = max(_OPEN_AT_LEAST, int(_OPEN_PER_CPU * pool.capacity))
        waiting = deque(context.todo())
        while True:
            waiting += context.further_units()
            while waiting and len(evaluations.open) < window:
                studies.add(todo[waiting.popleft().key])
            evaluations.submit()
            context.advance(stored + studies.progress(), str(evaluations))
            ended = evaluations.finished()
            if not ended and not waiting:
                break
            for request, result in ended:
                studies.take(request, result)
    if studies.failed:
        raise next(iter(studies.failed.values()))


def forget_studies(context: StageContext, units: Sequence[Unit]) -> None:
    """Remove the histories of studies whose model has been trained further since.

    The evaluations stay: the value at a number of topics does not depend on who asks for it.
    """
    outdated = {unit.key for unit in units}
    stored = context.ledger.items("study_history")
    context.ledger.remove(
        "study_history", [key for key, _ in stored if key.rpartition("/")[0] in outdated]
    )
    context.ledger.remove("studies", outdated)


class _OpenStudies:
    """The studies under way, and the evaluations that each one waits for."""

    def __init__(
        self,
        context: StageContext,
        settings: LdaSettings,
        evaluations: Evaluations,
        scorers: Scorers,
    ) -> None:
        self._context, self._settings, self._scorers = context, settings, scorers
        self._evaluations = evaluations
        self._open: dict[str, Iterator[tuple[Fits, float]]] = {}
        self._waiting: dict[str, dict[str, None]] = defaultdict(dict)
        self._evaluated: dict[str, int] = {}
        self.failed: dict[str, UnitError] = {}

    def add(self, spec: StudySpec) -> None:
        """Start a study; it requests the values that are not stored."""
        self._open[spec.key] = self._search(spec)
        self._move_on(spec.key)

    def take(self, request: EvaluationRequest, result: TaskResult) -> None:
        """Continue every study that waits for an evaluation, which is stored or has failed."""
        for key in self._waiting.pop(request.key):
            if result.error is not None:
                self._fail(UnitError(key, result.kind or "error", result.error))
            elif key in self._open:
                self._move_on(key)

    def progress(self) -> int:
        """Return the number of evaluations of the studies so far."""
        return sum(self._evaluated.values())

    def _move_on(self, key: str) -> None:
        """Let a study supply what is known; request what it needs and does not wait for yet."""
        try:
            fits, rest_s = next(self._open[key], ({}, 0.0))
        except HistoryMismatchError as error:
            message = (
                f"the stored history of {key} cannot be continued: the optimizer {error}; "
                "use the versions that recorded it, or another --run-dir"
            )
            self._context.fail(Failure(key, 1, "error", message, "gave up"))
            self._fail(UnitError(key, "error", message))
            return
        if not fits:
            self._open.pop(key)
        for request in (each for fit in fits.values() for each in fit):
            waiting = self._waiting[request.key]
            if key not in waiting and self._evaluations.row(request) is None:
                waiting[key] = None
                path_s = request.objective.cost_s(request.point) + rest_s
                self._evaluations.ask(request, path_s)

    def _search(self, spec: StudySpec) -> Iterator[tuple[Fits, float]]:
        """Run a study; yield the fits that it waits for and the seconds of what follows them.

        Each step continues when one of them is stored. The last one records the study.
        """
        settings, evaluations = self._settings, self._evaluations
        whole = range(settings.seeds)
        study = self._begin(spec)
        while not study.done:
            wanted = {point: spec.fits(point, whole) for point in study.request()}
            known = evaluations.known(wanted)
            for point, value in known.items():  # a batch that is wholly known opens the next one
                study.supply(point, value)
            self._evaluated[spec.key] = study.evaluated
            if not known:
                # assumes that the remaining batches, one after the other, are like this one
                batches = math.ceil((settings.evaluations - len(study.history)) / len(wanted)) - 1
                yield wanted, batches * fmean(spec.objective.cost_s(point) for point in wanted)
        confirmed: dict[Point, float] = {}
        if settings.unseen_seeds and study.best is not None:
            unseen = range(settings.seeds, settings.seeds + settings.unseen_seeds)
            best = {study.best[0]: spec.fits(study.best[0], unseen)}
            while not (confirmed := evaluations.known(best)):
                yield best, 0.0
        self._evaluated[spec.key] = settings.evaluations
        fits = {step.point: spec.fits(step.point, whole) for step in study.history}
        self._record(spec, study, fits, next(iter(confirmed.values()), None))

    def _begin(self, spec: StudySpec) -> Study:
        settings = self._settings
        optimizer = make_optimizer(
            spec.optimizer,
            space=settings.space,
            seed=spec.seed,
            scorer=self._scorers(spec.optimizer),
            policy=settings.policy,
        )
        start = settings.space.start_points(settings.start)
        recorded = [
            Point(row["T"], row.get("alpha"), row.get("eta"))
            for row in _history(self._context, spec.key)
        ]
        return Study(optimizer, start, settings.evaluations, settings.iterations, recorded)

    def _fail(self, error: UnitError) -> None:
        self._open.pop(error.unit, None)
        self._evaluated.pop(error.unit, None)
        self.failed.setdefault(error.unit, error)

    def _record(self, spec: StudySpec, study: Study, fits: Fits, confirmed: float | None) -> None:
        about = {
            "dataset": spec.objective.dataset,
            "optimizer": spec.optimizer,
            "run": spec.run,
            "seed": spec.seed,
        }
        elapsed, cpu = 0.0, 0.0
        history = {}
        for step in study.history:
            rows = [self._evaluations.row(request) or {} for request in fits[step.point]]
            elapsed += sum(row.get("duration_s", 0.0) for row in rows)
            cpu += sum(row.get("cpu_s", 0.0) for row in rows)
            history[f"{spec.key}/{step.evaluation}"] = {
                **about,
                "evaluation": step.evaluation,
                "batch": step.batch,
                **_columns(step.point),
                "value": step.value,
                "lda_seeds": len(rows),
                **_columns(step.best_point, "best_"),
                "best_value": step.best_value,
                "elapsed_s": elapsed,
                "cpu_s": cpu,
            }
        best_point, best_value = study.best or (None, math.inf)
        is_coherence = spec.objective.kind == "coherence"
        row = {
            **about,
            **_columns(best_point, "best_"),
            "best_perplexity": None if is_coherence else best_value,
            "best_coherence": -best_value if is_coherence else None,
            "confirmed_value": confirmed,
            "evaluations": study.asked,
            "unique_evaluations": len(study.history),
            "batches": study.history[-1].batch,
            "duration_s": elapsed,
            "cpu_s": cpu,
        }
        self._context.finish(spec.key, {"study_history": history, "studies": {spec.key: row}})


def _columns(point: Point | None, prefix: str = "") -> dict[str, Any]:
    """Return T and the searched priors as columns."""
    given = {"T": None} if point is None else point.given
    return {f"{prefix}{name}": value for name, value in given.items()}


def _history(context: StageContext, key: str) -> list[dict[str, Any]]:
    """Return the stored history of a study, in order."""
    rows = (context.ledger.get("study_history", f"{key}/{number}") for number in count(1))
    return [row for row in takewhile(bool, rows) if row]
