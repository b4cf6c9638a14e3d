"""Study: one optimizer with its budget and its history, without a clock and without processes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from experiments.pabbo_lda.optimizers import Optimizer
from experiments.pabbo_lda.space import Point

PATIENCE = 20


@dataclass(frozen=True)
class Evaluation:
    """One distinct point of a study, with the best finite value so far.

    ``batch`` is 0 for the start and then counts the optimizer's batches. ``best_point`` is None
    and ``best_value`` infinite while no value was finite.
    """

    evaluation: int
    batch: int
    point: Point
    value: float
    best_point: Point | None
    best_value: float


class HistoryMismatchError(ValueError):
    """The optimizer does not propose the points of the recorded history."""


class Study:
    """Ask an optimizer for batches, and tell it the values once a batch is complete.

    The budget counts distinct points, including the start. The study ends at its budget, after
    ``iterations`` batches, when its optimizer asks for nothing, or after 20 batches in a row
    without a new point. The order in which values arrive does not matter. The budget only decides
    where the history ends: the optimizer does not know it, so a study continues under a larger
    budget by replaying its known values.

    Args:
        optimizer: a fresh optimizer, used by this study alone.
        start: the first points of every optimizer; repeated ones count once.
        budget: the number of distinct points, at least 1. Of a longer start only the first
            ``budget`` are evaluated.
        iterations: the maximum number of batches after the start.
        recorded: the points of the stored history that the study replays.

    Raises:
        HistoryMismatchError: the study proposes other points than the recorded ones; also raised
            by ``supply``.

    """

    def __init__(
        self,
        optimizer: Optimizer,
        start: Sequence[Point],
        budget: int,
        iterations: int | None = None,
        recorded: Sequence[Point] = (),
    ) -> None:
        self._optimizer = optimizer
        self._budget = budget
        self._iterations = iterations
        self._recorded = recorded[:budget]
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
        """Whether no further value is needed."""
        return self._done

    @property
    def evaluated(self) -> int:
        """The number of distinct points with a value, those of an incomplete batch included."""
        return min(len(self._values), self._budget)

    @property
    def history(self) -> tuple[Evaluation, ...]:
        """One row per distinct point, in the order asked; the rows of a batch appear together."""
        return tuple(self._history)

    @property
    def asked(self) -> int:
        """The number of points in complete batches, including the start and repeated points."""
        return self._total_asked

    @property
    def best(self) -> tuple[Point, float] | None:
        """The point of the smallest finite value and that value; None while there is none."""
        if not self._history or self._history[-1].best_point is None:
            return None
        return self._history[-1].best_point, self._history[-1].best_value

    def request(self) -> list[Point]:
        """Return the distinct points whose values are needed now, in the order asked."""
        return [point for point in self._waiting if point not in self._values]

    def supply(self, point: Point, value: float) -> None:
        """Set the value of a requested point; the last one of a batch opens the next batch.

        Raises:
            ValueError: the point is not requested now.
            HistoryMismatchError: the next batch is not the recorded one.

        """
        if point in self._values or point not in self._waiting:
            waiting = "; ".join(map(str, self.request())) or "nothing"
            raise ValueError(f"{point} is not requested by this study; it waits for {waiting}")
        self._values[point] = float(value)
        self._advance()

    def _open(self, asked: Sequence[Point]) -> None:
        """Make ``asked`` the current batch, cut to the remaining budget."""
        self._asked = list(asked)
        new = [point for point in dict.fromkeys(self._asked) if point not in self._values]
        self._waiting = new[: self._budget - len(self._values)]
        for number, point in enumerate(self._waiting, len(self._values)):
            if number < len(self._recorded) and point != self._recorded[number]:
                raise HistoryMismatchError(self._mismatch(f"proposed {point}", number))

    def _advance(self) -> None:
        while not self._done and not self.request():
            self._record()
            self._done = len(self._values) >= self._budget or not self._ask()
        if self._done and len(self._values) < len(self._recorded):
            raise HistoryMismatchError(self._mismatch("proposed nothing", len(self._values)))

    def _ask(self) -> bool:
        """Tell the values of the complete batch and open the next one; False if there is none."""
        self._optimizer.tell(self._asked, [self._values[point] for point in self._asked])
        if self._idle >= PATIENCE or self._batch == self._iterations:
            return False
        asked = self._optimizer.ask()
        if asked:
            self._batch += 1
            self._open(asked)
        return bool(asked)

    def _record(self) -> None:
        """Add the complete batch to the history."""
        self._idle = 0 if self._waiting else self._idle + 1
        # A batch that the budget has cut ends at its first unknown point.
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

    def _mismatch(self, proposed: str, number: int) -> str:
        return f"{proposed}, stored {self._recorded[number]} at evaluation {number + 1}"
