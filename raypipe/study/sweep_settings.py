"""Settings of a sweep: the axes, the search and the metric."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from raypipe.config.axes import AxisSettings, dotted_axes, without_dropped
from raypipe.config.settings import Settings
from raypipe.report.measures import REPEATED

Scheduler = Literal["asha", "median"]


class ConstraintSettings(Settings):
    """Conditions on every point of a sweep."""

    effective_batch: PositiveInt | None = None
    """Samples per optimizer step at every point; the accumulation follows from the micro-batch."""


class SweepSettings(Settings):
    """The stage, the points and the metric of a sweep."""

    stage: str
    """Training stage whose settings are varied."""
    kind: Literal["systems", "quality"] = "systems"
    """Measure speed, memory and energy of a few steps (systems), or train each point to the end
    (quality).
    """
    axes: dict[str, AxisSettings] = Field(min_length=1)
    """Values by key: a key of the stage (training.precision) or a full dotted key."""
    constraints: ConstraintSettings = ConstraintSettings()
    """Conditions that every point meets."""
    metric: str | None = None
    """Column of `trials` to compare; by default samples_per_s, or for kind=quality the metric of
    `training.monitor`, else the first held-out one, else loss_final.
    """
    mode: Literal["min", "max"] | None = None
    """Whether the metric is minimized or maximized; by default what is declared, the mode of the
    monitor, or what its name tells.
    """
    samples: PositiveInt = 16
    """Number of draws if an axis is not a grid."""
    search: Literal["random", "optuna"] = "random"
    """How points are drawn if an axis is not a grid: at random, or from the results so far, by
    Optuna's TPE.
    """
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of the draws."""
    scheduler: Scheduler | None = None
    """Scheduler that stops bad trials early (asha, median), for kind=quality."""
    grace_steps: PositiveInt | None = None
    """Steps before a trial may be stopped; by default a tenth of them."""
    reduction_factor: float = Field(3, gt=1)
    """ASHA continues one of this number of trials."""
    steps: PositiveInt = 10
    """Measured steps of a trial of kind=systems."""
    warmup_steps: PositiveInt = 5
    """Steps before the measured ones, which are not counted."""
    repeats: PositiveInt = 3
    """Measurements of each point of kind=systems: all points once, then all again."""
    parity_tolerance: float = Field(0.02, gt=0)
    """Largest relative difference of the loss to fp32's."""
    concurrent: PositiveInt | None = None
    """Most trials at the same time; by default as many as fit."""

    @property
    def metric_name(self) -> str:
        """The column that a sweep optimizes; empty if its first trial decides."""
        return self.metric or ("samples_per_s" if self.kind == "systems" else "")

    @property
    def direction(self) -> Literal["min", "max"]:
        """Whether the metric is minimized or maximized. Raises ValueError before it is known."""
        if self.mode is None:
            raise ValueError("the mode of the sweep's metric was not resolved")
        return self.mode

    @property
    def measurements(self) -> int:
        """How often each point is measured: more than once only if its metric then differs."""
        differs = self.kind == "systems" and self.metric_name in REPEATED
        return self.repeats if differs else 1

    @property
    def is_searched(self) -> bool:
        """Whether later trials depend on the outcomes of earlier ones."""
        return self.search != "random"

    _present = field_validator("axes", mode="before")(without_dropped)

    @classmethod
    def spelled_out(cls, given: Any) -> Any:
        """Return ``axes`` with dotted keys and lists, as on the command line and in files."""
        if isinstance(given, Mapping) and isinstance(given.get("axes"), Mapping):
            return {**given, "axes": type(given["axes"])(dotted_axes(given["axes"]))}
        return given

    @model_validator(mode="after")
    def _consistent(self) -> SweepSettings:
        if self.mode is not None and self.metric is None:
            raise ValueError(f"mode = {self.mode}: of which metric? give metric, too")
        if self.kind == "systems":
            if self.scheduler is not None:
                raise ValueError(f"scheduler = {self.scheduler}: is for kind = quality")
            if self.metric_name.startswith("eval_"):
                raise ValueError(
                    f"metric = {self.metric}: a trial of kind = systems is not evaluated; "
                    "take kind = quality"
                )
        return self
