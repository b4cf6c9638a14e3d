"""Tabular objective: recorded perplexities instead of fitted topic models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pandas.api.types import is_numeric_dtype

from raypipe.graph.identity import fingerprint


class TabularObjective:
    """Recorded values of the objective, looked up and interpolated.

    Between recorded T the logarithm of the value is interpolated linearly in log T (values grow to
    1e44); beyond the largest recorded T the value of that T holds.

    Args:
        table: columns dataset, seed, T and perplexity, one row for each recorded value.

    Raises:
        ValueError: a column is missing or not numeric, or a perplexity is not positive and finite.

    """

    def __init__(self, table: pd.DataFrame) -> None:
        missing = {"dataset", "seed", "T", "perplexity"} - set(table.columns)
        if missing:
            raise ValueError(f"the table of evaluations lacks the columns {sorted(missing)}")
        for name in ("seed", "T", "perplexity"):
            if not is_numeric_dtype(table[name]):
                raise ValueError(f"the table of evaluations holds a {name} that is not a number")
        if not table["perplexity"].between(0, np.inf, inclusive="neither").all():
            raise ValueError("the table of evaluations holds perplexities that are not positive")
        self._curves: dict[tuple[str, int], tuple[NDArray[np.int64], NDArray[np.float64]]] = {}
        table = table.sort_values("T")
        for dataset, seed in {*zip(table["dataset"], table["seed"], strict=True)}:
            rows = (table["dataset"] == dataset).to_numpy() & (table["seed"] == seed).to_numpy()
            points = table["T"].to_numpy(dtype=np.int64)[rows]
            values = table["perplexity"].to_numpy(dtype=np.float64)[rows]
            self._curves[str(dataset), int(seed)] = points, values

    @classmethod
    def read(cls, path: Path) -> TabularObjective:
        """Return the objective recorded in a CSV file such as ``evaluations.csv.gz``."""
        return cls(pd.read_csv(path))

    @property
    def runs(self) -> tuple[tuple[str, int], ...]:
        """The pairs (dataset, seed) that have values, ascending."""
        return tuple(sorted(self._curves))

    def fingerprint(self, dataset: str) -> str:
        """Return the hash of all recorded values of a dataset."""
        curves = [
            (seed, points.tolist(), values.tolist())
            for (name, seed), (points, values) in sorted(self._curves.items())
            if name == dataset
        ]
        return fingerprint({"dataset": dataset, "curves": curves})

    def value(self, dataset: str, seed: int, T: int) -> float:
        """Return the recorded or interpolated perplexity.

        Raises:
            ValueError: a dataset and seed without values.

        """
        points, values = self._curve(dataset, seed)
        at = int(np.searchsorted(points, T))
        if at < len(points) and points[at] == T:  # exactly as recorded
            return float(values[at])
        return float(np.exp(np.interp(np.log(T), np.log(points), np.log(values))))

    def best(self, dataset: str, seed: int) -> tuple[int, float]:
        """Return the T of the smallest recorded value, and that value."""
        points, values = self._curve(dataset, seed)
        return int(points[values.argmin()]), float(values.min())

    def _curve(self, dataset: str, seed: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        try:
            return self._curves[dataset, seed]
        except KeyError:
            raise ValueError(
                f"dataset {dataset!r}, seed {seed}: no recorded values; recorded are {self.runs}"
            ) from None


def tabular_value(
    table: TabularObjective, point: Sequence[float], seed: int, dataset: str
) -> float:
    """Return the recorded or interpolated value at a point, whose first coordinate is T."""
    return table.value(dataset, seed, int(point[0]))
