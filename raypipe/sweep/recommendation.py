"""Recommendation of a sweep: the best point as settings and YAML, with the reason."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal

from raypipe.config.yaml_text import dump_yaml
from raypipe.report.formatting import percent
from raypipe.storage.ledger import Row
from raypipe.sweep.point_results import PointResult, point_results
from raypipe.sweep.reasons import Words, memory_and_outcomes, uneven_split
from raypipe.sweep.rounds import Measured
from raypipe.sweep.standing import Comparison

#: relative difference below which values count as equal
_TIE = 0.02


@dataclass(frozen=True)
class Recommendation:
    """The best point: its trial and value (the mean over seeds), its settings, and the reason.

    ``best`` are the settings of the point with the best value, which may be another one that is
    as good. ``columns`` are further columns of the table. ``undecided`` says that measurements do
    not tell which point is the best; empty if they do.
    """

    trial_id: str
    value: float
    settings: dict[str, Any]
    reason: str
    best: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, Any] = field(default_factory=dict)
    undecided: str = ""


def recommend(
    rows: Iterable[Row],
    metric: str,
    mode: Literal["max", "min"],
    parity_tolerance: float,
    capacity_bytes: int | None = None,
    found: Measured | None = None,
) -> Recommendation | None:
    """Return the best succeeded point; None if no point is within the tolerance.

    Points that differ in the seed only count as one, with their mean. Among the points that are as
    good as the best, lower peak memory wins, then less energy per sample (each within 2 %), then
    the better value. As good is within 2 %, or what the rounds say. If they could not decide, the
    most exact precision of the points that may be the best wins, then the fewest extras, then the
    better value. The order of the rows does not matter.

    Args:
        rows: the trials of one sweep, with its references.
        metric: the column to compare; rows without a finite value are ignored.
        mode: whether more or less of it is better.
        parity_tolerance: the largest ``parity`` (relative loss difference to fp32) that a point may
            have in any seed.
        capacity_bytes: the device's memory, for the reason.
        found: the measurements in rounds, if there were any.

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
    if found is not None:
        accepted = [point for point in accepted if point.key in found.standing.centers]
    if not accepted:
        return None
    words, undecided = Words(metric, mode, found), ""
    plain = [point for point in point_results(trials, metric) if point.is_plain]
    if found is None:
        close = _lowest(accepted, cost)
        winner, merits = _leanest(close)
        best = close[0]
        standing = words.standing(accepted, close, merits)
    else:
        by_key = {point.key: point for point in accepted}
        state = found.standing
        best = by_key[state.best]
        others = [by_key[name] for name in state.order[1:]]
        if state.is_decided:
            close = [best, *(point for point in others if point.key in state.equal)]
            winner, merits = _leanest(close)
        else:
            near = {*state.open, *state.equal}.difference(state.apart)
            close = [best, *(point for point in others if point.key in near)]
            winner = min(close, key=lambda p: (p.coarseness, p.extras, close.index(p)))
            merits = []
            undecided = words.undecided(accepted, close)
        standing = words.standing_in_rounds(accepted, close, merits)
    better = [p for p in points if p.parity > parity_tolerance and cost(p) < cost(winner)]
    compared = _runner_up(winner, accepted, found)
    sentences = [
        standing
        + words.value(winner)
        + words.next(compared)
        + words.comparison(winner, accepted[-1], min(plain, key=cost, default=None), compared),
        words.decision(compared),
        uneven_split(winner),
        memory_and_outcomes(winner, swept, capacity_bytes),
        words.rejection(winner, better, parity_tolerance),
        words.caution(winner, accepted),
    ]
    reason = " ".join(f"{sentence}." for sentence in sentences if sentence)
    return Recommendation(
        str(winner.trial["trial_id"]),
        winner.value,
        winner.recommended_settings(),
        reason,
        best.settings,
        _columns(winner, compared, found, words),
        undecided,
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


def nothing(rows: Iterable[Row], metric: str, parity_tolerance: float) -> str:
    """Return why no point is recommended.

    Args:
        rows: the trials of the sweep, with its references.
        metric: the column that is compared; empty if no trial told it.
        parity_tolerance: as for :func:`recommend`.

    """
    succeeded = [r for r in rows if r["status"] == "succeeded" and not r.get("reference")]
    if not succeeded:
        return "no point succeeded"
    found = point_results(succeeded, metric)
    if not found:
        return f"no point has a finite {metric}"
    if all(point.parity > parity_tolerance for point in found):
        return f"every loss differs from fp32's by more than {percent(parity_tolerance)}"
    return "no point was measured in every round without an error"


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


def _runner_up(
    winner: PointResult, accepted: Sequence[PointResult], found: Measured | None
) -> tuple[PointResult, Comparison] | None:
    """Return the best of the other points, and how the winner compares with it in the rounds."""
    if found is None or len(accepted) < 2:
        return None
    state = found.standing
    if winner.key != state.best:
        best = next(point for point in accepted if point.key == state.best)
        return best, state.comparisons[winner.key].inverse
    others = [point for point in accepted if point.key != winner.key]  # the best first
    rest = [point for point in others if point.key in state.order]
    second = (rest or others)[0]
    return second, state.comparisons[second.key]


def _columns(
    winner: PointResult,
    compared: tuple[PointResult, Comparison] | None,
    found: Measured | None,
    words: Words,
) -> dict[str, Any]:
    """Return what the table says of the rounds."""
    if found is None:
        return {}
    low, high = found.standing.intervals[winner.key]
    columns: dict[str, Any] = {
        "value_low": low if math.isfinite(high) else None,
        "value_high": high if math.isfinite(high) else None,
        "rounds": found.standing.rounds[winner.key],
        "decided": found.standing.is_decided,
        "load": found.load,
        "longer": None if found.standing.is_decided else found.longer,
    }
    if compared is None:
        return columns
    other, ratio = compared
    return columns | {
        "runner_up": words.name(other, winner),
        "ratio": ratio.ratio,
        "ratio_low": ratio.low if ratio.is_known else None,
        "ratio_high": ratio.high if ratio.is_known else None,
        "noise": ratio.noise,
    }
