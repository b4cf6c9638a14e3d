"""Search and race of a matrix: points that are chosen while it runs, from a metric of any table."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from raypipe.config.axes import AxesSettings
from raypipe.config.settings import Settings

Mode = Literal["min", "max"]
#: samplers of Optuna that need no package beyond those of raypipe
Sampler = Literal["tpe", "gp", "random"]


class ColumnSettings(Settings):
    """A number of every point: the mean of a column over the point's rows and seeds."""

    metric: str
    """Column of a table, such as `measures.macro_f1`."""
    where: dict[str, Any] = Field(default_factory=dict)
    """Values of other columns that the metric's rows have; a list allows several values."""

    @field_validator("metric")
    @classmethod
    def _table_and_column(cls, name: str) -> str:
        table, _, column = name.partition(".")
        if not table or not column or "." in column:
            raise ValueError("must have the form table.column, such as measures.macro_f1")
        return name


class MetricSettings(ColumnSettings):
    """A metric to optimize."""

    mode: Mode | None = None
    """Whether the metric is minimized or maximized; by default what the table declares."""


class BoundSettings(ColumnSettings):
    """A condition on a metric that a point has to meet to be among the best."""

    at_most: float | None = None
    """Largest value that meets the condition."""
    at_least: float | None = None
    """Smallest value that meets the condition."""

    @model_validator(mode="after")
    def _bounded(self) -> BoundSettings:
        if self.at_most is None and self.at_least is None:
            raise ValueError(f"{self.metric}: has no bound; give at_most, at_least or both")
        return self


class SearchSettings(AxesSettings):
    """Points proposed by Optuna, each from the metrics of those before it."""

    metrics: tuple[MetricSettings, ...]
    """The metric to optimize; several ask for a Pareto front."""
    constraints: tuple[BoundSettings, ...] = ()
    """Conditions that the best points meet."""
    trials: PositiveInt
    """Number of proposed points."""
    sampler: Sampler = "tpe"
    """Sampler that proposes the points."""
    concurrent: PositiveInt | None = None
    """Proposed points that are computed at the same time; by default as many as the machines have
    GPUs, or CPUs without any, and at most a quarter of `trials`.
    """
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of the sampler."""

    @model_validator(mode="after")
    def _consistent(self) -> SearchSettings:
        if not self.metrics:
            raise ValueError("metrics: none is given")
        names = [(each.metric, each.where) for each in self.metrics]
        for place, name in enumerate(names):
            if name in names[:place]:
                raise ValueError(f"metrics: {name[0]} is given twice")
        return self


class RaceSettings(MetricSettings):
    """Race of the matrix's points: seeds are added until the statistics decide."""

    alpha: float = Field(0.05, gt=0, lt=0.5)
    """Level of significance in each round."""
    first_runs: int | None = Field(None, ge=2)
    """Seeds of every point before the first test; by default the fewest with which a point can be
    dropped.
    """
    most_runs: int = Field(20, ge=2)
    """Most seeds of a point."""

    @model_validator(mode="after")
    def _consistent(self) -> RaceSettings:
        if self.first_runs is not None and self.first_runs > self.most_runs:
            raise ValueError(
                f"first_runs = {self.first_runs}: exceeds most_runs = {self.most_runs}"
            )
        return self
