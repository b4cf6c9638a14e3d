"""A sweep under way: which trial comes next, and what became of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from raypipe.errors import UnitError
from raypipe.ledger import Row
from raypipe.runner import StageContext, first_line, status_of
from raypipe.sweep.memory import Memory
from raypipe.sweep.pareto import peak_bytes
from raypipe.sweep.settings import SweepSettings
from raypipe.sweep.trials import Trial, shown

if TYPE_CHECKING:
    from raypipe.training.job import TrainingJob

_WORTH_A_RESTART = ("worker_died", "node_lost", "host_out_of_memory")


class Sweep:
    """The trials of a sweep that are not done, in order, and the memory model that prunes them.

    A trial that is predicted not to fit waits: what the others show may correct the prediction.
    Those that still wait when nothing runs any more are skipped. Out of memory is a result; a
    trial whose process died is tried again, ``max_restarts`` times.
    """

    def __init__(
        self,
        context: StageContext,
        settings: SweepSettings,
        trials: Sequence[Trial],
        memory: Memory,
    ) -> None:
        self._context, self._settings = context, settings
        self._all = {trial.unit.slot: trial for trial in trials}
        self.memory = memory
        todo = {unit.slot for unit in context.todo()}
        # new trials may show that an earlier prediction was wrong
        self._waiting = [t for t in trials if t.unit.slot in todo or self._was_predicted(t)]
        self._running: dict[str, TrainingJob] = {}
        self._attempts: dict[str, int] = {}
        self.failed: dict[str, UnitError] = {}
        for trial in trials:
            self._remember(trial, context.ledger.get("trials", trial.unit.slot))
        context.begin(len(trials), len(trials) - len(self._waiting))

    def next(self) -> TrainingJob | None:
        """The next trial that may fit; None while that hangs on those that run."""
        for trial in list(self._waiting):
            if trial.lacks is not None:
                self._skip(trial, trial.lacks)
                continue
            verdict = self.memory.verdict(trial)
            if verdict.outcome == "does_not_fit":
                continue
            self._waiting.remove(trial)
            return self._start(trial)
        if not self._running:
            for trial in list(self._waiting):
                self._skip(trial, self.memory.verdict(trial).reason)
        return None

    @property
    def is_over(self) -> bool:
        """Whether every trial has run or was skipped."""
        return not self._waiting and not self._running

    def report(self, trial_id: str, row: dict[str, Any]) -> None:
        """A logged step of a trial."""
        self._context.session.trackers.log(trial_id, row)

    def ended(self, trial_id: str, outcome: dict[str, Any] | UnitError) -> None:
        """Record how a trial ended."""
        job, trial = self._running.pop(trial_id), self._all[trial_id]
        if not isinstance(outcome, UnitError):
            self._record(trial, job, "succeeded", outcome)
            self._say(trial, f"{outcome['samples_per_s']:.4g} samples/s")
            return
        again = outcome.kind in _WORTH_A_RESTART and job.attempt <= job.settings.max_restarts
        self._context.fail(
            trial_id, job.attempt, outcome.kind, outcome.message, "again" if again else "recorded"
        )
        if again:
            self._attempts[trial_id] = job.attempt + 1
            self._waiting.insert(0, trial)
            return
        finished = outcome.kind in ("out_of_memory", "invalid_value")
        if not finished:
            self.failed[trial_id] = outcome
        reason = {"reason": first_line(outcome.message)}
        self._record(trial, job, status_of(outcome), reason, finished=finished)
        self._say(trial, f"{outcome.kind}: {first_line(outcome.message)}")

    def stopped(self, trial_id: str) -> None:
        """Record that the scheduler ended a trial early."""
        job, trial = self._running.pop(trial_id), self._all[trial_id]
        self._record(
            trial, job, "interrupted", {"reason": f"stopped early by {self._settings.scheduler}"}
        )
        self._say(trial, "stopped early")

    def _was_predicted(self, trial: Trial) -> bool:
        row = self._context.ledger.get("trials", trial.unit.slot)
        return row is not None and row["status"] == "skipped" and trial.lacks is None

    def _start(self, trial: Trial) -> TrainingJob:
        job = self._context.job(trial.unit, trial.training.build_task(), trial.training.settings)
        job = replace(
            job,
            attempt=self._attempts.get(trial.unit.slot, 1),
            measured=self._settings.kind == "systems",
        )
        self._running[trial.unit.slot] = job
        return job

    def _skip(self, trial: Trial, reason: str) -> None:
        self._waiting.remove(trial)
        job = self._context.job(trial.unit, trial.training.build_task(), trial.training.settings)
        self._record(trial, replace(job, attempt=0), "skipped", {"reason": reason})
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
        predicted = self.memory.model(trial.group).predict(trial.micro_batch)
        row = {
            "reason": None,
            **outcome,
            "trained_stage": self._settings.stage,
            "kind": self._settings.kind,
            "point": trial.point,
            "reference": trial.reference,
            "predicted_peak_bytes": None if predicted is None else round(predicted),
        }
        self._context.record_trial(job, status, row)
        if finished:
            self._context.finish(trial.unit)
            self._context.run.delete(self._context.run.checkpoints(trial.unit.slot))
        self._remember(trial, self._context.ledger.get("trials", trial.unit.slot))

    def _remember(self, trial: Trial, row: Row | None) -> None:
        """Let the memory model learn from a trial that is recorded."""
        if row is not None and row["status"] == "succeeded":
            self.memory.observe(trial, peak_bytes(row))
        elif row is not None and row["status"] == "out_of_memory":
            self.memory.ran_out(trial)

    def _say(self, trial: Trial, text: str) -> None:
        done = len(self._all) - len(self._waiting) - len(self._running)
        self._context.say(f"{shown(trial.point)}: {text}")
        self._context.advance(done)
