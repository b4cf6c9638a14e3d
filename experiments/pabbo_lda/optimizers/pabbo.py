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
    from experiments.pabbo_lda.model import PabboModel

Scorer = Callable[[FloatArray, FloatArray, FloatArray, IntArray, float], FloatArray]
"""Scores of candidate pairs, float[P], from: duels float[D, 2] (positions), preferred float[D]
(1 where the second was preferred, else 0, or a degree between), points float[N] (positions), pairs
int[P, 2] (indices into points) and the share of the budget used."""

CANDIDATES = 256


class PolicySettings(Settings):
    """How the transformer is used as an optimiser of T."""

    scale: Scale = Field("log", description="positions in [-1, 1] even in log T or in T")
    exploration: float = Field(0.3, ge=0, le=1, description="share of batches drawn at random")
    horizon: PositiveInt = Field(80, description="distinct T at which the budget counts as used")
    context: PositiveInt = Field(20, description="most duels the transformer is shown")


class PABBO:
    """Preferential amortised black-box optimisation (arXiv 2503.00924) over integers.

    The context of the transformer are duels of the best T so far with the T evaluated last; the
    candidates are duels of the best T with each unknown one of up to 256 T evenly spaced on the
    scale, so that a duel costs one evaluation. The transformer tells the two sides of a duel apart
    although they are exchangeable: in the context the best takes them in turn, and a candidate's
    score is the mean of both orders. With the exploration rate a random candidate is evaluated
    instead.

    The horizon of the settings, not the budget of the study, defines the share of the budget used,
    so that the same study can continue under a larger budget.
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
        """The unknown member of the duel scored best, or a random T to explore."""
        unknown = self._grid[~np.isin(self._grid, list(self._losses))]
        if not len(unknown):
            return []
        explore = self._rng.random() < self._settings.exploration
        if explore or len(self._losses) < 2:
            return [Point(int(self._rng.choice(unknown)))]
        return [Point(self._propose(unknown))]

    def tell(self, points: Sequence[Point], values: Sequence[float]) -> None:
        """Remember the values; only their order is ever used."""
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
                "the scorer of PABBO must give each pair a finite score; train its model again"
            )
        return int(unknown[np.argmax(scores[:last] + scores[last:])])

    def _context(self, best: int) -> tuple[FloatArray, FloatArray]:
        """The latest duels with the best T: positions [D, 2], and who is preferred."""
        others = [T for T in self._losses if best != T][-self._settings.context :]
        duels = np.stack([np.full(len(others), best), others], axis=1)
        duels[1::2] = duels[1::2, ::-1]
        losses = np.vectorize(self._losses.__getitem__, otypes=[np.float64])(duels)
        return self._space.positions(duels), self._preferred(losses)

    def _preferred(self, losses: FloatArray) -> FloatArray:
        """1 where the second of losses [D, 2] has won, else 0."""
        return (losses[:, 1] < losses[:, 0]).astype(np.float64)


def model_scorer(model: PabboModel) -> Scorer:
    """The acquisition head of a trained model as a scorer, on the model's device."""
    import torch

    from experiments.pabbo_lda.model import score_pairs

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
