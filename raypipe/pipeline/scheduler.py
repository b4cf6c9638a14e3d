"""Concurrent stages: one that works on GPUs, and one on the remaining cores."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

from raypipe.pipeline.experiment import Stage

# a training group that is ended takes up to 20 s to put its things away
_END_S = 30.0
# Ray's libraries let waits go on after a signal: Python gets it when this one looks up
_POLL_S = 0.5

Run = Callable[[Stage], None]


def in_lanes(stages: Sequence[Stage], run: Run, interrupt: Callable[[], None]) -> None:
    """Call ``run`` for each stage, once it returned for all that the stage needs.

    Of the stages that work on GPUs one runs at a time, and of the others one; the first of those
    that may start. When anything is raised, here (Ctrl-C) or by a stage, ``interrupt`` is to make
    what runs end in order, and this thread waits some time for it.

    Args:
        stages: such that each comes after what it needs.
        run: runs a stage, in a thread of its own.
        interrupt: makes the other threads raise KeyboardInterrupt.

    Raises:
        BaseException: whatever came first.

    """
    waiting = list(stages)
    running: dict[bool, tuple[Stage, Future[None]]] = {}
    try:
        while waiting or running:
            for stage in list(waiting):
                unsettled = {s.name for s in waiting} | {s.name for s, _ in running.values()}
                if stage.on_gpu not in running and not unsettled & set(stage.needs):
                    waiting.remove(stage)
                    running[stage.on_gpu] = stage, _start(run, stage)
            futures = [future for _, future in running.values()]
            wait(futures, timeout=_POLL_S, return_when=FIRST_COMPLETED)
            ended = [lane for lane, (_, future) in running.items() if future.done()]
            for _, future in [running.pop(lane) for lane in ended]:
                future.result()
    except BaseException:
        interrupt()
        wait([future for _, future in running.values()], timeout=_END_S)
        raise


def _start(run: Run, stage: Stage) -> Future[None]:
    """Not in an executor, whose threads the interpreter waits for at its end, however long."""
    future: Future[None] = Future()

    def settle() -> None:
        try:
            run(stage)
            future.set_result(None)
        except BaseException as error:  # whatever it is, the main thread raises it
            future.set_exception(error)

    threading.Thread(target=settle, name=stage.name, daemon=True).start()
    return future
