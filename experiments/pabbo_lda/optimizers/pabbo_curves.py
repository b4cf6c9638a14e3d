"""PABBO by a transformer that was trained on perplexity curves and sees how far values differ."""

from __future__ import annotations

import numpy as np

from experiments.pabbo_lda.optimizers.pabbo import PABBO, PolicySettings, Scorer
from experiments.pabbo_lda.optimizers.space import FloatArray, IntegerRange

#: a log-perplexity is judged in these units; a duel lost by ``DECIDED`` of them or more is clear
UNIT = 0.01
DECIDED = 1e4
#: as in the training (:mod:`experiments.pabbo_lda.pabbo.curve_training_task`), which has no budget, a context
#: of at most the longest start and its own steps, and no steps at random but the policy's
POLICY = PolicySettings(scale="log", exploration=0.0, horizon=1, context=30)


class CurvePABBO(PABBO):
    """PABBO whose duels have a degree: by how much the logarithms of the perplexities differ.

    Unlike the other optimisers, and PABBO as published, it uses the values and not only their
    order. Where a value is not positive or not finite, its duels are clear ones.
    """

    def __init__(self, space: IntegerRange, seed: int, scorer: Scorer) -> None:
        super().__init__(space, seed, scorer, POLICY)

    def _preferred(self, losses: FloatArray) -> FloatArray:
        won = losses[:, 1] < losses[:, 0]
        best, other = losses.min(1), losses.max(1)
        known = (best > 0) & np.isfinite(other)
        with np.errstate(over="ignore"):  # infinitely far is clear as well
            ratio = np.divide(other, best, out=np.full(len(best), np.inf), where=known)
        certainty = np.minimum(1, np.log1p(np.log(ratio) / UNIT) / np.log1p(DECIDED))
        preferred: FloatArray = np.where(won, 1 + certainty, 1 - certainty) / 2
        return preferred
