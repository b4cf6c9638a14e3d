"""Objectives that the studies minimize over the number of topics."""

from __future__ import annotations

from typing import Literal, NamedTuple

ObjectiveName = Literal["perplexity", "heldout_perplexity", "coherence", "tabular"]
LdaPrecision = Literal["float64", "float32"]


class LdaFit(NamedTuple):
    """Passes over the corpus, documents per update, and the type of the word probabilities."""

    max_iter: int
    batch_size: int
    precision: LdaPrecision
