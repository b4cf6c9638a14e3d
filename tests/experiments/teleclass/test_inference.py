"""Predictions: what a text gets, which labels are chosen, what is kept of a block."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experiments.common.tokenizer import token_lists, tokenizer_path
from experiments.teleclass.infer import TrainedClassifier, choose
from experiments.teleclass.model import build_classifier, metadata_of
from experiments.teleclass.settings import ClassifierSettings, InferSettings
from experiments.teleclass.taxonomy import Row, make_taxonomy
from experiments.teleclass.training_set import make_tokenizer
from raypipe.store.run_directory import RunDirectory
from raypipe.training.weights import write_weights
from tests.experiments.teleclass.sections import tokens_of

#: 0 over 1 over 2, 3 over 2; 4 alone
TAXONOMY = make_taxonomy(
    [Row("", f"c{i}", f"name {i}") for i in range(5)],
    [Row("", "c0", "c1"), Row("", "c1", "c2"), Row("", "c3", "c2")],
    source="test",
)
ABOVE = [{0}, {0, 1}, {0, 1, 2, 3}, {3}, {4}]
SCRATCH = ClassifierSettings(vocabulary=512, length=24, hidden=16, layers=2, heads=2)


@pytest.fixture(params=["vectors", "scratch", "pretrained"])
def trained(request, tmp_path):
    """A run directory with a classifier, that classifier, and the dimensions of its vectors."""
    settings, width = SCRATCH, 7 if request.param == "vectors" else 0
    if request.param == "pretrained":
        settings = SCRATCH.model_copy(update={"pretrained": request.getfixturevalue("tiny_bert")})
    run = RunDirectory.at(tmp_path / "run")
    torch.manual_seed(0)
    model = build_classifier(settings, 5, width).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    write_weights(run, run.model("train"), weights, metadata_of(settings, 5, width))
    tokenizer = make_tokenizer(["a bee sees the sea"] * 9, *tokens_of(settings))
    run.write(tokenizer_path(run), tokenizer.encode())
    return run, model, tokenizer, width


def test_a_text_has_the_same_probabilities_whatever_is_beside_it(trained):
    run, model, tokenizer, width = trained
    draw = random.Random(0)
    texts = [" ".join(draw.choices("abcdefg", k=draw.randint(1, 30))) for _ in range(12)] + [""]
    vectors = np.random.default_rng(0).standard_normal((13, width), dtype=np.float32)
    with torch.inference_mode():
        logits = [
            model(
                torch.tensor([ids or [0]]), torch.tensor([len(ids)]), torch.tensor(vectors[[row]])
            )
            for row, ids in enumerate(token_lists(tokenizer, texts).to_pylist())
        ]
    expected = torch.cat(logits).sigmoid().numpy()
    assert np.ptp(expected, axis=0).max() > 0.01
    for order, size in ((list(range(13)), 64), (draw.sample(range(13), 13), 4), ([5, 5, 12], 2)):
        predictor = TrainedClassifier(run, "train", InferSettings(batch_size=size))
        mine = vectors[order] if width else None
        found = predictor.probabilities([texts[i] for i in order], mine)
        np.testing.assert_allclose(found, expected[order], atol=1e-5)


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.3, 0.5, 0.9]), st.integers(1, 7))
def test_labels_are_those_above_the_threshold_or_the_best_closed_upward(seed, threshold, top_k):
    probabilities = np.random.default_rng(seed).integers(0, 11, (6, 5)).astype(np.float32) / 10
    limit = np.float32(threshold)
    above = choose(probabilities, TAXONOMY, InferSettings(threshold=threshold), 1, 3)
    best = choose(probabilities, TAXONOMY, InferSettings(top_k=top_k), 1, 3)
    for row, values in enumerate(probabilities):
        order = sorted(range(5), key=lambda c: (-values[c], c))
        chosen = [c for c in range(5) if values[c] >= limit] or order[:1]
        assert set(above[row].indices) == set().union(*(ABOVE[c] for c in chosen))
        assert set(best[row].indices) == set().union(*(ABOVE[c] for c in order[:top_k]))


def test_labels_end_at_the_largest_gap_by_default():
    scores = np.array([[0.9, 0.1, 0.8, 0.2, 0.7], [5.0, 4.0, 0.0, 0.0, 0.0]], np.float32)
    found = choose(scores, TAXONOMY, InferSettings(), 1, 3)
    assert [set(row.indices) for row in found] == [{0, 1, 2, 3, 4}, {0, 1}]
    found = choose(scores, TAXONOMY, InferSettings(), 1, 1)
    assert [set(row.indices) for row in found] == [{0}, {0}]
