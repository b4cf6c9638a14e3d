"""Text encoders, LSA fitted here or a sentence-transformers model, and the vectors that they store.

An encoder is a frozen description that is cheap to pickle; a task loads its weights once per
process.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.preprocessing import normalize

from experiments.common.pretrained import check_saved_model, model_fingerprint, require_libraries
from experiments.teleclass.artifacts import vector_lists
from experiments.teleclass.corpus import LabeledCorpus
from experiments.teleclass.settings import Arithmetic, EncodeSettings
from raypipe import ConfigError, RunDirectory, artifacts, fingerprint

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

        from raypipe import precision

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


def stored_encoder(run_dir: RunDirectory, settings: EncodeSettings) -> Encoder:
    """Return the encoder of the vectors that a run directory holds.

    Raises:
        ConfigError: its weights are missing or corrupt.

    """
    if settings.model is not None:
        return sentence_encoder(settings)
    try:
        encoder = LsaEncoder.stored(run_dir)
        _lsa(encoder)
    except (OSError, ValueError, EOFError, KeyError, BadZipFile) as error:
        raise ConfigError(
            f"{LsaEncoder.path(run_dir)}: the encoder of the stored vectors is missing or "
            f"damaged ({error}); run the configuration in another run directory"
        ) from error
    return encoder


def fit_lsa(texts: Iterable[str], settings: EncodeSettings, run_dir: RunDirectory) -> int:
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
    )
    run_dir.write(LsaEncoder.path(run_dir), stream.getvalue())
    return dimensions


def sentence_encoder(settings: EncodeSettings) -> SentenceEncoder:
    """Return the sentence-transformers encoder of the settings.

    Raises:
        ConfigError: the libraries are missing, or a directory does not hold a model.

    """
    if (model := settings.model) is None:
        raise ValueError("these settings name no model")
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


def model_identity(model: str, key: str) -> str:
    """Return the identity of a pretrained model: its name, or a hash of its directory's files.

    Raises:
        ConfigError: the libraries are missing, or the directory does not hold a model.

    """
    require_libraries(f"{key} = {model}", "transformers", "sentence_transformers")
    check_saved_model(model, f"{key} = {model}")
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


_COLUMN = "embedding"


@dataclass(frozen=True)
class Embeddings:
    """The vectors ``[n, d]`` of ``n`` texts, in blocks of ``block`` rows; the last may be shorter.

    Cheap to pickle: a task opens the blocks it works on. On a local file system a block is
    memory-mapped, so that its rows are read when they are used.
    """

    run_dir: RunDirectory
    name: str
    rows: int
    block: int

    def __len__(self) -> int:
        return -(-self.rows // self.block)

    def bounds(self, number: int) -> tuple[int, int]:
        """Return the rows ``[start, stop)`` of a block."""
        start = number * self.block
        return start, min(start + self.block, self.rows)

    def read(self, number: int) -> Vectors:
        """Return the vectors of a block, read-only.

        Raises:
            OSError, ValueError: the block does not exist or is corrupt.

        """
        table = artifacts.read_arrow(self.run_dir, self._path(number))
        chunks = table.column(0).chunks if table.column_names == [_COLUMN] else []
        if len(chunks) != 1 or not pa.types.is_fixed_size_list(chunks[0].type):
            raise ValueError(f"block of vectors is corrupt: it holds {table.schema}")
        # combine_chunks would copy even a single chunk
        vectors: Vectors = chunks[0].values.to_numpy(zero_copy_only=True)
        return vectors.reshape(-1, chunks[0].type.list_size)

    def read_rows(self, rows: NDArray[np.int64]) -> Vectors:
        """Return the vectors ``[k, d]`` of these rows."""
        numbers = rows // self.block
        vectors = np.empty((len(rows), self.read(0).shape[1]), np.float32)
        for number in np.unique(numbers).tolist():
            here = numbers == number
            vectors[here] = self.read(number)[rows[here] - number * self.block]
        return vectors

    def write(self, number: int, vectors: Vectors) -> None:
        """Store a block atomically."""
        table = pa.table({_COLUMN: vector_lists(vectors)})
        artifacts.write_arrow(self.run_dir, self._path(number), table)

    def blocks(self) -> Iterator[tuple[int, Vectors]]:
        """Yield the first row and the vectors of each block."""
        for number in range(len(self)):
            yield self.bounds(number)[0], self.read(number)

    def _path(self, number: int) -> str:
        return self.run_dir.artifact("encode", self.name, f"{number:06d}.arrow")


def text_sets(corpus: LabeledCorpus) -> dict[str, int]:
    """Return the number of texts in each set that is encoded, by name."""
    classes = len(corpus.taxonomy.ids)
    sets = {"train": len(corpus.train), "classes": classes, "names": classes}
    return sets if corpus.test is None else {**sets, "test": len(corpus.test)}


def embeddings_of(
    run_dir: RunDirectory, corpus: LabeledCorpus, settings: EncodeSettings, name: str
) -> Embeddings:
    """Return the stored vectors of a set of texts."""
    return Embeddings(run_dir, name, text_sets(corpus)[name], settings.block)
