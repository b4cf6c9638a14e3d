"""Whole runs on a small text, by the public command."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import raypipe as rp
from experiments.lm_pretrain import shards
from experiments.lm_pretrain.data import read_texts
from experiments.lm_pretrain.shards import run_folder
from experiments.lm_pretrain.tables import STEP_METRICS, TABLES
from raypipe.commands import cluster
from raypipe.graph.source import SourceCode
from raypipe.launch.inline import InlineLauncher
from raypipe.store import tables as results
from raypipe.store.run_directory import RunDirectory
from tests import command

PROJECT = Path(__file__).resolve().parents[3]
PLAIN = str(PROJECT / "configs/lm_pretrain.yaml")
SHAKESPEARE = str(PROJECT / "configs/lm_shakespeare.yaml")
SMALL = [
    *["model.width=16", "model.heads=2", "model.layers=1", "model.feed_forward=16"],
    *["model.context=16", "model.vocabulary=270", "sample.tokens=20", "sample.temperature=0"],
    *["train.training.steps=60", "train.training.warmup_steps=5"],
    *["model.tied=false", "train.training.micro_batch=12", "train.training.effective_batch=12"],
    *["train.training.optimizer=adamw", "train.training.learning_rate=0.02"],
]
TEXT = "".join(f"line {number % 7} of the text\n" for number in range(400))

Run = Callable[..., RunDirectory]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command on a small text, in a cache of this test."""
    monkeypatch.setattr(cluster, "start", lambda *_: InlineLauncher())
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")

    def start(
        name: str,
        *overrides: str,
        plain: bool = True,
        status: int = 0,
        only: tuple[str, ...] = (),
    ) -> RunDirectory:
        given = [*SMALL, "data.source=text", f"data.files=[{path}]", *overrides]
        options = {"profile": "cpu", "only": only} if plain else {}
        config = PLAIN if plain else SHAKESPEARE
        assert command.status(rp.run, config, given, run_dir=tmp_path / name, **options) == status
        return RunDirectory.at(tmp_path / name)

    return start


def table(run: RunDirectory, name: str) -> pd.DataFrame:
    return results.read_table(run, name)


@pytest.mark.parametrize("tokens", ["bpe", "characters", "bytes"])
def test_it_learns_more_than_the_baseline_and_writes_on(run: Run, tokens: str) -> None:
    found = run("run", f"data.tokens={tokens}", "sample.prompt=line ")
    measures = table(found, "measures").set_index("method")
    model, unigram = measures.loc["language model"], measures.loc["unigram"]
    assert model["bits_per_byte"] < 0.7 * unigram["bits_per_byte"]
    assert model["perplexity"] == pytest.approx(np.exp(model["loss"]))
    assert 0 < measures.loc["sliding window", "loss"] < model["loss"]
    counts, mixture = measures.loc["kneser-ney tokens"], measures.loc["language model + kneser-ney"]
    assert counts["tokens"] == mixture["tokens"] == model["tokens"]
    assert mixture["loss"] < min(measures.loc["sliding window", "loss"], counts["loss"]) + 0.02
    assert 0 <= mixture["weight"] <= 1
    gains = table(found, "gains").set_index("method")
    for method in ("language model", "sliding window", "language model + kneser-ney"):
        difference = counts["bits_per_byte"] - measures.loc[method, "bits_per_byte"]
        assert gains.loc[method, "gain"] == pytest.approx(difference, rel=1e-6)
    trial = table(found, "trials").iloc[0]
    assert trial["status"] == "succeeded"
    evaluated = table(found, "steps").dropna(subset=["eval_loss"])  # not on the reported text
    assert len(evaluated) >= 10
    assert trial["eval_loss"] == evaluated["eval_loss"].min()
    assert trial["best_step"] == evaluated.loc[evaluated["eval_loss"].idxmin(), "step"]
    index, tokenizer = run_folder(found).index(), run_folder(found).tokenizer()
    share = index.tokens["held_out"] / index.bytes["held_out"]
    assert model["bits_per_byte"] == pytest.approx(model["loss"] / np.log(2) * share)
    decoded = [
        tokenizer.decode(np.concatenate(run_folder(found).maps(split)))
        for split in ("train", "held_out")
    ]
    assert decoded == [TEXT[: len(TEXT) * 9 // 10], TEXT[len(TEXT) * 9 // 10 :]]
    for declared in TABLES:
        names = [column.name for column in declared.columns]
        assert {*table(found, declared.name)} - {"run_id", "command_id", "variant"} == {*names}
    logged = [name for name in table(found, "steps") if name.startswith("eval_")]
    assert logged == [column.name for column in STEP_METRICS]
    text = table(found, "samples").iloc[0]["text"]
    assert 0 < len(tokenizer.encode(text)) <= 20


def test_the_model_of_characters_has_as_many_as_the_text(run: Run) -> None:
    found = run("run", plain=False)
    assert run_folder(found).index().vocabulary == len(set(TEXT)) + 1
    assert table(found, "trials").iloc[0]["status"] == "succeeded"


def test_of_a_text_learned_by_heart_the_best_step_is_reported(run: Run, tmp_path: Path) -> None:
    """A part of the training text chooses the step; the reported text has no say in it."""
    draw = np.random.default_rng(0).choice
    texts = ["".join(draw(list("aaaabbc \n"), size=size)) for size in (1500, 600, 600)]
    paths = [tmp_path / f"{name}.txt" for name in ("train", "one", "other")]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text, encoding="utf-8")

    def trained(name: str, held_out: Path, *given: str) -> tuple[pd.Series, pd.DataFrame]:
        files = [f"data.files=[{paths[0]}]", f"data.held_out_files=[{held_out}]"]
        settings = ["data.tokens=bytes", "data.validation_share=0.2", "data.most_passes=null"]
        settings += ["model.width=64", "model.feed_forward=128", "model.layers=2"]
        training = ["schedule=constant", "log_every=400", "learning_rate=0.005", "weight_decay=0"]
        settings += [f"train.training.{each}" for each in training]
        found = run(name, *files, *settings, "sample.prompt=a", *given)
        return table(found, "trials").iloc[0], table(found, "measures").set_index("method")

    long = "train.training.steps=400"
    trial, measures = trained("best", paths[1], long)
    steps = table(RunDirectory.at(tmp_path / "best"), "steps").set_index("step")["eval_loss"]
    assert trial["best_step"] == steps.idxmin() < steps.index[-1]
    assert trial["eval_loss"] == steps.min() < steps.iloc[-1]
    assert trial["stopped_early"] == (trial["steps"] < 400)
    last, ends = trained("last", paths[1], long, "train.training.monitor=null")
    assert last["steps"] == 400
    short = f"train.training.steps={trial['best_step']}"
    _, alone = trained("short", paths[1], short, "train.training.monitor=null")
    for method in ("language model", "sliding window", "language model + kneser-ney"):
        value = measures.loc[method, "bits_per_byte"]
        assert value == alone.loc[method, "bits_per_byte"] < ends.loc[method, "bits_per_byte"]
    again, others = trained("other", paths[2], long)
    names = ["best_step", "steps", "eval_loss"]
    assert [again[name] for name in names] == [trial[name] for name in names]
    assert others.loc["language model", "loss"] != measures.loc["language model", "loss"]


def test_a_short_text_is_repeated_a_few_times_only(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run("run", "data.most_passes=0.5", "data.tokens=bytes", only=("train",))
    index = run_folder(found).index()
    kept = index.tokens["train"] - int(index.tokens["train"] * 0.05) - 1
    steps = int(np.ceil(0.5 * (kept // 16) / 12))
    assert table(found, "trials").iloc[0]["steps"] == steps < 60
    assert f"{steps} steps: the task limits training.steps = 60" in capsys.readouterr().out


def test_without_a_validation_part_there_is_no_mixture(run: Run) -> None:
    found = run("run", "data.validation_share=0")
    methods = set(table(found, "measures")["method"])
    assert "kneser-ney tokens" in methods
    assert "language model + kneser-ney" not in methods


def test_a_second_run_directory_takes_the_cache(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    read: list[object] = []

    def counted(data: object) -> object:
        read.append(data)
        return read_texts(data)

    monkeypatch.setattr(shards, "read_texts", counted)
    first = run_folder(run("first")).index()
    assert run_folder(run("second", "train.training.steps=10")).index() == first
    assert len(read) == 1
    run("third", "data.tokens=bytes")
    assert len(read) == 2
    # a changed shard of the cache is detected, and the text is tokenized again
    (folder,) = {path.parent for path in (tmp_path / "cache/tokens").glob("*/train-00000.bin")} - {
        path.parent
        for path in (tmp_path / "cache/tokens").glob("*/tokens.json")
        if '"kind": "bytes"' in path.read_text()
    }
    shard = folder / "train-00000.bin"
    content = shard.read_bytes()
    shard.write_bytes(content[:-2])
    assert run_folder(run("fourth")).index() == first
    assert len(read) == 3
    assert shard.read_bytes() == content


@pytest.mark.parametrize("changed", ["__version__", "source_of", "package_version"])
def test_other_code_does_not_take_the_cache(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changed: str
) -> None:
    run("first", only=("tokenize",))
    other = SourceCode({"tokenizer": "edited"}) if changed == "source_of" else "0.0.1"
    monkeypatch.setattr(shards, changed, other if changed == "__version__" else lambda name: other)
    run("second", only=("tokenize",))
    assert len(list((tmp_path / "cache/tokens").iterdir())) == 2


def test_a_damaged_shard_of_the_run_is_not_trained_on(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run("run", only=("tokenize",))
    shard = Path(run_folder(found).folder) / "train-00000.bin"
    content = shard.read_bytes()
    shard.write_bytes(content[:5] + bytes([content[5] ^ 1]) + content[6:])
    run("run", status=1)
    output = " ".join(capsys.readouterr().out.split())
    assert "train-00000.bin: the tokens are missing or damaged (another checksum" in output
    assert "run the configuration in another run directory" in output
    assert not found.exists(found.checkpoints("train"))
    shard.write_bytes(content)
    run("run")
    assert found.exists(found.model("train"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.context=512"], "the held_out text has .* tokens; a sample needs"),
        (["data.tokens=characters", "sample.prompt=line+"], r"'\+' .* is not among the 18"),
    ],
)
def test_what_cannot_work_is_said(
    run: Run, overrides: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run("run", *overrides, status=1)
    output = capsys.readouterr()
    assert re.search(message, " ".join((output.out + output.err).split()))
    assert "failed" in set(table(found, "stages")["status"])
    assert not found.exists(found.checkpoints("train"))  # it is said before the training


def test_a_character_that_only_the_held_out_text_has_is_refused(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.txt").write_text(f"{TEXT}é", encoding="utf-8")
    files = f"data.held_out_files=[{tmp_path / 'other.txt'}]"
    found = run("run", files, "data.tokens=characters", status=1)
    assert "data.tokens = characters: 'é' (U+00E9) is not among" in capsys.readouterr().out
    assert not found.exists(found.model("train"))


def test_the_cache_may_be_out_of_reach(run: Run, monkeypatch, tmp_path, caplog) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "file"))
    found = run("run")
    assert table(found, "trials").iloc[0]["status"] == "succeeded"
    assert "the tokens cannot be cached" in caplog.text
