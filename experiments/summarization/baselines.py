"""Baselines of the summarizer, sentences of the documents, and ROUGE with intervals of gains."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from scipy import stats
from sklearn.feature_extraction.text import TfidfVectorizer

from experiments.common.evaluation import measure_rows
from experiments.summarization.tables import CENTRAL, LEAD, LEADS, ROUGE
from experiments.summarization.tokenizer import read_documents
from raypipe import RunDirectory, StageContext, artifacts

_TYPES = ("rouge1", "rouge2", "rougeL")
CONFIDENCE = 0.95
_RESAMPLES = 2000
#: a sentence ends at white space after a full stop, or at an empty line
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n\s*\n")
#: sentences of a longer document that are compared, and the rounds of the power iteration
_MOST_SENTENCES, _ROUNDS = 500, 50
_DAMPING = 0.85


def run_baselines(context: StageContext) -> None:
    """Record the measures of the baselines, and their scores; they need no trained model."""
    documents = read_documents(context.run_dir)
    texts, references = (documents.column(name).to_pylist() for name in ("text", "references"))
    found = context.call("baselines/central", central, texts, tuple(CENTRAL.values()))
    summaries = {name: [lead(text, number) for text in texts] for name, number in LEADS.items()}
    summaries |= dict(zip(CENTRAL, found, strict=True))
    scores = {method: score(written, references) for method, written in summaries.items()}
    context.ledger.put("measures", measured(context, summaries, scores))
    columns = {name: pa.array(values.tolist()) for name, values in scores.items()}
    artifacts.write_parquet(context.run_dir, _scores_path(context.run_dir), pa.table(columns))


def _scores_path(run_dir: RunDirectory) -> str:
    return run_dir.artifact("baselines", "scores.parquet")


def baseline_scores(run_dir: RunDirectory) -> dict[str, NDArray[np.float64]]:
    """Return the scores of the baselines on each held-out document ``[n, 3]``, by name."""
    table = artifacts.read_parquet(run_dir, _scores_path(run_dir))
    return {name: np.array(table.column(name).to_pylist()) for name in table.column_names}


def measured(
    context: StageContext,
    summaries: Mapping[str, Sequence[str]],
    scores: Mapping[str, NDArray[np.float64]],
) -> dict[str, dict[str, Any]]:
    """Return the rows of methods, with their gains over the lead sentence."""
    means = {
        method: dict(zip(ROUGE, scores[method].mean(0).tolist(), strict=True))
        for method in summaries
    }
    documents = len(scores[LEAD])
    rows = measure_rows(context, {"documents": documents}, means)
    for method, row in rows.items():
        row["words"] = _mean_words(summaries[method])
        if method != LEAD:
            row |= gains(scores[method] - scores[LEAD])
    return rows


def score(texts: Sequence[str], references: Sequence[Sequence[str]]) -> NDArray[np.float64]:
    """Return ROUGE-1, ROUGE-2 and ROUGE-L of each text, float64 ``[n, 3]``.

    They are F1 of unigrams, bigrams and the longest common subsequence, with Porter's stemmer (Lin
    2004, ROUGE: a package for automatic evaluation of summaries). With several references the best
    one counts, separately for each measure.
    """
    from rouge_score.rouge_scorer import RougeScorer  # slow to import: nltk

    scorer = RougeScorer(list(_TYPES), use_stemmer=True)
    rows = []
    for text, own in zip(texts, references, strict=True):
        scores = scorer.score_multi(list(own), text)
        rows.append([scores[name].fmeasure for name in _TYPES])
    return np.array(rows, np.float64).reshape(-1, len(_TYPES))


def gains(differences: NDArray[np.float64]) -> dict[str, float]:
    """Return the mean gain of each measure over a baseline, with its interval.

    Args:
        differences: per document, ``[n, 3]``.

    Returns:
        ``<measure>_gain``, and ``_low`` and ``_high``: the 95 % percentile bootstrap over documents
        (Efron, Tibshirani 1993, An introduction to the bootstrap, section 13.3).

    """
    found: dict[str, float] = {}
    for name, column in zip(ROUGE, differences.T, strict=True):
        low = high = float(column.mean())
        if len(column) > 1:
            low, high = stats.bootstrap(
                (column,),
                np.mean,
                n_resamples=_RESAMPLES,
                confidence_level=CONFIDENCE,
                method="percentile",
                rng=np.random.default_rng(0),
            ).confidence_interval
        found[f"{name}_gain"] = float(column.mean())
        found |= {f"{name}_gain_low": float(low), f"{name}_gain_high": float(high)}
    return found


def _mean_words(texts: Sequence[str]) -> float:
    counts = pc.list_value_length(pc.utf8_split_whitespace(pa.array(texts, pa.large_string())))
    return float(pc.mean(counts).as_py())


def lead(document: str, sentences: int) -> str:
    """Return the first sentences of a document."""
    return " ".join(_sentences(document)[:sentences])


def central(documents: Sequence[str], numbers: Sequence[int]) -> list[list[str]]:
    """Task: return for each number that many of the most central sentences of each document.

    They keep their order. Centrality is that of LexRank (Erkan and Radev 2004, "LexRank:
    graph-based lexical centrality as salience in text summarization"): the PageRank of a sentence
    among those of its document, with the cosine of their TF-IDF vectors as weights. A sentence has
    no weight to itself. Of equally central ones the first are taken.
    """
    parts = [_sentences(document)[:_MOST_SENTENCES] for document in documents]
    orders = [_by_centrality(sentences) for sentences in parts]
    return [
        [
            " ".join(sentences[place] for place in sorted(order[:number]))
            for sentences, order in zip(parts, orders, strict=True)
        ]
        for number in numbers
    ]


def _by_centrality(sentences: Sequence[str]) -> list[int]:
    """Return the places of sentences, the most central first."""
    total = len(sentences)
    if total < 2:
        return list(range(total))
    try:
        vectors = TfidfVectorizer().fit_transform(sentences)
    except ValueError:  # no word in any of them
        return list(range(total))
    weights = (vectors @ vectors.T).toarray()
    np.fill_diagonal(weights, 0)
    sums = weights.sum(1, keepdims=True)
    share = np.where(sums > 0, weights / np.where(sums > 0, sums, 1), 1 / total)
    rank = np.full(total, 1 / total)
    for _ in range(_ROUNDS):
        rank = (1 - _DAMPING) / total + _DAMPING * rank @ share
    return [int(place) for place in np.argsort(-rank.round(12), kind="stable")]


def _sentences(document: str) -> list[str]:
    return [part for part in _SENTENCE_END.split(document.strip()) if part]
