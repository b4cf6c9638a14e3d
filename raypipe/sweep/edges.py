"""Axes of a sweep whose best value is the last of those that were tried."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from raypipe.config.axes import Value
from raypipe.config.edges import edge_of_axis, possible
from raypipe.errors import ConfigError
from raypipe.sweep.trials import TrialMaker


def edge_remarks(maker: TrialMaker, best: Mapping[str, Value]) -> Iterator[tuple[str, str]]:
    """Yield each axis at whose end the best point lies, and what to try beyond it.

    Values that the configuration, a constraint or the hardware rejects are not proposed.
    """
    for name, axis in maker.sweep.axes.items():
        key = maker.key(name)
        if key not in best:
            continue

        def allows(value: Any, key: str = key) -> bool:
            try:
                trial = maker.trial({**best, key: value})
            except ConfigError:
                return False
            return trial is not None and trial.lacks is None

        if (edge := possible(edge_of_axis(axis, best[key]), allows)) is not None:
            short = key.removeprefix(f"{maker.sweep.stage}.")
            yield short, edge.remark(short, f"sweep.axes.{name}")
