"""Peak FLOP/s of GPUs: the denominator of model FLOPs utilization (MFU)."""

from __future__ import annotations

import re

from raypipe.hardware import Precision

#: TFLOP/s in fp32, tf32, bf16, fp16; None where the card does not support the precision
_TFLOPS: dict[str, tuple[float, float | None, float | None, float]] = {
    # Volta, Turing
    "v100 pcie": (14.0, None, None, 112.0),
    "v100 sxm2": (15.7, None, None, 125.0),
    "v100 sxm3": (15.7, None, None, 125.0),
    "v100s pcie": (16.4, None, None, 130.0),
    "t4": (8.1, None, None, 65.0),
    "rtx 2080 ti": (13.4, None, None, 53.8),
    "titan rtx": (16.3, None, None, 130.5),
    "quadro rtx 6000": (16.3, None, None, 130.5),
    "quadro rtx 8000": (16.3, None, None, 130.5),
    # Ampere
    "a10": (31.2, 62.5, 125.0, 125.0),
    "a10g": (35.0, 35.0, 70.0, 70.0),
    "a30": (10.3, 82.0, 165.0, 165.0),
    "a40": (37.4, 74.8, 149.7, 149.7),
    "a100": (19.5, 156.0, 312.0, 312.0),
    "rtx a4000": (19.2, 38.3, 76.7, 76.7),
    "rtx a5000": (27.8, 55.6, 111.1, 111.1),
    "rtx a6000": (38.7, 77.4, 154.8, 154.8),
    # Ada Lovelace
    "l4": (30.3, 60.0, 121.0, 121.0),
    "l40": (90.5, 90.5, 181.05, 181.05),
    "l40s": (91.6, 183.0, 362.05, 362.05),
    "rtx 6000 ada": (91.1, 182.1, 364.2, 364.2),
    # Hopper
    "h100 pcie": (51.2, 378.0, 756.0, 756.0),
    "h100 nvl": (60.0, 417.5, 835.5, 835.5),
    "h100 80gb hbm3": (66.9, 494.7, 989.4, 989.4),  # name reported by the SXM card
    "h200": (66.9, 494.7, 989.4, 989.4),
    "h200 nvl": (60.0, 417.5, 835.5, 835.5),
    "gh200": (66.9, 494.7, 989.4, 989.4),
    # Blackwell
    "b200": (75.0, 1100.0, 2250.0, 2250.0),
    "gb200": (80.0, 1250.0, 2500.0, 2500.0),
}

#: TFLOP/s in fp32 of the GeForce cards since Ampere: tf32 is equally fast; 16-bit precisions with
#: sums in fp32 are twice as fast
_GEFORCE_TFLOPS = {
    "rtx 3060": 12.7, "rtx 3060 ti": 16.2, "rtx 3070": 20.3, "rtx 3070 ti": 21.7,
    "rtx 3080": 29.8, "rtx 3080 ti": 34.1, "rtx 3090": 35.6, "rtx 3090 ti": 40.0,
    "rtx 4060": 15.1, "rtx 4060 ti": 22.1, "rtx 4070": 29.1, "rtx 4070 super": 35.5,
    "rtx 4070 ti": 40.1, "rtx 4070 ti super": 44.1, "rtx 4080": 48.7, "rtx 4080 super": 52.2,
    "rtx 4090": 82.6, "rtx 5070": 30.9, "rtx 5070 ti": 43.9, "rtx 5080": 56.3, "rtx 5090": 104.8,
}  # fmt: skip

_BRANDS = {"nvidia", "tesla", "geforce"}
#: name parts that do not change the peak: memory size and type, connector, generation
_NO_MATTER = re.compile(r"\d+gb?|sxm\d|pcie|hbm\d\w?|generation")


def peak_flops(device_name: str, precision: Precision) -> float | None:
    """Return the dense peak of a GPU in FLOP/s, by the name that NVML and torch report.

    The values are the vendor's at the boost clock: without 2:4 sparsity (newer data sheets print
    twice the dense value), and with 16-bit products summed in fp32 as in training (at half the
    rate on GeForce cards). ``fp32`` is without tensor cores. Sources, all by NVIDIA: the
    data sheets of V100, T4, A10, A10G (with AWS), A30, A40, A100, L4, L40, L40S, H100, H200,
    GH200, HGX B200, GB200 NVL72; the architecture white papers of Turing (TU102), GA102, Ada
    (AD102), H100 and RTX Blackwell for the H100 SXM and PCIe, RTX and GeForce cards.

    Returns:
        The peak, or None for an unlisted card, a variant with a different peak (laptop, a slice
        by MIG or vGPU), a precision that the card does not support, and the CPU.

    """
    words = [word for word in re.split(r"[\s-]+", device_name.lower()) if word not in _BRANDS]
    for length in range(len(words), 0, -1):  # the longest name first: A10G before A10
        name = " ".join(words[:length])
        if name in _TFLOPS:
            fp32, tf32, bf16, fp16 = _TFLOPS[name]
        elif name in _GEFORCE_TFLOPS:
            fp32 = tf32 = _GEFORCE_TFLOPS[name]
            bf16 = fp16 = 2 * fp32
        else:
            continue
        if not all(_NO_MATTER.fullmatch(word) for word in words[length:]):
            return None
        by_precision = {"fp32": fp32, "tf32": tf32, "bf16": bf16, "fp16": fp16}
        tflops = by_precision[precision]
        return None if tflops is None else tflops * 1e12
    return None
