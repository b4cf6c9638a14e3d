"""Settings of the selection of the best model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, PositiveInt, model_validator

from raypipe.config.settings import Settings
from raypipe.report.measures import better_by_name


class MonitorSettings(Settings):
    """Selection of the best model by an evaluation metric, and early stopping."""

    metric: str = Field("loss", description="Metric of the evaluation, without its prefix `eval_`.")
    mode: Literal["min", "max"] = Field(
        "min",
        description="Whether the metric is minimized or maximized; by default what its name tells, "
        "else min.",
    )
    patience: PositiveInt | None = Field(
        None,
        description="Evaluations without improvement after which the training stops; never if not "
        "given.",
    )
    min_delta: float = Field(
        0.0, ge=0, description="Smallest change of the metric that counts as an improvement."
    )

    @model_validator(mode="before")
    @classmethod
    def _mode_by_name(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or given.get("mode") is not None:
            return given
        higher = better_by_name(str(given.get("metric"))) == "higher"
        return {**given, "mode": "max"} if higher else given
