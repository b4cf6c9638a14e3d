"""The transformer on data through the public command, and what its tables and figures say."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from experiments.transformer import evaluation, experiment
from experiments.transformer.comparison import mcnemar, measures
from experiments.transformer.data import PredictionTarget
from experiments.transformer.evaluation import confused
from experiments.transformer.figures import sections
from experiments.transformer.tables import SVM
from experiments.transformer.training import StoredSamples
from raypipe.errors import ConfigError
from raypipe.store.run_directory import RunDirectory
from tests.command import table
from tests.experiments import runs
from tests.experiments.rows import write_rows
from tests.scenario import cases

MCNEMAR = cases(__file__, "mcnemar")


def run(folder: Path, *overrides: str, **options) -> pd.DataFrame:
    """The measures of a run, by method."""
    assert runs.run("transformer", folder, *runs.SMALL["transformer"], *overrides, **options) == 0
    return table(folder, "measures").set_index("method") if not options else pd.DataFrame()


def of_table(files: Path, *more: str) -> list[str]:
    given = ["data.source=table", f"data.file={files / 'rows.parquet'}", *more]
    return [*given, "data.validation_share=0.2", "train.training.epochs=12"]


def assert_pairs(pairs: pd.DataFrame, rows: pd.DataFrame) -> None:
    """The rows that one method alone has right are those of the measures."""
    right = rows["accuracy"] * rows["rows"]
    net = pairs["only_method_right"] - pairs["only_baseline_right"]
    expected = right[pairs["method"]].to_numpy() - right[pairs["baseline"]].to_numpy()
    np.testing.assert_allclose(net, expected, atol=1e-6)


@pytest.mark.usefixtures("report")
def test_a_table_is_classified(files, tmp_path):
    rows = run(tmp_path, *of_table(files, "data.target=y"))
    for measure in ("accuracy", "macro_f1"):
        assert rows.loc["transformer", measure] > 0.9 > rows.loc["majority class", measure]
    steps = table(tmp_path, "steps")
    assert steps["eval_accuracy"].notna().sum() > 3
    assert table(tmp_path, "trials")["eval_accuracy"][0] == steps["eval_accuracy"].max()
    assert table(tmp_path, "confusion")["rows"].sum() == rows["rows"].iloc[0]
    assert "confusion.svg" in {p.name for p in (tmp_path / "report/figures").rglob("*.svg")}
    page = (tmp_path / "report/index.html").read_text()
    assert f"{rows.loc['transformer', 'accuracy']:.4g}" in page
    assert "gradient boosting" in page
    assert {"gradient boosting", "linear model", "majority class"} < set(rows.index)
    pairs = table(tmp_path, "comparisons")
    assert set(pairs["baseline"]) == {"gradient boosting", "linear model"}
    assert_pairs(pairs, rows)
    assert (pairs["p_value"] <= pairs["p_holm"]).all()
    assert (pairs["p_holm"] <= 1).all()


def test_a_number_is_predicted_in_its_own_unit(files, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "_BLOCK", 7)  # several tasks
    rows = run(tmp_path, *of_table(files, "data.target=price", "data.ignore=[y]"))
    own, mean = rows.loc["transformer"], rows.loc["training mean"]
    assert own["r2"] > 0.8 > 0.05 > mean["r2"]
    assert own["rmse"] < 50 < 70 < mean["rmse"] < 130
    trial = table(tmp_path, "trials").iloc[0]
    # of other rows, in the same unit
    assert 1 < trial["eval_mae"] < trial["eval_mse"] ** 0.5 < 50


def test_texts_are_classified_and_prepared_once(tmp_path, monkeypatch):
    texts = [{"text": f"{'good' if i % 2 else 'bad'} {i}", "label": [9, i % 2]} for i in range(300)]
    path, folder = write_rows(tmp_path / "a.jsonl.gz", texts), tmp_path / "run"
    given = ["data.source=sequences", f"data.file={path}", "train.training.epochs=4"]
    given.append("model.ngrams={most: 500, width: 8}")
    run(folder, *given, only=("prepare",))
    monkeypatch.setattr(experiment, "run_prepare", pytest.fail)
    rows = run(folder, *given)
    assert (rows.loc[["transformer", "n-grams alone"], "accuracy"] > 0.95).all()
    pairs = table(folder, "comparisons")
    branches = ("encoder alone", "n-grams alone")
    baselines = ("tfidf, logistic regression", "tfidf, linear svm")
    assert (rows.loc[[*baselines], "accuracy"] == 1).all()
    assert {*zip(pairs["method"], pairs["baseline"], strict=True)} == {
        (method, baseline) for method in ("transformer", *branches) for baseline in baselines
    } | {("transformer", branch) for branch in branches}
    assert_pairs(pairs, rows)
    stored = StoredSamples(RunDirectory.at(folder), "train")
    ids, ngrams, weights, _ = stored[0]
    assert 1 < len(ids) <= 16  # cut at model.length
    assert len(ngrams) == len(weights) > 1
    assert pickle.loads(pickle.dumps(stored))[3][0].tolist() == stored[3][0].tolist()
    with pytest.raises(IndexError):
        stored[len(stored)]
    write_rows(path, [{"text": "other", "label": [0]}, {"text": "words", "label": [1]}] * 40)
    with pytest.raises(ConfigError, match="file"):
        run(folder, *given, f"data.test_file={path}")


def test_a_validation_file_chooses_the_step_and_the_baselines_train_on_it(tmp_path):
    def file(name, number, *words):
        rows = [{"text": f"{w} {i}", "label": w} for i in range(number) for w in words]
        return write_rows(tmp_path / f"{name}.jsonl", rows)

    train = file("train", 60, "red", "blue")
    other, test = (file(*part, "red", "blue", "green") for part in (("val", 15), ("test", 20)))
    given = ["data.source=sequences", f"data.file={train}", f"data.test_file={test}"]
    rows = run(tmp_path / "run", *given, f"data.validation_file={other}", "train.training.epochs=2")
    assert table(tmp_path / "run", "trials")["best_step"][0] > 0
    stored = RunDirectory.at(tmp_path / "run")
    sizes = [len(StoredSamples(stored, part)) for part in ("train", "validation", "held_out")]
    assert sizes == [120, 45, 60]
    assert rows.loc["tfidf, linear svm", "accuracy"] == 1.0  # it has seen the third class
    assert rows.loc["transformer", "accuracy"] < 0.7


def test_measures_are_those_of_their_definitions():
    target = PredictionTarget("classification", ("a", "b", "c"))
    gold, predicted = np.array([0, 0, 1, 1]), np.array([0, 1, 1, 2])
    # f1 of a: 2/3, of b: 1/2; c does not occur
    # the interval of k = 2 of n = 4: (k + z^2 / 2 +- z sqrt(k (n - k) / n + z^2 / 4)) / (n + z^2)
    half = 1.959964 * math.sqrt(2 * 2 / 4 + 1.959964**2 / 4) / (4 + 1.959964**2)
    assert measures(gold, predicted, target) == {
        "accuracy": 0.5,
        "accuracy_low": pytest.approx(0.5 - half),
        "accuracy_high": pytest.approx(0.5 + half),
        "macro_f1": pytest.approx((2 / 3 + 1 / 2) / 2),
    }
    pairs = {(r["gold"], r["predicted"]): r["rows"] for r in confused(gold, predicted, target)}
    assert pairs == {("a", "a"): 1, ("a", "b"): 1, ("b", "b"): 1, ("b", "c"): 1}
    numeric = PredictionTarget("regression", (), 10.0, 5.0)
    own = measures(np.array([-1.0, 1.0]), np.zeros(2), numeric)
    assert own == {"rmse": 5.0, "mae": 5.0, "r2": 0.0}
    first, second = np.ones(30, bool), np.ones(30, bool)
    assert mcnemar(first, second) == (0, 0, 1.0)
    first[:2], second[4:12] = False, False
    # the tail of ten throws of a coin: (1 + 10 + 45) / 2^10, on both sides
    assert mcnemar(first, second) == (8, 2, pytest.approx(2 * 56 / 1024))


def test_rare_classes_are_shown_as_one():
    target = PredictionTarget("classification", tuple(f"c{i:02}" for i in range(20)))
    gold = np.repeat(np.arange(20), np.arange(20, 0, -1))
    rows = confused(gold, gold, target)
    assert len(rows) == 13
    shown = pd.DataFrame(rows)
    assert shown.set_index("gold").loc["others", "rows"] == sum(range(1, 9))
    ((figure, _),) = (section.parts for section in sections({"confusion": shown}))
    assert figure.name == "confusion"
    assert json.loads(json.dumps(rows)) == rows


@pytest.mark.parametrize("case", MCNEMAR["cases"])
def test_mcnemars_test_says_what_is_chance(case):
    rows = [*MCNEMAR["others"], ["transformer", SVM, *case["rows"]]]
    columns = ["method", "baseline", "only_method_right", "only_baseline_right", "p_holm"]
    comparisons = pd.DataFrame(rows, columns=columns).assign(rows=400)
    (section,) = sections({"comparisons": comparisons})
    assert section.certainty == [case["says"]]
    assert not any(each.certainty for each in sections({}))
