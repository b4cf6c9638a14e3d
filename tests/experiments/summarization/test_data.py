"""Documents and summaries, sentences taken from a document as its summary, and ROUGE."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.feature_extraction.text import TfidfVectorizer

from experiments.common.corpora.corpus import CorpusError
from experiments.common.corpora.docstrings import DocstringRecord
from experiments.summarization import data as pairs
from experiments.summarization.baselines import central, lead, score
from experiments.summarization.data import PairSplits, load
from experiments.summarization.evaluation import gains
from experiments.summarization.settings import SummarizationDataSettings
from tests.experiments.rows import write_rows

ROWS = [{"document": f"text {i} of some words.", "summary": f"text {i}"} for i in range(60)]


def of_files(*files: Path, **given: Any) -> PairSplits:
    return load(SummarizationDataSettings(source="files", files=files, **given))


def everything(data: PairSplits) -> dict[str, tuple[str, ...]]:
    return {
        document: tuple(summaries)
        for part in (data.train, data.held_out)
        for document, summaries in zip(part.documents, part.summaries, strict=True)
    }


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.csv", "a.csv.gz", "a.parquet"])
def test_each_format_holds_the_same_pairs(tmp_path, name):
    data = of_files(write_rows(tmp_path / name, ROWS))
    assert everything(data) == {row["document"]: (row["summary"],) for row in ROWS}
    assert not set(data.train.documents) & set(data.held_out.documents)
    assert 0 < len(data.held_out) < 20


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_list_of_documents_is_joined_and_one_of_summaries_is_references(tmp_path, name):
    rows = [{"source": ["One.", f"Two {i}.", " "], "refs": ["a", f"b{i}"]} for i in range(60)]
    data = of_files(write_rows(tmp_path / name, rows), document="source", summary="refs")
    assert everything(data) == {f"One. Two {i}.": ("a", f"b{i}") for i in range(60)}


def test_each_file_is_read_by_the_first_of_the_names_it_has(tmp_path):
    first = write_rows(tmp_path / "a.jsonl", ROWS)
    other = write_rows(tmp_path / "b.csv", [{"dialogue": f"x {i}", "gist": "y"} for i in range(60)])
    names = {"document": ["dialogue", "document"], "summary": ["gist", "summary"]}
    found = everything(of_files(first, other, **names))
    assert len(found) == 120
    assert found["x 7"] == ("y",)


def test_what_chooses_the_step_is_neither_trained_on_nor_held_out(tmp_path):
    rows = [{"document": f"text {i % 400}", "summary": f"{i}"} for i in range(800)]
    first = write_rows(tmp_path / "a.jsonl", rows)
    whole, divided = (of_files(first, validation_share=share) for share in (0.0, 0.2))
    (note,) = whole.notes
    assert note.startswith("no validation part: data.validation_share = 0 of ")
    assert f" {len(whole.train)} training rows is 0, and 20 are needed" in note
    assert not len(whole.validation)
    assert whole.held_out == divided.held_out
    parts = (divided.train, divided.validation, divided.held_out)
    assert sum(len(part) for part in parts) == 800
    assert sum(len(set(part.documents)) for part in parts) == 400
    second, third = (write_rows(tmp_path / f"{n}.jsonl", rows[:n]) for n in (9, 3))
    given = of_files(first, validation_files=[second], held_out_files=[third])
    assert given.validation.documents == [row["document"] for row in rows[3:9]]
    assert len(given.held_out) == 3
    assert len(given.train) == 800 - 2 * 9
    assert given.notes == (
        "6 documents of data.files are left out: data.held_out_files has them, too",
        "3 documents of data.validation_files are left out: data.held_out_files has them, too",
        "12 documents of data.files are left out: data.validation_files has them, too",
    )
    with pytest.raises(CorpusError, match=r"every document is also in data.held_out_files"):
        of_files(first, held_out_files=[first])


def test_a_docstring_s_first_line_is_the_summary_of_its_body(monkeypatch):
    body = "It has five words here"
    texts = [
        f"Do it.\n\n{body}.",
        f"Do it again.\n\n{body}.",  # the same body: once
        f"A sentence that goes\non.\n\n{body} too.",  # not one line
        "Do it.\n\nToo short.",
        "Alone.",
        *(f"Do it {i}.\n  \n{body}, {i}.\n\nAnd more." for i in range(60)),
    ]
    records = [DocstringRecord("m", f"f{i}", "function", text) for i, text in enumerate(texts)]
    monkeypatch.setattr(pairs, "docstring_records", lambda: iter(records))
    data = load(SummarizationDataSettings(min_words=5))
    found = everything(data)
    expected = {f"{body}, {i}.\n\nAnd more.": (f"Do it {i}.",) for i in range(60)}
    assert found == {**expected, f"{body}.": ("Do it.",)}
    assert load(SummarizationDataSettings(min_words=2)).content != data.content
    with pytest.raises(CorpusError, match=r"data.min_words = 500"):
        load(SummarizationDataSettings(min_words=500))


def test_the_standard_library_has_thousands_of_pairs_of_which_no_body_is_on_both_sides():
    data = load(SummarizationDataSettings())
    assert len(data.train) > 1500
    assert len(data.held_out) > 100
    assert not set(data.train.documents) & set(data.held_out.documents)
    assert not any("\n" in summary for (summary,) in data.train.summaries)


STORY = (
    "It rained. The cat chased the red mouse. The red mouse hid from the cat. "
    "Nothing else happened. The dog saw the cat and a bird."
)


def test_the_lead_is_the_first_sentences():
    document = "First one.  Is it?\nYes, v1.5 of\nit\n\nA heading\n\nEnd"
    assert lead(document, 2) == "First one. Is it?"
    assert lead(document, 9) == "First one. Is it? Yes, v1.5 of\nit A heading End"


def test_centrality_is_the_stationary_distribution_of_the_graph():
    sentences = [f"{part}." for part in STORY.rstrip(".").split(". ")]
    vectors = TfidfVectorizer().fit_transform(sentences)
    weights = (vectors @ vectors.T).toarray() - np.eye(len(sentences))
    sums = weights.sum(1, keepdims=True).round(9)
    share = np.where(sums > 0, weights / np.maximum(sums, 1e-9), 1 / len(sentences))
    walk = 0.15 / len(sentences) + 0.85 * share
    values, columns = np.linalg.eig(walk.T)
    order = np.argsort(-np.abs(columns[:, values.real.argmax()].real))
    assert sentences[order[0]] == "The cat chased the red mouse."
    for number in (1, 2, 3):
        expected = " ".join(sentences[place] for place in sorted(order[:number]))
        assert central([STORY, STORY], [number]) == [[expected, expected]]


@pytest.mark.parametrize("document", ["", "One sentence only.", "1 2. 3! 4?", "? ! ."])
def test_short_and_wordless_documents_have_a_summary(document):
    assert central([document], [2]) == [[lead(document, 2)]]


def test_rouge_is_stemmed_and_the_best_reference_counts_for_each_measure():
    texts = ["a b c d", "returning values", ""]
    # by unigrams the second is best (4 of 4 and 4), by bigrams the first (2 of 3 and 3)
    found = score(texts, [["a b c x", "d c b a"], ["returns value"], ["a b"]])
    np.testing.assert_allclose(found, [[1, 2 / 3, 3 / 4], [1, 1, 1], [0, 0, 0]])
    assert score([], []).shape == (0, 3)


def test_the_gain_has_an_interval_that_holds_what_is_sure():
    draw = np.random.default_rng(1)
    found = gains(np.stack([np.full(50, 0.2), draw.normal(0, 1, 50), draw.normal(9, 1, 50)], 1))
    assert found["rouge_1_gain"] == found["rouge_1_gain_low"] == pytest.approx(0.2)
    assert found["rouge_2_gain_low"] < 0 < found["rouge_2_gain_high"]
    assert 8 < found["rouge_l_gain_low"] < found["rouge_l_gain"] < found["rouge_l_gain_high"] < 10
    assert gains(np.ones((1, 3)))["rouge_1_gain_low"] == 1
