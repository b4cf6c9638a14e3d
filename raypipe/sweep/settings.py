"""The section ``sweep`` of a configuration: what is varied, how, and what is best."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from raypipe.config.settings import Settings

Value = bool | int | float | str | list[Any] | None
Scheduler = Literal["asha", "median", "pbt"]

_KINDS = "must be a list of values, {choice: [...]}, or {low: ..., high: ...}"


class AxisSettings(Settings):
    """The values a key takes: all of ``grid``, or draws from ``choice`` or [low, high]."""

    grid: tuple[Value, ...] | None = Field(None, min_length=1, description="each value")
    choice: tuple[Value, ...] | None = Field(None, min_length=1, description="drawn from these")
    low: int | float | None = Field(None, description="drawn from here")
    high: int | float | None = Field(None, description="... up to here, both included")
    log: bool = Field(False, description="drawn evenly in the logarithm")

    @property
    def is_grid(self) -> bool:
        """Whether every value is tried."""
        return self.grid is not None

    @property
    def is_integer(self) -> bool:
        """Whether a range holds whole numbers."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    @model_validator(mode="before")
    @classmethod
    def _section(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            raise ValueError(_KINDS)  # noqa: TRY004 - pydantic words a ValueError
        return given

    @model_validator(mode="after")
    def _one_kind(self) -> AxisSettings:
        ranged = self.low is not None or self.high is not None
        if (self.grid is not None) + (self.choice is not None) + ranged != 1:
            raise ValueError(_KINDS)
        if ranged:
            if self.low is None or self.high is None or not self.low < self.high:
                raise ValueError("a range needs low and high, and low below high")
            if self.log and self.low <= 0:
                raise ValueError("log needs low above 0")
        elif self.log:
            raise ValueError("log is for a range of low and high")
        return self


def _dotted(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Axes by their whole keys, however these are nested; a plain list is a grid."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and not set(value) & set(AxisSettings.model_fields):
            yield from _dotted(value, f"{key}.")
        else:
            yield key, _alone({"grid": value} if isinstance(value, list | tuple) else value)


def _alone(axis: Any) -> Any:
    """An axis that takes the place of one of another kind at a lower level."""
    if not isinstance(axis, Mapping):
        return axis
    others: dict[str, Any] = {"grid": None, "choice": None}
    if axis.get("grid") is not None or axis.get("choice") is not None:
        others |= {"low": None, "high": None, "log": False}
    return others | dict(axis)


class ConstraintSettings(Settings):
    """What every point keeps."""

    effective_batch: PositiveInt | None = Field(
        None, description="samples a step: of micro-batch and accumulation one follows the other"
    )


class SweepSettings(Settings):
    """Which training stage is tried at which points, and what makes a point the best."""

    stage: str = Field(description="the training stage that is tried")
    kind: Literal["systems", "quality"] = Field(
        "systems", description="measure speed, memory and energy of some steps, or train in full"
    )
    axes: dict[str, AxisSettings] = Field(
        min_length=1,
        description="values by key: a key of the stage (training.precision), or a full one",
    )
    constraints: ConstraintSettings = ConstraintSettings()
    metric: str | None = Field(
        None, description="a column of `trials`: samples_per_s, or loss_final for kind quality"
    )
    mode: Literal["min", "max"] | None = Field(None, description="whether less or more is better")
    samples: PositiveInt = Field(
        16, description="draws, where an axis is no grid; the members of a population"
    )
    search: Literal["random", "optuna"] = Field("random", description="how they are drawn")
    seed: int = Field(0, ge=0, lt=2**32, description="seed of the draws")
    scheduler: Scheduler | None = Field(
        None, description="what ends or changes bad trials of kind quality early"
    )
    grace_steps: PositiveInt | None = Field(
        None, description="no trial is ended or changed before; a tenth of its steps if not given"
    )
    reduction_factor: float = Field(3, gt=1, description="asha: one of so many goes on")
    steps: PositiveInt = Field(20, description="measured steps of a systems trial")
    warmup_steps: PositiveInt = Field(5, description="steps before them, which do not count")
    parity_tolerance: float = Field(
        0.02, gt=0, description="largest relative difference of the loss to fp32's"
    )
    concurrent: PositiveInt | None = Field(
        None, description="most trials at the same time; as many as there is room for"
    )

    @property
    def metric_name(self) -> str:
        """The column that says how good a point is."""
        return self.metric or ("samples_per_s" if self.kind == "systems" else "loss_final")

    @property
    def direction(self) -> Literal["min", "max"]:
        """Whether less or more of it is better."""
        if self.mode is not None:
            return self.mode
        return "max" if self.metric_name.endswith("_per_s") or self.metric_name == "mfu" else "min"

    @property
    def is_searched(self) -> bool:
        """Whether which trials there are follows from how the first ones do."""
        return self.search == "optuna" or self.scheduler == "pbt"

    @field_validator("axes", mode="before")
    @classmethod
    def _without_dropped(cls, axes: Any) -> Any:
        """A higher level takes an axis of a lower one away by null."""
        if not isinstance(axes, Mapping):
            return axes
        return {key: axis for key, axis in axes.items() if axis is not None}

    @classmethod
    def spelled_out(cls, given: Any) -> Any:
        """``axes`` with dotted keys and lists, as the command line and the file write them."""
        if isinstance(given, Mapping) and isinstance(given.get("axes"), Mapping):
            return {**given, "axes": dict(_dotted(given["axes"]))}
        return given

    @model_validator(mode="after")
    def _consistent(self) -> SweepSettings:
        if self.kind == "systems":
            if self.scheduler is not None:
                raise ValueError(f"scheduler = {self.scheduler}: is for kind = quality")
            if self.metric_name.startswith("eval_"):
                raise ValueError(
                    f"metric = {self.metric}: a trial of kind = systems is not evaluated; "
                    "take kind = quality"
                )
        if self.search == "optuna" and self.scheduler == "pbt":
            raise ValueError("search = optuna: a population (scheduler = pbt) draws at random")
        grids = [name for name, axis in self.axes.items() if axis.is_grid]
        if self.scheduler == "pbt" and grids:
            raise ValueError(
                f"scheduler = pbt: the axis {grids[0]} is a grid; give choice, or low and high"
            )
        return self
