"""Hardware detection: GPUs through NVML, CPUs and memory of this machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import psutil
import pynvml

#: the arithmetic of a training run
Precision = Literal["fp32", "tf32", "bf16", "fp16"]


@dataclass(frozen=True)
class Gpu:
    """A GPU as NVML reports it."""

    index: int
    uuid: str
    name: str
    memory_bytes: int
    compute_capability: str


@dataclass(frozen=True)
class Hardware:
    """Hardware of a node."""

    hostname: str
    cpus: int
    memory_bytes: int
    gpus: tuple[Gpu, ...] = field(default=())
    driver: str | None = None
    cuda: str | None = None
    gpu_note: str | None = None

    @property
    def device(self) -> str:
        """``cpu``, or the name of the first GPU."""
        return self.gpus[0].name if self.gpus else "cpu"

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)


def detect() -> Hardware:
    """Return the hardware of this machine; without a driver there are no GPUs, and a note.

    GPUs hidden by ``CUDA_VISIBLE_DEVICES`` are not listed. ``cpus`` counts the cores that this
    process may use.
    """
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpus, driver, cuda, note = _nvml()
    return Hardware(
        hostname=socket.gethostname(),
        cpus=cpus or 1,
        memory_bytes=psutil.virtual_memory().total,
        gpus=gpus,
        driver=driver,
        cuda=cuda,
        gpu_note=note,
    )


def _nvml() -> tuple[tuple[Gpu, ...], str | None, str | None, str | None]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return (), None, None, f"no NVIDIA driver ({error})"
    try:
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        number = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        cuda = f"{number // 1000}.{number % 1000 // 10}"
        gpus = _visible([_gpu(index) for index in range(pynvml.nvmlDeviceGetCount())])
        return gpus, driver, cuda, None if gpus else "no visible GPU"
    finally:
        pynvml.nvmlShutdown()


def _gpu(index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(
        index=index,
        uuid=str(pynvml.nvmlDeviceGetUUID(handle)),
        name=str(pynvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
        compute_capability=f"{major}.{minor}",
    )


def _visible(gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """Return the GPUs visible to CUDA: in the variable's order, up to the first invalid name."""
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return tuple(gpus)
    found: list[Gpu] = []
    for name in (part.strip() for part in wanted.split(",")):
        named = [g for g in gpus if name == str(g.index) or (name and g.uuid.startswith(name))]
        if len(named) != 1:
            break
        found += named
    return tuple(found)


def bytes_text(size: float) -> str:
    """Return an amount of memory in binary units: ``39.4 GiB``, ``212 MiB``."""
    mebibytes = size / 2**20
    return f"{mebibytes / 2**10:.1f} GiB" if mebibytes >= 999.5 else f"{mebibytes:.3g} MiB"


def lowest_compute_capability(nodes: Sequence[Hardware]) -> str | None:
    """Return the lowest compute capability of all GPUs; None without GPUs."""
    found = [gpu.compute_capability for node in nodes for gpu in node.gpus]
    return min(found, key=float, default=None)


def supported_precisions(compute_capability: str | None) -> tuple[Precision, ...]:
    """Return the precisions of a GPU by its compute capability (``"9.0"``), or of the CPU."""
    if compute_capability is None:
        return ("fp32", "bf16", "fp16")
    if int(compute_capability.partition(".")[0]) >= 8:
        return ("fp32", "tf32", "bf16", "fp16")
    return ("fp32", "fp16")
