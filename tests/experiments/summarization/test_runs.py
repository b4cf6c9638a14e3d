"""Summarization through the public command, on a tiny corpus."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from experiments.summarization.baselines import score
from experiments.summarization.evaluation import load_model, summarize
from experiments.summarization.model import END, PAD
from experiments.summarization.tables import STEP_METRICS, TABLES, sections
from experiments.summarization.tokenizer import documents_path, pairs_path, tokenizer_of
from raypipe.store.artifacts import read_arrow
from raypipe.store.run_directory import RunDirectory
from tests.command import table
from tests.experiments import runs


def run(folder: Path, files: Path, *more: str, **options) -> int:
    return runs.run("summarization", folder, *runs.small("summarization", files, *more), **options)


@pytest.fixture(scope="module")
def trained(files, tmp_path_factory) -> Path:
    """The run directory of a summarizer that has learned its rule."""
    folder = tmp_path_factory.mktemp("trained")
    assert run(folder, files) == 0
    return folder


def settings(files: Path):
    return runs.resolved("summarization", *runs.small("summarization", files)).settings


def test_a_summarizer_beats_the_lead_sentence(trained, files):
    rows = table(trained, "measures").set_index("method")
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
    directory = RunDirectory.at(trained)
    documents = read_arrow(directory, documents_path(directory))
    assert (rows["documents"] == len(documents)).all()
    # every reference is a sample, of the held-out documents too
    assert len(read_arrow(directory, pairs_path(directory, "held_out"))) == 2 * len(documents)
    compared = table(trained, "gains").set_index("baseline")
    assert {*compared.index} == {*rows.index} - {"summarizer"}
    for name in ("rouge_1", "rouge_2", "rouge_l"):
        gain, low, high = (compared[f"{name}_gain{end}"] for end in ("", "_low", "_high"))
        expected = own[name] - rows[name][compared.index]
        np.testing.assert_allclose(gain.to_numpy(float), expected.to_numpy(float), atol=1e-9)
        assert (low <= gain).all()
        assert (gain <= high).all()
    hardest = compared["rouge_2_gain"].astype(float).idxmin()
    section, *_ = sections({name: table(trained, name) for name in ("measures", "gains")})
    (sentence,) = section.certainty
    assert f"above that of the {hardest}, the best baseline" in sentence
    assert sentence.endswith("more than chance.")


def test_the_tables_have_the_summaries_and_what_is_declared(trained, files):
    texts = table(trained, "summaries").sort_values("number")
    assert (texts["lead_sentence"].str.startswith("Some words come first")).all()
    # in the arithmetic of a training in bf16, most summaries are the same ones
    directory, given = RunDirectory.at(trained), settings(files)
    whole = directory, given.model, given.generation
    exact, coarse = (summarize(*whole, each, slice(None)) for each in ("fp32", "bf16"))
    assert exact[:50] == texts["summarizer"].to_list()
    references = read_arrow(directory, documents_path(directory)).column("references").to_pylist()
    values = score(exact, references).mean(0)
    assert score(coarse, references).mean(0) == pytest.approx(values, abs=0.1)
    runs.assert_declared(trained, TABLES, STEP_METRICS)
    steps = table(trained, "steps")
    assert steps["loss"].iloc[-1] < 0.5 * steps["loss"].iloc[0]
    assert [*(trained / "report/figures").glob("measures-rouge_2*.svg")]


def test_a_prefix_begins_every_document_and_what_is_cut_is_told(files, tmp_path, capsys):
    given = ["data.prefix='summarize: '", "data.source_length=16"]
    assert run(tmp_path, files, *given, only=("tokenize",)) == 0
    said = capsys.readouterr().out
    (documents, cut), *_ = re.findall(r"(\d+) documents, of which (\d+) are cut at 16 tokens", said)
    assert documents == cut
    directory = RunDirectory.at(tmp_path)
    stored = read_arrow(directory, documents_path(directory))
    (text,) = tokenizer_of(directory).decode([stored["source"][0].as_py()])
    assert text.startswith("summarize: Some words")


def test_the_trained_model_is_exported_and_begun_with(trained, files, tmp_path):
    transformers = pytest.importorskip("transformers")
    assert run(trained, files, "export=true") == 0
    directory = RunDirectory.at(trained)
    folder = directory.artifact("export")
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ours = load_model(directory, settings(files).model)
    texts = ["Some words come first.", "The end."]
    own_ids = tokenizer_of(directory).encode(texts)
    for own, padded in zip(own_ids, tokenizer(texts, padding=True)["input_ids"], strict=True):
        assert padded == [*own, END] + [PAD] * (len(padded) - len(own) - 1)
    ids = tokenizer(texts, padding=True, return_tensors="pt")
    ids["decoder_input_ids"] = torch.tensor([[0, 5, 9]] * 2)
    with torch.no_grad():
        found, expected = (model(**ids, use_cache=False).logits for model in (ours, theirs))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    # and a run may begin with it: its sizes, its weights and its tokenizer
    sizes = [text for text in runs.small("summarization", files) if not text.startswith("model.")]
    begun = [f"model={folder}", "generation.beams=1", "train.training.learning_rate=1e-9"]
    begun += ["train.training.steps=4", "train.training.epochs=null"]
    assert runs.run("summarization", tmp_path, *sizes, *begun) == 0
    after = RunDirectory.at(tmp_path)
    assert tokenizer_of(after).encode(texts) == own_ids
    unchanged = load_file(after.model("train"))
    torch.testing.assert_close(unchanged, {**ours.state_dict()}, rtol=1e-3, atol=1e-3)
