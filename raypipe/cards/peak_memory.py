"""Memory of a step on a card: peak by part, reserved by the allocator, CUDA context and buffers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from raypipe.cards.allocator import replay
from raypipe.cards.recorder import Kernel, Recording
from raypipe.hardware import MEMORY_MARGIN
from raypipe.training.data_sheets import Card

#: memory that the CUDA context takes with lazily loaded kernels, and NCCL's buffers with its own
CONTEXT_BYTES, NCCL_BYTES = 520 * 2**20, 400 * 2**20
#: workspaces of cuBLAS, one in the forward and one in the backward pass's thread; from Hopper on
#: they are larger
_WORKSPACE, _WORKSPACE_HOPPER = 2 * 8_519_680, 2 * 33_554_432
_FIRST_HOPPER = 9.0


@dataclass(frozen=True)
class Memory:
    """Predicted memory in bytes: the peak that torch reserves, and its parts.

    ``parts`` are the ``parameters``, ``gradients`` and ``optimizer`` states at the peak of tensors,
    and ``others``. ``fits`` is whether it fits on the card with the margin.
    """

    reserved: int
    parts: Mapping[str, int]
    fits: bool


def outside(workers: int) -> int:
    """Return the bytes of a card that a worker takes outside of torch's allocator."""
    return CONTEXT_BYTES + (NCCL_BYTES if workers > 1 else 0)


def memory(recording: Recording, card: Card, workers: int, *, bucketed: bool) -> Memory:
    """Return the memory of a step on a card.

    Args:
        recording: of the step.
        card: the card.
        workers: number of workers.
        bucketed: whether gradients are in DDP's buckets.

    """
    hopper = card.capability >= _FIRST_HOPPER
    events = [(-1, _WORKSPACE_HOPPER if hopper else _WORKSPACE), *recording.events]
    if bucketed and recording.gradient_bytes:
        buckets = (-2, recording.gradient_bytes)
        events = [events[0], buckets, *recording.in_buckets().events]
    key = (hopper, bucketed)
    if key not in recording.peaks:
        recording.peaks[key] = replay(events)
    # what torch may reserve with the margin free
    peak, limit = recording.peaks[key], (1 - MEMORY_MARGIN) * card.memory_bytes - outside(workers)
    names = {**recording.parts, -2: "gradients"}
    parts: Counter[str] = Counter()
    for number, size in dict(events[: peak.event + 1]).items():
        parts[names.get(number, "others")] += size
    parts["others"] += peak.reserved - parts.total()
    return Memory(peak.reserved, parts, peak.reserved <= limit)


def between(one: Recording, two: Recording, share: float) -> Recording | None:
    """Return the recording at a share of the way from one micro-batch to another; may be outside.

    Sizes and operations of a step are linear in the micro-batch. None if the two recordings differ
    in more than sizes.
    """
    if _shape(one) != _shape(two):
        return None
    events = [
        (number, max(1, round(size + share * (other - size))) if size else 0)
        for (number, size), (_, other) in zip(one.events, two.events, strict=True)
    ]
    kernels = {
        name: [_kernel(a, b, share) for a, b in zip(found, two.kernels[name], strict=True)]
        for name, found in one.kernels.items()
    }
    return Recording(events, one.parts, kernels, one.span)


def _shape(recording: Recording) -> Any:
    """Return what two recordings have in common that differ in sizes alone."""
    events = [(number, bool(size)) for number, size in recording.events]
    return events, {key: [each.name for each in found] for key, found in recording.kernels.items()}


def _kernel(one: Kernel, two: Kernel, share: float) -> Kernel:
    """Return the kernel on the line through two."""
    values: dict[str, Any] = {}
    for name in ("flops", "bytes", "exchanged"):
        start, end = getattr(one, name), getattr(two, name)
        values[name] = max(0, round(start + share * (end - start)))
    return replace(one, **values)
