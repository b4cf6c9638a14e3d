"""The loss and the split of the training set."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch
from experiments.teleclass.training_set import training_set_path
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from experiments.teleclass.settings import ClassifierSettings
from experiments.teleclass.training import Collate, TeleclassTask, build_task
from raypipe.artifacts import write_parquet
from raypipe.paths import RunDirectory
from raypipe.training.task import Phase, StepContext

SETTINGS = ClassifierSettings(vocabulary=512, length=10, hidden=8, layers=1, heads=1, dropout=0)
STEP = StepContext(0, Phase("train", 1, 1, 0.1), 0)
CLASSES = 6


class Fixed(nn.Module):
    """Logits that are decided by the first token of a text."""

    def forward(self, tokens, lengths):
        return torch.sin(tokens[:, :1] * torch.arange(1, CLASSES + 1)) * 3


def samples(count: int) -> list:
    draw = np.random.default_rng(count)
    return [
        (
            draw.integers(1, 512, draw.integers(1, 11), dtype=np.int32),
            draw.choice(CLASSES, draw.integers(0, 4), replace=False).astype(np.int32),
        )
        for _ in range(count)
    ]


def task() -> TeleclassTask:
    made = build_task(None, SETTINGS, CLASSES, 0.0)
    assert isinstance(made, TeleclassTask)
    return made


def test_the_loss_is_the_mean_over_classes_summed_over_documents():
    batch = samples(7)
    loss = task().loss(Fixed(), Collate(CLASSES)(batch), STEP)
    total = f1 = 0.0
    for tokens, labels in batch:
        logits = torch.sin(torch.tensor(int(tokens[0])) * torch.arange(1, CLASSES + 1)) * 3
        targets = torch.zeros(CLASSES)
        targets[labels.tolist()] = 1
        total += float(nn.BCEWithLogitsLoss()(logits, targets))
        chosen = {c for c in range(CLASSES) if logits[c] > 0}
        if chosen or len(labels):
            f1 += 2 * len(chosen & set(labels.tolist())) / (len(chosen) + len(labels))
    assert float(loss.total) == pytest.approx(total, rel=1e-5)
    assert float(loss.metrics["example_f1"]) == pytest.approx(f1, rel=1e-5)
    assert loss.weight == 7


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_any_split_into_micro_batches_sums_to_the_whole(sizes):
    torch.manual_seed(0)
    model, collate, made = task().build_model().eval(), Collate(CLASSES), task()
    batch = samples(sum(sizes))
    whole = made.loss(model, collate(batch), STEP)
    ends = np.cumsum(sizes)
    parts = [
        made.loss(model, collate(batch[end - size : end]), STEP)
        for size, end in zip(sizes, ends, strict=True)
    ]
    assert sum(float(part.total.detach()) for part in parts) == pytest.approx(
        float(whole.total.detach()), rel=1e-5
    )
    assert sum(part.weight for part in parts) == whole.weight
    f1 = sum(float(part.metrics["example_f1"]) for part in parts)
    assert f1 == pytest.approx(float(whole.metrics["example_f1"]), rel=1e-5, abs=1e-6)


def test_a_batch_is_padded_with_zeros_to_its_longest_text():
    batch = samples(4)
    batch.append((np.empty(0, np.int32), np.empty(0, np.int32)))
    ids, lengths, targets = Collate(CLASSES)(batch)
    assert ids.shape == (5, max(len(tokens) for tokens, _ in batch))
    assert targets.shape == (5, CLASSES)
    for row, (tokens, labels) in enumerate(batch):
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
    made = build_task(run, SETTINGS, CLASSES, share)
    kept, held = made.build_dataset(), made.build_eval_dataset()
    held_rows = [] if held is None else held.rows.tolist()
    assert len(held_rows) == out
    assert sorted([*kept.rows.tolist(), *held_rows]) == list(range(size))
    again = build_task(run, SETTINGS, CLASSES, share).build_dataset()
    np.testing.assert_array_equal(again.rows, kept.rows)


def test_samples_without_a_run_have_the_full_length():
    made = task()
    tokens, labels = made.build_dataset()[3]
    assert len(tokens) == SETTINGS.length
    assert 0 < tokens.min() <= tokens.max() < SETTINGS.vocabulary
    assert labels.max() < CLASSES
    np.testing.assert_array_equal(made.build_dataset()[3][0], tokens)
    assert not np.array_equal(made.build_dataset()[4][0], tokens)
    loss = made.loss(
        made.build_model(), made.collate()([made.build_dataset()[i] for i in (0, 1)]), STEP
    )
    assert torch.isfinite(loss.total)


def test_samples_without_a_run_are_words_of_the_pretrained_model(tiny_bert):
    made = build_task(None, SETTINGS.model_copy(update={"pretrained": tiny_bert}), CLASSES, 0.0)
    tokens = np.concatenate([made.build_dataset()[i][0] for i in range(200)])
    assert 512 < tokens.max() < 600
