"""Timing shared by all contenders, and the comparison of their losses."""

from __future__ import annotations

import gc
import math
import shutil
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from types import TracebackType
from typing import IO, Any, NamedTuple

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


@dataclass
class _Mark:
    wall_s: float
    cpu_s: float
    event: torch.cuda.Event | None


class StepTimes:
    """Context manager that records the end of every optimizer step.

    A step lasts from the end of one update to the end of the next. PyTorch's global optimizer hook
    takes the time: it is outside of compiled code, and at the same place in every loop. On a GPU
    the marks are CUDA events, which are read at the end.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[_Mark] = []

    def __enter__(self) -> StepTimes:
        self._hook = register_optimizer_step_post_hook(self._mark)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hook.remove()

    def _mark(self, *_: Any) -> None:
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self._marks.append(_Mark(time.perf_counter(), time.process_time(), event))

    def result(self, case: Case, warmup: int) -> dict[str, Any]:
        """Return the duration of the counted steps, the median step time and units per second.

        Raises:
            RuntimeError: the number of steps is not that of the case.

        """
        if len(self._marks) != case.steps:
            raise RuntimeError(f"{len(self._marks)} optimizer steps instead of {case.steps}")
        marks = self._marks[warmup - 1 :]
        steps = [self._seconds(one, other) for one, other in pairwise(marks)]
        seconds = self._seconds(marks[0], marks[-1])
        units = len(steps) * case.effective_batch * case.units
        return {
            "steps": len(steps),
            "seconds": seconds,
            "cpu_seconds": marks[-1].cpu_s - marks[0].cpu_s,
            "step_ms_median": 1000 * median(steps),
            "units_per_s": units / seconds,
        }

    def window(self, warmup: int) -> tuple[float, float]:
        """Return the begin and end of the counted steps on the host's clock."""
        return self._marks[warmup - 1].wall_s, self._marks[-1].wall_s

    def _seconds(self, begin: _Mark, end: _Mark) -> float:
        if begin.event is None or end.event is None:
            return end.wall_s - begin.wall_s
        end.event.synchronize()
        return float(begin.event.elapsed_time(end.event)) / 1000


class GpuUtilization:
    """GPU utilization sampled by a separate ``nvidia-smi`` process; no samples without a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._seen: list[tuple[float, float]] = []
        self._process: subprocess.Popen[str] | None = None
        if device.type != "cuda" or shutil.which("nvidia-smi") is None:
            return
        uuid = str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")
        command = ["nvidia-smi", f"--id=GPU-{uuid}", "--query-gpu=utilization.gpu"]
        command += ["--format=csv,noheader,nounits", "--loop-ms=250"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._read, args=[self._process.stdout], daemon=True).start()

    def mean(self, window: tuple[float, float]) -> float | None:
        """Return the percentage of time in which a kernel ran, in a window of the host's clock."""
        begin, end = window
        values = [value for at, value in self._seen if begin <= at <= end]
        return sum(values) / len(values) if values else None

    def close(self) -> None:
        """End the ``nvidia-smi`` process."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def _read(self, lines: IO[str]) -> None:
        for line in lines:
            with suppress(ValueError):  # "[N/A]"
                self._seen.append((time.perf_counter(), float(line)))


def run(
    contender: Contender, case: Case, device: torch.device, warmup: int, gpu: GpuUtilization
) -> tuple[dict[str, Any], list[Logged]]:
    """Run one contender's part of a round, from a clean state of the process."""
    torch.compiler.reset()  # graphs of other contenders count toward the limit of recompilations
    torch.set_float32_matmul_precision("highest")
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    with StepTimes(device) as times:
        losses = contender(case, device)
    row = times.result(case, warmup)
    if device.type == "cuda":
        row["peak_allocated_bytes"] = torch.cuda.max_memory_allocated(device)
        row["peak_reserved_bytes"] = torch.cuda.max_memory_reserved(device)
        row["gpu_util_mean"] = gpu.mean(times.window(warmup))
    return row, losses


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
