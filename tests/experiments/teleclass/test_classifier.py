"""The classifier, from scratch and of pretrained weights, and its predictions."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experiments.common.tokenizer import token_lists, tokenizer_path
from experiments.teleclass.infer import TrainedClassifier, choose
from experiments.teleclass.model import build_classifier, flops_of, metadata_of
from experiments.teleclass.settings import ClassifierSettings, InferSettings, takes_vectors
from experiments.teleclass.training import Collate
from experiments.teleclass.training_set import make_tokenizer
from raypipe.store.run_directory import RunDirectory
from raypipe.training.weights import write_weights
from tests.experiments.references import counted_flops, lively
from tests.experiments.teleclass.sections import taxonomy_of, tokens_of

SCRATCH = ClassifierSettings(vocabulary=512, length=24, hidden=16, layers=2, heads=2, dropout=0)


#: dimensions of the vectors of phase 1
WIDTH = 7


@pytest.fixture(params=["vectors", "scratch", "pretrained"])
def settings(request):
    if request.param in ("vectors", "scratch"):
        return SCRATCH.model_copy(update={"vectors": request.param == "vectors"})
    folder = request.getfixturevalue("tiny_bert")
    return SCRATCH.model_copy(update={"pretrained": folder})


@pytest.fixture
def width(settings) -> int:
    return WIDTH if takes_vectors(settings) else 0


def as_trained(settings: ClassifierSettings, width: int) -> torch.nn.Module:
    torch.manual_seed(0)
    return lively(build_classifier(settings, 5, width).eval(), 0.3)


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


def test_the_vectors_add_what_a_linear_layer_makes_of_them():
    torch.manual_seed(0)
    model = build_classifier(SCRATCH, 5, WIDTH).eval()
    ids, lengths, vectors = inputs(WIDTH)
    with torch.inference_mode():
        added = model(ids, lengths, vectors) - model(ids, lengths, torch.zeros_like(vectors))
    expected = WIDTH**0.5 * vectors.double() @ model.wide.weight.double().T
    torch.testing.assert_close(added.double(), expected, atol=1e-5, rtol=0)
    assert expected.abs().max() > 0.1


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
    given = ids, torch.tensor([large.length]), torch.ones(1, width)
    forward = counted_flops(lambda: model(*given))
    assert flops_of(model, large, 5) == pytest.approx(3 * forward, rel=0.1)


#: 0 over 1 over 2, 3 over 2; 4 alone
TAXONOMY = taxonomy_of("01234", ["01", "12", "32"])
ABOVE = [{0}, {0, 1}, {0, 1, 2, 3}, {3}, {4}]


def test_a_text_has_the_same_probabilities_whatever_is_beside_it(tmp_path, settings, width):
    run, model = RunDirectory.at(tmp_path / "run"), as_trained(settings, width)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    write_weights(run, run.model("train"), weights, metadata_of(settings, 5, width))
    tokenizer = make_tokenizer(["a bee sees the sea"] * 9, *tokens_of(settings))
    run.write(tokenizer_path(run), tokenizer.encode())
    draw = random.Random(0)
    texts = [" ".join(draw.choices("abcdefg", k=draw.randint(1, 30))) for _ in range(12)] + [""]
    vectors = np.random.default_rng(0).standard_normal((13, width), dtype=np.float32)
    with torch.inference_mode():
        logits = [
            model(torch.tensor([ids or [0]]), torch.tensor([len(ids)]), torch.tensor(row[None]))
            for ids, row in zip(token_lists(tokenizer, texts).to_pylist(), vectors, strict=True)
        ]
    expected = torch.cat(logits).sigmoid().numpy()
    assert np.ptp(expected, axis=0).max() > 0.01
    for order, size in ((list(range(13)), 64), (draw.sample(range(13), 13), 4), ([5, 5, 12], 2)):
        predictor = TrainedClassifier(run, "train", InferSettings(batch_size=size))
        mine = vectors[order] if width else None
        found = predictor.probabilities([texts[i] for i in order], mine)
        np.testing.assert_allclose(found, expected[order], atol=1e-5)


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.3, 0.5, 0.9]))
def test_labels_are_those_above_the_threshold_or_the_best_closed_upward(seed, threshold):
    probabilities = np.random.default_rng(seed).integers(0, 11, (6, 5)).astype(np.float32) / 10
    limit = np.float32(threshold)
    above = choose(probabilities, TAXONOMY, InferSettings(threshold=threshold), 1, 3)
    for row, values in enumerate(probabilities):
        order = sorted(range(5), key=lambda c: (-values[c], c))
        chosen = [c for c in range(5) if values[c] >= limit] or order[:1]
        assert set(above[row].indices) == set().union(*(ABOVE[c] for c in chosen))


def test_labels_end_at_the_largest_gap_by_default():
    scores = np.array([[0.9, 0.1, 0.8, 0.2, 0.7], [5.0, 4.0, 0.0, 0.0, 0.0]], np.float32)
    found = choose(scores, TAXONOMY, InferSettings(), 1, 3)
    assert [set(row.indices) for row in found] == [{0, 1, 2, 3, 4}, {0, 1}]
    found = choose(scores, TAXONOMY, InferSettings(), 1, 1)
    assert [set(row.indices) for row in found] == [{0}, {0}]
