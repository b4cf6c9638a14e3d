"""Inline launcher: all work in this process, without Ray, for debugging and tests.

A debugger works everywhere, since standard input and output are the terminal's. Unlike on Ray, one
task runs at a time, nothing is restarted in a fresh process, and a crash ends the command.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from bdb import BdbQuit
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psutil

from raypipe import process_tree
from raypipe.errors import Interrupted, UnitError
from raypipe.graph.launcher import PoolOptions, R, TaskPool, TaskResult
from raypipe.launch.task import Overdue, forks_end_at, run_task

if TYPE_CHECKING:  # torch takes seconds to import, and a run of tasks does not need it
    from raypipe.config.matrix import Point
    from raypipe.store.run_directory import RunDirectory
    from raypipe.study.sweep import Sweep
    from raypipe.training.ending import Ending
    from raypipe.training.job import Report, TrainingJob


class InlineLauncher:
    """Launcher that runs everything in the calling thread, with one worker per training.

    A training for several workers runs in one with the same effective batch. A task that exceeds
    its time limit is ended at its next Python instruction; the time in a debugger does not count.
    """

    concurrent = False

    def __init__(self) -> None:
        self._interrupted = threading.Event()
        self._winds_down = False
        self._ending: Ending | None = None

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

        started()
        worker = lone_worker(job)
        if not job.measured:  # a debugger cannot be used in the loader's processes
            job = replace(job, settings=job.settings.changed("loader", workers=0))

        def pass_on(row: dict[str, Any] | str) -> None:
            if self._interrupted.is_set():
                raise KeyboardInterrupt
            report(row)

        before = torch.get_num_threads()
        torch.set_num_threads(job.settings.scaling.threads)
        self._ending = Ending(wanted=self._winds_down)
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
        scheduler = sweep.settings.scheduler
        if scheduler is not None and scheduler.is_population:
            text = f"sweep.scheduler = {scheduler.name}: its trials go on from each other's state, "
            text += "for which it needs Ray; run it without --local"
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
        """Open a pool that runs each task in ``finished``."""
        del say
        pool = _InlinePool(options, lambda: self._winds_down or self._interrupted.is_set())
        process_tree.adopt_orphans()
        try:
            yield pool
        finally:
            pool.end()
            process_tree.adopt_orphans(False)

    @property
    def ending_s(self) -> float:
        """The seconds that the end of the running training would take."""
        return self._ending.seconds if self._ending is not None else 0.0

    @property
    def is_at_rest(self) -> bool:
        """False: the calling thread raises KeyboardInterrupt itself."""
        return False

    def wind_down(self) -> None:
        """Raise KeyboardInterrupt at the next task, or after the next step and a checkpoint."""
        self._winds_down = True
        if self._ending is not None:
            self._ending.wanted = True

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt at the next task or logged step."""
        self._interrupted.set()

    def close(self) -> None:
        """Do nothing: nothing was started."""


@contextmanager
def _limited(seconds: float | None) -> Iterator[None]:
    """Raise Overdue in the body after some seconds; a debugger restarts the time.

    Only the main thread can be interrupted; in another one there is no limit.
    """
    if seconds is None or not _in_main_thread():
        yield
        return

    def end(*_: object) -> None:
        if sys.gettrace() is None:
            raise Overdue(f"took longer than its limit of {seconds:g} s")
        signal.setitimer(signal.ITIMER_REAL, seconds)

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Raise Interrupted in the body at Ctrl-C, as the command line does everywhere.

    A KeyboardInterrupt of a task is its own error. What a task forks ends at SIGTERM.
    """
    if not _in_main_thread():
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


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


class _InlinePool:
    capacity = 1.0

    def __init__(self, options: PoolOptions, is_ending: Callable[[], bool]) -> None:
        self._options, self._is_ending = options, is_ending
        self._waiting: deque[tuple[str, int, float, Callable[..., Any], tuple[Any, ...]]] = deque()
        # the processes that tasks have left
        self._left: dict[int, psutil.Process] = {}

    @property
    def has_room(self) -> bool:
        return not self._waiting

    def share(self, value: Any) -> Any:
        return value

    def submit(
        self, key: str, function: Callable[..., Any], *arguments: Any, cpus: float | None = None
    ) -> None:
        self._waiting.append((key, 1, cpus or self._options.cpus, function, arguments))

    def finished(self) -> list[TaskResult]:
        if self._is_ending():
            raise KeyboardInterrupt
        if not self._waiting:
            return []
        key, attempt, cpus, function, arguments = self._waiting.popleft()

        def limited(*arguments: Any) -> Any:
            with _limited(self._options.time_limit_s):
                return function(*arguments)

        others: dict[int, psutil.Process] = {}  # of this program
        process_tree.add_started([os.getpid()], others)
        others = {pid: each for pid, each in others.items() if pid not in self._left}
        try:
            with _interruptible():
                result = run_task(key, attempt, max(1, int(cpus)), limited, *arguments)
        finally:
            process_tree.add_started([os.getpid()], self._left)
            self._left = {pid: each for pid, each in self._left.items() if pid not in others}
        if result.kind != "timeout":
            return [result]
        self.end()
        again = attempt < self._options.attempts
        if again:
            self._waiting.appendleft((key, attempt + 1, cpus, function, arguments))
        return [replace(result, retried=again)]

    def end(self) -> None:
        """End all processes that tasks have left."""
        process_tree.end_all(self._left)
