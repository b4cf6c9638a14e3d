"""Installed build of torch: whether it can use a GPU, and which build can."""

from __future__ import annotations

import runpy
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

#: the first driver of a major version of CUDA
_DRIVERS = {12: "525", 13: "580"}
#: the lowest compute capability that torch's newest wheels have kernels for
_NEWEST_WHEELS = (7, 5)
#: releases of torch whose wheels for a CUDA have kernels for the cards named behind them
_WHEELS = {
    "cu126": "'torch>=2.9,<2.11'",  # 5.0 to 9.0
    "cu128": "'torch>=2.9,<2.11'",  # 7.0 to 12.0
    "cu130": "'torch>=2.9,<2.14'",  # 7.5 to 12.0
}


@dataclass(frozen=True)
class TorchBuild:
    """A build of torch.

    ``cuda`` is the CUDA version that it was built for, None for a CPU build. ``architectures`` are
    those of its kernels, as torch names them: ``sm_90`` is machine code, ``compute_90`` can be
    compiled for newer cards.
    """

    version: str
    cuda: str | None
    architectures: tuple[str, ...] = ()

    def has_kernels(self, capability: str) -> bool:
        """Whether its kernels run on a card of this compute capability, such as ``8.6``."""
        major, minor = _version(capability)
        for name in self.architectures:
            kind, _, digits = name.partition("_")
            number = divmod(int(digits), 10) if digits.isdigit() else None
            if number is None:  # sm_90a runs on 9.0 only, in addition to sm_90
                continue
            if kind == "sm" and number[0] == major and number[1] <= minor:
                return True
            if kind == "compute" and number <= (major, minor):
                return True
        return False

    def unusable(
        self, card: str, capability: str, driver: str | None, driver_cuda: str | None
    ) -> str | None:
        """Return why this build cannot use a card and what to do; None if it can.

        Args:
            card: the name of the card.
            capability: its compute capability, such as ``8.6``.
            driver: the version of the NVIDIA driver.
            driver_cuda: the newest CUDA that the driver supports, such as ``12.4``.

        """
        advice = _advice(capability, driver_cuda)
        if self.cuda is None:
            return f"{card}: torch {self.version} is a CPU build; {advice}"
        needed = _version(self.cuda)[0]
        if driver_cuda is not None and _version(driver_cuda)[0] < needed:
            if needed in _DRIVERS and _version(capability) >= _NEWEST_WHEELS:
                advice = f"update the driver to {_DRIVERS[needed]} or newer, or {advice}"
            return (
                f"{card}: torch {self.version} is built for CUDA {self.cuda}, and the NVIDIA "
                f"driver {driver} supports CUDA {driver_cuda} at most; {advice}"
            )
        if not self.has_kernels(capability):
            return (
                f"{card}: torch {self.version} has no kernels for compute capability {capability} "
                f"(it has {', '.join(self.architectures)}); {advice}"
            )
        return None


@cache
def installed() -> TorchBuild:
    """Return the installed build. Imports torch if it was built for CUDA, which takes seconds."""
    version, cuda = _version_file()
    if cuda is None:
        return TorchBuild(version, None)
    import torch

    flags = torch._C._cuda_getArchFlags() or ""
    return TorchBuild(version, cuda, tuple(flags.split()))


def cuda_of_torch() -> str | None:
    """Return the CUDA version that torch was built for, without importing torch."""
    return _version_file()[1]


def _version_file() -> tuple[str, str | None]:
    """Return the version of torch and the CUDA version that it was built for."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return "(not installed)", None
    values = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    cuda = values.get("cuda")
    return str(values["__version__"]), None if cuda is None else str(cuda)


def _advice(capability: str, driver_cuda: str | None) -> str:
    """Return which build runs on a card with a driver."""
    card, driver = _version(capability), _version(driver_cuda or "13.0")
    if card < (5, 0):
        return "no supported release of torch has kernels for it"
    if card < _NEWEST_WHEELS:
        name = "cu126"
    elif driver >= (13, 0):
        name = "cu130"
    else:
        name = "cu128" if card >= (10, 0) else "cu126"
    update = f"update the driver to {_DRIVERS[12]} or newer, and " if driver < (12, 0) else ""
    index = f"https://download.pytorch.org/whl/{name}"
    return (
        f"{update}install a build for the card and its driver: "
        f"pip install {_WHEELS[name]} --index-url {index}"
    )


def _version(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return int(major), int(minor or 0)
