"""The stored training set block by block, its split, and the loss."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch
from scipy import sparse
from torch import nn

from experiments.common.tokenizer import token_lists, tokenizer_path
from experiments.teleclass import training_set
from experiments.teleclass.artifacts import label_lists, pseudo_labels_path, training_set_path
from experiments.teleclass.encode import embeddings_of, run_encode
from experiments.teleclass.encoders import LsaEncoder
from experiments.teleclass.settings import (
    ClassifierSettings,
    EncodeSettings,
    TeleclassSettings,
    TrainSettings,
)
from experiments.teleclass.training import Collate, TeleclassTask, build_task
from experiments.teleclass.training_set import (
    make_tokenizer,
    read_tokens,
    run_hierarchy,
    run_tokenize,
)
from raypipe.errors import ConfigError
from raypipe.store.artifacts import read_parquet, write_parquet
from raypipe.store.run_directory import RunDirectory
from tests.experiments.references import STEP
from tests.experiments.teleclass.sections import tokens_of, with_sections

SETTINGS = ClassifierSettings(vocabulary=512, length=12)
#: blocks of another size than those of the tokens
ENCODING = EncodeSettings(dimensions=4, block=3, cache=False)


@pytest.mark.parametrize("written", [0, 3])
@pytest.mark.parametrize("vectors", [True, False])
def test_blocks_hold_tokens_labels_and_vectors(context, labeled, monkeypatch, written, vectors):
    monkeypatch.setattr(training_set, "BLOCK", 4)  # the second has both kinds
    corpus, expected = labeled(written)
    run = context.run_dir
    if vectors:  # or phase 1 is not asked
        run_encode(corpus, with_sections(context, encode=ENCODING))
    run_hierarchy(corpus, context)
    settings = SETTINGS.model_copy(update={"vectors": vectors})
    run_tokenize(
        corpus, with_sections(context, encode=ENCODING, train=TrainSettings(classifier=settings))
    )
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
        run_tokenize(
            corpus,
            with_sections(context, encode=ENCODING, train=TrainSettings(classifier=SETTINGS)),
        )
    context.run_dir.write(path, content)
    run_tokenize(
        corpus, with_sections(context, encode=ENCODING, train=TrainSettings(classifier=SETTINGS))
    )


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


CLASSES = 6


class Fixed(nn.Module):
    """Logits that are decided by the first token of a text."""

    def forward(self, tokens, lengths, vectors):
        return torch.sin(tokens[:, :1] * torch.arange(1, CLASSES + 1)) * 3


def task_of(held_out: float, run: RunDirectory | None) -> TeleclassTask:
    train = TrainSettings(classifier=SETTINGS, held_out=held_out)
    return build_task(CLASSES, TeleclassSettings(encode=ENCODING, train=train), run)


def test_the_loss_is_the_mean_over_classes_summed_over_documents():
    draw = np.random.default_rng(7)
    batch = [
        (
            draw.integers(1, 512, draw.integers(1, 11), dtype=np.int32),
            draw.choice(CLASSES, draw.integers(0, 4), replace=False).astype(np.int32),
            draw.standard_normal(4, dtype=np.float32),
        )
        for _ in range(7)
    ]
    loss = task_of(0.0, None).loss(Fixed(), Collate(CLASSES)(batch), STEP)
    total = f1 = 0.0
    for tokens, labels, _ in batch:
        logits = torch.sin(torch.tensor(int(tokens[0])) * torch.arange(1, CLASSES + 1)) * 3
        targets = torch.zeros(CLASSES)
        targets[labels.tolist()] = 1
        total += float(nn.BCEWithLogitsLoss()(logits, targets))
        chosen = {c for c in range(CLASSES) if logits[c] > 0}
        if chosen or len(labels):
            f1 += 2 * len(chosen & set(labels.tolist())) / (len(chosen) + len(labels))
    assert float(loss.total) == pytest.approx(total, rel=1e-5)
    assert float(loss.metrics["pseudo_label_f1"]) == pytest.approx(f1, rel=1e-5)
    assert loss.weight == 7


@pytest.mark.parametrize(
    ("size", "share", "out"), [(40, 0.05, 2), (41, 0.5, 20), (3, 0.99, 2), (5, 0.01, 0), (9, 0, 0)]
)
def test_held_out_and_training_documents_are_all_documents(tmp_path, size, share, out):
    run = RunDirectory.at(tmp_path)
    write_parquet(run, training_set_path(run), pa.table({"row": range(size)}))
    made = task_of(share, run)
    kept, held = made.build_dataset(), made.build_eval_dataset()
    held_rows = [] if held is None else held.rows.tolist()
    assert len(held_rows) == out
    assert sorted([*kept.rows.tolist(), *held_rows]) == list(range(size))
    again = task_of(share, run).build_dataset()
    np.testing.assert_array_equal(again.rows, kept.rows)
