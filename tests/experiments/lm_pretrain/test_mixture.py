"""Gains of the model and of the mixture over n-grams, with their intervals."""

from __future__ import annotations

import math

import numpy as np

from experiments.lm_pretrain.evaluation import Losses, gain_rows


def losses(groups: int, gain: float, noise: float, seed: int = 0, size: int = 100) -> Losses:
    """Groups of tokens in which the sliding window is better than the n-grams by ``gain``."""
    generator = np.random.default_rng(seed)
    tokens = np.full(groups, float(size))
    ngrams = tokens * generator.uniform(2, 4, groups)
    sliding = ngrams - tokens * (gain + noise * generator.standard_normal(groups))
    return Losses(tokens, ngrams + tokens, sliding, ngrams, (sliding - tokens)[:, None])


def test_the_interval_has_the_true_gain_as_often_as_it_says() -> None:
    rows = [gain_rows(losses(20, 0.1, 0.3, seed), 1.0)["sliding window"] for seed in range(400)]
    inside = np.mean([row["gain_low"] <= 0.1 <= row["gain_high"] for row in rows])
    assert 0.92 < inside < 0.98


def test_one_group_has_no_interval_and_no_weight_has_no_mixture() -> None:
    found = losses(1, 0.1, 0)
    rows = gain_rows(found._replace(mixtures=np.empty((1, 0))), 1.0)
    assert [*rows] == ["language model", "sliding window"]
    assert math.isnan(rows["sliding window"]["gain_low"])
