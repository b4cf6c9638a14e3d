"""Texts to vectors: TF-IDF with a truncated SVD, trained here, or a sentence-transformers model.

An encoder is a frozen description that travels to a task; the task loads what it describes once in
its process.
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
from typing import Any, Protocol
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.preprocessing import normalize

from experiments.teleclass.settings import EncodeSettings
from raypipe.errors import ConfigError
from raypipe.hardware import Precision
from raypipe.pipeline.identity import fingerprint
from raypipe.storage.run_directory import RunDirectory

Vectors = NDArray[np.float32]

_TOKEN_PATTERN = r"[^\W\d_]{2,}"
_FILES = ("*.json", "*.safetensors", "*.bin", "*.txt", "*.model")


class Encoder(Protocol):
    """What turns texts into vectors."""

    @property
    def fingerprint(self) -> str:
        """The same for encoders that give the same vectors."""
        ...

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Vectors ``[n, d]`` of length 1, or 0 where a text has no known word."""
        ...


@dataclass(frozen=True)
class LsaEncoder:
    """Latent semantic analysis, of the texts it was fitted to; its weights lie in a run directory.

    TF-IDF of words, the logarithm of their counts, projected to the strongest singular vectors
    (Deerwester et al. 1990, Indexing by latent semantic analysis).
    """

    run: RunDirectory
    fingerprint: str

    @staticmethod
    def path(run: RunDirectory) -> str:
        """Where the weights lie."""
        return run.artifact("encode", "lsa.npz")

    @staticmethod
    def stored(run: RunDirectory) -> LsaEncoder:
        """The encoder of a run directory.

        Its fingerprint is that of the weights: two fits to the same texts need not agree, where
        singular values are close even small differences of the arithmetic turn the axes.
        """
        return LsaEncoder(run, hashlib.sha256(run.read(LsaEncoder.path(run))).hexdigest())

    def encode(self, texts: Sequence[str]) -> Vectors:
        """The vectors of texts."""
        vectoriser, components = _lsa(self)
        vectors: Vectors = normalize(vectoriser.transform(texts) @ components.T)
        return vectors.astype(np.float32, copy=False)


@dataclass(frozen=True)
class SentenceEncoder:
    """A sentence-transformers model by name or directory, on a GPU where the process has one."""

    model: str
    fingerprint: str
    max_tokens: int
    batch_size: int
    precision: Precision

    def encode(self, texts: Sequence[str]) -> Vectors:
        """The vectors of texts, which go through the model sorted by length."""
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


def fit_lsa(
    texts: Iterable[str], settings: EncodeSettings, identity: str, run: RunDirectory
) -> int:
    """Fit an encoder to texts and store it; its number of dimensions.

    A word counts that is in two texts at least; there are fewer dimensions where there are fewer
    words or texts.

    Raises:
        ValueError: no word is left.

    """
    vectoriser = TfidfVectorizer(
        token_pattern=_TOKEN_PATTERN,
        stop_words="english",
        min_df=2,
        max_df=0.5,
        sublinear_tf=True,
        dtype=np.float32,
        max_features=settings.max_features,
    )
    try:
        weights = vectoriser.fit_transform(texts)
    except ValueError as error:  # no word that is in two texts and not in most
        raise ValueError(f"{error}: too few texts for an encoder, give more documents") from error
    dimensions: int = min(settings.dimensions, *(size - 1 for size in weights.shape))
    if dimensions < 1:
        raise ValueError("too few words for an encoder, give more documents")
    svd = TruncatedSVD(
        dimensions, algorithm="randomized", n_iter=5, random_state=settings.seed
    ).fit(weights)
    words = [str(word) for word in vectoriser.get_feature_names_out()]
    stream = io.BytesIO()
    np.savez(
        stream,
        words=np.frombuffer(json.dumps(words).encode(), np.uint8),
        idf=vectoriser.idf_.astype(np.float32),
        components=svd.components_.astype(np.float32),
        identity=np.frombuffer(identity.encode(), np.uint8),
    )
    run.write(LsaEncoder.path(run), stream.getvalue())
    return dimensions


def fitted_lsa(run: RunDirectory, identity: str) -> bool:
    """Whether the run directory holds an encoder with this identity, whole."""
    path = LsaEncoder.path(run)
    if not run.exists(path):
        return False
    try:
        with np.load(io.BytesIO(run.read(path)), allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}  # compares their checksums
    except (OSError, ValueError, EOFError, BadZipFile):
        return False
    return "identity" in arrays and arrays["identity"].tobytes() == identity.encode()


def sentence_encoder(settings: EncodeSettings) -> SentenceEncoder:
    """The encoder of the settings.

    Raises:
        ConfigError: the libraries are missing, or a directory holds no model.

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
    """Refuse what needs the extra ``nlp`` where it is not installed. Raises ConfigError."""
    for module in ("transformers", "sentence_transformers"):
        if find_spec(module) is None:
            raise ConfigError(f"{what}: needs {module}: pip install 'raypipe-runner[nlp]'")


@lru_cache(maxsize=8)
def model_identity(model: str, key: str) -> str:
    """Return the identity of a pretrained model: its name, or the SHA-256 of its directory's files.

    Raises:
        ConfigError: a directory without a model.

    """
    folder = Path(model)
    if not folder.is_dir():
        if folder.is_absolute() or model.startswith("."):
            raise ConfigError(f"{key} = {model}: there is no such directory")
        return model
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{key} = {model}: holds no config.json, so it is not a saved model")
    digest = hashlib.sha256()
    for path in sorted(path for pattern in _FILES for path in folder.rglob(pattern)):
        digest.update(path.relative_to(folder).as_posix().encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


@lru_cache(maxsize=1)
def _lsa(encoder: LsaEncoder) -> tuple[TfidfVectorizer, Vectors]:
    content = encoder.run.read(LsaEncoder.path(encoder.run))
    with np.load(io.BytesIO(content), allow_pickle=False) as stored:
        words = json.loads(stored["words"].tobytes())
        idf, components = stored["idf"], stored["components"]
    vectoriser = TfidfVectorizer(
        token_pattern=_TOKEN_PATTERN, sublinear_tf=True, dtype=np.float32, vocabulary=words
    )
    vectoriser.idf_ = idf
    return vectoriser, components


@lru_cache(maxsize=1)
def _sentence_transformer(name: str, max_tokens: int) -> Any:
    from sentence_transformers import SentenceTransformer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = SentenceTransformer(name)
    model.max_seq_length = min(max_tokens, model.max_seq_length or max_tokens)
    return model
