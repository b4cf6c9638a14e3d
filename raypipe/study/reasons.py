"""Words of a recommendation: how the point compares with others."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from raypipe.hardware import bytes_text
from raypipe.report.formatting import percent
from raypipe.report.measures import REPEATED
from raypipe.store.ledger import Row
from raypipe.study.point_results import PointResult
from raypipe.study.trials import shown

_CLOSE = "within 2 %"
#: points that a reason lists at most; the table ``trials`` has all
_LISTED = 3


@dataclass(frozen=True)
class Words:
    """The sentences of a reason."""

    metric: str

    @property
    def best_worst_better(self) -> tuple[str, str, str]:
        """The words for the extremes of the metric."""
        if self.metric == "samples_per_s":
            return "fastest", "slowest", "faster"
        return "best", "worst", "better"

    def figure(self, value: float) -> str:
        """Return a value of the metric with its unit or name."""
        text = number_text(value)
        return f"{text} samples/s" if self.metric == "samples_per_s" else f"{self.metric} {text}"

    def standing(
        self, accepted: Sequence[PointResult], close: Sequence[PointResult], merits: Sequence[str]
    ) -> str:
        """Return the place of the point among all, up to its value."""
        best = self.best_worst_better[0]
        if len(accepted) == 1:
            return "The only point to choose from: "
        if merits:
            return (
                f"Of {len(accepted)} points {len(close)} are {_CLOSE} of the {best}, "
                f"and this is the one with the least {' and '.join(merits)}: "
            )
        others = f" ({len(close) - 1} more {_CLOSE})" if len(close) > 1 else ""
        return f"The {best} of {len(accepted)} points{others}: "

    def tie(self, accepted: Sequence[PointResult], tied: Sequence[PointResult]) -> str:
        """Return the place of a point that was measured several times, up to its value."""
        if len(tied) == 1:
            return self.standing(accepted, tied, ())
        best = self.best_worst_better[0]
        return (
            f"{len(tied)} of {len(accepted)} points are tied for the {best}, as their ranges "
            f"overlap: {self.listed(tied)}. Recommended is the simplest of them: "
        )

    def listed(self, points: Sequence[PointResult]) -> str:
        """Return the first points with their values, the best first, and how many there are."""
        listed = [f"{shown(each.settings)} {self.figure(each.value)}" for each in points[:_LISTED]]
        more = [f"{len(points) - _LISTED} more"] if len(points) > _LISTED else []
        return ", ".join([*listed, *more])

    def value(self, point: PointResult) -> str:
        """Return the value of a point, with the range of its measurements or its seeds."""
        text, measured = self.figure(point.value), len(point.values)
        low, high = number_text(point.low), number_text(point.high)
        if point.seeds == 1:
            once = point.repeats == 1
            return text if once else f"{text} (median of {point.repeats}, {low} to {high})"
        number = f"{measured}" if measured == point.seeds else f"{measured} of {point.seeds}"
        if measured == 1:
            return f"{text} ({number} seeds)"
        return f"{text} (mean of {number} seeds, {low} to {high})"

    def comparison(
        self,
        winner: PointResult,
        worst: PointResult,
        plain: PointResult | None,
        tied: Sequence[PointResult],
    ) -> str:
        """Return the ratios to the worst point and to plain fp32, without tied points."""
        name = f"the {self.best_worst_better[1]}"
        others = {} if worst.value == winner.value else {name: worst}
        if plain is not None and not winner.is_plain:
            if plain.settings == worst.settings:
                others = {f"plain fp32, {name}": worst}
            else:
                others["the best in plain fp32"] = plain
        return "".join(
            f", {self._ratio(winner, point, name)}"
            for name, point in others.items()
            if point not in tied
        )

    def _ratio(self, point: PointResult, other: PointResult, name: str) -> str:
        if point.value * other.value <= 0:
            return f"against {self.figure(other.value)} for {name}"
        times = _ratio_text(point.value / other.value)
        return f"{times} times {name} ({self.figure(other.value)})"

    def rejection(
        self, winner: PointResult, better: Sequence[PointResult], tolerance: float
    ) -> str:
        """Return why better points, the best first, are rejected for their loss."""
        if not better:
            return ""
        first, comparative = better[0], self.best_worst_better[2]
        differing = [
            f"{key.rpartition('.')[2]} {value}"
            for key, value in first.settings.items()
            if key not in winner.settings or winner.settings[key] != value
        ]
        named = f"with {', '.join(differing)} ({self.figure(first.value)})"
        which = f"A {comparative} one {named} is"
        if len(better) > 1:
            which = f"{len(better)} {comparative} ones, the best {named}, are"
        off = f"by {percent(first.parity)}" if math.isfinite(first.parity) else "beyond measure"
        return (
            f"{which} not recommended: the loss differs from fp32's {off}, "
            f"and {percent(tolerance)} are allowed"
        )

    def caution(self, winner: PointResult, points: Sequence[PointResult]) -> str:
        """Return the reasons to doubt a comparison of speeds."""
        doubts = []
        if winner.trial.get("kind") == "quality" and winner.seeds == 1:
            if len(points) > 1:
                doubts.append(
                    "each point was trained with one seed, so chance may decide "
                    "(sweep.axes.training.seed=[0,1,2] averages over seeds)"
                )
        elif winner.repeats == 1 and self.metric in REPEATED and len(points) > 1:
            doubts.append(
                "each point was measured once, which does not tell them apart (sweep.repeats)"
            )
        sizes = {point.trial.get("effective_batch") for point in points}
        swept = any(key.endswith(".effective_batch") for key in winner.settings)
        if len(sizes) > 1 and not swept:
            doubts.append(
                "the points differ in the effective batch, which changes the training "
                "(sweep.constraints.effective_batch keeps it)"
            )
        text = "; ".join(doubts)
        return f"Mind that {text}" if text else ""


def uneven_split(winner: PointResult) -> str:
    """Return how a step is split if the micro-batches of the point do not divide it."""
    names = ("micro_batch", "accumulation", "workers", "effective_batch")
    micro, accumulation, workers, effective = (winner.trial.get(name) for name in names)
    if not micro or not accumulation or not effective:
        return ""
    if micro * accumulation * (workers or 1) <= effective:
        return ""
    return (
        f"A step takes {effective} samples, with {accumulation} micro-batches of at most {micro} "
        "per worker"
    )


def memory_and_outcomes(winner: PointResult, swept: Sequence[Row], capacity: int | None) -> str:
    """Return the memory of the point, and what became of the trials that have no result."""
    parts = []
    if math.isfinite(winner.peak):
        capacity_text = f" of {bytes_text(capacity)}" if capacity else ""
        parts.append(f"peak memory {bytes_text(winner.peak)}{capacity_text}")
    count = Counter(row["status"] for row in swept)
    outcomes = {
        "out_of_memory": "ran out of memory",
        "failed": "failed",
        "skipped": "was skipped" if count["skipped"] == 1 else "were skipped",
        "interrupted": "was stopped early" if count["interrupted"] == 1 else "were stopped early",
    }
    others = [f"{count[status]} {text}" for status, text in outcomes.items() if count[status]]
    if others:
        parts.append(f"of {len(swept)} trials {', '.join(others)}")
    text = "; ".join(parts)
    return text[:1].upper() + text[1:]


def number_text(value: float) -> str:
    """Return a number with four digits, or whole above 1000."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"


def _ratio_text(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 1000 else f"{ratio:.3g}"
