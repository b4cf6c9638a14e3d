"""Recommendation of a sweep: the best point as settings and YAML, with the reason."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

from raypipe.config.yaml_text import dump_yaml
from raypipe.report.formatting import percent
from raypipe.store.ledger import Row
from raypipe.study.point_results import PointResult, medians, point_results
from raypipe.study.reasons import Words, memory_and_outcomes, uneven_split

#: relative difference below which values count as equal
_TIE = 0.02


@dataclass(frozen=True)
class Recommendation:
    """The best point: a trial of it, its value and the range of that, its settings, and the reason.

    ``best`` are the settings of the point with the best value, which may be another one that is
    as good.
    """

    trial_id: str
    value: float
    low: float
    high: float
    settings: dict[str, Any]
    reason: str
    best: dict[str, Any]


def recommend(
    rows: Iterable[Row],
    metric: str,
    mode: Literal["max", "min"],
    parity_tolerance: float,
    capacity_bytes: int | None = None,
) -> Recommendation | None:
    """Return the best succeeded point; None if no point is within the tolerance.

    Points that differ in the seed only count as one, with their mean. Measured several times, a
    point has its median, and points whose ranges overlap the best one's are tied with it: the most
    exact precision wins, then the fewest extras, then the better value. Measured once, points
    within 2 % of the best are as good: lower peak memory wins, then less energy per sample (each
    within 2 %), then the better value. The order of the rows does not matter.

    Args:
        rows: the trials of one sweep, with its references.
        metric: the column to compare; rows without a finite value are ignored.
        mode: whether more or less of it is better.
        parity_tolerance: the largest ``parity`` (relative loss difference to fp32) that a point may
            have in any seed.
        capacity_bytes: the device's memory, for the reason.

    Raises:
        ValueError: the mode is unknown.

    """
    if mode not in ("max", "min"):
        raise ValueError(f"mode = {mode!r}: must be 'max' or 'min'")
    sign = -1 if mode == "max" else 1

    def cost(point: PointResult) -> float:
        return sign * point.value

    trials = list(rows)
    swept = [row for row in trials if not row.get("reference")]
    points = sorted(
        point_results(swept, metric), key=lambda point: (cost(point), point.trial["trial_id"])
    )
    accepted = [point for point in points if point.parity <= parity_tolerance]
    if not accepted:
        return None
    words, best = Words(metric), accepted[0]
    plain = [point for point in point_results(trials, metric) if point.is_plain]
    if best.repeats > 1:
        close = [p for p in accepted if p.low <= best.high and best.low <= p.high]
        winner = min(close, key=lambda p: (p.coarseness, p.extras))
        standing = words.tie(accepted, close)
    else:
        close = _lowest(accepted, cost)
        winner, merits = _leanest(close)
        standing = words.standing(accepted, close, merits)
    better = [p for p in points if p.parity > parity_tolerance and cost(p) < cost(winner)]
    sentences = [
        standing
        + words.value(winner)
        + words.comparison(winner, accepted[-1], min(plain, key=cost, default=None), close),
        uneven_split(winner),
        memory_and_outcomes(winner, medians(swept), capacity_bytes),
        words.rejection(winner, better, parity_tolerance),
        words.caution(winner, accepted),
    ]
    reason = " ".join(f"{sentence}." for sentence in sentences if sentence)
    return Recommendation(
        str(winner.trial["trial_id"]),
        winner.value,
        winner.low,
        winner.high,
        winner.recommended_settings(),
        reason,
        best.settings,
    )


def snippet(settings: Mapping[str, Any], comment: str = "") -> str:
    """Return settings by dotted key as nested YAML, below a comment if there is one.

    Raises:
        ValueError: a key has both a value and parts (``a`` and ``a.b``).

    """
    nested: dict[str, Any] = {}
    for key, value in settings.items():
        *sections, name = key.split(".")
        section: Any = nested
        for part in sections:
            section = section.setdefault(part, {}) if isinstance(section, dict) else None
        if not isinstance(section, dict) or name in section:
            raise ValueError(f"{key}: there is a value for it and for a part of it")
        section[name] = deepcopy(value)  # a list shared by two keys would become a YAML alias
    plain = " ".join(comment.split())  # any line break would end the comment
    lines = textwrap.wrap(plain, 88, initial_indent="# ", subsequent_indent="# ")
    return "\n".join([*lines, dump_yaml(nested)])


def nothing(rows: Collection[Row], metric: str, parity_tolerance: float) -> str:
    """Return why no point is recommended.

    Args:
        rows: the trials of the sweep, with its references.
        metric: the column that is compared; empty if no trial told it.
        parity_tolerance: as for :func:`recommend`.

    """
    succeeded = [r for r in rows if r["status"] == "succeeded" and not r.get("reference")]
    if not succeeded:
        return "no point succeeded"
    if not point_results(succeeded, metric):
        return f"no point has a finite {metric}"
    if not point_results(list(rows), metric):
        return "no point was measured each time without an error"
    return f"every loss differs from fp32's by more than {percent(parity_tolerance)}"


def _lowest(
    points: Sequence[PointResult], cost: Callable[[PointResult], float]
) -> list[PointResult]:
    """Return the points within 2 % of the lowest value; all points if no value is known."""
    least = min(cost(point) for point in points)
    if math.isinf(least):
        return list(points)
    return [point for point in points if cost(point) - least <= _TIE * abs(least)]


def _leanest(close: Sequence[PointResult]) -> tuple[PointResult, list[str]]:
    """Return the point with the least memory, then energy, and which of them tell it apart."""
    lean = _lowest(close, lambda point: point.peak)
    frugal = _lowest(lean, lambda point: point.energy)
    merits = ["memory"] if len(lean) < len(close) else []
    merits += ["energy"] if len(frugal) < len(lean) else []
    return frugal[0], merits
