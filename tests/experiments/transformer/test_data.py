"""Files as the transformer and its baselines take them, and every refusal of a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from experiments.common.corpora.corpus import CorpusError
from experiments.common.corpora.docstrings import DocstringRecord
from experiments.transformer import data as files
from experiments.transformer.baselines import methods, predict
from experiments.transformer.comparison import measures
from experiments.transformer.settings import TransformerDataSettings
from tests.experiments.rows import ROWS, frame, write_rows
from tests.scenario import cases


def table(path: Path, **given) -> files.Splits:
    settings = {"source": "table", "file": path, "target": "y", **given}
    return files.load(TransformerDataSettings.model_validate(settings), None)


def texts(path: Path, **given) -> files.Splits:
    settings = {"source": "sequences", "file": path, **given}
    return files.load(TransformerDataSettings.model_validate(settings), None)


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".csv.gz"])
def test_columns_are_numbers_or_categories(tmp_path, suffix):
    paths = (write_rows(tmp_path / name, frame()) for name in (f"rows{suffix}", "same.parquet"))
    data, same = (table(path, ignore=["price"]) for path in paths)
    numeric = [column.name for column in data.columns if isinstance(column, files.Numeric)]
    assert numeric == ["size", "gap", "many"]
    assert data.target.classes == ("large", "small")
    # unknown, missing and the values; the last says where gap is missing
    assert data.sizes() == {
        "vocabulary": 0, "numeric": 3, "categories": (5, 6, 4, 2),
        "kind": "classification", "outputs": 2,
    }  # fmt: skip
    np.testing.assert_array_equal(data.train.target, same.train.target)
    one, other = (files.encode_rows(each.columns, each.train.inputs) for each in (data, same))
    assert one.equals(other)


def test_standardized_columns_have_mean_0_and_deviation_1_on_the_training_rows(tmp_path):
    data = table(write_rows(tmp_path / "rows.parquet", frame()), target="price")
    encoded = files.encode_rows(data.columns, data.train.inputs)
    numeric, categories = (np.array(encoded[name].to_pylist()) for name in encoded.column_names)
    missing = data.train.inputs["gap"].is_null(nan_is_null=True).to_numpy()
    np.testing.assert_array_equal(categories[:, -1], missing)
    assert set(numeric[missing, 1]) == {0.0}
    numeric[missing, 1] = np.nan
    for values in (*numeric.T, data.train.target):
        np.testing.assert_allclose([np.nanmean(values), np.nanstd(values)], [0, 1], atol=1e-5)
    own = data.target.mean + data.target.deviation * data.held_out.target
    assert 800 < own.min() < own.max() < 1600


def test_a_test_file_is_the_test(tmp_path):
    rows = frame()
    path = write_rows(tmp_path / "rows.csv", rows)
    other = write_rows(tmp_path / "other.csv", rows.head(7).assign(colour="violet"))
    data = table(path, test_file=other)
    assert (len(data.train.target), len(data.held_out.target)) == (ROWS, 7)
    encoded = files.encode_rows(data.columns, data.held_out.inputs)["categories"].to_pylist()
    assert {row[0] for row in encoded} == {0}  # an unknown color


@pytest.mark.parametrize(("values", "kind", "expected"), cases(__file__, "kinds"))
def test_the_kind_follows_from_the_target(values, kind, expected):
    column = pa.chunked_array([values])
    assert files.make_target(column, column, kind, 20, "y")[0].kind == expected


def test_a_label_is_a_value_or_an_element_of_a_list(tmp_path):
    rows = [{"text": f"text {i}", "label": i % 3, "labels": [i % 2, i % 3]} for i in range(60)]
    plain = write_rows(tmp_path / "a.jsonl.gz", rows)
    one, last = texts(plain), texts(plain, label="labels")
    first = texts(plain, label="labels", label_index=0)
    assert one.target.classes == last.target.classes == ("0", "1", "2")
    np.testing.assert_array_equal(one.train.target, last.train.target)
    assert first.target.classes == ("0", "1")
    write_rows(plain, [*rows, {"text": "none", "label": 0, "labels": []}])
    notes = texts(plain, label="labels", validation_share=0).notes
    assert notes[0] == "a.jsonl.gz: 1 rows without a label left out"


def test_a_text_is_several_columns(tmp_path):
    rows = [{"title": f"t{i}", "body": f"b{i}", "label": i % 2} for i in range(60)]
    rows[7] |= {"title": None}
    data = texts(write_rows(tmp_path / "a.jsonl", rows), text=["title", "body"])
    parts = (data.train, data.held_out)
    read = [text for part in parts for text in part.inputs["text"].to_pylist()]
    assert {"t3\nb3", "b7"} < {*read}


def test_the_built_in_corpus_has_each_text_once_and_no_small_package(monkeypatch):
    records = [
        DocstringRecord(f"p{i % 3}.m", f"f{i}", "function", f"Does {min(i, 130)}.")
        for i in range(140)
    ]
    records.append(DocstringRecord("tiny", "f", "function", "Alone."))
    monkeypatch.setattr(files, "docstring_records", lambda: iter(records))
    data = files.load(TransformerDataSettings(), None)
    assert data.target.classes == ("p0", "p1", "p2")
    parts = (data.train, data.held_out)
    found = [text for part in parts for text in part.inputs["text"].to_pylist()]
    assert sorted(found) == sorted({record.text for record in records[:-1]})
    assert len(data.held_out.target) > 10
    with pytest.raises(CorpusError, match="largest package has 44"):
        files.load(TransformerDataSettings(min_documents=99), None)


@pytest.mark.parametrize(
    ("target", "measure", "least"), [("above", "accuracy", 0.9), ("size", "r2", 0.8)]
)
def test_tables_have_two_baselines_that_see_every_column(tmp_path, target, measure, least):
    """Half of the target is in a number, with gaps, and half in a category."""
    draws = np.random.default_rng(1)
    number = draws.normal(size=600)
    kind = draws.choice(["low", "high"], 600)
    size = number + np.where(kind == "high", 4.0, 0.0)
    columns = {"number": np.where(draws.random(600) < 0.05, np.nan, number), "kind": kind}
    columns[target] = np.where(size > 2, "yes", "no") if target == "above" else size
    data = table(write_rows(tmp_path / "t.csv", columns), target=target)
    assert methods(data) == ("gradient boosting", "linear model")
    for method in methods(data):
        found = measures(data.held_out.target, predict(data, method), data.target)
        assert found[measure] > least


def test_a_class_with_one_row_among_many_is_no_failure(tmp_path):
    """Boosting would hold rows of each class out to decide when to stop."""
    draws = np.random.default_rng(2)
    number = draws.normal(size=13_000)
    label = np.where(number > 0, "yes", "no").astype(object)
    label[7] = "rare"
    data = table(write_rows(tmp_path / "t.csv", {"number": number, "y": label}))
    found = predict(data, "gradient boosting")
    assert (found == data.held_out.target).mean() > 0.99


def test_texts_without_words_are_left_out_with_the_reason(tmp_path):
    rows = [{"text": "!" * i, "label": i % 2} for i in range(1, 60)]
    found = predict(texts(write_rows(tmp_path / "a.jsonl", rows)), "tfidf, linear svm")
    assert isinstance(found, str)
    assert "empty vocabulary" in found


def test_the_parts_are_disjoint_and_the_test_part_stays_the_same(tmp_path):
    rows = [{"text": f"text {i % 400}", "label": i % 2} for i in range(800)]
    path = write_rows(tmp_path / "a.jsonl", rows)
    found = []
    for share in (0.0, 0.2):
        data = texts(path, validation_share=share)
        parts = {
            part: data.split(part).inputs["text"].to_pylist()
            for part in ("train", "validation", "held_out")
        }
        found.append((data.train.inputs["text"].to_pylist(), parts["held_out"]))
        assert sum(len(texts) for texts in parts.values()) == 800
        assert sum(len(set(texts)) for texts in parts.values()) == 400  # equal ones together
        assert (len(parts["validation"]) > 60) == (share > 0)
    assert found[0] == found[1]  # also what the baselines train on
