"""Linear interpolation of a language model with n-grams, and gains with their intervals."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raypipe.stats import half_width
from raypipe.store.ledger import Row

#: rows of the table ``measures``: the model, in two ways, the n-grams, and both mixed
MODEL, SLIDING = "language model", "sliding window"
NGRAMS, MIXTURE = "kneser-ney tokens", "language model + kneser-ney"
MODELS = (MODEL, SLIDING)
#: weights of the model that the choice is among
WEIGHTS = tuple(number / 50 for number in range(51))

Costs = NDArray[np.float64]


class Losses(NamedTuple):
    """Summed cross-entropies in nats of groups of successive tokens.

    Attributes:
        tokens: number of tokens of each group, ``[G]``.
        samples: of the model, each token after those of its sample, ``[G]``.
        sliding: of the model, each token after half of the context or more, except at the start of
            the text, ``[G]``.
        ngrams: of the n-grams, ``[G]``; NaN where they are not stored.
        mixtures: of the mixture with each weight, ``[G, W]``.

    """

    tokens: Costs
    samples: Costs
    sliding: Costs
    ngrams: Costs
    mixtures: Costs

    def part(self, groups: NDArray[np.bool_]) -> Losses:
        """Return the losses of some groups."""
        return Losses(*(each[groups] for each in self))


def mixed(model: Costs, ngrams: Costs, weight: float) -> Costs:
    """Return the cost of each token under ``weight`` model + (1 - ``weight``) n-grams, in nats.

    Probabilities are interpolated (Mikolov et al. 2010, Recurrent neural network based language
    model, section 3), so those of all tokens sum to one again.

    Args:
        model: cost of each token under the model.
        ngrams: cost of the same tokens under the n-grams.
        weight: of the model, 0 to 1.

    """
    # a weight of 0 or 1 has no logarithm, and n-grams that are not stored have no cost
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log([weight, 1 - weight])
        costs: Costs = -np.logaddexp(logs[0] - model, logs[1] - ngrams)
    return costs


def gain_rows(losses: Losses, bits_per_nat: float) -> dict[str, Row]:
    """Return by how much the model and the mixture are better than the n-grams, with intervals.

    The gain is the difference of the losses in bits per byte. Groups of tokens count as independent
    observations: the interval is Student's 95 % interval of the ratio of sums over groups (Cochran
    1977, Sampling techniques, section 6.3). It says nothing about other seeds of the training.

    Args:
        losses: of groups in which all methods have a loss, with at most one mixture.
        bits_per_nat: bits per byte of one nat per token.

    """
    costs = {MODEL: losses.samples, SLIDING: losses.sliding}
    if losses.mixtures.shape[1]:
        costs[MIXTURE] = losses.mixtures[:, 0]
    total, groups = float(losses.tokens.sum()), len(losses.tokens)
    rows: dict[str, Row] = {}
    for method, cost in costs.items():
        better = (losses.ngrams - cost) * bits_per_nat
        gain = float(better.sum()) / total
        half = math.nan
        if groups > 1:
            residuals = (better - gain * losses.tokens) * groups / total
            half = float(half_width(residuals.std(ddof=1), groups))
        rows[method] = {
            "method": method,
            "baseline": NGRAMS,
            "tokens": int(total),
            "groups": groups,
            "gain": gain,
            "gain_low": gain - half,
            "gain_high": gain + half,
        }
    return rows
