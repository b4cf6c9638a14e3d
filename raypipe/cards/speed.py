"""Time and energy of a step from its kernels: a roofline with stated efficiency factors.

A kernel takes the longer of its operations at a fraction of the card's peak and its bytes at a
fraction of the bandwidth (Williams et al. 2009, Roofline). The host launches kernels one by one;
the step takes the longer of the host's and the card's time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

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
#: host's time per kernel of a compiled step, as a fraction
_COMPILED_LAUNCH = 0.5


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
    compiled: bool = False,
    replicas: int = 1,
) -> StepTime:
    """Return the time of an optimizer step of ``accumulation`` micro-batches.

    Args:
        recording: of a step of two micro-batches.
        card: the card of each worker.
        precision: of the training.
        accumulation: micro-batches per worker per step.
        factors: efficiency.
        compiled: whether pointwise kernels are fused, as torch.compile does.
        replicas: workers that average the gradients (DDP).

    """
    if compiled:
        factors = replace(factors, launch_s=factors.launch_s * _COMPILED_LAUNCH)
    times = {}
    for name, kernels in recording.kernels.items():
        run = fused(kernels) if compiled and name != "update" else kernels
        times[name] = _section(run, card, precision, factors)
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


def fused(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Return the kernels with runs of pointwise ones as one, as a compiler fuses them.

    Such a kernel reads and writes only what others wrote before it or read after it.
    """
    last_read = {number: n for n, kernel in enumerate(kernels) for number, _ in kernel.reads}
    found: list[Kernel] = []
    start = 0
    while start < len(kernels):
        end = start + 1
        if _is_fusible(kernels[start]):
            while end < len(kernels) and _is_fusible(kernels[end]):
                end += 1
        found.append(_joined(kernels[start:end], last_read, end))
        start = end
    return found


def _is_fusible(kernel: Kernel) -> bool:
    return not (kernel.flops or kernel.waits or kernel.exchanged)


def _joined(run: Sequence[Kernel], last_read: dict[int, int], end: int) -> Kernel:
    """Return a run as one kernel, without reads of what it wrote itself."""
    if len(run) == 1:
        return run[0]
    reads: dict[int, int] = {}
    writes: dict[int, int] = {}
    for kernel in run:
        for number, size in kernel.reads:
            if number not in writes:
                reads[number] = max(size, reads.get(number, 0))
        for number, size in kernel.writes:
            writes[number] = max(size, writes.get(number, 0))
    kept = {n: size for n, size in writes.items() if last_read.get(n, end) >= end}
    return Kernel(run[0].name, reads=tuple(reads.items()), writes=tuple(kept.items()))
