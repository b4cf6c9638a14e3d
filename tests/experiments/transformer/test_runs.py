"""The transformer on data through the public command."""

from __future__ import annotations

import json
import math
import pickle
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import experiments.transformer.data as data_module
import raypipe as rp
from experiments.common.corpora.docstrings import DocstringRecord
from experiments.transformer import evaluation, experiment
from experiments.transformer.comparison import measures
from experiments.transformer.data import PredictionTarget
from experiments.transformer.evaluation import confused
from experiments.transformer.figures import sections
from experiments.transformer.training import StoredSamples
from raypipe.commands import cluster
from raypipe.errors import ConfigError
from raypipe.launch.inline import InlineLauncher
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import read_table
from tests.command import status
from tests.experiments.transformer.samples import frame, lines, write

PROJECT = Path(__file__).resolve().parents[3]
CONFIG = PROJECT / "configs/transformer.yaml"
SMALL = (
    "model.hidden=32",
    "model.layers=1",
    "model.length=16",
    "train.training.warmup_steps=4",
    "train.training.learning_rate=0.01",
    "train.training.eval_every=10",
    "data.vocabulary=300",
)


@pytest.fixture(autouse=True)
def _inline(monkeypatch, tmp_path):
    monkeypatch.setattr(cluster, "start", lambda *_: InlineLauncher())
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))


def run(folder: Path, *overrides: str, **options) -> int:
    given = [*SMALL, *overrides]
    return status(rp.run, CONFIG, given, run_dir=folder / "run", profile="cpu", **options)


def found(folder: Path, name: str = "measures") -> pd.DataFrame:
    return read_table(RunDirectory.at(folder / "run"), name)


def of_table(folder: Path, target: str = "y", rows: pd.DataFrame | None = None) -> list[str]:
    path = write(folder, frame(400) if rows is None else rows, ".parquet")
    given = ["data.source=table", f"data.file={path}", f"data.target={target}"]
    return [*given, "data.validation_share=0.2"]


def records() -> list[DocstringRecord]:
    draw = np.random.default_rng(0)
    words = {"mail": ["message", "header"], "net": ["socket", "port"], "xml": ["node", "tree"]}
    return [
        DocstringRecord(f"{name}.m", f"f{i}", "function", f"{' '.join(draw.choice(own, 3))} {i}.")
        for name, own in words.items()
        for i in range(100)
    ]


def test_a_table_is_classified(tmp_path):
    assert run(tmp_path, *of_table(tmp_path), "train.training.epochs=12") == 0
    rows = found(tmp_path).set_index("method")
    assert rows.loc["transformer", "accuracy"] > 0.9 > rows.loc["majority class", "accuracy"]
    assert rows.loc["transformer", "macro_f1"] > 0.9 > rows.loc["majority class", "macro_f1"]
    steps = found(tmp_path, "steps")
    assert steps["eval_accuracy"].notna().sum() > 3
    assert found(tmp_path, "trials")["eval_accuracy"][0] == steps["eval_accuracy"].max()
    assert found(tmp_path, "confusion")["rows"].sum() == rows["rows"].iloc[0]
    drawn = {p.name for p in (tmp_path / "run/report/figures").rglob("*.svg")}
    assert "confusion.svg" in drawn
    page = (tmp_path / "run/report/index.html").read_text()
    assert f"{rows.loc['transformer', 'accuracy']:.4g}" in page
    assert "gradient boosting" in page
    assert {"gradient boosting", "linear model", "majority class"} < set(rows.index)
    pairs = found(tmp_path, "comparisons").set_index("baseline")
    assert set(pairs.index) == {"gradient boosting", "linear model"}
    for name, pair in pairs.iterrows():
        right = rows["accuracy"] * pair["rows"]
        net = pair["only_method_right"] - pair["only_baseline_right"]
        assert net == pytest.approx(right["transformer"] - right[name])
        assert pair["p_value"] <= pair["p_holm"] <= 1


def test_a_number_is_predicted_in_its_own_unit(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "_BLOCK", 7)  # several tasks
    given = [*of_table(tmp_path, "price"), "data.ignore=[y]", "train.training.epochs=12"]
    assert run(tmp_path, *given) == 0
    rows = found(tmp_path).set_index("method")
    own, mean = rows.loc["transformer"], rows.loc["training mean"]
    assert own["r2"] > 0.8 > 0.05 > mean["r2"]
    assert own["rmse"] < 50 < 70 < mean["rmse"] < 130
    trial = found(tmp_path, "trials").iloc[0]
    # of other rows, in the same unit
    assert 1 < trial["eval_mae"] < trial["eval_mse"] ** 0.5 < 50


def test_texts_are_classified_and_prepared_once(tmp_path, monkeypatch):
    rows = [{"text": f"{'good' if i % 2 else 'bad'} {i}", "label": [9, i % 2]} for i in range(300)]
    path = lines(tmp_path / "a.jsonl.gz", rows)
    given = ["data.source=sequences", f"data.file={path}", "train.training.epochs=4"]
    given.append("model.ngrams={most: 500, width: 8}")
    assert run(tmp_path, *given, only=("prepare",)) == 0

    def never(*arguments):
        raise AssertionError("prepared twice")

    monkeypatch.setattr(experiment, "run_prepare", never)
    assert run(tmp_path, *given) == 0
    rows = found(tmp_path).set_index("method")
    assert rows.loc["transformer", "accuracy"] > 0.95
    assert rows.loc["n-grams alone", "accuracy"] > 0.95
    pairs = found(tmp_path, "comparisons")
    assert {*zip(pairs["method"], pairs["baseline"], strict=True)} == {
        (method, baseline)
        for method in ("transformer", "encoder alone", "n-grams alone")
        for baseline in ("tfidf, logistic regression", "tfidf, linear svm")
    } | {("transformer", branch) for branch in ("encoder alone", "n-grams alone")}
    right = rows["accuracy"] * rows["rows"]
    net = pairs["only_method_right"] - pairs["only_baseline_right"]
    expected = right[pairs["method"]].to_numpy() - right[pairs["baseline"]].to_numpy()
    np.testing.assert_allclose(net, expected, atol=1e-6)
    ids, ngrams, weights, _ = StoredSamples(RunDirectory.at(tmp_path / "run"), "train")[0]
    assert len(ids) > 1
    assert len(ngrams) == len(weights) > 1
    lines(path, [{"text": "other", "label": [0]}, {"text": "words", "label": [1]}] * 40)
    with pytest.raises(ConfigError, match="file"):
        run(tmp_path, *given, f"data.test_file={path}")


def test_the_built_in_corpus_is_the_default(tmp_path, monkeypatch):
    monkeypatch.setattr(data_module, "docstring_records", lambda: iter(records()))
    assert run(tmp_path, "train.training.epochs=6") == 0
    rows = found(tmp_path).set_index("method")
    assert rows.loc["transformer", "accuracy"] > 0.9 > rows.loc["majority class", "accuracy"]
    stored = StoredSamples(RunDirectory.at(tmp_path / "run"), "train")
    assert pickle.loads(pickle.dumps(stored))[3][0].tolist() == stored[3][0].tolist()
    with pytest.raises(IndexError):
        stored[len(stored)]


def test_token_ids_are_classified(tmp_path):
    draw = np.random.default_rng(0)
    ids = draw.integers(1, 8, (300, 20))
    path = tmp_path / "a.npz"
    np.savez(path, tokens=ids, target=(ids[:, :16] == 3).any(1).astype(int))
    given = ["data.source=sequences", f"data.file={path}", "train.training.epochs=12"]
    assert run(tmp_path, *given) == 0
    rows = found(tmp_path).set_index("method")
    assert rows.loc["transformer", "accuracy"] > rows.loc["majority class", "accuracy"]
    stored = StoredSamples(RunDirectory.at(tmp_path / "run"), "train")
    assert {len(stored[i][0]) for i in range(len(stored))} == {16}  # cut at model.length


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.numeric=9", "model.numeric = 9: the data have 4; leave it out"),
        ("model.outputs=7", "model.outputs = 7: the data have 2"),
        ("model.kind=regression", "not a number"),
        ("model.ngrams={}", "model.ngrams: n-grams are those of texts"),
        ("data.target=nothing", "no column 'nothing'"),
        ("data.file=none.csv", "no such file"),
        ("data.target=null", "target must name the column"),
    ],
)
def test_a_mistake_is_one_message_and_nothing_is_started(tmp_path, override, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        run(tmp_path, *of_table(tmp_path), override)
    assert not (tmp_path / "run").exists()


def test_measures_are_those_of_their_definitions():
    target = PredictionTarget("classification", ("a", "b", "c"))
    gold, predicted = np.array([0, 0, 1, 1]), np.array([0, 1, 1, 2])
    # f1 of a: 2/3, of b: 1/2; c does not occur
    # the interval of k = 2 of n = 4: (k + z^2 / 2 +- z sqrt(k (n - k) / n + z^2 / 4)) / (n + z^2)
    half = 1.959964 * math.sqrt(2 * 2 / 4 + 1.959964**2 / 4) / (4 + 1.959964**2)
    expected = {
        "accuracy": 0.5,
        "accuracy_low": pytest.approx(0.5 - half),
        "accuracy_high": pytest.approx(0.5 + half),
        "macro_f1": pytest.approx((2 / 3 + 1 / 2) / 2),
    }
    assert measures(gold, predicted, target) == expected
    pairs = {(r["gold"], r["predicted"]): r["rows"] for r in confused(gold, predicted, target)}
    assert pairs == {("a", "a"): 1, ("a", "b"): 1, ("b", "b"): 1, ("b", "c"): 1}
    own = measures(
        np.array([-1.0, 1.0]), np.zeros(2), PredictionTarget("regression", (), 10.0, 5.0)
    )
    assert own == {"rmse": 5.0, "mae": 5.0, "r2": 0.0}


def test_rare_classes_are_shown_as_one():
    target = PredictionTarget("classification", tuple(f"c{i:02}" for i in range(20)))
    gold = np.repeat(np.arange(20), np.arange(20, 0, -1))
    rows = confused(gold, gold, target)
    table = pd.DataFrame(rows)
    assert len(table) == 13
    assert table.set_index("gold").loc["others", "rows"] == sum(range(1, 9))
    ((figure, _),) = (section.parts for section in sections({"confusion": table}))
    assert figure.name == "confusion"
    assert json.loads(json.dumps(rows)) == rows
