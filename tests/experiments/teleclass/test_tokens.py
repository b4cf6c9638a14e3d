"""The tokens, and the vectors beside them: what is stored block by block."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from experiments.common.bpe import token_lists
from experiments.common.tokenizer import tokenizer_path
from experiments.teleclass import tokenize_stage
from experiments.teleclass.encoders import LsaEncoder
from experiments.teleclass.phases.encode import embeddings_of, run_encode
from experiments.teleclass.phases.hierarchy import run_hierarchy
from experiments.teleclass.settings import ClassifierSettings, EncodeSettings
from experiments.teleclass.tokenize_stage import (
    make_tokenizer,
    read_tokens,
    run_tokenize,
)
from raypipe.errors import ConfigError
from tests.experiments.teleclass.sections import tokens_of, train_with, with_sections

SETTINGS = ClassifierSettings(vocabulary=512, length=12)
#: blocks of another size than those of the tokens
ENCODING = EncodeSettings(dimensions=4, block=3, cache=False)
TRAINED = make_tokenizer(
    ["the cat sat on the mat", "naïve café"] * 20,
    SETTINGS.pretrained,
    SETTINGS.vocabulary,
    SETTINGS.length,
)


@given(st.text(max_size=40))
def test_tokens_of_a_short_text_are_the_text(text):
    tokenizer = Tokenizer.from_str(TRAINED)
    (found,) = token_lists(TRAINED, [text]).to_pylist()
    assert len(found) <= SETTINGS.length
    assert all(0 < token < tokenizer.get_vocab_size() <= SETTINGS.vocabulary for token in found)
    tokenizer.no_truncation()
    whole = tokenizer.encode(text).ids
    assert found == whole[: SETTINGS.length]
    assert tokenizer.decode(whole) == text


def test_equal_texts_train_equal_tokenizers():
    texts = ["the cat sat on the mat", "naïve café"] * 20
    assert make_tokenizer(texts, *tokens_of(SETTINGS)) == TRAINED
    assert len(token_lists(TRAINED, ["the cat sat"]).to_pylist()[0]) < 6  # merged, not bytes


@pytest.mark.parametrize("written", [0, 3])
@pytest.mark.parametrize("vectors", [True, False])
def test_blocks_hold_the_tokens_labels_and_vectors_of_phase_1(
    context, labeled, monkeypatch, written, vectors
):
    monkeypatch.setattr(
        tokenize_stage, "BLOCK", 4
    )  # the second has both kinds, the third written ones
    corpus, expected = labeled(written)
    run = context.run_dir
    if vectors:  # or phase 1 is not asked
        run_encode(corpus, with_sections(context, encode=ENCODING))
    run_hierarchy(corpus, context)
    settings = SETTINGS.model_copy(update={"vectors": vectors})
    run_tokenize(corpus, with_sections(context, encode=ENCODING, train=train_with(settings)))
    blocks = [read_tokens(run, number) for number in range(-(-len(expected) // 4))]
    assert [len(block) for block in blocks] == ([4, 4, 1] if written else [4, 2])
    tokenizer = run.read(tokenizer_path(run, context.stage.name)).decode()
    found = [ids for block in blocks for ids in block.column("tokens").to_pylist()]
    assert found == token_lists(tokenizer, [text for text, _ in expected]).to_pylist()
    labels = [set(each) for block in blocks for each in block.column("labels").to_pylist()]
    assert labels == [classes for _, classes in expected]
    if not vectors:
        assert all(block.column_names == ["tokens", "labels"] for block in blocks)
        return
    stored = np.array([v for block in blocks for v in block.column("vector").to_pylist()])
    known = embeddings_of(run, corpus, ENCODING, "train").read_rows(np.array([1, 2, 4, 5, 7, 8]))
    np.testing.assert_array_equal(stored[:6], known)
    if written:
        new = LsaEncoder.stored(run).encode([text for text, _ in expected[6:]])
        np.testing.assert_array_equal(stored[6:], new)
    assert len(np.unique(stored, axis=0)) == len(expected)
    np.testing.assert_allclose(np.linalg.norm(stored, axis=1), 1, atol=1e-6)


def test_written_documents_are_not_encoded_by_another_fit(context, labeled):
    corpus, _ = labeled(3)
    run_encode(corpus, with_sections(context, encode=ENCODING))
    run_hierarchy(corpus, context)
    path = LsaEncoder.path(context.run_dir)
    content = context.run_dir.read(path)
    context.run_dir.write(path, content[:-50])
    with pytest.raises(ConfigError, match=r"lsa\.npz: the encoder of the stored vectors is"):
        run_tokenize(corpus, with_sections(context, encode=ENCODING, train=train_with(SETTINGS)))
    context.run_dir.write(path, content)
    other = ENCODING.model_copy(update={"seed": 1})
    with pytest.raises(ConfigError, match="in another run directory"):
        run_tokenize(corpus, with_sections(context, encode=other, train=train_with(SETTINGS)))
    run_tokenize(corpus, with_sections(context, encode=ENCODING, train=train_with(SETTINGS)))


def test_the_tokenizer_is_that_of_the_pretrained_model(tiny_bert):
    from transformers import AutoTokenizer

    settings = SETTINGS.model_copy(update={"pretrained": tiny_bert, "length": 6})
    texts = ["a b c", "a b c d e f g h", ""]
    found = token_lists(make_tokenizer([], *tokens_of(settings)), texts).to_pylist()
    loaded = AutoTokenizer.from_pretrained(tiny_bert)
    assert found == [loaded(text, truncation=True, max_length=6)["input_ids"] for text in texts]
    assert [len(each) for each in found] == [5, 6, 2]
    with pytest.raises(ConfigError, match=r"length = 41: .* reads at most 40 tokens"):
        make_tokenizer([], settings.pretrained, settings.vocabulary, 41)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "has no fast tokenizer"), ("{", "its tokenizer cannot be loaded: Expecting")],
)
def test_a_model_without_a_tokenizer_is_refused(tiny_bert, tmp_path, content, message):
    """Of a folder without one the library makes one to which all words are unknown."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(Path(tiny_bert) / name, tmp_path)
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    settings = SETTINGS.model_copy(update={"pretrained": str(tmp_path)})
    with pytest.raises(ConfigError, match=message):
        make_tokenizer([], *tokens_of(settings))
