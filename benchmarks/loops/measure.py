"""Timing shared by all contenders, and the comparison of their losses."""

from __future__ import annotations

import gc
import math
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from types import TracebackType
from typing import IO, Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.loops.cases import Case


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
        difference = abs(loss - expected) / abs(expected)
        largest = max(largest, difference) if math.isfinite(difference) else math.inf
    return largest
