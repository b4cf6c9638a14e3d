"""Run of a script: one attempt, from its folders and its process to the columns of ``trials``."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, BinaryIO, cast

import torch
from pyarrow import fs as arrow_fs

from raypipe import hardware, process_tree
from raypipe.errors import BatchLimit, FailureKind, UnitError
from raypipe.provenance import now
from raypipe.redaction import without_credentials
from raypipe.scripts import command
from raypipe.scripts.command import ScriptStageSettings
from raypipe.scripts.metrics import MetricsFile, ScriptHistory
from raypipe.store.run_directory import make_folder
from raypipe.training import telemetry
from raypipe.training.ending import Ending
from raypipe.training.failure_kinds import failure_kind
from raypipe.training.job import Report, TrainingJob
from raypipe.training.telemetry import Telemetry

_POLL_S = 0.05
#: seconds between writes of the table ``steps``
_STORE_S = 10.0
#: seconds between copies of changed checkpoints to a remote run directory
_COPY_S = 60.0
_STDOUT = "stdout"
#: digits of the job's identity in the name of its folder of checkpoints
_DIGITS = 12
_CPU = torch.device("cpu")

#: last lines of the standard error that are kept, and those of them in the message of a failure
_MOST_LINES, _MOST_SHOWN = 200, 30
#: characters of a line, and those of them in a message
_LONGEST_LINE, _LONGEST_SHOWN = 1_000_000, 2000
#: seconds for the rest of the output once all processes have ended
_END_S = 15.0
_TRACEBACK = "Traceback (most recent call last)"
#: torchrun's report of a process that a signal ended, with a status of 1
_KILLED = re.compile(r"exitcode\s*:\s*-(\d+)")
_EXCEPTION = re.compile(r"(?:\[rank\d+\]:\s*)?([A-Za-z_][\w.]*)(?::.*)?")
#: kinds of exceptions that follow from the name, whatever else is said; the second one is NumPy's
_NAMED: dict[str, FailureKind] = {
    "MemoryError": "host_out_of_memory",
    "ArrayMemoryError": "host_out_of_memory",
    "FloatingPointError": "invalid_value",
    "OutOfMemoryError": "out_of_memory",
}
#: what a shell adds to the signal that ended its program, and the number of signals
_BY_SIGNAL, _SIGNALS = 128, 32


class Places:
    """Context manager of the local folders of a script's attempt.

    They are in the run directory if that is local, else temporary ones whose content is copied:
    checkpoints about every minute, everything at the end. Those of a measured trial are deleted.

    Checkpoints lie in a folder for the job's identity: after an edit of the script, or with another
    setting, it begins without those of the earlier one.
    """

    def __init__(self, job: TrainingJob) -> None:
        run, unit = job.run_dir, job.trial_id
        self._run, self._temporary = run, TemporaryDirectory(prefix="raypipe-script-")
        folder = Path(self._temporary.name)
        kept = {"log": run.log(unit)}
        if not job.measured:
            kept["output"] = run.artifact(unit)
            kept["checkpoints"] = f"{run.checkpoints(unit)}/identity-{job.identity[:_DIGITS]}"
        here = {name: folder / name for name in ("log", "output", "checkpoints", "stdout")}
        if run.is_local:
            here |= {name: Path(place) for name, place in kept.items()}
        self.log, self.output, self.checkpoints = here["log"], here["output"], here["checkpoints"]
        #: lines of its standard output that may be records, the others empty
        self.stdout = here["stdout"]
        #: local folders and files of a remote run directory, by their place in that
        self._remote = {} if run.is_local else {kept[name]: here[name] for name in kept}
        self._copied_at = time.time_ns()

    def __enter__(self) -> Places:
        """Create the folders, with the checkpoints of earlier attempts."""
        for folder in (self.output, self.checkpoints, self.log.parent):
            make_folder(folder)
        for remote, here in self._remote.items():
            if self._run.exists(remote):
                arrow_fs.copy_files(remote, str(here), source_filesystem=self._run.fs)
        return self

    def __exit__(self, *error: object) -> None:
        """Copy everything to a remote run directory, and delete temporary folders."""
        try:
            for remote, here in self._remote.items():
                self._copy(remote, here)
        finally:
            self._temporary.cleanup()

    @property
    def has_checkpoints(self) -> bool:
        """Whether the script has left files in the folder of checkpoints."""
        return any(not path.name.startswith(".") for path in self.checkpoints.iterdir())

    def keep(self) -> None:
        """Copy the checkpoints to a remote run directory if it is time and they changed."""
        started = time.time_ns()
        if started > self._copied_at + _COPY_S * 1e9:
            with suppress(FileNotFoundError):  # the script deletes an old one meanwhile
                changed = [path.stat().st_mtime_ns for path in self.checkpoints.rglob("*")]
                for remote, here in self._remote.items():
                    if here == self.checkpoints and max(changed, default=0) >= self._copied_at:
                        self._copy(remote, here)
                self._copied_at = started

    def _copy(self, remote: str, here: Path) -> None:
        if here.exists():
            folder = remote if here.is_dir() else remote.rpartition("/")[0]
            self._run.fs.create_dir(folder, recursive=True)
            arrow_fs.copy_files(str(here), remote, destination_filesystem=self._run.fs)


@contextmanager
def running(
    argv: Sequence[str],
    directory: Path,
    environment: Mapping[str, str],
    log: Path,
    grace_s: float,
    on_line: Callable[[str], None] = lambda _: None,
) -> Iterator[tuple[subprocess.Popen[bytes], Sequence[str]]]:
    """Run a script; afterwards none of its processes is left, and its output is complete.

    Yields its process, whose standard input ends it when it is closed, and the last lines of its
    standard error.

    Args:
        argv: the program and its arguments.
        directory: its working directory.
        environment: its environment variables, all of them.
        log: receives the standard output and the standard error.
        grace_s: seconds between SIGTERM and SIGKILL.
        on_line: receives each line of the standard output.

    """
    errors, pipe = deque[str](maxlen=_MOST_LINES), subprocess.PIPE
    with log.open("ab", buffering=0) as file:
        program = process_tree.start(grace_s, *argv, cwd=directory, env=environment, output=pipe)
        outputs = (
            (program.stdout, file, on_line),
            (program.stderr, file, lambda line: errors.append(line[:_LONGEST_SHOWN])),
        )
        copies = [threading.Thread(target=_copy, args=each, daemon=True) for each in outputs]
        for thread in copies:
            thread.start()
        try:
            with cast("IO[bytes]", program.stdin):
                yield program, errors
        finally:
            program.wait()
            for thread in copies:
                thread.join(_END_S)


def _copy(stream: IO[bytes], log: BinaryIO, keep: Callable[[str], None]) -> None:
    """Copy an output to the log without credentials, and pass on its lines.

    Another output of the same script is written into the same log. What a progress bar has
    written over is not passed on.
    """
    with TextIOWrapper(cast("BinaryIO", stream), "utf-8", "replace", newline="") as text:
        while line := text.readline(_LONGEST_LINE):
            log.write(without_credentials(line).encode())
            if not line.endswith("\r"):
                keep(line.rstrip("\r\n"))


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
        self._splits = "micro_batch" in used and bool(used & {"accumulation", "effective_batch"})
        effective = self._settings.training.effective_batch
        self._history = ScriptHistory(job, self._settings.columns, effective)
        self._metrics: MetricsFile | None = None
        self._samplers: list[Telemetry] = []

    def run(self, directory: Path, ending: Ending) -> dict[str, Any]:
        """Run the script to its end; see :meth:`~raypipe.training.job.ExternalTask.run`."""
        job, history = self._job, self._history
        try:
            with Places(job) as places:
                status, seconds, errors = self._attempt(directory, places, ending)
        finally:
            if not job.measured or history.rows:
                history.store()
        outcome = self._outcome(seconds)
        if ending.wanted:
            return {**outcome, "ended_at": history.last_step}
        if status:
            size = job.plan.micro_batch if self._splits else 1
            raise failure_of(job.trial_id, status, errors, size)
        history.check_losses()
        if job.measured and outcome["samples_per_s"] is None:
            raise self._failure(
                "the speed is not known, since its records came at once, or have no number of "
                "samples; write each record when it is logged (flush), and let the script receive "
                "{micro_batch}, or write `samples_per_s`"
            )
        return outcome

    def _attempt(
        self, directory: Path, places: Places, ending: Ending
    ) -> tuple[int, float, list[str]]:
        """Return the exit status of the script, its seconds, and its last errors."""
        settings, job = self._settings, self._job
        values = {
            **command.setting_values(settings, job.plan, job.until or settings.training.steps),
            "threads": max(1, torch.get_num_threads() // job.plan.workers),
            "output_dir": str(places.output),
            "checkpoint_dir": str(places.checkpoints),
            **self._parameters,
        }
        argv = command.arguments(settings, values, resumes=places.has_checkpoints)
        uses_gpus = bool(settings.scaling.gpus_per_worker)
        environment = command.environment(values, uses_gpus=uses_gpus)
        self._open_metrics(places, values)
        with places.log.open("a", encoding="utf-8") as log:
            shown = without_credentials(" ".join(argv))
            log.write(f"--- {now()} attempt {job.attempt}: {shown}\n")
        gpus = hardware.detect().gpus if uses_gpus else ()
        try:
            with ExitStack() as stack:
                output = stack.enter_context(places.stdout.open("w", 1, encoding="utf-8"))

                def heard(line: str) -> None:
                    output.write(line + "\n" if line.lstrip().startswith("{") else "\n")

                script = running(argv, directory, environment, places.log, settings.grace_s, heard)
                process, errors = stack.enter_context(script)
                started = time.monotonic()
                for rank, gpu in enumerate(gpus or [None]):
                    given: dict[str, Any] = {"rank": rank, "attempt": job.attempt, "gpu": gpu}
                    sampler = Telemetry(job.trial_id, _CPU, program=process.pid, **given)
                    self._samplers.append(stack.enter_context(sampler))
                status = self._follow(process, places, ending)
                seconds = time.monotonic() - started
            whole = not (status or ending.wanted)  # else half a line may be the last one
            self._take(last=whole)
        finally:
            self._store_samples()
        if whole:
            self._check_metrics(places)
        return status, seconds, [without_credentials(line) for line in errors]

    def _follow(self, process: subprocess.Popen[bytes], places: Places, ending: Ending) -> int:
        """Wait for the end of the script, and pass on what it writes."""
        stored = time.monotonic()
        while (status := process.poll()) is None:
            self._take()
            places.keep()
            if ending.wanted and process.stdin is not None:
                process.stdin.close()
            if time.monotonic() > stored + _STORE_S and not self._job.measured:
                self._history.store()
                self._store_samples()
                stored = time.monotonic()
            time.sleep(_POLL_S)
        return status

    def _take(self, *, last: bool = False) -> None:
        """Add what the script wrote to the history, and report new rows."""
        was_timed, said = self._history.is_timed, len(self._history.notes)
        try:
            reading = self._metrics.read(last=last) if self._metrics is not None else None
            rows = self._history.add(reading, time.monotonic()) if reading is not None else ()
        except ValueError as error:
            raise self._failure(str(error)) from None
        for note in self._history.notes[said:]:
            where = f"{self._job.trial_id}: metrics = {self._settings.metrics}"
            self._report(without_credentials(f"WARNING: {where}: {note}"))
        for row in rows:
            self._report({name: value for name, value in row.items() if value is not None})
        if self._history.is_timed and not was_timed:
            for sampler in self._samplers:
                sampler.steady()

    def _open_metrics(self, places: Places, values: Mapping[str, Any]) -> None:
        """Open the file with metrics; those of an attempt that left no checkpoint are deleted.

        The history goes on with the rows of an attempt that left one, of which half a last line
        is deleted, to which the script would append.
        """
        resumes = places.has_checkpoints
        if resumes and not self._job.measured:
            self._history.restore()
        if (metrics := self._settings.metrics) is None:
            return
        name = str(places.stdout) if metrics == _STDOUT else command.filled(metrics, values)
        path = places.output / name  # or an absolute one: {checkpoint_dir}/...
        self._metrics = MetricsFile(path)
        if path.is_relative_to(places.output) and path.is_file():
            if not resumes:
                path.unlink()
            elif not (content := path.read_bytes()).endswith(b"\n"):
                os.truncate(path, content.rfind(b"\n") + 1)
        with suppress(ValueError):  # it fails as soon as the script ends, unless another file comes
            if reading := self._metrics.read():
                self._history.add(reading, None)

    def _check_metrics(self, places: Places) -> None:
        """Raise UnitError if a script that succeeded wrote no metrics where they should be."""
        if self._metrics is None or self._history.rows or self._history.summary:
            return
        wrote = sorted(path.relative_to(places.output) for path in places.output.rglob("*"))
        raise self._failure(
            "no record with a number was written; let the script log every {log_every} steps, "
            f"which is {self._settings.training.log_every} here (files in {{output_dir}}: "
            f"{', '.join(map(str, wrote[:20])) or 'none'})"
        )

    def _failure(self, problem: str) -> UnitError:
        message = f"metrics = {self._settings.metrics}: {problem}"
        return UnitError(self._job.trial_id, "error", message)

    def _outcome(self, seconds: float) -> dict[str, Any]:
        plan, history, training = self._job.plan, self._history, self._settings.training
        speed = history.speed(None if self._job.measured else seconds)
        summaries = [sampler.summary() for sampler in self._samplers]
        measured = telemetry.combine(summaries)
        return {
            **history.last_values(),
            **speed,
            **measured,
            "host_peak_bytes": measured["host_peak_bytes"] or None,  # 0: ended before a sample
            "steps": history.last_step or None,
            "micro_batch": training.micro_batch and plan.micro_batch,
            "accumulation": training.accumulation and plan.accumulation,
            "workers": plan.workers,
        }

    def _store_samples(self) -> None:
        for sampler in self._samplers:
            sampler.store(self._job.run_dir, self._job.run_id)


def failure_of(unit: str, status: int, errors: Sequence[str], micro_batch: int) -> UnitError:
    """Return the failure of a script that ended with a status other than 0.

    Args:
        unit: the unit's key.
        status: the exit status; negative: the signal that ended it.
        errors: the last lines of its standard error.
        micro_batch: the samples that did not fit if it ran out of memory; 1 if a smaller number
            could not be passed on.

    """
    text, cause = "\n".join(errors), _cause(errors)
    shown = "\n".join(line for line in errors[-_MOST_SHOWN:] if line.strip())
    number, how = -status if status < 0 else status - _BY_SIGNAL, f"exit status {status}"
    if killed := _KILLED.search(text):
        number = int(killed[1])
    if is_signal := 0 < number < _SIGNALS:
        how = f"ended by {signal.Signals(number).name}"
        how += " (by the kernel, if memory was short)" if number == signal.SIGKILL else ""
    message = f"{how}: {cause}" if cause else how
    message += f"\n{shown}" if shown else "; it wrote nothing to standard error"
    name = cause.partition(":")[0].rpartition(".")[2].lstrip("_")
    kind = _NAMED.get(name) or failure_kind(RuntimeError(text))
    if kind == "error" and is_signal:
        kind = "worker_died"
    limit = BatchLimit("training", micro_batch) if kind == "out_of_memory" else None
    return UnitError(unit, kind, message, limit)


def _cause(errors: Sequence[str]) -> str:
    """Return the exception of the last Python traceback, else the last line."""
    starts = [number for number, line in enumerate(errors) if _TRACEBACK in line]
    for line in errors[starts[-1] + 1 :] if starts else ():
        if line and not line[0].isspace() and _EXCEPTION.fullmatch(line):
            return line.strip()
    return next((line.strip() for line in reversed(errors) if line.strip()), "")
