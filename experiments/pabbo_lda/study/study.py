"""One study: an optimiser, its budget and its history, with no clock and no processes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from experiments.pabbo_lda.optimizers import Optimizer, Point

PATIENCE = 20


@dataclass(frozen=True)
class Evaluation:
    """One distinct point of a study, with the best finite value up to it.

    ``batch`` is 0 for the start, then counts the optimiser's batches. ``best_point`` is None and
    ``best_value`` infinite as long as no value was finite.
    """

    evaluation: int
    batch: int
    point: Point
    value: float
    best_point: Point | None
    best_value: float


class Study:
    """Asks an optimiser for batches and tells it the values once all of a batch are there.

    The budget counts distinct points, the start included. The study ends at its budget, after
    ``iterations`` batches, when its optimiser asks for nothing, or after 20 batches in a row
    without a new point. The order in which values arrive changes nothing, and neither does the
    budget but in where the history ends: the optimiser never learns it, so a study continues under
    a larger one by replaying its known values.

    Args:
        optimizer: a fresh optimiser, used by this study alone.
        start: the points every optimiser is told first; repeated ones count once.
        budget: distinct points, at least 1. Of a longer start only the first ``budget`` are
            evaluated.
        iterations: the most batches after the start.

    Raises:
        ValueError: for a budget below 1 or negative iterations.

    """

    def __init__(
        self,
        optimizer: Optimizer,
        start: Sequence[Point],
        budget: int,
        iterations: int | None = None,
    ) -> None:
        if budget < 1:
            raise ValueError(f"the budget of a study must be at least 1, not {budget}")
        if iterations is not None and iterations < 0:
            raise ValueError(f"the iterations of a study cannot be negative: {iterations}")
        self._optimizer = optimizer
        self._budget = budget
        self._iterations = iterations
        self._values: dict[Point, float] = {}
        self._history: list[Evaluation] = []
        self._batch = 0
        self._asked: list[Point] = []
        self._waiting: list[Point] = []
        self._total_asked = 0
        self._idle = 0
        self._done = False
        self._open(start)
        self._advance()

    @property
    def done(self) -> bool:
        """True once no further value is needed."""
        return self._done

    @property
    def history(self) -> tuple[Evaluation, ...]:
        """One row a distinct point, in the order asked; the rows of a batch appear together."""
        return tuple(self._history)

    @property
    def asked(self) -> int:
        """How many points complete batches have asked for, the start and repeated ones counted."""
        return self._total_asked

    @property
    def best(self) -> tuple[Point, float] | None:
        """The point of the smallest finite value and that value; None while there is none."""
        if not self._history or self._history[-1].best_point is None:
            return None
        return self._history[-1].best_point, self._history[-1].best_value

    def request(self) -> list[Point]:
        """The distinct points whose values are needed now, in the order asked; empty when done."""
        return [point for point in self._waiting if point not in self._values]

    def supply(self, point: Point, value: float) -> None:
        """Give the value of a requested point; the last one of a batch moves the study on.

        Raises:
            ValueError: for a point that is not requested now.

        """
        if point in self._values or point not in self._waiting:
            waiting = "; ".join(map(str, self.request())) or "nothing"
            raise ValueError(f"{point} is not requested by this study; it waits for {waiting}")
        self._values[point] = float(value)
        self._advance()

    def _open(self, asked: Sequence[Point]) -> None:
        """Make ``asked`` the current batch, cut to what the budget leaves."""
        self._asked = list(asked)
        new = [point for point in dict.fromkeys(self._asked) if point not in self._values]
        self._waiting = new[: self._budget - len(self._values)]

    def _advance(self) -> None:
        while not self._done and not self.request():
            self._record()
            if len(self._values) >= self._budget:
                self._done = True
                return
            self._optimizer.tell(self._asked, [self._values[point] for point in self._asked])
            if self._idle >= PATIENCE or self._batch == self._iterations:
                self._done = True
                return
            asked = self._optimizer.ask()
            if not asked:
                self._done = True
                return
            self._batch += 1
            self._open(asked)

    def _record(self) -> None:
        """Add the complete batch to the history."""
        self._idle = 0 if self._waiting else self._idle + 1
        # A batch that the budget has cut ends at its first unknown T.
        unknown = (index for index, point in enumerate(self._asked) if point not in self._values)
        self._total_asked += next(unknown, len(self._asked))
        best = self.best
        for point in self._waiting:
            value = self._values[point]
            if math.isfinite(value) and (best is None or value < best[1]):
                best = (point, value)
            best_point, best_value = best if best is not None else (None, math.inf)
            self._history.append(
                Evaluation(
                    len(self._history) + 1, self._batch, point, value, best_point, best_value
                )
            )
        self._waiting = []
