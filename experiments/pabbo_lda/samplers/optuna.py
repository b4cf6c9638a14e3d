"""PABBO as a sampler of Optuna: expected improvement under a surrogate that was trained before.

    study = optuna.create_study(sampler=PabboSampler(seed=0))
    study.optimize(objective, n_trials=30)

A proposal depends on the seed, the number of the trial and the trials of the study alone. So a
sampler needs no state: a study continues from its storage, and several processes may share one.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.search_space import intersection_search_space
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from experiments.pabbo_lda.space import FloatArray, IntArray, Scale
from experiments.pabbo_lda.surrogate.posterior import Surrogate, load

_OBSERVED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING)
Number = IntDistribution | FloatDistribution
#: most numeric parameters that the surrogate takes
_MOST_NUMBERS = 3
#: candidates spread over the whole space; a space with fewer points is listed instead
_SPREAD = 1024
#: standard deviations of the candidates around the best ones, round by round
_WIDTHS = (0.1, 0.02, 0.004)
#: the best candidates of a round, and the new ones around each of them
_CENTERS, _AROUND = 8, 32
#: most evaluated points per function in the training of the surrogate, and the best ones of them
_MOST_KNOWN, _MOST_BEST = 40, 10
#: decimals in which positions of different points differ
_DIGITS = 12


class PabboSampler(BaseSampler):
    """Sampler for up to three integer or float parameters, with or without ``log`` and ``step``.

    Trials count as follows:

    - The first ``n_startup_trials`` with a value are spread evenly over the space.
    - A pruned trial counts with its last intermediate value.
    - A running trial counts with the best value so far, so that parallel trials differ (the
      constant liar of Ginsbourger et al., 2010).
    - An infinite value counts as the worst or best finite one, and a trial that breaks a constraint
      as the worst one.
    - Trials that failed, or whose value is NaN, are ignored.

    A point is not proposed twice, unless a discrete space has no other point.

    Args:
        seed: the seed; by default a random one.
        n_startup_trials: trials with a value before the surrogate is used.
        independent_sampler: draws categorical parameters, parameters that not all trials have or
            whose range has changed, and all parameters if there are more than three; by default
            ``TPESampler(constant_liar=True)``.
        surrogate: scores the candidates; by default the one that is shipped.
        warn_independent_sampling: whether to warn once when the independent sampler is used.

    """

    def __init__(
        self,
        *,
        seed: int | None = None,
        n_startup_trials: int = 5,
        independent_sampler: BaseSampler | None = None,
        surrogate: Surrogate | None = None,
        warn_independent_sampling: bool = True,
    ) -> None:
        self._seed = np.random.SeedSequence(seed).generate_state(4)
        self._startup = n_startup_trials
        self._independent = independent_sampler or _tpe(seed)
        self._surrogate = surrogate
        self._warns = warn_independent_sampling

    def reseed_rng(self) -> None:
        """Reseed the independent sampler. Proposals of trials differ by the trials' numbers."""
        self._independent.reseed_rng()

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return the parameters that all finished trials have.

        Raises:
            ValueError: the study has several objectives.

        """
        del trial
        _check_single_objective(study)
        trials = study.get_trials(deepcopy=False)
        common = intersection_search_space(trials, include_pruned=True)
        return {name: values for name, values in common.items() if not values.single()}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the values of the parameters of a search space.

        Raises:
            ValueError: the study has several objectives.

        """
        _check_single_objective(study)
        if not search_space:
            return {}
        numbers = {
            name: values for name, values in search_space.items() if isinstance(values, Number)
        }
        if len(numbers) > _MOST_NUMBERS:
            self._warn(f"has {len(numbers)} numeric parameters, and takes {_MOST_NUMBERS}")
            numbers = {}
        elif len(numbers) < len(search_space):
            self._warn(f"does not take the parameter {min(search_space.keys() - numbers.keys())}")
        others = {
            name: self._independent.sample_independent(study, trial, name, values)
            for name, values in search_space.items()
            if name not in numbers
        }
        return others | (self._numbers(study, trial, numbers) if numbers else {})

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Return the value of a parameter that the search space does not have.

        Raises:
            ValueError: the study has several objectives.

        """
        _check_single_objective(study)
        finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        if len(finished) >= max(1, self._startup):
            self._warn(f"does not take {param_name}, which other trials lack or draw differently")
        return self._independent.sample_independent(study, trial, param_name, param_distribution)

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """Prepare the independent sampler."""
        self._independent.before_trial(study, trial)

    def after_trial(
        self,
        study: Study,
        trial: FrozenTrial,
        state: TrialState,
        values: Sequence[float] | None,
    ) -> None:
        """Tell the independent sampler how a trial ended."""
        self._independent.after_trial(study, trial, state, values)

    def _numbers(
        self, study: Study, trial: FrozenTrial, space: Mapping[str, Number]
    ) -> dict[str, int | float]:
        """Return the values of numeric parameters."""
        scales = {name: _scale(values) for name, values in space.items()}
        known, values, running = _observed(study, trial, scales)
        if len(known) < max(1, self._startup):
            start = np.random.default_rng(self._seed).random(len(space))
            point = spread(start, np.array([trial.number]))[0]
        else:
            if self._surrogate is None:
                self._surrogate = load()
            lies = np.full(len(running), values.min())
            point = best_point(
                self._surrogate,
                list(scales.values()),
                np.concatenate([known, running]),
                np.concatenate([values, lies]),
                np.random.default_rng([*self._seed, trial.number]),
            )
        return {
            name: _value(space[name], float(scales[name].values(place)))
            for name, place in zip(space, point, strict=True)
        }

    def _warn(self, reason: str) -> None:
        if self._warns:
            self._warns = False
            warnings.warn(
                f"{type(self).__name__} {reason}; {self._independent} draws it without the "
                "surrogate. Pass warn_independent_sampling=False if that is intended.",
                stacklevel=3,
            )


def _tpe(seed: int | None) -> BaseSampler:
    with warnings.catch_warnings():  # constant_liar may change: Optuna has an upper bound
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return TPESampler(seed=seed, constant_liar=True)


def _check_single_objective(study: Study) -> None:
    if len(study.directions) > 1:
        raise ValueError(
            f"PabboSampler optimizes one objective, and the study has {len(study.directions)}; "
            "take NSGAIISampler or TPESampler"
        )


def _scale(distribution: Number) -> Scale:
    step = distribution.step
    return Scale(
        float(distribution.low),
        float(distribution.high),
        distribution.log,
        None if step is None else float(step),
    )


def _value(distribution: Number, value: float) -> int | float:
    """Return a value as Optuna stores it."""
    if isinstance(distribution, FloatDistribution):
        return value
    index = round((value - distribution.low) / distribution.step)
    return min(distribution.low + index * distribution.step, distribution.high)


def _observed(
    study: Study, trial: FrozenTrial, scales: Mapping[str, Scale]
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the positions of trials with a value, their values to minimize, and running trials."""
    known, values, running = [], [], []
    sign = -1 if study.direction == StudyDirection.MAXIMIZE else 1
    for other in study.get_trials(deepcopy=False, states=_OBSERVED):
        if other.number == trial.number or not scales.keys() <= other.params.keys():
            continue
        point = [scale.positions(other.params[name]) for name, scale in scales.items()]
        if other.state == TrialState.RUNNING:
            running.append(point)
        elif (value := _outcome(other)) is not None:
            known.append(point)
            is_broken = any(excess > 0 for excess in other.constraints.values())
            values.append(np.inf if is_broken else sign * value)
    shape = (-1, len(scales))
    return (
        np.array(known, dtype=np.float64).reshape(shape),
        _finite(np.array(values, dtype=np.float64)),
        np.array(running, dtype=np.float64).reshape(shape),
    )


def _outcome(trial: FrozenTrial) -> float | None:
    """Return the value of a trial, of a pruned one the last intermediate value; None without."""
    value = trial.value
    if trial.state == TrialState.PRUNED and trial.last_step is not None:
        value = trial.intermediate_values[trial.last_step]
    return None if value is None or np.isnan(value) else value


def _finite(values: FloatArray) -> FloatArray:
    """Return values with the extreme finite ones in place of infinities; zeros if all are."""
    finite = values[np.isfinite(values)]
    return np.clip(values, finite.min(), finite.max()) if len(finite) else np.zeros_like(values)


def spread(start: FloatArray, numbers: IntArray) -> FloatArray:
    """Return points of a sequence that fills [-1, 1]^d evenly, of shape [len(numbers), d].

    It is the additive recurrence of Roberts (2018), whose steps are powers of the root of
    x^(d + 1) = x + 1.

    Args:
        start: shift of the sequence, in [0, 1), of shape [d].
        numbers: the places of the points in the sequence.

    """
    dimensions = len(start)
    root = 2.0
    for _ in range(64):
        root = (1 + root) ** (1 / (dimensions + 1))
    steps = root ** -np.arange(1.0, dimensions + 1)
    return 2 * np.mod(start + np.outer(numbers, steps), 1) - 1


def best_point(
    surrogate: Surrogate,
    scales: Sequence[Scale],
    known: FloatArray,
    values: FloatArray,
    rng: np.random.Generator,
) -> FloatArray:
    """Return the position with the largest expected improvement, of shape [d].

    A known point is only returned if there is no other one. Of more than 40 known points, the
    surrogate sees the best ten, and those that are farthest from each other.

    Args:
        surrogate: the model of the objective.
        scales: the scale of each of the d parameters.
        known: positions of evaluated points, of shape [n, d].
        values: their values, of shape [n]; the objective is minimized.
        rng: generator of candidates, and of the choice between equal ones.

    """
    seen = _representative(known, values)

    def improvements(candidates: FloatArray) -> FloatArray:
        return surrogate.expected_improvement(known[seen], values[seen], candidates)

    levels = [scale.levels for scale in scales]
    is_listed = None not in levels and prod(filter(None, levels)) <= _SPREAD
    if is_listed:
        axes = (scale.positions(scale.grid(_SPREAD)) for scale in scales)
        every = np.array(list(product(*axes)))
        new = _new(every, known)
        candidates = rng.permutation(new if len(new) else every)
        return _best(candidates, improvements(candidates), 1).reshape(-1)
    points = _on_scales(scales, spread(rng.random(len(scales)), np.arange(_SPREAD)))
    new = _new(points, known)
    candidates = new if len(new) else points
    found = improvements(candidates)
    for width in _WIDTHS:
        centers = _best(candidates, found, _CENTERS)
        if width == _WIDTHS[0]:
            centers = np.concatenate([centers, known[[np.argmin(values)]]])
        moved = np.repeat(centers, _AROUND, axis=0)
        moved = np.clip(moved + width * rng.standard_normal(moved.shape), -1, 1)
        near = _new(_on_scales(scales, moved), known)
        if len(near):
            candidates = np.concatenate([candidates, near])
            found = np.concatenate([found, improvements(near)])
    return _best(candidates, found, 1).reshape(-1)


def _representative(known: FloatArray, values: FloatArray) -> IntArray:
    """Return the numbers of the points that stand for all of them."""
    if len(known) <= _MOST_KNOWN:
        return np.arange(len(known))
    chosen = list(np.argsort(values, kind="stable")[:_MOST_BEST])
    distances = np.linalg.norm(known[:, None] - known[chosen], axis=2).min(axis=1)
    while len(chosen) < _MOST_KNOWN:
        chosen.append(np.argmax(distances))
        away = np.linalg.norm(known - known[chosen[-1]], axis=1)
        distances = np.minimum(distances, away)
    return np.array(chosen)


def _best(points: FloatArray, improvements: FloatArray, number: int) -> FloatArray:
    return points[np.argsort(-improvements, kind="stable")[:number]]


def _on_scales(scales: Sequence[Scale], points: FloatArray) -> FloatArray:
    """Return the positions of the values nearest to points."""
    columns = [
        scale.positions(scale.values(points[:, place])) for place, scale in enumerate(scales)
    ]
    return np.stack(columns, axis=1)


def _new(points: FloatArray, known: FloatArray) -> FloatArray:
    """Return the points that are not known, without repetitions."""
    seen = set(map(tuple, np.round(known, _DIGITS)))
    rows = []
    for number, row in enumerate(map(tuple, np.round(points, _DIGITS))):
        if row not in seen:
            seen.add(row)
            rows.append(number)
    return points[rows]
