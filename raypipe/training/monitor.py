"""Settings of the selection of the best model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from raypipe.config.settings import Settings


class MonitorSettings(Settings):
    """Selection of the best model by an evaluation metric, and early stopping."""

    metric: str = Field("loss", description="Metric of the evaluation, without its prefix `eval_`.")
    mode: Literal["min", "max"] = Field(
        "min", description="Whether the metric is minimized or maximized."
    )
    patience: PositiveInt | None = Field(
        None,
        description="Evaluations without improvement after which the training stops; never if not "
        "given.",
    )
    min_delta: float = Field(
        0.0, ge=0, description="Smallest change of the metric that counts as an improvement."
    )
