"""Matrix: the points at which a whole experiment runs.

They are products and lists of values, or are chosen while it runs: by a search, or by a race.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveInt, field_validator, model_validator

from raypipe.config.axes import WITHOUT_NULL, AxesSettings, dotted, is_range, values_of
from raypipe.config.settings import Settings
from raypipe.redaction import refuse_secrets

#: ``json.dumps`` would make one for each value
_SORTED = json.JSONEncoder(sort_keys=True)
#: values of a point by dotted key
Point = dict[str, Any]

#: the axis of repetitions: run r adds ``SEED_STRIDE * r`` to every key that is named ``seed``
SEED = "seed"
SEED_STRIDE = 1000

Mode = Literal["min", "max"]
#: samplers of Optuna that need no package beyond those of raypipe
Sampler = Literal["tpe", "gp", "random"]


class MetricSettings(Settings):
    """A metric of every point: the mean of a column over the point's rows and seeds."""

    metric: str
    """Column of a table, such as `measures.macro_f1`."""
    where: dict[str, Any] = Field(default_factory=dict)
    """Values of other columns that the metric's rows have; a list allows several values."""
    mode: Mode | None = None
    """Whether the metric is minimized or maximized; by default what the table declares."""

    @field_validator("metric")
    @classmethod
    def _table_and_column(cls, name: str) -> str:
        table, _, column = name.partition(".")
        if not table or not column or "." in column:
            raise ValueError("must have the form table.column, such as measures.macro_f1")
        return name


class SearchSettings(AxesSettings):
    """Points proposed by Optuna, each from the metrics of those before it."""

    metrics: tuple[MetricSettings, ...]
    """The metric to optimize; several ask for a Pareto front."""
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
        if not self.metrics:  # a bound of the field would add a mistake to that of each metric
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
    most_runs: int = Field(20, ge=2)
    """Most seeds of a point."""


def _listed(axis: Any) -> list[Any]:
    if (values := values_of(axis)) is None:
        raise ValueError(
            "must be a list of values, a range 0..4, or {low: ..., high: ..., step: ...}"
        )
    return list(values)


Axis = Annotated[tuple[Any, ...], BeforeValidator(_listed)]


class MatrixSettings(Settings):
    """Points at which the experiment runs: ``dotted.key: [values]``, and the keys below."""

    axes: Annotated[dict[str, Axis], WITHOUT_NULL] = Field(default_factory=dict)
    """Values by dotted key, of which every combination runs: a list, integers `0..4`, or a range
    with a step; `matrix.KEY` is short for `matrix.axes.KEY`.
    """
    runs: PositiveInt | None = None
    """Repetitions of every point: run r adds 1000 x r to every key named `seed`."""
    points: tuple[dict[str, Any], ...] = ()
    """Points given one by one; each is combined with the axes."""
    exclude: tuple[dict[str, Any], ...] = ()
    """Combinations that do not run: points with all of these values."""
    search: SearchSettings | None = None
    """Points proposed one after the other; each runs at all other points."""
    race: RaceSettings | None = None
    """Comparison of the points that adds seeds until it is decided."""

    @property
    def keys(self) -> list[str]:
        """The varied keys, in the order of the configuration; ``seed`` for repetitions."""
        repeated = [SEED] if self.runs or self.race is not None else []
        return list(dict.fromkeys([*self._fixed, *repeated, *self.searched]))

    @property
    def _fixed(self) -> list[str]:
        """The keys of the axes and of the points given one by one."""
        return [*self.axes, *(key for point in self.points for key in point)]

    @property
    def searched(self) -> list[str]:
        """The keys that a search varies, in alphabetical order."""
        return [] if self.search is None else sorted(self.search.axes)

    def all_points(self, proposed: Point | None = None) -> Iterator[Point]:
        """Yield every point, without those that are excluded; each with the ``proposed`` values.

        A race repeats them.
        """
        lists = [[{key: value} for value in values] for key, values in self.axes.items()]
        lists.append(list(self.points) or [{}])
        lists.append([{SEED: run} for run in range(self.runs or 0)] or [{}])
        lists.append([proposed or {}])
        for parts in product(*lists):
            point = {key: value for part in parts for key, value in part.items()}
            if not any(_matches(point, excluded) for excluded in self.exclude):
                yield point

    @classmethod
    def spelled_out(cls, given: Any) -> Any:
        """Return the section with its axes below ``axes`` and all keys dotted."""
        if not isinstance(given, Mapping):
            return given
        known = {name: given[name] for name in cls.model_fields if name in given}
        short = {name: value for name, value in given.items() if name not in known}
        axes: Any = {} if known.get("axes") is None else known["axes"]
        if isinstance(axes, dict) and (axes or short):
            known["axes"] = type(axes)(dotted({**axes, **short}, is_range))
        for name in ("points", "exclude"):
            if isinstance(known.get(name), list | tuple):
                known[name] = [
                    dict(dotted(point, is_range)) if isinstance(point, Mapping) else point
                    for point in known[name]
                ]
        return known

    @model_validator(mode="after")
    def _consistent(self) -> MatrixSettings:
        if self.points:
            try:
                values_of(self.points)
            except ValueError as error:
                raise ValueError(f"points: {error}") from None
        refuse_secrets({key: list(values) for key, values in self.axes.items()})
        for point in self.points:
            refuse_secrets(point)
            for key in point:
                if key in self.axes:
                    raise ValueError(f"points: {key} is also an axis; give it in one of the two")
        if self.runs and SEED in self._fixed:
            raise ValueError("runs: the axis `seed` is also given; give one of the two")
        self._check_adaptive()
        for excluded in self.exclude:
            for key in excluded:
                if key not in self.keys:
                    raise ValueError(f"exclude: {key} is not varied by this matrix")
        return self

    def _check_adaptive(self) -> None:
        """Reject a search or a race that contradicts the other keys. Raises ValueError."""
        for key in self.searched:
            if is_seed(key):
                raise ValueError("search: a seed is nothing to choose; repeat points with runs")
            if key in self._fixed:
                raise ValueError(f"search: {key} is also an axis of the matrix; give it once")
        if self.race is None:
            return
        if self.search is not None:
            raise ValueError("race: cannot be combined with search; race its best points later")
        if self.runs is not None:
            raise ValueError("race: decides the number of seeds itself; leave out runs")
        if seeds := [key for key in self._fixed if is_seed(key)]:
            raise ValueError(f"race: the axis `{seeds[0]}` is also given; leave it out")


def is_seed(key: str) -> bool:
    """Whether a varied key is a seed: its values are repetitions, which are not compared."""
    return key.rpartition(".")[2] == SEED


def point_text(point: Mapping[str, Any]) -> str:
    """Return a point for a message or a table, such as ``lda.objective=nll, seed=1``."""
    return ", ".join(f"{key}={value_text(value)}" for key, value in point.items())


def value_text(value: Any) -> str:
    """Return a value as text: a plain string as it is, otherwise JSON.

    A string that reads as JSON, or as more than one value, is quoted: ``"1"`` is not ``1``.
    """
    if type(value) is int:  # most values of very many calls
        return str(value)
    is_word = isinstance(value, str) and text_value(value) is value and not set(value) & set(",=")
    return value if is_word else _SORTED.encode(value)


def text_value(text: str) -> Any:
    """Return the value of a text of ``value_text``."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _matches(point: Mapping[str, Any], part: Mapping[str, Any]) -> bool:
    """Whether a point has all values of a part; true is not 1."""
    return all(key in point and value_text(point[key]) == value_text(part[key]) for key in part)
