"""Summarization through the public command, on a tiny corpus."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

import raypipe as rp
from experiments.summarization.baselines import score
from experiments.summarization.evaluation import load_model, summarize
from experiments.summarization.model import END, PAD, next_token_logits
from experiments.summarization.tables import STEP_METRICS, TABLES, sections
from experiments.summarization.tokenizer import documents_path, pairs_path, tokenizer_of
from raypipe.commands import cluster
from raypipe.commands import configuration as config
from raypipe.errors import ConfigError
from raypipe.graph.configuration import Configuration
from raypipe.launch.inline import InlineLauncher
from raypipe.store.artifacts import read_arrow
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import read_table
from tests.command import status

PROJECT = Path(__file__).resolve().parents[3]
PLAIN = PROJECT / "configs/summarization.yaml"
SWEEP = PROJECT / "configs/sweeps/summarization.yaml"
SMALL = (
    *("model.vocabulary=300", "model.width=32", "model.head_width=16", "model.heads=2"),
    *("model.feed_forward=32", "model.layers=1", "model.dropout=0", "data.source_length=64"),
)
WORDS = ("socket", "header", "node", "queue", "turtle", "thread", "path", "digest")


@pytest.fixture(autouse=True)
def _inline(monkeypatch, tmp_path):
    monkeypatch.setattr(cluster, "start", lambda *_: InlineLauncher())
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))


def resolved(path: Path, *overrides: str) -> Configuration:
    return config.resolve(config.read(path), overrides, "cpu", [])


def corpus(folder: Path, rows: int = 240) -> list[str]:
    """Documents whose summary names the word that they have in the middle."""
    draw = np.random.default_rng(0)
    path = folder / "pairs.jsonl"
    with path.open("w") as file:
        for number in range(rows):
            word = str(draw.choice(WORDS))
            text = f"Some words come first, {number}. Then a {word} is told of. The end."
            summaries = [f"Return the {word}.", f"Get a {word}."]
            file.write(json.dumps({"document": text, "summary": summaries}) + "\n")
    return ["data.source=files", f"data.files=[{path}]", "data.target_length=16"]


def run(folder: Path, *overrides: str, path: Path = PLAIN, **options) -> int:
    given = [*SMALL, *overrides]
    return status(rp.run, path, given, run_dir=folder / "run", profile="cpu", **options)


def found(folder: Path, name: str = "measures") -> pd.DataFrame:
    return read_table(RunDirectory.at(folder / "run"), name)


def test_a_summarizer_is_trained_and_beats_the_lead_sentence(tmp_path, capsys):
    given = [*corpus(tmp_path), "train.training.epochs=14", "data.validation_share=0.15"]
    assert run(tmp_path, *given) == 0
    rows = found(tmp_path).set_index("method")
    assert sorted(rows.index) == [
        *("central sentence", "central three sentences"),
        *("lead sentence", "lead three sentences", "summarizer"),
    ]
    own, lead = rows.loc["summarizer"], rows.loc["lead sentence"]
    assert own["rouge_l"] > 0.6 > 0.2 > lead["rouge_l"]
    assert own["rouge_1_gain_low"] > 0.3
    assert own["rouge_1_gain"] == pytest.approx(own["rouge_1"] - lead["rouge_1"])
    assert own["words"] == pytest.approx(3, abs=0.3)
    assert lead["words"] == 5
    directory = RunDirectory.at(tmp_path / "run")
    documents = read_arrow(directory, documents_path(directory))
    assert (rows["documents"] == len(documents)).all()
    # every reference is a sample, of the held-out documents too
    assert len(read_arrow(directory, pairs_path(directory, "held_out"))) == 2 * len(documents)
    compared = found(tmp_path, "gains").set_index("baseline")
    assert {*compared.index} == {*rows.index} - {"summarizer"}
    for name in ("rouge_1", "rouge_2", "rouge_l"):
        gain, low, high = (compared[f"{name}_gain{end}"] for end in ("", "_low", "_high"))
        expected = own[name] - rows[name][compared.index]
        np.testing.assert_allclose(gain.to_numpy(float), expected.to_numpy(float), atol=1e-9)
        assert (low <= gain).all()
        assert (gain <= high).all()
    texts = found(tmp_path, "summaries")
    assert {"document", "references", "summarizer", "lead_sentence", "rouge_l"} <= {*texts.columns}
    assert (texts["lead_sentence"].str.startswith("Some words come first")).all()
    assert texts["rouge_l"].mean() == pytest.approx(own["rouge_l"], abs=0.2)
    # in the arithmetic of a training in bf16, most summaries are the same ones
    settings = resolved(PLAIN, *SMALL, *given).settings
    whole = directory, settings.model, settings.generation
    exact, coarse = (summarize(*whole, each, slice(None)) for each in ("fp32", "bf16"))
    assert exact[:50] == texts.sort_values("number")["summarizer"].to_list()
    references = documents.column("references").to_pylist()
    assert score(coarse, references).mean(0) == pytest.approx(
        score(exact, references).mean(0), abs=0.1
    )
    for declared in TABLES:
        names = [column.name for column in declared.columns]
        assert {*found(tmp_path, declared.name)} - {"run_id", "command_id", "variant"} == {*names}
    steps = found(tmp_path, "steps")
    logged = {name for name in steps if name.startswith("eval_")}
    assert logged == {column.name for column in STEP_METRICS}
    assert steps["loss"].iloc[-1] < 0.5 * steps["loss"].iloc[0]
    assert [*(tmp_path / "run/report/figures").glob("measures-rouge_2*.svg")]
    said = capsys.readouterr().out
    assert re.search(r"tokenize: train: \d+ documents, of which 0 are cut at 64 tokens", said)
    assert "summarizer - lead sentence: rouge_1 +" in said
    hardest = compared["rouge_2_gain"].astype(float).idxmin()
    tables = {name: found(tmp_path, name) for name in ("measures", "gains")}
    (sentence,) = sections(tables)[0].certainty
    assert f"above that of the {hardest}, the best baseline" in sentence
    assert sentence.endswith("more than chance.")


def test_of_pairs_learned_by_heart_the_best_step_is_reported(tmp_path: Path) -> None:
    """A part of the training documents chooses the step; the reported ones have no say in it."""
    draw = np.random.default_rng(0)

    def write(name: str, rows: int) -> Path:
        path = tmp_path / f"{name}.jsonl"
        lines = []
        for number in range(rows):
            document = f"{' '.join(draw.choice(WORDS, 4))} {number}."
            summary = f"Get the {' '.join(draw.choice(WORDS, 2))}."  # there is no rule
            lines.append(json.dumps({"document": document, "summary": summary}) + "\n")
        path.write_text("".join(lines))
        return path

    files = {name: write(name, 120 if name == "train" else 30) for name in ("train", "one", "two")}

    def trained(name: str, held_out: str, *training: str) -> pd.Series:
        given = ["data.source=files", f"data.files=[{files['train']}]", "generation.beams=1"]
        given += [f"data.held_out_files=[{files[held_out]}]", "data.validation_share=0.3"]
        exact = ["schedule=constant", "warmup_steps=0", *training]
        (tmp_path / name).mkdir()
        assert run(tmp_path / name, *given, *(f"train.training.{each}" for each in exact)) == 0
        return found(tmp_path / name, "trials").iloc[0]

    best = trained("best", "one", "steps=200")
    steps = found(tmp_path / "best", "steps").set_index("step")["eval_cross_entropy"].dropna()
    assert len(steps) >= 10
    assert best["best_step"] == steps.idxmin() < steps.index[-1]
    assert best["stopped_early"] == (best["steps"] < 200)
    assert "best_step" not in trained("last", "one", "steps=200", "monitor=null").dropna()
    trained("short", "one", f"steps={best['best_step']}", "monitor=null")
    written = [
        list(found(tmp_path / name, "summaries").sort_values("number")["summarizer"])
        for name in ("best", "short", "last")
    ]
    assert written[0] == written[1] != written[2]
    again = trained("other", "two", "steps=200")
    names = ["best_step", "steps", "eval_cross_entropy"]
    assert [again[name] for name in names] == [best[name] for name in names]


def test_a_prefix_begins_every_document_and_what_is_cut_is_told(tmp_path, capsys):
    given = [*corpus(tmp_path, 60), "data.prefix='summarize: '", "data.source_length=16"]
    assert run(tmp_path, *given, only=("tokenize",)) == 0
    said = capsys.readouterr().out
    (documents, cut), *_ = re.findall(r"(\d+) documents, of which (\d+) are cut at 16 tokens", said)
    assert documents == cut
    directory = RunDirectory.at(tmp_path / "run")
    table = read_arrow(directory, documents_path(directory))
    (text,) = tokenizer_of(directory).decode([table["source"][0].as_py()])
    assert text.startswith("summarize: Some words")


def test_the_trained_model_is_exported_and_begun_with(tmp_path):
    transformers = pytest.importorskip("transformers")
    given = [*corpus(tmp_path, 60), "train.training.epochs=1"]
    assert run(tmp_path, *given, "export=true") == 0
    directory = RunDirectory.at(tmp_path / "run")
    folder = directory.artifact("export")
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ours = load_model(directory, resolved(PLAIN, *SMALL, *given).settings.model)
    texts = ["Some words come first.", "The end."]
    own_ids = tokenizer_of(directory).encode(texts)
    padded = tokenizer(texts, padding=True)["input_ids"]
    for own, theirs_of in zip(own_ids, padded, strict=True):
        expected_ids = [*own, END]
        assert theirs_of == expected_ids + [PAD] * (len(theirs_of) - len(expected_ids))
    ids = tokenizer(texts, padding=True, return_tensors="pt")
    begin = torch.tensor([[0, 5, 9]] * 2)
    with torch.no_grad():
        expected = theirs(**ids, decoder_input_ids=begin).logits
        found_logits = next_token_logits(
            ours, ids["input_ids"], ids["attention_mask"].bool(), begin
        )
    torch.testing.assert_close(found_logits, expected, rtol=1e-4, atol=1e-4)
    # and a run may begin with it: its sizes, its weights and its tokenizer
    again = tmp_path / "again"
    again.mkdir()
    small = [f"model={folder}", "train.training.learning_rate=1e-9", *given]
    rp.run(PLAIN, small, run_dir=again / "run", profile="cpu")
    after = RunDirectory.at(again / "run")
    assert tokenizer_of(after).encode(["Then a node"]) == tokenizer_of(directory).encode(
        ["Then a node"]
    )
    unchanged = load_file(after.model("train"))
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(unchanged[name], value, rtol=1e-3, atol=1e-3)


def test_short_of_memory_the_batch_is_halved_then_the_sources(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYPIPE_FAULTS", "oom:micro_batch>2")
    given = [*corpus(tmp_path, 60), "train.training.epochs=1", "train.training.micro_batch=8"]
    assert run(tmp_path, *given) == 0
    failures = found(tmp_path, "failures")
    assert list(failures["kind"]) == ["out_of_memory"] * 2
    assert list(failures["outcome"]) == [
        f"again with micro-batch {micro} x accumulation {8 // micro}" for micro in (4, 2)
    ]
    monkeypatch.setenv("RAYPIPE_FAULTS", "oom:micro_batch>0")
    other = ["data.source_length=256", "train.on_oom=[shorten]", "train.training.micro_batch=1"]
    (tmp_path / "other").mkdir()
    assert run(tmp_path / "other", *given, *other) == 1
    outcomes = list(found(tmp_path / "other", "failures")["outcome"])
    sources = [f"again with sources of at most {length} tokens" for length in (128, 64)]
    assert outcomes == [*sources, "gave up"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "train.training.precision=fp16",
            "train.training.precision = fp16: T5 and mT5 overflow in it",
        ),
        ("model.vocabulary=200", "model.vocabulary = 200: the BPE trained here has 258"),
        ("model=./smal", "model = './smal': is not a size (small, t5_220m, mt5_1_2b)"),
        ("data.document=body", "no column 'body'; there are: document, summary"),
        ("data.files=[none.jsonl]", "none.jsonl: there is no such file"),
        ("data.files=[]", "source = files with 0 files"),
        ("data.target_length=1", "data.target_length"),
    ],
)
def test_a_mistake_is_one_message_and_nothing_is_started(tmp_path, override, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        run(tmp_path, *corpus(tmp_path, 60), override)
    assert not (tmp_path / "run").exists()


def test_it_can_be_swept(tmp_path):
    given = [*SMALL, *corpus(tmp_path, 60)]
    rp.sweep(SWEEP, [*given, "sweep.repeats=1"], run_dir=tmp_path / "run", profile="cpu")
    rows = found(tmp_path, "trials")
    by_precision = rows.groupby("precision")["status"].agg(set).to_dict()
    assert by_precision == {"fp32": {"succeeded"}, "bf16": {"succeeded"}}
    assert rows["parity"].max() < 0.05


def test_fit_says_what_fits_and_why_fp16_does_not(tmp_path):
    given = [*SMALL, *corpus(tmp_path, 60), "train.training.micro_batch=4"]
    rows = rp.fit(PLAIN, given, profile="cpu").to_dict("records")
    by_precision = {row["precision"]: row for row in rows if "precision" in row}
    assert by_precision["fp32"]["micro_batch"] == 4
    assert pd.isna(by_precision["fp16"]["micro_batch"])
    assert "overflow" in by_precision["fp16"]["note"]
