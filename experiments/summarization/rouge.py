"""ROUGE of written summaries, and the sentences that a document begins with.

The values are those of the package ``rouge-score``, with its Porter stemmer: F1 of unigrams,
bigrams and the longest common subsequence (Lin 2004, ROUGE: a package for automatic evaluation
of summaries). Of several references the best one counts, for each measure by itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from rouge_score.rouge_scorer import RougeScorer

MEASURES = ("rouge_1", "rouge_2", "rouge_l")
_TYPES = ("rouge1", "rouge2", "rougeL")
#: a sentence ends at white space after its full stop, or at an empty line
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n\s*\n")


def score(texts: Sequence[str], references: Sequence[Sequence[str]]) -> NDArray[np.float64]:
    """The measures of each text, ``[n, 3]``; ``references`` are those of each."""
    scorer = RougeScorer(list(_TYPES), use_stemmer=True)
    rows = []
    for text, own in zip(texts, references, strict=True):
        found = scorer.score_multi(list(own), text)
        rows.append([found[name].fmeasure for name in _TYPES])
    return np.array(rows, np.float64).reshape(-1, len(_TYPES))


def lead(document: str, sentences: int) -> str:
    """The first sentences of a document."""
    parts = [part for part in _SENTENCE_END.split(document.strip()) if part]
    return " ".join(parts[:sentences])
