"""How a topic model is fitted: what a worker needs of the settings, and nothing else."""

from __future__ import annotations

from typing import Literal, NamedTuple

LdaPrecision = Literal["float64", "float32"]


class LdaFit(NamedTuple):
    """How a topic model is fitted: passes, documents a step, type of the words' probabilities."""

    max_iter: int
    batch_size: int
    precision: LdaPrecision
