"""The classifier, from scratch and of pretrained weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from experiments.teleclass.model import (
    build_classifier,
    flops_of,
    metadata_of,
    restore_classifier,
)
from experiments.teleclass.settings import ClassifierSettings, takes_vectors
from experiments.teleclass.training import Collate

SCRATCH = ClassifierSettings(vocabulary=512, length=24, hidden=16, layers=2, heads=2, dropout=0)


#: dimensions of the vectors of phase 1
WIDTH = 7


@pytest.fixture(params=["vectors", "scratch", "mean", "cls"])
def settings(request):
    if request.param in ("vectors", "scratch"):
        return SCRATCH.model_copy(update={"vectors": request.param == "vectors"})
    folder = request.getfixturevalue("tiny_bert")
    return SCRATCH.model_copy(update={"pretrained": folder, "pooling": request.param})


@pytest.fixture
def width(settings) -> int:
    return WIDTH if takes_vectors(settings) else 0


def samples(width: int) -> list:
    draw = np.random.default_rng(0)
    lengths = [1, 3, 24, *draw.integers(1, 25, 3)]
    return [
        (
            draw.integers(1, 512, n, dtype=np.int32),
            draw.integers(0, 5, 2, dtype=np.int32),
            draw.standard_normal(width, dtype=np.float32),
        )
        for n in lengths
    ]


def inputs(width: int) -> list[torch.Tensor]:
    return list(Collate(5)(samples(width))[:-1])


def test_logits_do_not_depend_on_the_padding(settings, width):
    torch.manual_seed(0)
    model = build_classifier(settings, 5, width).eval()
    with torch.inference_mode():
        together = model(*inputs(width))
        alone = torch.cat([model(*Collate(5)([each])[:-1]) for each in samples(width)])
    assert together.shape == (6, 5)
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)
    assert (together[1:] - together[:1]).abs().max() > 1e-3


def test_the_vectors_add_what_a_linear_layer_makes_of_them():
    torch.manual_seed(0)
    model = build_classifier(SCRATCH, 5, WIDTH).eval()
    ids, lengths, vectors = inputs(WIDTH)
    with torch.inference_mode():
        added = model(ids, lengths, vectors) - model(ids, lengths, torch.zeros_like(vectors))
    expected = WIDTH**0.5 * vectors.double() @ model.wide.weight.double().T
    torch.testing.assert_close(added.double(), expected, atol=1e-5, rtol=0)
    assert expected.abs().max() > 0.1


def test_a_restored_classifier_gives_the_same_logits(settings, width):
    torch.manual_seed(0)
    model = build_classifier(settings, 5, width).eval()
    for parameter in model.parameters():  # as training would
        torch.nn.init.normal_(parameter, std=0.1)
    restored = restore_classifier(model.state_dict(), metadata_of(settings, 5, width))
    assert not restored.training
    with torch.inference_mode():
        expected = model(*inputs(width))
        torch.testing.assert_close(restored(*inputs(width)), expected, atol=0, rtol=0)


@pytest.mark.parametrize("classes", [1, 5])
def test_every_parameter_has_a_gradient(settings, width, classes):
    model = build_classifier(settings, classes, width)
    model(*inputs(width)).sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_the_count_of_operations_is_that_of_torch(settings):
    large = settings.model_copy(update={"hidden": 64, "heads": 4})
    width = 100_000 if takes_vectors(settings) else 0  # so that the wide layer counts
    model = build_classifier(large, 5, width).eval()
    ids = torch.randint(1, 512, (1, large.length))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(ids, torch.tensor([large.length]), torch.ones(1, width))
    assert flops_of(model, large, 5) == pytest.approx(3 * counter.get_total_flops(), rel=0.1)
