"""The stage ``sweep``, which hands trials to Ray Tune, and training stages that use its result."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from raypipe.config.axes import AxisSettings
from raypipe.config.matrix import Point
from raypipe.errors import TRANSIENT, ConfigError, UnitError
from raypipe.graph.configuration import Configuration
from raypipe.graph.context import StageContext
from raypipe.graph.experiment import Stage, Training, Unit
from raypipe.graph.identity import Identity, canonical_json
from raypipe.graph.stored_results import is_done
from raypipe.graph.training_stage import job_of, train, with_cpus
from raypipe.graph.unit_logs import Failure, first_line
from raypipe.hardware import Hardware
from raypipe.scripts.command import ScriptStageSettings
from raypipe.scripts.experiment import ScriptTask
from raypipe.stats import finite_or_none
from raypipe.store import tables as results
from raypipe.store.ledger import Row
from raypipe.study.metric import costs_of, with_metric, with_metric_of
from raypipe.study.population import Lineage, check_pauses
from raypipe.study.recommendation import recommend, snippet
from raypipe.study.space import points, shown
from raypipe.study.sweep_settings import SWEEP, SweepSettings
from raypipe.training.batching import KEYS, BatchConflict
from raypipe.training.job import TrainingJob
from raypipe.training.settings import TrainStageSettings, obstacle


def with_sweep(configuration: Configuration, nodes: Sequence[Hardware]) -> list[Stage]:
    """Return the stages of a configuration, the sweep before the stages that use its winner.

    There is no sweep of a training that this run leaves out because its model is given.

    Raises:
        ConfigError: the swept stage is not a training stage, an axis has invalid values, no trial
            has the metric, or a stage takes its settings from a sweep of another stage.

    """
    plain, sweep = list(configuration.stages()), configuration.settings.sweep
    takers = [s.name for s in plain if s.training is not None and s.training.settings.from_sweep]
    for name in takers:
        if sweep is None or sweep.stage != name:
            raise ConfigError(
                f"{configuration.origin}: {name}.from_sweep = true: there is no sweep of it "
                f"(set sweep.stage: {name} and sweep.axes)"
            )
    if sweep is None:
        return plain
    section = getattr(configuration.settings, sweep.stage, None)
    untrained = {stage.name for stage in plain if stage.training is None}
    if sweep.stage in untrained and isinstance(section, TrainStageSettings):
        return plain
    tried, swept = training_stage(plain, sweep.stage, f"{configuration.origin}: sweep.stage")
    sweep = with_metric(configuration, swept)
    if sweep.is_systems:
        where = f"{configuration.origin}: {sweep.stage}.command"
        check_counts_steps(swept, where, "a systems sweep", ", or kind: quality")
    maker = TrialMaker(configuration, sweep, nodes, swept)
    check_pauses(sweep, maker.axes, swept, configuration.origin)
    given = [] if sweep.is_searched else maker.trials()
    last = _last_unit(sweep, maker.identity(tried, swept), given)

    def run(context: StageContext) -> None:
        under_way = Sweep(context, maker, given, last)
        context.session.launcher.trials(under_way, context.run_dir)
        under_way.end()

    steps = f" of {sweep.steps + sweep.warmup_steps} steps" if sweep.is_systems else ""
    number = sweep.samples if sweep.is_searched else len(given)
    stage = Stage(
        SWEEP,
        run,
        [*(trial.unit for trial in given), last],
        tried.needs,
        (),
        f"{number * sweep.measurements} trials{steps}",
        on_gpu=tried.on_gpu,
        alone=sweep.is_systems and maker.device[0] == "cpu",
    )
    plain.insert(plain.index(tried), stage)
    return [_taking(s, maker) if s.name in takers else s for s in plain]


def _last_unit(sweep: SweepSettings, of_trial: Identity, given: Sequence[Trial]) -> Unit:
    """Return the unit that ends a sweep: the verdict on its trials, or its search."""
    literals = {**of_trial.literals, **sweep.model_dump(mode="json", exclude={"concurrent"})}
    if sweep.is_searched:
        kind, budget = "search-", {"budget": literals.pop("samples"), "budget_key": "sweep.samples"}
    else:
        kind, budget = "verdict-", {}
        literals["trials"] = [trial.unit.key for trial in given]
    identity = Identity.of(of_trial.shared, literals, of_trial.needs)
    return Unit(_key(sweep, identity, kind), **budget, identity=identity)


def _key(sweep: SweepSettings, identity: Identity, kind: str = "") -> str:
    return f"{SWEEP}/{sweep.stage}/{kind}{identity.fingerprint[:12]}"


def _taking(stage: Stage, maker: TrialMaker) -> Stage:
    """Return the training stage with the settings that the sweep recommends.

    Its identity says that the settings come from the sweep, not what they are: when a sweep grows,
    a model that was trained before stays valid. Its features are unknown before the sweep.
    """
    _, training = training_stage([stage], stage.name, "sweep.stage")
    decided = {
        key: value
        for key, value in training.settings.training.identity().items()
        if f"{stage.name}.training.{key}" not in maker.axes
    }
    rest = without_training(stage)
    own = {**rest.shared[stage.name], "training": decided, "from_sweep": sorted(maker.axes)}
    identity = Identity.of({**rest.shared, stage.name: own}, rest.literals, rest.needs)
    (given,) = stage.units
    unit = Unit(stage.name, identity=identity, extents=given.extents)

    def run(context: StageContext) -> None:
        if (row := context.ledger.get("recommendations", stage.name)) is None:
            text = "the sweep recommends nothing: no point succeeded"
            raise UnitError(stage.name, "error", text)
        values = dict(row["settings"])
        context.say(f"takes from the sweep {shown(values)}")
        origin = f"{maker.configuration.origin}: the sweep's recommendation"
        varied = maker.configuration.with_values(values, origin)
        _, found = training_stage(varied.stages(), stage.name, "sweep.stage")
        train(context, unit, found)

    return replace(stage, run=run, units=[unit], needs=(*stage.needs, SWEEP))


class Sweep:
    """Trials of a sweep: which one comes next, and what becomes of each.

    Out of memory is a result, and rules out larger micro-batches. A trial whose worker died is
    retried ``max_restarts`` times. A search adds its trials one at a time, when there is room; each
    proposal follows from the stored trials, its number and the seed. A systems sweep measures all
    points once, then all again; each measurement is a trial.

    Args:
        context: of the sweep's stage.
        maker: makes trials of points.
        given: the trials of all points; none for a search.
        last: the unit that ends the sweep.

    """

    def __init__(
        self, context: StageContext, maker: TrialMaker, given: Sequence[Trial], last: Unit
    ) -> None:
        self._context, self._maker, self.settings = context, maker, maker.sweep
        self._declared, self._last = context.session.tables["trials"].columns, last
        #: the error of a metric that trials do not have; no further trial is started then
        self._mistake: UnitError | None = None
        self._failure: UnitError | None = None
        self._all: dict[str, Trial] = {}
        self._waiting: list[Trial] = []
        self._running: dict[str, TrainingJob] = {}
        self._logged: dict[str, dict[int, Row]] = {}
        #: of a search: the number of each proposal in their order, and of all so far
        self._numbers: dict[str, int] = {}
        stored = [r for r in context.ledger.rows("trials") if r.get("search") == last.key]
        for row in sorted(stored, key=lambda row: row["number"]):
            trial = maker.any_trial(row["point"])
            self._numbers[trial.unit.key] = row["number"]
            self._add(trial)
        self._asked = 1 + max(self._numbers.values(), default=-1)
        for trial in given:
            self._add(trial)
        total = self.settings.samples if self.settings.is_searched else len(given)
        context.begin(total * self.settings.measurements, self._done)

    @property
    def steps(self) -> int:
        """The optimizer steps of the swept training."""
        context = self._context
        return job_of(context, self._last, self._maker.swept, context.run_dir).steps

    @property
    def is_over(self) -> bool:
        """Whether every trial has run or was skipped, or a mistake ended the sweep."""
        rest = self._waiting or self._is_searching
        return not self._running and (self._mistake is not None or not rest)

    def next(self, propose: Callable[..., Point]) -> TrainingJob | None:
        """Return the next trial; None while it depends on running trials, and at the end.

        ``propose`` returns the next point of a searcher from the settings, the axes, the known
        points with their costs, and its number.
        """
        while self._mistake is None and (trial := self._next(propose)) is not None:
            reason = self._obstacle(trial)
            if not reason:
                job = self._running[trial.unit.key] = self._job(trial)
                return job
            if trial.repeats is None:
                job = self._job(trial._replace(attempt=0))
                self._record(trial, job, "skipped", {"reason": reason})
                self._say(trial, f"skipped: {reason}")
        return None

    def report(self, trial_id: str, row: Row) -> None:
        """Record a logged step of a trial."""
        self._logged.setdefault(trial_id, {})[row["step"]] = row
        self._context.session.trackers.log(trial_id, row)

    def ended(self, trial_id: str, outcome: Row | UnitError) -> None:
        """Record how a trial ended."""
        job, trial = self._running.pop(trial_id), self._all[trial_id]
        if not isinstance(outcome, UnitError):
            self._record(trial, job, "succeeded", outcome)
            column = self.settings.metric or ""
            value = finite_or_none(outcome.get(column))
            self._say(trial, "done" if value is None else f"{column} {value:.4g}")
            return
        again = outcome.kind in TRANSIENT and job.attempt <= job.settings.max_restarts
        finished = outcome.kind in ("out_of_memory", "invalid_value")
        about = outcome.message, "again" if again else "recorded", outcome.trace
        failure = Failure(trial_id, job.attempt, outcome.kind, *about, shown=not finished)
        self._context.fail(failure)
        if again:
            self._waiting.insert(0, trial._replace(attempt=job.attempt + 1))
            return
        if not finished:
            self._failure = self._failure or outcome
        reason = {"reason": first_line(outcome.message)}
        self._record(trial, job, outcome.status, reason, finished=finished)
        self._say(trial, f"{outcome.kind}: {first_line(outcome.message)}")

    def stopped(self, trial_id: str) -> None:
        """Record that the scheduler ended a trial early, with the steps that it had not written."""
        job, trial = self._running.pop(trial_id), self._all[trial_id]
        logged = self._logged.pop(trial_id, {})
        known = {row["step"]: row for row in results.read_rows(job.run_dir, "steps", trial_id)}
        if not logged.keys() <= known.keys():
            merged = [row for _, row in sorted({**logged, **known}.items())]
            results.write_table(job.run_dir, job.steps_table, merged, job.run_id, trial_id)
        # a scheduler decides when a step is reported, so that there is one
        row = logged[max(logged)]
        seen = {key: value for key, value in row.items() if key.startswith("eval_")}
        seen |= {"steps": row["step"], "loss_final": row.get("loss")}
        reason = f"stopped early by {self.settings.scheduler_name}"
        self._record(trial, job, "interrupted", {**seen, "reason": reason})
        self._say(trial, f"{reason} after {row['step']} steps")

    def end(self) -> None:
        """Write the results of the sweep: differences from fp32, and the recommendation.

        Raises:
            UnitError: a trial failed, or none has the metric.

        """
        if self._mistake is not None:
            raise self._mistake
        context, settings = self._context, self.settings
        metric, mode = settings.metric or "", settings.mode or "min"
        rows = self._compared_with_fp32()
        context.ledger.put("trials", rows)
        best = recommend(rows.values(), metric, mode)
        if isinstance(best, str):
            context.ledger.remove("recommendations", [settings.stage])
            context.say(f"nothing is recommended: {best}")
        else:
            values = self._with_batch(best.settings, self._all[best.trial["trial_id"]])
            row = {
                **{"trained_stage": settings.stage, "trial_id": best.trial["trial_id"]},
                **{"metric": metric, "mode": mode, "value": best.value},
                **{"value_low": best.low, "value_high": best.high, "reason": best.reason},
                **{"settings": values, "snippet": snippet(values)},
            }
            context.ledger.put("recommendations", {settings.stage: row})
            context.say(f"recommended: {shown(values)}")
        if self._failure is not None:
            raise self._failure
        context.finish(self._last)

    def _with_batch(self, point: Mapping[str, Any], trial: Trial) -> dict[str, Any]:
        """Return the settings of a point, with all batch sizes if one was swept.

        They are those asked for: `--local` runs all in one worker, with more accumulation.
        """
        asked, section = trial.training.settings.training, f"{self.settings.stage}.training"
        sizes = {f"{section}.{key}": getattr(asked, key) for key in KEYS}
        if sizes.keys().isdisjoint(point):
            return dict(point)
        return {**point, **{key: size for key, size in sizes.items() if size}}

    def _compared_with_fp32(self) -> dict[str, Row]:
        """Return the trials' rows, with the relative difference of their losses to fp32 (parity).

        A trial is compared with the fp32 trial of otherwise the same settings. Where that one did
        not succeed, it gets the largest difference that its precision has elsewhere.
        """
        rows = {key: dict(row) for key in self._all if (row := self._row(key))}
        losses: dict[str, Any] = {}
        exact: dict[str, Any] = {}
        for key, row in rows.items():
            if self._succeeded(key):
                steps = results.read_table(self._context.run_dir, "steps", key)
                losses[key] = steps.set_index("step")["loss"].astype(float)
                if row["precision"] == "fp32":
                    exact[self._all[key].but("precision")] = losses.pop(key)
        parities = defaultdict[str, list[float]](list)
        for key, loss in losses.items():
            if (reference := exact.get(self._all[key].but("precision"))) is not None:
                parity = float(np.linalg.norm(loss - reference) / np.linalg.norm(reference))
                rows[key]["parity"] = parity
                parities[rows[key]["precision"]].append(parity)
        for key in losses:
            rows[key].setdefault("parity", max(parities[rows[key]["precision"]], default=None))
        return rows

    def _row(self, key: str) -> Row:
        """Return the row of a trial; empty if none is stored."""
        return self._context.ledger.get("trials", key) or {}

    def _succeeded(self, key: str) -> bool:
        return self._row(key).get("status") == "succeeded"

    @property
    def _done(self) -> int:
        """The number of trials that have ended."""
        return len(self._all) - len(self._waiting) - len(self._running)

    @property
    def _is_searching(self) -> bool:
        return self.settings.is_searched and self._asked < self.settings.samples

    def _add(self, trial: Trial) -> None:
        """Add a trial and its repeated measurements; those that are stored do not wait."""
        again = (trial.again(number) for number in range(2, self.settings.measurements + 1))
        for each in (trial, *again):
            self._all[each.unit.key] = each
            self._remember(each)
            if not is_done(self._context.ledger, each.unit):
                self._waiting.append(each)
        self._waiting.sort(key=lambda each: each.measurement)

    def _next(self, propose: Callable[..., Point]) -> Trial | None:
        """Return the next trial: first measurements before proposals, and these before others."""
        while self._is_searching and not any(each.repeats is None for each in self._waiting):
            self._propose(propose)
        if not self._waiting:
            return None
        trial, *rest = self._waiting
        if any(self._all[key].measurement < trial.measurement for key in self._running):
            return None  # a point that fails is not measured again
        self._waiting = rest
        return trial

    def _propose(self, propose: Callable[..., Point]) -> None:
        """Add the next proposal, unless the constraints rule it out or it is not a new point."""
        maker, number = self._maker, self._asked
        self._asked += 1
        rows = {key: {} if key in self._running else self._row(key) for key in self._numbers}
        known = [(self._all[key].point, costs_of(self.settings, rows[key])) for key in rows]
        trial = maker.trial(propose(self.settings, maker.axes, known, number))
        if trial is not None and trial.unit.key not in self._all:
            self._numbers[trial.unit.key] = number
            self._add(trial)

    def _obstacle(self, trial: Trial) -> str:
        """Return why a trial cannot run: the hardware, or less was too much; empty if it can."""
        if trial.repeats is not None:
            earlier = (f"{trial.repeats}-{number}" for number in range(2, trial.measurement))
            is_sound = all(map(self._succeeded, (trial.repeats, *earlier)))
            return "" if is_sound else "it failed before"
        if trial.lacks:
            return trial.lacks
        for other in filter(trial.needs_more_than, self._all.values()):
            if other.repeats is None and self._row(other.unit.key).get("status") == "out_of_memory":
                return f"micro-batch {other.micro_batch} with the same settings ran out of memory"
        return ""

    def _job(self, trial: Trial) -> TrainingJob:
        job = job_of(self._context, trial.unit, trial.training, self._context.run_dir)
        job = replace(job, attempt=trial.attempt, measured=self.settings.is_systems)
        return with_cpus(self._context, job) if job.measured else job

    def _record(
        self, trial: Trial, job: TrainingJob, status: str, outcome: Row, *, finished: bool = True
    ) -> None:
        key, ledger = trial.unit.key, self._context.ledger
        about = {"trained_stage": self.settings.stage, "kind": self.settings.kind}
        changed = Lineage.of(job.run_dir, key).columns
        point = {name: changed.get(name.rpartition(".")[2], v) for name, v in trial.point.items()}
        row = {"reason": None, **outcome, **about, "point": point, "repeats": trial.repeats}
        row |= changed
        if key in self._numbers:
            row |= {"search": self._last.key, "number": self._numbers[key]}
        self._context.record_trial(job, status, row)
        ledger.put("sweep_points", {key: {"trial_id": key, **about, **point}})
        if finished:
            self._context.finish(trial.unit)
            self._context.run_dir.delete(self._context.run_dir.checkpoints(key))
        self._remember(trial)

    def _remember(self, trial: Trial) -> None:
        """Take the metric from a trial that succeeded, unless it is known."""
        if self._succeeded(trial.unit.key):
            row = self._row(trial.unit.key)
            try:
                self.settings = with_metric_of(self.settings, row, self._declared)
            except UnitError as error:
                self._mistake = self._mistake or error

    def _say(self, trial: Trial, text: str) -> None:
        row = self._row(trial.unit.key)
        note = "settings changed, " if row.get("settings_history") else ""
        self._context.say(f"{shown(row.get('point') or trial.point)}: {note}{text}")
        self._context.advance(self._done)


class Trial(NamedTuple):
    """A point of a sweep as a training run.

    ``lacks`` says why this hardware cannot run the trial; empty if it can. ``repeats`` is the key
    of the trial that it measures again, as the given ``measurement``.
    """

    unit: Unit
    point: Point
    training: Training
    lacks: str
    repeats: str | None = None
    measurement: int = 1
    attempt: int = 1

    def needs_more_than(self, other: Trial) -> bool:
        """Whether the trial is another one with a larger micro-batch, and certainly needs more."""
        keeps_less = self.accumulation == 1 < other.accumulation  # no sum of gradients
        is_larger = self.micro_batch > other.micro_batch and not keeps_less
        return is_larger and self.but("micro_batch") == other.but("micro_batch")

    def again(self, number: int) -> Trial:
        """Return the trial that measures this one again, as the given number."""
        unit = Unit(f"{self.unit.key}-{number}", identity=self.unit.identity)
        return self._replace(unit=unit, repeats=self.unit.key, measurement=number)

    def but(self, setting: str) -> str:
        """Return the text of the point without a setting of the training."""
        rest = {k: v for k, v in self.point.items() if not k.endswith(f".training.{setting}")}
        return canonical_json(rest)

    @property
    def micro_batch(self) -> int:
        """Samples per worker per forward pass."""
        return self.training.settings.training.micro_batch or 1

    @property
    def accumulation(self) -> int:
        """Forward passes per worker per optimizer step."""
        return self.training.settings.training.accumulation or 1

    @property
    def is_exact(self) -> bool:
        """Whether a step has the effective batch: raypipe's own loop shortens micro-batches for it.

        A script that receives the micro-batch and the accumulation takes their product.
        """
        settings = self.training.settings
        if not isinstance(settings, ScriptStageSettings):
            return True  # without its task, which may load data
        task = self.training.task(None)
        if isinstance(task, ScriptTask) and "effective_batch" in task.used:
            return True
        product = self.micro_batch * self.accumulation * settings.scaling.worker_count
        return product == settings.training.effective_batch


@dataclass(frozen=True)
class TrialMaker:
    """Makes trials from points, for one stage of a configuration, whose training is ``swept``."""

    configuration: Configuration
    sweep: SweepSettings
    nodes: Sequence[Hardware]
    swept: Training

    def trials(self) -> list[Trial]:
        """Return the trials of all points that the constraints allow, small micro-batches first.

        Raises:
            ConfigError: an axis has a key or a value that the configuration rejects, or the
                constraints allow no point.

        """
        sweep, origin, found = self.sweep, self.configuration.origin, dict[str, Trial]()
        for point in points(self.axes, sweep.samples, sweep.seed):
            if (trial := self.trial(point)) is None:
                continue
            other = found.setdefault(trial.unit.key, trial)
            if other.point != point:
                keys = ", ".join(key for key in point if point[key] != other.point[key])
                raise ConfigError(
                    f"{origin}: sweep.axes: {keys}: {shown(other.point)} and {shown(point)} are "
                    f"the same training of {sweep.stage}; drop the axis, or make its key part of "
                    "the stage's identity"
                )
        if not found:
            raise ConfigError(
                f"{origin}: sweep: no point has training.effective_batch = "
                f"{sweep.constraints.effective_batch}; give micro-batches that are at most that "
                "over the workers (those of a script must divide it)"
            )
        return sorted(found.values(), key=lambda trial: (trial.micro_batch, trial.accumulation))

    def trial(self, point: Point) -> Trial | None:
        """Return the trial of a point by full keys; None if the constraints rule it out."""
        is_free = self.sweep.constraints.effective_batch is None
        try:
            trial = self.any_trial(point)
        except BatchConflict:
            if is_free:
                raise
            return None
        return trial if is_free or trial.is_exact else None

    def any_trial(self, point: Point) -> Trial:
        """Return the trial of a point by full keys. Raises ConfigError."""
        stage, sweep, values = self.sweep.stage, self.sweep, dict(point)
        if sweep.constraints.effective_batch is not None:
            values[f"{stage}.training.effective_batch"] = sweep.constraints.effective_batch
        if sweep.is_systems:
            values[f"{stage}.training.steps"] = sweep.warmup_steps + sweep.steps
            values[f"{stage}.training.log_every"] = sweep.warmup_steps
        origin = f"{self.configuration.origin}: sweep.axes"
        varied = self.configuration.with_values(values, origin)
        swept, training = training_stage(varied.stages(), stage, "sweep.stage")
        identity = self.identity(swept, training)
        lacks = obstacle(stage, training.settings, self.nodes)
        unit = Unit(_key(sweep, identity), identity=identity)
        return Trial(unit, point, training, lacks.reason if lacks else "")

    @property
    def axes(self) -> dict[str, AxisSettings]:
        """The axes by full key; that of an axis may be relative to the swept stage."""
        sections, stage = type(self.configuration.settings).model_fields, self.sweep.stage
        return {
            name if name.partition(".")[0] in sections else f"{stage}.{name}": axis
            for name, axis in self.sweep.axes.items()
        }

    @property
    def device(self) -> tuple[str, float]:
        """The name and the memory in bytes of the smallest GPU; ("cpu", inf) without one."""
        section = getattr(self.configuration.settings, self.sweep.stage)
        gpus = [gpu for node in self.nodes for gpu in node.gpus]
        if not gpus or section.scaling.gpus_per_worker == 0:
            return "cpu", math.inf
        smallest = min(gpus, key=lambda gpu: gpu.memory_bytes)
        return smallest.name, smallest.memory_bytes

    def identity(self, swept: Stage, training: Training) -> Identity:
        """Return all values that can change what a trial measures, its speed included."""
        settings, sweep = training.settings, self.sweep
        literals: dict[str, Any] = {
            "training": settings.training.model_dump(mode="json", exclude={"init_from"}),
            "scaling": settings.scaling.model_dump(mode="json"),
            "loader": settings.loader.model_dump(mode="json"),
            "kind": sweep.kind,
            "device": self.device[0],
        }
        if sweep.scheduler is not None:
            ended = {"scheduler", "metric", "mode"}
            literals["sweep"] = sweep.model_dump(mode="json", include=ended)
        of_stage = without_training(swept)
        (unit,) = swept.units
        if unit.extents:  # other trainings that it needs
            literals["extents"] = unit.extents
        return Identity.of(of_stage.shared, {**of_stage.literals, **literals}, of_stage.needs)


def without_training(stage: Stage) -> Identity:
    """Return the identity of a training stage without its own `training` settings."""
    (unit,) = stage.units
    identity = unit.composed
    own = dict(identity.shared.get(stage.name, {}))
    for name in ("training", "from_sweep"):
        own.pop(name, None)
    return Identity.of({**identity.shared, stage.name: own}, identity.literals, identity.needs)


def check_counts_steps(training: Training, where: str, what: str, instead: str = "") -> None:
    """Reject a script that receives its length in epochs, for trials of a few steps.

    Raises:
        ConfigError: it does; ``where`` is the stage, ``what`` measures it, ``instead`` is advice.

    """
    task = training.task(None)
    if isinstance(task, ScriptTask) and "epochs" in task.used:
        raise ConfigError(
            f"{where}: the script receives {{epochs}}, and {what} counts steps; use {{steps}}"
            f"{instead}"
        )


def training_stage(stages: Sequence[Stage], name: str, where: str) -> tuple[Stage, Training]:
    """Return the training stage named at ``where``, and its training. Raises ConfigError."""
    trained = {s.name: (s, s.training) for s in stages if s.training is not None}
    if name not in trained:
        raise ConfigError(
            f"{where} = {name!r}: must be a training stage of the experiment "
            f"(there are: {', '.join(trained) or 'none'})"
        )
    return trained[name]


def trainings(configuration: Configuration, stage: str | None) -> list[tuple[str, Training]]:
    """Return the training stages of a configuration by name, or the one of ``--stage``.

    Raises:
        ConfigError: there is no such training stage, or none at all.

    """
    stages = configuration.stages()
    if stage is not None:
        return [(stage, training_stage(stages, stage, "command line: --stage")[1])]
    found = [(each.name, each.training) for each in stages if each.training is not None]
    if not found:
        raise ConfigError(f"{configuration.origin}: no stage of this experiment trains a model")
    return found
