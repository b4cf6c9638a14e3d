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
    Scale,
    as_losses,
)
from raypipe.training.settings import Settings

if TYPE_CHECKING:
    from experiments.pabbo_lda.model import PabboModel

Scorer = Callable[[FloatArray, FloatArray, FloatArray, IntArray, float], FloatArray]
"""Scores of candidate pairs, float[P], from: duels float[D, 2] (positions), preferred float[D]
(1 where the second was preferred, else 0), points float[N] (positions), pairs int[P, 2] (indices
into points) and the share of the budget used."""

CANDIDATES = 256


class PabboSettings(Settings):
    """How the transformer is used as an optimiser of T."""

    scale: Scale = Field("log", description="positions in [-1, 1] even in log T or in T")
    exploration: float = Field(0.3, ge=0, le=1, description="share of batches drawn at random")
    horizon: PositiveInt = Field(80, description="distinct T at which the budget counts as used")
    context: PositiveInt = Field(20, description="most duels the transformer is shown")


class PABBO:
    """Preferential amortised black-box optimisation (arXiv 2503.00924) over integers.

    The horizon, not the budget of the study, defines the share of the budget used, so that the
    same study can continue under a larger budget.
    """

    def __init__(
        self, space: IntegerRange, seed: int, scorer: Scorer, settings: PabboSettings
    ) -> None:
        self._space = space
        self._rng = np.random.default_rng(seed)
        self._scorer = scorer
        self._settings = settings
        self._losses: dict[int, float] = {}
        self._grid = space.grid(CANDIDATES)

    def ask(self) -> list[int]:
        """The members not yet known of the pair scored best, or one random T to explore."""
        unknown = self._grid[~np.isin(self._grid, list(self._losses))]
        if not len(unknown):
            return []
        explore = self._rng.random() < self._settings.exploration
        drawn = int(self._rng.choice(unknown))  # always drawn: replaying must not depend on scores
        if explore or len(self._losses) < 2:
            return [drawn]
        return self._propose(unknown)

    def tell(self, points: Sequence[int], values: Sequence[float]) -> None:
        """Remember the values; only their order is ever used."""
        self._losses.update(zip((int(T) for T in points), as_losses(values).tolist(), strict=True))

    def _propose(self, unknown: IntArray) -> list[int]:
        best = min(self._losses, key=lambda T: (self._losses[T], T))
        points = np.append(unknown, best)
        pairs = np.stack([np.full(len(unknown), len(unknown)), np.arange(len(unknown))], axis=1)
        duels, preferred = self._context(best)
        used = min(1.0, len(self._losses) / self._settings.horizon)
        scores = self._scorer(duels, preferred, self._space.positions(points), pairs, used)
        if scores.shape != (len(pairs),) or not np.isfinite(scores).all():
            raise ValueError("the scorer of PABBO must give one finite score a pair; retrain it")
        return [int(T) for T in points[pairs[np.argmax(scores)]] if T not in self._losses]

    def _context(self, best: int) -> tuple[FloatArray, FloatArray]:
        points = np.array(list(self._losses))
        losses = np.array(list(self._losses.values()))
        first, second = np.arange(len(points) - 1), np.arange(1, len(points))
        first, second = first[-self._settings.context :], second[-self._settings.context :]
        positions = self._space.positions(points)
        duels = np.stack([positions[first], positions[second]], axis=1)
        return duels, (losses[second] < losses[first]).astype(np.float64)


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
