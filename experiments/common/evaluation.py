"""Evaluation of a trained model next to its baselines: loading weights, rows of measures."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

from raypipe import RunDirectory, StageContext, formatting, precision, weights

M = TypeVar("M", bound=torch.nn.Module)


def task_device() -> torch.device:
    """Return the GPU of a task, or the CPU if it has none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def task_arithmetic(arithmetic: precision.Precision) -> AbstractContextManager[object]:
    """Return the context of a task's forward passes in the arithmetic of a training."""
    precision.configure(arithmetic)
    return precision.autocast(arithmetic, task_device())


def load_trained(network: M, run_dir: RunDirectory, stage: str = "train") -> M:
    """Load the weights that a stage trained into a network, and set it to evaluation mode.

    Raises:
        ConfigError: the weights are missing or damaged.

    """
    network.load_state_dict(weights.read_weights(run_dir, run_dir.model(stage))[0])
    return network.eval()


def measure_rows(
    context: StageContext, held_out: Mapping[str, int], measures: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, Any]]:
    """Show the measures of each method; return them as rows of the table ``measures``.

    Args:
        context: of the stage.
        held_out: the column with the amount of held-out data, such as ``{"tokens": 4096}``.
        measures: the measures of the model and of each baseline.

    """
    for method, values in measures.items():
        context.say(f"{method}: {', '.join(f'{k} {v:.4g}' for k, v in values.items())}")
    return {name: {"method": name, **held_out, **values} for name, values in measures.items()}


def gain_sentence(
    row: Mapping[Any, Any], column: str, data: str, metric: str, baseline: str, better: str
) -> str:
    """Return how far a model is from a baseline on held-out data, and whether it may be chance.

    Args:
        row: of a table of gains, which are positive where the model is better.
        column: the gain; its 95 % limits are in ``<column>_low`` and ``<column>_high``.
        data: what was measured on, such as ``5000 held-out tokens``.
        metric: whose, such as ``the summarizer's ROUGE-2``.
        baseline: its name.
        better: ``lower`` or ``higher``.

    """
    gain, low, high = (float(row[f"{column}{end}"]) for end in ("", "_low", "_high"))
    judged = "more than chance" if low * high > 0 else "it may be chance"
    side = "above" if (gain > 0) == (better == "higher") else "below"
    return (
        f"Over the {data}, {metric} is {formatting.number(abs(gain))} {side} that of {baseline} "
        f"(95 % interval of the gain {formatting.number(low)} to "
        f"{formatting.number(high)}): {judged}."
    )
