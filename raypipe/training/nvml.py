"""Readings of a GPU through NVML; what it does not report is None."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pynvml
import torch

NO_GPU = {"gpu_uuid": None, "util": None, "memory_bytes": None, "power_w": None}


class NvmlGpu:
    """NVML readings of one GPU, found by UUID since torch numbers GPUs differently."""

    def __init__(self, device: torch.device) -> None:
        properties = torch.cuda.get_device_properties(device)
        self.name = str(properties.name)
        bare = str(properties.uuid).removeprefix("GPU-").removeprefix("MIG-")
        self.uuid = f"GPU-{bare}"
        self._device = device
        self._open = _ask(lambda: pynvml.nvmlInit() or True) is not None
        self._handle: Any | None = None
        if self._open:
            # torch does not report whether the UUID is that of a MIG slice
            for uuid in (f"GPU-{bare}", f"MIG-{bare}"):
                handle = _ask(pynvml.nvmlDeviceGetHandleByUUID, uuid)
                if handle is not None:
                    self.uuid, self._handle = uuid, handle
                    break

    def values(self) -> dict[str, Any]:
        """Return the GPU columns of a row."""
        util = self._read(pynvml.nvmlDeviceGetUtilizationRates)
        used = self._read(pynvml.nvmlDeviceGetMemoryInfo)
        power = self._read(pynvml.nvmlDeviceGetPowerUsage)
        return {
            "gpu_uuid": self.uuid,
            "util": None if util is None else float(util.gpu),
            "memory_bytes": None if used is None else int(used.used),
            "power_w": None if power is None else power / 1000,
        }

    def energy_j(self) -> float | None:
        """Return the joules since the driver was loaded; only cards since Volta count them."""
        energy = self._read(pynvml.nvmlDeviceGetTotalEnergyConsumption)
        return None if energy is None else energy / 1000

    def shared(self) -> bool | None:
        """Whether other processes compute on the GPU, as far as the driver shows them.

        In a container, NVML may report PIDs of another PID namespace, so processes are only
        counted. Once this process holds memory on the GPU, one of them is this process. None
        before that, and if the list is empty even then (WSL, MIG, some vGPU). False is less
        certain than True, since some drivers hide the processes of other containers. The server
        of CUDA's multi-process service counts as a process.
        """
        if torch.cuda.memory_reserved(self._device) == 0:
            return None
        processes = self._read(pynvml.nvmlDeviceGetComputeRunningProcesses)
        return len({process.pid for process in processes}) > 1 if processes else None

    def close(self) -> None:
        """Close NVML."""
        if self._open:
            _ask(pynvml.nvmlShutdown)

    def _read(self, function: Callable[[Any], Any]) -> Any | None:
        return None if self._handle is None else _ask(function, self._handle)


class VisibleGpu(NvmlGpu):
    """NVML readings of a GPU by its entry of ``CUDA_VISIBLE_DEVICES``, which another program uses.

    This process does not use CUDA, which would take memory of the GPU.
    """

    def __init__(self, entry: str) -> None:
        self.name, self.uuid = "GPU", f"GPU-{entry}"
        self._open = _ask(lambda: pynvml.nvmlInit() or True) is not None
        self._handle: Any | None = None
        if self._open:
            by_uuid = not entry.isdigit()
            get = pynvml.nvmlDeviceGetHandleByUUID if by_uuid else pynvml.nvmlDeviceGetHandleByIndex
            self._handle = _ask(get, entry if by_uuid else int(entry))
            self.name = _text(self._read(pynvml.nvmlDeviceGetName)) or self.name
            self.uuid = _text(self._read(pynvml.nvmlDeviceGetUUID)) or self.uuid

    def shared(self) -> bool | None:
        """Return None: which of the GPU's processes are the program's is not known."""
        return None


def _text(value: Any) -> str | None:
    return value.decode() if isinstance(value, bytes) else value


def _ask(function: Callable[..., Any], *arguments: Any) -> Any | None:
    try:
        return function(*arguments)
    except pynvml.NVMLError:
        return None
