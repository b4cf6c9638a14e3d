"""The model, its loss, and the n-grams that one of its branches reads."""

from __future__ import annotations

import hashlib
import math
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.feature_extraction.text import TfidfVectorizer
from torch.utils.data import default_collate

from experiments.transformer.model import SequenceInput, TableInput, Transformer, flops_per_sample
from experiments.transformer.prepare import encode_ngrams, known_ngrams, ngram_keys
from experiments.transformer.settings import NgramSettings, TransformerSettings
from experiments.transformer.training import RandomSamples, Sample, TransformerTask
from tests.experiments.references import STEP, counted_flops, torch_encoder

SEQUENCE = TransformerSettings(
    vocabulary=11, length=9, outputs=3, hidden=8, heads=2, layers=2, dropout=0.0
)
TABLE = TransformerSettings(
    numeric=3, categories=(4, 2), outputs=3, hidden=8, heads=2, layers=2, dropout=0.0
)
NGRAMS = SEQUENCE.model_copy(update={"ngrams": NgramSettings(most=12, width=4)})
NUMERIC_ONLY = TABLE.model_copy(update={"categories": ()})
CATEGORIES_ONLY = TABLE.model_copy(update={"numeric": 0})
KINDS = [SEQUENCE, NGRAMS, TABLE, NUMERIC_ONLY, CATEGORIES_ONLY]


def _model(given: TransformerSettings) -> Transformer:
    torch.manual_seed(0)
    return Transformer(given).double()


def _batch(given: TransformerSettings) -> Sample:
    """Eight samples; sequences have padding."""
    return tuple(default_collate(RandomSamples(given, 100).__getitems__(list(range(8)))))


def test_the_encoder_is_pytorch_s_read_at_the_cls_token():
    model = _model(SEQUENCE)

    def inputs(ours):
        weight = torch.cat((ours.query.weight, ours.key_value.weight))
        return weight, torch.cat((ours.query.bias, ours.key_value.bias))

    encoder = torch_encoder(model.layers, inputs, 8, 2, 32, activation="gelu", norm_first=True)
    ids, _ = _batch(SEQUENCE)
    tokens = model.input.embedding.weight[ids] + model.input.positions
    tokens = torch.cat((model.cls.expand(8, 1, 8), tokens), 1)
    padding = torch.cat((torch.zeros(8, 1, dtype=torch.bool), ids == 0), 1)
    assert padding.any()
    encoded = encoder(tokens, src_key_padding_mask=padding)[:, 0]
    expected = model.head(model.norm(encoded))
    torch.testing.assert_close(model(ids), expected, rtol=1e-10, atol=1e-10)


@settings(max_examples=25, deadline=None)
@given(tokens=st.lists(st.integers(1, 10), max_size=6), padding=st.integers(0, 3))
def test_padding_changes_no_output(tokens, padding):
    model = _model(SEQUENCE)
    bare = torch.tensor([tokens], dtype=torch.int64)
    padded = torch.tensor([tokens + [0] * padding])
    companion = torch.ones(1, len(tokens) + padding, dtype=torch.int64)
    in_a_batch = torch.cat((padded.long(), companion))
    torch.testing.assert_close(model(in_a_batch)[:1], model(bare), rtol=1e-10, atol=1e-10)


def test_a_row_is_a_token_a_feature():
    """FT-Transformer, section 3.3, equation by equation."""
    tokenizer = TableInput(TABLE).double()
    numeric, categories, _ = _batch(TABLE)
    tokens, _ = tokenizer(numeric, categories)
    assert tokens.shape == (8, 5, 8)
    first, second = tokenizer.embedding.weight.split((4, 2))
    expected = tokenizer.bias + numeric[..., None] * tokenizer.scale
    torch.testing.assert_close(tokens[:, :3], expected)
    expected = torch.stack((first[categories[:, 0]], second[categories[:, 1]]), 1)
    torch.testing.assert_close(tokens[:, 3:], expected)


@pytest.mark.parametrize("given", KINDS)
@pytest.mark.parametrize("layers", [1, 3])
def test_the_operations_are_those_pytorch_counts_and_every_parameter_learns(given, layers):
    given = given.model_copy(update={"layers": layers, "feed_forward": 20})
    model, (*inputs, _) = _model(given), _batch(given)
    found = counted_flops(lambda: model(*inputs).square().sum().backward())
    assert found == 8 * flops_per_sample(given)
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 0, name


def test_a_sequence_too_long_is_refused():
    with pytest.raises(ValueError, match="a sequence has 10 tokens, but the model has length=9"):
        SequenceInput(SEQUENCE)(torch.ones(1, 10, dtype=torch.int64))


REGRESSION = {"kind": "regression", "outputs": 1}
NUMBERS = [each.model_copy(update=REGRESSION) for each in (SEQUENCE, TABLE)]


@pytest.mark.parametrize("given", [SEQUENCE, NGRAMS, TABLE, *NUMBERS])
def test_the_loss_is_pytorch_s_on_the_whole_batch(given):
    model, (*inputs, target) = _model(given).eval(), _batch(given)
    task = TransformerTask(given, RandomSamples(given, 8))
    loss = task.loss(model, (*inputs, target), STEP)
    outputs = model(*inputs)
    assert loss.weight == 8
    if given.kind == "regression":
        expected = F.mse_loss(outputs.squeeze(1), target.double())
        assert loss.metrics == {}
    else:
        expected = F.cross_entropy(outputs, target)
        hits = sum(int(row.argmax() == label) for row, label in zip(outputs, target, strict=True))
        assert {name: int(value) for name, value in loss.metrics.items()} == {"accuracy": hits}
    torch.testing.assert_close(loss.total / loss.weight, expected)


def test_the_loss_in_training_is_the_mean_of_the_branches():
    model, (*inputs, target) = _model(NGRAMS), _batch(NGRAMS)
    task = TransformerTask(NGRAMS, RandomSamples(NGRAMS, 8))
    loss = task.loss(model, (*inputs, target), STEP)
    encoded, linear = (
        F.cross_entropy(part, target, reduction="sum") for part in model.branches(*inputs)
    )
    torch.testing.assert_close(loss.total, (encoded + linear) / 2)
    hits = (model(*inputs).argmax(1) == target).sum()
    torch.testing.assert_close(loss.metrics["accuracy"], hits)


MASK = 2**64 - 1
BOTH = NgramSettings()
WORDS = NgramSettings(bytes=None)


def mixed(value: int) -> int:
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & MASK
    return value ^ (value >> 31)


def plain_keys(text: str) -> list[int]:
    """The keys one by one, with Python's integers."""
    words = "".join(c if c.isalnum() or c == "_" else " " for c in text.lower()).split()
    hashes = [int.from_bytes(hashlib.sha256(w.encode()).digest()[:8], "little") for w in words]
    keys = [mixed(h) for h in hashes]
    keys += [mixed(mixed(a) + b & MASK) for a, b in pairwise(hashes)]
    data = f" {' '.join(words)} ".encode()
    for n in (3, 4, 5):
        for start in range(len(data) - n + 1):
            keys.append(mixed(int.from_bytes(data[start : start + n], "little") + (n << 56)))
    return keys


@given(st.text(st.sampled_from("abAB \u00e9\u4e2d1_,.\n"), max_size=30))
def test_the_keys_are_those_written_plainly(text):
    assert sorted(ngram_keys(text, BOTH).tolist()) == sorted(plain_keys(text))


def test_the_weights_are_those_of_scikit_learn():
    train = ["the card is lost", "a lost card a card", "is the weather fine", "fine fine weather"]
    test = ["card card weather, the unknown", "is a lost weather"]
    vectors = TfidfVectorizer(
        ngram_range=(1, 2), min_df=2, sublinear_tf=True, token_pattern=r"(?u)\b\w+\b"
    )
    expected = vectors.fit(train).transform(test)
    found = encode_ngrams(test, known_ngrams(train, WORDS), WORDS)
    for row, weights in enumerate(found["weights"].to_pylist()):
        np.testing.assert_allclose(sorted(weights), sorted(expected[row].data), rtol=1e-6)
    assert len(known_ngrams(train, WORDS)) == len(vectors.vocabulary_)


def test_the_model_knows_the_ngrams_of_the_most_texts():
    texts = ["a b", "b a", "a c c", "c a", "c", "d d d"]
    known = known_ngrams(texts, NgramSettings(words=1, bytes=None, most=2))
    a, c = (int(ngram_keys(word, WORDS)[0]) for word in "ac")
    assert known["key"].to_pylist() == sorted((a, c))
    idf = dict(zip(known["key"].to_pylist(), known["idf"].to_pylist(), strict=True))
    assert idf == pytest.approx({a: math.log(7 / 5) + 1, c: math.log(7 / 4) + 1})


@pytest.mark.parametrize("known", [["b b", "b"], ["x", "y"]])
def test_a_text_without_known_ngrams_is_only_padding(known):
    found = encode_ngrams(["z"], known_ngrams(known, WORDS), WORDS)
    assert (found["ngrams"].to_pylist(), found["weights"].to_pylist()) == ([[0]], [[0.0]])
    assert found["ngrams"].type == pa.list_(pa.int32())


def test_the_branch_is_a_linear_model_of_the_weights():
    torch.manual_seed(0)
    ngrams = NgramSettings(most=20, width=4, share=0.75)
    model = Transformer(SEQUENCE.model_copy(update={"ngrams": ngrams})).double()
    branch = model.ngrams
    ids, ngrams = torch.tensor([[3, 4]]), torch.tensor([[5, 2, 9]])
    weights = torch.tensor([[0.6, 0.0, 0.8]], dtype=torch.float64)
    features = torch.zeros(1, 21, dtype=torch.float64).index_add(1, ngrams[0], weights)
    expected = branch.head(features @ branch.vectors * 2)  # the root of the width
    encoded, linear = model.branches(ids, ngrams, weights)
    torch.testing.assert_close(linear, expected)
    expected = 0.25 * encoded + 0.75 * linear
    torch.testing.assert_close(model(ids, ngrams, weights), expected)
