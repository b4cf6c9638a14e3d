"""Text encoders: LSA (TF-IDF with a truncated SVD) fitted here, or a sentence-transformers model.

An encoder is a frozen description that is cheap to pickle; a task loads its weights once per
process.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.preprocessing import normalize

from experiments.common.pretrained import model_fingerprint
from experiments.teleclass.data.corpus import LabeledCorpus
from experiments.teleclass.settings import EncodeSettings
from raypipe.errors import ConfigError
from raypipe.graph.identity import fingerprint
from raypipe.hardware import Arithmetic
from raypipe.store.run_directory import RunDirectory

Vectors = NDArray[np.float32]

_TOKEN_PATTERN = r"[^\W\d_]{2,}"


@dataclass(frozen=True)
class LsaEncoder:
    """Latent semantic analysis with weights in a run directory.

    TF-IDF with logarithmic counts, projected to the strongest singular vectors (Deerwester et al.
    1990, Indexing by latent semantic analysis).
    """

    run_dir: RunDirectory
    fingerprint: str

    @staticmethod
    def path(run_dir: RunDirectory) -> str:
        """Return the path of the weights."""
        return run_dir.artifact("encode", "lsa.npz")

    @staticmethod
    def stored(run_dir: RunDirectory) -> LsaEncoder:
        """Return the encoder of a run directory.

        Its fingerprint is that of the weights: if singular values are close, rounding can rotate
        the axes, so that two fits to the same texts differ.
        """
        weights = run_dir.read(LsaEncoder.path(run_dir))
        return LsaEncoder(run_dir, hashlib.sha256(weights).hexdigest())

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Return vectors ``[n, d]`` of length 1, or 0 for a text without a known word."""
        vectorizer, components = _lsa(self)
        vectors: Vectors = normalize(vectorizer.transform(texts) @ components.T)
        return vectors.astype(np.float32, copy=False)


@dataclass(frozen=True)
class SentenceEncoder:
    """A sentence-transformers model by name or directory, on a GPU if the process has one."""

    model: str
    fingerprint: str
    max_tokens: int
    batch_size: int
    precision: Arithmetic

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Return vectors ``[n, d]`` of length 1; texts of similar length share a batch."""
        import torch

        from raypipe.training import precision

        model = _sentence_transformer(self.model, self.max_tokens)
        device = torch.device(model.device)
        precision.check(self.precision, device, "encode.precision")
        precision.configure(self.precision)
        with precision.autocast(self.precision, device):
            vectors = model.encode(
                list(texts),
                batch_size=self.batch_size,
                normalize_embeddings=True,
                show_progress_bar=False,
                convert_to_tensor=True,
            )
        array: Vectors = vectors.float().cpu().numpy()
        return array


#: encoders with the same fingerprint return the same vectors
Encoder = LsaEncoder | SentenceEncoder


def stored_encoder(
    run_dir: RunDirectory, corpus: LabeledCorpus, settings: EncodeSettings
) -> Encoder:
    """Return the encoder of the vectors that a run directory holds.

    Raises:
        ConfigError: its weights are missing or corrupt, or it was fitted otherwise.

    """
    if settings.model is not None:
        return sentence_encoder(settings)
    if not is_fitted(run_dir, lsa_identity(corpus, settings)):  # another fit has other axes
        raise ConfigError(
            f"{LsaEncoder.path(run_dir)}: the encoder of the stored vectors is missing or "
            "damaged; run the configuration in another run directory"
        )
    return LsaEncoder.stored(run_dir)


def lsa_identity(corpus: LabeledCorpus, settings: EncodeSettings) -> str:
    """Return the fingerprint of the settings and texts that LSA is fitted to."""
    names = {"dimensions", "max_features", "fit_documents", "seed"}
    fit = settings.model_dump(mode="json", include=names)
    return fingerprint({"lsa": fit, "data": corpus.identity()})


def fit_lsa(
    texts: Iterable[str], settings: EncodeSettings, identity: str, run_dir: RunDirectory
) -> int:
    """Fit LSA to texts, store its weights, and return the number of dimensions.

    Words must occur in at least two texts. Few words or texts give fewer dimensions.

    Raises:
        ValueError: no word is left.

    """
    vectorizer = TfidfVectorizer(
        token_pattern=_TOKEN_PATTERN,
        stop_words="english",
        min_df=2,
        max_df=0.5,
        sublinear_tf=True,
        dtype=np.float32,
        max_features=settings.max_features,
    )
    try:
        weights = vectorizer.fit_transform(texts)
    except ValueError as error:  # no word occurs in two texts and not in most
        raise ValueError(f"{error}: too few texts for an encoder, give more documents") from error
    dimensions: int = min(settings.dimensions, *(size - 1 for size in weights.shape))
    if dimensions < 1:
        raise ValueError("too few words for an encoder, give more documents")
    svd = TruncatedSVD(
        dimensions, algorithm="randomized", n_iter=5, random_state=settings.seed
    ).fit(weights)
    words = [str(word) for word in vectorizer.get_feature_names_out()]
    stream = io.BytesIO()
    np.savez(
        stream,
        words=np.frombuffer(json.dumps(words).encode(), np.uint8),
        idf=vectorizer.idf_.astype(np.float32),
        components=svd.components_.astype(np.float32),
        identity=np.frombuffer(identity.encode(), np.uint8),
    )
    run_dir.write(LsaEncoder.path(run_dir), stream.getvalue())
    return dimensions


def is_fitted(run_dir: RunDirectory, identity: str) -> bool:
    """Whether the run directory holds intact weights with this identity."""
    path = LsaEncoder.path(run_dir)
    if not run_dir.exists(path):
        return False
    try:
        with np.load(io.BytesIO(run_dir.read(path)), allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}  # verifies their checksums
    except (OSError, ValueError, EOFError, BadZipFile):
        return False
    return "identity" in arrays and arrays["identity"].tobytes() == identity.encode()


def sentence_encoder(settings: EncodeSettings) -> SentenceEncoder:
    """Return the sentence-transformers encoder of the settings.

    Raises:
        ConfigError: the libraries are missing, or a directory does not hold a model.

    """
    if (model := settings.model) is None:
        raise ValueError("these settings name no model")
    need_nlp(f"encode.model = {model}")
    identity = {
        "model": model_identity(model, "encode.model"),
        "max_tokens": settings.max_tokens,
        "precision": settings.precision,
    }
    return SentenceEncoder(
        str(Path(model).resolve()) if Path(model).is_dir() else model,
        fingerprint(identity),
        settings.max_tokens,
        settings.batch_size,
        settings.precision,
    )


def need_nlp(what: str) -> None:
    """Refuse what needs the extra ``nlp`` if it is not installed. Raises ConfigError."""
    for module in ("transformers", "sentence_transformers"):
        if find_spec(module) is None:
            raise ConfigError(f"{what}: needs {module}: pip install 'raypipe-runner[nlp]'")


def model_identity(model: str, key: str) -> str:
    """Return the identity of a pretrained model: its name, or a hash of its directory's files.

    Raises:
        ConfigError: the directory does not hold a model.

    """
    folder = Path(model)
    if not folder.is_dir():
        if folder.is_absolute() or model.startswith("."):
            raise ConfigError(f"{key} = {model}: there is no such directory")
    elif not (folder / "config.json").is_file():
        raise ConfigError(f"{key} = {model}: holds no config.json, so it is not a saved model")
    return model_fingerprint(model)


@lru_cache(maxsize=1)
def _lsa(encoder: LsaEncoder) -> tuple[TfidfVectorizer, Vectors]:
    content = encoder.run_dir.read(LsaEncoder.path(encoder.run_dir))
    with np.load(io.BytesIO(content), allow_pickle=False) as stored:
        words = json.loads(stored["words"].tobytes())
        idf, components = stored["idf"], stored["components"]
    vectorizer = TfidfVectorizer(
        token_pattern=_TOKEN_PATTERN, sublinear_tf=True, dtype=np.float32, vocabulary=words
    )
    vectorizer.idf_ = idf
    return vectorizer, components


@lru_cache(maxsize=1)
def _sentence_transformer(name: str, max_tokens: int) -> Any:
    from sentence_transformers import SentenceTransformer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = SentenceTransformer(name)
    model.max_seq_length = min(max_tokens, model.max_seq_length or max_tokens)
    return model
