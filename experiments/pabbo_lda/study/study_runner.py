"""Run all studies concurrently: optimizers in the driver, every evaluation a CPU task.

Equal requests, also of other optimizers, are computed once and stored as they arrive. Stored values
are served without a task, so an interrupted study replays to where it was.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from statistics import fmean
from typing import Any

from experiments.pabbo_lda.objective.objectives import CorpusObjective
from experiments.pabbo_lda.optimizers import (
    OptimizerName,
    Point,
    Scorer,
    deciding_libraries,
    make_optimizer,
)
from experiments.pabbo_lda.settings import LdaSettings, ObjectiveName
from experiments.pabbo_lda.study.evaluations import EvaluationRequest, Evaluations, lda_seeds
from experiments.pabbo_lda.study.racing import LOWEST, most_for_a_race
from experiments.pabbo_lda.study.study import HistoryMismatchError, Study
from raypipe.errors import FailureKind, UnitError
from raypipe.graph.context import StageContext
from raypipe.graph.experiment import Unit
from raypipe.graph.launcher import PoolOptions, TaskResult
from raypipe.graph.unit_logs import Failure
from raypipe.provenance import package_version
from raypipe.store.cache import Cache
from raypipe.store.ledger import Ledger, Row

#: open studies are added until this many evaluations wait, per CPU and at least
_OPEN_PER_CPU, _OPEN_AT_LEAST = 16, 64
#: packages that can change a search, as columns of the table ``environment``
_PACKAGES = ("optuna", "numpy", "scipy", "scikit-learn", "torch")


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
        literals: dict[str, Any] = {
            "dataset": self.objective.dataset,
            "data": dict(self.objective.data_fingerprints),
            "optimizer": self.optimizer,
            "seed": self.seed,
            "libraries": deciding_libraries(self.optimizer),
        }
        if self.optimizer in ("pabbo_small", "pabbo_large"):
            literals["lda"] = {"policy": settings.policy.identity()}
        averaged: dict[str, Any] = {"seeds": settings.seeds} if settings.seeds > 1 else {}
        if settings.racing:
            averaged["racing"] = True
        if settings.unseen_seeds:
            averaged["final_seeds"] = settings.unseen_seeds
        if averaged:
            literals["lda"] = {**literals.get("lda", {}), **averaged}
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
    scorer: Callable[[OptimizerName], Scorer | None],
    cache: Cache,
) -> None:
    """Run the studies that are not finished, and record each when it is.

    Only as many studies are open at once as keep the CPUs busy. Those of a model follow when its
    training has ended.

    Args:
        context: the stage ``lda``.
        settings: its settings.
        specs: all studies of the stage.
        scorer: returns the trained model of an optimizer, None if it has none.
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
        studies = _OpenStudies(context, settings, evaluations, scorer)
        context.begin(whole, stored)
        window = max(_OPEN_AT_LEAST, int(_OPEN_PER_CPU * pool.capacity))
        waiting = deque(context.todo())
        while True:
            waiting += context.further_units()
            while waiting and evaluations.open < window:
                studies.add(todo[waiting.popleft().key])
            evaluations.submit()
            context.advance(stored + studies.progress(), _note(evaluations))
            ended = evaluations.finished()
            if not ended and not waiting and not context.await_units():
                break
            for request, result in ended:
                studies.take(request, result)
    if studies.failed:
        raise next(iter(studies.failed.values()))


def _note(evaluations: Evaluations) -> str:
    """Return what moves while the first and longest evaluations of all studies run."""
    note = f"{evaluations.computed} computed, {evaluations.running} running"
    return note + f", {evaluations.from_cache} cached" * bool(evaluations.from_cache)


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
        scorer: Callable[[OptimizerName], Scorer | None],
    ) -> None:
        self._context, self._settings, self._scorer = context, settings, scorer
        self._evaluations = evaluations
        self._searched = range(settings.seeds)
        self._final = range(settings.seeds, settings.seeds + settings.unseen_seeds)
        self._open: dict[str, tuple[StudySpec, Study]] = {}
        self._single: dict[str, set[Point]] = defaultdict(set)
        self._waiting: dict[str, dict[str, None]] = defaultdict(dict)
        self._finished = 0
        self.failed: dict[str, UnitError] = {}

    def add(self, spec: StudySpec) -> None:
        """Start a study; it requests the values that are not stored."""
        self._move_on(spec)

    def take(self, request: EvaluationRequest, result: TaskResult) -> None:
        """Continue every study that waits for an evaluation, which is stored or has failed."""
        for key in self._waiting.pop(request.key):
            if result.error is not None:
                self._fail(key, result.kind or "error", result.error)
            elif key in self._open:
                self._move_on(self._open[key][0])

    def progress(self) -> int:
        """Return the number of evaluations of the studies so far."""
        return self._finished + sum(study.evaluated for _, study in self._open.values())

    def _move_on(self, spec: StudySpec) -> None:
        """Begin or continue a study; end it if it departs from its stored history."""
        try:
            if spec.key not in self._open:
                self._open[spec.key] = (spec, self._begin(spec))
            self._serve(spec.key)
        except HistoryMismatchError as error:
            message = (
                f"the stored history of {spec.key} cannot be continued: the optimizer {error}"
                f"{_other_versions(self._context.ledger, spec.key)}; use the versions that "
                "recorded it, or another --run-dir"
            )
            self._context.fail(Failure(spec.key, 1, "error", message, "gave up"))
            self._fail(spec.key, "error", message)

    def _begin(self, spec: StudySpec) -> Study:
        settings = self._settings
        optimizer = make_optimizer(
            spec.optimizer,
            space=settings.space,
            seed=spec.seed,
            scorer=self._scorer(spec.optimizer),
            policy=settings.policy,
        )
        start = settings.space.start_points(settings.start)
        recorded = [
            Point(row["T"], row.get("alpha"), row.get("eta"))
            for row in _history(self._context.ledger, spec.key)
        ]
        return Study(optimizer, start, settings.evaluations, settings.iterations, recorded)

    def _serve(self, key: str) -> None:
        """Supply known values, request new ones, and record the study once it is done."""
        spec, study = self._open[key]
        while True:
            new, undecided = self._raced(key, self._new(key))
            known = self._evaluations.known(new)
            if not known:
                break
            for point, value in known.items():  # a batch that is wholly known opens the next one
                study.supply(point, value)
        new |= undecided
        if study.done:
            self._end(key)
            return
        if not new:
            return
        costs = {point: spec.objective.cost_s(point) for point in new}
        # assumes that the remaining batches, one after the other, are like this one
        batches = math.ceil((self._settings.evaluations - len(study.history)) / len(new)) - 1
        rest = batches * fmean(costs.values())
        for point, fits in new.items():
            self._ask(key, fits, costs[point] + rest)

    def _raced(
        self, key: str, fits: dict[Point, list[EvaluationRequest]]
    ) -> tuple[dict[Point, list[EvaluationRequest]], dict[Point, list[EvaluationRequest]]]:
        """Return the fits whose mean is the value of a point, and first fits that decide a race."""
        limit = self._limit(key) if self._settings.racing and fits else math.inf
        if limit == math.inf:
            return fits, {}
        firsts = {point: requests[:1] for point, requests in fits.items()}
        values = self._evaluations.known(firsts)
        self._single[key] |= {point for point, value in values.items() if not value <= limit}
        decided = {
            point: firsts[point] if point in self._single[key] else fits[point] for point in values
        }
        return decided, {point: fit for point, fit in firsts.items() if point not in values}

    def _limit(self, key: str) -> float:
        """Return the first value from which on a point of the next batch has no further fits."""
        spec, study = self._open[key]
        whole = [step for step in study.history if step.point not in self._single[key]]
        lowest = sorted(whole, key=lambda step: step.value)[:LOWEST]
        rows = ([self._evaluations.row(fit) or {} for fit in self._fits(spec, each.point)]
                for each in lowest)  # fmt: skip
        return most_for_a_race([[float(row["value"]) for row in fits] for fits in rows])

    def _fits(self, spec: StudySpec, point: Point) -> list[EvaluationRequest]:
        """Return the fits whose mean is the value of a point of a study."""
        return spec.fits(point, self._searched[: 1 if point in self._single[spec.key] else None])

    def _ask(self, key: str, fits: Sequence[EvaluationRequest], path_s: float) -> None:
        """Request the fits of a study that are not stored."""
        for request in fits:
            if self._evaluations.row(request) is None:
                self._waiting[request.key][key] = None
                self._evaluations.ask(request, path_s)

    def _end(self, key: str) -> None:
        """Record a study that is done, once its best point has its further fits."""
        spec, study = self._open[key]
        confirmed: dict[Point, float] = {}
        if self._final and study.best is not None:
            point = study.best[0]
            fits = spec.fits(point, self._final)
            confirmed = self._evaluations.known({point: fits})
            if not confirmed:
                self._ask(key, fits, spec.objective.cost_s(point))
                return
        del self._open[key]
        self._finished += self._settings.evaluations
        self._record(spec, study, next(iter(confirmed.values()), None))

    def _new(self, key: str) -> dict[Point, list[EvaluationRequest]]:
        """Return the fits of each point that a study needs, if it does not wait for any of them."""
        spec, study = self._open[key]
        fits = {point: spec.fits(point, self._searched) for point in study.request()}
        return {
            point: requests
            for point, requests in fits.items()
            if not any(key in self._waiting.get(request.key, ()) for request in requests)
        }

    def _fail(self, key: str, kind: FailureKind, message: str) -> None:
        self._open.pop(key, None)
        self.failed.setdefault(key, UnitError(key, kind, message))

    def _record(self, spec: StudySpec, study: Study, confirmed: float | None) -> None:
        about = {
            "dataset": spec.objective.dataset,
            "optimizer": spec.optimizer,
            "run": spec.run,
            "seed": spec.seed,
        }
        elapsed, cpu = 0.0, 0.0
        history = {}
        for step in study.history:
            fits = self._fits(spec, step.point)
            for request in fits:
                row = self._evaluations.row(request) or {}
                elapsed += row.get("duration_s", 0.0)
                cpu += row.get("cpu_s", 0.0)
            history[f"{spec.key}/{step.evaluation}"] = {
                **about,
                "evaluation": step.evaluation,
                "batch": step.batch,
                **_columns(step.point),
                "value": step.value,
                "lda_seeds": len(fits),
                **_columns(step.best_point, "best_"),
                "best_value": step.best_value,
                "elapsed_s": elapsed,
                "cpu_s": cpu,
            }
        best_point, best_value = study.best or (None, math.inf)
        row = {
            **about,
            **_columns(best_point, "best_"),
            **_best(spec.objective.kind, best_value),
            "confirmed_value": confirmed,
            "evaluations": study.asked,
            "unique_evaluations": len(study.history),
            "batches": study.history[-1].batch,
            "duration_s": elapsed,
            "cpu_s": cpu,
        }
        self._context.finish(spec.key, {"study_history": history, "studies": {spec.key: row}})


def _best(objective: ObjectiveName, value: float) -> dict[str, float | None]:
    """Return the best value as a perplexity or a coherence."""
    if objective == "coherence":
        return {"best_perplexity": None, "best_coherence": -value}
    return {"best_perplexity": value, "best_coherence": None}


def _columns(point: Point | None, prefix: str = "") -> dict[str, Any]:
    """Return T and the searched priors as columns."""
    if point is None:
        return {f"{prefix}T": None}
    return {f"{prefix}{name}": value for name, value in point.given.items()}


def _history(ledger: Ledger, key: str) -> list[Row]:
    """Return the stored history of a study, in order."""
    rows = (ledger.get("study_history", f"{key}/{number}") for number in count(1))
    return [row for row in takewhile(lambda row: row is not None, rows) if row is not None]


def _other_versions(ledger: Ledger, key: str) -> str:
    """Return the packages that changed since a history was stored, in words; empty if none did."""
    command = _history(ledger, key)[-1].get("command_id")
    recorded = [row for row in ledger.rows("environment") if row.get("command_id") == command]
    changed = {
        f"{package} {row[package]} recorded, {package_version(package)} installed"
        for row in recorded
        for package in _PACKAGES
        if package in row and row[package] != package_version(package)
    }
    return "".join(f"; {text}" for text in sorted(changed))
