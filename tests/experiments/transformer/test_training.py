from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import default_collate

from experiments.transformer.model import Transformer
from experiments.transformer.settings import NgramSettings, TransformerSettings
from experiments.transformer.training import RandomSamples, Sample, TransformerTask
from raypipe.training.schedule import Phase
from raypipe.training.task import StepContext

SIZE = {"hidden": 16, "heads": 2, "layers": 2, "dropout": 0.0}
SEQUENCE = TransformerSettings(vocabulary=12, length=10, outputs=3, **SIZE)
TABLE = TransformerSettings(numeric=4, categories=(3, 5), outputs=3, **SIZE)
REGRESSION = {"kind": "regression", "outputs": 1}
NGRAMS = SEQUENCE.model_copy(update={"ngrams": NgramSettings(most=11, width=4)})
KINDS = [
    SEQUENCE,
    NGRAMS,
    TABLE,
    SEQUENCE.model_copy(update=REGRESSION),
    TABLE.model_copy(update=REGRESSION),
]
CONTEXT = StepContext(0, Phase("train", 1, 8, 1e-3), 0)


def _name(settings: TransformerSettings) -> str:
    source = "ngrams" if settings.ngrams else "sequence" if settings.vocabulary else "table"
    return f"{source}-{settings.kind}"


def _model(settings: TransformerSettings) -> Transformer:
    torch.manual_seed(0)
    return Transformer(settings).double()


def _batch(settings: TransformerSettings, indices: Sequence[int]) -> Sample:
    return tuple(default_collate(RandomSamples(settings, 100).__getitems__(list(indices))))


@pytest.mark.parametrize("settings", KINDS, ids=_name)
def test_the_loss_is_pytorch_s_on_the_whole_batch(settings: TransformerSettings) -> None:
    model, (*inputs, target) = _model(settings).eval(), _batch(settings, range(8))
    task = TransformerTask(settings, RandomSamples(settings, 8))
    loss = task.loss(model, (*inputs, target), CONTEXT)
    outputs = model(*inputs)
    assert loss.weight == 8
    if settings.kind == "regression":
        expected = F.mse_loss(outputs.squeeze(1), target.double())
        assert loss.metrics == {}
    else:
        expected = F.cross_entropy(outputs, target)
        hits = sum(int(row.argmax() == label) for row, label in zip(outputs, target, strict=True))
        assert {name: int(value) for name, value in loss.metrics.items()} == {"accuracy": hits}
    torch.testing.assert_close(loss.total / loss.weight, expected)


def test_the_loss_in_training_is_the_mean_of_the_branches() -> None:
    model, (*inputs, target) = _model(NGRAMS), _batch(NGRAMS, range(8))
    task = TransformerTask(NGRAMS, RandomSamples(NGRAMS, 8))
    loss = task.loss(model, (*inputs, target), CONTEXT)
    encoded, linear = (
        F.cross_entropy(part, target, reduction="sum") for part in model.branches(*inputs)
    )
    torch.testing.assert_close(loss.total, (encoded + linear) / 2)
    hits = (model(*inputs).argmax(1) == target).sum()
    torch.testing.assert_close(loss.metrics["accuracy"], hits)
