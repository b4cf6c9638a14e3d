from __future__ import annotations

import pytest

from raypipe.hardware import Precision
from raypipe.training.data_sheets import peak_flops

#: name as NVML and torch give it: SMs, boost clock in MHz, and what an SM adds and multiplies a
#: clock (fused multiply-adds) in fp32, tf32 and 16 bits, from the white papers
CHIPS = {
    "Tesla V100-SXM2-16GB": (80, 1530, 64, None, 512),
    "Tesla V100-PCIE-32GB": (80, 1370, 64, None, 512),
    "Tesla T4": (40, 1590, 64, None, 512),
    "NVIDIA A10": (72, 1695, 128, 256, 512),
    "NVIDIA A30": (56, 1440, 64, 512, 1024),
    "NVIDIA A40": (84, 1740, 128, 256, 512),
    "NVIDIA A100-SXM4-80GB": (108, 1410, 64, 512, 1024),
    "NVIDIA A100 80GB PCIe": (108, 1410, 64, 512, 1024),
    "NVIDIA A100-PCIE-40GB": (108, 1410, 64, 512, 1024),
    "NVIDIA RTX A6000": (84, 1800, 128, 256, 512),
    "NVIDIA RTX 6000 Ada Generation": (142, 2505, 128, 256, 512),
    "NVIDIA L40S": (142, 2520, 128, 256, 512),
    "NVIDIA L40": (142, 2490, 128, 128, 256),
    "NVIDIA GeForce RTX 3080": (68, 1710, 128, 128, 256),
    "NVIDIA GeForce RTX 3090": (82, 1695, 128, 128, 256),
    "NVIDIA GeForce RTX 4070": (46, 2475, 128, 128, 256),
    "NVIDIA GeForce RTX 4080": (76, 2505, 128, 128, 256),
    "NVIDIA GeForce RTX 4090": (128, 2520, 128, 128, 256),
    "NVIDIA GeForce RTX 5090": (170, 2407, 128, 128, 256),
}


@pytest.mark.parametrize("name", CHIPS)
def test_the_data_sheets_agree_with_units_times_clock(name: str) -> None:
    units, megahertz, fp32, tf32, half = CHIPS[name]
    clock = 2e6 * units * megahertz  # an addition and a multiplication each
    assert peak_flops(name, "fp32") == pytest.approx(clock * fp32, rel=0.015)
    assert peak_flops(name, "fp16") == pytest.approx(clock * half, rel=0.015)
    if tf32 is None:
        assert peak_flops(name, "tf32") is None
        assert peak_flops(name, "bf16") is None
    else:
        assert peak_flops(name, "tf32") == pytest.approx(clock * tf32, rel=0.015)
        assert peak_flops(name, "bf16") == peak_flops(name, "fp16")


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 80GB HBM3", "tf32", 494.7),
        ("NVIDIA H100 PCIe", "bf16", 756.0),
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H200", "fp32", 66.9),
        ("NVIDIA H200 NVL", "bf16", 835.5),
        ("NVIDIA GH200 480GB", "fp16", 989.4),
        ("NVIDIA GH200 144G HBM3e", "fp16", 989.4),
        ("NVIDIA B200", "bf16", 2250.0),
        ("NVIDIA GB200", "bf16", 2500.0),
        ("NVIDIA L4", "bf16", 121.0),
        ("NVIDIA A10G", "bf16", 70.0),
        ("Tesla V100S-PCIE-32GB", "fp16", 130.0),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "fp32", 44.1),
    ],
)
def test_the_longest_name_counts(name: str, precision: Precision, tflops: float) -> None:
    assert peak_flops(name, precision) == tflops * 1e12


@pytest.mark.parametrize(
    "name",
    [
        "cpu",
        "",
        "NVIDIA",
        "NVIDIA Graphics Device",
        "NVIDIA H100",  # which of them is not said
        "NVIDIA T400",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA A40-8Q",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3070 Ti Laptop GPU",
        "AMD Instinct MI300X",
    ],
)
def test_a_card_whose_peak_is_not_known_has_none(name: str) -> None:
    assert peak_flops(name, "fp32") is None
    assert peak_flops(name, "bf16") is None


def test_a_tensor_core_is_never_slower_than_the_arithmetic_above_it() -> None:
    for name in CHIPS:
        known = [peak_flops(name, precision) for precision in ("fp32", "tf32", "bf16")]
        peaks = [peak for peak in known if peak is not None]
        assert peaks == sorted(peaks)
