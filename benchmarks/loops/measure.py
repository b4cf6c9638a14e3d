"""Contenders in alternation, and the comparison of their losses."""

from __future__ import annotations

import math
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.loops.cases import LOG_EVERY, Case


class Logged(NamedTuple):
    """Loss logged by a contender: the mean of the micro-batches from ``first`` to ``last``.

    Micro-batches are counted from 0 over the whole run; ``last`` is excluded.
    """

    first: int
    last: int
    loss: float


Contender = Callable[[Case, torch.device], list[Logged]]


class Burst(NamedTuple):
    """Some optimizer steps of a contender, all others of which waited meanwhile.

    ``peak_bytes`` is the GPU memory of the steps beyond what lay there before them.
    """

    contender: str
    number: int
    seconds: float
    cpu_seconds: float
    peak_bytes: int | None


class Alternation:
    """Trainings that take turns of ``LOG_EVERY`` steps in one process, each in its own thread.

    Each contender is compiled once, and what slows the machine for seconds slows all of them. A
    burst begins on an idle device and ends when the device is idle again.

    Args:
        contenders: functions by name.
        case: that they train.
        device: that they share.

    """

    def __init__(
        self, contenders: Mapping[str, Contender], case: Case, device: torch.device
    ) -> None:
        self.losses: dict[str, list[Logged]] = {}
        self._case, self._device = case, device
        self._go = {name: threading.Semaphore(0) for name in contenders}
        self._paused = threading.Semaphore(0)
        self._steps = dict.fromkeys(contenders, 0)
        #: of contenders that failed, the others of which go on
        self.errors: dict[str, BaseException] = {}
        self._threads = [
            threading.Thread(target=self._run, args=item, name=item[0], daemon=True)
            for item in contenders.items()
        ]

    def bursts(self) -> Iterator[Burst]:
        """Yield the bursts, of which the first of each contender compiles; end the trainings."""
        if self._device.type == "cuda":
            torch.cuda.init()
        with _after_each_step(self._stepped):
            for thread in self._threads:
                thread.start()
            names, number = list(self._go), self._case.steps // LOG_EVERY
            for burst in range(number + 1):
                turn = (burst - 1) % len(names)
                for name in (*names[turn:], *names[:turn]):
                    if name not in self.errors:
                        found = self._turn(name, burst)
                        if burst < number and name not in self.errors:
                            yield found

    def _turn(self, name: str, burst: int) -> Burst:
        """Let a contender run to its next pause, or to its end."""
        on_gpu, before = self._device.type == "cuda", 0
        if on_gpu:
            before = torch.cuda.memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        begun, cpu = time.perf_counter(), time.process_time()
        self._go[name].release()
        self._paused.acquire()
        seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
        peak = torch.cuda.max_memory_allocated(self._device) - before if on_gpu else None
        return Burst(name, burst, seconds, cpu, peak)

    def _run(self, name: str, contender: Contender) -> None:
        threads = torch.get_num_threads()
        self._go[name].acquire()
        torch.set_num_threads(threads)  # of this thread
        try:
            self.losses[name] = contender(self._case, self._device)
        except Exception as error:
            traceback.print_exc()
            self.errors[name] = error
        self._paused.release()

    def _stepped(self) -> None:
        """Pause the contender of this thread after the last step of a burst."""
        name = threading.current_thread().name
        self._steps[name] += 1
        if self._steps[name] % LOG_EVERY == 0:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._paused.release()
            self._go[name].acquire()


@contextmanager
def _after_each_step(function: Callable[[], None]) -> Iterator[None]:
    """Call a function after each optimizer step of any thread."""
    hook = register_optimizer_step_post_hook(lambda *_: function())
    try:
        yield
    finally:
        hook.remove()


def largest_difference(losses: Sequence[Logged], reference: Sequence[Logged]) -> float:
    """Return the largest relative difference to a reference's mean over the same micro-batches.

    Args:
        losses: the logged losses of a contender.
        reference: the loss of every micro-batch.

    Returns:
        The difference; infinity if nothing was logged or a loss is not finite.

    """
    if not losses:
        return math.inf
    largest = 0.0
    for first, last, loss in losses:
        expected = sum(entry.loss for entry in reference[first:last]) / (last - first)
        difference = abs(loss - expected) / abs(expected) if expected else math.inf
        largest = max(largest, difference) if math.isfinite(difference) else math.inf
    return largest
