"""Time and energy of a step from its kernels: a roofline with stated efficiency factors.

A kernel takes the longer of its operations at a fraction of the card's peak and its bytes at a
fraction of the bandwidth (Williams et al. 2009, Roofline). The host launches kernels one by one;
the step takes the longer of the host's and the card's time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from raypipe.cards.recorder import Kernel, Recording
from raypipe.hardware import Precision
from raypipe.training.data_sheets import Card

#: time of the shortest kernel on a card
_SHORTEST_S = 2e-6
#: a step without products in double precision has no use for its peak, which differs by card
_DOUBLE = 1 / 32
#: power of a card that waits, as a fraction of that of a busy one
_IDLE_POWER = 0.3
#: part of the last micro-batch's time behind which gradients are exchanged: the backward pass
_BACKWARD = 2 / 3
_DTYPES: Mapping[str, Precision] = {"bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class Factors:
    """Fractions of the peaks that kernels reach, and the host's time per kernel in seconds."""

    products: float
    attention: float
    memory: float
    link: float
    launch_s: float


#: what well-tuned kernels reach on large inputs, and the ends of the interval
EXPECTED = Factors(0.65, 0.4, 0.75, 0.7, 8e-6)
FASTEST = Factors(0.85, 0.6, 0.9, 0.9, 4e-6)
SLOWEST = Factors(0.4, 0.2, 0.5, 0.4, 16e-6)


@dataclass(frozen=True)
class StepTime:
    """Duration of an optimizer step in seconds, and that in which the card computes."""

    seconds: float
    busy_s: float


def step_time(
    recording: Recording,
    card: Card,
    precision: Precision,
    accumulation: int,
    factors: Factors = EXPECTED,
    *,
    replicas: int = 1,
) -> StepTime:
    """Return the time of an optimizer step of ``accumulation`` micro-batches.

    Args:
        recording: of a step of two micro-batches.
        card: the card of each worker.
        precision: of the training.
        accumulation: micro-batches per worker per step.
        factors: efficiency.
        replicas: workers that average the gradients (DDP).

    """
    times = {
        name: _section(kernels, card, precision, factors)
        for name, kernels in recording.kernels.items()
    }
    first, update = times["first"], times["update"]
    further = times.get("further", first)
    seconds = first.seconds + (accumulation - 1) * further.seconds + update.seconds
    busy = first.busy_s + (accumulation - 1) * further.busy_s + update.busy_s
    exchange = 2 * (replicas - 1) / replicas * recording.gradient_bytes / (factors.link * card.link)
    return StepTime(seconds + max(0.0, exchange - _BACKWARD * further.seconds), busy)


def watts(card: Card, time: StepTime) -> float:
    """Return the mean power of a card: between that of an idle and of a busy one."""
    return card.power_w * (_IDLE_POWER + (1 - _IDLE_POWER) * min(1.0, time.busy_s / time.seconds))


def _section(
    kernels: Iterable[Kernel], card: Card, precision: Precision, factors: Factors
) -> StepTime:
    host = device = busy = exchange = 0.0
    for kernel in kernels:
        if kernel.waits:
            host = device = max(host, device)
            continue
        if kernel.exchanged:
            exchange += kernel.exchanged / (factors.link * card.link)
            continue
        host += factors.launch_s
        duration = _kernel_time(kernel, card, precision, factors)
        device = max(host, device) + duration
        busy += duration
    return StepTime(max(host, device, exchange), busy)


def _kernel_time(kernel: Kernel, card: Card, precision: Precision, factors: Factors) -> float:
    seconds = kernel.bytes / (factors.memory * card.bandwidth)
    if kernel.flops:
        share = factors.attention if "attention" in kernel.name else factors.products
        seconds = max(seconds, kernel.flops / (share * _peak(kernel.dtype, card, precision)))
    return max(seconds, _SHORTEST_S)


def _peak(dtype: str, card: Card, precision: Precision) -> float:
    if dtype == "float64":
        return _DOUBLE * card.peaks["fp32"]
    single: Precision = "tf32" if precision == "tf32" else "fp32"
    return card.peaks.get(_DTYPES.get(dtype, single)) or card.peaks["fp32"]
