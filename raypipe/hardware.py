"""Hardware detection: GPUs through NVML, and whether torch can use them; CPUs and memory."""

from __future__ import annotations

import os
import re
import runpy
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import psutil
import pynvml

#: the arithmetic of a forward pass
Precision = Literal["fp32", "tf32", "bf16", "fp16"]
#: fraction of a GPU's memory to keep free for fragmentation and longer samples
MEMORY_MARGIN = 0.05

_VISIBLE = "CUDA_VISIBLE_DEVICES"
#: entries of CUDA_VISIBLE_DEVICES that hide what follows
_HIDING = ("", "-1", "none", "void", "NoDevFiles")
#: what to do where torch cannot use a card
_REMEDY = (
    "install a build for the card and its driver: pip install 'torch>=2.9,<2.11' --index-url "
    "https://download.pytorch.org/whl/cu126 for older ones, else torch with cu128 or cu130"
)
#: errors of NVML on a machine without NVIDIA GPUs
_NO_DRIVER = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)


@dataclass(frozen=True)
class Gpu:
    """A GPU, or a MIG slice of one, as NVML reports it.

    ``index`` is the GPU's number in the order of the PCI bus, as in ``nvidia-smi``.
    ``memory_bytes`` is the host's memory if the GPU has no dedicated memory (GB10, for example).
    """

    index: int
    uuid: str
    name: str
    memory_bytes: int
    compute_capability: str

    @property
    def is_slice(self) -> bool:
        """Whether this is a MIG slice."""
        return self.uuid.startswith("MIG-")


@dataclass(frozen=True)
class Hardware:
    """Hardware of a node.

    ``gpus`` are the visible GPUs that the installed torch can use; ``gpu_note`` says why there are
    none. ``gpu_problems`` say why other visible GPUs cannot be used, and what to do.
    """

    hostname: str
    cpus: int
    memory_bytes: int
    gpus: tuple[Gpu, ...] = field(default=())
    driver: str | None = None
    cuda: str | None = None
    gpu_note: str | None = None
    gpu_problems: tuple[str, ...] = ()

    @property
    def device(self) -> str:
        """``cpu``, or the name of the first GPU."""
        return self.gpus[0].name if self.gpus else "cpu"


@dataclass(frozen=True)
class _Device:
    """A card that NVML lists: what can be computed on, or why nothing can.

    ``uuid`` is None if NVML does not report it.
    """

    index: int
    uuid: str | None
    gpus: tuple[Gpu, ...] = ()
    problem: str | None = None


def detect() -> Hardware:
    """Return the hardware of this machine; without a driver there are no GPUs, and a note.

    GPUs hidden by ``CUDA_VISIBLE_DEVICES`` are not listed. ``cpus`` counts the cores that this
    process may use.
    """
    return Hardware(
        hostname=socket.gethostname(),
        cpus=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        **_nvml(),
    )


def _nvml() -> dict[str, Any]:
    """Return the fields of ``Hardware`` that concern GPUs."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if error.value in _NO_DRIVER:
            return {"gpu_note": f"no NVIDIA driver ({error})"}
        return _unreadable(f"the NVIDIA driver does not work ({error}); reboot, or reinstall it")
    try:
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        number = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        cuda = f"{number // 1000}.{number % 1000 // 10}"
        visible, problems = _visible([_card(i) for i in range(pynvml.nvmlDeviceGetCount())])
    except pynvml.NVMLError as error:
        return _unreadable(f"NVML does not list the GPUs ({error}); reinstall the NVIDIA driver")
    finally:
        pynvml.nvmlShutdown()
    usable: list[Gpu] = []
    for gpu in visible:
        reason = torch_build().unusable(gpu.name, gpu.compute_capability, driver, cuda)
        if reason is None:
            usable.append(gpu)
        else:
            problems.append(reason)
    note = None if usable else "no usable GPU" if problems else "no visible GPU"
    return {
        "gpus": tuple(usable),
        "driver": driver,
        "cuda": cuda,
        "gpu_note": note,
        "gpu_problems": tuple(dict.fromkeys(problems)),  # equal cards have equal problems
    }


def _unreadable(problem: str) -> dict[str, Any]:
    """Return the fields of ``Hardware`` if NVML lists no GPUs; a problem unless all are hidden."""
    if os.environ.get(_VISIBLE, "0").split(",")[0].strip() in _HIDING:
        return {"gpu_note": "no visible GPU"}
    return {"gpu_note": "no usable GPU", "gpu_problems": (problem,)}


def _card(index: int) -> _Device:
    """Return a card; one that NVML cannot read, such as a lost one, has a problem."""
    uuid = None
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        uuid = str(pynvml.nvmlDeviceGetUUID(handle))
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        capability = f"{major}.{minor}"
        slices = _slices(handle)
        found = [handle] if slices is None else slices
        gpus = tuple(_gpu(each, index, capability) for each in found)
    except pynvml.NVMLError as error:
        advice = f"reset it (nvidia-smi --gpu-reset -i {index}) or reboot"
        return _Device(index, uuid, problem=f"GPU {index}: {error}; {advice}")
    if gpus:
        return _Device(index, uuid, gpus)
    advice = f"create one (nvidia-smi mig -i {index} -cgi PROFILE -C), or disable MIG"
    return _Device(index, uuid, problem=f"GPU {index}: MIG is enabled and has no slice; {advice}")


def _slices(handle: Any) -> list[Any] | None:
    """Return the MIG slices of a card; None if MIG is disabled or not supported."""
    try:
        if not pynvml.nvmlDeviceGetMigMode(handle)[0]:
            return None
        most = pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):
        return None
    found = []
    for number in range(most):
        with suppress(pynvml.NVMLError_NotFound):
            found.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number))
    return found


def _gpu(handle: Any, index: int, capability: str) -> Gpu:
    memory = psutil.virtual_memory().total
    with suppress(pynvml.NVMLError_NotSupported):  # some drivers report 0 instead
        memory = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) or memory
    uuid, name = pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle)
    return Gpu(index, str(uuid), str(name), memory, capability)


def _visible(cards: Sequence[_Device]) -> tuple[list[Gpu], list[str]]:
    """Return the visible GPUs in the variable's order, and the problems of visible cards.

    An entry is a number, or the beginning of a UUID. As CUDA does, stop at the first one that is
    not valid.
    """
    wanted = os.environ.get(_VISIBLE)
    if wanted is None:
        found = [gpu for card in cards for gpu in card.gpus]
        return found, [card.problem for card in cards if card.problem]
    slices = [gpu for card in cards for gpu in card.gpus if gpu.is_slice]
    by_uuid = [card for card in cards if card.uuid]
    by_uuid += [_Device(gpu.index, gpu.uuid, (gpu,)) for gpu in slices]
    gpus, problems = list[Gpu](), list[str]()
    for name in (part.strip() for part in wanted.split(",")):
        if name in _HIDING:
            break
        named = [card for card in cards if name == str(card.index)]
        named = named or [each for each in by_uuid if str(each.uuid).startswith(name)]
        if len(named) != 1:
            problems.append(
                f"{_VISIBLE}={wanted}: {name} is not one GPU, and CUDA ignores it and what follows;"
                f" allowed: the numbers 0 to {len(cards) - 1}, or "
                f"{', '.join(str(each.uuid) for each in by_uuid)}"
            )
            break
        gpus += named[0].gpus[:1]  # of a card with MIG, CUDA uses the first slice
        problems += filter(None, [named[0].problem])
    return gpus, problems


@dataclass(frozen=True)
class TorchBuild:
    """A build of torch: its version, its CUDA, and the architectures that it has kernels for.

    ``cuda`` is None for a CPU build. Of the architectures, ``sm_90`` is machine code, and
    ``compute_90`` can be compiled for newer cards.
    """

    version: str
    cuda: str | None
    architectures: tuple[str, ...] = ()

    def has_kernels(self, capability: str) -> bool:
        """Whether its kernels run on a card of this compute capability, such as ``8.6``."""
        card = _version(capability)
        # sm_90a runs on 9.0 only, in addition to sm_90
        found = re.findall(r"(sm|compute)_(\d+)\b", " ".join(self.architectures))
        kernels = [(kind, divmod(int(digits), 10)) for kind, digits in found]
        return any(n <= card and (k == "compute" or n[0] == card[0]) for k, n in kernels)

    def unusable(self, card: str, capability: str, driver: str, driver_cuda: str) -> str | None:
        """Return why this build cannot use a card and what to do; None if it can.

        Args:
            card: the name of the card.
            capability: its compute capability, such as ``8.6``.
            driver: the version of the NVIDIA driver.
            driver_cuda: the newest CUDA that the driver supports, such as ``12.4``.

        """
        if self.cuda is None:
            return f"{card}: torch {self.version} is a CPU build; {_REMEDY}"
        if _version(driver_cuda)[0] < _version(self.cuda)[0]:
            reason = (
                f"is built for CUDA {self.cuda}, and the NVIDIA driver {driver} supports CUDA "
                f"{driver_cuda} at most; update the driver"
            )
        elif not self.has_kernels(capability):
            reason = f"has no kernels for compute capability {capability}"
            reason += f" (it has {', '.join(self.architectures)})"
        else:
            return None
        return f"{card}: torch {self.version} {reason}; {_REMEDY}"


def _version(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return int(major), int(minor or 0)


@cache
def torch_version() -> tuple[str, str | None]:
    """Return the version of torch and its CUDA, None for a CPU build, without importing it."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return "(not installed)", None
    values = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return str(values["__version__"]), values.get("cuda")


@cache
def torch_build() -> TorchBuild:
    """Return the installed build. Imports torch if it was built for CUDA, which takes seconds."""
    version, cuda = torch_version()
    if cuda is None:
        return TorchBuild(version, None)
    import torch

    return TorchBuild(version, cuda, tuple((torch._C._cuda_getArchFlags() or "").split()))


def bytes_text(size: float) -> str:
    """Return an amount of memory in binary units: ``39.4 GiB``, ``212 MiB``."""
    mebibytes = size / 2**20
    return f"{mebibytes / 2**10:.1f} GiB" if mebibytes >= 999.5 else f"{mebibytes:.3g} MiB"


def unusable_gpus(nodes: Sequence[Hardware]) -> str | None:
    """Return why no GPU of the nodes can be used; None if one can, or if there is none."""
    if any(node.gpus for node in nodes):
        return None
    return next((problem for node in nodes for problem in node.gpu_problems), None)


def lowest_compute_capability(nodes: Sequence[Hardware]) -> str | None:
    """Return the lowest compute capability of all GPUs; None without GPUs."""
    found = [gpu.compute_capability for node in nodes for gpu in node.gpus]
    return min(found, key=float, default=None)


def supported_precisions(compute_capability: str | None) -> tuple[Precision, ...]:
    """Return the precisions of a GPU by its compute capability (``"9.0"``), or of the CPU."""
    if compute_capability is None:
        return ("fp32", "bf16", "fp16")
    if float(compute_capability) < 8:
        return ("fp32", "fp16")
    return ("fp32", "tf32", "bf16", "fp16")
