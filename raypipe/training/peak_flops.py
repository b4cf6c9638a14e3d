"""Peak FLOP/s of GPUs: the denominator of model FLOPs utilization (MFU)."""

from __future__ import annotations

from raypipe.hardware import Precision
from raypipe.prediction import cards


def peak_flops(device_name: str, precision: Precision) -> float | None:
    """Return the dense peak of a GPU in FLOP/s, by the name that NVML and torch report.

    The values are those of ``raypipe/prediction/cards.yaml``, which names the sources.

    Returns:
        The peak, or None for an unlisted card, a variant with a different peak (laptop, a slice
        by MIG or vGPU), a precision that the card does not support, and the CPU.

    """
    card = cards.of_device(device_name)
    return None if card is None else card.peaks.get(precision)
