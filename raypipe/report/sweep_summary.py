"""Summarize a sweep: its points, and the recommended one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from raypipe.config.yaml_text import load_yaml
from raypipe.errors import ConfigError
from raypipe.report.formatting import number, with_unit
from raypipe.report.headlines import Headline, Ranked
from raypipe.report.sections import Tile
from raypipe.report.sweep_trials import SweepResults, of_stage, short
from raypipe.report.table_shape import point_label
from raypipe.store.tables import Column

Tables = Mapping[str, pd.DataFrame]

_SPEED = "samples_per_s"


def sweep_asked(swept: Sequence[SweepResults]) -> Iterator[str]:
    """Yield which settings of which stage were tried."""
    for sweep in swept:
        keys = sweep.axes
        counts = [len({repr(point.get(key)) for point in sweep.trials["point"]}) for key in keys]
        axes = [
            f"{short(key, sweep.stage)} ({count} values)"
            for key, count in zip(keys, counts, strict=True)
        ]
        fastest = (sweep.metric or _SPEED) == _SPEED and sweep.kind != "quality"
        what = "the fastest settings" if fastest else "the best settings"
        trials = f"{len(sweep.trials)} trial{'s' * (len(sweep.trials) > 1)}"
        listed = f": {', '.join(axes)}" if axes else ""
        yield f"a sweep for {what} of {sweep.stage} with {trials}{listed}"


def sweep_headlines(swept: Sequence[SweepResults]) -> Iterator[Headline]:
    """Yield the recommended point of each swept stage with the value of its metric."""
    for sweep in swept:
        if np.isfinite(sweep.value) and sweep.recommended is not None:
            better: Any = "higher" if sweep.mode == "max" else "lower"
            column = Column(sweep.metric or _SPEED, "real", "", better=better)
            axes = {key: sweep.recommended["point"].get(key) for key in sweep.axes}
            points = pd.DataFrame(list(sweep.trials["point"]))
            ranking = [Ranked(axes, sweep.value, 1)]
            yield Headline("trials", column, "", ranking, 1, np.nan, points)


def sweep_tiles(swept: Sequence[SweepResults]) -> list[Tile]:
    """Return the recommended point of each swept stage, against the worst that was measured."""
    tiles = []
    for sweep in swept:
        best = sweep.recommended
        metric = sweep.metric or _SPEED
        if best is None or metric not in sweep.trials or not np.isfinite(sweep.value):
            continue
        known = sweep.trials[metric].astype(float)
        known = known[np.isfinite(known)]
        better = "higher" if sweep.mode == "max" else "lower"
        name = "samples/s" if metric == _SPEED else metric.replace("_", " ")
        label = with_unit(f"{sweep.stage}, {name}", metric, "", better)
        worst = float(known.min() if better == "higher" else known.max())
        note = point_label({short(key, sweep.stage): best["point"].get(key) for key in sweep.axes})
        if len(known) > 1:
            word = "slowest" if metric == _SPEED else "worst"
            note += f"; {word} of {len(known)}: {number(worst)}"
        tiles.append(Tile(label, number(sweep.value), note))
    return tiles


def sweep_certainty(tables: Tables, swept: Sequence[SweepResults]) -> Iterator[str]:
    """Yield how far the recommended point of each sweep varied; its section has the reason."""
    for sweep in swept:
        table = of_stage(tables, "recommendations", sweep.stage)
        if table.empty:
            continue
        low, high = table.iloc[0].get("value_low"), table.iloc[0].get("value_high")
        if pd.notna(low) and pd.notna(high) and low < high:
            text = f"{number(float(low))} to {number(float(high))}"
            yield f"{sweep.stage}: the recommended point was measured at {text}."
        else:
            yield f"{sweep.stage}: each point was measured once, so there is no range."


def recommended_settings(tables: Tables, sweep: SweepResults) -> dict[str, Any]:
    """Return the recommended settings by dotted key; empty if there are none."""
    table = of_stage(tables, "recommendations", sweep.stage)
    snippet = None if table.empty else table.iloc[0].get("snippet")
    if not isinstance(snippet, str):
        return {}
    try:
        found = load_yaml(snippet, "recommendations")
    except ConfigError:
        return {}
    return dict(_flat(found, "")) if isinstance(found, Mapping) else {}


def _flat(settings: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
