"""State of a running sweep: pending trials, the next one, and outcomes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from raypipe.errors import TRANSIENT, UnitError
from raypipe.pipeline.context import StageContext
from raypipe.pipeline.stage_units import is_done
from raypipe.pipeline.unit_logs import Failure, first_line
from raypipe.provenance import ago
from raypipe.stats import finite_or_none
from raypipe.storage import tables as results
from raypipe.storage.ledger import Row
from raypipe.sweep.memory import Memory
from raypipe.sweep.objective import Objective
from raypipe.sweep.pareto import peak_bytes
from raypipe.sweep.parity import record_parity
from raypipe.sweep.rounds import TABLE, Rounds, forget, last_round, round_row
from raypipe.sweep.search import Search
from raypipe.sweep.settings import SweepSettings
from raypipe.sweep.trials import Trial, shown

if TYPE_CHECKING:
    from raypipe.training.job import TrainingJob


class Sweep:
    """Trials of a sweep that are not done, in order, and the memory model that prunes them.

    A trial that is predicted not to fit waits, because other trials may correct the prediction;
    it is skipped if nothing else is running. Out of memory is a result. A trial whose worker died
    is retried ``max_restarts`` times. A search adds its trials one at a time, when there is room.
    With a scheduler, ``history`` replays the logged steps of trials that ended earlier. After its
    trials, a systems sweep measures those that may be the best again, in rounds. ``mistake`` is the
    error of an objective that trials do not have; no further trial is started then.
    """

    def __init__(
        self,
        context: StageContext,
        settings: SweepSettings,
        trials: Sequence[Trial],
        memory: Memory,
        objective: Objective,
        search: Search | None = None,
    ) -> None:
        self._context, self._settings = context, settings
        self._all = {trial.unit.key: trial for trial in trials}
        self._memory, self._objective, self._search = memory, objective, search
        self.mistake: UnitError | None = None
        # new trials may correct an earlier prediction
        self._waiting = [t for t in trials if self._is_new(t) or self._was_predicted(t)]
        self._running: dict[str, TrainingJob] = {}
        self._rows: dict[str, dict[int, Row]] = {}
        self._attempts: dict[str, int] = {}
        self.failed: dict[str, UnitError] = {}
        self._first_round = last_round(context.ledger) + 1
        self._place, self._clock = 0, time.monotonic()
        self._begun: dict[str, float] = {}
        self._rounds: Rounds | None = None
        self._repeating: set[str] = set()
        for trial in trials:
            self._remember(trial, context.ledger.get("trials", trial.unit.key))
        total = len(trials) if search is None else search.total
        context.begin(total, len(trials) - len(self._waiting))

    @property
    def trials(self) -> list[Trial]:
        """The given trials, and those of the search so far."""
        return list(self._all.values())

    def next(self) -> TrainingJob | None:
        """Return the next trial that may fit; None while it depends on running trials."""
        if self.mistake is not None:
            return None
        for trial in list(self._waiting):
            if trial.lacks is not None:
                self._skip(trial, trial.lacks)
                continue
            verdict = self._memory.verdict(trial)
            if verdict.outcome == "does_not_fit":
                continue
            self._waiting.remove(trial)
            return self._start(trial)
        found = self._found()
        if found is None and not self._running:
            for trial in list(self._waiting):
                self._skip(trial, self._memory.verdict(trial).reason)
            found = self._found()
        return self._next_repetition() if found is None else self._start(found)

    @property
    def is_over(self) -> bool:
        """Whether every trial has run or was skipped, or a mistake ended the sweep."""
        if self.mistake is not None:
            return not self._running
        searched = self._search is None or self._search.is_over
        tried = searched and not self._waiting and not self._running
        if not tried or not self._settings.has_rounds:
            return tried
        return self._rounds is not None and self._rounds.is_over

    def _next_repetition(self) -> TrainingJob | None:
        """Return the next measurement of the rounds; None while others run, and at the end."""
        rounds = self._rounds
        over = rounds is not None and (rounds.is_over or (self._running and not rounds.has_due))
        if over or not self._settings.has_rounds or (rounds is None and self._running):
            return None
        if self._search is not None and not self._search.is_over:
            return None
        if rounds is None:
            rows = record_parity(self._context, self.trials)
            first = max(self._first_round, last_round(self._context.ledger) + 1)
            rounds = Rounds(self._context.ledger, self._settings, self._all, rows, first)
            self._rounds = rounds
        trial, said = rounds.next()
        for line in said.splitlines():
            self._context.say(line)
        if trial is None:
            return None
        self._repeating.add(trial.unit.key)
        return self._start(trial)

    def _found(self) -> Trial | None:
        """Return the next trial of the search that may fit; None while there is none."""
        while self._search is not None and (trial := self._search.ask()) is not None:
            self._all[trial.unit.key] = trial
            if not self._is_new(trial):  # done by an earlier command or another sweep
                recorded = self._context.ledger.get("trials", trial.unit.key)
                self._remember(trial, recorded)
                if self.mistake is not None:
                    return None
                self._tell(trial, recorded)
            elif trial.lacks is not None:
                self._skip(trial, trial.lacks)
            elif (verdict := self._memory.verdict(trial)).outcome == "does_not_fit":
                self._skip(trial, verdict.reason)
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
        if trial_id in self._repeating:
            return
        self._rows.setdefault(trial_id, {})[row["step"]] = row
        self._context.session.trackers.log(trial_id, row)

    def ended(self, trial_id: str, outcome: dict[str, Any] | UnitError) -> None:
        """Record how a trial ended."""
        job, trial = self._running.pop(trial_id), self._all[trial_id]
        duration_s = self._duration(trial_id)
        if trial_id in self._repeating:
            self._repeated(trial, job, outcome, duration_s)
            return
        if not isinstance(outcome, UnitError):
            columns = {name: value for name, value in outcome.items() if name != "load"}
            if self._settings.has_rounds:
                self._record_first(trial, outcome, duration_s)
            self._record(trial, job, "succeeded", columns)
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

    def _record_first(self, trial: Trial, outcome: Mapping[str, Any], duration_s: float) -> None:
        """Record the first measurement of a trial; those of an outdated one do not count."""
        forget(self._context.ledger, trial.unit.key)
        row = round_row(trial, self._settings, self._first_round, self._place, "succeeded", outcome)
        self._place += 1
        self._put_round(row, duration_s)

    def _repeated(
        self,
        trial: Trial,
        job: TrainingJob,
        outcome: dict[str, Any] | UnitError,
        duration_s: float,
    ) -> None:
        """Record a measurement of a later round."""
        key, rounds = trial.unit.key, self._rounds
        if rounds is None:
            raise ValueError(f"{key}: no round has begun")
        if not isinstance(outcome, UnitError):
            self._repeating.discard(key)
            self._put_round(rounds.row(key, "succeeded", outcome), duration_s)
            return
        if self._is_tried_again(trial, job, outcome):
            return
        self._repeating.discard(key)
        rounds.drop(key)
        if outcome.kind in ("out_of_memory", "invalid_value"):
            self._put_round(rounds.row(key, outcome.status, {}), duration_s)
        else:  # the next command measures it again
            self.failed[key] = outcome
        self._say(trial, f"round {rounds.number}: {outcome.kind}: {first_line(outcome.message)}")

    def _put_round(self, row: Row, duration_s: float) -> None:
        key = f"{row['trial_id']}/{row['round']}"
        timed = {**row, "started_at": ago(duration_s), "duration_s": duration_s}
        self._context.ledger.put(TABLE, {key: timed})

    def _duration(self, trial_id: str) -> float:
        """Return the seconds of a measurement, without those that it waited for others."""
        begun, self._clock = max(self._begun.pop(trial_id), self._clock), time.monotonic()
        return self._clock - begun

    def stopped(self, trial_id: str) -> None:
        """Record that the scheduler ended a trial early."""
        job, trial = self._running.pop(trial_id), self._all[trial_id]
        self._duration(trial_id)
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

    def _was_predicted(self, trial: Trial) -> bool:
        row = self._context.ledger.get("trials", trial.unit.key)
        return row is not None and row["status"] == "skipped" and trial.lacks is None

    def _start(self, trial: Trial) -> TrainingJob:
        job = replace(
            self._job(trial),
            attempt=self._attempts.get(trial.unit.key, 1),
            measured=self._settings.kind == "systems",
            repeated=trial.unit.key in self._repeating,
            initial=trial.training.initial,
        )
        self._running[trial.unit.key] = job
        self._begun[trial.unit.key] = time.monotonic()
        return job

    def _job(self, trial: Trial) -> TrainingJob:
        task = trial.training.task(self._context.run_dir)
        return self._context.job(trial.unit, task, trial.training.settings)

    def _skip(self, trial: Trial, reason: str) -> None:
        if trial in self._waiting:
            self._waiting.remove(trial)
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
        predicted = self._memory.model(trial.group).predict(trial.micro_batch)
        row = {
            "reason": None,
            **outcome,
            **(self._search.about(trial) if self._search is not None else {}),
            "trained_stage": self._settings.stage,
            "kind": self._settings.kind,
            "point": trial.point,
            "reference": trial.reference,
            "predicted_peak_bytes": None if predicted is None else round(predicted),
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
        if self._search is not None:
            self._search.tell(trial, row if done else None)
        if done:
            self._context.run_dir.delete(self._context.run_dir.checkpoints(trial.unit.key))

    def _remember(self, trial: Trial, row: Row | None) -> None:
        """Update the memory model and the objective with a recorded trial."""
        if row is not None and row["status"] == "succeeded":
            try:
                self._objective.settle(row)
            except UnitError as error:
                self.mistake = self.mistake or error
            self._memory.observe(trial, peak_bytes(row))
        elif row is not None and row["status"] == "out_of_memory":
            self._memory.ran_out(trial)

    def _say(self, trial: Trial, text: str) -> None:
        done = len(self._all) - len(self._waiting) - len(self._running)
        self._context.say(f"{shown(trial.point)}: {text}")
        self._context.advance(done)
