"""Telemetry of a worker: its GPU through NVML, and its processes.

Values that NVML, the driver or the card does not report are null. A failure here never stops the
training.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import resource
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any

import psutil
import pynvml
import torch

from raypipe import process_tree
from raypipe.hardware import Gpu
from raypipe.provenance import now
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import write_table
from raypipe.training.tables import GPU_SAMPLES

log = logging.getLogger(__name__)

_PERIOD_S = 0.5
#: row limit: above it every other row is dropped, so a long run keeps between half and all of it
_MOST_ROWS = 4000
#: CPU time is counted in ticks of 10 ms, so shorter intervals give no meaningful utilization
_SHORTEST_S = 0.1


class Telemetry:
    """Context manager that samples the GPU of a worker, its process and its child processes.

    A daemon thread takes a sample every half second. Peaks and energy include all samples. When the
    rows exceed their limit, every other one is dropped, and from then on every other sample; means
    are those of the rows.

    If another program trains, the samples are those of the process ``program``, its descendants,
    and ``gpu`` (None on CPUs). The peak memory of the GPU is then the most in use on the whole
    card: this process does not use CUDA, which would take memory of the GPU.
    """

    def __init__(
        self,
        trial_id: str,
        device: torch.device,
        *,
        rank: int,
        attempt: int,
        program: int | None = None,
        gpu: Gpu | None = None,
    ) -> None:
        self._program, self._program_gpu, self._device = program, gpu, device
        self._fixed = {"trial_id": trial_id, "rank": rank, "attempt": attempt}
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._failed = False
        self._rows: list[dict[str, Any]] = []
        self._samples, self._stride = 0, 1
        self._gpu_used_peak: int | None = None
        self._rss_peak = 0
        self._warms_up = True

    def __enter__(self) -> Telemetry:
        self._gpu = self._open_gpu()
        self._tree = _ProcessTree(self._program)
        if self._program is None:
            forget_peaks(self._device)
        self._at = perf_counter()
        self._started_j = self._energy_j = self._gpu.energy_j()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()
        self._gpu.close()

    def steady(self) -> None:
        """End the warm-up: later samples count toward the means."""
        if not self._stop.is_set():  # else the GPU is closed, and the energy would be unknown
            self._sample()
        with self._lock:
            self._warms_up = False

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of the table ``gpu_samples`` so far.

        Of the GPU: ``util`` in percent (the share of the card's last sampling period, up to a
        second, in which a kernel ran), ``memory_bytes`` in use on the whole card, and ``power_w``.
        Of the worker and its children: ``cpu_util`` in percent of one core since the previous
        sample, and ``rss_bytes`` (shared pages count once per process).
        """
        with self._lock:
            return list(self._rows)

    def store(self, run: RunDirectory, run_id: str) -> None:
        """Write the rows of this worker so far."""
        if rows := self.rows():
            name = "{trial_id}-{attempt}-{rank}".format_map(self._fixed)
            write_table(run, GPU_SAMPLES, rows, run_id, name)

    def summary(self) -> dict[str, Any]:
        """Return means, totals and peaks of this worker so far; None where unknown.

        Means exclude the warm-up unless there are no other samples. ``energy_j`` is that of the
        whole card since the context was entered.
        """
        if not self._stop.is_set():
            self._sample()
        with self._lock:
            gpu_peak, host_peak = self._gpu_used_peak, self._rss_peak
            if self._program is None:
                on_gpu = self._device.type == "cuda"
                gpu_peak = torch.cuda.max_memory_reserved(self._device) if on_gpu else None
                host_peak = max(host_peak, host_peak_bytes())
            joules = None
            if self._energy_j is not None and self._started_j is not None:
                joules = self._energy_j - self._started_j
            return {
                "device": self._gpu.name,
                "gpu_uuid": self._gpu.uuid,
                "gpu_util_mean": self._mean_of("util"),
                "gpu_memory_used_peak_bytes": self._gpu_used_peak,
                "gpu_peak_bytes": gpu_peak,
                "energy_j": joules,
                "cpu_util_mean": self._mean_of("cpu_util"),
                "host_peak_bytes": host_peak,
            }

    def _mean_of(self, column: str) -> float | None:
        """Return the mean of a column after the warm-up; if that has no value, of all rows."""
        steady = _mean(row[column] for row in self._rows if not row["warmup"])
        return _mean(row[column] for row in self._rows) if steady is None else steady

    def _open_gpu(self) -> NvmlGpu:
        gpu: Any = self._program_gpu
        if self._program is None and self._device.type == "cuda":
            gpu = torch.cuda.get_device_properties(self._device)
        return NvmlGpu(None) if gpu is None else NvmlGpu(str(gpu.uuid), str(gpu.name))

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
        gpu = self._gpu.values()
        cpu_seconds, rss = self._tree.measure()
        self._at, self._energy_j = at, self._gpu.energy_j()
        self._rss_peak = max(self._rss_peak, rss)
        self._gpu_used_peak = _largest([self._gpu_used_peak, gpu["memory_bytes"]])
        if self._samples % self._stride == 0:
            busy = 100 * cpu_seconds / elapsed if elapsed >= _SHORTEST_S else None
            own = {"warmup": self._warms_up, "cpu_util": busy, "rss_bytes": rss}
            self._rows.append({**self._fixed, "at": now(), **gpu, **own})
            if len(self._rows) > _MOST_ROWS:
                del self._rows[1::2]
                self._stride *= 2
        self._samples += 1


def combine(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the columns of ``trials`` from the summaries of all workers; None where unknown.

    Peaks are the maximum over the workers. Energy is summed over the GPUs and utilization is
    averaged over them; a GPU shared by several workers counts once.
    """
    gpus: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for summary in summaries:
        if summary["gpu_uuid"] is not None:
            gpus[summary["gpu_uuid"]].append(summary)

    def of(column: str) -> list[Any]:
        return [summary[column] for summary in summaries]

    # workers on one GPU each measured all of its energy, over slightly different periods
    largest = [_largest(worker["energy_j"] for worker in gpu) for gpu in gpus.values()]
    joules = [value for value in largest if value is not None]
    peaks = ("gpu_memory_used_peak_bytes", "gpu_peak_bytes", "host_peak_bytes")
    return {
        "device": ", ".join(sorted(set(of("device")))) or None,
        "gpu_util_mean": _mean(
            _mean(worker["gpu_util_mean"] for worker in gpu) for gpu in gpus.values()
        ),
        **{column: _largest(of(column)) for column in peaks},
        "energy_j": sum(joules) if joules else None,
        "cpu_util_mean": _mean(of("cpu_util_mean")),
    }


class NvmlGpu:
    """NVML readings of one GPU; what it does not report is None.

    Args:
        uuid: its UUID; torch does not report whether it is that of a MIG slice. None on CPUs,
            which report nothing.
        name: its name.

    """

    def __init__(self, uuid: str | None, name: str = "cpu") -> None:
        self.name, self.uuid, self._handle, self._open = name, None, None, False
        if uuid is None:
            return
        with suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            self._open = True
        bare = uuid.removeprefix("GPU-").removeprefix("MIG-")
        self.uuid = f"GPU-{bare}"
        for full in (self.uuid, f"MIG-{bare}") if self._open else ():
            if (handle := _ask(pynvml.nvmlDeviceGetHandleByUUID, full)) is not None:
                self.uuid, self._handle = full, handle
                break

    def values(self) -> dict[str, Any]:
        """Return the columns of the GPU in the table ``gpu_samples``."""
        return {
            "gpu_uuid": self.uuid,
            "util": self._read(lambda gpu: float(pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu)),
            "memory_bytes": self._read(lambda gpu: int(pynvml.nvmlDeviceGetMemoryInfo(gpu).used)),
            "power_w": self._read(lambda gpu: pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000),
        }

    def energy_j(self) -> float | None:
        """Return the joules since the driver was loaded; only cards since Volta count them."""
        return self._read(lambda gpu: pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1000)

    def close(self) -> None:
        """Close NVML."""
        if self._open:
            _ask(pynvml.nvmlShutdown)

    def _read(self, function: Callable[[Any], Any]) -> Any | None:
        return None if self._handle is None else _ask(function, self._handle)


class _ProcessTree:
    """CPU time and resident memory of a process and its descendants (loader processes)."""

    def __init__(self, pid: int | None) -> None:
        self._root, self._seconds = psutil.Process(pid), 0.0
        self._children: dict[int, psutil.Process] = {}
        self.measure()

    def measure(self) -> tuple[float, int]:
        """Return the CPU seconds since the last call, and the resident bytes."""
        process_tree.add_started([self._root.pid], self._children)
        seconds, resident = 0.0, 0
        for process in (*self._children.values(), self._root):
            with suppress(psutil.Error), process.oneshot():  # unless the process has ended
                # CPU time of an ended child remains in its parent's time for children
                seconds += sum(process.cpu_times()[:4])
                resident += process.memory_info().rss
        used, self._seconds = max(0.0, seconds - self._seconds), seconds
        return used, resident


def forget_peaks(device: torch.device) -> None:
    """Reset the peak-memory counters: the process may have run another training before."""
    gc.collect()
    if device.type == "cuda" and torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # what torch keeps reserved would count as this training's
        torch.cuda.reset_peak_memory_stats(device)
    ctypes.CDLL(None).malloc_trim(0)
    with suppress(OSError):  # a container may lack the file
        Path("/proc/self/clear_refs").write_text("5")


def host_peak_bytes() -> int:
    """Return the peak resident memory of this process since ``forget_peaks``.

    Linux's ``ru_maxrss`` is at least that of the process that started this one.
    """
    status = Path("/proc/self/status").read_text().splitlines()
    peaks = [int(line.split()[1]) for line in status if line.startswith("VmHWM:")]
    return 1024 * (peaks[0] if peaks else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _largest(values: Iterable[Any]) -> Any | None:
    return max((value for value in values if value is not None), default=None)


def _ask(function: Callable[..., Any], *arguments: Any) -> Any | None:
    with suppress(pynvml.NVMLError):
        return function(*arguments)
    return None
