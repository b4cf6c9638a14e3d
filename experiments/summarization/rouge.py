"""ROUGE scores.

The values are those of the package ``rouge-score``, with its Porter stemmer: F1 of unigrams,
bigrams and the longest common subsequence (Lin 2004, ROUGE: a package for automatic evaluation
of summaries). With several references the best one counts, separately for each measure.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from rouge_score.rouge_scorer import RougeScorer

#: columns of the tables, with their titles
MEASURES = {"rouge_1": "ROUGE-1", "rouge_2": "ROUGE-2", "rouge_l": "ROUGE-L"}
_TYPES = ("rouge1", "rouge2", "rougeL")


def score(texts: Sequence[str], references: Sequence[Sequence[str]]) -> NDArray[np.float64]:
    """Return the measures of each text, float64 ``[n, 3]``; each text has its references."""
    scorer = RougeScorer(list(_TYPES), use_stemmer=True)
    rows = []
    for text, own in zip(texts, references, strict=True):
        scores = scorer.score_multi(list(own), text)
        rows.append([scores[name].fmeasure for name in _TYPES])
    return np.array(rows, np.float64).reshape(-1, len(_TYPES))
