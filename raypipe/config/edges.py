"""Edges of an axis: a best value that is the last of those that were tried."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from raypipe.config.axes import AxisSettings

#: share of a range at either end that counts as its edge
_NEAR = 0.05


@dataclass(frozen=True)
class Edge:
    """The end of an axis at which its best value lies, and the values beyond to try."""

    value: float
    is_largest: bool
    further: tuple[float, ...]

    def remark(self, key: str, option: str) -> str:
        """Return what to try, as a sentence without its period.

        Args:
            key: the name of the axis for readers.
            option: the key of its values on the command line.

        """
        side, direction = ("largest", "larger") if self.is_largest else ("smallest", "smaller")
        values = sorted((self.value, *self.further))
        listed = ",".join(f"{value:.6g}" for value in values)
        return (
            f"the best {key} is the {side} that was tried ({self.value:.6g}): try {direction} "
            f"ones, e.g. '{option}=[{listed}]'"
        )


def edge_of_values(values: Sequence[Any], best: Any) -> Edge | None:
    """Return the edge at which the best of these values lies; None if it lies between others.

    None, too, if a value is not a number, or fewer than two differ.
    """
    numbers = sorted({value for value in values if _is_number(value)})
    if len(numbers) < 2 or len(numbers) < len(set(map(repr, values))) or not _is_number(best):
        return None
    if best not in (numbers[0], numbers[-1]):
        return None
    is_largest = best == numbers[-1]
    inner = numbers[-2] if is_largest else numbers[1]
    return Edge(best, is_largest, _beyond(best, inner))


def edge_of_axis(axis: AxisSettings, best: Any) -> Edge | None:
    """Return the edge of an axis at which its best value lies, None if it lies between others.

    In a range that is the twentieth at either end, in the logarithm if it is drawn so.
    """
    if (values := axis.listed) is not None:
        return edge_of_values(values, best)
    if not _is_number(best):
        return None
    low, high, at = (math.log(x) if axis.log else float(x) for x in (*axis.ends, best))
    share = (at - low) / (high - low)
    if _NEAR < share < 1 - _NEAR:
        return None
    other, end = axis.ends if share > 0.5 else reversed(axis.ends)
    middle = math.sqrt(end * other) if axis.log else (end + other) / 2
    inner = round(middle) if axis.is_integer else middle
    return Edge(end, share > 0.5, _beyond(end, inner))


def possible(edge: Edge | None, allows: Callable[[float], bool]) -> Edge | None:
    """Return the edge with those further values that are allowed; None without any."""
    if edge is None:
        return None
    further = tuple(value for value in edge.further if allows(value))
    return Edge(edge.value, edge.is_largest, further) if further else None


def _beyond(end: float, inner: float) -> tuple[float, ...]:
    """Return two values beyond the end, spaced as the last two values; none that changes sign."""
    found: list[float] = []
    at = end
    for _ in range(2):
        geometric = min(inner, end) > 0 and max(inner, end) >= 1.5 * min(inner, end)
        following = at * end / inner if geometric else at + end - inner
        if isinstance(end, int) and isinstance(inner, int):
            following = round(following)
        if following == at or (end >= 0 and following < 0) or (end > 0 and following == 0):
            break
        found.append(following)
        at = following
    return tuple(found)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
