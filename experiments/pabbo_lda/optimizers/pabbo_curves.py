"""PABBO with a transformer that was trained on perplexity curves and sees degrees of preference."""

from __future__ import annotations

import numpy as np

from experiments.pabbo_lda.optimizers.pabbo import PABBO, PolicySettings, Scorer
from experiments.pabbo_lda.optimizers.space import FloatArray, IntegerRange

#: unit of differences of the log-perplexity; a duel is clear from ``DECIDED`` of them on
UNIT = 0.01
DECIDED = 1e4
#: use of the model as in its training (:mod:`experiments.pabbo_lda.pabbo.curve_training_task`): no
#: budget, a context of at most the longest start and the steps, no exploration
POLICY = PolicySettings(scale="log", exploration=0.0, horizon=1, context=30)


class CurvePABBO(PABBO):
    """PABBO whose duels have a degree: the difference of the log-perplexities.

    Unlike the other optimizers and the published PABBO, it uses the values and not only their
    order. A duel with a value that is not positive or not finite is clear.
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
