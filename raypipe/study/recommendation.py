"""Recommendation of a sweep: the best point as settings and YAML, with the reason in two lines."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from statistics import fmean
from typing import Any, NamedTuple

from raypipe.config.matrix import Mode
from raypipe.config.validation import nested
from raypipe.config.yaml_text import dump_yaml
from raypipe.errors import named
from raypipe.graph.identity import canonical_json
from raypipe.report.formatting import number, percent
from raypipe.report.results import medians
from raypipe.stats import finite_or_none
from raypipe.store.ledger import Row
from raypipe.study.metric import cost
from raypipe.study.space import seedless, shown

#: from the most to the least exact
_PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
#: largest relative difference of the loss to fp32's of a point that is recommended
_PARITY = 0.02
#: tied points that a reason lists at most; the table ``trials`` has all
_LISTED = 3


class Recommendation(NamedTuple):
    """A point: the trials that repeat each other or differ in the seed only.

    ``value`` is the mean over seeds of the medians of their measurements, which are from ``low`` to
    ``high``; ``of`` says of how many, and is empty for one. ``trial`` is the one nearest to it.
    ``differs`` says that the loss of a seed differs too much from fp32's.
    """

    settings: dict[str, Any]
    trial: Row
    value: float
    low: float
    high: float
    of: str
    differs: bool
    reason: str = ""

    @property
    def simplicity(self) -> tuple[int, int]:
        """The place of its precision, the most exact first, and what a plain training lacks."""
        precision = self.trial.get("precision")
        place = _PRECISIONS.index(precision) if precision in _PRECISIONS else len(_PRECISIONS)
        extras = sum(bool(self.trial.get(key)) for key in ("gradient_checkpointing", "compile"))
        return place, extras


def recommend(rows: Iterable[Row], metric: str, mode: Mode) -> Recommendation | str:
    """Return the best point, or why none is recommended.

    Points whose ranges overlap the best one's are tied with it: the most exact precision wins, then
    the fewest extras, then the better value. The order of the rows does not matter. A point whose
    ``parity`` (relative loss difference to fp32) is too large in any seed is not recommended.

    Args:
        rows: the trials of one sweep.
        metric: the column to compare; rows without a finite value are ignored.
        mode: whether more or less of it is better.

    """
    swept = list(rows)
    points = _points(swept, metric)
    points.sort(key=lambda point: (cost(point.value, mode), point.trial["trial_id"]))
    accepted = [point for point in points if not point.differs]
    tolerance = f"the loss differs from fp32's by more than {percent(_PARITY)}"
    if not accepted:
        if points:
            return f"of every point {tolerance}"
        if "succeeded" not in {row["status"] for row in swept}:
            return "no point succeeded"
        return f"no point has a finite {metric} in each of its measurements"
    best = accepted[0]
    tied = [point for point in accepted if point.low <= best.high and best.low <= point.high]
    winner = min(tied, key=lambda point: point.simplicity)

    first = f"The best of {len(accepted)} points"
    if len(tied) > 1:
        listed = [f"{shown(each.settings)} {_figure(metric, each)}" for each in tied]
        first = f"The simplest of {len(tied)} points that are tied for the best of {len(accepted)}"
        first += f", as their ranges overlap ({named(listed, _LISTED)})"
    first += f": {_figure(metric, winner)}"
    if winner.of:
        first += f" ({winner.of}, {number(winner.low)} to {number(winner.high)})"
    rejected = sum(point.differs for point in points[: points.index(winner)])
    ended = Counter(row["status"] for row in medians(swept))
    total = ended.total()
    del ended["succeeded"]
    lost = [f"{count} {status}" for status, count in sorted(ended.items())]
    sizes = {point.trial.get("effective_batch") for point in accepted}
    is_asked = any(key.endswith(".effective_batch") for key in winner.settings)
    history = winner.trial.get("settings_history")
    remarks = {
        f"of {total} trials {', '.join(lost).replace('_', ' ')}": lost,
        f"{rejected} better rejected, as {tolerance}": rejected,
        "its settings changed during the training (trials.settings_history), so that no single "
        f"value has led to its model, {winner.trial['trial_id']}": history,
        "the points differ in the effective batch, which changes the training "
        "(sweep.constraints.effective_batch keeps it)": len(sizes) > 1 and not is_asked,
    }
    text = "; ".join(remark for remark, holds in remarks.items() if holds)
    reason = f"{first}." + (f"\n{text[:1].upper()}{text[1:]}." if text else "")
    return winner._replace(reason=reason)


def snippet(settings: Mapping[str, Any], comment: str = "") -> str:
    """Return settings by dotted key as nested YAML, below a comment if there is one."""
    # a list shared by two keys would become a YAML alias
    sections = nested({key: deepcopy(value) for key, value in settings.items()})
    plain = " ".join(comment.split())  # any line break would end the comment
    lines = textwrap.wrap(plain, initial_indent="# ", subsequent_indent="# ")
    return "\n".join([*lines, dump_yaml(sections)])


def peak_bytes(row: Row) -> int | None:
    """Return the peak memory of a trial: its GPU's, on a CPU the host's; None if unknown."""
    name = "host_peak_bytes" if row.get("device") == "cpu" else "gpu_peak_bytes"
    peak = finite_or_none(row.get(name))
    return int(peak) if peak else None


def _points(rows: Sequence[Row], metric: str) -> list[Recommendation]:
    """Return the points with a trial that has the metric and whose measurements all succeeded.

    Their settings lack the seed, and those that changed during a trial.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        # of trials whose settings have changed none is another one's point
        own = row["trial_id"] if row.get("settings_history") else ""
        key = canonical_json(seedless(row["point"]))
        groups.setdefault(key + own, []).append(row)
    found = []
    for group in groups.values():
        seeds = medians(group)
        trials = [row for row in seeds if row["status"] == "succeeded" and _finite([row], metric)]
        if not trials:
            continue
        measured = _finite((row for row in group if row["status"] == "succeeded"), metric)
        mean = fmean(float(row[metric]) for row in trials)
        first, *_ = trials
        point, changed = seedless(first["point"]), first.get("settings_history")
        parities = [row["parity"] for row in trials if row.get("parity") is not None]
        of = f"median of {len(group)}" if len(group) > 1 else ""
        if (count := len(seeds)) > 1:
            of = f"mean of {count if len(trials) == count else f'{len(trials)} of {count}'} seeds"
        found.append(
            Recommendation(
                settings={k: v for k, v in point.items() if v is not None or not changed},
                trial=min(trials, key=lambda row: (abs(row[metric] - mean), row["trial_id"])),
                value=mean,
                low=min(measured),
                high=max(measured),
                of=of,
                differs=not all(parity <= _PARITY for parity in parities),  # so does NaN
            )
        )
    return found


def _finite(rows: Iterable[Row], column: str) -> list[float]:
    values = (finite_or_none(row.get(column)) for row in rows)
    return [value for value in values if value is not None]


def _figure(metric: str, point: Recommendation) -> str:
    """Return the value of a point with its unit or name."""
    text = number(point.value)
    return f"{text} samples/s" if metric == "samples_per_s" else f"{metric} {text}"
