"""Files as the transformer takes them, and every refusal of a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

import experiments.transformer.data as data_module
from experiments.common.corpora.corpus import CorpusError
from experiments.common.corpora.docstrings import DocstringRecord
from experiments.transformer.data import (
    Category,
    Numeric,
    Splits,
    encode_rows,
    load,
    make_target,
)
from experiments.transformer.settings import TransformerDataSettings, TransformerModelSettings
from raypipe.errors import ConfigError
from tests.experiments.transformer.samples import ROWS, frame, lines, write


def table(path: Path, kind=None, **given) -> Splits:
    settings = {"source": "table", "file": path, "target": "y", **given}
    data = load(TransformerDataSettings.model_validate(settings), kind)
    assert data is not None
    return data


def texts(path: Path, kind=None, **given) -> Splits:
    data = load(
        TransformerDataSettings.model_validate({"source": "sequences", "file": path, **given}), kind
    )
    assert data is not None
    return data


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".csv.gz"])
def test_columns_are_numbers_or_categories(tmp_path: Path, suffix: str) -> None:
    data = table(write(tmp_path, frame(), suffix), ignore=["price"])
    kinds = {column.name: type(column) for column in data.columns}
    assert kinds == {
        "size": Numeric, "gap": Numeric, "many": Numeric,
        "colour": Category, "few": Category, "flag": Category,
    }  # fmt: skip
    assert data.target.classes == ("large", "small")
    # unknown, missing and the values; the last says where gap is missing
    assert data.sizes() == {
        "vocabulary": 0, "numeric": 3, "categories": (5, 6, 4, 2),
        "kind": "classification", "outputs": 2,
    }  # fmt: skip


def test_the_same_rows_are_the_same_data_whatever_the_format(tmp_path: Path) -> None:
    rows = frame().drop(columns=["colour", "flag", "y"])
    ways = [table(write(tmp_path, rows, s), target="price") for s in (".parquet", ".csv", ".npz")]
    encoded = [encode_rows(data.columns, data.train.inputs) for data in ways]
    for data, columns in zip(ways[1:], encoded[1:], strict=True):
        np.testing.assert_array_equal(data.train.target, ways[0].train.target)
        assert columns.equals(encoded[0])


def test_standardized_columns_have_mean_0_and_deviation_1_on_the_training_rows(
    tmp_path: Path,
) -> None:
    data = table(write(tmp_path, frame(), ".parquet"), target="price")
    encoded = encode_rows(data.columns, data.train.inputs)
    numeric = np.array(encoded["numeric"].to_pylist())
    names = [column.name for column in data.columns if isinstance(column, Numeric)]
    known = ~data.train.inputs["gap"].is_null(nan_is_null=True).to_numpy()
    for position, name in enumerate(names):
        values = numeric[known if name == "gap" else slice(None), position]
        np.testing.assert_allclose([values.mean(), values.std()], [0, 1], atol=1e-5)
    categories = np.array(encoded["categories"].to_pylist())
    np.testing.assert_array_equal(categories[:, -1], ~known)
    assert set(numeric[~known, names.index("gap")]) == {0.0}
    np.testing.assert_allclose(data.train.target.mean(), 0, atol=1e-5)
    np.testing.assert_allclose(data.train.target.std(), 1, atol=1e-5)
    own = data.target.mean + data.target.deviation * data.held_out.target
    assert 800 < own.min() < own.max() < 1600


def test_a_test_file_is_the_test(tmp_path: Path) -> None:
    rows = frame()
    path = write(tmp_path, rows, ".csv")
    other = tmp_path / "other.csv"
    rows.head(7).assign(colour="violet").to_csv(other, index=False)
    data = table(path, test_file=other)
    assert (len(data.train.target), len(data.held_out.target)) == (ROWS, 7)
    position = [c.name for c in data.columns if isinstance(c, Category)].index("colour")
    encoded = np.array(encode_rows(data.columns, data.held_out.inputs)["categories"].to_pylist())
    assert set(encoded[:, position]) == {0}  # unknown


@pytest.mark.parametrize(
    ("values", "kind", "expected"),
    [
        (["a", "b"], None, "classification"),
        ([True, False], None, "classification"),
        ([0, 1, 1], None, "classification"),
        (list(range(30)), None, "regression"),
        (list(range(30)), "classification", "classification"),
        ([0, 1, 1], "regression", "regression"),
        ([0.5, 1.5], None, "regression"),
        ([1.0, 2.0], "classification", "classification"),
    ],
)
def test_the_kind_follows_from_the_target(values, kind, expected) -> None:
    column = pa.chunked_array([values])
    assert make_target(column, column, kind, 20, "y")[0].kind == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows.drop(columns="y"), "no column 'y'"),
        (lambda rows: rows.assign(y=[None, *rows["y"][1:]]), "missing in row 0"),
        (lambda rows: rows.assign(y="one"), "only one class"),
        (lambda rows: rows.assign(y=[float("inf"), *rows["size"][1:]]), "is inf in row 0"),
        (lambda rows: rows.assign(y=[float("nan"), *rows["size"][1:]]), "missing in row 0"),
        (lambda rows: rows.assign(y=2.5), "nothing to learn"),
        (lambda rows: rows.assign(size=float("-inf")), "is -inf in row 0"),
        (lambda rows: rows.assign(size=[1e300, *rows["size"][1:]]), "too far apart"),
        (lambda rows: rows.assign(size=float("nan")), "has no value"),
        (lambda rows: rows.assign(size=pd.Timestamp(0)), "is timestamp"),
        (lambda rows: rows[["y"]], "no column other than the target"),
        (lambda rows: rows.head(0), "no row"),
        (lambda rows: rows.head(1), r"1 rows [01] are held out; .* another data.test_share"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused(tmp_path: Path, change, message: str) -> None:
    path = write(tmp_path, change(frame()), ".parquet")
    with pytest.raises(CorpusError, match=message) as error:
        table(path)
    assert "rows.parquet" in str(error.value)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_label_is_a_value_or_an_element_of_a_list(tmp_path: Path, name: str) -> None:
    rows = [{"text": f"text {i}", "label": i % 3, "labels": [i % 2, i % 3]} for i in range(60)]
    plain = lines(tmp_path / name, rows)
    one, last = texts(plain), texts(plain, label="labels")
    first = texts(plain, label="labels", label_index=0)
    assert one.target.classes == last.target.classes == ("0", "1", "2")
    np.testing.assert_array_equal(one.train.target, last.train.target)
    assert first.target.classes == ("0", "1")
    lines(plain, [*rows, {"text": "none", "label": 0, "labels": []}])
    notes = texts(plain, label="labels", validation_share=0).notes
    assert notes[0] == f"{name}: 1 rows without a label left out"


def test_a_text_is_several_columns(tmp_path: Path) -> None:
    rows = [{"title": f"t{i}", "body": f"b{i}", "label": i % 2} for i in range(60)]
    rows[7] |= {"title": None}
    data = texts(lines(tmp_path / "a.jsonl", rows), text=["title", "body"])
    parts = (data.train, data.held_out)
    read = [text for part in parts for text in part.inputs["text"].to_pylist()]
    assert {"t3\nb3", "b7"} < {*read}
    rows[8] |= {"title": "", "body": None}
    with pytest.raises(CorpusError, match=r"row 8.* is empty"):
        texts(lines(tmp_path / "a.jsonl", rows), text=["title", "body"])


def tokens(folder: Path, ids: object, target: object = (0, 1)) -> Path:
    path = folder / "a.npz"
    np.savez(path, tokens=np.array(ids), target=np.array(target))
    return path


def test_token_ids_have_no_padding_left(tmp_path: Path) -> None:
    path = tokens(tmp_path, [[3, 9, 0], [1, 0, 0]])
    data = texts(path, test_file=path)
    assert data.train.inputs["tokens"].to_pylist() == [[3, 9], [1]]
    assert data.sizes()["vocabulary"] == 10


def test_the_built_in_corpus_has_each_text_once_and_no_small_package(monkeypatch) -> None:
    records = [
        DocstringRecord(f"p{i % 3}.m", f"f{i}", "function", f"Does {min(i, 130)}.")
        for i in range(140)
    ]
    records.append(DocstringRecord("tiny", "f", "function", "Alone."))
    monkeypatch.setattr(data_module, "docstring_records", lambda: iter(records))
    data = load(TransformerDataSettings(), None)
    assert data is not None
    assert data.target.classes == ("p0", "p1", "p2")
    found = [
        text for split in (data.train, data.held_out) for text in split.inputs["text"].to_pylist()
    ]
    assert sorted(found) == sorted({record.text for record in records[:-1]})
    monkeypatch.setattr(data_module, "docstring_records", lambda: iter(records[::-1]))
    again = load(TransformerDataSettings(), None)
    assert again is not None
    assert len(again.held_out.target) > 10
    with pytest.raises(CorpusError, match="largest package has 44"):
        load(TransformerDataSettings(min_documents=99), None)


def test_settings_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    for values, message in [
        ({"source": "table"}, "are read from a file"),
        ({"file": "a.csv"}, "are read from a file"),
        ({"test_file": "a.csv"}, "are read from a file"),
        ({"source": "table", "file": "a.csv"}, "target must name"),
    ]:
        with pytest.raises(ValueError, match=message):
            TransformerDataSettings.model_validate(values)
    found = {"vocabulary": 0, "numeric": 2, "categories": (), "kind": "regression", "outputs": 1}
    assert TransformerModelSettings(numeric=2).completed(found).numeric == 2
    with pytest.raises(ConfigError, match=r"numeric = 5: the data have 2(.|\n)*outputs = 3: the"):
        TransformerModelSettings(numeric=5, outputs=3).completed(found)
    with pytest.raises(ConfigError, match="model: give either vocabulary"):
        TransformerModelSettings().completed({})
