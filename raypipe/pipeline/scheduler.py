"""Stage scheduler: up to one GPU stage and one CPU stage at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

from raypipe.pipeline.experiment import Stage

# a training group takes up to 20 s to clean up
_END_S = 30.0
# Ray's libraries resume waits after a signal; Python handles it when this wait times out
_POLL_S = 0.5

Run = Callable[[Stage], None]


def run_concurrently(stages: Sequence[Stage], run: Run, interrupt: Callable[[], None]) -> None:
    """Call ``run`` for each stage, once it has returned for all stages that it needs.

    Up to two stages run at a time: the first ready one that works on GPUs, and the first ready one
    that does not. If a stage or this thread (Ctrl-C) raises, ``interrupt`` must end the running
    stages, and this thread waits up to 30 s for them.

    Args:
        stages: in an order in which each follows what it needs.
        run: called with each stage, in a new thread.
        interrupt: makes the other threads raise KeyboardInterrupt.

    Raises:
        BaseException: the first exception of a stage or of this thread.

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
            ended = [on_gpu for on_gpu, (_, future) in running.items() if future.done()]
            for _, future in [running.pop(on_gpu) for on_gpu in ended]:
                future.result()
    except BaseException:
        interrupt()
        wait([future for _, future in running.values()], timeout=_END_S)
        raise


def _start(run: Run, stage: Stage) -> Future[None]:
    """Start a stage in a daemon thread; the interpreter would wait for an executor's at exit."""
    future: Future[None] = Future()

    def settle() -> None:
        try:
            run(stage)
            future.set_result(None)
        except BaseException as error:  # re-raised in the main thread
            future.set_exception(error)

    threading.Thread(target=settle, name=stage.name, daemon=True).start()
    return future
