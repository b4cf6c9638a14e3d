from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest
import yaml

from raypipe import hardware
from raypipe.config.document import pick_profile
from raypipe.hardware import (
    Gpu,
    Hardware,
    TorchBuild,
    detect,
    lowest_compute_capability,
    supported_precisions,
    unusable_gpus,
)

UUIDS = ["GPU-aaaa0000-1", "GPU-bbbb0000-2", "GPU-bbbb1111-3"]


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """NVML with three GPUs; counts how often it is opened and closed."""
    state = SimpleNamespace(open=0)

    def count(step: int) -> None:
        state.open += step

    def no_mig(index: int) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    replaced = {
        "nvmlInit": lambda: count(1),
        "nvmlShutdown": lambda: count(-1),
        "nvmlSystemGetDriverVersion": lambda: "570.10",
        "nvmlSystemGetCudaDriverVersion_v2": lambda: 12080,
        "nvmlDeviceGetCount": lambda: 3,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetMigMode": no_mig,
        "nvmlDeviceGetUUID": lambda index: UUIDS[index],
        "nvmlDeviceGetName": lambda index: f"card {index}",
        "nvmlDeviceGetMemoryInfo": lambda index: SimpleNamespace(total=(index + 1) * 2**30),
        "nvmlDeviceGetCudaComputeCapability": lambda index: (9, index),
    }
    for name, function in replaced.items():
        monkeypatch.setattr(pynvml, name, function)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(hardware, "torch_build", lambda: TorchBuild("2.9.0", "12.8", ("sm_90",)))
    return state


@pytest.mark.parametrize(
    ("code", "visible", "note", "problem"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "0", "no NVIDIA driver", None),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "0", "no usable GPU", "does not work"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "", "no visible GPU", None),
    ],
)
def test_without_a_working_driver_there_are_no_gpus_and_a_note_says_why(
    monkeypatch: pytest.MonkeyPatch, code: int, visible: str, note: str, problem: str | None
) -> None:
    def fail() -> None:
        raise pynvml.NVMLError(code)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = detect()
    assert (found.gpus, found.driver, found.device) == ((), None, "cpu")
    assert note in str(found.gpu_note)
    assert (problem or "None") in str(unusable_gpus([found]))
    assert found.cpus == len(os.sched_getaffinity(0))
    assert found.memory_bytes > 2**28


def test_what_nvml_tells(three_gpus: SimpleNamespace) -> None:
    found = detect()
    assert (found.driver, found.cuda, found.gpu_note) == ("570.10", "12.8", None)
    assert found.device == "card 0"
    assert [gpu.memory_bytes for gpu in found.gpus] == [2**30, 2**31, 3 * 2**30]
    assert found.gpus[2].compute_capability == "9.2"
    assert found.as_dict()["gpus"][1]["uuid"] == UUIDS[1]
    assert three_gpus.open == 0  # closed again


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [0, 1, 2]),
        ("0", [0]),
        ("2, 0", [2, 0]),
        ("GPU-aaaa", [0]),
        ("GPU-bbbb1111-3,GPU-aaaa0000-1", [2, 0]),
        ("", []),
        ("-1", []),
        ("0,-1,1", [0]),  # CUDA stops at the first that is none
        ("1,7,0", [1]),
        ("none", []),
    ],
)
def test_hidden_gpus_are_not_listed(
    visible: str | None,
    expected: list[int],
    three_gpus: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = detect()
    assert [gpu.index for gpu in found.gpus] == expected
    assert (found.gpu_note is None) == bool(expected)
    assert three_gpus.open == 0


def test_the_profile_looks_at_the_smallest_gpu_of_all_nodes(three_gpus: SimpleNamespace) -> None:
    profiles = {
        "gpu2": {"min_gpu_memory_gb": 2}, "gpu1": {"min_gpu_memory_gb": 1}, "gpu": {}, "x": {},
    }  # fmt: skip
    mixed = detect()
    large = Hardware("other", 1, 1, gpus=mixed.gpus[1:])
    none = Hardware("cpus", 1, 1)
    assert pick_profile(profiles, [mixed]) == "gpu1"
    assert pick_profile(profiles, [large, none]) == "gpu2"
    assert pick_profile(profiles, [large, mixed]) == "gpu1"
    assert pick_profile({"gpu": {}, "x": {}}, [mixed]) == "gpu"
    assert pick_profile({}, [mixed]) == "gpu"
    assert pick_profile(profiles, [none]) == pick_profile(profiles, []) == "cpu"


def test_the_profile_looks_at_the_oldest_gpu_too() -> None:
    volta, ada, hopper = (
        Hardware(capability, 1, 1, gpus=(Gpu(0, capability, "card", 24 * 10**9, capability),))
        for capability in ("7.0", "8.9", "10.0")
    )
    profiles = {
        "gpu": {},
        "gpu_16": {"min_gpu_memory_gb": 16},
        "gpu_16_bf16": {"min_gpu_memory_gb": 16, "min_compute_capability": 8},
        "gpu_24": {"min_gpu_memory_gb": 24, "min_compute_capability": 9},
    }
    found = [pick_profile(profiles, nodes) for nodes in ([volta], [ada], [hopper], [hopper, ada])]
    assert found == ["gpu_16", "gpu_16_bf16", "gpu_24", "gpu_16_bf16"]
    assert lowest_compute_capability([hopper, ada]) == "8.9"
    assert lowest_compute_capability([]) is None


def test_a_profile_made_for_settings_goes_before_larger_ones() -> None:
    profiles = {
        "gpu": {},
        "gpu_24": {"min_gpu_memory_gb": 24},
        "large_16": {"for": {"model": "large"}, "min_gpu_memory_gb": 16},
        "large_24": {"for": {"model": ["large", "larger"]}, "min_gpu_memory_gb": 24},
        "tied": {"for": {"model": "large", "data.kind": "text"}},
    }
    small, big = (
        [Hardware("node", 1, 1, gpus=(Gpu(0, "8.0", "card", gb * 10**9, "8.0"),))]
        for gb in (16, 24)
    )
    file = {"model": "medium", "data": {"kind": "random"}}
    assert pick_profile(profiles, big, (file,)) == "gpu_24"
    assert pick_profile(profiles, big, ({"model": "large"}, file)) == "large_24"
    assert pick_profile(profiles, small, ({"model": "large"}, file)) == "large_16"
    assert pick_profile(profiles, small, ({"model": "larger"}, file)) == "gpu"
    # parts of a section leave the plain value of the file
    assert pick_profile(profiles, big, ({"model": {"width": 1}}, {"model": "large"})) == "large_24"
    both = {"model": "large", "data": {"kind": "text"}}
    assert pick_profile(profiles, big, (both, file)) == "tied"
    assert pick_profile(profiles, [Hardware("cpus", 1, 1)], (both, file)) == "cpu"


@pytest.mark.parametrize(
    ("config", "settings", "gb", "expected"),
    [
        ("lm_pretrain", {"model": "large"}, 24, "large_24gb"),
        ("lm_pretrain", {"model": "large"}, 80, "large_80gb"),
        ("lm_pretrain", {"model": "medium"}, 80, "gpu_40gb"),
        ("summarization", {"model": "mt5_1_2b"}, 24, "mt5_24gb"),
        ("summarization", {"model": "google/mt5-large"}, 10, "mt5_10gb"),
        ("summarization", {"model": "t5_220m"}, 10, "gpu_10gb"),
    ],
)
def test_shipped_profiles_by_card_and_model(
    config: str, settings: dict[str, str], gb: int, expected: str
) -> None:
    file = Path(__file__).parents[2] / "configs" / f"{config}.yaml"
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    nodes = [Hardware("node", 1, 1, gpus=(Gpu(0, "8.6", "card", gb * 10**9, "8.6"),))]
    assert pick_profile(content["profiles"], nodes, (settings, content)) == expected


def test_precisions_by_generation() -> None:
    assert "tf32" not in supported_precisions(None)
    assert "bf16" not in supported_precisions("7.5")
    for capability in ("8.0", "8.6"):
        assert supported_precisions(capability) == ("fp32", "tf32", "bf16", "fp16")
    for capability in ("8.9", "9.0", "10.0", "12.0"):
        assert supported_precisions(capability) == ("fp32", "tf32", "bf16", "fp16", "fp8")


CU130 = TorchBuild("2.13.0", "13.0", ("sm_75", "sm_80", "sm_86", "sm_90", "sm_120", "compute_120"))
CU126 = TorchBuild("2.10.0", "12.6", ("sm_50", "sm_70", "sm_75", "sm_80", "sm_90", "sm_90a"))


@pytest.mark.parametrize(
    ("build", "capability", "cuda", "parts"),
    [
        (CU130, "7.5", "13.0", []),
        (CU130, "8.9", "13.0", []),  # by the kernels for 8.0 and 8.6
        (CU130, "13.0", "13.0", []),  # compiled from compute_120
        (CU126, "5.2", "12.2", []),  # a driver runs builds of the same major version of CUDA
        (CU126, "7.0", "13.0", []),
        (CU130, "8.0", "12.8", ["built for CUDA 13.0", "update the driver", "cu126"]),
        (CU130, "10.0", "12.8", ["built for CUDA 13.0", "cu128"]),
        (CU130, "7.0", "13.0", ["no kernels for compute capability 7.0", "sm_75", "cu126"]),
        (CU126, "12.0", "13.0", ["no kernels", "cu130"]),
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

    found = hardware.torch_build()
    assert (found.version, found.cuda) == (str(torch.__version__), torch.version.cuda)
    assert bool(found.architectures) == (torch.version.cuda is not None)
