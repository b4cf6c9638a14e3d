"""All studies side by side: optimisers in the driver, every evaluation a CPU task.

A study asks for values; equal requests, of other optimisers too, are computed once and stored
as they arrive. What is stored already is served without a task, so a study that was interrupted
replays to where it was.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.pabbo_lda.optimizers import OptimizerName, Point, Scorer, Space, make_optimizer
from experiments.pabbo_lda.settings import LdaPrecision, LdaSettings
from experiments.pabbo_lda.study import Study
from raypipe.datasets import Corpus
from raypipe.errors import UnitError
from raypipe.experiment import Unit
from raypipe.identity import fingerprint
from raypipe.launch.launcher import TaskPool, TaskResult
from raypipe.runner import StageContext

#: names the objective, and changes when its values do
OBJECTIVE = "lda_perplexity, compiled"


@dataclass(frozen=True)
class StudySpec:
    """One optimiser run on one corpus; ``seed`` is the optimiser's and LDA's."""

    unit: Unit
    corpus: Corpus
    optimizer: OptimizerName
    run: int
    seed: int


@dataclass(frozen=True)
class Request:
    """An evaluation of the objective, by what decides its value."""

    corpus: Corpus
    seed: int
    point: Point
    max_iter: int
    batch_size: int
    precision: LdaPrecision

    @property
    def name(self) -> str:
        """What a message calls it; one of a kind in a run."""
        return f"{self.corpus.name}/seed {self.seed}/{self.point}"

    @property
    def key(self) -> str:
        """The same for equal requests, in every study and every run directory."""
        return fingerprint(
            {
                "objective": OBJECTIVE,
                "corpus": self.corpus.fingerprint,
                "seed": self.seed,
                "max_iter": self.max_iter,
                "batch_size": self.batch_size,
                "precision": self.precision,
                **self.point.given,
            }
        )


def run_studies(
    context: StageContext,
    settings: LdaSettings,
    corpora: Sequence[Corpus],
    specs: Sequence[StudySpec],
    scorers: Mapping[str, Scorer],
) -> None:
    """Run the studies that are not finished; each is recorded when it is.

    Raises:
        UnitError: an evaluation failed for good; the studies that do not need it are finished.

    """
    todo = {unit.slot for unit in context.todo()}
    # compiled here, once; the workers import it before the clock of a task starts
    from experiments.pabbo_lda.topic_model import lda_perplexity

    with context.pool(settings.cpus) as pool:
        shared = {corpus.name: pool.share(corpus.counts) for corpus in corpora}
        board = _Board(context, settings, pool, shared, lda_perplexity)
        total = sum(spec.unit.extent for spec in specs)
        stored = sum(spec.unit.extent for spec in specs if spec.unit.slot not in todo)
        context.begin(total, stored)
        for spec in specs:
            if spec.unit.slot in todo:
                board.add(spec, _study(spec, settings, scorers))
        while ended := context.finished(pool):
            for result in ended:
                board.take(result)
            context.advance(stored + board.progress(), f"{board.computed} trainings")
    if board.broken:
        unit, result = next(iter(board.broken.items()))
        raise UnitError(unit, result.kind or "error", result.error or "")


def _study(spec: StudySpec, settings: LdaSettings, scorers: Mapping[str, Scorer]) -> Study:
    space = Space(settings.t_min, settings.t_max, settings.alpha, settings.eta)
    optimizer = make_optimizer(
        spec.optimizer,
        space=space,
        seed=spec.seed,
        scorer=scorers.get(spec.optimizer),
        pabbo=settings.policy,
    )
    start = space.start_points(settings.start)
    return Study(optimizer, start, settings.evaluations, settings.iterations)


class _Board:
    """Which study waits for which evaluation."""

    def __init__(
        self,
        context: StageContext,
        settings: LdaSettings,
        pool: TaskPool,
        shared: Mapping[str, Any],
        objective: Callable[..., float],
    ) -> None:
        self._objective = objective
        self._context, self._settings, self._pool, self._shared = context, settings, pool, shared
        self._open: dict[str, tuple[StudySpec, Study]] = {}
        self._requests: dict[str, Request] = {}
        self._waiting: dict[str, list[str]] = defaultdict(list)
        self._finished = 0
        self.broken: dict[str, TaskResult] = {}
        self.computed = 0

    def add(self, spec: StudySpec, study: Study) -> None:
        """Start a study: it asks for what is not stored."""
        self._open[spec.unit.slot] = (spec, study)
        self._move_on(spec.unit.slot)

    def take(self, result: TaskResult) -> None:
        """Store an evaluation and give it to every study that waits for it."""
        request = self._requests.pop(result.key)
        slots = self._waiting.pop(result.key)
        if result.error is not None:
            for slot in slots:
                self._open.pop(slot, None)
                self.broken[slot] = result
            return
        value = float(result.value)
        if not math.isfinite(value):
            message = f"the perplexity is {value}"
            self._context.fail(
                request.name, result.attempt, "invalid_value", message, "worst value"
            )
        row = {
            "dataset": request.corpus.name,
            "seed": request.seed,
            **request.point.given,
            "value": value,
            "duration_s": result.duration_s,
            "cpu_s": result.cpu_s,
            "started_at": result.started_at,
            "worker": result.worker,
        }
        self._context.ledger.put("evaluations", {request.key: row})
        self.computed += 1
        for slot in slots:
            if slot in self._open:
                self._open[slot][1].supply(request.point, value)
                self._move_on(slot)

    def progress(self) -> int:
        """Evaluations of the studies so far."""
        return self._finished + sum(len(study.history) for _, study in self._open.values())

    def _move_on(self, slot: str) -> None:
        """Serve what is stored, submit what is new, record the study once it is done."""
        spec, study = self._open[slot]
        while self._serve(spec, study):
            pass  # a batch that was stored whole opens the next one
        if study.done:
            del self._open[slot]
            self._finished += spec.unit.extent
            self._record(spec, study)
            return
        for point in study.request():
            request = self._request(spec, point)
            if request.name not in self._requests:
                self._requests[request.name] = request
                self._pool.submit(
                    request.name,
                    self._objective,
                    self._shared[spec.corpus.name],
                    point.T,
                    request.seed,
                    request.max_iter,
                    request.batch_size,
                    request.precision,
                    *(point[1:] if self._settings.searches_priors else ()),
                )
            if slot not in self._waiting[request.name]:
                self._waiting[request.name].append(slot)

    def _serve(self, spec: StudySpec, study: Study) -> int:
        """Supply the stored values among those requested now; how many there were."""
        served = 0
        for point in study.request():
            row = self._context.ledger.get("evaluations", self._request(spec, point).key)
            if row is not None:
                study.supply(point, row["value"])
                served += 1
        return served

    def _request(self, spec: StudySpec, point: Point) -> Request:
        settings = self._settings
        return Request(
            spec.corpus,
            spec.seed,
            point,
            settings.max_iter,
            settings.batch_size,
            settings.precision,
        )

    def _record(self, spec: StudySpec, study: Study) -> None:
        about = {
            "dataset": spec.corpus.name,
            "optimizer": spec.optimizer,
            "run": spec.run,
            "seed": spec.seed,
        }
        elapsed = 0.0
        history = {}
        for step in study.history:
            stored = self._context.ledger.get("evaluations", self._request(spec, step.point).key)
            elapsed += stored["duration_s"] if stored else 0.0
            history[f"{spec.unit.slot}/{step.evaluation}"] = {
                **about,
                "evaluation": step.evaluation,
                "batch": step.batch,
                **step.point.given,
                "value": step.value,
                "best_T": step.best_point.T if step.best_point else None,
                "best_value": step.best_value,
                "elapsed_s": elapsed,
            }
        best_point, best_value = study.best or (None, math.inf)
        row = {
            **about,
            "best_T": best_point.T if best_point else None,
            "best_perplexity": best_value,
            "evaluations": study.asked,
            "unique_evaluations": len(study.history),
            "batches": study.history[-1].batch,
            "duration_s": elapsed,
        }
        self._context.ledger.put("study_history", history)
        self._context.ledger.put("studies", {spec.unit.slot: row})
        self._context.finish(spec.unit)
