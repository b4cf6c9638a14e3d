"""PABBO: a trained transformer proposes the next T from pairwise comparisons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field, PositiveInt

from experiments.pabbo_lda.optimizers.space import (
    FloatArray,
    IntArray,
    IntegerRange,
    Point,
    Scale,
    as_losses,
)
from raypipe.config.settings import Settings

if TYPE_CHECKING:
    from experiments.pabbo_lda.pabbo.model import PabboModel

Scorer = Callable[[FloatArray, FloatArray, FloatArray, IntArray, float], FloatArray]
"""Scores of candidate pairs, float[P], from: duels float[D, 2] (positions), preferred float[D]
(1 where the second was preferred, else 0, or a degree between), points float[N] (positions), pairs
int[P, 2] (indices into points) and the used fraction of the budget."""

CANDIDATES = 256


class PolicySettings(Settings):
    """Use of the trained transformer as an optimizer of T."""

    scale: Scale = "log"
    """Scale on which the positions of T in [-1, 1] are even: log T or T."""
    exploration: float = Field(0.3, ge=0, le=1)
    """Exploration rate: fraction of proposals drawn at random."""
    horizon: PositiveInt = 80
    """Distinct values of T after which the model sees its budget as used up."""
    context: PositiveInt = 20
    """Maximum number of duels in the context of the transformer."""


class PABBO:
    """Preferential amortized black-box optimization (arXiv 2503.00924) over integers.

    The context of the transformer is duels of the best T so far with the latest T. The candidates
    are duels of the best T with each unknown one of up to 256 T evenly spaced on the scale, so
    that a duel costs one evaluation. The transformer distinguishes the two sides of a duel
    although they are exchangeable: in the context the best alternates between them, and a
    candidate's score is the mean of both orders. At the exploration rate, a random candidate is
    evaluated instead.

    The horizon of the settings, not the budget of the study, defines the used fraction of the
    budget, so that the same study can continue under a larger budget.
    """

    def __init__(
        self, space: IntegerRange, seed: int, scorer: Scorer, settings: PolicySettings
    ) -> None:
        self._space = space
        self._rng = np.random.default_rng(seed)
        self._scorer = scorer
        self._settings = settings
        self._losses: dict[int, float] = {}
        self._grid = space.grid(CANDIDATES)

    def ask(self) -> list[Point]:
        """Return the unknown T of the duel with the best score, or a random T to explore."""
        unknown = self._grid[~np.isin(self._grid, list(self._losses))]
        if not len(unknown):
            return []
        explore = self._rng.random() < self._settings.exploration
        if explore or len(self._losses) < 2:
            return [Point(int(self._rng.choice(unknown)))]
        return [Point(self._propose(unknown))]

    def tell(self, points: Sequence[Point], values: Sequence[float]) -> None:
        """Store the values; only their order is used."""
        topics = (point.T for point in points)
        self._losses.update(zip(topics, as_losses(values).tolist(), strict=True))

    def _propose(self, unknown: IntArray) -> int:
        best = min(self._losses, key=lambda T: (self._losses[T], T))
        last = len(unknown)
        sides = np.stack([np.full(last, last), np.arange(last)], axis=1)
        scores = self._scorer(
            *self._context(best),
            self._space.positions(np.append(unknown, best)),
            np.concatenate([sides, sides[:, ::-1]]),
            min(1.0, len(self._losses) / self._settings.horizon),
        )
        if scores.shape != (2 * last,) or not np.isfinite(scores).all():
            raise ValueError(
                "the scorer of PABBO must return one finite score per pair; train its model again"
            )
        return int(unknown[np.argmax(scores[:last] + scores[last:])])

    def _context(self, best: int) -> tuple[FloatArray, FloatArray]:
        """Return the latest duels with the best T: positions [D, 2] and preferences [D]."""
        others = [T for T in self._losses if best != T][-self._settings.context :]
        duels = np.stack([np.full(len(others), best), others], axis=1)
        duels[1::2] = duels[1::2, ::-1]
        losses = np.vectorize(self._losses.__getitem__, otypes=[np.float64])(duels)
        return self._space.positions(duels), self._preferred(losses)

    def _preferred(self, losses: FloatArray) -> FloatArray:
        """Return 1 where the second of losses [D, 2] is lower, else 0."""
        return (losses[:, 1] < losses[:, 0]).astype(np.float64)


def model_scorer(model: PabboModel) -> Scorer:
    """Return the acquisition head of a trained model as a scorer, on the model's device."""
    import torch

    from experiments.pabbo_lda.pabbo.model import score_pairs

    device = next(model.parameters()).device

    @torch.inference_mode()
    def score(
        duels: FloatArray,
        preferred: FloatArray,
        points: FloatArray,
        pairs: IntArray,
        budget_used: float,
    ) -> FloatArray:
        scores = score_pairs(
            model,
            torch.as_tensor(duels, dtype=torch.float32, device=device),
            torch.as_tensor(preferred, dtype=torch.float32, device=device),
            torch.as_tensor(points, dtype=torch.float32, device=device),
            torch.as_tensor(pairs, dtype=torch.int64, device=device),
            budget_used,
        )
        return scores.double().cpu().numpy()

    return score
