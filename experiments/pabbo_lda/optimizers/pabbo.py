"""PABBO: a trained transformer proposes the next T from pairwise comparisons."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from pydantic import Field, PositiveInt

from experiments.pabbo_lda.optimizers.sequential import TopicSearch
from experiments.pabbo_lda.pabbo.model import PabboModel, score_pairs
from experiments.pabbo_lda.space import FloatArray, IntArray, Space
from raypipe import Settings

PairScorer = Callable[[FloatArray, FloatArray, FloatArray, IntArray, float], FloatArray]
"""Scores of candidate pairs, float[P], from: duels float[D, 2] (positions), preferred float[D]
(1 where the second was preferred, else 0, or a degree between), points float[N] (positions), pairs
int[P, 2] (indices into points) and the used fraction of the budget."""

CANDIDATES = 256
#: unit of differences of the log-perplexity; a duel is clear from ``DECIDED`` of them on
UNIT = 0.01
DECIDED = 1e4


class PolicySettings(Settings):
    """Use of the trained transformer as an optimizer of T."""

    exploration: float = Field(0.3, ge=0, le=1)
    """Exploration rate: fraction of proposals drawn at random."""
    horizon: PositiveInt = 80
    """Distinct values of T after which the model sees its budget as used up."""
    context: PositiveInt = 20
    """Maximum number of duels in the context of the transformer."""


#: use of the model that was trained on curves, as in its training: no budget, a context of at most
#: the longest start and the steps, no exploration
CURVE_POLICY = PolicySettings(exploration=0.0, horizon=1, context=30)


class PABBO(TopicSearch):
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
        self, space: Space, seed: int, scorer: PairScorer, settings: PolicySettings
    ) -> None:
        super().__init__(space, seed)
        self._scorer, self._settings = scorer, settings
        self._grid = self._topics.grid(CANDIDATES).astype(np.int64)

    def propose(self) -> list[int]:
        """Return the unknown T of the duel with the best score, or a random T to explore."""
        unknown = self._grid[~np.isin(self._grid, list(self._losses))]
        if not len(unknown):
            return []
        explore = self._rng.random() < self._settings.exploration
        if explore or len(self._losses) < 2:
            return [int(self._rng.choice(unknown))]
        best, last = self.best, len(unknown)
        sides = np.stack([np.full(last, last), np.arange(last)], axis=1)
        scores = self._scorer(
            *self._context(best),
            self._topics.positions(np.append(unknown, best)),
            np.concatenate([sides, sides[:, ::-1]]),
            min(1.0, len(self._losses) / self._settings.horizon),
        )
        if scores.shape != (2 * last,) or not np.isfinite(scores).all():
            raise ValueError(
                "the scorer of PABBO must return one finite score per pair; train its model again"
            )
        return [int(unknown[np.argmax(scores[:last] + scores[last:])])]

    def preferred(self, losses: FloatArray) -> FloatArray:
        """Return 1 where the second of losses [D, 2] is lower, else 0."""
        return (losses[:, 1] < losses[:, 0]).astype(np.float64)

    def _context(self, best: int) -> tuple[FloatArray, FloatArray]:
        """Return the latest duels with the best T: positions [D, 2] and preferences [D]."""
        others = [T for T in self._losses if best != T][-self._settings.context :]
        duels = np.stack([np.full(len(others), best), others], axis=1)
        duels[1::2] = duels[1::2, ::-1]
        losses = np.vectorize(self._losses.__getitem__, otypes=[np.float64])(duels)
        return self._topics.positions(duels), self.preferred(losses)


class CurvePABBO(PABBO):
    """PABBO whose duels have a degree: the difference of the log-perplexities.

    Its transformer was trained on perplexity curves. Unlike the other optimizers and the published
    PABBO, it uses the values and not only their order. A duel with a value that is not positive or
    not finite is clear.
    """

    def preferred(self, losses: FloatArray) -> FloatArray:
        """Return the degree in [0, 1] to which the second of losses [D, 2] is preferred."""
        won = losses[:, 1] < losses[:, 0]
        best, other = losses.min(1), losses.max(1)
        known = (best > 0) & np.isfinite(other)
        with np.errstate(over="ignore"):  # infinitely far is clear as well
            ratio = np.divide(other, best, out=np.full(len(best), np.inf), where=known)
        certainty = np.minimum(1, np.log1p(np.log(ratio) / UNIT) / np.log1p(DECIDED))
        degree: FloatArray = np.where(won, 1 + certainty, 1 - certainty) / 2
        return degree


def model_scorer(model: PabboModel) -> PairScorer:
    """Return the acquisition head of a trained model as a scorer, on the model's device."""
    device = next(model.parameters()).device

    @torch.inference_mode()
    def score(
        duels: FloatArray,
        preferred: FloatArray,
        points: FloatArray,
        pairs: IntArray,
        budget_used: float,
    ) -> FloatArray:
        known, won, places = (
            torch.as_tensor(each, dtype=torch.float32, device=device)
            for each in (duels, preferred, points)
        )
        couples = torch.as_tensor(pairs, device=device)
        scores = score_pairs(model, known, won, places, couples, budget_used)
        return scores.double().cpu().numpy()

    return score
