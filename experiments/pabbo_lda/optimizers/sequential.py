"""Optimizers that ask for points one after the other by a rule, or at random."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from optuna.samplers import TPESampler

from experiments.pabbo_lda.space import Point, Space, as_losses

GOLDEN = (3 - 5**0.5) / 2
BATCH = 10
ATTEMPTS = 100


class TopicSearch:
    """A search of T alone that proposes from the known values; the priors are 1/T."""

    def __init__(self, space: Space, seed: int) -> None:
        self._space, self._topics = space, space.topics
        self._rng = np.random.default_rng(seed)
        self._losses: dict[int, float] = {}

    def ask(self) -> list[Point]:
        """Return the points of the next values of T."""
        return [Point(T) for T in self.propose()]

    def tell(self, points: Sequence[Point], values: Sequence[float]) -> None:
        """Store the values."""
        topics = (point.T for point in points)
        self._losses.update(zip(topics, as_losses(values).tolist(), strict=True))

    def propose(self) -> list[int]:
        """Return the next values of T; none once the search is finished."""
        raise NotImplementedError

    @property
    def best(self) -> int:
        """The T of the lowest value, of equal ones the smallest."""
        return min(self._losses, key=lambda T: (self._losses[T], T))

    def neighbors(self, least: int, most: int) -> tuple[int, int]:
        """Return the known T next to the best one; ``least`` and ``most`` where there are none."""
        below = [T for T in self._losses if self.best > T]
        above = [T for T in self._losses if self.best < T]
        return max(below, default=least), min(above, default=most)

    def nearest(self, position: float) -> int:
        """Return the T nearest to a position."""
        return round(float(self._topics.values(position)))


class GoldenSection(TopicSearch):
    """Golden-section search (Kiefer 1953) for the minimum of a function unimodal in T.

    The bracket is the best known T with its nearest known neighbors, or the ends of the range
    where it has none. Each step probes the wider side, the golden fraction (0.382 of its width on
    the scale) away from the best T. When no integer is left inside the bracket, its ends are
    evaluated if they are unknown, and the search finishes.
    """

    def propose(self) -> list[int]:
        """Return the next probe, the unknown ends of an exhausted bracket, or nothing."""
        if not self._losses:
            return [self.nearest(0.0)]
        best = self.best
        left, right = self.neighbors(self._space.t_min, self._space.t_max)
        if right - best <= 1 and best - left <= 1:
            return [T for T in (left, right) if T not in self._losses]
        x_left, x_best, x_right = self._topics.positions([left, best, right])
        rightwards = right - best > 1 and (best - left <= 1 or x_right - x_best > x_best - x_left)
        target = x_right if rightwards else x_left
        # rounding must not return an end of the interval
        low, high = (best + 1, right - 1) if rightwards else (left + 1, best - 1)
        return [min(max(self.nearest(x_best + GOLDEN * (target - x_best)), low), high)]


class Bisection(TopicSearch):
    """Probe the middle of the wider gap next to the best known T, on the scale of the range.

    A baseline without a model. The gaps end at the nearest known T, or at the end of the range. The
    search finishes when no integer is left in them.
    """

    def propose(self) -> list[int]:
        """Return the next probe; nothing once both gaps are exhausted."""
        if not self._losses:
            return [self.nearest(0.0)]
        # one beyond the range, so that its ends can be probed, too
        left, right = self.neighbors(self._space.t_min - 1, self._space.t_max + 1)
        gaps = [
            (low, high) for low, high in ((left, self.best), (self.best, right)) if high - low > 1
        ]
        if not gaps:
            return []
        # the gap below T = 1 ends at 0.5
        ends = self._topics.positions(np.maximum(gaps, 0.5))
        wider = int(np.ptp(ends, axis=1).argmax())
        low, high = gaps[wider]
        return [min(max(self.nearest(ends[wider].mean()), low + 1), high - 1)]


class RandomTopics(TopicSearch):
    """Uniform draws of T on the scale of its range, without known T."""

    def propose(self) -> list[int]:
        """Return up to ten T, drawn with the probability of their width on the scale."""
        every = np.arange(self._space.t_min, self._space.t_max + 1)
        unknown = every[~np.isin(every, list(self._losses))]
        if not len(unknown):
            return []
        edges = self._topics.positions(np.stack([unknown - 0.5, unknown + 0.5]))
        widths = edges[1] - edges[0]
        size = min(BATCH, len(unknown))
        drawn = self._rng.choice(unknown, size, replace=False, p=widths / widths.sum())
        return [int(T) for T in drawn]


class RandomSearch:
    """Uniform draws of points on the scale of a space with priors, without known points.

    It finishes after 100 batches of draws in a row without an unknown point: by then almost every
    point of such a small space is known.
    """

    def __init__(self, space: Space, seed: int) -> None:
        self._space = space
        self._rng = np.random.default_rng(seed)
        self._known: set[Point] = set()

    def ask(self) -> list[Point]:
        """Return up to ten points."""
        batch: dict[Point, None] = {}  # a set that keeps its order
        for _ in range(ATTEMPTS):
            drawn = self._rng.uniform(-1, 1, (BATCH, self._space.dimensions))
            new = (point for point in self._space.points(drawn) if point not in self._known)
            batch |= dict.fromkeys(new)
            if len(batch) >= BATCH:
                break
        return list(batch)[:BATCH]

    def tell(self, points: Sequence[Point], values: Sequence[float]) -> None:  # noqa: ARG002
        """Exclude the points from further draws."""
        self._known.update(points)


class TPE:
    """``optuna.samplers.TPESampler`` through ask and tell (Bergstra et al. 2011).

    A batch is one point. The sampler ranks values and never uses their size. It may propose a
    known point again. Its arguments are spelled out because their defaults change between
    releases of Optuna.
    """

    def __init__(self, space: Space, seed: int) -> None:
        # Otherwise Optuna announces every study on standard error.
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = TPESampler(
            n_startup_trials=10,
            n_ei_candidates=24,
            multivariate=True,
            group=False,
            constant_liar=False,  # one trial at a time
            seed=seed,
        )
        self._study = optuna.create_study(direction="minimize", sampler=sampler)
        self._priors = space.priors
        self._space: dict[str, BaseDistribution] = {
            "T": IntDistribution(space.t_min, space.t_max, log=True)
        }
        for name, prior in self._priors.items():
            self._space[name] = FloatDistribution(prior.low, prior.high, log=True)
        self._asked: optuna.Trial | None = None

    def ask(self) -> list[Point]:
        """Return the next point."""
        self._asked = self._study.ask(self._space)
        params = self._asked.params
        # The sampler keeps the value that it drew, at most half a percent from the rounded one.
        priors = {name: prior.nearest(params[name]) for name, prior in self._priors.items()}
        return [Point(int(params["T"]), **priors)]

    def tell(self, points: Sequence[Point], values: Sequence[float]) -> None:
        """Finish the asked trial, or add the start values as finished trials."""
        losses = as_losses(values).tolist()
        if self._asked is not None:
            self._study.tell(self._asked, losses[0])
            self._asked = None
            return
        for point, loss in zip(points, losses, strict=True):
            params = {name: getattr(point, name) for name in self._space}
            trial = optuna.trial.create_trial(params=params, distributions=self._space, value=loss)
            self._study.add_trial(trial)
