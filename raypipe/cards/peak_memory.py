"""Memory of a step on a card: peak by part, reserved by the allocator, CUDA context and buffers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

from raypipe.cards.allocator import replay
from raypipe.cards.recorder import Kernel, Recording, living
from raypipe.hardware import MEMORY_MARGIN
from raypipe.training.data_sheets import Card

#: memory that the CUDA context takes with lazily loaded kernels, and NCCL's buffers with its own
CONTEXT_BYTES, NCCL_BYTES = 520 * 2**20, 400 * 2**20
#: workspaces of cuBLAS, one in the forward and one in the backward pass's thread; from Hopper on
#: they are larger
_WORKSPACE, _WORKSPACE_HOPPER = 2 * 8_519_680, 2 * 33_554_432
#: compute capability of the first Hopper
HOPPER = 9.0


def outside(workers: int) -> int:
    """Return the bytes of a card that a worker takes outside of torch's allocator."""
    return CONTEXT_BYTES + (NCCL_BYTES if workers > 1 else 0)


def most_reserved(card: Card, workers: int) -> float:
    """Return the bytes that torch may reserve on a card with the margin free."""
    return (1 - MEMORY_MARGIN) * card.memory_bytes - outside(workers)


@cache
def peak_parts(recording: Recording, *, hopper: bool, bucketed: bool) -> Counter[str]:
    """Return the bytes that torch reserves at the peak of a step, by part.

    They are the ``parameters``, ``gradients`` and ``optimizer`` states at the peak of tensors, and
    ``others``.

    Args:
        recording: of the step.
        hopper: whether the card is a Hopper or later.
        bucketed: whether gradients are in DDP's buckets.

    """
    events = [(-1, _WORKSPACE_HOPPER if hopper else _WORKSPACE), *recording.events]
    if bucketed and recording.gradient_bytes:
        buckets = (-2, recording.gradient_bytes)
        events = [events[0], buckets, *recording.in_buckets().events]
    peak = replay(events)
    names = {**recording.parts, -2: "gradients"}
    parts: Counter[str] = Counter()
    for number, size in living(events[: peak.event + 1]).items():
        parts[names.get(number, "others")] += size
    parts["others"] += peak.reserved - parts.total()
    return parts


@cache
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
