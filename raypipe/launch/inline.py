"""Inline launcher: all work in this process, without Ray, for debugging and tests.

A debugger works everywhere, since standard input and output are the terminal's. Unlike on Ray, one
task runs at a time, nothing is restarted in a fresh process, and a crash ends the command.
"""

from __future__ import annotations

import gc
import signal
import threading
from bdb import BdbQuit
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from raypipe.errors import Interrupted, UnitError
from raypipe.graph.launcher import Control, PoolOptions, R, TaskPool, TaskResult
from raypipe.launch import leave_out_imports
from raypipe.launch.task import MathThreads, forks_end_at, run_task

if TYPE_CHECKING:  # torch takes seconds to import, and a run of tasks does not need it
    from raypipe.config.matrix import Point
    from raypipe.store.run_directory import RunDirectory
    from raypipe.study.sweep import Sweep
    from raypipe.training.ending import Ending
    from raypipe.training.job import Report, TrainingJob


class InlineLauncher(Control):
    """Launcher that runs everything in the calling thread, with one worker per training.

    A training for several workers runs in one with the same effective batch. Tasks have no time
    limit, since a debugger takes its time.
    """

    concurrent = False

    def __init__(self) -> None:
        super().__init__()
        self._ending: Ending | None = None
        self._has_trained = False

    def on_every_node(self, function: Callable[[], R]) -> list[R]:
        """Call the function here."""
        return [function()]

    def train(
        self, job: TrainingJob, report: Report, started: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """Run a training job in this process. Raises UnitError."""
        import torch

        from raypipe.training.ending import Ending
        from raypipe.training.failure_kinds import unit_error
        from raypipe.training.loop import lone_worker, train

        if not self._has_trained:
            leave_out_imports()
        self._has_trained = True
        started()
        worker = lone_worker(job)
        if not job.measured:  # a debugger cannot be used in the loader's processes
            job = replace(job, settings=job.settings.changed("loader", workers=0))

        def pass_on(row: dict[str, Any] | str) -> None:
            self.pause()
            report(row)

        before = torch.get_num_threads()
        torch.set_num_threads(job.settings.scaling.threads)
        self._ending = Ending(wanted=self.is_winding_down)
        try:
            outcome = train(job, worker, pass_on, self._ending)
        except BdbQuit:
            raise
        except (Exception, SystemExit) as error:
            raise unit_error(job.trial_id, error) from error
        finally:
            torch.set_num_threads(before)
        if "ended_at" in outcome:
            raise KeyboardInterrupt
        return outcome

    def trials(self, sweep: Sweep, run_dir: RunDirectory) -> None:
        """Run the trials in sequence; no scheduler ends one early. Raises UnitError."""
        del run_dir
        if sweep.settings.is_population:
            text = f"sweep.scheduler = {sweep.settings.scheduler_name}: its trials go on from each "
            text += "other's state, for which it needs Ray; run it without --local"
            raise UnitError("sweep", "error", text)

        def proposed(*known: Any) -> Point:
            from raypipe.launch.trials import propose  # slow to import, and seldom needed

            return propose(*known)

        while (job := sweep.next(proposed)) is not None:

            def report(row: dict[str, Any] | str, trial_id: str = job.trial_id) -> None:
                if not isinstance(row, str):
                    sweep.report(trial_id, row)

            try:
                sweep.ended(job.trial_id, self.train(job, report))
            except UnitError as error:
                sweep.ended(job.trial_id, error)

    @contextmanager
    def pool(self, options: PoolOptions, say: Callable[[str], None] = print) -> Iterator[TaskPool]:
        """Open a pool that runs each task in ``finished``, without a time limit."""
        if options.time_limit_s is not None:
            say(f"local: not followed: the time limit of {options.time_limit_s:g} s")
        threads = MathThreads()
        try:
            yield _InlinePool(options.cpus, self, threads)
        finally:
            threads.restore()

    @property
    def is_at_rest(self) -> bool:
        """False: the calling thread raises KeyboardInterrupt itself."""
        return False

    def wind_down(self) -> None:
        """Raise KeyboardInterrupt at the next task, or after the next step and a checkpoint."""
        super().wind_down()
        if self._ending is not None:
            self._ending.wanted = True

    def close(self) -> None:
        """Let Python collect garbage among all objects of this process again."""
        if self._has_trained:
            gc.unfreeze()


@contextmanager
def _interruptible() -> Iterator[None]:
    """Raise Interrupted in the body at Ctrl-C, as the command line does everywhere.

    A KeyboardInterrupt of a task is its own error. What a task forks ends at SIGTERM.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # of Python, as in a notebook
        signal.signal(signal.SIGINT, _interrupt)
    try:
        with forks_end_at(signal.SIGINT, signal.SIGTERM):
            yield
    finally:
        if before is signal.default_int_handler:
            signal.signal(signal.SIGINT, before)


def _interrupt(*_: object) -> None:
    raise Interrupted


class _InlinePool:
    capacity = 1.0

    def __init__(self, cpus: float, control: Control, threads: MathThreads) -> None:
        self._cpus, self._control, self._threads = cpus, control, threads
        self._waiting: deque[tuple[str, float, Callable[..., Any], tuple[Any, ...]]] = deque()

    @property
    def has_room(self) -> bool:
        return not self._waiting

    def share(self, value: Any) -> Any:
        return value

    def submit(
        self, key: str, function: Callable[..., Any], *arguments: Any, cpus: float | None = None
    ) -> None:
        self._waiting.append((key, cpus or self._cpus, function, arguments))

    def finished(self) -> list[TaskResult]:
        self._control.pause()
        if self._control.is_winding_down:
            raise KeyboardInterrupt
        if not self._waiting:
            return []
        key, cpus, function, arguments = self._waiting.popleft()
        self._threads.apply(max(1, int(cpus)))
        with _interruptible():
            return [run_task(key, function, *arguments)]
