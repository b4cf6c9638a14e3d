"""Measures of multi-label rankings and label sets, as sums over blocks of documents."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from experiments.teleclass.taxonomy import Taxonomy
from raypipe import StageContext

#: cells compared at a time when gold labels are ranked, which bounds the memory
RANKED_CELLS = 2**22

Floats = NDArray[np.floating[Any]]
Integers = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Counts:
    """Sums over documents, for all classes (position 0) and for those of each level 1 to L.

    Documents without gold labels at a level are in none of that level's sums.

    Attributes:
        documents: int64 [L + 1].
        predicted: int64 [L + 1], predicted labels.
        gold: int64 [L + 1], gold labels.
        example_f1: float64 [L + 1], sums of F1 over documents.
        hits_at_1: int64 [L + 1], gold labels ranked first.
        hits_at_3: int64 [L + 1], gold labels among the first three.
        reciprocal_ranks: float64 [L + 1], sums over gold labels.
        class_hits: int64 [C], documents with the class both predicted and gold.
        class_gold: int64 [C].
        class_predicted: int64 [2, C], among the documents with any gold label, and among those
            with one at the level of the class.

    """

    documents: Integers
    predicted: Integers
    gold: Integers
    example_f1: Floats
    hits_at_1: Integers
    hits_at_3: Integers
    reciprocal_ranks: Floats
    class_hits: Integers
    class_gold: Integers
    class_predicted: Integers

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def to_json(self) -> str:
        """Return the sums as a text."""
        return json.dumps({f.name: getattr(self, f.name).tolist() for f in fields(self)})

    @staticmethod
    def from_json(text: str) -> Counts:
        """Return the sums of :meth:`to_json`."""
        return Counts(**{name: np.array(values) for name, values in json.loads(text).items()})


def count(
    scores: NDArray[np.float32],
    predicted: sparse.csr_matrix,
    gold: sparse.csr_matrix,
    level: Integers,
) -> Counts:
    """Return the sums over one block of documents.

    Args:
        scores: float32 [B, C], the higher the more likely; ``-inf`` is allowed.
        predicted: bool [B, C], the label sets to measure.
        gold: bool [B, C].
        level: int64 [C], from 1, the same for all blocks: :attr:`Taxonomy.depth`.

    Raises:
        ValueError: shapes differ, or a score is NaN.

    """
    if not scores.shape == predicted.shape == gold.shape == (len(scores), len(level)):
        raise ValueError(
            f"scores {scores.shape}, predicted {predicted.shape} and gold {gold.shape} must be "
            f"documents x {len(level)} classes"
        )
    if np.isnan(scores).any():
        row, column = np.argwhere(np.isnan(scores))[0]
        raise ValueError(f"the score of document {row}, class {column} is NaN")
    guess = np.asarray(predicted.toarray(), dtype=np.bool_)
    truth = np.asarray(gold.toarray(), dtype=np.bool_)
    everywhere = truth.any(axis=1)
    class_predicted = np.zeros((2, len(level)), dtype=np.int64)
    class_predicted[0] = guess[everywhere].sum(axis=0)
    sums = [_sums(scores[everywhere], guess[everywhere], truth[everywhere])]
    for number in range(1, int(level.max(initial=0)) + 1):
        classes = np.flatnonzero(level == number)
        rows = np.flatnonzero(truth[:, classes].any(axis=1))
        cells = np.ix_(rows, classes)
        class_predicted[1, classes] = guess[cells].sum(axis=0)
        sums.append(_sums(scores[cells], guess[cells], truth[cells]))
    arrays = [np.array(values) for values in zip(*sums, strict=True)]
    arrays += [(guess & truth).sum(axis=0), truth.sum(axis=0), class_predicted]
    return Counts(*arrays)


def example_f1(predicted: sparse.csr_matrix, gold: sparse.csr_matrix) -> NDArray[np.float64]:
    """Return the F1 of each document's label set ``[B]``; NaN without gold labels."""
    guess, truth = predicted.astype(np.float64), gold.astype(np.float64)
    both = np.asarray(guess.multiply(truth).sum(axis=1)).ravel()
    number = np.asarray(truth.sum(axis=1)).ravel()
    sizes = np.asarray(guess.sum(axis=1)).ravel() + number
    with np.errstate(invalid="ignore"):
        values: NDArray[np.float64] = np.where(number > 0, 2 * both / sizes, np.nan)
    return values


def summarize(counts: Counts, level: Integers) -> list[dict[str, Any]]:
    """Return the measures for level "all", then for "1", "2", ...; NaN without gold labels.

    Example-F1 is 2|P∩G| / (|P| + |G|) averaged over documents, precision at k is |top-k∩G| / k
    averaged over documents, as in TELEClass (Zhang et al., WWW 2025, section 4). MRR is the mean
    of 1/rank over all pairs of document and gold label, where a rank counts only classes that are
    not gold, including ties, as in PinSage (Ying et al., KDD 2018, eq. 2, unscaled). Ranks are
    among the classes of the level. Macro-F1 averages over the classes that occur as gold labels.

    Args:
        counts: the sum of all blocks.
        level: as given to :func:`count`.

    Returns:
        level, documents, classes (at the level), example_f1, precision_at_1, precision_at_3, mrr,
        micro_f1, macro_f1, labels_mean and gold_mean (labels per document).

    """
    rows = []
    with np.errstate(divide="ignore", invalid="ignore"):
        class_f1 = 2 * counts.class_hits / (counts.class_predicted + counts.class_gold)
        for number in range(len(counts.documents)):
            classes = level == number if number else np.ones(len(level), dtype=np.bool_)
            occurring = classes & (counts.class_gold > 0)
            documents, gold = counts.documents[number], counts.gold[number]
            predicted = counts.predicted[number]
            hits = counts.class_hits[classes].sum()
            measures = {
                "example_f1": counts.example_f1[number] / documents,
                "precision_at_1": counts.hits_at_1[number] / documents,
                "precision_at_3": counts.hits_at_3[number] / (3 * documents),
                "mrr": counts.reciprocal_ranks[number] / gold,
                "micro_f1": 2 * hits / (predicted + gold),
                "macro_f1": class_f1[min(number, 1), occurring].sum() / occurring.sum(),
                "labels_mean": predicted / documents,
                "gold_mean": gold / documents,
            }
            rows.append(
                {
                    "level": str(number or "all"),
                    "documents": int(documents),
                    "classes": int(classes.sum()),
                    **{name: float(value) for name, value in measures.items()},
                }
            )
    return rows


def _sums(scores: Floats, guess: Mask, truth: Mask) -> tuple[int | float, ...]:
    """Return the first seven fields of :class:`Counts` for documents that all have gold labels."""
    predicted, gold = guess.sum(axis=1), truth.sum(axis=1)
    at_1, at_3 = _hits(scores, truth)
    return (
        len(truth),
        int(predicted.sum()),
        int(gold.sum()),
        float((2 * (guess & truth).sum(axis=1) / (predicted + gold)).sum()),
        at_1,
        at_3,
        _reciprocal_ranks(scores, truth),
    )


def _hits(scores: Floats, truth: Mask) -> tuple[int, int]:
    """Count gold labels among the first one and three of each row; ties go to the lower class."""
    # classes already ranked get -inf, so raise -inf scores above it
    left = np.maximum(scores, np.finfo(scores.dtype).min)
    rows = np.arange(len(scores))
    hits = [0, 0, 0]
    for rank in range(min(3, scores.shape[1])):
        best = left.argmax(axis=1)
        hits[rank] = int(truth[rows, best].sum())
        left[rows, best] = -np.inf
    return hits[0], sum(hits)


def _reciprocal_ranks(scores: Floats, truth: Mask) -> float:
    """Sum 1/rank over gold labels; a rank counts the other classes scored at least as high."""
    others = np.where(truth, np.nan, scores)  # NaN is not at least as high as anything
    rows, columns = np.nonzero(truth)
    total = 0.0
    step = max(1, RANKED_CELLS // max(1, scores.shape[1]))
    for start in range(0, len(rows), step):
        row, column = rows[start : start + step], columns[start : start + step]
        ranks = 1 + (others[row] >= scores[row, column][:, None]).sum(axis=1)
        total += float((1 / ranks).sum())
    return total


def record_measures(
    context: StageContext, taxonomy: Taxonomy, method: str, documents: str, counts: Counts
) -> None:
    """Write rows of the table ``measures``, one per level, and report the measures."""
    if not counts.documents[0]:
        context.say(f"{method} on {documents}: no document has a gold label to measure it by")
        return
    about = {"phase": context.stage.name, "method": method, "documents_of": documents}
    rows = {
        f"{context.stage.name}/{method}/{documents}/{row['level']}": about
        | {name: None if value != value else value for name, value in row.items()}  # NaN
        for row in summarize(counts, taxonomy.depth)
    }
    context.ledger.put("measures", rows)
    whole = rows[f"{context.stage.name}/{method}/{documents}/all"]
    names = ("example_f1", "precision_at_1", "precision_at_3", "mrr", "macro_f1")
    shown = ", ".join(f"{name} {whole[name]:.3f}" for name in names)
    context.say(f"{method} on {documents}: {shown}")
