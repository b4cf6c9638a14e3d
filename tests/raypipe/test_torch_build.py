from __future__ import annotations

import pytest

from raypipe.hardware.torch_build import TorchBuild, installed

CU130 = TorchBuild(
    "2.13.0", "13.0", ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")
)
CU126 = TorchBuild(
    "2.10.0", "12.6", ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_90", "sm_90a")
)


@pytest.mark.parametrize(
    ("build", "capability", "expected"),
    [
        (CU130, "7.0", False),
        (CU130, "7.5", True),
        (CU130, "8.9", True),  # those for 8.0 and 8.6
        (CU130, "12.1", True),
        (CU130, "13.0", True),  # compiled from compute_120
        (CU126, "5.2", True),
        (CU126, "7.0", True),
        (CU126, "10.0", False),
        (TorchBuild("2.13.0", None), "9.0", False),
    ],
)
def test_kernels_run_on_newer_cards_of_their_generation(
    build: TorchBuild, capability: str, expected: bool
) -> None:
    assert build.has_kernels(capability) is expected


@pytest.mark.parametrize(
    ("build", "capability", "cuda", "parts"),
    [
        (CU130, "9.0", "13.0", []),
        (CU126, "9.0", "12.2", []),  # a driver runs builds of the same major version of CUDA
        (CU126, "7.0", "13.0", []),
        (CU130, "8.0", "12.8", ["built for CUDA 13.0", "driver to 580", "cu126"]),
        (CU130, "10.0", "12.8", ["built for CUDA 13.0", "driver to 580", "cu128"]),
        (CU130, "7.0", "11.4", ["at most; update the driver to 525", "cu126"]),
        (CU130, "7.0", "13.0", ["no kernels for compute capability 7.0", "sm_75", "cu126"]),
        (CU126, "12.0", "13.0", ["no kernels", "cu130"]),
        (CU130, "3.5", "11.4", ["no supported release"]),
        (TorchBuild("2.13.0", None), "9.0", "13.0", ["is a CPU build", "cu130"]),
    ],
)
def test_an_unusable_card_gets_the_build_to_install(
    build: TorchBuild, capability: str, cuda: str, parts: list[str]
) -> None:
    reason = build.unusable("card", capability, "550.54", cuda)
    assert (reason is None) == (not parts)
    for part in parts:
        assert part in str(reason)


def test_the_installed_build_is_torch_s() -> None:
    import torch

    found = installed()
    assert (found.version, found.cuda) == (str(torch.__version__), torch.version.cuda)
    assert bool(found.architectures) == (torch.version.cuda is not None)
