"""State of a running sweep: pending trials, the next one, and outcomes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from raypipe.errors import TRANSIENT, UnitError
from raypipe.graph.context import StageContext
from raypipe.graph.continuation import is_done
from raypipe.graph.stages import job_of
from raypipe.graph.unit_logs import Failure, first_line
from raypipe.stats import finite_or_none
from raypipe.store import tables as results
from raypipe.store.ledger import Row
from raypipe.study.objective import Objective
from raypipe.study.sweep_search import SweepSearch
from raypipe.study.sweep_settings import SweepSettings
from raypipe.study.trials import Trial, shown

if TYPE_CHECKING:
    from raypipe.training.job import TrainingJob


class Sweep:
    """Trials of a sweep that are not done, in order.

    Out of memory is a result, and rules out larger micro-batches. A trial whose worker died is
    retried ``max_restarts`` times. A search adds its trials one at a time, when there is room.
    With a scheduler, ``history`` replays the logged steps of trials that ended earlier. A systems
    sweep measures all points once, then all again; each measurement is a trial. ``mistake`` is the
    error of an objective that trials do not have; no further trial is started then.
    """

    def __init__(
        self,
        context: StageContext,
        settings: SweepSettings,
        trials: Sequence[Trial],
        objective: Objective,
        search: SweepSearch | None = None,
    ) -> None:
        self._context, self._settings = context, settings
        self._all = {trial.unit.key: trial for trial in trials}
        self._objective, self._search = objective, search
        self.mistake: UnitError | None = None
        self._waiting = [trial for trial in trials if self._is_new(trial)]
        self._out_of_memory: list[Trial] = []
        self._running: dict[str, TrainingJob] = {}
        self._rows: dict[str, dict[int, Row]] = {}
        self._attempts: dict[str, int] = {}
        self.failed: dict[str, UnitError] = {}
        self._measurement = 1
        for trial in trials:
            self._remember(trial, context.ledger.get("trials", trial.unit.key))
        total = len(trials) if search is None else search.total
        context.begin(total * settings.measurements, len(trials) - len(self._waiting))

    @property
    def trials(self) -> list[Trial]:
        """The given trials, those of the search so far, and repeated measurements."""
        return list(self._all.values())

    def next(self) -> TrainingJob | None:
        """Return the next trial; None while it depends on running trials, and at the end."""
        if self.mistake is not None:
            return None
        trial = self._next()
        if trial is None and not self._running and self.mistake is None:
            self._measure_again()
            trial = self._next()
        return None if trial is None else self._start(trial)

    def _next(self) -> Trial | None:
        while self._waiting:
            trial = self._waiting.pop(0)
            if not (reason := self._obstacle(trial)):
                return trial
            self._skip(trial, reason)
        return self._found()

    def _obstacle(self, trial: Trial) -> str:
        """Return why a trial cannot run: the hardware, or less was too much; empty if it can."""
        too_large = next((t for t in self._out_of_memory if trial.needs_more_than(t)), None)
        if trial.lacks or too_large is None:
            return trial.lacks or ""
        return f"micro-batch {too_large.micro_batch} with the same settings ran out of memory"

    def _measure_again(self) -> None:
        """Add a measurement of every point, unless an earlier one of the point did not succeed."""
        while not self._waiting and self._measurement < self._settings.measurements:
            self._measurement += 1
            rows = {key: self._context.ledger.get("trials", key) or {} for key in self._all}
            failed = {
                trial.repeats or key
                for key, trial in self._all.items()
                if trial.reference or rows[key].get("status") != "succeeded"
            }
            firsts = [trial for trial in self._all.values() if trial.repeats is None]
            trials = [t.again(self._measurement) for t in firsts if t.unit.key not in failed]
            self._all |= {trial.unit.key: trial for trial in trials}
            self._waiting = [trial for trial in trials if self._is_new(trial)]

    @property
    def is_over(self) -> bool:
        """Whether every trial has run or was skipped, or a mistake ended the sweep."""
        if self.mistake is not None:
            return not self._running
        searched = self._search is None or self._search.is_over
        measured = self._measurement >= self._settings.measurements
        return searched and measured and not self._waiting and not self._running

    def _found(self) -> Trial | None:
        """Return the next trial of the search that can run; None while there is none."""
        while self._search is not None and (trial := self._search.ask()) is not None:
            self._all[trial.unit.key] = trial
            if not self._is_new(trial):  # done by an earlier command or another sweep
                recorded = self._context.ledger.get("trials", trial.unit.key)
                self._remember(trial, recorded)
                if self.mistake is not None:
                    return None
                self._tell(trial, recorded)
            elif reason := self._obstacle(trial):
                self._skip(trial, reason)
            else:
                return trial
        return None

    def history(self) -> Iterator[tuple[str, Row]]:
        """Yield the results that a scheduler received in earlier commands, in their order.

        The last step of a trial that finished is not among them, as in Ray Tune.
        """
        ledger = self._context.ledger
        done = [key for key, trial in self._all.items() if is_done(ledger, trial.unit)]
        for key in sorted(
            done, key=lambda key: str((ledger.get("units", key) or {})["finished_at"])
        ):
            row = ledger.get("trials", key)
            if row is None or row["status"] not in ("succeeded", "interrupted"):
                continue
            steps = results.read_partition(self._context.run_dir, "steps", key)
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
        if self._is_tried_again(trial, job, outcome):
            return
        finished = outcome.kind in ("out_of_memory", "invalid_value")
        if not finished:
            self.failed[trial_id] = outcome
        reason = {"reason": first_line(outcome.message)}
        self._record(trial, job, outcome.status, reason, finished=finished)
        self._say(trial, f"{outcome.kind}: {first_line(outcome.message)}")

    def _is_tried_again(self, trial: Trial, job: TrainingJob, error: UnitError) -> bool:
        """Record a failed attempt; return whether there is another one."""
        again = error.kind in TRANSIENT and job.attempt <= job.settings.max_restarts
        about = error.message, "again" if again else "recorded", error.trace
        shown = error.kind not in ("out_of_memory", "invalid_value")
        self._context.fail(Failure(job.trial_id, job.attempt, error.kind, *about, shown=shown))
        if again:
            self._attempts[job.trial_id] = job.attempt + 1
            self._waiting.insert(0, trial)
        return again

    def stopped(self, trial_id: str) -> None:
        """Record that the scheduler ended a trial early."""
        job, trial = self._running.pop(trial_id), self._all[trial_id]
        rows = self._rows.pop(trial_id, {})
        self._store(job, rows)
        row = rows[max(rows)] if rows else {}
        seen = {key: value for key, value in row.items() if key.startswith("eval_")}
        seen |= {"steps": row.get("step"), "loss_final": row.get("loss")}
        reason = f"stopped early by {self._settings.scheduler}"
        self._record(trial, job, "interrupted", {**seen, "reason": reason})
        self._say(trial, f"{reason} after {row.get('step', 0)} steps")

    def _store(self, job: TrainingJob, rows: Mapping[int, Row]) -> None:
        """Write the logged steps that a stopped worker had not written."""
        stored = results.read_rows(job.run_dir, "steps", job.trial_id)
        known = {row["step"]: row for row in stored}
        if not rows.keys() <= known.keys():
            merged = [row for _, row in sorted({**rows, **known}.items())]
            results.write_table(job.run_dir, job.steps_table, merged, job.run_id, job.trial_id)

    def _is_new(self, trial: Trial) -> bool:
        return not is_done(self._context.ledger, trial.unit)

    def _start(self, trial: Trial) -> TrainingJob:
        job = replace(
            self._job(trial),
            attempt=self._attempts.get(trial.unit.key, 1),
            measured=self._settings.kind == "systems",
            initial=trial.training.initial,
        )
        self._running[trial.unit.key] = job
        return job

    def _job(self, trial: Trial) -> TrainingJob:
        task = trial.training.task(self._context.run_dir)
        return job_of(self._context, trial.unit, task, trial.training.settings)

    def _skip(self, trial: Trial, reason: str) -> None:
        job = replace(self._job(trial), attempt=0)
        self._record(trial, job, "skipped", {"reason": reason})
        self._say(trial, f"skipped: {reason}")

    def _record(
        self,
        trial: Trial,
        job: TrainingJob,
        status: str,
        outcome: Mapping[str, Any],
        *,
        finished: bool = True,
    ) -> None:
        row = {
            "reason": None,
            **outcome,
            **(self._search.about(trial) if self._search and not trial.repeats else {}),
            "trained_stage": self._settings.stage,
            "kind": self._settings.kind,
            "point": trial.point,
            "reference": trial.reference,
            "repeats": trial.repeats,
        }
        self._context.record_trial(job, status, row)
        about = {name: row[name] for name in ("trained_stage", "kind", "reference")}
        point = {"trial_id": trial.unit.key, **about, **trial.point}
        self._context.ledger.put("sweep_points", {trial.unit.key: point})
        if finished:
            self._context.finish(trial.unit)
        recorded = self._context.ledger.get("trials", trial.unit.key)
        self._remember(trial, recorded)
        if self.mistake is None:
            self._tell(trial, recorded)

    def _tell(self, trial: Trial, row: Row | None) -> None:
        """Report an outcome to the search, and delete checkpoints that are no longer needed."""
        done = is_done(self._context.ledger, trial.unit)
        if self._search is not None and trial.repeats is None:
            self._search.tell(trial, row if done else None)
        if done:
            self._context.run_dir.delete(self._context.run_dir.checkpoints(trial.unit.key))

    def _remember(self, trial: Trial, row: Row | None) -> None:
        """Update the objective, and what runs out of memory, with a recorded trial."""
        if row is not None and row["status"] == "succeeded":
            try:
                self._objective.settle(row)
            except UnitError as error:
                self.mistake = self.mistake or error
        elif row is not None and row["status"] == "out_of_memory" and trial.repeats is None:
            self._out_of_memory.append(trial)

    def _say(self, trial: Trial, text: str) -> None:
        done = len(self._all) - len(self._waiting) - len(self._running)
        self._context.say(f"{shown(trial.point)}: {text}")
        self._context.advance(done)
