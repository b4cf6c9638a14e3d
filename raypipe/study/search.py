"""Search of a matrix: points proposed by Optuna from the metrics of earlier ones.

Every measured point is a row of the table ``search``, recorded before its stages start. A proposal
is a function of these rows, the seed and its number: a continued search proposes the same points as
an uninterrupted one whose points end in the same order.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from optuna.trial import FrozenTrial, TrialState, create_trial
from pydantic import BaseModel

from raypipe.config.matrix import MatrixSettings, Point, SearchSettings, point_text
from raypipe.config.validation import dig
from raypipe.errors import ConfigError
from raypipe.graph.configuration import Configuration
from raypipe.hardware import Hardware
from raypipe.report.formatting import number as number_text
from raypipe.report.results import monitors_of
from raypipe.stats import finite_or_none, on_pareto_front, ranked
from raypipe.store.ledger import Ledger, Row
from raypipe.store.tables import COMMAND_ID, Table
from raypipe.study.loop import Outcome, Source
from raypipe.study.metric import Metric, cost, metric_of
from raypipe.study.placement import BuiltPoint, Placement
from raypipe.study.space import distribution, draw, optuna_study, rounded, sampler_for

#: points at which a value of an axis is tried before it counts as impossible
_TRIES = 8


class Search(Source):
    """The proposals of a search by key, in the order in which they were asked.

    Args:
        settings: the section of the configuration.
        metrics: its metrics.
        concurrent: the number of proposals in flight.
        rows: the table ``search`` of earlier commands by key.
        combine: returns the points of the matrix at which a proposal runs.

    """

    table = "search"

    def __init__(
        self,
        settings: SearchSettings,
        metrics: Sequence[Metric],
        concurrent: int,
        rows: Mapping[str, Row],
        combine: Callable[[Point], Iterable[Point]] = lambda point: [point],
    ) -> None:
        fixed = list(combine({}))
        text = f"search: at most {settings.trials} points by {settings.sampler}"
        text += f", each at {len(fixed)} points of the matrix" if len(fixed) > 1 else ""
        super().__init__(fixed, text, is_compared=False)
        self._settings, self._concurrent, self._combine = settings, concurrent, combine
        self.varied, self.metrics = list(settings.axes), metrics
        self._distributions = {key: distribution(settings.axes[key]) for key in sorted(self.varied)}
        self._rows = {key: dict(row) for key, row in rows.items()}
        for row in self._rows.values():  # a result is of the command that measures it
            row.pop(COMMAND_ID.name, None)
        #: of earlier commands; those that failed are tried again
        self._left = [key for key, row in rows.items() if row["status"] != "excluded"]
        plain = settings.model_dump(mode="json", exclude={"trials", "concurrent"})
        modes = [metric.mode for metric in metrics]
        self.decisive = {**plain, "points": fixed, "modes": modes}

    @property
    def is_over(self) -> bool:
        """Whether all points were proposed and have ended."""
        return not self._left and not self._running and len(self._rows) >= self._settings.trials

    def ask(self) -> list[str]:
        """Return the keys of further proposals, as many as there is room for."""
        found, self._left = self._left, []
        while self._running < self._concurrent and len(self._rows) < self._settings.trials:
            number = len(self._rows)
            key = f"{number:06}"
            found.append(key)
            self._rows[key] = {
                **{"number": number, "point": json.dumps(self._sampled(number))},
                **{"status": "running", "on_front": False},
                **{"ended": None, "message": None, "metrics": {}},
            }
        return found

    def points(self, asked: str) -> Iterable[Point]:
        """Return a proposal at all points of the matrix."""
        return self._combine(json.loads(self._rows[asked]["point"]))

    def tell(self, asked: str, outcome: Outcome) -> str:
        """Record how a proposal ended; return a line that says so."""
        row = self._rows[asked]
        if row["status"] == "succeeded":
            return ""
        if row["ended"] is None:
            row["ended"] = sum(each["ended"] is not None for each in self._rows.values())
        values = {name: finite_or_none(each) for name, each in outcome.measured.items()}
        lacking = ", ".join(name for name, value in values.items() if value is None)
        message = outcome.failure or (f"{lacking}: has no finite number" if lacking else None)
        row |= {"status": "excluded" if outcome.excluded else "failed", "message": message}
        text = f"{row['status']} ({message})"
        if message is None:
            row |= {**values, "status": "succeeded", "metrics": values}
            text = ", ".join(f"{name} {number_text(v)}" for name, v in row["metrics"].items())
        self._rank()
        if message is None and row["on_front"] and len(self.metrics) == 1:
            is_shared = sum(each["on_front"] for each in self._rows.values()) > 1
            text += "; as good as the best so far" if is_shared else "; the best so far"
        place = f"{row['number'] + 1} of {self._settings.trials}"
        return f"search: point {place} ({point_text(json.loads(row['point']))}): {text}"

    def rows(self) -> Mapping[str, Row]:
        """Return the rows of all proposals, in the order in which they were asked."""
        objectives = json.dumps({metric.name: metric.mode for metric in self.metrics})
        return {key: {**row, "objectives": objectives} for key, row in self._rows.items()}

    def expected(self) -> Iterator[Point]:
        """Yield the points of known proposals, and of drawn ones in place of those to come."""
        for key, row in self._rows.items():
            if row["status"] != "excluded":
                yield from self.points(key)
        for number in range(len(self._rows), self._settings.trials):
            yield from self._combine(draw(self._settings.axes, self._settings.seed, number))

    @property
    def _running(self) -> int:
        return sum(row["status"] == "running" for row in self._rows.values())

    def _sampled(self, number: int) -> Point:
        """Return the values of a new point."""
        settings = self._settings
        sampler = sampler_for(settings.sampler, settings.seed, number)
        study = optuna_study(
            ["maximize" if each.mode == "max" else "minimize" for each in self.metrics], sampler
        )
        study.add_trials([self._trial(row) for _, row in sorted(self._rows.items())])
        params = study.ask(self._distributions).params
        return {key: rounded(settings.axes[key], value) for key, value in params.items()}

    def _trial(self, row: Row) -> FrozenTrial:
        """Return a proposal as Optuna knows it."""
        states = {"running": TrialState.RUNNING, "succeeded": TrialState.COMPLETE}
        return create_trial(
            state=states.get(row["status"], TrialState.FAIL),
            values=[row["metrics"][m.name] for m in self.metrics if row["metrics"]] or None,
            params=json.loads(row["point"]),
            distributions=self._distributions,
        )

    def _rank(self) -> None:
        """Mark the measured points that no other dominates."""
        known = [row for row in self._rows.values() if row["metrics"]]
        costs = [
            [cost(row["metrics"][metric.name], metric.mode) for metric in self.metrics]
            for row in known
        ]
        for row, is_kept in zip(known, on_pareto_front(costs), strict=True):
            row["on_front"] = bool(is_kept)
        if len(self.metrics) > 1:
            return
        order, ties = ranked([c for (c,) in costs], range(len(known)), [0] * len(known), "lower")
        for place in order[:ties]:  # as good up to rounding
            known[place]["on_front"] = True


def search_of(
    configuration: Configuration,
    matrix: MatrixSettings,
    tables: Mapping[str, Table],
    nodes: Sequence[Hardware],
    values: BaseModel,
) -> Callable[[Ledger | None], Search]:
    """Return what makes the search of a matrix from the rows of a ledger.

    ``values`` are the settings of a point, which tell the type of each key.

    Raises:
        ConfigError: a table or column that does not exist.

    """
    where, settings = f"{configuration.origin}: matrix.search", matrix.search
    if settings is None:
        raise ValueError("the matrix has no search")
    at, monitors = f"{where}.metrics", monitors_of(configuration.settings.model_dump())
    metrics = [metric_of(each, tables, at, monitors) for each in settings.metrics]
    plain, axes = values.model_dump(), dict(settings.axes)
    for key, axis in axes.items():  # `low: 1` of a key of real numbers
        if axis.values is None and isinstance(dig(plain, *key.split(".")), float):
            low, high = map(float, axis.ends)
            axes[key] = axis.model_copy(update={"low": low, "high": high})
    typed = settings.model_copy(update={"axes": axes})
    devices = sum(len(node.gpus) for node in nodes) or sum(node.cpus for node in nodes)
    at_once = math.ceil(devices / len(list(matrix.all_points())))
    concurrent = settings.concurrent or max(1, min(at_once, settings.trials // 4))

    def search(ledger: Ledger | None) -> Search:
        rows = {} if ledger is None else dict(ledger.items(Search.table))
        return Search(typed, metrics, concurrent, rows, matrix.all_points)

    return search


def probes(settings: SearchSettings, fixed: Point, placement: Placement) -> Iterator[BuiltPoint]:
    """Yield points that show on which keys each stage depends, and that the axes are possible.

    They are the ends and two draws of each axis at a point of the matrix. A value that is
    impossible there is tried with drawn values of other axes.

    Raises:
        ConfigError: a key that does not exist, or a value that is possible at no point tried.

    """
    draws = [draw(settings.axes, settings.seed, number) for number in range(_TRIES)]
    for key, axis in sorted(settings.axes.items()):
        ends = axis.ends if axis.values is None else axis.values
        for value in (*ends, *(drawn[key] for drawn in draws[:2])):
            errors: list[ConfigError] = []
            for others in ({}, *draws):
                try:
                    built = placement.build({**fixed, **others, key: value}, "matrix.search")
                except ConfigError as error:
                    errors.append(error)
                    continue
                yield built
                break
            else:
                raise errors[0]
