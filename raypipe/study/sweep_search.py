"""Adaptive search: points proposed by a sampler of Optuna."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from optuna.samplers import BaseSampler
from optuna.trial import TrialState, create_trial

from raypipe.store.ledger import Row
from raypipe.study.objective import Objective
from raypipe.study.optuna_samplers import distribution, sampler_for, study_of
from raypipe.study.trials import Trial, TrialMaker


class SweepSearch:
    """Points proposed by Optuna's tree-structured Parzen estimator.

    A proposal depends on the seed, its number and the values reported so far. A continued search
    therefore proposes the same points as an uninterrupted one if trials end in the same order.
    ``objective`` is minimized or maximized.
    ``name`` is the name of this search in its rows; ``rows`` are those of earlier commands.
    """

    def __init__(
        self, maker: TrialMaker, objective: Objective, name: str, rows: Iterable[Row]
    ) -> None:
        self._maker, self._objective, self._name = maker, objective, name
        self._distributions = {
            maker.key(key): distribution(axis) for key, axis in maker.sweep.axes.items()
        }
        self._study = study_of(["minimize"], self._sampler_of(0))
        self._numbers: dict[str, int] = {}
        for row in sorted(rows, key=lambda row: (row["number"], row["trial_id"])):
            cost = self._cost(row)
            self._numbers[row["trial_id"]] = self._asked
            self._study.add_trial(
                create_trial(
                    params=row["point"],
                    distributions=self._distributions,
                    value=cost,
                    state=_state(cost),
                )
            )

    @property
    def total(self) -> int:
        """The number of proposals, those of earlier commands included."""
        return self._maker.sweep.samples

    @property
    def is_over(self) -> bool:
        """Whether all points were proposed."""
        return self._asked >= self.total

    def ask(self) -> Trial | None:
        """Return the next trial that the constraints allow; None at the end."""
        while not self.is_over:
            if (trial := self._ask()) is not None:
                return trial
        return None

    @property
    def _asked(self) -> int:
        return len(self._study.get_trials(deepcopy=False))

    def _ask(self) -> Trial | None:
        self._study.sampler = self._sampler_of(self._asked)
        asked = self._study.ask(self._distributions)
        trial = self._maker.trial(dict(asked.params))
        if trial is None or trial.unit.key in self._numbers:
            again = None if trial is None else self._numbers[trial.unit.key]
            known = None if again is None else self._study.get_trials(deepcopy=False)[again].value
            self._study.tell(asked.number, known, _state(known))
            return None
        self._numbers[trial.unit.key] = asked.number
        return trial

    def _sampler_of(self, number: int) -> BaseSampler:
        return sampler_for("tpe", self._maker.sweep.seed, number, self.total)

    def tell(self, trial: Trial, row: Row | None) -> None:
        """Record the outcome of a trial."""
        cost = None if row is None else self._cost(row)
        number = self._numbers[trial.unit.key]
        # a trial of an earlier command keeps the value reported then
        self._study.tell(number, cost, _state(cost), skip_if_finished=True)

    def about(self, trial: Trial) -> dict[str, Any]:
        """Return the columns that place a trial in the search."""
        return {"search": self._name, "number": self._numbers[trial.unit.key]}

    def _cost(self, row: Row) -> float | None:
        if row["status"] not in ("succeeded", "interrupted"):
            return None
        return self._objective.cost(row)


def _state(cost: float | None) -> TrialState:
    return TrialState.FAIL if cost is None else TrialState.COMPLETE
