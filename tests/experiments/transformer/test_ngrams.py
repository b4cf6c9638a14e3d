"""N-grams of texts, their weights, and the branch of the model that reads them."""

from __future__ import annotations

import hashlib
import math
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.feature_extraction.text import TfidfVectorizer

from experiments.transformer.model import Transformer
from experiments.transformer.prepare import encode_ngrams, known_ngrams, ngram_keys
from experiments.transformer.settings import NgramSettings, TransformerSettings

MASK = 2**64 - 1
BOTH = NgramSettings()
WORDS = NgramSettings(bytes=None)
SMALL = TransformerSettings(
    vocabulary=9, length=6, outputs=3, hidden=8, heads=2, layers=1, dropout=0.0,
    ngrams=NgramSettings(most=20, width=4, share=0.75),
)  # fmt: skip


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
def test_the_keys_are_those_written_plainly(text: str) -> None:
    assert sorted(ngram_keys(text, BOTH).tolist()) == sorted(plain_keys(text))


def test_the_weights_are_those_of_scikit_learn() -> None:
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


def test_the_model_knows_the_ngrams_of_the_most_texts() -> None:
    texts = ["a b", "b a", "a c c", "c a", "c", "d d d"]
    known = known_ngrams(texts, NgramSettings(words=1, bytes=None, most=2))
    a, c = (int(ngram_keys(word, WORDS)[0]) for word in "ac")
    assert known["key"].to_pylist() == sorted((a, c))
    idf = dict(zip(known["key"].to_pylist(), known["idf"].to_pylist(), strict=True))
    assert idf == pytest.approx({a: math.log(7 / 5) + 1, c: math.log(7 / 4) + 1})


@pytest.mark.parametrize("known", [["b b", "b"], ["x", "y"]])
def test_a_text_without_known_ngrams_is_only_padding(known: list[str]) -> None:
    found = encode_ngrams(["z"], known_ngrams(known, WORDS), WORDS)
    assert (found["ngrams"].to_pylist(), found["weights"].to_pylist()) == ([[0]], [[0.0]])
    assert found["ngrams"].type == pa.list_(pa.int32())


def test_the_branch_is_a_linear_model_of_the_weights() -> None:
    torch.manual_seed(0)
    model = Transformer(SMALL).double()
    branch = model.ngrams
    assert branch is not None
    ids, ngrams = torch.tensor([[3, 4]]), torch.tensor([[5, 2, 9]])
    weights = torch.tensor([[0.6, 0.0, 0.8]], dtype=torch.float64)
    features = torch.zeros(1, 21, dtype=torch.float64).index_add(1, ngrams[0], weights)
    expected = branch.head(features @ branch.vectors * 2)  # the root of the width
    encoded, linear = model.branches(ids, ngrams, weights)
    torch.testing.assert_close(linear, expected)
    expected = 0.25 * encoded + 0.75 * linear
    torch.testing.assert_close(model(ids, ngrams, weights), expected)
