"""Recommendation of a sweep: the best point as settings and YAML, with the reason in two lines."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Literal

import numpy as np

from raypipe.config.yaml_text import dump_yaml
from raypipe.hardware import bytes_text
from raypipe.report.formatting import percent
from raypipe.report.measures import REPEATED
from raypipe.stats import finite_or_none, on_pareto_front
from raypipe.store.ledger import Row
from raypipe.study.space import point_key, seedless
from raypipe.study.trials import shown
from raypipe.training.batching import KEYS

Mode = Literal["max", "min"]
#: from the most to the least exact
_PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8")
#: points that a reason lists at most; the table ``trials`` has all
_LISTED = 3


@dataclass(frozen=True)
class Recommendation:
    """The best point: a trial of it, its value and the range of that, its settings, and the reason.

    ``best`` are the settings of the point with the best value, which may be another one that is
    tied with it.
    """

    trial_id: str
    value: float
    low: float
    high: float
    settings: dict[str, Any]
    reason: str
    best: dict[str, Any]


@dataclass(frozen=True)
class _PointResult:
    """The trials of a point, which repeat each other or differ in the seed only.

    ``value`` is the mean over seeds of the medians of their measurements, which are from ``low`` to
    ``high``. ``trial`` is the one nearest to it. ``seeds`` includes those that did not succeed,
    ``repeats`` is the number of measurements of a seed. ``simplicity`` is less for simpler ones.
    """

    settings: dict[str, Any]
    trial: Row
    value: float
    low: float
    high: float
    measured: int
    seeds: int
    repeats: int
    peak: float
    parity: float

    @property
    def simplicity(self) -> tuple[int, int]:
        """The place of its precision, the most exact first, and what a plain training lacks."""
        precision = self.trial.get("precision")
        place = _PRECISIONS.index(precision) if precision in _PRECISIONS else len(_PRECISIONS)
        extras = sum(bool(self.trial.get(key)) for key in ("gradient_checkpointing", "compile"))
        return place, extras

    def overlaps(self, other: _PointResult) -> bool:
        """Whether the measurements of two points do not tell them apart."""
        return self.low <= other.high and other.low <= self.high

    def recommended_settings(self) -> dict[str, Any]:
        """Return the swept settings except the seed, with all batch sizes if one was swept."""
        keys = {f"{self.trial['trained_stage']}.training.{key}": key for key in KEYS}
        if not keys.keys() & self.settings.keys():
            return self.settings
        sizes = {key: self.trial.get(name) for key, name in keys.items()}
        return self.settings | {key: size for key, size in sizes.items() if size is not None}


def recommend(
    rows: Iterable[Row],
    metric: str,
    mode: Mode,
    parity_tolerance: float,
    capacity_bytes: int | None = None,
) -> Recommendation | None:
    """Return the best succeeded point; None if no point is within the tolerance.

    A point has the median of its measurements, and the mean over its seeds. Points whose ranges
    overlap the best one's are tied with it: the most exact precision wins, then the fewest extras,
    then the better value. The order of the rows does not matter.

    Args:
        rows: the trials of one sweep, with its references.
        metric: the column to compare; rows without a finite value are ignored.
        mode: whether more or less of it is better.
        parity_tolerance: the largest ``parity`` (relative loss difference to fp32) that a point may
            have in any seed.
        capacity_bytes: the device's memory, for the reason.

    """
    sign = -1 if mode == "max" else 1

    def cost(point: _PointResult) -> tuple[float, str]:
        return sign * point.value, point.trial["trial_id"]

    trials = list(rows)
    swept = [row for row in trials if not row.get("reference")]
    points = sorted(_points(swept, metric), key=cost)
    accepted = [point for point in points if point.parity <= parity_tolerance]
    if not accepted:
        return None
    tied = [point for point in accepted if point.overlaps(accepted[0])]
    winner = min(tied, key=lambda point: point.simplicity)
    better = [p for p in points if p.parity > parity_tolerance and cost(p) < cost(winner)]
    plain = min(
        (p for p in _points(trials, metric) if p.simplicity == (0, 0)), key=cost, default=None
    )
    words = _Words(metric)
    first = words.standing(accepted, tied) + words.value(winner)
    first += words.comparison(winner, accepted[-1], plain, tied)
    second = [
        *words.memory_and_outcomes(winner, medians(swept), capacity_bytes),
        *words.rejection(winner, better, parity_tolerance),
        *words.cautions(winner, accepted),
    ]
    text = "; ".join(second)
    return Recommendation(
        str(winner.trial["trial_id"]),
        winner.value,
        winner.low,
        winner.high,
        winner.recommended_settings(),
        f"{first}." + (f"\n{text[:1].upper()}{text[1:]}." if text else ""),
        accepted[0].settings,
    )


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
    if not _points(succeeded, metric):
        return f"no point has a finite {metric}"
    if not _points(list(rows), metric):
        return "no point was measured each time without an error"
    return f"every loss differs from fp32's by more than {percent(parity_tolerance)}"


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


def medians(rows: Iterable[Row]) -> list[Row]:
    """Return one row per trial that was measured again, with the medians of its measurements.

    Its status is that of a measurement that did not succeed, if there is one.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.get("repeats") or row["trial_id"], []).append(row)
    found = []
    for group in groups.values():
        first = next((row for row in group if not row.get("repeats")), group[0])
        status = next((row["status"] for row in group if row["status"] != "succeeded"), "succeeded")
        measured = {name: _finite(group, name) for name in REPEATED}
        middle = {name: median(values) for name, values in measured.items() if values}
        found.append({**first, **middle, "status": status})
    return found


def front(rows: Iterable[Row], qualities: Mapping[str, Mode]) -> list[Row]:
    """Return the trials that no other one dominates, in the given order; equal ones are all kept.

    The objectives are more ``samples_per_s``, less peak memory, better ``qualities`` and, if every
    trial has it, less ``energy_j_per_sample``. Only points that succeeded with a finite speed and
    qualities count; an unknown peak is larger than any other.

    Args:
        rows: the trials.
        qualities: columns that measure quality, each with its mode.

    """
    measured = [
        row
        for row in rows
        if row["status"] == "succeeded"
        and not row.get("reference")
        and all(finite_or_none(row.get(name)) is not None for name in ("samples_per_s", *qualities))
    ]
    costs = [
        [
            -row["samples_per_s"],
            peak_bytes(row) or math.inf,
            *((-1 if mode == "max" else 1) * row[name] for name, mode in qualities.items()),
        ]
        for row in measured
    ]
    energies = [finite_or_none(row.get("energy_j_per_sample")) for row in measured]
    if all(energy is not None for energy in energies):
        costs = [[*cost, energy or 0.0] for cost, energy in zip(costs, energies, strict=True)]
    kept = on_pareto_front(np.array(costs, dtype=np.float64)) if costs else ()
    return [row for row, is_kept in zip(measured, kept, strict=True) if is_kept]


def peak_bytes(row: Row) -> int | None:
    """Return the peak memory of a trial: its GPU's, on a CPU the host's; None if unknown."""
    name = "host_peak_bytes" if row.get("device") == "cpu" else "gpu_peak_bytes"
    peak = finite_or_none(row.get(name))
    return int(peak) if peak is not None and peak > 0 else None


def _finite(rows: Iterable[Row], column: str) -> list[float]:
    values = (finite_or_none(row.get(column)) for row in rows)
    return [value for value in values if value is not None]


def _points(rows: Sequence[Row], metric: str) -> list[_PointResult]:
    """Return the points with a trial that has the metric and whose measurements all succeeded."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(point_key(row.get("point") or {}), []).append(row)
    found = []
    for group in groups.values():
        seeds = medians(group)
        trials = [row for row in seeds if row["status"] == "succeeded" and _finite([row], metric)]
        if not trials:
            continue
        measured = _finite((row for row in group if row["status"] == "succeeded"), metric)
        mean = fmean(float(row[metric]) for row in trials)
        parities = [row["parity"] for row in trials if row.get("parity") is not None]
        found.append(
            _PointResult(
                settings=seedless(trials[0].get("point") or {}),
                trial=min(trials, key=lambda row: (abs(row[metric] - mean), row["trial_id"])),
                value=mean,
                low=min(measured),
                high=max(measured),
                measured=len(trials),
                seeds=len(seeds),
                repeats=len(group) // len(seeds),
                peak=max(peak_bytes(row) or math.inf for row in trials),
                parity=max((math.inf if math.isnan(p) else p for p in parities), default=0.0),
            )
        )
    return found


@dataclass(frozen=True)
class _Words:
    """The words of a reason."""

    metric: str

    @property
    def best_worst_better(self) -> tuple[str, str, str]:
        """The words for the extremes of the metric."""
        if self.metric == "samples_per_s":
            return "fastest", "slowest", "faster"
        return "best", "worst", "better"

    def figure(self, value: float) -> str:
        """Return a value of the metric with its unit or name."""
        text = _number(value)
        return f"{text} samples/s" if self.metric == "samples_per_s" else f"{self.metric} {text}"

    def standing(self, accepted: Sequence[_PointResult], tied: Sequence[_PointResult]) -> str:
        """Return the place of the point among all, up to its value."""
        best = self.best_worst_better[0]
        if len(accepted) == 1:
            return "The only point to choose from: "
        if len(tied) == 1:
            return f"The {best} of {len(accepted)} points: "
        listed = [f"{shown(each.settings)} {self.figure(each.value)}" for each in tied[:_LISTED]]
        more = [f"{len(tied) - _LISTED} more"] if len(tied) > _LISTED else []
        return (
            f"{len(tied)} of {len(accepted)} points are tied for the {best}, as their ranges "
            f"overlap: {', '.join([*listed, *more])}. Recommended is the simplest of them: "
        )

    def value(self, point: _PointResult) -> str:
        """Return the value of a point, with the range of its measurements or its seeds."""
        text, low, high = self.figure(point.value), _number(point.low), _number(point.high)
        if point.seeds == 1:
            once = point.repeats == 1
            return text if once else f"{text} (median of {point.repeats}, {low} to {high})"
        measured, seeds = point.measured, point.seeds
        number = f"{measured}" if measured == seeds else f"{measured} of {seeds}"
        if measured == 1:
            return f"{text} ({number} seeds)"
        return f"{text} (mean of {number} seeds, {low} to {high})"

    def comparison(
        self,
        winner: _PointResult,
        worst: _PointResult,
        plain: _PointResult | None,
        tied: Sequence[_PointResult],
    ) -> str:
        """Return the ratios to the worst point and to plain fp32, without tied points."""
        name = f"the {self.best_worst_better[1]}"
        others = {name: worst}
        if plain is not None and winner.simplicity != (0, 0):
            if plain.settings == worst.settings:
                others = {f"plain fp32, {name}": worst}
            else:
                others["the best in plain fp32"] = plain
        text = ""
        for name, point in others.items():
            if point in tied or point.value == winner.value:
                continue
            if winner.value * point.value <= 0:
                text += f", against {self.figure(point.value)} for {name}"
            else:
                ratio = winner.value / point.value
                times = f"{ratio:,.0f}" if ratio >= 1000 else f"{ratio:.3g}"
                text += f", {times} times {name} ({self.figure(point.value)})"
        return text

    def memory_and_outcomes(
        self, winner: _PointResult, swept: Sequence[Row], capacity: int | None
    ) -> list[str]:
        """Return the memory of the point, and what became of the trials that have no result."""
        parts = []
        if math.isfinite(winner.peak):
            of = f" of {bytes_text(capacity)}" if capacity else ""
            parts.append(f"peak memory {bytes_text(winner.peak)}{of}")
        count = Counter(row["status"] for row in swept)
        outcomes = {
            "out_of_memory": "ran out of memory",
            "failed": "failed",
            "skipped": "was skipped" if count["skipped"] == 1 else "were skipped",
            "interrupted": f"{'was' if count['interrupted'] == 1 else 'were'} stopped early",
        }
        others = [f"{count[status]} {text}" for status, text in outcomes.items() if count[status]]
        return [*parts, f"of {len(swept)} trials {', '.join(others)}"] if others else parts

    def rejection(
        self, winner: _PointResult, better: Sequence[_PointResult], tolerance: float
    ) -> list[str]:
        """Return why better points, the best first, are rejected for their loss."""
        if not better:
            return []
        first, comparative = better[0], self.best_worst_better[2]
        differing = [
            f"{key.rpartition('.')[2]} {value}"
            for key, value in first.settings.items()
            if key not in winner.settings or winner.settings[key] != value
        ]
        named = f"with {', '.join(differing)} ({self.figure(first.value)})"
        which = f"a {comparative} one {named} is"
        if len(better) > 1:
            which = f"{len(better)} {comparative} ones, the best {named}, are"
        off = f"by {percent(first.parity)}" if math.isfinite(first.parity) else "beyond measure"
        return [
            f"{which} not recommended: the loss differs from fp32's {off}, "
            f"and {percent(tolerance)} are allowed"
        ]

    def cautions(self, winner: _PointResult, points: Sequence[_PointResult]) -> list[str]:
        """Return the reasons to doubt a comparison."""
        doubts = []
        if winner.trial.get("kind") == "quality":
            if winner.seeds == 1 < len(points):
                doubts.append(
                    "each point was trained with one seed, so chance may decide "
                    "(sweep.axes.training.seed=[0,1,2] averages over seeds)"
                )
        elif winner.repeats == 1 < len(points) and self.metric in REPEATED:
            doubts.append(
                "each point was measured once, which does not tell them apart (sweep.repeats)"
            )
        sizes = {point.trial.get("effective_batch") for point in points}
        if len(sizes) > 1 and not any(key.endswith(".effective_batch") for key in winner.settings):
            doubts.append(
                "the points differ in the effective batch, which changes the training "
                "(sweep.constraints.effective_batch keeps it)"
            )
        return doubts


def _number(value: float) -> str:
    """Return a number with four digits, or whole above 1000."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"
