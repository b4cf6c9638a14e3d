"""Stage scheduler: every stage starts as soon as the stages that it needs have ended.

A stage whose units need different stages starts when the first of them can be computed. A stage
that measures speed starts when no other one runs, and no other one starts beside it.

Of the stages that can start, the one with the longest remaining path comes first. What they submit
waits in Ray's queue for its resources.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

from raypipe.graph.experiment import Stage

# a training group takes up to 20 s to clean up
_END_S = 30.0
# Ray's libraries resume waits after a signal; Python handles it when this wait times out
_POLL_S = 0.5
# threads; stages beyond them start when others end
_MOST_STAGES = 64

Run = Callable[[Stage], None]
Further = Callable[[], Sequence[Stage]]


def run_in_sequence(stages: Sequence[Stage], run: Run, further: Further = tuple) -> None:
    """Call ``run`` for each stage in order, then for those that ``further`` adds."""
    waiting = deque([*stages, *further()])
    while waiting:
        run(waiting.popleft())
        waiting.extend(further())


def run_concurrently(
    stages: Sequence[Stage], run: Run, interrupt: Callable[[], None], further: Further = tuple
) -> None:
    """Call ``run`` for each stage, once it has returned for all that one of its units needs.

    If a stage or this thread (Ctrl-C) raises, ``interrupt`` must end the running stages, and this
    thread waits up to 30 s for them.

    Args:
        stages: in an order in which each follows what it needs.
        run: called with each stage, in a new thread.
        interrupt: makes the other threads raise KeyboardInterrupt.
        further: returns stages to add to the graph, which may need earlier ones; called at the
            start and whenever a stage has ended.

    Raises:
        BaseException: the first exception of a stage or of this thread.

    """
    needs: dict[str, set[frozenset[str]]] = {}
    waiting: list[Stage] = []
    running: dict[str, Future[None]] = {}
    started: dict[str, Stage] = {}

    def add(stages: Sequence[Stage]) -> None:
        longest = _remaining_paths(stages)
        needs.update({stage.key: stage.starts for stage in stages})
        waiting.extend(sorted(stages, key=lambda stage: -longest[stage.key]))  # stable

    add(stages)
    try:
        add(further())
        while waiting or running:
            unsettled = {*running, *(stage.key for stage in waiting)}
            whole = [stage for stage in waiting if unsettled.isdisjoint(stage.needed_keys)]
            early = [
                stage
                for stage in waiting
                if len(needs[stage.key]) > 1
                and not unsettled.isdisjoint(stage.needed_keys)
                and any(map(unsettled.isdisjoint, needs[stage.key]))
            ]
            # stages that started early wait for others, which must find a thread
            ready = whole[: _MOST_STAGES - len(running)]
            ready += early[: max(0, _MOST_STAGES // 2 - len(running) - len(ready))]
            for stage in _undisturbed(ready, started.values(), unsettled):
                waiting.remove(stage)
                started[stage.key] = stage
                running[stage.key] = Future()  # before the start, in which Ctrl-C may come
                _start(run, stage, running[stage.key])
            wait(running.values(), timeout=_POLL_S, return_when=FIRST_COMPLETED)
            over = [name for name, future in running.items() if future.done()]
            for name in over:
                del started[name]
                running.pop(name).result()
            if over:
                add(further())
    except BaseException:
        interrupt()
        wait(running.values(), timeout=_END_S)
        raise


class Outcomes:
    """The stages that have ended; stages that started early wait for the others of their needs."""

    def __init__(self, ended: Collection[str] = ()) -> None:
        self._changed = threading.Condition()
        self._ended = set(ended)
        self._interrupted = False
        #: why stages failed or were skipped, by key, the first one first
        self.failures: dict[str, str] = {}

    def end(self, stage: str, failure: str | None) -> None:
        """Record that a stage has ended, and why it failed."""
        with self._changed:
            self._ended.add(stage)
            if failure is not None:
                self.failures[stage] = failure
            self._changed.notify_all()

    @property
    def is_interrupted(self) -> bool:
        """Whether the run is interrupted."""
        return self._interrupted

    @property
    def ended(self) -> int:
        """The number of stages that have ended."""
        return len(self._ended)

    def failed(self, stages: Iterable[str]) -> list[str]:
        """Return the stages that failed or were skipped."""
        return [stage for stage in stages if stage in self.failures]

    def running(self, stages: Collection[str]) -> set[str]:
        """Return the stages that have not ended."""
        return set(stages) - self._ended

    def wait(self, stages: Collection[str]) -> None:
        """Wait until one of these stages has ended. Raises KeyboardInterrupt."""
        with self._changed:
            self._changed.wait_for(lambda: self._interrupted or not self._ended.isdisjoint(stages))
            if self._interrupted:
                raise KeyboardInterrupt

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in every current and later ``wait``."""
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()


def _remaining_paths(stages: Sequence[Stage]) -> dict[str, int]:
    """Return the number of stages from each one to the end of the graph, on the longest path."""
    paths: dict[str, int] = {}
    for stage in reversed(stages):
        after = [paths[other.key] for other in stages if stage.key in other.needed_keys]
        paths[stage.key] = 1 + max(after, default=0)
    return paths


def _undisturbed(
    ready: Sequence[Stage], running: Collection[Stage], unsettled: Collection[str]
) -> Sequence[Stage]:
    """Return the stages to start now, so that a stage that measures speed runs alone.

    Nothing is held back while a running stage waits for others, as one that started early does.
    """
    if any(not set(stage.needed_keys).isdisjoint(unsettled) for stage in running):
        return ready
    alone = [stage for stage in ready if stage.alone]
    if any(stage.alone for stage in running) or (alone and running):
        return []
    return alone[:1] or ready


def _start(run: Run, stage: Stage, future: Future[None]) -> None:
    """Start a stage in a daemon thread; the interpreter would wait for an executor's at exit."""

    def settle() -> None:
        try:
            run(stage)
            future.set_result(None)
        except BaseException as error:  # re-raised in the main thread
            future.set_exception(error)

    threading.Thread(target=settle, name=stage.key, daemon=True).start()
