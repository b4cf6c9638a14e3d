"""Options of fitting a topic model; apart from the settings, so that LDA workers stay small."""

from __future__ import annotations

from typing import Literal, NamedTuple

LdaPrecision = Literal["float64", "float32"]


class LdaFit(NamedTuple):
    """Passes over the corpus, documents per update, and the type of the word probabilities."""

    max_iter: int
    batch_size: int
    precision: LdaPrecision
