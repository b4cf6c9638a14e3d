"""Recommendation of a sweep: the best point as settings and YAML, with the reason."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from raypipe.hardware import bytes_text
from raypipe.pipeline.identity import canonical_json
from raypipe.stats import finite_or_none
from raypipe.storage.ledger import Row
from raypipe.sweep.pareto import peak_bytes
from raypipe.training.batching import KEYS

#: relative difference below which values count as equal
_TIE = 0.02
#: relative spread of the speed within a trial above which the measurement was disturbed
_CALM = 0.1
_CLOSE = f"within {100 * _TIE:g} %"


@dataclass(frozen=True)
class Recommendation:
    """The best point: its trial and value (the mean over seeds), its settings, and the reason."""

    trial_id: str
    value: float
    settings: dict[str, Any]
    reason: str


@dataclass(frozen=True)
class _Point:
    """Results of a point's trials, which differ in the seed only; infinite if unknown."""

    settings: dict[str, Any]
    trial: Row  # the trial nearest to the mean
    values: list[float]
    seeds: int  # including those that did not succeed
    value: float
    peak: float
    energy: float
    parity: float


def recommend(
    rows: Iterable[Row],
    metric: str,
    mode: Literal["max", "min"],
    parity_tolerance: float,
    capacity_bytes: int | None = None,
) -> Recommendation | None:
    """Return the best succeeded point; None if no point is within the tolerance.

    Points that differ in the seed only count as one, with their mean. Among points within 2 % of
    the best, lower peak memory wins, then less energy per sample (each within 2 %), then the better
    value. The order of the rows does not matter.

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

    def cost(point: _Point) -> float:
        return sign * point.value

    trials = list(rows)
    swept = [row for row in trials if not row.get("reference")]
    points = sorted(
        _points(swept, metric), key=lambda point: (cost(point), point.trial["trial_id"])
    )
    accepted = [point for point in points if point.parity <= parity_tolerance]
    if not accepted:
        return None
    close = _lowest(accepted, cost)
    lean = _lowest(close, lambda point: point.peak)
    frugal = _lowest(lean, lambda point: point.energy)
    winner = frugal[0]

    merits = ["memory"] if len(lean) < len(close) else []
    merits += ["energy"] if len(frugal) < len(lean) else []
    plain = [point for point in _points(trials, metric) if _is_plain(point)]
    better = [point for point in points if point not in accepted and cost(point) < cost(winner)]
    words = _Words(metric)
    sentences = [
        words.standing(accepted, close, merits)
        + words.value(winner)
        + words.comparison(winner, accepted[-1], min(plain, key=cost, default=None)),
        _memory_and_outcomes(winner, swept, capacity_bytes),
        words.rejection(winner, better, parity_tolerance),
        words.caution(winner, accepted),
    ]
    reason = " ".join(f"{sentence}." for sentence in sentences if sentence)
    return Recommendation(str(winner.trial["trial_id"]), winner.value, _settings(winner), reason)


def snippet(settings: Mapping[str, Any], comment: str) -> str:
    """Return settings by dotted key as nested YAML below a comment.

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
    return "\n".join([*lines, yaml.safe_dump(nested, sort_keys=False)])


def _points(rows: Sequence[Row], metric: str) -> list[_Point]:
    """Return the points with a succeeded trial that has the metric."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(canonical_json(_seedless(row)), []).append(row)
    return [point for group in groups.values() if (point := _point(group, metric)) is not None]


def _point(rows: Sequence[Row], metric: str) -> _Point | None:
    trials = sorted(
        (
            row
            for row in rows
            if row["status"] == "succeeded" and finite_or_none(row.get(metric)) is not None
        ),
        key=lambda row: str(row["trial_id"]),
    )
    if not trials:
        return None
    values = [float(row[metric]) for row in trials]
    mean = math.fsum(values) / len(values)
    energies = [finite_or_none(row.get("energy_j_per_sample")) for row in trials]
    known = [energy for energy in energies if energy is not None]
    return _Point(
        settings=_seedless(trials[0]),
        trial=min(trials, key=lambda row: abs(row[metric] - mean)),
        values=values,
        seeds=len(rows),
        value=mean,
        peak=max(peak_bytes(row) or math.inf for row in trials),
        energy=math.fsum(known) / len(known) if known else math.inf,
        parity=max(_parity(row) for row in trials),
    )


def _seedless(row: Row) -> dict[str, Any]:
    point = row.get("point") or {}
    return {key: value for key, value in point.items() if not key.endswith(".training.seed")}


def _parity(row: Row) -> float:
    """Return the largest parity; 0 without a reference, infinite if a loss was not finite."""
    parity = row.get("parity")
    if parity is None:
        return 0.0
    return math.inf if math.isnan(parity) else float(parity)


def _lowest(points: Sequence[_Point], cost: Callable[[_Point], float]) -> list[_Point]:
    """Return the points within 2 % of the lowest value; all points if no value is known."""
    least = min(cost(point) for point in points)
    if math.isinf(least):
        return list(points)
    return [point for point in points if cost(point) - least <= _TIE * abs(least)]


def _settings(point: _Point) -> dict[str, Any]:
    """Return the swept settings except the seed, with all batch sizes if one was swept."""
    keys = {f"{point.trial['trained_stage']}.training.{key}": key for key in KEYS}
    if not keys.keys() & point.settings.keys():
        return point.settings
    sizes = {key: point.trial.get(name) for key, name in keys.items()}
    return point.settings | {key: size for key, size in sizes.items() if size is not None}


def _is_plain(point: _Point) -> bool:
    trial = point.trial
    faster = trial.get("gradient_checkpointing") or trial.get("compile")
    return trial.get("precision") == "fp32" and not faster


@dataclass(frozen=True)
class _Words:
    """The parts of a reason that name the metric."""

    metric: str

    @property
    def best_worst_better(self) -> tuple[str, str, str]:
        if self.metric == "samples_per_s":
            return "fastest", "slowest", "faster"
        return "best", "worst", "better"

    def figure(self, value: float) -> str:
        text = f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"
        return f"{text} samples/s" if self.metric == "samples_per_s" else f"{self.metric} {text}"

    def standing(
        self, accepted: Sequence[_Point], close: Sequence[_Point], merits: Sequence[str]
    ) -> str:
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

    def value(self, point: _Point) -> str:
        text, measured = self.figure(point.value), len(point.values)
        if point.seeds == 1:
            return text
        number = f"{measured}" if measured == point.seeds else f"{measured} of {point.seeds}"
        if measured == 1:
            return f"{text} ({number} seeds)"
        low, high = self.figure(min(point.values)), self.figure(max(point.values))
        return f"{text} (mean of {number} seeds, from {low} to {high})"

    def comparison(self, winner: _Point, worst: _Point, plain: _Point | None) -> str:
        """Return the ratios to the worst point and to plain fp32, unless these are the winner."""
        name = f"the {self.best_worst_better[1]}"
        others = {} if worst.value == winner.value else {name: worst}
        if plain is not None and not _is_plain(winner):
            if plain.settings == worst.settings:
                others = {f"plain fp32, {name}": worst}
            else:
                others["the best in plain fp32"] = plain
        return "".join(f", {self._ratio(winner, point, name)}" for name, point in others.items())

    def _ratio(self, point: _Point, other: _Point, name: str) -> str:
        if point.value * other.value <= 0:
            return f"against {self.figure(other.value)} for {name}"
        return f"{point.value / other.value:.3g} times {name} ({self.figure(other.value)})"

    def rejection(self, winner: _Point, better: Sequence[_Point], tolerance: float) -> str:
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
        off = f"by {100 * first.parity:.3g} %" if math.isfinite(first.parity) else "beyond measure"
        return (
            f"{which} not recommended: the loss differs from fp32's {off}, "
            f"and {100 * tolerance:.3g} % are allowed"
        )

    def caution(self, winner: _Point, points: Sequence[_Point]) -> str:
        """Return the reasons to doubt a comparison of speeds."""
        if self.metric != "samples_per_s":
            return ""
        doubts = []
        spread = winner.trial.get("speed_spread")
        if spread is not None and spread > _CALM:
            doubts.append(
                f"its speed varied by {100 * spread:.0f} % while it was measured (other work on "
                "the machine, or too few steps: sweep.steps)"
            )
        if len({point.trial.get("effective_batch") for point in points}) > 1:
            doubts.append(
                "the points differ in the effective batch, which changes the training "
                "(sweep.constraints.effective_batch keeps it)"
            )
        text = "; ".join(doubts)
        return f"Mind that {text}" if text else ""


def _memory_and_outcomes(winner: _Point, swept: Sequence[Row], capacity: int | None) -> str:
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
