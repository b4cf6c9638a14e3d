"""Run of a script: from its start to the columns of ``trials``."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

import torch

from raypipe.errors import UnitError
from raypipe.provenance import now
from raypipe.redaction import without_credentials
from raypipe.scripts import command
from raypipe.scripts.failure import failure_of, oom_kills
from raypipe.scripts.history import ScriptHistory
from raypipe.scripts.metrics import Lines, MetricsFile, Reading
from raypipe.scripts.places import Places
from raypipe.scripts.process import Exit, ScriptProcess
from raypipe.scripts.settings import ScriptStageSettings
from raypipe.store import tables
from raypipe.training import telemetry
from raypipe.training.ending import Ending
from raypipe.training.job import Report, TrainingJob
from raypipe.training.tables import GPU_SAMPLES
from raypipe.training.telemetry import Program, Telemetry

_POLL_S = 0.05
#: seconds between writes of the table ``steps``
_STORE_S = 10.0
_STDOUT = "stdout"
_CPU = torch.device("cpu")


class ScriptRun:
    """One attempt of a script.

    Args:
        job: the training.
        parameters: the parameters by dotted name.
        used: names of the values that reach the script.
        report: receives the rows of ``steps``.

    """

    def __init__(
        self, job: TrainingJob, parameters: Mapping[str, Any], used: frozenset[str], report: Report
    ) -> None:
        self._job, self._parameters, self._report = job, parameters, report
        self._settings = cast("ScriptStageSettings", job.settings)
        self._splits = {"micro_batch", "accumulation"} <= used
        self._splits |= {"micro_batch", "effective_batch"} <= used
        effective = self._settings.training.effective_batch
        self._history = ScriptHistory(job, self._settings.columns, effective)
        self._lines: SimpleQueue[str] = SimpleQueue()
        self._stdout, self._problem = Lines(), ""

    def run(self, directory: Path, ending: Ending) -> dict[str, Any]:
        """Run the script to its end; see :meth:`~raypipe.training.job.ExternalTask.run`."""
        before = oom_kills()
        try:
            with Places(self._job) as places:
                ended, seconds, summaries = self._attempt(directory, places, ending)
        finally:
            if not self._job.measured or self._history.rows:
                self._history.store()
        if ending.wanted:
            return {**self._outcome(seconds, summaries), "ended_at": self._history.last_step}
        if ended.status:
            size = self._job.plan.micro_batch if self._splits else 1
            kernel = oom_kills() > before
            unit = self._job.trial_id
            raise failure_of(unit, ended.status, self._errors, size, killed_by_kernel=kernel)
        self._history.finish()
        outcome = self._outcome(seconds, summaries)
        outcome["host_peak_bytes"] = max(outcome["host_peak_bytes"] or 0, ended.peak_bytes)
        self._check(outcome)
        return outcome

    def _attempt(
        self, directory: Path, places: Places, ending: Ending
    ) -> tuple[Exit, float, list[dict[str, Any]]]:
        """Return the end of the script, its seconds, and the summaries of the telemetry."""
        settings, newest = self._settings, places.newest_checkpoint
        values = self._values(places, newest)
        argv = command.arguments(settings, values, resumes=newest is not None)
        metrics = self._metrics(places, values, resumes=newest is not None)
        if not self._job.measured and newest is not None:  # else it begins at its first step
            self._history.restore()
        if metrics is not None:
            self._history.add(metrics.read(), None)
        with places.log.open("a", encoding="utf-8") as log:
            shown = without_credentials(" ".join(argv))
            log.write(f"--- {now()} attempt {self._job.attempt}: {shown}\n")
        heard = self._lines.put if settings.metrics == _STDOUT else _ignore
        environment = self._environment(values, newest)
        process = ScriptProcess(
            argv, str(directory), environment, places.log, settings.grace_s, heard
        )
        ending.seconds = settings.grace_s
        gpus = _gpus(environment)
        with ExitStack() as stack:
            stack.enter_context(process)
            started = time.monotonic()
            samplers = [
                stack.enter_context(
                    Telemetry(
                        self._job.trial_id,
                        _CPU,
                        rank=rank,
                        attempt=self._job.attempt,
                        program=Program(process.guard_pid, gpu),
                    )
                )
                for rank, gpu in enumerate(gpus or [None])
            ]
            try:
                ended = self._follow(process, metrics, places, samplers, ending)
                seconds = time.monotonic() - started
                whole = not (ended.status or ending.wanted)  # else half a line may be the last one
                self._take(metrics, time.monotonic(), samplers, last=whole)
            finally:
                self._store_samples(samplers)
            self._errors = [without_credentials(line) for line in process.errors()]
            self._take(metrics, time.monotonic(), samplers, last=whole)
            if whole:
                self._check_metrics(metrics, places)
            return ended, seconds, [sampler.summary() for sampler in samplers]

    def _follow(
        self,
        process: ScriptProcess,
        metrics: MetricsFile | None,
        places: Places,
        samplers: list[Telemetry],
        ending: Ending,
    ) -> Exit:
        """Wait for the end of the script, and pass on what it writes."""
        limit, asked = self._settings.time_limit_s, False
        started = stored = time.monotonic()
        while (ended := process.poll()) is None:
            self._take(metrics, time.monotonic(), samplers)
            places.keep()
            if self._problem:
                raise self._failure(self._problem)
            if ending.wanted and not asked:
                asked = True
                process.end()
            if limit is not None and time.monotonic() > started + limit:
                message = f"it ran longer than time_limit_s = {limit:g}"
                raise UnitError(self._job.trial_id, "timeout", message)
            if time.monotonic() > stored + _STORE_S and not self._job.measured:
                self._history.store()
                self._store_samples(samplers)
                stored = time.monotonic()
            time.sleep(_POLL_S)
        return ended

    def _take(
        self,
        metrics: MetricsFile | None,
        at: float,
        samplers: list[Telemetry],
        *,
        last: bool = False,
    ) -> None:
        """Add what the script wrote to the history, and report new rows."""
        batch = metrics.read(last=last) if metrics is not None else self._heard()
        self._problem = batch.problem or ("" if batch.restarted else self._problem)
        first = not self._history.is_timed
        rows = self._history.add(batch, at) if batch.records else []
        for note in (*batch.notes, *self._history.notes()):
            where = f"metrics = {self._settings.metrics}"
            self._report(without_credentials(f"WARNING: {self._job.trial_id}: {where}: {note}"))
        for row in rows:
            self._report({name: value for name, value in row.items() if value is not None})
        if first and self._history.is_timed:
            for sampler in samplers:
                sampler.steady()

    def _heard(self) -> Reading:
        """Return the records of the standard output since the last call."""
        lines = []
        while not self._lines.empty():
            lines.append(self._lines.get())
        return self._stdout.read(lines)

    def _values(self, places: Places, newest: Path | None) -> dict[str, Any]:
        training, plan = self._settings.training, self._job.plan
        steps = self._job.until or training.steps
        threads = max(1, torch.get_num_threads() // plan.workers)
        return {
            **command.setting_values(self._settings, plan, steps),
            "threads": threads,
            "output_dir": str(places.output),
            "checkpoint_dir": str(places.checkpoints),
            "newest_checkpoint": str(newest or ""),
            **self._parameters,
        }

    def _environment(self, values: Mapping[str, Any], newest: Path | None) -> dict[str, str]:
        """Return all environment variables of the script."""
        found = dict(os.environ)
        binaries = str(Path(sys.executable).parent)
        found["PATH"] = os.pathsep.join([binaries, found.get("PATH", os.defpath)])
        found["PYTHONUNBUFFERED"] = "1"
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            found[name] = str(values["threads"])
        if not self._settings.scaling.gpus_per_worker:
            found["CUDA_VISIBLE_DEVICES"] = ""
        else:
            found.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # the order of Ray's numbers
        found["RAYPIPE_RESUME"] = str(newest or "")
        return found | command.environment(self._settings, values)

    def _metrics(
        self, places: Places, values: Mapping[str, Any], *, resumes: bool
    ) -> MetricsFile | None:
        """Return the reader of the metrics; files of an attempt that left no checkpoint go.

        Of another one, half a last line goes, to which the script would append.
        """
        if self._settings.metrics in (None, _STDOUT):
            return None
        pattern = command.filled(str(self._settings.metrics), values)
        folder = places.output
        if Path(pattern).is_absolute():  # {checkpoint_dir}/...
            folder, pattern = Path("/"), pattern.lstrip("/")
        metrics = MetricsFile(folder, pattern)
        own = [path for path in metrics.files() if path.is_relative_to(places.output)]
        for path in own if not resumes else ():
            path.unlink()
        for path in own[-1:] if resumes else ():
            content = path.read_bytes()
            if path.suffix != ".json" and not content.endswith(b"\n"):
                os.truncate(path, content.rfind(b"\n") + 1)
        return metrics

    def _check_metrics(self, metrics: MetricsFile | None, places: Places) -> None:
        """Raise UnitError if a script that succeeded wrote no metrics where they should be."""
        wanted = self._settings.metrics
        if self._problem:
            raise self._failure(self._problem)
        if wanted is None or self._history.rows or self._history.summary:
            return
        if metrics is not None and not metrics.files():
            wrote = sorted(path.relative_to(places.output) for path in places.output.rglob("*"))
            listed = ", ".join(map(str, wrote[:20])) or "nothing"
            problem = f"no such file in {{output_dir}}, where the script wrote: {listed}"
        else:
            problem = "it has no record with a number"
            if self._job.measured:
                every = self._settings.training.log_every
                problem += (
                    f" in the {self._job.steps} steps of a trial; let the script log every "
                    f"{{log_every}} steps, which is {every} here"
                )
        raise self._failure(problem)

    def _failure(self, problem: str) -> UnitError:
        message = f"metrics = {self._settings.metrics}: {problem}"
        return UnitError(self._job.trial_id, "error", message)

    def _outcome(self, seconds: float, summaries: list[dict[str, Any]]) -> dict[str, Any]:
        plan, history, training = self._job.plan, self._history, self._settings.training
        columns = {
            **history.last_values(),
            **history.speed(None if self._job.measured else seconds),
            **telemetry.combine(summaries),
            "steps": history.last_step or None,
            "micro_batch": training.micro_batch and plan.micro_batch,
            "accumulation": training.accumulation and plan.accumulation,
            "workers": plan.workers,
        }
        return telemetry.with_energy_per_sample(columns)

    def _check(self, outcome: Mapping[str, Any]) -> None:
        """Raise UnitError if the speed of a trial that measures it is unknown."""
        if self._job.measured and outcome["samples_per_s"] is None:
            message = (
                "its speed is not known, since its records came at once, or have no number of "
                "samples; write each record when it is logged (flush), and let the script receive "
                "{micro_batch}, or write `samples` (so far) or `samples_per_s`"
            )
            raise UnitError(self._job.trial_id, "error", message)

    def _store_samples(self, samplers: list[Telemetry]) -> None:
        job = self._job
        for rank, sampler in enumerate(samplers):
            if rows := sampler.rows():
                name = f"{job.trial_id}-{job.attempt}-{rank}"
                tables.write_table(job.run_dir, GPU_SAMPLES, rows, job.run_id, name)


def _gpus(environment: Mapping[str, str]) -> list[str | None]:
    entries = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return [entry.strip() for entry in entries if entry.strip()]


def _ignore(line: str) -> None:
    del line
