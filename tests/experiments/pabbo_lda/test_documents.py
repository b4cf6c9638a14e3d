"""Documents of the user's own: what of them the studies see, through the public API."""

from __future__ import annotations

from pathlib import Path

import pytest

import raypipe as rp

CONFIG = """
experiment: experiments.pabbo_lda
data: {source: text, dir: docs, options: {min_df: 1, max_df: 1.0}}
lda:
  {datasets: [mixed], optimizers: [random, golden_section], runs: 1, final_seeds: 1, t_max: 4,
   start: [2, 4], evaluations: 3, max_iter: 1, batch_size: 32, cache: false}
"""
WORDS = ("alpha beta gamma delta", "beta gamma epsilon", "alpha delta epsilon gamma", "zeta beta")
DOCUMENTS = {
    "mixed": [*WORDS, "", "!!", "12 34"],
    "one": [" ".join(WORDS)],
    "cjk": ["主题 模型 测试 文档 数据集合 机器学习算法 自然语言处理"] * 4,
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "l.yaml").write_text(CONFIG)
    (tmp_path / "docs").mkdir()
    for name, lines in DOCUMENTS.items():
        (tmp_path / f"docs/{name}.txt").write_text("\n".join(lines) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*stages: str, **overrides: object) -> rp.Run:
    given = {key.replace("__", "."): value for key, value in overrides.items()}
    return rp.run("l.yaml", given, run_dir="r", only=stages or ("lda",), local=True)


def test_documents_without_a_word_are_counted_where_they_are_left_out(capsys):
    table = run().table("corpora")
    assert table[["documents", "dropped_documents", "words"]].values.tolist() == [[4, 3, 6]]
    shown = capsys.readouterr().out
    assert "documents 4, words 6" in shown
    assert "WARNING: corpus mixed: 3 of 7 documents have no word of the vocabulary" in shown


@pytest.mark.parametrize("objective", ["heldout_perplexity", "coherence"])
def test_one_document_is_refused_where_the_objective_needs_several(objective):
    with pytest.raises(rp.ConfigError, match=f"{objective}: the corpus one has one document"):
        run(lda__datasets=["one"], lda__objective=objective)
    assert not Path("r").exists()


def test_short_words_are_words_if_the_pattern_says_so(capsys):
    cjk = {"lda__datasets": ["cjk"]}
    with pytest.raises(rp.ConfigError, match=r"has only 3 words; .* data\.options\.word_pattern"):
        run(**cjk)
    assert run(**cjk, data__options__word_pattern=r"\w{2,}").table("corpora")["words"].item() == 7
    assert "in no word" not in capsys.readouterr().out


def test_letters_outside_all_words_are_counted(capsys):
    run(lda__datasets=["cjk"], lda__t_max=3, lda__start=[2])
    assert "33% of the letters are in no word" in capsys.readouterr().out


@pytest.mark.parametrize("pattern", ["(a)(b)", "(x"])
def test_a_pattern_that_is_not_one_is_refused(pattern):
    with pytest.raises(rp.ConfigError, match="word_pattern = "):
        run(data__options__word_pattern=pattern)


def test_a_coherence_is_not_called_a_perplexity(capsys):
    studies = run("lda", "aggregate", lda__objective="coherence").table("studies")
    assert studies["best_perplexity"].isna().all()
    lowest = rp.open("r").table("study_history").groupby("optimizer")["value"].min()
    assert dict(zip(studies["optimizer"], -studies["best_coherence"], strict=True)) == dict(lowest)
    shown = capsys.readouterr().out
    assert "best_coherence" in shown
    assert "best_perplexity" not in shown


def test_the_comparison_of_studies_needs_nothing_but_the_studies():
    run_ = run("aggregate", train_small__weights="trained", train_large__weights="trained")
    assert set(run_.table("stages")["stage"]) == {"hardware", "lda", "aggregate"}
