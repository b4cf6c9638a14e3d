"""The tokens, and the vectors beside them: what is stored block by block."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import sparse

from experiments.common.tokenizer import token_lists, tokenizer_path
from experiments.teleclass import training_set
from experiments.teleclass.artifacts import label_lists, pseudo_labels_path
from experiments.teleclass.encode import embeddings_of, run_encode
from experiments.teleclass.encoders import LsaEncoder
from experiments.teleclass.settings import ClassifierSettings, EncodeSettings
from experiments.teleclass.training_set import (
    make_tokenizer,
    read_tokens,
    run_hierarchy,
    run_tokenize,
)
from raypipe.errors import ConfigError
from raypipe.store.artifacts import read_parquet, write_parquet
from tests.experiments.teleclass.sections import tokens_of, train_with, with_sections

SETTINGS = ClassifierSettings(vocabulary=512, length=12)
#: blocks of another size than those of the tokens
ENCODING = EncodeSettings(dimensions=4, block=3, cache=False)


@pytest.mark.parametrize("written", [0, 3])
@pytest.mark.parametrize("vectors", [True, False])
def test_blocks_hold_the_tokens_labels_and_vectors_of_phase_1(
    context, labeled, monkeypatch, written, vectors
):
    monkeypatch.setattr(
        training_set, "BLOCK", 4
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


def test_without_any_label_there_is_nothing_to_train_on(context, labeled):
    corpus, _ = labeled(0)
    path = pseudo_labels_path(context.run_dir)
    none = label_lists(sparse.csr_matrix((10, 4), dtype=bool))
    table = read_parquet(context.run_dir, path).set_column(1, "labels", none)
    write_parquet(context.run_dir, path, table)
    with pytest.raises(ValueError, match="nothing to train on"):
        run_hierarchy(corpus, context)
