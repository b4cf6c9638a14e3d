"""Profiles, builds of torch and precisions by the cards; tests/gpu has what is detected."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import Mock

import pynvml
import pytest
import yaml

from raypipe import hardware
from raypipe.config.document import profile_name
from raypipe.hardware import Gpu, Hardware, TorchBuild, detect, supported_precisions, unusable_gpus
from tests.scenario import cases

CASES = cases(__file__, "hardware")


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
    monkeypatch.setattr(pynvml, "nvmlInit", Mock(side_effect=pynvml.NVMLError(code)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = detect()
    assert (found.gpus, found.driver, found.device) == ((), None, "cpu")
    assert note in str(found.gpu_note)
    assert (problem or "None") in str(unusable_gpus([found]))
    assert found.cpus == len(os.sched_getaffinity(0))
    assert found.memory_bytes > 2**28


def node(*cards: tuple[float, str]) -> Hardware:
    """A node with cards of so many GB and a compute capability."""
    gpus = [
        Gpu(place, str(place), "card", int(gb * 10**9), capability)
        for place, (gb, capability) in enumerate(cards)
    ]
    return Hardware("node", 1, 1, gpus=tuple(gpus))


@pytest.mark.parametrize("case", CASES["profiles"], ids=lambda case: ",".join(case))
def test_the_profile_is_picked_by_cards_and_settings(case) -> None:
    content = {"profiles": case.get("profiles")}
    if "config" in case:
        file = Path(__file__).parents[2] / "configs" / f"{case['config']}.yaml"
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    for pick in case["picks"]:
        nodes = [node(*cards) for cards in pick["nodes"]]
        levels = (*pick.get("settings", ()), content)
        known = ["model", "data", *content]
        found = profile_name(content["profiles"], "auto", nodes, levels, known, "x.yaml")
        assert found == pick["profile"], pick


@pytest.mark.parametrize("case", CASES["builds"], ids=lambda case: str(case["build"]["cuda"]))
def test_an_unusable_card_gets_the_build_to_install(case) -> None:
    for capability, cuda, says in case["cards"]:
        reason = TorchBuild(**case["build"]).unusable("card", capability, "550.54", cuda)
        assert (reason is None) == (not says)
        assert [text for text in says if text not in str(reason)] == []


def test_precisions_by_generation() -> None:
    assert "tf32" not in supported_precisions(None)
    assert "bf16" not in supported_precisions("7.5")
    for capability in ("8.0", "8.9", "10.0", "12.0"):
        assert supported_precisions(capability) == ("fp32", "tf32", "bf16", "fp16")


def test_the_installed_build_is_torch_s() -> None:
    import torch

    found = hardware.torch_build()
    assert (found.version, found.cuda) == (str(torch.__version__), torch.version.cuda)
    assert bool(found.architectures) == (torch.version.cuda is not None)
