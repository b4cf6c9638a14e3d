"""State of a running sweep: pending trials, the next one, and outcomes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from raypipe.errors import TRANSIENT, UnitError
from raypipe.graph.context import StageContext
from raypipe.graph.continuation import is_done
from raypipe.graph.launcher import Trials
from raypipe.graph.stages import job_of
from raypipe.graph.unit_logs import Failure, first_line
from raypipe.stats import finite_or_none
from raypipe.store import tables as results
from raypipe.store.ledger import Row
from raypipe.study.metric import Objective
from raypipe.study.population import Lineage
from raypipe.study.trials import Trial, TrialMaker, shown, total_steps, training_stage

if TYPE_CHECKING:
    from raypipe.training.job import TrainingJob


class Sweep(Trials):
    """Trials of a sweep that are not done, in order.

    Out of memory is a result, and rules out larger micro-batches. A trial whose worker died is
    retried ``max_restarts`` times. A search adds its trials one at a time, when there is room; each
    proposal follows from the stored trials, its number and the seed. A systems sweep measures all
    points once, then all again; each measurement is a trial.

    Args:
        context: of the sweep's stage.
        maker: makes trials of points.
        trials: those that are given, or that a search proposed in earlier commands.
        objective: the metric.
        search: the name of the search in its rows; empty without one.

    """

    def __init__(
        self,
        context: StageContext,
        maker: TrialMaker,
        trials: Sequence[Trial],
        objective: Objective,
        search: str = "",
    ) -> None:
        self._context, self._maker, self._settings = context, maker, maker.sweep
        self._objective, self._search = objective, search
        #: the error of an objective that trials do not have; no further trial is started then
        self.mistake: UnitError | None = None
        self.failed: dict[str, UnitError] = {}
        self._all: dict[str, Trial] = {}
        self._waiting: list[Trial] = []
        self._running: dict[str, TrainingJob] = {}
        self._too_large: list[Trial] = []
        self._rows: dict[str, dict[int, Row]] = {}
        self._attempts: dict[str, int] = {}
        stored = context.ledger.rows("trials") if search else ()
        #: of the search: the number of each proposal
        self._numbers = {r["trial_id"]: r["number"] for r in stored if r.get("search") == search}
        self._asked = 1 + max(self._numbers.values(), default=-1)
        for trial in trials:
            self._add(trial)
        total = self._settings.samples if search else len(trials)
        context.begin(total * self._settings.measurements, len(self._all) - len(self._waiting))

    @property
    def trials(self) -> list[Trial]:
        """The trials so far, with those that measure a point again."""
        return list(self._all.values())

    @property
    def steps(self) -> int:
        """The optimizer steps of the swept training."""
        stages, name = self._maker.configuration.stages(), self._settings.stage
        training = training_stage(stages, name, "sweep.stage")[1]
        return total_steps(training, self._context.run_dir)

    @property
    def is_over(self) -> bool:
        """Whether every trial has run or was skipped, or a mistake ended the sweep."""
        rest = self._waiting or self._is_searching
        return not self._running and (self.mistake is not None or not rest)

    def next(self) -> TrainingJob | None:
        """Return the next trial; None while it depends on running trials, and at the end."""
        while self.mistake is None and (trial := self._next()) is not None:
            reason = self._obstacle(trial)
            if not reason:
                return self._start(trial)
            if trial.repeats is None:
                job = replace(self._job(trial), attempt=0)
                self._record(trial, job, "skipped", {"reason": reason})
                self._say(trial, f"skipped: {reason}")
        return None

    def history(self) -> Iterator[tuple[str, Row]]:
        """Yield the results that a scheduler received in earlier commands, in their order.

        The last step of a trial that finished is not among them, as in Ray Tune.
        """
        ledger = self._context.ledger
        done = [key for key, trial in self._all.items() if is_done(ledger, trial.unit)]
        ends = {key: str((ledger.get("units", key) or {})["finished_at"]) for key in done}
        for key in sorted(done, key=ends.__getitem__):
            row = ledger.get("trials", key)
            if row is None or row["status"] not in ("succeeded", "interrupted"):
                continue
            steps = results.read_table(self._context.run_dir, "steps", key)
            seen = steps["step"] < row["steps"] + (row["status"] == "interrupted")
            for _, step in steps[seen].iterrows():
                yield key, step.dropna().to_dict()

    def report(self, trial_id: str, row: dict[str, Any]) -> None:
        """Record a logged step of a trial."""
        self._rows.setdefault(trial_id, {})[row["step"]] = row
        self._context.session.trackers.log(trial_id, row)

    def ended(self, trial_id: str, outcome: dict[str, Any] | UnitError) -> None:
        """Record how a trial ended."""
        job, trial = self._running.pop(trial_id), self._all[trial_id]
        if not isinstance(outcome, UnitError):
            self._record(trial, job, "succeeded", outcome)
            column = self._objective.column
            value = finite_or_none(outcome.get(column))
            self._say(trial, "done" if value is None else f"{column} {value:.4g}")
            return
        again = outcome.kind in TRANSIENT and job.attempt <= job.settings.max_restarts
        finished = outcome.kind in ("out_of_memory", "invalid_value")
        about = outcome.message, "again" if again else "recorded", outcome.trace
        failure = Failure(trial_id, job.attempt, outcome.kind, *about, shown=not finished)
        self._context.fail(failure)
        if again:
            self._attempts[trial_id] = job.attempt + 1
            self._waiting.insert(0, trial)
            return
        if not finished:
            self.failed[trial_id] = outcome
        reason = {"reason": first_line(outcome.message)}
        self._record(trial, job, outcome.status, reason, finished=finished)
        self._say(trial, f"{outcome.kind}: {first_line(outcome.message)}")

    def stopped(self, trial_id: str) -> None:
        """Record that the scheduler ended a trial early, with the steps that it had not written."""
        job, trial = self._running.pop(trial_id), self._all[trial_id]
        rows = self._rows.pop(trial_id, {})
        known = {row["step"]: row for row in results.read_rows(job.run_dir, "steps", trial_id)}
        if not rows.keys() <= known.keys():
            merged = [row for _, row in sorted({**rows, **known}.items())]
            results.write_table(job.run_dir, job.steps_table, merged, job.run_id, trial_id)
        row = rows[max(rows)] if rows else {}
        seen = {key: value for key, value in row.items() if key.startswith("eval_")}
        seen |= {"steps": row.get("step"), "loss_final": row.get("loss")}
        name = self._settings.scheduler.name if self._settings.scheduler else "the scheduler"
        reason = f"stopped early by {name}"
        self._record(trial, job, "interrupted", {**seen, "reason": reason})
        self._say(trial, f"{reason} after {row.get('step', 0)} steps")

    @property
    def _is_searching(self) -> bool:
        return bool(self._search) and self._asked < self._settings.samples

    def _add(self, trial: Trial) -> None:
        """Add a trial and its repeated measurements; those that are stored do not wait."""
        count = 1 if trial.reference else self._settings.measurements
        for each in (trial, *(trial.again(number) for number in range(2, count + 1))):
            self._all[each.unit.key] = each
            self._remember(each, self._context.ledger.get("trials", each.unit.key))
            if not is_done(self._context.ledger, each.unit):
                self._waiting.append(each)
        self._waiting.sort(key=lambda each: each.measurement)

    def _next(self) -> Trial | None:
        """Return the next trial: first measurements before proposals, and these before others."""
        while self._is_searching and not any(each.repeats is None for each in self._waiting):
            self._propose()
        if not self._waiting:
            return None
        running = [self._all[key].measurement for key in self._running]
        if self._waiting[0].measurement > min(running, default=self._waiting[0].measurement):
            return None  # a point that fails is not measured again
        return self._waiting.pop(0)

    def _propose(self) -> None:
        """Add the next proposal, unless the constraints rule it out or it is not a new point."""
        maker, number = self._maker, self._asked
        self._asked += 1
        known = []
        for key in sorted(self._numbers, key=self._numbers.__getitem__):
            row = None if key in self._running else self._context.ledger.get("trials", key)
            costs = None if row is None else self._objective.costs(row)
            known.append((self._all[key].point, costs))
        axes = {maker.key(name): axis for name, axis in self._settings.axes.items()}
        propose = self._context.session.launcher.propose
        trial = maker.trial(propose(self._settings, axes, known, number))
        if trial is not None and trial.unit.key not in self._all:
            self._numbers[trial.unit.key] = number
            self._add(trial)

    def _obstacle(self, trial: Trial) -> str:
        """Return why a trial cannot run: the hardware, or less was too much; empty if it can."""
        if trial.repeats is not None:
            earlier = (f"{trial.repeats}-{number}" for number in range(2, trial.measurement))
            rows = [self._context.ledger.get("trials", k) or {} for k in (trial.repeats, *earlier)]
            return "" if all(r.get("status") == "succeeded" for r in rows) else "it failed before"
        too_large = next((t for t in self._too_large if trial.needs_more_than(t)), None)
        if trial.lacks or too_large is None:
            return trial.lacks or ""
        return f"micro-batch {too_large.micro_batch} with the same settings ran out of memory"

    def _job(self, trial: Trial) -> TrainingJob:
        task = trial.training.task(self._context.run_dir)
        return job_of(self._context, trial.unit, task, trial.training.settings)

    def _start(self, trial: Trial) -> TrainingJob:
        job = replace(
            self._job(trial),
            attempt=self._attempts.get(trial.unit.key, 1),
            measured=self._settings.kind == "systems",
            initial=trial.training.initial,
        )
        self._running[trial.unit.key] = job
        return job

    def _record(
        self,
        trial: Trial,
        job: TrainingJob,
        status: str,
        outcome: Mapping[str, Any],
        *,
        finished: bool = True,
    ) -> None:
        key, ledger = trial.unit.key, self._context.ledger
        about = {
            "trained_stage": self._settings.stage,
            "kind": self._settings.kind,
            "reference": trial.reference,
        }
        changed = Lineage.of(job.run_dir, key).columns
        point = {name: changed.get(name.rpartition(".")[2], v) for name, v in trial.point.items()}
        row = {"reason": None, **outcome, **about, "point": point, "repeats": trial.repeats}
        row |= changed
        if key in self._numbers:
            row |= {"search": self._search, "number": self._numbers[key]}
        self._context.record_trial(job, status, row)
        ledger.put("sweep_points", {key: {"trial_id": key, **about, **point}})
        if finished:
            self._context.finish(trial.unit)
            self._context.run_dir.delete(self._context.run_dir.checkpoints(key))
        self._remember(trial, ledger.get("trials", key))

    def _remember(self, trial: Trial, row: Row | None) -> None:
        """Update the objective, and what runs out of memory, with a recorded trial."""
        if row is not None and row["status"] == "succeeded":
            try:
                self._objective.settle(row)
            except UnitError as error:
                self.mistake = self.mistake or error
        elif row is not None and row["status"] == "out_of_memory" and trial.repeats is None:
            self._too_large.append(trial)

    def _say(self, trial: Trial, text: str) -> None:
        row = self._context.ledger.get("trials", trial.unit.key) or {}
        note = "settings changed, " if row.get("settings_history") else ""
        self._context.say(f"{shown(row.get('point') or trial.point)}: {note}{text}")
        self._context.advance(len(self._all) - len(self._waiting) - len(self._running))
