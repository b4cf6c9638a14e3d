"""The stored documents as samples, the loss and the split of the training set."""

from __future__ import annotations

import pickle

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

from experiments.teleclass import training, training_set
from experiments.teleclass.artifacts import training_set_path
from experiments.teleclass.encode import run_encode
from experiments.teleclass.settings import (
    ClassifierSettings,
    EncodeSettings,
    TeleclassSettings,
    TrainSettings,
)
from experiments.teleclass.training import (
    NOTHING,
    Collate,
    TeleclassTask,
    TokenizedDocuments,
    build_task,
)
from experiments.teleclass.training_set import read_tokens, run_hierarchy, run_tokenize
from raypipe.store.artifacts import write_parquet
from raypipe.store.run_directory import RunDirectory
from raypipe.training.schedule import Phase
from raypipe.training.task import StepContext
from tests.experiments.teleclass.sections import train_with, with_sections

SETTINGS = ClassifierSettings(vocabulary=512, length=10, hidden=8, layers=1, heads=1, dropout=0)
STEP = StepContext(0, Phase("train", 1, 1, 0.1), 0)
CLASSES, WIDTH = 6, 5
ENCODING = EncodeSettings(dimensions=WIDTH, block=3, cache=False)


class Fixed(nn.Module):
    """Logits that are decided by the first token of a text."""

    def forward(self, tokens, lengths, vectors):
        return torch.sin(tokens[:, :1] * torch.arange(1, CLASSES + 1)) * 3


def settings_of(held_out: float = 0.0, **changed) -> TeleclassSettings:
    classifier = SETTINGS.model_copy(update=changed)
    train = TrainSettings(classifier=classifier, held_out=held_out)
    return TeleclassSettings(encode=ENCODING, train=train)


def samples(count: int, width: int = WIDTH) -> list:
    draw = np.random.default_rng(count)
    return [
        (
            draw.integers(1, 512, draw.integers(1, 11), dtype=np.int32),
            draw.choice(CLASSES, draw.integers(0, 4), replace=False).astype(np.int32),
            draw.standard_normal(width, dtype=np.float32),
        )
        for _ in range(count)
    ]


def task() -> TeleclassTask:
    return build_task(CLASSES, settings_of(), None)


@pytest.mark.parametrize("vectors", [True, False])
def test_stored_documents_are_read_back_one_by_one(context, labeled, monkeypatch, vectors):
    for module in (training_set, training):
        monkeypatch.setattr(module, "BLOCK", 4)
    corpus, expected = labeled(3)
    run_encode(corpus, with_sections(context, encode=ENCODING))
    run_hierarchy(corpus, context)
    settings = settings_of(vectors=vectors)
    run_tokenize(
        corpus, with_sections(context, encode=ENCODING, train=train_with(settings.train.classifier))
    )
    rows = np.array([*reversed(range(len(expected))), 0, 5])
    stored = TokenizedDocuments(context.run_dir, rows)
    for data in (stored, pickle.loads(pickle.dumps(stored))):
        assert len(data) == len(rows)
        assert data.width == (WIDTH if vectors else 0)
        for index, row in enumerate(rows):
            tokens, classes, vector = data[index]
            block = read_tokens(context.run_dir, row // 4).slice(row % 4, 1)
            assert tokens.tolist() == block.column("tokens")[0].as_py()
            assert set(classes.tolist()) == expected[row][1]
            assert vector.dtype == np.float32
            assert vector.tolist() == (block.column("vector")[0].as_py() if vectors else [])
    # the mapped blocks do not travel
    assert len(pickle.dumps(stored)) == len(pickle.dumps(TokenizedDocuments(context.run_dir, rows)))

    made = build_task(4, settings, context.run_dir)
    batch = made.collate()([made.build_dataset()[i] for i in range(9)])
    assert batch[2].shape == (9, WIDTH if vectors else 0)
    model = made.build_model()
    assert (model.wide is not None) == vectors
    assert torch.isfinite(made.loss(model, batch, STEP).total)


def test_the_loss_is_the_mean_over_classes_summed_over_documents():
    batch = samples(7)
    loss = task().loss(Fixed(), Collate(CLASSES)(batch), STEP)
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


@pytest.mark.parametrize("width", [WIDTH, 0])
def test_a_batch_is_padded_with_zeros_to_its_longest_text(width):
    batch = samples(4, width)
    batch.append((np.empty(0, np.int32), np.empty(0, np.int32), np.ones(width, np.float32)))
    ids, lengths, vectors, targets = Collate(CLASSES)(batch)
    assert ids.shape == (5, max(len(tokens) for tokens, _, _ in batch))
    assert targets.shape == (5, CLASSES)
    assert (vectors.shape, vectors.dtype) == ((5, width), torch.float32)
    for row, (tokens, labels, vector) in enumerate(batch):
        assert vectors[row].tolist() == vector.tolist()
        assert ids[row].tolist() == tokens.tolist() + [0] * (ids.shape[1] - len(tokens))
        assert lengths[row] == len(tokens)
        assert sorted(targets[row].nonzero().flatten().tolist()) == sorted(labels.tolist())
    assert Collate(2)(batch[-1:])[0].shape == (1, 1)


@pytest.mark.parametrize(
    ("size", "share", "out"), [(40, 0.05, 2), (41, 0.5, 20), (3, 0.99, 2), (5, 0.01, 0), (9, 0, 0)]
)
def test_held_out_and_training_documents_are_all_documents(tmp_path, size, share, out):
    run = RunDirectory.at(tmp_path)
    write_parquet(run, training_set_path(run), pa.table({"row": range(size)}))
    made = build_task(CLASSES, settings_of(share), run)
    kept, held = made.build_dataset(), made.build_eval_dataset()
    held_rows = [] if held is None else held.rows.tolist()
    assert len(held_rows) == out
    assert sorted([*kept.rows.tolist(), *held_rows]) == list(range(size))
    again = build_task(CLASSES, settings_of(share), run).build_dataset()
    np.testing.assert_array_equal(again.rows, kept.rows)


def test_samples_without_a_run_have_the_full_length():
    made = task()
    tokens, labels, vector = made.build_dataset()[3]
    assert len(tokens) == SETTINGS.length
    assert 0 < tokens.min() <= tokens.max() < SETTINGS.vocabulary
    assert labels.max() < CLASSES
    assert vector.shape == (WIDTH,)
    for one, again in zip((tokens, labels, vector), made.build_dataset()[3], strict=True):
        np.testing.assert_array_equal(one, again)
    assert not np.array_equal(made.build_dataset()[4][0], tokens)
    assert not np.array_equal(made.build_dataset()[4][2], vector)
    without = build_task(CLASSES, settings_of(vectors=False), None)
    assert without.data[3][2].shape == NOTHING.shape
    assert without.build_model().wide is None
    loss = made.loss(
        made.build_model(), made.collate()([made.build_dataset()[i] for i in (0, 1)]), STEP
    )
    assert torch.isfinite(loss.total)


def test_samples_without_a_run_are_words_of_the_pretrained_model(tiny_bert):
    made = build_task(CLASSES, settings_of(pretrained=tiny_bert), None)
    assert made.data.width == 0
    tokens = np.concatenate([made.build_dataset()[i][0] for i in range(200)])
    assert 512 < tokens.max() < 600
