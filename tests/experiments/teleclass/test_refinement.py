"""The arithmetic of phase 2 and of the measures, against loops written from their definitions."""

from __future__ import annotations

from functools import partial, reduce
from itertools import pairwise
from operator import add

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import sparse
from sklearn.metrics import f1_score
from sklearn.preprocessing import normalize

from benchmarks.teleclass import measure_refine
from experiments.teleclass import refinement
from experiments.teleclass.evaluation import count, summarize
from experiments.teleclass.settings import PUBLISHED_REFINE, RefineSettings
from experiments.teleclass.taxonomy import Taxonomy
from tests.experiments.teleclass.conftest import taxonomy_of
from tests.experiments.teleclass.test_corpus import graphs

SEEDS = st.integers(0, 2**32 - 1)
CUTS = st.lists(st.integers(0, 8), max_size=3)


def related_to(taxonomy: Taxonomy) -> sparse.csr_matrix:
    """Each class with itself, its ancestors and its descendants, bool ``[C, C]``."""
    return (taxonomy.ancestors + taxonomy.ancestors.T).astype(bool)


def rough(draw: np.random.Generator, *shape: int) -> np.ndarray:
    """Scores of a few values only, so that many are equal, some of them NEVER."""
    scores = draw.integers(-3, 4, shape).astype(np.float32) / 4
    scores[draw.random(shape) < 0.1] = refinement.NEVER
    return scores


def in_order(scores: np.ndarray) -> list[int]:
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))


@given(SEEDS, st.integers(1, 7), st.integers(0, 40), st.integers(1, 4))
def test_any_split_and_any_order_of_merges_is_one_sort(seed, k, rows, classes):
    draw = np.random.default_rng(seed)
    scores = rough(draw, rows, classes)
    cuts = np.sort(draw.integers(0, rows + 1, 5))
    blocks = [(a, scores[a:b]) for a, b in zip([0, *cuts], [*cuts, rows], strict=True)]
    draw.shuffle(blocks)
    tasks = [[refinement.TopDocuments.of_block(scores[:0], 0, k)] for _ in range(3)]
    for start, block in blocks:
        tasks[draw.integers(3)].append(refinement.TopDocuments.of_block(block, start, k))
    draw.shuffle(tasks)
    best = refinement.TopDocuments.merged(
        [refinement.TopDocuments.merged(parts, k) for parts in tasks], k
    )
    members = [
        (c, row, scores[row, c])
        for c in range(classes)
        for row in [row for row in in_order(scores[:, c]) if scores[row, c] > refinement.NEVER][:k]
    ]
    assert list(zip(*(part.tolist() for part in best), strict=True)) == members


@given(SEEDS, graphs(), st.integers(1, 3))
def test_margins_are_those_of_the_definition(seed, graph, ranks):
    size, edges = graph
    related = related_to(taxonomy_of(map(str, range(size)), [map(str, edge) for edge in edges]))
    scores = rough(np.random.default_rng(seed), 6, size)
    expected, unrelated = scores.copy(), ~related.toarray()
    for (row, c), value in np.ndenumerate(scores):
        rivals = scores[row, unrelated[c]]
        if (rivals > refinement.NEVER).any():
            expected[row, c] = value - rivals.max()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(refinement, "_RANKED", ranks)  # the rest goes another way
        found = refinement.margins(scores, related)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.filterwarnings("error")
def test_a_document_without_a_vector_is_none_of_the_documents_of_a_class():
    documents = np.array([[0, 0], [1, 0], [0.6, 0.8]], np.float32)
    classes = np.array([[1, 0], [0, 1], [0, 0]], np.float32)
    scores = refinement.similarities(documents, classes)
    nothing_related = sparse.csr_matrix(np.eye(3, dtype=bool))
    for values in (scores, refinement.margins(scores, nothing_related)):
        best = refinement.TopDocuments.of_block(values, 0, 5)
        assert sorted(zip(best.classes, best.rows, strict=True)) == [(0, 1), (0, 2), (1, 1), (1, 2)]


@given(SEEDS, st.integers(1, 6), st.sampled_from([0.0, 1.0, 10.0]))
def test_class_vectors_are_weighted_sums_of_unit_vectors_and_anchors(seed, classes, anchor):
    draw = np.random.default_rng(seed)
    documents = draw.normal(size=(8, 3)).astype(np.float32)
    documents[draw.random(8) < 0.3] = 0
    earlier = normalize(draw.normal(size=(classes, 3))).astype(np.float32)
    earlier[draw.random(classes) < 0.3] = 0
    own, rows = np.nonzero(draw.random((classes, 8)) < 0.4)
    weights = draw.uniform(0.1, 2, len(rows)).astype(np.float32)
    cut = draw.integers(len(rows) + 1)  # two tasks
    parts = [
        refinement.sums(own[part], rows[part], weights[part], documents, classes)
        for part in (slice(cut), slice(cut, None))
    ]
    found = refinement.class_vectors(parts[0] + parts[1], earlier, anchor * earlier)
    assert found.dtype == np.float32
    for c in range(classes):
        members = [place for place in np.flatnonzero(own == c) if documents[rows[place]].any()]
        expected = earlier[c]
        if members and earlier[c].any():
            added = (weights[members] / weights.mean()) @ normalize(documents[rows[members]])
            expected = normalize([added + anchor * earlier[c]])[0]
        np.testing.assert_allclose(found[c], expected, atol=1e-4)


def test_candidates_are_all_documents_in_the_published_settings():
    scores = np.array([[0.5, 0.4, 0.3], [0.1, 0.2, 0.3]], np.float32)
    related = related_to(taxonomy_of("012", ["01"]))
    published = RefineSettings.model_validate(PUBLISHED_REFINE)
    np.testing.assert_array_equal(refinement.candidates(scores, related, published), scores)
    own = refinement.candidates(scores, related, RefineSettings())
    np.testing.assert_allclose(
        own, [[0.2, 0.1, refinement.NEVER], [refinement.NEVER, refinement.NEVER, 0.1]], atol=1e-6
    )


@pytest.mark.filterwarnings("error")
@given(SEEDS, st.integers(1, 9), st.integers(1, 5), st.integers(0, 4))
@example(0, 1, 5, 4).via("one class, many labels wanted")
def test_labels_end_at_the_largest_gap(seed, classes, least, more):
    """Of the best ``most + 1`` classes the first ``least`` are taken, and those before the gap."""
    most = least + more
    scores = rough(np.random.default_rng(seed), 8, classes)
    labels, width = refinement.cut_at_gap(*refinement.best_labels(scores, most), least)
    assert labels.shape == (8, most)
    for row, values in enumerate(scores):
        order = [c for c in in_order(values) if values[c] > refinement.NEVER]
        gaps = [float(values[a] - values[b]) for a, b in pairwise(order[: most + 1])]
        cut = max(gaps.index(max(gaps)) + 1 if gaps else 1, least)
        expected = order[:cut]
        assert labels[row].tolist() == expected + [-1] * (most - len(expected))
        assert width[row] == (gaps[cut - 1] if cut <= len(gaps) else 0)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_memory_does_not_grow_with_the_documents():
    rows = measure_refine([100_000, 1_000_000])["rows"]
    peaks = [row["peak_bytes"] for row in rows]
    assert peaks[1] < min(4e9, 2 * peaks[0])


@settings(max_examples=40)
@given(SEEDS, st.integers(1, 8), st.integers(1, 7), st.floats(0, 1), CUTS)
def test_every_level_equals_the_definitions_and_sklearn(seed, documents, classes, density, cuts):
    """Also where the counts are those of blocks of documents, added up."""
    draw = np.random.default_rng(seed)
    scores = rough(draw, documents, classes)
    labels = list(map(sparse.csr_matrix, draw.random((2, documents, classes)) < density))
    level = draw.integers(1, draw.integers(1, 5) + 1, size=classes)
    bounds = sorted({0, len(scores), *(min(cut, len(scores)) for cut in cuts)})
    blocks = [slice(0), *(slice(*pair) for pair in pairwise(bounds))]
    counts = [count(scores[block], *(each[block] for each in labels), level) for block in blocks]
    table = summarize(reduce(add, reversed(counts)), level)
    assert [row["level"] for row in table] == ["all", *map(str, range(1, level.max() + 1))]
    for number, row in enumerate(table):
        classes = np.flatnonzero((level == number) | (number == 0))
        kept = np.flatnonzero(labels[1].toarray()[:, classes].any(1))
        assert (row["documents"], row["classes"]) == (len(kept), len(classes))
        if not len(kept):
            assert np.isnan([row[name] for name in ("example_f1", "precision_at_3", "mrr")]).all()
            continue
        cells = np.ix_(kept, classes)
        # with one class more: scikit-learn takes a single column for something else
        guess, truth = (np.pad(each.toarray()[cells], ((0, 0), (0, 1))) for each in labels)
        f1 = partial(f1_score, truth, guess, zero_division=0)
        best, ranks = {1: [], 3: []}, []
        for own, values in zip(truth[:, :-1], scores[cells], strict=True):
            for k, shares in best.items():
                shares.append(own[in_order(values)[:k]].sum() / k)
            ranks += [1 + (~own & (values >= values[c])).sum() for c in np.flatnonzero(own)]
        expected = {
            "example_f1": f1(average="samples"),
            "micro_f1": f1(average="micro"),
            "macro_f1": f1(average="macro", labels=np.flatnonzero(truth.any(0))),
            "precision_at_1": np.mean(best[1]),
            "precision_at_3": np.mean(best[3]),
            "mrr": np.mean(1 / np.array(ranks)),
            "labels_mean": guess.sum(1).mean(),
            "gold_mean": truth.sum(1).mean(),
        }
        assert {name: row[name] for name in expected} == pytest.approx(expected)


def test_a_score_that_is_no_number_is_refused():
    labels = sparse.csr_matrix((2, 3), dtype=np.bool_)
    scores = np.array([[0, 0, 0], [0, 0, np.nan]], np.float32)
    with pytest.raises(ValueError, match="document 1, class 2 is NaN"):
        count(scores, labels, labels, np.ones(3, np.int64))
