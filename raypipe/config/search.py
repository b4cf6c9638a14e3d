"""Search and race of a matrix: points that are chosen while it runs, from a metric of any table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import Field, PositiveInt, field_validator, model_validator

from raypipe.config.axes import AxisSettings, dotted_axes, without_dropped
from raypipe.config.settings import Settings
from raypipe.config.validation import did_you_mean

Mode = Literal["min", "max"]
#: samplers of Optuna that need no package beyond those of raypipe
Sampler = Literal["tpe", "gp", "random", "qmc", "nsgaii", "nsgaiii"]

_METRIC = "Column of a table, such as `measures.macro_f1`."
_WHERE = "Values of other columns that the metric's rows have; a list allows several values."
_MODE = "Whether the metric is minimized or maximized; by default what the table declares."


def _table_and_column(name: str) -> str:
    table, _, column = name.partition(".")
    if not table or not column or "." in column:
        raise ValueError("must have the form table.column, such as measures.macro_f1")
    return name


class MetricSettings(Settings):
    """A number of every point: the mean of a column over the point's rows and seeds."""

    metric: str = Field(description=_METRIC)
    where: dict[str, Any] = Field(default_factory=dict, description=_WHERE)
    mode: Mode | None = Field(None, description=_MODE)

    _form = field_validator("metric")(_table_and_column)


class BoundSettings(Settings):
    """A condition on a metric that a point has to meet to be among the best."""

    metric: str = Field(description=_METRIC)
    where: dict[str, Any] = Field(default_factory=dict, description=_WHERE)
    at_most: float | None = None
    """Largest value that meets the condition."""
    at_least: float | None = None
    """Smallest value that meets the condition."""

    _form = field_validator("metric")(_table_and_column)

    @model_validator(mode="after")
    def _bounded(self) -> BoundSettings:
        if self.at_most is None and self.at_least is None:
            raise ValueError(f"{self.metric}: has no bound; give at_most, at_least or both")
        return self


class SearchSettings(Settings):
    """Points proposed by Optuna, each from the metrics of those before it."""

    axes: dict[str, AxisSettings] = Field(min_length=1)
    """Values by key: a range `{low: ..., high: ..., log: true}`, or a list of values."""
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

    @classmethod
    def spelled_out(cls, given: Any) -> Any:
        """Return ``axes`` with dotted keys and lists, as on the command line and in files."""
        if isinstance(given, Mapping) and isinstance(given.get("axes"), Mapping):
            return {**given, "axes": type(given["axes"])(dotted_axes(given["axes"]))}
        return given

    _present = field_validator("axes", mode="before")(without_dropped)

    @field_validator("sampler", mode="before")
    @classmethod
    def _known(cls, name: Any) -> Any:
        if name not in get_args(Sampler):
            near = did_you_mean(str(name), get_args(Sampler))
            raise ValueError(f"unknown sampler{near} (there are: {', '.join(get_args(Sampler))})")
        return name

    @model_validator(mode="after")
    def _consistent(self) -> SearchSettings:
        if not self.metrics:
            raise ValueError("metrics: none is given")
        names = [(each.metric, each.where) for each in self.metrics]
        for place, name in enumerate(names):
            if name in names[:place]:
                raise ValueError(f"metrics: {name[0]} is given twice")
        return self


class RaceSettings(Settings):
    """Race of the matrix's points: seeds are added until the statistics decide."""

    metric: str = Field(description=_METRIC)
    where: dict[str, Any] = Field(default_factory=dict, description=_WHERE)
    mode: Mode | None = Field(None, description=_MODE)
    alpha: float = Field(0.05, gt=0, lt=0.5)
    """Level of significance in each round."""
    first_runs: int | None = Field(None, ge=2)
    """Seeds of every point before the first test; by default the fewest with which a point can be
    dropped.
    """
    most_runs: int = Field(20, ge=2)
    """Most seeds of a point."""

    _form = field_validator("metric")(_table_and_column)

    @property
    def objective(self) -> MetricSettings:
        """The metric of the race."""
        return MetricSettings(metric=self.metric, where=self.where, mode=self.mode)

    @model_validator(mode="after")
    def _consistent(self) -> RaceSettings:
        if self.first_runs is not None and self.first_runs > self.most_runs:
            raise ValueError(
                f"first_runs = {self.first_runs}: exceeds most_runs = {self.most_runs}"
            )
        return self
