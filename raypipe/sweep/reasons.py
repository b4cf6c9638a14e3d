"""Words of a recommendation: how the point compares with others, and how far that is known."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from raypipe.hardware import bytes_text
from raypipe.report.formatting import percent
from raypipe.storage.ledger import Row
from raypipe.sweep.point_results import PointResult
from raypipe.sweep.rounds import Measured
from raypipe.sweep.settings import REPEATED
from raypipe.sweep.standing import Comparison
from raypipe.sweep.trials import shown

#: relative spread of the speed within a trial above which the measurement was disturbed
_CALM = 0.1
#: load per core above which more than the trial itself was running
_BUSY = 1.2
_CLOSE = "within 2 %"
#: points that a reason lists at most; the table ``trials`` has all
_LISTED = 3


@dataclass(frozen=True)
class Words:
    """The sentences of a reason.

    ``found`` are the measurements in rounds; None if each trial was measured once.
    """

    metric: str
    mode: str = "max"
    found: Measured | None = None

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

    def name(self, point: PointResult, other: PointResult | None = None) -> str:
        """Return a point as text: the settings that differ from the other point, or all."""
        differing = {
            key: value
            for key, value in point.settings.items()
            if other is None or other.settings.get(key) != value
        }
        return shown(differing or point.settings)

    def standing_in_rounds(
        self,
        accepted: Sequence[PointResult],
        close: Sequence[PointResult],
        merits: Sequence[str],
    ) -> str:
        """Return how the point was chosen, up to its value."""
        found = self.found
        if found is None or len(accepted) == 1:
            return "The only point to choose from: "
        best = self.best_worst_better[0]
        if not found.standing.is_decided and len(close) == 1:
            return f"{self.undecided(accepted, close)}: "
        if not found.standing.is_decided:
            first = f"{self.undecided(accepted, close)}: {self.listed(close)}. "
            return (
                f"{first}Recommended is, by rule, the one with the highest precision, then without "
                f"compilation and checkpointing, then the {best} measured: "
            )
        equal = f"no more than {100 * found.negligible:g} % apart from the {best}"
        if merits:
            return (
                f"Of {len(accepted)} points {len(close)} are {equal}, and this is the one with the "
                f"least {' and '.join(merits)}: "
            )
        others = f" ({len(close) - 1} more {equal})" if len(close) > 1 else ""
        return f"The {best} of {len(accepted)} points{others}: "

    def undecided(self, accepted: Sequence[PointResult], close: Sequence[PointResult]) -> str:
        """Return that the measurements do not tell which of the close points is the best."""
        of = f"{len(close)} of " * (len(close) < len(accepted))
        best = self.best_worst_better[0]
        if len(close) == 1:
            return f"The {best} of {len(accepted)} points in every round, too few to be certain"
        return f"Cannot tell which of {of}{len(accepted)} points is the {best}"

    def listed(self, points: Sequence[PointResult]) -> str:
        """Return the first points with their values, the best first, and how many there are."""
        listed = [f"{shown(each.settings)} {self.figure(each.value)}" for each in points[:_LISTED]]
        more = [f"{len(points) - _LISTED} more"] if len(points) > _LISTED else []
        return ", ".join([*listed, *more])

    def next(self, compared: tuple[PointResult, Comparison] | None) -> str:
        """Return the ratio to the best of the other points, with its interval."""
        if compared is None:
            return ""
        other, ratio = compared
        number = _ratio_text(ratio.ratio)
        times = f"{number} times the {'next' if self.is_ahead(ratio) else 'other'}"
        if number == "1":
            times = "as good as the other"
        return (
            f"; {times}, {shown(other.settings)} ({self.figure(other.value)}; {_interval(ratio)})"
        )

    def is_ahead(self, ratio: Comparison) -> bool:
        """Whether a ratio means that the first is better."""
        return ratio.ratio >= 1 if self.mode == "max" else ratio.ratio <= 1

    def decision(self, compared: tuple[PointResult, Comparison] | None) -> str:
        """Return how the rounds decided, or why they could not."""
        found = self.found
        if found is None or compared is None:
            return ""
        ratio, state = compared[1], found.standing
        rounds = max(state.rounds.values())
        noise = (
            ""
            if ratio.noise is None
            else f"the ratio of the two varied by {percent(ratio.noise)} from round to round"
        )
        busy = self.load()
        count = f"{rounds} round{'s' * (rounds != 1)}"
        better = self.best_worst_better[2]
        if state.is_decided:
            sure = f"no other point is {better} by more than {100 * found.negligible:g} %"
            return (
                f"Decided after {count}: {sure}, with {100 * (1 - found.alpha):g} % confidence"
                f"{f'; {noise}' if noise else ''}{f', {busy}' if busy else ''}"
            )
        why = ", ".join(part for part in (noise, busy) if part)
        return (
            f"After {count} the intervals still overlap{f': {why}' if why else ''}; "
            f"{found.over}. The same command goes on with {found.longer}, best while nothing else "
            "runs"
        )

    def load(self) -> str:
        """Return how busy the machine was; empty if unknown."""
        if self.found is None or self.found.load is None:
            return ""
        busy = " (other work was running)" if self.found.load > _BUSY else ""
        return f"at a load of {self.found.load:.2g} per core{busy}"

    def value(self, point: PointResult) -> str:
        """Return the value of a point, with its interval or the range of its seeds."""
        text, measured = self.figure(point.value), len(point.values)
        if self.found is not None:
            low, high = self.found.standing.intervals[point.key]
            rounds = self.found.standing.rounds[point.key]
            if math.isfinite(high):
                text += (
                    f" (95 % interval {number_text(low)} to {number_text(high)}, {rounds} rounds)"
                )
        if point.seeds == 1:
            return text
        number = f"{measured}" if measured == point.seeds else f"{measured} of {point.seeds}"
        if measured == 1:
            return f"{text} ({number} seeds)"
        least, most = self.figure(min(point.values)), self.figure(max(point.values))
        return f"{text} (mean of {number} seeds, from {least} to {most})"

    def comparison(
        self,
        winner: PointResult,
        worst: PointResult,
        plain: PointResult | None,
        compared: tuple[PointResult, Comparison] | None = None,
    ) -> str:
        """Return the ratios to the worst point and to plain fp32, unless they are said already.

        A point that may be the best is left out.
        """
        name = f"the {self.best_worst_better[1]}"
        others = {} if worst.value == winner.value else {name: worst}
        if plain is not None and not winner.is_plain:
            if plain.settings == worst.settings:
                others = {f"plain fp32, {name}": worst}
            else:
                others["the best in plain fp32"] = plain
        said = [] if compared is None else [compared[0].key]
        said += [] if self.found is None else self.found.standing.order
        others = {name: point for name, point in others.items() if point.key not in said}
        return "".join(f", {self._ratio(winner, point, name)}" for name, point in others.items())

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
        if self.found is None and winner.trial.get("kind") == "quality" and winner.seeds == 1:
            if len(points) > 1:
                doubts.append(
                    "each point was trained with one seed, so chance may decide "
                    "(sweep.axes.training.seed=[0,1,2] averages over seeds)"
                )
        elif self.found is None and self.metric in REPEATED and len(points) > 1:
            doubts.append(
                "each point was measured once, which does not tell them apart (sweep.rounds.most)"
            )
        is_speed = self.metric == "samples_per_s" and self.found is None
        spread = winner.trial.get("speed_spread") if is_speed else None
        if spread is not None and spread > _CALM:
            doubts.append(
                f"its speed varied by {100 * spread:.0f} % while it was measured (other work on "
                "the machine, or too few steps: sweep.steps)"
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


def _interval(ratio: Comparison) -> str:
    if not ratio.is_known:
        return "too few rounds for an interval"
    return f"interval {_ratio_text(ratio.low)} to {_ratio_text(ratio.high)}"
