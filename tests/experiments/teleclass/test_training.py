"""The stored documents as samples, the loss and the split of the training set."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

from experiments.teleclass.artifacts import training_set_path
from experiments.teleclass.settings import (
    ClassifierSettings,
    EncodeSettings,
    TeleclassSettings,
    TrainSettings,
)
from experiments.teleclass.training import (
    Collate,
    TeleclassTask,
    build_task,
)
from raypipe.store.artifacts import write_parquet
from raypipe.store.run_directory import RunDirectory
from raypipe.training.schedule import Phase
from raypipe.training.task import StepContext

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
