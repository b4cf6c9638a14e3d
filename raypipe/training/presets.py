"""Published batch sizes per GPU model, not measured by raypipe."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from raypipe.store.ledger import Row


@dataclass(frozen=True)
class Preset:
    """Samples per forward pass of a model on a card, for training, evaluation and generation."""

    card: str
    gpu_memory_gb: float
    model: str
    micro_batch: int
    accumulation: int
    eval_batch: int
    inference_batch: int


def published(presets: Iterable[Preset], memory_bytes: int | None) -> list[Row]:
    """Return the presets of the largest card with at most ``memory_bytes``, as rows of a fit.

    The list is empty without a GPU or if the GPU has less memory than every card.
    """
    gigabytes = 0.0 if memory_bytes is None else memory_bytes / 1e9
    fitting = [preset for preset in presets if preset.gpu_memory_gb <= gigabytes]
    largest = max((preset.gpu_memory_gb for preset in fitting), default=None)
    return [
        {
            "stage": preset.model,
            "micro_batch": preset.micro_batch,
            "accumulation": preset.accumulation,
            "failed": False,
            "note": f"published for {preset.card}, not measured: evaluate {preset.eval_batch}, "
            f"generate {preset.inference_batch} at a time",
        }
        for preset in fitting
        if preset.gpu_memory_gb == largest
    ]
