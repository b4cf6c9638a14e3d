"""Axis of a sweep or a search: the values of a key that are tried or drawn from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field, model_validator

from raypipe.config.settings import Settings

Value = bool | int | float | str | list[Any] | None

_KINDS = "must be a list of values, {choice: [...]}, or {low: ..., high: ...}"


class AxisSettings(Settings):
    """Values of a key: all of ``grid``, or draws from ``choice`` or from the range [low, high]."""

    grid: tuple[Value, ...] | None = Field(None, min_length=1)
    """Values that are all tried."""
    choice: tuple[Value, ...] | None = Field(None, min_length=1)
    """Values that are drawn from."""
    low: int | float | None = None
    """Lower end of a range, included."""
    high: int | float | None = None
    """Upper end of a range, included."""
    log: bool = False
    """Whether a range is drawn evenly in the logarithm."""

    @property
    def is_integer(self) -> bool:
        """Whether a range is of integers."""
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


def dotted_axes(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield axes by dotted key, whatever their nesting; a plain list is a grid."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and not set(value) & set(AxisSettings.model_fields):
            yield from dotted_axes(value, f"{key}.")
        else:
            yield key, _alone({"grid": value} if isinstance(value, list | tuple) else value)


def without_dropped(axes: Any) -> Any:
    """Return axes by key without those that a higher level sets to null."""
    if not isinstance(axes, Mapping):
        return axes
    return {key: axis for key, axis in axes.items() if axis is not None}


def _alone(axis: Any) -> Any:
    """Return an axis without the parts of another kind that a lower level gave it."""
    if not isinstance(axis, Mapping):
        return axis
    others: dict[str, Any] = {"grid": None, "choice": None}
    if axis.get("grid") is not None or axis.get("choice") is not None:
        others |= {"low": None, "high": None, "log": False}
    return others | dict(axis)
