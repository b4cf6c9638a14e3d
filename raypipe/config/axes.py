"""Axis of a study: the values of a key that are tried, or the range from which they are drawn.

One grammar everywhere: a list ``[a, b]``, integers ``0..4``, or a range ``{low: 1, high: 9}``. A
range may have ``log: true``, and a ``step``, which makes it a list.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from raypipe.config.settings import Replacing, Settings
from raypipe.config.validation import shown

Value = bool | int | float | str | list[Any] | None

_KINDS = "must be a list of values, a range 0..4, or {low: ..., high: ...}"
_INTEGERS = re.compile(r"(-?\d+)\.\.(-?\d+)")
#: values of one axis
_MOST = 1_000_000


class AxisSettings(Settings):
    """Values of a key: those of a list, or a range from ``low`` to ``high``."""

    values: tuple[Value, ...] | None = None
    """Values that are tried."""
    low: int | float | None = None
    """Lower end of a range, included."""
    high: int | float | None = None
    """Upper end of a range, included."""
    step: int | float | None = Field(None, gt=0)
    """Difference between values of the range; with `log` their ratio."""
    log: bool = False
    """Whether a range is even in the logarithm."""

    @property
    def is_integer(self) -> bool:
        """Whether a range is of integers."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def ends(self) -> tuple[float, float]:
        """The ends of a range. Raises ValueError for a list."""
        if self.low is None or self.high is None:
            raise ValueError("a list of values has no ends")
        return self.low, self.high

    @property
    def listed(self) -> tuple[Any, ...] | None:
        """All values of a list, or of a range with a step; None for a range without."""
        if self.values is not None or self.step is None:
            return self.values
        (low, high), step = self.ends, self.step
        steps = math.floor((math.log(high / low, step) if self.log else (high - low) / step) + 1e-9)
        if steps >= _MOST:
            raise ValueError(f"a range with this step has more than {_MOST:,} values")
        found = [low * step**n if self.log else low + step * n for n in range(1 + steps)]
        is_whole = self.is_integer and isinstance(step, int)
        return tuple(round(each) if is_whole else float(f"{each:.12g}") for each in found)

    @model_validator(mode="before")
    @classmethod
    def _section(cls, given: Any) -> Any:
        given = {"values": given} if _is_list(given) else given
        if not isinstance(given, Mapping):
            raise ValueError(_KINDS)  # noqa: TRY004 - pydantic words a ValueError
        if given.get("values") is not None:
            values = values_of(given["values"])
            return {**given, "values": values and list(values)}
        return given

    @model_validator(mode="after")
    def _one_kind(self) -> AxisSettings:
        ranged = self.low is not None or self.high is not None
        if (self.values is not None) == ranged:
            raise ValueError(_KINDS)
        if not ranged and (self.log or self.step is not None):
            raise ValueError("log and step are for a range of low and high")
        if ranged:
            if self.low is None or self.high is None or not self.low < self.high:
                raise ValueError("a range needs low and high, and low below high")
            if self.log and (self.low <= 0 or (self.step or 2) <= 1):
                raise ValueError("log needs low above 0, and a step above 1")
        return self


def _without_null(axes: Any) -> Any:
    is_mapping = isinstance(axes, Mapping)
    return {k: axis for k, axis in axes.items() if axis is not None} if is_mapping else axes


#: marker of axes of which null removes one
WITHOUT_NULL = BeforeValidator(_without_null)


class AxesSettings(Settings):
    """A section with axes."""

    axes: Annotated[dict[str, AxisSettings], WITHOUT_NULL] = Field(min_length=1)
    """Values by key: a list, integers `0..4`, or a range `{low: ..., high: ..., log: true}`; null
    removes an axis.
    """

    @classmethod
    def spelled_out(cls, given: Any) -> Any:
        """Return ``axes`` with dotted keys and lists, as on the command line and in files."""
        if isinstance(given, Mapping) and isinstance(given.get("axes"), Mapping):
            fields = set(AxisSettings.model_fields)
            axes = dotted(given["axes"], lambda value: bool(fields & set(value)))
            return {**given, "axes": type(given["axes"])((key, _alone(axis)) for key, axis in axes)}
        return given


def values_of(value: Any) -> Sequence[Any] | None:
    """Return the values of an axis: of a list, integers ``0..4`` or a range with a step.

    None for any other value.

    Raises:
        ValueError: an axis without a value, or with a value given twice.

    """
    if isinstance(value, Mapping) and is_range(value) and "step" in value:
        return list(AxisSettings.model_validate(value).listed or ())
    if not _is_list(value):
        return None
    if isinstance(value, str):
        first, last = map(int, value.split(".."))
        if last < first:
            raise ValueError(f"the range {value} is empty: its end lies before its start")
        if last - first >= _MOST:
            raise ValueError(f"the range {value} has more than {_MOST:,} values")
        return range(first, last + 1)
    if not value:
        raise ValueError("is an empty list: it has no value")
    seen: set[str] = set()
    for item in value:
        text = json.dumps(item, sort_keys=True)
        if text in seen:
            raise ValueError(f"the value {shown(item)} is given twice")
        seen.add(text)
    return list(value)


def is_range(value: Mapping[str, Any]) -> bool:
    """Whether a mapping is a range rather than a section."""
    return {"low", "high"} <= set(value) <= set(AxisSettings.model_fields)


def _is_list(value: Any) -> bool:
    if isinstance(value, str):
        return _INTEGERS.fullmatch(value) is not None
    return isinstance(value, list | tuple)


def dotted(
    values: Mapping[str, Any], is_axis: Callable[[Mapping[str, Any]], bool], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield axes by dotted key, whatever their nesting; some mappings are axes."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value and not is_axis(value):
            yield from dotted(value, is_axis, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _alone(axis: Any) -> Any:
    """Return an axis without the parts of another kind that a lower level gave it."""
    axis = {"values": axis} if _is_list(axis) else axis
    if not isinstance(axis, Mapping):
        return axis
    return {"values": None, **axis} if axis.get("values") is None else Replacing(axis)
