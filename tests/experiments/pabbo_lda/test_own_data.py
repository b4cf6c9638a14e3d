"""Bags of words and documents of the user's own: what of them the studies see."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import raypipe as rp
from experiments.pabbo_lda import settings
from raypipe.commands import configuration as config
from tests.command import table
from tests.experiments.runs import CONFIGS, run

OWN = ("data.source=bow", "data.dir=bow", "lda.datasets=[mine]")
#: shipped models, and a study of three evaluations
TINY = (
    *("train_small.weights=shipped", "train_large.weights=shipped", "lda.t_max=8"),
    *("lda.optimizers=[random]", "lda.start=[2,4]", "lda.runs=1", "lda.seeds=1"),
    *("lda.evaluations=3", "lda.max_iter=1", "evaluate_small.functions=2"),
    *("evaluate_large.functions=2", "evaluate_small.steps=2", "evaluate_large.steps=2"),
)
TEXTS = {
    "data": {"source": "text", "dir": "docs", "options": {"min_df": 1, "max_df": 1.0}},
    "lda.datasets": ["mixed"], "lda.optimizers": ["random", "golden_section"], "lda.runs": 1,
    "lda.final_seeds": 1, "lda.t_max": 4, "lda.start": [2, 4], "lda.evaluations": 3,
    "lda.max_iter": 1, "lda.batch_size": 32, "lda.cache": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _here(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings._warn.cache_clear()
    monkeypatch.chdir(files)


def test_the_quickstart_runs_on_own_files(tmp_path, caplog):
    assert run("quickstart", tmp_path, *OWN, *TINY, profile="auto") == 0
    found = table(tmp_path, "evaluations")
    assert set(found["dataset"]) == {"mine"}
    assert found["value"].between(1, 3000).all()
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert told == ["data.options: max_documents, max_features: left out, since data.source = bow"]


SIZES = {"max_documents": 4000, "max_features": 1000}


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ((), SIZES),
        (("data.source=builtin",), SIZES),
        (("data.options.min_df=2",), {**SIZES, "min_df": 2}),
        (("data.options={}",), {}),
        (("data.options={}", "data.options.min_df=2"), {"min_df": 2}),
        (OWN, {}),
        ((*OWN, "data.options.split=train"), {"split": "train"}),
        (("data.source=text", "data.options={max_features: 9}"), {"max_features": 9}),
    ],
)
def test_options_belong_to_the_source_that_was_chosen(words, options):
    document = config.read(CONFIGS / "quickstart.yaml")
    assert config.resolve(document, words, "cpu", []).settings.data.options == options


def studied(folder: Path, *stages: str, **lda: object) -> rp.Run:
    given = {**TEXTS, **{f"lda.{key}": value for key, value in lda.items()}}
    document = {"experiment": "experiments.pabbo_lda"}
    return rp.run(document, given, run_dir=folder, only=stages or ("lda",), local=True)


def test_documents_without_a_word_are_counted_where_they_are_left_out(tmp_path, capsys):
    found = studied(tmp_path).table("corpora")
    assert found[["documents", "dropped_documents", "words"]].values.tolist() == [[4, 3, 6]]
    shown = capsys.readouterr().out
    assert "documents 4, words 6" in shown
    assert "WARNING: corpus mixed: 3 of 7 documents have no word of the vocabulary" in shown


def test_letters_outside_all_words_are_counted(tmp_path, capsys, monkeypatch):
    """And short words are words if the pattern says so."""
    studied(tmp_path / "some", datasets=["cjk"], t_max=3, start=[2])
    assert "33% of the letters are in no word" in capsys.readouterr().out
    monkeypatch.setitem(TEXTS, "data.options.word_pattern", r"\w{2,}")
    assert studied(tmp_path / "all", datasets=["cjk"]).table("corpora")["words"].item() == 7
    assert "in no word" not in capsys.readouterr().out


def test_a_coherence_is_not_called_a_perplexity(tmp_path, capsys):
    found = studied(tmp_path, "lda", "aggregate", objective="coherence")
    studies, history = found.table("studies"), found.table("study_history")
    assert studies["best_perplexity"].isna().all()
    lowest = history.groupby("optimizer")["value"].min()
    assert dict(zip(studies["optimizer"], -studies["best_coherence"], strict=True)) == dict(lowest)
    shown = capsys.readouterr().out
    assert "best_coherence" in shown
    assert "best_perplexity" not in shown
    # and the comparison of studies needs nothing but the studies
    assert set(found.table("stages")["stage"]) == {"hardware", "lda", "aggregate"}
