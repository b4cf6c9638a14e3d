"""A sampler beside each worker: the GPU through NVML, by UUID; else the process's own use."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import psutil
import pynvml
import torch

from raypipe.provenance import now

_PERIOD_S = 0.5


@dataclass
class Telemetry:
    """Samples utilisation, memory and power of ``device`` while the context is open.

    On a CPU there are no GPU samples; the utilisation of the process's cores is kept instead.
    """

    trial_id: str
    device: torch.device
    gpu_samples: list[dict[str, Any]] = field(default_factory=list)
    cpu_percent: list[float] = field(default_factory=list)

    def __enter__(self) -> Telemetry:
        self._stop = threading.Event()
        self._gpu = _handle(self.device)
        self._energy_at_start = _energy(self._gpu)
        self._process = psutil.Process()
        self._process.cpu_percent()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
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

    def summary(self) -> dict[str, Any]:
        """Means and totals for the ``trials`` table; None where the device has none."""
        utils = [sample["util"] for sample in self.gpu_samples]
        energy = _energy(self._gpu)
        started = self._energy_at_start
        return {
            "gpu_util_mean": sum(utils) / len(utils) if utils else None,
            "energy_j": None if energy is None or started is None else (energy - started) / 1000,
            "cpu_util_mean": (
                sum(self.cpu_percent) / len(self.cpu_percent) if self.cpu_percent else None
            ),
        }

    def _run(self) -> None:
        while not self._stop.wait(_PERIOD_S):
            self.cpu_percent.append(self._process.cpu_percent())
            if self._gpu is not None:
                self.gpu_samples.append(
                    {
                        "trial_id": self.trial_id,
                        "gpu_uuid": str(pynvml.nvmlDeviceGetUUID(self._gpu)),
                        "at": now(),
                        "util": float(pynvml.nvmlDeviceGetUtilizationRates(self._gpu).gpu),
                        "memory_bytes": int(pynvml.nvmlDeviceGetMemoryInfo(self._gpu).used),
                        "power_w": pynvml.nvmlDeviceGetPowerUsage(self._gpu) / 1000,
                    }
                )


def _handle(device: torch.device) -> Any | None:
    """NVML's handle of a torch device, found by UUID: the two number GPUs differently."""
    if device.type != "cuda":
        return None
    pynvml.nvmlInit()
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")


def _energy(handle: Any | None) -> int | None:
    """Millijoules since the driver was loaded; None on a CPU or a card that does not count."""
    if handle is None:
        return None
    try:
        return int(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle))
    except pynvml.NVMLError_NotSupported:
        return None
