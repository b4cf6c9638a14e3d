"""Numbers that stand for a training, in the order of their importance.

The report, the comparison of a matrix and the key result of ``raypipe ls`` use the same order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from raypipe.store.tables import Column

#: names of metrics of which lower or higher is better, unless the experiment says otherwise
_LOWER = re.compile(
    r"loss|perplexity|entropy|error|regret|nll|(^|_)(mae|mse|rmse|ppl|wer|time|bytes|energy)(_|$)"
)
_HIGHER = re.compile(
    r"accuracy|(^|_)(acc|auc|auroc|bleu|f1|mfu|mrr|precision|r2|recall|rouge)(_|$)"
)
_RATE = re.compile(r"_per_s$")
#: begins the names of columns with held-out metrics
PREFIX = "eval_"
#: stands for a training without evaluations
LOSS = Column("loss_final", "real", "Training loss of the last logged step.", better="lower")
#: columns of ``trials`` that another measurement of the same trial changes; all are above 0
REPEATED = (
    *("samples_per_s", "tokens_per_s", "step_time_s", "flops_per_s", "mfu"),
    *("energy_j", "energy_j_per_sample"),
)


def better_by_name(name: str) -> str:
    """Return ``lower`` or ``higher`` as the name of a metric tells; empty if it does not."""
    if _LOWER.search(name) and not _RATE.search(name):
        return "lower"
    return "higher" if _HIGHER.search(name) or _RATE.search(name) else ""


def monitors_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the monitored columns ``eval_...`` of a configuration, with ``lower`` or ``higher``.

    Monitors are the sections that are named so; any other content of them is ignored. The metric of
    a sweep counts, too, and comes first.
    """
    found: dict[str, str] = {}
    if isinstance(sweep := settings.get("sweep"), Mapping):
        metric, mode = str(sweep.get("metric")), sweep.get("mode")
        better = {"max": "higher", "min": "lower"}.get(str(mode)) or better_by_name(metric)
        if metric.startswith(PREFIX) and better:
            found[metric] = better
    for name, value in settings.items():
        if not isinstance(value, Mapping):
            continue
        if name == "monitor" and isinstance(own := value.get("metric"), str):
            mode = {"max": "higher", "min": "lower"}.get(str(value.get("mode")))
            found[f"{PREFIX}{own}"] = mode or better_by_name(own) or "lower"
        else:
            found |= monitors_of(value)
    return found


def held_out_columns(
    names: Iterable[str],
    declared: Sequence[Column] = (),
    monitors: Mapping[str, str] = MappingProxyType({}),
) -> list[Column]:
    """Return the held-out metrics among the names of columns, the most important first.

    Monitored metrics come first, then the declared ones, then others, each time with the loss last.
    ``better`` is what is declared, else the monitor's mode, else what the name tells; it may be
    empty. Declarations of other columns are ignored.
    """
    known = {each.name: each for each in declared if each.name.startswith(PREFIX)}
    found = []
    for name in filter(lambda name: name.startswith(PREFIX), names):
        column = known.get(name, Column(name, "real", ""))
        better: Any = column.better or monitors.get(name) or better_by_name(name)
        found.append(replace(column, better=better))
    places = {name: place for place, name in enumerate([*monitors, *known])}

    def importance(column: Column) -> tuple[bool, bool, bool, int]:
        name = column.name
        is_loss, place = name == f"{PREFIX}loss", places.get(name, 0)
        return name not in monitors, name not in known, is_loss, place

    return sorted(found, key=importance)


def training_measures(
    names: Iterable[str], declared: Sequence[Column], monitors: Mapping[str, str]
) -> list[Column]:
    """Return the numbers that stand for a training, the most important first.

    They are the held-out metrics of which it is known what is better; without any, the loss.
    """
    names = list(names)
    found = [each for each in held_out_columns(names, declared, monitors) if each.better]
    return found or [each for each in (LOSS,) if each.name in names]
