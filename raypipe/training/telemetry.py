"""Telemetry of a worker: its GPU through NVML, and its processes.

Values that NVML, the driver or the card does not report are null. A failure here never stops the
training.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from types import TracebackType
from typing import Any

import psutil
import torch

from raypipe.provenance import now
from raypipe.training import oom as memory
from raypipe.training.nvml import NO_GPU, NvmlGpu, VisibleGpu

log = logging.getLogger(__name__)

_PERIOD_S = 0.5
#: row limit: above it every other row is dropped, so a long run keeps between half and all of it
_MOST_ROWS = 4000
#: CPU time is counted in ticks of 10 ms, so shorter intervals give no meaningful utilization
_SHORTEST_S = 0.1
#: share of the time for searching descendants; those of another program change more
_SEARCH_SHARE, _PROGRAM_SEARCH_SHARE = 0.001, 0.02


@dataclass(frozen=True)
class Program:
    """Another program that trains: the descendants of process ``pid``.

    ``gpu`` is an entry of its ``CUDA_VISIBLE_DEVICES``, None on CPUs.
    """

    pid: int
    gpu: str | None


class Telemetry:
    """Context manager that samples the GPU of a worker, its process and its child processes.

    A daemon thread takes a sample every half second. Means are weighted by time. Means, peaks and
    energy include all samples. When the rows exceed their limit, every other row is dropped and
    the time between rows doubles. For another program, the peak memory of the GPU is what was in
    use on the whole card.
    """

    def __init__(
        self,
        trial_id: str,
        device: torch.device,
        *,
        rank: int = 0,
        attempt: int = 1,
        program: Program | None = None,
    ) -> None:
        self._program = program
        self._fixed = {"trial_id": trial_id, "rank": rank, "attempt": attempt}
        self._device = device
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._warmup = True
        self._failed = False
        self._rows: list[dict[str, Any]] = []
        self._samples, self._stride = 0, 1
        # indexed by whether the sample is from the warm-up
        self._util, self._cpu = (_Mean(), _Mean()), (_Mean(), _Mean())
        self._gpu_used_peak: int | None = None
        self._rss_peak = 0
        self._shared: bool | None = None
        # when the warm-up ended, and the energy until then
        self._steady: tuple[float, float | None] | None = None

    def __enter__(self) -> Telemetry:
        self._gpu = self._open_gpu()
        self._energy = _Energy()
        self._tree = _ProcessTree(None if self._program is None else self._program.pid)
        if self._program is None:
            memory.forget_peaks(self._device)
        self._at = perf_counter()
        if self._gpu is not None:
            self._energy.add(self._at, self._gpu.energy_j(), self._gpu.values()["power_w"])
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()
        if self._gpu is not None:
            self._gpu.close()

    def steady(self) -> None:
        """End the warm-up: later samples count toward the means."""
        self._sample()
        with self._lock:
            self._warmup = False
            self._steady = self._at, self._energy.joules

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of the table ``gpu_samples`` so far.

        Of the GPU: ``util`` in percent (the share of the card's last sampling period, up to a
        second, in which a kernel ran), ``memory_bytes`` in use on the whole card, and ``power_w``.
        Of the worker and its children: ``cpu_util`` in percent of one core since the previous
        sample, and ``rss_bytes`` (shared pages count once per process).
        """
        with self._lock:
            return list(self._rows)

    def summary(self) -> dict[str, Any]:
        """Return means, totals and peaks of this worker so far; None where unknown.

        Means exclude the warm-up unless there are no other samples. ``energy_j`` is that of the
        whole card since the context was entered, and ``steady_power_w`` its mean power after the
        warm-up.
        """
        if not self._stop.is_set():
            self._sample()
        with self._lock:
            return {
                "device": "cpu" if self._gpu is None else self._gpu.name,
                "gpu_uuid": None if self._gpu is None else self._gpu.uuid,
                "gpu_util_mean": _preferred(self._util),
                "gpu_memory_used_peak_bytes": self._gpu_used_peak,
                "gpu_peak_bytes": self._gpu_used_peak
                if self._program is not None
                else memory.gpu_peak_bytes(self._device),
                "gpu_shared": self._shared,
                "energy_j": self._energy.joules,
                "steady_power_w": self._steady_power(),
                "cpu_util_mean": _preferred(self._cpu),
                "host_peak_bytes": self._rss_peak
                if self._program is not None
                else max(self._rss_peak, memory.host_peak_bytes()),
            }

    def _steady_power(self) -> float | None:
        """Return the mean power since the warm-up; None if that is too short a time."""
        if self._steady is None or self._energy.joules is None:
            return None
        began, before = self._steady
        seconds = self._at - began
        return (self._energy.joules - (before or 0.0)) / seconds if seconds >= _SHORTEST_S else None

    def _open_gpu(self) -> NvmlGpu | None:
        if self._program is not None:
            return VisibleGpu(self._program.gpu) if self._program.gpu is not None else None
        return NvmlGpu(self._device) if self._device.type == "cuda" else None

    def _run(self) -> None:
        while not self._stop.wait(_PERIOD_S):
            self._sample()

    def _sample(self) -> None:
        with self._lock:
            try:
                self._measure()
            except Exception:  # a lost sample must not cost the training
                if not self._failed:
                    log.warning("a sample of the telemetry was lost", exc_info=True)
                self._failed = True

    def _measure(self) -> None:
        at = perf_counter()
        elapsed = at - self._at
        if elapsed <= 0:
            return
        gpu = NO_GPU if self._gpu is None else self._gpu.values()
        cpu_seconds, rss = self._tree.measure()
        self._at = at
        cpu_util = 100 * cpu_seconds / elapsed
        self._cpu[self._warmup].add(cpu_util, elapsed)
        self._util[self._warmup].add(gpu["util"], elapsed)
        self._rss_peak = max(self._rss_peak, rss)
        self._gpu_used_peak = _largest([self._gpu_used_peak, gpu["memory_bytes"]])
        if self._gpu is not None:
            self._energy.add(at, self._gpu.energy_j(), gpu["power_w"])
            self._shared = _either([self._shared, self._gpu.shared()])
        if self._samples % self._stride == 0:
            own = {
                "warmup": self._warmup,
                "cpu_util": cpu_util if elapsed >= _SHORTEST_S else None,
                "rss_bytes": rss,
            }
            self._rows.append({**self._fixed, "at": now(), **gpu, **own})
            if len(self._rows) > _MOST_ROWS:
                del self._rows[1::2]
                self._stride *= 2
        self._samples += 1


def combine(summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the columns of ``trials`` from the summaries of all workers; None where unknown.

    Peaks are the maximum over the workers. Energy and power are summed over the GPUs and
    utilization is averaged over them; a GPU shared by several workers counts once.
    """
    by_gpu: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for summary in summaries:
        if summary["gpu_uuid"] is not None:
            by_gpu[summary["gpu_uuid"]].append(summary)

    def of(column: str) -> list[Any]:
        return [summary[column] for summary in summaries]

    def total(column: str) -> float | None:
        # workers on one GPU each measured all of its energy, over slightly different periods
        values = [_largest(one[column] for one in gpu) for gpu in by_gpu.values()]
        known = [value for value in values if value is not None]
        return sum(known) if known else None

    return {
        "device": ", ".join(sorted(set(of("device")))) or None,
        "gpu_util_mean": _mean(
            _mean(one["gpu_util_mean"] for one in gpu) for gpu in by_gpu.values()
        ),
        "gpu_memory_used_peak_bytes": _largest(of("gpu_memory_used_peak_bytes")),
        "gpu_peak_bytes": _largest(of("gpu_peak_bytes")),
        "gpu_shared": _either(of("gpu_shared")),
        "energy_j": total("energy_j"),
        "steady_power_w": total("steady_power_w"),
        "cpu_util_mean": _mean(of("cpu_util_mean")),
        "host_peak_bytes": _largest(of("host_peak_bytes")),
    }


def with_energy_per_sample(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of ``trials``, with the energy per sample instead of the power.

    It is the mean power over the samples per second, both without the warm-up: the start of a
    training, its compilation and its end count in ``energy_j`` alone.
    """
    known, speed = dict(columns), columns["samples_per_s"]
    power = known.pop("steady_power_w")
    return {**known, "energy_j_per_sample": power / speed if power is not None and speed else None}


class _Energy:
    """Joules since the first reading: the card's counter, or power integrated over time."""

    def __init__(self) -> None:
        self._counter: tuple[float, float] | None = None
        self._power: tuple[float, float] | None = None
        self._integral: float | None = None

    def add(self, at: float, counted_j: float | None, power_w: float | None) -> None:
        if counted_j is not None:
            self._counter = (self._counter[0] if self._counter else counted_j, counted_j)
        if power_w is not None:
            if self._power is not None:  # the trapezoid rule
                before, watts = self._power
                area = (at - before) * (watts + power_w) / 2
                self._integral = (self._integral or 0.0) + area
            self._power = (at, power_w)

    @property
    def joules(self) -> float | None:
        if self._counter is None:
            return self._integral
        return self._counter[1] - self._counter[0]


class _ProcessTree:
    """CPU time and resident memory of this process and its descendants (loader processes).

    With a ``pid``, those of its descendants alone.
    """

    def __init__(self, pid: int | None = None) -> None:
        self._root = psutil.Process(pid)
        self._own = [self._root] if pid is None else []
        self._share = _SEARCH_SHARE if pid is None else _PROGRAM_SEARCH_SHARE
        self._children: list[psutil.Process] = []
        self._next_search = 0.0
        self._seconds = 0.0
        self.measure()

    def measure(self) -> tuple[float, int]:
        """Return the CPU seconds since the last call, and the resident bytes."""
        started = perf_counter()
        if started >= self._next_search:
            # the search reads every process of the machine: limit its share of the time
            with suppress(psutil.Error):  # if /proc hides others' processes, count only itself
                self._children = self._root.children(recursive=True)
            ended = perf_counter()
            self._next_search = ended + (ended - started) / self._share
        seconds, resident = 0.0, 0
        for process in [*self._children, *self._own]:
            try:
                with process.oneshot():
                    times, rss = process.cpu_times(), process.memory_info().rss
            except psutil.Error:  # the process has ended
                continue
            # CPU time of an ended child remains in its parent's time for children
            seconds += times.user + times.system + times.children_user + times.children_system
            resident += rss
        used, self._seconds = max(0.0, seconds - self._seconds), seconds
        return used, resident


@dataclass
class _Mean:
    """Mean of the known values, weighted by seconds."""

    total: float = 0.0
    seconds: float = 0.0

    def add(self, value: float | None, seconds: float) -> None:
        if value is not None:
            self.total += value * seconds
            self.seconds += seconds


def _preferred(means: tuple[_Mean, _Mean]) -> float | None:
    """Return the mean after the warm-up; if that is too short, the mean of everything."""
    total, seconds = means[0].total, means[0].seconds
    if seconds < _SHORTEST_S:
        total, seconds = total + means[1].total, seconds + means[1].seconds
    return total / seconds if seconds else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _largest(values: Iterable[Any]) -> Any | None:
    return max((value for value in values if value is not None), default=None)


def _either(values: Iterable[bool | None]) -> bool | None:
    known = [value for value in values if value is not None]
    return any(known) if known else None
