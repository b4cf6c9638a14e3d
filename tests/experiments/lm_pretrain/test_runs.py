"""Runs by the public command: three kinds of tokens, each exported, and their identities."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from experiments.lm_pretrain import shards
from experiments.lm_pretrain.evaluation import load_model
from experiments.lm_pretrain.tables import STEP_METRICS, TABLES
from experiments.lm_pretrain.tokenizer import END_OF_TEXT
from experiments.lm_pretrain.training import model_of
from raypipe.store.run_directory import RunDirectory
from tests.command import table
from tests.experiments import runs
from tests.experiments.conftest import TEXT


@pytest.fixture
def run(tmp_path: Path, cache: Path, files: Path):
    """The command on the text, in a cache of this test."""

    def start(name: str, *overrides: str, status: int = 0, **options) -> RunDirectory:
        given = runs.small("lm_pretrain", files, *overrides)
        assert runs.run("lm_pretrain", tmp_path / name, *given, **options) == status
        return RunDirectory.at(tmp_path / name)

    return start


@pytest.fixture(
    scope="module", params=["bpe", "characters", pytest.param("bytes", marks=pytest.mark.slow)]
)
def trained(request, files: Path, tmp_path_factory) -> tuple[str, list[str], Path]:
    """The kind of the tokens, the overrides, and a finished run."""
    folder = tmp_path_factory.mktemp(request.param)
    tied = ["model.tied=true"] if request.param == "bytes" else []
    given = runs.small("lm_pretrain", files, f"data.tokens={request.param}", *tied)
    assert runs.run("lm_pretrain", folder, *given) == 0
    return request.param, given, folder


def test_it_learns_more_than_the_baseline_and_writes_on(trained):
    _, _, folder = trained
    measures = table(folder, "measures").set_index("method")
    model, unigram = measures.loc["language model"], measures.loc["unigram"]
    assert model["bits_per_byte"] < 0.7 * unigram["bits_per_byte"]
    assert model["perplexity"] == pytest.approx(np.exp(model["loss"]))
    assert 0 < measures.loc["sliding window", "loss"] < model["loss"]
    counts, mixture = measures.loc["kneser-ney tokens"], measures.loc["language model + kneser-ney"]
    assert counts["tokens"] == mixture["tokens"] == model["tokens"]
    assert mixture["loss"] < min(measures.loc["sliding window", "loss"], counts["loss"]) + 0.02
    assert 0 <= mixture["weight"] <= 1
    gains = table(folder, "gains").set_index("method")
    for method in ("language model", "sliding window", "language model + kneser-ney"):
        difference = counts["bits_per_byte"] - measures.loc[method, "bits_per_byte"]
        assert gains.loc[method, "gain"] == pytest.approx(difference, rel=1e-6)
    stored = shards.run_folder(RunDirectory.at(folder))
    index, tokenizer = stored.index(), stored.tokenizer()
    share = index.tokens["held_out"] / index.bytes["held_out"]
    assert model["bits_per_byte"] == pytest.approx(model["loss"] / np.log(2) * share)
    kept = len(TEXT) * 9 // 10
    for split, text in {"train": TEXT[:kept], "held_out": TEXT[kept:]}.items():
        assert tokenizer.decode(np.concatenate(stored.maps(split))) == text
    runs.assert_declared(folder, TABLES, STEP_METRICS)
    written = table(folder, "samples").iloc[0]["text"]
    assert 0 < len(tokenizer.encode(written)) <= 20


def test_a_finished_run_is_exported_when_it_is_asked_for(trained):
    """The library ``transformers`` reads it, and computes the same."""
    transformers = pytest.importorskip("transformers", reason="needs the extra nlp")
    kind, given, location = trained
    run = RunDirectory.at(location)
    folder = Path(run.artifact("export", "hf"))
    assert not folder.exists()
    assert runs.run("lm_pretrain", location, *given, "export=true") == 0
    settings = model_of(shards.run_folder(run), runs.resolved("lm_pretrain", *given).settings.model)
    model = load_model(run, settings)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        str(folder), output_loading_info=True
    )
    assert type(loaded).__name__ == "LlamaForCausalLM"
    assert loaded.dtype == torch.float32
    assert not any(report.values()), report
    tokens = torch.randint(settings.vocabulary, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        torch.testing.assert_close(loaded.eval()(tokens).logits, model(tokens), rtol=0, atol=1e-4)
    tokenizer = shards.run_folder(run).tokenizer()
    library = transformers.AutoTokenizer.from_pretrained(str(folder))
    for text in (TEXT[:50], "the  <|endoftext|>", " a", "", "\n\n"):
        if kind != "characters" or not set(text) - set(TEXT):
            assert library(text)["input_ids"] == tokenizer.encode(text).tolist()
            assert library.decode(library(text)["input_ids"]) == text
    assert (library.eos_token_id, library.bos_token_id) == (END_OF_TEXT, END_OF_TEXT)
    assert (len(library), library.model_max_length) == (tokenizer.vocabulary, 16)


def test_the_shakespeare_model_has_the_characters_of_the_text(files, tmp_path):
    given = runs.small("lm_pretrain", files, "train.training.steps=2")
    assert runs.run("lm_shakespeare", tmp_path, *given, profile="auto", only=("train",)) == 0
    assert shards.run_folder(RunDirectory.at(tmp_path)).index().vocabulary == len(set(TEXT)) + 1


def test_a_second_run_directory_takes_the_cache(run, cache, capsys):
    def tokenize(name: str, *overrides: str) -> tuple[shards.Index, bool]:
        index = shards.run_folder(run(name, *overrides, only=("tokenize",))).index()
        return index, "the tokens of an earlier run are used" in capsys.readouterr().out

    first, used = tokenize("first")
    assert not used
    assert tokenize("second", "train.training.steps=10") == (first, True)
    # a changed shard of the cache is detected, and the text is tokenized again
    (shard,) = (cache / "tokens").glob("*/train-00000.bin")
    content = shard.read_bytes()
    shard.write_bytes(content[:-2])
    assert tokenize("third") == (first, False)
    assert shard.read_bytes() == content
    assert not tokenize("fourth", "data.tokens=bytes")[1]


def test_other_code_and_other_libraries_do_not_take_the_cache(run, monkeypatch, tmp_path, cache):
    (tmp_path / "edited.py").write_text("edited")
    files = SimpleNamespace(getfile=lambda part: tmp_path / "edited.py")
    run("first", only=("tokenize",))
    monkeypatch.setattr(shards, "inspect", files)
    run("second", only=("tokenize",))
    monkeypatch.setattr(shards, "version", lambda name: "0.0.1")
    run("third", only=("tokenize",))
    assert len(list((cache / "tokens").iterdir())) == 3


def test_a_damaged_shard_of_the_run_is_not_trained_on(run, capsys):
    found = run("run", only=("tokenize",))
    shard = Path(shards.run_folder(found).folder) / "train-00000.bin"
    content = shard.read_bytes()
    shard.write_bytes(content[:5] + bytes([content[5] ^ 1]) + content[6:])
    run("run", status=1, only=("train",))
    output = " ".join(capsys.readouterr().out.split())
    assert "train-00000.bin: the tokens are missing or damaged (another checksum" in output
    assert "run the configuration in another run directory" in output
    assert not found.exists(found.checkpoints("train"))
    shard.write_bytes(content)
    run("run", "train.training.steps=2", only=("train",))
    assert found.exists(found.model("train"))


def test_a_run_ends_at_the_entropy_of_its_tokens(tmp_path):
    given = ["data.source=random", "data.held_out=64", "model.vocabulary=256", "model.context=32"]
    tiny = ["model.width=16", "model.heads=2", "model.layers=1", "model.feed_forward=16"]
    steps = ["train.training.steps=40", "train.training.warmup_steps=4"]
    assert runs.run("lm_pretrain", tmp_path, *given, *tiny, *steps) == 0
    row = table(tmp_path, "trials").iloc[0]
    assert (row["status"], row["steps"]) == ("succeeded", 40)
    assert row["eval_loss"] == pytest.approx(math.log(256), abs=0.02)
