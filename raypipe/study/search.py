"""Search of a matrix: points proposed by Optuna from the metrics of earlier ones.

Every measured point is a row of the table ``search``, recorded before its stages start. A proposal
is a function of these rows, the seed and its number: a continued search proposes the same points as
an uninterrupted one whose points end in the same order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from optuna.trial import FrozenTrial, TrialState, create_trial

from raypipe.config.matrix import Point, point_text
from raypipe.config.search import Mode, SearchSettings
from raypipe.report.formatting import number as number_text
from raypipe.stats import on_pareto_front, ranked
from raypipe.store.ledger import Row
from raypipe.study.metric import Metric
from raypipe.study.optuna_samplers import Direction, distribution, sampler_for, study_of
from raypipe.study.point_loop import Outcome

TABLE = "search"
#: significant digits of a value of a range, and the relative width below which it keeps all
_DIGITS, _NARROW = 6, 1e-3
#: what a population's sampler stores with a trial
_GENERATION = ":generation"


@dataclass(frozen=True)
class Bound:
    """A condition on a metric."""

    metric: Metric
    at_most: float | None
    at_least: float | None

    def violations(self, value: float) -> dict[str, float]:
        """Return by how much a value breaks each bound; it meets a bound if that is 0 or less."""
        found = {}
        if self.at_most is not None:
            found[f"{self.metric.name} <= {self.at_most:g}"] = value - self.at_most
        if self.at_least is not None:
            found[f"{self.metric.name} >= {self.at_least:g}"] = self.at_least - value
        return found


@dataclass(frozen=True)
class Proposal:
    """A proposed point; ``status`` as in the table.

    ``order`` counts the points that ended before; ``attributes`` are those of Optuna's trial.
    """

    number: int
    values: Point
    status: str = "running"
    metrics: Mapping[str, float] = field(default_factory=dict)
    violations: Mapping[str, float] = field(default_factory=dict)
    order: int | None = None
    best: float | None = None
    on_front: bool = False
    message: str | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The key of its row, in the order of the proposals."""
        return f"{self.number:06}"

    @property
    def is_feasible(self) -> bool:
        """Whether it was measured and meets every condition."""
        return self.status == "succeeded" and all(v <= 0 for v in self.violations.values())


class Search:
    """The proposals of a search, and the next ones.

    Args:
        settings: the section of the configuration.
        objectives: its metrics, each with its mode.
        bounds: its constraints.
        concurrent: the number of proposals in flight.
        rows: the table ``search`` of earlier commands by key.

    """

    table = TABLE

    def __init__(
        self,
        settings: SearchSettings,
        objectives: Sequence[tuple[Metric, Mode]],
        bounds: Sequence[Bound],
        concurrent: int,
        rows: Mapping[str, Row],
    ) -> None:
        self._settings, self._concurrent = settings, concurrent
        self._objectives, self._bounds = objectives, bounds
        self._distributions = {
            key: distribution(axis) for key, axis in sorted(settings.axes.items())
        }
        #: by key, in the order in which they were asked
        self.proposals = {key: _proposal(row) for key, row in rows.items()}

    @property
    def varied(self) -> list[str]:
        """The keys in which its points differ."""
        return list(self._distributions)

    @property
    def metrics(self) -> list[Metric]:
        """The metrics to measure at each point."""
        bounded = [each.metric for each in self._bounds]
        return [*(metric for metric, _ in self._objectives), *bounded]

    @property
    def is_over(self) -> bool:
        """Whether all points were proposed and have ended."""
        return not self._running and len(self.proposals) >= self._settings.trials

    def stored(self) -> list[Proposal]:
        """Return the proposals of earlier commands; those that failed are tried again."""
        return [each for each in self.proposals.values() if each.status != "excluded"]

    def ask(self) -> list[Proposal]:
        """Return further proposals, as many as there is room for."""
        found = []
        while len(self._running) < self._concurrent and (proposal := self._propose()) is not None:
            self._put(proposal)
            found.append(proposal)
        return found

    def point(self, proposal: Proposal) -> Point:
        """Return the values of the varied keys of a proposal."""
        return proposal.values

    def tell(self, proposal: Proposal, outcome: Outcome) -> str:
        """Record how a proposal ended; return a line that says so."""
        known = self.proposals[proposal.key]
        if known.status == "succeeded":
            return ""
        ended = replace(known, order=known.order if known.order is not None else self._ended)
        values = {name: each.value for name, each in outcome.measured.items()}
        if outcome.failure is not None:
            status = "excluded" if outcome.excluded else "failed"
            ended = replace(ended, status=status, message=outcome.failure)
        elif lacking := [name for name, value in values.items() if value is None]:
            message = f"{', '.join(lacking)}: has no finite number"
            ended = replace(ended, status="failed", message=message)
        else:
            numbers = {name: float(value) for name, value in values.items() if value is not None}
            broken: dict[str, float] = {}
            for bound in self._bounds:
                broken |= bound.violations(numbers[bound.metric.name])
            ended = replace(
                ended, status="succeeded", metrics=numbers, violations=broken, message=None
            )
        self._put(ended)
        self._put(replace(ended, best=self._best()))
        self._mark_front()
        return self._text(self.proposals[ended.key])

    def rows(self) -> dict[str, Row]:
        """Return the rows of all proposals, in the order in which they were asked."""
        objectives = json.dumps({metric.name: mode for metric, mode in self._objectives})
        return {
            key: {**_row(each), "objectives": objectives} for key, each in self.proposals.items()
        }

    @property
    def _running(self) -> list[Proposal]:
        return [each for each in self.proposals.values() if each.status == "running"]

    @property
    def _ended(self) -> int:
        return sum(each.order is not None for each in self.proposals.values())

    def _put(self, proposal: Proposal) -> None:
        self.proposals[proposal.key] = proposal

    def _propose(self) -> Proposal | None:
        number = len(self.proposals)
        if number >= self._settings.trials:
            return None
        values, attributes = self._sampled(number)
        return Proposal(number, values, attributes=attributes)

    def _sampled(self, number: int) -> tuple[Point, dict[str, Any]]:
        """Return the values of a new point, and the attributes of its trial."""
        settings = self._settings
        sampler = sampler_for(settings.sampler, settings.seed, number, settings.trials)
        study = study_of(self._directions, sampler)
        if settings.sampler == "qmc":  # the sequence does not depend on the metrics
            for _ in range(number):
                study.tell(study.ask(self._distributions), [0.0] * len(self._objectives))
        else:
            study.add_trials([self._trial(self.proposals[key]) for key in sorted(self.proposals)])
        asked = study.ask(self._distributions)
        attributes = study.get_trials(deepcopy=False)[-1].system_attrs
        kept = {key: value for key, value in attributes.items() if key.endswith(_GENERATION)}
        return {key: self._rounded(key, value) for key, value in asked.params.items()}, kept

    def _rounded(self, key: str, value: Any) -> Any:
        """Return a value of a range with few digits, unless the range is narrow."""
        axis = self._settings.axes[key]
        if axis.low is None or axis.high is None or not isinstance(value, float):
            return value
        if axis.high - axis.low < _NARROW * max(abs(axis.low), abs(axis.high)):
            return value
        return min(max(float(f"{value:.{_DIGITS}g}"), float(axis.low)), float(axis.high))

    def _trial(self, proposal: Proposal) -> FrozenTrial:
        """Return a point as Optuna knows it."""
        about: dict[str, Any] = {
            "params": {key: proposal.values[key] for key in self._distributions},
            "distributions": self._distributions,
            "system_attrs": dict(proposal.attributes),
        }
        if proposal.status != "succeeded":
            state = TrialState.RUNNING if proposal.status == "running" else TrialState.FAIL
            return create_trial(state=state, **about)
        values = [proposal.metrics[metric.name] for metric, _ in self._objectives]
        broken = dict(proposal.violations) or None
        return create_trial(state=TrialState.COMPLETE, values=values, constraints=broken, **about)

    @property
    def _directions(self) -> list[Direction]:
        return ["maximize" if mode == "max" else "minimize" for _, mode in self._objectives]

    @property
    def _signs(self) -> list[int]:
        return [-1 if mode == "max" else 1 for _, mode in self._objectives]

    def _costs(self, proposals: Sequence[Proposal]) -> list[list[float]]:
        names = [metric.name for metric, _ in self._objectives]
        return [
            [sign * each.metrics[name] for name, sign in zip(names, self._signs, strict=True)]
            for each in proposals
        ]

    def _best(self) -> float | None:
        """Return the best value so far; None with several metrics or without any."""
        known = [each for each in self.proposals.values() if each.is_feasible]
        if len(self._objectives) > 1 or not known:
            return None
        return self._signs[0] * min(cost for (cost,) in self._costs(known))

    def _mark_front(self) -> None:
        """Mark the measured points that no other one dominates."""
        known = [each for each in self.proposals.values() if each.is_feasible]
        costs = self._costs(known)
        if len(self._objectives) == 1:
            places = range(len(known))
            order, ties = ranked([cost for (cost,) in costs], places, [0] * len(known), "lower")
            best = {known[place].key for place in order[:ties]}
        else:
            kept = zip(known, on_pareto_front(costs), strict=True) if known else ()
            best = {each.key for each, is_kept in kept if is_kept}
        for each in list(self.proposals.values()):
            self._put(replace(each, on_front=each.key in best))

    def _text(self, ended: Proposal) -> str:
        shown = f"search: point {ended.number + 1} of {self._settings.trials}"
        shown += f" ({point_text(ended.values)}): "
        if ended.status != "succeeded":
            return f"{shown}{ended.status} ({ended.message})"
        shown += ", ".join(f"{name} {number_text(v)}" for name, v in ended.metrics.items())
        if not ended.is_feasible:
            return f"{shown}; breaks {', '.join(k for k, v in ended.violations.items() if v > 0)}"
        if not ended.on_front or len(self._signs) > 1:
            return shown
        shared = sum(each.on_front for each in self.proposals.values()) > 1
        return shown + ("; as good as the best so far" if shared else "; the best so far")


def _row(proposal: Proposal) -> Row:
    """Return the row of a proposal: declared columns, a column per metric, and internal values."""
    return {
        "number": proposal.number,
        "point": json.dumps(proposal.values),
        "status": proposal.status,
        "feasible": proposal.is_feasible if proposal.status == "succeeded" else None,
        "on_front": proposal.on_front,
        "best": proposal.best,
        "ended": proposal.order,
        "message": proposal.message,
        **proposal.metrics,
        "violations": dict(proposal.violations),
        "metrics": dict(proposal.metrics),
        "attributes": dict(proposal.attributes),
    }


def _proposal(row: Row) -> Proposal:
    return Proposal(
        row["number"],
        json.loads(row["point"]),
        row["status"],
        row["metrics"],
        row["violations"],
        row["ended"],
        row["best"],
        row["on_front"],
        row["message"],
        row["attributes"],
    )
