"""Statistics of labels that need no gold labels, to see whether a phase made them worse.

A useful statistic rises and falls as the example-F1 does. It is computed for several label sets of
a run of TELEClass, and compared between the sets of a pair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.metrics import adjusted_mutual_info_score, cohen_kappa_score, mutual_info_score
from sklearn.preprocessing import normalize

from experiments.teleclass.corpus import LabeledCorpus
from experiments.teleclass.evaluation import example_f1
from experiments.teleclass.infer import TrainedClassifier, choose
from experiments.teleclass.refinement import ClassVectors, centered, label, label_sets, similarities
from experiments.teleclass.settings import InferSettings, TeleclassSettings
from experiments.teleclass.taxonomy import Taxonomy
from raypipe.store.run_directory import RunDirectory

Vectors = NDArray[np.float32]
Indices = NDArray[np.int64]

#: documents of a run that the statistics see, random halves, and documents of a class mean
_DOCUMENTS, _SPLITS, _MEAN_OF = 3000, 5, 20
#: statistics in the order of the table
_STATISTICS = {
    "kappa": "kappa of the labels and their prediction",
    "adjusted_mutual_information": "... adjusted mutual information",
    "mutual_information": "... mutual information",
    "cohesion": "cohesion",
    "entropy": "entropy of the class sizes",
    "with_description": "agreement with the nearest description",
}
_PAIRS = {
    ("description", "refined"): "nearest description, refined",
    ("description", "means"): "nearest description, means of 20",
    ("refined", "classifier"): "refined, classifier alone",
    ("refined", "gold"): "refined, gold labels",
}
#: smallest difference of the example-F1 that a statistic should see
_LEAST = 0.02


def label_statistics(
    corpus: LabeledCorpus,
    run: RunDirectory,
    settings: TeleclassSettings,
    vectors: Mapping[str, Vectors],
) -> dict[str, dict[str, float]]:
    """Return the example-F1 and the statistics of each label set of a run.

    ``vectors`` are those of the ``documents`` to predict, of the ``train`` documents and of the
    ``classes``. At most 3,000 of the documents are taken.
    """
    taxonomy, documents = corpus.taxonomy, corpus.documents(corpus.predicted)
    assert documents.gold is not None
    shuffled = np.random.default_rng(1).permutation(len(documents))
    keep = np.sort(shuffled[:_DOCUMENTS])
    every = documents.text_list(0, len(documents))
    texts, own = [every[i] for i in keep], vectors["documents"][keep]
    gold = sparse.csr_matrix(documents.gold[keep]).astype(bool)
    sets = {**_label_sets(run, settings, taxonomy, texts, own, vectors), "gold": gold}
    features = TfidfVectorizer(
        sublinear_tf=True, stop_words="english", min_df=2, dtype=np.float32
    ).fit_transform(texts)
    unit = normalize(centered(own, ClassVectors.read(run).center))
    found = {}
    for name, labels in sets.items():
        deepest = _deepest(labels, taxonomy)
        sizes = np.asarray(labels.sum(0), np.float64).ravel()
        shares = sizes[sizes > 0] / sizes.sum()
        found[name] = {
            "example_f1": _mean_f1(labels, gold),
            "entropy": float(-(shares * np.log2(shares)).sum()),
            "cohesion": _cohesion(unit, deepest),
            "with_description": _mean_f1(labels, sets["description"]),
            **_predictability(features, deepest),
        }
    return found


def _label_sets(
    run: RunDirectory,
    settings: TeleclassSettings,
    taxonomy: Taxonomy,
    texts: Sequence[str],
    own: Vectors,
    vectors: Mapping[str, Vectors],
) -> dict[str, sparse.csr_matrix]:
    """Return the labels ``[n, C]`` of the methods, with all ancestors."""
    nearest = similarities(own, normalize(vectors["classes"])).argmax(1)
    first = sparse.csr_matrix(
        (np.ones(len(own), bool), (np.arange(len(own)), nearest)), (len(own), len(taxonomy))
    )
    sets = {"description": taxonomy.closure(first)}
    scores = {
        "refined": ClassVectors.read(run).similarities(own),
        "means": similarities(own, _means_of_nearest(vectors["train"], vectors["classes"])),
    }
    for name, each in scores.items():
        best, _ = label(each, taxonomy, settings.refine)
        sets[name] = taxonomy.closure(label_sets(best, len(taxonomy)))
    probabilities = TrainedClassifier(run, "train", InferSettings()).probabilities(texts, own)
    alone = choose(probabilities, taxonomy, InferSettings(threshold=0.5), 1, 3)
    return sets | {"classifier": sparse.csr_matrix(alone)}


def _means_of_nearest(documents: Vectors, classes: Vectors, rounds: int = 3) -> Vectors:
    """Return class vectors ``[C, d]`` that are set to the mean of their 20 nearest documents."""
    unit, found = normalize(documents), normalize(classes)
    for _ in range(rounds):
        nearest = np.argsort(-(unit @ found.T), axis=0, kind="stable")[:_MEAN_OF]
        found = normalize(unit[nearest].mean(0))
    return np.asarray(found, np.float32)


def _deepest(labels: sparse.csr_matrix, taxonomy: Taxonomy) -> Indices:
    """Return one of the most specific labels of each document, ``[n]``."""
    depths = labels.multiply(np.asarray(taxonomy.depth)[None, :]).tocsr()
    return np.asarray(depths.argmax(1), np.int64).ravel()


def _mean_f1(labels: sparse.csr_matrix, others: sparse.csr_matrix) -> float:
    return float(np.nanmean(example_f1(labels.astype(float), others.astype(float))))


def _cohesion(unit: Vectors, labels: Indices) -> float:
    """Return the mean similarity of the documents ``[n, d]`` to the mean of their class."""
    sums = np.zeros((labels.max() + 1, unit.shape[1]))
    np.add.at(sums, labels, unit)
    return float((unit * normalize(sums)[labels]).sum(1).mean())


def _predictability(features: sparse.csr_matrix, labels: Indices) -> dict[str, float]:
    """Return how well labels ``[n]`` agree with the nearest class centroid of the other half.

    The kappa is the mean of five random splits into halves, the others are of the first split.
    """
    predicted = [_of_other_half(features, labels, split) for split in range(_SPLITS)]
    kappas = [cohen_kappa_score(labels, each) for each in predicted]
    return {
        "kappa": float(np.mean(kappas)),
        "adjusted_mutual_information": float(adjusted_mutual_info_score(labels, predicted[0])),
        "mutual_information": float(mutual_info_score(labels, predicted[0])),
    }


def _of_other_half(features: sparse.csr_matrix, labels: Indices, seed: int) -> Indices:
    """Return the class of the most similar centroid, learned from the other half, ``[n]``."""
    half = np.random.default_rng(seed).permutation(len(labels)) % 2
    predicted = np.empty_like(labels)
    for part in (0, 1):
        known = half != part
        classes, place = np.unique(labels[known], return_inverse=True)
        member = sparse.csr_matrix(
            (np.ones(len(place)), (place, np.arange(len(place)))), (len(classes), len(place))
        )
        closest = (features[~known] @ normalize(member @ features[known]).T).argmax(1)
        predicted[~known] = classes[np.asarray(closest).ravel()]
    return predicted


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of the docs: how often a statistic moves as the example-F1 does."""
    lines = [
        f"| statistic | {' | '.join(_PAIRS.values())} |",
        f"|---|{'---|' * len(_PAIRS)}",
    ]
    for key, text in _STATISTICS.items():
        cells = []
        for before, after in _PAIRS:
            moved = [
                (
                    row["labels"][after][key] - row["labels"][before][key],
                    row["labels"][after]["example_f1"] - row["labels"][before]["example_f1"],
                )
                for row in rows
            ]
            counted = [own * gain > 0 for own, gain in moved if abs(gain) >= _LEAST]
            constant = key == "with_description" and before == "description"
            cells.append("" if constant else f"{sum(counted)} of {len(counted)}")
        lines.append(f"| {text} | {' | '.join(cells)} |")
    return "\n".join(lines)
